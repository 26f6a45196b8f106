"""One LISTEN connection a process, fanned out to whoever is interested. A hint, never the truth.

Channel `towpath`: `available <queue> <order>` when jobs of the queue may have become claimable, the first of them
at this place (`claim_order` in microseconds since 1970; without it, anywhere), or when it was paused or opened;
`due` when something was scheduled. After a reconnect `lost` is called, since signals may have been
missed meanwhile.
"""

import asyncio
from collections.abc import Callable

import psycopg
import structlog
from psycopg import AsyncConnection

log = structlog.get_logger(__name__)

CHANNEL = "towpath"
_PROBE_SECONDS = 10.0
_RECONNECT_SECONDS = (0.1, 0.5, 1.0, 2.0)


class Notifications:
    """Listens until cancelled; `heard(payload)` and `lost()` are called on the event loop and must not block."""

    def __init__(self, conninfo: str, heard: Callable[[str], None], lost: Callable[[], None]) -> None:
        self._conninfo = conninfo
        self._heard = heard
        self._lost = lost
        self.listening = asyncio.Event()

    async def run(self) -> None:
        """Connect, listen, reconnect: for ever."""
        failures = 0
        while True:
            try:
                async with await AsyncConnection.connect(self._conninfo, autocommit=True) as connection:
                    await connection.execute(f"LISTEN {CHANNEL}")
                    failures = 0
                    self.listening.set()
                    self._lost()
                    await self._listen(connection)
            except (psycopg.Error, OSError) as error:
                delay = _RECONNECT_SECONDS[min(failures, len(_RECONNECT_SECONDS) - 1)]
                log.warning("listening again soon", error=type(error).__name__, delay_seconds=delay)
                failures += 1
                await asyncio.sleep(delay)
            finally:
                self.listening.clear()

    async def _listen(self, connection: "AsyncConnection[object]") -> None:
        while True:
            async for notify in connection.notifies(timeout=_PROBE_SECONDS):
                self._heard(notify.payload)
            # A half-open connection hears nothing for ever: a question finds out.
            await connection.execute("SELECT 1")


async def stopped(*tasks: "asyncio.Task[None]") -> None:
    """Cancel background tasks and wait until they have gone.

    Again and again: before Python 3.12 `asyncio.wait_for`, which the driver uses, can swallow a cancellation.
    """
    while alive := {task for task in tasks if not task.done()}:
        for task in alive:
            task.cancel()
        await asyncio.wait(alive, timeout=0.5)
