"""Claims begin where the last one ended; whatever becomes claimable further in front is found all the same."""

from collections.abc import Callable
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from app.work.claim import _AFTER
from tests.build import JSON, Api, ok
from tests.waiting import eventually

Connection = psycopg.Connection[Any]


def backlog(api: Api, jobs: int = 200) -> list[str]:
    """Waiting jobs, of which the first have been claimed, so that the cursor stands among them."""
    ids = api.enqueue_many(jobs)
    taken = api.claims(limit=20)["jobs"]
    assert [job["id"] for job in taken] == ids[:20]
    return ids[20:]


def until_claimed(api: Api, job: str) -> list[str]:
    """Claims one by one until this job comes; those that came before it."""
    before: list[str] = []
    for _ in range(100):
        claimed = api.claim()
        if claimed["id"] == job:
            return before
        before.append(claimed["id"])
    raise AssertionError("it was not claimed")


def test_jobs_come_in_order_across_claims(api: Api) -> None:
    ids = backlog(api)
    claimed: list[str] = []
    while len(claimed) < len(ids):
        claimed += [job["id"] for job in api.claims(limit=7)["jobs"]]
    assert claimed == ids


def test_a_more_urgent_job_does_not_wait_for_the_backlog(api: Api) -> None:
    backlog(api)
    urgent = api.enqueue(priority=1)["id"]
    assert len(until_claimed(api, urgent)) < 10


def test_a_released_job_has_its_place_again(api: Api) -> None:
    api.enqueue_many(200)
    first, *_ = api.claims(limit=20)["jobs"]
    ok(api.settle("release", first))
    assert len(until_claimed(api, first["id"])) < 10


def test_a_resumed_job_has_its_place_again(api: Api) -> None:
    api.enqueue_many(200)
    first, *_ = api.claims(limit=20)["jobs"]
    wait = api.open_wait(first)
    ok(api.settle("park", first, wait_id=wait["wait_id"]))
    api.claims(limit=20)
    ok(api.client.post(wait["urls"]["resume"]))
    assert len(until_claimed(api, first["id"])) < 10


def test_a_job_whose_producer_commits_late_is_not_passed_over(api: Api, connect: Callable[[], Connection]) -> None:
    producer = connect()
    enqueue = "SELECT towpath.enqueue('work', %s, queue => %s)"
    row = producer.execute(enqueue, [Jsonb({}), api.queue]).fetchone()
    assert row
    backlog(api)  # came later, was committed before
    producer.commit()
    assert len(until_claimed(api, str(row[0]))) < 10


def test_what_nobody_told_of_is_found_a_little_later(api: Api, db: Connection) -> None:
    ids = backlog(api, 400)
    moved = ids[-1]
    db.execute("UPDATE towpath.jobs SET claim_order = claim_order - interval '1 hour' WHERE id = %s", [moved])

    def claimed() -> bool:
        job: JSON = api.claim()
        assert job["id"] != ids[-2], "it was found only in its old place"
        return bool(job["id"] == moved)

    eventually(claimed)


def test_an_empty_queue_is_looked_at_from_its_start(api: Api, db: Connection) -> None:
    api.enqueue_many(3)
    first, *_ = api.claims(limit=3)["jobs"]
    db.execute(
        """UPDATE towpath.jobs SET state = 'available', attempt = 0, lease_expires_at = NULL, deadline_at = NULL
        WHERE id = %s""",
        [first["id"]],
    )
    assert api.claims()["jobs"][0]["id"] == first["id"]


def test_dead_entries_in_front_of_the_cursor_are_not_read(
    db: Connection, connect: Callable[[], Connection], queue: str
) -> None:
    old = connect()
    old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    old.execute("SELECT count(*) FROM towpath.queues")
    db.execute("SET session_replication_role = replica")
    db.execute(
        """INSERT INTO towpath.jobs (id, queue, kind, state, max_attempts, run_at, claim_order, args)
        SELECT gen_random_uuid(), %s, 'work', 'available', 20, now(), now() + n * interval '1 ms', '{}'
        FROM generate_series(1, 20000) AS n""",
        [queue],
    )
    db.execute(
        "UPDATE towpath.jobs SET state = 'cancelled', finished_at = now() WHERE queue = %s AND claim_order < ("
        "SELECT max(claim_order) - interval '100 ms' FROM towpath.jobs WHERE queue = %s)",
        [queue, queue],
    )
    row = db.execute(
        "SELECT (extract(epoch FROM min(claim_order)) * 1000000)::bigint FROM towpath.jobs"
        " WHERE queue = %s AND state = 'available'",
        [queue],
    ).fetchone()
    assert row
    read = [pages_read(db, queue, condition, row[0]) for condition in ("", _AFTER)]
    print(f"pages: {read[0]} from the start, {read[1]} from the cursor")
    assert read[0] > 100
    assert read[1] < 20
    db.execute("SET session_replication_role = origin")


def pages_read(db: Connection, queue: str, condition: str, after: int) -> int:
    """How much of the index a look for ten jobs reads."""
    db.execute("SET enable_seqscan = off")
    db.execute("SET enable_bitmapscan = off")
    db.execute("SET enable_sort = off")
    query = (
        "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT id FROM towpath.jobs WHERE queue = %(queue)s"
        f" AND state = 'available' {condition} ORDER BY claim_order, id LIMIT 10"
    )
    row = db.execute(query, {"queue": queue, "after": after}).fetchone()
    assert row
    plan = row[0][0]["Plan"]
    return int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])
