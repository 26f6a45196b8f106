"""The schema on a page. Typed definitions for Core statements; the CHECKs come from the lifecycle's sets.

Migrations build the real thing, in plain SQL; a test compares the two catalogues.
"""

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    ForeignKey,
    Identity,
    Index,
    Integer,
    MetaData,
    SmallInteger,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, DOUBLE_PRECISION, JSONB, TIMESTAMP
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from app.lifecycle import CALLBACK_VERBS, DUE_LATER, FINAL, MAX_ATTEMPTS_RANGE, PENDING, PRIORITIES, State

SCHEMA = "towpath"
metadata = MetaData(schema=SCHEMA)


class Table(DeclarativeBase):
    """Base of the definitions: used as tables in Core statements, never as mapped objects."""

    metadata = metadata
    type_annotation_map = {
        str: Text(),
        float: DOUBLE_PRECISION(),
        datetime: TIMESTAMP(timezone=True),
        dict[str, Any]: JSONB(),
        list[str]: ARRAY(Text()),
        list[UUID]: ARRAY(Uuid()),
    }


def one_of(column: str, values: "frozenset[State] | tuple[str, ...]") -> str:
    """An SQL condition that a text column has one of the values, in a stable order."""
    return f"{column} IN ({', '.join(repr(str(value)) for value in sorted(values))})"


def _range(column: str, numbers: range) -> str:
    return f"{column} BETWEEN {numbers.start} AND {numbers.stop - 1}"


_NAME = r"'^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,99}$'"
_PLAIN_NAME = r"'^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$'"
_YEAR = "BETWEEN 1 AND 31536000"
_DECADE = "BETWEEN 0 AND 315360000"


class Queue(Table):
    """One row per queue, made on first use; every setting can be edited while jobs run."""

    __tablename__ = "queues"

    name: Mapped[str] = mapped_column(primary_key=True)
    paused: Mapped[bool] = mapped_column(server_default=text("false"))
    paused_at: Mapped[datetime | None]
    max_attempts: Mapped[int] = mapped_column(server_default=text("20"))
    lease_seconds: Mapped[float] = mapped_column(server_default=text("60"))
    timeout_seconds: Mapped[float | None] = mapped_column(server_default=text("3600"))
    backoff: Mapped[dict[str, Any]] = mapped_column(
        server_default=text(
            """'{"kind": "exponential", "base_seconds": 2, "factor": 2, "cap_seconds": 86400, "jitter": 0.25}'"""
        )
    )
    aging_seconds: Mapped[float | None] = mapped_column(server_default=text("600"))
    completed_retention_seconds: Mapped[float | None] = mapped_column(server_default=text("86400"))
    failed_retention_seconds: Mapped[float | None] = mapped_column(server_default=text("604800"))
    cancelled_retention_seconds: Mapped[float | None] = mapped_column(server_default=text("604800"))
    keep_dead_letters: Mapped[bool] = mapped_column(server_default=text("true"))
    dead_letter_retention_seconds: Mapped[float | None]
    created_at: Mapped[datetime] = mapped_column(server_default=text("now()"))
    updated_at: Mapped[datetime] = mapped_column(server_default=text("now()"))

    __table_args__ = (
        CheckConstraint(f"name ~ {_NAME}", "queues_name"),
        CheckConstraint("paused = (paused_at IS NOT NULL)", "queues_paused_at"),
        CheckConstraint(_range("max_attempts", MAX_ATTEMPTS_RANGE), "queues_max_attempts"),
        CheckConstraint("lease_seconds BETWEEN 1 AND 86400", "queues_lease_seconds"),
        CheckConstraint(f"timeout_seconds {_YEAR}", "queues_timeout_seconds"),
        CheckConstraint(f"aging_seconds {_YEAR}", "queues_aging_seconds"),
        CheckConstraint(f"completed_retention_seconds {_DECADE}", "queues_completed_retention"),
        CheckConstraint(f"failed_retention_seconds {_DECADE}", "queues_failed_retention"),
        CheckConstraint(f"cancelled_retention_seconds {_DECADE}", "queues_cancelled_retention"),
        CheckConstraint(f"dead_letter_retention_seconds {_DECADE}", "queues_dead_letter_retention"),
    )


class Job(Table):
    """One row per job, from enqueue to retention; narrow columns that every step rewrites come first."""

    __tablename__ = "jobs"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    queue: Mapped[str]
    kind: Mapped[str]
    state: Mapped[str]
    priority: Mapped[int] = mapped_column(SmallInteger, server_default=text("2"))
    attempt: Mapped[int] = mapped_column(server_default=text("0"))
    max_attempts: Mapped[int]
    snoozes: Mapped[int] = mapped_column(server_default=text("0"))
    lease_number: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    errors_total: Mapped[int] = mapped_column(server_default=text("0"))
    run_at: Mapped[datetime]
    claim_order: Mapped[datetime]
    created_at: Mapped[datetime] = mapped_column(server_default=text("now()"))
    claimed_at: Mapped[datetime | None]
    lease_expires_at: Mapped[datetime | None]
    deadline_at: Mapped[datetime | None]
    start_by: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    lease_seconds: Mapped[float | None]
    timeout_seconds: Mapped[float | None]
    claim_id: Mapped[UUID | None]
    waiting_on: Mapped[list[UUID] | None]
    worker: Mapped[str | None]
    settled_as: Mapped[str | None]
    cancel_reason: Mapped[str | None]
    dead_letter_reason: Mapped[str | None]
    tags: Mapped[list[str]] = mapped_column(server_default=text("'{}'"))
    backoff: Mapped[dict[str, Any] | None]
    metadata_: Mapped[dict[str, Any] | None] = mapped_column("metadata")
    progress: Mapped[dict[str, Any] | None]
    checkpoint: Mapped[dict[str, Any] | None]
    callback_results: Mapped[dict[str, Any] | None]
    errors: Mapped[dict[str, Any] | None]
    result: Mapped[dict[str, Any] | None]
    args: Mapped[dict[str, Any]]
    answers_needed: Mapped[int | None] = mapped_column(SmallInteger)

    __table_args__ = (
        # The length apart: a bounded repetition costs twenty times as much, at every step of a job.
        CheckConstraint(r"queue ~ '^[A-Za-z0-9_][A-Za-z0-9_.:-]*$' AND length(queue) <= 100", "jobs_queue"),
        CheckConstraint(r"kind ~ '^[A-Za-z0-9_][A-Za-z0-9_./:-]*$' AND length(kind) <= 200", "jobs_kind"),
        CheckConstraint(one_of("state", frozenset(State)), "jobs_state"),
        CheckConstraint(_range("priority", PRIORITIES), "jobs_priority"),
        CheckConstraint(_range("max_attempts", MAX_ATTEMPTS_RANGE), "jobs_max_attempts"),
        CheckConstraint("attempt BETWEEN 0 AND max_attempts", "jobs_attempt"),
        # What may be claimed has an attempt left, so that a claim can't fail for one job of its set.
        CheckConstraint(f"attempt < max_attempts OR NOT ({one_of('state', PENDING)})", "jobs_attempt_left"),
        CheckConstraint(f"timeout_seconds {_YEAR}", "jobs_timeout_seconds"),
        CheckConstraint(f"({one_of('state', FINAL)}) = (finished_at IS NOT NULL)", "jobs_final_time"),
        CheckConstraint(
            f"state <> '{State.RUNNING}' OR (lease_expires_at IS NOT NULL AND claim_id IS NOT NULL"
            " AND lease_number > 0 AND attempt > 0)",
            "jobs_running_lease",
        ),
        CheckConstraint(
            f"lease_expires_at IS NULL OR {one_of('state', frozenset({State.RUNNING, State.WAITING_EXTERNAL}))}",
            "jobs_lease_ended",
        ),
        CheckConstraint(f"(state = '{State.WAITING_EXTERNAL}') = (waiting_on IS NOT NULL)", "jobs_wait"),
        CheckConstraint(
            "(waiting_on IS NULL) = (answers_needed IS NULL)"
            " AND (answers_needed IS NULL OR answers_needed BETWEEN 1 AND cardinality(waiting_on))",
            "jobs_answers_needed",
        ),
        CheckConstraint(f"dead_letter_reason IS NULL OR state = '{State.FAILED}'", "jobs_dead_letter"),
        # What is next?
        Index("jobs_next", "queue", "claim_order", "id", postgresql_where=text(f"state = '{State.AVAILABLE}'")),
        # Who holds what? Lease columns are in no index, so that a heartbeat is a HOT update.
        Index("jobs_held", "queue", "claim_id", postgresql_where=text(f"state = '{State.RUNNING}'")),
        # What is due?
        Index("jobs_due", "run_at", postgresql_where=text(one_of("state", DUE_LATER))),
        # What was not started in time?
        Index(
            "jobs_start_by", "start_by", postgresql_where=text(f"start_by IS NOT NULL AND {one_of('state', PENDING)}")
        ),
        # What may retention delete?
        Index("jobs_final", "queue", "state", "finished_at", postgresql_where=text(one_of("state", FINAL))),
    )


class Wait(Table):
    """What a parked job waits on. It belongs to one lease: a new claim makes it stale without touching it."""

    __tablename__ = "waits"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    job_id: Mapped[UUID] = mapped_column(ForeignKey(Job.id, ondelete="CASCADE"))
    lease_number: Mapped[int] = mapped_column(BigInteger)
    attempt: Mapped[int]
    name: Mapped[str]
    state: Mapped[str] = mapped_column(server_default=text("'open'"))
    default_verb: Mapped[str] = mapped_column(server_default=text("'resume'"))
    created_at: Mapped[datetime] = mapped_column(server_default=text("now()"))
    timeout_seconds: Mapped[float]
    deadline_at: Mapped[datetime]
    resolved_as: Mapped[str | None]
    resolved_at: Mapped[datetime | None]
    early: Mapped[bool] = mapped_column(server_default=text("false"))
    payload: Mapped[dict[str, Any] | None]
    url_version: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"))
    hard_deadline_at: Mapped[datetime | None]
    max_timeout_seconds: Mapped[float | None]
    hook: Mapped[str | None]
    correlation_key: Mapped[str | None]
    settings: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    encoding: Mapped[str | None]
    content_type: Mapped[str | None]
    headers: Mapped[dict[str, Any] | None]
    event: Mapped[dict[str, Any] | None]
    body: Mapped[bytes | None]

    __table_args__ = (
        CheckConstraint(one_of("state", ("expired", "open", "resolved")), "waits_state"),
        CheckConstraint(one_of("default_verb", CALLBACK_VERBS), "waits_default_verb"),
        CheckConstraint(one_of("resolved_as", CALLBACK_VERBS), "waits_resolved_as"),
        CheckConstraint(f"timeout_seconds {_YEAR}", "waits_timeout"),
        CheckConstraint(
            "(state = 'resolved') = (resolved_as IS NOT NULL AND resolved_at IS NOT NULL)", "waits_resolution"
        ),
        UniqueConstraint("job_id", "lease_number", "name", name="waits_name_once"),
        CheckConstraint("max_timeout_seconds BETWEEN timeout_seconds AND 31536000", "waits_max_timeout"),
        CheckConstraint("(hook IS NULL) = (correlation_key IS NULL)", "waits_correlation"),
        CheckConstraint(
            "(hard_deadline_at IS NULL) = (max_timeout_seconds IS NULL)"
            " AND (hard_deadline_at IS NULL OR deadline_at <= hard_deadline_at)",
            "waits_hard_deadline",
        ),
        # Which wait is over?
        Index("waits_over", "deadline_at", postgresql_where=text("state = 'open'")),
        # Who waits for this key?
        Index(
            "waits_correlated", "hook", "correlation_key", postgresql_where=text("state = 'open' AND hook IS NOT NULL")
        ),
    )


class Secret(Table):
    """A sender's secret, encrypted; after a change the previous value may still count for a while."""

    __tablename__ = "secrets"

    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[bytes]
    previous: Mapped[bytes | None]
    previous_until: Mapped[datetime | None]
    created_at: Mapped[datetime] = mapped_column(server_default=text("now()"))
    updated_at: Mapped[datetime] = mapped_column(server_default=text("now()"))

    __table_args__ = (
        CheckConstraint(f"name ~ {_PLAIN_NAME}", "secrets_name"),
        CheckConstraint("(previous IS NULL) = (previous_until IS NULL)", "secrets_previous"),
    )


class Hook(Table):
    """Where webhooks arrive that cannot carry a callback URL."""

    __tablename__ = "hooks"

    name: Mapped[str] = mapped_column(primary_key=True)
    secret: Mapped[str | None] = mapped_column(ForeignKey(Secret.name, name="hooks_secret"))
    signature: Mapped[dict[str, Any] | None]
    correlation: Mapped[str]
    filter: Mapped[str | None]
    delivery_id: Mapped[str | None]
    keep_seconds: Mapped[float]
    created_at: Mapped[datetime] = mapped_column(server_default=text("now()"))
    updated_at: Mapped[datetime] = mapped_column(server_default=text("now()"))

    __table_args__ = (
        CheckConstraint(f"name ~ {_PLAIN_NAME}", "hooks_name"),
        CheckConstraint("keep_seconds BETWEEN 60 AND 2592000", "hooks_keep_seconds"),
        CheckConstraint("(signature IS NULL) = (secret IS NULL)", "hooks_signature"),
    )


class HookDelivery(Table):
    """What arrived at a hook: kept for a wait that is opened later, and so that a repeat does nothing twice."""

    __tablename__ = "hook_deliveries"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    hook: Mapped[str] = mapped_column(ForeignKey(Hook.name, name="hook_deliveries_hook", ondelete="CASCADE"))
    delivery_id: Mapped[str]
    correlation_key: Mapped[str]
    received_at: Mapped[datetime] = mapped_column(server_default=text("now()"))
    expires_at: Mapped[datetime]
    matched: Mapped[int] = mapped_column(server_default=text("0"))
    encoding: Mapped[str]
    content_type: Mapped[str | None]
    headers: Mapped[dict[str, Any] | None]
    event: Mapped[dict[str, Any] | None]
    payload: Mapped[dict[str, Any] | None]
    body: Mapped[bytes | None]

    __table_args__ = (
        UniqueConstraint("hook", "delivery_id", name="hook_deliveries_once"),
        # Did the answer come before its wait?
        Index("hook_deliveries_unmatched", "hook", "correlation_key", "id", postgresql_where=text("matched = 0")),
        # Which delivery is old?
        Index("hook_deliveries_expiry", "expires_at"),
    )


class RefusedCallback(Table):
    """A callback that resolved nothing: filtered out, or refused because the wait's policy could not decide."""

    __tablename__ = "refused_callbacks"

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    wait_id: Mapped[UUID] = mapped_column(ForeignKey(Wait.id, name="refused_callbacks_wait", ondelete="CASCADE"))
    received_at: Mapped[datetime] = mapped_column(server_default=text("now()"))
    verb: Mapped[str]
    reason: Mapped[str]
    encoding: Mapped[str]
    content_type: Mapped[str | None]
    headers: Mapped[dict[str, Any] | None]
    body: Mapped[bytes | None]

    __table_args__ = (Index("refused_callbacks_of_wait", "wait_id", "id"),)


class JobEvent(Table):
    """Only what the job's row can't tell: a job that just works leaves none."""

    __tablename__ = "job_events"

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    job_id: Mapped[UUID] = mapped_column(ForeignKey(Job.id, ondelete="CASCADE"))
    at: Mapped[datetime] = mapped_column(server_default=text("now()"))
    step: Mapped[str]
    state: Mapped[str]
    attempt: Mapped[int] = mapped_column(Integer)
    lease_number: Mapped[int] = mapped_column(BigInteger)
    worker: Mapped[str | None]
    details: Mapped[dict[str, Any] | None]

    __table_args__ = (Index("job_events_of_job", "job_id", "id"),)


class IdempotencyKey(Table):
    """One answer per Idempotency-Key; the digests tell what differs in a repeat."""

    __tablename__ = "idempotency_keys"

    key: Mapped[str] = mapped_column(primary_key=True)
    digests: Mapped[dict[str, Any]]
    answer: Mapped[dict[str, Any]]
    expires_at: Mapped[datetime]

    __table_args__ = (
        CheckConstraint("octet_length(key) BETWEEN 1 AND 255", "idempotency_keys_key"),
        Index("idempotency_keys_expiry", "expires_at"),
    )


class UsedSigningKey(Table):
    """Fingerprints, never keys: a process that signs with an unknown key must not serve this database."""

    __tablename__ = "signing_keys"

    fingerprint: Mapped[str] = mapped_column(primary_key=True)
    first_used_at: Mapped[datetime] = mapped_column(server_default=text("now()"))
