"""${message}

The code before this migration is still running while it is applied, and after: add first, remove later.

Revision ID: ${up_revision}
Revises: ${down_revision | comma,n}
"""

from alembic import op

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None


def upgrade() -> None:
    """${message}."""
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    """Back to ${down_revision | comma,n}."""
    ${downgrades if downgrades else "pass"}
