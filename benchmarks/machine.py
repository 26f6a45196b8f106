"""What is measured, and with what: a durable PostgreSQL, real server processes on loopback, wrk.

Everything is started for a run and is gone at its end. Database and servers are processes of their own, as is what
puts load on them.
"""

import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import psycopg
from psycopg import sql

from app.database.embedded import EmbeddedPostgres

HERE = Path(__file__).parent
ROOT = HERE.parent
_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "shared_buffers": f"{min(2048, _MEMORY // 4 >> 20)}MB",
    "max_wal_size": "8GB",
    "wal_buffers": "16MB",
    "max_connections": "400",
    "checkpoint_timeout": "15min",
    "autovacuum_naptime": "10s",
}
_START_SECONDS = 30


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class DurablePostgres(EmbeddedPostgres):
    """The embedded server's binaries, with the settings of a small server of one's own, on TCP too (for the peers)."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.port = free_port()
        self._options = {**self._options, **SETTINGS, "listen_addresses": "127.0.0.1"}
        self._tcp_options = {"port": str(self.port)}

    def _launch(self) -> None:
        # The socket in the data directory is named by the port; both have to be found under it.
        self._options |= self._tcp_options
        super()._launch()

    @property
    def cpu_seconds(self) -> float:
        """What all of its processes have used so far, those included that have ended."""
        assert self._process
        return _cpu_seconds(self._process.pid)

    def url(self, database: str = "towpath") -> str:
        """A connection string over TCP, as the peers need it: everybody takes the same way."""
        return f"postgresql://towpath@127.0.0.1:{self.port}/{database}"


@dataclass(frozen=True, slots=True)
class Database:
    """One database of the server."""

    url: str

    def rows(self, query: str, parameters: Any = None) -> list[tuple[Any, ...]]:
        """What a query gives; empty for one that gives nothing."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(query, parameters)
            return cursor.fetchall() if cursor.description else []

    def value(self, query: str, parameters: Any = None) -> Any:
        """The one value that a query gives."""
        return self.rows(query, parameters)[0][0]


@contextmanager
def postgres() -> Iterator[DurablePostgres]:
    """A server for one run, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="towpath-benchmark-") as directory:
        Path(directory).chmod(0o711)
        with DurablePostgres.start(Path(directory) / "postgres") as server:
            yield server


def fresh_database(server: DurablePostgres, name: str) -> Database:
    """An empty database of this name."""
    with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    return Database(server.url(name))


def _cpu_seconds(pid: int) -> float:
    """Of a process and its children; of those that have ended, too."""
    pids, ticks = [pid], 0
    for each in pids:
        try:
            pids += map(int, Path(f"/proc/{each}/task/{each}/children").read_text().split())
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            continue  # it ended just now: its parent has its time
        ticks += sum(int(used) for used in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


class Server:
    """A process that answers on a port, and what it costs."""

    def __init__(self, command: list[str], port: int, ready: str, environment: dict[str, str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        # Left alone by what else runs here, and gone with the server.
        self._directory = tempfile.TemporaryDirectory(prefix="towpath-benchmark-data-")
        environment = {**environment, "TOWPATH_DATA_DIRECTORY": self._directory.name}
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        give_up_at = time.monotonic() + _START_SECONDS
        while time.monotonic() < give_up_at:
            if self._process.poll() is not None:
                raise RuntimeError(f"{command} ended with {self._process.returncode}")
            try:
                httpx.get(self.url + ready, timeout=2)
            except httpx.TransportError:
                time.sleep(0.05)
            else:
                return
        raise RuntimeError(f"{command} does not answer")

    @property
    def cpu_seconds(self) -> float:
        """What it and its children have used so far."""
        return _cpu_seconds(self._process.pid)

    @property
    def memory_bytes(self) -> int:
        """Resident memory of the main process."""
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self._process.pid}/status").read_text())
        assert found
        return int(found[1]) * 1024

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._directory.cleanup()


def towpath(database: Database, *options: str, **settings: Any) -> Server:
    """The service, on a database that it brings up to date first."""
    port = free_port()
    environment = {"TOWPATH_DATABASE_URL": database.url, "TOWPATH_SIGNING_KEYS": "benchmark " * 5}
    environment |= {f"TOWPATH_{name.upper()}": str(value) for name, value in settings.items()}
    command = [sys.executable, "-m", "app"]
    subprocess.run([*command, "migrate"], cwd=ROOT, env={**os.environ, **environment}, check=True, capture_output=True)
    return Server([*command, "serve", "--port", str(port), *options], port, "/livez", environment)


def asgi(application: str, **environment: str) -> Server:
    """Another application under uvicorn, as the service is."""
    port = free_port()
    options = ["--port", str(port), "--log-level", "error", "--no-access-log", "--backlog", "4096"]
    return Server([sys.executable, "-m", "uvicorn", *options, application], port, "/", environment)


@dataclass(frozen=True, slots=True)
class Load:
    """What wrk saw, and the share of one core that it took itself."""

    per_second: float
    p50_ms: float
    p99_ms: float
    answers: int
    errors: int
    own_cpu: float
    ids: list[str]
    """Of the jobs that were acknowledged."""


def wrk(url: str, *, connections: int, seconds: float, jobs: int = 1, pause_ms: float = 0) -> Load:
    """Closed loop: each connection sends its next request, of so many jobs, when it has its answer.

    With a pause it waits in between, for a random time of this mean.
    """
    program = shutil.which("wrk")
    if program is None:
        raise SystemExit("wrk is needed: apt-get install wrk")
    command = [
        program,
        "-t1",
        f"-c{connections}",
        f"-d{max(1, round(seconds))}s",
        "--latency",
        "-s",
        str(HERE / "wrk" / "post.lua"),
        url,
    ]
    with tempfile.NamedTemporaryFile("r", prefix="towpath-benchmark-ids-") as log:
        asked = {"BENCH_LOG": log.name, "BENCH_JOBS": str(jobs), "BENCH_PAUSE_MS": str(round(pause_ms))}
        before = os.times()
        ran = subprocess.run(command, env={**os.environ, **asked}, check=True, capture_output=True, text=True)
        after = os.times()
        ids = log.read().split()
    own = after.children_user + after.children_system - before.children_user - before.children_system
    found = re.search(r"@@ (\d+) (\d+) (\d+) (\d+) (\d+)", ran.stdout)
    assert found, ran.stdout + ran.stderr
    answers, errors, duration_us, p50_us, p99_us = map(int, found.groups())
    took = duration_us / 1e6
    return Load((answers - errors) / took, p50_us / 1000, p99_us / 1000, answers, errors, own / took, ids)


def conditions(server: DurablePostgres) -> dict[str, Any]:
    """What a figure depends on."""
    with psycopg.connect(server.url("postgres")) as connection:
        version = connection.execute("SHOW server_version").fetchone()
        shown = {name: connection.execute(f"SHOW {name}").fetchone() for name in SETTINGS}
    return {
        "cores": os.cpu_count(),
        "processor": processor(),
        "python": platform.python_version(),
        "postgresql": version and version[0],
        "settings": {name: value and value[0] for name, value in shown.items()},
        "fdatasync_ms": fdatasync_ms(),
    }


def processor() -> str:
    """The processor's name."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


def fdatasync_ms() -> float:
    """The median of writing 8 kB durably, where the database is too."""
    times = []
    with tempfile.NamedTemporaryFile(dir=tempfile.gettempdir()) as file:
        for _ in range(200):
            file.write(b"x" * 8192)
            file.flush()
            started = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - started)
    return round(sorted(times)[100] * 1000, 3)
