"""The checker can fail: each broken promise is found in a log that breaks it."""

import copy
from collections.abc import Callable

import pytest

from tests.faults.checker import JobRow, violations
from tests.faults.load import Log

GOOD_LOG = Log(
    enqueued=[("k1", "j1"), ("k2", "j2")],
    claimed=[("c1", "j1", "l1", 1), ("c2", "j2", "l2", 1)],
    settled=[
        ("j1", "l1", "complete", 200, False),
        ("j2", "l2", "fail", 200, False),
        ("j1", "l1", "complete", 200, True),
    ],
    called_back=[("w1", "p1", 200, False), ("w1", "p1", 200, True)],
)
GOOD_JOBS = {"j1": JobRow("k1", "completed", 1, 0, "l1"), "j2": JobRow("k2", "failed", 1, 1, None)}
GOOD_WAITS = {"w1": "p1"}
Break = Callable[[Log, dict[str, JobRow], dict[str, str]], object]

BROKEN: dict[str, Break] = {
    "an acknowledged job is gone": lambda log, jobs, waits: jobs.pop("j1"),
    "one key made two jobs": lambda log, jobs, waits: jobs.update(j3=JobRow("k1", "failed", 1, 1, None)),
    "one key has two answers": lambda log, jobs, waits: log.enqueued.append(("k1", "j2")),
    "one lease has two owners": lambda log, jobs, waits: log.claimed.append(("c9", "j1", "l1", 1)),
    "an attempt too many": lambda log, jobs, waits: log.claimed.append(("c9", "j1", "l9", 5)),
    "two outcomes of one lease": lambda log, jobs, waits: log.settled.append(("j1", "l1", "retry", 200, False)),
    "two first reports": lambda log, jobs, waits: log.settled.append(("j1", "l1", "complete", 200, False)),
    "completed twice": lambda log, jobs, waits: log.settled.append(("j1", "l9", "complete", 200, False)),
    "completed and yet failed": lambda log, jobs, waits: jobs.update(j1=JobRow("k1", "failed", 1, 1, None)),
    "another result": lambda log, jobs, waits: jobs.update(j1=JobRow("k1", "completed", 1, 0, "l7")),
    "left behind": lambda log, jobs, waits: jobs.update(j2=JobRow("k2", "running", 1, 1, None)),
    "an attempt without its cause": lambda log, jobs, waits: jobs.update(j2=JobRow("k2", "failed", 2, 1, None)),
    "two winners": lambda log, jobs, waits: log.called_back.append(("w1", "p1", 200, False)),
    "another payload": lambda log, jobs, waits: waits.update(w1="p9"),
    "a server error": lambda log, jobs, waits: log.bad_answers.append("/v1/jobs: 500"),
}


def test_a_good_log_has_no_violation() -> None:
    assert violations(GOOD_LOG, GOOD_JOBS, GOOD_WAITS) == []


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_promise_is_found(broken: str) -> None:
    log, jobs, waits = copy.deepcopy((GOOD_LOG, GOOD_JOBS, GOOD_WAITS))
    BROKEN[broken](log, jobs, waits)
    assert violations(log, jobs, waits) != []
