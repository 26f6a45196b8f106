"""The routes of hooks: define them, and let webhooks in."""

from typing import Annotated, Any
from uuid import UUID

import uuid_utils
from fastapi import APIRouter, Depends, Path, Request, Response

from app.callbacks.answer_router import ANY_BODY, guarded, received
from app.callbacks.correlation import deliver
from app.callbacks.router import callbacks_of
from app.database.engine import Database
from app.hooks import definitions
from app.hooks.receive import check_sender, delivery_of, texts_of
from app.hooks.schemas import Hook, HookAnswer, HookPage, HookSettings
from app.http.dependencies import json_body, json_response
from app.http.openapi import documented
from app.http.pagination import PageCursor, PageLimit

router = APIRouter(prefix="/v1/hooks", tags=["hooks"])
Name = Annotated[str, Path(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$", description="The hook's name.")]


def _database(request: Request) -> Database:
    return callbacks_of(request).database


@router.get("", **documented({200: HookPage}, summary="List hooks by name."))
async def list_hooks(request: Request, cursor: PageCursor = None, limit: PageLimit = 50) -> Response:
    """Their secrets are named, never shown."""
    hooks, next_cursor = await definitions.list_hooks(_database(request), cursor, limit)
    return json_response(HookPage(hooks=hooks, next_cursor=next_cursor))


@router.get("/{name}", **documented({200: Hook}, "unknown-hook", summary="Read a hook."))
async def get_hook(request: Request, name: Name) -> Response:
    """As it was put."""
    return json_response(await definitions.get_hook(_database(request), name))


@router.put("/{name}", **documented({200: Hook, 201: Hook}, body=HookSettings, summary="Make a hook, or change it."))
async def put_hook(
    request: Request, name: Name, settings: Annotated[HookSettings, Depends(json_body(HookSettings))]
) -> Response:
    """The whole of it: what is not given is at its default. Counts for what arrives from then on."""
    if settings.signature:
        settings.signature.check("/signature")
    await callbacks_of(request).resolver.evaluator.check(texts_of(settings))
    hook, is_new = await definitions.put_hook(_database(request), name, settings)
    return json_response(hook, 201 if is_new else 200)


@router.delete("/{name}", **documented({204: None}, "unknown-hook", summary="Remove a hook."))
async def delete_hook(request: Request, name: Name) -> Response:
    """With what it has kept. Waits for its keys go on until their deadlines."""
    await definitions.delete_hook(_database(request), name)
    return Response(status_code=204)


@router.post(
    "/{name}",
    **documented(
        {200: HookAnswer, 202: HookAnswer}, "unknown-hook", "malformed-body", "signature-refused", "hook-failed",
        "too-many-callbacks", body=Any, other_bodies=ANY_BODY, summary="A webhook arrives.",
    ),
)  # fmt: skip
async def receive(request: Request, name: Name) -> Response:
    """Resolves the waits of its key, by their own rules; kept for later when there is none yet."""
    callbacks = callbacks_of(request)
    with guarded(request):
        hook = await definitions.get_hook(callbacks.database, name)
        callbacks.rates.admit_to_hook(name)
        payload = await received(request)
        await check_sender(callbacks.database, callbacks.resolver, hook, payload)
        delivery = await delivery_of(callbacks.resolver, hook, payload, UUID(bytes=uuid_utils.uuid7().bytes))
    if delivery is None:
        return json_response(HookAnswer(id=None, matched=0, kept=False, ignored=True, already_applied=False))
    delivered = await deliver(callbacks.database, callbacks.resolver, delivery)
    callbacks.resolved.hint(delivered.wait_ids)
    callbacks.unparked.hint(delivered.job_ids)
    kept = delivered.matched == 0
    return json_response(
        HookAnswer(
            id=delivered.id,
            matched=delivered.matched,
            kept=kept,
            ignored=False,
            already_applied=delivered.already_applied,
        ),
        202 if kept and not delivered.already_applied else 200,
    )
