"""The workloads. Each runs its rounds interleaved with what it is compared to, and checks that nothing went wrong."""

from collections.abc import Callable

from benchmarks.run import Run
from benchmarks.workloads.drain import drain
from benchmarks.workloads.endurance import snapshot, soak
from benchmarks.workloads.enqueue import bulk, processes, single
from benchmarks.workloads.latency import callbacks, heartbeats, idle_polls, pickup, timeliness
from benchmarks.workloads.volume import depth, retention

WORKLOADS: dict[str, Callable[[Run], None]] = {
    each.__name__: each
    for each in (
        single,
        bulk,
        drain,
        pickup,
        idle_polls,
        snapshot,
        depth,
        processes,
        retention,
        heartbeats,
        callbacks,
        timeliness,
        soak,
    )
}
