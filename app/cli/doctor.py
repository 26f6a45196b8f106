"""What can be wrong with a database, seen as the service would see it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import psycopg

from app.database.migrations import current_revision, head_revision
from app.settings import Settings

_SKEW_SECONDS = 5.0
_LONG_SECONDS = 300.0
_LISTEN_SECONDS = 2.0
_OLDEST, _NEWEST = 15, 18

_LONG = """SELECT pid, coalesce(application_name, ''), extract(epoch FROM now() - xact_start)::float8
FROM pg_stat_activity
WHERE xact_start < now() - %s * interval '1 s' AND pid <> pg_backend_pid() AND backend_type = 'client backend'
ORDER BY xact_start LIMIT 5"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    ok: bool
    what: str
    detail: str


def findings(settings: Settings) -> Iterator[Finding]:
    """Look at one thing after the other; stops when the database can't be reached."""
    try:
        connection = psycopg.connect(settings.database_url, autocommit=True, connect_timeout=5)
    except psycopg.Error as error:
        yield Finding(False, "database", f"not reachable: {str(error).strip().splitlines()[0]}")
        return
    with connection:
        major = connection.info.server_version // 10_000
        yield Finding(
            _OLDEST <= major <= _NEWEST, "database", f"reachable, PostgreSQL {major} (supported: {_OLDEST}–{_NEWEST})"
        )
        current, head = current_revision(settings.database_url), head_revision()
        hint = "" if current == head else "; run `towpath migrate`"
        yield Finding(current == head, "revision", f"{current or 'none'}, this version needs {head}{hint}")
        yield _durability(connection)
        yield _clock(connection)
        yield _long_transactions(connection)
        yield _listen(connection)


def _durability(connection: "psycopg.Connection[tuple[object, ...]]") -> Finding:
    settings = {name: connection.execute(f"SHOW {name}").fetchone() for name in ("fsync", "full_page_writes")}
    off = [name for name, value in settings.items() if value and value[0] != "on"]
    return Finding(not off, "durability", f"{', '.join(off)} off: a crash can lose jobs" if off else "on")


def _clock(connection: "psycopg.Connection[tuple[object, ...]]") -> Finding:
    before = datetime.now(UTC)
    row = connection.execute("SELECT clock_timestamp()").fetchone()
    middle = before + (datetime.now(UTC) - before) / 2
    assert row
    assert isinstance(row[0], datetime)
    skew = (row[0] - middle).total_seconds()
    # Nothing here decides by this machine's clock; people who compare logs do.
    return Finding(abs(skew) < _SKEW_SECONDS, "clock", f"{skew:+.3f} s from this machine's")


def _long_transactions(connection: "psycopg.Connection[tuple[object, ...]]") -> Finding:
    rows = connection.execute(_LONG, [_LONG_SECONDS]).fetchall()
    if not rows:
        return Finding(True, "long transactions", "none: vacuum can remove dead rows")
    told = ", ".join(f"pid {pid} ({name or 'no name'}, {seconds:.0f} s)" for pid, name, seconds in rows)
    return Finding(False, "long transactions", f"hold back vacuum: {told}")


def _listen(connection: "psycopg.Connection[tuple[object, ...]]") -> Finding:
    started = time.monotonic()
    connection.execute("LISTEN towpath_doctor")
    connection.execute("SELECT pg_notify('towpath_doctor', '')")
    heard = next(connection.notifies(timeout=_LISTEN_SECONDS, stop_after=1), None)
    if heard is None:
        return Finding(False, "LISTEN", "no notification came back: is a transaction pooler in between?")
    return Finding(True, "LISTEN", f"a notification came back in {(time.monotonic() - started) * 1000:.1f} ms")
