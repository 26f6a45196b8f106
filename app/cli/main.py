"""The `towpath` command. Each command imports what it needs, so that `--help` is quick."""

from pathlib import Path
from typing import Annotated

import typer

main = typer.Typer(
    name="towpath",
    help="A durable job service over HTTP on PostgreSQL. Settings are read from TOWPATH_… in the environment.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@main.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8080,
    workers: Annotated[int, typer.Option(min=1, help="Processes; they share nothing but the database.")] = 1,
    embedded: Annotated[bool, typer.Option(help="Start a PostgreSQL of our own, in the data directory.")] = False,
    maintenance: Annotated[bool, typer.Option(help="Run the sweeps in these processes.")] = True,
) -> None:
    """Serve the API."""
    from app.cli.serve import serve as run

    run(host=host, port=port, workers=workers, embedded=embedded, maintenance=maintenance)


@main.command()
def maintain() -> None:
    """Run the sweeps only: promotion, rescue, time-outs, retention."""
    from app.cli.serve import maintain as run

    run()


@main.command()
def migrate() -> None:
    """Bring the database's schema up to date. Safe to repeat, and to run from two places."""
    from app.database.migrations import upgrade
    from app.settings import Settings

    upgrade(Settings().database_url)
    typer.echo("The database is up to date.")


@main.command()
def reseal() -> None:
    """Encrypt every stored secret anew with the first of TOWPATH_ENCRYPTION_KEYS."""
    import asyncio

    from app.cli.reseal import reseal as run
    from app.errors import Refusal

    try:
        typer.echo(f"Secrets encrypted with the first key: {asyncio.run(run())}")
    except (Refusal, ValueError) as error:
        typer.echo(f"towpath: {error}", err=True)
        raise typer.Exit(1) from None


@main.command()
def openapi(
    path: Annotated[Path, typer.Argument(help="Where to write the document.")] = Path("openapi/openapi.json"),
    check: Annotated[bool, typer.Option(help="Write nothing; fail when the file is not current.")] = False,
) -> None:
    """Write the OpenAPI document, or check that it is current."""
    import json

    from app.main import create_app

    current = json.dumps(create_app().openapi(), indent=2, ensure_ascii=False) + "\n"
    if not check:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(current)
    elif not path.exists() or path.read_text() != current:
        typer.echo(f"{path} is not current: run `towpath openapi`.", err=True)
        raise typer.Exit(1)


@main.command()
def doctor() -> None:
    """Look at the database as the service would, and say what is wrong with it."""
    from app.cli.doctor import findings
    from app.settings import Settings

    bad = 0
    for finding in findings(Settings()):
        typer.echo(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.what}: {finding.detail}")
        bad += not finding.ok
    raise typer.Exit(1 if bad else 0)
