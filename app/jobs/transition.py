"""Applies a lifecycle step to a set of jobs, in one guarded statement.

Besides the claim (`work/claim.py`) and the insert (`towpath.insert_jobs`), nothing sets a job's state. The SQL
is built once per step from the rule in `lifecycle.py`; `tests/statements/test_transition_sql.py` keeps it readable.

A statement takes `items`, a JSON array that names the jobs, and returns a row for each job that moved. A job
that did not move is no error here: `diagnose` tells why.
"""

import re
from functools import cache
from typing import Any, LiteralString

import msgspec
from psycopg import AsyncConnection
from psycopg.rows import namedtuple_row

from app.errors import Kind, Refusal, unknown_job
from app.lifecycle import (
    CALLBACK_COMPLETE,
    CALLBACK_RETRY,
    CANCEL,
    CANCEL_OWN,
    COMPLETE,
    DUE_LATER,
    ERRORS_KEPT,
    EXPIRE,
    FINAL,
    LIVE,
    PARK,
    REDRIVE,
    RETRY,
    SNOOZE,
    Actor,
    Attempt,
    State,
    Step,
)

# Times inside stored JSON look like all others on the wire.
NOW_TEXT: LiteralString = """to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"""

HELD = frozenset({State.RUNNING, State.WAITING_EXTERNAL})

ITEM_COLUMNS: dict[str, LiteralString] = {
    "n": "integer",
    "id": "uuid",
    "lease_number": "bigint",
    "delay_seconds": "double precision",
    "result": "jsonb",
    "error": "jsonb",
    "reason": "text",
    "wait_ids": "uuid[]",
    "answers_needed": "smallint",
    "attached": "boolean",
    "payload": "jsonb",
    "wait_name": "text",
    "step": "text",
}


def given_items(*columns: str) -> LiteralString:
    """The parameter `items` as rows named `i`."""
    return f"jsonb_to_recordset(%(items)s) AS i({', '.join(f'{each} {ITEM_COLUMNS[each]}' for each in columns)})"


class Item(msgspec.Struct, omit_defaults=True):
    """One job of a set, and what its step needs to know. `n` comes back with the row that it moved."""

    n: int
    id: str
    lease_number: int | None = None
    delay_seconds: float | None = None
    result: msgspec.Raw | None = None
    error: msgspec.Raw | None = None
    reason: str | None = None
    wait_ids: list[str] | None = None
    answers_needed: int | None = None
    attached: bool | None = None
    payload: msgspec.Raw | None = None
    wait_name: str | None = None


class Moved(msgspec.Struct, frozen=True):
    """A job after its step; `run_at` only where it has to wait for it."""

    n: int
    state: str
    attempt: int
    run_at: Any


@cache
def statement(step: Step, picked: str | None = None) -> LiteralString:
    """The SQL of a step: for given items, or for what `picked` (a SELECT of id) finds and locks."""
    # `state || ''` keeps the planner from reading a partial index, full of dead entries under a held
    # snapshot, where the primary key is what it was given.
    sources = ", ".join(f"'{source}'" for source in sorted(step.sources))
    guard = f"j.id = i.id AND (j.state || '') IN ({sources})"
    if step.leased:
        guard += " AND j.lease_number = i.lease_number"
    assignments = ",\n        ".join(f"{column} = {value}" for column, value in _assignments(step).items())
    hint, hinted = "", ""
    if State.AVAILABLE in step.targets:
        hint, hinted = ", hinted.told", _HINTED
    elif step.targets & {State.RETRYABLE, State.SCHEDULED}:
        hint = ", CASE WHEN moved.state <> 'failed' THEN pg_notify('towpath', 'due')::text END"
    # Whoever answers a callback, or cancels, is not the worker that claimed the job last.
    worker = "NULL" if step.actors & {Actor.THIRD_PARTY, Actor.PRODUCER, Actor.OPERATOR} else "worker"
    given_back = " + 1" if step.attempt is Attempt.GIVE_BACK else ""
    logged = (
        f""", logged AS (
    INSERT INTO towpath.job_events (job_id, step, state, attempt, lease_number, worker, details)
    SELECT id, '{step.name}', state, attempt{given_back}, lease_number, {worker}, {_details(step)} FROM moved
)"""
        if step is not COMPLETE and step.name != "promote"
        else ""
    )
    due = "moved.run_at" if step.targets & DUE_LATER else "NULL::timestamptz"
    rest = f"""{logged}{hinted}
SELECT {"NULL::integer" if picked else "moved.n"}, moved.state, moved.attempt, {due}{hint}
FROM moved{" LEFT JOIN hinted USING (queue)" if hinted else ""}"""
    # Each is read or carried along for each row: only those that the step uses.
    known = ("i.n", "i.wait_name", *(f"j.{column}" for column in _MOVED_COLUMNS))
    returned = ", ".join(column for column in known if _names(rest, column[2:]) and not (picked and column == "i.n"))
    if picked:
        given, returned = "picked", returned.replace("i.wait_name", "NULL::text AS wait_name")
        before = f"picked AS MATERIALIZED (\n    {picked}\n), "
    else:
        used = (column for column in ITEM_COLUMNS if _names(f"{guard} {assignments} {returned}", f"i.{column}"))
        given, before = given_items(*used), ""
    # Nothing in the text comes from a caller: it is built of this module's and the lifecycle's constants.
    return f"""WITH {before}moved AS (
    UPDATE towpath.jobs AS j SET
        {assignments}
    FROM {given}{" AS i" if picked else ""}
    WHERE {guard}
    RETURNING {returned}
){rest}"""


_MOVED_COLUMNS = (
    "id",
    "queue",
    "state",
    "attempt",
    "run_at",
    "lease_number",
    "worker",
    "cancel_reason",
    "claim_order",
)


def _names(sql: str, column: str) -> bool:
    return re.search(rf"(?<!')\b{re.escape(column)}\b(?!')", sql) is not None


# Once a queue, with the place of the first: claims need not look in front of it. Materialized, or it would be told
# anew for each row that it is joined to.
_HINTED = """, hinted AS MATERIALIZED (
    SELECT queue, pg_notify('towpath', 'available ' || queue || ' '
        || (extract(epoch FROM min(claim_order)) * 1000000)::bigint)::text AS told
    FROM moved GROUP BY queue
)"""

_TIMEOUT = "coalesce(j.timeout_seconds, (SELECT q.timeout_seconds FROM towpath.queues AS q WHERE q.name = j.queue))"


def _assignments(step: Step) -> dict[str, str]:
    exhausted = "j.attempt >= j.max_attempts"
    sets = {"state": f"'{step.target}'"}
    failed = "true" if step.target is State.FAILED else "false"
    if step.exhausted:
        sets["state"] = f"CASE WHEN {exhausted} THEN '{step.exhausted}' ELSE '{step.target}' END"
        failed = exhausted
    match step.attempt:
        case Attempt.GIVE_BACK:
            sets["attempt"] = "j.attempt - 1"
        case Attempt.RESET:
            sets["attempt"] = "0"
    if step.sources & HELD:
        sets["settled_as"] = f"'{step.name}'"
        if step.target not in HELD:
            sets |= {"lease_expires_at": "NULL", "deadline_at": "NULL"}
        if State.WAITING_EXTERNAL in step.sources:
            sets |= {"waiting_on": "NULL", "answers_needed": "NULL"}
    if step.target in FINAL:
        sets["finished_at"] = "now()"
    elif step.exhausted:
        sets["finished_at"] = f"CASE WHEN {exhausted} THEN now() END"
    if failed != "false":
        reason = step.error if step.error != "worker" else "attempts_exhausted" if step.exhausted else "failed"
        sets["dead_letter_reason"] = (
            f"CASE WHEN {failed} AND (SELECT q.keep_dead_letters FROM towpath.queues AS q WHERE q.name = j.queue)"
            f" IS NOT false THEN '{reason}' END"
        )
    if step.error:
        sets |= {"errors_total": "j.errors_total + 1", "errors": _errors(step.error)}
    sets |= _due(step)
    if step is COMPLETE:
        sets["result"] = "i.result"
    elif step is CALLBACK_COMPLETE:
        sets["result"] = "i.payload"
    elif step is SNOOZE:
        sets["snoozes"] = "j.snoozes + 1"
    elif step in (CANCEL, CANCEL_OWN):
        sets["cancel_reason"] = "i.reason"
    elif step is EXPIRE:
        sets["cancel_reason"] = "'expired'"
    elif step is PARK:
        sets |= {
            "waiting_on": "i.wait_ids",
            "answers_needed": "i.answers_needed",
            "lease_expires_at": "CASE WHEN i.attached THEN j.lease_expires_at END",
            "deadline_at": "NULL",
        }
    elif step is REDRIVE:
        sets |= {"finished_at": "NULL", "dead_letter_reason": "NULL", "cancel_reason": "NULL"}
    if step.name == "callback_resume_attached":
        sets |= {"settled_as": "NULL", "deadline_at": f"now() + {_TIMEOUT} * interval '1 s'"}
    if step is CALLBACK_RETRY:
        sets["callback_results"] = "NULL"
    return sets


def _due(step: Step) -> dict[str, str]:
    """A new due time. `claim_order` keeps its distance, which is what priority and aging made of it."""
    if step.target is State.RETRYABLE:
        given = "i.delay_seconds" if step is RETRY else "NULL"
        backoff = (
            "towpath.backoff_seconds(coalesce(j.backoff, (SELECT q.backoff FROM towpath.queues AS q"
            " WHERE q.name = j.queue)), j.attempt, j.id)"
        )
        due = f"now() + coalesce({given}, {backoff}) * interval '1 s'"
    elif step is SNOOZE:
        due = "now() + i.delay_seconds * interval '1 s'"
    elif step in (REDRIVE, CALLBACK_RETRY):
        due = "now()"
    else:
        return {}
    return {"run_at": due, "claim_order": f"{due} + (j.claim_order - j.run_at)"}


def _errors(kind: str) -> str:
    facts = f"'attempt', j.attempt, 'at', {NOW_TEXT}, 'worker', j.worker"
    if kind == "worker":
        entry = f"i.error || jsonb_build_object({facts})"
    elif kind == "callback_failed":
        entry = f"i.error || jsonb_build_object('kind', '{kind}', {facts})"
    else:
        entry = f"jsonb_build_object('kind', '{kind}', 'message', '{_SAID[kind]}', {facts})"
    kept = (
        f"CASE WHEN jsonb_array_length(j.errors) >= {ERRORS_KEPT} THEN j.errors - 0 ELSE coalesce(j.errors, '[]') END"
    )
    return f"{kept} || jsonb_build_array({entry})"


_SAID = {
    "lease_expired": "The worker stopped heartbeating.",
    "deadline_exceeded": "The attempt ran longer than its time-out.",
    "callback_timeout": "Nobody called back before the deadline of the wait.",
}


def _details(step: Step) -> str:
    if step.target is State.CANCELLED:
        return "jsonb_strip_nulls(jsonb_build_object('reason', cancel_reason))"
    if State.WAITING_EXTERNAL in step.sources | step.targets and step.sources != LIVE:
        return "jsonb_strip_nulls(jsonb_build_object('wait', wait_name))"
    if step.target in {State.RETRYABLE, State.SCHEDULED}:
        return "CASE WHEN state <> 'failed' THEN jsonb_build_object('run_at', run_at) END"
    return "NULL::jsonb"


async def apply(connection: AsyncConnection[Any], step: Step, items: list[Item]) -> list[Moved]:
    """Run the step for the items, inside the caller's transaction; the jobs that moved come back."""
    # In id order: two sets that share jobs then lock them in the same order.
    items = sorted(items, key=lambda item: item.id)
    cursor = await connection.execute(statement(step), {"items": msgspec.json.encode(items).decode()})
    return [Moved(*row[:4]) for row in await cursor.fetchall()]


# Not EXISTS: PostgreSQL may answer that by a hash of the whole table, sequential scans off or not.
_DIAGNOSE = f"""SELECT i.n, j.state, j.attempt, j.lease_number, j.settled_as, j.worker, j.finished_at, j.cancel_reason,
    (SELECT true FROM towpath.job_events AS e WHERE e.job_id = i.id AND e.lease_number = i.lease_number
        AND e.step = i.step LIMIT 1) IS NOT NULL AS in_history,
    (SELECT true FROM towpath.job_events AS e WHERE e.job_id = j.id AND e.lease_number = j.lease_number
        AND e.step = 'redrive' LIMIT 1) IS NOT NULL AS redriven,
    j.result IS NOT DISTINCT FROM i.result AS same_result,
    j.waiting_on IS NULL OR j.waiting_on @> i.wait_ids AND j.waiting_on <@ i.wait_ids AS same_waits,
    j.lease_expires_at, now() AS now
FROM {given_items("n", "id", "lease_number", "result", "wait_ids", "step")}
LEFT JOIN towpath.jobs AS j ON j.id = i.id"""


class Question(Item):
    """An item that did not move, with the step that it was to take."""

    step: str = ""


async def diagnose(connection: AsyncConnection[Any], questions: list[Question]) -> dict[int, Any]:
    """One read that tells, per item, what the job is now (`state` is None when there is no such job)."""
    cursor = connection.cursor(row_factory=namedtuple_row)
    await cursor.execute(_DIAGNOSE, {"items": msgspec.json.encode(questions).decode()})
    rows: list[Any] = await cursor.fetchall()
    return {row.n: row for row in rows}


def lease_lost(question: Question, found: Any) -> Refusal:
    """Why a lease did not hold its job, with the facts that a worker needs to decide."""
    if found.state is None:
        return unknown_job(question.id)
    facts = {"state": found.state, "attempt": found.attempt, "settled_as": found.settled_as}
    if found.state == State.RUNNING:
        facts["holder"] = found.worker
    if found.cancel_reason is not None:
        facts["cancel_reason"] = found.cancel_reason
    return Refusal(
        Kind.CONFLICT, "lease-lost", f"The lease does not hold the job any more: it is {found.state}.", **facts
    )


async def lock_jobs(connection: AsyncConnection[Any], ids: list[str]) -> None:
    """Lock the jobs' rows until the transaction ends, in id order, so that two sets cannot deadlock.

    The statements after it see what was committed before the lock was had: each has a snapshot of its own.
    """
    await connection.execute(
        "SELECT FROM towpath.jobs WHERE id = ANY(%s::uuid[]) ORDER BY id FOR UPDATE", [sorted(ids)]
    )
