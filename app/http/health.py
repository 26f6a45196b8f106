"""For load balancers and people on call: whether the process is alive and can do its work."""

from typing import Any

from fastapi import APIRouter, Request, Response
from sqlalchemy import text

from app.http.dependencies import json_response
from app.http.openapi import documented
from app.http.wire import Answer

router = APIRouter(tags=["health"])
# A sweep's pass ends within its statement time-out; one that does not for so long hangs.
_STALLED_SECONDS = 30.0


class Live(Answer, kw_only=True):
    """The process answers."""

    status: str


class Ready(Answer, kw_only=True):
    """Whether the process can serve: `ready`, `degraded` (served, but more slowly), or 503."""

    status: str
    database: bool
    listening: bool
    stalled_sweeps: list[str]
    draining: bool


@router.get("/livez", **documented({200: Live}, summary="Is the process alive?"))
async def livez() -> Response:
    """Asks nothing of the database."""
    return json_response(Live(status="live"))


@router.get("/readyz", **documented({200: Ready, 503: Ready}, summary="Can the process serve?"))
async def readyz(request: Request) -> Response:
    """503 when the database is away or the process is shutting down: send requests elsewhere."""
    runtime: Any = request.state.runtime
    try:
        async with runtime.database.core() as connection:
            await connection.execute(text("SELECT 1"))
        database = True
    except Exception:
        database = False
    listening = runtime.notifications.listening.is_set()
    stalled = runtime.maintenance.stalled(_STALLED_SECONDS) if runtime.maintenance else []
    draining = runtime.work.dispatcher.draining
    able = database and not draining
    status = ("ready" if listening and not stalled else "degraded") if able else "unavailable"
    ready = Ready(status=status, database=database, listening=listening, stalled_sweeps=stalled, draining=draining)
    return json_response(ready, 200 if able else 503)
