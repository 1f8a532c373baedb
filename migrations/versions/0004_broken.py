"""Which interactions cannot be rebuilt: the tables are emptied and computed again.

Revision ID: 0004
Revises: 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

OLDER = (
    "cursors", "events", "runs", "policies", "episodes", "interactions", "rewards", "batches", "batch_rows", "scored",
    "failures", "tool_calls", "tool_results",
)  # fmt: skip


def upgrade() -> None:
    op.add_column("interactions", sa.Column("is_broken", sa.Boolean))
    for table in OLDER:
        op.execute(f"delete from {table}")
