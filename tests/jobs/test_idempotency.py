"""Idempotency keys: a repeat has the first answer, another request is told what differs, a race makes one job."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import pytest

from app.settings import Settings
from tests.build import JSON, Api, client_of, ok, problem
from tests.servers import ServiceThread
from tests.waiting import eventually


@pytest.fixture
def key() -> str:
    """A key that no other test uses."""
    return str(uuid4())


def jobs_of(db: "psycopg.Connection[Any]", queue: str) -> int:
    """How many jobs a queue has."""
    row = db.execute("SELECT count(*) FROM towpath.jobs WHERE queue = %s", [queue]).fetchone()
    assert row
    return int(row[0])


def test_a_repeat_has_the_first_answer_byte_for_byte(api: Api, key: str) -> None:
    job = {"kind": "work", "queue": api.queue, "delay_seconds": 3600, "tags": ["a"], "priority": 3}
    first, again = (api.post("/v1/jobs", job, Idempotency_Key=key) for _ in range(2))
    assert again.content == first.content
    assert (first.status_code, again.status_code) == (201, 200)
    assert ("idempotency-replayed" in first.headers, again.headers["idempotency-replayed"]) == (False, "true")
    assert again.headers["location"] == first.headers["location"]


def test_a_repeated_batch_has_the_first_answer_byte_for_byte(api: Api, key: str) -> None:
    body = {"jobs": [{"kind": "work", "queue": api.queue, "args": n} for n in range(100)]}
    first, again = (api.post("/v1/jobs/batch", body, Idempotency_Key=key) for _ in range(2))
    assert again.content == first.content
    assert (first.status_code, again.status_code, again.headers["idempotency-replayed"]) == (201, 200, "true")


def test_a_repeat_makes_no_job(api: Api, db: "psycopg.Connection[Any]", key: str) -> None:
    for _ in range(3):
        ok(api.post("/v1/jobs", {"kind": "work", "queue": api.queue}, Idempotency_Key=key))
    assert jobs_of(db, api.queue) == 1


def test_a_repeat_has_the_first_answer_whatever_became_of_the_job(api: Api, key: str) -> None:
    job = {"kind": "work", "queue": api.queue}
    first = api.post("/v1/jobs", job, Idempotency_Key=key)
    ok(api.settle("complete", api.claim()))
    assert api.post("/v1/jobs", job, Idempotency_Key=key).content == first.content


def test_the_same_job_without_a_key_is_another_job(api: Api, db: "psycopg.Connection[Any]") -> None:
    for _ in range(2):
        api.enqueue()
    assert jobs_of(db, api.queue) == 2


@pytest.mark.parametrize(
    ("written", "again"),
    [
        ('{"kind":"a","args":{"x":1,"y":[2,3]}}', '{\n "args" : {"y": [2, 3], "x": 1},\t"kind": "a"}'),
        ('{"kind":"a","delay_seconds":60}', '{"kind":"a","delay_seconds":60.0}'),
        ('{"kind":"a","run_at":"2099-01-01T00:00:00Z"}', '{"kind":"a","run_at":"2099-01-01T02:00:00.000+02:00"}'),
        ('{"kind":"a","tags":[],"priority":2,"args":{}}', '{"kind":"a"}'),
        ('{"kind":"a","backoff":{}}', '{"kind":"a","backoff":{"factor":2,"kind":"exponential"}}'),
    ],
    ids=["key order and space", "numbers", "offsets", "defaults", "backoff defaults"],
)
def test_it_is_the_same_request_however_it_is_written(api: Api, key: str, written: str, again: str) -> None:
    headers = {"Content-Type": "application/json", "Idempotency-Key": key}
    first, second = (api.client.post("/v1/jobs", content=body, headers=headers) for body in (written, again))
    assert (first.status_code, second.status_code) == (201, 200)
    assert second.content == first.content


@pytest.mark.parametrize(
    ("change", "pointers"),
    [
        ({"args": {"x": 2}}, ["/args"]),
        ({"kind": "other"}, ["/kind"]),
        ({"queue": "elsewhere"}, ["/queue"]),
        ({"priority": 1, "max_attempts": 3}, ["/max_attempts", "/priority"]),
        ({"run_at": "2099-01-01T00:00:00Z"}, ["/run_at"]),
        ({"start_by": "2099-01-01T00:00:00Z"}, ["/start_by"]),
        ({"delay_seconds": 5}, ["/delay_seconds"]),
        ({"timeout_seconds": 5}, ["/timeout_seconds"]),
        ({"backoff": {"kind": "fixed"}}, ["/backoff"]),
        ({"tags": ["b"]}, ["/tags"]),
        ({"metadata": {"a": 1}}, ["/metadata"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, list) else "",
)
def test_another_job_is_refused_and_told_what_differs(
    api: Api, db: "psycopg.Connection[Any]", key: str, change: JSON, pointers: list[str]
) -> None:
    job = {"kind": "work", "queue": api.queue, "args": {"x": 1}}
    ok(api.post("/v1/jobs", job, Idempotency_Key=key))
    refused = problem(api.post("/v1/jobs", {**job, **change}, Idempotency_Key=key), 422, "idempotency-key-reused")
    assert refused["differences"] == pointers
    assert jobs_of(db, api.queue) == 1


def test_another_batch_is_refused_and_told_which_jobs_differ(api: Api, key: str) -> None:
    jobs = [{"kind": "work", "queue": api.queue, "args": n} for n in range(5)]
    ok(api.post("/v1/jobs/batch", {"jobs": jobs}, Idempotency_Key=key))
    jobs[1], jobs[3] = {**jobs[1], "args": "other"}, {**jobs[3], "priority": 1}
    refused = api.post("/v1/jobs/batch", {"jobs": jobs}, Idempotency_Key=key)
    assert problem(refused, 422, "idempotency-key-reused")["differences"] == ["/jobs/1", "/jobs/3"]


def test_a_longer_batch_is_another_batch(api: Api, key: str) -> None:
    jobs = [{"kind": "work", "queue": api.queue}] * 2
    ok(api.post("/v1/jobs/batch", {"jobs": jobs}, Idempotency_Key=key))
    refused = api.post("/v1/jobs/batch", {"jobs": jobs + jobs[:1]}, Idempotency_Key=key)
    assert problem(refused, 422, "idempotency-key-reused")["differences"] == ["/jobs/2"]


@pytest.mark.parametrize("first", ["single", "batch"])
def test_a_key_of_one_job_is_no_key_of_a_batch(api: Api, db: "psycopg.Connection[Any]", key: str, first: str) -> None:
    job = {"kind": "work", "queue": api.queue}
    calls: list[tuple[str, JSON]] = [("/v1/jobs", job), ("/v1/jobs/batch", {"jobs": [job]})]
    if first == "batch":
        calls.reverse()
    ok(api.post(*calls[0], Idempotency_Key=key))
    problem(api.post(*calls[1], Idempotency_Key=key), 422, "idempotency-key-reused")
    assert jobs_of(db, api.queue) == 1


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs/batch"])
def test_a_refused_request_does_not_bind_its_key(api: Api, key: str, path: str) -> None:
    def sent(**fields: Any) -> httpx.Response:
        job = {"kind": "work", "queue": api.queue, **fields}
        return api.post(path, {"jobs": [job]} if path.endswith("batch") else job, Idempotency_Key=key)

    problem(sent(priority=9), 422, "invalid-field")
    assert sent(priority=1).status_code == 201


def test_a_repeat_of_each_tells_of_the_bad_job_again(api: Api, key: str) -> None:
    jobs = [{"kind": "work", "queue": api.queue, "args": n, "priority": 9 if n == 1 else 2} for n in range(3)]
    body = {"jobs": jobs, "mode": "each"}
    first, again = (api.post("/v1/jobs/batch", body, Idempotency_Key=key) for _ in range(2))
    assert again.content == first.content
    assert [item["problem"] is None for item in again.json()["jobs"]] == [True, False, True]


@pytest.mark.parametrize("bad", [b"", b"k" * 256, "clé".encode(), b"a\tb"], ids=["empty", "long", "not ascii", "tab"])
def test_a_key_that_could_not_be_told_apart_is_refused(api: Api, bad: bytes) -> None:
    headers = {b"Idempotency-Key": bad}
    refused = api.client.post("/v1/jobs", json={"kind": "work", "queue": api.queue}, headers=headers)
    assert problem(refused, 422, "invalid-field")["errors"][0]["pointer"] == "Idempotency-Key"


# Races


async def race(urls: list[str], path: str, body: JSON, key: str, times: int) -> list[httpx.Response]:
    """The same request at once over as many connections, by turns to each service."""
    content = json.dumps(body)
    headers = {"Content-Type": "application/json", "Idempotency-Key": key}
    async with httpx.AsyncClient(timeout=30, verify=False, limits=httpx.Limits(max_connections=times)) as client:
        calls = (client.post(urls[n % len(urls)] + path, content=content, headers=headers) for n in range(times))
        return await asyncio.gather(*calls)


def test_racing_repeats_make_one_job_and_all_are_told_its_id(
    service: ServiceThread, other_service: ServiceThread, api: Api, db: "psycopg.Connection[Any]"
) -> None:
    for n in range(3):
        queue = f"{api.queue}-{n}"
        job = {"kind": "work", "queue": queue}
        answers = asyncio.run(race([service.url, other_service.url], "/v1/jobs", job, queue, 64))
        assert Counter(answer.status_code for answer in answers) == {201: 1, 200: 63}
        assert len({answer.content for answer in answers}) == 1
        assert jobs_of(db, queue) == 1


def test_repeats_that_share_a_flush_make_one_job(
    service: ServiceThread,
    api: Api,
    db: "psycopg.Connection[Any]",
    connect: Callable[[], "psycopg.Connection[Any]"],
    key: str,
) -> None:
    enqueues = service.server.lifespan.state["runtime"].jobs.enqueues
    held = f"held-{key}"
    holding = connect()
    holding.execute("SELECT towpath.enqueue('work', idempotency_key => %s)", [held])
    with ThreadPoolExecutor(17) as pool:
        before = pool.submit(api.post, "/v1/jobs", {"kind": "work"}, Idempotency_Key=held)
        blocked = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        eventually(lambda: db.execute(blocked).rowcount == 1)
        job = {"kind": "work", "queue": api.queue}
        twins = [pool.submit(api.post, "/v1/jobs", job, Idempotency_Key=key) for _ in range(16)]
        eventually(lambda: len(enqueues._queue) == 16)
        holding.rollback()
        assert Counter(twin.result(10).status_code for twin in twins) == {201: 1, 200: 15}
        assert before.result(10).status_code == 201
    assert jobs_of(db, api.queue) == 1


def test_racing_repeats_of_a_batch_make_one_batch(
    service: ServiceThread, other_service: ServiceThread, api: Api, db: "psycopg.Connection[Any]", key: str
) -> None:
    body = {"jobs": [{"kind": "work", "queue": api.queue, "args": n} for n in range(20)]}
    answers = asyncio.run(race([service.url, other_service.url], "/v1/jobs/batch", body, key, 64))
    assert Counter(answer.status_code for answer in answers) == {201: 1, 200: 63}
    assert len({answer.content for answer in answers}) == 1
    assert jobs_of(db, api.queue) == 20


def test_racing_requests_that_differ_make_one_job_and_the_losers_are_told(
    service: ServiceThread, api: Api, db: "psycopg.Connection[Any]", key: str
) -> None:
    async def all_different() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=30, verify=False, limits=httpx.Limits(max_connections=32)) as client:
            jobs = ({"kind": "work", "queue": api.queue, "args": n} for n in range(32))
            headers = {"Idempotency-Key": key}
            return await asyncio.gather(*(client.post(f"{service.url}/v1/jobs", json=j, headers=headers) for j in jobs))

    answers = asyncio.run(all_different())
    assert Counter(answer.status_code for answer in answers) == {201: 1, 422: 31}
    assert jobs_of(db, api.queue) == 1


# The end of a key


def test_a_key_is_usable_for_something_else_after_its_expiry(api: Api, db: "psycopg.Connection[Any]", key: str) -> None:
    ok(api.post("/v1/jobs", {"kind": "work", "queue": api.queue}, Idempotency_Key=key))
    db.execute("UPDATE towpath.idempotency_keys SET expires_at = now() WHERE key = %s", [key])
    eventually(lambda: db.execute("SELECT FROM towpath.idempotency_keys WHERE key = %s", [key]).rowcount == 0)
    assert api.post("/v1/jobs", {"kind": "other", "queue": api.queue}, Idempotency_Key=key).status_code == 201


def test_a_key_is_kept_as_long_as_the_settings_say(new_settings: Callable[..., Settings], queue: str, key: str) -> None:
    settings = new_settings(idempotency_seconds=7200)
    with ServiceThread(settings, maintenance=False) as service, client_of(service.url) as client:
        ok(Api(client, queue).post("/v1/jobs", {"kind": "work", "queue": queue}, Idempotency_Key=key))
    with psycopg.connect(settings.database_url) as db:
        query = "SELECT expires_at - now() BETWEEN '119 minutes' AND '120 minutes' FROM towpath.idempotency_keys"
        assert db.execute(query).fetchone() == (True,)
