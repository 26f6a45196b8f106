"""A random user of the real API against a small model of the lifecycle, written without looking at the rules.

Hypothesis chooses what happens; after every step each job must be what the model says.
"""

from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from hypothesis import HealthCheck
from hypothesis import settings as effort
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from app.settings import Settings
from tests.build import JSON, Api, client_of, ok
from tests.servers import ServiceThread
from tests.waiting import eventually

FINAL = ("completed", "failed", "cancelled")


@dataclass
class Model:
    """What a job should be."""

    id: str
    max_attempts: int
    state: str = "available"
    attempt: int = 0
    snoozes: int = 0
    errors: int = 0
    lease: str | None = None
    old_leases: list[str] = field(default_factory=list)
    wait: JSON | None = None

    def end_lease(self) -> None:
        if self.lease:
            self.old_leases.append(self.lease)
        self.lease = None

    def fail_attempt(self) -> None:
        """This attempt failed: another one later, or never."""
        self.errors += 1
        self.state = "failed" if self.attempt >= self.max_attempts else "retryable"
        self.end_lease()


class Users(RuleBasedStateMachine):
    """Everything that may happen to a handful of jobs."""

    service: ServiceThread
    database: str

    def __init__(self) -> None:
        super().__init__()
        self.client = client_of(self.service.url)
        self.api = Api(self.client, f"q-{uuid4().hex[:16]}")
        self.db = psycopg.connect(self.database, autocommit=True)
        self.jobs: dict[str, Model] = {}

    def teardown(self) -> None:
        self.client.close()
        self.db.close()

    def some(self, number: int, *states: str) -> Model | None:
        """One of the jobs in these states."""
        found = [job for job in self.jobs.values() if job.state in states]
        return found[number % len(found)] if found else None

    def report(self, job: Model, verb: str, **more: Any) -> None:
        answer = ok(self.api.post(f"/v1/jobs/{job.id}/{verb}", {"lease": job.lease, **more}))
        assert not answer["already_applied"]

    @rule(max_attempts=st.integers(1, 3), later=st.booleans())
    @precondition(lambda self: len(self.jobs) < 4)
    def enqueue(self, max_attempts: int, later: bool) -> None:
        job = self.api.enqueue(
            max_attempts=max_attempts,
            backoff={"kind": "fixed", "base_seconds": 3600},
            **({"delay_seconds": 3600} if later else {}),
        )
        self.jobs[job["id"]] = Model(job["id"], max_attempts, state="scheduled" if later else "available")

    @rule(limit=st.integers(1, 3))
    def claim(self, limit: int) -> None:
        available = [job for job in self.jobs.values() if job.state == "available"]
        claimed = self.api.claims(limit=limit)["jobs"]
        assert len(claimed) == min(limit, len(available))
        for each in claimed:
            job = self.jobs[each["id"]]
            assert job.state == "available"
            job.state, job.attempt, job.lease, job.wait = "running", job.attempt + 1, each["lease"], None
            assert (each["attempt"], each["last_attempt"]) == (job.attempt, job.attempt == job.max_attempts)

    @rule(number=st.integers(0, 9), verb=st.sampled_from(["complete", "retry", "snooze", "release", "fail", "cancel"]))
    def settle(self, number: int, verb: str) -> None:
        job = self.some(number, "running")
        if job is None:
            return
        self.report(job, verb, **({"delay_seconds": 3600} if verb in ("retry", "snooze") else {}))
        match verb:
            case "complete":
                job.state = "completed"
            case "cancel":
                job.state = "cancelled"
            case "fail":
                job.state, job.errors = "failed", job.errors + 1
            case "snooze":
                job.state, job.attempt, job.snoozes = "scheduled", job.attempt - 1, job.snoozes + 1
            case "release":
                job.state, job.attempt = "available", job.attempt - 1
            case "retry":
                job.fail_attempt()
        job.end_lease()

    @rule(number=st.integers(0, 9), verb=st.sampled_from(["complete", "fail", "heartbeat", "release"]))
    def report_under_an_old_lease(self, number: int, verb: str) -> None:
        stale = [job for job in self.jobs.values() if job.old_leases]
        if not stale:
            return
        job = stale[number % len(stale)]
        answer = self.api.post(f"/v1/jobs/{job.id}/{verb}", {"lease": job.old_leases[0]})
        # The same report as the one that ended that lease is a repeat; any other is too late.
        assert answer.status_code == 409 or answer.json()["already_applied"]

    @rule(number=st.integers(0, 9), attached=st.booleans())
    def park(self, number: int, attached: bool) -> None:
        job = self.some(number, "running")
        if job is None:
            return
        job.wait = ok(self.api.post(f"/v1/jobs/{job.id}/callbacks", {"lease": job.lease}))
        if ok(self.api.get(f"/v1/jobs/{job.id}"))["waits"][-1]["state"] != "open":
            return  # this attempt's wait was answered before: it went on, and has no other
        self.report(job, "park", wait_id=job.wait["wait_id"], attached=attached)
        job.state = "waiting_external"
        if not attached:
            job.end_lease()

    @rule(number=st.integers(0, 9), verb=st.sampled_from(["complete", "fail", "resume", "retry"]))
    def call_back(self, number: int, verb: str) -> None:
        job = self.some(number, "waiting_external")
        if job is None:
            return
        assert job.wait is not None
        ok(self.client.post(job.wait["urls"][verb], json=verb))
        match verb:
            case "complete":
                job.state = "completed"
            case "fail":
                job.state, job.errors = "failed", job.errors + 1
            case "resume" if job.lease:
                job.state = "running"
                return
            case "resume":
                job.state, job.attempt = "available", job.attempt - 1
            case "retry":
                job.state, job.attempt = "available", 0
        job.end_lease()

    @rule(number=st.integers(0, 9))
    def cancel(self, number: int) -> None:
        job = self.some(number, "scheduled", "available", "running", "retryable", "waiting_external")
        if job is not None:
            ok(self.api.post(f"/v1/jobs/{job.id}/cancel", {}))
            job.state = "cancelled"
            job.end_lease()

    @rule(number=st.integers(0, 9))
    def redrive(self, number: int) -> None:
        job = self.some(number, "failed", "cancelled")
        if job is not None:
            ok(self.api.post(f"/v1/jobs/{job.id}/redrive"))
            job.state, job.attempt = "available", 0

    @rule(number=st.integers(0, 9))
    def fall_due(self, number: int) -> None:
        job = self.some(number, "scheduled", "retryable")
        if job is not None:
            self.db.execute("UPDATE towpath.jobs SET run_at = now() WHERE id = %s", [job.id])
            self.db.execute("SELECT pg_notify('towpath', 'due')")
            self.wait_for(job, "available")

    @rule(number=st.integers(0, 9), column=st.sampled_from(["lease_expires_at", "deadline_at"]))
    def lose(self, number: int, column: str) -> None:
        job = self.some(number, "running")
        if job is not None:
            self.db.execute(f"UPDATE towpath.jobs SET {column} = now() - interval '1 h' WHERE id = %s", [job.id])
            job.fail_attempt()
            self.wait_for(job, job.state)

    @rule(number=st.integers(0, 9))
    def run_out_of_time(self, number: int) -> None:
        job = self.some(number, "waiting_external")
        if job is not None:
            self.db.execute(
                "UPDATE towpath.waits SET deadline_at = now() WHERE job_id = %s AND state = 'open'", [job.id]
            )
            job.fail_attempt()
            self.wait_for(job, job.state)

    def wait_for(self, job: Model, state: str) -> None:
        eventually(lambda: self.api.job(job.id)["state"] == state)
        job.state = state

    @invariant()
    def every_job_is_what_the_model_says(self) -> None:
        for job in self.jobs.values():
            real = self.api.job(job.id)
            assert (real["state"], real["attempt"], real["snoozes"], real["errors_total"], real["max_attempts"]) == (
                job.state,
                job.attempt,
                job.snoozes,
                job.errors,
                job.max_attempts,
            )
            assert (real["finished_at"] is not None) == (job.state in FINAL)


@pytest.mark.timeout(300)
def test_the_service_does_what_the_model_says(service: ServiceThread, settings: Settings) -> None:
    Users.service, Users.database = service, settings.database_url
    run_state_machine_as_test(Users, settings=_effort())


def _effort() -> Any:
    return effort(
        max_examples=20,
        stateful_step_count=25,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
