"""AWA by its public fast paths: `insert`, `enqueue_many_copy`, a worker on its queue storage."""

import asyncio
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

import awa
from measure import QUEUE, URL, Meter, closed, paced, payload, tell


@dataclass
class Bench:
    """A job."""

    user_id: int
    email: str
    template: str
    t: float
    padding: str = ""


async def main(what: str, *numbers: int) -> None:
    """Set up, enqueue one by one, in bulk, at a pace, or work."""
    client = awa.AsyncClient(
        URL.replace("postgresql://", "postgres://"), min(60, max(20, *numbers[1:2]) if what == "single" else 20)
    )
    if what == "setup":
        await client.migrate()

        @client.task(Bench, queue=QUEUE)
        async def nothing(_: Bench) -> None:
            return None

        # A worker's first start moves a fresh database to the queue-storage engine.
        await client.start([(QUEUE, 2)])
        await asyncio.sleep(1.5)
        await client.shutdown()
    elif what == "single":
        await closed(lambda n: client.insert(Bench(**payload(n)), queue=QUEUE), *numbers)
    elif what == "bulk":
        began = time.perf_counter()
        for start in range(0, numbers[0], numbers[1]):
            await client.enqueue_many_copy([Bench(**payload(n)) for n in range(start, start + numbers[1])], queue=QUEUE)
        tell(per_second=numbers[0] / (time.perf_counter() - began))
    elif what == "produce":
        await paced(lambda n: client.insert(Bench(**payload(n)), queue=QUEUE), *numbers)
    elif what == "work":
        meter = Meter(numbers[0])

        @client.task(Bench, queue=QUEUE)
        async def handle(job: awa.Job) -> None:
            meter.hit(job.args.t)

        await client.start([(QUEUE, numbers[1])])
        with suppress(TimeoutError):
            await asyncio.wait_for(meter.done.wait(), numbers[2])
        await asyncio.sleep(0.3)
        await client.shutdown()
        meter.report()


asyncio.run(main(sys.argv[1], *(int(number) for number in sys.argv[2:])))
