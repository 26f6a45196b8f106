"""The worker protocol on the wire: claims, heartbeats, and one report type per outcome."""

from typing import Annotated, Literal
from uuid import UUID

from msgspec import UNSET, Meta, Raw, UnsetType, field

from app.callbacks.schemas import CallbackResult
from app.errors import FieldError, invalid
from app.http.wire import Answer, Body, DelaySeconds, KindName, Lease, LeaseSeconds, QueueName, Reason, Time


class ClaimRequest(Body, kw_only=True):
    """Take jobs, or wait for some. Queues are served in the order given."""

    queues: Annotated[list[QueueName], Meta(min_length=1, max_length=50)]
    kinds: Annotated[list[KindName], Meta(max_length=100, description="Only these; empty: all.")] = []
    limit: Annotated[int, Meta(ge=1, le=1000)] = 1
    wait_seconds: Annotated[float, Meta(ge=0, le=60)] = 20.0
    lease_seconds: LeaseSeconds | None = None
    worker: Annotated[str, Meta(min_length=1, max_length=200, description="Shown to operators.")] = "anonymous"
    claim_id: Annotated[
        UUID | None, Meta(description="Choose it, and a repeat of the request returns the jobs that it still holds.")
    ] = None
    max_bytes: Annotated[int, Meta(ge=1024, le=67_108_864, description="The answer is cut to about this.")] = 8_388_608


class Claimed(Answer, kw_only=True):
    """A job that is yours until `lease_expires_at`, which heartbeats move."""

    id: UUID
    queue: str
    kind: str
    args: Raw
    lease: str
    lease_expires_at: Time
    deadline_at: Time | None
    attempt: int
    max_attempts: int
    last_attempt: bool
    snoozes: int
    priority: int
    run_at: Time
    created_at: Time
    tags: list[str]
    metadata: Raw
    progress: Raw
    checkpoint: Raw
    callback_results: Raw
    last_error: Raw


class ClaimAnswer(Answer, kw_only=True):
    """Jobs, or the reason why there are none and when to ask again. Empty is calm: it is no error."""

    claim_id: UUID
    jobs: list[Claimed]
    reason: Literal["empty", "paused", "draining"] | None
    retry_after_seconds: float
    heartbeat_seconds: float | None


class HeartbeatOne(Body, kw_only=True):
    """Keep one lease, and report how far the work is."""

    lease: Lease
    lease_seconds: LeaseSeconds | None = None
    progress: Raw | UnsetType = UNSET
    checkpoint: Raw | UnsetType = UNSET


class HeartbeatItem(HeartbeatOne, kw_only=True):
    """One of many heartbeats."""

    id: UUID


class HeartbeatMany(Body, kw_only=True):
    """Keep many leases with one request."""

    heartbeats: Annotated[list[HeartbeatItem], Meta(min_length=1, max_length=1000)]


class Beat(Answer, kw_only=True):
    """What became of one lease. Stop the work unless `status` is `ok`, or `refused`: then `problem` says why."""

    id: UUID | None
    status: Literal["ok", "lost", "cancelled", "deadline", "unknown", "refused"]
    state: str | None
    settled_as: Annotated[str | None, Meta(description="What ended the lease, your own report included.")]
    lease_expires_at: Time | None
    deadline_at: Time | None
    problem: Raw | None = None


class HeartbeatAnswer(Answer, kw_only=True):
    """One beat per heartbeat, in the order sent."""

    heartbeats: list[Beat]
    server_time: Time | None
    next_heartbeat_seconds: float


class WorkError(Body, kw_only=True):
    """What went wrong, for people: kept on the job."""

    message: Annotated[str, Meta(max_length=10_000)]
    kind: Annotated[str, Meta(min_length=1, max_length=200)] = "error"
    details: Raw | UnsetType = UNSET


class Complete(Body, kw_only=True):
    """The work is done."""

    lease: Lease
    result: Raw | UnsetType = UNSET


class Retry(Body, kw_only=True):
    """It failed this time. Due again after `delay_seconds`, or the backoff; failed when attempts are used up."""

    lease: Lease
    error: WorkError = field(default_factory=lambda: WorkError(message=""))
    delay_seconds: DelaySeconds | None = None


class Snooze(Body, kw_only=True):
    """Not now: the same attempt goes on later. Uses no attempt."""

    lease: Lease
    delay_seconds: DelaySeconds


class Park(Body, kw_only=True):
    """Wait for callbacks on waits that this attempt has opened. Uses no attempt.

    `complete` and `retry` act on the job at once. `resume` is an answer, and counts: so many as `needed` resume the
    job. `fail`, and a passed deadline, are answers that will not come: when too few are left, the job fails, or
    its time-out counts as an attempt.
    """

    lease: Lease
    wait_id: Annotated[UUID | UnsetType, Meta(description="The one wait.")] = UNSET
    wait_ids: Annotated[list[UUID], Meta(min_length=1, max_length=100, description="Or several.")] | UnsetType = UNSET
    needed: Annotated[
        Literal["all", "any"] | Annotated[int, Meta(ge=1, le=100)],
        Meta(description="How many of the waits must be answered."),
    ] = "all"
    attached: bool = False

    def waits(self, pointer: str = "") -> tuple[list[UUID], int]:
        """The waits, and how many answers are needed. Raises Refusal when the fields contradict each other."""
        one = [] if self.wait_id is UNSET else [self.wait_id]
        several = [] if self.wait_ids is UNSET else self.wait_ids
        if bool(one) == bool(several):
            raise invalid(FieldError(f"{pointer}/wait_id", "give either wait_id or wait_ids"))
        waits = one or several
        if len(set(waits)) < len(waits):
            raise invalid(FieldError(f"{pointer}/wait_ids", "has one wait twice"))
        needed = len(waits) if self.needed == "all" else 1 if self.needed == "any" else self.needed
        if needed > len(waits):
            raise invalid(FieldError(f"{pointer}/needed", f"is more than the waits given, {len(waits)}"))
        return waits, needed


class Fail(Body, kw_only=True):
    """It failed and no attempt can help."""

    lease: Lease
    error: WorkError = field(default_factory=lambda: WorkError(message=""))


class Release(Body, kw_only=True):
    """Hand it back unstarted: it keeps its place and uses no attempt."""

    lease: Lease


class CancelOwn(Body, kw_only=True):
    """Give the job up for good."""

    lease: Lease
    reason: Reason = ""


class SettleComplete(Complete, tag_field="outcome", tag="complete", kw_only=True):
    """`complete`, as one of many."""

    id: UUID


class SettleRetry(Retry, tag_field="outcome", tag="retry", kw_only=True):
    """`retry`, as one of many."""

    id: UUID


class SettleSnooze(Snooze, tag_field="outcome", tag="snooze", kw_only=True):
    """`snooze`, as one of many."""

    id: UUID


class SettlePark(Park, tag_field="outcome", tag="park", kw_only=True):
    """`park`, as one of many."""

    id: UUID


class SettleFail(Fail, tag_field="outcome", tag="fail", kw_only=True):
    """`fail`, as one of many."""

    id: UUID


class SettleRelease(Release, tag_field="outcome", tag="release", kw_only=True):
    """`release`, as one of many."""

    id: UUID


class SettleCancel(CancelOwn, tag_field="outcome", tag="cancel", kw_only=True):
    """`cancel`, as one of many."""

    id: UUID


Report = Complete | Retry | Snooze | Park | Fail | Release | CancelOwn
Settlement = SettleComplete | SettleRetry | SettleSnooze | SettlePark | SettleFail | SettleRelease | SettleCancel


class SettleMany(Body, kw_only=True):
    """Report many outcomes and, with `claim`, take the next jobs in the same request."""

    settlements: Annotated[list[Settlement], Meta(max_length=1000)] = []
    claim: ClaimRequest | None = None


class Settled(Answer, kw_only=True):
    """The job after the report. A repeated report has `already_applied` and changed nothing."""

    id: UUID
    state: str
    attempt: int
    already_applied: bool
    run_at: Time | None = None
    parked: Annotated[
        bool | None, Meta(description="After `park`: whether it waits, or goes on with `callbacks` that came first.")
    ] = None
    callbacks: list[CallbackResult] | None = None


class SettlementResult(Answer, kw_only=True):
    """One outcome of many: `status` is what the single call would have answered."""

    index: int
    id: UUID | None
    status: int
    settled: Settled | None
    problem: Raw | None


class SettleManyAnswer(Answer, kw_only=True):
    """One result per settlement, in the order sent, and the answer to `claim`."""

    settlements: list[SettlementResult]
    claim: ClaimAnswer | None
    claim_problem: Raw | None
