"""Two ends for one attempt: exactly one is true, and everybody is told the same."""

import random
from typing import Any

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

LATER = {"kind": "fixed", "base_seconds": 3600}


@pytest.mark.parametrize(("verb", "state"), [("cancel", "cancelled"), ("fail", "failed")])
def test_of_complete_and_another_end_exactly_one_is_true(
    api: Api, db: "psycopg.Connection[Any]", service: ServiceThread, other_service: ServiceThread, verb: str, state: str
) -> None:
    jobs = running_jobs(api, 100)
    outcomes: dict[str, tuple[int, int]] = {}

    async def trial(number: int, callers: list[Caller]) -> str:
        job = jobs[number]
        lease = {"lease": job["lease"]}
        completed, ended = await meet(
            lambda: callers[0].post(f"/v1/jobs/{job['id']}/complete", {**lease, "result": "done"}),
            # The cancel is an operator's, who has no lease.
            lambda: callers[1].post(f"/v1/jobs/{job['id']}/{verb}", {} if verb == "cancel" else lease),
        )
        outcomes[job["id"]] = (completed.status_code, ended.status_code)
        return "complete first" if completed.is_success else f"{verb} first"

    each_was_seen(tally(trial, len(jobs), service, other_service), "complete first", f"{verb} first")
    truths = {(200, 409, "completed", "done"), (409, 200, state, None)}
    now = jobs_now(db, api.queue)
    assert {(*outcomes[job_id], found["state"], found["result"]) for job_id, found in now.items()} == truths


@pytest.mark.parametrize(
    ("limit", "lost"), [("lease_expires_at", "lease_expired"), ("deadline_at", "deadline_exceeded")]
)
@pytest.mark.parametrize("verb", ["complete", "retry", "heartbeat"])
def test_a_report_against_the_rescue_has_one_outcome(
    api: Api, db: "psycopg.Connection[Any]", service: ServiceThread, verb: str, limit: str, lost: str
) -> None:
    jobs = running_jobs(api, 100, backoff=LATER)
    report: JSON = {"complete": {"result": "done"}, "retry": {"delay_seconds": 7200}, "heartbeat": {}}[verb]
    statuses: dict[str, int] = {}

    async def trial(number: int, callers: list[Caller]) -> str:
        job = jobs[number]
        # The sweep looks every few hundredths of a second: the report comes before, at, or after its look.
        answer = await after(
            around(number, 0.06),
            lambda: callers[0].post(f"/v1/jobs/{job['id']}/{verb}", {"lease": job["lease"], **report}),
        )
        statuses[job["id"]] = answer.status_code
        return "report first" if answer.is_success else "rescue first"

    orders = tally(trial, len(jobs), service, at_once=100, begin=lambda: end_each(db, "jobs", limit, "id", ids(jobs)))
    each_was_seen(orders, "report first", "rescue first")
    reported = {
        "complete": ("completed", []),
        "retry": ("retryable", ["error"]),
        # A heartbeat keeps the lease; the deadline it does not move, and that passes in the end.
        "heartbeat": ("running", []) if limit == "lease_expires_at" else ("retryable", [lost]),
    }[verb]
    for job_id, found in jobs_now(db, api.queue).items():
        kinds = [error["kind"] for error in found["errors"] or []]
        if (verb, limit, statuses[job_id], found["state"]) == ("heartbeat", "deadline_at", 200, "running"):
            continue  # its deadline has not been looked at yet
        expected = reported if statuses[job_id] == 200 else ("retryable", [lost])
        assert (found["state"], kinds) == expected
        assert found["result"] == ("done" if (verb, statuses[job_id]) == ("complete", 200) else None)


@pytest.mark.parametrize("verb", ["complete", "retry", "snooze", "release", "fail", "cancel", "park"])
def test_the_same_report_from_many_connections_is_applied_once(
    api: Api, service: ServiceThread, other_service: ServiceThread, verb: str
) -> None:
    jobs = running_jobs(api, 6)
    reports: list[JSON] = [{"lease": job["lease"]} for job in jobs]
    for job, report in zip(jobs, reports, strict=True):
        if verb in ("retry", "snooze"):
            report["delay_seconds"] = 3600
        elif verb == "park":
            report["wait_id"] = api.open_wait(job)["wait_id"]

    async def trial(number: int, callers: list[Caller]) -> str:
        path = f"/v1/jobs/{jobs[number]['id']}/{verb}"
        answers = await meet(*(lambda caller=callers[n % 2]: caller.post(path, reports[number]) for n in range(16)))
        assert sorted(ok(answer)["already_applied"] for answer in answers) == [False] + [True] * 15
        return "applied once"

    assert tally(trial, len(jobs), service, other_service, at_once=2) == {"applied once": 6}


def test_many_reports_at_once_over_the_same_jobs_are_each_applied_once(
    api: Api, service: ServiceThread, other_service: ServiceThread
) -> None:
    jobs = running_jobs(api, 100)
    settlements = [{"outcome": "complete", "id": job["id"], "lease": job["lease"]} for job in jobs]
    # Each in an order of its own: whoever locked the rows as they come would meet the others half-way.
    mixed = [random.sample(settlements, len(settlements)) for _ in range(8)]

    async def trial(_: int, callers: list[Caller]) -> str:
        answers = await meet(
            *(lambda n=n: callers[n % 2].post("/v1/settlements", {"settlements": mixed[n]}) for n in range(8))
        )
        items = [item for answer in answers for item in ok(answer)["settlements"]]
        assert {item["status"] for item in items} == {200}
        assert sum(not item["settled"]["already_applied"] for item in items) == len(jobs)
        return "applied once"

    assert tally(trial, 1, service, other_service) == {"applied once": 1}


def test_nobody_is_told_of_a_deadlock_when_bulk_reports_callbacks_and_cancels_meet(
    api: Api, service: ServiceThread, other_service: ServiceThread
) -> None:
    parked, running = parked_jobs(api, 40), running_jobs(api, 40)
    settlements = [{"outcome": "fail", "id": job["id"], "lease": job["lease"]} for job in running]
    mixed = [random.sample(settlements, len(settlements)) for _ in range(4)]
    calls: list[tuple[str, Any]] = [("/v1/settlements", {"settlements": each}) for each in mixed]
    calls += [(f"/v1/jobs/{job['id']}/cancel", {}) for job in [*running, *(job for job, _ in parked)]]
    calls += [(callback_path(wait, "complete"), {}) for _, wait in parked]
    random.shuffle(calls)

    async def trial(_: int, callers: list[Caller]) -> str:
        answers = await meet(
            *(
                lambda caller=callers[n % 2], path=path, body=body: caller.post(path, body)
                for n, (path, body) in enumerate(calls)
            ),
            within_seconds=0.05,
        )
        # Who came second is told so; none has to come again.
        assert {answer.status_code for answer in answers} <= {200, 409, 410}
        return "told"

    assert tally(trial, 1, service, other_service) == {"told": 1}
