"""Callback URLs: a capability per wait and verb. Nothing is stored; a `complete` URL can't resume."""

from typing import NamedTuple
from uuid import UUID

from app.callbacks.verbs import URL_VERBS
from app.signing import Signer

_PURPOSE = b"callback"
_ID_BYTES = 16
_VERSION_BYTES = 2


class Capability(NamedTuple):
    """What a genuine token is for. It counts only while the wait's URLs are of this version."""

    wait_id: UUID
    url_version: int


def callback_token(signer: Signer, wait: Capability, verb: str) -> str:
    """The token in a callback URL: the wait's id, the version of its URLs, and a MAC over both and the verb."""
    payload = wait.wait_id.bytes + wait.url_version.to_bytes(_VERSION_BYTES, "big")
    return signer.token(_PURPOSE, payload, verb.encode())


def wait_of(signer: Signer, token: str, verb: str) -> Capability | None:
    """The wait that a genuine token of this verb is for, else None: unknown and forged look the same."""
    payload = signer.opened(_PURPOSE, token, verb.encode())
    # Tokens without a version were made before URLs could be rotated.
    if payload is None or len(payload) not in (_ID_BYTES, _ID_BYTES + _VERSION_BYTES):
        return None
    return Capability(UUID(bytes=payload[:_ID_BYTES]), int.from_bytes(payload[_ID_BYTES:], "big"))


def wait_of_any(signer: Signer, token: str) -> Capability | None:
    """The wait that the token of any verb is for: whoever may change it may also look at it."""
    return next((found for verb in URL_VERBS if (found := wait_of(signer, token, verb))), None)


def callback_urls(signer: Signer, base_url: str, wait: Capability) -> dict[str, str]:
    """One URL per verb."""
    urls = {}
    for verb in URL_VERBS:
        path = "" if verb in ("default", "status") else f"/{verb}"
        urls[verb] = f"{base_url}/v1/callbacks/{callback_token(signer, wait, verb)}{path}"
    return urls
