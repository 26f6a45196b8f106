"""A callback arrives: exactly one resolver wins, an early one counts, a late one is told so.

The job's row is locked before its waits are read, here, in park and in the time-out sweep; so what `_decide`
reads can't change before the commit. Many callbacks share a transaction.
"""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec
from psycopg import AsyncConnection
from psycopg.rows import namedtuple_row

from app.callbacks.verbs import failure, step_of
from app.database.engine import Database
from app.errors import Kind, Refusal
from app.jobs.transition import NOW_TEXT, Item, apply
from app.lifecycle import State

_LOCK = """SELECT FROM towpath.jobs WHERE id IN (SELECT job_id FROM towpath.waits WHERE id = ANY(%(ids)s::uuid[]))
ORDER BY id FOR UPDATE"""

_READ = """SELECT i.n, w.id, w.job_id, w.name, w.state, w.default_verb, w.resolved_as, w.resolved_at, w.deadline_at,
    w.early, j.state AS job_state, j.attempt, j.cancel_reason, now() AS now,
    (j.state || '') = 'waiting_external' AND j.waiting_on = w.id AS parked,
    (j.state || '') = 'running' AND j.lease_number = w.lease_number AS running,
    j.lease_expires_at > now() AS handler_attached,
    w.payload IS NOT DISTINCT FROM i.payload AS same_payload
FROM jsonb_to_recordset(%(items)s) AS i(n integer, wait_id uuid, payload jsonb)
JOIN towpath.waits AS w ON w.id = i.wait_id
JOIN towpath.jobs AS j ON j.id = w.job_id"""

_RESOLVE = f"""WITH resolved AS (
    UPDATE towpath.waits AS w SET state = 'resolved', resolved_as = i.verb, resolved_at = now(), payload = i.payload,
        early = i.early
    FROM jsonb_to_recordset(%(items)s) AS i(wait_id uuid, verb text, payload jsonb, early boolean)
    WHERE w.id = i.wait_id AND (w.state || '') = 'open'
    RETURNING w.id, w.job_id, w.name, w.resolved_as, w.payload
)
UPDATE towpath.jobs AS j SET callback_results = coalesce(j.callback_results, '{{}}') || jsonb_build_object(
    r.name, jsonb_build_object('wait_id', r.id, 'verb', r.resolved_as, 'payload', r.payload, 'received_at', {NOW_TEXT}))
FROM resolved AS r WHERE j.id = r.job_id"""

_EXTEND = """UPDATE towpath.waits AS w
SET deadline_at = now() + coalesce(%(timeout_seconds)s, w.timeout_seconds) * interval '1 s'
FROM towpath.jobs AS j
WHERE w.id = %(id)s AND (w.state || '') = 'open' AND j.id = w.job_id
  AND (((j.state || '') = 'waiting_external' AND j.waiting_on = w.id)
    OR ((j.state || '') = 'running' AND j.lease_number = w.lease_number))
RETURNING w.deadline_at"""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One callback: the wait that its token is for, the verb (`default` is the wait's own), and its body."""

    wait_id: UUID
    verb: str
    payload: msgspec.Raw | None

    @property
    def weight(self) -> int:
        """About how many bytes it adds to a flush."""
        return 300 + len(bytes(self.payload or b""))


@dataclass(frozen=True, slots=True)
class Resolution:
    """What the caller is told: it won (now or before), and what the job is."""

    wait_id: UUID
    name: str
    verb: str
    early: bool
    already_applied: bool
    resolved_at: Any
    job_state: str


async def resolve(database: Database, arrivals: list[Arrival]) -> list[Resolution | Exception]:
    """Resolve each wait at most once, in one commit; the winner, its repeats and the others are told apart."""
    async with database.transaction() as connection:
        await connection.execute(_LOCK, {"ids": [arrival.wait_id for arrival in arrivals]})
        # One at a time within the flush: two callbacks of one wait must see each other.
        return [await _resolve_one(connection, arrival) for arrival in arrivals]


async def _resolve_one(connection: AsyncConnection[Any], arrival: Arrival) -> Resolution | Exception:
    wait = await _read(connection, arrival)
    if wait is None:
        return unknown_callback()
    verb = wait.default_verb if arrival.verb == "default" else arrival.verb
    if wait.state != "open" or not (wait.parked or wait.running):
        return _too_late(wait, verb)
    early = not wait.parked
    resolved = {"wait_id": wait.id, "verb": verb, "payload": arrival.payload, "early": early}
    await connection.execute(_RESOLVE, {"items": msgspec.json.encode([resolved]).decode()})
    state = wait.job_state
    if not early:
        item = Item(n=0, id=str(wait.job_id), payload=arrival.payload, wait_name=wait.name)
        item.error = failure(arrival.payload)
        step = step_of(verb, handler_attached=bool(wait.handler_attached))
        (moved,) = await apply(connection, step, [item])
        state = moved.state
    return Resolution(wait.id, wait.name, verb, early, False, wait.now, state)


async def _read(connection: AsyncConnection[Any], arrival: Arrival) -> Any:
    cursor = connection.cursor(row_factory=namedtuple_row)
    item = {"n": 0, "wait_id": arrival.wait_id, "payload": arrival.payload}
    await cursor.execute(_READ, {"items": msgspec.json.encode([item]).decode()})
    return await cursor.fetchone()


def _too_late(wait: Any, verb: str) -> Resolution | Exception:
    facts = {"wait_state": wait.state, "job_state": wait.job_state}
    if wait.state == "resolved":
        if wait.resolved_as == verb and wait.same_payload:
            return Resolution(wait.id, wait.name, verb, wait.early, True, wait.resolved_at, wait.job_state)
        return Refusal(
            Kind.CONFLICT,
            "callback-conflict",
            f"The wait was resolved before, as {wait.resolved_as}.",
            resolved_as=wait.resolved_as,
            resolved_at=wait.resolved_at,
            **facts,
        )
    if wait.state == "expired":
        why = "its deadline passed"
    else:
        facts["wait_state"] = "superseded"
        cancelled = wait.job_state == State.CANCELLED
        why = "the job was cancelled" if cancelled else "the attempt that opened it is over"
    return Refusal(Kind.GONE, "callback-gone", f"Nobody waits for this callback any more: {why}.", **facts)


def unknown_callback() -> Refusal:
    """Unknown, forged, and of another verb: the same answer."""
    return Refusal(Kind.UNKNOWN, "unknown-callback", "There is no such callback.")


async def extend(database: Database, wait_id: UUID, timeout_seconds: float | None) -> Any:
    """Move a wait's deadline to `timeout_seconds` from now (default: its own time-out); the new deadline.

    Raises Refusal: unknown, resolved or over.
    """
    async with database.transaction() as connection:
        await connection.execute(_LOCK, {"ids": [wait_id]})
        parameters = {"id": wait_id, "timeout_seconds": timeout_seconds}
        row = await (await connection.execute(_EXTEND, parameters)).fetchone()
        if row:
            return row[0]
        wait = await _read(connection, Arrival(wait_id, "heartbeat", None))
    late = _too_late(wait, "heartbeat") if wait else unknown_callback()
    assert isinstance(late, Exception)
    raise late
