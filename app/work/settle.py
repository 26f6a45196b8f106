"""Report outcomes: each becomes a lifecycle step, all of a flush become one transaction.

A report is guarded by its lease in the statement itself. One that changed nothing is explained by one read:
the same report again, a lease that was lost, or a job that is not there.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec
from msgspec import UNSET, Raw
from psycopg import AsyncConnection

from app import lifecycle
from app.callbacks.park import Parked, found_there, park
from app.callbacks.schemas import CallbackResult
from app.database.engine import Database
from app.jobs.lease import lease_number
from app.jobs.transition import Item, Moved, Question, apply, diagnose, lease_lost
from app.lifecycle import Step
from app.signing import Signer
from app.work.claim import ClaimedJob
from app.work.schemas import (
    CancelOwn,
    Complete,
    Fail,
    Park,
    Release,
    Report,
    Retry,
    Settled,
    Snooze,
    WorkError,
)


class Outcome(msgspec.Struct, frozen=True):
    """A report as the step it asks for and what that step needs."""

    step: Step
    item: Item
    job_id: UUID

    @property
    def weight(self) -> int:
        """About how many bytes it adds to a flush."""
        return 200 + len(bytes(self.item.result or b"")) + len(bytes(self.item.error or b""))


def outcome(signer: Signer, job_id: UUID, report: Report, pointer: str = "") -> Outcome:
    """What a report means. A lease that is not genuine becomes one that nobody holds.

    Raises Refusal for fields that contradict each other; `pointer` is where the report is in its body.
    """
    item = Item(n=0, id=job_id.hex, lease_number=lease_number(signer, job_id, report.lease))
    return Outcome(_asked_for(item, report, pointer), item, job_id)


def _asked_for(item: Item, report: Report, pointer: str) -> Step:
    match report:
        case Complete(result=result):
            item.result = None if result is UNSET else result
            return lifecycle.COMPLETE
        case Retry(error=error, delay_seconds=delay):
            item.error, item.delay_seconds = _entry(error), delay
            return lifecycle.RETRY
        case Snooze(delay_seconds=delay):
            item.delay_seconds = delay
            return lifecycle.SNOOZE
        case Park(attached=attached):
            wait_ids, item.answers_needed = report.waits(pointer)
            item.wait_ids, item.attached = [str(wait_id) for wait_id in wait_ids], attached
            return lifecycle.PARK
        case Fail(error=error):
            item.error = _entry(error)
            return lifecycle.FAIL
        case Release():
            return lifecycle.RELEASE
        case CancelOwn(reason=reason):
            item.reason = reason
            return lifecycle.CANCEL_OWN


def _entry(error: WorkError) -> Raw:
    return Raw(msgspec.json.encode(error))


def released(jobs: Sequence[ClaimedJob]) -> list[Outcome]:
    """Jobs that were claimed for somebody who has gone."""
    return [Outcome(lifecycle.RELEASE, Item(n=0, id=job.id.hex, lease_number=job.lease_number), job.id) for job in jobs]


async def settle(database: Database, outcomes: list[Outcome]) -> list[Settled | Exception]:
    """Apply the outcomes in one commit; each one's own answer, or the refusal that is to be raised for it."""
    by_step: dict[Step, list[Item]] = defaultdict(list)
    for n, each in enumerate(outcomes):
        each.item.n = n
        by_step[each.step].append(each.item)
    if len(by_step) == 1 and lifecycle.PARK not in by_step:
        # One statement is its own transaction: a round trip instead of three.
        async with database.hot.connection() as connection:
            answers = await _apply(connection, by_step, outcomes)
            return await _explained(connection, outcomes, answers)
    async with database.transaction() as connection:
        answers = await _apply(connection, by_step, outcomes)
        return await _explained(connection, outcomes, answers)


async def _apply(
    connection: AsyncConnection[Any], by_step: dict[Step, list[Item]], outcomes: list[Outcome]
) -> dict[int, Settled | Exception]:
    answers: dict[int, Settled | Exception] = {}
    for step, items in by_step.items():
        if step is lifecycle.PARK:
            parked = await park(connection, items)
            answers |= {n: result if isinstance(result, Exception) else _parked(result) for n, result in parked.items()}
        else:
            answers |= {
                moved.n: _settled(outcomes[moved.n].job_id, moved) for moved in await apply(connection, step, items)
            }
    return answers


def _settled(job_id: UUID, moved: Moved) -> Settled:
    return Settled(
        id=job_id,
        state=moved.state,
        attempt=moved.attempt,
        already_applied=False,
        run_at=moved.run_at if moved.state in lifecycle.DUE_LATER else None,
    )


def _parked(parked: Parked) -> Settled:
    return Settled(
        id=parked.job_id,
        state=parked.state,
        attempt=parked.attempt,
        already_applied=False,
        parked=parked.parked,
        callbacks=[CallbackResult.of(*arrived) for arrived in parked.arrived],
    )


async def _explained(
    connection: AsyncConnection[Any], outcomes: list[Outcome], answers: dict[int, Settled | Exception]
) -> list[Settled | Exception]:
    questions = [
        Question(
            n=n,
            id=each.item.id,
            lease_number=each.item.lease_number,
            result=each.item.result,
            wait_ids=each.item.wait_ids,
            step=each.step.name,
        )
        for n, each in enumerate(outcomes)
        if n not in answers
    ]
    if questions:
        found = await diagnose(connection, questions)
        for question in questions:
            answer = answers[question.n] = _unmoved(question, found[question.n])
            if isinstance(answer, Settled) and question.step == lifecycle.PARK.name:
                early = await found_there(connection, question.id, question.wait_ids or [])
                answer.parked, answer.callbacks = early is None, [CallbackResult.of(*early)] if early else []
    return [answers[n] for n in range(len(outcomes))]


def _unmoved(question: Question, found: Any) -> Settled | Exception:
    mine = found.lease_number == question.lease_number
    again = (mine and found.settled_as == question.step) or found.in_history
    if question.step == lifecycle.COMPLETE.name:
        again = again and found.same_result
    elif question.step == lifecycle.PARK.name:
        again = again and found.same_waits
    if again:
        return Settled(id=UUID(question.id), state=found.state, attempt=found.attempt, already_applied=True)
    return lease_lost(question, found)
