"""The OpenAPI document: valid, committed, and saying what the code says."""

import json
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import validate

from app.http.problems import PROBLEM_STATUS
from app.lifecycle import CALLBACK_VERBS, State
from app.main import create_app
from app.settings import Settings

COMMITTED = Path(__file__).parents[2] / "openapi/openapi.json"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return create_app(Settings()).openapi()


def operations(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(f"{verb} {path}", op) for path, item in document["paths"].items() for verb, op in item.items()]


def test_it_is_valid(document: dict[str, Any]) -> None:
    validate(document)


def test_the_committed_one_is_current(document: dict[str, Any]) -> None:
    assert json.loads(COMMITTED.read_text()) == document


def test_every_operation_says_what_it_is(document: dict[str, Any]) -> None:
    bare = [
        name for name, op in operations(document) if not (op.get("operationId") and op.get("summary") and op["tags"])
    ]
    assert bare == []


def test_operation_ids_are_unique(document: dict[str, Any]) -> None:
    ids = [op["operationId"] for _, op in operations(document)]
    assert len(ids) == len(set(ids))


def test_every_body_may_be_too_large_or_of_the_wrong_type(document: dict[str, Any]) -> None:
    with_body = [op for _, op in operations(document) if "requestBody" in op]
    assert with_body
    assert [op["operationId"] for op in with_body if not {"413", "415", "422"} <= set(op["responses"])] == []


def test_states_and_verbs_are_those_of_the_lifecycle(document: dict[str, Any]) -> None:
    listed = next(op for name, op in operations(document) if name == "get /v1/jobs")
    state = next(each for each in listed["parameters"] if each["name"] == "state")
    assert set(json.dumps(state).split('"')) >= {str(each) for each in State} or "$ref" in json.dumps(state)
    for verb in CALLBACK_VERBS:
        assert f"/v1/callbacks/{{token}}/{verb}" in document["paths"]


def test_every_problem_has_a_status_of_its_own_kind() -> None:
    assert all(400 <= status < 600 for status in PROBLEM_STATUS.values())
