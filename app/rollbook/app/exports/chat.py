"""OpenAI's chat format, as fine-tuning services take it: JSONL, {"messages": [...], "tools": [...]} a line.

An assistant message that the policy did not sample (an example in the prompt) has "weight": 0. Lines hold nothing
else, since services refuse unknown fields; with `all_fields` they also have reasoning, ids and rewards, and
`rollbook import` reads those back.
"""

from pathlib import Path
from typing import Any

import msgspec

from rollbook.store import Book
from rollbook.store.selection import Rows, Selection

from .conversations import Conversation, conversations, facts, plain


def export(
    book: Book, out: Path, selection: Selection, *, rows: Rows = "trajectories", all_fields: bool = False
) -> tuple[list[Path], int, list[str]]:
    """rows: a line per trajectory, or per call (`interactions`)."""
    notes: list[str] = []
    n = n_without = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("wb") as file:
        for conversation in conversations(book, selection, rows, notes):
            line, is_less = _line(conversation, all_fields)
            file.write(msgspec.json.encode(line) + b"\n")
            n += 1
            n_without += is_less
    if n_without:
        notes.append(
            f"{n_without} lines lost what the chat format has no field for, such as reasoning; --all-fields keeps it"
        )
    return [out], n, notes


def _line(conversation: Conversation, all_fields: bool) -> tuple[dict[str, Any], bool]:
    messages, is_less = [], False
    for message, is_sampled in zip(conversation.messages, conversation.sampled, strict=True):
        kept, has_more = (dict(message), False) if all_fields else plain(message)
        if kept.get("role") == "assistant" and not is_sampled:
            kept["weight"] = 0
        messages.append(kept)
        is_less = is_less or has_more
    line: dict[str, Any] = {"messages": messages}
    if conversation.tools:
        line["tools"] = conversation.tools
    return (line | facts(conversation) if all_fields else line), is_less
