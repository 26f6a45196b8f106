"""A cheap HTTP client: one keep-alive connection, requests as bytes. A library would be measured, not the service."""

import asyncio
from typing import Any, Self

import msgspec


class Connection:
    """One connection, one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, url: str) -> Self:
        """Connect to a server's base URL."""
        host, _, port = url.removeprefix("http://").partition(":")
        return cls(*await asyncio.open_connection(host, int(port), limit=1 << 26))

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """The status and the JSON of the answer."""
        sent = body if isinstance(body, bytes) else msgspec.json.encode(body)
        self._writer.write(
            b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % (path.encode(), len(sent))
            + sent
        )
        head = await self._reader.readuntil(b"\r\n\r\n")
        at = head.lower().index(b"content-length:") + 15
        content = await self._reader.readexactly(int(head[at : head.index(b"\r", at)]))
        return int(head[9:12]), msgspec.json.decode(content) if content else None

    def close(self) -> None:
        """Hang up."""
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
