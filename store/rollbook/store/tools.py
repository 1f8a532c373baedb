"""Tool calls and what came back: rows of `tool_calls` and `tool_results`, read from messages as they are projected.

A result answers the latest call of its id before it, within the episode; of several (branches send it again) the first
counts. That is decided by time, so it does not depend on the order of projecting.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from xxhash import xxh3_64_intdigest

MARK = '"tool'
"""In all messages that have a call or a result, and in few others."""

_CALLS = {"row": pa.int64(), "key": pa.int64(), "call": pa.int32(), "tool": pa.string(), "is_json": pa.bool_()}
_RESULTS = {"row": pa.int64(), "key": pa.int64(), "place": pa.int32(), "is_error": pa.bool_()}


class _Message(msgspec.Struct, frozen=True, gc=False):
    """What of a message concerns tools; the rest is skipped where it stands."""

    role: Any = None
    tool_call_id: Any = None
    content: Any = None
    is_error: Any = None
    tool_calls: Any = None


class _Said(msgspec.Struct, frozen=True, gc=False):
    request: list[_Message] = []
    reply: _Message = _Message()


_said = msgspec.json.Decoder(_Said)


def read_tools(rows: Iterable[tuple[str | None, Any]]) -> tuple[pa.Table, pa.Table]:
    """The calls and the results in each (episode_id, JSON of messages): columns of the tables, and `row`, the number of
    the pair. Messages that are none have neither."""
    calls: tuple[list[Any], ...] = ([], [], [], [], [])
    results: tuple[list[Any], ...] = ([], [], [], [])
    for row, (episode, messages) in enumerate(rows):
        try:
            said = _said.decode(messages)
        except msgspec.DecodeError:
            continue
        for place, message in enumerate(said.request):
            if message.role == "tool":
                results[0].append(row)
                results[1].append(f"{episode}\0{message.tool_call_id}")
                results[2].append(place)
                results[3].append(is_tool_error(message.content, message.is_error))
        asked = said.reply.tool_calls
        if not isinstance(asked, list):
            continue
        for call, one in enumerate(asked):
            if isinstance(one, dict):
                function = one.get("function")
                named = function if isinstance(function, dict) else {}
                calls[0].append(row)
                calls[1].append(f"{episode}\0{one.get('id')}")
                calls[2].append(call)
                calls[3].append(str(named.get("name")))
                calls[4].append(_is_json(named.get("arguments", "")))
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


def _table(columns: tuple[list[Any], ...], schema: dict[str, pa.DataType]) -> pa.Table:
    """key: a number for the id of a call within its episode. Two in a million million are alike by accident."""
    rows, names, *others = columns
    digests = np.fromiter((xxh3_64_intdigest(name.encode()) for name in names), np.uint64, len(names))
    keys = (digests ^ np.uint64(1 << 63)).view(np.int64)
    return pa.table(
        {
            name: pa.array(values, kind)
            for values, (name, kind) in zip((rows, keys, *others), schema.items(), strict=True)
        }
    )


def _is_json(arguments: Any) -> bool:
    if isinstance(arguments, dict):
        return True
    try:
        return isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.DecodeError, TypeError):
        return False


def is_tool_error(content: Any, is_error: Any = None) -> bool:
    """Whether a tool's answer reports an error: by flag, as a JSON object with an error, or as text that says so."""
    if is_error:
        return True
    text = (content if isinstance(content, str) else " ".join(_texts(content))).strip()
    if text.startswith("{"):
        try:
            said = msgspec.json.decode(text)
        except msgspec.DecodeError:
            pass
        else:
            if said:
                return bool(said.get("error") or said.get("is_error") or said.get("isError"))
    return text[:9].lower().startswith(("error", "traceback", "exception"))


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, list):
        for part in content:
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield part["text"]
