"""The whole edge on a page: routers, hot routes, middleware, error handlers, lifespan."""

import gc
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import structlog
from fastapi import FastAPI
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from app import __version__
from app import runtime as running
from app.callbacks.answer_router import router as answers
from app.callbacks.router import router as callbacks
from app.database.migrations import require_current_revision
from app.database.signing_keys import claim_signing_keys
from app.dead_letters.router import router as dead_letters
from app.hooks.router import router as hooks
from app.http import openapi, problems
from app.http.health import router as health
from app.http.hot import HotRoutes
from app.jobs.router import ROUTES as ENQUEUE_ROUTES
from app.jobs.router import router as jobs
from app.queues.router import router as queues
from app.secrets.encryption import vault_of
from app.secrets.router import router as secrets
from app.settings import Settings
from app.telemetry import logging
from app.work.router import ROUTES as WORK_ROUTES

HOT_ROUTES = (*ENQUEUE_ROUTES, *WORK_ROUTES)


class _Service(FastAPI):
    """The framework's application behind the hot routes, which pass it what is not theirs.

    They come before all of it, so that a hot route pays for nothing that it does not use.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        framework: Any = super().__call__
        behind: Any = ProxyHeadersMiddleware(framework, os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1"))
        self._hot = HotRoutes(behind, HOT_ROUTES)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request, or run the lifespan."""
        await self._hot(scope, receive, send)


async def _answered_before() -> None:
    raise AssertionError("the hot routes come first")


def create_app(settings: Settings | None = None, *, maintenance: bool = True) -> FastAPI:
    """The service. Nothing is opened until its lifespan starts.

    Raises WrongRevision or WrongSigningKey at start-up when the database is not for this process.
    """
    settings = settings or Settings()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, Any]]:
        logging.configure(json=settings.log_json)
        require_current_revision(settings.database_url)
        signer = claim_signing_keys(settings)
        async with running.opened(settings, signer, vault_of(settings), maintenance=maintenance) as runtime:
            # What was made at start-up lives as long as the process. Going through it again and again for garbage
            # stopped everything for 60 ms, several times a second under load.
            gc.collect()
            gc.freeze()
            structlog.get_logger(__name__).info("serving", version=__version__, maintenance=maintenance)
            yield {
                "runtime": runtime,
                "jobs": runtime.jobs,
                "work": runtime.work,
                "callbacks": runtime.callbacks,
                "secrets": runtime.secrets,
                "max_body_bytes": settings.max_body_bytes,
            }

    app = _Service(
        title="Towpath",
        version=__version__,
        lifespan=lifespan,
        docs_url="/docs",
        redoc_url=None,
        redirect_slashes=False,
        openapi_url="/openapi.json",
        generate_unique_id_function=lambda route: route.name,
    )
    for router in (jobs, callbacks, answers, hooks, secrets, queues, dead_letters, health):
        app.include_router(router)
    for route in HOT_ROUTES:
        # Never called: it lets the framework answer 405 where only the method is wrong.
        app.add_api_route(route.path, _answered_before, methods=["POST"], include_in_schema=False)
    problems.install(app)
    app.openapi = lambda: openapi.document(app, HOT_ROUTES)  # type: ignore[method-assign]
    return app
