"""The long-lived objects of one process, opened by one context manager that server, CLI and tests share."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from app.callbacks.evaluator import evaluating
from app.callbacks.resolve import Arrival, Resolution, Resolver
from app.callbacks.router import Callbacks
from app.database import engine
from app.database.batching import Batcher
from app.database.engine import Database
from app.database.notifications import Notifications, stopped
from app.database.watch import Watch
from app.http.rates import Rates
from app.jobs.control import Order, control
from app.jobs.enqueue import Enqueued, Enqueuer, Request
from app.jobs.router import Jobs
from app.jobs.schemas import Controlled
from app.lifecycle import FINAL
from app.maintenance.loop import Maintenance
from app.secrets.encryption import Vault
from app.secrets.router import Secrets
from app.settings import Settings
from app.signing import Signer
from app.work.claim import ClaimedJob
from app.work.dispatcher import Dispatcher
from app.work.heartbeat import Kept, Pulse, keep
from app.work.router import Work
from app.work.schemas import Settled
from app.work.settle import Outcome, released, settle

log = structlog.get_logger(__name__)

_FINISHED = (
    "SELECT id FROM towpath.jobs WHERE id = ANY(%(ids)s)"
    " AND (state || '') IN ('cancelled', 'completed', 'failed')"
    " UNION ALL SELECT id FROM unnest(%(ids)s::uuid[]) AS asked(id)"
    " WHERE NOT EXISTS (SELECT FROM towpath.jobs AS j WHERE j.id = asked.id)"
)
_RESOLVED = (
    "SELECT w.id FROM towpath.waits AS w JOIN towpath.jobs AS j ON j.id = w.job_id WHERE w.id = ANY(%(ids)s)"
    " AND ((w.state || '') <> 'open'"
    " OR (w.id = ANY(j.waiting_on)) IS NOT true"
    " AND ((j.state || '') <> 'running' OR j.lease_number <> w.lease_number))"
)
_UNPARKED = (
    "SELECT asked.id FROM unnest(%(ids)s::uuid[]) AS asked(id) LEFT JOIN towpath.jobs AS j ON j.id = asked.id"
    " WHERE (j.state || '') IS DISTINCT FROM 'waiting_external'"
)


@dataclass(frozen=True, slots=True)
class Runtime:
    """Everything that lives as long as the process; each capability's routes get their own part."""

    settings: Settings
    database: Database
    notifications: Notifications
    maintenance: Maintenance | None
    jobs: Jobs
    work: Work
    callbacks: Callbacks
    secrets: Secrets

    def drain(self) -> None:
        """The process is about to stop: answer every waiting request at once."""
        self.work.dispatcher.drain()
        self.jobs.finished.drain()
        self.callbacks.resolved.drain()
        self.callbacks.unparked.drain()


@asynccontextmanager
async def opened(
    settings: Settings, signer: Signer, vault: Vault, *, maintenance: bool = True
) -> AsyncIterator[Runtime]:
    """A running process without its HTTP server. At the end, flushes that are on their way come to their end."""
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(engine.opened(settings))
        finished, resolved, unparked = (Watch(database, reached) for reached in (_FINISHED, _RESOLVED, _UNPARKED))
        resolver = Resolver(vault, await stack.enter_async_context(evaluating(settings.policy_seconds)))

        async def flush_settlements(outcomes: list[Outcome]) -> list[Settled | Exception]:
            answers = await settle(database, outcomes)
            finished.hint([each.id for each in answers if isinstance(each, Settled) and each.state in FINAL])
            return answers

        async def flush_arrivals(arrivals: list[Arrival]) -> list[Resolution | Exception]:
            answers = await resolver.resolve(database, arrivals)
            resolved.hint([arrival.wait_id for arrival in arrivals])
            unparked.hint([each.job_id for each in answers if isinstance(each, Resolution)])
            return answers

        async def flush_orders(orders: list[Order]) -> list[Controlled | Exception]:
            answers = await control(database, orders)
            finished.hint([each.id for each in answers if isinstance(each, Controlled)])
            return answers

        limits: Any = {"max_queued": settings.max_queued_items, "deadline_seconds": settings.request_deadline_seconds}
        enqueues: Batcher[Request, Enqueued] = Batcher(
            "enqueue", Enqueuer(database).insert, weigh=lambda request: request.weight, **limits
        )
        settlements: Batcher[Outcome, Settled] = Batcher(
            "settle", flush_settlements, weigh=lambda outcome: outcome.weight, **limits
        )
        heartbeats: Batcher[Pulse, Kept] = Batcher("heartbeat", partial(keep, database), **limits)
        arrivals: Batcher[Arrival, Resolution] = Batcher(
            "callback", flush_arrivals, weigh=lambda arrival: arrival.weight, max_items=100, **limits
        )
        orders: Batcher[Order, Controlled] = Batcher("control", flush_orders, **limits)

        async def release(jobs: list[ClaimedJob]) -> None:
            for answer in await settlements.submit_all(released(jobs)):
                if isinstance(answer, Exception):
                    log.warning("undelivered job not released; its lease will expire", error=str(answer))

        dispatcher = Dispatcher(
            database,
            release,
            safety_poll_seconds=settings.safety_poll_seconds,
            max_waiting=settings.max_waiting_polls,
        )
        sweeping = Maintenance(settings) if maintenance else None

        def heard(payload: str) -> None:
            what, *about = payload.split(" ")
            if what == "available":
                dispatcher.hint(about[0], int(about[1]) if len(about) > 1 else None)
            elif what == "due" and sweeping:
                sweeping.wake()

        def may_have_missed() -> None:
            dispatcher.hint_all()
            if sweeping:
                sweeping.wake()

        notifications = Notifications(engine.conninfo(settings, "listen"), heard, may_have_missed)
        for background in (notifications.run, dispatcher.run, finished.run, resolved.run, unparked.run):
            task = asyncio.create_task(background(), name=background.__qualname__)
            stack.push_async_callback(stopped, task)
        if sweeping:
            await stack.enter_async_context(sweeping.running())
        yield Runtime(
            settings=settings,
            database=database,
            notifications=notifications,
            maintenance=sweeping,
            jobs=Jobs(settings, database, enqueues, orders, finished),
            work=Work(settings, signer, database, dispatcher, heartbeats, settlements),
            callbacks=Callbacks(
                settings,
                signer,
                database,
                resolver,
                arrivals,
                resolved,
                unparked,
                Rates(
                    per_wait=settings.callbacks_per_minute,
                    per_hook=settings.deliveries_per_minute,
                    refused_per_source=settings.refusals_per_minute,
                ),
            ),
            secrets=Secrets(database, vault),
        )
        dispatcher.drain()
        await dispatcher.drained()
        for batcher in (enqueues, settlements, heartbeats, arrivals, orders):
            await batcher.drained()
