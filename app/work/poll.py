"""A claim request from start to end: repeat, take, wait, give back what could not be delivered."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import uuid_utils
from msgspec import Raw

from app.database.engine import Database
from app.errors import unavailable
from app.http.hot import ClientGone
from app.http.protocol import Protocol
from app.jobs.lease import lease_token
from app.signing import Signer
from app.work.claim import ClaimedJob, held
from app.work.dispatcher import Dispatcher, Waiter
from app.work.schemas import ClaimAnswer, ClaimRequest

_ASK_AGAIN_SECONDS = {"empty": 0.0, "paused": 5.0, "draining": 1.0}
# How long a poll whose time is up gives the database to answer the look that its arrival caused.
_LOOK_SECONDS = 10.0
# A worker can miss one heartbeat, and be late with the next, before its lease is lost.
HEARTBEATS_PER_LEASE = 3


async def poll(
    database: Database, dispatcher: Dispatcher, signer: Signer, request: ClaimRequest, connection: Protocol
) -> ClaimAnswer:
    """Jobs as soon as there are some; none, and the reason, after `wait_seconds`.

    A poll whose client goes away (`connection` tells) is given no job, and what was claimed for it meanwhile goes
    back without using an attempt: raises ClientGone. Raises Refusal when the database could not be asked.
    """
    claim_id = request.claim_id or UUID(bytes=uuid_utils.uuid7().bytes)
    if request.claim_id:
        async with database.hot.connection() as asking:
            again = await held(asking, request.queues, [claim_id])
        if again:
            return _answer(signer, claim_id, again)
    if dispatcher.draining:
        return _none(claim_id, "draining")

    loop = connection.loop
    waiter = Waiter(
        claim_id=claim_id,
        worker=request.worker,
        limit=request.limit,
        lease_seconds=request.lease_seconds,
        jobs=loop.create_future(),
    )
    if connection.lost:
        raise ClientGone
    group = dispatcher.enter(tuple(dict.fromkeys(request.queues)), tuple(sorted(set(request.kinds))), waiter)

    def time_is_up() -> None:
        if dispatcher.settle_for_a_look(group, waiter):
            loop.call_later(_LOOK_SECONDS, waiter.end)
        else:
            waiter.end()

    timer = loop.call_later(request.wait_seconds, time_is_up)
    connection.when_lost = waiter.end
    kept = 0
    try:
        jobs = await waiter.jobs
        if not connection.lost:
            kept = _fitting(jobs, request.max_bytes)
    finally:
        # Also when this task is cancelled: whatever was dealt to it must not wait for its lease to expire.
        timer.cancel()
        connection.when_lost = None
        looked = dispatcher.leave(group, waiter)
        undelivered = [] if waiter.jobs.cancelled() else waiter.jobs.result()[kept:]
        if undelivered:
            dispatcher.give_back(undelivered)
    if connection.lost:
        raise ClientGone
    if kept:
        return _answer(signer, claim_id, jobs[:kept])
    if dispatcher.draining:
        return _none(claim_id, "draining")
    if not looked:
        raise unavailable("The database could not be asked for jobs.")
    return _none(claim_id, "paused" if group.paused.issuperset(group.queues) else "empty")


def _fitting(jobs: Sequence[ClaimedJob], max_bytes: int) -> int:
    """How many of the jobs fit; the first always does, or a large one would block its queue."""
    size = 0
    for count, job in enumerate(jobs):
        size += job.weight
        if count and size > max_bytes:
            return count
    return len(jobs)


def _none(claim_id: UUID, reason: str) -> ClaimAnswer:
    return ClaimAnswer(
        claim_id=claim_id,
        jobs=[],
        reason=reason,  # type: ignore[arg-type]
        retry_after_seconds=_ASK_AGAIN_SECONDS[reason],
        heartbeat_seconds=None,
    )


def _answer(signer: Signer, claim_id: UUID, jobs: Sequence[ClaimedJob]) -> ClaimAnswer:
    return ClaimAnswer(
        claim_id=claim_id,
        jobs=[_with_lease(signer, job) for job in jobs],
        reason=None,
        retry_after_seconds=0,
        heartbeat_seconds=min(job.lease_seconds for job in jobs) / HEARTBEATS_PER_LEASE,
    )


def _with_lease(signer: Signer, job: ClaimedJob) -> Any:
    """The job's JSON, a `Claimed` for the encoder, which passes it through."""
    return Raw(f'{{"lease":"{lease_token(signer, job.id, job.lease_number)}",{job.job[1:]}'.encode())
