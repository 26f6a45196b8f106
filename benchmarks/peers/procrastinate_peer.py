"""Procrastinate by its public paths: `defer_async`, `batch_defer_async`, its own worker."""

import asyncio
import logging
import sys
import time
from contextlib import suppress
from typing import Any

import procrastinate
from measure import QUEUE, URL, Meter, closed, paced, payload, tell

logging.disable(logging.WARNING)
METER: list[Meter] = []


async def main(what: str, *numbers: int) -> None:
    """Set up, enqueue one by one, in bulk, at a pace, or work."""
    connector = procrastinate.PsycopgConnector(conninfo=URL, min_size=2, max_size=60)
    app = procrastinate.App(connector=connector)

    @app.task(queue=QUEUE, name="bench")
    async def bench(t: float, **_: Any) -> None:
        METER[0].hit(t)

    async with app.open_async():
        if what == "setup":
            await app.schema_manager.apply_schema_async()
        elif what == "single":
            await closed(lambda n: bench.defer_async(**payload(n)), *numbers)
        elif what == "bulk":
            began = time.perf_counter()
            for start in range(0, numbers[0], numbers[1]):
                await bench.batch_defer_async(*[payload(n) for n in range(start, start + numbers[1])])
            tell(per_second=numbers[0] / (time.perf_counter() - began))
        elif what == "produce":
            await paced(lambda n: bench.defer_async(**payload(n)), *numbers)
        elif what == "work":
            METER.append(Meter(numbers[0]))
            worker = asyncio.create_task(
                app.run_worker_async(queues=[QUEUE], concurrency=numbers[1], install_signal_handlers=False)
            )
            with suppress(TimeoutError):
                await asyncio.wait_for(METER[0].done.wait(), numbers[2])
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)
            METER[0].report()


asyncio.run(main(sys.argv[1], *(int(number) for number in sys.argv[2:])))
