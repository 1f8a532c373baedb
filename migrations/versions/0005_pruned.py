"""Which interactions `rollbook prune` took.

Revision ID: 0005
Revises: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

OLDER = (
    "cursors", "events", "runs", "policies", "episodes", "interactions", "rewards", "batches", "batch_rows", "scored",
    "failures", "tool_calls", "tool_results",
)  # fmt: skip


def upgrade() -> None:
    op.create_table(
        "pruned",
        sa.Column("interaction_id", sa.String),
        sa.Column("episode_id", sa.String),
        sa.Column("run_id", sa.String),
        sa.Column("pruned_at", sa.DateTime(timezone=True)),
        sa.Column("event_id", sa.Uuid),
    )
    # DuckDB 1.5 does not take an altered table whose rows were changed as well, so tables are made anew.
    op.execute("create or replace table interactions as select *, false as is_pruned from interactions")
    op.execute("create or replace table episodes as select *, 0::bigint as n_pruned from episodes")
    named = op.get_bind().execute(sa.text("select count(*) from events where kind = 'InteractionsPruned'")).scalar()
    if named:  # which a version that did not know them passed over: only the log can tell
        for table in OLDER:
            op.execute(f"create or replace table {table} as select * from {table} limit 0")
