"""What each callback verb does to a parked job. Pure."""

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
