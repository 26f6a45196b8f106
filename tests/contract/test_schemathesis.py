"""The contract, from the outside: every operation is called with what the document allows and with what it forbids.

No call is a 5xx, every answer is one that the document describes, what it allows is taken, and what it forbids is
refused. The cases are the same in each run: boundaries of every field and parameter, missing and foreign parts,
other methods, and a few generated ones.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS
from schemathesis.core.failures import FailureGroup

from app.main import create_app
from app.settings import Settings
from tests.servers import ServiceThread

schema = schemathesis.openapi.from_dict(create_app(Settings()).openapi())

ALWAYS = [
    CHECKS.get_one(name)
    for name in (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
        "missing_required_header",
        "unsupported_method",
        "allow_header_conformance",
    )
]
ALLOWED_IS_TAKEN = CHECKS.get_one("positive_data_acceptance")
FORBIDDEN_IS_REFUSED = CHECKS.get_one("negative_data_rejection")

MORE_THAN_A_SCHEMA_SAYS = re.compile(
    "is not a cursor of this list"
    "|cannot be given with run_at"
    "|has a NUL character"
    "|has a lone surrogate"
    "|is nested deeper than 64"
    "|is a number"
    "|is an integer of more than"
    "|expected `int( . null)?`, got `float`"  # to a schema 1.0 is an integer
    "|invalid RFC3339 encoded datetime"  # a leap second
    "|must be in the years 1 to 9999, in UTC"
    "|has an offset of 16 hours or more"
    "|give either wait_id or wait_ids"
    "|has one wait twice"
    "|is more than the waits given"
    "|must not be less than timeout_seconds"
    "|line [0-9]+, column [0-9]+: "
    "|must be true or false, and is "
    "|is (required )?for the scheme hmac"
    "|is for messages with a time"
    "|there is no "
    "|has no expression"
)


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as kept_alive:
        yield kept_alive


@schema.parametrize()
@settings(max_examples=5, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_the_service_does_what_its_document_says(
    case: schemathesis.Case, service: ServiceThread, session: requests.Session
) -> None:
    do_not_wait(case)
    response = case.call(base_url=service.url, session=session, timeout=30)
    case.validate_response(response, checks=ALWAYS)
    told = response.json() if response.content and "json" in response.headers["content-type"][0] else None
    for check, excuse in ((ALLOWED_IS_TAKEN, beyond_a_schema), (FORBIDDEN_IS_REFUSED, refused_one_by_one)):
        try:
            case.validate_response(response, checks=[check])
        except FailureGroup:
            if not excuse(told):
                raise


def do_not_wait(case: schemathesis.Case) -> None:
    """A long poll that would wait is told not to; a length that is not allowed stays."""
    places = [case.query, case.body, case.body.get("claim") if isinstance(case.body, dict) else None]
    for place in places:
        if isinstance(place, dict) and ("wait_seconds" in place or "queues" in place):
            seconds = place.get("wait_seconds", 20)
            if type(seconds) in (int, float) and 0 <= seconds <= 60:
                place["wait_seconds"] = 0


def beyond_a_schema(told: Any) -> bool:
    """Whether a refusal is for a rule that the document states in words."""
    if told["type"].endswith("idempotency-key-reused"):
        return True
    return all(MORE_THAN_A_SCHEMA_SAYS.match(error["detail"]) for error in told["errors"])


def refused_one_by_one(told: Any) -> bool:
    """Whether a call with many items refused a bad one by itself."""
    return isinstance(told, dict) and '"status": 422' in json.dumps(told)
