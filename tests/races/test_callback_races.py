"""A callback before, during and after its park, against its deadline, and against another: one truth, told to all."""

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psycopg
import pytest

from tests.build import Api, client_of, ok
from tests.servers import ServiceThread
from tests.waiting import eventually

AFTER = {"complete": {"completed"}, "fail": {"failed"}, "resume": {"running", "available"}, "retry": {"available"}}


@pytest.mark.parametrize("verb", AFTER)
def test_no_callback_is_lost_whenever_it_meets_the_park(api: Api, service: ServiceThread, verb: str) -> None:
    orders: Counter[str] = Counter()
    with client_of(service.url) as third_party, ThreadPoolExecutor(1) as pool:
        for trial in range(40):
            claimed = api.a_running_job()
            wait = api.open_wait(claimed)
            body = {"n": trial}

            def call_back() -> httpx.Response:
                threading.Event().wait(random.uniform(0, 0.005))
                return third_party.post(wait["urls"][verb], json=body)  # noqa: B023

            calling = pool.submit(call_back)
            threading.Event().wait(random.uniform(0, 0.005))
            parked = ok(api.settle("park", claimed, wait_id=wait["wait_id"]))
            answer = ok(calling.result())
            job = api.job(claimed)
            assert job["state"] in AFTER[verb]
            assert parked["parked"] is not answer["early"]
            (shown,) = job["waits"]
            assert (shown["resolved_as"], shown["payload"]) == (verb, body)
            if verb == "resume":
                assert job["attempt"] == (1 if answer["early"] else 0)
                assert job["callback_results"]["callback"]["payload"] == body
            if job["state"] in ("available", "running"):
                ok(api.settle("complete", api.claim() if job["state"] == "available" else claimed))
            orders["callback first" if answer["early"] else "park first"] += 1
    assert len(orders) == 2, orders


def test_a_callback_against_the_deadline_has_one_outcome(
    api: Api, db: "psycopg.Connection[Any]", service: ServiceThread
) -> None:
    ends: Counter[str] = Counter()
    with ThreadPoolExecutor(1) as pool:
        for _ in range(40):
            claimed, wait = api.a_parked_job(backoff={"kind": "fixed", "base_seconds": 3600})

            def call_back() -> httpx.Response:
                threading.Event().wait(random.uniform(0, 0.06))
                return api.client.post(wait["urls"]["complete"], json="paid")  # noqa: B023

            db.execute(
                "UPDATE towpath.waits SET deadline_at = now() + random() * interval '30 ms' WHERE id = %s",
                [wait["wait_id"]],
            )
            answer = pool.submit(call_back).result()
            eventually(lambda: api.job(claimed)["state"] != "waiting_external")  # noqa: B023
            job = api.job(claimed)
            assert (answer.status_code, job["state"]) in {(200, "completed"), (410, "retryable")}
            assert job["result"] == ("paid" if answer.is_success else None)
            ends[job["state"]] += 1
    assert len(ends) == 2, ends


def test_of_two_resolvers_exactly_one_wins(api: Api, service: ServiceThread) -> None:
    winners: Counter[str] = Counter()
    others = [client_of(service.url) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(40):
            claimed, wait = api.a_parked_job()

            def call_back(client: httpx.Client, verb: str) -> httpx.Response:
                return client.post(wait["urls"][verb], json=verb)  # noqa: B023

            complete = pool.submit(call_back, others[0], "complete")
            fail = pool.submit(call_back, others[1], "fail")
            statuses = (complete.result().status_code, fail.result().status_code)
            assert sorted(statuses) == [200, 409]
            winner = "completed" if statuses[0] == 200 else "failed"
            assert api.job(claimed)["state"] == winner
            winners[winner] += 1
    for client in others:
        client.close()
    assert len(winners) == 2, winners


def test_the_same_callback_from_many_at_once_is_told_once_that_it_won(api: Api, service: ServiceThread) -> None:
    _, wait = api.a_parked_job()
    clients = [client_of(service.url) for _ in range(16)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda client: ok(client.post(wait["urls"]["resume"], json=1)), clients))
    for client in clients:
        client.close()
    assert sorted(answer["already_applied"] for answer in answers) == [False] + [True] * 15


def test_a_resume_against_the_expiry_of_the_attached_lease_loses_nothing(
    api: Api, db: "psycopg.Connection[Any]", connect: Callable[[], "psycopg.Connection[Any]"]
) -> None:
    states: Counter[str] = Counter()
    for trial in range(30):
        claimed, wait = api.a_parked_job(attached=True, backoff={"kind": "fixed", "base_seconds": 0})
        sooner = "- interval '1 s'" if trial % 2 else "+ interval '20 ms'"
        db.execute(f"UPDATE towpath.jobs SET lease_expires_at = now() {sooner} WHERE id = %s", [claimed["id"]])
        states[ok(api.client.post(wait["urls"]["resume"], json=trial))["job_state"]] += 1
        again = api.claim()
        assert again["id"] == claimed["id"]
        assert again["callback_results"]["callback"]["payload"] == trial
        ok(api.settle("complete", again))
    assert set(states) == {"running", "available"}, states
