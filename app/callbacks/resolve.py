"""A callback arrives: exactly one resolver wins, an early one counts, a late one is told so.

The job's row is locked before its waits are read, here, in park and in the time-out sweep; so what is read
can't change before the commit. Every path comes through `Resolver.resolve_one`: verb URLs, hooks, and deliveries
that were kept. So a wait's rules hold on all of them. Many callbacks share a transaction.
"""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec
from psycopg import AsyncConnection
from psycopg.rows import namedtuple_row

from app.callbacks import signatures
from app.callbacks.evaluator import Evaluator
from app.callbacks.payloads import NO_PAYLOAD, Payload
from app.callbacks.policy import Arrived, PolicyError
from app.callbacks.schemas import WaitSettings
from app.callbacks.verbs import Answered, Verdict, failure, step_of, verdict
from app.database.engine import Database
from app.errors import Kind, Refusal
from app.jobs.transition import NOW_TEXT, Item, apply
from app.lifecycle import CALLBACK_FAIL, State
from app.secrets.encryption import Vault
from app.secrets.operations import secret_values

_LOCK = """SELECT FROM towpath.jobs WHERE id IN (SELECT job_id FROM towpath.waits WHERE id = ANY(%(ids)s::uuid[]))
ORDER BY id FOR UPDATE"""

_READ = """SELECT w.id, w.job_id, w.name, w.state, w.default_verb, w.resolved_as, w.resolved_at, w.deadline_at,
    w.early, w.url_version, w.settings::text, j.state AS job_state, j.finished_at, j.answers_needed, now() AS now,
    (j.state || '') = 'waiting_external' AND w.id = ANY(j.waiting_on) AS parked,
    (j.state || '') = 'running' AND j.lease_number = w.lease_number AS running,
    j.lease_expires_at > now() AS handler_attached,
    w.body IS NOT DISTINCT FROM %(body)s::bytea AS same_body,
    w.payload IS NOT DISTINCT FROM %(payload)s::jsonb AS same_payload,
    (SELECT jsonb_agg(jsonb_build_array(coalesce(o.resolved_as, o.state), coalesce(o.resolved_at::text, '')))
        FROM towpath.waits AS o WHERE o.id = ANY(j.waiting_on) AND o.id <> w.id) AS others,
    CASE WHEN w.settings ? 'policy' THEN jsonb_build_object('id', j.id, 'queue', j.queue, 'kind', j.kind,
        'attempt', j.attempt, 'args', j.args, 'tags', j.tags, 'metadata', j.metadata, 'wait', w.name)::text END
        AS job_facts
FROM towpath.waits AS w JOIN towpath.jobs AS j ON j.id = w.job_id WHERE w.id = %(wait_id)s"""

_RESOLVE = f"""WITH resolved AS (
    UPDATE towpath.waits AS w SET state = 'resolved', resolved_as = %(verb)s, resolved_at = now(),
        early = %(early)s, payload = %(payload)s, encoding = %(encoding)s, content_type = %(content_type)s,
        headers = %(headers)s, event = %(event)s, body = %(body)s
    WHERE w.id = %(wait_id)s AND (w.state || '') = 'open'
    RETURNING w.*
)
UPDATE towpath.jobs AS j SET callback_results = coalesce(j.callback_results, '{{}}') || jsonb_build_object(
    r.name, jsonb_build_object('wait_id', r.id, 'verb', r.resolved_as, 'payload', r.payload, 'encoding', r.encoding,
        'content_type', r.content_type, 'event', r.event, 'received_at', {NOW_TEXT}))
FROM resolved AS r WHERE j.id = r.job_id"""

_REFUSED = """WITH kept AS (
    INSERT INTO towpath.refused_callbacks (wait_id, verb, reason, encoding, content_type, headers, body)
    VALUES (%(wait_id)s, %(verb)s, %(reason)s, %(encoding)s, %(content_type)s, %(headers)s, %(body)s)
)
DELETE FROM towpath.refused_callbacks WHERE wait_id = %(wait_id)s AND id <= (
    SELECT id FROM towpath.refused_callbacks WHERE wait_id = %(wait_id)s ORDER BY id DESC OFFSET %(others)s LIMIT 1)"""
REFUSED_KEPT = 10
"""The newest callbacks of a wait that resolved nothing; older ones go, so that an outsider can't fill the disk."""

_EXTEND = """UPDATE towpath.waits AS w
SET deadline_at = least(now() + coalesce(%(timeout_seconds)s, w.timeout_seconds) * interval '1 s', w.hard_deadline_at)
FROM towpath.jobs AS j
WHERE w.id = %(id)s AND w.url_version = %(url_version)s AND (w.state || '') = 'open' AND j.id = w.job_id
  AND (((j.state || '') = 'waiting_external' AND w.id = ANY(j.waiting_on))
    OR ((j.state || '') = 'running' AND j.lease_number = w.lease_number))
RETURNING w.deadline_at, w.hard_deadline_at"""

_SETTINGS = msgspec.json.Decoder(WaitSettings)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One callback: its wait, the verb of its URL (`default` is the wait's own), and what came with it.

    Without a `url_version` it did not come by a URL, but by a hook, which has checked the sender.
    """

    wait_id: UUID
    verb: str
    payload: Payload
    url_version: int | None = None

    @property
    def weight(self) -> int:
        """About how many bytes it adds to a flush."""
        return 300 + 2 * len(self.payload.body)


@dataclass(frozen=True, slots=True)
class Resolution:
    """What the caller is told: it won (now or before), or the wait's filter let it pass; and what the job is."""

    wait_id: UUID
    job_id: UUID
    name: str
    verb: str | None
    early: bool
    already_applied: bool
    resolved_at: Any
    job_state: str
    ignored: bool = False


@dataclass(frozen=True, slots=True)
class Resolver:
    """Resolves waits by their rules."""

    vault: Vault
    evaluator: Evaluator

    async def resolve(self, database: Database, arrivals: list[Arrival]) -> list[Resolution | Exception]:
        """Resolve each wait at most once, in one commit; the winner, its repeats and the others are told apart."""
        async with database.transaction() as connection:
            await lock_jobs_of(connection, [arrival.wait_id for arrival in arrivals])
            # One at a time within the flush: two callbacks of one wait must see each other.
            return [await self.resolve_one(connection, arrival) for arrival in arrivals]

    async def resolve_one(self, connection: AsyncConnection[Any], arrival: Arrival) -> Resolution | Exception:
        """Resolve one wait; its job's row is locked by the caller."""
        wait = await _read(connection, arrival)
        if wait is None or arrival.url_version not in (None, wait.url_version):
            return unknown_callback()
        settings = _SETTINGS.decode(wait.settings)
        if settings.signature and arrival.url_version is not None:
            refused = await self._unsigned(connection, settings.signature, arrival.payload, wait.now)
            if refused:
                return refused
        verb = wait.default_verb if arrival.verb == "default" else arrival.verb
        if wait.state != "open" or not (wait.parked or wait.running):
            return _too_late(wait, verb, by_policy=settings.policy is not None)
        payload = arrival.payload.value
        if settings.policy:
            try:
                decided = await self.evaluator.decide(
                    settings.policy,
                    Arrived(
                        payload or msgspec.Raw(b"null"), arrival.payload.headers, msgspec.Raw(wait.job_facts.encode())
                    ),
                )
            except PolicyError as error:
                await _keep_refused(connection, arrival, str(error))
                return Refusal(
                    Kind.INVALID,
                    "policy-failed",
                    f"The wait's policy could not decide: {error}. The wait is still open.",
                    expression=error.expression,
                    wait_state="open",
                )
            if decided.ignored:
                await _keep_refused(connection, arrival, "ignored by the filter")
                return Resolution(
                    wait.id, wait.job_id, wait.name, None, wait.running, False, None, wait.job_state, ignored=True
                )
            if decided.verb and arrival.verb not in ("default", decided.verb):
                await _keep_refused(connection, arrival, f"the policy says {decided.verb}")
                return Refusal(
                    Kind.CONFLICT,
                    "policy-disagrees",
                    f"The wait's policy decides for {decided.verb}, and this URL can only {verb}.",
                    decided=decided.verb,
                    wait_state="open",
                )
            verb = decided.verb or verb
            if decided.payload is not msgspec.UNSET:
                payload = decided.payload
        return await _resolved(connection, wait, verb, payload, arrival.payload)

    async def _unsigned(
        self, connection: AsyncConnection[Any], check: signatures.SignatureCheck, payload: Payload, now: Any
    ) -> Refusal | None:
        secrets = await secret_values(connection, self.vault, [check.secret])
        reason = signatures.verify(check, secrets.get(check.secret, []), payload.headers, payload.body, now)
        return unsigned(reason) if reason else None


async def lock_jobs_of(connection: AsyncConnection[Any], wait_ids: list[UUID]) -> None:
    """Lock the rows of the jobs that these waits are of, in id order."""
    await connection.execute(_LOCK, {"ids": wait_ids})


async def _read(connection: AsyncConnection[Any], arrival: Arrival) -> Any:
    cursor = connection.cursor(row_factory=namedtuple_row)
    payload = arrival.payload.value
    await cursor.execute(
        _READ,
        {
            "wait_id": arrival.wait_id,
            "body": arrival.payload.body or None,
            "payload": None if payload is None else bytes(payload).decode(),
        },
    )
    return await cursor.fetchone()


async def _resolved(
    connection: AsyncConnection[Any], wait: Any, verb: str, payload: msgspec.Raw | None, came: Payload
) -> Resolution:
    early = not wait.parked
    parameters = {"wait_id": wait.id, "verb": verb, "early": early, **received(came)}
    parameters["payload"] = None if payload is None else bytes(payload).decode()
    await connection.execute(_RESOLVE, parameters)
    state = wait.job_state
    if not early:
        state = await _decided(connection, wait, verb, payload) or state
    return Resolution(wait.id, wait.job_id, wait.name, verb, early, False, wait.now, state)


async def _decided(connection: AsyncConnection[Any], wait: Any, verb: str, payload: msgspec.Raw | None) -> str | None:
    """Apply what this answer, with the others of its park, means for the job; its new state, if it moved."""
    waits = [Answered(verb, str(wait.now)), *(Answered(*other) for other in wait.others or ())]
    says = verdict(waits, wait.answers_needed)
    if says is Verdict.WAIT:
        return None
    step = CALLBACK_FAIL if says is Verdict.IMPOSSIBLE else step_of(verb, handler_attached=bool(wait.handler_attached))
    item = Item(n=0, id=str(wait.job_id), payload=payload, error=failure(payload), wait_name=wait.name)
    (moved,) = await apply(connection, step, [item])
    return moved.state


def received(payload: Payload) -> dict[str, Any]:
    """The columns in which what came is kept as it came."""
    return {
        "encoding": payload.encoding,
        "content_type": payload.content_type,
        "headers": msgspec.json.encode(payload.kept_headers).decode(),
        "event": msgspec.json.encode(payload.event).decode() if payload.event else None,
        "body": payload.body or None,
    }


async def _keep_refused(connection: AsyncConnection[Any], arrival: Arrival, reason: str) -> None:
    parameters = {"wait_id": arrival.wait_id, "verb": arrival.verb, "reason": reason, "others": REFUSED_KEPT - 1}
    await connection.execute(_REFUSED, parameters | received(arrival.payload))


def _too_late(wait: Any, verb: str, *, by_policy: bool = False) -> Resolution | Exception:
    facts = {"wait_state": wait.state, "job_state": wait.job_state}
    if wait.state == "resolved":
        # What a policy made of the same body is the recorded outcome, whatever the URL's own verb.
        again = wait.same_body if by_policy else wait.resolved_as == verb and (wait.same_body or wait.same_payload)
        if again:
            return Resolution(
                wait.id, wait.job_id, wait.name, wait.resolved_as, wait.early, True, wait.resolved_at, wait.job_state
            )
        return Refusal(
            Kind.CONFLICT,
            "callback-conflict",
            f"The wait was resolved before, as {wait.resolved_as}.",
            resolved_as=wait.resolved_as,
            resolved_at=wait.resolved_at,
            **facts,
        )
    if wait.state == "expired":
        why = "its deadline passed"
    else:
        facts["wait_state"] = "superseded"
        cancelled = wait.job_state == State.CANCELLED
        if cancelled:
            facts["cancelled_at"] = wait.finished_at
        why = "the job was cancelled" if cancelled else "what opened it is over, or was answered otherwise"
    return Refusal(Kind.GONE, "callback-gone", f"Nobody waits for this callback any more: {why}.", **facts)


def unknown_callback() -> Refusal:
    """Unknown, forged, revoked, and of another verb: the same answer."""
    return Refusal(Kind.UNKNOWN, "unknown-callback", "There is no such callback.")


def unsigned(reason: str) -> Refusal:
    """The sender's own signature does not hold."""
    return Refusal(Kind.FORBIDDEN, "signature-refused", f"The sender's signature was refused: {reason}.")


async def extend(database: Database, wait_id: UUID, url_version: int, timeout_seconds: float | None) -> Any:
    """Move a wait's deadline to `timeout_seconds` from now (default: its own time-out), within its hard limit.

    Returns both. Raises Refusal: unknown, resolved or over.
    """
    async with database.transaction() as connection:
        await lock_jobs_of(connection, [wait_id])
        parameters = {"id": wait_id, "url_version": url_version, "timeout_seconds": timeout_seconds}
        row = await (await connection.execute(_EXTEND, parameters)).fetchone()
        if row:
            return row
        wait = await _read(connection, Arrival(wait_id, "heartbeat", NO_PAYLOAD))
    late = _too_late(wait, "heartbeat") if wait and wait.url_version == url_version else unknown_callback()
    assert isinstance(late, Exception)
    raise late
