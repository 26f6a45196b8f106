"""A claim request from start to end: repeat, take, wait, give back what could not be delivered."""

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import uuid_utils
from msgspec import Raw

from app.database.engine import Database
from app.errors import unavailable
from app.http.hot import ClientGone, Receive
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
    database: Database, dispatcher: Dispatcher, signer: Signer, request: ClaimRequest, receive: Receive
) -> ClaimAnswer:
    """Jobs as soon as there are some; none, and the reason, after `wait_seconds`.

    A poll whose client goes away (`receive` tells) is given no job, and what was claimed for it meanwhile goes
    back without using an attempt: raises ClientGone. Raises Refusal when the database could not be asked.
    """
    claim_id = request.claim_id or UUID(bytes=uuid_utils.uuid7().bytes)
    if request.claim_id:
        async with database.hot.connection() as connection:
            again = await held(connection, request.queues, [claim_id])
        if again:
            return _answer(signer, claim_id, again)
    if dispatcher.draining:
        return _none(claim_id, "draining")

    waiter = Waiter(
        claim_id=claim_id,
        worker=request.worker,
        limit=request.limit,
        lease_seconds=request.lease_seconds,
        jobs=asyncio.get_running_loop().create_future(),
    )
    group = dispatcher.enter(tuple(dict.fromkeys(request.queues)), tuple(sorted(set(request.kinds))), waiter)
    leaving = asyncio.ensure_future(_client_gone(receive))
    either: set[asyncio.Future[Any]] = {waiter.jobs, leaving}
    try:
        await asyncio.wait(either, timeout=request.wait_seconds, return_when=asyncio.FIRST_COMPLETED)
        if not waiter.gone and dispatcher.settle_for_a_look(group, waiter):
            await asyncio.wait(either, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    finally:
        # Also when this task is cancelled: whatever was dealt to it must not wait for its lease to expire.
        jobs = waiter.jobs.result() if waiter.gone else []
        looked = dispatcher.leave(group, waiter)
        gone = leaving.done()
        leaving.cancel()
        kept = 0 if gone else _fitting(jobs, request.max_bytes)
        if jobs[kept:]:
            dispatcher.give_back(jobs[kept:])
    if gone:
        raise ClientGone
    if kept:
        return _answer(signer, claim_id, jobs[:kept])
    if dispatcher.draining:
        return _none(claim_id, "draining")
    if not looked:
        raise unavailable("The database could not be asked for jobs.")
    return _none(claim_id, "paused" if group.paused.issuperset(group.queues) else "empty")


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


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
