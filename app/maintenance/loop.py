"""Runs the sweeps: each in its own task, so that a slow or blocked one holds up no other.

Every service process runs this loop; an advisory lock lets one process at a time do a sweep. It needs no
worker, no scheduler, and no leader that could be lost.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import structlog
from psycopg import AsyncConnection
from psycopg_pool import AsyncConnectionPool

from app.database.engine import conninfo
from app.database.notifications import stopped
from app.lifecycle import PROMOTE
from app.maintenance.expire import expire_callbacks, expire_unstarted
from app.maintenance.promote import promote
from app.maintenance.rescue import rescue
from app.maintenance.retention import retention
from app.maintenance.sweep import Sweep
from app.settings import Settings

log = structlog.get_logger(__name__)

_LOCK = "SELECT pg_try_advisory_xact_lock(hashtext('towpath sweep'), hashtext(%s))"
_AFTER_ERROR_SECONDS = 0.5
_FORGIVE_SECONDS = 60.0
# Below this, waking up costs more than it gains; due jobs are promoted in batches.
_SHORTEST_SLEEP = 0.002
# Something is due and could not be had: another process is at it, or somebody holds the row.
_SLEEP_BEHIND_OTHERS = 0.03


def sweeps(settings: Settings) -> tuple[Sweep, ...]:
    """Everything that must happen without being asked."""
    return (
        promote(settings.sweep_interval_seconds),
        *rescue(settings.rescue_interval_seconds),
        expire_callbacks(settings.rescue_interval_seconds),
        expire_unstarted(settings.rescue_interval_seconds),
        *retention(settings.sweep_interval_seconds * 2),
    )


class Maintenance:
    """The sweeps of one process. `wake` is for when something new was scheduled."""

    def __init__(self, settings: Settings, chosen: Iterable[Sweep] | None = None) -> None:
        self._settings = settings
        self._sweeps = tuple(chosen or sweeps(settings))
        self._wake = {sweep.name: asyncio.Event() for sweep in self._sweeps}
        self._last_pass: dict[str, float] = {}
        self._pool: AsyncConnectionPool[AsyncConnection[Any]] = AsyncConnectionPool(
            conninfo(settings, "maintenance"),
            min_size=1,
            max_size=4,
            kwargs={"autocommit": True},
            timeout=10,
            open=False,
            name="maintenance",
        )

    def wake(self) -> None:
        """Something was scheduled: what is due next may have changed."""
        if PROMOTE.name in self._wake:
            self._wake[PROMOTE.name].set()

    def stalled(self, seconds: float) -> list[str]:
        """The sweeps that have not come to an end of a pass for so long."""
        now = time.monotonic()
        return sorted(sweep for sweep, at in self._last_pass.items() if now - at > seconds)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Sweeps run while the block does."""
        await self._pool.open()
        tasks = [asyncio.create_task(self._run(sweep), name=f"sweep {sweep.name}") for sweep in self._sweeps]
        try:
            yield
        finally:
            await stopped(*tasks)
            await self._pool.close()

    async def _run(self, sweep: Sweep) -> None:
        excluded: list[Any] = []
        forgive_at = 0.0
        most = limit = min(self._settings.sweep_batch, sweep.most)
        self._last_pass[sweep.name] = time.monotonic()
        while True:
            if time.monotonic() > forgive_at:
                excluded, forgive_at = [], time.monotonic() + _FORGIVE_SECONDS
            wake = self._wake[sweep.name]
            wake.clear()
            began = time.monotonic()
            try:
                count = await self._pass(sweep, limit, excluded)
                self._last_pass[sweep.name] = ended = time.monotonic()
                if count:
                    log.info("swept", sweep=sweep.name, rows=count)
                if count >= limit:
                    # Back to full batches: one bad row must not leave the rest to go one by one.
                    limit = min(limit * 2, most)
                    await asyncio.sleep((ended - began) * (1 / sweep.share - 1))
                    continue
                limit = most
                sleep = await self._until_due(sweep, _SHORTEST_SLEEP if count else _SLEEP_BEHIND_OTHERS)
            except psycopg.OperationalError as error:
                log.warning("sweep will run again", sweep=sweep.name, error=type(error).__name__)
                limit = max(1, limit // 2)
                sleep = _AFTER_ERROR_SECONDS
            except psycopg.Error as error:
                # A row that the step can't be given: smaller batches until it is alone, then without it.
                log.warning("sweep failed", sweep=sweep.name, limit=limit, error=str(error).splitlines()[0])
                if limit == 1:
                    excluded += await self._culprit(sweep, excluded)
                limit = max(1, limit // 4)
                continue
            try:
                async with asyncio.timeout(sleep):
                    await wake.wait()
            except TimeoutError:
                pass

    async def _pass(self, sweep: Sweep, limit: int, excluded: list[Any]) -> int:
        async with self._pool.connection() as connection, connection.transaction():
            row = await (await connection.execute(_LOCK, [sweep.name])).fetchone()
            return await sweep.run(connection, limit, excluded) if row and row[0] else 0

    async def _culprit(self, sweep: Sweep, excluded: list[Any]) -> list[Any]:
        async with self._pool.connection() as connection, connection.transaction():
            cursor = await connection.execute(sweep.pick, {"limit": 1, "excluded": excluded})
            bad = [row[0] for row in await cursor.fetchall()]
        log.error("row left out of its sweep", sweep=sweep.name, rows=[str(each) for each in bad])
        return bad

    async def _until_due(self, sweep: Sweep, when_overdue: float) -> float:
        longest = sweep.interval_seconds * random.uniform(0.9, 1.0)  # noqa: S311
        if sweep.next_due is None:
            return longest
        async with self._pool.connection() as connection:
            row = await (await connection.execute(sweep.next_due)).fetchone()
        if row is None or row[0] is None:
            return longest
        return min(longest, row[0] + _SHORTEST_SLEEP if row[0] > 0 else when_overdue)
