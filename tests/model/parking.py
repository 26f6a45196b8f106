"""A model of parking: a worker, callers, sweeps and an operator, whose reads and writes interleave in every order.

Each transaction is four steps: lock the job's row, read, write and commit, answer. Between any two of them everybody
else may act, and the service may crash, which takes what is not committed with it. What the waits mean together, what
a step does to the attempts and which moves are legal is asked of the code itself. `Flaw` takes one safeguard away.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from app.callbacks.verbs import Answered, Verdict, step_of, verdict
from app.lifecycle import FINAL, LEGAL_MOVES, STEPS, Attempt, State, Step
from tests.model.explorer import Violation

R, W, A = State.RUNNING, State.WAITING_EXTERNAL, State.AVAILABLE


class Flaw(Enum):
    """A safeguard that is taken away."""

    PARK_DOES_NOT_LOCK = auto()
    CALLBACK_DOES_NOT_LOCK = auto()
    CALLBACK_GUARDS_BY_ATTEMPT = auto()
    SWEEP_DOES_NOT_LOCK = auto()
    SWEEP_READS_BEFORE_IT_LOCKS = auto()
    RESOLVES_WHAT_IS_NOT_OPEN = auto()
    PARK_OVERLOOKS_EARLY_CALLBACKS = auto()
    PARK_DOES_NOT_CHECK_THE_LEASE = auto()
    RESUME_FORGETS_THE_PAYLOAD = auto()
    RESUME_USES_AN_ATTEMPT = auto()
    RESCUE_TAKES_PARKED_JOBS = auto()
    CANCEL_LEAVES_THE_WAITS_OF_USE = auto()
    ONE_FAIL_ENDS_A_PARK_ON_ANY = auto()
    ONE_DEADLINE_ENDS_A_PARK_ON_ANY = auto()
    ANSWERS_BEFORE_THE_COMMIT = auto()
    REPEATS_ARE_TOLD_THAT_THEY_ARE_LATE = auto()
    RESUME_DOES_NOT_COUNT = auto()
    RESUME_TO_A_DEAD_HANDLER = auto()


@dataclass(frozen=True)
class Setting:
    """Who takes part. A caller is the wait that it calls and its verb."""

    waits: int
    needed: int
    callers: tuple[tuple[int, str], ...]
    attached: bool = False
    max_attempts: int = 2
    cancels: bool = False
    heartbeats: bool = False
    crashes: int = 1


class Job(NamedTuple):
    """The job's row. `failures` counts what used an attempt; `results` are (wait, caller)."""

    state: State
    attempt: int = 1
    lease: int = 1
    alive: bool = True
    waiting_on: tuple[int, ...] = ()
    needed: int = 0
    failures: int = 0
    results: tuple[tuple[int, int], ...] = ()
    ended_by: int | None = None


class Wait(NamedTuple):
    """A wait's row, and how often it was resolved."""

    lease: int = 1
    attempt: int = 1
    state: str = "open"
    verb: str = ""
    by: int | None = None
    due: bool = False
    moved: bool = False
    early: bool = False
    times: int = 0


class Actor(NamedTuple):
    """Where someone is in their transaction, what they have read, and what they were told."""

    at: str = "idle"
    read: tuple[object, ...] = ()
    told: str = ""
    committed: bool = False


class World(NamedTuple):
    """The database, the lock of the job's row, and everybody."""

    job: Job
    waits: tuple[Wait, ...]
    lock: str
    actors: tuple[tuple[str, Actor], ...]
    crashes: int
    scratched: bool = False

    def actor(self, name: str) -> Actor:
        return dict(self.actors)[name]

    def with_actor(self, name: str, **changes: object) -> "World":
        actors = tuple((who, actor._replace(**changes) if who == name else actor) for who, actor in self.actors)
        return self._replace(actors=actors)

    def with_wait(self, n: int, **changes: object) -> "World":
        return self._replace(waits=(*self.waits[:n], self.waits[n]._replace(**changes), *self.waits[n + 1 :]))


class Parking:
    """The model of one setting, with or without a flaw."""

    def __init__(self, setting: Setting, flaw: Flaw | None = None) -> None:
        self.setting = setting
        self.flaw = flaw
        self.callers = {f"caller {n}": caller for n, caller in enumerate(setting.callers)}
        names = ["worker", *self.callers, "sweep", *(["operator"] if setting.cancels else [])]
        self.initial = World(
            Job(R), (Wait(),) * setting.waits, "", tuple((name, Actor()) for name in names), setting.crashes
        )

    # --- Who can do what next

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        """Every single step that anybody can take."""
        for name, actor in world.actors:
            yield from self._transaction(world, name, actor)
            if actor.at not in ("idle", "done", "attached") and world.crashes:
                lost = world.with_actor(name, at="idle", read=())._replace(crashes=world.crashes - 1)
                yield f"{name}: the service crashes", self._unlocked(lost, name)
        yield from self._surroundings(world)

    def _surroundings(self, world: World) -> Iterator[tuple[str, World]]:
        job = world.job
        if job.alive and job.state in (R, W) and (job.state is R or self.setting.attached):
            yield "the lease expires", world._replace(job=job._replace(alive=False))
        for n, wait in enumerate(world.waits):
            if wait.state == "open" and not wait.due:
                yield f"deadline of wait {n} passes", world.with_wait(n, due=True)
            of_use = n in job.waiting_on or (job.state is R and job.lease == wait.lease)
            late = wait.state == "open" and wait.due and of_use
            if self.setting.heartbeats and late and not wait.moved and not world.lock:
                yield f"a heartbeat moves the deadline of wait {n}", world.with_wait(n, due=False, moved=True)
        if world.lock:
            return
        rescued = (R, W) if self.flaw is Flaw.RESCUE_TAKES_PARKED_JOBS else (R,)
        if job.state in rescued and not job.alive:
            yield "rescue", self._moved(world, STEPS["lose_lease"])
        if job.state is State.RETRYABLE:
            yield "promote", self._moved(world, STEPS["promote"])
        if job.state is A and job.lease < 3:
            # What the claim takes along is seen now: `kept` holds for it in every state.
            yield "claim", self._moved(world, STEPS["claim"])
        if job.state is R and job.lease > 1 and job.alive:
            yield "a later worker completes", self._moved(world, STEPS["complete"], ended_by=-1)

    def _transaction(self, world: World, name: str, actor: Actor) -> Iterator[tuple[str, World]]:
        kind = "caller" if name in self.callers else name
        if actor.at == "idle":
            if self._wants(world, kind, actor):
                if self._locks(kind):
                    if not world.lock:
                        yield f"{name} locks", world.with_actor(name, at="locked")._replace(lock=name)
                else:
                    yield f"{name} begins", world.with_actor(name, at="locked")
        elif actor.at == "locked":
            yield f"{name} reads", world.with_actor(name, at="read", read=self._read(world, name, kind))
        elif actor.at == "read":
            if self.flaw is Flaw.ANSWERS_BEFORE_THE_COMMIT and kind == "caller" and not actor.told:
                yield f"{name} is answered", world.with_actor(name, told=self._says(name, actor))
            if world.lock in ("", name):
                after = self._unlocked(self._written(world, name, kind, actor), name)
                yield f"{name} writes and commits", after
                if kind == "worker" and world.crashes:
                    again = after.with_actor(name, at="idle", read=(), told="")
                    yield f"{name} commits and does not get the answer", again._replace(crashes=world.crashes - 1)
        elif actor.at == "committed":
            yield f"{name} is answered", world.with_actor(name, at="done", told=self._says(name, actor), read=())
            if kind == "caller" and world.crashes:
                lost = world.with_actor(name, at="idle", read=())._replace(crashes=world.crashes - 1)
                yield f"{name} does not get the answer", lost
        elif actor.at == "attached":
            job = world.job
            if job.state is R and job.lease == 1 and job.alive:
                yield "the attached handler completes", self._moved(world, STEPS["complete"], ended_by=-1)

    def _wants(self, world: World, kind: str, actor: Actor) -> bool:
        if kind == "sweep":
            return any(wait.state == "open" and wait.due for wait in world.waits)
        if kind == "operator":
            return world.job.state not in FINAL
        return True

    def _locks(self, kind: str) -> bool:
        return self.flaw not in {
            "worker": (Flaw.PARK_DOES_NOT_LOCK,),
            "caller": (Flaw.CALLBACK_DOES_NOT_LOCK,),
            "sweep": (Flaw.SWEEP_DOES_NOT_LOCK, Flaw.SWEEP_READS_BEFORE_IT_LOCKS),
        }.get(kind, ())

    @staticmethod
    def _unlocked(world: World, name: str) -> World:
        return world._replace(lock="") if world.lock == name else world

    # --- What is read

    def _read(self, world: World, name: str, kind: str) -> tuple[object, ...]:
        if kind == "worker":
            return self._read_park(world)
        if kind == "caller":
            return self._read_callback(world, *self.callers[name])
        if kind == "sweep":
            return tuple(n for n, wait in enumerate(world.waits) if wait.state == "open" and wait.due)
        return ()

    def _read_park(self, world: World) -> tuple[object, ...]:
        job = world.job
        mine = job.lease == 1 or self.flaw is Flaw.PARK_DOES_NOT_CHECK_THE_LEASE
        if job.state is not R or not mine:
            return ("stale",)
        says = self._verdict(world, tuple(range(self.setting.waits)), self.setting.needed)
        if self.flaw is Flaw.PARK_OVERLOOKS_EARLY_CALLBACKS:
            says = Verdict.WAIT
        failed = any(wait.verb == "fail" for wait in world.waits)
        if says is Verdict.IMPOSSIBLE and not failed:
            return ("refused",)
        return ("park", says)

    def _verdict(self, world: World, waits: tuple[int, ...], needed: int) -> Verdict:
        stand = [world.waits[n] for n in waits]
        return verdict([Answered(wait.verb or wait.state, str(wait.by)) for wait in stand], needed)

    def _read_callback(self, world: World, n: int, verb: str) -> tuple[object, ...]:
        job, wait = world.job, world.waits[n]
        parked = job.state is W and n in job.waiting_on
        if self.flaw is Flaw.CANCEL_LEAVES_THE_WAITS_OF_USE:
            parked = n in job.waiting_on
        running = job.state is R and job.lease == wait.lease
        if self.flaw is Flaw.CALLBACK_GUARDS_BY_ATTEMPT:
            running = job.state is R and job.attempt == wait.attempt
        still_open = wait.state == "open" or self.flaw is Flaw.RESOLVES_WHAT_IS_NOT_OPEN
        if not still_open or not (parked or running):
            return ("late", wait.state, wait.verb, wait.by)
        return ("resolve", not parked, job.alive)

    # --- What is written

    def _written(self, world: World, name: str, kind: str, actor: Actor) -> World:
        if kind == "worker":
            return self._park(world, actor)
        if kind == "caller":
            return self._resolve(world, name, actor)
        if kind == "sweep":
            return self._expire(world, actor)
        world = world.with_actor(name, at="done")
        if world.job.state in FINAL:
            return world
        keep = self.flaw is Flaw.CANCEL_LEAVES_THE_WAITS_OF_USE
        on = world.job.waiting_on
        cancelled = self._moved(world, STEPS["cancel"])
        return cancelled._replace(job=cancelled.job._replace(waiting_on=on)) if keep else cancelled

    def _park(self, world: World, actor: Actor) -> World:
        what = actor.read[0]
        if what != "park":
            return world.with_actor("worker", at="done", told=str(what))
        job = world.job
        # The statement's own guard: whoever reads without a lock still can't park a job that is not its own.
        if job.state is not R or (job.lease != 1 and self.flaw is not Flaw.PARK_DOES_NOT_CHECK_THE_LEASE):
            return world.with_actor("worker", at="done", told="stale")
        if job.lease != 1:
            raise Violation("an old lease changed the job")
        says = actor.read[1]
        if says is Verdict.RESUME:
            world = world.with_actor("worker", told="goes on", at="done")
            return self._moved(world, STEPS["complete"], ended_by=-1)
        world = self._moved(world, STEPS["park"])
        waits = tuple(range(self.setting.waits))
        alive = world.job.alive and self.setting.attached
        world = world._replace(job=world.job._replace(waiting_on=waits, needed=self.setting.needed, alive=alive))
        if says is not Verdict.WAIT:
            verb = "fail" if says is Verdict.IMPOSSIBLE else str(says)
            decisive = min((wait for wait in world.waits if wait.verb == verb), key=lambda wait: str(wait.by))
            world = self._moved(world, step_of(verb, handler_attached=True), ended_by=decisive.by)
        stays = self.setting.attached and says is Verdict.WAIT
        return world.with_actor("worker", at="attached" if stays else "done", told="parked")

    def _resolve(self, world: World, name: str, actor: Actor) -> World:
        n, verb = self.callers[name]
        if actor.read[0] != "resolve":
            return world.with_actor(name, at="committed")
        wait, caller = world.waits[n], list(self.callers).index(name)
        if wait.state != "open" and self.flaw is not Flaw.RESOLVES_WHAT_IS_NOT_OPEN:
            return world.with_actor(name, at="committed", read=("late", wait.state, wait.verb, wait.by))
        if wait.lease != world.job.lease:
            raise Violation("a wait of an old lease was resolved")
        early = bool(actor.read[1])
        world = world.with_wait(n, state="resolved", verb=verb, by=caller, early=early, times=wait.times + 1)
        if wait.state == "expired":
            raise Violation("a wait was resolved after its deadline had ended it")
        results = (*(result for result in world.job.results if result[0] != n), (n, caller))
        if self.flaw is not Flaw.RESUME_FORGETS_THE_PAYLOAD:
            world = world._replace(job=world.job._replace(results=results))
        if not early:
            world = self._decided(world, verb, caller, alive=bool(actor.read[2]))
        return world.with_actor(name, at="committed", committed=True)

    def _decided(self, world: World, verb: str, caller: int, *, alive: bool) -> World:
        job = world.job
        if job.state is not W:
            raise Violation("a callback moved a job that does not wait")
        says = self._verdict(world, job.waiting_on, job.needed)
        if self.flaw is Flaw.ONE_FAIL_ENDS_A_PARK_ON_ANY and verb == "fail":
            says = Verdict.IMPOSSIBLE
        if self.flaw is Flaw.RESUME_DOES_NOT_COUNT and verb == "resume":
            says = Verdict.RESUME
        if says is Verdict.WAIT:
            return world
        self._require(world, says)
        attached = alive or self.flaw is Flaw.RESUME_TO_A_DEAD_HANDLER
        step = STEPS["callback_fail"] if says is Verdict.IMPOSSIBLE else step_of(verb, handler_attached=attached)
        # A lease that ends after it was looked at is found by the next rescue.
        if step is STEPS["callback_resume_attached"] and not alive:
            raise Violation("a job was given back to a handler that was gone")
        return self._moved(world, step, ended_by=caller)

    def _require(self, world: World, says: Verdict) -> None:
        job = world.job
        answers = sum(world.waits[n].verb == "resume" for n in job.waiting_on)
        coming = sum(world.waits[n].state == "open" for n in job.waiting_on)
        if says is Verdict.RESUME and answers < job.needed:
            raise Violation("a job went on with too few answers")
        if says is Verdict.IMPOSSIBLE and answers + coming >= job.needed:
            raise Violation("a job was given up though enough answers could still come")

    def _expire(self, world: World, actor: Actor) -> World:
        world = world.with_actor("sweep", at="idle", read=())
        for n in actor.read:
            wait = world.waits[int(str(n))]
            if self.flaw is not Flaw.SWEEP_DOES_NOT_LOCK and wait.state != "open":
                continue
            if wait.state == "resolved":
                raise Violation("a resolved wait expired")
            if not wait.due:
                raise Violation("a wait expired before its deadline")
            world = world.with_wait(int(str(n)), state="expired")
        job = world.job
        if job.state is not W:
            return world
        says = self._verdict(world, job.waiting_on, job.needed)
        ended = any(n in job.waiting_on for n in actor.read)
        if self.flaw is Flaw.ONE_DEADLINE_ENDS_A_PARK_ON_ANY and ended:
            says = Verdict.IMPOSSIBLE
        if says is not Verdict.IMPOSSIBLE:
            return world
        self._require(world, says)
        return self._moved(world, STEPS["callback_time_out"])

    def _moved(self, world: World, step: Step, ended_by: int | None = None) -> World:
        job = world.job
        exhausted = step.exhausted is not None and job.attempt >= self.setting.max_attempts
        target = step.exhausted if exhausted and step.exhausted else step.target
        if job.state not in step.sources or (job.state, target) not in LEGAL_MOVES:
            raise Violation(f"{step.name} is no step for a job that is {job.state}")
        attempt = {
            Attempt.KEEP: job.attempt, Attempt.TAKE: job.attempt + 1, Attempt.GIVE_BACK: job.attempt - 1,
            Attempt.RESET: 0,
        }[step.attempt]  # fmt: skip
        if self.flaw is Flaw.RESUME_USES_AN_ATTEMPT and step.name == "callback_resume":
            attempt = job.attempt
        changes: dict[str, object] = {"state": target, "attempt": attempt, "ended_by": ended_by}
        if step.exhausted is not None:
            changes["failures"] = job.failures + 1
        if step.name == "claim":
            changes |= {"lease": job.lease + 1, "alive": True}
        if job.state is W:
            changes |= {"waiting_on": (), "needed": 0}
        if target is not R and target is not W:
            changes["alive"] = False
        scratched = world.scratched
        if step.name == "callback_retry":
            changes |= {"failures": 0, "results": ()}
            scratched = True
        return world._replace(job=job._replace(**changes), scratched=scratched)

    def _says(self, name: str, actor: Actor) -> str:
        if actor.read[0] == "resolve":
            return "won"
        repeated = actor.read[3] == list(self.callers).index(name)
        return "already" if repeated and self.flaw is not Flaw.REPEATS_ARE_TOLD_THAT_THEY_ARE_LATE else "late"

    # --- What must hold in every state

    def broken(self, world: World) -> str | None:
        """The rule that this state breaks."""
        job = world.job
        if any(wait.times > 1 for wait in world.waits):
            return "a wait was resolved twice"
        if job.state is W and self._verdict(world, job.waiting_on, job.needed) is not Verdict.WAIT:
            return "a job is parked though its waits have decided"
        if job.state is W and job.lease != 1:
            return "a job is parked on waits of an old lease"
        expected = {R: 1, W: 1, A: 0, State.RETRYABLE: 0}.get(job.state)
        if expected is not None and job.attempt != job.failures + expected:
            return "an attempt was used, or given back, that should not have been"
        if not 0 <= job.attempt <= self.setting.max_attempts:
            return "more attempts than allowed"
        return self._unkept(world)

    def _unkept(self, world: World) -> str | None:
        """A caller that was told what is not so, or whose callback was accepted and is not what happened."""
        for caller, (name, (n, verb)) in enumerate(self.callers.items()):
            actor, wait, job = world.actor(name), world.waits[n], world.job
            if actor.told in ("won", "already") and not actor.committed:
                return "a caller was told that it won before that was so"
            if actor.told == "late" and actor.committed:
                return "a caller whose callback counted was told that it came too late"
            if not actor.committed:
                continue
            if (wait.state, wait.by) != ("resolved", caller):
                return "what a caller won is not what is recorded"
            if (n, caller) not in job.results and not world.scratched:
                return "the payload of a callback that won is lost"
            if verb == "complete" and not wait.early and (job.state, job.ended_by) != (State.COMPLETED, caller):
                return "a callback completed a job that is not completed by it"
        return None

    @staticmethod
    def settled(world: World) -> bool:
        """Nothing has to happen any more, or somebody can claim the job."""
        return world.job.state in FINAL or world.job.state is A
