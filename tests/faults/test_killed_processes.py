"""Service processes and PostgreSQL are killed under load; what callers were told stays true."""

import os
import random
import threading
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import pytest

from app.settings import Settings
from tests.build import Api, client_of, ok
from tests.conftest import PostgresServer
from tests.faults.checker import stored, violations
from tests.faults.load import Caller, Log
from tests.servers import ServiceProcess
from tests.waiting import eventually

Start = Callable[..., ServiceProcess]


def run(
    start: Start, settings: Settings, postgres: PostgresServer, *, kills: int, restarts: int, seconds_between: float
) -> Log:
    """Load on two processes, with kills and restarts by turns; drained and checked."""
    processes = [start(settings) for _ in range(2)]
    urls = [process.url for process in processes]
    log, stop, queue = Log(), threading.Event(), f"q-{uuid4().hex[:16]}"
    callers = [Caller(urls, log, stop) for _ in range(9)]
    threads = [threading.Thread(target=caller.produce, args=(queue,)) for caller in callers[:3]]
    threads += [threading.Thread(target=caller.work, args=(queue,)) for caller in callers[3:]]
    for thread in threads:
        thread.start()
    pause = threading.Event()
    for each in random.sample(["kill"] * kills + ["restart"] * restarts, kills + restarts):
        pause.wait(seconds_between)
        if each == "restart":
            postgres.restart_immediately()
        else:
            victim = random.choice(processes)
            victim.kill()
            victim.start()
    pause.wait(seconds_between)
    stop.set()
    for thread in [*threads, *log.third_parties]:
        thread.join(120)
        assert not thread.is_alive(), "a caller never got a definite answer"
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        last = Caller(urls, log, stop)
        left = "SELECT count(*) FROM towpath.jobs WHERE queue = %s AND state NOT IN ('completed', 'failed')"
        # Leases of claims that nobody reported run out; their jobs are worked off.
        eventually(lambda: last.work(queue) or connection.execute(left, [queue]).fetchone() == (0,), 60)
        for third_party in log.third_parties:
            third_party.join()
        for caller in (*callers, last):
            caller.close()
        jobs, waits = stored(connection, queue)
    print(
        f"\n{kills} kills, {restarts} restarts of PostgreSQL, {log.calls} calls ({log.unknown} without a definite"
        f" answer), {len(jobs)} jobs, {len(waits)} callbacks"
    )
    assert len(log.enqueued) > 50
    broken = violations(log, jobs, waits)
    print(f"{len(broken)} violations")
    assert broken == []
    return log


def test_no_promise_breaks_when_services_and_the_database_are_killed(
    start_process: Start, new_settings: Callable[..., Settings], postgres: PostgresServer
) -> None:
    run(start_process, new_settings(), postgres, kills=4, restarts=2, seconds_between=0.7)


@pytest.mark.chaos
@pytest.mark.timeout(0)
def test_no_promise_breaks_for_minutes(
    start_process: Start, new_settings: Callable[..., Settings], postgres: PostgresServer
) -> None:
    seconds = float(os.environ.get("TOWPATH_CHAOS_SECONDS", "300"))
    faults = max(10, int(seconds / 4))
    run(start_process, new_settings(), postgres, kills=faults * 4 // 5, restarts=faults // 5, seconds_between=1.0)


def test_a_keyed_enqueue_is_exact_across_a_kill(start_process: Start, new_settings: Callable[..., Settings]) -> None:
    settings = new_settings()
    first, second = start_process(settings), start_process(settings)
    queue = f"q-{uuid4().hex[:16]}"
    told: dict[str, str] = {}

    def send(number: int) -> None:
        try:
            with client_of(first.url) as client:
                body = {"kind": "work", "queue": queue, "args": number}
                answer = client.post("/v1/jobs", json=body, headers={"Idempotency-Key": f"{queue}-{number}"})
                told[str(number)] = answer.json()["id"]
        except httpx.TransportError:
            pass

    senders = [threading.Thread(target=send, args=(number,)) for number in range(80)]
    for sender in senders:
        sender.start()
    eventually(lambda: len(told) > 5)
    first.kill()
    for sender in senders:
        sender.join()
    with client_of(second.url) as client:
        for number in range(80):
            body = {"kind": "work", "queue": queue, "args": number}
            answer = client.post("/v1/jobs", json=body, headers={"Idempotency-Key": f"{queue}-{number}"})
            assert ok(answer)["id"] == told.get(str(number), answer.json()["id"])
    with psycopg.connect(settings.database_url) as connection:
        row = connection.execute("SELECT count(*), count(DISTINCT args) FROM towpath.jobs WHERE queue = %s", [queue])
        assert row.fetchone() == (80, 80)


def test_a_claim_is_repeated_through_another_process(
    start_process: Start, new_settings: Callable[..., Settings]
) -> None:
    settings = new_settings()
    first, second = start_process(settings), start_process(settings)
    queue, claim_id = f"q-{uuid4().hex[:16]}", str(uuid4())
    with client_of(first.url) as client:
        one = Api(client, queue)
        one.enqueue_many(3)
        claimed = one.claims(limit=3, claim_id=claim_id)["jobs"]
    first.kill()
    with client_of(second.url) as client:
        again = Api(client, queue).claims(limit=3, claim_id=claim_id)["jobs"]
    assert [(job["id"], job["lease"]) for job in again] == [(job["id"], job["lease"]) for job in claimed]


def test_a_stop_under_load_burns_no_attempt(start_process: Start, new_settings: Callable[..., Settings]) -> None:
    settings = new_settings()
    process = start_process(settings)
    queue = f"q-{uuid4().hex[:16]}"
    with client_of(process.url) as client:
        api = Api(client, queue)
        waiting: list[Any] = []
        poll = threading.Thread(target=lambda: waiting.append(api.claims(wait_seconds=60)))
        poll.start()
        with client_of(process.url) as other:
            eventually(lambda: ok(other.get("/readyz"))["status"] == "ready")
        status = process.terminate()
        poll.join(5)
    assert status == 0
    assert waiting[0]["reason"] == "draining"


def test_the_service_comes_back_with_its_database(
    start_process: Start, new_settings: Callable[..., Settings], postgres: PostgresServer
) -> None:
    process = start_process(new_settings(safety_poll_seconds=600))
    queue = f"q-{uuid4().hex[:16]}"
    with client_of(process.url) as client:
        api = Api(client, queue)
        eventually(lambda: ok(api.get("/readyz"))["listening"])
        postgres.restart_immediately()
        eventually(lambda: api.get("/readyz").is_success and ok(api.get("/readyz"))["listening"], 15)
        results: list[Any] = []
        poll = threading.Thread(target=lambda: results.append(api.claim(wait_seconds=30)))
        poll.start()
        with client_of(process.url) as producer:
            ok(producer.post("/v1/jobs", json={"kind": "work", "queue": queue}))
        poll.join(10)
        assert results, "the wake-up did not come"


def test_a_callback_survives_the_death_of_the_service_that_took_it(
    start_process: Start, new_settings: Callable[..., Settings]
) -> None:
    service = start_process(new_settings())
    with client_of(service.url) as client:
        api = Api(client, "survives")
        parked = [api.a_parked_job(attached=attached) for attached in (False, True)]
        for n, (_, wait) in enumerate(parked):
            ok(client.post(wait["urls"]["resume"], json={"n": n}))
        service.kill()
        service.start()
        # The attached handler polls again, and goes on under its lease.
        claimed, wait = parked[1]
        seen = ok(client.get(f"/v1/jobs/{claimed['id']}/callbacks/{wait['wait_id']}", params={"wait_seconds": 5}))
        assert (seen["job_state"], seen["payload"]) == ("running", {"n": 1})
        ok(api.settle("complete", claimed))
        assert api.claim()["callback_results"]["callback"]["payload"] == {"n": 0}


def test_a_handler_that_dies_between_resume_and_delivery_loses_nothing(
    start_process: Start, new_settings: Callable[..., Settings]
) -> None:
    settings = new_settings()
    service = start_process(settings)
    with client_of(service.url) as client, psycopg.connect(settings.database_url, autocommit=True) as db:
        api = Api(client, "rescued")
        claimed, wait = api.a_parked_job(attached=True, backoff={"kind": "fixed", "base_seconds": 0})
        assert ok(client.post(wait["urls"]["resume"], json="the answer"))["job_state"] == "running"
        service.kill()  # before the handler asked, and the handler dies with it: its lease runs out
        db.execute("UPDATE towpath.jobs SET lease_expires_at = now() WHERE id = %s", [claimed["id"]])
        service.start()
        again = api.claim()
        assert (again["id"], again["attempt"]) == (claimed["id"], 2)
        assert again["callback_results"]["callback"]["payload"] == "the answer"
