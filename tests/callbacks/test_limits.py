"""What an outsider can cost: bodies are cut before parsing, callbacks and guesses are counted, nothing is echoed."""

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest

from app.settings import Settings
from tests.build import Api, client_of, ok, problem
from tests.servers import ServiceThread


@pytest.fixture(scope="module")
def strict(new_settings: Callable[..., Settings]) -> Iterator[ServiceThread]:
    """A service with small limits."""
    limits: dict[str, Any] = {"callbacks_per_minute": 5, "deliveries_per_minute": 5, "refusals_per_minute": 10}
    with ServiceThread(new_settings(**limits, max_body_bytes=2048)) as running:
        yield running


@pytest.fixture
def limited(strict: ServiceThread) -> Iterator[Api]:
    with client_of(strict.url) as client:
        yield Api(client, f"q-{uuid4().hex[:12]}")


def test_one_wait_takes_so_many_callbacks_a_minute(limited: Api) -> None:
    _, wait = limited.a_parked_job()
    _, other = limited.a_parked_job()
    for _ in range(5):
        ok(limited.client.post(wait["urls"]["heartbeat"]))
    refused = limited.client.post(wait["urls"]["heartbeat"])
    facts = problem(refused, 429, "too-many-callbacks")
    assert facts["limit"] == 5
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    ok(limited.client.post(other["urls"]["heartbeat"]))


def test_one_hook_takes_so_many_deliveries_a_minute(limited: Api) -> None:
    ok(limited.client.put("/v1/hooks/busy", json={"correlation": "payload.key"}))
    for n in range(5):
        ok(limited.client.post("/v1/hooks/busy", json={"key": "a", "n": n}))
    problem(limited.client.post("/v1/hooks/busy", json={"key": "a", "n": 6}), 429, "too-many-callbacks")


def test_a_body_over_the_limit_changes_nothing(limited: Api) -> None:
    claimed, wait = limited.a_parked_job()
    facts = problem(limited.client.post(wait["urls"]["complete"], content=b"x" * 3000), 413, "too-large")
    assert facts["limit"] == 2048
    assert limited.job(claimed)["state"] == "waiting_external"


def test_an_address_that_guesses_is_cut_off(new_settings: Callable[..., Settings]) -> None:
    with ServiceThread(new_settings(refusals_per_minute=10)) as service, client_of(service.url) as client:
        _, wait = Api(client, "guessed").a_parked_job()
        for _ in range(10):
            problem(client.post("/v1/callbacks/AAAA/complete"), 404, "unknown-callback")
        problem(client.post("/v1/callbacks/AAAA/complete"), 429, "too-many-callbacks")
        problem(client.post(wait["urls"]["complete"]), 429, "too-many-callbacks")


def test_nothing_of_what_was_sent_comes_back(api: Api) -> None:
    _, wait = api.a_parked_job()
    marker = f"echo-{uuid4().hex}"
    bodies: list[tuple[bytes, str]] = [
        (f'{{"a": "{marker}"}}'.encode(), "application/json"),
        (f'{{"{marker}": '.encode(), "application/json"),
        (marker.encode(), f"text/plain; charset={marker}"),
        (marker.encode(), "application/cloudevents+json"),
        (f'{{"specversion": "{marker}"}}'.encode(), "application/cloudevents+json"),
    ]
    for body, content_type in reversed(bodies):
        for url in (wait["urls"]["complete"], f"/v1/callbacks/{marker}", f"/v1/hooks/{marker}"):
            answer = api.client.post(url, content=body, headers={"content-type": content_type, "x-marker": marker})
            assert marker not in answer.text, answer.text
