"""Reading jobs and steering them: what is told, when a wait ends, what may change in which state, and repeats."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from app.lifecycle import FINAL, LIVE, PENDING, State
from tests.build import JSON, Api, client_of, move, ok, problem
from tests.servers import ServiceThread
from tests.waiting import eventually

UNKNOWN = "018f0000-0000-7000-8000-000000000000"


def at(text: str) -> datetime:
    """A time of the wire."""
    return datetime.fromisoformat(text)


def patch(api: Api, job: JSON, **changes: Any) -> Any:
    """Change a job; the raw answer."""
    return api.client.patch(f"/v1/jobs/{job['id']}", json=changes)


@pytest.fixture
def elsewhere(other_service: ServiceThread, queue: str) -> Iterator[Api]:
    """The API of another service on the same database."""
    with client_of(other_service.url) as client:
        yield Api(client, queue)


# Read


def test_a_job_tells_all_that_was_given(api: Api) -> None:
    given = {
        "kind": "send", "args": {"to": "a"}, "priority": 1, "max_attempts": 7, "timeout_seconds": 30.0,
        "tags": ["x", "y"], "metadata": {"trace": 1}, "start_by": "2099-01-01T00:00:00Z",
    }  # fmt: skip
    job = api.job(api.enqueue(**given))
    assert {name: job[name] for name in given} == given


def test_a_new_job_has_every_field_though_nothing_happened_yet(api: Api) -> None:
    job = api.job(api.enqueue())
    told = ("result", "progress", "checkpoint", "worker", "claimed_at", "finished_at", "errors", "waits", "attempt")
    assert [job[name] for name in told] == [None, None, None, None, None, None, [], [], 0]


def test_a_running_job_tells_who_has_it_until_when(api: Api) -> None:
    claimed = api.a_running_job()
    job = api.job(claimed)
    told = ("worker", "attempt", "lease_expires_at", "deadline_at")
    assert [job[name] for name in told] == ["worker-1", 1, claimed["lease_expires_at"], claimed["deadline_at"]]


def test_a_lease_is_told_to_its_owner_only(api: Api) -> None:
    claimed = api.a_running_job()
    assert claimed["lease"] not in api.get(f"/v1/jobs/{claimed['id']}").text


def test_an_unknown_job_is_404(api: Api) -> None:
    problem(api.get(f"/v1/jobs/{UNKNOWN}"), 404, "unknown-job")


def test_an_unchanged_job_is_304_and_a_changed_one_is_not(api: Api) -> None:
    path = f"/v1/jobs/{api.enqueue()['id']}"
    etag = api.get(path).headers["etag"]
    unchanged = api.client.get(path, headers={"If-None-Match": etag})
    assert (unchanged.status_code, unchanged.content, unchanged.headers["etag"]) == (304, b"", etag)
    api.claim()
    changed = api.client.get(path, headers={"If-None-Match": etag})
    assert changed.status_code == 200
    assert changed.headers["etag"] != etag


# Wait for the end


def finish(api: Api, claimed: JSON, state: str) -> None:
    """Bring a running job to a final state."""
    match state:
        case "completed":
            ok(api.settle("complete", claimed, result=1))
        case "failed":
            ok(api.settle("fail", claimed))
        case _:
            ok(api.post(f"/v1/jobs/{claimed['id']}/cancel", {}))


@pytest.mark.parametrize("state", sorted(FINAL))
@pytest.mark.parametrize("where", ["the same service", "another service"])
def test_a_wait_ends_as_soon_as_the_job_is_final(api: Api, elsewhere: Api, state: str, where: str) -> None:
    claimed = api.a_running_job()
    waits = elsewhere if where == "another service" else api
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waits.get, f"/v1/jobs/{claimed['id']}", wait_seconds=30)
        finish(api, claimed, state)
        assert waiting.result(5).json()["state"] == state


def test_a_wait_ends_when_a_callback_finishes_the_job(api: Api) -> None:
    claimed, wait = api.a_parked_job()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(api.get, f"/v1/jobs/{claimed['id']}", wait_seconds=30)
        ok(api.post(wait["urls"]["complete"], {"answer": 42}))
        assert waiting.result(5).json()["result"] == {"answer": 42}


def test_a_wait_for_a_final_job_is_answered_at_once(api: Api) -> None:
    claimed = api.a_running_job()
    ok(api.settle("complete", claimed))
    answer = api.client.get(f"/v1/jobs/{claimed['id']}", params={"wait_seconds": 60}, timeout=5)
    assert answer.json()["state"] == "completed"


def test_a_wait_ends_with_the_job_as_it_is_when_the_time_is_up(api: Api) -> None:
    job = api.enqueue()
    assert ok(api.get(f"/v1/jobs/{job['id']}", wait_seconds=0.1))["state"] == "available"


@pytest.mark.parametrize("seconds", ["-1", "61", "nan", "soon"])
def test_a_wait_of_another_length_is_refused(api: Api, seconds: str) -> None:
    refused = problem(api.get(f"/v1/jobs/{api.enqueue()['id']}", wait_seconds=seconds), 422, "invalid-field")
    assert refused["errors"][0]["pointer"] == "wait_seconds"


# Lists


def listed(api: Api, **filters: Any) -> list[str]:
    """The ids on the first page."""
    return [job["id"] for job in ok(api.get("/v1/jobs", **{"queue": api.queue, **filters}))["jobs"]]


def test_a_list_has_the_newest_job_first(api: Api) -> None:
    ids = [api.enqueue()["id"] for _ in range(5)]
    assert listed(api) == ids[::-1]


def test_a_listed_job_is_told_as_a_read_one(api: Api) -> None:
    job = api.job(api.enqueue(args={"a": 1}))
    for only_in_detail in ("waits", "waiting_on", "answers_needed"):
        del job[only_in_detail]
    assert ok(api.get("/v1/jobs", queue=api.queue))["jobs"] == [job]


@pytest.mark.parametrize("state", sorted(State))
def test_a_state_is_a_filter(api: Api, state: str) -> None:
    wanted = api.a_job_in(state)["id"]
    api.a_job_in("scheduled" if state != "scheduled" else "completed")
    assert listed(api, state=state) == [wanted]


def test_kind_and_tag_are_filters_and_all_filters_apply_together(api: Api) -> None:
    wanted = api.enqueue(kind="send", tags=["a", "b"])["id"]
    api.enqueue(kind="send", tags=["ab"])
    other = api.enqueue(kind="other", tags=["b"])["id"]
    assert listed(api, kind="send", tag="b") == [wanted]
    assert listed(api, tag="b") == [other, wanted]
    assert listed(api, kind="send", tag="b", state="running") == []


def test_pages_have_every_job_once_while_others_are_added(api: Api) -> None:
    before = api.enqueue_many(25)
    seen: list[str] = []
    cursor: JSON = {}
    while True:
        page = ok(api.get("/v1/jobs", queue=api.queue, limit=4, **cursor))
        seen += [job["id"] for job in page["jobs"]]
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
        api.enqueue_many(3)
    assert seen == sorted(before, reverse=True)


def test_pages_have_every_job_once_while_others_are_settled(api: Api) -> None:
    before = api.enqueue_many(20)
    seen: list[str] = []
    cursor: JSON = {}
    while True:
        page = ok(api.get("/v1/jobs", queue=api.queue, limit=3, **cursor))
        seen += [job["id"] for job in page["jobs"]]
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
        ok(api.settle("complete", api.claim()))
    assert seen == sorted(before, reverse=True)


def test_the_last_full_page_is_the_last(api: Api) -> None:
    api.enqueue_many(4)
    assert ok(api.get("/v1/jobs", queue=api.queue, limit=4))["next_cursor"] is None


# History


def test_a_job_that_just_worked_has_two_events(api: Api) -> None:
    claimed = api.a_running_job()
    ok(api.settle("complete", claimed))
    told = [(event["step"], event["state"], event["attempt"], event["worker"]) for event in api.events(claimed)]
    assert told == [("enqueue", None, 0, None), ("complete", "completed", 1, "worker-1")]


def test_the_history_tells_every_turn_in_order(api: Api, db: "psycopg.Connection[Any]") -> None:
    claimed = api.a_running_job(max_attempts=2)
    ok(api.settle("snooze", claimed, delay_seconds=0))
    ok(api.settle("retry", api.claim(), delay_seconds=0))
    expiring = api.claim()
    move(db, expiring, "lease_expires_at", -3600)
    eventually(lambda: api.job(claimed)["state"] == "failed")
    ok(api.post(f"/v1/jobs/{claimed['id']}/redrive"))
    ok(api.post(f"/v1/jobs/{claimed['id']}/cancel", {"reason": "enough"}))
    events = api.events(claimed)
    assert [(event["step"], event["state"], event["attempt"]) for event in events] == [
        ("enqueue", None, 0),
        ("snooze", "scheduled", 1),
        ("retry", "retryable", 1),
        ("lose_lease", "failed", 2),
        ("redrive", "available", 0),
        ("cancel", "cancelled", 0),
    ]
    assert events[-1]["details"] == {"reason": "enough"}
    assert [event["at"] for event in events] == sorted(event["at"] for event in events)


def test_a_long_history_comes_in_pages(api: Api) -> None:
    claimed = api.a_running_job()
    for _ in range(5):
        ok(api.settle("snooze", claimed, delay_seconds=0))
        claimed = api.claim()
    steps: list[str] = []
    cursor: JSON = {}
    while cursor is not None:
        page = ok(api.get(f"/v1/jobs/{claimed['id']}/events", limit=2, **cursor))
        steps += [event["step"] for event in page["events"]]
        cursor = {"cursor": page["next_cursor"]} if page["next_cursor"] else None  # type: ignore[assignment]
    assert steps == ["enqueue"] + ["snooze"] * 5


def test_an_unknown_job_has_no_history(api: Api) -> None:
    problem(api.get(f"/v1/jobs/{UNKNOWN}/events"), 404, "unknown-job")


# Change


def test_a_changed_priority_changes_the_order_of_claims(api: Api) -> None:
    first, second = api.enqueue()["id"], api.enqueue()["id"]
    changed = ok(patch(api, {"id": second}, priority=1))
    assert changed["priority"] == 1
    assert [job["id"] for job in api.claims(limit=2)["jobs"]] == [second, first]


def test_a_lowered_priority_changes_the_order_too(api: Api) -> None:
    first, second = api.enqueue(priority=1)["id"], api.enqueue(priority=1)["id"]
    ok(patch(api, {"id": first}, priority=4))
    assert [job["id"] for job in api.claims(limit=2)["jobs"]] == [second, first]


def test_a_later_run_at_postpones_an_available_job(api: Api) -> None:
    job = api.enqueue()
    changed = ok(patch(api, job, run_at="2099-01-01T00:00:00+01:00"))
    assert (changed["state"], changed["run_at"]) == ("scheduled", "2098-12-31T23:00:00Z")
    assert api.claims()["jobs"] == []


@pytest.mark.parametrize("state", ["scheduled", "retryable"])
def test_an_earlier_run_at_wakes_a_waiting_poll(api: Api, state: str) -> None:
    job = api.a_job_in(state)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(api.claim)
        ok(patch(api, job, run_at="1999-01-01T00:00:00Z"))
        assert waiting.result(5)["id"] == job["id"]


def test_a_past_run_at_means_now(api: Api) -> None:
    job = api.enqueue(delay_seconds=3600)
    changed = ok(patch(api, job, run_at="1999-01-01T00:00:00Z"))
    assert timedelta() <= at(changed["run_at"]) - at(job["created_at"]) < timedelta(seconds=60)


def test_only_what_is_given_changes(api: Api) -> None:
    job = api.job(api.enqueue(priority=3, max_attempts=5, delay_seconds=3600))
    assert ok(patch(api, job, priority=2)) == {**job, "priority": 2}
    assert ok(patch(api, job)) == {**job, "priority": 2}


def test_attempts_can_be_given_but_not_below_those_used(api: Api) -> None:
    claimed = api.a_running_job(max_attempts=3)
    ok(api.settle("retry", claimed, delay_seconds=0))
    ok(api.settle("retry", api.claim(), delay_seconds=3600))
    refused = problem(patch(api, claimed, max_attempts=2), 422, "invalid-field")
    assert refused["errors"][0]["pointer"] == "/max_attempts"
    assert api.job(claimed)["max_attempts"] == 3
    assert ok(patch(api, claimed, max_attempts=10))["max_attempts"] == 10


@pytest.mark.parametrize("state", sorted(set(State) - PENDING))
def test_only_a_pending_job_can_be_changed(api: Api, state: str) -> None:
    job = api.a_job_in(state)
    before = api.job(job)
    refused = problem(patch(api, job, priority=1), 409, "wrong-state")
    assert (refused["state"], refused["allowed_states"]) == (state, sorted(PENDING))
    assert api.job(job) == before


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"priority": 5}, "/priority"),
        ({"priority": None}, "/priority"),
        ({"max_attempts": 0}, "/max_attempts"),
        ({"run_at": "2099-01-01T00:00:00"}, "/run_at"),
        ({"run_at": "9999-12-31T23:59:59-14:00"}, "/run_at"),
        ({"kind": "other"}, "/kind"),
    ],
    ids=str,
)
def test_a_bad_change_is_refused_by_name_and_changes_nothing(api: Api, changes: JSON, pointer: str) -> None:
    job = api.job(api.enqueue())
    refused = problem(patch(api, job, **changes), 422, "invalid-field")
    assert [error["pointer"] for error in refused["errors"]] == [pointer]
    assert api.job(job) == job


def test_an_unknown_job_cannot_be_changed(api: Api) -> None:
    problem(patch(api, {"id": UNKNOWN}, priority=1), 404, "unknown-job")


# Cancel


def cancel(api: Api, job: JSON, **request: Any) -> Any:
    """Cancel a job as its producer would; the raw answer."""
    return api.post(f"/v1/jobs/{job['id']}/cancel", request)


@pytest.mark.parametrize("state", sorted(LIVE))
def test_every_live_job_can_be_cancelled(api: Api, state: str) -> None:
    job = api.a_job_in(state)
    answer = ok(cancel(api, job, reason="not needed"))
    assert (answer["state"], answer["already_applied"]) == ("cancelled", False)
    now = api.job(job)
    assert (now["state"], now["cancel_reason"], now["lease_expires_at"]) == ("cancelled", "not needed", None)
    assert now["finished_at"] is not None


@pytest.mark.parametrize("state", sorted(LIVE))
def test_a_repeated_cancel_changes_nothing(api: Api, state: str) -> None:
    job = api.a_job_in(state)
    ok(cancel(api, job, reason="first"))
    before = api.job(job)
    again = ok(cancel(api, job, reason="second"))
    assert (again["state"], again["already_applied"]) == ("cancelled", True)
    assert api.job(job) == before


@pytest.mark.parametrize("state", sorted(FINAL - {State.CANCELLED}))
def test_a_job_that_has_ended_cannot_be_cancelled(api: Api, state: str) -> None:
    job = api.a_job_in(state)
    before = api.job(job)
    refused = problem(cancel(api, job), 409, "wrong-state")
    assert (refused["state"], refused["allowed_states"]) == (state, sorted(LIVE))
    assert api.job(job) == before


def test_a_cancelled_job_is_given_to_nobody(api: Api) -> None:
    ok(cancel(api, api.enqueue()))
    assert api.claims()["jobs"] == []


@pytest.mark.parametrize("where", ["the same service", "another service"])
def test_a_cancel_reaches_the_worker_at_its_next_heartbeat(api: Api, elsewhere: Api, where: str) -> None:
    claimed = api.a_running_job()
    ok(cancel(elsewhere if where == "another service" else api, claimed))
    lost = problem(api.heartbeat(claimed), 409, "lease-lost")
    assert (lost["status_of_lease"], lost["state"]) == ("cancelled", "cancelled")
    (beat,) = ok(api.post("/v1/heartbeats", {"heartbeats": [{"id": claimed["id"], "lease": claimed["lease"]}]}))[
        "heartbeats"
    ]
    assert beat["status"] == "cancelled"


def test_a_report_after_the_cancel_is_refused_with_the_reason(api: Api) -> None:
    claimed = api.a_running_job()
    ok(cancel(api, claimed, reason="not needed"))
    lost = problem(api.settle("complete", claimed, result=1), 409, "lease-lost")
    assert (lost["state"], lost["settled_as"], lost["cancel_reason"]) == ("cancelled", "cancel", "not needed")
    assert api.job(claimed)["result"] is None


def test_a_worker_can_cancel_its_own_job_with_its_lease_only(api: Api) -> None:
    claimed = api.a_running_job()
    problem(cancel(api, claimed, lease="forged"), 409, "lease-lost")
    assert ok(cancel(api, claimed, lease=claimed["lease"], reason="mine"))["state"] == "cancelled"
    assert ok(cancel(api, claimed, lease=claimed["lease"], reason="mine"))["already_applied"] is True


def test_a_reason_has_its_bound(api: Api) -> None:
    job = api.enqueue()
    problem(cancel(api, job, reason="r" * 1001), 422, "invalid-field")
    ok(cancel(api, job, reason="r" * 1000))
    assert api.job(job)["cancel_reason"] == "r" * 1000


def test_an_unknown_job_cannot_be_cancelled(api: Api) -> None:
    problem(cancel(api, {"id": UNKNOWN}), 404, "unknown-job")


# Redrive


def redrive(api: Api, job: JSON) -> Any:
    """Run a job again; the raw answer."""
    return api.post(f"/v1/jobs/{job['id']}/redrive")


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_a_redriven_job_starts_again_with_its_errors_kept(api: Api, state: str) -> None:
    claimed = api.a_running_job()
    ok(api.settle("retry", claimed, error={"message": "first"}, delay_seconds=0))
    claimed = api.claim()
    finish(api, claimed, state)
    errors = api.job(claimed)["errors"]
    answer = ok(redrive(api, claimed))
    assert (answer["state"], answer["attempt"], answer["already_applied"]) == ("available", 0, False)
    now = api.job(claimed)
    told = ("finished_at", "cancel_reason", "dead_letter_reason", "errors")
    assert [now[name] for name in told] == [None, None, None, errors]


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_a_redrive_wakes_a_waiting_poll_and_counts_attempts_anew(api: Api, state: str) -> None:
    job = api.a_job_in(state)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(api.claim)
        ok(redrive(api, job))
        claimed = waiting.result(5)
    assert (claimed["id"], claimed["attempt"]) == (job["id"], 1)


def test_a_lease_from_before_the_redrive_is_lost(api: Api) -> None:
    old = api.a_running_job()
    ok(cancel(api, old))
    ok(redrive(api, old))
    new = api.claim()
    problem(api.settle("complete", old), 409, "lease-lost")
    ok(api.settle("complete", new))


def test_a_repeated_redrive_changes_nothing(api: Api) -> None:
    job = api.a_job_in("failed")
    ok(redrive(api, job))
    before = api.job(job)
    assert ok(redrive(api, job))["already_applied"] is True
    assert api.job(job) == before


@pytest.mark.parametrize("state", sorted(set(State) - {State.FAILED, State.CANCELLED}))
def test_a_job_in_another_state_cannot_be_redriven(api: Api, state: str) -> None:
    job = api.a_job_in(state)
    before = api.job(job)
    refused = problem(redrive(api, job), 409, "wrong-state")
    assert (refused["state"], refused["allowed_states"]) == (state, ["cancelled", "failed"])
    assert api.job(job) == before


def test_an_unknown_job_cannot_be_redriven(api: Api) -> None:
    problem(redrive(api, {"id": str(uuid4())}), 404, "unknown-job")


def test_cancels_and_redrives_of_many_jobs_at_once_are_each_answered(
    api: Api, connect: Callable[[], "psycopg.Connection[Any]"]
) -> None:
    jobs = [{"id": each} for each in api.enqueue_many(30)]
    ended = [api.claim() for _ in range(10)]
    for claimed in ended:
        ok(api.settle("fail", claimed))
    live = [job for job in jobs if job["id"] not in {claimed["id"] for claimed in ended}]
    with ThreadPoolExecutor(20) as pool:
        cancelled = pool.map(lambda job: ok(cancel(api, job)), live)
        redriven = pool.map(lambda job: ok(redrive(api, job)), ended)
        assert [answer["state"] for answer in cancelled] == ["cancelled"] * 20
        assert [answer["state"] for answer in redriven] == ["available"] * 10
