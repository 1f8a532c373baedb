"""Tokens as verl and AReaL hold them in memory, in files that `torch.load(..., weights_only=True)` reads.

verl (0.9, `verl.protocol.DataProto`): a file is {"tensors", "non_tensors", "meta_info"}, the arguments of
`DataProto.from_dict`. B rows, each a trajectory; prompts (P tokens) are padded on the left, responses (R) on the right:

    prompts [B, P], responses [B, R], input_ids, attention_mask and position_ids [B, P + R]   int64
    response_mask int64 [B, R]        1 where the policy sampled, 0 for what tools and users said, and for padding
    rollout_log_probs float32 [B, R]  0 where response_mask is
    rm_scores float32 [B, R]          the episode's reward at the last token of the response
    non_tensors: uid (the group), data_source, num_turns, episode_id, row_id, version_min, version_max

AReaL (1.0, what `InteractionWithTokenLogpReward.to_tensor_dict` gives, and `concat_padded_tensors` takes): a file is a
list of rows of their own length, T tokens, each with a batch dimension of 1:

    input_ids, loss_mask, versions int64 [1, T]; logprobs float32 [1, T]; attention_mask bool [1, T]
    rewards float32 [1]

`rows.jsonl` beside the files says which episode, task and group each row is, in order.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from rollbook.store import Book
from rollbook.store.connection import need
from rollbook.store.selection import Credit, Rows, Selection
from rollbook.store.stream import Form, Tokens

_ROWS_PER_FILE = 1024


def export_verl(book: Book, out: Path, selection: Selection, *, pad_id: int = 0) -> tuple[list[Path], int, list[str]]:
    """pad_id: the token that stands where nothing does."""
    table = book.select(msgspec.structs.replace(selection, rows="trajectories"))
    return _write(book, out, table, "leaf_id", lambda rows, tokens: _data_proto(rows, tokens, pad_id))


def export_areal(
    book: Book, out: Path, selection: Selection, *, rows: Rows = "interactions"
) -> tuple[list[Path], int, list[str]]:
    """rows: AReaL's `individual` (interactions, the reward is their credit) or its `concat` (trajectories)."""
    if rows == "interactions" and selection.credit is None:
        selection = msgspec.structs.replace(selection, credit=Credit())
    table = book.select(msgspec.structs.replace(selection, rows=rows))
    name, reward = ("leaf_id", "reward") if rows == "trajectories" else ("interaction_id", "credit")
    found = table.filter(table[reward].is_valid())
    written = _write(book, out, found, name, lambda rows, tokens: _areal_rows(rows, tokens, reward))
    if found.num_rows < table.num_rows:
        written[2].append(
            f"{table.num_rows - found.num_rows} rows have no {reward} and are left out; AReaL would read 0"
        )
    return written


def _write(
    book: Book, out: Path, table: pa.Table, name: str, form: Callable[[list[dict[str, Any]], Tokens], Any]
) -> tuple[list[Path], int, list[str]]:
    torch = need("torch", "exporting tensors")
    out.mkdir(parents=True, exist_ok=True)
    files = [out / "rows.jsonl"]
    with files[0].open("wb") as index:
        for n, (rows, tokens) in enumerate(_parts(book, table, name)):
            for row in rows:
                index.write(msgspec.json.encode({"row_id": row[name]} | {k: row.get(k) for k in _INDEX}) + b"\n")
            files.append(out / f"part-{n:05d}.pt")
            torch.save(form(rows, tokens), files[-1])
    return files, table.num_rows, []


_INDEX = ("run_id", "task_id", "group_id", "episode_id", "reward", "credit", "version_min", "version_max")


def _parts(book: Book, table: pa.Table, name: str) -> Iterator[tuple[list[dict[str, Any]], Tokens]]:
    form: Form = "trajectory" if name == "leaf_id" else "individual"
    for at in range(0, table.num_rows, _ROWS_PER_FILE):
        rows = table.slice(at, _ROWS_PER_FILE).to_pylist()
        yield rows, book.load([row[name] for row in rows], form=form)


def _areal_rows(rows: list[dict[str, Any]], tokens: Tokens, reward: str) -> list[dict[str, Any]]:
    import torch

    samples = []
    for r, row in enumerate(rows):
        at = tokens.row(r)
        samples.append(
            {
                "input_ids": torch.from_numpy(tokens.input_ids[at]).long()[None],
                "loss_mask": torch.from_numpy(tokens.loss_mask[at]).long()[None],
                "logprobs": torch.from_numpy(tokens.logprobs[at].copy())[None],
                "versions": torch.from_numpy(tokens.versions[at]).long()[None],
                "attention_mask": torch.ones((1, at.stop - at.start), dtype=torch.bool),
                "rewards": torch.tensor([row[reward]], dtype=torch.float32),
            }
        )
    return samples


def _data_proto(rows: list[dict[str, Any]], tokens: Tokens, pad_id: int) -> dict[str, Any]:
    import torch

    # The prompt of a trajectory is what stands before its first sampled token.
    n_prompt = np.array([int(np.argmax(tokens.loss_mask[tokens.row(r)])) for r in range(len(rows))])
    n_response = np.diff(tokens.cu_seqlens) - n_prompt
    longest_prompt, longest_response = int(n_prompt.max()), int(n_response.max())
    shape = (len(rows), longest_prompt + longest_response)
    ids, attention = np.full(shape, pad_id, np.int64), np.zeros(shape, np.int64)
    mask, logprobs = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    scores = np.zeros(shape, np.float32)
    for r, row in enumerate(rows):
        where, at = slice(longest_prompt - n_prompt[r], longest_prompt + n_response[r]), tokens.row(r)
        ids[r, where], attention[r, where] = tokens.input_ids[at], 1
        mask[r, where], logprobs[r, where] = tokens.loss_mask[at], tokens.logprobs[at]
        scores[r, where.stop - 1] = row["reward"]
    positions = np.maximum(np.cumsum(attention, axis=1) - 1, 0) * attention
    response = slice(longest_prompt, None)
    arrays = {
        "prompts": ids[:, :longest_prompt],
        "responses": ids[:, response],
        "response_mask": mask[:, response],
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": positions,
        "rollout_log_probs": logprobs[:, response],
        "rm_scores": scores[:, response],
    }
    return {
        "tensors": {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()},
        "non_tensors": {
            "uid": [f"{row['run_id']} {row['group_id'] or row['episode_id']}" for row in rows],
            "data_source": [row["task_id"] for row in rows],
            "__num_turns__": [row["n_interactions"] for row in rows],
            "episode_id": [row["episode_id"] for row in rows],
            "row_id": [row["leaf_id"] for row in rows],
            "version_min": [row["version_min"] for row in rows],
            "version_max": [row["version_max"] for row in rows],
        },
        "meta_info": {"source": "rollbook"},
    }
