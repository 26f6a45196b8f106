"""Two ends for one attempt: exactly one is true, and everybody is told the same."""

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psycopg
import pytest

from tests.build import JSON, Api, client_of, ok
from tests.servers import ServiceThread
from tests.waiting import eventually

TRIALS = 40


def race(
    first: Callable[[], httpx.Response], second: Callable[[], httpx.Response]
) -> tuple[httpx.Response, httpx.Response]:
    """Both at once, a few milliseconds apart in either order."""
    offset = random.uniform(-0.004, 0.004)

    def delayed(seconds: float, call: Callable[[], httpx.Response]) -> httpx.Response:
        if seconds > 0:
            threading.Event().wait(seconds)
        return call()

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(delayed, offset, first)
        two = pool.submit(delayed, -offset, second)
        return one.result(), two.result()


def test_cancel_against_complete(api: Api, service: ServiceThread) -> None:
    ends: Counter[str] = Counter()
    with client_of(service.url) as other:
        for _ in range(TRIALS):
            claimed = api.a_running_job()
            completed, cancelled = race(
                lambda: api.settle("complete", claimed, result="done"),  # noqa: B023
                lambda: other.post(f"/v1/jobs/{claimed['id']}/cancel", json={}),  # noqa: B023
            )
            job = api.job(claimed)
            assert sorted((completed.status_code, cancelled.status_code)) == [200, 409]
            assert job["state"] == ("completed" if completed.is_success else "cancelled")
            assert job["result"] == ("done" if completed.is_success else None)
            ends[job["state"]] += 1
    assert set(ends) == {"completed", "cancelled"}, ends


def test_complete_against_rescue(
    api: Api, db: "psycopg.Connection[Any]", connect: Callable[[], "psycopg.Connection[Any]"]
) -> None:
    ends: Counter[str] = Counter()
    blocker = connect()
    for trial in range(TRIALS):
        claimed = api.a_running_job(backoff={"kind": "fixed", "base_seconds": 3600})
        # The row is held while both want it, so that they meet there, now one first and now the other.
        blocker.execute("SELECT FROM towpath.jobs WHERE id = %s FOR UPDATE", [claimed["id"]])
        with ThreadPoolExecutor(1) as pool:
            if trial % 2:
                completing = pool.submit(api.settle, "complete", claimed, result="done")
            blocker.execute("UPDATE towpath.jobs SET lease_expires_at = now() WHERE id = %s", [claimed["id"]])
            blocker.commit()
            if not trial % 2:
                threading.Event().wait(random.uniform(0, 0.1))
                completing = pool.submit(api.settle, "complete", claimed, result="done")
            answer = completing.result()
        eventually(lambda: api.job(claimed)["state"] != "running")  # noqa: B023
        job = api.job(claimed)
        assert job["state"] == ("completed" if answer.is_success else "retryable")
        assert len(job["errors"]) == (0 if answer.is_success else 1)
        ends[job["state"]] += 1
    assert set(ends) == {"completed", "retryable"}, ends


@pytest.mark.parametrize("verb", ["complete", "retry", "snooze", "release", "fail"])
def test_the_same_report_from_many_connections_is_applied_once(api: Api, service: ServiceThread, verb: str) -> None:
    report: JSON = {"delay_seconds": 3600} if verb in ("retry", "snooze") else {}
    claimed = api.a_running_job()
    clients = [client_of(service.url) for _ in range(16)]
    body = {"lease": claimed["lease"], **report}
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda client: ok(client.post(f"/v1/jobs/{claimed['id']}/{verb}", json=body)), clients))
    for client in clients:
        client.close()
    assert sorted(answer["already_applied"] for answer in answers) == [False] + [True] * 15
