"""Wait until something is so, many waiters at the cost of one query: final jobs, resolved waits.

This process tells of its own changes at once (`hint`); what other processes did is found by asking, a few
times a second and only while somebody waits, for all that is watched in one statement.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import LiteralString, TypeVar
from uuid import UUID

import psycopg
import structlog

from app.database.engine import Database

log = structlog.get_logger(__name__)

_TICK_SECONDS = 0.25

T = TypeVar("T")


class Watch:
    """`reached` is SQL that takes `%(ids)s` and returns those that have come to where they were going."""

    def __init__(self, database: Database, reached: LiteralString) -> None:
        self._database = database
        self._reached = reached
        self._waiters: dict[UUID, set[asyncio.Event]] = defaultdict(set)
        self._watched = asyncio.Event()
        self._draining = False

    async def until(
        self, watched: UUID, seconds: float, look: Callable[[], Awaitable[T]], reached: Callable[[T], bool]
    ) -> T:
        """What `look` finds once it is `reached`, or when the time is up."""
        event = asyncio.Event()
        self._waiters[watched].add(event)
        self._watched.set()
        give_up_at = asyncio.get_running_loop().time() + seconds
        try:
            found = await look()  # subscribed first: what happened until now is seen here
            while not (reached(found) or self._draining):
                try:
                    async with asyncio.timeout_at(give_up_at):
                        await event.wait()
                except TimeoutError:
                    break
                event.clear()
                found = await look()
        finally:
            self._waiters[watched].discard(event)
            if not self._waiters[watched]:
                del self._waiters[watched]
        return found

    def hint(self, ids: Iterable[UUID]) -> None:
        """These may have come there."""
        if not self._waiters:
            return
        for each in ids:
            for event in self._waiters.get(each, ()):
                event.set()

    def drain(self) -> None:
        """Let everyone go, now and later."""
        self._draining = True
        self.hint(list(self._waiters))

    async def run(self) -> None:
        """Ask the database for all waiters: for ever."""
        while True:
            if not self._waiters:
                self._watched.clear()
                await self._watched.wait()
            await asyncio.sleep(_TICK_SECONDS)
            try:
                async with self._database.hot.connection() as connection:
                    cursor = await connection.execute(self._reached, {"ids": list(self._waiters)})
                    self.hint([row[0] for row in await cursor.fetchall()])
            except psycopg.Error as error:
                log.warning("watch failed", error=type(error).__name__)
