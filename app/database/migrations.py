"""Migrations from code: bring a database up to date, or refuse to serve one that is not."""

from pathlib import Path

import psycopg
from alembic.config import Config
from alembic.script import ScriptDirectory

from alembic import command

_INI = Path(__file__).parents[2] / "alembic.ini"


class WrongRevision(RuntimeError):
    """The database's schema is not the one that this code is written for."""


def configuration(url: str) -> Config:
    """Alembic's configuration for a database."""
    config = Config(str(_INI))
    config.attributes["url"] = url
    return config


def upgrade(url: str, revision: str = "head") -> None:
    """Apply what is missing. Safe to run again, and from two places at once."""
    command.upgrade(configuration(url), revision)


def downgrade(url: str, revision: str = "base") -> None:
    """Take migrations back."""
    command.downgrade(configuration(url), revision)


def head_revision() -> str:
    """The revision that this code is written for."""
    head = ScriptDirectory.from_config(Config(str(_INI))).get_current_head()
    assert head
    return head


def current_revision(url: str) -> str | None:
    """The database's revision; None when it has never been migrated."""
    with psycopg.connect(url, connect_timeout=10) as connection:
        row = connection.execute("SELECT to_regclass('towpath.alembic_version')").fetchone()
        if row is None or row[0] is None:
            return None
        row = connection.execute("SELECT version_num FROM towpath.alembic_version").fetchone()
        return row[0] if row else None


def require_current_revision(url: str) -> None:
    """Raises WrongRevision, with what to do about it, unless the database is at this code's revision."""
    current, head = current_revision(url), head_revision()
    if current != head:
        raise WrongRevision(
            f"The database is at revision {current or 'none'}, this version needs {head}: run `towpath migrate`"
            " (or, if the database is newer, the version of Towpath that it belongs to)."
        )
