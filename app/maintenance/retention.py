"""Final jobs go after the time that their queue keeps each state, with their waits and events; so do old keys."""

from typing import Any, LiteralString

from psycopg import AsyncConnection

from app.lifecycle import FINAL, State
from app.maintenance.sweep import Sweep

# A few rows of every queue at a time: a large queue does not keep the others waiting.
_OLD = """SELECT old.id FROM towpath.queues AS q CROSS JOIN LATERAL (
    SELECT j.id FROM towpath.jobs AS j
    WHERE j.queue = q.name AND j.state = '{state}' AND {which}
      AND j.finished_at <= now() - q.{setting} * interval '1 s' AND j.id <> ALL(%(excluded)s::uuid[])
    ORDER BY j.finished_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED) AS old
LIMIT %(limit)s"""
_OLD_KEYS = """SELECT key FROM towpath.idempotency_keys
WHERE expires_at <= now() AND key <> ALL(%(excluded)s::text[])
ORDER BY expires_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED"""
_OLD_DELIVERIES = """SELECT id FROM towpath.hook_deliveries
WHERE expires_at <= now() AND id <> ALL(%(excluded)s::uuid[])
ORDER BY expires_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED"""
# Old jobs can wait: short batches with as long a pause between them, or live jobs wait behind those. On two cores they
# still go faster than as many could be made and done.
_SHARE = 0.5
_MOST = 100


def _deleting(name: str, table: LiteralString, key: LiteralString, pick: LiteralString, interval: float) -> Sweep:
    delete: LiteralString = (
        f"WITH old AS MATERIALIZED ({pick}) DELETE FROM towpath.{table} USING old WHERE {table}.{key} = old.{key}"
    )

    async def run(connection: AsyncConnection[Any], limit: int, excluded: list[Any]) -> int:
        return (await connection.execute(delete, {"limit": limit, "excluded": excluded})).rowcount

    return Sweep(name, run, pick, interval, share=_SHARE, most=_MOST)


def retention(interval_seconds: float) -> tuple[Sweep, ...]:
    """One sweep per final state, one for dead letters, idempotency keys and hooks' deliveries each."""
    picks: dict[str, LiteralString] = {
        "retain_completed": _pick("completed", "true", "completed_retention_seconds"),
        "retain_cancelled": _pick("cancelled", "true", "cancelled_retention_seconds"),
        "retain_failed": _pick("failed", "j.dead_letter_reason IS NULL", "failed_retention_seconds"),
        "retain_dead_letters": _pick("failed", "j.dead_letter_reason IS NOT NULL", "dead_letter_retention_seconds"),
    }
    assert {State(name) for name in ("completed", "cancelled", "failed")} == FINAL
    return (
        *(_deleting(name, "jobs", "id", pick, interval_seconds) for name, pick in picks.items()),
        _deleting("retain_idempotency_keys", "idempotency_keys", "key", _OLD_KEYS, interval_seconds),
        _deleting("retain_hook_deliveries", "hook_deliveries", "id", _OLD_DELIVERIES, interval_seconds),
    )


def _pick(state: LiteralString, which: LiteralString, setting: LiteralString) -> LiteralString:
    return _OLD.replace("{state}", state).replace("{which}", which).replace("{setting}", setting)
