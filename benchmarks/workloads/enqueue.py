"""T1, T2, T10: how many jobs a second can be handed in."""

from contextlib import ExitStack

from benchmarks import peers
from benchmarks.ledger import Ledger
from benchmarks.machine import asgi, fresh_database, wrk
from benchmarks.peers import PEERS
from benchmarks.run import Run

_CONNECTIONS = 64
_MANY_CONNECTIONS = 256
_BUSY = 0.8
_TRIALS = 2
"""Loads that find out how long to pause for 80 % of the rate."""


def single(run: Run) -> None:
    """T1: one durable job a request, 64 connections; beside a bare echo, the textbook, and peers with 50 callers."""
    ledger = Ledger()
    with ExitStack() as stack:
        service, database = stack.enter_context(run.service())
        textbook = fresh_database(run.server, "textbook")
        servers = {
            "echo": stack.enter_context(asgi("benchmarks.echo:app")),
            "towpath": service,
            "textbook": stack.enter_context(asgi("benchmarks.textbook:app", TEXTBOOK_URL=textbook.url)),
        }
        ledger.acknowledged += wrk(service.url, connections=_CONNECTIONS, seconds=1).ids
        for _ in range(run.rounds):
            for name, server in servers.items():
                before = server.cpu_seconds
                load = wrk(server.url, connections=_CONNECTIONS, seconds=run.seconds)
                run.results.add(f"single/s: {name}", load.per_second)
                run.results.add(f"single p99 ms: {name}", load.p99_ms)
                run.results.add(f"single server CPU us: {name}", (server.cpu_seconds - before) / load.answers * 1e6)
                run.results.add(f"single: wrk's own share of a core, {name}", load.own_cpu)
                if server is service:
                    ledger.acknowledged += load.ids
                    run.results.check(load.errors == 0, f"{load.errors} errors from {name}")
            if run.with_peers:
                for peer in PEERS:
                    calls = 200 if run.quick else 1000
                    told = peers.finish(peers.start(peer, peers.fresh(peer, run.server), "single", calls, 50))
                    run.results.add(f"peer single/s: {peer.name}", told["per_second"])
        wanted = _BUSY * run.results.median("single/s: towpath")
        pause_ms = 0.0
        for number in range(run.rounds + _TRIALS):
            load = wrk(service.url, connections=_CONNECTIONS, seconds=run.seconds, pause_ms=pause_ms)
            ledger.acknowledged += load.ids
            # A connection's requests are that far apart; some of it is the answer's time, which is not known before.
            pause_ms = max(1.0, pause_ms + 1000 * _CONNECTIONS * (1 / wanted - 1 / load.per_second))
            if number < _TRIALS:
                continue
            run.results.add("single at 80 %: reached/s", load.per_second)
            run.results.add("single at 80 %: p50 ms", load.p50_ms)
            run.results.add("single at 80 %: p99 ms", load.p99_ms)
        # What was under way at the end of a load may be in as well.
        run.check("single", ledger, database, unheard=_CONNECTIONS * (1 + 2 * run.rounds + _TRIALS))


def bulk(run: Run) -> None:
    """T2: batches of 1,000, four connections; beside the peers' bulk calls."""
    for _ in range(run.rounds):
        with run.service() as (service, database):
            load = wrk(service.url, connections=4, seconds=run.seconds, jobs=1000)
            run.results.add("bulk/s: towpath", load.per_second * 1000)
            run.results.check(load.errors == 0, f"{load.errors} errors in batches")
            run.check("bulk", Ledger(acknowledged=load.ids), database, unheard=4 * 1000)
        if run.with_peers:
            for peer in PEERS:
                told = peers.finish(peers.start(peer, peers.fresh(peer, run.server), "bulk", run.jobs, 1000))
                run.results.add(f"peer bulk/s: {peer.name}", told["per_second"])


def processes(run: Run) -> None:
    """T10: one service process and two, on one database, with 256 connections."""
    for _ in range(run.rounds):
        for workers in (1, 2):
            with run.service("--workers", str(workers)) as (service, database):
                load = wrk(service.url, connections=_MANY_CONNECTIONS, seconds=run.seconds)
                name = f"towpath {workers} process{'es' if workers > 1 else ''}, 256"
                run.results.add(f"single/s: {name}", load.per_second)
                run.results.check(load.errors == 0, f"{load.errors} errors from {name}")
                run.check(name, Ledger(acknowledged=load.ids), database, unheard=_MANY_CONNECTIONS)
