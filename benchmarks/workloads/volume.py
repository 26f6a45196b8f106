"""T8, T11: what many waiting jobs, and many finished ones, do to the others."""

import time

import uvloop

from benchmarks.curves import Curve
from benchmarks.http import Connection
from benchmarks.ledger import Ledger
from benchmarks.machine import Database
from benchmarks.run import Run
from benchmarks.workloads.load import paced, percentile

_FIRST = 10_000
_AN_HOURS_WORTH = 3_600_000
_WAITING = """INSERT INTO towpath.jobs (id, queue, kind, state, max_attempts, run_at, claim_order, args)
SELECT gen_random_uuid(), 'bench', 'send', CASE WHEN n %% 2 = 0 THEN 'available' ELSE 'scheduled' END, 20,
    now() + CASE WHEN n %% 2 = 0 THEN interval '0' ELSE interval '1 day' END, now() + n * interval '1 us', '{}'
FROM generate_series(1, %s) AS n"""
# Between one hour and two hours ago: what is worked off meanwhile is younger.
_FINISHED = """INSERT INTO towpath.jobs
    (id, queue, kind, state, attempt, lease_number, max_attempts, run_at, claim_order, finished_at, settled_as, args)
SELECT gen_random_uuid(), 'bench', 'send', 'completed', 1, 1, 20, at, at, at, 'complete', '{}'
FROM generate_series(1, %s) AS n, LATERAL (SELECT now() - (3600 + n %% 3600) * interval '1 s') AS finished (at)"""


def depth(run: Run) -> None:
    """T8: claim's p50 with more and more waiting jobs, and as many scheduled ones; the first depth again at the end."""
    largest = min(run.deepest, 200_000) if run.quick else run.deepest
    depths = [*(depth for depth in (_FIRST, 100_000, 1_000_000) if depth < largest), largest]
    curve = Curve("Claim of one job, p50", "waiting jobs", "ms")
    run.results.curves["depth"] = curve
    with run.service() as (service, database):
        filled = 0
        for wanted in depths:
            _fill(database, _WAITING, 2 * (wanted - filled))
            filled = wanted
            p50 = uvloop.run(_claims(service.url, 300))
            run.results.add(f"depth: claim p50 ms, {wanted:,} waiting", p50)
            curve.add("towpath", wanted, p50)
        run.results.add("depth: deepest p50 ms", p50)
        run.results.add("depth: first p50 ms", run.results.median(f"depth: claim p50 ms, {depths[0]:,} waiting"))
        database.rows("TRUNCATE towpath.jobs CASCADE")
        _fill(database, _WAITING, 2 * depths[0])
        run.results.add("depth: first p50 ms", uvloop.run(_claims(service.url, 300)))


def _fill(database: Database, insert: str, rows: int) -> None:
    database.rows(insert, [rows])
    database.rows("VACUUM ANALYZE towpath.jobs")
    # What was filled in is not to be written to disk while it is measured.
    database.rows("CHECKPOINT")


async def _claims(url: str, claims: int) -> float:
    with await Connection.open(url) as connection:
        took = []
        for _ in range(claims):
            began = time.perf_counter()
            _, answer = await connection.post("/v1/claims", {"queues": ["bench"], "wait_seconds": 0})
            took.append((time.perf_counter() - began) * 1000)
            assert len(answer["jobs"]) == 1
        return percentile(took, 0.5)


def retention(run: Run) -> None:
    """T11: an hour's worth of jobs that finished at 1,000 a second may go, all at once, while others are worked off."""
    finished = min(run.deepest, 100_000 if run.quick else _AN_HOURS_WORTH)
    seconds = max(3.0, run.seconds * 2)
    with run.service(sweep_interval_seconds=0.5) as (service, database):
        # No job may start as finished: past the trigger that sees to it.
        _fill(Database(f"{database.url}?options=-csession_replication_role%3Dreplica"), _FINISHED, finished)
        ledger = Ledger()
        for due, name in ((False, "before"), (True, "meanwhile")):
            if due:
                database.rows("UPDATE towpath.queues SET completed_retention_seconds = 1800 WHERE name = 'bench'")
            left, began = _finished(database), time.perf_counter()
            seen = uvloop.run(paced(service.url, ledger, polls=64, seconds=seconds))
            if due:
                gone = left - _finished(database)
                run.results.add("retention: deleted/s", gone / (time.perf_counter() - began))
            run.results.add(f"retention: enqueue p99 ms, {name}", percentile(seen.enqueues, 0.99))
            run.results.add(f"retention: pickup p99 ms, {name}", percentile(seen.pickups, 0.99))
        there = [row[0] for row in database.rows("SELECT id::text FROM towpath.jobs WHERE claimed_at IS NOT NULL")]
        for fault in ledger.faults(there, there):
            run.results.check(False, f"retention: {fault}")


def _finished(database: Database) -> int:
    return int(database.value("SELECT count(*) FROM towpath.jobs WHERE claimed_at IS NULL AND state = 'completed'"))
