"""Outcomes: what each report does, that its repeat is a success, and that a late one changes nothing."""

from typing import Any
from uuid import uuid4

import psycopg
import pytest

from tests.build import JSON, Api, move, ok, problem
from tests.waiting import eventually

REPORTS: dict[str, JSON] = {
    "complete": {"result": {"answer": 42}},
    "retry": {"error": {"message": "not now"}, "delay_seconds": 0},
    "snooze": {"delay_seconds": 0},
    "fail": {"error": {"message": "never", "kind": "Hopeless", "details": {"tried": [1, 2]}}},
    "release": {},
}


def row(db: "psycopg.Connection[Any]", job: JSON) -> Any:
    """The job as stored."""
    return db.execute("SELECT j.* FROM towpath.jobs AS j WHERE id = %s", [job["id"]]).fetchone()


def lose_lease(api: Api, db: "psycopg.Connection[Any]", job: JSON) -> None:
    """Let the lease run out and the rescue happen."""
    move(db, job, "lease_expires_at", -3600)
    eventually(lambda: api.job(job)["state"] != "running")


def test_complete_stores_the_result(api: Api) -> None:
    claimed = api.a_running_job()
    ok(api.settle("complete", claimed, result={"answer": [1, None, "é"]}))
    job = api.job(claimed)
    assert (job["state"], job["result"]) == ("completed", {"answer": [1, None, "é"]})
    assert job["finished_at"] is not None


def test_retry_records_the_error_and_waits_for_the_given_delay(api: Api) -> None:
    claimed = api.a_running_job()
    settled = ok(api.settle("retry", claimed, error={"message": "busy", "kind": "Busy"}, delay_seconds=3600))
    job = api.job(claimed)
    assert (job["state"], job["run_at"]) == ("retryable", settled["run_at"])
    assert [(error["message"], error["kind"], error["attempt"]) for error in job["errors"]] == [("busy", "Busy", 1)]


@pytest.mark.parametrize("max_attempts", [1, 2, 5])
def test_a_job_is_executed_exactly_as_often_as_it_may_fail(
    api: Api, db: "psycopg.Connection[Any]", max_attempts: int
) -> None:
    api.enqueue(max_attempts=max_attempts, backoff={"kind": "fixed", "base_seconds": 0})
    executions = 0
    while jobs := api.claims(wait_seconds=2 if executions < max_attempts else 0)["jobs"]:
        executions += 1
        # By turns: a retry at once, a lost lease.
        if executions % 2:
            ok(api.settle("retry", jobs[0], delay_seconds=0))
        else:
            lose_lease(api, db, jobs[0])
        last = jobs[0]
    job = api.job(last)
    assert (executions, job["state"], job["errors_total"]) == (max_attempts, "failed", max_attempts)


def test_a_snooze_uses_no_attempt_however_often(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed = api.a_running_job(max_attempts=1)
    db.execute("UPDATE towpath.jobs SET snoozes = 40000 WHERE id = %s", [claimed["id"]])
    for _ in range(20):
        ok(api.settle("snooze", claimed, delay_seconds=0))
        claimed = api.claim()
    assert (claimed["attempt"], claimed["snoozes"], claimed["max_attempts"]) == (1, 40020, 1)


def test_a_released_job_keeps_its_place_and_its_attempts(api: Api) -> None:
    first, second = api.enqueue()["id"], api.enqueue()["id"]
    claimed = api.claim()
    ok(api.settle("release", claimed))
    again = api.claims(limit=2, wait_seconds=5)["jobs"]
    assert [(job["id"], job["attempt"]) for job in again] == [(first, 1), (second, 1)]


def test_the_newest_twenty_errors_are_kept_and_all_are_counted(api: Api) -> None:
    claimed = api.a_running_job(max_attempts=30)
    for number in range(25):
        ok(api.settle("retry", claimed, error={"message": f"failure {number}"}, delay_seconds=0))
        claimed = api.claim()
    job = api.job(claimed)
    assert [error["message"] for error in job["errors"]] == [f"failure {number}" for number in range(5, 25)]
    assert job["errors_total"] == 25


@pytest.mark.parametrize("ends", ["retry", "snooze", "release", "lost lease", "parked and resumed"])
def test_progress_and_checkpoint_go_to_the_next_claim(api: Api, db: "psycopg.Connection[Any]", ends: str) -> None:
    claimed = api.a_running_job(backoff={"kind": "fixed", "base_seconds": 0})
    ok(api.heartbeat(claimed, progress={"done": 3}, checkpoint={"page": 7}))
    match ends:
        case "lost lease":
            lose_lease(api, db, claimed)
        case "parked and resumed":
            wait = api.open_wait(claimed)
            ok(api.settle("park", claimed, wait_id=wait["wait_id"]))
            ok(api.client.post(wait["urls"]["resume"]))
        case _:
            ok(api.settle(ends, claimed, **REPORTS[ends]))
    again = api.claim()
    assert (again["progress"], again["checkpoint"]) == ({"done": 3}, {"page": 7})


@pytest.mark.parametrize("verb", REPORTS)
def test_the_same_report_again_is_a_success(api: Api, verb: str) -> None:
    claimed = api.a_running_job()
    first = ok(api.settle(verb, claimed, **REPORTS[verb]))
    again = ok(api.settle(verb, claimed, **REPORTS[verb]))
    assert (first["already_applied"], again["already_applied"]) == (False, True)


@pytest.mark.parametrize("verb", ["retry", "snooze", "release"])
def test_the_same_report_again_is_a_success_though_somebody_else_has_the_job(api: Api, verb: str) -> None:
    claimed = api.a_running_job()
    ok(api.settle(verb, claimed, **REPORTS[verb]))
    other = api.claim()
    assert ok(api.settle(verb, claimed, **REPORTS[verb]))["already_applied"]
    assert api.job(other)["state"] == "running"


@pytest.mark.parametrize("verb", REPORTS)
@pytest.mark.parametrize("other", REPORTS)
def test_another_outcome_under_the_same_lease_is_refused_with_what_settled_it(api: Api, verb: str, other: str) -> None:
    if verb == other:
        return
    claimed = api.a_running_job()
    ok(api.settle(verb, claimed, **REPORTS[verb]))
    refusal = problem(api.settle(other, claimed, **REPORTS[other]), 409, "lease-lost")
    assert refusal["settled_as"] == verb


def test_complete_with_another_result_is_refused_and_the_first_stays(api: Api) -> None:
    claimed = api.a_running_job()
    ok(api.settle("complete", claimed, result=1))
    problem(api.settle("complete", claimed, result=2), 409, "lease-lost")
    assert api.job(claimed)["result"] == 1


@pytest.mark.parametrize("meanwhile", ["rescued", "claimed by another", "failed for good", "cancelled"])
@pytest.mark.parametrize("verb", [*REPORTS, "heartbeat"])
def test_a_late_worker_is_told_and_changes_nothing(
    api: Api, db: "psycopg.Connection[Any]", meanwhile: str, verb: str
) -> None:
    late = api.a_running_job(
        max_attempts=1 if meanwhile == "failed for good" else 5, backoff={"kind": "fixed", "base_seconds": 3600}
    )
    if meanwhile == "cancelled":
        ok(api.post(f"/v1/jobs/{late['id']}/cancel", {"reason": "no need"}))
    else:
        lose_lease(api, db, late)
    if meanwhile == "claimed by another":
        move(db, late, "run_at", -7200)
        db.execute("SELECT pg_notify('towpath', 'due')")
        api.claim(worker="worker-2")
    before = row(db, late)
    for _ in range(2):
        refusal = problem(api.settle(verb, late, **REPORTS.get(verb, {"progress": 1})), 409, "lease-lost")
    assert refusal["state"] == api.job(late)["state"]
    assert row(db, late) == before


def test_a_lease_of_another_job_is_worth_nothing(api: Api) -> None:
    mine, other = api.a_running_job(), api.a_running_job()
    problem(api.settle("complete", {**mine, "lease": other["lease"]}), 409, "lease-lost")
    assert api.job(mine)["state"] == "running"


def test_an_unknown_job_is_unknown(api: Api) -> None:
    claimed = api.a_running_job()
    problem(api.settle("complete", {**claimed, "id": str(uuid4())}), 404, "unknown-job")


def test_mixed_outcomes_are_answered_one_by_one_with_the_next_claim(api: Api) -> None:
    api.enqueue_many(5)
    done, failed, bad, foreign = api.claims(limit=4)["jobs"]
    answer = ok(
        api.post(
            "/v1/settlements",
            {
                "settlements": [
                    {"outcome": "complete", "id": done["id"], "lease": done["lease"], "result": 1},
                    {"outcome": "fail", "id": failed["id"], "lease": failed["lease"]},
                    {"outcome": "complete", "id": bad["id"], "lease": bad["lease"], "result": {"n": "\0"}},
                    {"outcome": "complete", "id": foreign["id"], "lease": done["lease"]},
                    {"outcome": "complete", "id": done["id"], "lease": done["lease"], "result": 1},
                ],
                "claim": {"queues": [api.queue], "limit": 10, "wait_seconds": 0},
            },
        )
    )
    assert answer["claim"]["jobs"][0]["attempt"] == 1
    assert [item["status"] for item in answer["settlements"]] == [200, 200, 422, 409, 200]
    applied = [bool(item["settled"] and item["settled"]["already_applied"]) for item in answer["settlements"]]
    assert sorted((applied[0], applied[4])) == [False, True]
    assert [api.job(job)["state"] for job in (done, failed, bad)] == ["completed", "failed", "running"]


def test_a_thousand_outcomes_are_one_request(api: Api) -> None:
    api.enqueue_many(1000)
    jobs = api.claims(limit=1000)["jobs"]
    reports = [{"outcome": "complete", "id": job["id"], "lease": job["lease"]} for job in jobs]
    answer = ok(api.post("/v1/settlements", {"settlements": reports}))
    assert {item["status"] for item in answer["settlements"]} == {200}


def test_a_worker_cancels_its_own_job(api: Api) -> None:
    claimed = api.a_running_job()
    ok(api.settle("cancel", claimed, reason="the user left"))
    job = api.job(claimed)
    assert (job["state"], job["cancel_reason"]) == ("cancelled", "the user left")
