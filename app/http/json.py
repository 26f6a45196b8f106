"""JSON at the door: what PostgreSQL, or another reader, could not hold is refused before anything happens.

Stored values pass through as the bytes that came (`msgspec.Raw`), so integers beyond 2^53 and long decimals
come back equal. The price is that nobody parses them: this module looks at the bytes instead, and parses only
a text that could be out of bounds.

Limits: depth 64; numbers within a double's range (no overflow, no underflow to zero); integers of at most
1,000 digits; no NUL character, no lone surrogate, no NaN or Infinity.
"""

import json
import math
import re
from typing import Any, TypeVar

import msgspec

from app.errors import FieldError, Kind, Refusal, invalid

MAX_DEPTH = 64
MAX_DIGITS = 1000
# A body wraps its values in a few levels of its own; beyond this the parser itself would give up.
_MAX_BODY_DEPTH = MAX_DEPTH + 8

T = TypeVar("T")

_SUSPECT = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])|(?:^|[\s:,\[])-?[0-9.]+[eE]|[0-9]{300}")
_LONG_NUMBER = 300
_ALIKE = bytes.maketrans(b"123456789E", b"000000000e")
# Possessive, and a text that does not end is taken to its end: looking for the end again from each of its quotes
# would take hours.
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_ONE_PAIR = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_PATH_STEP = re.compile(r"\.([^.\[]+)|\[([^\]]*)\]")

encode = msgspec.json.Encoder(decimal_format="number").encode


def decode(body: bytes | msgspec.Raw, decoder: "msgspec.json.Decoder[T]", pointer: str = "") -> T:
    """The body as the decoder's type, or a refusal: 400 when it is no JSON, 422 with a pointer otherwise."""
    raw = bytes(body)
    _check_shape(raw, _MAX_BODY_DEPTH, pointer)
    _check_suspects(raw, pointer)
    return _typed(raw, decoder, pointer)


def decode_envelope(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    """The body of a batch call, whose items are `msgspec.Raw`: each is to be decoded, and refused, by itself."""
    _check_encoding(body)
    return _typed(body, decoder, "")


def decode_all(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    """The body of a batch call with its items, looked at once for all of them; a bad one refuses all.

    How deep the stored values are is for `check` to say, value by value.
    """
    _check_encoding(body)
    _check_suspects(body, "")
    return _typed(body, decoder, "")


def check(value: msgspec.Raw, pointer: str) -> None:
    """Refuse a stored value, decoded as a part of its body, that is too deep; `pointer` names it."""
    _check_shape(bytes(value), MAX_DEPTH, pointer)


def _typed(raw: bytes, decoder: "msgspec.json.Decoder[T]", pointer: str) -> T:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise invalid(_located(str(error), pointer)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refusal(Kind.MALFORMED, "malformed-json", f"The body is not JSON: {error}.") from None


def _check_shape(raw: bytes, max_depth: int, pointer: str) -> None:
    _check_encoding(raw)
    if raw.count(b"[") + raw.count(b"{") > max_depth and _deeper(raw, max_depth):
        raise invalid(FieldError(pointer, f"is nested deeper than {MAX_DEPTH}"))


def _check_encoding(raw: bytes) -> None:
    if not raw.isascii():
        try:
            raw.decode()
        except UnicodeDecodeError as error:
            raise Refusal(Kind.MALFORMED, "malformed-json", f"The body is not UTF-8: {error.reason}.") from None


def _check_suspects(raw: bytes, pointer: str) -> None:
    # Mostly nothing of the kind is there, which is told a few times faster than by an expression.
    alike = raw.translate(_ALIKE)
    if b"0e" not in alike and b"\\u" not in raw and (len(raw) < _LONG_NUMBER or b"0" * _LONG_NUMBER not in alike):
        return
    # An exponent stands where a number does: ids and tokens are full of what looks like one.
    if not _SUSPECT.search(raw):
        return
    try:
        parsed = json.loads(raw.decode(), parse_int=_whole, parse_float=_decimal, parse_constant=_constant)
    except json.JSONDecodeError:
        return  # the typed decoder says it better
    _check_values(parsed, pointer)


def _deeper(raw: bytes, levels: int) -> bool:
    """Whether brackets outside of texts are nested deeper. Each pass takes the innermost pairs away."""
    brackets = _TEXT.sub(b"", raw).translate(_ONE_PAIR, _NO_BRACKETS)
    for _ in range(levels):
        fewer = brackets.replace(b"[]", b"")
        if len(fewer) == len(brackets):
            return brackets.count(b"[") > levels
        brackets = fewer
    return b"[" in brackets


class _Unstorable:
    """Stands in the parsed tree for what can't be stored, so that the walk can say where it is."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def _whole(digits: str) -> "_Unstorable | None":
    if len(digits) > MAX_DIGITS:
        return _Unstorable(f"is an integer of more than {MAX_DIGITS} digits")
    return None


def _decimal(literal: str) -> "_Unstorable | None":
    value = float(literal)
    if math.isinf(value):
        return _Unstorable("is a number beyond a double's range")
    if value == 0 and re.search("[1-9]", re.split("[eE]", literal)[0]):
        return _Unstorable("is a number below a double's range")
    if len(literal) > MAX_DIGITS:
        return _Unstorable(f"is a number of more than {MAX_DIGITS} digits")
    return None


def _constant(name: str) -> _Unstorable:
    return _Unstorable(f"is {name}, which is no JSON")


def _check_values(value: Any, pointer: str) -> None:
    match value:
        case _Unstorable():
            raise invalid(FieldError(pointer, value.reason))
        case str():
            if "\0" in value:
                raise invalid(FieldError(pointer, "has a NUL character (\\u0000), which can't be stored"))
            if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
                raise invalid(FieldError(pointer, "has a lone surrogate, which is no Unicode text"))
        case dict():
            for key, item in value.items():
                _check_values(key, pointer)
                _check_values(item, f"{pointer}/{_escaped(key)}")
        case list():
            for index, item in enumerate(value):
                _check_values(item, f"{pointer}/{index}")


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _located(message: str, pointer: str) -> FieldError:
    """Msgspec's "… - at `$.jobs[3].kind`" as a JSON pointer, behind the given one, and a sentence."""
    text, _, path = message.partition(" - at `$")
    steps = (match[1] or match[2] for match in _PATH_STEP.finditer(path.rstrip("`")))
    pointer += "".join("/" + _escaped(step) for step in steps)
    unknown = re.match("Object (?:contains unknown|missing required) field `(.*)`", text)
    if unknown:
        pointer += "/" + _escaped(unknown[1])
        return FieldError(pointer, "is required" if "missing" in text else "is not a field that is known here")
    return FieldError(pointer, text[0].lower() + text[1:])
