"""Make, change, read and remove hooks."""

from typing import Any

import msgspec
from sqlalchemy import Row, delete, func, literal_column, null, select
from sqlalchemy.dialects.postgresql import insert

from app.callbacks.correlation import unknown_hook
from app.callbacks.signatures import SignatureCheck
from app.database import tables as t
from app.database.engine import Database
from app.errors import FieldError, invalid
from app.hooks.schemas import Hook, HookSettings
from app.http.pagination import page_by_name

_TABLE = t.Hook.__table__
_COLUMNS = tuple(_TABLE.c[name] for name in Hook.__struct_fields__)


def _hook(row: Row[Any]) -> Hook:
    signature = None if row.signature is None else msgspec.convert(row.signature, SignatureCheck)
    return Hook(**{**{name: row._mapping[name] for name in Hook.__struct_fields__}, "signature": signature})


async def get_hook(database: Database, name: str) -> Hook:
    """Raises Refusal: no such hook."""
    async with database.core() as connection:
        row = (await connection.execute(select(*_COLUMNS).where(_TABLE.c.name == name))).one_or_none()
    if row is None:
        raise unknown_hook()
    return _hook(row)


async def list_hooks(database: Database, cursor: str | None, limit: int) -> tuple[list[Hook], str | None]:
    """A page of hooks by name, and the cursor of the next."""
    rows, next_cursor = await page_by_name(database, _COLUMNS, _TABLE.c.name, cursor, limit)
    return [_hook(row) for row in rows], next_cursor


async def put_hook(database: Database, name: str, settings: HookSettings) -> tuple[Hook, bool]:
    """The hook, and whether it is new. Its secret must be there. Raises Refusal when it is not."""
    secret = settings.signature.secret if settings.signature else None
    values = {
        "correlation": settings.correlation,
        "filter": settings.filter,
        "delivery_id": settings.delivery_id,
        "signature": null() if settings.signature is None else msgspec.to_builtins(settings.signature),
        "secret": secret,
        "keep_seconds": settings.keep_seconds,
    }
    made = insert(t.Hook).values(name=name, **values)
    put = made.on_conflict_do_update(
        index_elements=[_TABLE.c.name], set_={**values, "updated_at": func.now()}
    ).returning(*_COLUMNS, literal_column("xmax = 0").label("is_new"))
    async with database.core() as connection:
        if secret is not None:
            secrets = select(t.Secret.__table__.c.name).where(t.Secret.__table__.c.name == secret)
            if (await connection.execute(secrets.with_for_update(key_share=True))).one_or_none() is None:
                raise invalid(FieldError("/signature/secret", f"there is no {secret}"))
        row = (await connection.execute(put)).one()
    return _hook(row), row.is_new


async def delete_hook(database: Database, name: str) -> None:
    """With what it has kept; waits for its keys go on. Raises Refusal: no such hook."""
    async with database.core() as connection:
        if (await connection.execute(delete(t.Hook).where(_TABLE.c.name == name))).rowcount == 0:
            raise unknown_hook()
