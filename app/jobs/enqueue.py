"""Enqueue: checked at the door, inserted with everyone else's in one statement, answered after the commit.

The insert itself is `towpath.insert_jobs`, which producers that share the database use too.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
import uuid_utils
from msgspec import UNSET, Raw
from psycopg import AsyncConnection

from app.database.engine import Database
from app.errors import FieldError, Kind, Refusal, invalid
from app.http import json
from app.http.wire import in_utc
from app.jobs.schemas import NewJob, Receipt
from app.lifecycle import State

_NEW_JOB = msgspec.json.Decoder(NewJob)
_NO_ARGS = Raw(b"{}")

_ENSURE_QUEUES = """INSERT INTO towpath.queues (name)
SELECT name FROM unnest(%(names)s::text[]) AS given(name)
WHERE NOT EXISTS (SELECT FROM towpath.queues AS q WHERE q.name = given.name)
ORDER BY name ON CONFLICT DO NOTHING"""
# As one JSON text, which the driver need not take apart; and of each job only what the service does not know.
_INSERT = """SELECT json_build_array(min(created_at),
    json_agg(CASE WHEN inserted THEN max_attempts END ORDER BY r, n),
    json_agg(CASE WHEN run_at > created_at THEN run_at END ORDER BY r, n))::text
FROM towpath.insert_jobs(%(items)s::jsonb, %(keys)s::jsonb)"""
_INSERTED = msgspec.json.Decoder(tuple[datetime, list[int | None], list[datetime | None]])
_REPLAY = "SELECT r, answer::text, differences FROM towpath.replay_answers(%(items)s::jsonb, %(keys)s::jsonb)"


class Row(msgspec.Struct, omit_defaults=True):
    """A checked job on its way to `towpath.insert_jobs`: `n` is its place in its request, `r` the request's number."""

    id: str
    queue: str
    kind: str
    args: Raw
    priority: int
    run_at: Any = None
    delay_seconds: float | None = None
    max_attempts: int | None = None
    timeout_seconds: float | None = None
    backoff: Any = None
    start_by: Any = None
    tags: Sequence[str] = ()
    metadata: Raw | None = None
    # No place has the default: it would be left out of the JSON.
    r: int = -1
    n: int = -1


# Structs rather than dataclasses: making one costs a tenth, and each request makes a few.
class Request(msgspec.Struct, frozen=True):
    """The jobs of one HTTP request: they go in together."""

    rows: list[Row]
    key: str | None = None
    batch: bool = False
    keep_seconds: float = 86_400.0

    @property
    def weight(self) -> int:
        """About how many bytes it adds to a flush."""
        return sum([300 + memoryview(row.args).nbytes for row in self.rows])


class Enqueued(msgspec.Struct, frozen=True):
    """Receipts in the order of the rows; `existing` when an earlier request with the same key made them."""

    receipts: list[Receipt]
    existing: bool


def checked(body: bytes | Raw, max_bytes: int) -> Row:
    """A job's JSON as a row, with a new id. Raises Refusal with a pointer to the bad field."""
    job = json.decode(body, _NEW_JOB)
    if job.run_at is not None and job.delay_seconds is not None:
        raise invalid(FieldError("/delay_seconds", "cannot be given with run_at"))
    args = _NO_ARGS if job.args is UNSET else job.args
    if len(bytes(args)) > max_bytes:
        raise Refusal(
            Kind.TOO_LARGE, "too-large", f"args has more than {max_bytes} bytes.", limit=max_bytes, pointer="/args"
        )
    json.check(args, pointer="/args")
    metadata = None if job.metadata is UNSET else job.metadata
    if metadata is not None and bytes(metadata) == b"null":
        metadata = None
    if metadata is not None:
        json.check(metadata, pointer="/metadata")
        if not bytes(metadata).startswith(b"{"):
            raise invalid(FieldError("/metadata", "must be an object"))
    return Row(
        id=str(uuid_utils.uuid7()),
        queue=job.queue,
        kind=job.kind,
        args=args,
        priority=job.priority,
        run_at=None if job.run_at is None else in_utc(job.run_at, "/run_at"),
        delay_seconds=job.delay_seconds,
        max_attempts=job.max_attempts,
        timeout_seconds=job.timeout_seconds,
        backoff=job.backoff,
        start_by=None if job.start_by is None else in_utc(job.start_by, "/start_by"),
        tags=job.tags,
        metadata=metadata,
        n=0,
    )


class Enqueuer:
    """Inserts requests; remembers which queues exist, so that a first use is noticed without a look-up."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known_queues: set[str] = set()

    async def insert(self, requests: list[Request]) -> list[Enqueued | Exception]:
        """One flush: every request's jobs, or the first answer to its key, or why it has none."""
        rows: list[Row] = []
        keys: list[dict[str, Any]] = []
        for r, request in enumerate(requests):
            for row in request.rows:
                row.r = r
            rows += request.rows
            if request.key is not None:
                keys.append({"r": r, "key": request.key, "batch": request.batch, "keep_seconds": request.keep_seconds})
        parameters = {"items": msgspec.json.encode(rows).decode(), "keys": msgspec.json.encode(keys).decode()}
        async with self._database.hot.connection() as connection:
            await self._ensure_queues(connection, rows)
            told = await (await connection.execute(_INSERT, parameters)).fetchone()
            assert told
            now, max_attempts, due_later = _INSERTED.decode(told[0])
            answers: list[Enqueued | Exception | None] = [None] * len(requests)
            receipts: list[list[Receipt]] = [[] for _ in requests]
            for row, attempts, later in zip(rows, max_attempts, due_later, strict=True):
                if attempts is not None:
                    receipts[row.r].append(
                        Receipt(
                            id=row.id,
                            queue=row.queue,
                            kind=row.kind,
                            state=State.SCHEDULED if later else State.AVAILABLE,
                            priority=row.priority,
                            run_at=later or now,
                            max_attempts=attempts,
                            created_at=now,
                        )
                    )
            if not all(receipts):
                for r, answer, differences in await (await connection.execute(_REPLAY, parameters)).fetchall():
                    if not receipts[r]:
                        answers[r] = _first_answer(answer, differences)
        return [
            answer or (Enqueued(made, existing=False) if made else _vanished())
            for answer, made in zip(answers, receipts, strict=True)
        ]

    async def _ensure_queues(self, connection: AsyncConnection[Any], rows: list[Row]) -> None:
        new = {row.queue for row in rows} - self._known_queues
        if new:
            await connection.execute(_ENSURE_QUEUES, {"names": sorted(new)})
            self._known_queues |= new


def _first_answer(answer: str, differences: list[str]) -> Enqueued | Exception:
    if not differences:
        return Enqueued(msgspec.json.decode(answer, type=list[Receipt]), existing=True)
    shown = differences[:10]
    return Refusal(
        Kind.INVALID,
        "idempotency-key-reused",
        f"This Idempotency-Key was used with another request; it differs at {', '.join(shown)}.",
        differences=shown,
    )


def _vanished() -> Refusal:
    """The key's first answer was swept between two statements: a repeat is a new request."""
    return Refusal(
        Kind.UNAVAILABLE, "database-unavailable", "The Idempotency-Key has just expired; repeat the request.",
        retry_after_seconds=0,
    )  # fmt: skip
