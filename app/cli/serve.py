"""Run the server: one process or several, with or without a PostgreSQL of our own."""

import asyncio
import os
import signal
import sys
from contextlib import ExitStack, suppress

import structlog
import typer
import uvicorn
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from uvicorn.supervisors import Multiprocess

from app.database.migrations import WrongRevision, upgrade
from app.http.protocol import Protocol
from app.settings import Settings
from app.telemetry import logging

log = structlog.get_logger(__name__)

_APP = "app.cli.serve:served_app"
_NO_MAINTENANCE = "TOWPATH_NO_MAINTENANCE"


def served_app() -> object:
    """The application of one server process; what the command line chose comes through the environment."""
    from app.main import create_app

    return create_app(maintenance=_NO_MAINTENANCE not in os.environ)


def serve(*, host: str, port: int, workers: int, embedded: bool, maintenance: bool) -> None:
    """Serve until told to stop. Exits with a message when the database is not for this version."""
    settings = Settings()
    logging.configure(json=settings.log_json)
    # The server gives the signal back once it has stopped, and then our own things must be stopped too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        if embedded:
            from app.database.embedded import AlreadyRunning, EmbeddedPostgres

            try:
                server = stack.enter_context(EmbeddedPostgres.start(settings.data_directory.resolve() / "postgres"))
            except AlreadyRunning as error:
                typer.echo(f"towpath: {error}", err=True)
                raise typer.Exit(1) from None
            server.ensure_database("towpath")
            os.environ["TOWPATH_DATABASE_URL"] = server.url()
            settings = Settings()
            upgrade(settings.database_url)
        _check(settings)
        if not maintenance:
            os.environ[_NO_MAINTENANCE] = "1"
        config = uvicorn.Config(
            _APP,
            factory=True,
            host=host,
            port=port,
            workers=workers,
            loop="uvloop",
            http=Protocol,
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,  # looked at behind the hot routes, which have no use for them
            timeout_graceful_shutdown=10,
            timeout_keep_alive=75,
            backlog=4096,
        )
        listening = config.bind_socket()
        _greet(host, listening.getsockname()[1], settings)
        if workers == 1:
            uvicorn.Server(config).run(sockets=[listening])
        else:
            Multiprocess(config, sockets=[listening]).run()


def _check(settings: Settings) -> None:
    from app.database.migrations import require_current_revision
    from app.database.signing_keys import WrongSigningKey, claim_signing_keys
    from app.secrets.encryption import vault_of

    try:
        require_current_revision(settings.database_url)
        claim_signing_keys(settings)
        vault_of(settings)
    except (WrongRevision, WrongSigningKey, ValueError) as error:
        typer.echo(f"towpath: {error}", err=True)
        raise typer.Exit(1) from None


def _greet(host: str, port: int, settings: Settings) -> None:
    base = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"  # noqa: S104
    given = conninfo_to_dict(settings.database_url)
    where = make_conninfo(**{name: str(value) for name, value in given.items() if name != "password"})
    typer.echo(
        f"\n  Towpath   {base}\n  API docs  {base}/docs\n  Database  {where}\n"
        f"  Data      {settings.data_directory.resolve()}\n\n  Try it:\n"
        f'    curl --json \'{{"kind": "hello", "args": {{"name": "world"}}}}\' {base}/v1/jobs\n'
        f'    curl --json \'{{"queues": ["default"]}}\' {base}/v1/claims\n'
    )


def maintain() -> None:
    """Run the sweeps until told to stop."""
    settings = Settings()
    logging.configure(json=settings.log_json)
    _check(settings)
    asyncio.run(_sweep(settings))


async def _sweep(settings: Settings) -> None:
    from app.database.engine import conninfo
    from app.database.notifications import Notifications, stopped
    from app.maintenance.loop import Maintenance

    maintenance = Maintenance(settings)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def heard(payload: str) -> None:
        if payload == "due":
            maintenance.wake()

    notifications = Notifications(conninfo(settings, "maintain"), heard, maintenance.wake)
    listening = asyncio.create_task(notifications.run())
    async with maintenance.running():
        log.info("maintaining")
        await stop.wait()
    await stopped(listening)
