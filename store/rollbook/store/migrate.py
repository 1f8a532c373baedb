"""Alembic for views.duckdb: which revisions there are, and the way from an older one to this one.

The migrations are in the repository's top folder `migrations/`, and in an installed package beside this file.
"""

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory


def folder() -> Path:
    """Where the migrations are."""
    installed = Path(__file__).parent / "migrations"
    return installed if installed.is_dir() else Path(__file__).parents[3] / "migrations"


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(folder()).replace("%", "%%"))
    return config


def revisions() -> list[str]:
    """All revisions, oldest first."""
    found = ScriptDirectory.from_config(_config()).walk_revisions()
    return [script.revision for script in found][::-1]


def upgrade(path: Path) -> None:
    """Bring the tables of a database file to the newest revision, in one transaction. Nobody else may have it open."""
    engine = sa.create_engine(f"duckdb:///{path}", poolclass=sa.NullPool)
    try:
        with engine.begin() as connection:
            config = _config()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    finally:
        engine.dispose()
