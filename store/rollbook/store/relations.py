"""A relation too big to keep, read from the log when somebody asks.

`tokens`: one row per token, where an interaction brought it (a prompt's shared beginning belongs to its parent).
"""

import re
from typing import Any

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

_BATCH = 4096
_NAMED = re.compile(r"\btokens\b", re.IGNORECASE)


def names_tokens(query: str) -> bool:
    """Whether a SELECT reads `tokens`. A name that the query itself defines is its own."""
    if not _NAMED.search(query):
        return False
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
    return "tokens" in read - own


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
