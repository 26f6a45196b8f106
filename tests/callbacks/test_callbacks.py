"""Parking and callbacks: each wait is resolved once, early ones count, late ones are told, URLs can't be guessed."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from tests.build import JSON, Api, move, ok, problem
from tests.waiting import eventually

VERBS = ("complete", "fail", "resume", "retry")
PAYLOAD = {"paid": True, "amount": 12.50}
AFTER = {"complete": "completed", "fail": "failed", "resume": "available", "retry": "available"}


def call(api: Api, wait: JSON, verb: str, payload: Any = PAYLOAD) -> Any:
    """A callback, as a third party sends it."""
    return api.client.post(wait["urls"][verb], json=payload)


def end_wait(api: Api, db: "psycopg.Connection[Any]", wait: JSON) -> None:
    """Let the wait's deadline pass and the sweep notice."""
    db.execute("UPDATE towpath.waits SET deadline_at = now() WHERE id = %s", [wait["wait_id"]])
    eventually(lambda: ok(api.client.get(wait["urls"]["status"]))["state"] != "open")


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_does_to_a_parked_job_what_it_says(api: Api, verb: str) -> None:
    claimed, wait = api.a_parked_job()
    answer = ok(call(api, wait, verb))
    job = api.job(claimed)
    assert (answer["early"], answer["already_applied"], job["state"]) == (False, False, AFTER[verb])
    assert job["result"] == (PAYLOAD if verb == "complete" else None)
    assert [error["details"] for error in job["errors"]] == ([PAYLOAD] if verb == "fail" else [])


def test_the_plain_url_does_what_the_wait_says(api: Api) -> None:
    claimed = api.a_running_job()
    wait = api.open_wait(claimed, default_verb="complete")
    ok(api.settle("park", claimed, wait_id=wait["wait_id"]))
    assert ok(call(api, wait, "default"))["resolved_as"] == "complete"


def test_a_resumed_job_goes_on_with_the_payload_and_the_same_attempt(api: Api) -> None:
    _, wait = api.a_parked_job()
    ok(call(api, wait, "resume"))
    again = api.claim()
    assert again["attempt"] == 1
    assert again["callback_results"]["callback"]["payload"] == PAYLOAD


def test_a_job_that_a_callback_retries_starts_from_scratch(api: Api) -> None:
    _, wait = api.a_parked_job()
    ok(call(api, wait, "retry"))
    again = api.claim()
    assert (again["attempt"], again["callback_results"]) == (1, {})


def test_the_payload_outlives_the_failure_of_the_resumed_job(api: Api) -> None:
    _, wait = api.a_parked_job()
    ok(call(api, wait, "resume"))
    ok(api.settle("retry", api.claim(), delay_seconds=0))
    assert api.claim()["callback_results"]["callback"]["payload"] == PAYLOAD


@pytest.mark.parametrize("verb", VERBS)
def test_a_callback_before_the_park_counts(api: Api, verb: str) -> None:
    claimed = api.a_running_job()
    wait = api.open_wait(claimed)
    early = call(api, wait, verb)
    assert (early.status_code, early.json()["early"]) == (202, True)
    parked = ok(api.settle("park", claimed, wait_id=wait["wait_id"]))
    assert (parked["parked"], parked["callback"]["payload"]) == (False, PAYLOAD)
    # The handler is there: an early resume lets it go on.
    assert parked["state"] == ("running" if verb == "resume" else AFTER[verb])


@pytest.mark.parametrize("verb", VERBS)
def test_a_repeated_park_tells_the_same_though_a_callback_was_early(api: Api, verb: str) -> None:
    claimed = api.a_running_job()
    wait = api.open_wait(claimed)
    call(api, wait, verb)
    first = ok(api.settle("park", claimed, wait_id=wait["wait_id"]))
    again = ok(api.settle("park", claimed, wait_id=wait["wait_id"]))
    assert again == {**first, "already_applied": True}


def test_an_early_callback_of_a_crashed_attempt_goes_to_the_next(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed = api.a_running_job(backoff={"kind": "fixed", "base_seconds": 0})
    wait = api.open_wait(claimed)
    assert call(api, wait, "resume").status_code == 202
    move(db, claimed, "lease_expires_at", -3600)
    assert api.claim()["callback_results"]["callback"]["payload"] == PAYLOAD


@pytest.mark.parametrize("verb", VERBS)
def test_the_same_callback_again_gets_the_recorded_outcome(api: Api, verb: str) -> None:
    _, wait = api.a_parked_job()
    first = ok(call(api, wait, verb))
    again = ok(call(api, wait, verb))
    assert (again["already_applied"], again["resolved_at"]) == (True, first["resolved_at"])


@pytest.mark.parametrize("other", [("fail", PAYLOAD), ("complete", {"paid": False})], ids=["verb", "payload"])
def test_another_callback_afterwards_is_refused_with_what_won(api: Api, other: tuple[str, JSON]) -> None:
    claimed, wait = api.a_parked_job()
    ok(call(api, wait, "complete"))
    assert problem(call(api, wait, *other), 409, "callback-conflict")["resolved_as"] == "complete"
    assert api.job(claimed)["result"] == PAYLOAD


@pytest.mark.parametrize("verb", [*VERBS, "default", "heartbeat"])
def test_a_callback_after_the_deadline_is_gone(api: Api, db: "psycopg.Connection[Any]", verb: str) -> None:
    claimed, wait = api.a_parked_job(backoff={"kind": "fixed", "base_seconds": 3600})
    end_wait(api, db, wait)
    problem(call(api, wait, verb, {}), 410, "callback-gone")
    job = api.job(claimed)
    assert (job["state"], job["attempt"], job["errors"][-1]["kind"]) == ("retryable", 1, "callback_timeout")


@pytest.mark.parametrize("verb", VERBS)
def test_a_callback_of_a_cancelled_job_is_told_so(api: Api, verb: str) -> None:
    claimed, wait = api.a_parked_job()
    ok(api.post(f"/v1/jobs/{claimed['id']}/cancel", {}))
    assert problem(call(api, wait, verb), 410, "callback-gone")["job_state"] == "cancelled"


def test_the_wait_of_an_earlier_attempt_resolves_nothing(api: Api) -> None:
    claimed = api.a_running_job()
    old = api.open_wait(claimed)
    ok(api.settle("retry", claimed, delay_seconds=0))
    again = api.claim()
    new = api.open_wait(again)
    ok(api.settle("park", again, wait_id=new["wait_id"]))
    assert problem(call(api, old, "complete"), 410, "callback-gone")["wait_state"] == "superseded"
    assert api.job(again)["state"] == "waiting_external"


@pytest.mark.parametrize("verb", VERBS)
def test_a_url_is_good_for_its_own_verb_only(api: Api, verb: str) -> None:
    claimed, wait = api.a_parked_job()
    token = wait["urls"][verb].split("/")[-2]
    for other in {*VERBS, "heartbeat"} - {verb}:
        problem(api.client.post(f"/v1/callbacks/{token}/{other}", json={}), 404, "unknown-callback")
    problem(api.client.post(f"/v1/callbacks/{token}", json={}), 404, "unknown-callback")
    assert api.job(claimed)["state"] == "waiting_external"


def test_forged_altered_and_unknown_tokens_all_look_the_same(api: Api) -> None:
    claimed, wait = api.a_parked_job()
    _, other = api.a_parked_job()
    token, foreign = (each["urls"]["complete"].split("/")[-2] for each in (wait, other))
    tokens = [token[:at] + ("A" if token[at] != "A" else "B") + token[at + 1 :] for at in range(len(token))]
    tokens += [token[:10] + foreign[10:], foreign[:22] + token[22:], token + "A", token[:-1], str(uuid4()), "x", "%00"]
    answers = {api.client.post(f"/v1/callbacks/{each}/complete", json={}).text for each in tokens}
    assert len(answers) == 1
    assert api.job(claimed)["state"] == "waiting_external"


def test_looking_changes_nothing(api: Api) -> None:
    claimed, wait = api.a_parked_job()
    before = api.job(claimed)
    for verb, url in wait["urls"].items():
        token = url.split("/")[5]
        assert ok(api.client.get(f"/v1/callbacks/{token}"))["state"] == "open", verb
    assert api.job(claimed) == before


def test_a_callback_heartbeat_moves_the_deadline(api: Api) -> None:
    _, wait = api.a_parked_job(timeout_seconds=60)
    extended = ok(api.client.post(wait["urls"]["heartbeat"], json={"timeout_seconds": 5000}))
    assert extended["deadline_at"] > wait["deadline_at"]
    assert ok(api.client.get(wait["urls"]["status"]))["deadline_at"] == extended["deadline_at"]


def test_a_parked_job_is_not_lost_for_want_of_a_heartbeat(api: Api, db: "psycopg.Connection[Any]") -> None:
    api.enqueue(timeout_seconds=1)
    claimed = api.claim(lease_seconds=1)
    wait = api.open_wait(claimed)
    ok(api.settle("park", claimed, wait_id=wait["wait_id"], attached=True))
    db.execute("UPDATE towpath.jobs SET lease_expires_at = now() - interval '1 h' WHERE id = %s", [claimed["id"]])
    bystander = api.a_running_job()
    move(db, bystander, "lease_expires_at", -3600)
    eventually(lambda: api.job(bystander)["state"] != "running")
    assert api.job(claimed)["state"] == "waiting_external"


def test_an_attached_handler_goes_on_under_the_same_lease(api: Api) -> None:
    claimed, wait = api.a_parked_job(attached=True)
    ok(api.heartbeat(claimed))
    with ThreadPoolExecutor(1) as pool:
        path = f"/v1/jobs/{claimed['id']}/callbacks/{wait['wait_id']}"
        waiting = pool.submit(lambda: ok(api.get(path, wait_seconds=20)))
        ok(call(api, wait, "resume"))
        assert waiting.result(5)["payload"] == PAYLOAD
    assert api.job(claimed)["state"] == "running"
    ok(api.settle("complete", claimed))


def test_the_payload_goes_to_the_next_claim_when_the_attached_handler_has_died(
    api: Api, db: "psycopg.Connection[Any]"
) -> None:
    claimed, wait = api.a_parked_job(attached=True)
    move(db, claimed, "lease_expires_at", -3600)
    ok(call(api, wait, "resume"))
    again = api.claim()
    assert (again["attempt"], again["callback_results"]["callback"]["payload"]) == (1, PAYLOAD)


@pytest.mark.parametrize("payload", [None, 0, "text", [1], {"a": {"b": 2**70}}], ids=str)
def test_any_json_value_is_a_payload(api: Api, payload: Any) -> None:
    claimed, wait = api.a_parked_job()
    ok(api.client.post(wait["urls"]["complete"], json=payload))
    assert api.job(claimed)["result"] == payload


def test_no_body_is_a_payload_too(api: Api) -> None:
    claimed, wait = api.a_parked_job()
    ok(api.client.post(wait["urls"]["complete"]))
    assert api.job(claimed)["state"] == "completed"


@pytest.mark.parametrize("seconds", [0, -1, 0.5, 1e9, "soon"])
def test_an_absurd_time_out_is_refused(api: Api, seconds: Any) -> None:
    claimed = api.a_running_job()
    refusal = problem(
        api.post(f"/v1/jobs/{claimed['id']}/callbacks", {"lease": claimed["lease"], "timeout_seconds": seconds}),
        422,
        "invalid-field",
    )
    assert refusal["errors"][0]["pointer"] == "/timeout_seconds"


def test_a_missing_time_out_is_finite(api: Api) -> None:
    claimed = api.a_running_job()
    wait = ok(api.post(f"/v1/jobs/{claimed['id']}/callbacks", {"lease": claimed["lease"]}))
    assert wait["deadline_at"] > claimed["lease_expires_at"]


def test_opening_a_wait_again_returns_the_same(api: Api) -> None:
    claimed = api.a_running_job()
    assert api.open_wait(claimed, name="pay") == api.open_wait(claimed, name="pay")
    body = {"lease": claimed["lease"], "name": "pay", "timeout_seconds": 5}
    problem(api.post(f"/v1/jobs/{claimed['id']}/callbacks", body), 409, "wait-name-taken")


def test_parking_needs_a_wait_of_ones_own(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed = api.a_running_job()
    other = api.open_wait(api.a_running_job())
    problem(api.settle("park", claimed, wait_id=other["wait_id"]), 404, "unknown-wait")
    over = api.open_wait(claimed)
    end_wait(api, db, over)
    problem(api.settle("park", claimed, wait_id=over["wait_id"]), 409, "wait-not-open")
    assert api.job(claimed)["state"] == "running"


def test_the_job_shows_its_waits(api: Api) -> None:
    claimed, wait = api.a_parked_job()
    ok(call(api, wait, "resume"))
    (shown,) = api.job(claimed)["waits"]
    assert (shown["wait_id"], shown["state"], shown["resolved_as"]) == (wait["wait_id"], "resolved", "resume")
