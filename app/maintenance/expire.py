"""Waits whose deadline passed, and jobs that were not started by their `start_by`."""

from typing import Any

from psycopg import AsyncConnection

from app.callbacks.verbs import Answered, Verdict, verdict
from app.jobs.transition import Item, apply
from app.lifecycle import CALLBACK_TIME_OUT, EXPIRE
from app.maintenance.sweep import Sweep, transition_sweep

# The wait's row is locked too, so that a callback heartbeat which is just moving the deadline is seen.
_PARKED = """SELECT j.id FROM towpath.waits AS w JOIN towpath.jobs AS j ON j.id = w.job_id AND w.id = ANY(j.waiting_on)
WHERE w.state = 'open' AND w.deadline_at <= now() AND j.id <> ALL(%(excluded)s::uuid[])
ORDER BY w.deadline_at LIMIT %(limit)s FOR UPDATE OF j, w SKIP LOCKED"""
_OVER = """UPDATE towpath.waits AS w SET state = 'expired' FROM towpath.jobs AS j
WHERE j.id = ANY(%(jobs)s) AND w.id = ANY(j.waiting_on) AND w.state = 'open' AND w.deadline_at <= now()"""
_STAND = """SELECT j.id::text, j.answers_needed, array_agg(coalesce(w.resolved_as, w.state))
FROM towpath.jobs AS j JOIN towpath.waits AS w ON w.id = ANY(j.waiting_on)
WHERE j.id = ANY(%(jobs)s) GROUP BY j.id, j.answers_needed"""
# After the jobs: what is still open and over belongs to an attempt that never parked on it. With the job's row
# locked, so that nobody parks on the wait while it is closed: that job would wait for ever.
_CLOSE = """UPDATE towpath.waits SET state = 'expired' WHERE id IN (
    SELECT w.id FROM towpath.waits AS w JOIN towpath.jobs AS j ON j.id = w.job_id
    WHERE w.state = 'open' AND w.deadline_at <= now() AND (w.id = ANY(j.waiting_on)) IS NOT true
    LIMIT %(limit)s FOR UPDATE OF j, w SKIP LOCKED)"""
_NEXT_WAIT = "SELECT extract(epoch FROM min(deadline_at) - now())::float8 FROM towpath.waits WHERE state = 'open'"

_UNSTARTED = """SELECT id FROM towpath.jobs
WHERE start_by <= now() AND state IN ('available', 'retryable', 'scheduled') AND id <> ALL(%(excluded)s::uuid[])
ORDER BY start_by LIMIT %(limit)s FOR UPDATE SKIP LOCKED"""
_NEXT_START = """SELECT extract(epoch FROM min(start_by) - now())::float8 FROM towpath.jobs
WHERE start_by IS NOT NULL AND state IN ('available', 'retryable', 'scheduled')"""


async def _time_out(connection: AsyncConnection[Any], limit: int, excluded: list[Any]) -> int:
    cursor = await connection.execute(_PARKED, {"limit": limit, "excluded": excluded})
    over = await cursor.fetchall()
    jobs = list({row[0] for row in over})
    if jobs:
        await connection.execute(_OVER, {"jobs": jobs})
        rows = await (await connection.execute(_STAND, {"jobs": jobs})).fetchall()
        # A job whose other waits can still answer goes on waiting for them.
        await apply(
            connection,
            CALLBACK_TIME_OUT,
            [
                Item(n=0, id=job_id)
                for job_id, needed, outcomes in rows
                if verdict([Answered(outcome) for outcome in outcomes], needed) is Verdict.IMPOSSIBLE
            ],
        )
    closed = (await connection.execute(_CLOSE, {"limit": limit})).rowcount
    return max(len(over), closed)


def expire_callbacks(interval_seconds: float) -> Sweep:
    """Parked jobs whose wait is over, and waits that nobody parked on."""
    return Sweep(CALLBACK_TIME_OUT.name, _time_out, _PARKED, interval_seconds, _NEXT_WAIT)


def expire_unstarted(interval_seconds: float) -> Sweep:
    """Jobs that nobody started in time."""
    return transition_sweep(EXPIRE, _UNSTARTED, interval_seconds=interval_seconds, next_due=_NEXT_START)
