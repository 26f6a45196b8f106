"""A Towpath worker in plain Python: python worker.py URL QUEUE NAME ANSWERER_URL."""

import hashlib
import json
import signal
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

URL, QUEUE, NAME, ANSWERER_URL = sys.argv[1:]
LEASE_SECONDS = 15
stopping = threading.Event()
jobs: list[Any] = []


def post(url: str, **body: Any) -> Any:
    """Every call is safe to repeat, so a failure that may pass is tried again."""
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    while True:
        try:
            with urlopen(request, timeout=30) as answer:
                return json.load(answer)
        except OSError as error:
            if getattr(error, "code", 503) not in (429, 503):
                raise
        time.sleep(1)


def measure_file(job: Any) -> Any:
    content = Path(job["args"]["path"]).read_bytes()
    return {"sha256": hashlib.sha256(content).hexdigest(), "words": len(content.split())}


def review_file(job: Any) -> Any:
    answer = job["callback_results"].get("review")
    if not answer:
        url, lease = f"{URL}/v1/jobs/{job['id']}", job["lease"]
        wait = post(f"{url}/callbacks", lease=lease, name="review", timeout_seconds=60)
        post(ANSWERER_URL, callback_url=wait["urls"]["resume"], **job["args"])
        arrived = post(f"{url}/park", lease=lease, wait_id=wait["wait_id"])["callbacks"]
        answer = arrived[0] if arrived else None
    # Still no answer: it is parked, and whoever claims it after the callback finishes it.
    return answer and {**measure_file(job), "review": answer["payload"]}


HANDLERS = {"measure_file": measure_file, "review_file": review_file}


def report(job: Any) -> Any:
    """What became of the job; nothing when it is parked."""
    held = {"id": job["id"], "lease": job["lease"]}
    if stopping.is_set():
        return {**held, "outcome": "release"}
    try:
        result = HANDLERS[job["kind"]](job)
    except Exception as error:
        return {**held, "outcome": "retry", "error": {"message": repr(error)}}
    return result and {**held, "outcome": "complete", "result": result}


def keep_leases() -> None:
    while True:
        time.sleep(LEASE_SECONDS / 3)
        if held := jobs:
            beats = [{"id": job["id"], "lease": job["lease"]} for job in held]
            answer = post(f"{URL}/v1/heartbeats", heartbeats=beats)
            for job, beat in zip(held, answer["heartbeats"], strict=True):
                job["lost"] = beat["status"] != "ok"


signal.signal(signal.SIGTERM, lambda *_: stopping.set())
threading.Thread(target=keep_leases, daemon=True).start()
claim = {"queues": [QUEUE], "kinds": list(HANDLERS), "worker": NAME, "limit": 5, "lease_seconds": LEASE_SECONDS}
reports: list[Any] = []
while reports or not stopping.is_set():
    # With a claim_id, a repeated claim gets the jobs that it got before.
    wanted = None if stopping.is_set() else {**claim, "wait_seconds": 3, "claim_id": str(uuid.uuid4())}
    answer = post(f"{URL}/v1/settlements", settlements=reports, claim=wanted)
    claimed = answer["claim"] or answer["claim_problem"] or {}
    jobs = claimed.get("jobs", [])
    reports = [done for job in jobs if not job.get("lost") and (done := report(job))]
    time.sleep(claimed.get("retry_after_seconds", 0))
