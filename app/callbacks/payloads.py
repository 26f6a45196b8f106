"""What a callback came with, as received and as parsed. Pure.

JSON is a value, a form an object of texts, `text/…` a text; anything else is base64. A CloudEvent (structured or
binary mode) is its data, and its attributes are kept beside it. What PostgreSQL or another reader could not hold
is refused, as everywhere.
"""

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from json import loads
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec
from msgspec import Raw

from app.errors import FieldError, Kind, Refusal, invalid
from app.http import json

_ANY = msgspec.json.Decoder(Raw)
_MOST_FIELDS = 1000
# Python knows codecs that are no character sets, and some that grow what they read.
_CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "ascii", "iso-8859-1", "latin-1", "windows-1252", "utf-16"})
_KEPT = frozenset(
    {
        "content-type", "user-agent", "webhook-id", "webhook-timestamp", "idempotency-key", "x-request-id",
        "x-github-event", "x-github-delivery", "traceparent",
    }
)  # fmt: skip
_MOST_KEPT = 30
_LONGEST_KEPT = 500
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# The standard library's parser of mail headers fails at some of what an outsider may send, and takes its time.
_MEDIA_TYPE = re.compile(r"\s*([\w!#$&^.+-]+/[\w!#$&^.+-]+)\s*(?:;|$)", re.ASCII)
_PARAMETER = re.compile(r';\s*([\w*-]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^;"\s]*)', re.ASCII)
_ATTRIBUTES = ("id", "source", "type", "subject", "time", "datacontenttype", "dataschema")
_REQUIRED = ("id", "source", "type")


@dataclass(frozen=True, slots=True)
class Payload:
    """`value` is JSON (None: there was no body); `encoding` says what it was made of; `body` are the bytes.

    `headers` are all of the request's, for policies and signatures; `kept_headers` the few that are stored.
    """

    value: Raw | None
    encoding: str
    content_type: str | None
    body: bytes
    headers: dict[str, str]
    kept_headers: dict[str, str]
    event: dict[str, str] | None


NO_PAYLOAD = Payload(None, "none", None, b"", {}, {}, None)


def parse(raw_headers: Sequence[tuple[bytes, bytes]], body: bytes) -> Payload:
    """What these headers and this body are. Raises Refusal: not what they claim to be, or not to be stored."""
    headers: dict[str, str] = {}
    for name, value in raw_headers:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    content_type = headers.get("content-type")
    media_type, charset = _media_type(content_type)
    event: dict[str, str] | None = None
    if media_type.startswith("application/cloudevents-batch"):
        raise Refusal(Kind.UNSUPPORTED, "unsupported-media-type", "Send one CloudEvent, not a batch of them.")
    if media_type == "application/cloudevents+json":
        event, parsed, encoding = _structured(body)
    else:
        if "ce-specversion" in headers:
            event = _binary(headers, [name.decode("latin-1").lower() for name, _ in raw_headers])
        parsed, encoding = _parsed(media_type, charset, body)
    return Payload(parsed, encoding, _cut(content_type), body, headers, _kept(headers), event)


def _media_type(content_type: str | None) -> tuple[str, str]:
    """The type and the charset; what is no media type says nothing of its bytes."""
    found = _MEDIA_TYPE.match(content_type or "")
    if content_type is None or found is None:
        return "application/octet-stream", "utf-8"
    parameters = (match.groups() for match in _PARAMETER.finditer(content_type))
    charset = next((value for name, value in parameters if name.lower() == "charset"), "utf-8")
    return found[1].lower(), charset.strip('"').lower()


def _parsed(media_type: str, charset: str, body: bytes) -> tuple[Raw | None, str]:
    if not body:
        return None, "none"
    if media_type == "application/json" or media_type.endswith("+json"):
        return _stored(body), "json"
    if media_type == "application/x-www-form-urlencoded":
        return _of(_form(_decoded(body, charset))), "form"
    if media_type.startswith("text/") or media_type == "application/xml" or media_type.endswith("+xml"):
        return _of(_decoded(body, charset)), "text"
    return _of(base64.b64encode(body).decode()), "base64"


def _stored(body: bytes) -> Raw:
    value = json.decode(body, _ANY)
    json.check(value, "")
    return value


def _of(value: Any) -> Raw:
    return _stored(msgspec.json.encode(value))


def _decoded(body: bytes, charset: str) -> str:
    if charset not in _CHARSETS:
        raise _malformed("The body's charset is not known here: send UTF-8.")
    try:
        return body.decode(charset)
    except UnicodeDecodeError:
        raise _malformed("The body is not in the charset that its content type says.") from None


def _form(text: str) -> dict[str, str | list[str]]:
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS, errors="strict")
    except (ValueError, UnicodeDecodeError):
        raise _malformed(f"The body is no form of at most {_MOST_FIELDS} fields, in UTF-8.") from None
    fields: dict[str, str | list[str]] = {}
    for name, value in pairs:
        before = fields.get(name)
        if before is None:
            fields[name] = value
        elif isinstance(before, list):
            before.append(value)
        else:
            fields[name] = [before, value]
    return fields


def _malformed(detail: str) -> Refusal:
    return Refusal(Kind.MALFORMED, "malformed-body", detail)


def _structured(body: bytes) -> tuple[dict[str, str], Raw | None, str]:
    members = json.decode(body, _EVENT)
    # The outermost object comes last: what is left are its names, as they were written.
    _single(loads(body.decode(), object_pairs_hook=lambda pairs: [name for name, _ in pairs]), "", "/{}")
    event = _event({name: _text(members, name) for name in members if name in (*_ATTRIBUTES, "specversion")}, "/{}")
    if "data" in members and "data_base64" in members:
        raise invalid(FieldError("/data_base64", "is there beside data"))
    if "data_base64" in members:
        text = _text(members, "data_base64")
        try:
            base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise invalid(FieldError("/data_base64", "is no base64")) from None
        return event, _of(text), "base64"
    if "data" not in members:
        return event, None, "none"
    json.check(members["data"], "/data")
    return event, members["data"], "json"


_EVENT = msgspec.json.Decoder(dict[str, Raw])


def _text(members: dict[str, Raw], name: str) -> str:
    try:
        return msgspec.json.decode(members[name], type=str)
    except msgspec.MsgspecError:
        raise invalid(FieldError(f"/{name}", "must be a text")) from None


def _binary(headers: dict[str, str], names: list[str]) -> dict[str, str]:
    _single(names, "ce-", "ce-{}")
    found = {name: headers[f"ce-{name}"] for name in (*_ATTRIBUTES, "specversion") if f"ce-{name}" in headers}
    return _event({name: _unquoted(name, value) for name, value in found.items()}, "ce-{}")


def _unquoted(name: str, value: str) -> str:
    # Strictly: ids that differ must not become the same.
    try:
        text = unquote(value, errors="strict")
    except UnicodeDecodeError:
        raise invalid(FieldError(f"ce-{name}", "is not percent-encoded UTF-8")) from None
    if "\0" in text:
        raise invalid(FieldError(f"ce-{name}", "has a NUL character, which can't be stored"))
    return text


def _single(names: list[str], prefix: str, pointer: str) -> None:
    """Readers disagree on which of two counts."""
    for name in (*_ATTRIBUTES, "specversion", "data", "data_base64"):
        if names.count(prefix + name) > 1:
            raise invalid(FieldError(pointer.format(name), "is there twice"))


def _event(attributes: dict[str, str], pointer: str) -> dict[str, str]:
    if attributes.get("specversion") != "1.0":
        raise invalid(FieldError(pointer.format("specversion"), "must be 1.0"))
    for name in _REQUIRED:
        if not attributes.get(name):
            raise invalid(FieldError(pointer.format(name), "is required in a CloudEvent"))
    return {name: value for name, value in attributes.items() if name != "specversion"}


def _kept(headers: dict[str, str]) -> dict[str, str]:
    kept = [(name, _cut(value)) for name, value in headers.items() if name in _KEPT or name.startswith("ce-")]
    return {_CONTROL.sub("", name)[:100]: value or "" for name, value in kept[:_MOST_KEPT]}


def _cut(value: str | None) -> str | None:
    return None if value is None else _CONTROL.sub("", value)[:_LONGEST_KEPT]
