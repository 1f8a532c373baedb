"""Scalar SQL expressions from outside: read with DuckDB's own parser, allowed only what computes a value of a row.

Reward expressions (`0.5 * accuracy - 0.01 * n_interactions`) and filters (`task_id like 'gsm8k/%'`) come from configs,
command lines and HTTP. They may name columns and call plain functions; no subqueries, no aggregates over other rows,
no functions that read files, settings or the environment.
"""

import json
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import duckdb

from .errors import BadSelection

FORBIDDEN_FUNCTIONS = frozenset({
    "getenv", "current_setting", "set_config", "getvariable", "query", "query_table", "read_text", "read_blob",
    "read_csv", "read_csv_auto", "read_json", "read_json_auto", "read_json_objects", "read_json_objects_auto",
    "read_ndjson", "read_ndjson_auto", "read_ndjson_objects", "read_parquet", "parquet_scan", "parquet_metadata",
    "parquet_schema", "parquet_file_metadata", "parquet_kv_metadata", "parquet_bloom_probe", "glob", "sniff_csv",
    "sql_auto_complete", "nextval", "setval", "setseed", "stats", "vector_type", "currval", "txid_current",
    "arrow_scan", "arrow_scan_dumb", "pandas_scan", "python_map_function", "write_log", "which_secret",
    "json_execute_serialized_sql", "from_substrait", "from_substrait_json", "get_substrait", "get_substrait_json",
    "pg_sleep", "sleep_ms", "current_user", "current_catalog", "error",
})  # fmt: skip
"""By name, whatever their kind. `sql.py` refuses them too."""


UNCOMPUTABLE = (duckdb.ProgrammingError, duckdb.DataError)
"""What DuckDB raises where an expression that was taken cannot be computed: a function that is not there, a row whose
value it cannot take."""


def why_uncomputable(error: duckdb.Error) -> str:
    """DuckDB's sentence, without the query that it points into."""
    return " ".join(str(error).partition("\n\nLINE")[0].split())


@dataclass(frozen=True)
class Expression:
    """A checked expression and the column names in it, as they are written there."""

    text: str
    columns: frozenset[str]

    def beyond(self, columns: frozenset[str]) -> list[str]:
        """The names in it that are none of these columns. Raises BadSelection for two that SQL takes for one."""
        names = sorted(name for name in self.columns if name.lower() not in columns)
        by_column = {name.lower(): name for name in names}
        for name in names:
            if (other := by_column[name.lower()]) != name:
                raise BadSelection(f"{self.text!r} names {name} and {other}, which are one column in SQL; rename one")
        return names


@lru_cache(maxsize=256)
def parse(text: str) -> Expression:
    """Check an expression. Raises BadSelection."""
    if not text.strip():
        raise BadSelection("expected an SQL expression, got an empty text")
    tree = serialize(f"select ({text}\n) as value")
    statements = tree.get("statements", [])
    if tree.get("error") or len(statements) != 1:
        said = tree.get("error_message", "more than one statement")
        raise BadSelection(f"expected one SQL expression, got {text!r}: {said}")
    node = statements[0]["node"]
    plain = node.get("type") == "SELECT_NODE" and (node.get("from_table") or {}).get("type") == "EMPTY"
    others = ("where_clause", "group_expressions", "having", "qualify", "sample", "modifiers")
    if not plain or len(node["select_list"]) != 1 or any(node.get(part) for part in others):
        raise BadSelection(f"expected one SQL expression, got {text!r}, which is more than an expression")
    if node["cte_map"]["map"]:
        raise BadSelection(f"expected one SQL expression, got {text!r}, which is a query")
    columns: set[str] = set()
    _check(node["select_list"][0], text, columns)
    in_parentheses(text)
    return Expression(text, frozenset(columns))


def in_parentheses(text: str) -> str:
    """A condition as a part of a larger query. By itself `a) or (b` is none, but in parentheses it would be two.

    Raises BadSelection.
    """
    tree = serialize(f"select {text}\n")
    if tree.get("error"):
        raise BadSelection(f"expected one SQL expression, got {text!r}: {tree.get('error_message')}")
    return f"({text}\n)"


def serialize(query: str) -> dict[str, Any]:
    """DuckDB's parse of a query; only SELECT statements can be read this way, others come back as an error."""
    with _parser().cursor() as con:
        found = con.execute("select json_serialize_sql(?::varchar)", [query]).fetchone()
    try:
        tree: dict[str, Any] = json.loads(found[0]) if found else {}
    except RecursionError:
        return {"error": True, "error_message": "nested too deeply"}
    return tree


@cache
def _parser() -> duckdb.DuckDBPyConnection:
    """A database of its own without tables; to make one takes 14 ms."""
    return duckdb.connect()


def _check(part: Any, text: str, columns: set[str]) -> None:
    if isinstance(part, list):
        for one in part:
            _check(one, text, columns)
    elif isinstance(part, dict):
        kind = part.get("class")
        if kind in ("SUBQUERY", "WINDOW", "STAR", "PARAMETER", "POSITIONAL_REFERENCE", "LAMBDA_REF"):
            raise BadSelection(f"{text!r} has a {str(kind).lower().replace('_', ' ')}; expected a value of one row")
        if kind == "COLUMN_REF":
            names = part["column_names"]
            if len(names) != 1:
                raise BadSelection(f"{text!r} names {'.'.join(names)}; write the column without a table")
            columns.add(names[0])
        if kind == "FUNCTION" and part["function_name"].lower() == "unnest":
            raise BadSelection(f"{text!r} has an unnest; expected a value of one row")
        if kind == "FUNCTION" and part["function_name"].lower() in FORBIDDEN_FUNCTIONS:
            raise BadSelection(f"{text!r} calls {part['function_name']}, which is not allowed here")
        for one in part.values():
            _check(one, text, columns)


def quote(name: str) -> str:
    """A name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"
