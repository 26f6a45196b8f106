"""Waits and callbacks on the wire."""

from typing import Annotated, Literal, Self
from uuid import UUID

from msgspec import Meta, Raw, Struct

from app.callbacks.policy import Policy
from app.callbacks.signatures import SignatureCheck
from app.errors import FieldError, invalid
from app.http.wire import Answer, Body, Lease, Page, Time, TimeoutSeconds

HookName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$(?!\n)")]
CorrelationKey = Annotated[
    str, Meta(min_length=1, max_length=500, pattern=r"^[^\x00]*$", description="What the hook finds in what arrives.")
]
Verb = Literal["complete", "fail", "resume", "retry"]
WaitStanding = Literal["open", "resolved", "expired", "superseded"]


class Correlation(Body, kw_only=True):
    """Answered by a webhook that cannot carry our URL: by the delivery at `hook` whose key is `key`."""

    hook: HookName
    key: CorrelationKey


class Confirm(Body, kw_only=True):
    """A page for people: a callback URL that is opened in a browser shows it, and its button posts."""

    title: Annotated[str, Meta(min_length=1, max_length=200)]
    text: Annotated[str, Meta(max_length=4000)] = ""
    button: Annotated[str, Meta(min_length=1, max_length=100)] = "Confirm"


class WaitSettings(Struct, kw_only=True, omit_defaults=True):
    """The rules of a wait, as they are stored."""

    policy: Policy | None = None
    signature: SignatureCheck | None = None
    confirm: Confirm | None = None


class OpenWait(Body, kw_only=True):
    """Open a wait before you call the outside system; then park on it."""

    lease: Lease
    name: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$(?!\n)", description="Unique in the job.")
    ] = "callback"
    timeout_seconds: TimeoutSeconds = 86_400.0
    max_timeout_seconds: Annotated[
        TimeoutSeconds | None, Meta(description="No heartbeat of the callback moves the deadline beyond this.")
    ] = None
    default_verb: Annotated[Verb, Meta(description="What the plain URL does.")] = "resume"
    policy: Annotated[Policy | None, Meta(description="Decides what an arrival does; CEL expressions.")] = None
    signature: Annotated[SignatureCheck | None, Meta(description="Arrivals must be signed by their sender.")] = None
    correlation: Correlation | None = None
    confirm: Confirm | None = None

    def kept_settings(self) -> WaitSettings:
        """The part that is stored as it is."""
        return WaitSettings(policy=self.policy, signature=self.signature, confirm=self.confirm)

    def check(self) -> None:
        """Raises Refusal for what the types can't say."""
        if self.max_timeout_seconds is not None and self.max_timeout_seconds < self.timeout_seconds:
            raise invalid(FieldError("/max_timeout_seconds", "must not be less than timeout_seconds"))
        if self.policy == Policy():
            raise invalid(FieldError("/policy", "has no expression"))
        if self.signature:
            self.signature.check("/signature")


class CallbackUrls(Answer, kw_only=True):
    """One capability URL per verb: whoever has it may do that, and nothing else. `status` is for GET."""

    default: str
    complete: str
    fail: str
    resume: str
    retry: str
    heartbeat: str
    status: str


class RotatedUrls(Answer, kw_only=True):
    """The only URLs of the wait that count."""

    wait_id: UUID
    urls: CallbackUrls


class CallbackResult(Answer, kw_only=True):
    """What arrived on a wait."""

    wait_id: UUID
    name: str
    verb: str
    payload: Raw
    encoding: Annotated[str | None, Meta(description="What `payload` was made of: json, form, text, base64, or none.")]
    content_type: str | None
    event: Annotated[Raw, Meta(description="The attributes of a CloudEvent, or null.")]

    @classmethod
    def of(
        cls,
        wait_id: UUID,
        name: str,
        verb: str,
        payload: str | None,
        encoding: str | None,
        content_type: str | None,
        event: str | None,
    ) -> Self:
        """From stored values, which are JSON as text."""
        return cls(
            wait_id=wait_id,
            name=name,
            verb=verb,
            payload=Raw((payload or "null").encode()),
            encoding=encoding,
            content_type=content_type,
            event=Raw((event or "null").encode()),
        )


class OpenedWait(Answer, kw_only=True):
    """A wait to park on. `callback` is there when its answer came before, to an earlier attempt or a hook."""

    wait_id: UUID
    name: str
    state: WaitStanding
    default_verb: str
    deadline_at: Time
    hard_deadline_at: Time | None
    urls: CallbackUrls
    callback: CallbackResult | None


class RefusedCallback(Answer, kw_only=True):
    """A callback that resolved nothing, and why."""

    received_at: Time
    verb: str
    reason: str
    encoding: str
    content_type: str | None
    headers: Raw
    body_base64: str | None


class WaitState(Answer, kw_only=True):
    """How a wait stands, and what came."""

    wait_id: UUID
    job_id: UUID
    name: str
    state: WaitStanding
    default_verb: str
    created_at: Time
    deadline_at: Time
    hard_deadline_at: Time | None
    resolved_as: str | None
    resolved_at: Time | None
    early: bool
    payload: Raw
    encoding: str | None
    content_type: str | None
    headers: Raw
    event: Raw
    hook: str | None
    correlation_key: str | None
    settings: Raw
    job_state: str


class WaitDetail(WaitState, kw_only=True):
    """A wait with the callbacks that did not resolve it."""

    refused: list[RefusedCallback]


class JobWaits(Answer, kw_only=True):
    """All waits of a job, oldest first, and what the job is parked on."""

    job_state: str
    waiting_on: list[UUID]
    answers_needed: int | None
    waits: list[WaitState]


class ParkedWait(Answer, kw_only=True):
    """An open wait that a job is parked on, and since when."""

    wait_id: UUID
    name: str
    job_id: UUID
    queue: str
    kind: str
    parked_at: Time | None
    deadline_at: Time
    hard_deadline_at: Time | None
    default_verb: str
    hook: str | None
    correlation_key: str | None


class ParkedPage(Page, kw_only=True):
    """What is parked, the oldest waits first."""

    waits: list[ParkedWait]


class CallbackAnswer(Answer, kw_only=True):
    """The callback counts. `early`: the job had not parked yet, and will find it there (202).

    `ignored`: the wait's filter let it pass; the wait is still open.
    """

    wait_id: UUID
    name: str
    resolved_as: str | None
    resolved_at: Time | None
    early: bool
    ignored: bool
    already_applied: bool
    job_state: str


class CallbackStatus(Answer, kw_only=True):
    """What a holder of a callback URL may know."""

    wait_id: UUID
    name: str
    state: WaitStanding
    deadline_at: Time
    resolved_as: str | None
    resolved_at: Time | None
    job_state: str


class ExtendWait(Body, kw_only=True):
    """How long from now the wait may go on; without it, as long as when it was opened."""

    timeout_seconds: TimeoutSeconds | None = None


class Extended(Answer, kw_only=True):
    """The wait's new deadline, never beyond its hard one."""

    wait_id: UUID
    deadline_at: Time
    hard_deadline_at: Time | None
