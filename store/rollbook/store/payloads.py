"""The fields of a fact as columns: SQL by which DuckDB reads the JSON of the `payload` column, a whole chunk at once.

The fields, their types and their defaults are those of the classes in `events.py`; nothing is said twice. What a
payload has beyond them is ignored, as `events.decode_fact` does.
"""

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from .events import KINDS

_PLAIN = {str: "VARCHAR", int: "INTEGER", float: "DOUBLE", bool: "BOOLEAN"}


def _bare(kind: Any) -> Any:
    """The type without `| None` and without its limits."""
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (one for one in get_args(kind) if one is not types.NoneType)
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _structure(kind: Any) -> Any:
    """A type as DuckDB's `from_json` wants it; an object of any keys stays JSON."""
    kind = _bare(kind)
    origin = get_origin(kind)
    if origin is Literal:
        return "VARCHAR"
    if origin is list:
        return [_structure(get_args(kind)[0])]
    if origin is dict:
        return "JSON"
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return {field.encode_name: _structure(field.type) for field in msgspec.structs.fields(kind)}
    return _PLAIN[kind]


def _column(field: Any) -> str:
    value = f'f."{field.encode_name}"'
    if _structure(field.type) == "JSON":
        value = f"{value}::varchar"
    default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
    if default is None or default is msgspec.NODEFAULT:
        return f'{value} as "{field.name}"'
    text = default if isinstance(default, str) else msgspec.json.encode(default).decode()
    quoted = text if isinstance(default, bool | int | float) else f"'{text}'"
    return f'coalesce({value}, {quoted}) as "{field.name}"'


def facts_query(kind: str, rows: str) -> str:
    """SQL for the relation `rows` with the fields of that kind in the place of `payload`."""
    fields = msgspec.structs.fields(KINDS[kind])
    structure = msgspec.json.encode({field.encode_name: _structure(field.type) for field in fields}).decode()
    return f"""(
        select r.* exclude (payload, f), {", ".join(_column(field) for field in fields)}
        from (select *, from_json(payload, '{structure}') as f from {rows}) r
    )"""
