"""How a wait stands. Changes nothing: mail scanners open links."""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from msgspec import Raw
from sqlalchemy import Text, cast, select

from app.database import tables as t
from app.database.engine import Database
from app.lifecycle import State


@dataclass(frozen=True, slots=True)
class WaitNow:
    """A wait, as stored, and its job's state."""

    id: UUID
    job_id: UUID
    name: str
    state: str
    deadline_at: Any
    resolved_as: str | None
    resolved_at: Any
    payload: Raw
    job_state: str


async def wait_now(database: Database, wait_id: UUID) -> WaitNow | None:
    """The wait; an open one that nothing can wait on any more is `superseded`."""
    wait, job = t.Wait.__table__, t.Job.__table__
    query = (
        select(
            wait.c.id,
            wait.c.job_id,
            wait.c.name,
            wait.c.state,
            wait.c.deadline_at,
            wait.c.resolved_as,
            wait.c.resolved_at,
            cast(wait.c.payload, Text).label("payload"),
            wait.c.lease_number,
            job.c.state.label("job_state"),
            job.c.waiting_on,
            job.c.lease_number.label("job_lease_number"),
        )
        .join(job, job.c.id == wait.c.job_id)
        .where(wait.c.id == wait_id)
    )
    async with database.core() as connection:
        row = (await connection.execute(query)).one_or_none()
    if row is None:
        return None
    of_use = row.waiting_on == row.id or (row.job_state == State.RUNNING and row.job_lease_number == row.lease_number)
    return WaitNow(
        id=row.id,
        job_id=row.job_id,
        name=row.name,
        state=row.state if of_use or row.state != "open" else "superseded",
        deadline_at=row.deadline_at,
        resolved_as=row.resolved_as,
        resolved_at=row.resolved_at,
        payload=Raw((row.payload or "null").encode()),
        job_state=row.job_state,
    )
