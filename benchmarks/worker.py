"""A worker in a process of its own, over HTTP: claims, does nothing, reports, and writes down what it did.

    python -m benchmarks.worker URL QUEUE JOBS CONNECTIONS LIMIT

With a limit of 1 each job costs a claim and a report of its own, as the simplest worker does it. With more, the
outcomes of the jobs before ride on the next claim. Prints one line of JSON: jobs a second from the first handler's
start to the last durable report, and the ids that were handled and reported, each time.
"""

import asyncio
import json
import sys
import time

import uvloop

from benchmarks.http import Connection

_GIVE_UP_SECONDS = 20


class Log:
    """What the handlers have seen."""

    def __init__(self, jobs: int) -> None:
        self.wanted = jobs
        self.handled: list[str] = []
        self.reported: list[str] = []
        self.started = self.ended = time.perf_counter()

    @property
    def over(self) -> bool:
        """All is reported, or nothing has come for so long that something is lost."""
        return len(self.reported) >= self.wanted or time.perf_counter() - self.ended > _GIVE_UP_SECONDS

    def handle(self, job_id: str) -> None:
        """The no-op handler."""
        if not self.handled:
            self.started = time.perf_counter()
        self.handled.append(job_id)

    def report(self, job_id: str) -> None:
        """Its completion is durable."""
        self.reported.append(job_id)
        self.ended = time.perf_counter()


async def simple(url: str, queue: str, log: Log) -> None:
    """Claim one, complete it."""
    with await Connection.open(url) as connection:
        claim = json.dumps({"queues": [queue], "wait_seconds": 1}).encode()
        while not log.over:
            _, answer = await connection.post("/v1/claims", claim)
            for job in answer["jobs"]:
                log.handle(job["id"])
                status, _ = await connection.post(f"/v1/jobs/{job['id']}/complete", {"lease": job["lease"]})
                assert status == 200, status
                log.report(job["id"])


async def batched(url: str, queue: str, limit: int, log: Log) -> None:
    """Report what is done and claim the next in one request."""
    with await Connection.open(url) as connection:
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


async def main(url: str, queue: str, jobs: int, connections: int, limit: int) -> None:
    """Work the queue off, and say how it went."""
    log = Log(jobs)
    workers = [simple(url, queue, log) if limit == 1 else batched(url, queue, limit, log) for _ in range(connections)]
    await asyncio.gather(*workers)
    rate = len(log.reported) / (log.ended - log.started)
    print(json.dumps({"per_second": rate, "handled": log.handled, "reported": log.reported}))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], *(int(argument) for argument in sys.argv[3:])))
