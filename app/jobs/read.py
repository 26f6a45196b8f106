"""Read jobs: one, a page, a history. Stored values come out as JSON text and are passed on as they are."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from msgspec import Raw
from sqlalchemy import ColumnElement, Row, Select, Text, cast, select

from app.database import tables as t
from app.database.engine import Database
from app.errors import unknown_job
from app.http.pagination import Cursor
from app.jobs.schemas import Event, Job, JobDetail, Wait
from app.lifecycle import State

_JSON = ("errors", "args", "result", "progress", "checkpoint", "metadata", "backoff", "callback_results")
_ABSENT = {"errors": b"[]", "callback_results": b"{}", "metadata": b"{}"}
_PLAIN = tuple(name for name in Job.__struct_fields__ if name not in _JSON)
_TABLE = t.Job.__table__


def _text(column: ColumnElement[Any]) -> Any:
    return cast(column, Text).label(column.key)


JOB_COLUMNS = (*(_TABLE.c[name] for name in _PLAIN), *(_text(_TABLE.c[name]) for name in _JSON))


def job_of(row: Row[Any]) -> Job:
    """A job from a row of `JOB_COLUMNS`."""
    return Job(**_fields(row))


def _fields(row: Row[*tuple[Any, ...]]) -> dict[str, Any]:
    fields = {name: row._mapping[name] for name in _PLAIN}
    for name in _JSON:
        fields[name] = _raw(row._mapping[name], _ABSENT.get(name, b"null"))
    return fields


def _raw(text: str | None, absent: bytes = b"null") -> Raw:
    return Raw(absent if text is None else text.encode())


async def get_job(database: Database, job_id: UUID) -> JobDetail:
    """A job with its waits. Raises Refusal: unknown job."""
    wait = t.Wait.__table__
    waits = select(
        wait.c.id, wait.c.name, wait.c.state, wait.c.attempt, wait.c.lease_number, wait.c.default_verb,
        wait.c.created_at, wait.c.deadline_at, wait.c.resolved_as, wait.c.resolved_at, wait.c.early,
        _text(wait.c.payload), wait.c.encoding, wait.c.content_type, _text(wait.c.event), wait.c.hard_deadline_at,
        wait.c.hook, wait.c.correlation_key,
    ).where(wait.c.job_id == job_id).order_by(wait.c.id)  # fmt: skip
    async with database.core() as connection:
        job = (
            await connection.execute(
                select(*JOB_COLUMNS, _TABLE.c.lease_number, _TABLE.c.waiting_on, _TABLE.c.answers_needed).where(
                    _TABLE.c.id == job_id
                )
            )
        ).one_or_none()
        if job is None:
            raise unknown_job(job_id)
        rows = (await connection.execute(waits)).all()
    return JobDetail(
        **_fields(job),
        waiting_on=job.waiting_on or [],
        answers_needed=job.answers_needed,
        waits=[_wait(row, job) for row in rows],
    )


def _wait(row: Row[*tuple[Any, ...]], job: Row[*tuple[Any, ...]]) -> Wait:
    # A wait is of use only to the lease that opened it, while that runs or waits.
    stale = row.id not in (job.waiting_on or ()) and (
        row.lease_number != job.lease_number or job.state != State.RUNNING
    )
    return Wait(
        wait_id=row.id,
        name=row.name,
        state="superseded" if row.state == "open" and stale else row.state,
        attempt=row.attempt,
        default_verb=row.default_verb,
        created_at=row.created_at,
        deadline_at=row.deadline_at,
        resolved_as=row.resolved_as,
        resolved_at=row.resolved_at,
        early=row.early,
        payload=_raw(row.payload),
        encoding=row.encoding,
        content_type=row.content_type,
        event=_raw(row.event),
        hard_deadline_at=row.hard_deadline_at,
        hook=row.hook,
        correlation_key=row.correlation_key,
    )


async def list_jobs(
    database: Database,
    *,
    queue: str | None,
    state: State | None,
    kind: str | None,
    tag: str | None,
    cursor: str | None,
    limit: int,
) -> tuple[list[Job], str | None]:
    """A page of jobs, newest first, and the cursor of the next."""
    query = select(*JOB_COLUMNS).order_by(_TABLE.c.id.desc()).limit(limit + 1)
    for column, value in ((_TABLE.c.queue, queue), (_TABLE.c.state, state), (_TABLE.c.kind, kind)):
        if value is not None:
            query = query.where(column == str(value))
    if tag is not None:
        query = query.where(_TABLE.c.tags.contains([tag]))
    return await page_of_jobs(database, query, cursor, limit)


async def page_of_jobs(
    database: Database, query: Select[Any], cursor: str | None, limit: int
) -> tuple[list[Job], str | None]:
    """A page of a query over `JOB_COLUMNS` in falling id order, which asks for one row more than the page has."""
    if cursor is not None:
        query = query.where(_TABLE.c.id < Cursor.read(cursor, UUID))
    async with database.core() as connection:
        rows: Sequence[Row[Any]] = (await connection.execute(query)).all()
    jobs = [job_of(row) for row in rows[:limit]]
    return jobs, Cursor.write(jobs[-1].id) if len(rows) > limit else None


async def list_events(
    database: Database, job_id: UUID, cursor: str | None, limit: int
) -> tuple[list[Event], str | None]:
    """A job's history, oldest first. Raises Refusal: unknown job."""
    event = t.JobEvent.__table__
    after = Cursor.read(cursor, int) if cursor is not None else 0
    columns = (
        event.c.id, event.c.at, event.c.step, event.c.state, event.c.attempt, event.c.worker, _text(event.c.details)
    )  # fmt: skip
    query = select(*columns).where(event.c.job_id == job_id, event.c.id > after).order_by(event.c.id).limit(limit + 1)
    async with database.core() as connection:
        job = (
            await connection.execute(
                select(
                    _TABLE.c.state, _TABLE.c.attempt, _TABLE.c.worker, _TABLE.c.created_at, _TABLE.c.finished_at
                ).where(_TABLE.c.id == job_id)
            )
        ).one_or_none()
        if job is None:
            raise unknown_job(job_id)
        rows = (await connection.execute(query)).all()
    events = [
        Event(
            at=row.at,
            step=row.step,
            state=row.state,
            attempt=row.attempt,
            worker=row.worker,
            details=_raw(row.details),
        )
        for row in rows[:limit]
    ]
    more = len(rows) > limit
    if cursor is None:
        events.insert(0, _from_row("enqueue", job.created_at, None, 0, None))
    if not more and job.state == State.COMPLETED and not any(e.step == "callback_complete" for e in events):
        events.append(_from_row("complete", job.finished_at, job.state, job.attempt, job.worker))
    return events, Cursor.write(rows[limit - 1].id) if more else None


def _from_row(step: str, at: datetime, state: str | None, attempt: int, worker: str | None) -> Event:
    return Event(at=at, step=step, state=state, attempt=attempt, worker=worker, details=Raw(b"null"))
