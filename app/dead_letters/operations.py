"""Jobs that gave up: failed ones of queues whose policy keeps them. Redrive runs one again, discard deletes it."""

from uuid import UUID

from sqlalchemy import delete, select

from app.database import tables as t
from app.database.engine import Database
from app.errors import unknown_dead_letter
from app.jobs.read import JOB_COLUMNS, job_of, page_of_jobs
from app.jobs.schemas import Job
from app.lifecycle import State

_TABLE = t.Job.__table__
# The state is what the index and the retention go by; the reason is what makes it a dead letter.
_IS_DEAD_LETTER = (_TABLE.c.state == str(State.FAILED)) & _TABLE.c.dead_letter_reason.is_not(None)


async def list_dead_letters(
    database: Database, *, queue: str | None, kind: str | None, cursor: str | None, limit: int
) -> tuple[list[Job], str | None]:
    """A page of dead letters, newest job first, and the cursor of the next."""
    query = select(*JOB_COLUMNS).where(_IS_DEAD_LETTER).order_by(_TABLE.c.id.desc()).limit(limit + 1)
    if queue is not None:
        query = query.where(_TABLE.c.queue == queue)
    if kind is not None:
        query = query.where(_TABLE.c.kind == kind)
    return await page_of_jobs(database, query, cursor, limit)


async def get_dead_letter(database: Database, job_id: UUID) -> Job:
    """Raises Refusal when the job is no dead letter (any more)."""
    async with database.core() as connection:
        query = select(*JOB_COLUMNS).where(_TABLE.c.id == job_id, _IS_DEAD_LETTER)
        row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise unknown_dead_letter(job_id)
    return job_of(row)


async def discard(database: Database, job_id: UUID) -> None:
    """Delete a dead letter with all that belongs to it. Raises Refusal when the job is none."""
    async with database.core() as connection:
        deleted = await connection.execute(delete(t.Job).where(_TABLE.c.id == job_id, _IS_DEAD_LETTER))
    if deleted.rowcount == 0:
        raise unknown_dead_letter(job_id)
