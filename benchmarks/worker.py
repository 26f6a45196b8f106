"""A worker in a process of its own, over HTTP: claims, does nothing, reports, and writes down what it did.

    python -m benchmarks.worker URL QUEUE JOBS CONNECTIONS LIMIT

With a limit of 1 each job costs a claim and a report of its own, as the simplest worker does it. With more, the
outcomes of the jobs before ride on the next claim. Prints one line of JSON: jobs a second from the first handler's
start to the last durable report, ids handled twice, ids that were reported and not accepted.
"""

import asyncio
import json
import sys
import time
from collections import Counter

import uvloop

from benchmarks.http import Connection


class Log:
    """What the handlers have seen."""

    def __init__(self, jobs: int) -> None:
        self.wanted = jobs
        self.handled: Counter[str] = Counter()
        self.reported: set[str] = set()
        self.started = 0.0
        self.ended = 0.0
        self.over = False

    def handle(self, job_id: str) -> None:
        """The no-op handler."""
        if not self.handled:
            self.started = time.perf_counter()
        self.handled[job_id] += 1

    def report(self, job_id: str) -> None:
        """Its completion is durable."""
        self.reported.add(job_id)
        if len(self.reported) >= self.wanted:
            self.ended = time.perf_counter()
            self.over = True


async def simple(url: str, queue: str, log: Log) -> None:
    """Claim one, complete it."""
    connection = await Connection.open(url)
    claim = json.dumps({"queues": [queue], "wait_seconds": 1}).encode()
    while not log.over:
        _, answer = await connection.post("/v1/claims", claim)
        for job in answer["jobs"]:
            log.handle(job["id"])
            status, _ = await connection.post(f"/v1/jobs/{job['id']}/complete", {"lease": job["lease"]})
            assert status == 200, status
            log.report(job["id"])
    connection.close()


async def batched(url: str, queue: str, limit: int, log: Log) -> None:
    """Report what is done and claim the next in one request."""
    connection = await Connection.open(url)
    done: list[dict[str, str]] = []
    while not log.over:
        claim = {"queues": [queue], "limit": limit, "wait_seconds": 0 if done else 1}
        _, answer = await connection.post("/v1/settlements", {"settlements": done, "claim": claim})
        for settled in answer["settlements"]:
            assert settled["status"] == 200, settled
            log.report(settled["id"])
        done = []
        for job in answer["claim"]["jobs"]:
            log.handle(job["id"])
            done.append({"outcome": "complete", "id": job["id"], "lease": job["lease"]})
    connection.close()


async def main(url: str, queue: str, jobs: int, connections: int, limit: int) -> None:
    """Work the queue off, and say how it went."""
    log = Log(jobs)
    workers = [simple(url, queue, log) if limit == 1 else batched(url, queue, limit, log) for _ in range(connections)]
    await asyncio.gather(*workers)
    doubled = [job for job, times in log.handled.items() if times > 1]
    print(
        json.dumps(
            {
                "per_second": jobs / (log.ended - log.started),
                "handled": len(log.handled),
                "doubled": len(doubled),
                "unreported": len(log.handled.keys() - log.reported),
            }
        )
    )


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], *(int(argument) for argument in sys.argv[3:])))  # type: ignore[arg-type]
