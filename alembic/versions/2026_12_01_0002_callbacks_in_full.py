"""Several waits per park, raw payloads, policies, senders' signatures, named secrets, hooks.

Revision ID: 0002
Revises: 0001
"""

from pathlib import Path

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

SQL = Path(__file__).parents[1] / "sql"


def upgrade() -> None:
    """New tables and columns; what is parked stays parked, on its one wait."""
    _run("0002_callbacks.sql")


def downgrade() -> None:
    """Refuses while jobs wait for several answers."""
    _run("0002_drop.sql")


def _run(name: str) -> None:
    # On the driver's own cursor: without parameters it takes many statements and leaves `%` alone.
    op.get_bind().connection.cursor().execute((SQL / name).read_text())
