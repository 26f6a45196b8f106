"""Protects the lifecycle where it can't be bypassed: the database refuses whatever the rules forbid.

Every statement here is plain SQL by a superuser, the strongest writer there is. Each refusal is named by its
constraint, so that a wrong one does not pass for the right one.
"""

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import errors as pg
from psycopg import sql

from app.lifecycle import FINAL, INITIAL, LEGAL_MOVES, LIVE, PENDING, State

Connection = psycopg.Connection[Any]

MOVES = [(source, target) for source in State for target in State]
HOUR_FROM_NOW = sql.SQL("now() + interval '1 hour'")


@pytest.fixture
def connection(connect: Callable[[], Connection]) -> Iterator[Connection]:
    """A transaction that is rolled back in the end."""
    opened = connect()
    yield opened
    opened.rollback()


def consistent(state: State, wait: UUID) -> dict[str, Any]:
    """The columns that must be set, or not, in a state; the CHECKs are content with them."""
    return {
        "state": str(state),
        "lease_expires_at": HOUR_FROM_NOW if state is State.RUNNING else None,
        "finished_at": sql.SQL("now()") if state in FINAL else None,
        "waiting_on": [wait] if state is State.WAITING_EXTERNAL else None,
        "answers_needed": 1 if state is State.WAITING_EXTERNAL else None,
    }


def update(connection: Connection, job: UUID, **columns: Any) -> None:
    """Set columns, to values or SQL expressions."""
    assignments = [
        sql.SQL("{} = {}").format(
            sql.Identifier(name), value if isinstance(value, sql.Composable) else sql.Literal(value)
        )
        for name, value in columns.items()
    ]
    done = connection.execute(
        sql.SQL("UPDATE towpath.jobs SET {} WHERE id = {}").format(sql.SQL(", ").join(assignments), sql.Literal(job))
    )
    assert done.rowcount == 1


def insert(connection: Connection, **columns: Any) -> UUID:
    """A new job; what is not given is as after an enqueue."""
    row = {
        "id": uuid4(),
        "queue": "q",
        "kind": "work",
        "state": "available",
        "max_attempts": 5,
        "run_at": "now",
        "claim_order": "now",
        "args": "{}",
        **columns,
    }
    connection.execute(
        sql.SQL("INSERT INTO towpath.jobs ({}) VALUES ({})").format(
            sql.SQL(", ").join(map(sql.Identifier, row)),
            sql.SQL(", ").join(
                value if isinstance(value, sql.Composable) else sql.Literal(value) for value in row.values()
            ),
        )
    )
    return row["id"]  # type: ignore[no-any-return]


def open_wait(connection: Connection, job: UUID, **columns: Any) -> UUID:
    """A wait of the job's first claim."""
    wait = {
        "id": uuid4(),
        "job_id": job,
        "lease_number": 1,
        "attempt": 1,
        "name": f"wait-{uuid4().hex[:8]}",
        "timeout_seconds": 60,
        "deadline_at": "infinity",
        **columns,
    }
    connection.execute(
        sql.SQL("INSERT INTO towpath.waits ({}) VALUES ({})").format(
            sql.SQL(", ").join(map(sql.Identifier, wait)), sql.SQL(", ").join(map(sql.Literal, wait.values()))
        )
    )
    return wait["id"]  # type: ignore[no-any-return]


def a_job(connection: Connection, state: State) -> tuple[UUID, UUID]:
    """A job in any state, claimed once, and a wait of that claim. The guard looks away while it is made."""
    connection.execute("SET LOCAL session_replication_role = replica")
    wait = uuid4()
    columns = consistent(state, wait)
    job = insert(connection, attempt=1, lease_number=1, claim_id=uuid4(), worker="w", **columns)
    open_wait(connection, job, id=wait)
    connection.execute("SET LOCAL session_replication_role = origin")
    return job, wait


def refusal(error: "pytest.ExceptionInfo[psycopg.Error]") -> str | None:
    """The name of the constraint that refused."""
    return error.value.diag.constraint_name


class TestSteps:
    """The full product of states: what the trigger lets through is what the rules allow, and nothing else."""

    def test_the_product_is_full(self) -> None:
        assert len(MOVES) == len(State) ** 2 == 64

    @pytest.mark.parametrize(("source", "target"), MOVES)
    def test_a_job_moves_exactly_where_the_rules_let_it(
        self, connection: Connection, source: State, target: State
    ) -> None:
        job, wait = a_job(connection, source)
        claimed = (source, target) == (State.AVAILABLE, State.RUNNING)
        columns = {**consistent(target, wait), "lease_number": 2 if claimed else 1}
        if source is target or (source, target) in LEGAL_MOVES:
            update(connection, job, **columns)
            row = connection.execute("SELECT state FROM towpath.jobs WHERE id = %s", [job]).fetchone()
            assert row == (target,)
        else:
            with pytest.raises(pg.CheckViolation) as refused:
                update(connection, job, **columns)
            assert refusal(refused) == "jobs_step"

    def test_the_refusal_says_which_job_and_which_step(self, connection: Connection) -> None:
        job, _ = a_job(connection, State.COMPLETED)
        with pytest.raises(pg.CheckViolation) as refused:
            update(connection, job, state="available", finished_at=None)
        assert refused.value.diag.message_primary == (
            f"job {job} cannot go from completed (lease 1) to available (lease 1)"
        )

    def test_a_state_that_does_not_exist_is_refused_even_without_the_trigger(self, connection: Connection) -> None:
        connection.execute("SET LOCAL session_replication_role = replica")
        with pytest.raises(pg.CheckViolation) as refused:
            insert(connection, state="paused")
        assert refusal(refused) == "jobs_state"

    def test_a_job_keeps_its_id(self, connection: Connection) -> None:
        job, _ = a_job(connection, State.AVAILABLE)
        with pytest.raises(pg.CheckViolation) as refused:
            update(connection, job, id=uuid4())
        assert refusal(refused) == "jobs_step"


class TestLeaseNumber:
    """It grows by one at each claim, and never otherwise: it is what a stale worker is told apart by."""

    @pytest.mark.parametrize("state", State)
    @pytest.mark.parametrize("number", [0, 2])
    def test_nothing_but_a_claim_moves_it(self, connection: Connection, state: State, number: int) -> None:
        job, _ = a_job(connection, state)
        with pytest.raises(pg.CheckViolation) as refused:
            update(connection, job, lease_number=number)
        assert refusal(refused) == "jobs_step"

    @pytest.mark.parametrize(("source", "target"), sorted(LEGAL_MOVES - {(State.AVAILABLE, State.RUNNING)}))
    @pytest.mark.parametrize("number", [0, 2])
    def test_no_other_step_moves_it(self, connection: Connection, source: State, target: State, number: int) -> None:
        job, wait = a_job(connection, source)
        with pytest.raises(pg.CheckViolation) as refused:
            update(connection, job, **consistent(target, wait), lease_number=number)
        assert refusal(refused) == "jobs_step"

    @pytest.mark.parametrize("number", [0, 1, 3])
    def test_a_claim_raises_it_by_one(self, connection: Connection, number: int) -> None:
        job, wait = a_job(connection, State.AVAILABLE)
        with pytest.raises(pg.CheckViolation) as refused:
            update(connection, job, **consistent(State.RUNNING, wait), lease_number=number)
        assert refusal(refused) == "jobs_step"


class TestWhatHoldsInEachState:
    @pytest.mark.parametrize(
        "missing",
        [{"lease_expires_at": None}, {"claim_id": None}, {"attempt": 0}],
        ids=["lease_expires_at", "claim_id", "attempt"],
    )
    def test_a_running_job_has_a_lease(self, connection: Connection, missing: dict[str, Any]) -> None:
        job, _ = a_job(connection, State.RUNNING)
        with pytest.raises(pg.CheckViolation) as refused:
            update(connection, job, **missing)
        assert refusal(refused) == "jobs_running_lease"

    def test_a_running_job_has_been_claimed(self, connection: Connection) -> None:
        connection.execute("SET LOCAL session_replication_role = replica")
        with pytest.raises(pg.CheckViolation) as refused:
            insert(
                connection, state="running", attempt=1, claim_id=uuid4(), lease_number=0, lease_expires_at="infinity"
            )
        assert refusal(refused) == "jobs_running_lease"

    @pytest.mark.parametrize("state", sorted(set(State) - {State.RUNNING, State.WAITING_EXTERNAL}))
    def test_a_lease_ends_with_its_claim(self, connection: Connection, state: State) -> None:
        job, _ = a_job(connection, state)
        with pytest.raises(pg.CheckViolation) as refused:
            update(connection, job, lease_expires_at=HOUR_FROM_NOW)
        assert refusal(refused) == "jobs_lease_ended"

    @pytest.mark.parametrize("state", sorted(FINAL))
    def test_a_final_job_has_a_finish_time(self, connection: Connection, state: State) -> None:
        job, _ = a_job(connection, state)
        with pytest.raises(pg.CheckViolation) as refused:
            update(connection, job, finished_at=None)
        assert refusal(refused) == "jobs_final_time"

    @pytest.mark.parametrize("state", sorted(LIVE))
    def test_a_live_job_has_no_finish_time(self, connection: Connection, state: State) -> None:
        job, _ = a_job(connection, state)
        with pytest.raises(pg.CheckViolation) as refused:
            update(connection, job, finished_at=sql.SQL("now()"))
        assert refusal(refused) == "jobs_final_time"

    def test_a_parked_job_waits_on_something(self, connection: Connection) -> None:
        job, _ = a_job(connection, State.WAITING_EXTERNAL)
        with pytest.raises(pg.CheckViolation) as refused:
            update(connection, job, waiting_on=None, answers_needed=None)
        assert refusal(refused) == "jobs_wait"

    @pytest.mark.parametrize("state", sorted(set(State) - {State.WAITING_EXTERNAL}))
    def test_only_a_parked_job_waits_on_something(self, connection: Connection, state: State) -> None:
        job, wait = a_job(connection, state)
        with pytest.raises(pg.CheckViolation) as refused:
            update(connection, job, waiting_on=[wait], answers_needed=1)
        assert refusal(refused) == "jobs_wait"

    def test_what_a_job_waits_on_exists(self, connection: Connection) -> None:
        job, _ = a_job(connection, State.RUNNING)
        with pytest.raises(pg.CheckViolation) as refused:
            update(connection, job, **consistent(State.WAITING_EXTERNAL, uuid4()))
        assert refusal(refused) == "jobs_waiting_on"

    def test_what_a_job_waits_on_is_its_own(self, connection: Connection) -> None:
        job, _ = a_job(connection, State.RUNNING)
        _, foreign = a_job(connection, State.RUNNING)
        with pytest.raises(pg.CheckViolation) as refused:
            update(connection, job, **consistent(State.WAITING_EXTERNAL, foreign))
        assert refusal(refused) == "jobs_waiting_on"

    def test_what_a_job_waits_on_cannot_go(self, connection: Connection) -> None:
        _, wait = a_job(connection, State.WAITING_EXTERNAL)
        with pytest.raises(pg.CheckViolation) as refused:
            connection.execute("DELETE FROM towpath.waits WHERE id = %s", [wait])
        assert refusal(refused) == "waits_parked_on"

    @pytest.mark.parametrize("needed", [0, 2])
    def test_as_many_answers_are_needed_as_can_come(self, connection: Connection, needed: int) -> None:
        job, _ = a_job(connection, State.WAITING_EXTERNAL)
        with pytest.raises(pg.CheckViolation) as refused:
            update(connection, job, answers_needed=needed)
        assert refusal(refused) == "jobs_answers_needed"

    @pytest.mark.parametrize("state", sorted(set(State) - {State.FAILED}))
    def test_only_a_failed_job_is_a_dead_letter(self, connection: Connection, state: State) -> None:
        job, _ = a_job(connection, state)
        with pytest.raises(pg.CheckViolation) as refused:
            update(connection, job, dead_letter_reason="failed")
        assert refusal(refused) == "jobs_dead_letter"


class TestNumbers:
    @pytest.mark.parametrize("attempt", [-1, 6])
    def test_attempts_stay_between_none_and_the_most(self, connection: Connection, attempt: int) -> None:
        job, _ = a_job(connection, State.RUNNING)
        with pytest.raises(pg.CheckViolation) as refused:
            update(connection, job, attempt=attempt)
        assert refusal(refused) == "jobs_attempt"

    @pytest.mark.parametrize("state", sorted(PENDING))
    def test_a_pending_job_has_an_attempt_left(self, connection: Connection, state: State) -> None:
        job, _ = a_job(connection, state)
        with pytest.raises(pg.CheckViolation) as refused:
            update(connection, job, attempt=5)
        assert refusal(refused) == "jobs_attempt_left"

    @pytest.mark.parametrize("state", sorted(PENDING))
    def test_the_most_cannot_be_cut_to_what_was_used(self, connection: Connection, state: State) -> None:
        job, _ = a_job(connection, state)
        with pytest.raises(pg.CheckViolation) as refused:
            update(connection, job, max_attempts=1)
        assert refusal(refused) == "jobs_attempt_left"

    @pytest.mark.parametrize(
        ("column", "value"), [("max_attempts", 0), ("max_attempts", 1001), ("priority", 0), ("priority", 5)]
    )
    def test_a_job_asks_for_what_there_is(self, connection: Connection, column: str, value: int) -> None:
        job, _ = a_job(connection, State.COMPLETED)
        with pytest.raises(pg.CheckViolation) as refused:
            update(connection, job, attempt=0, **{column: value})
        assert refusal(refused) == f"jobs_{column}"


class TestStart:
    @pytest.mark.parametrize("state", sorted(INITIAL))
    def test_a_job_starts_unclaimed(self, connection: Connection, state: State) -> None:
        insert(connection, state=str(state))

    @pytest.mark.parametrize("state", sorted(set(State) - INITIAL))
    def test_a_job_starts_nowhere_else(self, connection: Connection, state: State) -> None:
        job, wait = a_job(connection, State.RUNNING)
        with pytest.raises(pg.CheckViolation) as refused:
            insert(connection, attempt=1, lease_number=1, claim_id=uuid4(), **consistent(state, wait))
        assert refusal(refused) == "jobs_start"

    @pytest.mark.parametrize("column", ["attempt", "lease_number"])
    def test_a_job_starts_without_an_attempt_or_a_lease(self, connection: Connection, column: str) -> None:
        with pytest.raises(pg.CheckViolation) as refused:
            insert(connection, **{column: 1})
        assert refusal(refused) == "jobs_start"


class TestDelete:
    @pytest.mark.parametrize("state", sorted(LIVE))
    def test_a_live_job_cannot_be_deleted(self, connection: Connection, state: State) -> None:
        job, _ = a_job(connection, state)
        with pytest.raises(pg.CheckViolation) as refused:
            connection.execute("DELETE FROM towpath.jobs WHERE id = %s", [job])
        assert refusal(refused) == "jobs_delete"

    @pytest.mark.parametrize("state", sorted(FINAL))
    def test_a_final_job_goes_with_its_waits_and_events(self, connection: Connection, state: State) -> None:
        job, _ = a_job(connection, state)
        connection.execute(
            "INSERT INTO towpath.job_events (job_id, step, state, attempt, lease_number) VALUES (%s, 'x', 'x', 1, 1)",
            [job],
        )
        connection.execute("DELETE FROM towpath.jobs WHERE id = %s", [job])
        left = connection.execute(
            """SELECT (SELECT count(*) FROM towpath.waits WHERE job_id = %(job)s),
                (SELECT count(*) FROM towpath.job_events WHERE job_id = %(job)s)""",
            {"job": job},
        ).fetchone()
        assert left == (0, 0)


class TestWaits:
    def test_a_wait_has_a_deadline(self, connection: Connection) -> None:
        job, _ = a_job(connection, State.RUNNING)
        with pytest.raises(pg.NotNullViolation) as refused:
            open_wait(connection, job, deadline_at=None)
        assert refused.value.diag.column_name == "deadline_at"

    def test_a_wait_belongs_to_a_job(self, connection: Connection) -> None:
        with pytest.raises(pg.ForeignKeyViolation) as refused:
            open_wait(connection, uuid4())
        assert refusal(refused) == "waits_job_id_fkey"

    @pytest.mark.parametrize(
        "columns",
        [
            {"state": "resolved"},
            {"resolved_as": "resume", "resolved_at": "now"},
            {"state": "resolved", "resolved_at": "now"},
        ],
        ids=["resolved by nothing", "open and resolved", "resolved somehow"],
    )
    def test_a_resolution_is_whole(self, connection: Connection, columns: dict[str, Any]) -> None:
        job, _ = a_job(connection, State.RUNNING)
        with pytest.raises(pg.CheckViolation) as refused:
            open_wait(connection, job, **columns)
        assert refusal(refused) == "waits_resolution"

    def test_an_attempt_has_one_wait_of_a_name(self, connection: Connection) -> None:
        job, _ = a_job(connection, State.RUNNING)
        open_wait(connection, job, name="approval")
        with pytest.raises(pg.UniqueViolation) as refused:
            open_wait(connection, job, name="approval")
        assert refusal(refused) == "waits_name_once"

    @pytest.mark.parametrize(
        ("column", "value"), [("state", "closed"), ("default_verb", "cancel"), ("resolved_as", "cancel")]
    )
    def test_a_wait_knows_only_its_own_words(self, connection: Connection, column: str, value: str) -> None:
        job, _ = a_job(connection, State.RUNNING)
        with pytest.raises(pg.CheckViolation) as refused:
            open_wait(connection, job, **{column: value})
        assert refusal(refused) == f"waits_{column}"

    @pytest.mark.parametrize("seconds", [0, 31_536_001])
    def test_a_wait_lasts_up_to_a_year(self, connection: Connection, seconds: int) -> None:
        job, _ = a_job(connection, State.RUNNING)
        with pytest.raises(pg.CheckViolation) as refused:
            open_wait(connection, job, timeout_seconds=seconds)
        assert refusal(refused) == "waits_timeout"
