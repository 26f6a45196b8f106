"""The SQL of every lifecycle step, as it is sent: reviewed here, and ready to paste into EXPLAIN.

After a change that is meant, `TOWPATH_UPDATE_SNAPSHOTS=1 make test ARGS=tests/statements` writes the files anew.
"""

import os
from pathlib import Path

import pytest

from app.jobs.transition import statement
from app.lifecycle import CLAIM, STEPS, Step

SNAPSHOTS = Path(__file__).parent / "sql"


@pytest.mark.parametrize("step", [step for step in STEPS.values() if step is not CLAIM], ids=lambda step: step.name)
def test_the_statement_of_a_step_is_the_reviewed_one(step: Step) -> None:
    snapshot = SNAPSHOTS / f"{step.name}.sql"
    sql = statement(step) + "\n"
    if os.environ.get("TOWPATH_UPDATE_SNAPSHOTS"):
        snapshot.write_text(sql)
    assert snapshot.read_text() == sql
