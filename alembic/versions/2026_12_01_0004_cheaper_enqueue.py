"""Names are checked by cheaper patterns, and a set of jobs goes in with one statement.

Revision ID: 0004
Revises: 0003
"""

from pathlib import Path

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

SQL = Path(__file__).parents[1] / "sql"
_NAMES = r"""ALTER TABLE towpath.jobs
    DROP CONSTRAINT jobs_queue,
    DROP CONSTRAINT jobs_kind,
    ADD CONSTRAINT jobs_queue CHECK (queue ~ '^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,99}$'),
    ADD CONSTRAINT jobs_kind CHECK (kind ~ '^[A-Za-z0-9_][A-Za-z0-9_./:-]{0,199}$')"""


def upgrade() -> None:
    """Two constraints and one function are replaced."""
    _execute((SQL / "0004_cheaper_enqueue.sql").read_text())


def downgrade() -> None:
    """By those before."""
    _execute((SQL / "0003_order_in_hints.sql").read_text())
    _execute(_NAMES)


def _execute(sql: str) -> None:
    # On the driver's own cursor: without parameters it takes many statements and leaves `%` alone.
    op.get_bind().connection.cursor().execute(sql)
