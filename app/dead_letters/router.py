"""The routes of dead letters."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request, Response

from app.database.engine import Database
from app.dead_letters import operations
from app.dead_letters.schemas import DeadLetterPage
from app.http.dependencies import job_id_in_path, json_response
from app.http.openapi import documented
from app.http.pagination import NO_NUL, PageCursor, PageLimit
from app.jobs.control import Order
from app.jobs.schemas import Controlled, Job
from app.lifecycle import REDRIVE

router = APIRouter(prefix="/v1/dead-letters", tags=["dead letters"])
JobId = Annotated[UUID, Depends(job_id_in_path)]


def _database(request: Request) -> Database:
    database: Database = request.state.jobs.database
    return database


@router.get("", **documented({200: DeadLetterPage}, summary="List dead letters, newest first."))
async def list_dead_letters(
    request: Request,
    queue: Annotated[str | None, Query(max_length=100, pattern=NO_NUL)] = None,
    kind: Annotated[str | None, Query(max_length=200, pattern=NO_NUL)] = None,
    cursor: PageCursor = None,
    limit: PageLimit = 50,
) -> Response:
    """Failed jobs of queues that keep them."""
    jobs, next_cursor = await operations.list_dead_letters(
        _database(request), queue=queue, kind=kind, cursor=cursor, limit=limit
    )
    return json_response(DeadLetterPage(dead_letters=jobs, next_cursor=next_cursor))


@router.get("/{id}", **documented({200: Job}, "unknown-dead-letter", summary="Inspect a dead letter."))
async def get_dead_letter(request: Request, job_id: JobId) -> Response:
    """With its errors, newest last, and why it gave up."""
    return json_response(await operations.get_dead_letter(_database(request), job_id))


@router.post(
    "/{id}/redrive",
    **documented(
        {200: Controlled}, "unknown-job", "unknown-dead-letter", "wrong-state", summary="Run a dead letter again."
    ),
)
async def redrive_dead_letter(request: Request, job_id: JobId) -> Response:
    """From attempt 0; its errors are kept. A repeat changes nothing."""
    return json_response(await request.state.jobs.orders.submit(Order(REDRIVE, job_id, dead_letter=True)))


@router.delete("/{id}", **documented({204: None}, "unknown-dead-letter", summary="Discard a dead letter."))
async def discard_dead_letter(request: Request, job_id: JobId) -> Response:
    """Gone, with its history."""
    await operations.discard(_database(request), job_id)
    return Response(status_code=204)
