"""How late: from a job's due time to its claim by a waiting poll, and from a lease's expiry to its rescue.

    python -m benchmarks.timeliness [URL]

Both by the database's clock, read off the jobs themselves.
"""

import random
import statistics
import sys
import threading
from datetime import datetime
from typing import Any
from uuid import uuid4

import httpx

JOBS = 300
WINDOW_SECONDS = 10.0
LEASE_SECONDS = 1.0


def main(url: str) -> None:
    """Print the median and the 99th percentile of each."""
    with httpx.Client(base_url=url, timeout=60) as client:
        report("promotion: due time to claim", promotions(client))
        report("rescue: lease expiry to rescue", rescues(client))


def report(what: str, seconds: list[float]) -> None:
    """One line."""
    cuts = statistics.quantiles(seconds, n=100)
    print(f"{what}: p50 {cuts[49] * 1000:.1f} ms, p99 {cuts[98] * 1000:.1f} ms, n = {len(seconds)}")


def enqueue(client: httpx.Client, queue: str, jobs: list[dict[str, Any]]) -> None:
    """All in one batch."""
    batch = {"jobs": [{"kind": "measure", "queue": queue, **job} for job in jobs]}
    client.post("/v1/jobs/batch", json=batch).raise_for_status()


def claim(client: httpx.Client, queue: str, **more: Any) -> list[dict[str, Any]]:
    """Jobs, after a wait if need be."""
    answer = client.post("/v1/claims", json={"queues": [queue], "wait_seconds": 15, **more}).raise_for_status()
    return list(answer.json()["jobs"])


def promotions(client: httpx.Client, wanted: int = JOBS, window_seconds: float = WINDOW_SECONDS) -> list[float]:
    """Jobs that fall due at random moments, and one poll that waits for each."""
    queue = f"promotion-{uuid4().hex[:8]}"
    delays = (random.uniform(1, window_seconds) for _ in range(wanted))
    enqueue(client, queue, [{"delay_seconds": delay} for delay in delays])
    claimed: list[dict[str, Any]] = []
    while len(claimed) < wanted:
        claimed += claim(client, queue, limit=10)
    jobs = [client.get(f"/v1/jobs/{job['id']}").json() for job in claimed]
    return [seconds_between(job["run_at"], job["claimed_at"]) for job in jobs]


def rescues(client: httpx.Client, wanted: int = JOBS, window_seconds: float = WINDOW_SECONDS) -> list[float]:
    """Jobs that are claimed at random moments and never heard of again."""
    queue = f"rescue-{uuid4().hex[:8]}"
    enqueue(client, queue, [{"max_attempts": 1} for _ in range(wanted)])
    held: list[dict[str, Any]] = []
    pause = threading.Event()
    while len(held) < wanted:
        held += claim(client, queue, lease_seconds=LEASE_SECONDS)
        pause.wait(random.uniform(0, 2 * window_seconds / wanted))
    late = []
    for job in held:
        ended = client.get(f"/v1/jobs/{job['id']}", params={"wait_seconds": 10}).json()
        late.append(seconds_between(job["lease_expires_at"], ended["finished_at"]))
    return late


def seconds_between(earlier: str, later: str) -> float:
    """Two times of the API."""
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080")
