"""The few hot routes: handlers on the raw request, dispatched before FastAPI's machinery.

They cost a fifth of a usual route. Apart from that they are like any other: same operations, same errors, same
OpenAPI, made from the same types. A handler takes a `Call` and returns a `Reply`:

    async def complete(call: Call) -> Reply:
        report = await call.body(COMPLETE)
        return Reply(200, await runtime.settle(...))
"""

import itertools
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import msgspec

from app.errors import Kind, Refusal, unknown_job
from app.http import json
from app.http.problems import MEDIA_TYPE, answer_to
from app.http.protocol import Protocol
from app.http.request_id import REQUEST_ID

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

T = TypeVar("T")

_JSON = (b"content-type", b"application/json")
_PROBLEM = (b"content-type", MEDIA_TYPE.encode())
_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,100}\Z")


class ClientGone(Exception):
    """The client closed the connection: there is nobody to answer."""


class Reply(NamedTuple):
    """Status, body (any type that msgspec encodes) and extra headers."""

    status: int
    body: Any
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Call(msgspec.Struct):
    """One request on a hot route."""

    scope: Scope
    receive: Receive
    headers: dict[bytes, bytes]
    """By lower-case name; of several with one name, the first."""
    job_id: UUID | None = None

    @property
    def runtime(self) -> Any:
        """The process's long-lived objects, put there by the lifespan."""
        return self.scope["state"]["runtime"]

    @property
    def connection(self) -> Protocol:
        """The client's connection, which tells when it is lost."""
        connection: Protocol = self.scope["state"]["connection"]
        return connection

    def header(self, name: bytes) -> str | None:
        """The first header of this (lower-case) name."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    async def read(self, limit: int) -> bytes:
        """The whole body, of any type, refused as soon as it is known to be larger than `limit` bytes."""
        declared = self.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            chunks.append(chunk)
            if not message.get("more_body"):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def raw_body(self, limit: int) -> bytes:
        """The whole body. Raises Refusal: no JSON media type, or more than `limit` bytes."""
        given = self.headers.get(b"content-type", b"")
        if given != b"application/json":
            media_type = given.decode("latin-1").partition(";")[0].strip().lower()
            if media_type != "application/json":
                raise Refusal(
                    Kind.UNSUPPORTED,
                    "unsupported-media-type",
                    f"Send application/json, not {media_type or 'a body without a content type'}.",
                )
        return await self.read(limit)

    async def body(self, decoder: "msgspec.json.Decoder[T]", limit: int) -> T:
        """The body as the decoder's type. Raises Refusal when it is not."""
        return json.decode(await self.raw_body(limit), decoder)

    async def envelope(self, decoder: "msgspec.json.Decoder[T]", limit: int) -> T:
        """The body of a batch call, whose items are still to be decoded. Raises Refusal when it is none."""
        return json.decode_envelope(await self.raw_body(limit), decoder)


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """A request's headers by name; of several with one name, the first."""
    return dict(reversed(scope["headers"]))


def _too_large(limit: int) -> Refusal:
    return Refusal(Kind.TOO_LARGE, "too-large", f"The body has more than {limit} bytes.", limit=limit)


Handler = Callable[[Call], Awaitable[Reply]]


@dataclass(frozen=True)
class HotRoute:
    """A handler and what the OpenAPI document says of it. `{id}` in the path is a job's id."""

    path: str
    handler: Handler
    operation_id: str
    summary: str
    body: Any
    answers: dict[int, Any]
    problems: tuple[str, ...] = ()
    tag: str = "work"
    headers: dict[str, str] = field(default_factory=dict)
    """Request headers by name, with what each is for."""


class HotRoutes:
    """ASGI: answers the hot routes, which are all POST, and passes everything else on."""

    def __init__(self, app: App, routes: tuple[HotRoute, ...]) -> None:
        self._app = app
        self._fixed = {route.path: route.handler for route in routes if "{id}" not in route.path}
        self._process = secrets.token_hex(6).encode()
        self._count = itertools.count(1)
        self._of_job = {route.path.rpartition("/")[2]: route.handler for route in routes if "{id}" in route.path}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a hot route, or pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers_given = headers_of(scope)
        request_id = self._request_id(headers_given)
        handler, job = self._match(scope)
        if handler is None:
            await self._app(scope, receive, with_request_id(send, request_id))
            return
        try:
            reply = await handler(Call(scope, receive, headers_given, _job_id(job) if job is not None else None))
            status, body, headers = reply.status, json.encode(reply.body), (_JSON, *reply.headers)
        except ClientGone:
            return
        except Exception as error:
            status, body, extra = answer_to(error)
            headers = (_PROBLEM, *((key.encode(), value.encode()) for key, value in extra.items()))
        start = [*headers, (b"content-length", b"%d" % len(body)), (b"x-request-id", request_id)]
        await send({"type": "http.response.start", "status": status, "headers": start})
        await send({"type": "http.response.body", "body": body})

    def _match(self, scope: Scope) -> tuple[Handler | None, str | None]:
        if scope["method"] != "POST":
            return None, None
        path: str = scope["path"]
        handler = self._fixed.get(path)
        if handler is None and path.startswith("/v1/jobs/"):
            job, _, verb = path[9:].partition("/")
            return self._of_job.get(verb), job
        return handler, None

    def _request_id(self, headers: dict[bytes, bytes]) -> bytes:
        given = headers.get(b"x-request-id")
        # Counted, not drawn: randomness is a system call.
        request_id = given if given and _REQUEST_ID.match(given) else b"%s-%x" % (self._process, next(self._count))
        REQUEST_ID.set(request_id)
        return request_id


def _job_id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise unknown_job(text[:100]) from None


def with_request_id(send: Send, request_id: bytes) -> Send:
    """Adds the request's id to an answer that the framework makes."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id)]
        await send(message)

    return sending
