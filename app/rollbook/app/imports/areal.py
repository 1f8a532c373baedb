"""AReaL's rollouts: tensor dumps, exports of its proxy, and the JSONL of `rollout.dump_to_file`.

    .pt      what `torch.save` made of a row, a padded batch or a list of them (`exports/tensors.py` has the layout)
    .json    an answer of /export_trajectories, its tensors as lists or as base64
    .jsonl   task_id, sample_idx, head_version, tail_version, reward, prompt, completion: text alone

A row of tensors is an episode; each run of loss_mask 1 in it is a model call that goes on from the one before.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import numpy.typing as npt

from rollbook.store.connection import need

from .record import Attempt, Call, Imported, Message, WrongSource, digest, json_lines

Arrays = dict[str, npt.NDArray[Any]]

_NEEDED = ("input_ids", "loss_mask")
NO_GROUP = "episodes are grouped by equal prompts: the source does not say which were drawn together"


def read(path: Path, outcome: Imported) -> Iterator[Attempt]:
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    n_of: dict[str, int] = {}
    for file in files:
        try:
            if file.suffix in (".pt", ".json"):
                for row in _rows(file):
                    yield _attempt(row, n_of, outcome)
            elif file.suffix == ".jsonl" and file.name != "rows.jsonl":  # that one is our own export's list of its rows
                yield from _texts(file, outcome)
        except (LookupError, TypeError, ValueError, AttributeError, EOFError, RuntimeError, UnpicklingError) as error:
            if isinstance(error, WrongSource):
                raise
            why = str(error).partition("\n")[0]
            raise WrongSource(f"{file}: not as AReaL writes it ({type(error).__name__}: {why})") from error


def _rows(file: Path) -> Iterator[Arrays]:
    """Arrays [T] of each row, and rewards [1]."""
    if file.suffix == ".pt":
        found = need("torch", "reading tensor dumps").load(file, map_location="cpu", weights_only=True)
    else:
        found = json.loads(file.read_text(encoding="utf-8"))
        found = found.get("interactions", found) if isinstance(found, dict) else found
    batches = _batches(found)
    if not batches:
        raise WrongSource(f"{file}: expected rows with {' and '.join(_NEEDED)}, found none")
    for batch in batches:
        arrays = {name: _array(value) for name, value in batch.items() if _is_array(value)}
        ids = np.atleast_2d(arrays["input_ids"])
        there = np.atleast_2d(arrays.get("attention_mask", np.ones(ids.shape))).astype(bool)
        for b in range(len(ids)):
            row = {
                name: np.atleast_2d(array)[b][there[b]]
                for name, array in arrays.items()
                if np.atleast_2d(array).shape == ids.shape
            }
            if "rewards" in arrays:
                row["rewards"] = np.asarray(arrays["rewards"]).reshape(len(ids), -1)[b]
            yield row


def _batches(found: Any) -> list[dict[str, Any]]:
    if isinstance(found, list):
        return [batch for one in found for batch in _batches(one)]
    if isinstance(found, dict):
        if all(name in found for name in _NEEDED):
            return [found]
        return [batch for one in found.values() if isinstance(one, dict | list) for batch in _batches(one)]
    return []


def _is_array(value: Any) -> bool:
    return (
        hasattr(value, "numpy")
        or isinstance(value, list)
        or (isinstance(value, dict) and value.get("type") == "tensor")
    )


def _array(value: Any) -> npt.NDArray[Any]:
    if hasattr(value, "numpy"):
        array: npt.NDArray[Any] = value.numpy()
        return array
    if isinstance(value, dict):
        kind = np.dtype(value["dtype"].removeprefix("torch."))
        return np.frombuffer(base64.b64decode(value["data"]), kind).reshape(value["shape"])
    return np.asarray(value)


def _attempt(row: Arrays, n_of: dict[str, int], outcome: Imported) -> Attempt:
    ids, mask = row["input_ids"].astype(np.int32), row["loss_mask"].astype(bool)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    calls = []
    for n, (start, stop) in enumerate(edges.reshape(-1, 2).tolist()):
        part = slice(start, stop)
        versions = row["versions"][part].astype(np.int32) if "versions" in row else None
        calls.append(
            Call(
                messages=[],
                reply={"role": "assistant", "content": None},
                prompt_ids=ids[:start],
                output_ids=ids[part],
                logprobs=row["logprobs"][part].astype(np.float32) if "logprobs" in row else None,
                versions=versions,
                above=n - 1 if n else None,
            )
        )
    if len(edges) and edges[-1] < len(ids):
        outcome.notes["rows end in tokens that were not sampled: those are left out"] += 1
    reward = row.get("rewards")
    if calls and reward is not None and np.isfinite(reward[-1]):
        calls[-1].reward = float(reward[-1])
    same = digest([(name, array.tolist()) for name, array in sorted(row.items())])
    n_of[same] = n_of.get(same, 0) + 1
    task = f"task_{digest(ids[: edges[0]].tolist() if len(edges) else ids.tolist())[:16]}"
    outcome.notes[NO_GROUP] += 1
    return Attempt(key=f"{same} {n_of[same]}", task_id=task, group_id=task, calls=calls)


def _texts(file: Path, outcome: Imported) -> Iterator[Attempt]:
    for place, row in json_lines(file, outcome):
        missing = [name for name in ("task_id", "prompt", "completion", "reward") if name not in row]
        if missing:
            raise WrongSource(f"{place}: expected {missing[0]!r}, as AReaL's dump_to_file writes it")
        messages = chatml(row["prompt"])
        end = "<|im_end|>"
        content = row["completion"].removesuffix("\n").removesuffix(end)
        task = f"areal-{row['task_id']}"
        yield Attempt(
            key=digest(row),
            task_id=task,
            group_id=task,
            task={name: row[name] for name in ("head_version", "tail_version", "sample_idx") if name in row},
            version=row.get("head_version"),
            calls=[
                Call(messages=messages, reply={"role": "assistant", "content": content}, reward=float(row["reward"]))
            ],
        )


def chatml(text: str) -> list[Message]:
    """The messages that a ChatML prompt was rendered from; one user message with the whole text, if it is none."""
    start, end = "<|im_start|>", "<|im_end|>\n"
    parts = text.split(start)
    messages: list[Message] = []
    for part in parts[1:]:
        role, newline, content = part.partition("\n")
        if not newline or " " in role:
            break
        if content.endswith(end):
            messages.append({"role": role, "content": content.removesuffix(end)})
        elif part is not parts[-1] or (role, content) != ("assistant", ""):
            break
    rendered = "".join(f"{start}{m['role']}\n{m['content']}{end}" for m in messages)
    if messages and text in (rendered, f"{rendered}{start}assistant\n"):
        return messages
    return [{"role": "user", "content": text}]
