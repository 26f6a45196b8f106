"""Notifications of new jobs say where in the queue they are, so that claims need not look in front of it.

Revision ID: 0003
Revises: 0002
"""

from pathlib import Path

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

SQL = Path(__file__).parents[1] / "sql"
_FUNCTION = "CREATE FUNCTION towpath.insert_jobs"


def upgrade() -> None:
    """One function is replaced."""
    _execute((SQL / "0003_order_in_hints.sql").read_text())


def downgrade() -> None:
    """By the one before, as its migration made it."""
    before = (SQL / "0001_enqueue.sql").read_text()
    start = before.index(_FUNCTION)
    end = before.index("$$;", start) + len("$$;")
    _execute(before[start:end].replace("CREATE", "CREATE OR REPLACE", 1))


def _execute(sql: str) -> None:
    # On the driver's own cursor: without parameters it takes many statements and leaves `%` alone.
    op.get_bind().connection.cursor().execute(sql)
