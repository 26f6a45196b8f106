"""Protects the lifecycle's rules themselves: every state has its use, final means final, executions are bounded.

And that the database, which computes the backoff, computes the one that the rules describe.
"""

from collections.abc import Iterable
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from app.lifecycle import (
    BACKOFF_KINDS,
    FINAL,
    INITIAL,
    LEGAL_MOVES,
    LIVE,
    MAX_ATTEMPTS_RANGE,
    STEPS,
    Actor,
    Attempt,
    Backoff,
    State,
    Step,
)


def named(steps: Iterable[Step]) -> set[str]:
    return {step.name for step in steps}


def reachable(start: Iterable[State], moves: Iterable[tuple[State, State]]) -> set[State]:
    """Where one can get to, the start included."""
    moves = list(moves)
    found: set[State] = set()
    edge = set(start)
    while edge:
        found |= edge
        edge = {target for source, target in moves if source in found} - found
    return found


class TestStates:
    def test_every_state_can_be_reached(self) -> None:
        assert reachable(INITIAL, LEGAL_MOVES) == set(State)

    def test_every_live_state_can_come_to_every_end(self) -> None:
        for state in LIVE:
            assert FINAL <= reachable({state}, LEGAL_MOVES), f"from {state}"

    def test_only_redrive_leaves_a_final_state(self) -> None:
        assert named(step for step in STEPS.values() if step.sources & FINAL) == {"redrive"}

    def test_a_completed_job_is_never_left(self) -> None:
        assert not [target for source, target in LEGAL_MOVES if source is State.COMPLETED]

    def test_only_an_operator_can_redrive(self) -> None:
        assert STEPS["redrive"].actors == {Actor.OPERATOR}

    def test_live_and_final_are_all_there_is(self) -> None:
        assert LIVE | FINAL == set(State)


class TestOwnership:
    def test_every_step_that_a_worker_reports_is_guarded_by_its_lease(self) -> None:
        reported = [step for step in STEPS.values() if Actor.WORKER in step.actors and step.name != "claim"]
        assert named(reported) == named(step for step in STEPS.values() if step.leased)

    def test_only_claim_and_an_attached_resume_lead_to_running(self) -> None:
        leading = named(step for step in STEPS.values() if State.RUNNING in step.targets)
        assert leading == {"claim", "callback_resume_attached"}

    def test_only_an_available_job_can_be_claimed(self) -> None:
        assert STEPS["claim"].sources == {State.AVAILABLE}


class TestExecutionsAreBounded:
    """P6."""

    def test_only_a_claim_takes_an_attempt(self) -> None:
        assert named(step for step in STEPS.values() if step.attempt is Attempt.TAKE) == {"claim"}

    def test_a_failure_a_lost_lease_a_deadline_and_a_callback_time_out_use_the_attempt_up(self) -> None:
        using = [step for step in STEPS.values() if step.exhausted is State.FAILED]
        assert named(using) == {"retry", "lose_lease", "pass_deadline", "callback_time_out"}
        assert {step.attempt for step in using} == {Attempt.KEEP}

    def test_whatever_uses_an_attempt_up_leaves_an_entry_with_its_cause(self) -> None:
        causes = {step.name: step.error for step in STEPS.values() if step.exhausted}
        assert causes == {
            "retry": "worker",
            "lose_lease": "lease_expired",
            "pass_deadline": "deadline_exceeded",
            "callback_time_out": "callback_timeout",
        }

    def test_snooze_release_and_a_resume_give_the_attempt_back(self) -> None:
        giving = named(step for step in STEPS.values() if step.attempt is Attempt.GIVE_BACK)
        assert giving == {"snooze", "release", "callback_resume"}

    def test_park_uses_no_attempt(self) -> None:
        assert STEPS["park"].attempt is Attempt.KEEP
        assert STEPS["park"].exhausted is None

    def test_only_someone_from_outside_can_start_the_count_again(self) -> None:
        resetting = [step for step in STEPS.values() if step.attempt is Attempt.RESET]
        assert named(resetting) == {"redrive", "callback_retry"}
        assert {actor for step in resetting for actor in step.actors} == {Actor.OPERATOR, Actor.THIRD_PARTY}

    def test_a_job_whose_claim_kept_its_attempt_cannot_be_claimed_again_without_a_check_of_its_attempts(self) -> None:
        unchecked = [
            (source, target)
            for step in STEPS.values()
            if step.attempt is Attempt.KEEP and not step.exhausted
            for source in step.sources
            for target in step.targets
        ]
        assert State.AVAILABLE not in reachable({State.RUNNING}, unchecked)


POLICIES = {
    kind: [
        Backoff(kind, base, factor, cap, jitter)
        for base in (0.0, 0.001, 2.0, 31_536_000.0)
        for factor in ((1.0, 1.05, 2.0, 100.0) if kind == "exponential" else (2.0,))
        for cap in (0.0, 1.0, 86_400.0, 31_536_000.0)
        for jitter in (0.0, 0.25, 1.0)
    ]
    for kind in BACKOFF_KINDS
}
"""The corners of what a queue or a job may ask for."""


def as_stored(policy: Backoff) -> dict[str, Any]:
    return {name: getattr(policy, name) for name in ("kind", "base_seconds", "factor", "cap_seconds", "jitter")}


class TestBackoffBounds:
    def test_the_default_doubles_from_two_seconds_to_a_day(self) -> None:
        assert [Backoff().bounds(attempt)[0] for attempt in (1, 2, 3, 10, 17, 1000)] == pytest.approx(
            [2, 4, 8, 1024, 86_400, 86_400]
        )

    def test_the_default_adds_up_to_a_quarter_of_jitter(self) -> None:
        assert Backoff().bounds(3) == pytest.approx((8, 10))

    def test_linear_grows_by_its_base(self) -> None:
        assert Backoff("linear", 5.0, jitter=0.0).bounds(7) == pytest.approx((35, 35))

    def test_fixed_stays(self) -> None:
        assert Backoff("fixed", 5.0, jitter=0.0).bounds(999) == pytest.approx((5, 5))

    def test_a_small_factor_grows_for_ever_too(self) -> None:
        assert Backoff("exponential", 2.0, 1.05, jitter=0.0).bounds(201)[0] == pytest.approx(2 * 1.05**200)

    def test_no_base_means_no_delay_at_any_attempt(self) -> None:
        assert [Backoff("exponential", 0.0).bounds(attempt) for attempt in (1, 64, 1000)] == [(0, 0)] * 3

    @pytest.mark.parametrize("kind", BACKOFF_KINDS)
    def test_bounds_are_ordered_and_within_the_cap_for_every_attempt(self, kind: str) -> None:
        for policy in POLICIES[kind]:
            for attempt in MAX_ATTEMPTS_RANGE:
                shortest, longest = policy.bounds(attempt)
                assert 0 <= shortest <= longest <= policy.cap_seconds, f"{policy} after attempt {attempt}"


class TestBackoffInTheDatabase:
    @pytest.mark.parametrize("kind", BACKOFF_KINDS)
    def test_every_delay_is_within_the_bounds(self, db: "psycopg.Connection[Any]", kind: str) -> None:
        attempts = sorted({*range(1, 70), *range(70, MAX_ATTEMPTS_RANGE.stop, 31), MAX_ATTEMPTS_RANGE.stop - 1})
        policies = POLICIES[kind]
        rows = db.execute(
            """SELECT p.place, a, towpath.backoff_seconds(p.policy, a, gen_random_uuid())
            FROM unnest(%s::jsonb[]) WITH ORDINALITY AS p(policy, place), unnest(%s::integer[]) AS a""",
            [[Jsonb(as_stored(policy)) for policy in policies], attempts],
        ).fetchall()
        assert len(rows) == len(policies) * len(attempts)
        for place, attempt, delay in rows:
            shortest, longest = policies[place - 1].bounds(attempt)
            said = f"{policies[place - 1]} after attempt {attempt}"
            assert shortest * (1 - 1e-9) <= delay <= longest * (1 + 1e-9), said

    def test_jitter_differs_from_job_to_job(self, db: "psycopg.Connection[Any]") -> None:
        row = db.execute(
            """SELECT count(DISTINCT towpath.backoff_seconds(%s, 5, gen_random_uuid())) FROM generate_series(1, 100)""",
            [Jsonb(as_stored(Backoff()))],
        ).fetchone()
        assert row is not None
        assert row[0] > 50

    def test_the_same_job_and_attempt_have_one_delay(self, db: "psycopg.Connection[Any]") -> None:
        row = db.execute(
            """SELECT count(DISTINCT towpath.backoff_seconds(%s, 5, id))
            FROM (SELECT gen_random_uuid() AS id) AS job, generate_series(1, 100)""",
            [Jsonb(as_stored(Backoff()))],
        ).fetchone()
        assert row == (1,)

    def test_an_empty_policy_is_the_default(self, db: "psycopg.Connection[Any]") -> None:
        row = db.execute(
            """SELECT towpath.backoff_seconds('{}', 6, id), towpath.backoff_seconds(%s, 6, id)
            FROM (SELECT gen_random_uuid() AS id) AS job""",
            [Jsonb(as_stored(Backoff()))],
        ).fetchone()
        assert row is not None
        assert row[0] == row[1]
