"""A callback before, during and after its park, against its deadline, and against others: one truth, told to all."""

import random
from typing import Any

import httpx
import psycopg
import pytest

from tests.build import JSON, Api, ok
from tests.races.racing import (
    Caller,
    after,
    around,
    callback_path,
    each_was_seen,
    end_each,
    ids,
    jobs_now,
    meet,
    parked_jobs,
    running_jobs,
    tally,
)
from tests.servers import ServiceThread
from tests.waiting import eventually

AFTER = {"complete": "completed", "fail": "failed", "resume": "available", "retry": "available"}
AT_ONCE = {"kind": "fixed", "base_seconds": 0}
LATER = {"kind": "fixed", "base_seconds": 3600}


@pytest.mark.parametrize("verb", AFTER)
def test_no_callback_is_lost_whenever_it_meets_the_park(
    api: Api, db: "psycopg.Connection[Any]", service: ServiceThread, other_service: ServiceThread, verb: str
) -> None:
    jobs = running_jobs(api, 100)
    waits = [api.open_wait(job) for job in jobs]
    early: dict[str, bool] = {}

    async def trial(number: int, callers: list[Caller]) -> str:
        job, wait = jobs[number], waits[number]
        # Half of them in one process, half in two.
        worker, third_party = callers[0], callers[number % 2]
        park = {"lease": job["lease"], "wait_id": wait["wait_id"]}
        answers = await meet(
            lambda: worker.post(f"/v1/jobs/{job['id']}/park", park),
            lambda: third_party.post(callback_path(wait, verb), number),
        )
        parked, called = (ok(answer) for answer in answers)
        early[job["id"]] = called["early"]
        assert parked["parked"] is not called["early"]
        assert answers[1].status_code == (202 if called["early"] else 200)
        assert [came["payload"] for came in parked["callbacks"]] == ([number] if called["early"] else [])
        return "callback first" if called["early"] else "park first"

    each_was_seen(tally(trial, len(jobs), service, other_service), "callback first", "park first")
    now = jobs_now(db, api.queue)
    for number, job in enumerate(jobs):
        found = now[job["id"]]
        # The handler was there for an early resume, so it goes on.
        stays = early[job["id"]] and verb == "resume"
        assert found["state"] == ("running" if stays else AFTER[verb])
        assert found["attempt"] == (1 if stays or verb in ("complete", "fail") else 0)
        assert found["result"] == (number if verb == "complete" else None)
        assert [(w["state"], w["resolved_as"], w["payload"]) for w in found["waits"]] == [("resolved", verb, number)]
        if verb == "resume":
            assert found["callback_results"]["callback"]["payload"] == number


@pytest.mark.parametrize("verb", ["complete", "resume", "heartbeat"])
def test_a_callback_against_the_deadline_has_one_outcome(
    api: Api, db: "psycopg.Connection[Any]", service: ServiceThread, verb: str
) -> None:
    parked = parked_jobs(api, 100, backoff=LATER)
    answers: dict[str, httpx.Response] = {}

    async def trial(number: int, callers: list[Caller]) -> str:
        job, wait = parked[number]
        answers[job["id"]] = await after(
            around(number),
            lambda: callers[0].post(callback_path(wait, verb), {}),
        )
        return "callback first" if answers[job["id"]].is_success else "deadline first"

    orders = tally(
        trial,
        len(parked),
        service,
        at_once=100,
        begin=lambda: end_each(db, "waits", "deadline_at", "job_id", ids(job for job, _ in parked)),
    )
    each_was_seen(orders, "callback first", "deadline first")
    won = {"complete": "completed", "resume": "available", "heartbeat": "waiting_external"}[verb]
    for job_id, found in jobs_now(db, api.queue).items():
        status = answers[job_id].status_code
        assert (status, found["state"], found["errors_total"]) in {(200, won, 0), (410, "retryable", 1)}
        assert found["result"] == ({} if (verb, status) == ("complete", 200) else None)


def test_of_different_resolvers_exactly_one_wins(
    api: Api, db: "psycopg.Connection[Any]", service: ServiceThread, other_service: ServiceThread
) -> None:
    parked = parked_jobs(api, 100)
    winners: dict[str, str] = {}

    async def trial(number: int, callers: list[Caller]) -> str:
        job, wait = parked[number]
        verbs = random.sample(sorted(AFTER), len(AFTER))
        answers = await meet(
            *(
                lambda verb=verb, caller=callers[n % 2]: caller.post(callback_path(wait, verb), verb)
                for n, verb in enumerate(verbs)
            )
        )
        assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409]
        winner = next(verb for verb, answer in zip(verbs, answers, strict=True) if answer.is_success)
        assert {answer.json()["resolved_as"] for answer in answers} == {winner}
        winners[job["id"]] = winner
        return winner

    each_was_seen(tally(trial, len(parked), service, other_service), *AFTER)
    for job_id, found in jobs_now(db, api.queue).items():
        (wait,) = found["waits"]
        winner = winners[job_id]
        assert (found["state"], wait["resolved_as"], wait["payload"]) == (AFTER[winner], winner, winner)


@pytest.mark.parametrize("early", [True, False], ids=["before the park", "after the park"])
def test_the_same_callback_from_many_at_once_is_told_once_that_it_won(
    api: Api, service: ServiceThread, other_service: ServiceThread, early: bool
) -> None:
    if early:
        waits = [api.open_wait(job) for job in running_jobs(api, 6)]
    else:
        waits = [wait for _, wait in parked_jobs(api, 6)]

    async def trial(number: int, callers: list[Caller]) -> str:
        path = callback_path(waits[number], "resume")
        answers = await meet(*(lambda caller=callers[n % 2]: caller.post(path, 1) for n in range(16)))
        told = [ok(answer)["already_applied"] for answer in answers]
        assert sorted(told) == [False] + [True] * 15
        assert len({answer.json()["resolved_at"] for answer in answers}) == 1
        return "one winner"

    assert tally(trial, len(waits), service, other_service, at_once=2) == {"one winner": 6}


def test_a_resume_against_the_expiry_of_the_attached_lease_loses_nothing(
    api: Api, db: "psycopg.Connection[Any]", service: ServiceThread
) -> None:
    parked = parked_jobs(api, 100, attached=True, backoff=AT_ONCE)
    states: dict[str, str] = {}

    async def trial(number: int, callers: list[Caller]) -> str:
        job, wait = parked[number]
        answer = await after(
            around(number),
            lambda: callers[0].post(callback_path(wait, "resume"), number),
        )
        states[job["id"]] = ok(answer)["job_state"]
        return states[job["id"]]

    orders = tally(
        trial,
        len(parked),
        service,
        at_once=100,
        begin=lambda: end_each(db, "jobs", "lease_expires_at", "id", ids(job for job, _ in parked)),
    )
    each_was_seen(orders, "running", "available")
    # Nobody kept the leases of the resumed ones, so those come back too, as another attempt.
    claimed: list[JSON] = []
    while len(claimed) < len(parked):
        claimed += api.claims(limit=100, wait_seconds=10)["jobs"]
    payloads = {job["id"]: number for number, (job, _) in enumerate(parked)}
    assert {job["id"]: job["callback_results"]["callback"]["payload"] for job in claimed} == payloads
    assert all(job["attempt"] == (2 if states[job["id"]] == "running" else 1) for job in claimed)


def test_a_cancel_against_a_callback_has_one_outcome(
    api: Api, db: "psycopg.Connection[Any]", service: ServiceThread, other_service: ServiceThread
) -> None:
    parked = parked_jobs(api, 100)
    outcomes: dict[str, tuple[int, int]] = {}

    async def trial(number: int, callers: list[Caller]) -> str:
        job, wait = parked[number]
        cancelled, called = await meet(
            lambda: callers[0].post(f"/v1/jobs/{job['id']}/cancel", {}),
            lambda: callers[1].post(callback_path(wait, "complete"), 1),
            within_seconds=0.03,
        )
        outcomes[job["id"]] = (cancelled.status_code, called.status_code)
        return "cancel first" if cancelled.is_success else "callback first"

    each_was_seen(tally(trial, len(parked), service, other_service), "cancel first", "callback first")
    truths = {(200, 410, "cancelled"), (409, 200, "completed")}
    assert {(*outcomes[job_id], found["state"]) for job_id, found in jobs_now(db, api.queue).items()} == truths


def test_a_park_against_the_deadline_of_its_wait_leaves_no_job_waiting_for_ever(
    api: Api, db: "psycopg.Connection[Any]", service: ServiceThread
) -> None:
    jobs = running_jobs(api, 100, backoff=LATER)
    waits = [api.open_wait(job) for job in jobs]

    async def trial(number: int, callers: list[Caller]) -> str:
        job, wait = jobs[number], waits[number]
        park = {"lease": job["lease"], "wait_id": wait["wait_id"]}
        answer = await after(
            around(number),
            lambda: callers[0].post(f"/v1/jobs/{job['id']}/park", park),
        )
        assert answer.status_code in (200, 409)
        return "park first" if answer.is_success else "deadline first"

    orders = tally(
        trial,
        len(jobs),
        service,
        at_once=100,
        begin=lambda: end_each(db, "waits", "deadline_at", "job_id", ids(jobs)),
    )
    each_was_seen(orders, "park first", "deadline first")
    states = "SELECT state, count(*) FROM towpath.jobs WHERE queue = %s GROUP BY 1"
    expected = {"retryable": orders["park first"], "running": orders["deadline first"]}
    eventually(lambda: dict(db.execute(states, [api.queue]).fetchall()) == expected)
