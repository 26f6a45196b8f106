"""Protects the schema: migrations go up, down and up again, make what the table definitions say, and never hang.

And that a service does not start on a database that is not at its own revision.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import NullPool, create_engine, text

from alembic import command
from app.database.migrations import (
    WrongRevision,
    configuration,
    current_revision,
    downgrade,
    head_revision,
    upgrade,
)
from app.database.tables import SCHEMA, metadata
from app.main import create_app
from app.settings import Settings
from tests.servers import ROOT

Catalogue = dict[str, Any]

INDEXES = {
    "queues_pkey": "what is this queue set to",
    "jobs_pkey": "what is this job",
    "jobs_next": "what is next",
    "jobs_held": "who holds what",
    "jobs_due": "what is due",
    "jobs_start_by": "what was not started in time",
    "jobs_final": "what may retention delete",
    "waits_pkey": "what is this wait",
    "waits_name_once": "has the attempt a wait of this name",
    "waits_over": "which wait is over",
    "waits_correlated": "who waits for this key",
    "refused_callbacks_pkey": "what is this callback",
    "refused_callbacks_of_wait": "which callbacks did not resolve this wait",
    "secrets_pkey": "what is this secret",
    "hooks_pkey": "what is this hook",
    "hook_deliveries_pkey": "what is this delivery",
    "hook_deliveries_once": "did this delivery come before",
    "hook_deliveries_unmatched": "did the answer come before its wait",
    "hook_deliveries_expiry": "which delivery is old",
    "job_events_pkey": "what is this event",
    "job_events_of_job": "what happened to this job",
    "idempotency_keys_pkey": "was this key used",
    "idempotency_keys_expiry": "which key is old",
    "signing_keys_pkey": "is this signing key known",
}
"""Every index and the one question that it answers."""

COLUMNS = """SELECT c.relname, a.attname,
    row_number() OVER (PARTITION BY a.attrelid ORDER BY a.attnum), format_type(a.atttypid, a.atttypmod), a.attnotnull,
    a.attidentity,
    pg_get_expr(d.adbin, d.adrelid)
FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid AND c.relkind = 'r'
LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE c.relnamespace = 'towpath'::regnamespace AND a.attnum > 0 AND NOT a.attisdropped
    AND c.relname <> 'alembic_version'"""
CONSTRAINTS = """SELECT r.conname, c.relname, r.contype, pg_get_constraintdef(r.oid), r.convalidated, r.condeferrable
FROM pg_constraint AS r JOIN pg_class AS c ON c.oid = r.conrelid
WHERE r.connamespace = 'towpath'::regnamespace AND r.contype <> 'n' AND c.relname <> 'alembic_version'"""
INDEX_DEFINITIONS = """SELECT c.relname, pg_get_indexdef(i.indexrelid), i.indisvalid
FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid
WHERE c.relnamespace = 'towpath'::regnamespace AND c.relname <> 'alembic_version_pkc'"""
FUNCTIONS = """SELECT p.proname, pg_get_functiondef(p.oid) FROM pg_proc AS p
WHERE p.pronamespace = 'towpath'::regnamespace"""
TRIGGERS = """SELECT t.tgname, pg_get_triggerdef(t.oid) FROM pg_trigger AS t
JOIN pg_class AS c ON c.oid = t.tgrelid WHERE c.relnamespace = 'towpath'::regnamespace AND NOT t.tgisinternal"""


def catalogue(url: str, **queries: str) -> dict[str, list[tuple[Any, ...]]]:
    """What PostgreSQL says that is in the schema."""
    with psycopg.connect(url) as connection:
        return {name: sorted(connection.execute(query).fetchall(), key=repr) for name, query in queries.items()}


def everything(url: str) -> dict[str, list[tuple[Any, ...]]]:
    return catalogue(
        url,
        columns=COLUMNS,
        constraints=CONSTRAINTS,
        indexes=INDEX_DEFINITIONS,
        functions=FUNCTIONS,
        triggers=TRIGGERS,
    )


@pytest.fixture(scope="module")
def migrated(new_database: Callable[[], str]) -> str:
    """A database that the migrations made."""
    url = new_database()
    upgrade(url)
    return url


@pytest.fixture(scope="module")
def defined(new_database: Callable[[], str]) -> str:
    """A database that the table definitions made."""
    url = new_database()
    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(url), poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {SCHEMA}"))
        metadata.create_all(connection)
    return url


class TestUpAndDown:
    def test_head_is_the_same_after_base(self, new_database: Callable[[], str]) -> None:
        url = new_database()
        upgrade(url)
        first = everything(url)
        downgrade(url)
        upgrade(url)
        assert everything(url) == first

    def test_base_leaves_nothing_behind(self, new_database: Callable[[], str]) -> None:
        url = new_database()
        upgrade(url)
        downgrade(url)
        assert everything(url) == dict.fromkeys(everything(url), [])

    def test_base_goes_from_tables_in_use(self, new_database: Callable[[], str]) -> None:
        url = new_database()
        upgrade(url)
        with psycopg.connect(url) as connection:
            connection.execute("SELECT towpath.enqueue('work')")
        downgrade(url)
        assert current_revision(url) is None

    def test_up_to_date_stays_as_it_is(self, migrated: str) -> None:
        before = everything(migrated)
        upgrade(migrated)
        assert everything(migrated) == before

    def test_jobs_survive_a_repeated_upgrade(self, new_database: Callable[[], str]) -> None:
        url = new_database()
        upgrade(url)
        with psycopg.connect(url) as connection:
            connection.execute("SELECT towpath.enqueue('work')")
        upgrade(url)
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT count(*) FROM towpath.jobs").fetchone() == (1,)


class TestMigratedIsDefined:
    """The migrations and `tables.py` say the same, down to the text of each condition."""

    @pytest.mark.parametrize(
        ("what", "query"),
        [("columns", COLUMNS), ("constraints", CONSTRAINTS), ("indexes", INDEX_DEFINITIONS)],
        ids=["columns", "constraints", "indexes"],
    )
    def test_the_catalogues_are_equal(self, migrated: str, defined: str, what: str, query: str) -> None:
        made, said = catalogue(migrated, **{what: query})[what], catalogue(defined, **{what: query})[what]
        assert made
        assert made == said

    def test_alembic_finds_nothing_to_do(self, migrated: str) -> None:
        command.check(configuration(migrated))

    def test_there_is_no_index_without_a_question(self, migrated: str) -> None:
        found = {name for name, *_ in catalogue(migrated, indexes=INDEX_DEFINITIONS)["indexes"]}
        assert found == set(INDEXES)

    def test_no_index_holds_what_a_heartbeat_changes(self, migrated: str) -> None:
        beaten = ("lease_expires_at", "lease_seconds", "progress", "checkpoint")
        definitions = [definition for _, definition, _ in catalogue(migrated, it=INDEX_DEFINITIONS)["it"]]
        assert not [definition for definition in definitions for column in beaten if column in definition]


class TestLimits:
    """A migration that meets a lock of the running service gives up; it does not queue up everyone behind it."""

    @pytest.fixture
    def noting(self, new_database: Callable[[], str]) -> str:
        """An empty database that notes the limits that each CREATE TABLE runs under."""
        url = new_database()
        with psycopg.connect(url) as connection:
            connection.execute("CREATE TABLE public.noted (setting text, seconds double precision)")
            connection.execute(
                """CREATE FUNCTION public.note() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN
                    INSERT INTO public.noted SELECT s, extract(epoch FROM current_setting(s)::interval)
                    FROM unnest('{lock_timeout,statement_timeout}'::text[]) AS s;
                END $$"""
            )
            connection.execute(
                """CREATE EVENT TRIGGER note ON ddl_command_end WHEN TAG IN ('CREATE TABLE')
                EXECUTE FUNCTION public.note()"""
            )
        return url

    @pytest.mark.parametrize(("setting", "most"), [("lock_timeout", 10), ("statement_timeout", 120)])
    def test_a_migration_runs_under_limits(self, noting: str, setting: str, most: float) -> None:
        upgrade(noting)
        with psycopg.connect(noting) as connection:
            rows = connection.execute("SELECT seconds FROM public.noted WHERE setting = %s", [setting]).fetchall()
        assert len(rows) > len(metadata.tables)  # Alembic's own table, too
        assert all(0 < seconds <= most for (seconds,) in rows)


class TestTwoMigrators:
    def test_both_succeed(self, new_database: Callable[[], str]) -> None:
        url = new_database()
        with psycopg.connect(url, autocommit=True) as gate:
            gate.execute("SELECT pg_advisory_lock(hashtext('towpath migrations'))")
            with migrating(url) as first, migrating(url) as second:
                try:
                    until_waiting(gate, 2)
                finally:
                    gate.execute("SELECT pg_advisory_unlock_all()")
                said = [(each.communicate(timeout=60)[0], each.returncode) for each in (first, second)]
        assert [status for _, status in said] == [0, 0], said
        assert current_revision(url) == head_revision()


def migrating(url: str) -> "subprocess.Popen[str]":
    """`towpath migrate`, on its way."""
    return subprocess.Popen(
        [sys.executable, "-m", "app", "migrate"],
        cwd=ROOT,
        env={**os.environ, "TOWPATH_DATABASE_URL": url},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def until_waiting(gate: "psycopg.Connection[Any]", migrators: int) -> None:
    """Returns when so many wait for the lock that the gate holds."""
    give_up_at = time.monotonic() + 30
    while time.monotonic() < give_up_at:
        row = gate.execute(
            """SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""
        ).fetchone()
        if row == (migrators,):
            return
        time.sleep(0.02)
    raise AssertionError("the migrators do not wait for each other")


class TestServiceNeedsItsRevision:
    async def _start(self, settings: Settings) -> None:
        app = create_app(settings)
        async with app.router.lifespan_context(app):
            pass

    @pytest.fixture
    def settings_of(self, tmp_path: Path) -> Callable[[str], Settings]:
        def make(url: str) -> Settings:
            return Settings(database_url=url, data_directory=tmp_path)

        return make

    def test_it_starts_on_its_own(self, migrated: str, settings_of: Callable[[str], Settings]) -> None:
        asyncio.run(self._start(settings_of(migrated)))

    def test_it_refuses_an_empty_database(
        self, new_database: Callable[[], str], settings_of: Callable[[str], Settings]
    ) -> None:
        with pytest.raises(WrongRevision, match=r"at revision none, .* run `towpath migrate`"):
            asyncio.run(self._start(settings_of(new_database())))

    def test_it_refuses_a_database_taken_back_to_base(
        self, new_database: Callable[[], str], settings_of: Callable[[str], Settings]
    ) -> None:
        url = new_database()
        upgrade(url)
        downgrade(url)
        with pytest.raises(WrongRevision, match="towpath migrate"):
            asyncio.run(self._start(settings_of(url)))

    def test_it_refuses_a_newer_database_and_says_what_else_may_be_wrong(
        self, new_database: Callable[[], str], settings_of: Callable[[str], Settings]
    ) -> None:
        url = new_database()
        upgrade(url)
        with psycopg.connect(url) as connection:
            connection.execute("UPDATE towpath.alembic_version SET version_num = '9999'")
        with pytest.raises(WrongRevision, match=r"at revision 9999, .* if the database is newer"):
            asyncio.run(self._start(settings_of(url)))

    def test_the_command_exits_with_the_message_and_no_trace(
        self, new_database: Callable[[], str], tmp_path: Path
    ) -> None:
        served = subprocess.run(
            [sys.executable, "-m", "app", "serve", "--port", "0"],
            cwd=ROOT,
            env={
                **os.environ,
                "TOWPATH_DATABASE_URL": new_database(),
                "TOWPATH_DATA_DIRECTORY": str(tmp_path),
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert served.returncode == 1
        assert served.stderr.startswith("towpath: The database is at revision none")
        assert "run `towpath migrate`" in served.stderr
        assert "Traceback" not in served.stderr


class TestCallbacksInFull:
    """From one wait per park to several: what is parked stays parked, and nothing is lost on the way back."""

    @pytest.fixture
    def parked(self, new_database: Callable[[], str]) -> str:
        """A database of the revision before, with a job that is parked on its wait."""
        url = new_database()
        upgrade(url, "0001")
        with psycopg.connect(url) as connection:
            connection.execute("SET session_replication_role = replica")
            connection.execute(
                """INSERT INTO towpath.jobs (id, queue, kind, state, attempt, max_attempts, lease_number, run_at,
                    claim_order, waiting_on, args)
                VALUES ('00000000-0000-7000-8000-000000000001', 'q', 'k', 'waiting_external', 1, 20, 1, now(), now(),
                    '00000000-0000-7000-8000-000000000002', '{}')"""
            )
            connection.execute(
                """INSERT INTO towpath.waits (id, job_id, lease_number, attempt, name, timeout_seconds, deadline_at)
                VALUES ('00000000-0000-7000-8000-000000000002', '00000000-0000-7000-8000-000000000001', 1, 1,
                    'payment', 3600, now() + interval '1 hour')"""
            )
        return url

    def test_a_parked_job_waits_for_its_one_answer(self, parked: str) -> None:
        upgrade(parked)
        with psycopg.connect(parked) as connection:
            row = connection.execute("SELECT waiting_on::text, answers_needed FROM towpath.jobs").fetchone()
        assert row == ("{00000000-0000-7000-8000-000000000002}", 1)

    def test_it_waits_for_it_on_the_way_back_too(self, parked: str) -> None:
        upgrade(parked)
        downgrade(parked, "0001")
        with psycopg.connect(parked) as connection:
            row = connection.execute("SELECT state, waiting_on::text FROM towpath.jobs").fetchone()
        assert row == ("waiting_external", "00000000-0000-7000-8000-000000000002")

    def test_a_park_on_several_waits_is_not_taken_back(self, parked: str) -> None:
        upgrade(parked)
        with psycopg.connect(parked) as connection:
            connection.execute("SET session_replication_role = replica")
            connection.execute("UPDATE towpath.jobs SET waiting_on = waiting_on || gen_random_uuid()")
        with pytest.raises(psycopg.errors.RaiseException, match="wait for several answers"):
            downgrade(parked, "0001")
        assert current_revision(parked) == "0002"
