"""What happens without being asked: in time, never early, in batches, once, and in spite of whatever is in the way."""

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import psycopg
import pytest

from app.maintenance.loop import Maintenance
from app.maintenance.sweep import Sweep
from app.settings import Settings
from tests.build import JSON, Api, client_of, move, ok, problem
from tests.servers import ServiceThread
from tests.waiting import eventually

LATER = {"kind": "fixed", "base_seconds": 3600}
SPOIL = "CREATE FUNCTION public.spoil() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'spoiled'; END $$"


def count(db: "psycopg.Connection[Any]", queue: str, state: str) -> int:
    """Jobs of the queue in a state."""
    row = db.execute("SELECT count(*) FROM towpath.jobs WHERE queue = %s AND state = %s", [queue, state]).fetchone()
    assert row is not None
    return int(row[0])


def state(db: "psycopg.Connection[Any]", job: JSON | str) -> str | None:
    """A job's state; None when it is gone."""
    job_id = job if isinstance(job, str) else job["id"]
    row = db.execute("SELECT state FROM towpath.jobs WHERE id = %s", [job_id]).fetchone()
    return None if row is None else str(row[0])


@pytest.fixture(scope="module")
def settings(new_settings: Callable[..., Settings]) -> Settings:
    """Every sweep is quick here, retention too."""
    return new_settings(sweep_interval_seconds=0.1)


@pytest.fixture(scope="module")
def service(settings: Settings) -> Iterator[ServiceThread]:
    with ServiceThread(settings) as running:
        yield running


@pytest.fixture(scope="module")
def shipped(new_settings: Callable[..., Settings]) -> Settings:
    """The intervals that a service has when nobody chooses others."""
    defaults = Settings()
    names = ("rescue_interval_seconds", "sweep_interval_seconds", "safety_poll_seconds", "sweep_batch")
    return new_settings(**{name: getattr(defaults, name) for name in names})


@pytest.fixture(scope="module")
def shipped_service(shipped: Settings) -> Iterator[ServiceThread]:
    with ServiceThread(shipped) as running:
        yield running


@pytest.fixture
def shipped_api(shipped_service: ServiceThread, queue: str) -> Iterator[Api]:
    with client_of(shipped_service.url) as client:
        yield Api(client, queue)


@pytest.fixture
def shipped_db(shipped: Settings) -> Iterator["psycopg.Connection[Any]"]:
    with psycopg.connect(shipped.database_url, autocommit=True) as connection:
        yield connection


def told(what: str, seconds: list[float]) -> None:
    """Put the figures into the test's output."""
    p50, p99 = statistics.median(seconds), sorted(seconds)[int(len(seconds) * 0.99)]
    print(f"{what}: {len(seconds)} jobs, p50 {p50 * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms")


# In time


def test_a_job_is_claimed_soon_after_its_due_time_and_never_before(
    shipped_api: Api, shipped_db: "psycopg.Connection[Any]"
) -> None:
    jobs = [{"kind": "work", "queue": shipped_api.queue, "delay_seconds": 0.2 + number * 0.02} for number in range(50)]
    ok(shipped_api.post("/v1/jobs/batch", {"jobs": jobs}))
    claimed = 0
    while claimed < len(jobs):
        claimed += len(shipped_api.claims(limit=10, wait_seconds=10)["jobs"])
    rows = shipped_db.execute(
        "SELECT extract(epoch FROM claimed_at - run_at)::float8 FROM towpath.jobs WHERE queue = %s",
        [shipped_api.queue],
    ).fetchall()
    late = [row[0] for row in rows]
    told("claimed after due", late)
    assert min(late) >= 0
    assert statistics.median(late) < 0.1
    assert max(late) < 1


def test_a_job_that_is_not_due_is_not_claimed_however_long_leases_have_run(
    api: Api, db: "psycopg.Connection[Any]"
) -> None:
    new, snoozed, retried = api.enqueue(delay_seconds=3600), api.a_running_job(), api.a_running_job()
    for verb, job in (("snooze", snoozed), ("retry", retried)):
        ok(api.settle(verb, job, delay_seconds=3600))
    lost = api.a_running_job()
    move(db, lost, "lease_expires_at", -3600)
    eventually(lambda: state(db, lost) == "retryable")
    assert [state(db, job) for job in (new, snoozed, retried)] == ["scheduled", "scheduled", "retryable"]
    assert api.claims()["jobs"] == []


def test_something_scheduled_wakes_a_sweep_that_sleeps(new_settings: Callable[..., Settings], queue: str) -> None:
    lazy = new_settings(sweep_interval_seconds=600)
    with ServiceThread(lazy) as service, client_of(service.url) as client:
        api = Api(client, queue)
        eventually(lambda: ok(api.get("/readyz"))["status"] == "ready")
        api.enqueue(delay_seconds=0.2)
        assert api.claim()["attempt"] == 1


@pytest.mark.parametrize("limit", ["lease", "deadline", "wait"])
def test_what_is_over_is_noticed_within_two_seconds(
    shipped_api: Api, shipped_db: "psycopg.Connection[Any]", limit: str
) -> None:
    api, db = shipped_api, shipped_db
    api.enqueue_many(20, backoff=LATER)
    jobs = api.claims(limit=20)["jobs"]
    if limit == "wait":
        for job in jobs:
            ok(api.settle("park", job, wait_id=api.open_wait(job)["wait_id"]))
    table, column, key = {
        "lease": ("jobs", "lease_expires_at", "id"),
        "deadline": ("jobs", "deadline_at", "id"),
        "wait": ("waits", "deadline_at", "job_id"),
    }[limit]
    # Not all at one moment: the time until the next look counts.
    over = db.execute(
        f"UPDATE towpath.{table} SET {column} = now() + random() * interval '0.7 s'"
        f" WHERE {key} = ANY(%s::uuid[]) RETURNING {key}, {column}",
        [[job["id"] for job in jobs]],
    ).fetchall()
    eventually(lambda: count(db, api.queue, "retryable") == 20)
    steps = ["lose_lease", "pass_deadline", "callback_time_out"]
    noticed = dict(
        db.execute(
            "SELECT job_id, at FROM towpath.job_events WHERE job_id = ANY(%s) AND step = ANY(%s)",
            [[job_id for job_id, _ in over], steps],
        ).fetchall()
    )
    late = [(noticed[job_id] - at).total_seconds() for job_id, at in over]
    told(f"{limit} noticed after its end", late)
    assert min(late) >= 0
    assert max(late) < 2


# What is told


@pytest.mark.parametrize(
    ("column", "kind"), [("lease_expires_at", "lease_expired"), ("deadline_at", "deadline_exceeded")]
)
def test_a_lost_job_goes_back_with_its_cause(api: Api, db: "psycopg.Connection[Any]", column: str, kind: str) -> None:
    claimed = api.a_running_job(backoff=LATER)
    move(db, claimed, column, -7200)
    eventually(lambda: state(db, claimed) == "retryable")
    job = api.job(claimed)
    (error,) = job["errors"]
    assert (error["kind"], error["attempt"], error["worker"]) == (kind, 1, api.worker)
    assert error["message"]
    assert (job["attempt"], job["lease_expires_at"], job["deadline_at"]) == (1, None, None)


@pytest.mark.parametrize(("lease", "deadline", "kind"), [(-20, -10, "lease_expired"), (-10, -20, "deadline_exceeded")])
def test_of_two_causes_the_one_that_came_first_is_told(
    api: Api, db: "psycopg.Connection[Any]", lease: int, deadline: int, kind: str
) -> None:
    claimed = api.a_running_job(backoff=LATER)
    db.execute(
        "UPDATE towpath.jobs SET lease_expires_at = now() + %s * interval '1 s',"
        " deadline_at = now() + %s * interval '1 s' WHERE id = %s",
        [lease, deadline, claimed["id"]],
    )
    eventually(lambda: state(db, claimed) == "retryable")
    assert [error["kind"] for error in api.job(claimed)["errors"]] == [kind]


@pytest.mark.parametrize(
    ("column", "reason"), [("lease_expires_at", "lease_expired"), ("deadline_at", "deadline_exceeded")]
)
def test_a_lost_job_without_attempts_left_is_dead_with_its_cause(
    api: Api, db: "psycopg.Connection[Any]", column: str, reason: str
) -> None:
    claimed = api.a_running_job(max_attempts=1)
    move(db, claimed, column, -7200)
    eventually(lambda: state(db, claimed) == "failed")
    job = api.job(claimed)
    assert (job["dead_letter_reason"], job["errors"][0]["kind"], job["attempt"]) == (reason, reason, 1)


def test_a_lost_job_waits_for_its_backoff(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed = api.a_running_job(backoff=LATER)
    move(db, claimed, "lease_expires_at", -7200)
    eventually(lambda: state(db, claimed) == "retryable")
    due_in = "SELECT extract(epoch FROM run_at - now()) BETWEEN 3500 AND 4500 FROM towpath.jobs WHERE id = %s"
    assert db.execute(due_in, [claimed["id"]]).fetchone() == (True,)


def test_a_restarted_workers_heartbeats_keep_only_its_own_jobs(api: Api, db: "psycopg.Connection[Any]") -> None:
    before, after = (api.a_running_job(backoff=LATER) for _ in range(2))  # one name, two lives
    move(db, before, "lease_expires_at", -7200)
    eventually(lambda: ok(api.heartbeat(after)) and state(db, before) == "retryable")
    assert state(db, after) == "running"


def test_heartbeats_do_not_put_off_the_deadline(api: Api) -> None:
    claimed = api.a_running_job(timeout_seconds=1, backoff=LATER)
    eventually(lambda: api.heartbeat(claimed).status_code == 409, 3)
    assert problem(api.heartbeat(claimed), 409, "lease-lost")["status_of_lease"] == "deadline"
    assert [error["kind"] for error in api.job(claimed)["errors"]] == ["deadline_exceeded"]


# Not started in time


@pytest.mark.parametrize("before", ["scheduled", "available", "retryable"])
def test_a_job_that_nobody_started_in_time_is_cancelled(api: Api, db: "psycopg.Connection[Any]", before: str) -> None:
    job = api.a_job_in(before)
    db.execute("UPDATE towpath.jobs SET start_by = now() WHERE id = %s", [job["id"]])
    eventually(lambda: state(db, job) == "cancelled")
    assert api.job(job)["cancel_reason"] == "expired"


@pytest.mark.parametrize("before", ["running", "waiting_external", "completed", "failed"])
def test_a_job_that_is_not_waiting_to_start_is_not_cancelled(
    api: Api, db: "psycopg.Connection[Any]", before: str
) -> None:
    job, pending = api.a_job_in(before), api.enqueue()
    for each in (job, pending):
        db.execute("UPDATE towpath.jobs SET start_by = now() WHERE id = %s", [each["id"]])
    eventually(lambda: state(db, pending) == "cancelled")
    assert state(db, job) == before


# Retention

RETENTION = {
    "completed_retention_seconds": 1000,
    "failed_retention_seconds": 2000,
    "cancelled_retention_seconds": 3000,
    "dead_letter_retention_seconds": 4000,
}


@pytest.mark.parametrize("kept", ["completed", "failed", "cancelled", "dead_letter"])
def test_each_final_state_goes_after_its_own_time_and_nothing_younger_does(
    api: Api, db: "psycopg.Connection[Any]", kept: str
) -> None:
    retention = RETENTION[f"{kept}_retention_seconds"]
    ok(api.client.put(f"/v1/queues/{api.queue}", json={**RETENTION, "keep_dead_letters": kept == "dead_letter"}))
    final = "failed" if kept == "dead_letter" else kept
    old, young = api.a_job_in(final), api.a_job_in(final)
    assert (api.job(old)["dead_letter_reason"] is not None) == (kept == "dead_letter")
    move(db, old, "finished_at", -retention - 60)
    move(db, young, "finished_at", -retention + 60)
    eventually(lambda: state(db, old) is None)
    assert state(db, young) == final


def test_a_live_job_never_goes_however_old_it_is(api: Api, db: "psycopg.Connection[Any]") -> None:
    final = [api.a_job_in(each) for each in ("completed", "failed", "cancelled")]
    live = {each: api.a_job_in(each) for each in ("running", "waiting_external", "retryable", "scheduled", "available")}
    for job in live.values():
        move(db, job, "created_at", -315_360_000)
    at_once = {**dict.fromkeys(RETENTION, 0), "keep_dead_letters": False}
    ok(api.client.put(f"/v1/queues/{api.queue}", json=at_once))
    eventually(lambda: [state(db, job) for job in final] == [None] * 3)
    assert {each: state(db, job) for each, job in live.items()} == {each: each for each in live}


def test_without_a_retention_time_a_job_stays(api: Api, db: "psycopg.Connection[Any]") -> None:
    ok(api.client.put(f"/v1/queues/{api.queue}", json={"failed_retention_seconds": 0}))
    dead, other = api.a_job_in("failed"), api.a_job_in("completed")
    move(db, dead, "finished_at", -315_360_000)
    ok(api.client.put(f"/v1/queues/{api.queue}", json={"completed_retention_seconds": 0}))
    eventually(lambda: state(db, other) is None)
    assert state(db, dead) == "failed"


def test_a_jobs_waits_and_history_go_with_it(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed, wait = api.a_parked_job()
    ok(api.client.post(wait["urls"]["complete"]))
    tables = ("waits", "job_events")

    def left() -> list[Any]:
        of_job = (f"SELECT count(*) FROM towpath.{table} WHERE job_id = %s" for table in tables)
        return [db.execute(query, [claimed["id"]]).fetchone() for query in of_job]

    assert left() == [(1,), (2,)]
    ok(api.client.put(f"/v1/queues/{api.queue}", json={"completed_retention_seconds": 0}))
    eventually(lambda: state(db, claimed) is None)
    assert left() == [(0,), (0,)]
    problem(api.client.get(wait["urls"]["status"]), 404, "unknown-callback")


def test_an_idempotency_key_is_forgotten_after_its_time(api: Api, db: "psycopg.Connection[Any]") -> None:
    old, young = (f"{api.queue}-{age}" for age in ("old", "young"))

    def enqueue(key: str) -> str:
        body = {"kind": "work", "queue": api.queue}
        return str(ok(api.client.post("/v1/jobs", json=body, headers={"Idempotency-Key": key}))["id"])

    first = {key: enqueue(key) for key in (old, young)}
    db.execute("UPDATE towpath.idempotency_keys SET expires_at = now() WHERE key = %s", [old])
    gone = "SELECT count(*) FROM towpath.idempotency_keys WHERE key = %s"
    eventually(lambda: db.execute(gone, [old]).fetchone() == (0,))
    assert {key: enqueue(key) == first[key] for key in (old, young)} == {old: False, young: True}


# Batches


@pytest.fixture
def no_service(new_settings: Callable[..., Settings], queue: str) -> Iterator[Callable[..., tuple[Settings, Any, Api]]]:
    """A database of one's own that no service sweeps yet; the API of one that sweeps nothing."""
    with ExitStack() as stack:

        def make(**changes: Any) -> tuple[Settings, Any, Api]:
            own = new_settings(sweep_interval_seconds=600, **changes)
            service = stack.enter_context(ServiceThread(own, maintenance=False))
            api = Api(stack.enter_context(client_of(service.url)), queue)
            return own, stack.enter_context(psycopg.connect(own.database_url, autocommit=True)), api

        yield make


def test_a_sweep_goes_on_batch_after_batch(no_service: Any) -> None:
    own, db, api = no_service(sweep_batch=10)
    ok(api.client.put(f"/v1/queues/{api.queue}", json={"completed_retention_seconds": 0, "backoff": LATER}))
    api.enqueue_many(285)
    jobs = api.claims(limit=190)["jobs"]
    done = [{"outcome": "complete", "id": job["id"], "lease": job["lease"]} for job in jobs[:95]]
    ok(api.post("/v1/settlements", {"settlements": done}))
    db.execute("UPDATE towpath.jobs SET state = 'scheduled', run_at = now() WHERE state = 'available'")
    db.execute("UPDATE towpath.jobs SET lease_expires_at = now() WHERE state = 'running'")
    with ServiceThread(own):
        # The next pass would come after ten minutes.
        eventually(lambda: count(db, api.queue, "available") == count(db, api.queue, "retryable") == 95)
        eventually(lambda: count(db, api.queue, "completed") == 0)


def test_what_can_wait_goes_in_short_batches_and_leaves_the_rest_of_the_time_to_others(no_service: Any) -> None:
    own, _, _ = no_service(sweep_batch=16)
    asked: list[int] = []
    begun: list[float] = []
    enough = asyncio.Event()

    async def full_batch(connection: Any, limit: int, _: list[Any]) -> int:
        await connection.execute("SELECT pg_sleep(0.02)")
        asked.append(limit)
        begun.append(time.monotonic())
        if len(begun) == 4:
            enough.set()
        return limit

    async def sweep_for_a_while() -> None:
        async with Maintenance(own, [Sweep("test", full_batch, "SELECT", 600, share=0.25, most=5)]).running():
            await enough.wait()

    asyncio.run(sweep_for_a_while())
    assert set(asked) == {5}
    assert min(later - sooner for sooner, later in pairwise(begun)) >= 0.08


def test_one_bad_row_neither_stops_a_sweep_nor_slows_it(no_service: Any) -> None:
    own, db, api = no_service()
    ids = [each for _ in range(4) for each in api.enqueue_many(1000, delay_seconds=3600)]
    db.execute(SPOIL)
    db.execute(
        f"CREATE TRIGGER spoil BEFORE UPDATE OF state ON towpath.jobs FOR EACH ROW WHEN (OLD.id = '{ids[7]}')"
        " EXECUTE FUNCTION public.spoil()"
    )
    db.execute("UPDATE towpath.jobs SET run_at = now() - (id = %s)::integer * interval '1 h'", [ids[7]])
    with ServiceThread(own):
        eventually(lambda: count(db, api.queue, "available") == 3999, 3)
    assert state(db, ids[7]) == "scheduled"


def test_bad_rows_do_not_keep_lost_jobs_from_their_rescue(no_service: Any) -> None:
    own, db, api = no_service(sweep_batch=16)
    api.enqueue_many(50, backoff=LATER)
    jobs = api.claims(limit=50)["jobs"]
    bad = [job["id"] for job in jobs[::10]]
    db.execute(SPOIL)
    db.execute(
        f"CREATE TRIGGER spoil BEFORE UPDATE OF state ON towpath.jobs FOR EACH ROW"
        f" WHEN (OLD.id = ANY('{{{','.join(bad)}}}'::uuid[])) EXECUTE FUNCTION public.spoil()"
    )
    db.execute("UPDATE towpath.jobs SET lease_expires_at = now()")
    with ServiceThread(own):
        eventually(lambda: count(db, api.queue, "retryable") == 45)
    assert [state(db, job) for job in bad] == ["running"] * 5


# What is in the way


def test_a_row_that_somebody_holds_holds_up_no_other(
    api: Api, db: "psycopg.Connection[Any]", connect: Callable[[], "psycopg.Connection[Any]"]
) -> None:
    held, free = api.a_running_job(backoff=LATER), api.a_running_job(backoff=LATER)
    blocker = connect()
    blocker.execute("SELECT FROM towpath.jobs WHERE id = %s FOR UPDATE", [held["id"]])
    blocker.execute("UPDATE towpath.jobs SET lease_expires_at = now() WHERE id = %s", [held["id"]])
    move(db, free, "lease_expires_at", -3600)
    eventually(lambda: state(db, free) == "retryable", 2)
    blocker.commit()
    eventually(lambda: state(db, held) == "retryable", 2)


@pytest.mark.parametrize(
    "block",
    [
        "SELECT pg_advisory_xact_lock(hashtext('towpath sweep'), hashtext('callback_time_out'))",
        "LOCK TABLE towpath.waits IN ACCESS EXCLUSIVE MODE",
    ],
    ids=["by another process", "by a table lock"],
)
def test_a_blocked_sweep_holds_up_no_other_and_goes_on_afterwards(
    api: Api, db: "psycopg.Connection[Any]", connect: Callable[[], "psycopg.Connection[Any]"], block: str
) -> None:
    parked, wait = api.a_parked_job(backoff=LATER)
    lost, late = api.a_running_job(backoff=LATER), api.a_running_job(backoff=LATER)
    due, unstarted = api.enqueue(delay_seconds=3600), api.enqueue(delay_seconds=3600)
    db.execute("UPDATE towpath.waits SET deadline_at = now() + interval '0.5 s' WHERE id = %s", [wait["wait_id"]])
    blocker = connect()
    blocker.execute(block)
    move(db, lost, "lease_expires_at", -3600)
    move(db, late, "deadline_at", -7200)
    move(db, due, "run_at", -3600)
    db.execute("UPDATE towpath.jobs SET start_by = now() WHERE id = %s", [unstarted["id"]])
    eventually(
        lambda: (
            [state(db, job) for job in (lost, late, due, unstarted)]
            == ["retryable", "retryable", "available", "cancelled"]
        ),
        2,
    )
    assert state(db, parked) == "waiting_external"
    blocker.rollback()
    eventually(lambda: state(db, parked) == "retryable", 3)


def test_sweeps_survive_the_loss_of_their_connections(api: Api, db: "psycopg.Connection[Any]") -> None:
    for _ in range(3):
        (ended,) = db.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'towpath maintenance'"
        ).fetchone() or (0,)
        assert ended > 0
        lost, due = api.a_running_job(backoff=LATER), api.enqueue(delay_seconds=3600)
        move(db, lost, "lease_expires_at", -3600)
        move(db, due, "run_at", -3600)
        eventually(lambda: (state(db, lost), state(db, due)) == ("retryable", "available"))  # noqa: B023
        ok(api.settle("complete", api.claim()))


def test_two_services_do_each_step_once(api: Api, settings: Settings, db: "psycopg.Connection[Any]") -> None:
    with ServiceThread(settings) as other, client_of(other.url) as client:
        eventually(lambda: ok(client.get("/readyz"))["status"] == "ready")
        api.enqueue_many(100, delay_seconds=0.3, backoff=LATER)
        jobs: list[JSON] = []
        while len(jobs) < 100:
            jobs += api.claims(limit=100, wait_seconds=10)["jobs"]
        assert {job["attempt"] for job in jobs} == {1}
        db.execute("UPDATE towpath.jobs SET lease_expires_at = now() WHERE queue = %s", [api.queue])
        eventually(lambda: count(db, api.queue, "retryable") == 100)
    steps = db.execute(
        "SELECT e.step, count(*), count(DISTINCT e.job_id) FROM towpath.job_events AS e"
        " JOIN towpath.jobs AS j ON j.id = e.job_id WHERE j.queue = %s GROUP BY 1",
        [api.queue],
    ).fetchall()
    assert steps == [("lose_lease", 100, 100)]


def test_when_one_service_stops_the_other_goes_on(new_settings: Callable[..., Settings], queue: str) -> None:
    own = new_settings()
    with ServiceThread(own) as staying, client_of(staying.url) as client:
        api = Api(client, queue)
        stopping = ServiceThread(own)
        with stopping:
            api.enqueue_many(5, delay_seconds=0.5)
        claimed = 0
        while claimed < 5:
            claimed += len(api.claims(limit=5, wait_seconds=10)["jobs"])
