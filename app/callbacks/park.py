"""Open a wait, and park a job on it. A step inside settling: it runs in the caller's transaction."""

from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import msgspec
from psycopg import AsyncConnection
from psycopg.rows import namedtuple_row

from app import lifecycle
from app.callbacks.verbs import failure, step_of
from app.database.engine import Database
from app.errors import Kind, Refusal
from app.jobs.transition import ITEM_COLUMNS, Item, Question, apply, diagnose, lease_lost, lock_jobs

_PARKABLE = f"""SELECT i.n, w.id AS wait_id, w.name, w.state, w.delivered, w.resolved_as, w.payload::text AS payload
FROM jsonb_to_recordset(%(items)s) AS i({ITEM_COLUMNS})
JOIN towpath.jobs AS j ON j.id = i.id AND j.lease_number = i.lease_number AND (j.state || '') = 'running'
LEFT JOIN towpath.waits AS w ON w.id = i.wait_id AND w.job_id = j.id AND w.lease_number = j.lease_number"""

_OPEN = """INSERT INTO towpath.waits
    (id, job_id, lease_number, attempt, name, default_verb, timeout_seconds, deadline_at)
SELECT %(id)s, j.id, j.lease_number, j.attempt, %(name)s, %(default_verb)s, %(timeout_seconds)s,
    now() + %(timeout_seconds)s * interval '1 s'
FROM towpath.jobs AS j
WHERE j.id = %(job_id)s AND j.lease_number = %(lease_number)s AND (j.state || '') = 'running'
ON CONFLICT (job_id, lease_number, name) DO NOTHING
RETURNING id, name, default_verb, timeout_seconds, deadline_at"""

_SAME = """SELECT id, name, default_verb, timeout_seconds, deadline_at FROM towpath.waits
WHERE job_id = %(job_id)s AND lease_number = %(lease_number)s AND name = %(name)s"""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A callback that came before its park."""

    wait_id: UUID
    name: str
    verb: str
    payload: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Parked:
    """What parking led to: waiting, or straight on because the callback was there already."""

    job_id: UUID
    state: str
    attempt: int
    arrived: Arrived | None


@dataclass(frozen=True, slots=True)
class OpenedWait:
    """A wait that the attempt may park on; `existing` when the request was a repeat."""

    id: UUID
    name: str
    default_verb: str
    timeout_seconds: float
    deadline_at: Any
    existing: bool = False


async def park(connection: AsyncConnection[Any], items: list[Item]) -> dict[int, Parked | Exception]:
    """Park each item's job on its wait, or apply the callback that came first. Stale leases have no entry.

    The job's row is locked first, by this and by every arriving callback: whoever comes second then reads
    what the first one did, whatever the statement's snapshot said.
    """
    await lock_jobs(connection, [item.id for item in items])
    cursor = connection.cursor(row_factory=namedtuple_row)
    await cursor.execute(_PARKABLE, {"items": msgspec.json.encode(items).decode()})
    rows: list[Any] = await cursor.fetchall()
    waits = {row.n: row for row in rows}

    answers: dict[int, Parked | Exception] = {}
    arrived: dict[int, Arrived] = {}
    going: list[Item] = []
    for item in items:
        wait = waits.get(item.n)
        if wait is None or wait.delivered:
            continue  # a stale lease, or the same park again: settling tells which
        if wait.state not in ("open", "resolved"):
            answers[item.n] = _not_open(item, wait.state)
            continue
        if wait.state == "resolved":
            payload = msgspec.Raw((wait.payload or "null").encode())
            arrived[item.n] = Arrived(wait.wait_id, wait.name, wait.resolved_as, payload)
            # The handler is there to go on: an early resume returns to it, whether or not it would have stayed.
            item.attached = True
        item.wait_name = wait.name
        going.append(item)
    for moved in await apply(connection, lifecycle.PARK, going):
        early = arrived.get(moved.n)
        if early:
            step = step_of(early.verb, handler_attached=True)
            arrival = Item(n=moved.n, id=str(moved.id), payload=early.payload, wait_name=early.name)
            arrival.error = failure(early.payload)
            (moved,) = await apply(connection, step, [arrival])
            await connection.execute("UPDATE towpath.waits SET delivered = true WHERE id = %s", [early.wait_id])
        answers[moved.n] = Parked(moved.id, moved.state, moved.attempt, early)
    return answers


def _not_open(item: Item, state: str | None) -> Refusal:
    if state is None:
        return Refusal(Kind.UNKNOWN, "unknown-wait", f"This attempt has no wait {item.wait_id}.", wait_id=item.wait_id)
    return Refusal(
        Kind.CONFLICT, "wait-not-open", f"The wait is {state}: open another.", wait_id=item.wait_id, wait_state=state
    )


async def open_wait(
    database: Database,
    *,
    wait_id: UUID,
    job_id: UUID,
    lease_number: int,
    name: str,
    default_verb: str,
    timeout_seconds: float,
) -> OpenedWait:
    """A wait of this attempt. Its name makes a repeat return the same one.

    Raises Refusal: unknown job, lease lost, or the attempt has another wait of this name.
    """
    parameters = {
        "id": wait_id,
        "job_id": job_id,
        "lease_number": lease_number,
        "name": name,
        "default_verb": default_verb,
        "timeout_seconds": timeout_seconds,
    }
    async with database.hot.connection() as connection:
        row = await (await connection.execute(_OPEN, parameters)).fetchone()
        if row:
            return OpenedWait(*row)
        question = Question(n=0, id=str(job_id), lease_number=lease_number)
        found = (await diagnose(connection, [question]))[0]
        if found.lease_number != lease_number or found.state != lifecycle.State.RUNNING:
            raise lease_lost(question, found)
        row = await (await connection.execute(_SAME, parameters)).fetchone()
    if row is None or (row[2], row[3]) != (default_verb, timeout_seconds):
        raise Refusal(
            Kind.CONFLICT,
            "wait-name-taken",
            f"This attempt has a wait named {name} with other settings.",
            name=name,
        )
    return replace(OpenedWait(*row), existing=True)
