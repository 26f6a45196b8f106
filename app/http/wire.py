"""Types that more than one capability puts on the wire: names, durations, the base of every body and answer."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

from msgspec import Meta, Struct

from app.errors import FieldError, invalid

QueueName = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,99}$(?!\n)", description="A queue's name.", examples=["default"])
]
KindName = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./:-]{0,199}$(?!\n)",
        description="What sort of work it is: what a worker picks its handler by.",
        examples=["send_email"],
    ),
]
Time = Annotated[datetime, Meta(tz=True, description="RFC 3339, with its offset.")]
Priority = Annotated[int, Meta(ge=1, le=4, description="1 (first) to 4.")]
MaxAttempts = Annotated[int, Meta(ge=1, le=1000, description="Executions that may fail, the first included.")]
LeaseSeconds = Annotated[float, Meta(ge=1, le=86_400)]
TimeoutSeconds = Annotated[float, Meta(ge=1, le=31_536_000)]
RetentionSeconds = Annotated[float, Meta(ge=0, le=315_360_000)]
DelaySeconds = Annotated[float, Meta(ge=0, le=315_360_000)]
Tag = Annotated[str, Meta(min_length=1, max_length=100)]
Reason = Annotated[str, Meta(max_length=1000)]
Lease = Annotated[str, Meta(min_length=1, max_length=200, description="The token that came with the claim.")]


# PostgreSQL's own limit; no place on Earth is further from UTC than 14 hours.
_LARGEST_OFFSET = timedelta(hours=16)


def in_utc(time: datetime, pointer: str) -> datetime:
    """The instant in UTC. Raises Refusal when that is not in the years 1 to 9999: it could be stored, but not read."""
    if abs(time.utcoffset() or timedelta()) >= _LARGEST_OFFSET:
        raise invalid(FieldError(pointer, "has an offset of 16 hours or more"))
    try:
        return time.astimezone(UTC)
    except OverflowError:
        raise invalid(FieldError(pointer, "must be in the years 1 to 9999, in UTC")) from None


class Body(Struct, forbid_unknown_fields=True, kw_only=True):
    """What a caller sends: unknown fields are refused, so that a typing error is never silence."""


class Answer(Struct, kw_only=True):
    """What a caller gets: every field is always there, so that clients can rely on it."""


class BackoffPolicy(Body, omit_defaults=False, kw_only=True):
    """How long a job waits between attempts; `lifecycle.Backoff` says what each field does."""

    kind: Annotated[str, Meta(pattern="^(exponential|linear|fixed)$")] = "exponential"
    base_seconds: Annotated[float, Meta(ge=0, le=31_536_000)] = 2.0
    factor: Annotated[float, Meta(ge=1, le=100)] = 2.0
    cap_seconds: Annotated[float, Meta(ge=0, le=31_536_000)] = 86_400.0
    jitter: Annotated[float, Meta(ge=0, le=1)] = 0.25


class Page(Answer, kw_only=True):
    """Where a list goes on: pass it as `cursor`; null at the end."""

    next_cursor: str | None


class Problem(Answer, kw_only=True):
    """RFC 9457. `type` is stable; further members are facts to act on, such as `state` or `retry_after_seconds`."""

    type: str
    title: str
    status: int
    detail: str
