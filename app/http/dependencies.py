"""What plain FastAPI routes take: strict JSON bodies, and answers that pass stored JSON through."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar
from uuid import UUID

import msgspec
from fastapi import Path, Request, Response

from app.errors import unknown_job
from app.http import json
from app.http.hot import Call, headers_of

T = TypeVar("T")


def call_of(request: Request) -> Call:
    """A plain route's request as the hot routes see theirs."""
    return Call(request.scope, request.receive, headers_of(request.scope))


def json_body(body_type: type[T], *, optional: bool = False) -> Callable[[Request], Awaitable[T]]:
    """A dependency that decodes the body; an `optional` one may be absent, and is then all defaults."""
    decoder = msgspec.json.Decoder(body_type)

    async def decoded(request: Request) -> T:
        limit: int = request.state.max_body_bytes
        if optional and request.headers.get("content-length", "0") == "0" and not _chunked(request):
            return body_type()
        return await call_of(request).body(decoder, limit)

    return decoded


def _chunked(request: Request) -> bool:
    return "transfer-encoding" in request.headers


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer of any type that msgspec encodes."""
    return Response(json.encode(body), status, headers, "application/json")


async def _job_id(id: Annotated[str, Path(description="The job's id.")]) -> UUID:  # noqa: A002
    try:
        return UUID(id)
    except ValueError:
        raise unknown_job(id[:100]) from None


job_id_in_path = _job_id
