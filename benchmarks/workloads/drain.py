"""T3, T4, T9: how many jobs a second are worked off, and what each writes."""

import json
import subprocess
import sys

from benchmarks import peers
from benchmarks.ledger import Ledger
from benchmarks.machine import ROOT
from benchmarks.peers import PEERS, Peer
from benchmarks.run import Run, fill

# Until a job's args have 200 bytes of JSON; the peers' carry a time too.
_PADDING, _PEERS_PADDING = 120, 95


def drain(run: Run) -> None:
    """A separate worker over HTTP works off no-op jobs; beside the peers' workers."""
    for _ in range(run.rounds):
        for connections, limit in ((64, 1), (16, 10), (8, 100)):
            _drain(run, connections, limit)
        if run.with_peers:
            for peer in PEERS:
                for setting in peer.workers:
                    peer_drain(run, peer, setting)


def _drain(run: Run, connections: int, limit: int) -> None:
    name = f"towpath {connections} × {limit}"
    # One by one takes longer: a quarter of them.
    thousands = max(1, run.jobs // (1000 if limit > 1 else 4000))
    with run.service() as (service, database):
        wal, commits = run.wal_bytes(), run.transactions()
        ledger = Ledger(acknowledged=fill(database, thousands, "x" * _PADDING))
        jobs = len(ledger.acknowledged)
        numbers = (str(jobs), str(connections), str(limit))
        worker = [sys.executable, "-m", "benchmarks.worker", service.url, "bench", *numbers]
        ran = subprocess.run(worker, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300)
        told = json.loads(ran.stdout)
        ledger.handled, ledger.reported = told["handled"], told["reported"]
        run.results.add(f"drain/s: {name}", told["per_second"])
        written = run.wal_bytes() - wal
        run.check(name, ledger, database)
        left = jobs - len(ledger.reported)
        run.results.check(left == 0, f"{name}: {left} jobs not worked off")
    if limit == 10:
        run.results.add("WAL B/job: towpath", written / jobs)
        # The server has hung up, so that all it did is counted.
        run.results.add("commits/job: towpath", (run.transactions() - commits) / jobs)


def peer_drain(run: Run, peer: Peer, setting: tuple[int, ...]) -> None:
    """One peer's worker, with one of its settings."""
    database = peers.fresh(peer, run.server)
    # A system that takes one query for each job is given fewer.
    jobs = min(run.jobs, 2000) if peer.name == "procrastinate" else run.jobs
    wal = run.wal_bytes()
    peers.finish(peers.start(peer, database, "bulk", jobs, 1000, padding=_PEERS_PADDING))
    told = peers.finish(peers.start(peer, database, "work", jobs, setting[0], 60, *setting[1:]))
    run.results.add(f"peer drain/s: {peer.name} {setting}", told["per_second"])
    if setting == peer.workers[-1]:
        run.results.add(f"peer WAL B/job: {peer.name}", (run.wal_bytes() - wal) / told["jobs"])
