"""Jobs, queues, waits, events and idempotency keys, with the lifecycle enforced by the database.

Revision ID: 0001
Revises:
"""

from pathlib import Path

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

SQL = Path(__file__).parents[1] / "sql"


def upgrade() -> None:
    """Plain SQL files: a DBA can read, and a reviewer can diff, exactly what runs."""
    for name in ("0001_tables.sql", "0001_lifecycle_guard.sql", "0001_enqueue.sql"):
        _run(name)


def downgrade() -> None:
    """Drops everything but the schema itself, which holds Alembic's own table."""
    _run("0001_drop.sql")


def _run(name: str) -> None:
    # On the driver's own cursor: without parameters it takes many statements and leaves `%` alone.
    op.get_bind().connection.cursor().execute((SQL / name).read_text())
