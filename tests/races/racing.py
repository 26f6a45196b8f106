"""Callers that meet: a few milliseconds apart in either order, over real connections, and a tally of who was first."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import psycopg
from psycopg.rows import dict_row

from tests.build import JSON, Api, ok
from tests.servers import ServiceThread

OFFSET_SECONDS = 0.005

T = TypeVar("T")
Call = Callable[[], Awaitable[T]]


class Caller:
    """Calls one service, each call on a connection that no other uses meanwhile.

    Not httpx: it needs longer for a call than the offsets that matter here. Its response type is used.
    """

    def __init__(self, service: ServiceThread) -> None:
        self._address = urlsplit(service.url)
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._all: list[asyncio.StreamWriter] = []

    async def open(self, connections: int) -> None:
        for _ in range(connections):
            self._free.append(await self._connect())

    async def post(self, path: str, body: Any) -> httpx.Response:
        reader, writer = self._free.pop() if self._free else await self._connect()
        sent = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}"
        writer.write(head.encode() + b"\r\n\r\n" + sent)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        content = await reader.readexactly(int(headers["content-length"]))
        self._free.append((reader, writer))
        return httpx.Response(int(lines[0].split()[1]), headers=headers, content=content)

    async def close(self) -> None:
        for writer in self._all:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        self._all.append(writer)
        return reader, writer


async def after(seconds: float, call: Call[T]) -> T:
    if seconds > 0:
        await asyncio.sleep(seconds)
    return await call()


async def meet(*calls: Call[T], within_seconds: float = OFFSET_SECONDS) -> list[T]:
    """All of them, each at a random moment of the same few milliseconds."""
    return await asyncio.gather(*(after(random.uniform(0, within_seconds), call) for call in calls))


def tally(
    trial: Callable[[int, list[Caller]], Coroutine[Any, Any, str]],
    count: int,
    *services: ServiceThread,
    at_once: int = 10,
    begin: Callable[[], object] = lambda: None,
) -> "Counter[str]":
    """How often each answer came when the trial was made so many times, `at_once` of them at once.

    A trial gets its number and a caller of each service; their connections are open before the first one.
    """

    async def all_of_them() -> list[str]:
        gate = asyncio.Semaphore(at_once)
        callers = [Caller(service) for service in services]

        async def gated(number: int) -> str:
            async with gate:
                return await trial(number, callers)

        try:
            for caller in callers:
                await caller.open(at_once)
            begin()
            return await asyncio.gather(*(gated(number) for number in range(count)))
        finally:
            for caller in callers:
                await caller.close()

    return Counter(asyncio.run(all_of_them()))


def each_was_seen(orders: "Counter[str]", *expected: str) -> None:
    """A race in which only one order was seen has shown nothing."""
    print(f"{orders.total()} trials: {dict(orders)}")
    assert set(orders) == set(expected), orders


def moment_of(number: int) -> float:
    """When, in seconds after the start, the two of a trial meet: far enough from the others' moments."""
    return 0.05 + number * 0.008


def around(number: int, later_seconds: float = 0.03) -> float:
    """A little before or after that; a call is on its way for a while, on a busy machine a long one."""
    return moment_of(number) + random.uniform(-0.12, later_seconds)


def end_each(db: "psycopg.Connection[Any]", table: str, column: str, key: str, jobs: list[str]) -> None:
    """Let a time of the jobs come at their moments, one after another."""
    db.execute(
        f"UPDATE towpath.{table} AS t SET {column} = now() + at * interval '1 s'"
        f" FROM unnest(%s::uuid[], %s::float8[]) AS given(job, at) WHERE t.{key} = given.job",
        [jobs, [moment_of(number) for number in range(len(jobs))]],
    )


def jobs_now(db: "psycopg.Connection[Any]", queue: str) -> dict[str, Any]:
    """What is stored of the queue's jobs, by id, each with its waits."""
    rows = db.cursor(row_factory=dict_row).execute(
        "SELECT j.*, coalesce((SELECT jsonb_agg(w) FROM towpath.waits AS w WHERE w.job_id = j.id), '[]') AS waits"
        " FROM towpath.jobs AS j WHERE j.queue = %s",
        [queue],
    )
    return {str(row["id"]): row for row in rows}


def running_jobs(api: Api, count: int, **job: Any) -> list[JSON]:
    api.enqueue_many(count, **job)
    return api.claims(limit=count)["jobs"]  # type: ignore[no-any-return]


def parked_jobs(api: Api, count: int, *, attached: bool = False, **job: Any) -> list[tuple[JSON, JSON]]:
    """Claimed jobs that are parked, each with its wait."""
    jobs = running_jobs(api, count, **job)
    waits = [api.open_wait(claimed) for claimed in jobs]
    parks = [
        {"outcome": "park", "id": job["id"], "lease": job["lease"], "wait_id": wait["wait_id"], "attached": attached}
        for job, wait in zip(jobs, waits, strict=True)
    ]
    answers = ok(api.post("/v1/settlements", {"settlements": parks}))["settlements"]
    assert {answer["status"] for answer in answers} == {200}
    return list(zip(jobs, waits, strict=True))


def callback_path(wait: JSON, verb: str) -> str:
    """The path of a wait's URL, which is the same at every service."""
    return "/" + str(wait["urls"][verb]).split("/", 3)[3]


def ids(jobs: Iterable[JSON]) -> list[str]:
    return [job["id"] for job in jobs]
