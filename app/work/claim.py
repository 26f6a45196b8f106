"""The claim: take up to n available jobs of a queue and lease them, in one statement and one commit."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec
from psycopg import AsyncConnection

# The whole job as its owner gets it, but for the lease: put together by the database, passed through as it is.
# Reading twenty columns and writing them down again took the service longer than anything else in a claim.
_TIME = """to_char({} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"""
_COLUMNS = f"""j.id, j.lease_number, j.lease_seconds, j.claim_id::text,
    (extract(epoch FROM j.claim_order) * 1000000)::bigint AS claim_order, json_build_object(
    'id', j.id, 'queue', j.queue, 'kind', j.kind, 'args', j.args,
    'lease_expires_at', {_TIME.format("j.lease_expires_at")}, 'deadline_at', {_TIME.format("j.deadline_at")},
    'attempt', j.attempt, 'max_attempts', j.max_attempts, 'last_attempt', j.attempt >= j.max_attempts,
    'snoozes', j.snoozes, 'priority', j.priority, 'run_at', {_TIME.format("j.run_at")},
    'created_at', {_TIME.format("j.created_at")}, 'tags', j.tags, 'metadata', j.metadata, 'progress', j.progress,
    'checkpoint', j.checkpoint, 'callback_results', coalesce(j.callback_results, '{{}}'),
    'last_error', j.errors -> -1)::text AS job"""

# `queue_open` locks the queue's row, so that a pause waits for the claims before it and every later claim
# sees it: FOR SHARE reads the row again after waiting, which the statement's snapshot would not.
# `picked` is materialized: as a plain sub-select it could be run again and take more than its limit.
_CLAIM = f"""WITH queue_open AS MATERIALIZED (
    SELECT q.lease_seconds, q.timeout_seconds FROM towpath.queues AS q
    WHERE q.name = %(queue)s AND NOT q.paused FOR SHARE
), picked AS MATERIALIZED (
    SELECT id, claim_order FROM towpath.jobs
    WHERE queue = %(queue)s AND state = 'available' {{kinds}} {{after}} AND EXISTS (SELECT FROM queue_open)
    ORDER BY claim_order, id LIMIT %(limit)s FOR UPDATE SKIP LOCKED
), dealt AS MATERIALIZED (
    SELECT id, row_number() OVER (ORDER BY claim_order, id) AS place FROM picked
), claimed AS (
    UPDATE towpath.jobs AS j SET
        state = 'running',
        attempt = j.attempt + 1,
        lease_number = j.lease_number + 1,
        claimed_at = now(),
        lease_seconds = coalesce(w.lease_seconds, o.lease_seconds),
        lease_expires_at = now() + coalesce(w.lease_seconds, o.lease_seconds) * interval '1 s',
        deadline_at = now() + coalesce(j.timeout_seconds, o.timeout_seconds) * interval '1 s',
        claim_id = w.claim_id,
        worker = w.worker,
        settled_as = NULL
    FROM dealt AS d
    JOIN jsonb_to_recordset(%(waiters)s) AS w(first integer, last integer, claim_id uuid, worker text,
        lease_seconds double precision) ON d.place BETWEEN w.first AND w.last
    CROSS JOIN queue_open AS o
    WHERE j.id = d.id
    RETURNING {_COLUMNS}, d.place
)
SELECT (SELECT q.paused FROM towpath.queues AS q WHERE q.name = %(queue)s) AS paused, claimed.*
FROM (SELECT 1) AS always LEFT JOIN claimed ON true ORDER BY claimed.place"""

_AFTER = "AND claim_order >= timestamptz 'epoch' + %(after)s * interval '1 microsecond'"

_HELD = f"""SELECT {_COLUMNS}, 0 AS place FROM towpath.jobs AS j
WHERE j.queue = ANY(%(queues)s) AND j.claim_id = ANY(%(claim_ids)s::uuid[]) AND j.state = 'running'
ORDER BY j.claim_order, j.id"""

# A queue that only SQL producers have used has no row yet: they must not hold one locked until they commit.
_ADOPT = """INSERT INTO towpath.queues (name)
SELECT %(queue)s WHERE EXISTS (SELECT FROM towpath.jobs WHERE queue = %(queue)s AND state = 'available')
ON CONFLICT DO NOTHING"""


class ClaimedJob(msgspec.Struct, frozen=True):
    """A job as its new owner gets it: `job` is the JSON object of `schemas.Claimed`, without the lease."""

    id: UUID
    lease_number: int
    lease_seconds: float
    claim_id: str
    order: int
    """Its `claim_order`, in microseconds since 1970."""
    job: str
    place: int

    @property
    def weight(self) -> int:
        """About how many bytes it adds to an answer."""
        return len(self.job) + 60


class Wanted(msgspec.Struct):
    """One waiter's share of a claim: the places `first` to `last` in queue order are its own."""

    first: int
    last: int
    claim_id: str
    worker: str
    lease_seconds: float | None


async def claim(
    connection: AsyncConnection[Any],
    queue: str,
    kinds: Sequence[str],
    wanted: list[Wanted],
    after: int | None = None,
) -> tuple[list[ClaimedJob], bool | None]:
    """The jobs in queue order, at most `wanted[-1].last`; and whether the queue is paused (None: no such queue).

    With `after`, a place in microseconds since 1970, nothing in front of it is looked at.

    The connection is in autocommit: when this returns, the leases are durable.
    """
    sql = _CLAIM.replace("{kinds}", "AND kind = ANY(%(kinds)s)" if kinds else "")
    sql = sql.replace("{after}", "" if after is None else _AFTER)
    parameters = {
        "queue": queue,
        "kinds": list(kinds),
        "limit": wanted[-1].last,
        "after": after,
        "waiters": msgspec.json.encode(wanted).decode(),
    }
    for _ in range(2):
        rows = await (await connection.execute(sql, parameters)).fetchall()
        paused = rows[0][0]
        if paused is not None:
            break
        if (await connection.execute(_ADOPT, parameters)).rowcount == 0:
            return [], None
    return [ClaimedJob(*row[1:]) for row in rows if row[1] is not None], paused


async def held(connection: AsyncConnection[Any], queues: Sequence[str], claim_ids: Sequence[UUID]) -> list[ClaimedJob]:
    """What these claims still hold: the answer to a claim that is repeated, or whose commit is in doubt."""
    parameters = {"queues": list(queues), "claim_ids": list(claim_ids)}
    rows = await (await connection.execute(_HELD, parameters)).fetchall()
    return [ClaimedJob(*row) for row in rows]
