"""Lakes for tests, each a database of its own in one PostgreSQL server."""

import uuid
from pathlib import Path

import psycopg

from rollbook.store.lake import create_lake_book


def new_lake(server: str, folder: Path) -> Path:
    """A book in an empty lake. server: a libpq connection string without a database."""
    name = f"lake_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(f"{server} dbname=postgres", autocommit=True) as connection:
        connection.execute(f"create database {name}")  # type: ignore[arg-type]
    book = folder / name
    create_lake_book(book, f"{server} dbname={name}", folder / f"{name}-data")
    return book
