"""Of several judges of an episode under one name the last one's rewards stand.

Revision ID: 0006
Revises: 0005
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

TABLES = (
    "cursors", "events", "runs", "policies", "episodes", "interactions", "rewards", "batches", "batch_rows", "scored",
    "failures", "tool_calls", "tool_results", "pruned",
)  # fmt: skip


def upgrade() -> None:
    judged_again = sa.text(
        "select count(*) from (select episode_id from rewards where name = 'reward' and "
        "regexp_matches(source, '@[0-9a-f]{12}$') group by episode_id having min(source) <> max(source))"
    )
    if op.get_bind().execute(judged_again).scalar():  # `episodes.reward` may add up what several judges gave
        for table in TABLES:
            op.execute(f"create or replace table {table} as select * from {table} limit 0")
