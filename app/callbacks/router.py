"""The worker's routes: open waits, see how they stand, rotate or revoke their URLs, list what is parked."""

from dataclasses import dataclass
from typing import Annotated
from uuid import UUID

import uuid_utils
from fastapi import APIRouter, Depends, Query, Request, Response
from msgspec import structs

from app.callbacks.open import OpenedWait as Opened
from app.callbacks.open import open_wait
from app.callbacks.read import find_wait, job_waits, list_parked, received_body, refused_callbacks
from app.callbacks.resolve import Arrival, Resolution, Resolver
from app.callbacks.rotate import rotate
from app.callbacks.schemas import (
    CallbackResult,
    CallbackUrls,
    JobWaits,
    OpenedWait,
    OpenWait,
    ParkedPage,
    RotatedUrls,
    WaitDetail,
    WaitState,
)
from app.callbacks.tokens import Capability, callback_urls
from app.database.batching import Batcher
from app.database.engine import Database
from app.database.watch import Watch
from app.errors import Kind, Refusal
from app.http.dependencies import job_id_in_path, json_body, json_response
from app.http.openapi import documented
from app.http.pagination import PageCursor, PageLimit
from app.http.rates import Rates
from app.jobs.lease import lease_number
from app.lifecycle import State
from app.settings import Settings
from app.signing import Signer


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What the routes of callbacks use."""

    settings: Settings
    signer: Signer
    database: Database
    resolver: Resolver
    arrivals: Batcher[Arrival, Resolution]
    resolved: Watch
    unparked: Watch
    rates: Rates


def callbacks_of(request: Request) -> Callbacks:
    """What the routes of callbacks use in this process."""
    callbacks: Callbacks = request.state.callbacks
    return callbacks


router = APIRouter(tags=["callbacks"])
JobId = Annotated[UUID, Depends(job_id_in_path)]
WaitSeconds = Annotated[float, Query(ge=0, le=60, description="Wait this long for the callback.")]
QueueFilter = Annotated[str | None, Query(max_length=100)]


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
    """Do this before you call the outside system. A repeat of the name returns the same wait (200).

    So does the name of a wait that an earlier attempt got a `resume` on: `callback` then has the answer.
    """
    callbacks = callbacks_of(request)
    wanted.check()
    wait = await open_wait(
        callbacks.database,
        callbacks.resolver,
        wait_id=UUID(bytes=uuid_utils.uuid7().bytes),
        job_id=job_id,
        lease_number=lease_number(callbacks.signer, job_id, wanted.lease),
        wanted=wanted,
    )
    answer = OpenedWait(
        wait_id=wait.id,
        name=wait.name,
        state=wait.state,  # type: ignore[arg-type]
        default_verb=wait.default_verb,
        deadline_at=wait.deadline_at,
        hard_deadline_at=wait.hard_deadline_at,
        urls=_urls(request, Capability(wait.id, wait.url_version)),
        callback=_came(wait),
    )
    return json_response(answer, 200 if wait.existing else 201)


def _came(wait: Opened) -> CallbackResult | None:
    if wait.resolved_as is None:
        return None
    return CallbackResult.of(
        wait.id, wait.name, wait.resolved_as, wait.payload, wait.encoding, wait.content_type, wait.event
    )


def _urls(request: Request, wait: Capability) -> CallbackUrls:
    callbacks = callbacks_of(request)
    base_url = callbacks.settings.public_url or str(request.base_url)
    return CallbackUrls(**callback_urls(callbacks.signer, base_url.rstrip("/"), wait))


@router.get(
    "/v1/jobs/{id}/callbacks",
    **documented({200: JobWaits}, "unknown-job", summary="Read a job's waits, or wait until it is parked no more."),
)
async def get_waits(request: Request, job_id: JobId, wait_seconds: WaitSeconds = 0) -> Response:
    """For a handler that stays attached to several waits. Keep heartbeating meanwhile."""
    callbacks = callbacks_of(request)

    async def look() -> JobWaits:
        return await job_waits(callbacks.database, job_id)

    waits = await look()
    if wait_seconds and waits.job_state == State.WAITING_EXTERNAL:
        waits = await callbacks.unparked.until(
            job_id, wait_seconds, look, lambda found: found.job_state != State.WAITING_EXTERNAL
        )
    return json_response(waits)


@router.get(
    "/v1/jobs/{id}/callbacks/{wait_id}",
    **documented({200: WaitDetail}, "unknown-wait", summary="Read a wait, or wait for its callback."),
)
async def get_wait(request: Request, job_id: JobId, wait_id: UUID, wait_seconds: WaitSeconds = 0) -> Response:
    """For a handler that stays attached. Keep heartbeating meanwhile."""
    callbacks = callbacks_of(request)

    async def look() -> WaitState | None:
        found = await find_wait(callbacks.database, wait_id)
        return found[0] if found else None

    wait = await look()
    if wait is not None and wait.job_id == job_id and wait_seconds and wait.state == "open":
        wait = await callbacks.resolved.until(
            wait_id, wait_seconds, look, lambda found: found is None or found.state != "open"
        )
    if wait is None or wait.job_id != job_id:
        raise _unknown_wait(wait_id)
    refused = await refused_callbacks(callbacks.database, wait_id)
    return json_response(WaitDetail(**structs.asdict(wait), refused=refused))


@router.get(
    "/v1/jobs/{id}/callbacks/{wait_id}/body",
    **documented({200: None}, "unknown-wait", summary="The bytes that a callback came with."),
)
async def get_wait_body(request: Request, job_id: JobId, wait_id: UUID) -> Response:
    """As they were received, and never as what they claim to be: they are somebody else's."""
    body = await received_body(callbacks_of(request).database, job_id, wait_id)
    if body is None:
        raise _unknown_wait(wait_id)
    headers = {"content-disposition": "attachment", "x-content-type-options": "nosniff"}
    return Response(body, headers=headers, media_type="application/octet-stream")


@router.post(
    "/v1/jobs/{id}/callbacks/{wait_id}/rotate",
    **documented({200: RotatedUrls}, "unknown-wait", "wait-not-open", summary="New URLs; the old ones are unknown."),
)
async def rotate_urls(request: Request, job_id: JobId, wait_id: UUID) -> Response:
    """For a URL that got into the wrong hands. From this answer on, all URLs given out before are refused."""
    version = await rotate(callbacks_of(request).database, job_id, wait_id)
    return json_response(RotatedUrls(wait_id=wait_id, urls=_urls(request, Capability(wait_id, version))))


@router.post(
    "/v1/jobs/{id}/callbacks/{wait_id}/revoke",
    **documented({204: None}, "unknown-wait", "wait-not-open", summary="Make the wait's URLs unknown."),
)
async def revoke_urls(request: Request, job_id: JobId, wait_id: UUID) -> Response:
    """The wait goes on, until its deadline, or until its hook or new URLs (`rotate`) answer it."""
    await rotate(callbacks_of(request).database, job_id, wait_id)
    return Response(status_code=204)


@router.get("/v1/waits", **documented({200: ParkedPage}, summary="List what is parked, and since when."))
async def list_waits(
    request: Request,
    queue: QueueFilter = None,
    hook: QueueFilter = None,
    cursor: PageCursor = None,
    limit: PageLimit = 50,
) -> Response:
    """The open waits that jobs are parked on, the oldest first."""
    waits, next_cursor = await list_parked(
        callbacks_of(request).database, queue=queue, hook=hook, cursor=cursor, limit=limit
    )
    return json_response(ParkedPage(waits=waits, next_cursor=next_cursor))


def _unknown_wait(wait_id: UUID) -> Refusal:
    return Refusal(Kind.UNKNOWN, "unknown-wait", f"The job has no wait {wait_id}.")
