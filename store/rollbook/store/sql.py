"""SQL from strangers: one SELECT on the documented tables, within limits, and nothing else.

The query is read by DuckDB's own parser and checked as a tree, by what is allowed: query nodes that only read, tables
and views of `schema.py`, names the query itself defines, and functions without reach (no file, network, extension,
setting, environment, log or sequence). It then runs in a read-only transaction under a watchdog that interrupts it
at its limit of time, memory or rows. Everything refused is QueryRefused, and says what would be allowed.
"""

import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa

from .errors import QueryRefused
from .expressions import FORBIDDEN_FUNCTIONS, serialize
from .schema import VIEWS, metadata
from .views import Views

ON_DEMAND = frozenset({"tokens", "tool_calls"})
"""Tables of `relations.py`: they may be as large as the log."""

TABLES = frozenset(metadata.tables) | {view.name for view in VIEWS}

_NODES = {"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"}
_SOURCES = {"BASE_TABLE", "SUBQUERY", "JOIN", "TABLE_FUNCTION", "EXPRESSION_LIST", "EMPTY", "PIVOT", "SHOW_REF"}
_TABLE_FUNCTIONS = {"range", "generate_series", "unnest"}
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WATCH_S = 0.02


@dataclass(frozen=True)
class Limits:
    """What one query may use. memory_bytes is of DuckDB's working memory beyond what it used before."""

    timeout_s: float = 10.0
    memory_bytes: int = 1 << 30
    rows: int = 100_000
    result_bytes: int = 256 << 20


def check_query(query: str) -> None:
    """Raise QueryRefused unless the query only reads, and only what is documented."""
    if "\x00" in query:
        raise QueryRefused("the query has a NUL character; expected SQL text")
    tree = serialize(query)
    statements = tree.get("statements") or []
    if tree.get("error"):
        said = str(tree.get("error_message", "")).strip()
        raise QueryRefused(f"expected one SELECT statement: {said}")
    if len(statements) != 1:
        raise QueryRefused(f"expected one SELECT statement, got {len(statements)}; send them one at a time")
    own: set[str] = set()
    _names(statements[0], own)
    strange = sorted(name for name in own if not _PLAIN_NAME.fullmatch(name))
    if strange:
        raise QueryRefused(f"the name {strange[0]!r} is not allowed; use letters, digits and underscores")
    _check(statements[0], own)


def _names(part: Any, own: set[str]) -> None:
    if isinstance(part, list):
        for one in part:
            _names(one, own)
    elif isinstance(part, dict):
        ctes = part.get("cte_map")
        if isinstance(ctes, dict):
            own.update(str(entry["key"]).lower() for entry in ctes.get("map", []))
        for one in part.values():
            _names(one, own)


def _check(part: Any, own: set[str]) -> None:
    if isinstance(part, list):
        for one in part:
            _check(one, own)
        return
    if not isinstance(part, dict):
        return
    kind = part.get("type")
    if "cte_map" in part and kind not in _NODES:
        raise QueryRefused("only SELECT is allowed, also inside WITH; nothing may be changed")
    if "class" in part:
        if part["class"] == "FUNCTION":
            _check_function(part["function_name"])
    elif isinstance(kind, str) and "alias" in part and "sample" in part:
        _check_source(kind, part, own)
    for one in part.values():
        _check(one, own)


def _check_source(kind: str, part: dict[str, Any], own: set[str]) -> None:
    if kind not in _SOURCES:
        raise QueryRefused(f"reading from a {kind.lower().replace('_', ' ')} is not allowed; use the documented tables")
    if kind == "BASE_TABLE":
        name = str(part["table_name"])
        if part.get("schema_name") or part.get("catalog_name"):
            raise QueryRefused(f"{name!r} is named with a schema; use the documented tables by their plain names")
        if name.lower() in ON_DEMAND - own:
            raise QueryRefused(
                f"{name!r} is read from the log, which a server does not do for a query; "
                "ask book.sql in Python, or `rollbook sql`, beside the book"
            )
        if name.lower() not in TABLES | own:
            raise QueryRefused(f"no table {name!r}; the tables are {', '.join(sorted(TABLES))}")
    if kind == "TABLE_FUNCTION":
        function = part["function"]
        name = str(function.get("function_name", "")).lower()
        if name not in _TABLE_FUNCTIONS:
            raise QueryRefused(f"the table function {name!r} is not allowed; use the documented tables")
    if kind == "SHOW_REF":
        named = str(part.get("table_name") or "").strip('"').lower()
        if named and named != "tables" and named not in TABLES:
            raise QueryRefused(f"cannot show {named!r}; SHOW TABLES, and DESCRIBE of a documented table, are allowed")


def _check_function(name: str) -> None:
    if name.lower() in FORBIDDEN_FUNCTIONS:
        raise QueryRefused(f"the function {name!r} is not allowed: queries read the tables and nothing else")


def run_query(
    views: Views,
    query: str,
    params: Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    limits: Limits = Limits(),
) -> pa.Table:
    """Run a stranger's query on the views as they are now. Blocks; call it in a thread. Raises QueryRefused."""
    check_query(query)
    with views.cursor() as cursor:
        cursor.execute("begin transaction read only")
        with _Watchdog(views, cursor, limits) as watchdog:
            try:
                relation = cursor.sql(query, params=params) if params else cursor.sql(query)
                reader = relation.to_arrow_reader(8192)
                batches: list[pa.RecordBatch] = []
                rows = size = 0
                for batch in reader:
                    rows += batch.num_rows
                    size += batch.nbytes
                    if rows > limits.rows:
                        raise QueryRefused(f"the answer has more than {limits.rows} rows; aggregate, or add a LIMIT")
                    if size > limits.result_bytes:
                        raise QueryRefused(
                            f"the answer is larger than {limits.result_bytes >> 20} MiB; select fewer columns or rows"
                        )
                    batches.append(batch)
                return pa.Table.from_batches(batches, reader.schema)
            except (duckdb.Error, pa.ArrowException, RuntimeError) as error:
                if watchdog.why is not None:
                    raise QueryRefused(watchdog.why) from None
                said = str(error).strip().split("\n\n")[0]
                raise QueryRefused(f"the query failed: {said}") from error


class _Watchdog:
    """Interrupts a cursor that goes over its limits; `why` says which."""

    def __init__(self, views: Views, cursor: duckdb.DuckDBPyConnection, limits: Limits) -> None:
        self.why: str | None = None
        self._views = views
        self._cursor = cursor
        self._limits = limits
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rollbook-sql-watchdog", daemon=True)

    def __enter__(self) -> "_Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()

    def _watch(self) -> None:
        limits = self._limits
        until = time.monotonic() + limits.timeout_s
        with self._views.cursor() as own:
            before = _memory(own)
            while not self._is_done.wait(_WATCH_S):
                if time.monotonic() > until:
                    self.why = f"the query took longer than {limits.timeout_s:g} s; ask for less at once"
                elif _memory(own) - before > limits.memory_bytes:
                    self.why = (
                        f"the query needed more than {limits.memory_bytes >> 20} MiB of memory; ask for less at once"
                    )
                if self.why is not None:
                    # Again and again: an interrupt between two steps of the query is forgotten.
                    self._cursor.interrupt()


def _memory(cursor: duckdb.DuckDBPyConnection) -> int:
    found = cursor.execute("select sum(memory_usage_bytes + temporary_storage_bytes) from duckdb_memory()").fetchone()
    return int(found[0]) if found else 0
