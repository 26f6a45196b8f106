"""A pause during a storm of claims: once it is acknowledged, no claim is committed."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psycopg

from app.settings import Settings
from tests.build import Api, ok
from tests.servers import ServiceThread


def test_no_claim_is_committed_after_an_acknowledged_pause(
    api: Api, service: ServiceThread, settings: Settings, db: "psycopg.Connection[Any]"
) -> None:
    api.enqueue_many(1000)
    stop = threading.Event()
    with ServiceThread(settings, maintenance=False) as other:

        def storm(n: int) -> int:
            count = 0
            with httpx.Client(base_url=(service, other)[n % 2].url, timeout=30) as client:
                while not stop.is_set():
                    body = {"queues": [api.queue], "limit": 2, "wait_seconds": 0.05}
                    count += len(ok(client.post("/v1/claims", json=body))["jobs"])
            return count

        running = "SELECT count(*) FROM towpath.jobs WHERE queue = %s AND state = 'running'"
        with ThreadPoolExecutor(8) as pool:
            claimers = [pool.submit(storm, n) for n in range(8)]
            for _ in range(5):
                threading.Event().wait(0.05)
                ok(api.post(f"/v1/queues/{api.queue}/pause"))
                at_pause = db.execute(running, [api.queue]).fetchone()
                threading.Event().wait(0.1)
                assert db.execute(running, [api.queue]).fetchone() == at_pause
                ok(api.post(f"/v1/queues/{api.queue}/resume"))
            stop.set()
            assert sum(claimer.result() for claimer in claimers) > 0
