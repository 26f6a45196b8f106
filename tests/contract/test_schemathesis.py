"""Generated requests over the whole document: no 5xx, and every answer is one that the document describes."""

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from app.main import create_app
from app.settings import Settings
from tests.servers import ServiceThread

schema = schemathesis.openapi.from_dict(create_app(Settings()).openapi())


@schema.parametrize()
@settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_no_request_breaks_the_service_or_its_contract(case: schemathesis.Case, service: ServiceThread) -> None:
    _do_not_wait(case)
    response = case.call(base_url=service.url)
    case.validate_response(
        response,
        checks=[not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance],
    )


def _do_not_wait(case: schemathesis.Case) -> None:
    """Long polls are told not to wait; what was generated for anything else stays."""
    if isinstance(case.query, dict) and isinstance(case.query.get("wait_seconds"), int | float | str):
        case.query["wait_seconds"] = 0
    for body in (case.body, case.body.get("claim") if isinstance(case.body, dict) else None):
        if isinstance(body, dict) and case.path.endswith(("/claims", "/settlements")):
            body["wait_seconds"] = 0 if "queues" in body else body.get("wait_seconds", 0)
            if "queues" not in body:
                body.pop("wait_seconds", None)
