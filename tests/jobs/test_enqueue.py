"""Enqueue: a 2xx is a durable job that the very next call sees; a bad job is refused by name, alone or in its batch."""

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import httpx
import psycopg
import pytest

from app.settings import Settings
from tests.build import JSON, Api, client_of, ok, problem
from tests.jobs.inputs import AT_ITS_BOUND, BEYOND_ITS_BOUND
from tests.servers import ServiceThread


def at(text: str) -> datetime:
    """A time of the wire."""
    return datetime.fromisoformat(text)


def test_a_new_job_is_201_with_its_location(api: Api) -> None:
    response = api.post("/v1/jobs", {"kind": "work", "queue": api.queue})
    assert response.status_code == 201
    assert response.headers["location"] == f"/v1/jobs/{response.json()['id']}"


def test_the_receipt_says_what_the_job_is(api: Api) -> None:
    receipt = api.enqueue(kind="send", priority=3, max_attempts=7)
    job = ok(api.get(f"/v1/jobs/{receipt['id']}"))
    assert receipt == {name: job[name] for name in receipt}


def test_ids_are_ordered_by_time(api: Api) -> None:
    ids = [api.enqueue()["id"] for _ in range(5)]
    assert ids == sorted(ids)
    assert {UUID(each).version for each in ids} == {7}


def test_a_job_is_visible_to_the_next_read_and_the_next_claim_of_any_service(
    api: Api, other_service: ServiceThread
) -> None:
    with client_of(other_service.url) as client:
        elsewhere = Api(client, api.queue)
        for _ in range(20):
            job = api.enqueue()
            assert elsewhere.get(f"/v1/jobs/{job['id']}").status_code == 200
            assert [claimed["id"] for claimed in elsewhere.claims()["jobs"]] == [job["id"]]


def test_a_job_without_a_time_is_available_at_once(api: Api) -> None:
    job = api.enqueue()
    assert (job["state"], job["run_at"]) == ("available", job["created_at"])


def test_a_future_run_at_schedules_the_job(api: Api) -> None:
    job = api.enqueue(run_at="2099-01-02T03:04:05.678901+02:00")
    assert (job["state"], job["run_at"]) == ("scheduled", "2099-01-02T01:04:05.678901Z")


def test_a_delay_counts_from_now_by_the_database_clock(api: Api) -> None:
    job = api.enqueue(delay_seconds=90.5)
    assert job["state"] == "scheduled"
    assert at(job["run_at"]) - at(job["created_at"]) == timedelta(seconds=90.5)


@pytest.mark.parametrize("past", ["1999-12-31T23:59:59Z", "0001-01-01T00:00:00Z"])
def test_a_past_run_at_means_now(api: Api, past: str) -> None:
    job = api.enqueue(run_at=past)
    assert (job["state"], job["run_at"]) == ("available", job["created_at"])


@pytest.mark.parametrize(
    ("spelled", "instant"),
    [
        ("2098-07-01T12:00:00Z", "2098-07-01T12:00:00Z"),
        ("2098-07-01T21:00:00+09:00", "2098-07-01T12:00:00Z"),
        ("2098-07-01T08:30:00.25-03:30", "2098-07-01T12:00:00.250000Z"),
        ("9999-12-31T23:59:59.999999Z", "9999-12-31T23:59:59.999999Z"),
    ],
)
def test_every_offset_names_the_same_instant_and_is_told_in_utc(api: Api, spelled: str, instant: str) -> None:
    assert api.job(api.enqueue(run_at=spelled, start_by=spelled))["run_at"] == instant


def test_a_job_takes_its_attempts_from_the_queue(api: Api) -> None:
    ok(api.client.put(f"/v1/queues/{api.queue}", json={"max_attempts": 3}))
    assert api.enqueue()["max_attempts"] == 3


def test_a_jobs_own_attempts_win(api: Api) -> None:
    ok(api.client.put(f"/v1/queues/{api.queue}", json={"max_attempts": 3}))
    assert api.enqueue(max_attempts=5)["max_attempts"] == 5


def test_an_absent_field_has_its_documented_default(api: Api) -> None:
    job = api.job(ok(api.post("/v1/jobs", {"kind": "work"})))
    told = {name: job[name] for name in ("queue", "args", "priority", "max_attempts", "tags", "metadata", "start_by")}
    assert told == {
        "queue": "default", "args": {}, "priority": 2, "max_attempts": 20, "tags": [], "metadata": {}, "start_by": None,
    }  # fmt: skip


@pytest.mark.parametrize("fields", AT_ITS_BOUND, ids=lambda fields: str(fields)[:50])
def test_a_value_at_its_bound_is_taken_and_given_back(api: Api, fields: JSON) -> None:
    job = api.job(api.enqueue(**fields))
    given = {name: value for name, value in fields.items() if value is not None and name != "delay_seconds"}
    assert {name: job[name] for name in given} == given


@pytest.mark.parametrize(("fields", "pointer"), BEYOND_ITS_BOUND, ids=lambda value: str(value)[:50])
def test_a_value_beyond_its_bound_is_refused_by_name(api: Api, fields: JSON, pointer: str) -> None:
    refused = problem(api.post("/v1/jobs", {"kind": "work", "queue": api.queue, **fields}), 422, "invalid-field")
    assert [error["pointer"] for error in refused["errors"]] == [pointer]


def test_a_missing_kind_is_refused_by_name(api: Api) -> None:
    refused = problem(api.post("/v1/jobs", {"queue": api.queue}), 422, "invalid-field")
    assert refused["errors"] == [{"pointer": "/kind", "detail": "is required"}]


@pytest.mark.parametrize("bad", [{"priority": 9}, {"run_at": "9999-12-31T23:59:59-14:00"}], ids=str)
def test_a_refused_job_is_not_stored(api: Api, bad: JSON) -> None:
    problem(api.post("/v1/jobs", {"kind": "work", "queue": api.queue, **bad}), 422, "invalid-field")
    assert ok(api.get("/v1/jobs", queue=api.queue))["jobs"] == []


# Batches


def batch(api: Api, jobs: list[Any], **options: Any) -> httpx.Response:
    """A batch of jobs for the test's queue; a job that is not a dict goes as it is."""
    sent = [{"kind": "work", "queue": api.queue, **job} if isinstance(job, dict) else job for job in jobs]
    return api.post("/v1/jobs/batch", {"jobs": sent, **options})


def stored(db: "psycopg.Connection[Any]", api: Api) -> int:
    """How many jobs the test's queue has."""
    row = db.execute("SELECT count(*) FROM towpath.jobs WHERE queue = %s", [api.queue]).fetchone()
    assert row
    return int(row[0])


def test_a_batch_answers_in_the_order_sent(api: Api) -> None:
    answer = ok(batch(api, [{"args": n, "priority": 1 + n % 4} for n in range(20)]))
    assert [item["index"] for item in answer["jobs"]] == list(range(20))
    assert [api.job(item["job"])["args"] for item in answer["jobs"]] == list(range(20))
    assert (answer["enqueued"], answer["refused"]) == (20, 0)


def test_a_thousand_jobs_fit_in_a_batch(api: Api, db: "psycopg.Connection[Any]") -> None:
    answer = ok(batch(api, [{}] * 1000))
    assert len({item["job"]["id"] for item in answer["jobs"]}) == 1000
    assert stored(db, api) == 1000


@pytest.mark.parametrize("mode", ["atomic", "each"])
@pytest.mark.parametrize("count", [0, 1001])
def test_more_than_a_thousand_jobs_or_none_are_refused(
    api: Api, db: "psycopg.Connection[Any]", mode: str, count: int
) -> None:
    refused = problem(batch(api, [{}] * count, mode=mode), 422, "invalid-field")
    assert [error["pointer"] for error in refused["errors"]] == ["/jobs"]
    assert stored(db, api) == 0


def test_one_bad_job_refuses_an_atomic_batch_and_is_named(api: Api, db: "psycopg.Connection[Any]") -> None:
    jobs: list[Any] = [{} for _ in range(1000)]
    jobs[500] = {"priority": 9}
    refused = problem(batch(api, jobs), 422, "invalid-field")
    assert [error["pointer"] for error in refused["errors"]] == ["/jobs/500/priority"]
    assert stored(db, api) == 0


def test_an_atomic_batch_names_every_bad_job(api: Api) -> None:
    refused = problem(batch(api, [{}, {"priority": 9}, {}, {"kind": ""}, 5]), 422, "invalid-field")
    assert [error["pointer"] for error in refused["errors"]] == ["/jobs/1/priority", "/jobs/3/kind", "/jobs/4"]


def test_each_takes_the_good_jobs_and_tells_of_the_bad_one(api: Api, db: "psycopg.Connection[Any]") -> None:
    jobs: list[Any] = [{"args": n} for n in range(1000)]
    jobs[500] = {"priority": 9}
    answer = ok(batch(api, jobs, mode="each"))
    assert [item["index"] for item in answer["jobs"]] == list(range(1000))
    assert [item["index"] for item in answer["jobs"] if item["job"] is None] == [500]
    refused = answer["jobs"][500]["problem"]
    assert (refused["status"], refused["errors"][0]["pointer"]) == (422, "/priority")
    assert api.job(answer["jobs"][501]["job"])["args"] == 501
    assert (answer["enqueued"], answer["refused"], stored(db, api)) == (999, 1, 999)


def test_a_batch_of_bad_jobs_only_is_refused_in_either_mode(api: Api) -> None:
    refused = problem(batch(api, [{"priority": 9}, None], mode="each"), 422, "invalid-field")
    assert [error["pointer"] for error in refused["errors"]] == ["/jobs/0/priority", "/jobs/1"]


def test_an_unknown_mode_is_refused(api: Api) -> None:
    refused = problem(batch(api, [{}], mode="some"), 422, "invalid-field")
    assert [error["pointer"] for error in refused["errors"]] == ["/mode"]


def test_jobs_of_a_batch_may_go_to_many_queues(api: Api) -> None:
    queues = [f"{api.queue}-{n}" for n in range(5)]
    answer = ok(batch(api, [{"queue": queue} for queue in queues]))
    assert [item["job"]["queue"] for item in answer["jobs"]] == queues


# A commit that fails


def doom(db: "psycopg.Connection[Any]", code: str) -> None:
    """From now on a transaction with a job of the kind `doomed` fails at its commit."""
    db.execute(f"""CREATE FUNCTION refuse_at_commit() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN RAISE EXCEPTION 'refused at commit' USING ERRCODE = '{code}'; END $$""")
    db.execute("""CREATE CONSTRAINT TRIGGER refuse_at_commit AFTER INSERT ON towpath.jobs
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.kind = 'doomed') EXECUTE FUNCTION refuse_at_commit()""")


@pytest.mark.parametrize("code", ["integrity_constraint_violation", "raise_exception"])
def test_a_job_whose_commit_fails_is_never_acknowledged_and_its_mates_are(
    new_settings: Callable[..., Settings], queue: str, code: str
) -> None:
    settings = new_settings()
    with psycopg.connect(settings.database_url, autocommit=True) as db:
        doom(db, code)
        with ServiceThread(settings, maintenance=False) as service:
            sent = [{"kind": "doomed" if n % 20 == 7 else "work", "queue": queue, "args": n} for n in range(100)]
            answers = asyncio.run(post_together(f"{service.url}/v1/jobs", sent))
        rows = db.execute("SELECT id::text, args FROM towpath.jobs WHERE queue = %s", [queue]).fetchall()
    acknowledged = {(answer.json()["id"], n) for n, answer in enumerate(answers) if answer.is_success}
    assert acknowledged == set(rows)
    assert {n for _, n in acknowledged} == {n for n in range(100) if n % 20 != 7}
    assert {answer.headers["content-type"] for answer in answers if not answer.is_success} == {
        "application/problem+json"
    }


async def post_together(url: str, bodies: list[JSON]) -> list[httpx.Response]:
    """All at once, so that they share flushes."""
    async with httpx.AsyncClient(timeout=60, verify=False, limits=httpx.Limits(max_connections=len(bodies))) as client:
        return await asyncio.gather(*(client.post(url, json=body) for body in bodies))


def test_a_failed_commit_can_be_repeated_with_its_key(new_settings: Callable[..., Settings], queue: str) -> None:
    settings = new_settings()
    with psycopg.connect(settings.database_url, autocommit=True) as db:
        doom(db, "raise_exception")
        with ServiceThread(settings, maintenance=False) as service, client_of(service.url) as client:
            api = Api(client, queue)
            job = {"kind": "doomed", "queue": queue}
            assert not api.post("/v1/jobs", job, Idempotency_Key="once").is_success
            db.execute("DROP TRIGGER refuse_at_commit ON towpath.jobs")
            assert api.post("/v1/jobs", job, Idempotency_Key="once").status_code == 201
            assert stored(db, api) == 1
