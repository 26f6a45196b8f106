"""Long polls: who waits for which queues, and one claim for all of them.

Polls with the same filter (queues and kinds) form a group with one line of waiters. When one of its queues may
have work, one claim statement asks for the sum of what the line wants, and the rows are dealt out in order of
arrival. An idle poll costs a future: no connection, no query.

A group looks at a queue when it is *dirty*: at a poll's arrival, after a local enqueue, at a notification, and
at a slow safety poll, since a notification is only a hint. A waiter is in the line before its group looks, so
a job that arrives in between is not missed.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg
import structlog

from app.database.engine import Database
from app.database.failures import is_away
from app.errors import Kind, Refusal
from app.work.claim import ClaimedJob, Wanted, claim, held

log = structlog.get_logger(__name__)

MOST_PER_CLAIM = 1000
# One new job must not cost the description of ten thousand idle polls; a queue with more is claimed from again.
_MOST_WAITERS = 64
_RETRY_SECONDS = 0.5
# How often a queue is looked at from its start, in seconds, whatever its cursor says.
_FULL_LOOK_AT_LEAST = 1.0
_FULL_LOOK_AT_MOST = 30.0
# So much a look from the start may take, in seconds, to be worth it whenever the cursor finds too little.
_CHEAP_LOOK = 0.02
_MOST_CURSORS = 1000
_ANYWHERE = -(2**63)

Filter = tuple[tuple[str, ...], tuple[str, ...]]


@dataclass(eq=False, slots=True)
class Waiter:
    """One poll: what it wants, and the future that its jobs come through."""

    claim_id: UUID
    worker: str
    limit: int
    lease_seconds: float | None
    jobs: asyncio.Future[list[ClaimedJob]]
    patient: bool = True
    """Whether it waits when its queues are dry; if not, it is answered after one look at each."""

    @property
    def gone(self) -> bool:
        """Answered, timed out, or its client went away."""
        return self.jobs.done()

    def end(self) -> None:
        """Answer it with nothing, if it is not answered."""
        if not self.gone:
            self.jobs.set_result([])


@dataclass(eq=False, slots=True)
class Cursor:
    """Up to where a queue (or some kinds of it) has been emptied: what is dead in front of that is not read again.

    While a long transaction holds an old snapshot, vacuum can't remove dead entries, and there may be millions.
    Places are `claim_order` in microseconds since 1970.
    """

    order: int | None = None
    """In front of this place nothing is left; None: not known."""
    hinted: int | None = None
    """The first place of the jobs that came while a claim was on its way, which may not have seen them."""
    next_full_look: float = 0.0
    full_look_seconds: float = 0.0

    def lower(self, order: int | None) -> None:
        """Jobs came, the first of them at this place; anywhere, if it is not told."""
        order = _ANYWHERE if order is None else order
        self.hinted = order if self.hinted is None else min(self.hinted, order)
        if self.order is not None and order < self.order:
            self.order = None if order == _ANYWHERE else order

    def start(self, now: float) -> int | None:
        """Where a claim is to begin; None: at the queue's start, which is due after a while whatever is known."""
        self.hinted = None
        return self.order if now < self.next_full_look else None

    def found(self, jobs: list[ClaimedJob], began: float, now: float, *, full: bool) -> bool:
        """Note what a claim found; whether a queue that had less than was wanted is certainly empty.

        A look from the start is due the later the more it costs; and at once when a look from the cursor finds too
        little, unless that costs much.
        """
        if full:
            self.full_look_seconds = now - began
            self.next_full_look = now + min(_FULL_LOOK_AT_MOST, max(_FULL_LOOK_AT_LEAST, 50 * (now - began)))
        if jobs:
            self.order = max(job.order for job in jobs)
            if self.hinted is not None and self.hinted < self.order:
                self.order = None if self.hinted == _ANYWHERE else self.hinted
        return full or self.full_look_seconds > _CHEAP_LOOK


@dataclass(eq=False, slots=True)
class Group:
    """Waiters with one filter, in order of arrival, and the queues that are worth a look."""

    queues: tuple[str, ...]
    kinds: tuple[str, ...]
    waiters: dict[Waiter, None] = field(default_factory=dict)
    unlooked: dict[Waiter, set[str]] = field(default_factory=dict)
    """Waiters that have not had a look at each of their queues since they came, with those queues."""
    doubtful: dict[Waiter, None] = field(default_factory=dict)
    """Waiters of claims whose connection died: nobody knows yet whether they were committed."""
    dirty: set[str] = field(default_factory=set)
    paused: set[str] = field(default_factory=set)
    task: asyncio.Task[None] | None = None


class Dispatcher:
    """Every waiting poll of this process."""

    def __init__(
        self,
        database: Database,
        release: Callable[[list[ClaimedJob]], Coroutine[Any, Any, None]],
        *,
        safety_poll_seconds: float,
        max_waiting: int,
    ) -> None:
        self._database = database
        self._release = release
        self._safety_poll_seconds = safety_poll_seconds
        self._max_waiting = max_waiting
        self._groups: dict[Filter, Group] = {}
        self._by_queue: dict[str, set[Filter]] = defaultdict(set)
        # By queue and kinds. They outlive their groups, which come and go with each poll.
        self._cursors: dict[str, dict[tuple[str, ...], Cursor]] = defaultdict(dict)
        self._waiting = 0
        self._releases: set[asyncio.Task[None]] = set()
        self.draining = False

    @property
    def waiting(self) -> int:
        """How many polls wait."""
        return self._waiting

    def enter(self, queues: tuple[str, ...], kinds: tuple[str, ...], waiter: Waiter) -> Group:
        """Put a waiter in line and look for it. Raises Refusal when the process has too many polls."""
        if self._waiting >= self._max_waiting:
            raise Refusal(
                Kind.OVERLOADED,
                "too-many-polls",
                f"This process has {self._max_waiting} waiting polls, its limit.",
                limit=self._max_waiting,
                retry_after_seconds=5,
            )
        group = self._groups.get((queues, kinds))
        if group is None:
            group = self._groups[queues, kinds] = Group(queues, kinds)
            for queue in queues:
                self._by_queue[queue].add((queues, kinds))
        self._waiting += 1
        group.waiters[waiter] = None
        group.unlooked[waiter] = set(queues)
        self._look(group, queues)
        return group

    def settle_for_a_look(self, group: Group, waiter: Waiter) -> bool:
        """The waiter's time is up: whether it is still to have its first look, with which it is answered."""
        waiter.patient = False
        return waiter in group.unlooked

    def leave(self, group: Group, waiter: Waiter) -> bool:
        """Take a waiter out of line; whether it had its look. Jobs on their way to it go back to their queue."""
        waiter.jobs.cancel()
        self._waiting -= 1
        group.waiters.pop(waiter, None)
        looked = group.unlooked.pop(waiter, None) is None
        if not group.waiters and group.task is None:
            self._forget(group)
        return looked

    def hint(self, queue: str, order: int | None = None) -> None:
        """Jobs of this queue may have become claimable, the first of them at this place."""
        for cursor in self._cursors[queue].values():
            cursor.lower(order)
        for key in self._by_queue.get(queue, ()):
            self._look(self._groups[key], (queue,))

    def hint_all(self) -> None:
        """Anything may have become claimable, and nobody told us: after a reconnect."""
        self._cursors.clear()
        self._look_at_all()

    def _look_at_all(self) -> None:
        for group in list(self._groups.values()):
            self._look(group, group.queues)

    def drain(self) -> None:
        """Answer every poll at once, and every later one."""
        self.draining = True
        for group in self._groups.values():
            for waiter in group.waiters:
                waiter.end()

    async def run(self) -> None:
        """The safety poll: for ever. It bounds what a lost notification can cost."""
        while True:
            await asyncio.sleep(self._safety_poll_seconds * random.uniform(0.8, 1.2))  # noqa: S311
            self._look_at_all()

    async def drained(self) -> None:
        """Returns when no claim or release is on its way."""
        while tasks := {group.task for group in self._groups.values() if group.task} | self._releases:
            await asyncio.wait(tasks)

    def give_back(self, jobs: list[ClaimedJob]) -> None:
        """Release jobs that could not be delivered, without using an attempt."""
        task = asyncio.create_task(self._release(jobs), name="release undelivered")
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    def _look(self, group: Group, queues: Iterable[str]) -> None:
        if not group.waiters or self.draining:
            return
        group.dirty.update(queues)
        if group.task is None:
            group.task = asyncio.create_task(self._serve(group), name=f"claim {','.join(group.queues)[:50]}")

    def _forget(self, group: Group) -> None:
        key = (group.queues, group.kinds)
        if self._groups.pop(key, None) is not None:
            for queue in group.queues:
                self._by_queue[queue].discard(key)
                if not self._by_queue[queue]:
                    del self._by_queue[queue]

    async def _serve(self, group: Group) -> None:
        failed: set[str] = set()
        try:
            while group.doubtful or (group.waiters and group.dirty):
                # In the order given; but a queue whose row somebody holds must not hold up the others.
                queue = min((q for q in group.queues if q in group.dirty), key=failed.__contains__, default="")
                # Clean before the look: what arrives during it makes the queue dirty again.
                group.dirty.discard(queue)
                try:
                    if group.doubtful:
                        await self._recover(group)
                    if queue and await self._claim(group, queue):
                        group.dirty.add(queue)
                    failed.discard(queue)
                except psycopg.Error as error:
                    log.warning("claim failed", queue=queue, error=type(error).__name__, away=is_away(error))
                    if queue:
                        group.dirty.add(queue)
                        failed.add(queue)
                    if self.draining:
                        break
                    await asyncio.sleep(_RETRY_SECONDS)
        finally:
            group.task = None
            if not group.waiters:
                self._forget(group)
            elif group.dirty:
                self._look(group, ())

    async def _claim(self, group: Group, queue: str) -> bool:
        """One claim for the whole line; true when the queue had as much as was wanted, so may have more."""
        # One turn of the loop first: polls that arrive together are then served together.
        await asyncio.sleep(0)
        line: list[Waiter] = []
        wanted: list[Wanted] = []
        total = 0
        for waiter in group.waiters:
            if waiter.gone:
                continue
            if line and (total + waiter.limit > MOST_PER_CLAIM or len(line) == _MOST_WAITERS):
                break
            share = Wanted(total + 1, total + waiter.limit, str(waiter.claim_id), waiter.worker, waiter.lease_seconds)
            wanted.append(share)
            line.append(waiter)
            total += waiter.limit
        if not line:
            return False
        cursor = self._cursor(queue, group.kinds)
        clock = asyncio.get_running_loop().time
        began = clock()
        after = cursor.start(began)
        waiting_for_a_look = [waiter for waiter, left in group.unlooked.items() if queue in left]
        try:
            async with self._database.hot.connection() as connection:
                jobs, paused = await claim(connection, queue, group.kinds, wanted, after)
        except psycopg.Error as error:
            if is_away(error):
                group.doubtful.update(dict.fromkeys(line))
            raise
        (group.paused.add if paused else group.paused.discard)(queue)
        for waiter, share in zip(line, wanted, strict=True):
            self._deal(group, waiter, jobs[share.first - 1 : share.last])
        certain = cursor.found(jobs, began, clock(), full=after is None)
        if len(jobs) == total:
            return True
        if not certain:
            cursor.order = None
            return True
        for waiter in waiting_for_a_look:
            self._looked(group, waiter, queue)
        return False

    def _cursor(self, queue: str, kinds: tuple[str, ...]) -> Cursor:
        of_queue = self._cursors[queue]
        if kinds not in of_queue:
            if len(of_queue) >= _MOST_CURSORS or len(self._cursors) > _MOST_CURSORS:
                self._cursors.clear()  # they are found again by looking
                of_queue = self._cursors[queue]
            of_queue[kinds] = Cursor()
        return of_queue[kinds]

    def _looked(self, group: Group, waiter: Waiter, queue: str) -> None:
        left = group.unlooked.get(waiter)
        if left is None:
            return
        left.discard(queue)
        if not left:
            del group.unlooked[waiter]
            if not waiter.patient:
                waiter.end()

    def _deal(self, group: Group, waiter: Waiter, jobs: list[ClaimedJob]) -> None:
        if not jobs:
            return
        if waiter.gone:
            self.give_back(jobs)
        else:
            waiter.jobs.set_result(jobs)
        group.waiters.pop(waiter, None)
        group.unlooked.pop(waiter, None)

    async def _recover(self, group: Group) -> None:
        """Deal out what a claim whose connection died did commit: it is held under the waiters' ids."""
        claim_ids = [waiter.claim_id for waiter in group.doubtful]
        async with self._database.hot.connection() as connection:
            jobs = await held(connection, group.queues, claim_ids)
        doubtful, group.doubtful = group.doubtful, {}
        for waiter in doubtful:
            self._deal(group, waiter, [job for job in jobs if job.claim_id == str(waiter.claim_id)])
