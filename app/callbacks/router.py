"""Open waits (the worker), and answer callbacks (anyone who holds the URL)."""

from dataclasses import dataclass
from typing import Annotated, Any
from uuid import UUID

import msgspec
import uuid_utils
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from msgspec import Raw

from app.callbacks.park import open_wait
from app.callbacks.read import WaitNow, wait_now
from app.callbacks.resolve import Arrival, Resolution, extend, unknown_callback
from app.callbacks.schemas import (
    CallbackAnswer,
    CallbackStatus,
    CallbackUrls,
    Extended,
    ExtendWait,
    OpenedWait,
    OpenWait,
    WaitState,
)
from app.callbacks.tokens import callback_urls, wait_of, wait_of_any
from app.database.batching import Batcher
from app.database.engine import Database
from app.database.watch import Watch
from app.errors import Kind, Refusal
from app.http import json
from app.http.dependencies import call_of, job_id_in_path, json_body, json_response
from app.http.hot import read_body
from app.http.openapi import documented
from app.jobs.lease import lease_number
from app.settings import Settings
from app.signing import Signer


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What the routes of callbacks use."""

    settings: Settings
    signer: Signer
    database: Database
    arrivals: Batcher[Arrival, Resolution]
    resolved: Watch


def _of(request: Request) -> Callbacks:
    callbacks: Callbacks = request.state.callbacks
    return callbacks


_ANY = msgspec.json.Decoder(Raw)

router = APIRouter(tags=["callbacks"])
JobId = Annotated[UUID, Depends(job_id_in_path)]
Token = Annotated[str, Path(max_length=200, description="From the URL that the worker passed on.")]
WaitSeconds = Annotated[float, Query(ge=0, le=60, description="Wait this long for the callback.")]
_GONE = ("unknown-callback", "callback-conflict", "callback-gone")


@router.post(
    "/v1/jobs/{id}/callbacks",
    **documented(
        {200: OpenedWait, 201: OpenedWait}, "unknown-job", "lease-lost", "wait-name-taken", body=OpenWait,
        summary="Open a wait and get its callback URLs.",
    ),
)  # fmt: skip
async def open_callback(
    request: Request, job_id: JobId, wanted: Annotated[OpenWait, Depends(json_body(OpenWait))]
) -> Response:
    """Do this before you call the outside system. A repeat of the name returns the same wait (200)."""
    callbacks = _of(request)
    wait = await open_wait(
        callbacks.database,
        wait_id=UUID(bytes=uuid_utils.uuid7().bytes),
        job_id=job_id,
        lease_number=lease_number(callbacks.signer, job_id, wanted.lease),
        name=wanted.name,
        default_verb=wanted.default_verb,
        timeout_seconds=wanted.timeout_seconds,
    )
    base_url = callbacks.settings.public_url or str(request.base_url)
    opened = OpenedWait(
        wait_id=wait.id,
        name=wait.name,
        default_verb=wait.default_verb,
        deadline_at=wait.deadline_at,
        urls=CallbackUrls(**callback_urls(callbacks.signer, base_url.rstrip("/"), wait.id)),
    )
    return json_response(opened, 200 if wait.existing else 201)


@router.get(
    "/v1/jobs/{id}/callbacks/{wait_id}",
    **documented({200: WaitState}, "unknown-wait", summary="Read a wait, or wait for its callback."),
)
async def get_wait(request: Request, job_id: JobId, wait_id: UUID, wait_seconds: WaitSeconds = 0) -> Response:
    """For a handler that stays attached. Keep heartbeating meanwhile."""
    callbacks = _of(request)

    async def look() -> WaitNow | None:
        return await wait_now(callbacks.database, wait_id)

    wait = await look()
    if wait is not None and wait.job_id == job_id and wait_seconds and wait.state == "open":
        wait = await callbacks.resolved.until(
            wait_id, wait_seconds, look, lambda found: found is None or found.state != "open"
        )
    if wait is None or wait.job_id != job_id:
        raise Refusal(Kind.UNKNOWN, "unknown-wait", f"The job has no wait {wait_id}.")
    return json_response(
        WaitState(
            wait_id=wait.id,
            name=wait.name,
            state=wait.state,  # type: ignore[arg-type]
            deadline_at=wait.deadline_at,
            resolved_as=wait.resolved_as,
            resolved_at=wait.resolved_at,
            payload=wait.payload,
            job_state=wait.job_state,
        )
    )


@router.get(
    "/v1/callbacks/{token}", **documented({200: CallbackStatus}, "unknown-callback", summary="How the wait stands.")
)
async def get_callback(request: Request, token: Token) -> Response:
    """With the token of any verb. Changes nothing."""
    callbacks = _of(request)
    wait_id = wait_of_any(callbacks.signer, token)
    wait = await wait_now(callbacks.database, wait_id) if wait_id else None
    if wait is None:
        raise unknown_callback()
    return json_response(
        CallbackStatus(
            wait_id=wait.id,
            name=wait.name,
            state=wait.state,  # type: ignore[arg-type]
            deadline_at=wait.deadline_at,
            resolved_as=wait.resolved_as,
            resolved_at=wait.resolved_at,
            job_state=wait.job_state,
        )
    )


@router.post(
    "/v1/callbacks/{token}/heartbeat",
    **documented({200: Extended}, *_GONE, body=ExtendWait, summary="Move the wait's deadline."),
)
async def extend_wait(
    request: Request,
    token: Token,
    wanted: Annotated[ExtendWait, Depends(json_body(ExtendWait, optional=True))],
) -> Response:
    """The outside system is still at it."""
    callbacks = _of(request)
    wait_id = _genuine(callbacks, token, "heartbeat")
    deadline_at = await extend(callbacks.database, wait_id, wanted.timeout_seconds)
    return json_response(Extended(wait_id=wait_id, deadline_at=deadline_at))


async def _payload(request: Request) -> Raw | None:
    """The body, if there is one. Any JSON value is a payload."""
    callbacks = _of(request)
    call = call_of(request)
    if call.header(b"content-type") is None:
        body = await read_body(request.scope, request.receive, callbacks.settings.max_body_bytes)
        if not body:
            return None
        raise Refusal(Kind.UNSUPPORTED, "unsupported-media-type", "Send application/json.")
    body = await call.raw_body(callbacks.settings.max_body_bytes)
    if not body:
        return None
    payload = json.decode(body, _ANY)
    json.check(payload, "")
    return payload


def _genuine(callbacks: Callbacks, token: str, verb: str) -> UUID:
    wait_id = wait_of(callbacks.signer, token, verb)
    if wait_id is None:
        raise unknown_callback()
    return wait_id


async def _resolve(request: Request, token: str, verb: str) -> Response:
    callbacks = _of(request)
    wait_id = _genuine(callbacks, token, verb)
    done = await callbacks.arrivals.submit(Arrival(wait_id, verb, await _payload(request)))
    answer = CallbackAnswer(
        wait_id=done.wait_id,
        name=done.name,
        resolved_as=done.verb,
        resolved_at=done.resolved_at,
        early=done.early,
        already_applied=done.already_applied,
        job_state=done.job_state,
    )
    return json_response(answer, 202 if done.early and not done.already_applied else 200)


@router.post(
    "/v1/callbacks/{token}",
    **documented(
        {200: CallbackAnswer, 202: CallbackAnswer}, *_GONE, body=Any, summary="Answer a wait, as the wait says."
    ),
)
async def answer_callback(request: Request, token: Token) -> Response:
    """Does the wait's default verb. Any JSON value, or none, is the payload."""
    return await _resolve(request, token, "default")


def _verb_route(verb: str, does: str) -> None:
    @router.post(
        f"/v1/callbacks/{{token}}/{verb}",
        operation_id=f"callback_{verb}",
        name=f"callback_{verb}",
        description="Any JSON value, or none, is the payload. Exactly one caller wins; its repeat is told so again.",
        **documented({200: CallbackAnswer, 202: CallbackAnswer}, *_GONE, body=Any, summary=does),
    )
    async def answer(request: Request, token: Token) -> Response:
        return await _resolve(request, token, verb)


for _verb, _does in {
    "complete": "Finish the job with the payload as its result.",
    "fail": "Fail the job.",
    "resume": "Let the job go on, with the payload.",
    "retry": "Start the job again from scratch.",
}.items():
    _verb_route(_verb, _does)
