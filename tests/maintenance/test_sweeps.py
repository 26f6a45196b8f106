"""What happens without being asked: in time, in batches, once, and in spite of one bad row."""

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from app.settings import Settings
from tests.build import Api, client_of, move, ok
from tests.servers import ServiceThread
from tests.waiting import eventually


def count(db: "psycopg.Connection[Any]", queue: str, state: str) -> int:
    """Jobs of the queue in a state."""
    row = db.execute("SELECT count(*) FROM towpath.jobs WHERE queue = %s AND state = %s", [queue, state]).fetchone()
    assert row is not None
    return int(row[0])


def test_a_due_job_is_claimable_at_once(api: Api) -> None:
    delays = [0.2 + number * 0.02 for number in range(40)]
    ok(api.post("/v1/jobs/batch", {"jobs": [{"kind": "w", "queue": api.queue, "delay_seconds": d} for d in delays]}))
    claimed: list[Any] = []
    while len(claimed) < len(delays):
        claimed += api.claims(limit=5, wait_seconds=10)["jobs"]
    jobs = [api.job(job["id"]) for job in claimed]
    assert all(job["claimed_at"] >= job["run_at"] for job in jobs)


def test_something_scheduled_wakes_a_sweep_that_sleeps(new_settings: Callable[..., Settings], queue: str) -> None:
    lazy = new_settings(sweep_interval_seconds=600)
    with ServiceThread(lazy) as service, client_of(service.url) as client:
        api = Api(client, queue)
        eventually(lambda: ok(api.get("/readyz"))["status"] == "ready")
        api.enqueue(delay_seconds=0.2)
        assert api.claim()["attempt"] == 1


@pytest.mark.parametrize(
    ("column", "kind"), [("lease_expires_at", "lease_expired"), ("deadline_at", "deadline_exceeded")]
)
def test_a_lost_job_goes_back_with_its_cause(api: Api, db: "psycopg.Connection[Any]", column: str, kind: str) -> None:
    claimed = api.a_running_job(backoff={"kind": "fixed", "base_seconds": 3600})
    move(db, claimed, column, -7200)
    eventually(lambda: api.job(claimed)["state"] == "retryable", 2)
    (error,) = api.job(claimed)["errors"]
    assert (error["kind"], error["attempt"], error["worker"]) == (kind, 1, api.worker)


def test_a_lost_job_without_attempts_left_is_dead_with_its_cause(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed = api.a_running_job(max_attempts=1)
    move(db, claimed, "lease_expires_at", -3600)
    eventually(lambda: api.job(claimed)["state"] == "failed")
    assert api.job(claimed)["dead_letter_reason"] == "lease_expired"


@pytest.mark.parametrize("state", ["scheduled", "available", "retryable"])
def test_a_job_that_nobody_started_in_time_is_cancelled(api: Api, db: "psycopg.Connection[Any]", state: str) -> None:
    job = api.a_job_in(state)
    db.execute("UPDATE towpath.jobs SET start_by = now() WHERE id = %s", [job["id"]])
    eventually(lambda: api.job(job)["state"] == "cancelled")
    assert api.job(job)["cancel_reason"] == "expired"


def test_a_job_that_was_started_in_time_is_not_cancelled(api: Api, db: "psycopg.Connection[Any]") -> None:
    running, waiting = api.a_running_job(), api.enqueue()
    for job in (running, waiting):
        db.execute("UPDATE towpath.jobs SET start_by = now() WHERE id = %s", [job["id"]])
    eventually(lambda: api.job(waiting)["state"] == "cancelled")
    assert api.job(running)["state"] == "running"


@pytest.mark.parametrize("state", ["completed", "failed", "cancelled"])
def test_final_jobs_go_after_their_queues_time_and_nothing_else_does(
    api: Api, db: "psycopg.Connection[Any]", state: str
) -> None:
    settings = {
        "keep_dead_letters": False,
        **{f"{name}_retention_seconds": 3600 for name in ("completed", "failed", "cancelled")},
    }
    ok(api.client.put(f"/v1/queues/{api.queue}", json=settings))
    young, old, live = api.a_job_in(state), api.a_job_in(state), api.a_running_job()
    move(db, old, "finished_at", -7200)
    eventually(lambda: api.get(f"/v1/jobs/{old['id']}").status_code == 404)
    assert api.job(young)["state"] == state
    assert api.job(live)["state"] == "running"
    left = db.execute("SELECT count(*) FROM towpath.job_events WHERE job_id = %s", [old["id"]]).fetchone()
    assert left == (0,)


def test_dead_letters_have_a_retention_of_their_own(api: Api, db: "psycopg.Connection[Any]") -> None:
    ok(api.client.put(f"/v1/queues/{api.queue}", json={"failed_retention_seconds": 0}))
    dead = api.a_job_in("failed")
    other = api.a_job_in("completed")
    ok(api.client.put(f"/v1/queues/{api.queue}", json={"completed_retention_seconds": 0}))
    eventually(lambda: api.get(f"/v1/jobs/{other['id']}").status_code == 404)
    assert api.job(dead)["state"] == "failed"
    ok(api.client.put(f"/v1/queues/{api.queue}", json={"dead_letter_retention_seconds": 0}))
    eventually(lambda: api.get(f"/v1/jobs/{dead['id']}").status_code == 404)


def test_a_sweep_goes_on_batch_after_batch(new_settings: Callable[..., Settings], queue: str) -> None:
    small = new_settings(sweep_batch=10, sweep_interval_seconds=600)
    with ServiceThread(small, maintenance=False) as service, client_of(service.url) as client:
        Api(client, queue).enqueue_many(95, delay_seconds=3600)
    with psycopg.connect(small.database_url, autocommit=True) as db:
        db.execute("UPDATE towpath.jobs SET run_at = now()")
        with ServiceThread(small):
            eventually(lambda: count(db, queue, "available") == 95)


def test_one_bad_row_does_not_stop_a_sweep(new_settings: Callable[..., Settings], queue: str) -> None:
    own = new_settings(sweep_batch=16)
    with ServiceThread(own, maintenance=False) as service, client_of(service.url) as client:
        ids = Api(client, queue).enqueue_many(40, delay_seconds=3600)
    with psycopg.connect(own.database_url, autocommit=True) as db:
        db.execute(
            "CREATE FUNCTION public.spoil() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'spoiled'; END $$"
        )
        db.execute(
            f"CREATE TRIGGER spoil BEFORE UPDATE OF state ON towpath.jobs FOR EACH ROW WHEN (OLD.id = '{ids[7]}')"
            " EXECUTE FUNCTION public.spoil()"
        )
        db.execute("UPDATE towpath.jobs SET run_at = now()")
        with ServiceThread(own):
            eventually(lambda: count(db, queue, "available") == 39)
        assert count(db, queue, "scheduled") == 1


def test_a_blocked_sweep_holds_up_no_other(
    api: Api, db: "psycopg.Connection[Any]", connect: Callable[[], "psycopg.Connection[Any]"]
) -> None:
    blocked, lost = api.enqueue(delay_seconds=3600), api.a_running_job()
    blocker = connect()
    blocker.execute("SELECT pg_advisory_xact_lock(hashtext('towpath sweep'), hashtext('promote'))")
    db.execute("UPDATE towpath.jobs SET run_at = now() WHERE id = %s", [blocked["id"]])
    move(db, lost, "lease_expires_at", -3600)
    eventually(lambda: api.job(lost)["state"] != "running")
    assert api.job(blocked)["state"] == "scheduled"
    blocker.rollback()
    eventually(lambda: api.job(blocked)["state"] == "available")


def test_sweeps_survive_the_loss_of_their_connections(api: Api, db: "psycopg.Connection[Any]") -> None:
    db.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = 'towpath maintenance'"
    )
    claimed = api.a_running_job()
    move(db, claimed, "lease_expires_at", -3600)
    eventually(lambda: api.job(claimed)["state"] != "running")


def test_two_services_rescue_each_job_once(api: Api, settings: Settings, db: "psycopg.Connection[Any]") -> None:
    with ServiceThread(settings):
        api.enqueue_many(50, backoff={"kind": "fixed", "base_seconds": 3600})
        jobs = api.claims(limit=50)["jobs"]
        db.execute("UPDATE towpath.jobs SET lease_expires_at = now() WHERE queue = %s", [api.queue])
        eventually(lambda: count(db, api.queue, "retryable") == 50)
    assert {len(api.job(job["id"])["errors"]) for job in jobs} == {1}


def test_the_idempotency_keys_go_when_their_time_is_over(api: Api, db: "psycopg.Connection[Any]") -> None:
    headers = {"Idempotency-Key": api.queue}
    first = ok(api.client.post("/v1/jobs", json={"kind": "w", "queue": api.queue}, headers=headers))
    db.execute("UPDATE towpath.idempotency_keys SET expires_at = now() WHERE key = %s", [api.queue])
    gone = "SELECT count(*) FROM towpath.idempotency_keys WHERE key = %s"
    eventually(lambda: db.execute(gone, [api.queue]).fetchone() == (0,))
    second = ok(api.client.post("/v1/jobs", json={"kind": "w", "queue": api.queue}, headers=headers))
    assert first["id"] != second["id"]
