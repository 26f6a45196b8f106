"""A queue's settings, and its switch. A pause that was answered holds in every process.

The claim statement locks the queue's row FOR SHARE. So a pause waits for the claims before it, and every claim
after it sees it.
"""

from typing import Any

import msgspec
from msgspec import UNSET
from sqlalchemy import Row, func, select, text
from sqlalchemy.dialects.postgresql import insert

from app.database import tables as t
from app.database.engine import Database
from app.errors import Kind, Refusal
from app.http.pagination import page_by_name
from app.http.wire import BackoffPolicy
from app.queues.schemas import Queue, QueueSettings

_TABLE = t.Queue.__table__
_COLUMNS = tuple(_TABLE.c[name] for name in Queue.__struct_fields__)
# In the change's own transaction: polls wake when it is committed, not before.
_HINT = text("SELECT pg_notify('towpath', 'available ' || :name)")


def _queue(row: Row[Any]) -> Queue:
    return Queue(**{**row._mapping, "backoff": msgspec.convert(row.backoff, BackoffPolicy)})


async def get_queue(database: Database, name: str) -> Queue:
    """Raises Refusal when nothing has used the queue yet."""
    async with database.core() as connection:
        row = (await connection.execute(select(*_COLUMNS).where(_TABLE.c.name == name))).one_or_none()
    if row is None:
        raise Refusal(Kind.UNKNOWN, "unknown-queue", f"There is no queue {name}; its first use, or a PUT, makes it.")
    return _queue(row)


async def list_queues(database: Database, cursor: str | None, limit: int) -> tuple[list[Queue], str | None]:
    """A page of queues by name, and the cursor of the next."""
    rows, next_cursor = await page_by_name(database, _COLUMNS, _TABLE.c.name, cursor, limit)
    return [_queue(row) for row in rows], next_cursor


async def put_queue(database: Database, name: str, settings: QueueSettings) -> Queue:
    """Make the queue if it is new, and change what is given. Running jobs notice at their next step."""
    given = {field: getattr(settings, field) for field in settings.__struct_fields__}
    values = {field: value for field, value in given.items() if value is not UNSET}
    if "backoff" in values:
        values["backoff"] = msgspec.to_builtins(values["backoff"])
    return await _upsert(database, name, values)


async def pause_queue(database: Database, name: str) -> Queue:
    """Stop claims from the queue. When this returns no process claims from it; repeating is harmless."""
    since = func.coalesce(_TABLE.c.paused_at, func.now())
    return await _upsert(
        database, name, {"paused": True, "paused_at": func.now()}, {"paused": True, "paused_at": since}
    )


async def resume_queue(database: Database, name: str) -> Queue:
    """Open the queue and wake the polls that wait for it."""
    return await _upsert(database, name, {"paused": False, "paused_at": None})


async def _upsert(
    database: Database, name: str, values: dict[str, Any], changes: dict[str, Any] | None = None
) -> Queue:
    changed = {**(changes or values), "updated_at": func.now()}
    statement = (
        insert(t.Queue)
        .values(name=name, **values)
        .on_conflict_do_update(index_elements=[_TABLE.c.name], set_=changed)
        .returning(*_COLUMNS)
    )
    async with database.core() as connection:
        row = (await connection.execute(statement)).one()
        await connection.execute(_HINT, {"name": name})
    return _queue(row)
