"""Write, list and remove secrets; and their live values, for checking a sender's signature."""

from collections.abc import Sequence
from typing import Any

from psycopg import AsyncConnection
from sqlalchemy import Row, case, delete, func, literal_column, null, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection as CoreConnection

from app.database import tables as t
from app.database.engine import Database
from app.errors import Kind, Refusal
from app.http.pagination import page_by_name
from app.secrets.encryption import Vault
from app.secrets.schemas import NewSecret, Secret

_TABLE = t.Secret.__table__
_COLUMNS = tuple(_TABLE.c[name] for name in Secret.__struct_fields__)

_LIVE = """SELECT name, value, CASE WHEN previous_until > now() THEN previous END
FROM towpath.secrets WHERE name = ANY(%s)"""


def _secret(row: Row[Any]) -> Secret:
    return Secret(**{name: row._mapping[name] for name in Secret.__struct_fields__})


def _unknown(name: str) -> Refusal:
    return Refusal(Kind.UNKNOWN, "unknown-secret", f"There is no secret {name}.")


async def put_secret(database: Database, vault: Vault, name: str, new: NewSecret) -> tuple[Secret, bool]:
    """Set a secret's value; the secret, and whether it is new.

    The same value again, as after a lost answer, leaves the previous one in place and never makes it count longer.
    Raises Refusal: what is to be kept can't be decrypted.
    """
    async with database.core() as connection:
        previous: Any = null()
        until: Any = null()
        if new.keep_previous_seconds:
            previous = _TABLE.c.value
            until = func.now() + func.make_interval(0, 0, 0, 0, 0, 0, new.keep_previous_seconds)
            if await _current(connection, vault, name) == new.value:
                previous = _TABLE.c.previous
                until = case((previous.is_not(None), func.least(_TABLE.c.previous_until, until)))
        row = (await connection.execute(_put(name, vault.seal(new.value), previous, until))).one()
    return _secret(row), row.is_new


async def _current(connection: CoreConnection, vault: Vault, name: str) -> str | None:
    """The value that is about to be replaced, locked so that two changes can't both take it for the previous one."""
    query = select(_TABLE.c.value).where(_TABLE.c.name == name).with_for_update()
    sealed = (await connection.execute(query)).scalar_one_or_none()
    return None if sealed is None else vault.open(sealed)


def _put(name: str, sealed: bytes, previous: Any, until: Any) -> Any:
    return (
        insert(t.Secret)
        .values(name=name, value=sealed)
        .on_conflict_do_update(
            index_elements=[_TABLE.c.name],
            set_={
                "value": sealed,
                "previous": previous,
                "previous_until": until,
                "updated_at": func.now(),
            },
        )
        .returning(*_COLUMNS, literal_column("xmax = 0").label("is_new"))
    )


async def get_secret(database: Database, name: str) -> Secret:
    """Raises Refusal: no such secret."""
    async with database.core() as connection:
        row = (await connection.execute(select(*_COLUMNS).where(_TABLE.c.name == name))).one_or_none()
    if row is None:
        raise _unknown(name)
    return _secret(row)


async def list_secrets(database: Database, cursor: str | None, limit: int) -> tuple[list[Secret], str | None]:
    """A page of secrets by name, and the cursor of the next."""
    rows, next_cursor = await page_by_name(database, _COLUMNS, _TABLE.c.name, cursor, limit)
    return [_secret(row) for row in rows], next_cursor


async def delete_secret(database: Database, name: str) -> None:
    """Waits that need it then refuse every callback. Raises Refusal: no such secret, or a hook uses it."""
    try:
        async with database.core() as connection:
            gone = (await connection.execute(delete(t.Secret).where(_TABLE.c.name == name))).rowcount
    except IntegrityError:
        raise Refusal(Kind.CONFLICT, "secret-in-use", f"A hook uses the secret {name}.") from None
    if gone == 0:
        raise _unknown(name)


async def secret_values(connection: AsyncConnection[Any], vault: Vault, names: Sequence[str]) -> dict[str, list[str]]:
    """The live values of the secrets that there are: the current one, and the previous while it counts.

    Raises Refusal: a value can't be decrypted.
    """
    rows = await (await connection.execute(_LIVE, [list(names)])).fetchall()
    return {name: [vault.open(sealed) for sealed in (value, previous) if sealed] for name, value, previous in rows}


async def reseal_all(database: Database, vault: Vault) -> int:
    """Encrypt every secret anew with the first key; how many there are. Raises Refusal: one can't be decrypted."""
    query = select(_TABLE.c.name, _TABLE.c.value, _TABLE.c.previous).with_for_update()
    async with database.core() as connection:
        rows = (await connection.execute(query)).all()
        for name, value, previous in rows:
            resealed = {"value": vault.resealed(value), "previous": previous and vault.resealed(previous)}
            await connection.execute(update(t.Secret).where(_TABLE.c.name == name).values(**resealed))
    return len(rows)
