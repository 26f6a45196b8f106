"""Jobs in each state of the lifecycle, made through the API the way a user makes them."""

from dataclasses import dataclass, field
from typing import Any

import httpx
import psycopg

JSON = dict[str, Any]


@dataclass
class Api:
    """The HTTP API with a default queue. Every call returns the raw response; the builders insist on success."""

    client: httpx.Client
    queue: str
    worker: str = "worker-1"
    opened: list[JSON] = field(default_factory=list)

    def get(self, path: str, **parameters: Any) -> httpx.Response:
        return self.client.get(path, params=parameters)

    def post(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return (
            self.client.post(path, json=body, headers=named)
            if body is not None
            else self.client.post(path, headers=named)
        )

    def enqueue(self, **job: Any) -> JSON:
        """A new job; `kind` defaults to `work`."""
        return ok(self.post("/v1/jobs", {"kind": "work", "queue": self.queue, **job}))

    def enqueue_many(self, count: int, **job: Any) -> list[str]:
        """The ids of `count` equal jobs."""
        jobs = [{"kind": "work", "queue": self.queue, **job} for _ in range(count)]
        return [item["job"]["id"] for item in ok(self.post("/v1/jobs/batch", {"jobs": jobs}))["jobs"]]

    def claims(self, **request: Any) -> JSON:
        """The answer to a claim; does not wait unless told to."""
        asked = {"queues": [self.queue], "wait_seconds": 0, "worker": self.worker, **request}
        return ok(self.post("/v1/claims", asked))

    def claim(self, **request: Any) -> JSON:
        """One claimed job; waits for it."""
        (job,) = self.claims(**{"wait_seconds": 10, **request})["jobs"]
        return job  # type: ignore[no-any-return]

    def job(self, job: JSON | str) -> JSON:
        """The job as it is now."""
        return ok(self.get(f"/v1/jobs/{job if isinstance(job, str) else job['id']}"))

    def settle(self, verb: str, claimed: JSON, **report: Any) -> httpx.Response:
        """Report an outcome with the claim's lease."""
        return self.post(f"/v1/jobs/{claimed['id']}/{verb}", {"lease": claimed["lease"], **report})

    def heartbeat(self, claimed: JSON, **beat: Any) -> httpx.Response:
        return self.settle("heartbeat", claimed, **beat)

    def events(self, job: JSON) -> list[JSON]:
        return ok(self.get(f"/v1/jobs/{job['id']}/events"))["events"]  # type: ignore[no-any-return]

    def open_wait(self, claimed: JSON, **wait: Any) -> JSON:
        """A wait with its callback URLs."""
        return ok(self.post(f"/v1/jobs/{claimed['id']}/callbacks", {"lease": claimed["lease"], **wait}))

    def a_running_job(self, **job: Any) -> JSON:
        self.enqueue(**job)
        return self.claim()

    def a_parked_job(self, *, attached: bool = False, timeout_seconds: float = 60, **job: Any) -> tuple[JSON, JSON]:
        """A claimed job that is parked, and its wait."""
        claimed = self.a_running_job(**job)
        wait = self.open_wait(claimed, timeout_seconds=timeout_seconds)
        parked = ok(self.settle("park", claimed, wait_id=wait["wait_id"], attached=attached))
        assert parked["state"] == "waiting_external"
        return claimed, wait

    def a_job_in(self, state: str) -> JSON:
        """A job in the given state, with the lease of its claim if it has been claimed."""
        match state:
            case "scheduled":
                return self.enqueue(delay_seconds=3600)
            case "available":
                return self.enqueue()
            case "running":
                return self.a_running_job()
            case "waiting_external":
                return self.a_parked_job()[0]
        claimed = self.a_running_job()
        match state:
            case "retryable":
                ok(self.settle("retry", claimed, delay_seconds=3600))
            case "completed":
                ok(self.settle("complete", claimed))
            case "failed":
                ok(self.settle("fail", claimed))
            case "cancelled":
                ok(self.post(f"/v1/jobs/{claimed['id']}/cancel", {}))
            case _:
                raise ValueError(state)
        return claimed


def client_of(url: str, timeout: float = 30) -> httpx.Client:
    """A client with a connection pool of its own. Loading certificates would take longer than most tests."""
    return httpx.Client(base_url=url, timeout=timeout, verify=False)


def ok(response: httpx.Response) -> JSON:
    """The body of a 2xx answer."""
    assert response.is_success, f"{response.status_code}: {response.text}"
    return response.json()  # type: ignore[no-any-return]


def problem(response: httpx.Response, status: int, code: str) -> JSON:
    """The body of a refusal, which must be this problem."""
    assert response.status_code == status, f"{response.status_code}: {response.text}"
    assert response.headers["content-type"] == "application/problem+json"
    body: JSON = response.json()
    assert body["type"] == f"urn:towpath:problem:{code}"
    assert body["status"] == status
    return body


def move(db: "psycopg.Connection[Any]", job: JSON, column: str, seconds: float) -> None:
    """Move one of a job's times, instead of waiting for it."""
    db.execute(
        psycopg.sql.SQL("UPDATE towpath.jobs SET {0} = {0} + %s * interval '1 s' WHERE id = %s").format(
            psycopg.sql.Identifier(column)
        ),
        [seconds, job["id"]],
    )
