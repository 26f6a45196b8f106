"""Measure: `python -m benchmarks [names] [--peers] [--rounds 3] [--seconds 3] [--quick] [--json FILE]`."""

import argparse
import json
import signal
import sys
from pathlib import Path

from benchmarks import peers
from benchmarks.machine import conditions, postgres
from benchmarks.results import Results, report, stored
from benchmarks.run import Run
from benchmarks.workloads import WORKLOADS

parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure the service on this machine.")
parser.add_argument("names", nargs="*", metavar="name", help=f"which: {', '.join(WORKLOADS)}; default: all")
parser.add_argument("--peers", action="store_true", help="other systems in the same run; they are installed first")
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--seconds", type=float, default=3, help="of each measurement by wrk")
parser.add_argument("--jobs", type=int, default=20_000, help="of each drain, in thousands")
parser.add_argument("--minutes", type=float, default=5, help="that a snapshot is held, and of a soak")
parser.add_argument("--deepest", type=int, default=5_000_000, help="most waiting jobs, most finished ones")
parser.add_argument("--quick", action="store_true", help="small sizes: to see that it works")
parser.add_argument("--json", type=Path, help="where to keep the run; its curves lie beside it")
options = parser.parse_args()
unknown = set(options.names) - set(WORKLOADS)
if unknown:
    parser.error(f"there is no {', '.join(sorted(unknown))}")
if options.peers:
    peers.install()

# Told to stop, it stops what it started.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
results = Results()
with postgres() as server:
    here = conditions(server)
    print(json.dumps(here, indent=2))
    run = Run(
        server=server,
        results=results,
        rounds=options.rounds,
        seconds=options.seconds,
        jobs=options.jobs,
        with_peers=options.peers,
        quick=options.quick,
        minutes=options.minutes,
        deepest=options.deepest,
    )
    for name in options.names or WORKLOADS:
        print(f"… {name}", flush=True)
        WORKLOADS[name](run)
print(report(results))
if options.json:
    options.json.write_text(json.dumps(stored(results, here), indent=2, ensure_ascii=False) + "\n")
    for name, curve in results.curves.items():
        options.json.with_name(f"{options.json.stem}-{name}.svg").write_text(curve.svg())
raise SystemExit(1 if results.wrong else 0)
