"""What producers and operators do to a job: change it while it is pending, cancel, redrive."""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from msgspec import UNSET
from psycopg.rows import namedtuple_row

from app.database.engine import Database
from app.errors import FieldError, Kind, Refusal, invalid, unknown_dead_letter, unknown_job
from app.http.wire import in_utc
from app.jobs.schemas import Controlled, JobChanges
from app.jobs.transition import Item, Question, apply, diagnose, lock_jobs
from app.lifecycle import CANCEL, PENDING, POSTPONE, REDRIVE, State, Step

# `claim_order` keeps its distance to the due time, as everywhere; only another priority makes it anew.
# Not `greatest` alone: it takes no notice of NULL, and a job whose due time is not changed would be due at once.
_DUE = "CASE WHEN %(run_at)s::timestamptz IS NULL THEN j.run_at ELSE greatest(now(), %(run_at)s::timestamptz) END"
_CHANGE = f"""UPDATE towpath.jobs AS j SET
    max_attempts = coalesce(%(max_attempts)s, j.max_attempts),
    priority = coalesce(%(priority)s, j.priority),
    run_at = {_DUE},
    claim_order = {_DUE} + CASE WHEN coalesce(%(priority)s, j.priority) = j.priority THEN j.claim_order - j.run_at
        ELSE (%(priority)s - 1) * coalesce((SELECT coalesce(q.aging_seconds * interval '1 s', interval '36500 days')
            FROM towpath.queues AS q WHERE q.name = j.queue), interval '600 s') END
WHERE j.id = %(id)s AND (j.state || '') = ANY(%(pending)s) AND j.attempt < coalesce(%(max_attempts)s, j.max_attempts)
RETURNING j.state, j.queue, j.run_at > now() AS later"""
_NOTIFY = "SELECT pg_notify('towpath', %s)"


@dataclass(frozen=True, slots=True)
class Order:
    """An operator's step for one job, on its way to the database."""

    step: Step
    job_id: UUID
    reason: str = ""
    dead_letter: bool = False
    """Only if the job is a dead letter, or was one before this very order."""


_NO_DEAD_LETTER = """SELECT id FROM towpath.jobs WHERE id = ANY(%s)
AND ((state || '') = 'cancelled' OR (state || '') = 'failed' AND dead_letter_reason IS NULL)"""


async def control(database: Database, orders: list[Order]) -> list[Controlled | Exception]:
    """Cancel and redrive, many in one commit; each one's own answer."""
    answers: dict[int, Controlled | Exception] = {}
    async with database.transaction() as connection:
        await lock_jobs(connection, [str(order.job_id) for order in orders])
        wanted = [order.job_id for order in orders if order.dead_letter]
        other = (
            {row[0] for row in await (await connection.execute(_NO_DEAD_LETTER, [wanted])).fetchall()} if wanted else ()
        )
        for n, order in enumerate(orders):
            if order.dead_letter and order.job_id in other:
                answers[n] = unknown_dead_letter(order.job_id)
        for step in {order.step.name: order.step for order in orders}.values():
            items = [
                Item(n=n, id=str(order.job_id), reason=order.reason)
                for n, order in enumerate(orders)
                if order.step is step and n not in answers
            ]
            for moved in await apply(connection, step, items):
                answers[moved.n] = Controlled(
                    id=orders[moved.n].job_id, state=moved.state, attempt=moved.attempt, already_applied=False
                )
        missed = [
            Question(n=n, id=str(order.job_id), step=order.step.name)
            for n, order in enumerate(orders)
            if n not in answers
        ]
        if missed:
            for n, found in (await diagnose(connection, missed)).items():
                answers[n] = _unmoved(orders[n], found)
    return [answers[n] for n in range(len(orders))]


def _unmoved(order: Order, found: Any) -> Controlled | Exception:
    if found.state is None:
        return unknown_job(order.job_id)
    cancelled_before = order.step is CANCEL and found.state == State.CANCELLED
    # Redriven, and not claimed since: the step is in the history of the lease number that the job still has.
    redriven_before = order.step is REDRIVE and found.state == State.AVAILABLE and found.redriven
    if cancelled_before or redriven_before:
        return Controlled(id=order.job_id, state=found.state, attempt=found.attempt, already_applied=True)
    allowed = sorted(order.step.sources)
    return Refusal(
        Kind.CONFLICT,
        "wrong-state",
        f"A job that is {found.state} can't be given {order.step.name}.",
        state=found.state,
        attempt=found.attempt,
        allowed_states=allowed,
    )


async def change(database: Database, job_id: UUID, changes: JobChanges) -> None:
    """Change a pending job. Raises Refusal: unknown job, wrong state, more attempts used than it would have."""
    priority, max_attempts = (None if value is UNSET else value for value in (changes.priority, changes.max_attempts))
    run_at = None if changes.run_at is UNSET else in_utc(changes.run_at, "/run_at")
    parameters = {
        "id": job_id,
        "priority": priority,
        "run_at": run_at,
        "max_attempts": max_attempts,
        "pending": sorted(PENDING),
    }
    async with database.transaction() as connection:
        await lock_jobs(connection, [str(job_id)])
        cursor = connection.cursor(row_factory=namedtuple_row)
        changed: Any = await (await cursor.execute(_CHANGE, parameters)).fetchone()
        if changed is None:
            found = (await diagnose(connection, [Question(n=0, id=str(job_id))]))[0]
            if found.state is None:
                raise unknown_job(job_id)
            if found.state in PENDING:
                raise invalid(FieldError("/max_attempts", f"the job has used {found.attempt} attempts already"))
            raise Refusal(
                Kind.CONFLICT,
                "wrong-state",
                f"Only a pending job can be changed; this one is {found.state}.",
                state=found.state,
                allowed_states=sorted(PENDING),
            )
        if changed.state == State.AVAILABLE and changed.later:
            await apply(connection, POSTPONE, [Item(n=0, id=str(job_id))])
        elif changed.state == State.AVAILABLE:
            await connection.execute(_NOTIFY, [f"available {changed.queue}"])
        else:
            await connection.execute(_NOTIFY, ["due"])
