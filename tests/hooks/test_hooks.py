"""Hooks: webhooks that cannot carry a callback URL find their waits by a key, in whichever order they come."""

import hashlib
import hmac
import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import pytest

from tests.build import JSON, Api, client_of, ok, problem
from tests.servers import ServiceThread
from tests.waiting import eventually


@pytest.fixture
def hook(api: Api) -> str:
    """A hook whose deliveries are about an order."""
    name = f"h-{uuid4().hex[:12]}"
    put(api, name)
    return name


def put(api: Api, name: str, **settings: Any) -> httpx.Response:
    body = {"correlation": "payload.order", "filter": "payload.type != 'ping'", **settings}
    response = api.client.put(f"/v1/hooks/{name}", json=body)
    ok(response)
    return response


def parked(api: Api, hook: str, key: str, **wait: Any) -> JSON:
    claimed = api.a_running_job()
    opened = api.open_wait(claimed, correlation={"hook": hook, "key": key}, timeout_seconds=60, **wait)
    assert ok(api.settle("park", claimed, wait_id=opened["wait_id"]))["parked"] is True
    return claimed


def deliver(api: Api, hook: str, payload: Any, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return api.client.post(f"/v1/hooks/{hook}", json=payload, headers=named)


def order(key: str, **more: Any) -> JSON:
    return {"type": "paid", "order": key, **more}


class TestMatching:
    def test_a_delivery_resolves_the_wait_with_its_key(self, api: Api, hook: str) -> None:
        claimed = parked(api, hook, "o-1")
        other = parked(api, hook, "o-2")
        answer = ok(deliver(api, hook, order("o-1", amount=3)))
        assert (answer["matched"], answer["kept"], answer["already_applied"]) == (1, False, False)
        assert api.claim()["callback_results"]["callback"]["payload"] == order("o-1", amount=3)
        assert (api.job(claimed)["state"], api.job(other)["state"]) == ("running", "waiting_external")

    def test_it_resolves_all_waits_with_its_key(self, api: Api, hook: str) -> None:
        jobs = [parked(api, hook, "o-1") for _ in range(3)]
        assert ok(deliver(api, hook, order("o-1")))["matched"] == 3
        assert {api.job(job)["state"] for job in jobs} == {"available"}

    def test_each_wait_has_its_own_rules(self, api: Api, hook: str) -> None:
        done = parked(api, hook, "o-1", default_verb="complete")
        picky = parked(api, hook, "o-1", policy={"filter": "payload.amount > 5"})
        broken = parked(api, hook, "o-1", policy={"filter": "payload.nothing > 5"})
        assert ok(deliver(api, hook, order("o-1", amount=3)))["matched"] == 1
        assert [api.job(job)["state"] for job in (done, picky, broken)] == [
            "completed", "waiting_external", "waiting_external",
        ]  # fmt: skip

    def test_a_number_may_be_a_key(self, api: Api, hook: str) -> None:
        parked(api, hook, "12")
        assert ok(deliver(api, hook, {"type": "paid", "order": 12}))["matched"] == 1

    def test_an_early_delivery_answers_the_wait_that_is_opened_later(self, api: Api, hook: str) -> None:
        kept = deliver(api, hook, order("o-1", amount=3))
        assert (kept.status_code, ok(kept)["kept"], ok(kept)["matched"]) == (202, True, 0)
        claimed = api.a_running_job()
        wait = api.open_wait(claimed, correlation={"hook": hook, "key": "o-1"})
        assert (wait["state"], wait["callback"]["payload"]) == ("resolved", order("o-1", amount=3))
        parked = ok(api.settle("park", claimed, wait_id=wait["wait_id"]))
        assert (parked["parked"], parked["state"]) == (False, "running")

    def test_a_kept_delivery_answers_one_wait_only(self, api: Api, hook: str) -> None:
        deliver(api, hook, order("o-1"))
        first = api.open_wait(api.a_running_job(), correlation={"hook": hook, "key": "o-1"})
        second = api.open_wait(api.a_running_job(), correlation={"hook": hook, "key": "o-1"})
        assert (first["state"], second["state"]) == ("resolved", "open")

    def test_the_oldest_kept_delivery_that_the_wait_accepts_answers_it(self, api: Api, hook: str) -> None:
        for amount in (1, 7, 9):
            deliver(api, hook, order("o-1", amount=amount))
        correlation = {"hook": hook, "key": "o-1"}
        wait = api.open_wait(api.a_running_job(), correlation=correlation, policy={"filter": "payload.amount > 5"})
        assert wait["callback"]["payload"]["amount"] == 7

    def test_a_delivery_is_kept_for_a_stated_time(self, api: Api, hook: str, db: "psycopg.Connection[Any]") -> None:
        deliver(api, hook, order("o-1"))
        db.execute("UPDATE towpath.hook_deliveries SET expires_at = now() WHERE hook = %s", [hook])
        wait = api.open_wait(api.a_running_job(), correlation={"hook": hook, "key": "o-1"})
        assert wait["state"] == "open"
        left = "SELECT count(*) FROM towpath.hook_deliveries WHERE hook = %s"
        eventually(lambda: db.execute(left, [hook]).fetchone() == (0,))

    def test_a_wait_of_a_lost_attempt_is_no_match(self, api: Api, hook: str) -> None:
        claimed = api.a_running_job()
        api.open_wait(claimed, correlation={"hook": hook, "key": "o-1"})
        ok(api.settle("retry", claimed))
        assert ok(deliver(api, hook, order("o-1")))["matched"] == 0

    def test_what_the_filter_is_false_for_is_ignored(self, api: Api, hook: str) -> None:
        answer = ok(deliver(api, hook, {"type": "ping"}))
        assert (answer["ignored"], answer["kept"], answer["matched"]) == (True, False, 0)


class TestRepeats:
    @pytest.mark.parametrize("header", ["webhook-id", "x-github-delivery", "idempotency-key"])
    def test_a_repeated_delivery_id_resolves_nothing_twice(self, api: Api, hook: str, header: str) -> None:
        parked(api, hook, "o-1", default_verb="complete")
        assert ok(deliver(api, hook, order("o-1"), **{header: "d-1"}))["matched"] == 1
        later = parked(api, hook, "o-1")
        again = ok(deliver(api, hook, order("o-1"), **{header: "d-1"}))
        assert (again["matched"], again["already_applied"]) == (1, True)
        assert api.job(later)["state"] == "waiting_external"

    def test_without_an_id_the_same_body_is_the_same_delivery(self, api: Api, hook: str) -> None:
        assert ok(deliver(api, hook, order("o-1")))["already_applied"] is False
        assert ok(deliver(api, hook, order("o-1")))["already_applied"] is True
        assert ok(deliver(api, hook, order("o-1", n=2)))["already_applied"] is False

    def test_the_hook_may_say_what_the_id_is(self, api: Api, hook: str) -> None:
        put(api, hook, delivery_id="payload.event")
        assert ok(deliver(api, hook, order("o-1", event="e-1", n=1)))["already_applied"] is False
        assert ok(deliver(api, hook, order("o-1", event="e-1", n=2)))["already_applied"] is True

    def test_a_cloud_event_is_known_by_source_and_id(self, api: Api, hook: str) -> None:
        event = {"ce-specversion": "1.0", "ce-id": "7", "ce-source": "/shop", "ce-type": "paid"}
        assert ok(deliver(api, hook, order("o-1", n=1), **event))["already_applied"] is False
        assert ok(deliver(api, hook, order("o-1", n=2), **event))["already_applied"] is True

    def test_many_repeats_at_once_resolve_once(self, api: Api, hook: str, service: ServiceThread) -> None:
        parked(api, hook, "o-1")

        def send(_: int) -> JSON:
            with client_of(service.url) as client:
                return ok(client.post(f"/v1/hooks/{hook}", json=order("o-1"), headers={"webhook-id": "d-1"}))

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(send, range(16)))
        assert Counter(answer["already_applied"] for answer in answers) == {False: 1, True: 15}
        assert {answer["matched"] for answer in answers} == {1}


def soon(call: Callable[[], JSON]) -> JSON:
    """At a random moment of the next few milliseconds."""
    threading.Event().wait(random.uniform(0, 0.02))
    return call()


class TestRace:
    def test_a_delivery_and_its_wait_find_each_other_whichever_commits_first(
        self, api: Api, hook: str, service: ServiceThread, other_service: ServiceThread
    ) -> None:
        api.enqueue_many(60)
        jobs = api.claims(limit=60)["jobs"]
        orders: Counter[str] = Counter()
        with (
            client_of(service.url) as sender,
            client_of(other_service.url) as worker,
            ThreadPoolExecutor(2) as pool,
        ):
            for number, job in enumerate(jobs):
                key = f"o-{number}"
                wait_body = {"lease": job["lease"], "correlation": {"hook": hook, "key": key}}
                calls = [
                    lambda: ok(sender.post(f"/v1/hooks/{hook}", json=order(key))),  # noqa: B023
                    lambda: ok(worker.post(f"/v1/jobs/{job['id']}/callbacks", json=wait_body)),  # noqa: B023
                ]
                futures = {n: pool.submit(soon, calls[n]) for n in (0, 1)}
                delivered, opened = futures[0].result(), futures[1].result()
                orders["delivery first" if delivered["kept"] else "wait first"] += 1
                assert delivered["kept"] == (opened["state"] == "resolved")
                parked = ok(
                    worker.post(
                        f"/v1/jobs/{job['id']}/park", json={"lease": job["lease"], "wait_id": opened["wait_id"]}
                    )
                )
                assert parked["callbacks"][0]["payload"]["order"] == key
        assert len(orders) == 2, orders


class TestSender:
    @pytest.fixture
    def secret(self, api: Api) -> str:
        name = f"s-{uuid4().hex[:12]}"
        ok(api.client.put(f"/v1/secrets/{name}", json={"value": "a shared secret"}))
        return name

    def test_only_what_is_signed_counts(self, api: Api, hook: str, secret: str) -> None:
        put(api, hook, signature={"scheme": "github", "secret": secret})
        claimed = parked(api, hook, "o-1")
        body = json.dumps(order("o-1")).encode()
        url = f"/v1/hooks/{hook}"
        for headers in ({}, {"x-hub-signature-256": "sha256=" + "0" * 64}):
            refused = api.client.post(url, content=body, headers={"content-type": "application/json", **headers})
            problem(refused, 403, "signature-refused")
        assert api.job(claimed)["state"] == "waiting_external"
        digest = hmac.new(b"a shared secret", body, hashlib.sha256).hexdigest()
        signed = {"x-hub-signature-256": f"sha256={digest}", "content-type": "application/json"}
        assert ok(api.client.post(url, content=body, headers=signed))["matched"] == 1

    def test_a_secret_in_use_stays(self, api: Api, hook: str, secret: str) -> None:
        put(api, hook, signature={"scheme": "github", "secret": secret})
        problem(api.client.delete(f"/v1/secrets/{secret}"), 409, "secret-in-use")
        assert api.client.delete(f"/v1/hooks/{hook}").status_code == 204
        assert api.client.delete(f"/v1/secrets/{secret}").status_code == 204


class TestDefinitions:
    def test_a_hook_is_made_changed_read_and_removed(self, api: Api) -> None:
        name = f"h-{uuid4().hex[:12]}"
        assert put(api, name).status_code == 201
        changed = put(api, name, keep_seconds=60)
        assert (changed.status_code, ok(changed)["keep_seconds"]) == (200, 60)
        assert ok(api.get(f"/v1/hooks/{name}")) == ok(changed)
        assert name in [each["name"] for each in ok(api.get("/v1/hooks", limit=200))["hooks"]]
        assert api.client.delete(f"/v1/hooks/{name}").status_code == 204
        for gone in (api.get(f"/v1/hooks/{name}"), api.client.delete(f"/v1/hooks/{name}"), deliver(api, name, {})):
            problem(gone, 404, "unknown-hook")

    @pytest.mark.parametrize(
        ("definition", "pointer"),
        [
            ({"correlation": "payload."}, "/correlation"),
            ({"correlation": "x"}, "/correlation"),
            ({"correlation": "payload.x", "filter": "1"}, "/filter"),
            ({"correlation": "payload.x", "delivery_id": "payload[["}, "/delivery_id"),
            ({"correlation": "payload.x", "keep_seconds": 1}, "/keep_seconds"),
            ({"correlation": "payload.x", "signature": {"scheme": "github", "secret": "nobody"}}, "/signature/secret"),
            ({}, "/correlation"),
        ],
    )
    def test_a_bad_definition_is_refused_with_where(self, api: Api, definition: JSON, pointer: str) -> None:
        name = f"h-{uuid4().hex[:12]}"
        refused = problem(api.client.put(f"/v1/hooks/{name}", json=definition), 422, "invalid-field")
        assert refused["errors"][0]["pointer"] == pointer
        problem(api.get(f"/v1/hooks/{name}"), 404, "unknown-hook")

    @pytest.mark.parametrize(
        "payload", [{"type": "paid"}, {"type": "paid", "order": [1]}, {"type": "paid", "order": ""}]
    )
    def test_a_delivery_without_a_key_is_refused(self, api: Api, hook: str, payload: JSON) -> None:
        assert problem(deliver(api, hook, payload), 422, "hook-failed")["expression"] == "correlation"

    def test_a_wait_for_a_hook_that_is_not_there_is_refused(self, api: Api) -> None:
        claimed = api.a_running_job()
        body = {"lease": claimed["lease"], "correlation": {"hook": "nobody-made-it", "key": "x"}}
        refused = problem(api.post(f"/v1/jobs/{claimed['id']}/callbacks", body), 422, "invalid-field")
        assert refused["errors"][0]["pointer"] == "/correlation/hook"
