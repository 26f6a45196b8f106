"""Heartbeats: a lease lives as long as they come, and each one is told the truth."""

from typing import Any

import psycopg

from tests.build import Api, move, ok
from tests.waiting import eventually


def beat(api: Api, *claims: dict[str, Any]) -> list[dict[str, Any]]:
    """Many heartbeats in one request."""
    body = {"heartbeats": [{"id": claimed["id"], "lease": claimed["lease"]} for claimed in claims]}
    return ok(api.post("/v1/heartbeats", body))["heartbeats"]  # type: ignore[no-any-return]


def test_a_heartbeat_moves_the_expiry_by_the_leases_length(api: Api, db: "psycopg.Connection[Any]") -> None:
    api.enqueue()
    claimed = api.claim(lease_seconds=100)
    move(db, claimed, "lease_expires_at", -90)
    kept = ok(api.heartbeat(claimed))
    expires = db.execute(
        "SELECT extract(epoch FROM lease_expires_at - now()) FROM towpath.jobs WHERE id = %s", [claimed["id"]]
    ).fetchone()
    assert expires is not None
    assert 95 < expires[0] <= 100
    assert kept["next_heartbeat_seconds"] < 50


def test_a_lease_that_is_kept_is_not_lost(api: Api) -> None:
    api.enqueue()
    claimed = api.claim(lease_seconds=1)
    other = api.a_running_job()
    eventually(lambda: ok(api.heartbeat(claimed)) and other, 1)
    assert api.job(claimed)["state"] == "running"


def test_a_heartbeat_does_not_move_the_deadline(api: Api) -> None:
    claimed = api.a_running_job(timeout_seconds=500)
    kept = ok(api.heartbeat(claimed))["heartbeats"][0]
    assert kept["deadline_at"] == claimed["deadline_at"]


def test_each_of_many_heartbeats_is_answered_in_the_order_sent(api: Api, db: "psycopg.Connection[Any]") -> None:
    kept, cancelled, lost, late, done = (
        api.a_running_job(backoff={"kind": "fixed", "base_seconds": 3600}) for _ in "12345"
    )
    ok(api.post(f"/v1/jobs/{cancelled['id']}/cancel", {}))
    move(db, lost, "lease_expires_at", -3600)
    move(db, late, "deadline_at", -7200)
    ok(api.settle("complete", done))
    eventually(lambda: api.job(lost)["state"] == api.job(late)["state"] == "retryable")
    unknown = {**kept, "id": "01234567-0123-7123-8123-0123456789ab"}
    answers = beat(api, kept, cancelled, lost, late, done, unknown)
    assert [answer["status"] for answer in answers] == ["ok", "cancelled", "lost", "deadline", "lost", "unknown"]
    assert answers[4]["settled_as"] == "complete"


def test_a_heartbeat_under_a_stale_lease_stores_nothing(api: Api) -> None:
    stale = api.a_running_job()
    ok(api.settle("release", stale))
    api.claim()
    response = api.heartbeat(stale, progress={"by": "nobody"})
    assert response.status_code == 409
    assert api.job(stale)["progress"] is None


def test_an_absent_progress_keeps_the_one_before(api: Api) -> None:
    claimed = api.a_running_job()
    ok(api.heartbeat(claimed, progress=1))
    ok(api.heartbeat(claimed))
    assert api.job(claimed)["progress"] == 1
