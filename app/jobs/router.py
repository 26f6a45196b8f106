"""The routes of producers and operators: enqueue (hot), read, change, cancel, redrive."""

import hashlib
from dataclasses import dataclass
from typing import Annotated, Literal
from uuid import UUID

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from msgspec import Meta, Raw

from app.database.batching import Batcher
from app.database.engine import Database
from app.database.watch import Watch
from app.errors import FieldError, Refusal, invalid
from app.http.dependencies import job_id_in_path, json_body, json_response
from app.http.hot import Call, HotRoute, Reply
from app.http.openapi import documented
from app.http.pagination import NO_NUL, PageCursor, PageLimit
from app.http.problems import answer_of
from app.http.wire import Body
from app.jobs import read
from app.jobs.control import Order, change
from app.jobs.enqueue import Enqueued, checked
from app.jobs.enqueue import Request as EnqueueRequest
from app.jobs.schemas import (
    BatchAnswer,
    BatchItem,
    Controlled,
    EventPage,
    JobChanges,
    JobDetail,
    JobPage,
    NewJob,
    NewJobs,
    Receipt,
)
from app.lifecycle import FINAL, REDRIVE, State
from app.settings import Settings


@dataclass(frozen=True, slots=True)
class Jobs:
    """What the routes of jobs use."""

    settings: Settings
    database: Database
    enqueues: Batcher[EnqueueRequest, Enqueued]
    orders: Batcher[Order, Controlled]
    finished: Watch


class _Batch(Body, kw_only=True):
    """`NewJobs` before its jobs are decoded, so that one bad job does not hide the others."""

    jobs: Annotated[list[Raw], Meta(min_length=1, max_length=1000)]
    mode: Literal["atomic", "each"] = "atomic"


_BATCH = msgspec.json.Decoder(_Batch)
_REPLAYED = ((b"idempotency-replayed", b"true"),)


def _jobs(call: Call) -> Jobs:
    jobs: Jobs = call.scope["state"]["jobs"]
    return jobs


def _of(request: Request) -> Jobs:
    jobs: Jobs = request.state.jobs
    return jobs


def _idempotency_key(call: Call) -> str | None:
    key = call.header(b"idempotency-key")
    if key is not None and not (1 <= len(key) <= 255 and key.isascii() and key.isprintable()):  # noqa: PLR2004
        raise invalid(FieldError("Idempotency-Key", "must be 1 to 255 printable ASCII characters"))
    return key


async def enqueue(call: Call) -> Reply:
    """201 with `Location` once the job is durable; 200 when this Idempotency-Key made it before."""
    jobs = _jobs(call)
    limit = jobs.settings.max_body_bytes
    # The wrapper around the largest allowed `args` must not make it too large.
    row = checked(await call.raw_body(limit + 65_536), limit)
    request = EnqueueRequest([row], _idempotency_key(call), keep_seconds=jobs.settings.idempotency_seconds)
    enqueued = await jobs.enqueues.submit(request)
    receipt = enqueued.receipts[0]
    location = (b"location", b"/v1/jobs/" + str(receipt.id).encode())
    return Reply(200, receipt, (location, *_REPLAYED)) if enqueued.existing else Reply(201, receipt, (location,))


async def enqueue_batch(call: Call) -> Reply:
    """Each job answers by its index. `atomic`, the default: one bad job refuses all."""
    jobs = _jobs(call)
    settings = jobs.settings
    key = _idempotency_key(call)
    batch = await call.envelope(_BATCH, settings.max_batch_body_bytes)
    rows, problems = [], {}
    for n, job in enumerate(batch.jobs):
        try:
            row = checked(job, settings.max_body_bytes)
            row.n = n
            rows.append(row)
        except Refusal as refusal:
            problems[n] = refusal
    if problems and (batch.mode == "atomic" or not rows):
        raise _in_batch(problems)
    request = EnqueueRequest(rows, key, batch=True, keep_seconds=settings.idempotency_seconds)
    enqueued = await jobs.enqueues.submit(request)
    receipts = iter(enqueued.receipts)
    items = [
        BatchItem(index=n, job=None, problem=Raw(answer_of(problems[n])[1]))
        if n in problems
        else BatchItem(index=n, job=next(receipts), problem=None)
        for n in range(len(batch.jobs))
    ]
    answer = BatchAnswer(jobs=items, enqueued=len(rows), refused=len(problems))
    return Reply(200, answer, _REPLAYED) if enqueued.existing else Reply(201, answer)


def _in_batch(problems: dict[int, Refusal]) -> Refusal:
    """The refusal of a whole batch: every bad job's own errors, located in the batch."""
    errors = [
        FieldError(f"/jobs/{n}{error['pointer']}", error["detail"])
        for n, refusal in problems.items()
        for error in refusal.facts.get("errors", [{"pointer": "", "detail": refusal.detail}])
    ]
    return invalid(*errors[:100])


ROUTES = (
    HotRoute(
        "/v1/jobs", enqueue, "enqueue_job", "Enqueue a job.", NewJob, {200: Receipt, 201: Receipt},
        ("idempotency-key-reused", "too-many-requests"), "jobs",
        {"Idempotency-Key": "A repeat with the same key returns the first answer; another body is refused."},
    ),
    HotRoute(
        "/v1/jobs/batch", enqueue_batch, "enqueue_jobs", "Enqueue up to 1,000 jobs.", NewJobs,
        {200: BatchAnswer, 201: BatchAnswer}, ("idempotency-key-reused", "too-many-requests"), "jobs",
        {"Idempotency-Key": "A repeat with the same key returns the first answer; another body is refused."},
    ),
)  # fmt: skip

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
JobId = Annotated[UUID, Depends(job_id_in_path)]
WaitSeconds = Annotated[float, Query(ge=0, le=60, description="Wait this long for a final state.")]


@router.get("", **documented({200: JobPage}, summary="List jobs, newest first."))
async def list_jobs(
    request: Request,
    queue: Annotated[str | None, Query(max_length=100, pattern=NO_NUL)] = None,
    state: State | None = None,
    kind: Annotated[str | None, Query(max_length=200, pattern=NO_NUL)] = None,
    tag: Annotated[str | None, Query(max_length=100, pattern=NO_NUL)] = None,
    cursor: PageCursor = None,
    limit: PageLimit = 50,
) -> Response:
    """Filters are combined; `next_cursor` is null on the last page."""
    jobs, next_cursor = await read.list_jobs(
        _of(request).database, queue=queue, state=state, kind=kind, tag=tag, cursor=cursor, limit=limit
    )
    return json_response(JobPage(jobs=jobs, next_cursor=next_cursor))


@router.get(
    "/{id}", **documented({200: JobDetail, 304: None}, "unknown-job", summary="Read a job, or wait for its end.")
)
async def get_job(request: Request, job_id: JobId, wait_seconds: WaitSeconds = 0) -> Response:
    """`wait_seconds` holds the answer until the job is final or the time is up; `If-None-Match` saves the body."""
    jobs = _of(request)
    job = await read.get_job(jobs.database, job_id)
    if wait_seconds and job.state not in FINAL:
        job = await jobs.finished.until(
            job_id, wait_seconds, lambda: read.get_job(jobs.database, job_id), lambda found: found.state in FINAL
        )
    response = json_response(job)
    etag = f'"{hashlib.blake2b(response.body, digest_size=12).hexdigest()}"'
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers={"etag": etag})
    response.headers["etag"] = etag
    response.headers["cache-control"] = "no-store"
    return response


@router.patch(
    "/{id}",
    **documented({200: JobDetail}, "unknown-job", "wrong-state", body=JobChanges, summary="Change a pending job."),
)
async def change_job(
    request: Request, job_id: JobId, changes: Annotated[JobChanges, Depends(json_body(JobChanges))]
) -> Response:
    """Only what is given changes; only while the job is scheduled, available or retryable."""
    database = _of(request).database
    await change(database, job_id, changes)
    return json_response(await read.get_job(database, job_id))


@router.post(
    "/{id}/redrive",
    **documented({200: Controlled}, "unknown-job", "wrong-state", summary="Run a failed or cancelled job again."),
)
async def redrive_job(request: Request, job_id: JobId) -> Response:
    """From attempt 0; its errors are kept. A repeat changes nothing."""
    return json_response(await _of(request).orders.submit(Order(REDRIVE, job_id)))


@router.get("/{id}/events", **documented({200: EventPage}, "unknown-job", summary="Read a job's history."))
async def list_events(request: Request, job_id: JobId, cursor: PageCursor = None, limit: PageLimit = 100) -> Response:
    """Oldest first. A job that just worked has two events: enqueue and complete."""
    events, next_cursor = await read.list_events(_of(request).database, job_id, cursor, limit)
    return json_response(EventPage(events=events, next_cursor=next_cursor))
