"""THE rules: which steps a job can take, who may cause each, and what each does.

Everything else derives from this module or is checked against it: the SQL of `jobs/transition.py`, the
database's CHECK constraints and triggers, the enums of the OpenAPI document, the lifecycle page and the
tests that go through the full product of states and steps. It is pure: no I/O, no clock.
"""

import math
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """Where a job is. The last three are final: only `redrive` leaves them."""

    SCHEDULED = "scheduled"
    AVAILABLE = "available"
    RUNNING = "running"
    RETRYABLE = "retryable"
    WAITING_EXTERNAL = "waiting_external"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Actor(StrEnum):
    """Who causes a step."""

    PRODUCER = "producer"
    WORKER = "worker"
    THIRD_PARTY = "third party"
    OPERATOR = "operator"
    MAINTENANCE = "maintenance"


class Attempt(StrEnum):
    """What a step does to the attempt counter."""

    KEEP = "keep"
    TAKE = "take"
    GIVE_BACK = "give back"
    RESET = "reset"


FINAL = frozenset({State.COMPLETED, State.FAILED, State.CANCELLED})
LIVE = frozenset(State) - FINAL
PENDING = frozenset({State.SCHEDULED, State.AVAILABLE, State.RETRYABLE})
"""Not started, or waiting to start again: what `PATCH` may change and `start_by` may cancel."""
DUE_LATER = frozenset({State.SCHEDULED, State.RETRYABLE})
"""What promotion makes available once `run_at` has passed."""
INITIAL = frozenset({State.SCHEDULED, State.AVAILABLE})


@dataclass(frozen=True)
class Step:
    """One move of the lifecycle.

    A step that may find the attempts used up has `exhausted` as its other target. A `leased` step is
    guarded by the lease number of the claim, which only `claim` raises; attempts go back on snooze and
    redrive, so they guard nothing.
    """

    name: str
    sources: frozenset[State]
    target: State
    actors: frozenset[Actor]
    exhausted: State | None = None
    leased: bool = False
    attempt: Attempt = Attempt.KEEP
    error: str | None = None
    """Kind of the error entry that the step leaves; `worker` means the caller supplies it."""
    effect: str = ""

    @property
    def targets(self) -> frozenset[State]:
        """Every state that the step can lead to."""
        return frozenset({self.target} | ({self.exhausted} if self.exhausted else set()))


def _step(
    name: str,
    sources: State | frozenset[State],
    target: State,
    *actors: Actor,
    exhausted: State | None = None,
    leased: bool = False,
    attempt: Attempt = Attempt.KEEP,
    error: str | None = None,
    effect: str,
) -> Step:
    origin = frozenset({sources}) if isinstance(sources, State) else sources
    return Step(name, origin, target, frozenset(actors), exhausted, leased, attempt, error, effect)


_S, _A = State, Actor

CLAIM = _step(
    "claim", _S.AVAILABLE, _S.RUNNING, _A.WORKER, attempt=Attempt.TAKE,
    effect="lease number +1, lease expiry, deadline and worker set",
)  # fmt: skip
COMPLETE = _step("complete", _S.RUNNING, _S.COMPLETED, _A.WORKER, leased=True, effect="result stored")
RETRY = _step(
    "retry", _S.RUNNING, _S.RETRYABLE, _A.WORKER, exhausted=_S.FAILED, leased=True, error="worker",
    effect="error recorded; due after the given delay or the backoff",
)  # fmt: skip
SNOOZE = _step(
    "snooze", _S.RUNNING, _S.SCHEDULED, _A.WORKER, leased=True, attempt=Attempt.GIVE_BACK,
    effect="snooze count +1; the same attempt goes on later",
)  # fmt: skip
RELEASE = _step(
    "release", _S.RUNNING, _S.AVAILABLE, _A.WORKER, _A.MAINTENANCE, leased=True, attempt=Attempt.GIVE_BACK,
    effect="work that was never started; keeps its place in the queue",
)  # fmt: skip
PARK = _step(
    "park", _S.RUNNING, _S.WAITING_EXTERNAL, _A.WORKER, leased=True,
    effect="waits for a callback until the wait's deadline; slot freed unless attached",
)  # fmt: skip
FAIL = _step(
    "fail", _S.RUNNING, _S.FAILED, _A.WORKER, leased=True, error="worker",
    effect="error recorded, no more attempts; dead-letter policy applies",
)  # fmt: skip
CANCEL_OWN = _step(
    "cancel_own", _S.RUNNING, _S.CANCELLED, _A.WORKER, leased=True, effect="the worker gives its own job up"
)
CANCEL = _step(
    "cancel", LIVE, _S.CANCELLED, _A.PRODUCER, _A.OPERATOR,
    effect="reason kept; a running worker learns at its next heartbeat or report",
)  # fmt: skip
POSTPONE = _step(
    "postpone", _S.AVAILABLE, _S.SCHEDULED, _A.PRODUCER, _A.OPERATOR, effect="its due time was moved to later"
)
PROMOTE = _step("promote", DUE_LATER, _S.AVAILABLE, _A.MAINTENANCE, effect="due; its due time is kept")
LOSE_LEASE = _step(
    "lose_lease", _S.RUNNING, _S.RETRYABLE, _A.MAINTENANCE, exhausted=_S.FAILED, error="lease_expired",
    effect="the worker stopped heartbeating; counts as an attempt",
)  # fmt: skip
PASS_DEADLINE = _step(
    "pass_deadline", _S.RUNNING, _S.RETRYABLE, _A.MAINTENANCE, exhausted=_S.FAILED, error="deadline_exceeded",
    effect="heartbeats do not move a deadline; counts as an attempt",
)  # fmt: skip
CALLBACK_COMPLETE = _step(
    "callback_complete", _S.WAITING_EXTERNAL, _S.COMPLETED, _A.THIRD_PARTY, effect="payload becomes the result"
)
CALLBACK_FAIL = _step(
    "callback_fail", _S.WAITING_EXTERNAL, _S.FAILED, _A.THIRD_PARTY, error="callback_failed",
    effect="error recorded; dead-letter policy applies",
)  # fmt: skip
CALLBACK_RESUME = _step(
    "callback_resume", _S.WAITING_EXTERNAL, _S.AVAILABLE, _A.THIRD_PARTY, attempt=Attempt.GIVE_BACK,
    effect="nobody holds it: payload goes with the next claim",
)  # fmt: skip
CALLBACK_RESUME_ATTACHED = _step(
    "callback_resume_attached", _S.WAITING_EXTERNAL, _S.RUNNING, _A.THIRD_PARTY,
    effect="the attached handler goes on under the same lease",
)  # fmt: skip
CALLBACK_RETRY = _step(
    "callback_retry", _S.WAITING_EXTERNAL, _S.AVAILABLE, _A.THIRD_PARTY, attempt=Attempt.RESET,
    effect="starts again from scratch",
)  # fmt: skip
CALLBACK_TIME_OUT = _step(
    "callback_time_out", _S.WAITING_EXTERNAL, _S.RETRYABLE, _A.MAINTENANCE, exhausted=_S.FAILED,
    error="callback_timeout", effect="nobody called before the wait's deadline; counts as an attempt",
)  # fmt: skip
EXPIRE = _step("expire", PENDING, _S.CANCELLED, _A.MAINTENANCE, effect="not started by `start_by`; reason `expired`")
REDRIVE = _step(
    "redrive", frozenset({_S.FAILED, _S.CANCELLED}), _S.AVAILABLE, _A.OPERATOR, attempt=Attempt.RESET,
    effect="errors kept; the lease number never goes back",
)  # fmt: skip

STEPS: dict[str, Step] = {
    step.name: step
    for step in (
        CLAIM, COMPLETE, RETRY, SNOOZE, RELEASE, PARK, FAIL, CANCEL_OWN, CANCEL, POSTPONE, PROMOTE, LOSE_LEASE,
        PASS_DEADLINE, CALLBACK_COMPLETE, CALLBACK_FAIL, CALLBACK_RESUME, CALLBACK_RESUME_ATTACHED, CALLBACK_RETRY,
        CALLBACK_TIME_OUT, EXPIRE, REDRIVE,
    )
}  # fmt: skip

LEGAL_MOVES = frozenset(
    (source, target) for step in STEPS.values() for source in step.sources for target in step.targets
)
"""Every from → to pair that some step allows: what the database's trigger lets through."""

CALLBACK_VERBS = ("complete", "fail", "resume", "retry")
"""What a third party can do with a wait; `callbacks/verbs.py` says which step each is."""

PRIORITIES = range(1, 5)
DEFAULT_PRIORITY = 2
MAX_ATTEMPTS_RANGE = range(1, 1001)
ERRORS_KEPT = 20
"""The newest error entries that stay on a job; `errors_total` counts all."""


@dataclass(frozen=True)
class Backoff:
    """How long a job waits before its next attempt, in seconds.

    `exponential`: base × factor^(attempt − 1); `linear`: base × attempt; `fixed`: base. Capped, then up to
    `jitter` (a share, 0–1) is added. The database computes it (`towpath.backoff_seconds`).
    """

    kind: str = "exponential"
    base_seconds: float = 2.0
    factor: float = 2.0
    cap_seconds: float = 86_400.0
    jitter: float = 0.25

    def bounds(self, attempt: int) -> tuple[float, float]:
        """The shortest and the longest delay after `attempt` failed."""
        match self.kind:
            case "exponential":
                # In logarithms, as in the database: factor ^ attempt overflows.
                grows = math.log(self.factor) * (attempt - 1)
                grown = math.exp(min(math.log(self.base_seconds) + grows, 700)) if self.base_seconds else 0.0
            case "linear":
                grown = self.base_seconds * attempt
            case _:
                grown = self.base_seconds
        shortest = min(grown, self.cap_seconds)
        return shortest, min(shortest * (1 + self.jitter), self.cap_seconds)


DEFAULT_BACKOFF = Backoff()
BACKOFF_KINDS = ("exponential", "linear", "fixed")
