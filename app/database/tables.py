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
    }


def one_of(column: str, values: "frozenset[State] | tuple[str, ...]") -> str:
    """An SQL condition that a text column has one of the values, in a stable order."""
    return f"{column} IN ({', '.join(repr(str(value)) for value in sorted(values))})"


def _range(column: str, numbers: range) -> str:
    return f"{column} BETWEEN {numbers.start} AND {numbers.stop - 1}"


_NAME = r"'^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,99}$'"
_KIND = r"'^[A-Za-z0-9_][A-Za-z0-9_./:-]{0,199}$'"
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
    waiting_on: Mapped[UUID | None] = mapped_column(ForeignKey("waits.id", name="jobs_waiting_on", use_alter=True))
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

    __table_args__ = (
        CheckConstraint(f"queue ~ {_NAME}", "jobs_queue"),
        CheckConstraint(f"kind ~ {_KIND}", "jobs_kind"),
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
    delivered: Mapped[bool] = mapped_column(server_default=text("false"))
    payload: Mapped[dict[str, Any] | None]

    __table_args__ = (
        CheckConstraint(one_of("state", ("expired", "open", "resolved")), "waits_state"),
        CheckConstraint(one_of("default_verb", CALLBACK_VERBS), "waits_default_verb"),
        CheckConstraint(one_of("resolved_as", CALLBACK_VERBS), "waits_resolved_as"),
        CheckConstraint(f"timeout_seconds {_YEAR}", "waits_timeout"),
        CheckConstraint(
            "(state = 'resolved') = (resolved_as IS NOT NULL AND resolved_at IS NOT NULL)", "waits_resolution"
        ),
        UniqueConstraint("job_id", "lease_number", "name", name="waits_name_once"),
        # Which wait is over?
        Index("waits_over", "deadline_at", postgresql_where=text("state = 'open'")),
    )


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
