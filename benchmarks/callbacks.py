"""How soon a callback's payload is at work: from its POST to the claim that carries it, by a poll that waits.

    python -m benchmarks.callbacks [URL]

Both ends are the caller's, by its own clock: a third party and a worker in one process, one job at a time.
"""

import sys
import threading
import time
from queue import Queue
from typing import Any
from uuid import uuid4

import httpx

from benchmarks.timeliness import claim, enqueue, report

JOBS = 400


def main(url: str) -> None:
    """Print the median and the 99th percentile."""
    report("callback: POST to the claim with its payload", measured(url, f"callbacks-{uuid4().hex[:8]}"))


def measured(url: str, queue: str, jobs: int = JOBS) -> list[float]:
    """Seconds, for each of the jobs."""
    claimed_at: Queue[tuple[str, float]] = Queue()
    with httpx.Client(base_url=url, timeout=60) as client:
        waits = parked(client, queue, jobs)
        worker = threading.Thread(target=work, args=(url, queue, jobs, claimed_at), daemon=True)
        worker.start()
        seconds = []
        for payload, callback in enumerate(waits):
            started = time.perf_counter()
            client.post(callback, json={"n": payload}).raise_for_status()
            job, at = claimed_at.get(timeout=30)
            assert job == str(payload), "the claim carries another callback's payload"
            seconds.append(at - started)
        worker.join(30)
    return seconds


def parked(client: httpx.Client, queue: str, jobs: int) -> list[str]:
    """The resume URLs of parked jobs."""
    enqueue(client, queue, [{} for _ in range(jobs)])
    urls = []
    for job in claim(client, queue, limit=jobs):
        path = f"/v1/jobs/{job['id']}"
        wait: dict[str, Any] = client.post(f"{path}/callbacks", json={"lease": job["lease"]}).raise_for_status().json()
        client.post(f"{path}/park", json={"lease": job["lease"], "wait_id": wait["wait_id"]}).raise_for_status()
        urls.append(wait["urls"]["resume"])
    return urls


def work(url: str, queue: str, jobs: int, claimed_at: "Queue[tuple[str, float]]") -> None:
    """Claim each job as soon as it can be had, and say what it brought and when."""
    with httpx.Client(base_url=url, timeout=60) as client:
        for _ in range(jobs):
            (job,) = claim(client, queue)
            claimed_at.put((str(job["callback_results"]["callback"]["payload"]["n"]), time.perf_counter()))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080")
