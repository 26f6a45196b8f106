"""HTTP/1.1 as uvicorn speaks it, but answers leave whole, and polls hear when their client goes or the server ends."""

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Protocol(HttpToolsProtocol):
    """One connection. A request finds it in its state, as `connection`."""

    # Not in the instance's dictionary, which is full: one more would cost 1.5 kB, with ten thousand polls.
    __slots__ = ("lost", "when_lost")

    lost: bool
    when_lost: Callable[[], object] | None
    """Called when the client goes away. To await that instead takes a task for each poll."""

    def connection_made(self, transport: Any) -> None:
        """A client has come."""
        self.lost, self.when_lost = False, None
        super().connection_made(_Gathering(transport, self.loop))  # type: ignore[arg-type]

    def connection_lost(self, exc: Exception | None) -> None:
        """A client has gone."""
        super().connection_lost(exc)
        self.lost = True
        if self.when_lost:
            self.when_lost()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.scope["state"]["connection"] = self

    def shutdown(self) -> None:
        """Called on every connection, in each process, before the server waits for its requests.

        It would wait for the longest of the polls otherwise.
        """
        runtime = self.app_state.get("runtime")
        if runtime is not None:
            runtime.drain()
        super().shutdown()


class _Gathering:
    """A transport that sends what one turn of the loop writes at once.

    Head and body are written apart; two system calls, and two packets, cost more than making the answer does.
    """

    __slots__ = ("_loop", "_parts", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._parts.append(data)
        if len(self._parts) == 1:
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._parts:
            data = b"".join(self._parts)
            self._parts.clear()
            self._transport.write(data)
