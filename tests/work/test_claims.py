"""Claims: who gets which jobs and when, and that a poll costs nothing, loses nothing, and ends when it should."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import psycopg
import pytest

from app.settings import Settings
from tests.build import JSON, Api, client_of, move, ok, problem
from tests.servers import ServiceThread
from tests.waiting import eventually

BLOCKED = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


def put_queue(api: Api, **settings: Any) -> None:
    """Make the test's queue, or change it."""
    ok(api.client.put(f"/v1/queues/{api.queue}", json=settings))


def ids_of(jobs: list[JSON]) -> list[str]:
    return [job["id"] for job in jobs]


def stored(db: "psycopg.Connection[Any]", job: JSON | str) -> tuple[str, int]:
    """A job's state and how many attempts it has used."""
    job_id = job if isinstance(job, str) else job["id"]
    row = db.execute("SELECT state, attempt FROM towpath.jobs WHERE id = %s", [job_id]).fetchone()
    assert row is not None
    return row


def leases_of(db: "psycopg.Connection[Any]", job: JSON) -> int:
    """How many claims have taken the job."""
    row = db.execute("SELECT lease_number FROM towpath.jobs WHERE id = %s", [job["id"]]).fetchone()
    assert row is not None
    return int(row[0])


@contextmanager
def a_waiting_poll(service: ServiceThread, api: Api, **request: Any) -> Iterator["Future[JSON]"]:
    """A long poll that has had its look and waits; the future is its answer."""
    before = service.waiting_polls()
    asked = {"queues": [api.queue], "wait_seconds": 30, **request}
    with ThreadPoolExecutor(1) as pool, client_of(service.url) as client:
        poll = pool.submit(lambda: ok(client.post("/v1/claims", json=asked)))
        eventually(lambda: service.waiting_polls() > before)
        yield poll


@pytest.fixture(scope="module")
def rarely_looking(new_settings: Callable[..., Settings]) -> Settings:
    """Settings under which a poll that is not woken finds its job after ten minutes."""
    return new_settings(safety_poll_seconds=600)


@pytest.fixture(scope="module")
def quiet(rarely_looking: Settings) -> Iterator[ServiceThread]:
    """A service whose polls have nothing but wake-ups, and that sweeps nothing."""
    with ServiceThread(rarely_looking, maintenance=False) as running:
        yield running


@pytest.fixture
def quiet_api(quiet: ServiceThread, queue: str) -> Iterator[Api]:
    with client_of(quiet.url) as client:
        yield Api(client, queue)


# Order, and what is asked for


def test_jobs_come_in_the_order_in_which_they_became_due(api: Api) -> None:
    ids = [api.enqueue()["id"] for _ in range(5)]
    assert ids_of(api.claims(limit=10)["jobs"]) == ids


def test_a_promoted_job_has_the_place_of_its_due_time(api: Api, db: "psycopg.Connection[Any]") -> None:
    scheduled, ready = api.enqueue(delay_seconds=3600), api.enqueue()
    for column in ("run_at", "claim_order"):
        move(db, scheduled, column, -7200)
    db.execute("SELECT pg_notify('towpath', 'due')")
    eventually(lambda: stored(db, scheduled)[0] == "available")
    assert ids_of(api.claims(limit=10)["jobs"]) == [scheduled["id"], ready["id"]]


def test_a_higher_priority_comes_first(api: Api) -> None:
    by_priority = {priority: api.enqueue(priority=priority)["id"] for priority in (3, 1, 4, 2)}
    assert ids_of(api.claims(limit=10)["jobs"]) == [by_priority[priority] for priority in (1, 2, 3, 4)]


def test_a_job_that_has_waited_one_aging_step_competes_one_level_higher(api: Api) -> None:
    put_queue(api, aging_seconds=1)
    old = api.enqueue(priority=3)["id"]
    put_queue(api, aging_seconds=600)
    young = api.enqueue(priority=2)["id"]
    assert ids_of(api.claims(limit=10)["jobs"]) == [old, young]


def test_without_aging_a_lower_priority_waits_however_old_it_is(api: Api, db: "psycopg.Connection[Any]") -> None:
    put_queue(api, aging_seconds=None)
    old, young = api.enqueue(priority=3), api.enqueue(priority=2)
    for column in ("run_at", "claim_order"):
        move(db, old, column, -365 * 86_400)
    assert ids_of(api.claims(limit=10)["jobs"]) == ids_of([young, old])


def test_no_answer_has_more_jobs_than_asked_for(api: Api) -> None:
    api.enqueue_many(10)
    assert len(api.claims(limit=3)["jobs"]) == 3


def test_polls_that_wait_together_share_the_jobs_in_order_of_arrival(service: ServiceThread, api: Api) -> None:
    with a_waiting_poll(service, api, limit=2) as first, a_waiting_poll(service, api, limit=2) as second:
        ids = api.enqueue_many(3)
        answers = [ids_of(poll.result(10)["jobs"]) for poll in (first, second)]
    assert answers == [ids[:2], ids[2:]]


def test_only_the_kinds_asked_for_are_given(api: Api) -> None:
    api.enqueue(kind="other")
    wanted = api.enqueue(kind="wanted")["id"]
    assert ids_of(api.claims(limit=10, kinds=["wanted"])["jobs"]) == [wanted]


def test_queues_are_served_in_the_order_given(api: Api) -> None:
    second = f"{api.queue}-second"
    later = api.enqueue(queue=second)["id"]
    first = api.enqueue()["id"]
    claimed = [api.claims(queues=[api.queue, second])["jobs"][0]["id"] for _ in range(2)]
    assert claimed == [first, later]


def test_a_job_in_any_of_its_queues_wakes_a_poll(quiet: ServiceThread, quiet_api: Api) -> None:
    last = f"{quiet_api.queue}-last"
    with a_waiting_poll(quiet, quiet_api, queues=[quiet_api.queue, last]) as poll:
        job = quiet_api.enqueue(queue=last)
        assert ids_of(poll.result(10)["jobs"]) == [job["id"]]


def test_a_queue_whose_row_somebody_holds_does_not_hold_up_the_next_one(
    api: Api, connect: Callable[[], "psycopg.Connection[Any]"]
) -> None:
    second = f"{api.queue}-second"
    api.enqueue()
    free = api.enqueue(queue=second)["id"]
    connect().execute("SELECT FROM towpath.queues WHERE name = %s FOR UPDATE", [api.queue])
    assert ids_of(api.claims(queues=[api.queue, second], wait_seconds=10)["jobs"]) == [free]


# What a claimed job says


def test_a_lease_is_as_long_as_the_queue_says(api: Api) -> None:
    put_queue(api, lease_seconds=123)
    job = api.a_running_job()
    assert lease_length(api, job) == 123


def test_a_lease_is_as_long_as_the_worker_asks(api: Api) -> None:
    put_queue(api, lease_seconds=123)
    api.enqueue()
    assert lease_length(api, api.claim(lease_seconds=45)) == 45


def lease_length(api: Api, claimed: JSON) -> float:
    begun, ends = (datetime.fromisoformat(api.job(claimed)[name]) for name in ("claimed_at", "lease_expires_at"))
    return (ends - begun).total_seconds()


def test_polls_of_one_claim_have_each_their_own_lease_and_name(service: ServiceThread, api: Api) -> None:
    asked = [{"worker": "short", "lease_seconds": 30}, {"worker": "long", "lease_seconds": 300}]
    with a_waiting_poll(service, api, **asked[0]) as first, a_waiting_poll(service, api, **asked[1]) as second:
        api.enqueue_many(2)
        jobs = [poll.result(10)["jobs"][0] for poll in (first, second)]
    assert [(api.job(job)["worker"], lease_length(api, job)) for job in jobs] == [("short", 30), ("long", 300)]


def test_the_answer_says_when_to_heartbeat(api: Api) -> None:
    api.enqueue()
    assert 0 < api.claims(lease_seconds=60)["heartbeat_seconds"] <= 30


@pytest.mark.parametrize(("max_attempts", "told"), [(1, [True]), (3, [False, False, True])])
def test_the_last_attempt_says_so(api: Api, max_attempts: int, told: list[bool]) -> None:
    api.enqueue(max_attempts=max_attempts)
    claims = []
    for _ in range(max_attempts):
        claims.append(api.claim())
        ok(api.settle("retry", claims[-1], delay_seconds=0))
    assert [claimed["last_attempt"] for claimed in claims] == told


# Waiting


def test_an_empty_queue_is_no_error(api: Api) -> None:
    answer = api.claims()
    assert (answer["jobs"], answer["reason"], answer["retry_after_seconds"]) == ([], "empty", 0)


def test_a_poll_is_answered_when_its_time_is_up_and_not_before(api: Api) -> None:
    begun = time.monotonic()
    assert api.claims(wait_seconds=0.3)["reason"] == "empty"
    assert 0.3 <= time.monotonic() - begun < 5


@pytest.mark.parametrize("through", ["the same service", "another service", "sql"])
def test_a_new_job_wakes_a_waiting_poll(
    quiet: ServiceThread, quiet_api: Api, rarely_looking: Settings, through: str
) -> None:
    with ExitStack() as stack:
        if through == "another service":
            other = stack.enter_context(ServiceThread(rarely_looking, maintenance=False))
        poll = stack.enter_context(a_waiting_poll(quiet, quiet_api))
        match through:
            case "the same service":
                quiet_api.enqueue()
            case "another service":
                ok(httpx.post(f"{other.url}/v1/jobs", json={"kind": "work", "queue": quiet_api.queue}))
            case "sql":
                with psycopg.connect(rarely_looking.database_url) as connection:
                    connection.execute("SELECT towpath.enqueue('work', queue => %s)", [quiet_api.queue])
        assert poll.result(10)["jobs"][0]["attempt"] == 1


@pytest.mark.parametrize("verb", ["release", "redrive", "resume", "retry"])
def test_a_job_that_becomes_free_again_wakes_a_waiting_poll(quiet: ServiceThread, quiet_api: Api, verb: str) -> None:
    claimed, urls = quiet_api.a_running_job(), {}
    match verb:
        case "redrive":
            ok(quiet_api.settle("fail", claimed))
        case "resume" | "retry":
            wait = quiet_api.open_wait(claimed)
            urls = wait["urls"]
            ok(quiet_api.settle("park", claimed, wait_id=wait["wait_id"]))
    with a_waiting_poll(quiet, quiet_api) as poll:
        match verb:
            case "release":
                ok(quiet_api.settle("release", claimed))
            case "redrive":
                ok(quiet_api.post(f"/v1/jobs/{claimed['id']}/redrive"))
            case _:
                ok(quiet_api.client.post(urls[verb]))
        assert ids_of(poll.result(10)["jobs"]) == [claimed["id"]]


def test_too_many_polls_are_refused_while_heartbeats_go_on(new_settings: Callable[..., Settings], queue: str) -> None:
    with (
        ServiceThread(new_settings(max_waiting_polls=3)) as small,
        client_of(small.url) as client,
        ExitStack() as polls,
    ):
        own = Api(client, queue)
        claimed = own.a_running_job()
        for _ in range(3):
            polls.enter_context(_raw_poll(small.url, queue))
        eventually(lambda: small.waiting_polls() == 3)
        refused = own.post("/v1/claims", {"queues": [queue], "wait_seconds": 1})
        assert problem(refused, 429, "too-many-polls")["limit"] == 3
        assert int(refused.headers["retry-after"]) > 0
        ok(own.heartbeat(claimed))


def test_idle_polls_hold_no_connection_and_run_no_query(
    quiet: ServiceThread, rarely_looking: Settings, queue: str
) -> None:
    # The listener asks now and then whether its own connection is alive, polls or not.
    activity = (
        "SELECT count(*) FILTER (WHERE state <> 'idle'), max(query_start) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name LIKE 'towpath%%' AND application_name <> %s"
    )
    with ExitStack() as stack, psycopg.connect(rarely_looking.database_url, autocommit=True) as watching:

        def seen() -> Any:
            return watching.execute(activity, ["towpath listen"]).fetchone()

        for _ in range(200):
            stack.enter_context(_raw_poll(quiet.url, queue))
        # Each arrival causes one look; after those nothing more may come.
        eventually(lambda: quiet.waiting_polls() == 200)
        eventually(lambda: seen()[0] == 0)
        before = seen()
        assert before[1] is not None
        threading.Event().wait(0.5)
        assert seen() == before
    eventually(lambda: quiet.waiting_polls() == 0)


# A claim that cannot be lost


def test_a_repeated_claim_returns_the_jobs_and_leases_that_it_still_holds(api: Api) -> None:
    api.enqueue_many(3)
    claim_id = str(uuid4())
    first = api.claims(limit=3, claim_id=claim_id)["jobs"]
    ok(api.settle("complete", first[0]))
    again = api.claims(limit=3, claim_id=claim_id)["jobs"]
    assert [(job["id"], job["lease"], job["attempt"]) for job in again] == [
        (job["id"], job["lease"], 1) for job in first[1:]
    ]


def test_a_repeated_claim_takes_no_more_jobs_while_it_holds_some(api: Api) -> None:
    api.enqueue()
    claim_id = str(uuid4())
    first = api.claims(limit=5, claim_id=claim_id)["jobs"]
    api.enqueue()
    assert ids_of(api.claims(limit=5, claim_id=claim_id)["jobs"]) == ids_of(first)


def test_a_claim_can_be_repeated_at_another_service(api: Api, other_service: ServiceThread) -> None:
    api.enqueue()
    asked = {"queues": [api.queue], "claim_id": str(uuid4())}
    first = ok(api.post("/v1/claims", asked))["jobs"]
    again = ok(httpx.post(f"{other_service.url}/v1/claims", json=asked))["jobs"]
    assert [(job["id"], job["lease"]) for job in again] == [(job["id"], job["lease"]) for job in first]


def test_a_repeated_claim_whose_jobs_are_settled_is_a_new_one(api: Api) -> None:
    claim_id = str(uuid4())
    api.enqueue()
    (settled,) = api.claims(claim_id=claim_id)["jobs"]
    ok(api.settle("complete", settled))
    new = api.enqueue()["id"]
    assert ids_of(api.claims(claim_id=claim_id)["jobs"]) == [new]


def test_an_answer_is_cut_to_max_bytes_and_the_rest_is_free_for_others(api: Api, db: "psycopg.Connection[Any]") -> None:
    ids = api.enqueue_many(4, args={"text": "x" * 3000})
    assert ids_of(api.claims(limit=4, max_bytes=8000)["jobs"]) == ids[:2]
    eventually(lambda: [stored(db, each) for each in ids[2:]] == [("available", 0)] * 2)
    rest = api.claims(limit=4, worker="another")["jobs"]
    assert [(job["id"], job["attempt"]) for job in rest] == [(each, 1) for each in ids[2:]]


def test_a_job_larger_than_max_bytes_is_delivered_alone(api: Api) -> None:
    ids = api.enqueue_many(2, args={"text": "x" * 5000})
    assert ids_of(api.claims(limit=2, max_bytes=1024)["jobs"]) == ids[:1]


def test_large_jobs_do_not_keep_the_small_ones_behind_them_from_flowing(api: Api) -> None:
    large = api.enqueue_many(3, args={"text": "x" * 900_000})
    small = api.enqueue_many(20)
    claimed: list[str] = []
    while len(claimed) < 23:
        claimed += ids_of(api.claims(limit=100, wait_seconds=5, max_bytes=1_000_000)["jobs"])
    assert sorted(claimed) == sorted(large + small)


# Clients that go away


def _raw_poll(url: str, queue: str, **request: Any) -> socket.socket:
    """A poll on a socket of its own, which never reads its answer."""
    where = urlsplit(url)
    connection = socket.create_connection((where.hostname or "", where.port or 0))
    body = httpx.Request("POST", url, json={"queues": [queue], "wait_seconds": 60, **request}).read()
    head = f"POST /v1/claims HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    return connection


def _cut(connection: socket.socket, how: str) -> None:
    match how:
        case "half-closed":
            connection.shutdown(socket.SHUT_WR)
            return
        case "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


CUTS = ["closed", "reset", "half-closed"]


@pytest.mark.parametrize("how", CUTS)
def test_a_poll_whose_client_is_gone_leaves_the_line(quiet: ServiceThread, quiet_api: Api, how: str) -> None:
    gone = [_raw_poll(quiet.url, quiet_api.queue) for _ in range(5)]
    eventually(lambda: quiet.waiting_polls() == 5)
    for connection in gone:
        _cut(connection, how)
    eventually(lambda: quiet.waiting_polls() == 0, 1)
    for connection in gone:
        connection.close()


@pytest.mark.parametrize("how", CUTS)
def test_a_live_poll_gets_the_job_at_once_though_dead_ones_came_first(
    quiet: ServiceThread, quiet_api: Api, how: str
) -> None:
    gone = [_raw_poll(quiet.url, quiet_api.queue) for _ in range(20)]
    eventually(lambda: quiet.waiting_polls() == 20)
    with a_waiting_poll(quiet, quiet_api) as live:
        for connection in gone:
            _cut(connection, how)
        # Nobody waits until the service has noticed: that is the point.
        job = quiet_api.enqueue()
        (claimed,) = live.result(1)["jobs"]
    assert (claimed["id"], claimed["attempt"]) == (job["id"], 1)
    for connection in gone:
        connection.close()


def test_a_client_that_goes_away_during_the_claim_holds_nothing(
    service: ServiceThread, api: Api, db: "psycopg.Connection[Any]", connect: Callable[[], "psycopg.Connection[Any]"]
) -> None:
    job = api.enqueue()
    blocker = connect()
    blocker.execute("SELECT FROM towpath.queues WHERE name = %s FOR UPDATE", [api.queue])
    waiting = service.waiting_polls()
    poll = _raw_poll(service.url, api.queue)
    eventually(lambda: (db.execute(BLOCKED).fetchone() or (0,))[0] >= 1)
    poll.close()
    eventually(lambda: service.waiting_polls() == waiting)
    blocker.rollback()
    # The statement went on and took the job, for nobody.
    eventually(lambda: leases_of(db, job) == 1)
    eventually(lambda: stored(db, job) == ("available", 0))
    assert api.claim()["attempt"] == 1


def test_a_job_given_to_a_client_that_never_reads_comes_back_with_its_lease(api: Api, service: ServiceThread) -> None:
    put_queue(api, backoff={"kind": "fixed", "base_seconds": 0})
    with _raw_poll(service.url, api.queue, lease_seconds=1):
        job = api.enqueue()
        eventually(lambda: api.job(job)["state"] == "running")
        again = api.claim()
    assert (again["id"], again["attempt"], again["last_error"]["kind"]) == (job["id"], 2, "lease_expired")


def test_a_stop_answers_every_poll_at_once(new_settings: Callable[..., Settings], queue: str) -> None:
    service = ServiceThread(new_settings())
    with service, ThreadPoolExecutor(5) as pool:
        asked = {"queues": [queue], "wait_seconds": 60}
        polls = [pool.submit(httpx.post, f"{service.url}/v1/claims", json=asked, timeout=70) for _ in range(5)]
        eventually(lambda: service.waiting_polls() == 5)
        begun = time.monotonic()
        service.stop()
        assert {poll.result(5).json()["reason"] for poll in polls} == {"draining"}
        assert time.monotonic() - begun < 3


def test_a_stop_during_a_claim_leaves_the_job_to_others(
    settings: Settings, api: Api, db: "psycopg.Connection[Any]", connect: Callable[[], "psycopg.Connection[Any]"]
) -> None:
    job = api.enqueue()
    stopping = ServiceThread(settings, maintenance=False)
    blocker = connect()
    blocker.execute("SELECT FROM towpath.queues WHERE name = %s FOR UPDATE", [api.queue])
    with stopping, ThreadPoolExecutor(2) as pool:
        asked = {"queues": [api.queue], "wait_seconds": 60}
        poll = pool.submit(httpx.post, f"{stopping.url}/v1/claims", json=asked, timeout=70)
        eventually(lambda: (db.execute(BLOCKED).fetchone() or (0,))[0] >= 1)
        stop = pool.submit(stopping.stop)
        assert poll.result(5).json()["reason"] == "draining"
        blocker.rollback()
        stop.result(10)
    assert (leases_of(db, job), stored(db, job)) == (1, ("available", 0))
