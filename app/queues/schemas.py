"""Queues on the wire."""

from msgspec import UNSET, UnsetType

from app.http.wire import (
    Answer,
    BackoffPolicy,
    Body,
    LeaseSeconds,
    MaxAttempts,
    Page,
    RetentionSeconds,
    Time,
    TimeoutSeconds,
)


class QueueSettings(Body, kw_only=True):
    """What to change; an absent field stays as it is, and null takes a limit away where there can be none."""

    max_attempts: MaxAttempts | UnsetType = UNSET
    lease_seconds: LeaseSeconds | UnsetType = UNSET
    timeout_seconds: TimeoutSeconds | None | UnsetType = UNSET
    backoff: BackoffPolicy | UnsetType = UNSET
    aging_seconds: TimeoutSeconds | None | UnsetType = UNSET
    completed_retention_seconds: RetentionSeconds | None | UnsetType = UNSET
    failed_retention_seconds: RetentionSeconds | None | UnsetType = UNSET
    cancelled_retention_seconds: RetentionSeconds | None | UnsetType = UNSET
    keep_dead_letters: bool | UnsetType = UNSET
    dead_letter_retention_seconds: RetentionSeconds | None | UnsetType = UNSET


class Queue(Answer, kw_only=True):
    """A queue's settings. Jobs use them as they are when needed; what a job names itself wins."""

    name: str
    paused: bool
    paused_at: Time | None
    max_attempts: int
    lease_seconds: float
    timeout_seconds: float | None
    backoff: BackoffPolicy
    aging_seconds: float | None
    completed_retention_seconds: float | None
    failed_retention_seconds: float | None
    cancelled_retention_seconds: float | None
    keep_dead_letters: bool
    dead_letter_retention_seconds: float | None
    created_at: Time
    updated_at: Time


class QueuePage(Page, kw_only=True):
    """Queues by name."""

    queues: list[Queue]
