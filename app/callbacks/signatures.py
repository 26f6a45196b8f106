"""Senders' own signatures over the raw body. Pure: the secrets, the headers and the time are given.

Sources: Standard Webhooks 1.0; GitHub "Validating webhook deliveries"; Stripe "Verify webhook signatures manually";
Slack "Verifying requests from Slack". Several live secrets, and several signatures in one header, are each tried.
"""

import base64
import binascii
import hmac
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from app.errors import FieldError, invalid
from app.http.wire import Body

DEFAULT_TOLERANCE_SECONDS = 300.0
_SECONDS = re.compile(r"[0-9]{1,12}\Z", re.ASCII)
_TIMED = frozenset({"standard-webhooks", "stripe", "slack"})
_MOST_SIGNATURES = 20

HeaderName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9-]{1,100}$(?!\n)")]


class SignatureCheck(Body, kw_only=True, omit_defaults=True):
    """How a sender signs. The fields from `header` to `timestamp_header` are for the scheme `hmac` only."""

    scheme: Literal["standard-webhooks", "github", "stripe", "slack", "hmac"]
    secret: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$(?!\n)", description="The name of a secret.")
    ]
    header: Annotated[HeaderName | UnsetType, Meta(description="Where the signature is.")] = UNSET
    encoding: Literal["hex", "base64"] | UnsetType = UNSET
    algorithm: Literal["sha1", "sha256", "sha512"] | UnsetType = UNSET
    prefix: Annotated[str, Meta(max_length=50, description="What the header has before the signature.")] | UnsetType = (
        UNSET
    )
    timestamp_header: Annotated[
        HeaderName | UnsetType,
        Meta(description="Where the time is, in Unix seconds; then `{time}.{body}` is signed, else the body."),
    ] = UNSET
    tolerance_seconds: Annotated[
        Annotated[float, Meta(ge=1, le=86_400)] | UnsetType, Meta(description="How old a message may be; 300.")
    ] = UNSET

    def check(self, pointer: str) -> None:
        """Raises Refusal for fields that the scheme does not have, or lacks."""
        if self.scheme == "hmac":
            if self.header is UNSET:
                raise invalid(FieldError(f"{pointer}/header", "is required for the scheme hmac"))
        else:
            for name in ("header", "encoding", "algorithm", "prefix", "timestamp_header"):
                if getattr(self, name) is not UNSET:
                    raise invalid(FieldError(f"{pointer}/{name}", "is for the scheme hmac only"))
        timed = self.scheme in _TIMED or self.timestamp_header is not UNSET
        if self.tolerance_seconds is not UNSET and not timed:
            raise invalid(FieldError(f"{pointer}/tolerance_seconds", "is for messages with a time"))


class _Refused(Exception):
    """The message does not hold, with the reason."""


def verify(
    check: SignatureCheck, secrets: Sequence[str], headers: Mapping[str, str], body: bytes, now: datetime
) -> str | None:
    """None when one of the secrets signed this body, within the tolerance; else why not, with nothing secret in it."""
    try:
        match check.scheme:
            case "standard-webhooks":
                _standard_webhooks(check, secrets, headers, body, now)
            case "github":
                _signed(secrets, body, "sha256", [_hex(_after(_header(headers, "x-hub-signature-256"), "sha256="))])
            case "stripe":
                _stripe(check, secrets, headers, body, now)
            case "slack":
                sent = _header(headers, "x-slack-request-timestamp")
                _in_time(check, sent, now)
                signature = _hex(_after(_header(headers, "x-slack-signature"), "v0="))
                _signed(secrets, f"v0:{sent}:".encode() + body, "sha256", [signature])
            case "hmac":
                _plain(check, secrets, headers, body, now)
    except _Refused as refused:
        return str(refused)
    return None


def _standard_webhooks(
    check: SignatureCheck, secrets: Sequence[str], headers: Mapping[str, str], body: bytes, now: datetime
) -> None:
    message_id, sent = _header(headers, "webhook-id"), _header(headers, "webhook-timestamp")
    _in_time(check, sent, now)
    given = [part[3:] for part in _header(headers, "webhook-signature").split(" ") if part.startswith("v1,")]
    signed = f"{message_id}.{sent}.".encode() + body
    keys = _readable([secret.removeprefix("whsec_") for secret in secrets], _base64, "the secret is not base64")
    _signed(keys, signed, "sha256", _readable(_some(given), _base64))


def _stripe(
    check: SignatureCheck, secrets: Sequence[str], headers: Mapping[str, str], body: bytes, now: datetime
) -> None:
    pairs = [part.strip().partition("=") for part in _header(headers, "stripe-signature").split(",")]
    sent = next((value for name, _, value in pairs if name == "t"), "")
    _in_time(check, sent, now)
    given = [value for name, _, value in pairs if name == "v1"]
    _signed(secrets, f"{sent}.".encode() + body, "sha256", _readable(_some(given), _hex))


def _plain(
    check: SignatureCheck, secrets: Sequence[str], headers: Mapping[str, str], body: bytes, now: datetime
) -> None:
    assert check.header is not UNSET
    signed = body
    if check.timestamp_header is not UNSET:
        sent = _header(headers, check.timestamp_header.lower())
        _in_time(check, sent, now)
        signed = f"{sent}.".encode() + body
    text = _after(_header(headers, check.header.lower()), "" if check.prefix is UNSET else check.prefix)
    signature = _base64(text) if check.encoding == "base64" else _hex(text)
    _signed(secrets, signed, "sha256" if check.algorithm is UNSET else check.algorithm, [signature])


def _signed(secrets: Sequence[str | bytes], message: bytes, algorithm: str, given: list[bytes]) -> None:
    keys = [secret.encode() if isinstance(secret, str) else secret for secret in secrets]
    expected = [hmac.digest(key, message, algorithm) for key in keys]
    # All are compared, whichever fits: the time tells nothing.
    fits = [hmac.compare_digest(each, signature) for each in expected for signature in given]
    if not any(fits):
        raise _Refused("the signature does not match")


def _header(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(name)
    if not value:
        raise _Refused("a header is missing")
    if not value.isascii() or not value.isprintable():
        raise _Refused("a header is malformed")
    return value


def _after(text: str, prefix: str) -> str:
    if not text.startswith(prefix):
        raise _Refused("a header is malformed")
    return text[len(prefix) :]


def _some(given: list[str]) -> list[str]:
    if not 1 <= len(given) <= _MOST_SIGNATURES:
        raise _Refused("a header is malformed")
    return given


def _readable(
    texts: Sequence[str], read: Callable[[str], bytes], otherwise: str = "a header is malformed"
) -> list[bytes]:
    """Those that can be read: a garbled one does not count against a genuine one beside it."""
    found = []
    for text in texts:
        with suppress(_Refused):
            found.append(read(text))
    if texts and not found:
        raise _Refused(otherwise)
    return found


def _hex(text: str) -> bytes:
    try:
        return binascii.unhexlify(text)
    except (binascii.Error, ValueError):
        raise _Refused("a header is malformed") from None


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _Refused("a header is malformed") from None


def _in_time(check: SignatureCheck, sent: str, now: datetime) -> None:
    if not _SECONDS.match(sent):
        raise _Refused("a header is malformed")
    tolerance = DEFAULT_TOLERANCE_SECONDS if check.tolerance_seconds is UNSET else check.tolerance_seconds
    if abs(now.timestamp() - int(sent)) > tolerance:
        raise _Refused("the message's time is outside the tolerance")
