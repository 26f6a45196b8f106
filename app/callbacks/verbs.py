"""What each callback verb does to a parked job, alone or as one answer of several. Pure."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from app.lifecycle import (
    CALLBACK_COMPLETE,
    CALLBACK_FAIL,
    CALLBACK_RESUME,
    CALLBACK_RESUME_ATTACHED,
    CALLBACK_RETRY,
    CALLBACK_VERBS,
    Step,
)

URL_VERBS = (*CALLBACK_VERBS, "default", "heartbeat", "status")
"""Every verb that has a URL of its own; `default` does what the wait says."""


class Answered(NamedTuple):
    """How one wait of a park stands: `open`, `expired`, or the verb that resolved it, and when."""

    outcome: str
    resolved_at: str = ""


class Verdict(StrEnum):
    """What the waits of a park, taken together, mean for its job."""

    COMPLETE = "complete"
    RETRY = "retry"
    RESUME = "resume"
    IMPOSSIBLE = "impossible"
    """Too few answers can still come: the job fails, or times out, by what happened last."""
    WAIT = "wait"


def verdict(waits: Sequence[Answered], needed: int) -> Verdict:
    """`complete` and `retry` are about the job and act at once, the earliest first.

    `resume` is an answer and counts; `fail` and a passed deadline are answers that will not come.
    """
    at_once = [wait for wait in waits if wait.outcome in ("complete", "retry")]
    if at_once:
        return Verdict(min(at_once, key=lambda wait: wait.resolved_at).outcome)
    answers = sum(wait.outcome == "resume" for wait in waits)
    if answers >= needed:
        return Verdict.RESUME
    coming = sum(wait.outcome == "open" for wait in waits)
    return Verdict.WAIT if answers + coming >= needed else Verdict.IMPOSSIBLE


def step_of(verb: str, *, handler_attached: bool) -> Step:
    """The lifecycle step of a resolving verb; a resume goes back to a handler that is still there."""
    match verb:
        case "complete":
            return CALLBACK_COMPLETE
        case "fail":
            return CALLBACK_FAIL
        case "retry":
            return CALLBACK_RETRY
        case "resume":
            return CALLBACK_RESUME_ATTACHED if handler_attached else CALLBACK_RESUME
    raise ValueError(verb)


def failure(payload: msgspec.Raw | None) -> msgspec.Raw:
    """The error entry of a job that a callback failed; the payload goes with it."""
    entry = {"message": "The callback failed the job.", "details": payload or msgspec.Raw(b"null")}
    return msgspec.Raw(msgspec.json.encode(entry))
