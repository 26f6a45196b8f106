"""Several answers of one park at once, from two processes: counted once each, and the job goes on once."""

from typing import Any

import httpx
import psycopg

from tests.build import JSON, Api, ok
from tests.races.racing import (
    Caller,
    after,
    around,
    callback_path,
    each_was_seen,
    ids,
    jobs_now,
    meet,
    moment_of,
    running_jobs,
    tally,
)
from tests.servers import ServiceThread

LATER = {"kind": "fixed", "base_seconds": 3600}


def parked_on_two(api: Api, count: int, needed: str, **job: Any) -> list[tuple[JSON, list[JSON]]]:
    jobs = running_jobs(api, count, **job)
    waits = [[api.open_wait(claimed, name=name) for name in ("a", "b")] for claimed in jobs]
    parks = [
        {
            "outcome": "park",
            "id": job["id"],
            "lease": job["lease"],
            "wait_ids": [wait["wait_id"] for wait in both],
            "needed": needed,
        }
        for job, both in zip(jobs, waits, strict=True)
    ]
    ok(api.post("/v1/settlements", {"settlements": parks}))
    return list(zip(jobs, waits, strict=True))


def test_the_last_of_two_answers_resumes_the_job_whichever_it_is(
    api: Api, db: "psycopg.Connection[Any]", service: ServiceThread, other_service: ServiceThread
) -> None:
    parked = parked_on_two(api, 60, "all")

    async def trial(number: int, callers: list[Caller]) -> str:
        _, (a, b) = parked[number]
        answers = await meet(
            lambda: callers[number % 2].post(callback_path(a, "resume"), "a"),
            lambda: callers[1 - number % 2].post(callback_path(b, "resume"), "b"),
        )
        states = [ok(answer)["job_state"] for answer in answers]
        assert sorted(states) == ["available", "waiting_external"]
        return "a first" if states[0] == "waiting_external" else "b first"

    each_was_seen(tally(trial, len(parked), service, other_service), "a first", "b first")
    for found in jobs_now(db, api.queue).values():
        assert (found["state"], found["attempt"]) == ("available", 0)
        assert {name: came["payload"] for name, came in found["callback_results"].items()} == {"a": "a", "b": "b"}


def test_one_of_two_answers_wins_when_any_is_enough(
    api: Api, db: "psycopg.Connection[Any]", service: ServiceThread, other_service: ServiceThread
) -> None:
    parked = parked_on_two(api, 60, "any")

    async def trial(number: int, callers: list[Caller]) -> str:
        _, (a, b) = parked[number]
        answers = await meet(
            lambda: callers[number % 2].post(callback_path(a, "resume"), "a"),
            lambda: callers[1 - number % 2].post(callback_path(b, "resume"), "b"),
        )
        assert sorted(answer.status_code for answer in answers) == [200, 410]
        return "a" if answers[0].is_success else "b"

    each_was_seen(tally(trial, len(parked), service, other_service), "a", "b")
    for found in jobs_now(db, api.queue).values():
        assert found["state"] == "available"
        assert len(found["callback_results"]) == 1


def test_an_answer_against_the_deadline_of_the_other_wait_has_one_outcome(
    api: Api, db: "psycopg.Connection[Any]", service: ServiceThread
) -> None:
    parked = parked_on_two(api, 100, "all", backoff=LATER)
    answers: dict[str, httpx.Response] = {}
    for job, (_, b) in parked:
        ok(api.client.post(callback_path(b, "resume"), json="b"))
        assert api.job(job)["state"] == "waiting_external"

    async def trial(number: int, callers: list[Caller]) -> str:
        job, (a, _) = parked[number]
        answer = await after(around(number), lambda: callers[0].post(callback_path(a, "resume"), "a"))
        answers[job["id"]] = answer
        return "answer first" if answer.is_success else "deadline first"

    def deadlines() -> None:
        db.execute(
            "UPDATE towpath.waits AS w SET deadline_at = now() + at * interval '1 s'"
            " FROM unnest(%s::uuid[], %s::float8[]) AS given(job, at) WHERE w.job_id = given.job AND w.name = 'a'",
            [ids(job for job, _ in parked), [moment_of(number) for number in range(len(parked))]],
        )

    orders = tally(trial, len(parked), service, at_once=100, begin=deadlines)
    each_was_seen(orders, "answer first", "deadline first")
    for job_id, found in jobs_now(db, api.queue).items():
        won = answers[job_id].is_success
        assert found["state"] == ("available" if won else "retryable")
        # What came before the deadline stays with the job, for the next attempt.
        assert set(found["callback_results"]) == ({"a", "b"} if won else {"b"})
