"""The benchmarks run, and notice what they must not hide."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmarks.curves import Curve
from benchmarks.ledger import Ledger
from benchmarks.machine import DurablePostgres, postgres
from benchmarks.results import TARGETS, Results, measured, report
from benchmarks.run import Run
from benchmarks.workloads import WORKLOADS
from tests.servers import ROOT

FIGURES = {
    "single": "single at 80 %: p99 ms",
    "bulk": "bulk/s: towpath",
    "drain": "drain/s: towpath 16 × 10",
    "pickup": "pickup p99 ms: towpath",
    "idle_polls": "idle polls: memory MB",
    "snapshot": "last minute/s: snapshot held",
    "depth": "depth: deepest p50 ms",
    "processes": "single/s: towpath 2 processes, 256",
    "retention": "retention: deleted/s",
    "heartbeats": "heartbeats: share of a core",
    "callbacks": "callback to claim p99 ms",
    "timeliness": "rescue late p99 ms",
    "soak": "soak: memory MB at the end",
}
NEED_WRK = {"single", "bulk", "processes"}


@pytest.fixture(scope="module")
def durable() -> Iterator[DurablePostgres]:
    with postgres() as server:
        yield server


@pytest.mark.benchmark
@pytest.mark.parametrize("name", WORKLOADS)
def test_each_workload_runs_at_a_small_size_and_loses_nothing(durable: DurablePostgres, name: str) -> None:
    if name in NEED_WRK and shutil.which("wrk") is None:
        pytest.skip("wrk is not installed")
    results = Results()
    run = Run(server=durable, results=results, rounds=1, seconds=1, jobs=2000, quick=True, deepest=11_000)
    WORKLOADS[name](run)
    assert results.wrong == []
    assert results.median(FIGURES[name]) > 0


def test_a_run_is_kept_with_its_conditions(tmp_path: Path) -> None:
    kept = tmp_path / "run.json"
    options = ["--quick", "--rounds", "1", "--deepest", "11000", "--json", str(kept)]
    command = [sys.executable, "-m", "benchmarks", "depth", *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=90)
    finally:
        process.terminate()
        process.wait()
    assert process.returncode == 0, output
    assert "nothing lost, doubled or refused" in output
    run = json.loads(kept.read_text())
    assert run["conditions"]["settings"]["fsync"] == "on"
    assert run["targets"][0]["id"] == "T8"
    assert ET.parse(kept.with_name("run-depth.svg")).getroot().tag.endswith("svg")


THERE = ["a", "b", "c"]


def log(**doctored: list[str]) -> Ledger:
    return Ledger(**{"acknowledged": [*THERE], "handled": [*THERE], "reported": [*THERE], **doctored})


def test_a_log_that_agrees_with_the_tables_has_no_fault() -> None:
    assert log().faults(THERE, THERE) == []


@pytest.mark.parametrize(
    ("ledger", "fault"),
    [
        (log(acknowledged=["a", "b", "c", "d"]), "1 jobs acknowledged and lost"),
        (log(acknowledged=["a", "b", "c", "c"]), "1 jobs acknowledged twice"),
        (log(acknowledged=["a", "b"]), "1 jobs there without an answer"),
        (log(handled=["a", "b", "c", "c"]), "1 jobs handled twice"),
        (log(handled=["a", "b", "c", "x"]), "1 jobs handled and never enqueued"),
        (log(handled=["a", "b"]), "1 jobs reported and never handled"),
        (log(reported=["a", "b"]), "1 jobs completed without an answer"),
    ],
)
def test_a_doctored_log_is_caught(ledger: Ledger, fault: str) -> None:
    assert ledger.faults(THERE, THERE) == [fault]


def test_a_report_that_left_no_trace_is_caught() -> None:
    assert log().faults(THERE, ["a", "b"]) == ["1 jobs reported and not completed"]


def test_what_was_under_way_at_the_end_may_be_there_without_an_answer() -> None:
    ledger = log(acknowledged=["a", "b"])
    assert ledger.faults(THERE, THERE, unheard=1) == []


def test_what_went_wrong_is_told_and_kept() -> None:
    results = Results()
    results.check(True, "fine")
    results.check(False, "3 of 1000 jobs lost")
    assert results.wrong == ["3 of 1000 jobs lost"]
    assert "WRONG: 3 of 1000 jobs lost" in report(results)


@pytest.mark.parametrize(("ours", "said"), [(600, "met"), (300, "short by 50%")])
def test_a_target_is_a_ratio_of_medians(ours: float, said: str) -> None:
    results = Results()
    for echo in (900, 1000, 5000):
        results.add("single/s: echo", echo)
        results.add("single/s: towpath", ours)
    (line,) = [line for line in report(results).splitlines() if "bare echo" in line]
    assert line == f"| T1 | enqueue / bare echo | ≥ 0.6 | {ours / 1000:.2f} | {said} |"


def test_a_target_that_was_not_measured_is_left_out() -> None:
    assert measured(Results()) == []
    assert not [target for target in TARGETS if f"| {target.id} |" in report(Results())]


def test_a_curve_goes_through_its_points_in_order() -> None:
    curve = Curve("rate", "seconds", "jobs/s")
    for at, rate in ((1, 100), (2, 50)):
        curve.add("<held>", at, rate)
    (line,) = ET.fromstring(curve.svg()).iter("{http://www.w3.org/2000/svg}polyline")
    (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in line.get("points", "").split())
    assert x1 < x2
    assert y1 < y2, "a lower rate is drawn lower"
