"""Open a wait, before the outside system is called."""

from dataclasses import dataclass, replace
from typing import Any, LiteralString
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import class_row

from app import lifecycle
from app.callbacks.correlation import answer_from_kept, exclusive
from app.callbacks.evaluator import texts_of
from app.callbacks.resolve import Resolver
from app.callbacks.schemas import OpenWait
from app.database.engine import Database
from app.errors import FieldError, Kind, Refusal, invalid
from app.http import json
from app.jobs.transition import Question, diagnose, lease_lost, lock_jobs

_COLUMNS = """w.id, w.name, w.state, w.default_verb, w.timeout_seconds, w.max_timeout_seconds, w.deadline_at,
    w.hard_deadline_at, w.url_version, w.resolved_as, w.payload::text, w.encoding, w.content_type, w.event::text"""

# A resume that is still with the job holds its name: a new attempt finds the answer instead of asking again.
_OPEN = f"""INSERT INTO towpath.waits AS w (id, job_id, lease_number, attempt, name, default_verb, timeout_seconds,
    max_timeout_seconds, deadline_at, hard_deadline_at, hook, correlation_key, settings)
SELECT %(id)s, j.id, j.lease_number, j.attempt, %(name)s, %(default_verb)s, %(timeout_seconds)s,
    %(max_timeout_seconds)s, now() + %(timeout_seconds)s * interval '1 s',
    now() + %(max_timeout_seconds)s * interval '1 s', %(hook)s, %(correlation_key)s, %(settings)s
FROM towpath.jobs AS j
WHERE j.id = %(job_id)s AND j.lease_number = %(lease_number)s AND (j.state || '') = 'running'
  AND (j.callback_results -> %(name)s ->> 'verb') IS DISTINCT FROM 'resume'
ON CONFLICT (job_id, lease_number, name) DO NOTHING
RETURNING {_COLUMNS}, true AS same"""

_EXISTING = f"""SELECT {_COLUMNS}, w.lease_number < j.lease_number OR (
    w.default_verb = %(default_verb)s AND w.timeout_seconds = %(timeout_seconds)s
    AND w.max_timeout_seconds IS NOT DISTINCT FROM %(max_timeout_seconds)s AND w.hook IS NOT DISTINCT FROM %(hook)s
    AND w.correlation_key IS NOT DISTINCT FROM %(correlation_key)s AND w.settings = %(settings)s::jsonb) AS same
FROM towpath.jobs AS j JOIN towpath.waits AS w ON w.job_id = j.id AND w.name = %(name)s
    AND (w.lease_number = j.lease_number OR j.callback_results -> w.name ->> 'wait_id' = w.id::text)
WHERE j.id = %(job_id)s ORDER BY w.lease_number DESC LIMIT 1"""

_SECRET_THERE = "SELECT true FROM towpath.secrets WHERE name = %s"  # noqa: S105
_HOOK_THERE = "SELECT true FROM towpath.hooks WHERE name = %s"


@dataclass(frozen=True, slots=True)
class OpenedWait:
    """A wait that the attempt may park on; `existing` when the request was a repeat, or its answer came before."""

    id: UUID
    name: str
    state: str
    default_verb: str
    timeout_seconds: float
    max_timeout_seconds: float | None
    deadline_at: Any
    hard_deadline_at: Any
    url_version: int
    resolved_as: str | None
    payload: str | None
    encoding: str | None
    content_type: str | None
    event: str | None
    same: bool
    existing: bool = False


async def open_wait(
    database: Database, resolver: Resolver, *, wait_id: UUID, job_id: UUID, lease_number: int, wanted: OpenWait
) -> OpenedWait:
    """A wait of this attempt. Its name makes a repeat return the same one, or the answer that came before.

    Raises Refusal: unknown job, lease lost, no such secret or hook, or the attempt has another wait of this name.
    """
    correlation = wanted.correlation
    if wanted.policy:
        await resolver.evaluator.check(texts_of(wanted.policy, "/policy"))
    parameters = {
        "id": wait_id,
        "job_id": job_id,
        "lease_number": lease_number,
        "name": wanted.name,
        "default_verb": wanted.default_verb,
        "timeout_seconds": wanted.timeout_seconds,
        "max_timeout_seconds": wanted.max_timeout_seconds,
        "hook": correlation.hook if correlation else None,
        "correlation_key": correlation.key if correlation else None,
        "settings": json.encode(wanted.kept_settings()).decode(),
    }
    if correlation is None and wanted.signature is None:
        async with database.hot.connection() as connection:
            return await _inserted(connection, parameters) or await _existing(connection, parameters)
    async with database.transaction() as connection:
        await _check_references(connection, wanted)
        if correlation:
            await exclusive(connection, correlation.hook, correlation.key)
            await lock_jobs(connection, [str(job_id)])
        opened = await _inserted(connection, parameters)
        if opened is None:
            return await _existing(connection, parameters)
        if correlation and await answer_from_kept(connection, resolver, wait_id, correlation.hook, correlation.key):
            return await _existing(connection, parameters)
        return opened


async def _inserted(connection: AsyncConnection[Any], parameters: dict[str, Any]) -> OpenedWait | None:
    cursor = connection.cursor(row_factory=class_row(OpenedWait))
    await cursor.execute(_OPEN, parameters)
    return await cursor.fetchone()


async def _existing(connection: AsyncConnection[Any], parameters: dict[str, Any]) -> OpenedWait:
    question = Question(n=0, id=str(parameters["job_id"]), lease_number=parameters["lease_number"])
    found = (await diagnose(connection, [question]))[0]
    if found.lease_number != question.lease_number or found.state != lifecycle.State.RUNNING:
        raise lease_lost(question, found)
    cursor = connection.cursor(row_factory=class_row(OpenedWait))
    await cursor.execute(_EXISTING, parameters)
    wait = await cursor.fetchone()
    if wait is None or not wait.same:
        raise Refusal(
            Kind.CONFLICT,
            "wait-name-taken",
            f"This attempt has a wait named {parameters['name']} with other settings.",
            name=parameters["name"],
        )
    return replace(wait, existing=True)


async def _check_references(connection: AsyncConnection[Any], wanted: OpenWait) -> None:
    if wanted.signature:
        await _must_exist(connection, _SECRET_THERE, wanted.signature.secret, "/signature/secret")
    if wanted.correlation:
        await _must_exist(connection, _HOOK_THERE, wanted.correlation.hook, "/correlation/hook")


async def _must_exist(connection: AsyncConnection[Any], query: LiteralString, name: str, pointer: str) -> None:
    if await (await connection.execute(query, [name])).fetchone() is None:
        raise invalid(FieldError(pointer, f"there is no {name}"))
