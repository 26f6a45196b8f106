"""The routes of queues."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response

from app.database.engine import Database
from app.http.dependencies import json_body, json_response
from app.http.openapi import documented
from app.http.pagination import PageCursor, PageLimit
from app.queues import operations
from app.queues.schemas import Queue, QueuePage, QueueSettings

router = APIRouter(prefix="/v1/queues", tags=["queues"])
Name = Annotated[str, Path(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,99}$", description="The queue's name.")]


def _database(request: Request) -> Database:
    database: Database = request.state.jobs.database
    return database


@router.get("", **documented({200: QueuePage}, summary="List queues by name."))
async def list_queues(request: Request, cursor: PageCursor = None, limit: PageLimit = 50) -> Response:
    """Empty and paused ones too."""
    queues, next_cursor = await operations.list_queues(_database(request), cursor, limit)
    return json_response(QueuePage(queues=queues, next_cursor=next_cursor))


@router.get("/{name}", **documented({200: Queue}, "unknown-queue", summary="Read a queue's settings."))
async def get_queue(request: Request, name: Name) -> Response:
    """A queue exists from its first job, or its first PUT."""
    return json_response(await operations.get_queue(_database(request), name))


@router.put("/{name}", **documented({200: Queue}, body=QueueSettings, summary="Make a queue, or change its settings."))
async def put_queue(
    request: Request, name: Name, settings: Annotated[QueueSettings, Depends(json_body(QueueSettings))]
) -> Response:
    """Only what is given changes, at once, for jobs that are already there too."""
    return json_response(await operations.put_queue(_database(request), name, settings))


@router.post("/{name}/pause", **documented({200: Queue}, summary="Stop claims from a queue."))
async def pause_queue(request: Request, name: Name) -> Response:
    """Once this is answered no claim, in any process, answers from the queue. Running jobs go on."""
    return json_response(await operations.pause_queue(_database(request), name))


@router.post("/{name}/resume", **documented({200: Queue}, summary="Let claims go on."))
async def resume_queue(request: Request, name: Name) -> Response:
    """Waiting polls wake at once."""
    return json_response(await operations.resume_queue(_database(request), name))
