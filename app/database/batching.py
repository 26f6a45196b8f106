"""Group commit: requests of one kind that arrive while a flush is on its way share the next one.

One flush is one transaction, so a hundred waiting requests cost one fsync. There is no timer: an idle service
flushes a lone request at once; where more waits than one flush takes, two are on their way. Every answer is given
after the commit.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import psycopg
import structlog

from app.database.failures import LOCKED, TRANSIENT, is_away, refusal_of
from app.errors import Kind, Refusal, unavailable

log = structlog.get_logger(__name__)

Item = TypeVar("Item")
Answer = TypeVar("Answer")

# Connections for the items of a flush that met a locked row: few enough to leave some for everybody else.
_STRAGGLERS = 2
# A second flush keeps the database busy while the answers of the first are made; it pays only when it is full.
_IN_FLIGHT = 2
_DELAYS_WHEN_AWAY = (0.02, 0.2, 0.5, 1.0, 2.0)


class _TooLate(Refusal):
    """The deadline of a request came before its flush's answer."""


def _too_late() -> _TooLate:
    known = unavailable("The database is slow; whether the request took effect is not known. Repeat it.")
    return _TooLate(known.kind, known.code, known.detail, **known.facts)


class Batcher(Generic[Item, Answer]):
    """Collects items and flushes them together.

    `flush` takes a list of items and returns an answer for each, in order; an answer that is an exception is
    raised for its item alone. It must be safe to repeat, since it runs again when its connection died and
    nobody knows whether the commit came through. When it fails because of what it was given, the list is
    halved until the bad item is alone, so that the others succeed.
    """

    def __init__(
        self,
        name: str,
        flush: Callable[[list[Item]], Awaitable[Sequence[Answer | Exception]]],
        *,
        weigh: Callable[[Item], int] = lambda _: 0,
        max_items: int = 1000,
        max_weight: int = 262_144,
        max_queued: int = 20_000,
        deadline_seconds: float = 15.0,
    ) -> None:
        self.name = name
        self._flush = flush
        self._weigh = weigh
        self._max_items = max_items
        self._max_weight = max_weight
        self._max_queued = max_queued
        self._deadline_seconds = deadline_seconds
        self._queue: deque[tuple[Item, int, asyncio.Future[Answer]]] = deque()
        self._weight = 0
        self._deadlines: deque[tuple[float, Sequence[asyncio.Future[Answer]]]] = deque()
        # Asking which loop runs asks for the process's id, a system call.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stragglers: set[asyncio.Task[None]] = set()
        self._straggling = asyncio.Semaphore(_STRAGGLERS)

    async def submit(self, item: Item) -> Answer:
        """The item's own answer, after the commit of the flush that carried it.

        A caller that goes away leaves its item in place: what was asked for is done, as a repeat will tell.
        Raises Refusal: overloaded, the database is away, or what the flush said of the item.
        """
        (future,) = self._enter((item,))
        return await future

    async def submit_all(self, items: Sequence[Item]) -> list[Answer | Exception]:
        """An answer for each item, or the exception that `submit` would have raised for it.

        Raises Refusal when the process is overloaded, or when not all are answered in time.
        """
        answers: list[Answer | Exception] = []
        for future in self._enter(items):
            try:
                answers.append(await future)
            except _TooLate:
                raise
            except Exception as error:
                answers.append(error)
        return answers

    def _enter(self, items: Sequence[Item]) -> list["asyncio.Future[Answer]"]:
        if len(self._queue) + len(items) > self._max_queued:
            raise Refusal(
                Kind.OVERLOADED, "too-many-requests", "Too many requests wait for the database.", retry_after_seconds=1
            )
        loop = self._loop = self._loop or asyncio.get_running_loop()
        futures: list[asyncio.Future[Answer]] = [loop.create_future() for _ in items]
        for item, future in zip(items, futures, strict=True):
            weight = self._weigh(item)
            self._weight += weight
            self._queue.append((item, weight, future))
        if futures:
            # One timer for all that wait, not one for each: a timer costs more than the rest of this.
            self._deadlines.append((loop.time() + self._deadline_seconds, futures))
            if self._alarm is None:
                self._alarm = loop.call_later(self._deadline_seconds, self._give_up)
        if self._queue and (not self._tasks or (len(self._tasks) < _IN_FLIGHT and self._is_full)):
            self._tasks.add(asyncio.create_task(self._run(), name=f"flush {self.name}"))
        return futures

    def _give_up(self) -> None:
        loop = self._loop
        assert loop
        while self._deadlines and self._deadlines[0][0] <= loop.time():
            for future in self._deadlines.popleft()[1]:
                if not future.done():
                    future.set_exception(_too_late())
                    future.exception()  # told to the first that is awaited; the others need not be read
        self._alarm = loop.call_at(self._deadlines[0][0], self._give_up) if self._deadlines else None

    @property
    def _is_full(self) -> bool:
        return len(self._queue) >= self._max_items or self._weight >= self._max_weight

    async def drained(self) -> None:
        """Returns when all that was submitted has its answer."""
        while tasks := self._stragglers | self._tasks:
            await asyncio.wait(tasks)

    async def _run(self) -> None:
        try:
            while self._queue:
                await self._answer(self._next())
        finally:
            # At once, not by a callback a turn later: who comes in between must start the next.
            self._tasks.remove(asyncio.current_task())  # type: ignore[arg-type]

    def _next(self) -> list[tuple[Item, asyncio.Future[Answer]]]:
        taken: list[tuple[Item, asyncio.Future[Answer]]] = []
        room = self._max_weight
        while self._queue and len(taken) < self._max_items:
            item, weight, future = self._queue[0]
            if taken and weight > room:
                break
            self._queue.popleft()
            self._weight -= weight
            room -= weight
            taken.append((item, future))
        return taken

    async def _answer(self, taken: list[tuple[Item, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._flushed([item for item, _ in taken])
        except Exception as error:
            if len(taken) > 1 and isinstance(error, LOCKED):
                # Halving would wait for the lock again and again; the others, and who comes next, go on meanwhile.
                for one in taken:
                    task = asyncio.create_task(self._straggle(one), name=f"flush {self.name}, one by one")
                    self._stragglers.add(task)
                    task.add_done_callback(self._stragglers.discard)
                return
            if len(taken) > 1 and isinstance(error, psycopg.Error) and not is_away(error):
                middle = len(taken) // 2
                await self._answer(taken[:middle])
                await self._answer(taken[middle:])
                return
            refusal = refusal_of(error)
            if refusal is None and not isinstance(error, Refusal):
                log.exception("flush failed", batch=self.name, items=len(taken))
            answers = [refusal or error] * len(taken)
        for (_, future), answer in zip(taken, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        while self._deadlines and all(future.done() for future in self._deadlines[0][1]):
            self._deadlines.popleft()

    async def _straggle(self, one: tuple[Item, asyncio.Future[Answer]]) -> None:
        async with self._straggling:
            await self._answer([one])

    async def _flushed(self, items: list[Item]) -> Sequence[Answer | Exception]:
        for delay in _DELAYS_WHEN_AWAY:
            try:
                return await self._flush(items)
            except TRANSIENT:
                continue
            except psycopg.Error as error:
                if not is_away(error):
                    raise
                log.warning("flush repeated: the database is away", batch=self.name, items=len(items))
                await asyncio.sleep(delay)
        return await self._flush(items)
