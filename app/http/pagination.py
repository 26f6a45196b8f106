"""Keyset cursors: where a list goes on, opaque to callers. A page costs the same however deep it is."""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Query
from sqlalchemy import ColumnElement, Row, select

from app.database.engine import Database
from app.errors import FieldError, invalid

PageLimit = Annotated[int, Query(ge=1, le=200, description="Items per page.")]
PageCursor = Annotated[str | None, Query(max_length=200, description="`next_cursor` of the page before.")]
NO_NUL = r"^[^\x00]*$"
"""What a text parameter must match: PostgreSQL holds no NUL character."""

Key = TypeVar("Key")


class Cursor:
    """The last key of a page, as text that callers pass back."""

    @staticmethod
    def write(key: Any) -> str:
        """A cursor that goes on after this key."""
        return base64.urlsafe_b64encode(str(key).encode()).rstrip(b"=").decode()

    @staticmethod
    def read(cursor: str, key_type: "type[Key]") -> Key:
        """The key in a cursor. Raises Refusal when it is not one of ours."""
        try:
            text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
            if "\0" not in text:
                return key_type(text)  # type: ignore[call-arg]
        except (ValueError, OverflowError):
            pass
        raise invalid(FieldError("cursor", "is not a cursor of this list"))


async def page_by_name(
    database: Database, columns: Sequence[ColumnElement[Any]], name: ColumnElement[str], cursor: str | None, limit: int
) -> tuple[Sequence[Row[Any]], str | None]:
    """A page of a table's rows in the order of their names, and the cursor of the next."""
    query = select(*columns).order_by(name).limit(limit + 1)
    if cursor is not None:
        query = query.where(name > Cursor.read(cursor, str))
    async with database.core() as connection:
        rows = (await connection.execute(query)).all()
    return rows[:limit], Cursor.write(rows[limit - 1].name) if len(rows) > limit else None
