"""A real PostgreSQL and a real server for every test; each test has a queue of its own, so nothing needs cleaning.

The server is the embedded one, or the one that `TOWPATH_TEST_DATABASE_URL` names (a superuser's URL). Every
worker of pytest-xdist has its own database, built by the real migrations.
"""

import os
import secrets
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from app.database.embedded import EmbeddedPostgres
from app.database.migrations import upgrade
from app.settings import Settings
from tests.build import Api, client_of
from tests.servers import ServiceProcess, ServiceThread

SIGNING_KEY = "a signing key for tests that is long enough"


@dataclass(frozen=True)
class PostgresServer:
    """A server that tests may do anything to: a superuser's URL, and how to make it crash and recover."""

    url: str
    restart_immediately: Callable[[], None]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """The server of this worker of pytest-xdist, or the given one, which all share."""
    given = os.environ.get("TOWPATH_TEST_DATABASE_URL")
    if given:
        yield PostgresServer(given, _restart_given)
        return
    with tempfile.TemporaryDirectory(prefix="towpath-test-") as directory:
        Path(directory).chmod(0o711)  # the server may run as another user than we do
        with EmbeddedPostgres.start(Path(directory) / "postgres", durable=False) as server:
            yield PostgresServer(server.url("postgres"), server.restart_immediately)


def _restart_given() -> None:
    command = os.environ.get("TOWPATH_TEST_RESTART_COMMAND")
    if command is None:
        pytest.skip("TOWPATH_TEST_RESTART_COMMAND does not say how to restart the given server")
    subprocess.run(command, shell=True, check=True, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="session")
def postgres_url(postgres: PostgresServer) -> str:
    """A superuser's URL."""
    return postgres.url


@pytest.fixture(scope="session")
def new_database(postgres_url: str) -> Iterator[Callable[[], str]]:
    """Makes an empty database and returns its URL."""
    names: list[str] = []

    def create() -> str:
        names.append(f"towpath_test_{secrets.token_hex(6)}")
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(names[-1])))
        return psycopg.conninfo.make_conninfo(postgres_url, dbname=names[-1])

    yield create
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        for name in names:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture(scope="session")
def new_settings(new_database: Callable[[], str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Settings]:
    """Settings for a migrated database of one's own; sweeps are quick, so that tests need not wait for them."""

    def make(**changes: Any) -> Settings:
        url = changes.pop("database_url", None)
        if url is None:
            url = new_database()
            upgrade(url)
        values: dict[str, Any] = {
            "database_url": url,
            "data_directory": tmp_path_factory.mktemp("data"),
            "signing_keys": SIGNING_KEY,
            "rescue_interval_seconds": 0.05,
            "sweep_interval_seconds": 0.5,
            "safety_poll_seconds": 1.0,
            # Every test comes from one address; the tests of limits have a service of their own.
            "refusals_per_minute": 1_000_000,
        }
        return Settings(**{**values, **changes})

    return make


@pytest.fixture(scope="session")
def settings(new_settings: Callable[..., Settings]) -> Settings:
    """The settings of the shared service."""
    return new_settings()


@pytest.fixture(scope="session")
def service(settings: Settings) -> Iterator[ServiceThread]:
    """The shared service: a real server on a real socket, in a thread of this process."""
    with ServiceThread(settings) as running:
        yield running


@pytest.fixture
def queue() -> str:
    """A queue that no other test uses."""
    return f"q-{uuid4().hex[:16]}"


@pytest.fixture
def api(service: ServiceThread, queue: str) -> Iterator[Api]:
    """The shared service's API, with the test's own queue as its default."""
    with client_of(service.url) as client:
        yield Api(client, queue)


@pytest.fixture
def db(settings: Settings) -> Iterator["psycopg.Connection[Any]"]:
    """An autocommit connection to the shared service's database: to look, and to move a row's time."""
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def connect(settings: Settings) -> Iterator[Callable[[], "psycopg.Connection[Any]"]]:
    """More connections, for holding locks and for races."""
    opened: list[psycopg.Connection[Any]] = []

    def open_one() -> "psycopg.Connection[Any]":
        opened.append(psycopg.connect(settings.database_url))
        return opened[-1]

    yield open_one
    for connection in opened:
        connection.close()


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[Callable[..., ServiceProcess]]:
    """Starts `python -m app serve` as a process of its own, which tests may kill."""
    started: list[ServiceProcess] = []

    def start(settings: Settings, *options: str) -> ServiceProcess:
        started.append(ServiceProcess(settings, tmp_path / f"service-{len(started)}.log", *options))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture(scope="session")
def other_service(settings: Settings) -> Iterator[ServiceThread]:
    """Another service on the same database, which runs no sweeps: the two share nothing else."""
    with ServiceThread(settings, maintenance=False) as running:
        yield running
