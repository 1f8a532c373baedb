"""TRL's dataset types, as JSONL for `datasets.load_dataset("json", ...)`; messages are conversational, as TRL says it.

    prompt-completion   {"prompt": [...], "completion": [...], "reward": r}   SFT, or offline with the reward
    preference          {"prompt", "chosen", "rejected", "score_chosen", "score_rejected"}   DPO; see `_preferences`
    unpaired            {"prompt", "completion", "label"}   KTO
    messages            {"messages": [...], "reward": r}

Tool calls have their arguments as objects, which chat templates expect. `tools` are the request's, `id` is the row's.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from rollbook.store import BadSelection, Book
from rollbook.store.selection import Rows, Selection

from .conversations import Conversation, Message, conversations

Kind = Literal["prompt-completion", "preference", "unpaired", "messages"]


def export(
    book: Book,
    out: Path,
    selection: Selection,
    *,
    kind: Kind = "prompt-completion",
    rows: Rows = "trajectories",
    label_at: float = 0.5,
) -> tuple[list[Path], int, list[str]]:
    """rows: per trajectory, or per call (`interactions`). label_at: reward from which a completion is a good one."""
    if kind not in get_args(Kind):
        raise BadSelection(f"no TRL type {kind!r}; there are {', '.join(get_args(Kind))}")
    if kind in ("preference", "unpaired"):
        selection = msgspec.structs.replace(selection, needs_reward=True)
    notes: list[str] = []
    if kind == "preference":
        lines = _preferences(book, selection, notes)
    else:
        lines = (_line(one, kind, label_at) for one in conversations(book, selection, rows, notes))
    n = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("wb") as file:
        for line in lines:
            file.write(msgspec.json.encode(line) + b"\n")
            n += 1
    return [out], n, notes


def _line(one: Conversation, kind: Kind, label_at: float) -> dict[str, Any]:
    reward = one.row["reward"]
    if kind == "messages":
        line: dict[str, Any] = {"messages": _messages(one.messages), "reward": reward}
    else:
        line = {"prompt": _messages(one.prompt), "completion": _messages(one.completion)}
        line |= {"reward": reward} if kind == "prompt-completion" else {"label": reward >= label_at}
    if one.tools:
        line["tools"] = one.tools
    return line | {"id": one.interaction.interaction_id}


def _group(one: Conversation) -> tuple[str, str]:
    """What tells groups apart: two runs may use the same ids."""
    return one.row["run_id"], one.row["group_id"] or f"task {one.row['task_id']}"


def _preferences(book: Book, selection: Selection, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Of each group the best with the worst, the second best with the second worst, as long as their rewards differ.

    An episode stands for its main trajectory; two episodes pair only if they were asked the same.
    """
    n_alone = 0
    main = (one for one in conversations(book, selection, "trajectories", notes) if _is_main(one))
    # The rows of a group come together.
    for _, found in groupby(main, key=_group):
        asked: dict[str, list[Conversation]] = {}
        for one in found:
            asked.setdefault(json.dumps([one.prompt, one.tools], sort_keys=True), []).append(one)
        for same in asked.values():
            ordered = sorted(same, key=lambda one: one.row["reward"], reverse=True)
            pairs = [
                (best, worst)
                for best, worst in zip(ordered, reversed(ordered), strict=True)
                if best.row["reward"] > worst.row["reward"]
            ]
            n_alone += len(same) - 2 * len(pairs)
            for best, worst in pairs:
                line = {
                    "prompt": _messages(best.prompt),
                    "chosen": _messages(best.completion),
                    "rejected": _messages(worst.completion),
                    "score_chosen": best.row["reward"],
                    "score_rejected": worst.row["reward"],
                }
                if best.tools:
                    line["tools"] = best.tools
                yield line | {"id": f"{best.interaction.interaction_id} {worst.interaction.interaction_id}"}
    if n_alone:
        notes.append(
            f"{n_alone} episodes are in no pair: nobody else of their group was asked the same and rewarded differently"
        )


def _is_main(one: Conversation) -> bool:
    return bool(one.episode.row["main_id"] == one.interaction.interaction_id)


def _messages(messages: Iterable[Message]) -> list[Message]:
    return [_with_objects(message) for message in messages]


def _with_objects(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    try:
        arguments = json.loads(function.get("arguments") or "")
    except (TypeError, ValueError):  # an object already, or text that the model got wrong, which stays as it is
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
