"""SQL from strangers: one SELECT on the documented tables, within limits, and nothing else.

The query is read by DuckDB's own parser and checked as a tree, by what is allowed: query nodes that only read, tables
and views of `schema.py`, names the query itself defines, and functions without reach (no file, network, extension,
setting, environment, log or sequence). It is parsed and run in a process of its own (`sandbox.py`), which has no more
memory than the query may use, and is killed when its time is over. Everything refused is QueryRefused, and says what
would be allowed.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from .errors import QueryRefused
from .expressions import FORBIDDEN_FUNCTIONS
from .sandbox import GRACE_S, Died, read_answer
from .schema import VIEWS, metadata
from .views import Views

ON_DEMAND = frozenset({"tokens"})
"""Of `relations.py`: it may be as large as the log."""

TABLES = frozenset(metadata.tables) | {view.name for view in VIEWS}

_NODES = {"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"}
_SOURCES = {"BASE_TABLE", "SUBQUERY", "JOIN", "TABLE_FUNCTION", "EXPRESSION_LIST", "EMPTY", "PIVOT", "SHOW_REF"}
_TABLE_FUNCTIONS = {"range", "generate_series", "unnest"}
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_QUERY_CHARS = 100_000
_TREE_BYTES = 64 << 20


@dataclass(frozen=True)
class Limits:
    """What one query may use. memory_bytes: all that its process gets from the kernel beyond what it has without it."""

    timeout_s: float = 10.0
    memory_bytes: int = 1 << 30
    rows: int = 100_000
    result_bytes: int = 256 << 20


def _check_tree(tree: dict[str, Any]) -> None:
    """Raise QueryRefused unless a parsed query only reads, and only what is documented."""
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
    """Run a stranger's query on the views as they are now. Blocks; call it in a thread.

    Raises QueryRefused, and TablesDamaged where it met damage in their file.
    """
    if "\x00" in query:
        raise QueryRefused("the query has a NUL character; expected SQL text")
    if len(query) > _QUERY_CHARS:
        raise QueryRefused(f"the query has {len(query)} characters; expected at most {_QUERY_CHARS}")
    until = time.monotonic() + limits.timeout_s + GRACE_S
    too_late = f"the query took longer than {limits.timeout_s:g} s; ask for less at once"
    try:
        with views.guest(limits.timeout_s) as guest:
            said, _ = guest.ask(until, _TREE_BYTES, "parse", query)
            if "failed" in said:
                raise QueryRefused(f"the query failed: {said['failed']}")
            try:
                _check_tree(json.loads(said["tree"]))
            except RecursionError:
                raise QueryRefused("the query is nested too deeply; write it with fewer levels") from None
            left = until - GRACE_S - time.monotonic()
            said, answer = guest.ask(
                until,
                limits.result_bytes + (1 << 20),
                "run",
                query,
                params,
                max(0.0, left),
                limits.memory_bytes,
                limits.rows,
                limits.result_bytes,
            )
            if not said:
                return read_answer(answer)
            if "failed" in said:
                damage = views.damage_said(said["kind"], said["failed"])
                if damage is not None:
                    raise damage
    except TimeoutError:
        raise QueryRefused(too_late) from None
    except Died:
        raise QueryRefused(
            "the process that ran the query ended before it had an answer, most likely since the query needed more "
            f"than {limits.memory_bytes >> 20} MiB of memory; ask for less at once"
        ) from None
    over = {
        "time": too_late,
        "memory": f"the query needed more than {limits.memory_bytes >> 20} MiB of memory; ask for less at once",
        "rows": f"the answer has more than {limits.rows} rows; aggregate, or add a LIMIT",
        "size": f"the answer is larger than {limits.result_bytes >> 20} MiB; select fewer columns or rows",
    }
    raise QueryRefused(over.get(said.get("over", ""), f"the query failed: {said.get('failed')}"))
