"""Which interactions a fork repeats, and whose weights a score is of.

Revision ID: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("interactions", sa.Column("origin_id", sa.String))
    op.add_column("scored", sa.Column("weights_sha256", sa.String))
