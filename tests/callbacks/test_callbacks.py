"""Parking and callbacks: each wait is resolved once, early ones count, late ones are told, URLs can't be guessed."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import httpx
import psycopg
import pytest

from app.callbacks.tokens import Capability, callback_token
from app.signing import Signer, SigningKey
from tests.build import JSON, Api, client_of, move, ok, problem
from tests.conftest import SIGNING_KEY
from tests.servers import ServiceThread
from tests.waiting import eventually

VERBS = ("complete", "fail", "resume", "retry")
PAYLOAD = {"paid": True, "amount": 12.50}
AFTER = {"complete": "completed", "fail": "failed", "resume": "available", "retry": "available"}
AT_ONCE = {"kind": "fixed", "base_seconds": 0}
LATER = {"kind": "fixed", "base_seconds": 3600}


def call(api: Api, wait: JSON, verb: str, payload: Any = PAYLOAD) -> httpx.Response:
    """A callback, as a third party sends it."""
    return api.client.post(wait["urls"][verb], json=payload)


def token_of(wait: JSON, verb: str) -> str:
    return str(wait["urls"][verb].split("/")[5])


def stored(db: "psycopg.Connection[Any]", job: JSON) -> Any:
    """All that is stored of a job: its row, its waits, its history."""
    return [
        db.execute(f"SELECT t.* FROM towpath.{table} AS t WHERE {key} = %s ORDER BY id", [job["id"]]).fetchall()
        for table, key in (("jobs", "id"), ("waits", "job_id"), ("job_events", "job_id"))
    ]


def end_wait(db: "psycopg.Connection[Any]", wait: JSON) -> None:
    """Let the wait's deadline pass and the sweep notice."""
    db.execute("UPDATE towpath.waits SET deadline_at = now() WHERE id = %s", [wait["wait_id"]])
    closed = "SELECT count(*) FROM towpath.waits WHERE id = %s AND state = 'expired'"
    eventually(lambda: db.execute(closed, [wait["wait_id"]]).fetchone() == (1,))


def seconds_between(earlier: str, later: str) -> float:
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


# What each verb does


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_does_to_a_parked_job_what_it_says(api: Api, verb: str) -> None:
    claimed, wait = api.a_parked_job()
    answer = ok(call(api, wait, verb))
    job = api.job(claimed)
    assert (answer["early"], answer["already_applied"], answer["resolved_as"]) == (False, False, verb)
    assert (answer["job_state"], job["state"]) == (AFTER[verb], AFTER[verb])
    assert job["result"] == (PAYLOAD if verb == "complete" else None)
    assert [(error["kind"], error["details"]) for error in job["errors"]] == (
        [("callback_failed", PAYLOAD)] if verb == "fail" else []
    )


@pytest.mark.parametrize("verb", VERBS)
def test_the_plain_url_does_what_the_wait_says(api: Api, verb: str) -> None:
    claimed = api.a_running_job()
    wait = api.open_wait(claimed, default_verb=verb)
    ok(api.settle("park", claimed, wait_id=wait["wait_id"]))
    answer = ok(call(api, wait, "default"))
    assert (answer["resolved_as"], answer["job_state"]) == (verb, AFTER[verb])


def test_a_job_that_a_callback_failed_is_a_dead_letter(api: Api) -> None:
    claimed, wait = api.a_parked_job(max_attempts=5)
    ok(call(api, wait, "fail"))
    assert api.job(claimed)["dead_letter_reason"] == "callback_failed"


def test_a_resumed_job_goes_on_with_the_payload_and_the_same_attempt(api: Api) -> None:
    api.enqueue(max_attempts=5)
    ok(api.settle("retry", api.claim(), delay_seconds=0))
    claimed = api.claim()
    wait = api.open_wait(claimed)
    ok(api.settle("park", claimed, wait_id=wait["wait_id"]))
    ok(call(api, wait, "resume"))
    again = api.claim()
    assert again["attempt"] == 2
    assert {name: again["callback_results"]["callback"][name] for name in ("wait_id", "verb", "payload")} == {
        "wait_id": wait["wait_id"], "verb": "resume", "payload": PAYLOAD,
    }  # fmt: skip


def test_a_job_on_its_last_attempt_can_be_resumed(api: Api) -> None:
    _, wait = api.a_parked_job(max_attempts=1)
    ok(call(api, wait, "resume"))
    again = api.claim()
    assert (again["attempt"], again["last_attempt"]) == (1, True)


def test_a_job_that_a_callback_retries_starts_from_scratch(api: Api) -> None:
    api.enqueue(max_attempts=5)
    ok(api.settle("retry", api.claim(), delay_seconds=0))
    claimed = api.claim()
    wait = api.open_wait(claimed)
    ok(api.settle("park", claimed, wait_id=wait["wait_id"]))
    ok(call(api, wait, "retry"))
    again = api.claim()
    assert (again["attempt"], again["callback_results"]) == (1, {})


@pytest.mark.parametrize("ends", ["retry", "snooze", "release", "lost lease"])
def test_the_payload_outlives_the_end_of_the_resumed_attempt(
    api: Api, db: "psycopg.Connection[Any]", ends: str
) -> None:
    _, wait = api.a_parked_job(backoff=AT_ONCE)
    ok(call(api, wait, "resume"))
    resumed = api.claim()
    if ends == "lost lease":
        move(db, resumed, "lease_expires_at", -3600)
    else:
        ok(api.settle(ends, resumed, **({} if ends == "release" else {"delay_seconds": 0})))
    assert api.claim()["callback_results"]["callback"]["payload"] == PAYLOAD


def test_a_job_can_park_again_and_keeps_what_each_wait_brought(api: Api) -> None:
    claimed = api.a_running_job()
    for name in ("first", "second"):
        wait = api.open_wait(claimed, name=name)
        ok(api.settle("park", claimed, wait_id=wait["wait_id"]))
        ok(call(api, wait, "resume", name))
        claimed = api.claim()
    assert {name: found["payload"] for name, found in claimed["callback_results"].items()} == {
        "first": "first",
        "second": "second",
    }


# Before the park


@pytest.mark.parametrize("verb", VERBS)
def test_a_callback_before_the_park_counts(api: Api, verb: str) -> None:
    claimed = api.a_running_job()
    wait = api.open_wait(claimed)
    early = call(api, wait, verb)
    assert (early.status_code, early.json()["early"], early.json()["job_state"]) == (202, True, "running")
    parked = ok(api.settle("park", claimed, wait_id=wait["wait_id"]))
    assert (parked["parked"], [(came["verb"], came["payload"]) for came in parked["callbacks"]]) == (
        False, [(verb, PAYLOAD)],
    )  # fmt: skip
    # The handler is there: an early resume lets it go on.
    after = "running" if verb == "resume" else AFTER[verb]
    assert (parked["state"], api.job(claimed)["state"]) == (after, after)


def test_an_early_resume_leaves_the_handler_its_lease(api: Api) -> None:
    claimed = api.a_running_job()
    wait = api.open_wait(claimed)
    call(api, wait, "resume")
    ok(api.settle("park", claimed, wait_id=wait["wait_id"]))
    ok(api.heartbeat(claimed))
    ok(api.settle("complete", claimed, result=1))


@pytest.mark.parametrize("verb", VERBS)
def test_a_repeated_park_tells_the_same_though_a_callback_was_early(api: Api, verb: str) -> None:
    claimed = api.a_running_job()
    wait = api.open_wait(claimed)
    call(api, wait, verb)
    first = ok(api.settle("park", claimed, wait_id=wait["wait_id"]))
    again = ok(api.settle("park", claimed, wait_id=wait["wait_id"]))
    # A park that finds its answer changes nothing, so there is nothing that could have been applied before.
    assert again == {**first, "already_applied": verb != "resume"}


@pytest.mark.parametrize("verb", VERBS)
def test_an_early_callback_can_be_repeated_before_and_after_the_park(api: Api, verb: str) -> None:
    claimed = api.a_running_job()
    wait = api.open_wait(claimed)
    first = ok(call(api, wait, verb))
    answers = [call(api, wait, verb)]
    ok(api.settle("park", claimed, wait_id=wait["wait_id"]))
    answers.append(call(api, wait, verb))
    assert [answer.status_code for answer in answers] == [200, 200]
    assert {(a.json()["already_applied"], a.json()["resolved_at"]) for a in answers} == {(True, first["resolved_at"])}


def test_an_early_callback_of_a_crashed_attempt_goes_to_the_next(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed = api.a_running_job(backoff=AT_ONCE)
    wait = api.open_wait(claimed)
    assert call(api, wait, "resume").status_code == 202
    move(db, claimed, "lease_expires_at", -3600)
    assert api.claim()["callback_results"]["callback"]["payload"] == PAYLOAD


# Again, otherwise, too late


@pytest.mark.parametrize("verb", VERBS)
def test_the_same_callback_again_gets_the_recorded_outcome(api: Api, db: "psycopg.Connection[Any]", verb: str) -> None:
    claimed, wait = api.a_parked_job()
    first = ok(call(api, wait, verb))
    before = stored(db, claimed)
    again = ok(call(api, wait, verb))
    assert (again["already_applied"], again["resolved_at"]) == (True, first["resolved_at"])
    assert stored(db, claimed) == before


def test_the_same_callback_again_is_a_success_though_the_job_has_moved_on(api: Api) -> None:
    _, wait = api.a_parked_job()
    ok(call(api, wait, "resume"))
    ok(api.settle("complete", api.claim()))
    again = ok(call(api, wait, "resume"))
    assert (again["already_applied"], again["job_state"]) == (True, "completed")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("other", [*VERBS, "another payload", "heartbeat"])
def test_another_callback_afterwards_is_refused_with_what_won(
    api: Api, db: "psycopg.Connection[Any]", verb: str, other: str
) -> None:
    if verb == other:
        return
    claimed, wait = api.a_parked_job()
    ok(call(api, wait, verb))
    before = stored(db, claimed)
    if other == "another payload":
        refused = call(api, wait, verb, {"paid": False})
    else:
        refused = call(api, wait, other, {} if other == "heartbeat" else PAYLOAD)
    refusal = problem(refused, 409, "callback-conflict")
    assert (refusal["resolved_as"], refusal["job_state"]) == (verb, AFTER[verb])
    assert stored(db, claimed) == before


@pytest.mark.parametrize("verb", [*VERBS, "default", "heartbeat"])
def test_a_callback_after_the_deadline_is_gone(api: Api, db: "psycopg.Connection[Any]", verb: str) -> None:
    claimed, wait = api.a_parked_job(backoff=LATER)
    end_wait(db, wait)
    before = stored(db, claimed)
    refusal = problem(call(api, wait, verb, {}), 410, "callback-gone")
    assert (refusal["wait_state"], refusal["job_state"]) == ("expired", "retryable")
    assert stored(db, claimed) == before


@pytest.mark.parametrize("verb", [*VERBS, "default", "heartbeat"])
def test_a_callback_of_a_cancelled_job_is_gone(api: Api, db: "psycopg.Connection[Any]", verb: str) -> None:
    claimed, wait = api.a_parked_job()
    ok(api.post(f"/v1/jobs/{claimed['id']}/cancel", {}))
    before = stored(db, claimed)
    refusal = problem(call(api, wait, verb, {}), 410, "callback-gone")
    assert (refusal["job_state"], "cancelled" in refusal["detail"]) == ("cancelled", True)
    assert stored(db, claimed) == before


@pytest.mark.parametrize("verb", [*VERBS, "default", "heartbeat"])
def test_the_wait_of_an_earlier_attempt_resolves_nothing(api: Api, db: "psycopg.Connection[Any]", verb: str) -> None:
    claimed = api.a_running_job()
    old = api.open_wait(claimed)
    ok(api.settle("retry", claimed, delay_seconds=0))
    again = api.claim()
    new = api.open_wait(again)
    ok(api.settle("park", again, wait_id=new["wait_id"]))
    before = stored(db, again)
    assert problem(call(api, old, verb, {}), 410, "callback-gone")["wait_state"] == "superseded"
    assert stored(db, again) == before


def test_a_wait_that_the_job_did_not_park_on_resolves_nothing_once_it_parked_on_another(api: Api) -> None:
    claimed = api.a_running_job()
    other, chosen = api.open_wait(claimed, name="other"), api.open_wait(claimed, name="chosen")
    ok(api.settle("park", claimed, wait_id=chosen["wait_id"]))
    problem(call(api, other, "complete"), 410, "callback-gone")
    assert api.job(claimed)["state"] == "waiting_external"


# The deadline


def test_a_wait_that_is_over_counts_as_a_failed_attempt(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed, wait = api.a_parked_job(backoff=LATER)
    end_wait(db, wait)
    job = api.job(claimed)
    assert (job["state"], job["attempt"], [error["kind"] for error in job["errors"]]) == (
        "retryable", 1, ["callback_timeout"],
    )  # fmt: skip


def test_a_wait_that_is_over_fails_a_job_without_attempts_left(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed, wait = api.a_parked_job(max_attempts=1)
    end_wait(db, wait)
    job = api.job(claimed)
    assert (job["state"], job["dead_letter_reason"]) == ("failed", "callback_timeout")


def test_a_wait_nobody_parked_on_is_closed_at_its_deadline(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed = api.a_running_job()
    wait = api.open_wait(claimed)
    end_wait(db, wait)
    assert api.job(claimed)["state"] == "running"
    problem(api.settle("park", claimed, wait_id=wait["wait_id"]), 409, "wait-not-open")


def test_a_callback_heartbeat_moves_the_deadline(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed, wait = api.a_parked_job(timeout_seconds=60)
    bystander = api.a_parked_job(timeout_seconds=60)[1]
    for each in (wait, bystander):
        db.execute("UPDATE towpath.waits SET deadline_at = now() + interval '1 s' WHERE id = %s", [each["wait_id"]])
    extended = ok(api.client.post(wait["urls"]["heartbeat"], json={"timeout_seconds": 5000}))
    assert seconds_between(wait["deadline_at"], extended["deadline_at"]) > 4900
    # The other one's deadline, which was the same, passes.
    eventually(lambda: ok(api.client.get(bystander["urls"]["status"]))["state"] == "expired")
    assert api.job(claimed)["state"] == "waiting_external"


@pytest.mark.parametrize("send", [{}, {"json": {}}, {"json": {"timeout_seconds": None}}], ids=str)
def test_a_callback_heartbeat_without_a_time_goes_on_as_long_as_at_first(
    api: Api, db: "psycopg.Connection[Any]", send: JSON
) -> None:
    _, wait = api.a_parked_job(timeout_seconds=500)
    db.execute("UPDATE towpath.waits SET deadline_at = deadline_at - interval '400 s' WHERE id = %s", [wait["wait_id"]])
    extended = ok(api.client.post(wait["urls"]["heartbeat"], **send))
    assert 0 <= seconds_between(wait["deadline_at"], extended["deadline_at"]) < 60


@pytest.mark.parametrize("seconds", [0, -1, 0.5, 31_536_001, 1e9, "soon"])
def test_an_absurd_time_out_is_refused(api: Api, seconds: Any) -> None:
    claimed = api.a_running_job()
    body = {"lease": claimed["lease"], "timeout_seconds": seconds}
    refusals = [
        problem(api.post(f"/v1/jobs/{claimed['id']}/callbacks", body), 422, "invalid-field"),
        problem(
            api.client.post(api.open_wait(claimed)["urls"]["heartbeat"], json={"timeout_seconds": seconds}),
            422,
            "invalid-field",
        ),
    ]
    assert [refusal["errors"][0]["pointer"] for refusal in refusals] == ["/timeout_seconds"] * 2


def test_a_missing_time_out_is_a_day(api: Api) -> None:
    claimed = api.a_running_job()
    wait = api.open_wait(claimed)
    assert 86_400 - 60 < seconds_between(api.job(claimed)["claimed_at"], wait["deadline_at"]) < 86_400 + 60


@pytest.mark.parametrize("seconds", [1, 31_536_000])
def test_the_shortest_and_the_longest_time_out_are_kept(api: Api, seconds: int) -> None:
    claimed = api.a_running_job()
    wait = api.open_wait(claimed, timeout_seconds=seconds)
    (shown,) = api.job(claimed)["waits"]
    assert seconds_between(shown["created_at"], wait["deadline_at"]) == seconds


@pytest.mark.parametrize("attached", [True, False])
def test_a_parked_job_is_not_lost_for_want_of_heartbeats_or_time(
    api: Api, db: "psycopg.Connection[Any]", attached: bool
) -> None:
    api.enqueue(timeout_seconds=1)
    claimed = api.claim(lease_seconds=1)
    wait = api.open_wait(claimed)
    ok(api.settle("park", claimed, wait_id=wait["wait_id"], attached=attached))
    if attached:
        move(db, claimed, "lease_expires_at", -3600)
    overdue, late = api.a_running_job(), api.a_running_job()
    move(db, overdue, "lease_expires_at", -3600)
    move(db, late, "deadline_at", -7200)
    # Both sweeps have passed over the queue when these two are gone.
    eventually(lambda: api.job(overdue)["state"] == api.job(late)["state"] == "retryable")
    assert (api.job(claimed)["state"], api.job(claimed)["attempt"]) == ("waiting_external", 1)
    ok(call(api, wait, "resume"))


# URLs


@pytest.mark.parametrize("verb", [*VERBS, "default", "heartbeat", "status"])
def test_a_url_is_good_for_its_own_verb_only(api: Api, db: "psycopg.Connection[Any]", verb: str) -> None:
    claimed, wait = api.a_parked_job()
    before = stored(db, claimed)
    paths = {each: f"/{each}" for each in (*VERBS, "heartbeat")} | {"default": ""}
    for other in set(paths) - {verb}:
        answer = api.client.post(f"/v1/callbacks/{token_of(wait, verb)}{paths[other]}", json={})
        problem(answer, 404, "unknown-callback")
    assert stored(db, claimed) == before


def test_forged_altered_foreign_and_unknown_tokens_all_look_the_same(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed, wait = api.a_parked_job()
    _, other = api.a_parked_job()
    token, others = token_of(wait, "complete"), token_of(other, "complete")
    genuine, foreign = (Signer((SigningKey(key.encode()),)) for key in (SIGNING_KEY, "another " + SIGNING_KEY))
    assert token == callback_token(genuine, Capability(UUID(wait["wait_id"]), 0), "complete")
    tokens = {
        **{f"altered at {at}": token[:at] + other_character(token[at]) + token[at + 1 :] for at in range(len(token))},
        "foreign": callback_token(foreign, Capability(UUID(wait["wait_id"]), 0), "complete"),
        "unknown wait": callback_token(genuine, Capability(uuid4(), 0), "complete"),
        "other version": callback_token(genuine, Capability(UUID(wait["wait_id"]), 1), "complete"),
        "head of one, tail of another": token[:22] + others[22:],
        "longer": token + "A",
        "padded": token + "=",
        "shorter": token[:-1],
        "a lease": claimed["lease"],
        "an id": wait["wait_id"],
        "no text": "%00",
    }
    before = stored(db, claimed)
    answers = {name: api.client.post(f"/v1/callbacks/{each}/complete", json={}) for name, each in tokens.items()}
    problem(answers["unknown wait"], 404, "unknown-callback")
    assert {name: answer.text for name, answer in answers.items()} == dict.fromkeys(
        tokens, answers["unknown wait"].text
    )
    assert stored(db, claimed) == before


def other_character(character: str) -> str:
    return "A" if character != "A" else "B"


def test_altered_and_unknown_tokens_show_no_status(api: Api) -> None:
    _, wait = api.a_parked_job()
    token = token_of(wait, "status")
    altered = [token[:at] + other_character(token[at]) + token[at + 1 :] for at in range(0, len(token), 7)]
    answers = {api.client.get(f"/v1/callbacks/{each}").text for each in [*altered, "x", str(uuid4())]}
    assert len(answers) == 1
    problem(api.client.get("/v1/callbacks/x"), 404, "unknown-callback")


def test_looking_changes_nothing(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed, wait = api.a_parked_job()
    before = stored(db, claimed)
    for verb in wait["urls"]:
        assert ok(api.client.get(f"/v1/callbacks/{token_of(wait, verb)}"))["state"] == "open"
    assert stored(db, claimed) == before


@pytest.mark.parametrize("verb", [*VERBS, "heartbeat"])
def test_opening_the_link_of_a_verb_does_nothing(api: Api, db: "psycopg.Connection[Any]", verb: str) -> None:
    claimed, wait = api.a_parked_job()
    before = stored(db, claimed)
    assert api.client.get(wait["urls"][verb]).status_code == (405 if verb == "heartbeat" else 200)
    assert stored(db, claimed) == before


# Attached handlers


def test_an_attached_handler_goes_on_under_the_same_lease(api: Api) -> None:
    claimed, wait = api.a_parked_job(attached=True)
    ok(api.heartbeat(claimed))
    assert ok(call(api, wait, "resume"))["job_state"] == "running"
    job = api.job(claimed)
    assert (job["state"], job["attempt"], job["deadline_at"] is not None) == ("running", 1, True)
    ok(api.settle("complete", claimed))


@contextmanager
def a_waiting_handler(api: Api, db: "psycopg.Connection[Any]", claimed: JSON, wait: JSON) -> Iterator["Future[JSON]"]:
    """A long poll of the wait that has had its look; the future is its answer."""
    (now,) = db.execute("SELECT clock_timestamp()").fetchone() or (None,)
    # While somebody waits, the process asks for what was resolved elsewhere, a few times a second.
    asked = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query_start > %s"
        " AND application_name = 'towpath hot' AND query LIKE 'SELECT w.id FROM towpath.waits%%'"
    )
    with ThreadPoolExecutor(1) as pool:
        path = f"/v1/jobs/{claimed['id']}/callbacks/{wait['wait_id']}"
        waiting = pool.submit(lambda: ok(api.get(path, wait_seconds=30)))
        eventually(lambda: db.execute(asked, [now]).fetchone() != (0,))
        yield waiting


@pytest.mark.parametrize("verb", VERBS)
def test_a_handler_that_waits_for_the_callback_is_answered_at_once(
    api: Api, db: "psycopg.Connection[Any]", verb: str
) -> None:
    claimed, wait = api.a_parked_job(attached=True)
    with a_waiting_handler(api, db, claimed, wait) as waiting:
        ok(call(api, wait, verb))
        found = waiting.result(1)
    assert (found["state"], found["resolved_as"], found["payload"]) == ("resolved", verb, PAYLOAD)


def test_a_handler_that_waits_hears_of_a_callback_that_came_elsewhere(
    api: Api, db: "psycopg.Connection[Any]", other_service: ServiceThread
) -> None:
    claimed, wait = api.a_parked_job(attached=True)
    with a_waiting_handler(api, db, claimed, wait) as waiting, client_of(other_service.url) as elsewhere:
        ok(elsewhere.post(f"/v1/callbacks/{token_of(wait, 'resume')}/resume", json=PAYLOAD))
        assert waiting.result(2)["payload"] == PAYLOAD


@pytest.mark.parametrize("over", ["deadline", "cancel"])
def test_a_handler_that_waits_is_told_when_nothing_will_come(
    api: Api, db: "psycopg.Connection[Any]", over: str
) -> None:
    claimed, wait = api.a_parked_job(attached=True, backoff=LATER)
    with a_waiting_handler(api, db, claimed, wait) as waiting:
        if over == "deadline":
            end_wait(db, wait)
        else:
            ok(api.post(f"/v1/jobs/{claimed['id']}/cancel", {}))
        found = waiting.result(2)
    assert (found["state"], found["job_state"]) == (
        ("expired", "retryable") if over == "deadline" else ("superseded", "cancelled")
    )


def test_a_handler_that_waits_long_enough_is_told_that_the_wait_is_still_open(api: Api) -> None:
    claimed, wait = api.a_parked_job(attached=True)
    found = ok(api.get(f"/v1/jobs/{claimed['id']}/callbacks/{wait['wait_id']}", wait_seconds=0.2))
    assert (found["state"], found["payload"]) == ("open", None)


def test_the_payload_goes_to_the_next_claim_when_the_attached_handler_has_died(
    api: Api, db: "psycopg.Connection[Any]"
) -> None:
    claimed, wait = api.a_parked_job(attached=True)
    move(db, claimed, "lease_expires_at", -3600)
    assert ok(call(api, wait, "resume"))["job_state"] == "available"
    again = api.claim()
    assert (again["attempt"], again["callback_results"]["callback"]["payload"]) == (1, PAYLOAD)
    problem(api.settle("complete", claimed), 409, "lease-lost")


def test_the_payload_goes_to_the_next_claim_when_the_handler_dies_after_the_resume(
    api: Api, db: "psycopg.Connection[Any]"
) -> None:
    claimed, wait = api.a_parked_job(attached=True, backoff=AT_ONCE)
    assert ok(call(api, wait, "resume"))["job_state"] == "running"
    move(db, claimed, "lease_expires_at", -3600)
    again = api.claim()
    assert (again["attempt"], again["callback_results"]["callback"]["payload"]) == (2, PAYLOAD)


# Payloads


@pytest.mark.parametrize("payload", [None, False, 0, "", "text", [1], {"a": {"b": 2**70}}], ids=repr)
def test_any_json_value_is_a_payload(api: Api, payload: Any) -> None:
    _, wait = api.a_parked_job()
    # Not `json=`: the client takes None for no body.
    body = httpx.Request("POST", "http://x", json=payload).read() if payload is not None else b"null"
    ok(api.client.post(wait["urls"]["resume"], content=body, headers={"content-type": "application/json"}))
    assert api.claim()["callback_results"]["callback"]["payload"] == payload


@pytest.mark.parametrize("verb", VERBS)
def test_no_body_is_a_payload_too(api: Api, verb: str) -> None:
    claimed, wait = api.a_parked_job()
    answer = ok(api.client.post(wait["urls"][verb]))
    assert (answer["job_state"], api.job(claimed)["state"]) == (AFTER[verb], AFTER[verb])


@pytest.mark.parametrize(
    ("content", "media_type", "status"),
    [
        (b"{", "application/json", 400),
        (b'"\\u0000"', "application/json", 422),
        (b"1e400", "application/json", 422),
        (b"paid=%00", "application/x-www-form-urlencoded", 422),
        (b"x" * 1_100_000, "application/json", 413),
    ],
    ids=["no json", "nul", "overflow", "form", "too large"],
)
def test_a_payload_that_cannot_be_stored_is_refused_and_the_wait_stays_open(
    api: Api, content: bytes, media_type: str, status: int
) -> None:
    _, wait = api.a_parked_job()
    refused = api.client.post(wait["urls"]["complete"], content=content, headers={"content-type": media_type})
    assert refused.status_code == status
    ok(call(api, wait, "complete"))


# Opening and parking


def test_opening_a_wait_again_returns_the_same(api: Api) -> None:
    claimed = api.a_running_job()
    assert api.open_wait(claimed, name="pay") == api.open_wait(claimed, name="pay")


@pytest.mark.parametrize("other", [{"timeout_seconds": 5}, {"default_verb": "complete"}], ids=str)
def test_a_wait_cannot_be_opened_again_with_other_settings(api: Api, other: JSON) -> None:
    claimed = api.a_running_job()
    api.open_wait(claimed, name="pay")
    body = {"lease": claimed["lease"], "name": "pay", **other}
    problem(api.post(f"/v1/jobs/{claimed['id']}/callbacks", body), 409, "wait-name-taken")


def test_each_attempt_has_waits_of_its_own(api: Api) -> None:
    claimed = api.a_running_job()
    first = api.open_wait(claimed, name="pay")
    ok(api.settle("retry", claimed, delay_seconds=0))
    assert api.open_wait(api.claim(), name="pay")["wait_id"] != first["wait_id"]


@pytest.mark.parametrize("whose", ["another job's", "an earlier attempt's", "nobody's"])
def test_parking_needs_a_wait_of_ones_own(api: Api, whose: str) -> None:
    claimed = api.a_running_job()
    match whose:
        case "another job's":
            wait_id = api.open_wait(api.a_running_job())["wait_id"]
        case "an earlier attempt's":
            wait_id = api.open_wait(claimed)["wait_id"]
            ok(api.settle("release", claimed))
            claimed = api.claim()
        case _:
            wait_id = str(uuid4())
    problem(api.settle("park", claimed, wait_id=wait_id), 404, "unknown-wait")
    assert api.job(claimed)["state"] == "running"


def test_a_wait_of_another_job_cannot_be_read(api: Api) -> None:
    claimed, wait = api.a_parked_job()
    other, _ = api.a_parked_job()
    ok(api.get(f"/v1/jobs/{claimed['id']}/callbacks/{wait['wait_id']}"))
    problem(api.get(f"/v1/jobs/{other['id']}/callbacks/{wait['wait_id']}"), 404, "unknown-wait")


def test_the_job_shows_its_waits(api: Api) -> None:
    claimed = api.a_running_job()
    old = api.open_wait(claimed, name="old")
    ok(api.settle("retry", claimed, delay_seconds=0))
    claimed = api.claim()
    done, now = api.open_wait(claimed, name="done"), api.open_wait(claimed, name="now")
    ok(call(api, done, "resume", "early"))
    ok(api.settle("park", claimed, wait_id=now["wait_id"]))
    shown = [
        (wait["wait_id"], wait["attempt"], wait["state"], wait["resolved_as"], wait["early"], wait["payload"])
        for wait in api.job(claimed)["waits"]
    ]
    assert shown == [
        (old["wait_id"], 1, "superseded", None, False, None),
        (done["wait_id"], 2, "resolved", "resume", True, "early"),
        (now["wait_id"], 2, "open", None, False, None),
    ]
