"""The id of the request that is being answered, for the log."""

from contextvars import ContextVar

REQUEST_ID: ContextVar[bytes | None] = ContextVar("request_id", default=None)
