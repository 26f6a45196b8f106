"""T7 and the soak: full rate for minutes, under a held snapshot and without."""

import psycopg

from benchmarks.curves import Curve
from benchmarks.ledger import Ledger
from benchmarks.run import Run
from benchmarks.workloads.load import full_rate

_QUICK_WINDOWS, _QUICK_SECONDS = 4, 1.0
_WINDOW_SECONDS = 10.0


def _windows(run: Run) -> tuple[int, float]:
    if run.quick:
        return _QUICK_WINDOWS, _QUICK_SECONDS
    return max(4, round(run.minutes * 60 / _WINDOW_SECONDS)), _WINDOW_SECONDS


def snapshot(run: Run) -> None:
    """T7: full rate through HTTP while a transaction holds an old snapshot, so that vacuum can remove nothing."""
    windows, seconds = _windows(run)
    curve = Curve("Full rate through HTTP, enqueue to completed", "seconds", "jobs/s")
    run.results.curves["snapshot"] = curve
    for held in (False, True):
        name = "snapshot held" if held else "no snapshot"
        ledger = Ledger()
        with run.service() as (service, database):
            with psycopg.connect(database.url) as old:
                if held:
                    old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                    old.execute("SELECT count(*) FROM towpath.jobs")
                rates = full_rate(service, ledger, windows=windows, seconds=seconds)
            run.check(name, ledger, database)
        for number, rate in enumerate(rates):
            curve.add(name, (number + 1) * seconds, rate)
        # A minute; of shorter runs, a quarter.
        last = rates[-min(6, windows // 4) :]
        run.results.add(f"last minute/s: {name}", sum(last) / len(last))


def soak(run: Run) -> None:
    """Memory of the service over minutes at full rate."""
    windows, seconds = _windows(run)
    curve = Curve("Resident memory at full rate", "seconds", "MB")
    run.results.curves["soak"] = curve
    ledger = Ledger()
    with run.service() as (service, database):
        used = [service.memory_bytes / 1e6]
        rates = full_rate(
            service,
            ledger,
            windows=windows,
            seconds=seconds,
            after_each=lambda: used.append(service.memory_bytes / 1e6),
        )
        run.check("soak", ledger, database)
    for number, megabytes in enumerate(used):
        curve.add("service", number * seconds, megabytes)
    run.results.add("soak: jobs/s", sum(rates) / len(rates))
    run.results.add("soak: memory MB at a quarter", used[max(1, windows // 4)])
    run.results.add("soak: memory MB at the end", used[-1])
