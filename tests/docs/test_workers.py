"""The workers in `examples/` do real work, wait for an outside system, and stop without losing or using anything."""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.build import Api, ok
from tests.docs.pages import ROOT
from tests.servers import ServiceThread
from tests.waiting import eventually

EXAMPLES = ROOT / "examples"
FILES = [ROOT / "README.md", ROOT / "pyproject.toml", *sorted((ROOT / "app").glob("*.py"))]
WORKERS = {
    "worker.py": ([sys.executable, "worker.py"], ()),
    "worker.mjs": (["node", "worker.mjs"], ("node",)),
    "worker.sh": (["sh", "worker.sh"], ("sh", "curl", "awk", "sha256sum")),
}
WAITS_FOR_OTHERS = ("worker.py", "worker.mjs")

Process = subprocess.Popen[str]


@contextmanager
def running(command: list[str], **options: Any) -> Iterator[Process]:
    """A process that is gone at the end, whatever happened."""
    with subprocess.Popen(command, cwd=EXAMPLES, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def answerer_url() -> Iterator[str]:
    """Where the outside system listens."""
    with running([sys.executable, "answerer.py"], stdout=subprocess.PIPE) as process:
        assert process.stdout
        yield process.stdout.readline().strip()


@pytest.fixture(params=WORKERS)
def worker(request: pytest.FixtureRequest, service: ServiceThread, queue: str, answerer_url: str) -> Iterator[Process]:
    """Each of the workers, at work on the test's queue."""
    command, needed = WORKERS[request.param]
    for program in needed:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not there")
    with running([*command, service.url, queue, request.param, answerer_url], stderr=subprocess.PIPE) as process:
        yield process


def measured(path: Path) -> dict[str, Any]:
    """What `measure_file` must find, found here."""
    content = path.read_bytes()
    return {"sha256": hashlib.sha256(content).hexdigest(), "words": len(content.split())}


def test_a_worker_does_its_jobs_and_stops_without_losing_one(
    worker: Process, api: Api, service: ServiceThread, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["worker"]
    jobs = {api.enqueue(kind="measure_file", args={"path": str(path)})["id"]: path for path in FILES}
    reviewed = api.enqueue(kind="review_file", args={"path": str(FILES[0])})["id"] if name in WAITS_FOR_OTHERS else None
    unreadable = api.enqueue(kind="measure_file", args={"path": str(ROOT / "not/there")}, max_attempts=1)["id"]

    for job_id, path in jobs.items():
        done = ok(api.get(f"/v1/jobs/{job_id}", wait_seconds=20))
        assert (done["state"], done["worker"], done["attempt"]) == ("completed", name, 1)
        assert done["result"] == measured(path)
    assert ok(api.get(f"/v1/jobs/{unreadable}", wait_seconds=20))["dead_letter_reason"] == "attempts_exhausted"
    if reviewed:
        done = ok(api.get(f"/v1/jobs/{reviewed}", wait_seconds=20))
        assert (done["state"], done["attempt"]) == ("completed", 1)
        assert done["result"]["review"]["lines"] == len(FILES[0].read_bytes().splitlines())
        assert [event["step"] for event in api.events(done)] == ["enqueue", "park", "callback_resume", "complete"]

    eventually(lambda: service.waiting_polls() >= 1)
    worker.terminate()
    # This one meets the poll of a worker that was told to stop.
    left = api.enqueue(kind="measure_file", args={"path": str(FILES[0])})
    assert worker.wait(20) == 0, worker.stderr and worker.stderr.read()
    left = api.job(left)
    assert (left["state"], left["attempt"]) == ("available", 0)
