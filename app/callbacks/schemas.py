"""Waits and callbacks on the wire."""

from typing import Annotated, Literal
from uuid import UUID

from msgspec import Meta, Raw

from app.http.wire import Answer, Body, Lease, Time, TimeoutSeconds


class OpenWait(Body, kw_only=True):
    """Open a wait before you call the outside system; then park on it."""

    lease: Lease
    name: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$(?!\n)", description="Unique in the attempt.")
    ] = "callback"
    timeout_seconds: TimeoutSeconds = 86_400.0
    default_verb: Annotated[
        Literal["complete", "fail", "resume", "retry"], Meta(description="What the plain URL does.")
    ] = "resume"


class CallbackUrls(Answer, kw_only=True):
    """One capability URL per verb: whoever has it may do that, and nothing else. `status` is for GET."""

    default: str
    complete: str
    fail: str
    resume: str
    retry: str
    heartbeat: str
    status: str


class OpenedWait(Answer, kw_only=True):
    """A wait to park on."""

    wait_id: UUID
    name: str
    default_verb: str
    deadline_at: Time
    urls: CallbackUrls


class WaitState(Answer, kw_only=True):
    """How a wait stands, for a handler that stays attached."""

    wait_id: UUID
    name: str
    state: Literal["open", "resolved", "expired", "superseded"]
    deadline_at: Time
    resolved_as: str | None
    resolved_at: Time | None
    payload: Raw
    job_state: str


class CallbackAnswer(Answer, kw_only=True):
    """The callback counts. `early`: the job had not parked yet, and will find it there (202)."""

    wait_id: UUID
    name: str
    resolved_as: str
    resolved_at: Time
    early: bool
    already_applied: bool
    job_state: str


class CallbackStatus(Answer, kw_only=True):
    """What a holder of a callback URL may know."""

    wait_id: UUID
    name: str
    state: Literal["open", "resolved", "expired", "superseded"]
    deadline_at: Time
    resolved_as: str | None
    resolved_at: Time | None
    job_state: str


class ExtendWait(Body, kw_only=True):
    """How long from now the wait may go on; without it, as long as when it was opened."""

    timeout_seconds: TimeoutSeconds | None = None


class Extended(Answer, kw_only=True):
    """The wait's new deadline."""

    wait_id: UUID
    deadline_at: Time
