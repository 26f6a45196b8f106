"""Connections: a pool with pinned plans for the hot path, an SQLAlchemy engine for everything else."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from psycopg import AsyncConnection
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import AsyncConnectionPool
from sqlalchemy.ext.asyncio import AsyncConnection as CoreConnection
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from app.settings import Settings

# Statistics of a busy queue are always wrong, and a generic plan is planned once: keep it to key look-ups.
# Without `jit = off` each claim would be compiled for longer than it runs.
_PINNED = {
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_bitmapscan": "off",
}


@dataclass(frozen=True, slots=True)
class Database:
    """Both ways to the same database.

    `hot` gives autocommit psycopg connections with prepared statements and pinned plans; `core` runs
    SQLAlchemy Core statements for reading, listing and settings. Nobody waits while holding either.
    """

    hot: AsyncConnectionPool[AsyncConnection[Any]]
    engine: AsyncEngine
    conninfo: str

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection[Any]]:
        """One transaction on a hot connection, committed when the block ends without an exception."""
        async with self.hot.connection() as connection, connection.transaction():
            yield connection

    @asynccontextmanager
    async def core(self) -> AsyncIterator[CoreConnection]:
        """One SQLAlchemy transaction, committed when the block ends without an exception."""
        async with self.engine.begin() as connection:
            yield connection


def conninfo(settings: Settings, application: str, pinned: bool = False) -> str:
    """A libpq connection string with our limits: durable commits, time-outs, a dead peer noticed in seconds."""
    options = {
        "timezone": "UTC",
        "synchronous_commit": "on",
        "statement_timeout": f"{settings.statement_timeout_seconds * 1000:.0f}",
        "lock_timeout": f"{settings.lock_timeout_seconds * 1000:.0f}",
        "idle_in_transaction_session_timeout": f"{settings.statement_timeout_seconds * 2000:.0f}",
        **(_PINNED if pinned else {}),
    }
    given = {name: str(value) for name, value in conninfo_to_dict(settings.database_url).items()}
    flags = " ".join(f"-c {name}={value}" for name, value in options.items())
    return make_conninfo(
        **{
            "connect_timeout": "5",
            "tcp_user_timeout": "10000",
            "keepalives_idle": "5",
            "keepalives_interval": "3",
            "keepalives_count": "3",
            **given,
            "application_name": f"towpath {application}",
            "options": f"{given.get('options') or ''} {flags}".strip(),
        }
    )


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[Database]:
    """Both pools, closed at the end. Connections are made on demand: a database that is away fails requests."""
    pinned = conninfo(settings, "hot", pinned=True)
    hot: AsyncConnectionPool[AsyncConnection[Any]] = AsyncConnectionPool(
        pinned,
        min_size=1,
        max_size=settings.hot_connections,
        kwargs={"autocommit": True, "prepare_threshold": 0},
        # Short, since a new request is what makes the pool try again: it would double its delay up to the limit.
        timeout=3,
        reconnect_timeout=3,
        max_idle=60,
        open=False,
        name="hot",
    )
    plain = conninfo(settings, "core")

    async def connect() -> AsyncConnection[Any]:
        return await AsyncConnection.connect(plain)

    engine = create_async_engine(
        "postgresql+psycopg://",
        async_creator=connect,
        pool_size=settings.pool_connections,
        max_overflow=0,
        pool_timeout=5,
        pool_pre_ping=True,
    )
    await hot.open()
    try:
        yield Database(hot, engine, plain)
    finally:
        await hot.close()
        await engine.dispose()
