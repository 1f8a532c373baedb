"""The page that documents the tables says what the tables are."""

import runpy
from pathlib import Path

from rollbook.store import MemoryLog
from rollbook.store.book import Book
from rollbook.store.schema import VIEWS, metadata

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_what_the_schema_gives() -> None:
    page = runpy.run_path(str(DOCS / "make_sql.py"))["page"]()
    assert (DOCS / "sql.md").read_text() == page, "run: python docs/make_sql.py"


def test_every_table_column_and_view_is_explained() -> None:
    for table in metadata.tables.values():
        assert table.comment
        assert all(column.comment for column in table.columns)


def test_views_have_the_columns_that_are_documented() -> None:
    book = Book(MemoryLog())
    for view in VIEWS:
        assert book.sql(f"from {view.name}").column_names == list(view.columns)
