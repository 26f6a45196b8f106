"""Find each system's best worker setting: `python -m benchmarks.peers [names] [--rounds 2] [--json FILE]`.

They are installed first. What was found is kept in benchmarks/results; the best, and the plain one, are what
`python -m benchmarks --peers` runs.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from benchmarks.machine import conditions, postgres
from benchmarks.peers import PEERS, install
from benchmarks.results import Results, report, stored
from benchmarks.run import Run
from benchmarks.workloads.drain import peer_drain

parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="Try worker settings of the peers.")
parser.add_argument("names", nargs="*", metavar="name", help=f"which: {', '.join(peer.name for peer in PEERS)}")
parser.add_argument("--rounds", type=int, default=2)
parser.add_argument("--jobs", type=int, default=20_000)
parser.add_argument("--json", type=Path)
options = parser.parse_args()
unknown = set(options.names) - {peer.name for peer in PEERS}
if unknown:
    parser.error(f"there is no {', '.join(sorted(unknown))}")
install()
results = Results()
with postgres() as server:
    here = conditions(server)
    run = Run(server=server, results=results, jobs=options.jobs)
    for _ in range(options.rounds):
        for peer in PEERS:
            tried = replace(peer, workers=(*peer.swept, *peer.workers))
            for setting in tried.workers if not options.names or peer.name in options.names else ():
                print(f"… {peer.name} {setting}", flush=True)
                peer_drain(run, tried, setting)
print(report(results))
if options.json:
    options.json.write_text(json.dumps(stored(results, here), indent=2, ensure_ascii=False) + "\n")
