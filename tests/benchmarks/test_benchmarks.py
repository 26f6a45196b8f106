"""The benchmarks run, and notice what they must not hide."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.results import TARGETS, Results, report
from tests.servers import ROOT


def test_a_workload_runs_at_a_small_size_and_loses_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "run.json"
    options = ["--quick", "--rounds", "1", "--seconds", "1", "--jobs", "1000", "--json", str(kept)]
    command = [sys.executable, "-m", "benchmarks", "drain", *options]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "nothing lost, doubled or refused" in ran.stdout
    run = json.loads(kept.read_text())
    assert run["conditions"]["settings"]["fsync"] == "on"
    assert run["rounds"]["drain/s: towpath 16 × 10"][0] > 0


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
    assert not [target for target in TARGETS if f"| {target.id} |" in report(Results())]
