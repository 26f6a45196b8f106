"""Dead letters: every job that gave up is kept with its reason, can be looked at, run again, or thrown away."""

from typing import Any

import psycopg
import pytest

from app.lifecycle import State
from tests.build import JSON, Api, move, ok, problem
from tests.waiting import eventually

UNKNOWN = "018f0000-0000-7000-8000-000000000000"


def dead_letters(api: Api, **filters: Any) -> list[JSON]:
    """The first page of the test's queue."""
    return ok(api.get("/v1/dead-letters", **{"queue": api.queue, **filters}))["dead_letters"]  # type: ignore[no-any-return]


def a_dead_letter(api: Api, **job: Any) -> JSON:
    """A job that its worker failed."""
    claimed = api.a_running_job(**job)
    ok(api.settle("fail", claimed, error={"message": "no way", "kind": "Hopeless"}))
    return claimed


def fails(api: Api, db: "psycopg.Connection[Any]", how: str) -> JSON:
    """A job with one attempt that fails in this way."""
    if how.startswith("callback"):
        claimed, wait = api.a_parked_job(max_attempts=1)
        if how == "callback_failed":
            ok(api.post(wait["urls"]["fail"], {"why": "declined"}))
        else:
            db.execute("UPDATE towpath.waits SET deadline_at = now() WHERE id = %s", [wait["wait_id"]])
        return claimed
    claimed = api.a_running_job(max_attempts=1)
    match how:
        case "failed":
            ok(api.settle("fail", claimed))
        case "attempts_exhausted":
            ok(api.settle("retry", claimed, delay_seconds=0))
        case "lease_expired":
            move(db, claimed, "lease_expires_at", -3600)
        case "deadline_exceeded":
            move(db, claimed, "deadline_at", -7200)
    return claimed


WAYS_TO_FAIL = (
    "failed",
    "attempts_exhausted",
    "lease_expired",
    "deadline_exceeded",
    "callback_failed",
    "callback_timeout",
)


@pytest.mark.parametrize("how", WAYS_TO_FAIL)
def test_every_way_to_fail_has_its_own_reason(api: Api, db: "psycopg.Connection[Any]", how: str) -> None:
    job = fails(api, db, how)
    eventually(lambda: api.job(job)["state"] == "failed")
    (letter,) = dead_letters(api)
    assert (letter["id"], letter["dead_letter_reason"]) == (job["id"], how)


@pytest.mark.parametrize("state", sorted(set(State) - {State.FAILED}))
def test_a_job_that_did_not_fail_is_no_dead_letter(api: Api, state: str) -> None:
    job = api.a_job_in(state)
    assert dead_letters(api) == []
    problem(api.get(f"/v1/dead-letters/{job['id']}"), 404, "unknown-dead-letter")


def test_a_dead_letter_tells_all_about_the_job_and_why_it_gave_up(api: Api) -> None:
    claimed = api.a_running_job(args={"order": 7}, max_attempts=2)
    ok(api.settle("retry", claimed, error={"message": "first", "kind": "Busy"}, delay_seconds=0))
    ok(api.settle("fail", api.claim(), error={"message": "no way", "kind": "Hopeless", "details": [1]}))
    letter = ok(api.get(f"/v1/dead-letters/{claimed['id']}"))
    assert (letter["args"], letter["attempt"], letter["errors_total"]) == ({"order": 7}, 2, 2)
    told = [(error["message"], error["kind"], error["attempt"], error["worker"]) for error in letter["errors"]]
    assert told == [("first", "Busy", 1, "worker-1"), ("no way", "Hopeless", 2, "worker-1")]
    job = api.job(claimed)
    assert letter == {name: job[name] for name in letter}


def test_an_unknown_dead_letter_is_404(api: Api) -> None:
    problem(api.get(f"/v1/dead-letters/{UNKNOWN}"), 404, "unknown-dead-letter")


def test_the_newest_job_is_listed_first_and_kind_is_a_filter(api: Api) -> None:
    first, second = a_dead_letter(api, kind="a")["id"], a_dead_letter(api, kind="b")["id"]
    assert [letter["id"] for letter in dead_letters(api)] == [second, first]
    assert [letter["id"] for letter in dead_letters(api, kind="a")] == [first]


def test_other_queues_are_listed_without_the_filter(api: Api) -> None:
    job = a_dead_letter(api)
    assert job["id"] in {letter["id"] for letter in ok(api.get("/v1/dead-letters", limit=200))["dead_letters"]}


def test_pages_have_every_dead_letter_once_while_more_are_added(api: Api) -> None:
    before = [a_dead_letter(api)["id"] for _ in range(7)]
    seen: list[str] = []
    cursor: JSON = {}
    while True:
        page = ok(api.get("/v1/dead-letters", queue=api.queue, limit=3, **cursor))
        seen += [letter["id"] for letter in page["dead_letters"]]
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
        a_dead_letter(api)
    assert seen == before[::-1]


# Redrive


def test_a_redriven_dead_letter_runs_again_and_is_listed_no_more(api: Api) -> None:
    job = a_dead_letter(api)
    answer = ok(api.post(f"/v1/dead-letters/{job['id']}/redrive"))
    assert (answer["state"], answer["attempt"], answer["already_applied"]) == ("available", 0, False)
    assert dead_letters(api) == []
    again = api.claim()
    assert (again["id"], again["attempt"], again["last_error"]["message"]) == (job["id"], 1, "no way")


def test_a_redriven_job_that_fails_again_is_listed_again_with_both_errors(api: Api) -> None:
    job = a_dead_letter(api)
    ok(api.post(f"/v1/dead-letters/{job['id']}/redrive"))
    ok(api.settle("fail", api.claim()))
    (letter,) = dead_letters(api)
    assert (letter["id"], letter["errors_total"]) == (job["id"], 2)


def test_a_repeated_redrive_changes_nothing(api: Api) -> None:
    job = a_dead_letter(api)
    ok(api.post(f"/v1/dead-letters/{job['id']}/redrive"))
    before = api.job(job)
    assert ok(api.post(f"/v1/dead-letters/{job['id']}/redrive"))["already_applied"] is True
    assert api.job(job) == before


def test_an_unknown_dead_letter_cannot_be_redriven(api: Api) -> None:
    problem(api.post(f"/v1/dead-letters/{UNKNOWN}/redrive"), 404, "unknown-job")


# Discard


def test_a_discarded_dead_letter_is_gone_with_its_waits_and_events(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed, wait = api.a_parked_job()
    ok(api.post(wait["urls"]["fail"], {}))
    assert api.client.delete(f"/v1/dead-letters/{claimed['id']}").status_code == 204
    assert dead_letters(api) == []
    problem(api.get(f"/v1/jobs/{claimed['id']}"), 404, "unknown-job")
    problem(api.get(f"/v1/jobs/{claimed['id']}/events"), 404, "unknown-job")
    problem(api.get(wait["urls"]["status"]), 404, "unknown-callback")
    for table in ("waits", "job_events"):
        assert db.execute(f"SELECT FROM towpath.{table} WHERE job_id = %s", [claimed["id"]]).rowcount == 0


def test_discarding_one_leaves_the_others(api: Api) -> None:
    gone, stays = a_dead_letter(api)["id"], a_dead_letter(api)["id"]
    api.client.delete(f"/v1/dead-letters/{gone}")
    assert [letter["id"] for letter in dead_letters(api)] == [stays]


@pytest.mark.parametrize("state", sorted(set(State) - {State.FAILED}))
def test_only_a_dead_letter_can_be_discarded(api: Api, state: str) -> None:
    job = api.a_job_in(state)
    problem(api.client.delete(f"/v1/dead-letters/{job['id']}"), 404, "unknown-dead-letter")
    assert api.job(job)["state"] == state


def test_a_repeated_discard_is_404(api: Api) -> None:
    path = f"/v1/dead-letters/{a_dead_letter(api)['id']}"
    assert [api.client.delete(path).status_code for _ in range(2)] == [204, 404]


def test_a_failed_job_of_a_queue_that_keeps_none_is_no_dead_letter(api: Api) -> None:
    ok(api.client.put(f"/v1/queues/{api.queue}", json={"keep_dead_letters": False}))
    job = a_dead_letter(api)
    assert dead_letters(api) == []
    problem(api.get(f"/v1/dead-letters/{job['id']}"), 404, "unknown-dead-letter")
    assert api.job(job)["state"] == "failed"


def test_a_dead_letter_stays_one_when_its_queue_keeps_no_more(api: Api) -> None:
    job = a_dead_letter(api)
    ok(api.client.put(f"/v1/queues/{api.queue}", json={"keep_dead_letters": False}))
    assert [letter["id"] for letter in dead_letters(api)] == [job["id"]]


def test_only_a_dead_letter_is_redriven_as_one(api: Api) -> None:
    cancelled = api.a_job_in("cancelled")
    problem(api.post(f"/v1/dead-letters/{cancelled['id']}/redrive"), 404, "unknown-dead-letter")
    dead = api.a_job_in("failed")
    first = ok(api.post(f"/v1/dead-letters/{dead['id']}/redrive"))
    again = ok(api.post(f"/v1/dead-letters/{dead['id']}/redrive"))
    assert (first["already_applied"], again["already_applied"]) == (False, True)
    assert api.job(cancelled)["state"] == "cancelled"
