"""Tool calls and their results, which only the log can tell: the tables are emptied and computed again.

Revision ID: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

OLDER = (
    "cursors", "events", "runs", "policies", "episodes", "interactions", "rewards", "batches", "batch_rows", "scored",
    "failures",
)  # fmt: skip


def upgrade() -> None:
    op.create_table(
        "tool_calls",
        sa.Column("run_id", sa.String),
        sa.Column("episode_id", sa.String),
        sa.Column("interaction_id", sa.String),
        sa.Column("call", sa.Integer),
        sa.Column("tool", sa.String),
        sa.Column("is_json", sa.Boolean),
        sa.Column("is_error", sa.Boolean),
        sa.Column("called_at", sa.DateTime(timezone=True)),
        sa.Column("key", sa.BigInteger),
    )
    op.create_table(
        "tool_results",
        sa.Column("run_id", sa.String),
        sa.Column("episode_id", sa.String),
        sa.Column("interaction_id", sa.String),
        sa.Column("place", sa.Integer),
        sa.Column("is_error", sa.Boolean),
        sa.Column("answered_at", sa.DateTime(timezone=True)),
        sa.Column("key", sa.BigInteger),
    )
    for table in OLDER:
        op.execute(f"delete from {table}")
