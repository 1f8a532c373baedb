"""Which interactions cannot be rebuilt: the tables are emptied and computed again.

Revision ID: 0004
Revises: 0003
"""

from alembic import op

revision = "0004"
down_revision = "0003"

OLDER = (
    "cursors", "events", "runs", "policies", "episodes", "rewards", "batches", "batch_rows", "scored",
    "failures", "tool_calls", "tool_results",
)  # fmt: skip


def upgrade() -> None:
    # DuckDB 1.5 does not take a changed table whose rows were changed as well, so the table is made anew.
    op.execute("create or replace table interactions as select *, null::boolean as is_broken from interactions limit 0")
    for table in OLDER:
        op.execute(f"delete from {table}")
