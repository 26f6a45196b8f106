"""The workloads. Each runs its rounds interleaved with what it is compared to, and checks that nothing went wrong."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import uvloop

from benchmarks import peers
from benchmarks.http import Connection
from benchmarks.machine import ROOT, Database, DurablePostgres, Server, asgi, fresh_database, towpath, wrk
from benchmarks.peers import PEERS, Peer
from benchmarks.results import Results

FILL = """SELECT towpath.enqueue_many((SELECT jsonb_agg(jsonb_build_object('queue', 'bench', 'kind', 'send',
    'args', jsonb_build_object('user_id', n, 'email', 'someone@example.com', 'template', 'welcome',
        'padding', %(padding)s::text)))
    FROM generate_series(1, 1000) AS n)) FROM generate_series(1, %(thousands)s)"""


@dataclass(frozen=True)
class Run:
    """One run's server, its length, and where its figures go."""

    server: DurablePostgres
    results: Results
    rounds: int
    seconds: float
    jobs: int
    with_peers: bool
    quick: bool
    minutes: float
    """How long a snapshot is held."""
    deepest: int
    """Most waiting jobs."""

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


def single(run: Run) -> None:
    """T1: one durable job a request, 64 connections; beside a bare echo, the textbook, and peers with 50 callers."""
    with ExitStack() as stack:
        service, database = stack.enter_context(run.service())
        textbook = fresh_database(run.server, "textbook")
        servers = {
            "echo": stack.enter_context(asgi("benchmarks.echo:app")),
            "towpath": service,
            "textbook": stack.enter_context(asgi("benchmarks.textbook:app", TEXTBOOK_URL=textbook.url)),
        }
        wrk(service.url, "enqueue.lua", connections=64, seconds=1)
        accepted = database.value("SELECT count(*) FROM towpath.jobs")
        for _ in range(run.rounds):
            for name, server in servers.items():
                before = server.cpu_seconds
                load = wrk(server.url, "enqueue.lua", connections=64, seconds=run.seconds)
                run.results.add(f"single/s: {name}", load.per_second)
                run.results.add(f"single p99 ms: {name}", load.p99_ms)
                run.results.add(f"single server CPU us: {name}", (server.cpu_seconds - before) / load.answers * 1e6)
                run.results.add(f"single: wrk's own share of a core, {name}", load.own_cpu)
                run.results.check(load.errors == 0, f"{load.errors} errors from {name}")
                accepted += load.answers if name == "towpath" else 0
            if run.with_peers:
                for peer in PEERS:
                    told = peers.finish(peers.start(peer, peers.fresh(peer, run.server), "single", 1000, 50))
                    run.results.add(f"peer single/s: {peer.name}", told["per_second"])
        # A request that was cut off at the end of a round may be in as well: one for each connection and round.
        there = database.value("SELECT count(*) FROM towpath.jobs")
        run.results.check(accepted <= there <= accepted + 64 * (run.rounds + 1), f"{accepted} accepted, {there} there")


def bulk(run: Run) -> None:
    """T2: batches of 1,000, four connections; beside the peers' bulk calls."""
    for _ in range(run.rounds):
        with run.service() as (service, database):
            load = wrk(service.url, "batch.lua", connections=4, seconds=run.seconds)
            run.results.add("bulk/s: towpath", load.per_second * 1000)
            run.results.check(load.errors == 0, f"{load.errors} errors in batches")
            there = database.value("SELECT count(*) FROM towpath.jobs")
            run.results.check(there >= load.answers * 1000, f"{load.answers} batches accepted, {there} jobs there")
        if run.with_peers:
            for peer in PEERS:
                told = peers.finish(peers.start(peer, peers.fresh(peer, run.server), "bulk", run.jobs, 1000))
                run.results.add(f"peer bulk/s: {peer.name}", told["per_second"])


def drain(run: Run) -> None:
    """T3, T4, T9: a separate worker over HTTP works off no-op jobs; beside the peers' workers."""
    for _ in range(run.rounds):
        for connections, limit in ((64, 1), (16, 10), (8, 100)):
            _drain(run, connections, limit)
        if run.with_peers:
            for peer in PEERS:
                for setting in peer.workers:
                    _peer_drain(run, peer, setting)


def _drain(run: Run, connections: int, limit: int) -> None:
    name = f"towpath {connections} × {limit}"
    # In thousands, as they are filled in.
    jobs = run.jobs if limit > 1 else max(1000, run.jobs // 4000 * 1000)
    with run.service() as (service, database):
        commits = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
        wal = run.wal_bytes()
        database.rows(FILL, {"thousands": jobs // 1000, "padding": "x" * 80})
        commits_before = database.value(commits)
        worker = [
            sys.executable,
            "-m",
            "benchmarks.worker",
            service.url,
            "bench",
            str(jobs),
            str(connections),
            str(limit),
        ]
        told = json.loads(
            subprocess.run(worker, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300).stdout
        )
        run.results.add(f"drain/s: {name}", told["per_second"])
        if limit == 10:
            run.results.add("WAL B/job: towpath", (run.wal_bytes() - wal) / jobs)
            time.sleep(1.1)  # the statistics are that late
            run.results.add("commits/job: towpath", (database.value(commits) - commits_before) / jobs)
        completed = database.value("SELECT count(*) FROM towpath.jobs WHERE state = 'completed' AND attempt = 1")
        fine = told["doubled"] == told["unreported"] == 0 and completed == jobs == told["handled"]
        run.results.check(fine, f"{name}: {told}, {completed} of {jobs} completed")


def _peer_drain(run: Run, peer: Peer, setting: tuple[int, ...]) -> None:
    database = peers.fresh(peer, run.server)
    # A system that takes one query for each job is given fewer.
    jobs = 2000 if peer.name == "procrastinate" else run.jobs
    wal = run.wal_bytes()
    peers.finish(peers.start(peer, database, "bulk", jobs, 1000))
    told = peers.finish(peers.start(peer, database, "work", jobs, setting[0], 60, *setting[1:]))
    run.results.add(f"peer drain/s: {peer.name} {setting}", told["per_second"])
    if setting == peer.workers[-1]:
        run.results.add(f"peer WAL B/job: {peer.name}", (run.wal_bytes() - wal) / told["jobs"])


def pickup(run: Run) -> None:
    """T5: 100 jobs a second, 64 idle polls; from the start of the enqueue to the claim's answer."""
    for _ in range(run.rounds):
        with run.service() as (service, _database):
            p50, p99 = uvloop.run(_picked_up(service.url, polls=64, seconds=run.seconds * 2))
            run.results.add("pickup p50 ms: towpath", p50)
            run.results.add("pickup p99 ms: towpath", p99)
        if run.with_peers:
            for peer in PEERS:
                database = peers.fresh(peer, run.server)
                seconds = max(3, int(run.seconds * 2))
                worker = peers.start(
                    peer, database, "work", 100 * seconds, peer.for_latency[0], seconds + 8, *peer.for_latency[1:]
                )
                time.sleep(2)
                peers.finish(peers.start(peer, database, "produce", 100, seconds))
                told = peers.finish(worker)
                run.results.add(f"peer pickup p50 ms: {peer.name}", told["p50_ms"])
                run.results.add(f"peer pickup p99 ms: {peer.name}", told["p99_ms"])


async def _picked_up(url: str, polls: int, seconds: float, rate: int = 100) -> tuple[float, float]:
    jobs = int(seconds * rate)
    late: list[float] = []
    done = asyncio.Event()

    async def poll() -> None:
        connection = await Connection.open(url)
        while not done.is_set():
            _, answer = await connection.post("/v1/claims", {"queues": ["bench"], "wait_seconds": 60})
            for job in answer["jobs"]:
                late.append(time.time() - job["args"]["t"])
                if len(late) == jobs:
                    done.set()
                await connection.post(f"/v1/jobs/{job['id']}/complete", {"lease": job["lease"]})

    waiting = [asyncio.ensure_future(poll()) for _ in range(polls)]
    await asyncio.sleep(1)
    free = [await Connection.open(url) for _ in range(20)]

    async def produce() -> None:
        connection = free.pop() if free else await Connection.open(url)
        job = {"queue": "bench", "kind": "send", "args": {"user_id": 1, "t": time.time()}}
        await connection.post("/v1/jobs", job)
        free.append(connection)

    began = time.perf_counter()
    producing = []
    for number in range(jobs):
        await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
        producing.append(asyncio.ensure_future(produce()))
    await asyncio.gather(*producing)
    await asyncio.wait_for(done.wait(), 30)
    for each in waiting:
        each.cancel()
    counted = sorted(late[len(late) // 10 :])
    return counted[len(counted) // 2] * 1000, counted[int(len(counted) * 0.99)] * 1000


def idle_polls(run: Run) -> None:
    """T6: ten thousand idle polls in one process: memory, queries, pickup."""
    polls = 2_000 if run.quick else 10_000
    # The sweeps, which ask a few times a second, are not of the polls.
    with run.service("--no-maintenance", max_waiting_polls=polls + 1000) as (service, database):
        uvloop.run(_idle(run, service, database, polls))


async def _idle(run: Run, service: Server, database: Database, polls: int) -> None:
    idle: list[Connection] = []
    for _ in range(0, polls, 200):
        idle += await asyncio.gather(*(Connection.open(service.url) for _ in range(200)))
    # On another queue: they stay idle while the jobs of the bench queue are picked up.
    waiting = [
        asyncio.ensure_future(connection.post("/v1/claims", {"queues": ["idle"], "wait_seconds": 60}))
        for connection in idle
    ]
    await asyncio.sleep(3)
    run.results.add("idle polls: memory MB", service.memory_bytes / 1e6)
    count = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
    before = database.value(count)
    await asyncio.sleep(5)
    run.results.add("idle polls: transactions/s", (database.value(count) - before) / 5)
    _, p99 = await _picked_up(service.url, polls=64, seconds=run.seconds * 2)
    run.results.add("idle polls: pickup p99 ms", p99)
    for each in waiting:
        each.cancel()


def snapshot(run: Run) -> None:
    """T7: full rate through HTTP while a transaction holds an old snapshot, so that vacuum can remove nothing."""
    windows = 4 if run.quick else 10
    seconds = 5 if run.quick else run.minutes * 60 / windows
    for held in (False, True):
        with run.service() as (service, database), psycopg.connect(database.url) as old:
            if held:
                old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                old.execute("SELECT count(*) FROM towpath.jobs")
            rates = _full_rate(service, windows, seconds)
            if held:
                run.results.rounds["snapshot: windows/s"] = rates
            run.results.add("snapshot: last window/s" if held else "snapshot: without/s", rates[-1])


def _full_rate(service: Server, windows: int, seconds: float) -> list[float]:
    """Completed jobs a second, window by window: producers and a worker as fast as they can."""
    over = threading.Event()
    done = [0]

    async def produce() -> None:
        connection = await Connection.open(service.url)
        job = {"queue": "bench", "kind": "send", "args": {"user_id": 17}}
        while not over.is_set():
            if done[0] + 20_000 > made[0]:
                await connection.post("/v1/jobs/batch", {"jobs": [job] * 200})
                made[0] += 200
            else:
                await asyncio.sleep(0.005)

    async def work() -> None:
        connection = await Connection.open(service.url)
        reports: list[dict[str, str]] = []
        while not over.is_set():
            body = {"settlements": reports, "claim": {"queues": ["bench"], "limit": 100, "wait_seconds": 0}}
            _, answer = await connection.post("/v1/settlements", body)
            done[0] += len(reports)
            reports = [
                {"outcome": "complete", "id": job["id"], "lease": job["lease"]} for job in answer["claim"]["jobs"]
            ]

    made = [0]

    async def everybody() -> None:
        await asyncio.gather(*(produce() for _ in range(2)), *(work() for _ in range(8)))

    thread = threading.Thread(target=lambda: uvloop.run(everybody()))
    thread.start()
    rates = []
    for _ in range(windows):
        before = done[0]
        time.sleep(seconds)
        rates.append((done[0] - before) / seconds)
    over.set()
    thread.join(30)
    return rates


def depth(run: Run) -> None:
    """T8: claim's p50 with more and more waiting and scheduled jobs."""
    largest = 200_000 if run.quick else run.deepest
    depths = [*(depth for depth in (10_000, 100_000, 1_000_000) if depth < largest), largest]
    with run.service() as (service, database):
        filled = 0
        for wanted in depths:
            _fill(database, wanted - filled)
            filled = wanted
            p50 = uvloop.run(_claims(service.url, 300))
            run.results.add(f"depth: claim p50 ms, {wanted:,} waiting", p50)
            if wanted == depths[0]:
                run.results.add("depth: first p50 ms", p50)
        run.results.add("depth: deepest p50 ms", p50)


def _fill(database: Database, jobs: int) -> None:
    database.rows(
        """INSERT INTO towpath.jobs (id, queue, kind, state, max_attempts, run_at, claim_order, args)
        SELECT gen_random_uuid(), 'bench', 'send', CASE WHEN n %% 2 = 0 THEN 'available' ELSE 'scheduled' END, 20,
            now() + CASE WHEN n %% 2 = 0 THEN interval '0' ELSE interval '1 day' END, now() + n * interval '1 us', '{}'
        FROM generate_series(1, %s) AS n""",
        [jobs * 2],
    )
    database.rows("VACUUM ANALYZE towpath.jobs")
    # What was filled in is not to be written to disk while it is measured.
    database.rows("CHECKPOINT")


async def _claims(url: str, claims: int) -> float:
    connection = await Connection.open(url)
    took = []
    for _ in range(claims):
        began = time.perf_counter()
        _, answer = await connection.post("/v1/claims", {"queues": ["bench"], "wait_seconds": 0})
        took.append(time.perf_counter() - began)
        assert len(answer["jobs"]) == 1
    return sorted(took)[claims // 2] * 1000


def processes(run: Run) -> None:
    """T10: one service process and two, on one database, with 256 connections."""
    for _ in range(run.rounds):
        for workers in (1, 2):
            with run.service("--workers", str(workers)) as (service, _database):
                load = wrk(service.url, "enqueue.lua", connections=256, seconds=run.seconds)
                name = f"towpath {workers} process{'es' if workers > 1 else ''}, 256"
                run.results.add(f"single/s: {name}", load.per_second)
                run.results.check(load.errors == 0, f"{load.errors} errors from {name}")


def heartbeats(run: Run) -> None:
    """T12: ten thousand leases kept by one heartbeat each every ten seconds, in calls of 100."""
    with run.service() as (service, database):
        database.rows(FILL, {"thousands": 10, "padding": ""})
        share = uvloop.run(_beat(service, 10_000, run.seconds))
        run.results.add("heartbeats: share of a core", share)


async def _beat(service: Server, leases: int, seconds: float) -> float:
    connection = await Connection.open(service.url)
    held: list[dict[str, str]] = []
    while len(held) < leases:
        claim = {"queues": ["bench"], "limit": 1000, "lease_seconds": 600, "wait_seconds": 5}
        _, answer = await connection.post("/v1/claims", claim)
        held += [{"id": job["id"], "lease": job["lease"]} for job in answer["jobs"]]
    began, before = time.perf_counter(), service.cpu_seconds
    beats = 0
    while time.perf_counter() - began < max(5.0, seconds):
        at = began + beats / (leases / 10)
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        start = beats % leases
        _, answer = await connection.post("/v1/heartbeats", {"heartbeats": held[start : start + 100]})
        assert all(beat["status"] == "ok" for beat in answer["heartbeats"])
        beats += 100
    return (service.cpu_seconds - before) / (time.perf_counter() - began)


def callbacks(run: Run) -> None:
    """From the POST of a callback to the claim that carries its payload, by a poll that waits."""
    from benchmarks.callbacks import measured

    with run.service() as (service, _database):
        seconds = sorted(measured(service.url, f"callbacks-{uuid4().hex[:8]}"))
    run.results.add("callback to claim p50 ms", seconds[len(seconds) // 2] * 1000)
    run.results.add("callback to claim p99 ms", seconds[int(len(seconds) * 0.99)] * 1000)


WORKLOADS: dict[str, Callable[[Run], None]] = {
    each.__name__: each
    for each in (single, bulk, drain, pickup, idle_polls, snapshot, depth, processes, heartbeats, callbacks)
}
