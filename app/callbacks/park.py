"""Park a job on its waits. A step inside settling: it runs in the caller's transaction."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from psycopg import AsyncConnection
from psycopg.rows import namedtuple_row

from app import lifecycle
from app.callbacks.verbs import Answered, Verdict, failure, step_of, verdict
from app.errors import Kind, Refusal
from app.jobs.transition import Item, apply, given_items, lock_jobs

# An answer that an earlier attempt got, and that is still with the job, may be parked on again.
_PARKABLE = f"""SELECT i.n, j.state AS job_state, j.attempt, asked.wait_id, w.name, w.state, w.resolved_as,
    w.resolved_at::text, w.payload::text AS payload, w.encoding, w.content_type, w.event::text AS event
FROM {given_items("n", "id", "lease_number", "wait_ids")}
JOIN towpath.jobs AS j ON j.id = i.id AND j.lease_number = i.lease_number AND (j.state || '') = 'running'
CROSS JOIN LATERAL unnest(i.wait_ids) WITH ORDINALITY AS asked(wait_id, place)
LEFT JOIN towpath.waits AS w ON w.id = asked.wait_id AND w.job_id = j.id
    AND (w.lease_number = j.lease_number OR j.callback_results -> w.name ->> 'wait_id' = w.id::text)
ORDER BY i.n, asked.place"""

_FOUND_THERE = """SELECT id, name, resolved_as, payload::text, encoding, content_type, event::text FROM towpath.waits
WHERE id = ANY(%(wait_ids)s::uuid[]) AND job_id = %(job_id)s AND early AND resolved_as IN ('complete', 'fail', 'retry')
ORDER BY resolved_at LIMIT 1"""


class Arrived(NamedTuple):
    """What came on a wait; values are stored JSON, as text."""

    wait_id: UUID
    name: str
    verb: str
    payload: str | None
    encoding: str | None
    content_type: str | None
    event: str | None


@dataclass(frozen=True, slots=True)
class Parked:
    """What parking led to: waiting, or straight on because enough callbacks were there already."""

    job_id: UUID
    state: str
    attempt: int
    parked: bool
    arrived: tuple[Arrived, ...]


async def park(connection: AsyncConnection[Any], items: list[Item]) -> dict[int, Parked | Exception]:
    """Park each item's job on its waits, or apply the callbacks that came first. Stale leases have no entry.

    The job's row is locked first, by this and by every arriving callback: whoever comes second then reads
    what the first one did, whatever the statement's snapshot said.
    """
    await lock_jobs(connection, [item.id for item in items])
    cursor = connection.cursor(row_factory=namedtuple_row)
    await cursor.execute(_PARKABLE, {"items": msgspec.json.encode(items).decode()})
    waits: dict[int, list[Any]] = defaultdict(list)
    rows: list[Any] = await cursor.fetchall()
    for row in rows:
        waits[row.n].append(row)

    answers: dict[int, Parked | Exception] = {}
    going: dict[int, tuple[Verdict, tuple[Arrived, ...]]] = {}
    for item in items:
        rows = waits[item.n]
        if not rows:
            continue  # a stale lease, or the same park again: settling tells which
        assert item.answers_needed is not None
        stands = [Answered(row.resolved_as or row.state or "unknown", row.resolved_at or "") for row in rows]
        says = verdict(stands, item.answers_needed)
        refused = _not_open(rows, says)
        if refused:
            answers[item.n] = refused
            continue
        arrived = tuple(
            Arrived(row.wait_id, row.name, row.resolved_as, row.payload, row.encoding, row.content_type, row.event)
            for row in rows
            if row.resolved_as
        )
        if says is Verdict.RESUME:
            # The handler is there to go on, whether or not it would have stayed: nothing happens to the job.
            answers[item.n] = Parked(UUID(item.id), rows[0].job_state, rows[0].attempt, False, arrived)
            continue
        item.wait_name = ", ".join(row.name for row in rows)
        going[item.n] = says, arrived
    ids = {item.n: item.id for item in items}
    for moved in await apply(connection, lifecycle.PARK, [item for item in items if item.n in going]):
        says, arrived = going[moved.n]
        if says is not Verdict.WAIT:
            (moved,) = await _apply_early(connection, moved.n, ids[moved.n], says, arrived)
        answers[moved.n] = Parked(UUID(ids[moved.n]), moved.state, moved.attempt, says is Verdict.WAIT, arrived)
    return answers


async def _apply_early(
    connection: AsyncConnection[Any], n: int, job_id: str, says: Verdict, arrived: tuple[Arrived, ...]
) -> list[Any]:
    verb = "fail" if says is Verdict.IMPOSSIBLE else says.value
    decisive = next(each for each in arrived if each.verb == verb)
    payload = msgspec.Raw((decisive.payload or "null").encode())
    item = Item(n=n, id=job_id, payload=payload, error=failure(payload), wait_name=decisive.name)
    return await apply(connection, step_of(verb, handler_attached=True), [item])


def _not_open(rows: list[Any], says: Verdict) -> Refusal | None:
    for row in rows:
        if row.state is None:
            return Refusal(
                Kind.UNKNOWN, "unknown-wait", f"This attempt has no wait {row.wait_id}.", wait_id=row.wait_id
            )
    # What failed before the park is applied by it; a deadline that passed is for the worker to act on.
    if says is Verdict.IMPOSSIBLE and not any(row.resolved_as == "fail" for row in rows):
        over = next(row for row in rows if row.state == "expired")
        return Refusal(
            Kind.CONFLICT,
            "wait-not-open",
            f"The wait {over.name} is expired, so that too few answers can come: open another.",
            wait_id=over.wait_id,
            wait_state=over.state,
        )
    return None


async def found_there(connection: AsyncConnection[Any], job_id: str, wait_ids: list[str]) -> Arrived | None:
    """The callback that ended the job at its park: what the first answer to a repeated park said."""
    cursor = await connection.execute(_FOUND_THERE, {"job_id": job_id, "wait_ids": wait_ids})
    row = await cursor.fetchone()
    return Arrived(*row) if row else None
