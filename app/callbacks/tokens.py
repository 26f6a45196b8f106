"""Callback URLs: a capability per wait and verb. Nothing is stored; a `complete` URL can't resume."""

from uuid import UUID

from app.callbacks.verbs import URL_VERBS
from app.signing import Signer

_PURPOSE = b"callback"


def callback_token(signer: Signer, wait_id: UUID, verb: str) -> str:
    """The token in a callback URL: the wait's id, and a MAC over it and the verb."""
    return signer.token(_PURPOSE, wait_id.bytes, verb.encode())


def wait_of(signer: Signer, token: str, verb: str) -> UUID | None:
    """The wait that a genuine token of this verb is for, else None: unknown and forged look the same."""
    payload = signer.opened(_PURPOSE, token, verb.encode())
    return UUID(bytes=payload) if payload and len(payload) == 16 else None  # noqa: PLR2004


def wait_of_any(signer: Signer, token: str) -> UUID | None:
    """The wait that the token of any verb is for: whoever may change it may also look at it."""
    return next((found for verb in URL_VERBS if (found := wait_of(signer, token, verb))), None)


def callback_urls(signer: Signer, base_url: str, wait_id: UUID) -> dict[str, str]:
    """One URL per verb."""
    urls = {}
    for verb in URL_VERBS:
        path = "" if verb in ("default", "status") else f"/{verb}"
        urls[verb] = f"{base_url}/v1/callbacks/{callback_token(signer, wait_id, verb)}{path}"
    return urls
