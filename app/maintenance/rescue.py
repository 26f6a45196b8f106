"""Running jobs whose lease expired or whose deadline passed go back, or fail when their attempts are used up.

Liveness is per claim, never per worker's name. Which of the two is told is which came first.
"""

from app.lifecycle import LOSE_LEASE, PASS_DEADLINE
from app.maintenance.sweep import Sweep, transition_sweep

# Both read the partial index of running jobs: it is small, and heartbeats stay out of every index.
_EXPIRED = """SELECT id FROM towpath.jobs
WHERE state = 'running' AND lease_expires_at <= now()
  AND (deadline_at IS NULL OR deadline_at >= lease_expires_at) AND id <> ALL(%(excluded)s::uuid[])
ORDER BY lease_expires_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED"""
_PASSED = """SELECT id FROM towpath.jobs
WHERE state = 'running' AND deadline_at <= now() AND deadline_at < lease_expires_at
  AND id <> ALL(%(excluded)s::uuid[])
ORDER BY deadline_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED"""


def rescue(interval_seconds: float) -> tuple[Sweep, Sweep]:
    """The two sweeps."""
    return (
        transition_sweep(LOSE_LEASE, _EXPIRED, interval_seconds=interval_seconds),
        transition_sweep(PASS_DEADLINE, _PASSED, interval_seconds=interval_seconds),
    )
