"""`rollbook tail`: a line for what happens in a book, as it happens."""

import json
import sys
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.text import Text

from rollbook.app.reading import visible
from rollbook.store import (
    BatchTaken,
    BatchTrained,
    Book,
    EpisodeClosed,
    EpisodeOpened,
    InteractionFailed,
    InteractionRecorded,
    PolicyPublished,
    RewardGiven,
    RunStarted,
    TokensScored,
)
from rollbook.store.events import decode_fact, decode_messages

COLUMNS = ("kind", "run_id", "episode_id", "interaction_id", "recorded_at", "payload", "messages", "output_ids")

_STYLES = {"RewardGiven": "yellow", "EpisodeClosed": "bold", "InteractionFailed": "red", "BatchTrained": "magenta"}


def last_events(
    book: Book, n: int, *, run: str | None, episode: str | None, kinds: Collection[str]
) -> list[dict[str, Any]]:
    """The newest events that `wanted` wants, oldest first."""
    rows = book.sql(
        "select writer, position from events where ($run is null or run_id = $run) and ($episode is null or "
        "starts_with(episode_id, $episode)) and kind in $kinds "
        "order by recorded_at desc, event_id desc limit $n",
        {"run": run, "episode": episode, "kinds": list(kinds), "n": max(n, 0)},
    )
    pointers = list(zip(rows["writer"].to_pylist(), rows["position"].to_pylist(), strict=True))
    return rows_of(book.log.gather(pointers).to_batches())[::-1] if pointers else []


async def news(book: Book, *, wants: Callable[[dict[str, Any]], bool]) -> AsyncGenerator[dict[str, Any], None]:
    """What comes after now, for ever."""
    async for batch in book.log.follow(book.views.position):
        for row in rows_of([batch]):
            if wants(row):
                yield row


def rows_of(batches: Iterable[pa.RecordBatch]) -> list[dict[str, Any]]:
    """Events as rows of COLUMNS, with `fact` in place of the payload and `n_output` in place of the tokens."""
    rows = []
    for batch in batches:
        for row in batch.select(COLUMNS[:-1]).to_pylist():
            row["fact"] = decode_fact(row["kind"], row.pop("payload"))
            rows.append(row)
        lengths = batch["output_ids"].value_lengths().to_pylist()
        for row, length in zip(rows[-batch.num_rows :] if batch.num_rows else [], lengths, strict=True):
            row["n_output"] = length or 0
    return rows


def print_row(row: dict[str, Any], out: Console, *, is_json: bool) -> None:
    """One line, not folded."""
    if is_json:
        import msgspec

        plain = {name: row[name] for name in ("recorded_at", "kind", "run_id", "episode_id", "interaction_id")}
        line = {**plain, "recorded_at": row["recorded_at"].isoformat(), "fact": msgspec.to_builtins(row["fact"])}
        sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
        sys.stdout.flush()
        return
    stamp: datetime = row["recorded_at"].astimezone(UTC)
    text = Text.assemble(
        (stamp.strftime("%H:%M:%S "), "dim"),
        (f"{_short(row['episode_id'] or row['run_id']):<14} ", "cyan"),
        (visible(_said(row)), _STYLES.get(row["kind"], "")),
    )
    out.print(text, soft_wrap=not out.is_terminal, no_wrap=True, overflow="ellipsis", highlight=False)


def _short(name: str) -> str:
    return name if len(name) <= 14 else f"{name[:3]}…{name[-10:]}"


def _said(row: dict[str, Any]) -> str:
    fact = row["fact"]
    match fact:
        case RunStarted():
            return f"run {fact.name} started"
        case EpisodeOpened():
            return f"opened: task {fact.task_id}" + (f", version {fact.version}" if fact.version is not None else "")
        case InteractionRecorded():
            about = f"{row['n_output']} tokens after {fact.prompt_length}"
            edge = "" if fact.edge in (None, "extends") else f" ({fact.edge}: {fact.cause})"
            return f"call: {about}{edge}: {_reply(row['messages'])}"
        case InteractionFailed():
            return f"call failed: {fact.error}: {fact.message}"
        case RewardGiven():
            return f"{fact.name} {fact.value:g} by {fact.source}"
        case EpisodeClosed():
            return f"closed: {fact.state}" + (f" ({fact.reason})" if fact.reason else "")
        case PolicyPublished():
            return f"version {fact.version} published"
        case BatchTaken():
            return f"step {fact.step}: batch of {len(fact.rows)} calls taken"
        case BatchTrained():
            known = [(name, value) for name, value in fact.metrics.items() if value is not None]
            numbers = ", ".join(f"{name} {value:.4g}" for name, value in known[:4])
            return f"step {fact.step} trained: {numbers}"
        case TokensScored():
            return f"scored by {fact.scorer} at version {fact.version}"
    return str(row["kind"])


def _reply(messages: str | None) -> str:
    if messages is None:
        return ""
    reply = decode_messages(messages).reply
    calls = [str((call.get("function") or {}).get("name")) for call in reply.get("tool_calls") or ()]
    return " ".join(f"{reply.get('content') or ''} {' '.join(calls)}".split())


def wanted(run: str | None, episode: str | None, kinds: Iterable[str]) -> Callable[[dict[str, Any]], bool]:
    """Whether a row is of this run, this episode (or the beginning of its id) and one of these kinds."""
    chosen = frozenset(kinds)

    def wants(row: dict[str, Any]) -> bool:
        return (
            (run is None or row["run_id"] == run)
            and (episode is None or (row["episode_id"] or "").startswith(episode))
            and (not chosen or row["kind"] in chosen)
        )

    return wants


KINDS = {
    "calls": ("InteractionRecorded", "InteractionFailed"),
    "rewards": ("RewardGiven",),
    "episodes": ("EpisodeOpened", "EpisodeClosed"),
    "training": ("RunStarted", "PolicyPublished", "BatchTaken", "BatchTrained"),
}
"""What `--only` takes; without it everything but scores is shown."""
