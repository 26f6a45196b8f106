"""Protects the hot path from the planner: every hot statement finds its rows by key, whatever the statistics say.

A busy queue's statistics are always wrong, and under a held snapshot a partial index is full of dead entries. So a
look-up by id must use the primary key, a claim the index of what is next, and nothing may read a whole table.

The statements are those that the service itself sends: each operation is run on the service's own connections, and
what it prepared there is explained, as the generic plan that it runs with.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from cryptography.fernet import Fernet
from msgspec import Raw

from app.callbacks.correlation import Delivery, deliver
from app.callbacks.evaluator import Evaluator
from app.callbacks.open import open_wait
from app.callbacks.payloads import NO_PAYLOAD
from app.callbacks.resolve import Arrival, Resolver, extend
from app.callbacks.rotate import rotate
from app.callbacks.schemas import Correlation, OpenWait
from app.database import engine
from app.database.engine import Database
from app.database.tables import metadata
from app.errors import Refusal
from app.jobs.control import Order, change, control
from app.jobs.enqueue import Enqueuer, Request, checked
from app.jobs.schemas import JobChanges
from app.jobs.transition import Item, Question, apply, diagnose, lock_jobs
from app.lifecycle import STEPS, Actor
from app.runtime import _FINISHED, _RESOLVED, _UNPARKED
from app.secrets.encryption import Vault
from app.settings import Settings
from app.work.claim import Wanted, claim, held
from app.work.heartbeat import Pulse, keep
from app.work.settle import Outcome, settle

HOT_STEPS = sorted(name for name, step in STEPS.items() if step.actors != {Actor.MAINTENANCE} and name != "claim")
QUEUE = "q1"


# --- Statistics ---------------------------------------------------------------------------------------------------

FILL = """INSERT INTO towpath.jobs (id, queue, kind, state, attempt, max_attempts, lease_number, run_at, claim_order,
    lease_expires_at, finished_at, claim_id, worker, lease_seconds, args)
SELECT gen_random_uuid(), 'q' || n %% 3, 'work', %(state)s, %(claimed)s, 20, %(claimed)s, now(),
    now() + n * interval '1 ms', CASE WHEN %(state)s = 'running' THEN now() + interval '1 day' END,
    CASE WHEN %(state)s = 'completed' THEN now() END, gen_random_uuid(), 'w', 60, '{}'
FROM generate_series(1, %(rows)s) AS n"""


def fill(connection: "psycopg.Connection[Any]", state: str, rows: int) -> None:
    """Jobs in one state, past the guard."""
    connection.execute("SET session_replication_role = replica")
    connection.execute(FILL, {"state": state, "rows": rows, "claimed": 0 if state == "available" else 1})
    connection.execute("SET session_replication_role = origin")


def fresh(connection: "psycopg.Connection[Any]") -> None:
    for state, rows in (("available", 5_000), ("completed", 5_000), ("running", 300)):
        fill(connection, state, rows)
    connection.execute("ANALYZE")


def empty_when_analyzed(connection: "psycopg.Connection[Any]") -> None:
    connection.execute("ANALYZE")
    for state, rows in (("available", 5_000), ("completed", 5_000), ("running", 300)):
        fill(connection, state, rows)


def all_finished_when_analyzed(connection: "psycopg.Connection[Any]") -> None:
    """The partial indices of the other states look empty, and so the cheapest to read."""
    fill(connection, "completed", 5_000)
    connection.execute("ANALYZE")
    for state, rows in (("available", 5_000), ("running", 2_000)):
        fill(connection, state, rows)


STATISTICS = (fresh, empty_when_analyzed, all_finished_when_analyzed)


# --- Operations ---------------------------------------------------------------------------------------------------


@dataclass
class Running:
    """A job that runs, to go on with."""

    id: UUID
    lease_number: int = 1


Operation = Callable[[Database, Running], Awaitable[Any]]
OPERATIONS: dict[str, Operation] = {}


def operation(do: Operation) -> Operation:
    OPERATIONS[do.__name__] = do
    return do


def wanted() -> list[Wanted]:
    return [Wanted(1, 5, str(uuid4()), "w", None), Wanted(6, 9, str(uuid4()), "w", 30.0)]


@operation
async def claim_any(database: Database, _: Running) -> None:
    async with database.hot.connection() as connection:
        assert (await claim(connection, QUEUE, [], wanted()))[0]


@operation
async def claim_after(database: Database, _: Running) -> None:
    async with database.hot.connection() as connection:
        assert (await claim(connection, QUEUE, [], wanted(), after=0))[0]


@operation
async def claim_of_kinds(database: Database, _: Running) -> None:
    async with database.hot.connection() as connection:
        assert (await claim(connection, QUEUE, ["work", "other"], wanted()))[0]


@operation
async def claim_of_new_queue(database: Database, _: Running) -> None:
    async with database.hot.connection() as connection:
        assert await claim(connection, "nobody-knows-it", [], wanted()) == ([], None)


@operation
async def claim_repeated(database: Database, _: Running) -> None:
    async with database.hot.connection() as connection:
        await held(connection, [QUEUE], [uuid4()])


@operation
async def heartbeat(database: Database, running: Running) -> None:
    (kept,) = await keep(database, [Pulse(id=str(running.id), lease_number=running.lease_number)])
    assert kept.status == "ok"


@operation
async def heartbeat_lost(database: Database, running: Running) -> None:
    (kept,) = await keep(database, [Pulse(id=str(running.id), lease_number=7)])
    assert kept.status == "lost"


@operation
async def report_lost(database: Database, running: Running) -> None:
    item = Item(n=0, id=str(running.id), lease_number=7)
    (answer,) = await settle(database, [Outcome(STEPS["complete"], item, UUID(item.id))])
    assert isinstance(answer, Refusal)


@operation
async def explain_what_did_not_move(database: Database, running: Running) -> None:
    async with database.hot.connection() as connection:
        assert await diagnose(connection, [Question(n=0, id=str(running.id), lease_number=7, step="complete")])


@operation
async def lock(database: Database, running: Running) -> None:
    async with database.transaction() as connection:
        await lock_jobs(connection, [str(running.id), str(uuid4())])


def resolver() -> Resolver:
    return Resolver(Vault((Fernet.generate_key().decode(),)), Evaluator(seconds=1))


async def opened_wait(database: Database, running: Running, **opening: Any) -> UUID:
    wanted = OpenWait(lease="not looked at", **opening)
    lease: dict[str, Any] = {"job_id": running.id, "lease_number": running.lease_number}
    return (await open_wait(database, resolver(), wait_id=uuid4(), wanted=wanted, **lease)).id


async def parked(database: Database, running: Running, *waits: UUID) -> None:
    item = Item(n=0, id=str(running.id), lease_number=running.lease_number, attached=True, answers_needed=len(waits))
    item.wait_ids = [str(wait) for wait in waits]
    for _repeat in range(2):
        (answer,) = await settle(database, [Outcome(STEPS["park"], item, UUID(item.id))])
        assert not isinstance(answer, Exception)
        assert answer.state == "waiting_external"


@operation
async def park_and_call_back(database: Database, running: Running) -> None:
    waits = [await opened_wait(database, running, name=name) for name in ("approval", "approval", "payment")][1:]
    await extend(database, waits[0], 0, 90.0)
    await parked(database, running, *waits)
    answers = await resolver().resolve(database, [Arrival(wait, "resume", NO_PAYLOAD, 0) for wait in waits])
    assert [getattr(answer, "job_state", answer) for answer in answers] == ["waiting_external", "running"]


@operation
async def deliver_to_waits_and_wait_for_deliveries(database: Database, running: Running) -> None:
    correlation = Correlation(hook="hook", key=str(running.id))
    wait = await opened_wait(database, running, name="paid", correlation=correlation)
    await parked(database, running, wait)
    for key, matched in ((correlation.key, 1), ("nobody's", 0)):
        for _repeat in range(2):
            delivery = Delivery(uuid4(), "hook", f"{running.id} {key}", key, NO_PAYLOAD)
            assert (await deliver(database, resolver(), delivery)).matched == matched
    await opened_wait(database, running, name="next", correlation=Correlation(hook="hook", key="nobody's"))


@operation
async def rotate_urls(database: Database, running: Running) -> None:
    wait = await opened_wait(database, running, name="secret")
    assert await rotate(database, running.id, wait) == 1


@operation
async def cancel_and_redrive_nothing(database: Database, _: Running) -> None:
    await control(database, [Order(STEPS["cancel"], uuid4()), Order(STEPS["redrive"], uuid4())])


@operation
async def change_a_pending_job(database: Database, _: Running) -> None:
    request = Request([checked(b'{"kind": "work", "queue": "q1", "delay_seconds": 3600}', 1024)])
    (enqueued,) = await Enqueuer(database).insert([request])
    assert not isinstance(enqueued, Exception)
    await change(database, UUID(enqueued.receipts[0].id), JobChanges(priority=1))


@operation
async def enqueue(database: Database, _: Running) -> None:
    enqueuer = Enqueuer(database)
    for _repeat in range(2):
        request = Request([checked(b'{"kind": "work", "queue": "q1"}', 1024)], key="the same")
        (enqueued,) = await enqueuer.insert([request])
        assert not isinstance(enqueued, Exception)


@operation
async def watch(database: Database, running: Running) -> None:
    async with database.hot.connection() as connection:
        for reached in (_FINISHED, _RESOLVED, _UNPARKED):
            await connection.execute(reached, {"ids": [running.id]})


def step_of_nothing(name: str) -> Operation:
    async def do(database: Database, _: Running) -> None:
        async with database.transaction() as connection:
            item = Item(n=0, id=str(uuid4()), lease_number=1, delay_seconds=1.0, error=Raw(b"{}"))
            assert await apply(connection, STEPS[name], [item]) == []

    return do


for _step in HOT_STEPS:
    OPERATIONS[f"step {_step}"] = step_of_nothing(_step)


# --- Plans --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scan:
    """How a plan reads a table."""

    how: str
    table: str
    index: str | None


@dataclass(frozen=True)
class Explained:
    """A statement that an operation prepared, and its plan."""

    sql: str
    plan: dict[str, Any]

    @property
    def nodes(self) -> Iterator[dict[str, Any]]:
        """Every node of the plan."""
        yield from _nodes(self.plan)

    @property
    def scans(self) -> list[Scan]:
        """Every access to a table."""
        return [
            Scan(node["Node Type"], node["Relation Name"], node.get("Index Name"))
            for node in self.nodes
            if "Relation Name" in node and node["Node Type"] != "ModifyTable"
        ]


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", ()):
        yield from _nodes(child)


Plans = dict[str, list[Explained]]


async def explained(settings: Settings, running: Iterator[Running]) -> Plans:
    """Run each operation, and explain what it prepared."""
    plans: Plans = {}
    for name, do in OPERATIONS.items():
        # A connection of its own, the only one: what another operation has prepared counts for this one, too.
        async with engine.opened(settings) as database:
            await database.hot.wait()
            await do(database, next(running))
            plans[name] = await explanations(database)
            assert database.hot.get_stats()["pool_size"] == 1
    return plans


async def explanations(database: Database) -> list[Explained]:
    async with database.hot.connection() as connection:
        prepared = await connection.execute(
            """SELECT name, statement, cardinality(parameter_types) FROM pg_prepared_statements
            WHERE statement LIKE '%towpath.%'""",
            prepare=False,
        )
        found = []
        for name, sql, parameters in await prepared.fetchall():
            nothing = f"({', '.join(['NULL'] * parameters)})" if parameters else ""
            cursor = await connection.execute(f"EXPLAIN (FORMAT JSON) EXECUTE {name}{nothing}", prepare=False)
            row = await cursor.fetchone()
            assert row
            found.append(Explained(sql, row[0][0]["Plan"]))
        return found


@pytest.fixture(scope="module", params=STATISTICS, ids=lambda statistics: statistics.__name__)
def busy(request: pytest.FixtureRequest, new_settings: Callable[..., Settings]) -> Settings:
    """A database with a lot of jobs, and statistics that stay as they are for as long as the test looks."""
    settings = new_settings()
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        for table in ("jobs", "waits", "job_events", "queues", "idempotency_keys", "hooks", "hook_deliveries"):
            connection.execute(f"ALTER TABLE towpath.{table} SET (autovacuum_enabled = false)")
        connection.execute("INSERT INTO towpath.queues (name) VALUES ('q0'), ('q1'), ('q2')")
        connection.execute("INSERT INTO towpath.hooks (name, correlation, keep_seconds) VALUES ('hook', 'key', 60)")
        request.param(connection)
    return settings


@pytest.fixture(scope="module")
def plans(busy: Settings) -> Plans:
    """Each operation's statements with their plans."""
    with psycopg.connect(busy.database_url) as connection:
        rows = connection.execute("SELECT id FROM towpath.jobs WHERE state = 'running' LIMIT 100").fetchall()
    return asyncio.run(explained(busy, (Running(row[0]) for row in rows)))


@pytest.mark.parametrize("name", OPERATIONS)
class TestEveryHotStatement:
    def test_is_explained(self, plans: Plans, name: str) -> None:
        assert plans[name]

    def test_reads_no_whole_table(self, plans: Plans, name: str) -> None:
        for each in plans[name]:
            whole = [scan for scan in each.scans if "Index" not in scan.how or scan.how.startswith("Bitmap")]
            assert whole == [], each.sql

    def test_reads_jobs_by_key(self, plans: Plans, name: str) -> None:
        by_key = {"jobs_pkey"}
        if name.startswith("claim_"):
            by_key |= {"jobs_held"} if name == "claim_repeated" else {"jobs_next"}
        for each in plans[name]:
            used = {scan.index for scan in each.scans if scan.table == "jobs"}
            assert used <= by_key, each.sql


@pytest.mark.parametrize("name", ["claim_any", "claim_of_kinds"])
class TestClaim:
    def test_takes_the_next_jobs_off_their_index(self, plans: Plans, name: str) -> None:
        (picked,) = picks(plans[name])
        assert [node["Index Name"] for node in _nodes(picked) if "Index Name" in node] == ["jobs_next"]

    def test_sorts_nothing_to_find_them(self, plans: Plans, name: str) -> None:
        (picked,) = picks(plans[name])
        assert "Sort" not in {node["Node Type"] for node in _nodes(picked)}


def picks(explained: list[Explained]) -> list[dict[str, Any]]:
    """The part of a claim that chooses the jobs."""
    return [node for each in explained for node in each.nodes if node.get("Subplan Name") == "CTE picked"]


class TestEnqueue:
    """The insert is a function: its inner statements are watched at work, by what they scan."""

    @pytest.fixture
    def scans(self, busy: Settings) -> dict[str, int]:
        """How often the insert of a few jobs scans each table from end to end, and each index."""
        with psycopg.connect(engine.conninfo(busy, "hot", pinned=True)) as connection:
            connection.execute(
                """SELECT * FROM towpath.insert_jobs(
                    (SELECT jsonb_agg(jsonb_build_object('r', n, 'n', 0, 'id', gen_random_uuid(), 'queue', 'q1',
                        'kind', 'work', 'priority', 2)) FROM generate_series(1, 5) AS n),
                    '[{"r": 1, "key": "a key", "batch": false, "keep_seconds": 60}]')"""
            )
            counted = connection.execute(
                """SELECT relname, pg_stat_get_xact_numscans(oid) FROM pg_class
                WHERE relnamespace = 'towpath'::regnamespace AND relkind IN ('r', 'i')"""
            ).fetchall()
            connection.rollback()
        return {name: count for name, count in counted if count}

    def test_reads_no_whole_table(self, scans: dict[str, int]) -> None:
        assert not scans.keys() & {table.name for table in metadata.sorted_tables}

    def test_looks_jobs_up_by_key_alone(self, scans: dict[str, int]) -> None:
        assert {name for name in scans if name.startswith("jobs")} <= {"jobs_pkey"}

    def test_looks_queues_up_by_name(self, scans: dict[str, int]) -> None:
        assert "queues_pkey" in scans
