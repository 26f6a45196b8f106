"""Heartbeats: a lease lives as long as they come, each is told the truth, and a stale one stores nothing."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

import psycopg
import pytest

from tests.build import JSON, Api, move, ok, problem
from tests.waiting import eventually

UNKNOWN = "01234567-0123-7123-8123-0123456789ab"


def beats(api: Api, *claims: JSON, **more: Any) -> list[JSON]:
    """Many heartbeats in one request."""
    body = {"heartbeats": [{"id": claimed["id"], "lease": claimed["lease"], **more} for claimed in claims]}
    return ok(api.post("/v1/heartbeats", body))["heartbeats"]  # type: ignore[no-any-return]


def seconds_left(db: "psycopg.Connection[Any]", job: JSON) -> float:
    """How long the lease has, by the database's clock."""
    row = db.execute(
        "SELECT extract(epoch FROM lease_expires_at - now()) FROM towpath.jobs WHERE id = %s", [job["id"]]
    ).fetchone()
    assert row is not None
    return float(row[0])


# What a heartbeat does


def test_a_heartbeat_moves_the_expiry_by_the_leases_length(api: Api, db: "psycopg.Connection[Any]") -> None:
    api.enqueue()
    claimed = api.claim(lease_seconds=100)
    move(db, claimed, "lease_expires_at", -90)
    ok(api.heartbeat(claimed))
    assert 95 < seconds_left(db, claimed) <= 100


def test_a_heartbeat_may_change_the_leases_length_for_good(api: Api, db: "psycopg.Connection[Any]") -> None:
    api.enqueue()
    claimed = api.claim(lease_seconds=100)
    ok(api.heartbeat(claimed, lease_seconds=500))
    ok(api.heartbeat(claimed))
    assert 495 < seconds_left(db, claimed) <= 500


def test_a_heartbeat_says_when_the_next_one_is_wanted_and_what_time_it_is(api: Api) -> None:
    api.enqueue()
    claimed = api.claim(lease_seconds=90)
    answer = ok(api.heartbeat(claimed))
    now, expires = (
        datetime.fromisoformat(at) for at in (answer["server_time"], answer["heartbeats"][0]["lease_expires_at"])
    )
    assert (expires - now).total_seconds() == 90
    assert 0 < answer["next_heartbeat_seconds"] <= 45


def test_a_lease_that_is_kept_is_not_lost(api: Api) -> None:
    api.enqueue()
    claimed, silent = api.claim(lease_seconds=1), api.a_running_job()
    ok(api.heartbeat(silent, lease_seconds=1))
    # The sweep has passed over both once it has taken the silent one.
    eventually(lambda: ok(api.heartbeat(claimed)) and api.job(silent)["state"] == "retryable")
    assert api.job(claimed)["state"] == "running"


def test_a_late_heartbeat_saves_a_lease_that_nobody_has_taken_away_yet(
    api: Api, db: "psycopg.Connection[Any]", connect: Callable[[], "psycopg.Connection[Any]"]
) -> None:
    claimed = api.a_running_job()
    sweeping = connect()
    sweeping.execute("SELECT pg_advisory_xact_lock(hashtext('towpath sweep'), hashtext('lose_lease'))")
    move(db, claimed, "lease_expires_at", -3600)
    ok(api.heartbeat(claimed))
    assert seconds_left(db, claimed) > 50


def test_a_heartbeat_does_not_move_the_deadline(api: Api) -> None:
    claimed = api.a_running_job(timeout_seconds=500)
    (kept,) = ok(api.heartbeat(claimed))["heartbeats"]
    assert kept["deadline_at"] == claimed["deadline_at"]


def test_progress_and_checkpoint_are_readable_at_once(api: Api) -> None:
    claimed = api.a_running_job()
    ok(api.heartbeat(claimed, progress={"done": 3}, checkpoint=[7]))
    job = api.job(claimed)
    assert (job["progress"], job["checkpoint"]) == ({"done": 3}, [7])


def test_an_absent_progress_keeps_the_one_before(api: Api) -> None:
    claimed = api.a_running_job()
    ok(api.heartbeat(claimed, progress=1, checkpoint=2))
    ok(api.heartbeat(claimed))
    job = api.job(claimed)
    assert (job["progress"], job["checkpoint"]) == (1, 2)


def test_an_attached_handler_keeps_its_lease_while_it_waits(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed, _ = api.a_parked_job(attached=True)
    move(db, claimed, "lease_expires_at", -50)
    (kept,) = ok(api.heartbeat(claimed))["heartbeats"]
    assert (kept["state"], seconds_left(db, claimed) > 50) == ("waiting_external", True)


def test_a_detached_park_leaves_nothing_to_keep(api: Api) -> None:
    claimed, _ = api.a_parked_job(attached=False)
    refusal = problem(api.heartbeat(claimed), 409, "lease-lost")
    assert (refusal["state"], refusal["settled_as"]) == ("waiting_external", "park")


# Leases that are not held any more


def test_a_heartbeat_under_a_stale_lease_stores_nothing(api: Api) -> None:
    stale = api.a_running_job()
    ok(api.settle("release", stale))
    holder = api.claim()
    problem(api.heartbeat(stale, progress={"by": "nobody"}, lease_seconds=3600), 409, "lease-lost")
    job = api.job(stale)
    assert (job["progress"], job["lease_expires_at"]) == (None, holder["lease_expires_at"])


def test_a_cancel_reaches_the_worker_at_its_next_heartbeat(api: Api) -> None:
    claimed = api.a_running_job()
    ok(api.post(f"/v1/jobs/{claimed['id']}/cancel", {"reason": "no need"}))
    assert problem(api.heartbeat(claimed), 409, "lease-lost")["status_of_lease"] == "cancelled"


def test_the_heartbeat_of_a_job_that_is_not_there_is_unknown(api: Api) -> None:
    problem(api.heartbeat({**api.a_running_job(), "id": UNKNOWN}), 404, "unknown-job")


# Many at once


def test_each_of_many_heartbeats_is_answered_in_the_order_sent(api: Api, db: "psycopg.Connection[Any]") -> None:
    kept, cancelled, lost, late, done, taken = (
        api.a_running_job(backoff={"kind": "fixed", "base_seconds": 3600}) for _ in range(6)
    )
    ok(api.post(f"/v1/jobs/{cancelled['id']}/cancel", {}))
    move(db, lost, "lease_expires_at", -3600)
    move(db, late, "deadline_at", -7200)
    ok(api.settle("complete", done))
    ok(api.settle("release", taken))
    api.claim(worker="another")
    eventually(lambda: api.job(lost)["state"] == api.job(late)["state"] == "retryable")
    answers = beats(api, kept, cancelled, lost, late, done, taken, {**kept, "id": UNKNOWN})
    assert [(answer["status"], answer["state"], answer["settled_as"]) for answer in answers] == [
        ("ok", "running", None),
        ("cancelled", "cancelled", "cancel"),
        ("lost", "retryable", "lose_lease"),
        ("deadline", "retryable", "pass_deadline"),
        ("lost", "completed", "complete"),
        ("lost", "running", None),
        ("unknown", None, None),
    ]


def test_one_bad_heartbeat_costs_no_other_its_lease(api: Api, db: "psycopg.Connection[Any]") -> None:
    first, last = api.a_running_job(), api.a_running_job()
    for job in (first, last):
        move(db, job, "lease_expires_at", -50)
    body = [
        {"id": first["id"], "lease": first["lease"]},
        {"id": first["id"], "lease": first["lease"], "progress": "\0"},
        {"id": "no id", "lease": "x"},
        {"id": last["id"], "lease": last["lease"]},
    ]
    answers = ok(api.post("/v1/heartbeats", {"heartbeats": body}))["heartbeats"]
    assert [answer["status"] for answer in answers] == ["ok", "refused", "refused", "ok"]
    assert all(seconds_left(db, job) > 50 for job in (first, last))


def test_a_job_whose_row_somebody_holds_costs_no_other_its_lease(
    api: Api, db: "psycopg.Connection[Any]", connect: Callable[[], "psycopg.Connection[Any]"]
) -> None:
    first, held, last = (api.a_running_job() for _ in range(3))
    connect().execute("SELECT FROM towpath.jobs WHERE id = %s FOR UPDATE", [held["id"]])
    answers = beats(api, first, held, last)
    assert [answer["status"] for answer in answers] == ["ok", "refused", "ok"]
    assert answers[1]["problem"]["status"] == 503


def test_the_same_lease_twice_in_one_request_is_kept(api: Api) -> None:
    claimed = api.a_running_job()
    assert [answer["status"] for answer in beats(api, claimed, claimed)] == ["ok", "ok"]


def test_a_thousand_leases_are_kept_with_one_request(api: Api) -> None:
    api.enqueue_many(1000)
    jobs = api.claims(limit=1000)["jobs"]
    answers = beats(api, *jobs, progress=1)
    assert [answer["id"] for answer in answers] == [job["id"] for job in jobs]
    assert {answer["status"] for answer in answers} == {"ok"}


@pytest.mark.parametrize("count", [0, 1001])
def test_none_and_too_many_are_refused(api: Api, count: int) -> None:
    body = {"heartbeats": [{"id": UNKNOWN, "lease": "x"}] * count}
    assert problem(api.post("/v1/heartbeats", body), 422, "invalid-field")["errors"][0]["pointer"] == "/heartbeats"
