"""The worker's routes, all hot: claim, heartbeat, settle."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, Raw

from app.database.batching import Batcher
from app.database.engine import Database
from app.errors import Kind, Refusal, unknown_job
from app.http import json
from app.http.hot import Call, ClientGone, HotRoute, Reply
from app.http.problems import answer_of
from app.http.wire import Body
from app.jobs.control import Order
from app.jobs.lease import lease_number
from app.jobs.schemas import CancelRequest, Controlled
from app.lifecycle import CANCEL
from app.settings import Settings
from app.signing import Signer
from app.work import schemas
from app.work.dispatcher import Dispatcher
from app.work.heartbeat import Kept, Pulse
from app.work.poll import HEARTBEATS_PER_LEASE, poll
from app.work.schemas import (
    Beat,
    ClaimAnswer,
    ClaimRequest,
    HeartbeatAnswer,
    HeartbeatItem,
    HeartbeatMany,
    HeartbeatOne,
    Report,
    Settled,
    SettleMany,
    SettleManyAnswer,
    Settlement,
    SettlementResult,
)
from app.work.settle import Outcome, outcome


@dataclass(frozen=True, slots=True)
class Work:
    """What the worker's routes use."""

    settings: Settings
    signer: Signer
    database: Database
    dispatcher: Dispatcher
    heartbeats: Batcher[Pulse, Kept]
    settlements: Batcher[Outcome, Settled]


_CLAIM = msgspec.json.Decoder(ClaimRequest)
_BEAT_ONE = msgspec.json.Decoder(HeartbeatOne)
_BEAT_ITEM = msgspec.json.Decoder(HeartbeatItem)
_CANCEL = msgspec.json.Decoder(CancelRequest)
_SETTLEMENT: msgspec.json.Decoder[Settlement] = msgspec.json.Decoder(Settlement)


class _Beats(Body, kw_only=True):
    """`HeartbeatMany` before its items are decoded: one bad item must not cost the others their leases."""

    heartbeats: Annotated[list[Raw], Meta(min_length=1, max_length=1000)]


class _Settlements(Body, kw_only=True):
    """`SettleMany` before its items are decoded: each is answered by itself."""

    settlements: Annotated[list[Raw], Meta(max_length=1000)] = []
    claim: ClaimRequest | None = None


_BEATS = msgspec.json.Decoder(_Beats)
_SETTLEMENTS = msgspec.json.Decoder(_Settlements)
_SETTLE_MANY = msgspec.json.Decoder(SettleMany)


def _work(call: Call) -> Work:
    work: Work = call.scope["state"]["work"]
    return work


async def claim(call: Call) -> Reply:
    """Take jobs, or wait for some."""
    work = _work(call)
    request = await call.body(_CLAIM, work.settings.max_body_bytes)
    return Reply(200, await _poll(work, request, call))


async def _poll(work: Work, request: ClaimRequest, call: Call) -> ClaimAnswer:
    return await poll(work.database, work.dispatcher, work.signer, request, call.connection)


async def heartbeat(call: Call) -> Reply:
    """Keep one lease."""
    work = _work(call)
    beat = await call.body(_BEAT_ONE, work.settings.max_body_bytes)
    assert call.job_id
    kept = await work.heartbeats.submit(_pulse(work, call.job_id, beat))
    if kept.state is None:
        raise unknown_job(kept.id)
    if kept.status != "ok":
        raise Refusal(
            Kind.CONFLICT,
            "lease-lost",
            f"The lease does not hold the job any more: it is {kept.state}.",
            status_of_lease=kept.status,
            state=kept.state,
            attempt=kept.attempt,
            settled_as=kept.settled_as,
        )
    return Reply(200, _beats([kept]))


async def heartbeats(call: Call) -> Reply:
    """Keep many leases."""
    work = _work(call)
    many = await call.envelope(_BEATS, work.settings.max_batch_body_bytes)
    pulses: list[Pulse] = []
    refused: dict[int, Refusal] = {}
    for n, raw in enumerate(many.heartbeats):
        try:
            beat = json.decode(raw, _BEAT_ITEM, f"/heartbeats/{n}")
            pulses.append(_pulse(work, beat.id, beat, f"/heartbeats/{n}"))
        except Refusal as refusal:
            refused[n] = refusal
    kept: list[Kept] = []
    places = [n for n in range(len(many.heartbeats)) if n not in refused]
    results = await work.heartbeats.submit_all(pulses)
    for n, result in zip(places, results, strict=True):
        if isinstance(result, Kept):
            kept.append(result)
        elif isinstance(result, Refusal) and any(isinstance(other, Kept) for other in results):
            # Somebody holds this job's row: the others are told that they were kept.
            refused[n] = result
        else:
            raise result
    return Reply(200, _beats(kept, refused))


def _pulse(work: Work, job_id: UUID, beat: HeartbeatOne, pointer: str = "") -> Pulse:
    for name in ("progress", "checkpoint"):
        value = getattr(beat, name)
        if value is not UNSET:
            json.check(value, f"{pointer}/{name}")
    return Pulse(
        id=str(job_id),
        lease_number=lease_number(work.signer, job_id, beat.lease),
        lease_seconds=beat.lease_seconds,
        progress=None if beat.progress is UNSET else beat.progress,
        checkpoint=None if beat.checkpoint is UNSET else beat.checkpoint,
    )


def _beats(kept: list[Kept], refused: dict[int, Refusal] | None = None) -> HeartbeatAnswer:
    seconds = [each.lease_seconds for each in kept if each.lease_seconds]
    beats = [
        Beat(
            id=each.id,
            status=each.status,  # type: ignore[arg-type]
            state=each.state,
            settled_as=each.settled_as,
            lease_expires_at=each.lease_expires_at,
            deadline_at=each.deadline_at,
        )
        for each in kept
    ]
    for n, refusal in sorted((refused or {}).items()):
        beats.insert(
            n,
            Beat(
                id=None,
                status="refused",
                state=None,
                settled_as=None,
                lease_expires_at=None,
                deadline_at=None,
                problem=Raw(answer_of(refusal)[1]),
            ),
        )
    return HeartbeatAnswer(
        heartbeats=beats,
        server_time=kept[0].server_time if kept else None,
        next_heartbeat_seconds=min(seconds, default=60.0) / HEARTBEATS_PER_LEASE,
    )


def settle_one(report_type: type[Any]) -> Callable[[Call], Any]:
    """The handler of one settle verb; its body is the verb's own report type."""
    decoder: msgspec.json.Decoder[Report] = msgspec.json.Decoder(report_type)

    async def settle(call: Call) -> Reply:
        work = _work(call)
        report = await call.body(decoder, work.settings.max_body_bytes)
        assert call.job_id
        return Reply(200, await work.settlements.submit(_outcome(work, call.job_id, report)))

    return settle


def _outcome(work: Work, job_id: UUID, report: Report, pointer: str = "") -> Outcome:
    result = getattr(report, "result", UNSET)
    if result is not UNSET:
        json.check(result, pointer=f"{pointer}/result")
    error = getattr(report, "error", None)
    if error is not None and error.details is not UNSET:
        json.check(error.details, pointer=f"{pointer}/error/details")
    return outcome(work.signer, job_id, report, pointer)


async def cancel(call: Call) -> Reply:
    """With a lease, a worker gives its own job up; without, anyone cancels it, whatever it is doing."""
    work = _work(call)
    request = await call.body(_CANCEL, work.settings.max_body_bytes)
    assert call.job_id
    if request.lease is not None:
        report = schemas.CancelOwn(lease=request.lease, reason=request.reason)
        settled = await work.settlements.submit(_outcome(work, call.job_id, report))
        answer = Controlled(
            id=settled.id, state=settled.state, attempt=settled.attempt, already_applied=settled.already_applied
        )
    else:
        answer = await call.scope["state"]["jobs"].orders.submit(Order(CANCEL, call.job_id, request.reason))
    return Reply(200, answer)


async def settle_many(call: Call) -> Reply:
    """Report many outcomes, each answered by itself, and take the next jobs."""
    work = _work(call)
    body = await call.raw_body(work.settings.max_batch_body_bytes)
    many: SettleMany | _Settlements
    job_ids: list[UUID | None]
    refused: dict[int, Refusal] = {}
    try:
        many = json.decode_all(body, _SETTLE_MANY)
        job_ids = [settlement.id for settlement in many.settlements]
        outcomes = [_outcome(work, each.id, each, f"/settlements/{n}") for n, each in enumerate(many.settlements)]
    except Refusal:
        # Somewhere in it is something bad: each by itself, so that only the bad ones are refused.
        many = envelope = json.decode_envelope(body, _SETTLEMENTS)
        job_ids, outcomes, refused = _each_settlement(work, envelope.settlements)
    settled = iter(await work.settlements.submit_all(outcomes))
    results = [_result(n, job_id, refused[n] if n in refused else next(settled)) for n, job_id in enumerate(job_ids)]
    claimed, problem = None, None
    if many.claim:
        try:
            claimed = await _poll(work, many.claim, call)
        except ClientGone:
            raise
        except Refusal as refusal:
            # The outcomes are committed: they are told, whatever became of the claim.
            problem = Raw(answer_of(refusal)[1])
    return Reply(200, SettleManyAnswer(settlements=results, claim=claimed, claim_problem=problem))


def _each_settlement(work: Work, settlements: list[Raw]) -> tuple[list[UUID | None], list[Outcome], dict[int, Refusal]]:
    job_ids: list[UUID | None] = []
    outcomes: list[Outcome] = []
    refused: dict[int, Refusal] = {}
    for n, raw in enumerate(settlements):
        job_ids.append(None)
        try:
            settlement = json.decode(raw, _SETTLEMENT, f"/settlements/{n}")
            job_ids[n] = settlement.id
            outcomes.append(_outcome(work, settlement.id, settlement, f"/settlements/{n}"))
        except Refusal as refusal:
            refused[n] = refusal
    return job_ids, outcomes, refused


def _result(n: int, job_id: UUID | None, answer: Settled | Exception) -> SettlementResult:
    if isinstance(answer, Refusal):
        status, body, _ = answer_of(answer)
        return SettlementResult(index=n, id=job_id, status=status, settled=None, problem=Raw(body))
    if isinstance(answer, Exception):
        raise answer
    return SettlementResult(index=n, id=job_id, status=200, settled=answer, problem=None)


_LOST = ("unknown-job", "lease-lost")


def _settle_route(verb: str, report: type[Any], *more: str) -> HotRoute:
    return HotRoute(
        f"/v1/jobs/{{id}}/{verb}",
        settle_one(report),
        f"{verb}_job",
        (report.__doc__ or "").splitlines()[0],
        report,
        {200: Settled},
        (*_LOST, *more),
    )


ROUTES = (
    HotRoute(
        "/v1/claims",
        claim,
        "claim_jobs",
        "Take jobs, or wait for some.",
        ClaimRequest,
        {200: ClaimAnswer},
        ("too-many-polls",),
    ),
    HotRoute(
        "/v1/heartbeats", heartbeats, "heartbeat_jobs", "Keep many leases.", HeartbeatMany, {200: HeartbeatAnswer}
    ),
    HotRoute(
        "/v1/jobs/{id}/heartbeat",
        heartbeat,
        "heartbeat_job",
        "Keep one lease.",
        HeartbeatOne,
        {200: HeartbeatAnswer},
        _LOST,
    ),
    HotRoute(
        "/v1/settlements",
        settle_many,
        "settle_jobs",
        "Report many outcomes and take the next jobs.",
        SettleMany,
        {200: SettleManyAnswer},
    ),
    _settle_route("complete", schemas.Complete),
    _settle_route("retry", schemas.Retry),
    _settle_route("snooze", schemas.Snooze),
    _settle_route("park", schemas.Park, "unknown-wait", "wait-not-open"),
    _settle_route("fail", schemas.Fail),
    _settle_route("release", schemas.Release),
    HotRoute(
        "/v1/jobs/{id}/cancel",
        cancel,
        "cancel_job",
        "Cancel a job.",
        CancelRequest,
        {200: Controlled},
        (*_LOST, "wrong-state"),
        "jobs",
    ),
)
