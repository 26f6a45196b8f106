"""The third party's routes: whoever holds a callback URL may do what its verb says, and needs no account."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Path, Request, Response

from app.callbacks import confirm
from app.callbacks.payloads import Payload, parse
from app.callbacks.read import find_wait
from app.callbacks.resolve import Arrival, extend, unknown_callback
from app.callbacks.router import callbacks_of
from app.callbacks.schemas import (
    CallbackAnswer,
    CallbackStatus,
    Confirm,
    Extended,
    ExtendWait,
    WaitSettings,
    WaitState,
)
from app.callbacks.tokens import Capability, wait_of, wait_of_any
from app.errors import Refusal
from app.http.dependencies import call_of, json_body, json_response
from app.http.openapi import documented

router = APIRouter(tags=["callbacks"])
Token = Annotated[str, Path(max_length=200, description="From the URL that the worker passed on.")]
ANY_BODY = ("application/x-www-form-urlencoded", "text/plain", "application/octet-stream")
_REFUSALS = ("unknown-callback", "callback-conflict", "callback-gone", "too-many-callbacks")
_RULES = ("malformed-body", "signature-refused", "policy-failed", "policy-disagrees")
_SETTINGS = msgspec.json.Decoder(WaitSettings)


@contextmanager
def guarded(request: Request) -> Iterator[None]:
    """A request of an outsider: cut off when too many of its source's were refused."""
    source = request.client.host if request.client else "unknown"
    with callbacks_of(request).rates.source(source):
        yield


def _genuine(request: Request, token: str, verb: str) -> Capability:
    callbacks = callbacks_of(request)
    wait = wait_of(callbacks.signer, token, verb)
    if wait is None:
        raise unknown_callback()
    callbacks.rates.admit_to_wait(wait.wait_id)
    return wait


async def _seen(request: Request, token: str) -> WaitState:
    """The wait that a token of any verb is for, if its URLs still count."""
    callbacks = callbacks_of(request)
    wait = wait_of_any(callbacks.signer, token)
    found = await find_wait(callbacks.database, wait.wait_id) if wait else None
    if wait is None or found is None or found[1] != wait.url_version:
        raise unknown_callback()
    return found[0]


async def received(request: Request) -> Payload:
    """What a request brought: any media type, within the limit, which holds before anything is parsed."""
    body = await call_of(request).read(callbacks_of(request).settings.max_body_bytes)
    return parse(request.scope["headers"], body)


@router.get(
    "/v1/callbacks/{token}",
    **documented(
        {200: CallbackStatus}, "unknown-callback", "too-many-callbacks", summary="How the wait stands; changes nothing."
    ),
)
async def get_callback(request: Request, token: Token) -> Response:
    """With the token of any verb. In a browser, the wait's own page, if it has one."""
    return await _look(request, token, "default")


async def _look(request: Request, token: str, verb: str) -> Response:
    """Pressing a link in a mail changes nothing: the page has a button, which posts to where it came from."""
    with guarded(request):
        wait = await _seen(request, token)
    page = _page_of(request, wait)
    if page is None:
        return _status(wait)
    can_post = wait_of(callbacks_of(request).signer, token, verb) is not None
    return _html(confirm.question(page, is_open=wait.state == "open" and can_post))


def _status(wait: WaitState) -> Response:
    return json_response(
        CallbackStatus(
            wait_id=wait.wait_id,
            name=wait.name,
            state=wait.state,
            deadline_at=wait.deadline_at,
            resolved_as=wait.resolved_as,
            resolved_at=wait.resolved_at,
            job_state=wait.job_state,
        ),
        headers={"cache-control": "no-store"},
    )


@router.post(
    "/v1/callbacks/{token}/heartbeat",
    **documented({200: Extended}, *_REFUSALS, body=ExtendWait, summary="Move the wait's deadline."),
)
async def extend_wait(
    request: Request,
    token: Token,
    wanted: Annotated[ExtendWait, Depends(json_body(ExtendWait, optional=True))],
) -> Response:
    """The outside system is still at it. The deadline never goes beyond the wait's hard one."""
    with guarded(request):
        wait = _genuine(request, token, "heartbeat")
        deadline_at, hard = await extend(callbacks_of(request).database, *wait, wanted.timeout_seconds)
    return json_response(Extended(wait_id=wait.wait_id, deadline_at=deadline_at, hard_deadline_at=hard))


@router.post(
    "/v1/callbacks/{token}",
    **documented(
        {200: CallbackAnswer, 202: CallbackAnswer}, *_REFUSALS, *_RULES, body=Any, other_bodies=ANY_BODY,
        summary="Answer a wait, as the wait says.",
    ),
)  # fmt: skip
async def answer_callback(request: Request, token: Token) -> Response:
    """Does the wait's default verb, or what its policy decides. Any body, or none, is the payload."""
    return await _answer(request, token, "default")


def _verb_route(verb: str, does: str) -> None:
    @router.post(
        f"/v1/callbacks/{{token}}/{verb}",
        operation_id=f"callback_{verb}",
        name=f"callback_{verb}",
        description="Any body, or none, is the payload. Exactly one caller wins; its repeat is told so again.",
        **documented(
            {200: CallbackAnswer, 202: CallbackAnswer}, *_REFUSALS, *_RULES, body=Any, other_bodies=ANY_BODY,
            summary=does,
        ),
    )  # fmt: skip
    async def answer(request: Request, token: Token) -> Response:
        return await _answer(request, token, verb)

    @router.get(
        f"/v1/callbacks/{{token}}/{verb}",
        operation_id=f"get_callback_{verb}",
        name=f"get_callback_{verb}",
        description="In a browser, the wait's own page, if it has one: its button posts to this URL.",
        **documented(
            {200: CallbackStatus}, "unknown-callback", "too-many-callbacks",
            summary="How the wait stands; changes nothing.",
        ),
    )  # fmt: skip
    async def look(request: Request, token: Token) -> Response:
        return await _look(request, token, verb)


for _verb, _does in {
    "complete": "Finish the job with the payload as its result.",
    "fail": "Fail the job, or say that this answer will not come.",
    "resume": "Let the job go on, with the payload.",
    "retry": "Start the job again from scratch.",
}.items():
    _verb_route(_verb, _does)


async def _answer(request: Request, token: str, verb: str) -> Response:
    callbacks = callbacks_of(request)
    with guarded(request):
        wait = _genuine(request, token, verb)
        arrival = Arrival(wait.wait_id, verb, await received(request), wait.url_version)
        try:
            done = await callbacks.arrivals.submit(arrival)
        except Refusal as refusal:
            page = await _page_after(request, token)
            if page is None:
                raise
            return _html(confirm.outcome(page, refusal.detail), 409)
    page = await _page_after(request, token)
    if page:
        return _html(confirm.outcome(page, "This was recorded before." if done.already_applied else "Recorded."))
    answer = CallbackAnswer(
        wait_id=done.wait_id,
        name=done.name,
        resolved_as=done.verb,
        resolved_at=done.resolved_at,
        early=done.early,
        ignored=done.ignored,
        already_applied=done.already_applied,
        job_state=done.job_state,
    )
    return json_response(answer, 202 if done.early and not done.already_applied else 200)


def _page_of(request: Request, wait: WaitState) -> Confirm | None:
    """The wait's page, for a browser."""
    if "text/html" not in request.headers.get("accept", ""):
        return None
    return _SETTINGS.decode(wait.settings).confirm


async def _page_after(request: Request, token: str) -> Confirm | None:
    if "text/html" not in request.headers.get("accept", ""):
        return None
    return _page_of(request, await _seen(request, token))


def _html(page: str, status: int = 200) -> Response:
    return Response(page, status, confirm.HEADERS, "text/html; charset=utf-8")
