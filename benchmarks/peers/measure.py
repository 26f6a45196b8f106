"""What the Python peers' runs share: the payload, a meter for handlers, closed and open loops. Prints `@@` and JSON."""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

URL = os.environ["BENCH_URL"]
QUEUE = "bench"
PADDING = "x" * int(os.environ["BENCH_PADDING"])


def payload(number: int) -> dict[str, Any]:
    """What every system's jobs carry; `t` is when the enqueue began."""
    padded = {"padding": PADDING} if PADDING else {}
    return {"user_id": number, "email": "someone@example.com", "template": "welcome", "t": time.time(), **padded}


def tell(**figures: Any) -> None:
    """One run's figures."""
    print("@@" + json.dumps(figures), flush=True)


def percentile(values: list[float], share: float) -> float:
    """The value below which so many are."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


class Meter:
    """Counts handlers and keeps how long each job was on its way."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.seconds: list[float] = []
        self.first = 0.0
        self.last = 0.0
        self.done = asyncio.Event()

    def hit(self, began: float) -> None:
        """A handler starts."""
        self.last = time.time()
        self.first = self.first or self.last
        self.seconds.append(self.last - began)
        if len(self.seconds) >= self.jobs:
            self.done.set()

    def report(self) -> None:
        """The rate, and the delays without the first tenth, in which connections are made."""
        late = self.seconds[len(self.seconds) // 10 :]
        rate = len(self.seconds) / max(1e-9, self.last - self.first)
        p50, p99 = (1000 * percentile(late, share) for share in (0.5, 0.99))
        tell(jobs=len(self.seconds), per_second=rate, p50_ms=p50, p99_ms=p99)


async def closed(call: Callable[[int], Awaitable[Any]], calls: int, callers: int) -> None:
    """Each caller makes its next call when it has its answer."""
    numbers = iter(range(calls))
    seconds: list[float] = []

    async def one() -> None:
        for number in numbers:
            began = time.perf_counter()
            await call(number)
            seconds.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(callers)))
    rate = calls / (time.perf_counter() - began)
    tell(per_second=rate, p50_ms=1000 * percentile(seconds, 0.5), p99_ms=1000 * percentile(seconds, 0.99))


async def paced(call: Callable[[int], Awaitable[Any]], rate: int, seconds: int) -> None:
    """A call every so often, whether the one before is answered or not."""
    began = time.perf_counter()
    calls = []
    for number in range(rate * seconds):
        pause = began + number / rate - time.perf_counter()
        if pause > 0:
            await asyncio.sleep(pause)
        calls.append(asyncio.ensure_future(call(number)))
    await asyncio.gather(*calls)
