"""Tool calls and what came back: rows of `tool_calls` and `tool_results`, read from messages as they are projected.

A result answers the latest call of its id before it, within the episode; of several (branches send it again) the first
counts. That is decided by time, so it does not depend on the order of projecting.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pyarrow as pa
from xxhash import xxh3_64_intdigest

MARK = '"tool'
"""In all messages that have a call or a result, and in few others."""

_CALLS = {"row": pa.int64(), "key": pa.int64(), "call": pa.int32(), "tool": pa.string(), "is_json": pa.bool_()}
_RESULTS = {"row": pa.int64(), "key": pa.int64(), "place": pa.int32(), "is_error": pa.bool_()}


def read_tools(said: Iterable[tuple[int, str | None, Any]]) -> tuple[pa.Table, pa.Table]:
    """The calls and the results in (row, episode_id, JSON of messages): columns of the tables, and `row`."""
    calls: list[tuple[Any, ...]] = []
    results: list[tuple[Any, ...]] = []
    for row, episode, messages in said:
        spoken = _object(messages)
        for place, message in enumerate(_list(spoken.get("request"))):
            if isinstance(message, dict) and message.get("role") == "tool":
                key = _key(episode, message.get("tool_call_id"))
                results.append((row, key, place, is_tool_error(message)))
        reply = spoken.get("reply")
        for call, asked in enumerate(_list(reply.get("tool_calls")) if isinstance(reply, dict) else ()):
            if isinstance(asked, dict):
                function = asked.get("function")
                named = function if isinstance(function, dict) else {}
                key = _key(episode, asked.get("id"))
                calls.append((row, key, call, str(named.get("name")), _is_json(named.get("arguments", ""))))
    return _table(calls, _CALLS), _table(results, _RESULTS)


ANSWERS = """
    with told as (
        select *, last_value(case when is_call then {'interaction_id': interaction_id, 'call': place} end ignore nulls)
          over (partition by key order by told_at, interaction_id, is_call, place rows unbounded preceding) as asked
        from (
            select key, interaction_id, call as place, true as is_call, false as is_error, called_at as told_at
            from _asked
            union all
            select key, interaction_id, place, false, is_error, answered_at from tool_results
            where key in (select key from _asked)
        )
    )
    select asked.interaction_id as interaction_id, asked.call as call,
      arg_min(is_error, {'at': told_at, 'id': interaction_id, 'place': place}) as is_error
    from told where not is_call and asked is not null group by all
"""
"""SQL for what came back for the calls in `_asked`, which has all calls of its keys."""


def _key(episode: str | None, call_id: Any) -> int:
    """A number for the id of a call within its episode. Two in a million million are alike by accident."""
    digest = xxh3_64_intdigest(f"{episode}\0{call_id}".encode("utf-8", "surrogatepass"))
    return digest - (1 << 63)


def _table(rows: list[tuple[Any, ...]], schema: dict[str, pa.DataType]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    return pa.table(
        {name: pa.array(values, kind) for (name, kind), values in zip(schema.items(), columns, strict=True)}
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _object(text: Any) -> dict[str, Any]:
    """A JSON object; empty for what is none."""
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_json(arguments: Any) -> bool:
    if isinstance(arguments, dict):
        return True
    try:
        return isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.DecodeError, TypeError):
        return False


def is_tool_error(message: dict[str, Any]) -> bool:
    """Whether a tool's answer reports an error: by flag, as a JSON object with an error, or as text that says so."""
    if message.get("is_error"):
        return True
    text = " ".join(_texts(message.get("content"))).strip()
    if text.startswith("{"):
        said = _object(text)
        if said:
            return bool(said.get("error") or said.get("is_error") or said.get("isError"))
    return text[:9].lower().startswith(("error", "traceback", "exception"))


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield part["text"]
