"""T5, T6, T12: how soon, with how many polls waiting, and what leases cost to keep."""

import asyncio
import gc
import time
from uuid import uuid4

import httpx
import uvloop

from benchmarks import peers
from benchmarks.callbacks import JOBS, measured
from benchmarks.http import Connection
from benchmarks.ledger import Ledger
from benchmarks.machine import Server
from benchmarks.peers import PEERS
from benchmarks.run import Run, fill
from benchmarks.timeliness import promotions, rescues
from benchmarks.workloads.load import paced, percentile

# Statistics of a connection that has fallen idle are that late.
_STATISTICS_SECONDS = 11
_BEATS_A_SECOND = 50


def pickup(run: Run) -> None:
    """T5: 100 jobs a second, 64 idle polls; from the start of the enqueue to the claim's answer."""
    seconds = max(3, int(run.seconds * 2))
    for _ in range(run.rounds):
        with run.service() as (service, database):
            ledger = Ledger()
            seen = uvloop.run(paced(service.url, ledger, polls=64, seconds=seconds))
            run.results.add("pickup p50 ms: towpath", percentile(seen.pickups, 0.5))
            run.results.add("pickup p99 ms: towpath", percentile(seen.pickups, 0.99))
            run.check("pickup", ledger, database)
        if run.with_peers:
            for peer in PEERS:
                concurrency, *more = peer.for_latency
                there = peers.fresh(peer, run.server)
                worker = peers.start(peer, there, "work", 100 * seconds, concurrency, seconds + 8, *more)
                time.sleep(2)
                peers.finish(peers.start(peer, there, "produce", 100, seconds))
                told = peers.finish(worker)
                run.results.add(f"peer pickup p50 ms: {peer.name}", told["p50_ms"])
                run.results.add(f"peer pickup p99 ms: {peer.name}", told["p99_ms"])


def idle_polls(run: Run) -> None:
    """T6: ten thousand idle polls in one process: memory, queries, pickup, heartbeats; each before and with them."""
    polls = 1_000 if run.quick else 10_000
    # The sweeps, which ask a few times a second, are not of the polls.
    with run.service("--no-maintenance", max_waiting_polls=polls + 1000) as (service, database):
        ledger = Ledger(acknowledged=fill(database, 1))
        uvloop.run(_idle(run, service, ledger, polls))
        run.check("idle polls", ledger, database)


async def _idle(run: Run, service: Server, ledger: Ledger, polls: int) -> None:
    held = await leases(service, 1000)
    ledger.handled += [lease["id"] for lease in held]
    await _quiet(run, service, ledger, held, "64")
    idle: list[Connection] = []
    for _ in range(0, polls, 200):
        idle += await asyncio.gather(*(Connection.open(service.url) for _ in range(200)))
    # On another queue: they stay idle while the jobs of the bench queue are picked up.
    waiting = [asyncio.ensure_future(_wait_idle(connection)) for connection in idle]
    await asyncio.sleep(1 if run.quick else 3)
    # What lies about here must not be looked through while times are taken.
    gc.collect()
    gc.freeze()
    run.results.add("idle polls: memory MB", service.memory_bytes / 1e6)
    await _quiet(run, service, ledger, held, f"{polls:,}" if run.quick else "all")
    ended = [each for each in waiting if each.done()]
    run.results.check(not ended, f"{len(ended)} of the idle polls ended")
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for connection in idle:
        connection.close()


async def _wait_idle(connection: Connection) -> None:
    while True:
        status, answer = await connection.post("/v1/claims", {"queues": ["idle"], "wait_seconds": 60})
        assert status == 200, status
        assert answer["jobs"] == []


async def _quiet(run: Run, service: Server, ledger: Ledger, held: list[dict[str, str]], polls: str) -> None:
    quiet = 2 if run.quick else 20
    await asyncio.sleep(0 if run.quick else _STATISTICS_SECONDS)
    before = run.transactions()
    await asyncio.sleep(quiet)
    run.results.add(f"idle polls: transactions/s, {polls}", (run.transactions() - before) / quiet)
    seen = await paced(service.url, ledger, polls=64, seconds=run.seconds * 2)
    run.results.add(f"idle polls: pickup p99 ms, {polls}", percentile(seen.pickups, 0.99))
    beats = await _single_beats(service, held, run.seconds * 2)
    run.results.add(f"idle polls: heartbeat p99 ms, {polls}", percentile(beats, 0.99))


async def leases(service: Server, wanted: int) -> list[dict[str, str]]:
    """So many jobs, claimed and held."""
    with await Connection.open(service.url) as connection:
        held: list[dict[str, str]] = []
        while len(held) < wanted:
            claim = {"queues": ["bench"], "limit": 1000, "lease_seconds": 600, "wait_seconds": 5}
            _, answer = await connection.post("/v1/claims", claim)
            held += [{"id": job["id"], "lease": job["lease"]} for job in answer["jobs"]]
        return held


async def _single_beats(service: Server, held: list[dict[str, str]], seconds: float) -> list[float]:
    with await Connection.open(service.url) as connection:
        took = []
        began = time.perf_counter()
        for number in range(int(seconds * _BEATS_A_SECOND)):
            await asyncio.sleep(max(0.0, began + number / _BEATS_A_SECOND - time.perf_counter()))
            lease = held[number % len(held)]
            at = time.perf_counter()
            status, _ = await connection.post(f"/v1/jobs/{lease['id']}/heartbeat", {"lease": lease["lease"]})
            assert status == 200, status
            took.append((time.perf_counter() - at) * 1000)
        return took


def heartbeats(run: Run) -> None:
    """T12: ten thousand leases kept by one heartbeat each every ten seconds, in calls of 100."""
    with run.service() as (service, database):
        fill(database, 10)
        held = uvloop.run(leases(service, 10_000))
        before, began = service.cpu_seconds + run.server.cpu_seconds, time.perf_counter()
        uvloop.run(_beat(service, held, 3 if run.quick else max(10.0, run.seconds)))
        spent = service.cpu_seconds + run.server.cpu_seconds - before
        run.results.add("heartbeats: share of a core", spent / (time.perf_counter() - began))


async def _beat(service: Server, held: list[dict[str, str]], seconds: float) -> None:
    with await Connection.open(service.url) as connection:
        began = time.perf_counter()
        beats = 0
        while time.perf_counter() - began < seconds:
            await asyncio.sleep(max(0.0, began + beats / (len(held) / 10) - time.perf_counter()))
            start = beats % len(held)
            _, answer = await connection.post("/v1/heartbeats", {"heartbeats": held[start : start + 100]})
            assert all(beat["status"] == "ok" for beat in answer["heartbeats"])
            beats += 100


def callbacks(run: Run) -> None:
    """From the POST of a callback to the claim that carries its payload, by a poll that waits."""
    with run.service() as (service, _database):
        seconds = measured(service.url, f"callbacks-{uuid4().hex[:8]}", 30 if run.quick else JOBS)
    run.results.add("callback to claim p50 ms", percentile(seconds, 0.5) * 1000)
    run.results.add("callback to claim p99 ms", percentile(seconds, 0.99) * 1000)


def timeliness(run: Run) -> None:
    """How late a due job is claimed, and a lost lease is noticed."""
    with run.service() as (service, _database), httpx.Client(base_url=service.url, timeout=60) as client:
        for what, measure in (("promotion", promotions), ("rescue", rescues)):
            seconds = measure(client, 30, 2.0) if run.quick else measure(client)
            run.results.add(f"{what} late p50 ms", percentile(seconds, 0.5) * 1000)
            run.results.add(f"{what} late p99 ms", percentile(seconds, 0.99) * 1000)
