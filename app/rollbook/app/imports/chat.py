"""OpenAI's chat JSONL: {"messages": [...], "tools": [...]} a line, and what `rollbook export --all-fields` adds to it.

Each assistant message without "weight": 0 is a model call. Lines of one "episode_id" are one episode, if they follow
each other. There are no tokens in it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .record import Attempt, Call, Imported, Message, WrongSource, digest, json_lines


def read(path: Path, outcome: Imported) -> Iterator[Attempt]:
    attempt: Attempt | None = None
    n_of: dict[str, int] = {}  # lines that say the same, of one file, are as many episodes
    for place, row in json_lines(path, outcome):
        messages = row.get("messages")
        if not isinstance(messages, list) or not all(
            isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
        ):
            raise WrongSource(f'{place}: expected "messages", a list of objects with a role')
        tools, reward = row.get("tools") or [], row.get("reward")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise WrongSource(f'{place}: expected "tools", a list of objects')
        if reward is not None and not isinstance(reward, int | float):
            raise WrongSource(f'{place}: expected "reward", a number, got {reward!r}')
        calls = _calls(messages, tools)
        if not calls:
            outcome.notes["lines have no assistant message that was sampled: nothing to record"] += 1
            continue
        episode_id = row.get("episode_id")
        calls[-1].interaction_id = row.get("interaction_id")
        if attempt is not None and episode_id is not None and attempt.episode_id == episode_id:
            known = {digest(call.messages, call.reply) for call in attempt.calls}
            attempt.calls += [call for call in calls if digest(call.messages, call.reply) not in known]
            continue
        if attempt is not None:
            yield attempt
        same = digest(row)
        file = place.rpartition(" line ")[0]
        n_of[file + same] = n_of.get(file + same, 0) + 1
        attempt = Attempt(
            key=f"{same} {n_of[file + same]}",
            task_id=row.get("task_id") or f"task_{digest(calls[0].messages)[:16]}",
            group_id=row.get("group_id"),
            calls=calls,
            episode_id=episode_id,
            rewards=[] if reward is None else [("reward", float(reward), 1.0)],
        )
    if attempt is not None:
        yield attempt


def _calls(messages: list[Message], tools: list[dict[str, Any]]) -> list[Call]:
    plain = [{name: value for name, value in message.items() if name != "weight"} for message in messages]
    return [
        Call(messages=plain[:n], reply=plain[n], tools=tools)
        for n, message in enumerate(messages)
        if message["role"] == "assistant" and message.get("weight", 1) != 0
    ]
