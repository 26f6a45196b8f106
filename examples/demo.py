"""Real work: three workers in three languages share a queue with a job for each file of Python's standard library.

    python examples/demo.py                 start a service of its own, and take it away again
    python examples/demo.py --kill node     kill a worker part-way: its jobs go to the others
    TOWPATH_DEMO_URL=… python examples/demo.py     use a service that runs already

Every result is compared with what this process finds by itself; any difference is told and exits with 1.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

EXAMPLES = Path(__file__).resolve().parent
BATCH = 500
REVIEWS = 12
"""How many of the largest files are reviewed by the answerer, besides being measured."""
PATIENCE_SECONDS = 120.0
START_SECONDS = 60.0
STOP_SECONDS = 20.0
FINAL = ("completed", "failed", "cancelled")
WORKERS = {
    "python": ([sys.executable, "worker.py"], ()),
    "node": (["node", "worker.mjs"], ("node",)),
    "shell": (["sh", "worker.sh"], ("sh", "curl", "sha256sum", "awk", "tr", "wc")),
}
"""How each worker is started, and the programs that it needs."""

Job = dict[str, Any]
Process = subprocess.Popen[str]


class DemoFailed(Exception):
    """The demo did not show what it is to show; the message says what went wrong."""


def call(url: str, body: object = None, headers: dict[str, str] | None = None) -> Any:
    """POST with a body, GET without. Tries again while the service is away: every call here is safe to repeat."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    give_up_at = time.monotonic() + START_SECONDS
    while True:
        try:
            with urlopen(request, timeout=30) as answer:
                return json.load(answer)
        except HTTPError as error:
            if error.code not in (429, 503):
                raise DemoFailed(f"{url} answered {error.code}: {error.read().decode()}") from None
            problem: OSError = error
        except OSError as error:
            problem = error
        if time.monotonic() > give_up_at:
            raise DemoFailed(f"no answer from {url}: {problem}")
        time.sleep(0.2)


# -- the service, the answerer and the workers ------------------------------------------------------------------


def start(command: list[str], **options: Any) -> Process:
    """A process of a session of its own: Ctrl-C is for the demo alone, which then stops it."""
    return subprocess.Popen(command, text=True, start_new_session=True, **options)


def stop(processes: dict[str, Process]) -> None:
    """Tell all of them to stop, then wait; one that does not stop is killed."""
    for process in processes.values():
        process.terminate()
    for name, process in processes.items():
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{name} did not stop within {STOP_SECONDS:.0f} s: killed", file=sys.stderr)
            process.kill()
            process.wait()


@contextmanager
def service() -> Iterator[str]:
    """The URL of a service: the given one, or a new one with a database of its own."""
    given = os.environ.get("TOWPATH_DEMO_URL")
    if given:
        yield given.rstrip("/")
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="towpath-demo-", ignore_cleanup_errors=True) as directory:
        # PostgreSQL may run as another user than we do.
        Path(directory).chmod(0o711)
        log = Path(directory, "service.log")
        command = [sys.executable, "-m", "app", "serve", "--embedded", "--port", str(port)]
        environment = {**os.environ, "TOWPATH_DATA_DIRECTORY": str(Path(directory, "data"))}
        with log.open("w") as out:
            process = start(command, cwd=EXAMPLES.parent, env=environment, stdout=out, stderr=out)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url, process, log)
            yield url
        finally:
            stop({"the service": process})


def wait_until_ready(url: str, process: Process, log: Path) -> None:
    """Return when the service can serve. Raises DemoFailed with the end of its log when it does not get there."""
    give_up_at = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up_at and process.poll() is None:
        try:
            with urlopen(f"{url}/readyz", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise DemoFailed(f"the service did not start; its log ends with\n{log.read_text()[-2000:]}")


@contextmanager
def answerer() -> Iterator[str]:
    """The URL of the process that answers the callbacks."""
    process = start([sys.executable, "answerer.py"], cwd=EXAMPLES, stdout=subprocess.PIPE)
    try:
        assert process.stdout
        url = process.stdout.readline().strip()
        if not url:
            raise DemoFailed("the answerer did not start")
        yield url
    finally:
        stop({"the answerer": process})


@contextmanager
def started_workers(url: str, queue: str, answerer_url: str) -> Iterator[dict[str, Process]]:
    """A worker of each language that this machine has the programs for."""
    workers = {}
    try:
        for name, (command, needs) in WORKERS.items():
            missing = [program for program in needs if shutil.which(program) is None]
            if missing:
                print(f"no {name} worker: {', '.join(missing)} not found; the others go on")
            else:
                workers[name] = start([*command, url, queue, name, answerer_url], cwd=EXAMPLES)
        yield workers
    finally:
        stop(workers)


# -- the work ---------------------------------------------------------------------------------------------------


def files() -> list[Path]:
    """The standard library's Python files, without what was installed into it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts and path.is_file())


def enqueue(url: str, queue: str, paths: list[Path]) -> dict[str, tuple[str, Path]]:
    """A job for each file; what each is to do, by the job's id."""
    largest = set(sorted(paths, key=lambda path: path.stat().st_size)[-REVIEWS:])
    wanted = [("review_file" if path in largest else "measure_file", path) for path in paths]
    jobs: dict[str, tuple[str, Path]] = {}
    for first in range(0, len(wanted), BATCH):
        batch = wanted[first : first + BATCH]
        body = {"jobs": [{"queue": queue, "kind": kind, "args": {"path": str(path)}} for kind, path in batch]}
        answer = call(f"{url}/v1/jobs/batch", body, {"Idempotency-Key": f"{queue}-{first}"})
        jobs |= {item["job"]["id"]: job for item, job in zip(answer["jobs"], batch, strict=True)}
    return jobs


class QueueReader:
    """Reads all jobs of a queue, page by page. A page whose jobs are all final is not asked for again."""

    def __init__(self, url: str, queue: str) -> None:
        self._url = url
        self._queue = queue
        self._final: dict[str, Any] = {}

    def jobs(self) -> list[Job]:
        """The jobs as they are now."""
        found: list[Job] = []
        cursor = ""
        while True:
            page = self._final.get(cursor) or self._page(cursor)
            if all(job["state"] in FINAL for job in page["jobs"]):
                self._final[cursor] = page
            found += page["jobs"]
            cursor = page["next_cursor"]
            if cursor is None:
                return found

    def _page(self, cursor: str) -> Any:
        query = {"queue": self._queue, "limit": 200, **({"cursor": cursor} if cursor else {})}
        return call(f"{self._url}/v1/jobs?{urlencode(query)}")


def watch(reader: QueueReader, workers: dict[str, Process], kill: str | None) -> list[Job]:
    """Tell how the work goes until it is done; the finished jobs. Raises DemoFailed when it does not get there."""
    began = time.monotonic()
    dead: set[str] = set()
    while True:
        jobs = reader.jobs()
        seconds = time.monotonic() - began
        done = [job for job in jobs if job["state"] in FINAL]
        waiting = sum(job["state"] == "waiting_external" for job in jobs)
        print(
            f"{seconds:5.1f} s  {len(done):5}/{len(jobs)} done  {len(done) / max(seconds, 0.1):5.0f}/s  "
            f"{waiting:2} parked  {shares(done)}",
            flush=True,
        )
        if len(done) == len(jobs):
            return jobs
        if kill in workers and kill not in dead and len(done) > len(jobs) / 3:
            workers[kill].kill()
            workers[kill].wait()
        for name, worker in workers.items():
            if worker.poll() is not None and name not in dead:
                dead.add(name)
                print(f"         the {name} worker died; the leases of its jobs run out, and others get them")
        if len(dead) == len(workers):
            raise DemoFailed("no worker is left")
        if seconds > PATIENCE_SECONDS:
            states = Counter(job["state"] for job in jobs)
            raise DemoFailed(f"not done after {seconds:.0f} s: {dict(states)}")
        time.sleep(0.5)


def shares(jobs: list[Job]) -> str:
    """How many jobs each worker finished."""
    counted = Counter(job["worker"] for job in jobs)
    return "  ".join(f"{name} {counted[name]}" for name in sorted(counted))


# -- the check --------------------------------------------------------------------------------------------------


def expected(kind: str, path: Path) -> dict[str, Any]:
    """What the job's result must be, found without the service."""
    content = path.read_bytes()
    result: dict[str, Any] = {"sha256": hashlib.sha256(content).hexdigest(), "words": len(content.split())}
    if kind == "review_file":
        lines = content.splitlines()
        result["review"] = {"lines": len(lines), "longest_line": max(map(len, lines), default=0)}
    return result


def differences(wanted: dict[str, tuple[str, Path]], jobs: list[Job]) -> Iterator[str]:
    """Everything that is not as it must be, a sentence each."""
    by_id = {job["id"]: job for job in jobs}
    if len(jobs) != len(wanted):
        yield f"{len(wanted)} jobs were enqueued, the queue has {len(jobs)}"
    for job_id, (kind, path) in wanted.items():
        job = by_id.get(job_id)
        if job is None:
            yield f"{job_id} ({path}) is not in the queue"
        elif job["state"] != "completed":
            yield f"{job_id} ({path}) is {job['state']}: {job['errors']}"
        elif job["result"] != expected(kind, path):
            yield f"{job_id} ({path}) has {job['result']}, and should have {expected(kind, path)}"


def summarise(jobs: list[Job], seconds: float) -> None:
    """What was done, once it was found to be right."""
    reviewed = [job for job in jobs if job["kind"] == "review_file"]
    words = sum(job["result"]["words"] for job in jobs)
    again = [job for job in jobs if job["attempt"] > 1]
    print(f"\n{len(jobs)} jobs completed in {seconds:.1f} s, {len(jobs) / seconds:.0f} a second: {shares(jobs)}")
    print(f"{words:,} words; every hash, every count and every review is what this process finds by itself")
    print(f"{len(reviewed)} jobs parked and went on after a callback: {shares(reviewed)}")
    if again:
        print(f"{len(again)} jobs were lost by their worker and done by another: {shares(again)}")


def main() -> int:
    """Run it; 0 when everything is as it must be."""
    arguments = argparse.ArgumentParser(description="Three workers in three languages share real work.")
    arguments.add_argument("--kill", choices=WORKERS, help="kill this worker part-way")
    kill = arguments.parse_args().kill
    # A demo that is told to stop takes its processes with it, as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with service() as url, answerer() as answerer_url:
            queue = f"demo-{time.time_ns()}"
            paths = files()
            began = time.monotonic()
            with started_workers(url, queue, answerer_url) as workers:
                wanted = enqueue(url, queue, paths)
                print(f"{len(wanted)} jobs enqueued in {time.monotonic() - began:.1f} s: {url}, queue {queue}")
                jobs = watch(QueueReader(url, queue), workers, kill)
                seconds = time.monotonic() - began
        wrong = list(differences(wanted, jobs))
        if wrong:
            raise DemoFailed("\n  ".join([f"{len(wrong)} differences:", *wrong[:20]]))
        summarise(jobs, seconds)
    except DemoFailed as failure:
        print(f"demo failed: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
