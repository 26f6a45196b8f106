"""One run: its server, its sizes, where its figures go."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.ledger import Ledger
from benchmarks.machine import Database, DurablePostgres, Server, fresh_database, towpath
from benchmarks.results import Results

_FILL = """SELECT (towpath.enqueue_many((SELECT jsonb_agg(jsonb_build_object('queue', 'bench', 'kind', 'send',
    'args', jsonb_build_object('user_id', n, 'email', 'someone@example.com', 'template', 'welcome',
        'padding', %(padding)s::text)))
    FROM generate_series(1, 1000) AS n))).id::text FROM generate_series(1, %(thousands)s)"""
_THERE = "SELECT id::text FROM towpath.jobs"


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the workloads are given."""

    server: DurablePostgres
    results: Results
    rounds: int = 3
    seconds: float = 3
    jobs: int = 20_000
    with_peers: bool = False
    quick: bool = False
    minutes: float = 5
    """How long a snapshot is held, and how long a soak is."""
    deepest: int = 5_000_000
    """Most waiting jobs, and most finished ones."""

    @contextmanager
    def service(self, *options: str, **settings: Any) -> Iterator[tuple[Server, Database]]:
        """The service on a new database, with the queue there."""
        database = fresh_database(self.server, "towpath")
        with towpath(database, *options, **settings) as server:
            httpx.put(f"{server.url}/v1/queues/bench", json={}).raise_for_status()
            yield server, database

    def wal_bytes(self) -> int:
        """The place in the log."""
        return int(Database(self.server.url("postgres")).value("SELECT pg_current_wal_lsn() - '0/0'"))

    def transactions(self) -> int:
        """Of the service's database so far. Asked from another one, so that asking does not count."""
        count = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = 'towpath'"
        return int(Database(self.server.url("postgres")).value(count))

    def check(self, what: str, ledger: Ledger, database: Database, *, unheard: int = 0) -> None:
        """Hold the callers' log against the tables."""
        there = [row[0] for row in database.rows(_THERE)]
        completed = [row[0] for row in database.rows(f"{_THERE} WHERE state = 'completed'")]
        for fault in ledger.faults(there, completed, unheard=unheard):
            self.results.check(False, f"{what}: {fault}")


def fill(database: Database, thousands: int, padding: str = "") -> list[str]:
    """Waiting jobs, made in the database; their ids."""
    return [id_ for (id_,) in database.rows(_FILL, {"thousands": thousands, "padding": padding})]
