"""Queues: they exist from their first use, their settings apply at once, and a pause holds in every process."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import psycopg
import pytest

from app.settings import Settings
from tests.build import JSON, Api, client_of, move, ok, problem
from tests.servers import ServiceThread
from tests.waiting import eventually

DEFAULTS = {
    "paused": False,
    "paused_at": None,
    "max_attempts": 20,
    "lease_seconds": 60.0,
    "timeout_seconds": 3600.0,
    "backoff": {"kind": "exponential", "base_seconds": 2.0, "factor": 2.0, "cap_seconds": 86400.0, "jitter": 0.25},
    "aging_seconds": 600.0,
    "completed_retention_seconds": 86400.0,
    "failed_retention_seconds": 604800.0,
    "cancelled_retention_seconds": 604800.0,
    "keep_dead_letters": True,
    "dead_letter_retention_seconds": None,
}


@pytest.fixture
def elsewhere(other_service: ServiceThread, queue: str) -> Iterator[Api]:
    """The API of another service on the same database."""
    with client_of(other_service.url) as client:
        yield Api(client, queue)


def put(api: Api, **settings: Any) -> JSON:
    """Change the test's queue."""
    return ok(api.client.put(f"/v1/queues/{api.queue}", json=settings))


def pause(api: Api) -> JSON:
    return ok(api.post(f"/v1/queues/{api.queue}/pause"))


def resume(api: Api) -> JSON:
    return ok(api.post(f"/v1/queues/{api.queue}/resume"))


def settings_of(queue: JSON) -> JSON:
    """A queue's settings, without its name and times."""
    return {name: queue[name] for name in DEFAULTS}


def seconds_between(earlier: str, later: str) -> float:
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


# First use


def test_the_first_job_over_http_makes_the_queue_with_defaults(api: Api) -> None:
    problem(api.get(f"/v1/queues/{api.queue}"), 404, "unknown-queue")
    api.enqueue()
    assert settings_of(ok(api.get(f"/v1/queues/{api.queue}"))) == DEFAULTS


def test_the_first_claim_of_a_job_from_sql_makes_the_queue_with_defaults(
    api: Api, db: "psycopg.Connection[Any]"
) -> None:
    db.execute("SELECT towpath.enqueue('work', queue => %s)", [api.queue])
    api.claim()
    assert settings_of(ok(api.get(f"/v1/queues/{api.queue}"))) == DEFAULTS


def test_the_first_put_makes_the_queue_with_defaults_for_the_rest(api: Api) -> None:
    assert settings_of(put(api, max_attempts=3)) == {**DEFAULTS, "max_attempts": 3}


def test_the_first_pause_makes_the_queue_paused(api: Api) -> None:
    assert pause(api)["paused"] is True
    api.enqueue()
    assert api.claims()["reason"] == "paused"


def test_a_poll_does_not_make_a_queue(api: Api) -> None:
    api.claims()
    problem(api.get(f"/v1/queues/{api.queue}"), 404, "unknown-queue")


# Settings


def test_a_put_changes_only_what_it_names(api: Api) -> None:
    put(api, lease_seconds=30, timeout_seconds=None)
    assert settings_of(put(api, aging_seconds=None)) == {
        **DEFAULTS,
        "lease_seconds": 30.0,
        "timeout_seconds": None,
        "aging_seconds": None,
    }


def test_an_empty_put_changes_nothing(api: Api) -> None:
    before = put(api, lease_seconds=30)
    assert settings_of(put(api)) == settings_of(before)


def test_every_setting_is_given_back(api: Api) -> None:
    given = {
        "max_attempts": 1000, "lease_seconds": 1.5, "timeout_seconds": 31536000.0,
        "backoff": {"kind": "linear", "base_seconds": 1.0, "factor": 3.0, "cap_seconds": 9.0, "jitter": 0.0},
        "aging_seconds": 1.0, "completed_retention_seconds": 0.0, "failed_retention_seconds": None,
        "cancelled_retention_seconds": 315360000.0, "keep_dead_letters": False, "dead_letter_retention_seconds": 5.0,
    }  # fmt: skip
    put(api, **given)
    assert settings_of(ok(api.get(f"/v1/queues/{api.queue}"))) == {**DEFAULTS, **given}


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"max_attempts": 0}, "/max_attempts"),
        ({"max_attempts": None}, "/max_attempts"),
        ({"lease_seconds": 0.5}, "/lease_seconds"),
        ({"lease_seconds": 86401}, "/lease_seconds"),
        ({"lease_seconds": None}, "/lease_seconds"),
        ({"timeout_seconds": 0}, "/timeout_seconds"),
        ({"aging_seconds": 0}, "/aging_seconds"),
        ({"completed_retention_seconds": -1}, "/completed_retention_seconds"),
        ({"backoff": {"kind": "random"}}, "/backoff/kind"),
        ({"backoff": None}, "/backoff"),
        ({"keep_dead_letters": "yes"}, "/keep_dead_letters"),
        ({"paused": True}, "/paused"),
    ],
    ids=str,
)
def test_a_bad_setting_is_refused_by_name_and_changes_nothing(api: Api, changes: JSON, pointer: str) -> None:
    before = put(api, lease_seconds=30)
    refused = problem(api.client.put(f"/v1/queues/{api.queue}", json=changes), 422, "invalid-field")
    assert [error["pointer"] for error in refused["errors"]] == [pointer]
    assert ok(api.get(f"/v1/queues/{api.queue}")) == before


def test_the_next_claim_uses_the_new_lease(api: Api) -> None:
    api.enqueue_many(2)
    before = api.job(api.claim())
    put(api, lease_seconds=120)
    after = api.job(api.claim())
    assert seconds_between(before["claimed_at"], before["lease_expires_at"]) == 60
    assert seconds_between(after["claimed_at"], after["lease_expires_at"]) == 120


def test_the_next_claim_uses_the_new_deadline_unless_the_job_has_its_own(api: Api) -> None:
    api.enqueue()
    api.enqueue(timeout_seconds=7)
    put(api, timeout_seconds=30)
    queues, own = (api.job(job) for job in api.claims(limit=2)["jobs"])
    assert seconds_between(queues["claimed_at"], queues["deadline_at"]) == 30
    assert seconds_between(own["claimed_at"], own["deadline_at"]) == 7


def test_without_a_time_out_there_is_no_deadline(api: Api) -> None:
    put(api, timeout_seconds=None)
    assert api.a_running_job()["deadline_at"] is None


def test_the_next_retry_uses_the_new_backoff_unless_the_job_has_its_own(
    api: Api, db: "psycopg.Connection[Any]"
) -> None:
    api.enqueue()
    api.enqueue(backoff={"kind": "fixed", "base_seconds": 100, "jitter": 0})
    queues, own = api.claims(limit=2)["jobs"]
    put(api, backoff={"kind": "fixed", "base_seconds": 1000, "jitter": 0})
    for claimed, seconds in ((queues, 1000), (own, 100)):
        ok(api.settle("retry", claimed))
        row = db.execute("SELECT e.at, j.run_at FROM towpath.jobs AS j JOIN towpath.job_events AS e ON e.job_id = j.id"
                         " WHERE j.id = %s AND e.step = 'retry'", [claimed["id"]]).fetchone()  # fmt: skip
        assert row is not None
        assert (row[1] - row[0]).total_seconds() == seconds


def test_new_jobs_use_the_new_attempts_and_old_ones_keep_theirs(api: Api) -> None:
    old = api.enqueue()
    put(api, max_attempts=3)
    new = api.enqueue()
    assert (api.job(old)["max_attempts"], api.job(new)["max_attempts"]) == (20, 3)


def test_a_queue_that_keeps_no_dead_letters_lists_none(api: Api) -> None:
    put(api, keep_dead_letters=False)
    claimed = api.a_running_job()
    ok(api.settle("fail", claimed))
    assert api.job(claimed)["dead_letter_reason"] is None
    assert ok(api.get("/v1/dead-letters", queue=api.queue))["dead_letters"] == []


# Lists


def test_queues_are_listed_by_name_in_pages_the_idle_and_the_paused_too(api: Api) -> None:
    names = [f"{api.queue}-{n}" for n in range(5)]
    for name in names:
        ok(api.client.put(f"/v1/queues/{name}", json={}))
    ok(api.post(f"/v1/queues/{names[2]}/pause"))
    seen: list[str] = []
    cursor: JSON = {}
    while True:
        page = ok(api.get("/v1/queues", limit=200, **cursor))
        seen += [queue["name"] for queue in page["queues"]]
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert [name for name in seen if name.startswith(api.queue)] == names
    assert seen == sorted(seen)


def test_a_page_has_as_many_queues_as_asked_for(api: Api) -> None:
    for n in range(3):
        ok(api.client.put(f"/v1/queues/{api.queue}-{n}", json={}))
    first = ok(api.get("/v1/queues", limit=2))
    second = ok(api.get("/v1/queues", limit=2, cursor=first["next_cursor"]))
    names = [queue["name"] for page in (first, second) for queue in page["queues"]]
    assert names == sorted(set(names))


# Pause


def test_a_repeated_pause_changes_nothing(api: Api) -> None:
    first = pause(api)
    again = pause(api)
    assert (again["paused"], again["paused_at"]) == (True, first["paused_at"])


def test_a_repeated_resume_changes_nothing(api: Api) -> None:
    pause(api)
    assert [settings_of(resume(api)) for _ in range(2)] == [DEFAULTS, DEFAULTS]


def test_a_paused_queue_answers_polls_with_the_reason(api: Api) -> None:
    api.enqueue()
    pause(api)
    answer = api.claims()
    assert (answer["jobs"], answer["reason"]) == ([], "paused")
    assert answer["retry_after_seconds"] > 0


def test_a_pause_leaves_other_queues_alone(api: Api) -> None:
    pause(api)
    job = api.enqueue(queue=f"{api.queue}-open")
    assert [each["id"] for each in api.claims(queues=[api.queue, f"{api.queue}-open"])["jobs"]] == [job["id"]]


def test_running_jobs_go_on_and_can_be_settled(api: Api) -> None:
    claimed = api.a_running_job()
    pause(api)
    ok(api.heartbeat(claimed))
    ok(api.settle("complete", claimed, result=1))
    assert api.job(claimed)["result"] == 1


@pytest.fixture
def are_waiting(service: ServiceThread, other_service: ServiceThread) -> Callable[[int], None]:
    """Returns once so many polls wait in both services together."""

    def wait(polls: int) -> None:
        eventually(lambda: service.waiting_polls() + other_service.waiting_polls() == polls)

    return wait


BROUGHT_BY: dict[str, Callable[[Api, "psycopg.Connection[Any]"], Callable[[], Any]]] = {}
"""Each way by which a job becomes claimable: prepared before the pause, done after it."""


def brought_by(what: str) -> Callable[[Any], Any]:
    def register(way: Any) -> Any:
        BROUGHT_BY[what] = way
        return way

    return register


@brought_by("enqueue")
def _enqueue(api: Api, _: Any) -> Callable[[], Any]:
    return api.enqueue


@brought_by("enqueue in SQL")
def _enqueue_sql(api: Api, db: "psycopg.Connection[Any]") -> Callable[[], Any]:
    return lambda: db.execute("SELECT towpath.enqueue('work', queue => %s)", [api.queue])


@brought_by("promotion of a scheduled job")
def _promote(api: Api, db: "psycopg.Connection[Any]") -> Callable[[], Any]:
    return _due(api, db, api.a_job_in("scheduled"))


@brought_by("promotion of a retry")
def _promote_retry(api: Api, db: "psycopg.Connection[Any]") -> Callable[[], Any]:
    return _due(api, db, api.a_job_in("retryable"))


def _due(api: Api, db: "psycopg.Connection[Any]", job: JSON) -> Callable[[], Any]:
    def do() -> None:
        move(db, job, "run_at", -7200)
        db.execute("SELECT pg_notify('towpath', 'due')")
        eventually(lambda: api.job(job)["state"] == "available")

    return do


@brought_by("redrive")
def _redrive(api: Api, _: Any) -> Callable[[], Any]:
    job = api.a_job_in("failed")
    return lambda: ok(api.post(f"/v1/jobs/{job['id']}/redrive"))


@brought_by("release")
def _release(api: Api, _: Any) -> Callable[[], Any]:
    claimed = api.a_running_job()
    return lambda: ok(api.settle("release", claimed))


@brought_by("resume of a parked job")
def _resume(api: Api, _: Any) -> Callable[[], Any]:
    _, wait = api.a_parked_job()
    return lambda: ok(api.post(wait["urls"]["resume"], {}))


@brought_by("retry by a callback")
def _callback_retry(api: Api, _: Any) -> Callable[[], Any]:
    _, wait = api.a_parked_job()
    return lambda: ok(api.post(wait["urls"]["retry"], {}))


@brought_by("rescue")
def _rescue(api: Api, db: "psycopg.Connection[Any]") -> Callable[[], Any]:
    claimed = api.a_running_job(backoff={"kind": "fixed", "base_seconds": 0})

    def do() -> None:
        move(db, claimed, "lease_expires_at", -3600)
        eventually(lambda: api.job(claimed)["state"] == "available")

    return do


@brought_by("a new due time")
def _new_due_time(api: Api, _: Any) -> Callable[[], Any]:
    job = api.a_job_in("scheduled")

    def do() -> None:
        ok(api.client.patch(f"/v1/jobs/{job['id']}", json={"run_at": "2000-01-01T00:00:00Z"}))
        eventually(lambda: api.job(job)["state"] == "available")

    return do


@pytest.mark.parametrize("way", BROUGHT_BY)
def test_no_claim_answers_after_the_pause_however_the_job_came(
    api: Api, elsewhere: Api, db: "psycopg.Connection[Any]", are_waiting: Callable[[int], None], way: str
) -> None:
    bring = BROUGHT_BY[way](api, db)
    with ThreadPoolExecutor(6) as pool:
        polls = [pool.submit(each.claims, wait_seconds=0.4) for each in [api, elsewhere] * 3]
        are_waiting(6)
        pause(api)
        bring()
        assert [poll.result(10)["jobs"] for poll in polls] == [[]] * 6
    assert [each.claims()["jobs"] for each in (api, elsewhere)] == [[], []]
    resume(api)
    assert len(api.claims(wait_seconds=10)["jobs"]) == 1


def test_no_claim_is_committed_after_the_pause_while_jobs_and_polls_keep_coming(
    api: Api, elsewhere: Api, db: "psycopg.Connection[Any]"
) -> None:
    def claims() -> Any:
        return db.execute("SELECT sum(lease_number) FROM towpath.jobs WHERE queue = %s", [api.queue]).fetchone()

    with ThreadPoolExecutor(12) as pool:
        for n in range(6):
            api.enqueue_many(n + 1)
            producing = pool.submit(lambda: [api.enqueue() for _ in range(10)])
            polls = [pool.submit(each.claims, limit=2, wait_seconds=0.2) for each in [api, elsewhere] * 5]
            eventually(lambda: claims()[0])
            pause(elsewhere)
            at_the_pause = claims()
            producing.result(20)
            for poll in polls:
                poll.result(20)
            assert claims() == at_the_pause
            resume(api)


def test_a_pause_waits_for_the_claim_before_it(
    api: Api, elsewhere: Api, db: "psycopg.Connection[Any]", connect: Callable[[], "psycopg.Connection[Any]"]
) -> None:
    api.enqueue()
    claiming = connect()
    claiming.execute("SELECT FROM towpath.queues WHERE name = %s FOR SHARE", [api.queue])  # as a claim does
    blocked = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with ThreadPoolExecutor(1) as pool:
        pausing = pool.submit(pause, elsewhere)
        eventually(lambda: db.execute(blocked).rowcount == 1)
        assert not pausing.done()
        claiming.rollback()
        assert pausing.result(10)["paused"] is True


def test_a_pause_survives_a_restart(new_settings: Callable[..., Settings], queue: str) -> None:
    settings = new_settings()
    with ServiceThread(settings) as first, client_of(first.url) as client:
        api = Api(client, queue)
        api.enqueue()
        pause(api)
    with ServiceThread(settings) as second, client_of(second.url) as client:
        api = Api(client, queue)
        api.enqueue()
        assert (api.claims()["jobs"], api.claims()["reason"]) == ([], "paused")
        resume(api)
        assert len(api.claims(limit=5)["jobs"]) == 2


@pytest.mark.parametrize("where", ["the same service", "another service"])
def test_a_resume_wakes_waiting_polls(api: Api, elsewhere: Api, are_waiting: Callable[[int], None], where: str) -> None:
    jobs = set(api.enqueue_many(4))
    pause(api)
    with ThreadPoolExecutor(4) as pool:
        polls = [pool.submit(api.claim, wait_seconds=30) for _ in range(4)]
        are_waiting(4)
        resume(elsewhere if where == "another service" else api)
        assert {poll.result(5)["id"] for poll in polls} == jobs
