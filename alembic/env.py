"""How migrations run: one migrator at a time, and never waiting long for a lock that the service holds."""

import psycopg
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import NullPool, create_engine, text

from alembic import context
from app.database.tables import SCHEMA, metadata
from app.settings import Settings

# Two migrators queue behind each other; the number is only ours to know.
_LOCK = "SELECT pg_advisory_lock(hashtext('towpath migrations'))"


def run() -> None:
    """Upgrade, downgrade or compare the database that the command or the caller names."""
    url = context.config.attributes.get("url") or Settings().database_url
    # The driver reads the URL: it may be any connection string that libpq knows. A user who is named like our
    # schema has it as the default one, and Alembic would then look for our tables under no name.
    options = f"{conninfo_to_dict(url).get('options') or ''} -c search_path=public"
    engine = create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(url, options=options), poolclass=NullPool
    )
    with engine.connect() as connection:
        connection.execute(text(_LOCK))
        connection.execute(text("SET lock_timeout = '5s'"))
        connection.execute(text("SET statement_timeout = '60s'"))
        connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
        connection.commit()
        context.configure(
            connection=connection,
            target_metadata=metadata,
            version_table_schema=SCHEMA,
            include_schemas=True,
            include_name=lambda name, kind, _: kind != "schema" or name == SCHEMA,
            transaction_per_migration=True,
            compare_server_default=True,
        )
        with context.begin_transaction():
            context.run_migrations()


run()
