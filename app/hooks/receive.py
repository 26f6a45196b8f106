"""What arrives at a hook: who sent it, whether it is for us, what it is about, and whether it came before."""

import hashlib
from typing import Any
from uuid import UUID

import msgspec

from app.callbacks import signatures
from app.callbacks.correlation import Delivery
from app.callbacks.evaluator import Text
from app.callbacks.payloads import Payload
from app.callbacks.policy import Arrived, PolicyError
from app.callbacks.resolve import Resolver, unsigned
from app.database.engine import Database
from app.errors import Kind, Refusal
from app.hooks.schemas import Hook, HookSettings
from app.secrets.operations import secret_values

_IDENTIFYING = ("webhook-id", "x-github-delivery", "idempotency-key")
_LONGEST = 500


def texts_of(hook: Hook | HookSettings) -> list[Text]:
    """A hook's expressions, in the order in which they are evaluated."""
    texts = (("filter", hook.filter), ("correlation", hook.correlation), ("delivery_id", hook.delivery_id))
    return [Text(f"/{name}", text, condition=name == "filter") for name, text in texts if text is not None]


async def check_sender(database: Database, resolver: Resolver, hook: Hook, payload: Payload) -> None:
    """Raises Refusal unless the hook's signature check, if it has one, holds. Time is the database's."""
    if hook.signature is None:
        return
    async with database.hot.connection() as connection:
        secrets = await secret_values(connection, resolver.vault, [hook.signature.secret])
        row = await (await connection.execute("SELECT now()")).fetchone()
    assert row
    reason = signatures.verify(
        hook.signature, secrets.get(hook.signature.secret, []), payload.headers, payload.body, row[0]
    )
    if reason:
        raise unsigned(reason)


async def delivery_of(resolver: Resolver, hook: Hook, payload: Payload, new_id: UUID) -> Delivery | None:
    """The delivery, or None when the hook's filter lets it pass. Raises Refusal: an expression fails."""
    texts = texts_of(hook)
    arrived = Arrived(payload.value or msgspec.Raw(b"null"), payload.headers, msgspec.Raw(b"{}"))
    try:
        values = await resolver.evaluator.values(texts, arrived)
    except PolicyError as error:
        raise _failed(error.expression, error.reason) from None
    given = {text.name: value for text, value in zip(texts, values, strict=False)}
    if given.get("/filter") is False:
        return None
    key = _text(given, "/correlation")
    delivery_id = _text(given, "/delivery_id") if hook.delivery_id else _identity(payload)
    return Delivery(new_id, hook.name, delivery_id, key, payload)


def _text(given: dict[str, Any], name: str) -> str:
    value = given[name]
    text = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
    if not text or len(text) > _LONGEST or "\0" in text:
        raise _failed(name, f"gives no text of 1 to {_LONGEST} characters and no whole number")
    return text


def _failed(name: str, reason: str) -> Refusal:
    return Refusal(Kind.INVALID, "hook-failed", f"The hook's {name[1:]} {reason}.", expression=name[1:])


def _identity(payload: Payload) -> str:
    for header in _IDENTIFYING:
        if payload.headers.get(header):
            return f"{header} {payload.headers[header]}"[:_LONGEST]
    if payload.event:
        return msgspec.json.encode([payload.event["source"], payload.event["id"]]).decode()[:_LONGEST]
    return "sha256 " + hashlib.sha256(payload.body).hexdigest()
