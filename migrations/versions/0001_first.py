"""The tables of the first release.

Revision ID: 0001
Revises: nothing
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "cursors",
        sa.Column("writer", sa.String),
        sa.Column("position", sa.BigInteger),
    )
    op.create_table(
        "events",
        sa.Column("event_id", sa.Uuid),
        sa.Column("writer", sa.String),
        sa.Column("position", sa.BigInteger),
        sa.Column("kind", sa.String),
        sa.Column("run_id", sa.String),
        sa.Column("episode_id", sa.String),
        sa.Column("interaction_id", sa.String),
        sa.Column("recorded_at", sa.DateTime(timezone=True)),
    )
    op.create_table(
        "runs",
        sa.Column("run_id", sa.String),
        sa.Column("name", sa.String),
        sa.Column("config", sa.String),
        sa.Column("started_at", sa.DateTime(timezone=True)),
        sa.Column("restarted_at", sa.DateTime(timezone=True)),
        sa.Column("event_id", sa.Uuid),
    )
    op.create_table(
        "policies",
        sa.Column("run_id", sa.String),
        sa.Column("policy", sa.String),
        sa.Column("version", sa.Integer),
        sa.Column("path", sa.String),
        sa.Column("step", sa.Integer),
        sa.Column("published_at", sa.DateTime(timezone=True)),
        sa.Column("event_id", sa.Uuid),
    )
    op.create_table(
        "episodes",
        sa.Column("episode_id", sa.String),
        sa.Column("run_id", sa.String),
        sa.Column("task_id", sa.String),
        sa.Column("group_id", sa.String),
        sa.Column("attempt", sa.Integer),
        sa.Column("is_eval", sa.Boolean),
        sa.Column("version", sa.Integer),
        sa.Column("task", sa.String),
        sa.Column("key_sha256", sa.String),
        sa.Column("origin_interaction_id", sa.String),
        sa.Column("state", sa.String),
        sa.Column("reason", sa.String),
        sa.Column("opened_at", sa.DateTime(timezone=True)),
        sa.Column("closed_at", sa.DateTime(timezone=True)),
        sa.Column("opened_by", sa.Uuid),
        sa.Column("closed_by", sa.Uuid),
        sa.Column("reward", sa.Double),
        sa.Column("n_interactions", sa.Integer),
        sa.Column("n_output", sa.BigInteger),
        sa.Column("version_min", sa.Integer),
        sa.Column("version_max", sa.Integer),
        sa.Column("main_id", sa.String),
        sa.Column("main_node", sa.BigInteger),
        sa.Column("n_taken", sa.Integer),
    )
    op.create_table(
        "interactions",
        sa.Column("interaction_id", sa.String),
        sa.Column("episode_id", sa.String),
        sa.Column("run_id", sa.String),
        sa.Column("parent_id", sa.String),
        sa.Column("top_id", sa.String),
        sa.Column("root_id", sa.String),
        sa.Column("node", sa.BigInteger),
        sa.Column("up_node", sa.BigInteger),
        sa.Column("up_id", sa.String),
        sa.Column("up_edge", sa.String),
        sa.Column("depth", sa.Integer),
        sa.Column("edge", sa.String),
        sa.Column("cause", sa.String),
        sa.Column("version_min", sa.Integer),
        sa.Column("version_max", sa.Integer),
        sa.Column("n_prompt", sa.Integer),
        sa.Column("n_shared", sa.Integer),
        sa.Column("n_output", sa.Integer),
        sa.Column("finish_reason", sa.String),
        sa.Column("model", sa.String),
        sa.Column("role", sa.String),
        sa.Column("dialect", sa.String),
        sa.Column("is_trainable", sa.Boolean),
        sa.Column("capture", sa.String),
        sa.Column("delivered", sa.Integer),
        sa.Column("logprobs_mode", sa.String),
        sa.Column("sampling", sa.String),
        sa.Column("mean_logprob", sa.Double),
        sa.Column("seconds", sa.Double),
        sa.Column("first_token_seconds", sa.Double),
        sa.Column("recorded_at", sa.DateTime(timezone=True)),
        sa.Column("writer", sa.String),
        sa.Column("position", sa.BigInteger),
        sa.Column("event_id", sa.Uuid),
        sa.Column("is_leaf", sa.Boolean),
        sa.Column("is_retried", sa.Boolean),
        sa.Column("start_id", sa.String),
        sa.Column("path_n", sa.Integer),
        sa.Column("path_output", sa.BigInteger),
        sa.Column("path_version_min", sa.Integer),
        sa.Column("path_version_max", sa.Integer),
    )
    op.create_table(
        "rewards",
        sa.Column("event_id", sa.Uuid),
        sa.Column("run_id", sa.String),
        sa.Column("episode_id", sa.String),
        sa.Column("interaction_id", sa.String),
        sa.Column("start", sa.Integer),
        sa.Column("end", sa.Integer),
        sa.Column("name", sa.String),
        sa.Column("value", sa.Double),
        sa.Column("weight", sa.Double),
        sa.Column("source", sa.String),
        sa.Column("details", sa.String),
        sa.Column("given_at", sa.DateTime(timezone=True)),
    )
    op.create_table(
        "batches",
        sa.Column("batch_id", sa.String),
        sa.Column("run_id", sa.String),
        sa.Column("step", sa.Integer),
        sa.Column("version", sa.Integer),
        sa.Column("taken_at", sa.DateTime(timezone=True)),
        sa.Column("trained_at", sa.DateTime(timezone=True)),
        sa.Column("n_rows", sa.Integer),
        sa.Column("selection", sa.String),
        sa.Column("discarded", sa.String),
        sa.Column("metrics", sa.String),
        sa.Column("taken_by", sa.Uuid),
        sa.Column("trained_by", sa.Uuid),
    )
    op.create_table(
        "batch_rows",
        sa.Column("batch_id", sa.String),
        sa.Column("interaction_id", sa.String),
        sa.Column("credit", sa.Double),
        sa.Column("advantage", sa.Double),
        sa.Column("weight", sa.Double),
    )
    op.create_table(
        "scored",
        sa.Column("interaction_id", sa.String),
        sa.Column("run_id", sa.String),
        sa.Column("version", sa.Integer),
        sa.Column("scorer", sa.String),
        sa.Column("batch_id", sa.String),
        sa.Column("mean_logprob", sa.Double),
        sa.Column("mean_entropy", sa.Double),
        sa.Column("scored_at", sa.DateTime(timezone=True)),
        sa.Column("writer", sa.String),
        sa.Column("position", sa.BigInteger),
        sa.Column("event_id", sa.Uuid),
    )
    op.create_table(
        "failures",
        sa.Column("run_id", sa.String),
        sa.Column("episode_id", sa.String),
        sa.Column("error", sa.String),
        sa.Column("message", sa.String),
        sa.Column("status", sa.Integer),
        sa.Column("dialect", sa.String),
        sa.Column("failed_at", sa.DateTime(timezone=True)),
        sa.Column("event_id", sa.Uuid),
    )
