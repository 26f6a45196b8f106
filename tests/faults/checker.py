"""Proves the promises on what callers were told and what the database holds in the end."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import psycopg

from app.lifecycle import FINAL
from tests.faults.load import MAX_ATTEMPTS, Log


@dataclass
class JobRow:
    """A job in the end."""

    key: str
    state: str
    attempt: int
    errors_total: int
    result: Any


def stored(connection: "psycopg.Connection[Any]", queue: str) -> tuple[dict[str, JobRow], dict[str, Any]]:
    """All jobs of the queue, and the payload of each resolved wait."""
    jobs = connection.execute(
        "SELECT id::text, args->>'key', state, attempt, errors_total, result FROM towpath.jobs WHERE queue = %s",
        [queue],
    ).fetchall()
    waits = connection.execute(
        "SELECT w.id::text, w.payload FROM towpath.waits AS w JOIN towpath.jobs AS j ON j.id = w.job_id"
        " WHERE j.queue = %s AND w.state = 'resolved'",
        [queue],
    ).fetchall()
    return {row[0]: JobRow(*row[1:]) for row in jobs}, dict(waits)


def violations(log: Log, jobs: dict[str, JobRow], waits: dict[str, Any]) -> list[str]:
    """Every broken promise, in a sentence."""
    found = list(log.bad_answers)
    found += [f"acknowledged job {job} is gone" for _, job in log.enqueued if job not in jobs]
    found += [
        f"key {key} made {count} jobs" for key, count in Counter(j.key for j in jobs.values()).items() if count > 1
    ]
    ids: dict[str, set[str]] = defaultdict(set)
    for key, job in log.enqueued:
        ids[key].add(job)
    found += [f"key {key} was answered with {len(given)} ids" for key, given in ids.items() if len(given) > 1]

    owners: dict[str, set[str]] = defaultdict(set)
    for claim_id, job, lease, attempt in log.claimed:
        owners[lease].add(claim_id)
        if attempt > MAX_ATTEMPTS:
            found.append(f"job {job} was claimed for attempt {attempt}")
    found += [f"a lease was given to {len(given)} claims" for given in owners.values() if len(given) > 1]

    accepted: dict[str, set[str]] = defaultdict(set)
    completed: dict[str, set[str]] = defaultdict(set)
    firsts: Counter[str] = Counter()
    for job, lease, verb, status, repeat in log.settled:
        if status == 200:
            accepted[lease].add(verb)
            firsts[lease] += not repeat
            if verb == "complete":
                completed[job].add(lease)
    found += [f"one lease was settled as {verbs}" for verbs in accepted.values() if len(verbs) > 1]
    found += [f"a lease was settled {count} times" for count in firsts.values() if count > 1]
    found += _ends(jobs, completed)
    found += _callbacks(log, waits)
    return found


def _ends(jobs: dict[str, JobRow], completed: dict[str, set[str]]) -> list[str]:
    found = [
        f"job {job} was completed under {len(leases)} leases" for job, leases in completed.items() if len(leases) > 1
    ]
    for job, row in jobs.items():
        if row.state not in FINAL:
            found.append(f"job {job} is {row.state} and nobody has it")
        if row.state == "completed" and job in completed and row.result not in completed[job]:
            found.append(f"job {job} has another result than the one that was accepted")
        if job in completed and row.state != "completed":
            found.append(f"job {job} was completed and is {row.state}")
        # Failures and losses use an attempt and leave an entry; snooze, release and park do neither.
        used = row.attempt - (row.state == "completed")
        if row.errors_total != used:
            found.append(f"job {job} is {row.state} at attempt {row.attempt} with {row.errors_total} errors")
        if row.attempt > MAX_ATTEMPTS:
            found.append(f"job {job} had {row.attempt} attempts")
    return found


def _callbacks(log: Log, waits: dict[str, Any]) -> list[str]:
    found = []
    winners: Counter[str] = Counter()
    for wait, payload, status, repeat in log.called_back:
        if status in (200, 202):
            winners[wait] += not repeat
            if waits.get(wait) != payload:
                found.append(f"wait {wait} was answered and holds another payload")
    found += [f"wait {wait} told {count} callers that they won" for wait, count in winners.items() if count > 1]
    return found
