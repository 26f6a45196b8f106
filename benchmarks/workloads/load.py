"""What puts paced and full load on the service from this process, and writes down what it did."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import uvloop

from benchmarks.http import Connection
from benchmarks.ledger import Ledger
from benchmarks.machine import Server

JOB = {"queue": "bench", "kind": "send", "args": {"user_id": 17, "email": "someone@example.com", "template": "welcome"}}
_AHEAD = 20_000
"""Jobs that wait while producers go on as fast as they can."""


def percentile(values: list[float], share: float) -> float:
    """The value below which so many are."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@dataclass
class Paced:
    """What a pace of 100 jobs a second met, in milliseconds, without the first tenth."""

    enqueues: list[float] = field(default_factory=list)
    pickups: list[float] = field(default_factory=list)
    """From the start of an enqueue to the answer of the claim."""

    def settled(self) -> "Paced":
        """Without the first tenth, in which connections are made."""
        return Paced(self.enqueues[len(self.enqueues) // 10 :], self.pickups[len(self.pickups) // 10 :])


async def paced(url: str, ledger: Ledger, *, polls: int, seconds: float, rate: int = 100) -> Paced:
    """A job every so often, whether the one before is answered or not, and polls that wait for them."""
    jobs = int(seconds * rate)
    seen = Paced()
    done = asyncio.Event()
    reported = 0

    async def poll() -> None:
        nonlocal reported
        with await Connection.open(url) as connection:
            while not done.is_set():
                _, answer = await connection.post("/v1/claims", {"queues": ["bench"], "wait_seconds": 60})
                for job in answer["jobs"]:
                    seen.pickups.append((time.time() - job["args"]["t"]) * 1000)
                    ledger.handled.append(job["id"])
                    status, _ = await connection.post(f"/v1/jobs/{job['id']}/complete", {"lease": job["lease"]})
                    assert status == 200, status
                    ledger.reported.append(job["id"])
                    reported += 1
                    if reported == jobs:
                        done.set()

    waiting = [asyncio.ensure_future(poll()) for _ in range(polls)]
    await asyncio.sleep(1)
    free = [await Connection.open(url) for _ in range(20)]

    async def produce() -> None:
        connection = free.pop() if free else await Connection.open(url)
        at = time.time()
        status, answer = await connection.post("/v1/jobs", {**JOB, "args": {"user_id": 17, "t": at}})
        assert status == 201, status
        seen.enqueues.append((time.time() - at) * 1000)
        ledger.acknowledged.append(answer["id"])
        free.append(connection)

    began = time.perf_counter()
    producing = []
    for number in range(jobs):
        await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
        producing.append(asyncio.ensure_future(produce()))
    await asyncio.gather(*producing)
    await asyncio.wait_for(done.wait(), 30)
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for connection in free:
        connection.close()
    return seen.settled()


def full_rate(
    service: Server, ledger: Ledger, *, windows: int, seconds: float, after_each: Callable[[], None] = lambda: None
) -> list[float]:
    """Completed jobs a second, window by window: producers and workers as fast as they can. All is worked off."""
    over = threading.Event()
    failed: list[BaseException] = []

    async def produce() -> None:
        with await Connection.open(service.url) as connection:
            while not over.is_set():
                if len(ledger.acknowledged) - len(ledger.reported) < _AHEAD:
                    status, answer = await connection.post("/v1/jobs/batch", {"jobs": [JOB] * 200})
                    assert status == 201, status
                    ledger.acknowledged += [item["job"]["id"] for item in answer["jobs"]]
                else:
                    await asyncio.sleep(0.005)

    async def work() -> None:
        with await Connection.open(service.url) as connection:
            reports: list[dict[str, str]] = []
            while reports or not over.is_set() or len(ledger.reported) < len(ledger.acknowledged):
                body = {"settlements": reports, "claim": {"queues": ["bench"], "limit": 100, "wait_seconds": 0}}
                _, answer = await connection.post("/v1/settlements", body)
                assert all(settled["status"] == 200 for settled in answer["settlements"])
                ledger.reported += [report["id"] for report in reports]
                ledger.handled += [job["id"] for job in answer["claim"]["jobs"]]
                reports = [
                    {"outcome": "complete", "id": job["id"], "lease": job["lease"]} for job in answer["claim"]["jobs"]
                ]

    async def everybody() -> None:
        await asyncio.gather(*(produce() for _ in range(2)), *(work() for _ in range(8)))

    def run() -> None:
        try:
            uvloop.run(everybody())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    rates = []
    for _ in range(windows):
        before = len(ledger.reported)
        began = time.perf_counter()
        time.sleep(seconds)
        rates.append((len(ledger.reported) - before) / (time.perf_counter() - began))
        after_each()
    over.set()
    thread.join(60)
    if failed:
        raise failed[0]
    if thread.is_alive():
        raise RuntimeError("The jobs were not worked off within a minute.")
    return rates
