"""Trajectories and calls as conversations: who said what, and which of the assistant's messages the policy sampled."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from rollbook.store import Book
from rollbook.store.episodes import Episode, Interaction
from rollbook.store.selection import Rows, Selection

Message = dict[str, Any]

IMPORTED = "import"
"""The dialect of an interaction that did not come by an API; see `imports/record.py`."""

_EPISODES_AT_ONCE = 64


@dataclass(frozen=True)
class Conversation:
    """A trajectory, or one call of it, as messages.

    row: of `Book.select`. n_prompt: messages before the first one that was sampled here. sampled: which messages were.
    """

    row: dict[str, Any]
    episode: Episode
    interaction: Interaction  # its last
    messages: list[Message]
    sampled: list[bool]
    n_prompt: int
    tools: list[dict[str, Any]]

    @property
    def prompt(self) -> list[Message]:
        return self.messages[: self.n_prompt]

    @property
    def completion(self) -> list[Message]:
        return self.messages[self.n_prompt :]


def conversations(book: Book, selection: Selection, rows: Rows, notes: list[str]) -> Iterator[Conversation]:
    """The rows of a selection, in its order: one per trajectory, or one per call with all before it as its prompt.

    What the book no longer has the messages of is left out; at the end a sentence in `notes` says how many.
    """
    wanted = msgspec.structs.replace(selection, rows=rows)
    if selection.is_trainable:  # what was imported without tokens is as good as any other text
        wanted = msgspec.structs.replace(wanted, is_trainable=None)
    table = book.select(wanted).to_pylist()
    key = "leaf_id" if rows == "trajectories" else "interaction_id"
    at = n_gone = 0
    while at < len(table):
        names: dict[str, None] = {}
        stop = at
        while stop < len(table) and (table[stop]["episode_id"] in names or len(names) < _EPISODES_AT_ONCE):
            names[table[stop]["episode_id"]] = None
            stop += 1
        episodes = dict(zip(names, book.episodes(list(names)), strict=True))
        nodes = {name: {one.interaction_id: one for one in episode.interactions} for name, episode in episodes.items()}
        for row in table[at:stop]:
            of_episode = nodes[row["episode_id"]]
            last = of_episode[row[key]]
            if selection.is_trainable and not _is_whole(last):
                continue
            if not last.has_messages:
                n_gone += 1
                continue
            above = _trajectory(last, of_episode) if rows == "trajectories" else [last]
            yield _conversation(row, episodes[row["episode_id"]], above)
        at = stop
    if n_gone:
        notes.append(
            f"{n_gone} rows are left out, since the book has not all of their messages: they were pruned, or never "
            "recorded, or stand on a call that is missing"
        )


def _is_whole(one: Interaction) -> bool:
    """Whether the policy said this, the whole of it, and somebody waited for it: what `is_trainable` means of rows."""
    row = one.row
    if row["dialect"] == IMPORTED:
        return True
    is_orphan = row["is_retried"] and row["is_leaf"]
    return bool(row["is_trainable"] and row["capture"] == "complete" and row["n_output"] and not is_orphan)


def _trajectory(leaf: Interaction, nodes: dict[str, Interaction]) -> list[Interaction]:
    """The calls of the trajectory that ends here, first one first."""
    path = [leaf]
    while path[-1].interaction_id != leaf.row["start_id"]:
        path.append(nodes[path[-1].row["up_id"]])
    return path[::-1]


def _conversation(row: dict[str, Any], episode: Episode, path: list[Interaction]) -> Conversation:
    last = path[-1]
    messages = [*last.messages, last.reply]
    sampled = [False] * len(messages)
    starts = [len(one.messages) for one in path]
    for one, at in zip(path, starts, strict=True):
        # What the model said, also where the client sent it back in another form: the tokens are those.
        messages[at] = one.reply
        sampled[at] = True
    return Conversation(row, episode, last, messages, sampled, starts[0], last.tools)


_FIELDS = {
    "assistant": ("role", "content", "refusal", "name", "tool_calls", "function_call"),
    "tool": ("role", "content", "tool_call_id"),
    "function": ("role", "content", "name"),
}
_FIELDS_OF_OTHERS = ("role", "content", "name")


def plain(message: Message) -> tuple[Message, bool]:
    """A message with the fields of OpenAI's chat format alone, and whether it had others that say something."""
    fields = _FIELDS.get(message.get("role", ""), _FIELDS_OF_OTHERS)
    kept = {name: message[name] for name in fields if message.get(name) is not None}
    kept.setdefault("content", None)
    return kept, any(value for name, value in message.items() if name not in fields)


def facts(conversation: Conversation) -> dict[str, Any]:
    """What a book knows of a row beyond its messages."""
    row = conversation.row
    names = ("run_id", "task_id", "group_id", "episode_id", "reward")
    return {**{name: row.get(name) for name in names}, "interaction_id": conversation.interaction.interaction_id}
