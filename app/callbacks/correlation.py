"""Waits and deliveries that find each other by a key, whichever comes first.

Both sides hold a lock of (hook, key) until they commit: the delivery while it looks for waits and keeps itself, the
opening wait while it is stored and looks for a kept delivery. So one of them always sees the other.
"""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec
from psycopg import AsyncConnection, AsyncCursor
from psycopg.rows import namedtuple_row

from app.callbacks.payloads import Payload
from app.callbacks.resolve import Arrival, Resolution, Resolver, lock_jobs_of, received
from app.database.engine import Database
from app.errors import Kind, Refusal

MOST_WAITS = 100
"""So many waits of one key a delivery resolves: what an outsider can set off stays bounded."""

_EXCLUSIVE = "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))"

_KEEP = """INSERT INTO towpath.hook_deliveries (id, hook, delivery_id, correlation_key, expires_at, encoding,
    content_type, headers, event, payload, body)
SELECT %(id)s, h.name, %(delivery_id)s, %(key)s, now() + h.keep_seconds * interval '1 s', %(encoding)s,
    %(content_type)s, %(headers)s, %(event)s, %(payload)s, %(body)s
FROM towpath.hooks AS h WHERE h.name = %(hook)s
ON CONFLICT (hook, delivery_id) DO NOTHING RETURNING id"""
_BEFORE = "SELECT id, matched FROM towpath.hook_deliveries WHERE hook = %(hook)s AND delivery_id = %(delivery_id)s"
_MATCHED = "UPDATE towpath.hook_deliveries SET matched = matched + %s WHERE id = %s"

_WAITING = f"""SELECT w.id FROM towpath.waits AS w JOIN towpath.jobs AS j ON j.id = w.job_id
    AND (w.id = ANY(j.waiting_on) OR (j.state || '') = 'running' AND j.lease_number = w.lease_number)
WHERE w.hook = %(hook)s AND w.correlation_key = %(key)s AND w.state = 'open'
ORDER BY w.id LIMIT {MOST_WAITS}"""

_UNMATCHED = """SELECT id, encoding, content_type, headers, event, payload::text, body FROM towpath.hook_deliveries
WHERE hook = %(hook)s AND correlation_key = %(key)s AND matched = 0 AND expires_at > now() ORDER BY id"""


@dataclass(frozen=True, slots=True)
class Delivery:
    """What arrived at a hook, its sender checked."""

    id: UUID
    hook: str
    delivery_id: str
    key: str
    payload: Payload


@dataclass(frozen=True, slots=True)
class Delivered:
    """How many waits it resolved; none yet, and it is kept. A repeat (`already_applied`) resolves nothing twice."""

    id: UUID
    matched: int
    already_applied: bool
    wait_ids: tuple[UUID, ...] = ()
    job_ids: tuple[UUID, ...] = ()


def unknown_hook() -> Refusal:
    """There is none of this name."""
    return Refusal(Kind.UNKNOWN, "unknown-hook", "There is no such hook.")


async def exclusive(connection: AsyncConnection[Any], hook: str, key: str) -> None:
    """Be the only one that matches this key until the transaction ends."""
    await connection.execute(_EXCLUSIVE, [f"towpath hook {hook} {key}"])


async def deliver(database: Database, resolver: Resolver, delivery: Delivery) -> Delivered:
    """Resolve every open wait of the delivery's key by that wait's rules, or keep it for one that comes later."""
    parameters = {"id": delivery.id, "hook": delivery.hook, "delivery_id": delivery.delivery_id, "key": delivery.key}
    payload = delivery.payload
    kept_as = received(payload) | {"payload": None if payload.value is None else bytes(payload.value).decode()}
    async with database.transaction() as connection:
        await exclusive(connection, delivery.hook, delivery.key)
        kept = await (await connection.execute(_KEEP, parameters | kept_as)).fetchone()
        if kept is None:
            before = await (await connection.execute(_BEFORE, parameters)).fetchone()
            if before is None:  # removed, with its hook, in between
                raise unknown_hook()
            return Delivered(before[0], before[1], already_applied=True)
        rows = await (await connection.execute(_WAITING, parameters)).fetchall()
        wait_ids = [row[0] for row in rows]
        await lock_jobs_of(connection, wait_ids)
        answers = [await resolver.resolve_one(connection, Arrival(wait_id, "default", payload)) for wait_id in wait_ids]
        resolved = [each for each in answers if isinstance(each, Resolution) and not each.ignored]
        if resolved:
            await connection.execute(_MATCHED, [len(resolved), delivery.id])
    return Delivered(
        delivery.id,
        len(resolved),
        already_applied=False,
        wait_ids=tuple(each.wait_id for each in resolved),
        job_ids=tuple(each.job_id for each in resolved),
    )


async def answer_from_kept(
    connection: AsyncConnection[Any], resolver: Resolver, wait_id: UUID, hook: str, key: str
) -> bool:
    """Resolve a wait that was just opened by the oldest delivery that came before it; whether there was one.

    The caller has the key for itself, and the job's row locked.
    """
    cursor: AsyncCursor[Any] = connection.cursor(row_factory=namedtuple_row)
    await cursor.execute(_UNMATCHED, {"hook": hook, "key": key})
    for row in await cursor.fetchall():
        payload = Payload(
            value=None if row.payload is None else msgspec.Raw(row.payload.encode()),
            encoding=row.encoding,
            content_type=row.content_type,
            body=row.body or b"",
            headers=row.headers,
            kept_headers=row.headers,
            event=row.event,
        )
        answer = await resolver.resolve_one(connection, Arrival(wait_id, "default", payload))
        if isinstance(answer, Resolution) and not answer.ignored:
            await connection.execute(_MATCHED, [1, row.id])
            return True
    return False
