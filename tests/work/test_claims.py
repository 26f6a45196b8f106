"""Claims: who gets which jobs, when a poll is answered, and that a poll costs and loses nothing."""

import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import psycopg
import pytest

from app.settings import Settings
from tests.build import Api, client_of, move, ok, problem
from tests.servers import ServiceThread
from tests.waiting import eventually


def test_jobs_come_in_the_order_of_their_due_times(api: Api) -> None:
    ids = [api.enqueue()["id"] for _ in range(5)]
    assert [job["id"] for job in api.claims(limit=10)["jobs"]] == ids


def test_a_higher_priority_comes_first(api: Api) -> None:
    low, high = api.enqueue(priority=4)["id"], api.enqueue(priority=1)["id"]
    assert [job["id"] for job in api.claims(limit=10)["jobs"]] == [high, low]


def test_a_job_that_has_waited_one_aging_step_competes_one_level_higher(api: Api) -> None:
    ok(api.client.put(f"/v1/queues/{api.queue}", json={"aging_seconds": 1}))
    old = api.enqueue(priority=3)["id"]
    ok(api.client.put(f"/v1/queues/{api.queue}", json={"aging_seconds": 600}))
    young = api.enqueue(priority=2)["id"]
    assert [job["id"] for job in api.claims(limit=10)["jobs"]] == [old, young]


def test_no_answer_has_more_jobs_than_asked_for(api: Api) -> None:
    api.enqueue_many(10)
    assert len(api.claims(limit=3)["jobs"]) == 3


def test_only_the_kinds_asked_for_are_given(api: Api) -> None:
    api.enqueue(kind="other")
    wanted = api.enqueue(kind="wanted")["id"]
    assert [job["id"] for job in api.claims(limit=10, kinds=["wanted"])["jobs"]] == [wanted]


def test_queues_are_served_in_the_order_given(api: Api) -> None:
    second = f"{api.queue}-second"
    later = api.enqueue(queue=second)["id"]
    first = api.enqueue()["id"]
    claimed = [api.claims(queues=[api.queue, second])["jobs"][0]["id"] for _ in range(2)]
    assert claimed == [first, later]


def test_an_empty_queue_is_no_error(api: Api) -> None:
    answer = api.claims()
    assert (answer["jobs"], answer["reason"]) == ([], "empty")


def test_a_waiting_poll_is_answered_when_its_time_is_up(api: Api) -> None:
    assert api.claims(wait_seconds=0.2)["reason"] == "empty"


@pytest.mark.parametrize("through", ["the same service", "another service", "sql"])
def test_a_new_job_wakes_a_waiting_poll(api: Api, settings: Settings, through: str) -> None:
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(api.claim)
        match through:
            case "the same service":
                api.enqueue()
            case "another service":
                other = stack.enter_context(ServiceThread(settings, maintenance=False))
                ok(httpx.post(f"{other.url}/v1/jobs", json={"kind": "work", "queue": api.queue}))
            case "sql":
                with psycopg.connect(settings.database_url) as connection:
                    connection.execute("SELECT towpath.enqueue('work', queue => %s)", [api.queue])
        assert waiting.result(10)["kind"] == "work"


def test_a_repeated_claim_returns_the_jobs_and_leases_that_it_still_holds(api: Api) -> None:
    api.enqueue_many(3)
    claim_id = str(uuid4())
    first = api.claims(limit=3, claim_id=claim_id)["jobs"]
    ok(api.settle("complete", first[0]))
    again = api.claims(limit=3, claim_id=claim_id)["jobs"]
    assert [(job["id"], job["lease"]) for job in again] == [(job["id"], job["lease"]) for job in first[1:]]


def test_an_answer_is_cut_to_max_bytes_and_the_rest_stays_claimable(api: Api) -> None:
    api.enqueue_many(4, args={"text": "x" * 3000})
    assert len(api.claims(limit=4, max_bytes=8000)["jobs"]) == 2
    rest = api.claims(limit=4, wait_seconds=5)["jobs"]
    rest += api.claims(limit=4, wait_seconds=1)["jobs"] if len(rest) < 2 else []
    assert [job["attempt"] for job in rest] == [1, 1]


def test_a_job_larger_than_max_bytes_is_delivered_alone(api: Api) -> None:
    api.enqueue(args={"text": "x" * 5000})
    assert len(api.claims(max_bytes=1024)["jobs"]) == 1


def test_the_last_attempt_says_so(api: Api, db: "psycopg.Connection[Any]") -> None:
    api.enqueue(max_attempts=2)
    first = api.claim()
    ok(api.settle("retry", first, delay_seconds=0))
    assert (first["last_attempt"], api.claim()["last_attempt"]) == (False, True)


def test_too_many_polls_are_refused_while_heartbeats_go_on(new_settings: Callable[..., Settings], queue: str) -> None:
    with ServiceThread(new_settings(max_waiting_polls=3)) as small, client_of(small.url) as client:
        own = Api(client, queue)
        claimed = own.a_running_job()
        with ThreadPoolExecutor(8) as pool:
            asked = {"queues": [queue], "wait_seconds": 1}
            answers = list(pool.map(lambda _: httpx.post(f"{small.url}/v1/claims", json=asked, timeout=20), range(8)))
            beat = own.heartbeat(claimed)
        assert sorted({answer.status_code for answer in answers}) == [200, 429]
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert problem(refused, 429, "too-many-polls")["limit"] == 3
        assert int(refused.headers["retry-after"]) > 0
        assert beat.status_code == 200


def test_idle_polls_hold_no_connection_and_run_no_query(new_settings: Callable[..., Settings], queue: str) -> None:
    quiet = new_settings(safety_poll_seconds=600)
    activity = (
        "SELECT count(*) FILTER (WHERE state <> 'idle'), max(query_start) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    with ServiceThread(quiet, maintenance=False) as service, ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(_raw_poll(service.url, queue))
        with psycopg.connect(quiet.database_url, autocommit=True) as watching:
            # Each arrival causes one look; after those nothing more may come.
            eventually(lambda: service.waiting_polls() == 200)
            eventually(lambda: watching.execute(activity).fetchone()[0] == 0)  # type: ignore[index]
            before = watching.execute(activity).fetchone()
            threading.Event().wait(0.5)
            assert watching.execute(activity).fetchone() == before


def _raw_poll(url: str, queue: str) -> socket.socket:
    where = urlsplit(url)
    connection = socket.create_connection((where.hostname or "", where.port or 0))
    body = f'{{"queues": ["{queue}"], "wait_seconds": 30}}'
    head = (
        f"POST /v1/claims HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall((head + body).encode())
    return connection


def _cut(connection: socket.socket, how: str) -> None:
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif how == "half-closed":
        connection.shutdown(socket.SHUT_WR)
        return
    connection.close()


@pytest.mark.parametrize("how", ["closed", "reset", "half-closed"])
def test_a_poll_whose_client_is_gone_gets_no_job(service: ServiceThread, api: Api, how: str) -> None:
    before = service.waiting_polls()
    gone = [_raw_poll(service.url, api.queue) for _ in range(5)]
    eventually(lambda: service.waiting_polls() >= before + 5)
    for connection in gone:
        _cut(connection, how)
    eventually(lambda: service.waiting_polls() <= before)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(api.claim)
        job = api.enqueue()
        assert waiting.result(10)["id"] == job["id"]
    for connection in gone:
        connection.close()


def test_a_client_that_goes_away_during_the_claim_holds_nothing(
    service: ServiceThread, api: Api, db: "psycopg.Connection[Any]", connect: Callable[[], "psycopg.Connection[Any]"]
) -> None:
    job = api.enqueue()
    blocker = connect()
    blocker.execute("SELECT FROM towpath.queues WHERE name = %s FOR UPDATE", [api.queue])
    poll = _raw_poll(service.url, api.queue)
    blocked = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    eventually(lambda: (db.execute(blocked).fetchone() or (0,))[0] >= 1)
    waiting = service.waiting_polls()
    poll.close()
    eventually(lambda: service.waiting_polls() < waiting)
    blocker.rollback()
    claimed = api.claim()
    assert (claimed["id"], claimed["attempt"]) == (job["id"], 1)


def test_a_stop_answers_every_poll_at_once(new_settings: Callable[..., Settings], queue: str) -> None:
    service = ServiceThread(new_settings())
    with service, ThreadPoolExecutor(5) as pool:
        asked = {"queues": [queue], "wait_seconds": 60}
        polls = [pool.submit(httpx.post, f"{service.url}/v1/claims", json=asked, timeout=70) for _ in range(5)]
        eventually(lambda: service.waiting_polls() == 5)
        service.stop()
        assert {poll.result(5).json()["reason"] for poll in polls} == {"draining"}


def test_nothing_is_claimed_before_its_due_time(api: Api, db: "psycopg.Connection[Any]") -> None:
    job = api.enqueue(delay_seconds=3600)
    assert api.claims()["jobs"] == []
    move(db, job, "run_at", -3600)
    db.execute("SELECT pg_notify('towpath', 'due')")
    assert api.claim()["id"] == job["id"]
