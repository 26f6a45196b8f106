"""Refusals: what a caller is told when something can't be done. No HTTP here; `http/problems.py` maps kinds."""

from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """The classes of refusal, each with one meaning for the caller."""

    MALFORMED = "malformed"
    INVALID = "invalid"
    FORBIDDEN = "forbidden"
    UNKNOWN = "unknown"
    CONFLICT = "conflict"
    GONE = "gone"
    TOO_LARGE = "too large"
    UNSUPPORTED = "unsupported"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"


class Refusal(Exception):
    """A request that was understood and refused; nothing was changed by it.

    `code` is stable and documented in `docs/reference/problems.md`; `facts` are what the caller needs to act
    on it (current state, holder, limit, `retry_after_seconds`), added to the problem document as they are.
    """

    def __init__(self, kind: Kind, code: str, detail: str, **facts: Any) -> None:
        super().__init__(detail)
        self.kind = kind
        self.code = code
        self.detail = detail
        self.facts = facts


class FieldError:
    """One bad field: a JSON pointer into the body (or a parameter's name) and what is wrong with it."""

    __slots__ = ("detail", "pointer")

    def __init__(self, pointer: str, detail: str) -> None:
        self.pointer = pointer
        self.detail = detail


def invalid(*errors: FieldError, code: str = "invalid-field") -> Refusal:
    """The refusal of fields that are well-formed JSON but not what the operation takes."""
    first = errors[0]
    return Refusal(
        Kind.INVALID,
        code,
        f"{first.pointer or 'The body'}: {first.detail}",
        errors=[{"pointer": error.pointer, "detail": error.detail} for error in errors],
    )


def unknown_job(job_id: object) -> Refusal:
    """Missing and not yours look the same."""
    return Refusal(Kind.UNKNOWN, "unknown-job", f"There is no job {job_id}.")


def unknown_dead_letter(job_id: object) -> Refusal:
    """Missing, running again, or never dead: the same answer."""
    return Refusal(Kind.UNKNOWN, "unknown-dead-letter", f"There is no dead letter {job_id}.")


def unavailable(detail: str, retry_after_seconds: float = 1.0) -> Refusal:
    """The database is away, or the outcome of a commit is not known: repeat the request."""
    return Refusal(Kind.UNAVAILABLE, "database-unavailable", detail, retry_after_seconds=retry_after_seconds)
