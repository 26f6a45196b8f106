"""Many claimers at once: each attempt of a job has one owner, and no answer has more than was asked for."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import httpx

from app.settings import Settings
from tests.build import Api, ok
from tests.servers import ServiceThread

CLAIMERS = 64


def test_each_attempt_of_each_job_is_in_one_answer(api: Api, service: ServiceThread, settings: Settings) -> None:
    jobs, rounds, limit = 200, 4, 10
    api.enqueue_many(jobs, max_attempts=100)
    start = Barrier(CLAIMERS)
    with ServiceThread(settings, maintenance=False) as other:
        clients = [httpx.Client(base_url=(service, other)[n % 2].url, timeout=60) for n in range(CLAIMERS)]

        def claim_and_give_back(client: httpx.Client) -> list[list[dict[str, Any]]]:
            answers = []
            for _ in range(rounds):
                start.wait()
                body = {"queues": [api.queue], "limit": limit, "wait_seconds": 0}
                answers.append(ok(client.post("/v1/claims", json=body))["jobs"])
                reports = [
                    {"outcome": "retry", "id": job["id"], "lease": job["lease"], "delay_seconds": 0}
                    for job in answers[-1]
                ]
                ok(client.post("/v1/settlements", json={"settlements": reports}))
            return answers

        with ThreadPoolExecutor(CLAIMERS) as pool:
            answers = [answer for all_of_one in pool.map(claim_and_give_back, clients) for answer in all_of_one]
        for client in clients:
            client.close()
    claimed = [job for answer in answers for job in answer]
    assert max(len(answer) for answer in answers) <= limit
    assert len(claimed) >= jobs
    assert max(Counter((job["id"], job["attempt"]) for job in claimed).values()) == 1
    assert len({job["lease"] for job in claimed}) == len(claimed)
    attempts = Counter(job["id"] for job in claimed)
    assert all(job["attempt"] <= attempts[job["id"]] for job in claimed)
