"""Waits whose deadline passed, and jobs that were not started by their `start_by`."""

from typing import Any

from psycopg import AsyncConnection

from app.jobs.transition import statement
from app.lifecycle import CALLBACK_TIME_OUT, EXPIRE
from app.maintenance.sweep import Sweep, transition_sweep

# The wait's row is locked too, so that a callback heartbeat which is just moving the deadline is seen.
_PARKED = """SELECT j.id FROM towpath.waits AS w JOIN towpath.jobs AS j ON j.waiting_on = w.id
    AND j.id = w.job_id
WHERE w.state = 'open' AND w.deadline_at <= now() AND j.id <> ALL(%(excluded)s::uuid[])
ORDER BY w.deadline_at LIMIT %(limit)s FOR UPDATE OF j, w SKIP LOCKED"""
# After the jobs: what is still open and over belongs to an attempt that never parked on it. With the job's row
# locked, so that nobody parks on the wait while it is closed: that job would wait for ever.
_CLOSE = """UPDATE towpath.waits SET state = 'expired' WHERE id IN (
    SELECT w.id FROM towpath.waits AS w JOIN towpath.jobs AS j ON j.id = w.job_id
    WHERE w.state = 'open' AND w.deadline_at <= now() AND j.waiting_on IS DISTINCT FROM w.id
    LIMIT %(limit)s FOR UPDATE OF j, w SKIP LOCKED)"""
_NEXT_WAIT = "SELECT extract(epoch FROM min(deadline_at) - now())::float8 FROM towpath.waits WHERE state = 'open'"

_UNSTARTED = """SELECT id FROM towpath.jobs
WHERE start_by <= now() AND state IN ('available', 'retryable', 'scheduled') AND id <> ALL(%(excluded)s::uuid[])
ORDER BY start_by LIMIT %(limit)s FOR UPDATE SKIP LOCKED"""
_NEXT_START = """SELECT extract(epoch FROM min(start_by) - now())::float8 FROM towpath.jobs
WHERE start_by IS NOT NULL AND state IN ('available', 'retryable', 'scheduled')"""


async def _time_out(connection: AsyncConnection[Any], limit: int, excluded: list[Any]) -> int:
    parameters = {"limit": limit, "excluded": excluded}
    timed_out = (await connection.execute(statement(CALLBACK_TIME_OUT, _PARKED), parameters)).rowcount
    closed = (await connection.execute(_CLOSE, {"limit": limit + timed_out})).rowcount
    return max(timed_out, closed - timed_out)


def expire_callbacks(interval_seconds: float) -> Sweep:
    """Parked jobs whose wait is over, and waits that nobody parked on."""
    return Sweep(CALLBACK_TIME_OUT.name, _time_out, _PARKED, interval_seconds, _NEXT_WAIT)


def expire_unstarted(interval_seconds: float) -> Sweep:
    """Jobs that nobody started in time."""
    return transition_sweep(EXPIRE, _UNSTARTED, interval_seconds=interval_seconds, next_due=_NEXT_START)
