"""Other PostgreSQL job systems, by their public fast paths, on the same PostgreSQL in the same run.

Each is installed on demand, at a pinned version, in a folder of its own under the cache directory. How they are kept
fair is written in benchmarks/README.md.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import Database, DurablePostgres, fresh_database

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "towpath-benchmark-peers"


@dataclass(frozen=True, slots=True)
class Peer:
    """A system, the script that drives it, and the worker settings that are tried: the best one counts."""

    name: str
    script: str
    workers: tuple[tuple[int, ...], ...]
    """Concurrency, and for some a batch size or the local queue's size."""
    for_latency: tuple[int, ...]
    swept: tuple[tuple[int, ...], ...]
    """What else `python -m benchmarks.peers` tries, to find the best."""


PEERS = (
    Peer("awa", "awa_peer.py", ((64,), (256,), (1024,)), (64,), ((128,), (512,))),
    Peer("procrastinate", "procrastinate_peer.py", ((10,),), (10,), ((1,), (50,))),
    Peer("pg-boss", "pgboss.mjs", ((1, 500), (2, 1000)), (2, 100), ((1, 250), (1, 1000), (2, 500), (4, 500))),
    Peer("graphile-worker", "graphile.mjs", ((10, 0), (50, 500)), (10, 0), ((10, 100), (24, 500), (50, 1000))),
)


def install() -> None:
    """Install all of them, unless it was done before."""
    CACHE.mkdir(parents=True, exist_ok=True)
    wanted = (HERE / "requirements.txt").read_text() + (HERE / "package.json").read_text()
    mark = CACHE / "installed"
    if mark.exists() and mark.read_text() == wanted:
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", CACHE / "venv"], check=True)
    pip = [str(CACHE / "venv/bin/python"), "-m", "pip", "install", "--quiet", "-r", str(HERE / "requirements.txt")]
    subprocess.run(pip, check=True)
    shutil.copy(HERE / "package.json", CACHE / "package.json")
    npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--no-package-lock"]
    subprocess.run(npm, cwd=CACHE, check=True)
    mark.write_text(wanted)


def _command(peer: Peer, what: str, numbers: tuple[int, ...]) -> list[str]:
    # The scripts lie beside what they import: Node looks for packages where the file is.
    for script in HERE.glob("*.*js"):
        shutil.copy(script, CACHE / script.name)
    program = ["node", str(CACHE / peer.script)] if peer.script.endswith("js") else []
    program = program or [str(CACHE / "venv/bin/python"), str(HERE / peer.script)]
    return [*program, what, *map(str, numbers)]


def start(peer: Peer, database: Database, what: str, *numbers: int, padding: int = 0) -> "subprocess.Popen[str]":
    """A run that goes on. Its jobs carry so many bytes more."""
    environment = {**os.environ, "BENCH_URL": database.url, "BENCH_PADDING": str(padding)}
    return subprocess.Popen(
        _command(peer, what, numbers), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """The figures that a run told."""
    output, errors = process.communicate(timeout=300)
    told = [line[2:] for line in output.splitlines() if line.startswith("@@")]
    if process.returncode != 0:
        raise RuntimeError(f"{process.args!r} failed: {errors[-500:]}")
    return dict(json.loads(told[-1])) if told else {}


def fresh(peer: Peer, server: DurablePostgres) -> Database:
    """A new database with the peer's schema."""
    database = fresh_database(server, f"peer_{peer.name.replace('-', '_')}")
    finish(start(peer, database, "setup"))
    return database
