"""Protects the promise that a verb does what the rules say, and nothing else, in every state and under every lease.

The full product over HTTP: a job in every situation, every verb that there is, and every credential that could come
with it. What each cell must answer, and what it may change, is worked out from `app.lifecycle`: the rule's sources,
target and effects. A refused verb changes nothing: the job's row, its waits and its events are compared before
and after.

Each cell has a job of its own, with two claims behind it, so that there is an earlier lease to be stale. They are
made, and the verbs sent, before the first test: many at once is quick, and lets unlike requests share flushes.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple
from uuid import uuid4

import httpx
import psycopg
import pytest

from app.callbacks.tokens import Capability, callback_urls
from app.callbacks.verbs import step_of
from app.http.problems import PROBLEM_STATUS
from app.lifecycle import CALLBACK_VERBS, FINAL, PENDING, STEPS, Attempt, State, Step
from app.signing import Signer, SigningKey
from tests.build import JSON, Api, ok, problem
from tests.conftest import SIGNING_KEY
from tests.servers import ServiceThread

LONG = 3600


class Lease(StrEnum):
    """What comes with a verb: the lease of a worker's report, the token of a callback, the id of a claim."""

    FRESH = "fresh"
    """Of the latest claim."""
    STALE = "stale"
    """Of an earlier claim of the same job."""
    FOREIGN = "foreign"
    """Genuine, but for something else: another job's lease or claim, a callback URL of another verb."""
    FORGED = "forged"
    """A fresh one with a few characters changed."""
    NONE = "none"
    """The verb takes none."""


GIVEN = (Lease.FRESH, Lease.STALE, Lease.FOREIGN, Lease.FORGED)


@dataclass(frozen=True)
class Situation:
    """A state, and the way that a twice claimed job came to it: what its latest claim reported, if anything."""

    name: str
    state: State
    reported: str | None = None
    report: JSON = field(default_factory=dict)
    then: str | None = None
    """What an operator did after that."""
    max_attempts: int = 5

    @property
    def attached(self) -> bool:
        """Whether a parked job's handler is still there."""
        return bool(self.report.get("attached"))

    @property
    def settled_by(self) -> Step | None:
        """The step that ended, or parked, the latest claim."""
        return STEPS[{"cancel": "cancel_own"}.get(self.reported, self.reported)] if self.reported else None


SITUATIONS = (
    Situation("scheduled", State.SCHEDULED, "snooze", {"delay_seconds": LONG}),
    Situation("available", State.AVAILABLE, "release"),
    Situation("redriven", State.AVAILABLE, "fail", then="redrive"),
    Situation("running", State.RUNNING),
    Situation("running its last attempt", State.RUNNING, max_attempts=1),
    Situation("retryable", State.RETRYABLE, "retry", {"delay_seconds": LONG}),
    Situation("parked", State.WAITING_EXTERNAL, "park"),
    Situation("parked with its handler", State.WAITING_EXTERNAL, "park", {"attached": True}),
    Situation("completed", State.COMPLETED, "complete", {"result": {"first": True}}),
    Situation("failed", State.FAILED, "fail"),
    Situation("cancelled by its worker", State.CANCELLED, "cancel"),
    Situation("cancelled by an operator", State.CANCELLED, then="cancel"),
)


class Verb(NamedTuple):
    """A verb of the API: its step if it has one, what it carries, and how it is sent.

    One of many is sent in one request with all of its kind, so that very different outcomes share it.
    """

    name: str
    step: Step | None
    leases: tuple[Lease, ...]
    send: "Callable[[Cell], httpx.Response] | None" = None
    one_of_many: "Callable[[Cell], JSON] | None" = None


# --- What the cells are made of ---------------------------------------------------------------------------------


@dataclass
class Cell:
    """One job in its situation, with all that a verb may need."""

    http: Api
    situation: Situation
    verb: str
    lease: Lease
    job: str = ""
    claims: list[JSON] = field(default_factory=list)
    claim_ids: list[str] = field(default_factory=list)
    waits: dict[int, JSON] = field(default_factory=dict)
    """The wait that each claim opened."""
    foreign: JSON = field(default_factory=dict)
    foreign_claim_id: str = ""
    before: JSON = field(default_factory=dict)
    answer: httpx.Response | None = None
    after: JSON | None = None

    @property
    def kind(self) -> str:
        """The job's kind, which no other job has: a claim by kind gets this one or none."""
        return f"{self.situation.name}/{self.verb}/{self.lease}".replace(" ", "-")

    def token(self) -> str:
        """The lease that a worker shows."""
        fresh, stale, foreign = (claim["lease"] for claim in (self.claims[-1], self.claims[0], self.foreign))
        tokens = {Lease.FRESH: fresh, Lease.STALE: stale, Lease.FOREIGN: foreign, Lease.FORGED: forged(fresh)}
        return str(tokens[self.lease])

    def claim_id(self) -> str:
        """The id that a claim is repeated with."""
        return {
            Lease.FRESH: self.claim_ids[-1],
            Lease.STALE: self.claim_ids[0],
            Lease.FOREIGN: self.foreign_claim_id,
            Lease.FORGED: str(uuid4()),
        }[self.lease]

    def callback(self, verb: str) -> str:
        """The path of a callback URL."""
        urls = self.waits[0 if self.lease is Lease.STALE else 1]["urls"]
        path = httpx.URL(urls[verb]).path
        token = path.split("/")[3]
        if self.lease is Lease.FOREIGN:
            other = urls["resume" if verb == "complete" else "complete"]
            return path.replace(token, httpx.URL(other).path.split("/")[3])
        return path.replace(token, forged(token)) if self.lease is Lease.FORGED else path

    def wait(self, stored: JSON) -> JSON:
        """The row of the latest claim's wait."""
        (found,) = (wait for wait in stored["waits"] if wait["id"] == self.waits[1]["wait_id"])
        return found  # type: ignore[no-any-return]


def forged(token: str) -> str:
    """The same text but for a few characters of its MAC."""
    return token[:-6] + token[-6:-3].swapcase()[::-1] + ("AAA" if token[-3:] != "AAA" else "BBB")


# --- The verbs --------------------------------------------------------------------------------------------------

REPORTS: dict[str, JSON] = {
    "complete": {"result": {"first": True}},
    "retry": {"error": {"message": "no luck"}, "delay_seconds": LONG},
    "snooze": {"delay_seconds": LONG},
    "park": {},
    "fail": {"error": {"message": "no use"}},
    "release": {},
    "cancel": {"reason": "given up"},
}
STEP_OF_REPORT = {name: STEPS["cancel_own" if name == "cancel" else name] for name in REPORTS}


def _report(cell: Cell, verb: str) -> JSON:
    wait = {"wait_id": cell.waits[1]["wait_id"]} if verb == "park" else {}
    return {"lease": cell.token(), **REPORTS[verb], **wait}


def settle_one(verb: str) -> Verb:
    def send(cell: Cell) -> httpx.Response:
        return cell.http.post(f"/v1/jobs/{cell.job}/{verb}", _report(cell, verb))

    return Verb(verb, STEP_OF_REPORT[verb], GIVEN, send)


def settle_many(verb: str) -> Verb:
    def item(cell: Cell) -> JSON:
        return {"outcome": verb, "id": cell.job, **_report(cell, verb)}

    return Verb(f"settlements:{verb}", STEP_OF_REPORT[verb], GIVEN, one_of_many=item)


def callback(verb: str) -> Verb:
    def send(cell: Cell) -> httpx.Response:
        return cell.http.post(cell.callback(verb), {} if verb == "heartbeat" else {"paid": True})

    return Verb(f"callback:{verb}", None, GIVEN, send)


def _heartbeat(cell: Cell) -> httpx.Response:
    return cell.http.post(f"/v1/jobs/{cell.job}/heartbeat", {"lease": cell.token(), "progress": {"percent": 50}})


def _one_of_heartbeats(cell: Cell) -> JSON:
    return {"id": cell.job, "lease": cell.token(), "progress": {"percent": 50}}


def _open_wait(cell: Cell) -> httpx.Response:
    return cell.http.post(f"/v1/jobs/{cell.job}/callbacks", {"lease": cell.token(), "name": "another"})


def _claim(cell: Cell) -> httpx.Response:
    asked = {
        "queues": [cell.http.queue],
        "kinds": [cell.kind],
        "worker": "claimer",
        "wait_seconds": 0,
        "claim_id": cell.claim_id(),
    }
    return cell.http.post("/v1/claims", asked)


def _cancel(cell: Cell) -> httpx.Response:
    return cell.http.post(f"/v1/jobs/{cell.job}/cancel", {"reason": "not needed"})


def _redrive(cell: Cell) -> httpx.Response:
    return cell.http.post(f"/v1/jobs/{cell.job}/redrive")


def _redrive_dead_letter(cell: Cell) -> httpx.Response:
    return cell.http.post(f"/v1/dead-letters/{cell.job}/redrive")


def _discard(cell: Cell) -> httpx.Response:
    return cell.http.client.delete(f"/v1/dead-letters/{cell.job}")


def _prioritize(cell: Cell) -> httpx.Response:
    return cell.http.client.patch(f"/v1/jobs/{cell.job}", json={"priority": 1})


def _postpone(cell: Cell) -> httpx.Response:
    return cell.http.client.patch(f"/v1/jobs/{cell.job}", json={"run_at": "2100-01-01T00:00:00Z"})


OF_OPERATORS = (
    Verb("operator:cancel", STEPS["cancel"], (Lease.NONE,), _cancel),
    Verb("operator:redrive", STEPS["redrive"], (Lease.NONE,), _redrive),
    Verb("dead-letters:redrive", STEPS["redrive"], (Lease.NONE,), _redrive_dead_letter),
    Verb("dead-letters:discard", None, (Lease.NONE,), _discard),
    Verb("patch:priority", None, (Lease.NONE,), _prioritize),
    Verb("patch:run_at", None, (Lease.NONE,), _postpone),
)

VERBS = {
    verb.name: verb
    for verb in (
        *(settle_one(report) for report in REPORTS),
        *(settle_many(report) for report in REPORTS),
        Verb("heartbeat", None, GIVEN, _heartbeat),
        Verb("heartbeats", None, GIVEN, one_of_many=_one_of_heartbeats),
        Verb("open a wait", None, GIVEN, _open_wait),
        Verb("claim", STEPS["claim"], GIVEN, _claim),
        *(callback(verb) for verb in (*CALLBACK_VERBS, "default", "heartbeat")),
        *OF_OPERATORS,
    )
}

PRODUCT = [
    pytest.param(situation, verb, lease, id=f"{situation.name}-{verb.name}-{lease}")
    for situation in SITUATIONS
    for verb in VERBS.values()
    for lease in verb.leases
]


# --- What the rules say ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """A cell's answer: its status, the problem if it is one, the step that happens if one does."""

    status: int
    problem: str | None = None
    step: Step | None = None
    exhausted: bool = False
    already_applied: bool = False
    changes: frozenset[str] = frozenset()
    """Columns of the job that a verb which is no step may change."""

    def state(self, before: State) -> State:
        """The job's state afterwards."""
        if self.step is None:
            return before
        return self.step.exhausted if self.exhausted and self.step.exhausted else self.step.target


def refused(code: str) -> Expected:
    return Expected(PROBLEM_STATUS[code], code)


def expected(situation: Situation, verb: Verb, lease: Lease) -> Expected:
    """What the rules say of a cell."""
    if verb.name.startswith("callback:"):
        return of_callback(situation, verb.name.removeprefix("callback:"), lease)
    if verb.name == "claim":
        return of_claim(situation, lease)
    if verb.leases == (Lease.NONE,):
        return of_operator(situation, verb)
    return of_worker(situation, verb, lease)


def of_worker(situation: Situation, verb: Verb, lease: Lease) -> Expected:
    """P3 and P4: only the latest lease counts; the same report again is told so; anything else changes nothing."""
    running = lease is Lease.FRESH and situation.state is State.RUNNING
    if verb.name == "open a wait":
        return Expected(201) if running else refused("lease-lost")
    if verb.name in ("heartbeat", "heartbeats"):
        if running or (lease is Lease.FRESH and situation.attached):
            return Expected(200, changes=frozenset({"lease_expires_at", "progress"}))
        # One of many is told in its place; it does not refuse the others.
        return Expected(200) if verb.name == "heartbeats" else refused("lease-lost")
    step = verb.step
    assert step
    assert step.leased
    if lease is Lease.FRESH and situation.state in step.sources:
        return Expected(200, step=step, exhausted=situation.max_attempts == 1)
    reported = {Lease.FRESH: situation.settled_by, Lease.STALE: STEPS["release"]}.get(lease)
    return Expected(200, already_applied=True) if reported is step else refused("lease-lost")


def of_callback(situation: Situation, verb: str, lease: Lease) -> Expected:
    """P8: a callback resolves the wait that its job waits on, or will; a late one is told so."""
    if lease in (Lease.FOREIGN, Lease.FORGED):
        return refused("unknown-callback")
    waited_for = situation.state in (State.RUNNING, State.WAITING_EXTERNAL)
    if lease is Lease.STALE or not waited_for:
        return refused("callback-gone")
    if verb == "heartbeat":
        return Expected(200)
    if situation.state is State.RUNNING:
        return Expected(202, changes=frozenset({"callback_results"}))
    does = "resume" if verb == "default" else verb
    return Expected(200, step=step_of(does, handler_attached=situation.attached))


def of_claim(situation: Situation, lease: Lease) -> Expected:
    """A repeated claim gets what it still holds, and takes nothing more."""
    free = situation.state in STEPS["claim"].sources
    return Expected(200, step=STEPS["claim"]) if free and lease is not Lease.FOREIGN else Expected(200)


def of_operator(situation: Situation, verb: Verb) -> Expected:
    """P5: what operators do goes by the state alone."""
    if verb.name == "dead-letters:redrive" and situation.state is State.CANCELLED:
        return refused("unknown-dead-letter")
    if verb.name == "dead-letters:discard":
        return Expected(204) if situation.state is State.FAILED else refused("unknown-dead-letter")
    if verb.name.startswith("patch:"):
        if situation.state not in PENDING:
            return refused("wrong-state")
        if verb.name == "patch:priority":
            return Expected(200, changes=frozenset({"priority", "claim_order"}))
        moved = frozenset({"run_at", "claim_order"})
        postponed = STEPS["postpone"] if situation.state in STEPS["postpone"].sources else None
        return Expected(200, step=postponed, changes=moved)
    step = verb.step
    assert step
    if situation.state in step.sources:
        return Expected(200, step=step)
    if situation.then == step.name or (step.name == "cancel" and situation.state is step.target):
        return Expected(200, already_applied=True)
    return refused("wrong-state")


OFTEN = frozenset({"state", "settled_as", "lease_expires_at", "deadline_at", "finished_at", "dead_letter_reason"})
ALSO = {
    "claim": {"attempt", "lease_number", "claimed_at", "claim_id", "worker", "lease_seconds", "timeout_seconds"},
    "complete": {"result"},
    "retry": {"run_at", "claim_order", "errors", "errors_total"},
    "snooze": {"attempt", "snoozes", "run_at", "claim_order"},
    "release": {"attempt"},
    "park": {"waiting_on", "answers_needed"},
    "fail": {"errors", "errors_total"},
    "cancel_own": {"cancel_reason"},
    "cancel": {"cancel_reason", "waiting_on", "answers_needed"},
    "postpone": set(),
    "redrive": {"attempt", "run_at", "claim_order", "cancel_reason"},
    "callback_complete": {"result", "callback_results", "waiting_on", "answers_needed"},
    "callback_fail": {"errors", "errors_total", "callback_results", "waiting_on", "answers_needed"},
    "callback_resume": {"attempt", "callback_results", "waiting_on", "answers_needed"},
    "callback_resume_attached": {"callback_results", "waiting_on", "answers_needed"},
    "callback_retry": {"attempt", "run_at", "claim_order", "waiting_on", "answers_needed"},
}
"""The columns that a step may change, besides those which say where the job is and who holds it."""


def attempt_after(step: Step, attempt: int) -> int:
    return {Attempt.KEEP: attempt, Attempt.TAKE: attempt + 1, Attempt.GIVE_BACK: attempt - 1, Attempt.RESET: 0}[
        step.attempt
    ]


# --- The cells' jobs, made in a few requests ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def http(service: ServiceThread) -> Iterator[Api]:
    """The API with a queue of this module's own."""
    with httpx.Client(base_url=service.url, timeout=30) as client:
        yield Api(client, f"q-{uuid4().hex[:16]}")


@pytest.fixture(scope="module")
def database(service: ServiceThread, settings: Any) -> Iterator["psycopg.Connection[Any]"]:
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        yield connection


@pytest.fixture(scope="module")
def cells(http: Api, database: "psycopg.Connection[Any]") -> dict[tuple[str, str, Lease], Cell]:
    """A job for every cell, brought to its situation; then every verb is sent, many at once: they share flushes."""
    made = [
        Cell(http, situation, verb.name, lease)
        for situation in SITUATIONS
        for verb in VERBS.values()
        for lease in verb.leases
    ]
    for some in parts(made):
        jobs = [
            {
                "kind": cell.kind,
                "queue": http.queue,
                "max_attempts": cell.situation.max_attempts,
                "args": {"of": cell.kind},
            }
            for cell in some
        ]
        for cell, item in zip(some, ok(http.post("/v1/jobs/batch", {"jobs": jobs}))["jobs"], strict=True):
            cell.job = item["job"]["id"]
    take_all(http, made)
    report_all(http, made, lambda _: ("release", {}))
    take_all(http, made)
    open_waits(database, made)
    report_all(http, made, last_report)
    operated = [cell for cell in made if cell.situation.then]
    at_once(lambda cell: ok(http.post(f"/v1/jobs/{cell.job}/{cell.situation.then}", {})), operated)

    claim_id = str(uuid4())
    http.enqueue(kind="foreign")
    ok(http.settle("release", http.claim(kinds=["foreign"])))
    foreign = http.claim(kinds=["foreign"], claim_id=claim_id, lease_seconds=LONG)
    for cell in made:
        cell.foreign, cell.foreign_claim_id = foreign, claim_id
    for cell, known in zip(made, snapshots(database, made), strict=True):
        assert known
        cell.before = known
    send_alone([cell for cell in made if VERBS[cell.verb].send])
    send_together(http, "settlements", [cell for cell in made if cell.verb.startswith("settlements:")])
    send_together(http, "heartbeats", [cell for cell in made if cell.verb == "heartbeats"])
    for cell, known in zip(made, snapshots(database, made), strict=True):
        cell.after = known
    return {(cell.situation.name, cell.verb, cell.lease): cell for cell in made}


def parts(cells: list[Cell]) -> Iterator[list[Cell]]:
    for start in range(0, len(cells), 500):
        yield cells[start : start + 500]


def at_once(do: Callable[[Cell], Any], cells: list[Cell]) -> list[Any]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(do, cells))


def take_all(http: Api, cells: list[Cell]) -> None:
    """A claim for every cell; those about claims get their own, since a repeat returns all that it holds."""
    own = [cell for cell in cells if cell.verb == "claim"]
    by_kind = {cell.kind: cell for cell in cells}

    def take(cell: Cell) -> None:
        cell.claim_ids.append(str(uuid4()))
        cell.claims.append(http.claim(kinds=[cell.kind], claim_id=cell.claim_ids[-1], lease_seconds=LONG))

    at_once(take, own)
    taken: list[JSON] = []
    while len(taken) < len(cells) - len(own):
        taken += http.claims(limit=1000, wait_seconds=10, lease_seconds=LONG)["jobs"]
    for job in taken:
        by_kind[job["kind"]].claims.append(job)


def send_alone(cells: list[Cell]) -> None:
    def send(cell: Cell) -> httpx.Response:
        does = VERBS[cell.verb].send
        assert does
        return does(cell)

    for cell, answer in zip(cells, at_once(send, cells), strict=True):
        cell.answer = answer


def send_together(http: Api, route: str, cells: list[Cell]) -> None:
    """One request; each item's answer as if it had been asked alone."""
    items = []
    for cell in cells:
        item_of = VERBS[cell.verb].one_of_many
        assert item_of
        items.append(item_of(cell))
    answers = ok(http.post(f"/v1/{route}", {route: items}))[route]
    for cell, item in zip(cells, answers, strict=True):
        told = item.get("problem")
        status = item["status"] if route == "settlements" else 200
        media_type = "application/problem+json" if told else "application/json"
        body = told or item.get("settled") or item
        cell.answer = httpx.Response(status, json=body, headers={"content-type": media_type})


def open_waits(database: "psycopg.Connection[Any]", cells: list[Cell]) -> None:
    """A wait for each of a job's claims, written as opening it does; the URLs are made as the service makes them."""
    signer = Signer((SigningKey(SIGNING_KEY.encode()),))
    rows = []
    for cell in cells:
        for claim in (0, 1):
            wait = uuid4()
            urls = callback_urls(signer, "http://service", Capability(wait, 0))
            cell.waits[claim] = {"wait_id": str(wait), "urls": urls}
            rows.append((wait, cell.job, claim + 1, cell.claims[claim]["attempt"]))
    ids, jobs, leases, attempts = zip(*rows, strict=True)
    database.execute(
        """INSERT INTO towpath.waits (id, job_id, lease_number, attempt, name, timeout_seconds, deadline_at)
        SELECT id, job, lease, attempt, 'callback', 3600, now() + interval '1 hour'
        FROM unnest(%s::uuid[], %s::uuid[], %s::bigint[], %s::integer[]) AS given(id, job, lease, attempt)""",
        [list(ids), list(jobs), list(leases), list(attempts)],
    )


def last_report(cell: Cell) -> tuple[str, JSON] | None:
    reported = cell.situation.reported
    if reported is None:
        return None
    wait = {"wait_id": cell.waits[1]["wait_id"]} if reported == "park" else {}
    return reported, {**cell.situation.report, **wait}


def report_all(http: Api, cells: list[Cell], report: Callable[[Cell], tuple[str, JSON] | None]) -> None:
    """What each cell's latest claim reports, many per request."""
    settlements = []
    for cell in cells:
        if reported := report(cell):
            outcome, body = reported
            settlements.append({"outcome": outcome, "id": cell.job, "lease": cell.claims[-1]["lease"], **body})
    for start in range(0, len(settlements), 500):
        answers = ok(http.post("/v1/settlements", {"settlements": settlements[start : start + 500]}))["settlements"]
        assert {answer["status"] for answer in answers} == {200}


def snapshots(database: "psycopg.Connection[Any]", cells: list[Cell]) -> list[JSON | None]:
    """All that is stored of each cell's job; None when it is gone."""
    found: dict[str, JSON] = {}
    rows = database.execute(
        """SELECT j.id, to_jsonb(j),
            (SELECT jsonb_agg(to_jsonb(w) ORDER BY w.lease_number, w.id) FROM towpath.waits AS w WHERE w.job_id = j.id),
            (SELECT jsonb_agg(to_jsonb(e) ORDER BY e.id) FROM towpath.job_events AS e WHERE e.job_id = j.id)
        FROM towpath.jobs AS j WHERE j.id = ANY(%s::uuid[])""",
        [[cell.job for cell in cells]],
    ).fetchall()
    for job, row, waits, events in rows:
        found[str(job)] = {"row": row, "waits": waits or [], "events": events or []}
    return [found.get(cell.job) for cell in cells]


# --- The product ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("situation", "verb", "lease"), PRODUCT)
def test_a_verb_does_what_the_rules_say_and_nothing_else(
    cells: dict[tuple[str, str, Lease], Cell], situation: Situation, verb: Verb, lease: Lease
) -> None:
    cell = cells[situation.name, verb.name, lease]
    rule = expected(situation, verb, lease)
    assert cell.before["row"]["state"] == situation.state

    answer, after = cell.answer, cell.after
    assert answer is not None

    if rule.problem:
        facts = problem(answer, rule.status, rule.problem)
        if rule.problem in ("lease-lost", "wrong-state"):
            assert facts["state"] == situation.state
        assert after == cell.before, "a refused verb changed something"
        return
    assert answer.status_code == rule.status, answer.text
    if rule.status == 204:
        assert after is None
        return
    assert after is not None
    check_answer(cell, rule, answer, after)
    check_changes(cell, rule, after)


def check_answer(cell: Cell, rule: Expected, answer: httpx.Response, after: JSON) -> None:
    """What the caller is told is what is stored."""
    told = answer.json()
    state = rule.state(cell.situation.state)
    if cell.verb == "claim":
        check_claim(cell, rule, told)
    elif cell.verb == "heartbeats":
        lost = "cancelled" if state is State.CANCELLED else "lost"
        assert (told["id"], told["status"], told["state"]) == (cell.job, "ok" if rule.changes else lost, state)
    elif cell.verb == "heartbeat":
        assert [(beat["status"], beat["state"]) for beat in told["heartbeats"]] == [("ok", state)]
    elif cell.verb.startswith("callback:"):
        check_callback(cell, rule, told)
    elif cell.verb == "open a wait":
        assert told["name"] == "another"
    else:
        assert told["state"] == state
        assert told["attempt"] == after["row"]["attempt"]
        assert told.get("already_applied", rule.already_applied) == rule.already_applied


def check_claim(cell: Cell, rule: Expected, told: JSON) -> None:
    """A repeat gets the jobs that it holds, with the lease it got before; a new claim gets a new lease."""
    if cell.lease is Lease.FOREIGN:
        held: list[str] = [cell.foreign["id"]]
    elif cell.lease is Lease.FRESH and cell.situation.state is State.RUNNING:
        held = [cell.job]
        assert told["jobs"][0]["lease"] == cell.claims[-1]["lease"]
    else:
        held = [cell.job] if rule.step else []
    assert [job["id"] for job in told["jobs"]] == held
    if rule.step:
        assert told["jobs"][0]["lease"] not in [claim["lease"] for claim in cell.claims]


def check_callback(cell: Cell, rule: Expected, told: JSON) -> None:
    if cell.verb == "callback:heartbeat":
        assert datetime.fromisoformat(told["deadline_at"]) > datetime.fromisoformat(
            cell.wait(cell.before)["deadline_at"]
        )
        return
    assert told["already_applied"] is False
    assert told["early"] == (rule.status == 202)
    assert told["job_state"] == rule.state(cell.situation.state)


def check_changes(cell: Cell, rule: Expected, after: JSON) -> None:
    """The row changed as the rule says, and nowhere else; so did the waits and the history."""
    old, new = cell.before["row"], after["row"]
    changed = {column for column, value in new.items() if value != old[column]}
    added = [event["step"] for event in after["events"][len(cell.before["events"]) :]]
    if rule.already_applied:
        assert after == cell.before, "a repeat changed something"
    check_waits(cell, after)
    step = rule.step
    if step is None:
        assert changed <= rule.changes
        assert rule.changes - {"claim_order"} <= changed
        assert added == []
        return
    state = rule.state(cell.situation.state)
    assert changed <= OFTEN | ALSO[step.name] | rule.changes
    assert new["state"] == state
    assert new["attempt"] == attempt_after(step, old["attempt"])
    assert new["lease_number"] == old["lease_number"] + (step.name == "claim")
    assert new["errors_total"] - old["errors_total"] == (1 if step.error else 0)
    assert len(new["errors"] or []) == new["errors_total"]
    assert (new["finished_at"] is not None) == (state in FINAL)
    assert (new["dead_letter_reason"] is not None) == (state is State.FAILED)
    assert (new["deadline_at"] is not None) == (state is State.RUNNING)
    assert (new["lease_expires_at"] is not None) == (state is State.RUNNING)
    assert new["result"] == {"complete": {"first": True}, "callback_complete": {"paid": True}}.get(
        step.name, old["result"]
    )
    assert added == ([] if step.name in ("claim", "complete") else [step.name])


def check_waits(cell: Cell, after: JSON) -> None:
    """Only callbacks change a wait, and only their own; only opening one adds one."""
    verb = cell.verb.removeprefix("callback:")
    new = [wait for wait in after["waits"] if wait["name"] == "another"]
    assert len(new) == (1 if verb == "open a wait" else 0)
    old = cell.before["waits"]
    if verb != cell.verb:
        own = cell.wait(after)
        resolved_as = {"default": "resume", "heartbeat": None}.get(verb, verb)
        assert (own["state"], own["resolved_as"]) == ("resolved" if resolved_as else "open", resolved_as)
        old = [wait for wait in old if wait["id"] != own["id"]]
    unchanged = [wait for wait in after["waits"] if wait in old]
    assert unchanged == old


def test_every_state_has_a_situation() -> None:
    assert {situation.state for situation in SITUATIONS} == set(State)


def test_every_leased_step_has_its_verb_alone_and_as_one_of_many() -> None:
    leased = sorted(step.name for step in STEPS.values() if step.leased)
    alone = sorted(verb.step.name for verb in VERBS.values() if verb.step and verb.step.leased and ":" not in verb.name)
    many = sorted(verb.step.name for verb in VERBS.values() if verb.step and verb.name.startswith("settlements:"))
    assert alone == many == leased


def test_the_product_is_full() -> None:
    with_lease, without = len(VERBS) - len(OF_OPERATORS), len(OF_OPERATORS)
    assert len(PRODUCT) == len(SITUATIONS) * (with_lease * len(GIVEN) + without) == 1224
