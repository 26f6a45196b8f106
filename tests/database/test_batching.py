"""Protects group commit: requests share flushes without sharing each other's failures, and answers follow the commit.

The flush is a real one: a set-based insert on PostgreSQL, whose failures are PostgreSQL's own.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import psycopg
import pytest
from psycopg import AsyncConnection
from psycopg_pool import AsyncConnectionPool

from app.database.batching import Batcher
from app.errors import Kind, Refusal

T = TypeVar("T")

TABLE = "CREATE TABLE IF NOT EXISTS public.batched (value integer PRIMARY KEY, carried integer NOT NULL DEFAULT 1)"
# A repeat is safe, as every flush must be, and counted.
INSERT = """INSERT INTO public.batched AS b (value) SELECT given::integer FROM unnest(%s::text[]) AS given
ON CONFLICT (value) DO UPDATE SET carried = b.carried + 1 RETURNING value"""


class Flush:
    """Inserts numbers given as text; notes each batch; can be held before its statement and before its commit."""

    def __init__(self, pool: "AsyncConnectionPool[AsyncConnection[Any]]") -> None:
        self._pool = pool
        self.batches: list[list[str]] = []
        self.begun = asyncio.Event()
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.executed = asyncio.Event()
        self.may_commit = asyncio.Event()
        self.may_commit.set()
        self.pid = 0

    async def __call__(self, items: list[str]) -> list[str | Exception]:
        self.batches.append(items)
        self.begun.set()
        await self.may_start.wait()
        async with self._pool.connection() as connection, connection.transaction():
            self.pid = connection.info.backend_pid
            rows = await (await connection.execute(INSERT, [items])).fetchall()
            self.executed.set()
            await self.may_commit.wait()
        stored = {row[0] for row in rows}
        return [f"stored {item}" if int(item) in stored else ValueError(item) for item in items]


@pytest.fixture(scope="module")
def url(new_database: Callable[[], str]) -> str:
    url = new_database()
    with psycopg.connect(url) as connection:
        connection.execute(TABLE)
    return url


@pytest.fixture
def other(url: str) -> "psycopg.Connection[Any]":
    """Somebody else: sees only what is committed."""
    connection = psycopg.connect(url, autocommit=True)
    connection.execute("TRUNCATE public.batched")
    return connection


@pytest.fixture
def run(url: str, other: "psycopg.Connection[Any]") -> Any:
    """Runs a scenario with a flush on a pool of its own."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Flush]:
        async with AsyncConnectionPool(
            url, min_size=1, max_size=2, kwargs={"options": "-c lock_timeout=100"}, open=False
        ) as pool:
            await pool.wait()
            yield Flush(pool)

    async def play(scenario: Callable[[Flush], Awaitable[T]]) -> T:
        async with opened() as flush, asyncio.timeout(20):
            return await scenario(flush)

    yield lambda scenario: asyncio.run(play(scenario))
    other.close()


Run = Callable[[Callable[[Flush], Coroutine[Any, Any, Any]]], Any]


def stored(other: "psycopg.Connection[Any]") -> dict[int, int]:
    """What is committed: each value, and how many commits carried it."""
    return dict(other.execute("SELECT value, carried FROM public.batched").fetchall())


async def turns(count: int) -> None:
    """Let the event loop go round, without any time passing."""
    for _ in range(count):
        await asyncio.sleep(0)


async def refusal_of(task: Awaitable[Any]) -> Refusal:
    with pytest.raises(Refusal) as refused:
        await task
    return refused.value


class TestSharing:
    def test_what_arrives_during_a_flush_shares_the_next(self, run: Run) -> None:
        async def scenario(flush: Flush) -> None:
            batcher = Batcher("test", flush)
            flush.may_start.clear()
            first = asyncio.create_task(batcher.submit("0"))
            await flush.begun.wait()
            others = [asyncio.create_task(batcher.submit(str(n))) for n in range(1, 51)]
            await turns(2)
            flush.may_start.set()
            await asyncio.gather(first, *others)
            assert [len(batch) for batch in flush.batches] == [1, 50]

        run(scenario)

    def test_what_arrives_together_goes_together(self, run: Run) -> None:
        async def scenario(flush: Flush) -> None:
            batcher = Batcher("test", flush)
            await asyncio.gather(*(batcher.submit(str(n)) for n in range(20)))
            assert [len(batch) for batch in flush.batches] == [20]

        run(scenario)

    def test_a_lone_item_is_flushed_at_once(self, run: Run) -> None:
        async def scenario(flush: Flush) -> None:
            batcher = Batcher("test", flush)
            task = asyncio.create_task(batcher.submit("1"))
            await turns(3)
            assert flush.batches == [["1"]]
            await task

        run(scenario)

    def test_everyone_gets_its_own_answer(self, run: Run) -> None:
        async def scenario(flush: Flush) -> None:
            batcher = Batcher("test", flush)
            answers = await asyncio.gather(*(batcher.submit(str(n)) for n in range(100)))
            assert answers == [f"stored {n}" for n in range(100)]

        run(scenario)

    def test_many_items_of_one_caller_are_answered_in_their_order(self, run: Run) -> None:
        async def scenario(flush: Flush) -> None:
            batcher = Batcher("test", flush, max_items=3)
            assert await batcher.submit_all([str(n) for n in range(10)]) == [f"stored {n}" for n in range(10)]

        run(scenario)

    def test_no_items_need_no_flush(self, run: Run) -> None:
        async def scenario(flush: Flush) -> None:
            assert await Batcher("test", flush).submit_all([]) == []
            assert flush.batches == []

        run(scenario)


class TestBounds:
    def test_a_flush_carries_so_many_items(self, run: Run) -> None:
        async def scenario(flush: Flush) -> None:
            batcher = Batcher("test", flush, max_items=4)
            await batcher.submit_all([str(n) for n in range(10)])
            assert [len(batch) for batch in flush.batches] == [4, 4, 2]

        run(scenario)

    def test_a_flush_carries_so_much(self, run: Run) -> None:
        async def scenario(flush: Flush) -> None:
            batcher = Batcher("test", flush, weigh=int, max_weight=10)
            await batcher.submit_all(["4", "5", "6", "3"])
            assert flush.batches == [["4", "5"], ["6", "3"]]

        run(scenario)

    def test_an_item_that_is_too_heavy_for_any_flush_has_one_of_its_own(self, run: Run) -> None:
        async def scenario(flush: Flush) -> None:
            batcher = Batcher("test", flush, weigh=int, max_weight=10)
            await batcher.submit_all(["1", "99", "2"])
            assert flush.batches == [["1"], ["99"], ["2"]]

        run(scenario)

    @pytest.mark.parametrize(("waiting", "flushes"), [(3, 1), (4, 2), (9, 2)])
    def test_a_second_flush_is_begun_only_when_it_is_full_and_no_third(
        self, run: Run, waiting: int, flushes: int
    ) -> None:
        async def scenario(flush: Flush) -> None:
            batcher = Batcher("test", flush, max_items=4)
            flush.may_start.clear()
            first = asyncio.create_task(batcher.submit("0"))
            await flush.begun.wait()
            others = [asyncio.create_task(batcher.submit(str(n))) for n in range(1, waiting + 1)]
            await turns(5)
            assert len(flush.batches) == flushes
            flush.may_start.set()
            assert await asyncio.gather(first, *others) == [f"stored {n}" for n in range(waiting + 1)]

        run(scenario)

    def test_too_many_waiting_items_are_refused_with_when_to_come_back(self, run: Run) -> None:
        async def scenario(flush: Flush) -> None:
            batcher = Batcher("test", flush, max_queued=3)
            flush.may_start.clear()
            carried = [asyncio.create_task(batcher.submit("0"))]
            await flush.begun.wait()
            carried += [asyncio.create_task(batcher.submit(str(n))) for n in range(1, 4)]
            await turns(1)
            refusal = await refusal_of(batcher.submit("4"))
            assert (refusal.kind, refusal.code) == (Kind.OVERLOADED, "too-many-requests")
            assert refusal.facts["retry_after_seconds"] > 0
            flush.may_start.set()
            assert await asyncio.gather(*carried) == [f"stored {n}" for n in range(4)]

        run(scenario)

    def test_many_items_of_one_caller_are_refused_whole(self, run: Run, other: "psycopg.Connection[Any]") -> None:
        async def scenario(flush: Flush) -> None:
            await refusal_of(Batcher("test", flush, max_queued=3).submit_all(["1", "2", "3", "4"]))
            await turns(3)

        run(scenario)
        assert stored(other) == {}


class TestFailures:
    def test_a_value_that_postgresql_refuses_fails_alone(self, run: Run, other: "psycopg.Connection[Any]") -> None:
        async def scenario(flush: Flush) -> list[Any]:
            batcher = Batcher("test", flush)
            items = [str(n) for n in range(100)]
            items[37] = "poison"
            return await batcher.submit_all(items)

        answers = run(scenario)
        (poisoned,) = (answer for answer in answers if isinstance(answer, Exception))
        assert isinstance(poisoned, Refusal)
        assert poisoned.kind is Kind.INVALID
        assert answers.index(poisoned) == 37
        assert stored(other) == {n: 1 for n in range(100) if n != 37}

    def test_two_of_them_fail_and_nobody_else(self, run: Run, other: "psycopg.Connection[Any]") -> None:
        async def scenario(flush: Flush) -> list[Any]:
            items = [str(n) for n in range(16)]
            items[0] = items[15] = "poison"
            return await Batcher("test", flush).submit_all(items)

        answers = run(scenario)
        assert [n for n, answer in enumerate(answers) if isinstance(answer, Refusal)] == [0, 15]
        assert stored(other) == dict.fromkeys(range(1, 15), 1)

    def test_a_failure_does_not_hold_up_the_next_flush(self, run: Run) -> None:
        async def scenario(flush: Flush) -> None:
            batcher = Batcher("test", flush)
            await refusal_of(batcher.submit("poison"))
            assert await batcher.submit("1") == "stored 1"

        run(scenario)

    def test_a_row_that_somebody_else_locks_is_refused_for_its_own_caller(
        self, run: Run, other: "psycopg.Connection[Any]"
    ) -> None:
        other.execute("INSERT INTO public.batched (value) VALUES (2)")

        async def scenario(flush: Flush) -> list[Any]:
            with other.transaction():
                other.execute("SELECT FROM public.batched WHERE value = 2 FOR UPDATE")
                return await Batcher("test", flush).submit_all(["1", "2", "3", "4"])

        answers = run(scenario)
        assert [n for n, answer in enumerate(answers) if isinstance(answer, Refusal)] == [1]
        assert answers[1].kind is Kind.UNAVAILABLE

    def test_an_answer_that_is_an_exception_is_raised_for_its_item_alone(self) -> None:
        async def flush(items: list[str]) -> list[str | Exception]:
            return [ValueError(item) if item == "bad" else item for item in items]

        async def scenario() -> list[Any]:
            batcher: Batcher[str, str] = Batcher("test", flush)
            return await asyncio.gather(*map(batcher.submit, ("a", "bad", "c")), return_exceptions=True)

        first, second, third = asyncio.run(scenario())
        assert (first, third) == ("a", "c")
        assert isinstance(second, ValueError)

    def test_a_bug_in_the_flush_reaches_everyone_and_is_not_tried_again(self) -> None:
        batches: list[list[str]] = []

        async def flush(items: list[str]) -> list[str | Exception]:
            batches.append(items)
            raise KeyError("bug")

        answers = asyncio.run(Batcher("test", flush).submit_all(["a", "b"]))
        assert [type(answer) for answer in answers] == [KeyError, KeyError]
        assert batches == [["a", "b"]]


class TestDatabaseAway:
    def test_a_flush_whose_connection_dies_is_repeated(self, run: Run, other: "psycopg.Connection[Any]") -> None:
        async def scenario(flush: Flush) -> list[str]:
            batcher = Batcher("test", flush)
            flush.may_commit.clear()
            waiting = asyncio.gather(*(batcher.submit(str(n)) for n in range(3)))
            await flush.executed.wait()
            other.execute("SELECT pg_terminate_backend(%s, 5000)", [flush.pid])
            flush.may_commit.set()
            await waiting
            assert flush.batches == [["0", "1", "2"]] * 2
            return await waiting

        assert run(scenario) == ["stored 0", "stored 1", "stored 2"]
        assert stored(other) == dict.fromkeys(range(3), 1)

    @pytest.mark.parametrize("sqlstate", ["40P01", "40001"], ids=["deadlock", "serialization"])
    def test_a_flush_that_met_another_is_repeated(
        self, run: Run, other: "psycopg.Connection[Any]", sqlstate: str
    ) -> None:
        failures = [sqlstate]

        async def scenario(flush: Flush) -> list[Any]:
            async def meeting(items: list[str]) -> list[str | Exception]:
                if failures:
                    other.execute(f"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{failures.pop()}'; END $$")
                return await flush(items)

            return await Batcher("test", meeting).submit_all(["1", "2"])

        assert run(scenario) == ["stored 1", "stored 2"]


class TestAnswers:
    def test_come_after_the_commit(self, run: Run, other: "psycopg.Connection[Any]") -> None:
        async def scenario(flush: Flush) -> None:
            flush.may_commit.clear()
            task = asyncio.create_task(Batcher("test", flush).submit("1"))
            await flush.executed.wait()
            await turns(10)
            assert not task.done()
            assert stored(other) == {}
            flush.may_commit.set()
            await task
            assert stored(other) == {1: 1}

        run(scenario)

    def test_a_flush_that_hangs_is_refused_at_the_deadline(self, run: Run) -> None:
        async def scenario(flush: Flush) -> None:
            batcher = Batcher("test", flush, deadline_seconds=0.05)
            flush.may_start.clear()
            refusal = await refusal_of(batcher.submit("1"))
            assert refusal.kind is Kind.UNAVAILABLE
            assert "not known" in refusal.detail
            flush.may_start.set()
            await batcher.drained()

        run(scenario)

    def test_an_item_behind_a_flush_that_hangs_is_refused_at_the_deadline(self, run: Run) -> None:
        async def scenario(flush: Flush) -> None:
            batcher = Batcher("test", flush, deadline_seconds=0.05)
            flush.may_start.clear()
            first = asyncio.create_task(batcher.submit("1"))
            await flush.begun.wait()
            assert (await refusal_of(batcher.submit("2"))).kind is Kind.UNAVAILABLE
            await refusal_of(first)
            flush.may_start.set()
            await batcher.drained()

        run(scenario)

    def test_what_was_asked_for_is_done_after_a_deadline_too(self, run: Run, other: "psycopg.Connection[Any]") -> None:
        async def scenario(flush: Flush) -> None:
            batcher = Batcher("test", flush, deadline_seconds=0.05)
            flush.may_start.clear()
            await refusal_of(batcher.submit("1"))
            flush.may_start.set()
            await batcher.drained()

        run(scenario)
        assert stored(other) == {1: 1}

    def test_a_caller_that_goes_away_does_not_take_its_mates_along(
        self, run: Run, other: "psycopg.Connection[Any]"
    ) -> None:
        async def scenario(flush: Flush) -> None:
            batcher = Batcher("test", flush)
            flush.may_start.clear()
            tasks = [asyncio.create_task(batcher.submit(str(n))) for n in range(3)]
            await flush.begun.wait()
            tasks[1].cancel()
            await turns(3)
            flush.may_start.set()
            assert [await tasks[0], await tasks[2]] == ["stored 0", "stored 2"]
            assert tasks[1].cancelled()

        run(scenario)
        assert stored(other) == dict.fromkeys(range(3), 1)

    def test_a_caller_that_goes_away_before_its_flush_leaves_its_item_in_place(
        self, run: Run, other: "psycopg.Connection[Any]"
    ) -> None:
        async def scenario(flush: Flush) -> None:
            batcher = Batcher("test", flush)
            flush.may_start.clear()
            first = asyncio.create_task(batcher.submit("0"))
            await flush.begun.wait()
            second = asyncio.create_task(batcher.submit("1"))
            await turns(1)
            second.cancel()
            flush.may_start.set()
            await first
            await batcher.drained()

        run(scenario)
        assert stored(other) == {0: 1, 1: 1}

    def test_draining_waits_for_all_that_was_submitted(self, run: Run, other: "psycopg.Connection[Any]") -> None:
        async def scenario(flush: Flush) -> None:
            batcher = Batcher("test", flush, max_items=2)
            tasks = [asyncio.create_task(batcher.submit(str(n))) for n in range(5)]
            await turns(1)
            await batcher.drained()
            assert stored(other) == dict.fromkeys(range(5), 1)
            await asyncio.gather(*tasks)

        run(scenario)
