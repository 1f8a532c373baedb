"""Reading a book from the terminal: answers to SQL, one episode as a tree, a check of every record."""

import csv
import io
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollbook.store import open_book
from rollbook.store.verify import verify

_WIDTH = 60  # of a cell; a terminal is no place for a whole config


def query(book_path: str, statement: str) -> pa.Table:
    """Answer one statement from a book, live or not. Raises StoreError."""
    with open_book(book_path) as book:
        return book.sql(statement)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    text = str(value).replace("\n", "\\n")
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


def print_table(table: pa.Table, format_: str, out: Console, output: Path | None = None) -> None:
    """Print (or write to `output`) as table, csv, json, parquet or arrow."""
    if format_ in ("parquet", "arrow"):
        sink = pa.BufferOutputStream()
        if format_ == "parquet":
            import pyarrow.parquet as pq

            pq.write_table(table, sink)
        else:
            with pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
        data = sink.getvalue().to_pybytes()
        if output is None:
            sys.stdout.buffer.write(data)
        else:
            output.write_bytes(data)
        return
    if format_ == "table" and output is None:
        shown = Table(header_style="bold")
        for field in table.schema:
            is_number = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
            shown.add_column(field.name, justify="right" if is_number else "left", overflow="fold")
        for row in table.to_pylist():
            shown.add_row(*(Text(_cell(value)) for value in row.values()))
        out.print(shown)
        return
    text = io.StringIO()
    if format_ == "json":
        json.dump(table.to_pylist(), text, default=str, ensure_ascii=False, indent=1)
        text.write("\n")
    else:
        rows = csv.writer(text)
        rows.writerow(table.column_names)
        rows.writerows(row.values() for row in table.to_pylist())
    if output is None:
        sys.stdout.write(text.getvalue())
    else:
        output.write_text(text.getvalue())


def verify_book(book_path: str, out: Console) -> bool:
    """Check every record; print what was found. Whether the book is whole."""
    report = verify(book_path)
    out.print(str(report), highlight=False, soft_wrap=True)
    return report.is_whole
