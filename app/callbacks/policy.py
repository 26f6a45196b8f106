"""Policies: CEL expressions of a wait, or of a hook, over what arrived. Runs only in the evaluator's own process.

Order: `filter` (false: the arrival is ignored), `fail_if`, `complete_if`, `resume_if` (the first that is true
decides), then `transform` of what resolves. Errors are closed: what can't be evaluated decides nothing. AWA has
the same order without `resume_if`, transforms only what its on_complete decided, and counts an error in a filter as
true and in a condition as false.

The CEL runtime is young and native, and its limit on iterations bounds neither time nor memory (a chain of `map`
doubles a text each time). So `evaluator.py` runs this module in a process that can be killed.
"""

import math
import re
from functools import cache, lru_cache
from json import loads
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from app.errors import Refusal
from app.http import json
from app.http.wire import Body

LONGEST = 4000
"""Characters of an expression."""

Expression = Annotated[str, Meta(min_length=1, max_length=LONGEST)]
CONDITIONS = ("filter", "fail_if", "complete_if", "resume_if")
_VERBS = {"fail_if": "fail", "complete_if": "complete", "resume_if": "resume"}
_ANY = msgspec.json.Decoder(msgspec.Raw)
_POSITION = re.compile(r"<input>:(\d+):(\d+): (.*)")
# The runtime's own texts may quote what arrived, which must not come back to its sender.
_REASONS = {
    "NOT_FOUND": "needs something that is not there",
    "UNKNOWN": "compares or combines values of types that do not go together",
    "OUT_OF_RANGE": "leaves the range of a number or a list",
}


class Policy(Body, kw_only=True, omit_defaults=True):
    """What an arrival does to its wait. CEL over `payload`, `headers` and `job`."""

    filter: Annotated[Expression | None, Meta(description="False: the arrival is ignored.")] = None
    fail_if: Annotated[Expression | None, Meta(description="True: as the verb `fail`.")] = None
    complete_if: Annotated[Expression | None, Meta(description="Else true: as the verb `complete`.")] = None
    resume_if: Annotated[Expression | None, Meta(description="Else true: as the verb `resume`.")] = None
    transform: Annotated[Expression | None, Meta(description="Gives the payload that is stored.")] = None


class Arrived(msgspec.Struct):
    """The variables of an expression."""

    payload: msgspec.Raw
    headers: dict[str, str]
    job: msgspec.Raw


class Decision(msgspec.Struct):
    """What a policy decides: nothing (no `verb`), a verb, or to ignore; and the payload, when it is transformed."""

    verb: str | None = None
    ignored: bool = False
    payload: msgspec.Raw | UnsetType = UNSET


class PolicyError(Exception):
    """An expression that could not be evaluated; the reason quotes nothing of what arrived."""

    def __init__(self, expression: str, reason: str) -> None:
        super().__init__(f"{expression} {reason}")
        self.expression = expression
        self.reason = reason


class BadExpression(Exception):
    """An expression that does not compile, and where."""


@cache
def _environment() -> Any:
    from cel_expr_python import cel

    return cel.NewEnv(
        variables={
            "payload": cel.Type.DYN,
            "headers": cel.Type.Map(cel.Type.STRING, cel.Type.STRING),
            "job": cel.Type.Map(cel.Type.STRING, cel.Type.DYN),
        }
    )


@lru_cache(maxsize=1000)
def compiled(text: str, *, condition: bool) -> Any:
    """The compiled expression. Raises BadExpression, with line and column."""
    from cel_expr_python import cel

    try:
        expression = _environment().compile(text)
    except RuntimeError as error:
        found = _POSITION.search(str(error))
        if found is None:
            raise BadExpression("is too long or too deep") from None
        line, column, what = found.groups()
        raise BadExpression(f"line {line}, column {column}: {what.removesuffix(chr(39))}") from None
    kind = expression.return_type()
    if condition and kind not in (cel.Type.BOOL, cel.Type.DYN):
        raise BadExpression(f"must be true or false, and is {kind.name().lower()}")
    return expression


def value_of(name: str, text: str, arrived: Arrived, *, condition: bool = False) -> Any:
    """What an expression gives, as JSON's types. Raises PolicyError."""
    from cel_expr_python import cel

    try:
        value = compiled(text, condition=condition).eval(data=_variables(arrived))
    except RuntimeError:
        raise PolicyError(name, "goes on for too long") from None
    # Errors come as values, and are true.
    if value.type() == cel.Type.ERROR:
        code = str(value.plain_value()).partition(":")[0]
        raise PolicyError(name, _REASONS.get(code, "could not be evaluated"))
    plain = value.plain_value()
    if condition and not isinstance(plain, bool):
        raise PolicyError(name, "gives neither true nor false")
    return plain


def _variables(arrived: Arrived) -> dict[str, Any]:
    return {
        "payload": loads(bytes(arrived.payload)),
        "headers": arrived.headers,
        "job": loads(bytes(arrived.job)),
    }


def decide(policy: Policy, arrived: Arrived) -> Decision:
    """What the policy decides. Raises PolicyError when an expression that counts can't be evaluated."""
    for name in CONDITIONS:
        text = getattr(policy, name)
        if text is None:
            continue
        holds = value_of(name, text, arrived, condition=True)
        if name == "filter":
            if not holds:
                return Decision(ignored=True)
        elif holds:
            return Decision(verb=_VERBS[name], payload=_transformed(policy, arrived))
    return Decision(payload=_transformed(policy, arrived))


def _transformed(policy: Policy, arrived: Arrived) -> msgspec.Raw | UnsetType:
    if policy.transform is None:
        return UNSET
    value = value_of("transform", policy.transform, arrived)
    if not _is_json(value):
        raise PolicyError("transform", "gives something that is no JSON; convert it with string()")
    made = msgspec.Raw(msgspec.json.encode(value))
    try:
        json.decode(made, _ANY)
        json.check(made, "")
    except Refusal:
        raise PolicyError("transform", "gives what can't be stored: a NUL character, or nested too deep") from None
    return made


def _is_json(value: Any) -> bool:
    match value:
        case None | bool() | int() | str():
            return True
        case float():
            return math.isfinite(value)
        case list():
            return all(_is_json(item) for item in value)
        case dict():
            return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    return False
