"""Refusals as RFC 9457 problem documents: the only place that knows status codes."""

import re
from collections.abc import Mapping
from functools import cache
from http import HTTPStatus
from typing import Any

import msgspec
import psycopg
import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException

from app.database.failures import refusal_of
from app.errors import FieldError, Kind, Refusal, invalid

log = structlog.get_logger(__name__)

MEDIA_TYPE = "application/problem+json"
URN = "urn:towpath:problem:"

STATUS = {
    Kind.MALFORMED: 400,
    Kind.FORBIDDEN: 403,
    Kind.UNKNOWN: 404,
    Kind.CONFLICT: 409,
    Kind.GONE: 410,
    Kind.TOO_LARGE: 413,
    Kind.UNSUPPORTED: 415,
    Kind.INVALID: 422,
    Kind.OVERLOADED: 429,
    Kind.UNAVAILABLE: 503,
}

_PROBLEMS: dict[str, tuple[int, str]] = {
    "malformed-json": (400, "The body is not JSON"),
    "malformed-request": (400, "The request is malformed"),
    "malformed-body": (400, "The body is not what its content type says"),
    "invalid-field": (422, "A field is not valid"),
    "idempotency-key-reused": (422, "The Idempotency-Key was used with another request"),
    "policy-failed": (422, "The wait's policy could not decide"),
    "hook-failed": (422, "The hook's expressions could not be evaluated"),
    "signature-refused": (403, "The sender's signature was refused"),
    "unknown-job": (404, "There is no such job"),
    "unknown-queue": (404, "There is no such queue"),
    "unknown-wait": (404, "There is no such wait"),
    "unknown-callback": (404, "There is no such callback"),
    "unknown-secret": (404, "There is no such secret"),
    "unknown-hook": (404, "There is no such hook"),
    "unknown-dead-letter": (404, "There is no such dead letter"),
    "not-found": (404, "There is nothing here"),
    "method-not-allowed": (405, "The method is not allowed here"),
    "lease-lost": (409, "The lease is no longer yours"),
    "wrong-state": (409, "The job's state does not allow this"),
    "wait-not-open": (409, "The wait can't be parked on"),
    "wait-name-taken": (409, "The attempt has another wait of this name"),
    "callback-conflict": (409, "The wait was resolved otherwise"),
    "policy-disagrees": (409, "The wait's policy decides for another verb"),
    "secret-in-use": (409, "A hook uses the secret"),
    "callback-gone": (410, "Nobody waits for this callback any more"),
    "too-large": (413, "The request is too large"),
    "unsupported-media-type": (415, "The body must be JSON"),
    "too-many-polls": (429, "This process has too many waiting polls"),
    "too-many-callbacks": (429, "Too many callbacks in a minute"),
    "too-many-requests": (429, "This process is overloaded"),
    "secret-unreadable": (503, "A secret can't be decrypted with this process's keys"),
    "database-unavailable": (503, "The database did not answer"),
    "internal-error": (500, "This is a bug in Towpath"),
}
TITLES = {code: title for code, (_, title) in _PROBLEMS.items()}
"""Every problem's stable code and title; `docs/reference/problems.md` says what to do about each."""
PROBLEM_STATUS = {code: status for code, (status, _) in _PROBLEMS.items()}


def document(code: str, status: int, detail: str, facts: Mapping[str, Any]) -> bytes:
    """The problem document's bytes: the standard members first, and never hidden by a fact."""
    standard = {"type": URN + code, "title": TITLES[code], "status": status, "detail": detail}
    return msgspec.json.encode({**standard, **facts, **standard})


def answer_of(refusal: Refusal) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and extra headers of a refusal."""
    status = STATUS[refusal.kind]
    headers = {}
    retry_after = refusal.facts.get("retry_after_seconds")
    if retry_after is not None:
        headers["retry-after"] = str(max(1, round(retry_after)))
    return status, document(refusal.code, status, refusal.detail, refusal.facts), headers


def answer_to(error: Exception) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and extra headers for anything that went wrong. A bug is logged with its trace, told without it."""
    refusal = error if isinstance(error, Refusal) else refusal_of(error)
    if refusal is not None:
        return answer_of(refusal)
    log.error("unexpected error", exc_info=error)
    return 500, document("internal-error", 500, "The request failed for a reason that is ours.", {}), {}


def _response(error: Exception) -> Response:
    status, body, headers = answer_to(error)
    return Response(body, status, headers, MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Every refusal of the application, the framework's own included, becomes a problem document."""

    async def answered(_: Request, error: Exception) -> Response:
        return _response(error)

    async def bad_parameters(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        errors = (FieldError(str(item["loc"][-1]), item["msg"][0].lower() + item["msg"][1:]) for item in error.errors())
        return _response(invalid(*errors))

    @cache
    def methods() -> list[tuple[re.Pattern[str], str]]:
        # Paths without a parameter first: `/v1/jobs/batch` is no job.
        paths = sorted(app.openapi()["paths"].items(), key=lambda item: item[0].count("{"))
        return [
            (re.compile(re.sub(r"{\w+}", "[^/]+", path)), ", ".join(sorted(calls)).upper()) for path, calls in paths
        ]

    async def by_framework(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "not-found", 405: "method-not-allowed"}.get(error.status_code, "malformed-request")
        detail = HTTPStatus(error.status_code).description or str(error.detail)
        body = document(code, error.status_code, detail, {})
        headers = dict(error.headers or {})
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            # The framework names the methods of one of the path's routes only.
            headers |= next(({"Allow": verbs} for path, verbs in methods() if path.fullmatch(request.url.path)), {})
        return Response(body, error.status_code, headers, MEDIA_TYPE)

    for kind in (Refusal, psycopg.Error, SQLAlchemyError, Exception):
        app.add_exception_handler(kind, answered)
    app.add_exception_handler(RequestValidationError, bad_parameters)
    app.add_exception_handler(HTTPException, by_framework)
