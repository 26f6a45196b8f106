"""Keep leases: many in one statement, one commit. Only columns without an index change, so each is a HOT update."""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec

from app.database.engine import Database
from app.jobs.transition import Question, diagnose

_BEAT = """UPDATE towpath.jobs AS j SET
    lease_expires_at = now() + coalesce(i.lease_seconds, j.lease_seconds) * interval '1 s',
    lease_seconds = coalesce(i.lease_seconds, j.lease_seconds),
    progress = coalesce(i.progress, j.progress),
    checkpoint = coalesce(i.checkpoint, j.checkpoint)
FROM jsonb_to_recordset(%(items)s) AS i(n integer, id uuid, lease_number bigint, lease_seconds double precision,
    progress jsonb, checkpoint jsonb)
WHERE j.id = i.id AND j.lease_number = i.lease_number AND j.lease_expires_at IS NOT NULL
RETURNING i.n, j.state, j.lease_expires_at, j.deadline_at, j.lease_seconds, now()"""


class Pulse(msgspec.Struct, omit_defaults=True):
    """One heartbeat on its way to the database."""

    id: str
    lease_number: int
    lease_seconds: float | None = None
    progress: msgspec.Raw | None = None
    checkpoint: msgspec.Raw | None = None
    n: int = -1


@dataclass(frozen=True, slots=True)
class Kept:
    """What became of one lease: `ok`, or why it is not held (`lost`, `cancelled`, `deadline`, `unknown`)."""

    id: UUID
    status: str
    state: str | None
    lease_expires_at: Any = None
    deadline_at: Any = None
    lease_seconds: float | None = None
    server_time: Any = None
    attempt: int | None = None
    settled_as: str | None = None


_WHY = {"cancel": "cancelled", "cancel_own": "cancelled", "pass_deadline": "deadline"}


async def keep(database: Database, pulses: list[Pulse]) -> list[Kept]:
    """Move the expiry of every lease that is still held; tell of each other one what ended it."""
    for n, pulse in enumerate(pulses):
        pulse.n = n
    ordered = sorted(pulses, key=lambda pulse: pulse.id)
    kept: dict[int, Kept] = {}
    async with database.hot.connection() as connection:
        cursor = await connection.execute(_BEAT, {"items": msgspec.json.encode(ordered).decode()})
        for n, state, expires_at, deadline_at, seconds, now in await cursor.fetchall():
            kept[n] = Kept(UUID(pulses[n].id), "ok", state, expires_at, deadline_at, seconds, now)
        missed = [
            Question(n=n, id=pulse.id, lease_number=pulse.lease_number)
            for n, pulse in enumerate(pulses)
            if n not in kept
        ]
        if missed:
            for n, found in (await diagnose(connection, missed)).items():
                kept[n] = _lost(pulses[n], found)
    return [kept[n] for n in range(len(pulses))]


def _lost(pulse: Pulse, found: Any) -> Kept:
    job = UUID(pulse.id)
    if found.state is None:
        return Kept(job, "unknown", None, server_time=found.now)
    mine = found.lease_number == pulse.lease_number
    if mine and found.lease_expires_at is not None:
        # Twice in one flush: the statement kept the lease once, for the other.
        return Kept(job, "ok", found.state, found.lease_expires_at, server_time=found.now)
    why = _WHY.get(found.settled_as or "", "lost") if mine or found.state == "cancelled" else "lost"
    return Kept(job, why, found.state, server_time=found.now, attempt=found.attempt, settled_as=found.settled_as)
