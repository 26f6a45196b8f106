"""The job on the wire, as producers and operators see it."""

from typing import Annotated, Literal
from uuid import UUID

from msgspec import UNSET, Meta, Raw, UnsetType

from app.http.wire import (
    Answer,
    BackoffPolicy,
    Body,
    DelaySeconds,
    KindName,
    Lease,
    MaxAttempts,
    Page,
    Priority,
    QueueName,
    Reason,
    Tag,
    Time,
    TimeoutSeconds,
)
from app.lifecycle import DEFAULT_PRIORITY


class NewJob(Body, kw_only=True):
    """A job to enqueue. Due at once, or at `run_at`, or after `delay_seconds`; a past time means now."""

    kind: KindName
    queue: QueueName = "default"
    args: Annotated[Raw | UnsetType, Meta(description="Any JSON value; given back equal.")] = UNSET
    priority: Priority = DEFAULT_PRIORITY
    run_at: Time | None = None
    delay_seconds: DelaySeconds | None = None
    max_attempts: MaxAttempts | None = None
    timeout_seconds: TimeoutSeconds | None = None
    backoff: BackoffPolicy | None = None
    start_by: Annotated[
        Time | None, Meta(description="Cancelled with the reason `expired` if not started by then.")
    ] = None
    tags: Annotated[list[Tag], Meta(max_length=20)] = []
    metadata: Annotated[
        Raw | UnsetType, Meta(description="An object for your own use.", extra_json_schema={"type": ["object", "null"]})
    ] = UNSET


class NewJobs(Body, kw_only=True):
    """Many jobs. `atomic`: all or none. `each`: the good ones go in, each bad one is told."""

    jobs: Annotated[list[NewJob], Meta(min_length=1, max_length=1000)]
    mode: Literal["atomic", "each"] = "atomic"


class Receipt(Answer, kw_only=True):
    """The durable answer to an enqueue."""

    id: Annotated[str, Meta(extra_json_schema={"format": "uuid"})]
    queue: str
    kind: str
    state: str
    priority: int
    run_at: Time
    max_attempts: int
    created_at: Time


class BatchItem(Answer, kw_only=True):
    """What became of one job of a batch: a receipt, or the problem with it."""

    index: int
    job: Receipt | None
    problem: Raw | None


class BatchAnswer(Answer, kw_only=True):
    """One item per job, in the order sent."""

    jobs: list[BatchItem]
    enqueued: int
    refused: int


class Wait(Answer, kw_only=True):
    """Something that a parked job waits on, or waited on."""

    wait_id: UUID
    name: str
    state: Literal["open", "resolved", "expired", "superseded"]
    attempt: int
    default_verb: str
    created_at: Time
    deadline_at: Time
    resolved_as: str | None
    resolved_at: Time | None
    early: bool
    payload: Raw
    encoding: str | None
    content_type: str | None
    event: Raw
    hard_deadline_at: Time | None
    hook: str | None
    correlation_key: str | None


class Job(Answer, kw_only=True):
    """Everything about a job. Stored values come back JSON-equal."""

    id: UUID
    queue: str
    kind: str
    state: str
    priority: int
    attempt: int
    max_attempts: int
    snoozes: int
    created_at: Time
    run_at: Time
    start_by: Time | None
    claimed_at: Time | None
    lease_expires_at: Time | None
    deadline_at: Time | None
    finished_at: Time | None
    worker: str | None
    timeout_seconds: float | None
    cancel_reason: str | None
    dead_letter_reason: str | None
    errors_total: int
    errors: Raw
    tags: list[str]
    args: Raw
    result: Raw
    progress: Raw
    checkpoint: Raw
    metadata: Raw
    backoff: Raw
    callback_results: Raw


class JobDetail(Job, kw_only=True):
    """A job with the waits that it opened; while it is parked, with what it waits on."""

    waiting_on: list[UUID]
    answers_needed: int | None
    waits: list[Wait]


class JobPage(Page, kw_only=True):
    """Jobs, newest first."""

    jobs: list[Job]


class JobChanges(Body, kw_only=True):
    """What may change while a job is pending. An absent field stays as it is."""

    priority: Priority | UnsetType = UNSET
    run_at: Time | UnsetType = UNSET
    max_attempts: MaxAttempts | UnsetType = UNSET


class CancelRequest(Body, kw_only=True):
    """Why a job is cancelled; the worker and later callers are told. A worker cancels its own with its `lease`."""

    reason: Reason = ""
    lease: Lease | None = None


class Controlled(Answer, kw_only=True):
    """The job after an operator's verb. A repeat has `already_applied` and changed nothing."""

    id: UUID
    state: str
    attempt: int
    already_applied: bool


class Event(Answer, kw_only=True):
    """One step of a job's history. `enqueue` and `complete` are read off the job's own times."""

    at: Time
    step: str
    state: str | None
    attempt: int
    worker: str | None
    details: Raw


class EventPage(Page, kw_only=True):
    """A job's history, oldest first."""

    events: list[Event]
