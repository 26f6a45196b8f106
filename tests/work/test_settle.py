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
    "cancel": {"reason": "the user left"},
}
AT_ONCE = {"kind": "fixed", "base_seconds": 0}
LATER = {"kind": "fixed", "base_seconds": 3600}


def row(db: "psycopg.Connection[Any]", job: JSON) -> Any:
    """All that is stored of a job: its row, its waits, its history."""
    return [
        db.execute(f"SELECT t.* FROM towpath.{table} AS t WHERE {key} = %s ORDER BY id", [job["id"]]).fetchall()
        for table, key in (("jobs", "id"), ("waits", "job_id"), ("job_events", "job_id"))
    ]


def lose_lease(db: "psycopg.Connection[Any]", job: JSON) -> None:
    """Let the lease run out and the rescue happen."""
    move(db, job, "lease_expires_at", -7200)
    eventually(lambda: state(db, job) != "running")


def state(db: "psycopg.Connection[Any]", job: JSON) -> str:
    found = db.execute("SELECT state FROM towpath.jobs WHERE id = %s", [job["id"]]).fetchone()
    assert found is not None
    return str(found[0])


def park(api: Api, claimed: JSON) -> JSON:
    """Park the job; returns its wait."""
    wait = api.open_wait(claimed)
    assert ok(api.settle("park", claimed, wait_id=wait["wait_id"]))["parked"]
    return wait


def settlement(outcome: str, claimed: JSON, **report: Any) -> JSON:
    return {"outcome": outcome, "id": claimed["id"], "lease": claimed["lease"], **report}


def settle_many(api: Api, *settlements: JSON, **more: Any) -> list[JSON]:
    answer = ok(api.post("/v1/settlements", {"settlements": settlements, **more}))
    return answer["settlements"]  # type: ignore[no-any-return]


# What each outcome does


def test_complete_stores_the_result(api: Api) -> None:
    claimed = api.a_running_job()
    ok(api.settle("complete", claimed, result={"answer": [1, None, "é"]}))
    job = api.job(claimed)
    assert (job["state"], job["result"]) == ("completed", {"answer": [1, None, "é"]})
    assert job["finished_at"] is not None


def test_retry_records_the_error_and_waits_for_the_given_delay(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed = api.a_running_job()
    error = {"message": "busy", "kind": "Busy", "details": {"after": 3}}
    settled = ok(api.settle("retry", claimed, error=error, delay_seconds=3600))
    job = api.job(claimed)
    assert (job["state"], job["attempt"], job["run_at"]) == ("retryable", 1, settled["run_at"])
    (kept,) = job["errors"]
    assert {name: kept[name] for name in error} == error
    assert (kept["attempt"], kept["worker"]) == (1, api.worker)
    assert 3590 < due_in(db, job) <= 3600


def due_in(db: "psycopg.Connection[Any]", job: JSON) -> float:
    row = db.execute("SELECT extract(epoch FROM run_at - now()) FROM towpath.jobs WHERE id = %s", [job["id"]])
    return float((row.fetchone() or (0,))[0])


def test_retry_without_a_delay_waits_for_the_backoff(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed = api.a_running_job(backoff={"kind": "linear", "base_seconds": 1000, "jitter": 0})
    ok(api.settle("retry", claimed))
    assert 990 < due_in(db, claimed) <= 1000


def test_the_backoff_grows_with_failures_not_with_snoozes(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed = api.a_running_job(backoff={"kind": "linear", "base_seconds": 1000, "jitter": 0})
    for _ in range(3):
        ok(api.settle("snooze", claimed, delay_seconds=0))
        claimed = api.claim()
    ok(api.settle("retry", claimed))
    assert 990 < due_in(db, claimed) <= 1000


def test_snooze_continues_the_same_attempt_later(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed = api.a_running_job()
    settled = ok(api.settle("snooze", claimed, delay_seconds=3600))
    job = api.job(claimed)
    assert (settled["state"], job["attempt"], job["snoozes"], job["errors"]) == ("scheduled", 0, 1, [])
    assert 3590 < due_in(db, job) <= 3600


def test_a_released_job_keeps_its_place_and_its_attempts(api: Api) -> None:
    first, second = api.enqueue()["id"], api.enqueue()["id"]
    ok(api.settle("release", api.claim()))
    again = api.claims(limit=2, wait_seconds=5)["jobs"]
    assert [(job["id"], job["attempt"]) for job in again] == [(first, 1), (second, 1)]


def test_fail_ends_the_job_though_attempts_are_left(api: Api) -> None:
    claimed = api.a_running_job(max_attempts=5)
    ok(api.settle("fail", claimed, **REPORTS["fail"]))
    job = api.job(claimed)
    assert (job["state"], job["attempt"], job["dead_letter_reason"]) == ("failed", 1, "failed")
    assert [(error["kind"], error["details"]) for error in job["errors"]] == [("Hopeless", {"tried": [1, 2]})]


def test_a_worker_cancels_its_own_job(api: Api) -> None:
    claimed = api.a_running_job()
    ok(api.settle("cancel", claimed, reason="the user left"))
    job = api.job(claimed)
    assert (job["state"], job["cancel_reason"], job["errors"]) == ("cancelled", "the user left", [])


def test_park_waits_without_a_lease(api: Api) -> None:
    claimed = api.a_running_job()
    park(api, claimed)
    job = api.job(claimed)
    assert (job["state"], job["attempt"], job["lease_expires_at"], job["deadline_at"]) == (
        "waiting_external", 1, None, None,
    )  # fmt: skip


def test_the_newest_twenty_errors_are_kept_and_all_are_counted(api: Api) -> None:
    claimed = api.a_running_job(max_attempts=30)
    for number in range(25):
        ok(api.settle("retry", claimed, error={"message": f"failure {number}"}, delay_seconds=0))
        claimed = api.claim()
    job = api.job(claimed)
    assert [error["message"] for error in job["errors"]] == [f"failure {number}" for number in range(5, 25)]
    assert (job["errors_total"], claimed["last_error"]["message"]) == (25, "failure 24")


@pytest.mark.parametrize("ends", ["retry", "snooze", "release", "lost lease", "parked and resumed"])
def test_progress_and_checkpoint_go_to_the_next_claim(api: Api, db: "psycopg.Connection[Any]", ends: str) -> None:
    claimed = api.a_running_job(backoff=AT_ONCE)
    ok(api.heartbeat(claimed, progress={"done": 3}, checkpoint={"page": 7}))
    match ends:
        case "lost lease":
            lose_lease(db, claimed)
        case "parked and resumed":
            ok(api.client.post(park(api, claimed)["urls"]["resume"]))
        case _:
            ok(api.settle(ends, claimed, **REPORTS[ends]))
    again = api.claim()
    assert (again["progress"], again["checkpoint"]) == ({"done": 3}, {"page": 7})


# How often a job is executed


@pytest.mark.parametrize("ends", ["retry at once", "retry by backoff", "lost lease", "deadline", "callback time-out"])
@pytest.mark.parametrize("max_attempts", [1, 2, 5])
def test_a_job_is_executed_exactly_as_often_as_it_may_fail(
    api: Api, db: "psycopg.Connection[Any]", max_attempts: int, ends: str
) -> None:
    job = api.enqueue(max_attempts=max_attempts, backoff=AT_ONCE)
    executions = execute_to_the_end(api, db, job, lambda _: ends)
    found = api.job(job)
    assert (executions, found["state"], found["errors_total"]) == (max_attempts, "failed", max_attempts)
    assert [error["attempt"] for error in found["errors"]] == list(range(1, max_attempts + 1))


def test_all_ways_to_fail_count_together(api: Api, db: "psycopg.Connection[Any]") -> None:
    ways = ["retry at once", "lost lease", "retry by backoff", "deadline", "callback time-out"]
    job = api.enqueue(max_attempts=len(ways), backoff=AT_ONCE)
    assert execute_to_the_end(api, db, job, lambda execution: ways[execution - 1]) == len(ways)
    kinds = [error["kind"] for error in api.job(job)["errors"]]
    assert kinds == ["error", "lease_expired", "error", "deadline_exceeded", "callback_timeout"]


def execute_to_the_end(api: Api, db: "psycopg.Connection[Any]", job: JSON, how: Any) -> int:
    """Claim the job and end each attempt in the way that `how` says, until it is final; how often that was."""
    executions = 0
    while state(db, job) != "failed":
        claimed = api.claim()
        executions += 1
        assert claimed["attempt"] == executions
        match how(executions):
            case "retry at once":
                ok(api.settle("retry", claimed, delay_seconds=0))
            case "retry by backoff":
                ok(api.settle("retry", claimed))
            case "lost lease":
                lose_lease(db, claimed)
            case "deadline":
                move(db, claimed, "deadline_at", -7200)
                eventually(lambda: state(db, job) != "running")
            case "callback time-out":
                wait = park(api, claimed)
                db.execute("UPDATE towpath.waits SET deadline_at = now() WHERE id = %s", [wait["wait_id"]])
                eventually(lambda: state(db, job) != "waiting_external")
    assert api.claims()["jobs"] == []
    return executions


def test_a_thousand_snoozes_use_no_attempt(api: Api, db: "psycopg.Connection[Any]") -> None:
    jobs, rounds = 50, 20
    api.enqueue_many(jobs, max_attempts=1)
    claimed = claim_all(api, jobs)
    # On the way over the end of a small integer.
    db.execute("UPDATE towpath.jobs SET snoozes = 32760 WHERE queue = %s", [api.queue])
    for _ in range(rounds):
        settle_many(api, *(settlement("snooze", job, delay_seconds=0) for job in claimed))
        claimed = claim_all(api, jobs)
    assert {(job["attempt"], job["snoozes"], job["max_attempts"]) for job in claimed} == {(1, 32760 + rounds, 1)}


def test_snoozes_beside_the_last_attempt_do_not_end_the_job(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed = api.a_running_job(max_attempts=1000)
    db.execute("UPDATE towpath.jobs SET attempt = 1000 WHERE id = %s", [claimed["id"]])
    for _ in range(5):
        ok(api.settle("snooze", claimed, delay_seconds=0))
        claimed = api.claim()
    assert (claimed["attempt"], claimed["last_attempt"]) == (1000, True)


def claim_all(api: Api, count: int) -> list[JSON]:
    claimed: list[JSON] = []
    while len(claimed) < count:
        claimed += api.claims(limit=count, wait_seconds=5)["jobs"]
    return claimed


# The same report again


@pytest.mark.parametrize("verb", REPORTS)
def test_the_same_report_again_is_a_success_and_changes_nothing(
    api: Api, db: "psycopg.Connection[Any]", verb: str
) -> None:
    claimed = api.a_running_job()
    # To a time that does not come, so that nothing else moves the job between the looks.
    report = {**REPORTS[verb], **({"delay_seconds": 3600} if "delay_seconds" in REPORTS[verb] else {})}
    first = ok(api.settle(verb, claimed, **report))
    before = row(db, claimed)
    again = ok(api.settle(verb, claimed, **report))
    assert (first["already_applied"], again["already_applied"]) == (False, True)
    assert (again["state"], again["attempt"], row(db, claimed)) == (first["state"], first["attempt"], before)


@pytest.mark.parametrize("verb", ["retry", "snooze", "release", "park", "fail", "cancel"])
def test_the_same_report_again_is_a_success_though_somebody_else_has_the_job(
    api: Api, db: "psycopg.Connection[Any]", verb: str
) -> None:
    claimed = api.a_running_job()
    report = dict(REPORTS.get(verb, {}))
    if verb == "park":
        wait = park(api, claimed)
        report["wait_id"] = wait["wait_id"]
        ok(api.client.post(wait["urls"]["resume"]))
    else:
        ok(api.settle(verb, claimed, **report))
    if verb in ("fail", "cancel"):
        ok(api.post(f"/v1/jobs/{claimed['id']}/redrive"))
    api.claim(worker="another")
    before = row(db, claimed)
    assert ok(api.settle(verb, claimed, **report))["already_applied"]
    assert row(db, claimed) == before


def test_a_cancel_by_somebody_else_does_not_make_the_workers_own_a_repeat(api: Api) -> None:
    claimed = api.a_running_job()
    ok(api.post(f"/v1/jobs/{claimed['id']}/cancel", {"reason": "no need"}))
    refusal = problem(api.settle("cancel", claimed, reason="mine"), 409, "lease-lost")
    assert (refusal["settled_as"], refusal["cancel_reason"]) == ("cancel", "no need")


@pytest.mark.parametrize("verb", REPORTS)
@pytest.mark.parametrize("other", REPORTS)
def test_another_outcome_under_the_same_lease_is_refused_with_what_settled_it(
    api: Api, db: "psycopg.Connection[Any]", verb: str, other: str
) -> None:
    if verb == other:
        return
    claimed = api.a_running_job()
    settled = ok(api.settle(verb, claimed, **{**REPORTS[verb], **LATE.get(verb, {})}))
    before = row(db, claimed)
    refusal = problem(api.settle(other, claimed, **REPORTS[other]), 409, "lease-lost")
    assert refusal["settled_as"] == ("cancel_own" if verb == "cancel" else verb)
    assert (refusal["state"], refusal["attempt"]) == (settled["state"], settled["attempt"])
    assert row(db, claimed) == before


LATE: dict[str, JSON] = {"retry": {"delay_seconds": 3600}, "snooze": {"delay_seconds": 3600}}


def test_complete_with_another_result_is_refused_and_the_first_stays(api: Api) -> None:
    claimed = api.a_running_job()
    ok(api.settle("complete", claimed, result=1))
    problem(api.settle("complete", claimed, result=2), 409, "lease-lost")
    assert api.job(claimed)["result"] == 1


def test_the_same_result_in_another_spelling_is_the_same(api: Api) -> None:
    claimed = api.a_running_job()
    ok(api.settle("complete", claimed, result={"a": 1, "b": 2}))
    again = api.client.post(
        f"/v1/jobs/{claimed['id']}/complete",
        content=b'{"result": {"b":2.0, "a":1}, "lease": "%s"}' % claimed["lease"].encode(),
        headers={"content-type": "application/json"},
    )
    assert ok(again)["already_applied"]


# Too late


@pytest.mark.parametrize("meanwhile", ["rescued", "claimed by another", "failed for good", "cancelled"])
@pytest.mark.parametrize("verb", [*REPORTS, "park", "heartbeat", "callbacks"])
def test_a_late_worker_is_told_and_changes_nothing(
    api: Api, db: "psycopg.Connection[Any]", meanwhile: str, verb: str
) -> None:
    late = api.a_running_job(max_attempts=1 if meanwhile == "failed for good" else 5, backoff=LATER)
    report = REPORTS.get(verb, {})
    if verb == "park":
        report = {"wait_id": api.open_wait(late)["wait_id"]}
    elif verb == "heartbeat":
        report = {"progress": "late"}
    if meanwhile == "cancelled":
        ok(api.post(f"/v1/jobs/{late['id']}/cancel", {"reason": "no need"}))
    else:
        lose_lease(db, late)
    if meanwhile == "claimed by another":
        move(db, late, "run_at", -7200)
        db.execute("SELECT pg_notify('towpath', 'due')")
        api.claim(worker="another")
    before = row(db, late)
    refusals = [problem(api.settle(verb, late, **report), 409, "lease-lost") for _ in range(3)]
    job = api.job(late)
    assert {(refusal["state"], refusal["attempt"]) for refusal in refusals} == {(job["state"], job["attempt"])}
    assert row(db, late) == before


def test_a_late_worker_is_told_who_has_the_job_now(api: Api) -> None:
    late = api.a_running_job()
    ok(api.settle("release", late))
    api.claim(worker="another")
    assert problem(api.settle("complete", late), 409, "lease-lost")["holder"] == "another"


def test_a_late_report_among_many_changes_nothing(api: Api, db: "psycopg.Connection[Any]") -> None:
    late, kept = api.a_running_job(backoff=LATER), api.a_running_job()
    lose_lease(db, late)
    before = row(db, late)
    answers = settle_many(api, settlement("complete", late, result=1), settlement("complete", kept, result=1))
    assert [(answer["status"], answer["settled"] is None) for answer in answers] == [(409, True), (200, False)]
    assert row(db, late) == before


@pytest.mark.parametrize("lease", ["another job's", "altered", "no lease at all"])
def test_a_lease_that_is_not_ones_own_is_worth_nothing(api: Api, db: "psycopg.Connection[Any]", lease: str) -> None:
    mine, other = api.a_running_job(), api.a_running_job()
    given = {
        "another job's": other["lease"],
        "altered": ("A" if mine["lease"][0] != "A" else "B") + mine["lease"][1:],
        "no lease at all": "lease",
    }[lease]
    before = row(db, mine)
    problem(api.settle("complete", {**mine, "lease": given}), 409, "lease-lost")
    assert row(db, mine) == before


def test_an_unknown_job_is_unknown(api: Api) -> None:
    claimed = api.a_running_job()
    problem(api.settle("complete", {**claimed, "id": str(uuid4())}), 404, "unknown-job")


def test_a_job_whose_result_is_refused_can_still_be_settled(api: Api) -> None:
    claimed = api.a_running_job()
    refusal = problem(api.settle("complete", claimed, result={"text": "\0"}), 422, "invalid-field")
    assert refusal["errors"][0]["pointer"] == "/result/text"
    ok(api.settle("complete", claimed, result={"text": ""}))


# Many at once


def test_each_outcome_of_many_is_answered_by_itself(api: Api) -> None:
    api.enqueue_many(8)
    jobs = api.claims(limit=8)["jobs"]
    done, again, asleep, dead, given_back, cancelled, parked, bad = jobs
    wait = api.open_wait(parked)
    answers = settle_many(
        api,
        settlement("complete", done, result=1),
        settlement("complete", bad, result={"n": "\0"}),
        settlement("retry", again, delay_seconds=3600),
        settlement("snooze", asleep, delay_seconds=3600),
        settlement("nonsense", bad),
        settlement("fail", dead),
        settlement("complete", {**bad, "lease": done["lease"]}),
        settlement("release", given_back),
        settlement("cancel", cancelled),
        settlement("complete", {**bad, "id": str(uuid4())}),
        settlement("park", parked, wait_id=wait["wait_id"]),
        settlement("park", bad, wait_id=wait["wait_id"]),
    )
    assert [answer["index"] for answer in answers] == list(range(12))
    assert [answer["status"] for answer in answers] == [200, 422, 200, 200, 422, 200, 409, 200, 200, 404, 200, 404]
    assert [api.job(job)["state"] for job in jobs] == [
        "completed", "retryable", "scheduled", "failed", "available", "cancelled", "waiting_external", "running",
    ]  # fmt: skip
    assert answers[1]["problem"]["errors"][0]["pointer"] == "/settlements/1/result/n"


def test_outcomes_and_the_next_claim_are_one_request(api: Api) -> None:
    done = api.a_running_job()
    following = api.enqueue()["id"]
    body = {"settlements": [settlement("complete", done)], "claim": {"queues": [api.queue], "wait_seconds": 0}}
    answer = ok(api.post("/v1/settlements", body))
    assert [job["id"] for job in answer["claim"]["jobs"]] == [following]


def test_a_released_job_can_come_back_in_the_same_answer(api: Api) -> None:
    claimed = api.a_running_job()
    body = {"settlements": [settlement("release", claimed)], "claim": {"queues": [api.queue], "wait_seconds": 0}}
    (again,) = ok(api.post("/v1/settlements", body))["claim"]["jobs"]
    assert (again["id"], again["attempt"], again["lease"] != claimed["lease"]) == (claimed["id"], 1, True)


def test_a_claim_alone_is_no_outcome(api: Api) -> None:
    api.enqueue()
    answer = ok(api.post("/v1/settlements", {"claim": {"queues": [api.queue], "wait_seconds": 0}}))
    assert (answer["settlements"], len(answer["claim"]["jobs"])) == ([], 1)


@pytest.mark.parametrize("verb", REPORTS)
def test_the_same_outcome_twice_in_one_request_is_applied_once(api: Api, verb: str) -> None:
    claimed = api.a_running_job()
    answers = settle_many(api, *[settlement(verb, claimed, **REPORTS[verb])] * 2)
    assert [answer["status"] for answer in answers] == [200, 200]
    assert sorted(answer["settled"]["already_applied"] for answer in answers) == [False, True]


def test_two_outcomes_of_one_job_in_one_request_have_one_winner(api: Api) -> None:
    claimed = api.a_running_job()
    answers = settle_many(api, settlement("fail", claimed), settlement("complete", claimed, result=1))
    assert [answer["status"] for answer in answers] == [200, 409]
    assert api.job(claimed)["state"] == "failed"


def test_two_results_of_one_job_in_one_request_have_one_winner(api: Api) -> None:
    claimed = api.a_running_job()
    answers = settle_many(api, *(settlement("complete", claimed, result=number) for number in (1, 2)))
    statuses = [answer["status"] for answer in answers]
    assert sorted(statuses) == [200, 409]
    assert api.job(claimed)["result"] == 1 + statuses.index(200)


def test_a_thousand_outcomes_are_one_request(api: Api) -> None:
    api.enqueue_many(1000)
    jobs = api.claims(limit=1000)["jobs"]
    answers = settle_many(api, *(settlement("complete", job) for job in jobs))
    assert [answer["id"] for answer in answers] == [job["id"] for job in jobs]
    assert {answer["status"] for answer in answers} == {200}
