"""The OpenAPI document: FastAPI's own for the usual routes, the hot routes added, all schemas from msgspec types."""

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from app import __version__
from app.http.hot import HotRoute
from app.http.problems import MEDIA_TYPE, PROBLEM_STATUS, TITLES
from app.http.wire import Problem

_REF = "#/components/schemas/{name}"
_EVERYWHERE = ("malformed-json", "invalid-field", "database-unavailable")


def documented(
    answers: dict[int, Any], *problems: str, body: Any = None, summary: str, other_bodies: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Keyword arguments of a FastAPI route whose body and answers are msgspec types, by status.

    FastAPI knows only pydantic models, so the schemas ride along in `openapi_extra`; `document` puts them in place.
    `other_bodies` are media types that are taken besides JSON.
    """
    described = _described(answers, problems, body)
    for media_type in other_bodies:
        described["requestBody"]["content"][media_type] = {}
        described["requestBody"]["required"] = False
    extra = {"x-described": described}
    return {"response_model": None, "openapi_extra": extra, "status_code": min(answers), "summary": summary}


def document(app: FastAPI, hot_routes: Iterable[HotRoute]) -> dict[str, Any]:
    """The whole document; the same for the same code, so that it can be committed and compared."""
    made = get_openapi(
        title="Towpath",
        version=__version__,
        openapi_version="3.1.0",
        summary="A durable job service over HTTP on PostgreSQL.",
        routes=app.routes,
        tags=TAGS,
    )
    for route in hot_routes:
        made["paths"].setdefault(route.path, {})["post"] = _operation(route)
    components = {
        # Not those of the framework's own answer to bad parameters, which is a problem document here.
        name: schema
        for name, schema in made.get("components", {}).get("schemas", {}).items()
        if not name.endswith("ValidationError")
    }
    for path in made["paths"].values():
        for operation in path.values():
            described = operation.pop("x-described")
            components |= described.pop("components")
            operation |= described
    made["components"] = {"schemas": dict(sorted(components.items()))}
    made["paths"] = dict(sorted(made["paths"].items()))
    return made


def _operation(route: HotRoute) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = []
    if "{id}" in route.path:
        schema: dict[str, Any] = {"type": "string", "format": "uuid"}
        parameters.append({"name": "id", "in": "path", "required": True, "schema": schema})
    for name, why in route.headers.items():
        schema = {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]([ -~]*[!-~])?$"}
        parameters.append({"name": name, "in": "header", "required": False, "description": why, "schema": schema})
    return {
        "tags": [route.tag],
        "summary": route.summary,
        "operationId": route.operation_id,
        **({"description": route.handler.__doc__} if route.handler.__doc__ else {}),
        **({"parameters": parameters} if parameters else {}),
        "x-described": _described(route.answers, route.problems, route.body),
    }


def _described(answers: dict[int, Any], problems: tuple[str, ...], body: Any) -> dict[str, Any]:
    """Request body, responses and the schemas they refer to."""
    types = [Problem, *(kind for kind in answers.values() if kind is not None), *([] if body is None else [body])]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(types, schemas, strict=True))
    described: dict[str, Any] = {"components": components}
    if body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema_of[body]}}}
        problems = ("too-large", "unsupported-media-type", *problems)
    responses: dict[str, Any] = {}
    for status, kind in answers.items():
        responses[str(status)] = {"description": HTTPStatus(status).phrase}
        if kind is not None:
            responses[str(status)]["content"] = {"application/json": {"schema": schema_of[kind]}}
    by_status: dict[int, list[str]] = {}
    for code in dict.fromkeys((*_EVERYWHERE, *problems)):
        by_status.setdefault(PROBLEM_STATUS[code], []).append(code)
    for status, codes in by_status.items():
        said = "; ".join(f"`{code}`: {TITLES[code][0].lower()}{TITLES[code][1:]}" for code in codes)
        content = {MEDIA_TYPE: {"schema": schema_of[Problem]}}
        if str(status) in responses:
            responses[str(status)]["content"] |= content
        else:
            responses[str(status)] = {"description": said, "content": content}
    described["responses"] = dict(sorted(responses.items()))
    return described


TAGS = [
    {"name": "jobs", "description": "For producers and operators: enqueue, read, change, cancel, redrive."},
    {"name": "work", "description": "For workers: claim, heartbeat, settle."},
    {"name": "callbacks", "description": "For whom a parked job waits on: capability URLs, no account."},
    {"name": "hooks", "description": "For webhooks that cannot carry a callback URL: they find waits by a key."},
    {"name": "secrets", "description": "Senders' secrets: written, never read."},
    {"name": "queues", "description": "Defaults, pause and retention of each queue."},
    {"name": "dead letters", "description": "Jobs that gave up."},
    {"name": "health", "description": "For load balancers and people on call."},
]
