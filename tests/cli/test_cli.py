"""The command line: what it says, and that it refuses what would go wrong later."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psycopg

from app.settings import Settings
from tests.build import Api, client_of, ok
from tests.servers import ROOT, ServiceProcess, ServiceThread
from tests.waiting import eventually


def environment(settings: Settings, **changes: str) -> dict[str, str]:
    assert settings.signing_keys is not None
    own = {
        "TOWPATH_DATABASE_URL": settings.database_url,
        "TOWPATH_DATA_DIRECTORY": str(settings.data_directory),
        "TOWPATH_SIGNING_KEYS": settings.signing_keys.get_secret_value(),
    }
    return {**os.environ, **own, **changes}


def towpath(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "app", *arguments]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60)


@contextmanager
def running(settings: Settings, *arguments: str) -> "Iterator[subprocess.Popen[bytes]]":
    """A command that goes on until it is told to stop."""
    command = [sys.executable, "-m", "app", *arguments]
    with subprocess.Popen(command, cwd=ROOT, env=environment(settings), stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise
        process.terminate()
        assert process.wait(15) == 0


def test_the_doctor_finds_a_good_database_good(settings: Settings) -> None:
    # Tests run without fsync, which the doctor is right to complain of.
    found = towpath("doctor", **environment(settings)).stdout.splitlines()
    bad = {line.split(":")[0].split()[-1] for line in found if line.startswith("FAIL")}
    assert bad <= {"durability"}
    assert len(found) == 6


def test_the_doctor_says_that_a_migration_is_missing(settings: Settings, new_database: Callable[[], str]) -> None:
    answer = towpath("doctor", **environment(settings, TOWPATH_DATABASE_URL=new_database()))
    assert answer.returncode == 1
    assert "run `towpath migrate`" in answer.stdout


def test_the_doctor_says_that_the_database_is_away(settings: Settings) -> None:
    answer = towpath("doctor", **environment(settings, TOWPATH_DATABASE_URL="postgresql://127.0.0.1:1/none"))
    assert answer.returncode == 1
    assert "not reachable" in answer.stdout


def test_migrating_twice_is_migrating_once(settings: Settings, new_database: Callable[[], str]) -> None:
    variables = environment(settings, TOWPATH_DATABASE_URL=new_database())
    assert [towpath("migrate", **variables).returncode for _ in range(2)] == [0, 0]


def test_a_stale_document_is_told(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "openapi.json"
    assert towpath("openapi", str(path), "--check", **environment(settings)).returncode == 1
    assert towpath("openapi", str(path), **environment(settings)).returncode == 0
    assert towpath("openapi", str(path), "--check", **environment(settings)).returncode == 0


def test_serve_refuses_a_key_that_the_database_does_not_know(settings: Settings, service: ServiceThread) -> None:
    answer = towpath("serve", "--port", "1", **environment(settings, TOWPATH_SIGNING_KEYS="another key, no: too short"))
    assert (answer.returncode, "at least 32 characters" in answer.stderr) == (1, True)
    answer = towpath("serve", "--port", "1", **environment(settings, TOWPATH_SIGNING_KEYS="x" * 40))
    assert answer.returncode == 1
    assert "used with another signing key" in answer.stderr
    assert "x" * 40 not in answer.stderr


def test_two_workers_serve_and_stop(
    new_settings: Callable[..., Settings], start_process: Callable[..., ServiceProcess], queue: str
) -> None:
    process = start_process(new_settings(), "--workers", "2")
    with client_of(process.url) as client:
        api = Api(client, queue)
        api.enqueue_many(5)
        assert len(api.claims(limit=5)["jobs"]) == 5
    assert process.terminate(15) == 0


def test_maintain_sweeps_for_services_that_do_not(
    new_settings: Callable[..., Settings], start_process: Callable[..., ServiceProcess], queue: str
) -> None:
    settings = new_settings()
    process = start_process(settings, "--no-maintenance")
    with client_of(process.url) as client, psycopg.connect(settings.database_url, autocommit=True) as db:
        api = Api(client, queue)
        job = api.enqueue(delay_seconds=0.05)
        eventually(lambda: db.execute("SELECT run_at < now() FROM towpath.jobs").fetchone() == (True,))
        assert api.job(job)["state"] == "scheduled"
        with running(settings, "maintain"):
            assert api.claim(wait_seconds=25)["id"] == job["id"]


def test_every_answer_has_a_request_id_and_keeps_a_given_one(service: ServiceThread) -> None:
    for path in ("/livez", "/v1/claims"):
        given = httpx.post(service.url + path, headers={"X-Request-Id": "mine-1"}, verify=False)
        assert given.headers["x-request-id"] == "mine-1"
    assert ok(httpx.get(f"{service.url}/livez", verify=False))["status"] == "live"
