"""Structlog and the standard library's records through one chain: columns for people, JSON lines for machines."""

import logging
import sys
from typing import Any

import structlog

from app.http.request_id import REQUEST_ID


def _add_request_id(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    request_id = REQUEST_ID.get()
    if request_id is not None:
        event["request_id"] = request_id.decode()
    return event


def configure(*, json: bool) -> None:
    """Call once per process, before anything logs."""
    shared: list[structlog.typing.Processor] = [
        _add_request_id,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if json
        # Plain: the default also prints local variables, which hold what users sent, and takes a second to do so.
        else [
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
        ]
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    # A callback URL is a capability: it must not be in an access log. The pool tells each lost connection.
    logging.getLogger("uvicorn.access").disabled = True
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)
