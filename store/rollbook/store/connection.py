"""A book as data: what a notebook or a script asks of it, in the form that its other tools take.

    with connect("runs/demo/book") as db:
        db.sql("from episodes where reward = 1").df()         # a DuckDB relation, lazy
        db.polars("select version, avg(reward) from episodes group by version")
        DataLoader(db.torch(Selection(needs_reward=True)), batch_size=8, collate_fn=pad_rows)

Reads only: every query runs in a read-only transaction, and no writer is opened. A live book is followed: each call
sees what was durable when it was made. pandas, Polars, torch and Hugging Face `datasets` are imported when asked for.
"""

import importlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa

from .book import Book, open_book
from .errors import BookNotFound, PackageMissing
from .http import HttpLog
from .relations import names_tokens
from .selection import Selection
from .stream import Form

if TYPE_CHECKING:
    import datasets
    import pandas
    import polars

    from .torch_rows import TokenRows

Params = Sequence[Any] | Mapping[str, Any] | None


def connect(book: str | os.PathLike[str], *, key: str | None = None) -> "Connection":
    """Open a book to read it: a folder (of a finished or live run, or a copy), or the URL of a served book.

    key: the server's admin key, for a URL. A served book's events come over HTTP, so its tables are as fresh as the
    server's, and the first call takes as long as the whole log takes to arrive. Raises BookNotFound, BookTooNew.
    """
    return Connection(open_anywhere(book, key=key), str(book), key)


def open_anywhere(book: str | os.PathLike[str], *, key: str | None = None) -> Book:
    """The book in a folder or at a URL, to read."""
    where = str(book)
    if not is_url(where):
        return open_book(book)
    if key is None:
        raise BookNotFound(f"a served book needs its admin key: connect({where!r}, key=...)")
    log = HttpLog(where, key)
    try:
        return Book(log)
    except BaseException:
        log.close()
        raise


def is_url(where: str) -> bool:
    return where.startswith(("http://", "https://"))


def need(package: str, what: str) -> ModuleType:
    """Import an optional package. Raises PackageMissing, which says what wants it and how to get it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise PackageMissing(
            f"{what} needs the package {package}, which is not installed; pip install {package}"
        ) from None


class Connection:
    """A book open to be read. For one thread; `connect` once for each. Close it, or use it as a context manager."""

    def __init__(self, book: Book, where: str, key: str | None) -> None:
        self.book = book
        self._where = where
        self._key = key
        self._cursor = book.views.cursor()

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def sql(self, query: str, params: Params = None, **tables: Any) -> duckdb.DuckDBPyRelation:
        """A DuckDB relation over the book as it is now, to filter on, join and fetch (`.df()`, `.pl()`, `.fetchall()`).

        tables: Arrow tables, pandas or Polars frames that the query may name. A relation that is fetched later is
        answered from the book as it was at the latest call. Raises duckdb.Error; whatever would write is refused.
        """
        self.book.catch_up()
        if "tokens" not in tables and names_tokens(query):
            tables["tokens"] = self.book.all_tokens()
        self._leave()
        for name, table in tables.items():
            self._cursor.register(name, table)
        self._cursor.execute("begin transaction read only")
        return self._cursor.sql(query, params=params) if params is not None else self._cursor.sql(query)

    def _leave(self) -> None:
        with suppress(duckdb.TransactionException):  # none was open
            self._cursor.execute("rollback")

    def arrow(self, query: str, params: Params = None, **tables: Any) -> pa.Table:
        """The answer as an Arrow table."""
        return self.sql(query, params, **tables).to_arrow_table()

    def pandas(self, query: str, params: Params = None, **tables: Any) -> "pandas.DataFrame":
        """The answer as a pandas frame. Raises PackageMissing."""
        need("pandas", "pandas()")
        return self.sql(query, params, **tables).df()

    def polars(self, query: str, params: Params = None, **tables: Any) -> "polars.DataFrame":
        """The answer as a Polars frame. Raises PackageMissing."""
        frame: polars.DataFrame = need("polars", "polars()").from_arrow(self.arrow(query, params, **tables))
        return frame

    def huggingface(self, query: str, params: Params = None, **tables: Any) -> "datasets.Dataset":
        """The answer as a Hugging Face dataset, on the answer's own memory. Raises PackageMissing."""
        package = need("datasets", "huggingface()")
        table = package.table.InMemoryTable(self.arrow(query, params, **tables))
        dataset: datasets.Dataset = package.Dataset(table)
        return dataset

    def torch(self, selection: Selection | None = None, *, form: Form = "individual") -> "TokenRows":
        """The tokens of a selection as a map-style torch dataset; see `torch_rows.TokenRows`. Raises PackageMissing.

        form: `individual`, a row per interaction, or `trajectory`. The rows are those of now; ask again for newer.
        """
        need("torch", "torch()")
        from .torch_rows import TokenRows

        self.book.catch_up()
        return TokenRows(self.book, selection or Selection(), form=form, where=self._where, key=self._key)

    def close(self) -> None:
        """Give the book's files back. Twice is once."""
        self._cursor.close()
        self.book.close()
