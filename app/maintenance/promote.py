"""Due scheduled and retryable jobs become available. The loop sleeps until the next one is due."""

from app.lifecycle import PROMOTE
from app.maintenance.sweep import Sweep, transition_sweep

_PICK = """SELECT id FROM towpath.jobs
WHERE state IN ('retryable', 'scheduled') AND run_at <= now() AND id <> ALL(%(excluded)s::uuid[])
ORDER BY run_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED"""
_NEXT = """SELECT extract(epoch FROM min(run_at) - now())::float8 FROM towpath.jobs
WHERE state IN ('retryable', 'scheduled')"""


def promote(interval_seconds: float) -> Sweep:
    """The sweep; it is woken by what is scheduled meanwhile."""
    return transition_sweep(PROMOTE, _PICK, interval_seconds=interval_seconds, next_due=_NEXT)
