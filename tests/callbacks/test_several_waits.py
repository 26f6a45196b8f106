"""A park may wait for any, all or n of several waits: what each answer does, in whatever order they come."""

from typing import Any

import psycopg
import pytest

from tests.build import JSON, Api, ok, problem
from tests.waiting import eventually

AT_ONCE = {"kind": "fixed", "base_seconds": 0}


def opened(api: Api, claimed: JSON, *names: str, **wait: Any) -> dict[str, JSON]:
    return {name: api.open_wait(claimed, name=name, timeout_seconds=60, **wait) for name in names}


def park(api: Api, claimed: JSON, waits: dict[str, JSON], needed: Any, **more: Any) -> JSON:
    wait_ids = [wait["wait_id"] for wait in waits.values()]
    return ok(api.settle("park", claimed, wait_ids=wait_ids, needed=needed, **more))


def parked(api: Api, needed: Any, *names: str, attached: bool = False, **job: Any) -> tuple[JSON, dict[str, JSON]]:
    claimed = api.a_running_job(**job)
    waits = opened(api, claimed, *names)
    assert park(api, claimed, waits, needed, attached=attached)["parked"] is True
    return claimed, waits


def call(api: Api, wait: JSON, verb: str, payload: Any = None) -> JSON:
    return ok(api.client.post(wait["urls"][verb], json=payload))


def expire(db: "psycopg.Connection[Any]", wait: JSON) -> None:
    db.execute("UPDATE towpath.waits SET deadline_at = now() WHERE id = %s", [wait["wait_id"]])
    closed = "SELECT count(*) FROM towpath.waits WHERE id = %s AND state = 'expired'"
    eventually(lambda: db.execute(closed, [wait["wait_id"]]).fetchone() == (1,))


@pytest.mark.parametrize(("needed", "answers"), [("any", 1), (1, 1), (2, 2), ("all", 3), (3, 3)])
def test_a_job_resumes_with_the_answer_that_makes_it_enough(api: Api, needed: Any, answers: int) -> None:
    claimed, waits = parked(api, needed, "a", "b", "c")
    states = [call(api, wait, "resume", name)["job_state"] for name, wait in list(waits.items())[:answers]]
    assert states == ["waiting_external"] * (answers - 1) + ["available"]
    again = api.claim()
    assert again["id"] == claimed["id"]
    assert {name: came["payload"] for name, came in again["callback_results"].items()} == {
        name: name for name in list(waits)[:answers]
    }


def test_an_answer_that_is_not_yet_enough_stays_with_the_job(api: Api) -> None:
    claimed, waits = parked(api, 2, "a", "b", "c")
    call(api, waits["b"], "resume", {"price": 3})
    job = api.job(claimed)
    assert (job["state"], job["answers_needed"], len(job["waiting_on"])) == ("waiting_external", 2, 3)
    assert job["callback_results"]["b"]["payload"] == {"price": 3}
    assert {wait["name"]: wait["state"] for wait in job["waits"]} == {"a": "open", "b": "resolved", "c": "open"}


def test_waits_that_were_not_needed_are_told_so(api: Api) -> None:
    _, waits = parked(api, "any", "a", "b")
    call(api, waits["a"], "resume")
    late = problem(api.client.post(waits["b"]["urls"]["resume"]), 410, "callback-gone")
    assert late["wait_state"] == "superseded"


@pytest.mark.parametrize("verb", ["complete", "retry"])
@pytest.mark.parametrize("needed", ["any", "all"])
def test_complete_and_retry_act_on_the_job_at_once(api: Api, needed: str, verb: str) -> None:
    claimed, waits = parked(api, needed, "a", "b")
    call(api, waits["b"], verb, "done")
    job = api.job(claimed)
    assert job["state"] == {"complete": "completed", "retry": "available"}[verb]
    assert job["result"] == ("done" if verb == "complete" else None)


def test_a_fail_is_an_answer_that_will_not_come(api: Api) -> None:
    claimed, waits = parked(api, 2, "a", "b", "c")
    assert call(api, waits["a"], "fail")["job_state"] == "waiting_external"
    assert call(api, waits["b"], "resume")["job_state"] == "waiting_external"
    assert call(api, waits["c"], "resume")["job_state"] == "available"
    assert api.claim()["callback_results"]["a"]["verb"] == "fail"


def test_a_job_fails_when_too_few_answers_can_still_come(api: Api) -> None:
    claimed, waits = parked(api, 2, "a", "b", "c")
    call(api, waits["a"], "fail", "sold out")
    assert call(api, waits["b"], "fail", "closed")["job_state"] == "failed"
    assert [error["details"] for error in api.job(claimed)["errors"]] == ["closed"]


def test_a_passed_deadline_leaves_the_other_waits(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed, waits = parked(api, "any", "a", "b")
    expire(db, waits["a"])
    assert api.job(claimed)["state"] == "waiting_external"
    assert call(api, waits["b"], "resume")["job_state"] == "available"


def test_a_job_times_out_when_too_few_answers_can_still_come(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed, waits = parked(api, "all", "a", "b", backoff=AT_ONCE)
    call(api, waits["a"], "resume", "kept")
    expire(db, waits["b"])
    again = api.claim()
    assert (again["id"], again["attempt"]) == (claimed["id"], 2)
    assert again["last_error"]["kind"] == "callback_timeout"
    assert again["callback_results"]["a"]["payload"] == "kept"


def test_both_deadlines_at_once_time_the_job_out_once(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed, _ = parked(api, "any", "a", "b", backoff=AT_ONCE)
    db.execute("UPDATE towpath.waits SET deadline_at = now() WHERE job_id = %s", [claimed["id"]])
    assert api.claim()["attempt"] == 2
    assert [event["step"] for event in api.events(claimed)].count("callback_time_out") == 1


@pytest.mark.parametrize(("needed", "early", "goes_on"), [("any", "a", True), (2, "ab", True), (2, "a", False)])
def test_answers_that_came_before_the_park_count(api: Api, needed: Any, early: str, goes_on: bool) -> None:
    claimed = api.a_running_job()
    waits = opened(api, claimed, "a", "b", "c")
    for name in early:
        call(api, waits[name], "resume", name)
    answer = park(api, claimed, waits, needed)
    assert answer["parked"] is not goes_on
    assert answer["state"] == ("running" if goes_on else "waiting_external")
    assert [came["payload"] for came in answer["callbacks"]] == list(early)


def test_the_first_finishing_callback_before_the_park_counts(api: Api) -> None:
    claimed = api.a_running_job()
    waits = opened(api, claimed, "a", "b")
    call(api, waits["b"], "complete", "first")
    call(api, waits["a"], "retry", "second")
    answer = park(api, claimed, waits, "all")
    assert (answer["state"], answer["parked"]) == ("completed", False)
    assert api.job(claimed)["result"] == "first"


def test_an_attached_handler_goes_on_under_its_lease(api: Api) -> None:
    claimed, waits = parked(api, "any", "a", "b", attached=True)
    assert call(api, waits["b"], "resume", 7)["job_state"] == "running"
    seen = ok(api.get(f"/v1/jobs/{claimed['id']}/callbacks", wait_seconds=10))
    assert (seen["job_state"], seen["waiting_on"]) == ("running", [])
    assert {wait["name"]: wait["payload"] for wait in seen["waits"]} == {"a": None, "b": 7}
    assert ok(api.settle("complete", claimed))["state"] == "completed"


def test_a_handler_may_park_again_on_what_is_left(api: Api) -> None:
    claimed, waits = parked(api, "any", "a", "b", attached=True)
    call(api, waits["a"], "resume")
    again = park(api, claimed, {"b": waits["b"]}, "all")
    assert again["parked"] is True
    assert call(api, waits["b"], "complete", "done")["job_state"] == "completed"


def test_a_repeated_park_is_told_what_the_first_was(api: Api) -> None:
    claimed = api.a_running_job()
    waits = opened(api, claimed, "a", "b")
    first = park(api, claimed, waits, 2)
    again = park(api, claimed, waits, 2)
    assert (first["parked"], first["already_applied"]) == (True, False)
    assert (again["parked"], again["already_applied"]) == (True, True)


def test_a_park_on_other_waits_is_no_repeat(api: Api) -> None:
    claimed = api.a_running_job()
    waits = opened(api, claimed, "a", "b")
    park(api, claimed, {"a": waits["a"]}, "all")
    problem(api.settle("park", claimed, wait_ids=[waits["b"]["wait_id"]]), 409, "lease-lost")


@pytest.mark.parametrize(
    ("report", "pointer"),
    [
        ({}, "/wait_id"),
        ({"wait_id": "a", "wait_ids": ["b"]}, "/wait_id"),
        ({"wait_ids": ["a", "a"]}, "/wait_ids"),
        ({"wait_ids": ["a", "b"], "needed": 3}, "/needed"),
        ({"wait_ids": ["a", "b"], "needed": 0}, "/needed"),
        ({"wait_ids": ["a", "b"], "needed": "most"}, "/needed"),
        ({"wait_ids": []}, "/wait_ids"),
    ],
)
def test_a_park_that_contradicts_itself_changes_nothing(api: Api, report: JSON, pointer: str) -> None:
    claimed = api.a_running_job()
    ids = {name: wait["wait_id"] for name, wait in opened(api, claimed, "a", "b").items()}
    if "wait_id" in report:
        report = {**report, "wait_id": ids[report["wait_id"]]}
    if "wait_ids" in report:
        report = {**report, "wait_ids": [ids[name] for name in report["wait_ids"]]}
    refused = problem(api.settle("park", claimed, **report), 422, "invalid-field")
    assert refused["errors"][0]["pointer"] == pointer
    assert api.job(claimed)["state"] == "running"


def test_a_wait_that_expired_before_the_park_leaves_the_others(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed = api.a_running_job()
    waits = opened(api, claimed, "a", "b")
    expire(db, waits["a"])
    problem(api.settle("park", claimed, wait_ids=[w["wait_id"] for w in waits.values()]), 409, "wait-not-open")
    assert park(api, claimed, waits, "any")["parked"] is True


class TestAnswersStayWithTheJob:
    def test_a_new_attempt_finds_the_answer_instead_of_asking_again(self, api: Api) -> None:
        claimed, wait = api.a_parked_job()
        call(api, wait, "resume", {"paid": True})
        again = api.claim()
        found = api.open_wait(again, timeout_seconds=5)
        assert (found["wait_id"], found["state"]) == (wait["wait_id"], "resolved")
        assert found["callback"]["payload"] == {"paid": True}

    def test_a_park_on_such_an_answer_goes_straight_on(self, api: Api) -> None:
        claimed, wait = api.a_parked_job()
        call(api, wait, "resume", {"paid": True})
        again = api.claim()
        answer = ok(api.settle("park", again, wait_id=wait["wait_id"]))
        assert (answer["parked"], answer["state"]) == (False, "running")
        assert answer["callbacks"][0]["payload"] == {"paid": True}

    def test_they_survive_a_retry_of_the_worker(self, api: Api) -> None:
        claimed, wait = api.a_parked_job(backoff=AT_ONCE)
        call(api, wait, "resume", 1)
        ok(api.settle("retry", api.claim(), error={"message": "later"}))
        assert api.claim()["callback_results"]["callback"]["payload"] == 1

    def test_a_retry_from_scratch_forgets_them(self, api: Api) -> None:
        claimed, waits = parked(api, "all", "a", "b")
        call(api, waits["a"], "resume", 1)
        call(api, waits["b"], "retry")
        again = api.claim()
        assert again["callback_results"] == {}
        assert api.open_wait(again, name="a")["state"] == "open"

    def test_a_failure_is_no_answer_to_be_found_again(self, api: Api) -> None:
        claimed, wait = api.a_parked_job()
        call(api, wait, "fail")
        ok(api.post(f"/v1/jobs/{claimed['id']}/redrive"))
        assert api.open_wait(api.claim())["state"] == "open"

    def test_an_unanswered_wait_of_an_earlier_attempt_is_opened_anew(self, api: Api) -> None:
        claimed = api.a_running_job(backoff=AT_ONCE)
        old = api.open_wait(claimed)
        ok(api.settle("retry", claimed))
        new = api.open_wait(api.claim())
        assert new["wait_id"] != old["wait_id"]
        problem(api.client.post(old["urls"]["resume"]), 410, "callback-gone")

    def test_two_waits_one_after_another_in_one_handler(self, api: Api) -> None:
        claimed = api.a_running_job()
        first = api.open_wait(claimed, name="first")
        ok(api.settle("park", claimed, wait_id=first["wait_id"], attached=True))
        call(api, first, "resume", 1)
        second = api.open_wait(claimed, name="second")
        ok(api.settle("park", claimed, wait_id=second["wait_id"], attached=True))
        call(api, second, "resume", 2)
        results = api.job(claimed)["callback_results"]
        assert {name: came["payload"] for name, came in results.items()} == {"first": 1, "second": 2}
        assert ok(api.settle("complete", claimed))["attempt"] == 1
