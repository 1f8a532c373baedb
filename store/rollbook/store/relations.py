"""Relations too big to keep: read from the log when somebody asks.

`tokens`: one row per token, where an interaction brought it (a prompt's shared beginning belongs to its parent).
`tool_calls`: one row per tool call that a model made, with what came back.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from .expressions import serialize
from .log import Log

TOKENS = {
    "interaction_id": "the interaction that brought it",
    "place": "its place in that interaction's prompt + output",
    "token_id": "the token",
    "is_sampled": "sampled by the policy, not part of the prompt",
    "logprob": "behaviour logprob; NULL for prompt tokens",
    "version": "policy version that sampled it; NULL for prompt tokens",
    "entropy": "entropy where it was sampled, if somebody computed it",
}

TOOL_CALLS = {
    "run_id": "the run",
    "episode_id": "the episode",
    "interaction_id": "the model call that asked for the tool",
    "call": "its place among the calls of that answer",
    "tool": "the tool's name",
    "is_json": "its arguments are a JSON object",
    "is_error": "what came back reports an error; NULL while nothing has come back",
}

_BATCH = 4096
_NAMED = re.compile(r"\b(tokens|tool_calls)\b", re.IGNORECASE)


def named_relations(query: str) -> set[str]:
    """Which of `tokens` and `tool_calls` a SELECT reads. A name that the query itself defines is its own."""
    if not _NAMED.search(query):
        return set()
    read: set[str] = set()
    own: set[str] = set()
    parts: list[Any] = [serialize(query)]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            if part.get("type") == "BASE_TABLE" and not part.get("schema_name"):
                read.add(str(part["table_name"]).lower())
            ctes = part.get("cte_map")
            if isinstance(ctes, dict):
                own.update(str(entry["key"]).lower() for entry in ctes.get("map", []))
            parts += part.values()
    return (read - own) & {"tokens", "tool_calls"}


def read_tokens(log: Log, table: pa.Table) -> pa.Table:
    """Tokens of the given rows of `interactions` (interaction_id, n_shared, writer, position)."""
    parts: list[pa.Table] = []
    for start in range(0, table.num_rows, _BATCH):
        rows = table.slice(start, _BATCH)
        stored = log.gather(list(zip(rows["writer"].to_pylist(), rows["position"].to_pylist(), strict=True)))
        parts.append(_tokens(rows, stored))
    return pa.concat_tables(parts) if parts else _tokens(table, pa.table({}))


def _tokens(rows: pa.Table, stored: pa.Table) -> pa.Table:
    columns: dict[str, list[Any]] = {name: [] for name in TOKENS}
    names = rows["interaction_id"].to_pylist()
    for i, (name, shared) in enumerate(zip(names, rows["n_shared"].to_pylist(), strict=True)):
        prompt, output, logprobs, versions, entropies = (
            _values(stored[column][i]) for column in ("prompt_ids", "output_ids", "logprobs", "versions", "entropies")
        )
        n_prompt, n = len(prompt), len(prompt) + len(output)
        is_sampled = np.arange(n) >= n_prompt
        columns["interaction_id"].append(pa.repeat(pa.scalar(name, pa.string()), n))
        columns["place"].append(pa.array(np.arange(shared, shared + n, dtype=np.int32)))
        columns["token_id"].append(pa.array(np.concatenate([prompt, output]).astype(np.int32)))
        columns["is_sampled"].append(pa.array(is_sampled))
        columns["logprob"].append(_behind(n_prompt, logprobs, len(output), pa.float32()))
        columns["version"].append(_behind(n_prompt, versions, len(output), pa.int32()))
        columns["entropy"].append(_behind(n_prompt, entropies, len(output), pa.float32()))
    kinds = (pa.string(), pa.int32(), pa.int32(), pa.bool_(), pa.float32(), pa.int32(), pa.float32())
    return pa.table({c: pa.chunked_array(columns[c], kind) for c, kind in zip(columns, kinds, strict=True)})


def _values(scalar: Any) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = scalar.values.to_numpy() if scalar.is_valid else np.empty(0, np.int32)
    return values


def _behind(n_missing: int, values: np.ndarray[Any, Any], n: int, kind: pa.DataType) -> pa.Array:
    """Values after so many NULLs; all NULL where there are none."""
    known = pa.array(values, kind) if len(values) == n else pa.nulls(n, kind)
    return pa.concat_arrays([pa.nulls(n_missing, kind), known])


class _Call(msgspec.Struct):
    run_id: str
    episode_id: str
    interaction_id: str
    call: int
    tool: str
    is_json: bool
    is_error: bool | None = None


def read_tool_calls(log: Log) -> pa.Table:
    """Every tool call in the log, in the order of recording within each writer."""
    calls: list[_Call] = []
    waiting: dict[tuple[str, str], list[_Call]] = {}  # (episode, call id) -> calls without a result
    for batch in log.read():
        has_tools = pa.compute.match_substring(batch.column("messages"), '"tool').fill_null(False)
        for row in batch.select(["run_id", "episode_id", "interaction_id", "messages"]).filter(has_tools).to_pylist():
            said = msgspec.json.decode(row["messages"])
            episode = row["episode_id"] or ""
            for message in said.get("request", ()):
                if message.get("role") == "tool":
                    found = waiting.get((episode, str(message.get("tool_call_id"))))
                    if found:
                        found.pop(0).is_error = is_tool_error(message)
            for n, asked in enumerate(said.get("reply", {}).get("tool_calls") or ()):
                function = asked.get("function") or {}
                call = _Call(
                    row["run_id"], episode, row["interaction_id"], n, str(function.get("name")), _is_json(function)
                )
                calls.append(call)
                waiting.setdefault((episode, str(asked.get("id"))), []).append(call)
    kinds = (pa.string(), pa.string(), pa.string(), pa.int32(), pa.string(), pa.bool_(), pa.bool_())
    return pa.table(
        {name: pa.array([getattr(c, name) for c in calls], kind) for name, kind in zip(TOOL_CALLS, kinds, strict=True)}
    )


def _is_json(function: dict[str, Any]) -> bool:
    arguments = function.get("arguments", "")
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
    try:
        said = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text.lower().startswith(("error", "traceback", "exception"))
    return isinstance(said, dict) and bool(said.get("error") or said.get("is_error") or said.get("isError"))


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield part["text"]
