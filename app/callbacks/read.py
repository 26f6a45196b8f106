"""How waits stand. Changes nothing: mail scanners open links."""

import base64
from typing import Any
from uuid import UUID

from msgspec import Raw
from sqlalchemy import Row, Select, Text, and_, cast, func, or_, select

from app.callbacks.schemas import JobWaits, ParkedWait, RefusedCallback, WaitState
from app.database import tables as t
from app.database.engine import Database
from app.errors import unknown_job
from app.http.pagination import Cursor
from app.lifecycle import State

_WAIT, _JOB, _REFUSED, _EVENT = t.Wait.__table__, t.Job.__table__, t.RefusedCallback.__table__, t.JobEvent.__table__
_JSON = ("payload", "headers", "event", "settings")
_PLAIN = tuple(name for name in WaitState.__struct_fields__ if name not in (*_JSON, "wait_id", "state", "job_state"))
_PARKED_ON = _WAIT.c.id == func.any(_JOB.c.waiting_on)
_OF_USE = or_(_PARKED_ON, and_(_JOB.c.state == State.RUNNING, _JOB.c.lease_number == _WAIT.c.lease_number))
_COLUMNS = (
    _WAIT.c.id,
    _WAIT.c.state,
    *(_WAIT.c[name] for name in _PLAIN),
    *(cast(_WAIT.c[name], Text).label(name) for name in _JSON),
    _WAIT.c.url_version,
    _JOB.c.state.label("job_state"),
    func.coalesce(_OF_USE, False).label("of_use"),
)


def _select() -> Select[Any]:
    return select(*_COLUMNS).join(_JOB, _JOB.c.id == _WAIT.c.job_id)


def _raw(text: str | None) -> Raw:
    return Raw(b"null" if text is None else text.encode())


def _wait(row: Row[Any]) -> WaitState:
    fields: dict[str, Any] = {name: row._mapping[name] for name in _PLAIN}
    fields |= {name: _raw(row._mapping[name]) for name in _JSON}
    # An open wait that nothing can wait on any more is superseded.
    state: Any = "superseded" if row.state == "open" and not row.of_use else row.state
    return WaitState(wait_id=row.id, state=state, job_state=row.job_state, **fields)


async def find_wait(database: Database, wait_id: UUID) -> tuple[WaitState, int] | None:
    """The wait, and the version that its URLs have."""
    async with database.core() as connection:
        row = (await connection.execute(_select().where(_WAIT.c.id == wait_id))).one_or_none()
    return None if row is None else (_wait(row), row.url_version)


async def job_waits(database: Database, job_id: UUID) -> JobWaits:
    """All waits of a job. Raises Refusal: unknown job."""
    jobs = select(_JOB.c.state, _JOB.c.waiting_on, _JOB.c.answers_needed).where(_JOB.c.id == job_id)
    async with database.core() as connection:
        job = (await connection.execute(jobs)).one_or_none()
        if job is None:
            raise unknown_job(job_id)
        rows = (await connection.execute(_select().where(_WAIT.c.job_id == job_id).order_by(_WAIT.c.id))).all()
    return JobWaits(
        job_state=job.state,
        waiting_on=job.waiting_on or [],
        answers_needed=job.answers_needed,
        waits=[_wait(row) for row in rows],
    )


async def refused_callbacks(database: Database, wait_id: UUID) -> list[RefusedCallback]:
    """The newest callbacks that did not resolve the wait, oldest first."""
    query = select(*_REFUSED.c).where(_REFUSED.c.wait_id == wait_id).order_by(_REFUSED.c.id)
    query = query.with_only_columns(
        _REFUSED.c.received_at, _REFUSED.c.verb, _REFUSED.c.reason, _REFUSED.c.encoding, _REFUSED.c.content_type,
        cast(_REFUSED.c.headers, Text).label("headers"), _REFUSED.c.body,
    )  # fmt: skip
    async with database.core() as connection:
        rows = (await connection.execute(query)).all()
    return [
        RefusedCallback(
            received_at=row.received_at,
            verb=row.verb,
            reason=row.reason,
            encoding=row.encoding,
            content_type=row.content_type,
            headers=_raw(row.headers),
            body_base64=None if row.body is None else base64.b64encode(row.body).decode(),
        )
        for row in rows
    ]


async def received_body(database: Database, job_id: UUID, wait_id: UUID) -> bytes | None:
    """The bytes that came on a wait; None when there is no such wait of the job."""
    query = select(func.coalesce(_WAIT.c.body, b"")).where(_WAIT.c.id == wait_id, _WAIT.c.job_id == job_id)
    async with database.core() as connection:
        body: bytes | None = (await connection.execute(query)).scalar_one_or_none()
    return body


async def list_parked(
    database: Database, *, queue: str | None, hook: str | None, cursor: str | None, limit: int
) -> tuple[list[ParkedWait], str | None]:
    """A page of the open waits that jobs are parked on, oldest first, and the cursor of the next."""
    parked_at = (
        select(func.max(_EVENT.c.at)).where(_EVENT.c.job_id == _JOB.c.id, _EVENT.c.step == "park").scalar_subquery()
    )
    query = (
        select(
            _WAIT.c.id.label("wait_id"), _WAIT.c.name, _WAIT.c.job_id, _JOB.c.queue, _JOB.c.kind,
            parked_at.label("parked_at"), _WAIT.c.deadline_at, _WAIT.c.hard_deadline_at, _WAIT.c.default_verb,
            _WAIT.c.hook, _WAIT.c.correlation_key,
        )
        .join(_JOB, _JOB.c.id == _WAIT.c.job_id)
        .where(_WAIT.c.state == "open", _PARKED_ON)
        .order_by(_WAIT.c.id)
        .limit(limit + 1)
    )  # fmt: skip
    for column, value in ((_JOB.c.queue, queue), (_WAIT.c.hook, hook)):
        if value is not None:
            query = query.where(column == value)
    if cursor is not None:
        query = query.where(_WAIT.c.id > Cursor.read(cursor, UUID))
    async with database.core() as connection:
        rows = (await connection.execute(query)).all()
    waits = [ParkedWait(**row._mapping) for row in rows[:limit]]
    return waits, Cursor.write(waits[-1].wait_id) if len(rows) > limit else None
