"""SQL producers: the same jobs, refusals, wake-ups and keys as over HTTP, and never more than their transaction.

Each behaviour that the ways to enqueue share is one test that goes through every way.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import sqlalchemy
from psycopg import sql

from app.settings import Settings
from tests.build import JSON, Api, ok
from tests.jobs.inputs import AT_ITS_BOUND, BEYOND_ITS_BOUND, nested

BATCHES = ("POST /v1/jobs/batch", "towpath.enqueue_many")
WAYS = ("POST /v1/jobs", "towpath.enqueue", *BATCHES)
SQL_WAYS = ("towpath.enqueue", "towpath.enqueue_many")
_TYPES = {
    "args": "jsonb", "backoff": "jsonb", "metadata": "jsonb", "run_at": "timestamptz", "start_by": "timestamptz",
    "tags": "text[]", "priority": "integer", "max_attempts": "integer", "delay_seconds": "float8",
    "timeout_seconds": "float8", "kind": "text", "queue": "text",
}  # fmt: skip


class Refused(Exception):
    """What a way to enqueue said against it: pointers, those of a single job."""

    def __init__(self, pointers: list[str]) -> None:
        super().__init__(pointers)
        self.pointers = [pointer.removeprefix("/jobs/0") for pointer in pointers]


class Producer:
    """One job through any way to enqueue; returns its id, raises Refused."""

    def __init__(self, api: Api, connection: "psycopg.Connection[Any]") -> None:
        self._api = api
        self._connection = connection

    def enqueue(self, way: str, job: JSON, key: str | None = None) -> str:
        job = {"kind": "work", "queue": self._api.queue, **job}
        match way:
            case "POST /v1/jobs":
                return self._posted("/v1/jobs", job, key)["id"]  # type: ignore[no-any-return]
            case "POST /v1/jobs/batch":
                return self._posted("/v1/jobs/batch", {"jobs": [job]}, key)["jobs"][0]["job"]["id"]  # type: ignore[no-any-return]
            case "towpath.enqueue":
                return self._selected(*_named(job, key))
            case _:
                query = sql.SQL("SELECT id::text FROM towpath.enqueue_many(%(jobs)s::jsonb, %(key)s)")
                return self._selected(query, {"jobs": json.dumps([job]), "key": key})

    def _posted(self, path: str, body: JSON, key: str | None) -> JSON:
        response = self._api.post(path, body, **({"Idempotency_Key": key} if key else {}))
        if response.status_code == 422:
            told = response.json()
            raise Refused([e["pointer"] for e in told["errors"]] if "errors" in told else told["differences"])
        return ok(response)

    def _selected(self, query: sql.Composable, parameters: JSON) -> str:
        try:
            with self._connection.transaction():
                row = self._connection.execute(query, parameters).fetchone()
        except (psycopg.errors.InvalidParameterValue, psycopg.errors.UniqueViolation) as error:
            raise Refused((error.diag.message_detail or "").split(", ")) from None
        assert row
        return str(row[0])


def _named(job: JSON, key: str | None) -> tuple[sql.Composable, JSON]:
    """A call of `towpath.enqueue` with the job's fields as named arguments."""
    encoded = {
        name: json.dumps(value) if _TYPES[name] == "jsonb" and value is not None else value
        for name, value in job.items()
    }
    if "args" in job and job["args"] is None:
        encoded["args"] = "null"
    arguments = sql.SQL(", ").join(
        sql.SQL("{} => {}::" + _TYPES[name]).format(sql.Identifier(name), sql.Placeholder(name)) for name in job
    )
    query = sql.SQL("SELECT towpath.enqueue({}, idempotency_key => %(key)s)::text").format(arguments)
    return query, {**encoded, "key": key}


@pytest.fixture
def producer(api: Api, db: "psycopg.Connection[Any]") -> Producer:
    return Producer(api, db)


@pytest.fixture
def key() -> str:
    """A key that no other test uses."""
    return str(uuid4())


def own(job: JSON) -> JSON:
    """A job without what no two jobs share."""
    differs = {"id", "created_at"} | ({"run_at"} if job["run_at"] < "2098" else set())
    return {name: value for name, value in job.items() if name not in differs}


SPELLED: list[JSON] = [
    {"run_at": "2098-07-01T08:30:00.25-03:30", "start_by": "2099-01-01t00:00:00z"},
    {"run_at": "2098-07-01 12:00:00.123456789+02:00"},
    {"run_at": "1999-01-01T00:00:00Z"},
    {"backoff": {}},
    {"backoff": {"kind": "linear", "cap_seconds": 5}, "timeout_seconds": 1.5, "tags": ["a", "a"]},
]


@pytest.mark.parametrize("way", WAYS[1:])
def test_every_way_makes_the_same_job(api: Api, producer: Producer, way: str) -> None:
    for fields in AT_ITS_BOUND + SPELLED:
        made, by_http = (own(api.job(producer.enqueue(each, fields))) for each in (way, "POST /v1/jobs"))
        assert made == by_http, fields


@pytest.mark.parametrize("way", BATCHES)
def test_every_way_refuses_the_same_job_with_the_same_pointer(producer: Producer, way: str) -> None:
    for fields, pointer in BEYOND_ITS_BOUND:
        with pytest.raises(Refused) as refused:
            producer.enqueue(way, fields)
        assert refused.value.pointers == [pointer], fields


BAD_ARGUMENTS: list[tuple[JSON, str]] = [
    ({"kind": "two words"}, "/kind"),
    ({"kind": None}, "/kind"),
    ({"queue": ""}, "/queue"),
    ({"priority": 0}, "/priority"),
    ({"max_attempts": 1001}, "/max_attempts"),
    ({"delay_seconds": 1, "run_at": "2099-01-01Z"}, "/delay_seconds"),
    ({"delay_seconds": float("nan")}, "/delay_seconds"),
    ({"timeout_seconds": float("inf")}, "/timeout_seconds"),
    ({"run_at": "infinity"}, "/run_at"),
    ({"start_by": "10000-01-01Z"}, "/start_by"),
    ({"tags": ["good", ""]}, "/tags/1"),
    ({"tags": [None]}, "/tags/0"),
    ({"backoff": {"factor": 0}}, "/backoff/factor"),
    ({"metadata": []}, "/metadata"),
    ({"args": nested(65)}, "/args"),
]


def test_a_bad_argument_is_refused_with_its_pointer(producer: Producer) -> None:
    for fields, pointer in BAD_ARGUMENTS:
        with pytest.raises(Refused) as refused:
            producer.enqueue("towpath.enqueue", fields)
        assert refused.value.pointers == [pointer], fields


def test_an_argument_that_is_null_is_not_given(api: Api, producer: Producer) -> None:
    null: JSON = {
        "priority": None,
        "run_at": None,
        "max_attempts": None,
        "tags": None,
        "backoff": None,
        "metadata": None,
    }
    assert own(api.job(producer.enqueue("towpath.enqueue", null))) == own(
        api.job(producer.enqueue("POST /v1/jobs", {}))
    )


@pytest.mark.parametrize(
    "jobs", ["[]", "{}", "null", '"job"', json.dumps([{"kind": "work"}] * 1001)], ids=lambda j: j[:9]
)
def test_one_to_a_thousand_jobs_are_an_array(db: "psycopg.Connection[Any]", jobs: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue) as refused:
        db.execute("SELECT towpath.enqueue_many(%s::jsonb)", [jobs])
    assert refused.value.diag.message_detail == "/jobs"


def test_a_batch_names_the_place_of_the_bad_job_and_stores_nothing(api: Api, db: "psycopg.Connection[Any]") -> None:
    jobs: list[JSON] = [{"kind": "work", "queue": api.queue} for _ in range(1000)]
    jobs[500]["priority"] = 9
    with pytest.raises(psycopg.errors.InvalidParameterValue) as refused:
        db.execute("SELECT towpath.enqueue_many(%s::jsonb)", [json.dumps(jobs)])
    assert refused.value.diag.message_detail == "/jobs/500/priority"
    assert ok(api.get("/v1/jobs", queue=api.queue))["jobs"] == []


def test_a_batch_answers_in_the_order_sent(api: Api, db: "psycopg.Connection[Any]") -> None:
    jobs = [{"kind": "work", "queue": api.queue, "args": n, "priority": 1 + n % 4} for n in range(1000)]
    rows = db.execute("SELECT * FROM towpath.enqueue_many(%s::jsonb)", [json.dumps(jobs)]).fetchall()
    assert [row[0] for row in rows] == list(range(1000))
    assert [api.job(str(rows[n][1]))["args"] for n in (0, 500, 999)] == [0, 500, 999]


@pytest.mark.parametrize("way", BATCHES)
def test_jobs_of_one_batch_are_claimed_in_the_order_sent(api: Api, db: "psycopg.Connection[Any]", way: str) -> None:
    jobs = [{"kind": "work", "queue": api.queue, "args": n} for n in range(200)]
    if way == "POST /v1/jobs/batch":
        ok(api.post(way.removeprefix("POST "), {"jobs": jobs}))
    else:
        db.execute("SELECT towpath.enqueue_many(%s::jsonb)", [json.dumps(jobs)])
    assert [job["args"] for job in api.claims(limit=200)["jobs"]] == list(range(200))


def test_jobs_of_one_transaction_are_claimed_in_the_order_enqueued(
    api: Api, connect: Callable[[], "psycopg.Connection[Any]"]
) -> None:
    producing = connect()
    for n in range(50):
        producing.execute("SELECT towpath.enqueue('work', %s::text::jsonb, %s)", [str(n), api.queue])
    producing.commit()
    assert [job["args"] for job in api.claims(limit=50)["jobs"]] == list(range(50))


@pytest.mark.parametrize("way", WAYS)
def test_every_way_takes_the_attempts_of_the_queue(api: Api, producer: Producer, way: str) -> None:
    ok(api.client.put(f"/v1/queues/{api.queue}", json={"max_attempts": 3}))
    assert api.job(producer.enqueue(way, {}))["max_attempts"] == 3


@pytest.mark.parametrize("way", WAYS)
def test_every_way_wakes_a_waiting_poll(api: Api, producer: Producer, way: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(api.claim)
        job = producer.enqueue(way, {})
        assert waiting.result(10)["id"] == job


@pytest.mark.parametrize("way", WAYS)
def test_every_way_has_a_later_job_promoted_when_it_is_due(api: Api, producer: Producer, way: str) -> None:
    job = producer.enqueue(way, {"delay_seconds": 0.1})
    assert api.claim()["id"] == job


# Idempotency keys, whatever way the first request and its repeat take


def pairs() -> list[Any]:
    """The ways of a first request and its repeat that may share a key: both single, or both batches."""
    return [(first, again) for first in WAYS for again in WAYS if (first in BATCHES) == (again in BATCHES)]


JOB: JSON = {
    "args": {"x": [1, 2.5, None]}, "priority": 3, "run_at": "2099-01-01T00:00:00Z", "max_attempts": 4,
    "timeout_seconds": 60, "backoff": {"kind": "fixed"}, "start_by": "2099-06-01T00:00:00Z", "tags": ["a"],
    "metadata": {"m": 1},
}  # fmt: skip


@pytest.mark.parametrize(("first", "again"), pairs())
@pytest.mark.parametrize("job", [{}, JOB], ids=["defaults", "every field"])
def test_a_repeat_through_any_way_has_the_first_job(
    api: Api, producer: Producer, key: str, first: str, again: str, job: JSON
) -> None:
    assert producer.enqueue(again, job, key) == producer.enqueue(first, job, key)
    assert len(ok(api.get("/v1/jobs", queue=api.queue))["jobs"]) == 1


@pytest.mark.parametrize(("first", "again"), pairs())
def test_another_job_through_any_way_is_told_what_differs(producer: Producer, key: str, first: str, again: str) -> None:
    producer.enqueue(first, JOB, key)
    with pytest.raises(Refused) as refused:
        producer.enqueue(again, {**JOB, "priority": 1, "args": None}, key)
    assert refused.value.pointers == ([""] if again in BATCHES else ["/args", "/priority"])


@pytest.mark.parametrize(("first", "again"), [("towpath.enqueue", "POST /v1/jobs/batch"), BATCHES[::-1][:1] + WAYS[:1]])
def test_a_key_of_one_job_is_no_key_of_a_batch(producer: Producer, key: str, first: str, again: str) -> None:
    producer.enqueue(first, {}, key)
    with pytest.raises(Refused):
        producer.enqueue(again, {}, key)


@pytest.mark.parametrize("way", SQL_WAYS)
@pytest.mark.parametrize("bad", ["", "k" * 256, "clé", "a\tb"], ids=["empty", "long", "not ascii", "tab"])
def test_a_key_that_http_would_refuse_is_refused(producer: Producer, way: str, bad: str) -> None:
    with pytest.raises(Refused) as refused:
        producer.enqueue(way, {}, bad)
    assert refused.value.pointers == ["/idempotency_key"]


def test_a_repeat_says_that_the_job_existed(db: "psycopg.Connection[Any]", api: Api, key: str) -> None:
    query = "SELECT id, state, run_at, existing FROM towpath.enqueue_many(%s::jsonb, %s)"
    jobs = json.dumps([{"kind": "work", "queue": api.queue}] * 3)
    first, again = (db.execute(query, [jobs, key]).fetchall() for _ in range(2))
    assert [row[:3] for row in again] == [row[:3] for row in first]
    assert ({row[3] for row in first}, {row[3] for row in again}) == ({False}, {True})


def test_the_sessions_own_time_zone_and_date_style_change_nothing(
    api: Api, connect: Callable[[], "psycopg.Connection[Any]"], key: str
) -> None:
    producing = connect()
    producing.execute("SET TimeZone = 'America/St_Johns'")
    producing.execute("SET DateStyle = 'German, DMY'")
    producing.execute(
        "SELECT towpath.enqueue('work', queue => %s, run_at => '2099-07-01 12:00:00Z', idempotency_key => %s)",
        [api.queue, key],
    )
    producing.commit()
    job = {"kind": "work", "queue": api.queue, "run_at": "2099-07-01T12:00:00Z"}
    replayed = ok(api.post("/v1/jobs", job, Idempotency_Key=key))
    assert (replayed["run_at"], replayed["created_at"][-1]) == ("2099-07-01T12:00:00Z", "Z")
    assert api.job(replayed)["run_at"] == "2099-07-01T12:00:00Z"


# The producer's own transaction


@pytest.mark.parametrize("way", SQL_WAYS)
def test_a_rollback_leaves_no_job_and_wakes_nobody(
    api: Api, connect: Callable[[], "psycopg.Connection[Any]"], way: str
) -> None:
    producing = connect()
    producing.execute("SELECT")  # the transaction is open: what follows is a part of it
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(api.claims, wait_seconds=0.5)
        job = Producer(api, producing).enqueue(way, {})
        producing.rollback()
        assert waiting.result(10)["jobs"] == []
    assert api.get(f"/v1/jobs/{job}").status_code == 404


@pytest.mark.parametrize("way", SQL_WAYS)
def test_a_job_is_nobodys_until_the_commit_which_wakes_a_poll(
    api: Api, connect: Callable[[], "psycopg.Connection[Any]"], way: str
) -> None:
    producing = connect()
    producing.execute("SELECT")  # the transaction is open: what follows is a part of it
    job = Producer(api, producing).enqueue(way, {})
    assert api.claims()["jobs"] == []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(api.claim)
        producing.commit()
        assert waiting.result(10)["id"] == job


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_a_rollback_frees_the_key_and_a_commit_keeps_it(
    api: Api, connect: Callable[[], "psycopg.Connection[Any]"], key: str, ends: str
) -> None:
    producing = connect()
    producing.execute("SELECT towpath.enqueue('work', queue => %s, idempotency_key => %s)", [api.queue, key])
    getattr(producing, ends)()
    answer = api.post("/v1/jobs", {"kind": "work", "queue": api.queue}, Idempotency_Key=key)
    assert answer.status_code == (200 if ends == "commit" else 201)


def test_a_refused_job_fails_the_statement_and_what_came_before_can_be_kept(
    api: Api, connect: Callable[[], "psycopg.Connection[Any]"]
) -> None:
    producing = connect()
    (kept,) = producing.execute("SELECT towpath.enqueue('work', queue => %s)::text", [api.queue]).fetchone() or ()
    with pytest.raises(psycopg.errors.InvalidParameterValue), producing.transaction():
        producing.execute("SELECT towpath.enqueue('work', priority => 9)")
    producing.commit()
    assert api.job(kept)["state"] == "available"


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_psycopg_stores_the_job_with_the_producers_own_rows_or_neither(
    api: Api, db: "psycopg.Connection[Any]", connect: Callable[[], "psycopg.Connection[Any]"], ends: str
) -> None:
    orders = sql.Identifier(f"orders_{api.queue}")
    db.execute(sql.SQL("CREATE TABLE {} (id integer)").format(orders))
    producing = connect()
    producing.execute(sql.SQL("INSERT INTO {} VALUES (7)").format(orders))
    producing.execute("SELECT towpath.enqueue('ship', '{\"order\": 7}', queue => %s)", [api.queue])
    getattr(producing, ends)()
    rows = db.execute(sql.SQL("SELECT id FROM {}").format(orders)).fetchall()
    expected = 1 if ends == "commit" else 0
    assert (len(rows), [job["args"] for job in api.claims()["jobs"]]) == (expected, [{"order": 7}] * expected)


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_sqlalchemy_stores_the_job_with_the_producers_own_rows_or_neither(
    api: Api, db: "psycopg.Connection[Any]", settings: Settings, ends: str
) -> None:
    orders = sqlalchemy.table(f"orders_{api.queue}", sqlalchemy.column("id"))
    db.execute(sql.SQL("CREATE TABLE {} (id integer)").format(sql.Identifier(orders.name)))
    engine = sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(settings.database_url))
    with engine.connect() as producing:
        producing.execute(sqlalchemy.insert(orders).values(id=7))
        jobs = [{"kind": "ship", "queue": api.queue, "args": {"order": 7}}]
        many = sqlalchemy.func.towpath.enqueue_many(sqlalchemy.cast(jobs, sqlalchemy.dialects.postgresql.JSONB))
        made = producing.execute(sqlalchemy.select(many.table_valued("index", "id", "state"))).all()
        assert [(row.index, row.state) for row in made] == [(0, "available")]
        getattr(producing, ends)()
        found = producing.execute(sqlalchemy.select(orders)).all()
    engine.dispose()
    expected = 1 if ends == "commit" else 0
    assert (len(found), [job["args"] for job in api.claims()["jobs"]]) == (expected, [{"order": 7}] * expected)
