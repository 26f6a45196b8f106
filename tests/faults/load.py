"""Producers, workers and third parties who write down every call and every definite answer.

A call whose outcome is unknown (the connection broke, or 503) is repeated with the same key, claim id or lease until
the answer is definite, as a careful client would.
"""

import itertools
import random
import threading
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx

MAX_ATTEMPTS = 4


@dataclass
class Log:
    """What was told to whom. Lists are appended to by many threads, which is safe."""

    enqueued: list[tuple[str, str]] = field(default_factory=list)  # key, id
    claimed: list[tuple[str, str, str, int]] = field(default_factory=list)  # claim id, job, lease, attempt
    settled: list[tuple[str, str, str, int, bool]] = field(default_factory=list)  # job, lease, verb, status, repeat
    called_back: list[tuple[str, str, int, bool]] = field(default_factory=list)  # wait, payload, status, repeat
    bad_answers: list[str] = field(default_factory=list)
    third_parties: list[threading.Thread] = field(default_factory=list)
    calls: int = 0
    unknown: int = 0


class Caller:
    """One client. It goes from one service to the other when an answer fails to come."""

    def __init__(self, urls: list[str], log: Log, stop: threading.Event) -> None:
        self._urls = itertools.cycle(random.sample(urls, len(urls)))
        self._client = httpx.Client(verify=False, timeout=20)
        self._base = next(self._urls)
        self.log = log
        self.stop = stop
        self.pause = threading.Event()

    def close(self) -> None:
        """Give the connections back."""
        self._client.close()

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        """Repeats until the answer is definite."""
        while True:
            self.log.calls += 1
            try:
                response = self._client.post(self._base + path, json=body, headers=headers)
            except httpx.TransportError:
                response = None
            if response is not None and response.status_code not in (429, 503):
                if response.status_code >= 500:
                    self.log.bad_answers.append(f"{path}: {response.status_code} {response.text}")
                return response
            if response is not None and "retry-after" not in response.headers:
                self.log.bad_answers.append(f"{path}: {response.status_code} without Retry-After")
            self.log.unknown += 1
            self._base = next(self._urls)
            self.pause.wait(random.uniform(0.01, 0.2))

    def produce(self, queue: str) -> None:
        """Enqueue with a key, until told to stop."""
        while not self.stop.is_set():
            key = uuid4().hex
            job = {"kind": "work", "queue": queue, "args": {"key": key}, "max_attempts": MAX_ATTEMPTS}
            job["backoff"] = {"kind": "fixed", "base_seconds": 0}  # type: ignore[assignment]
            answer = self.post("/v1/jobs", job, {"Idempotency-Key": key}).json()
            self.log.enqueued.append((key, answer["id"]))
            self.pause.wait(0.005)

    def work(self, queue: str) -> None:
        """Claim and report, each outcome now and then, until there is nothing left after the stop."""
        while True:
            claim_id = str(uuid4())
            request = {"queues": [queue], "limit": 3, "wait_seconds": 0.5, "claim_id": claim_id, "lease_seconds": 2}
            answer = self.post("/v1/claims", request).json()
            for job in answer["jobs"]:
                self.log.claimed.append((claim_id, job["id"], job["lease"], job["attempt"]))
                self._report(job)
            if not answer["jobs"] and self.stop.is_set() and answer["reason"] == "empty":
                return

    def _report(self, job: dict[str, Any]) -> None:
        if job["callback_results"]:
            verb = "complete"
        else:
            verb = random.choices(
                ("complete", "retry", "snooze", "release", "fail", "park", "die"), (60, 9, 5, 5, 5, 12, 4)
            )[0]
        report: dict[str, Any] = {"lease": job["lease"]}
        match verb:
            case "die":
                return
            case "complete":
                report["result"] = job["lease"]
            case "retry" | "snooze":
                report["delay_seconds"] = 0
            case "park":
                opened = self.post(f"/v1/jobs/{job['id']}/callbacks", {"lease": job["lease"], "timeout_seconds": 600})
                if not opened.is_success:
                    return
                report["wait_id"] = opened.json()["wait_id"]
                url = httpx.URL(opened.json()["urls"]["resume"]).path
                third_party = threading.Thread(target=self._third_party, args=(report["wait_id"], url, job["lease"]))
                self.log.third_parties.append(third_party)
                third_party.start()
        settled = self.post(f"/v1/jobs/{job['id']}/{verb}", report)
        repeat = settled.is_success and settled.json()["already_applied"]
        self.log.settled.append((job["id"], job["lease"], verb, settled.status_code, repeat))

    def _third_party(self, wait: str, url: str, payload: str) -> None:
        caller = Caller([self._base, next(self._urls)], self.log, self.stop)
        answer = caller.post(url, payload)
        caller.close()
        repeat = answer.is_success and answer.json()["already_applied"]
        self.log.called_back.append((wait, payload, answer.status_code, repeat))
