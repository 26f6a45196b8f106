"""Make all callback URLs of a wait that were given out worthless: their version is no longer the wait's."""

from uuid import UUID

from app.database.engine import Database
from app.errors import Kind, Refusal

_ROTATE = """UPDATE towpath.waits AS w SET url_version = w.url_version + 1
WHERE w.id = %(wait_id)s AND w.job_id = %(job_id)s AND (w.state || '') = 'open' RETURNING w.url_version"""
_STATE = "SELECT state FROM towpath.waits WHERE id = %(wait_id)s AND job_id = %(job_id)s"


async def rotate(database: Database, job_id: UUID, wait_id: UUID) -> int:
    """The version of the URLs from now on. Raises Refusal: no such wait, or it is over."""
    parameters = {"wait_id": wait_id, "job_id": job_id}
    async with database.hot.connection() as connection:
        row = await (await connection.execute(_ROTATE, parameters)).fetchone()
        if row:
            version: int = row[0]
            return version
        row = await (await connection.execute(_STATE, parameters)).fetchone()
    if row is None:
        raise Refusal(Kind.UNKNOWN, "unknown-wait", f"The job has no wait {wait_id}.")
    raise Refusal(Kind.CONFLICT, "wait-not-open", f"The wait is {row[0]}.", wait_id=wait_id, wait_state=row[0])
