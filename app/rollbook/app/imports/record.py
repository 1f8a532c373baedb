"""Attempts read from elsewhere, as events: parents found by what was said, tokens stored once, ids made of content."""

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rollbook.app.exports.conversations import IMPORTED
from rollbook.store import (
    BadEvent,
    Book,
    EpisodeClosed,
    EpisodeOpened,
    Event,
    Fact,
    InteractionRecorded,
    Messages,
    RewardGiven,
    RunStarted,
)
from rollbook.store.events import EpisodeState, Float32s, Int32s, encode_messages
from rollbook.store.tree import Match, TreeIndex, classify, shared_prefix

Message = dict[str, Any]

_ATTEMPTS_AT_ONCE = 64

NO_TOKENS = "interactions have no token ids: not trainable; --tokenizer MODEL makes some, for supervised training"
NO_LOGPROBS = "interactions have tokens but no logprobs: not trainable by policy gradients, fit for supervised training"
NO_VERSION = "interactions do not say which policy version sampled them: it is recorded as -1"
NO_MESSAGES = "interactions have tokens but no messages: `show --tokenizer MODEL` spells them"

_HALF = re.compile("[\ud800-\udfff]")  # UTF-8 has none
HALVES = "lines have half a character, from a text that was cut in UTF-16: U+FFFD stands for it"


@dataclass
class Imported:
    """What an import did. `notes`: what could not be carried over -> how many of it."""

    format: str
    n_episodes: int = 0
    n_interactions: int = 0
    n_there: int = 0  # episodes that the book had already
    notes: Counter[str] = field(default_factory=Counter)


@dataclass
class Call:
    """One model call. messages: the whole request; ids: the whole prompt. None is what the source does not say."""

    messages: list[Message]
    reply: Message
    tools: list[dict[str, Any]] = field(default_factory=list)
    prompt_ids: Int32s | None = None
    output_ids: Int32s | None = None
    logprobs: Float32s | None = None
    versions: Int32s | None = None
    interaction_id: str | None = None
    above: int | None = None  # the call it goes on from, where messages do not say it
    role: str | None = None
    finish_reason: str | None = None
    reward: float | None = None
    at: int | None = None  # us since the epoch


@dataclass
class Attempt:
    """One episode. key: what makes it itself within its run; rewards: (name, value, weight) on the episode."""

    key: str
    task_id: str
    calls: list[Call]
    episode_id: str | None = None
    group_id: str | None = None
    task: dict[str, Any] | None = None
    is_eval: bool = False
    version: int | None = None
    rewards: list[tuple[str, float, float]] = field(default_factory=list)
    state: EpisodeState = "done"
    reason: str | None = None


class WrongSource(BadEvent):
    """A source that is not what it should be; the message names the place."""


def digest(*parts: Any) -> str:
    """32 hex digits of what these say."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def event_id(*parts: Any) -> bytes:
    """A UUIDv8 (RFC 9562) of what these say."""
    raw = bytearray.fromhex(digest(*parts))
    raw[6] = 0x80 | (raw[6] & 0x0F)
    raw[8] = 0x80 | (raw[8] & 0x3F)
    return bytes(raw)


def json_lines(path: Path, outcome: Imported) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) of each line of a file, or of every .jsonl file below a folder. Raises WrongSource."""
    for file in sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]:
        with file.open("rb") as lines:
            for n, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                    if b"\\ud" in line.lower():
                        said = json.dumps(row, ensure_ascii=False)
                        row = json.loads(_HALF.sub("\N{REPLACEMENT CHARACTER}", said))
                        outcome.notes[HALVES] += _HALF.search(said) is not None
                except ValueError as error:
                    raise WrongSource(f"{file} line {n}: expected a JSON object: {error}") from error
                if not isinstance(row, dict):
                    raise WrongSource(f"{file} line {n}: expected a JSON object, got a {type(row).__name__}")
                yield f"{file} line {n}", row


class Spelling:
    """Text as tokens, by a model's own template: for sources that have none."""

    def __init__(self, folder: str) -> None:
        from rollbook.proxy.tokenizer import Tokenizer  # of the extra `serve`; no other import needs it

        self._tokenizer = Tokenizer.load(folder)
        self._eos = np.array(self._tokenizer.eos_ids, np.int32)

    def spell(self, call: Call, before: "tuple[str, Int32s] | None") -> tuple[str, Int32s] | None:
        """Give a call the tokens of its text. before: text and tokens up to the end of the call it goes on from.

        Returns text and tokens up to its own end; None where the template does not put the reply after its prompt.
        """
        prompt = self._tokenizer.render(call.messages, call.tools, add_generation_prompt=True)
        whole = self._tokenizer.render([*call.messages, call.reply], call.tools)
        if not whole.startswith(prompt):
            return None
        output = self._tokenizer.encode(whole[len(prompt) :])
        ends = np.flatnonzero(np.isin(output, self._eos))
        if len(ends):  # what the template writes after the end of a turn was not sampled
            output = output[: ends[-1] + 1]
        if before is not None and prompt.startswith(before[0]):
            call.prompt_ids = np.concatenate([before[1], self._tokenizer.encode(prompt[len(before[0]) :])])
        else:
            call.prompt_ids = self._tokenizer.encode(prompt)
        call.output_ids = output
        return prompt + self._tokenizer.decode(output), np.concatenate([call.prompt_ids, output])


def record(
    book: Book, attempts: Iterable[Attempt], outcome: Imported, *, run_id: str, spelling: Spelling | None = None
) -> None:
    """Append attempts that the book does not have, each whole or not at all."""
    started = Event(run_id=run_id, event_id=event_id("run", run_id), fact=RunStarted(name=run_id))
    waiting: list[Attempt] = []
    for attempt in attempts:
        waiting.append(attempt)
        if len(waiting) == _ATTEMPTS_AT_ONCE:
            _append(book, waiting, outcome, started, spelling)
            waiting = []
    _append(book, waiting, outcome, started, spelling)


def _append(book: Book, attempts: list[Attempt], outcome: Imported, started: Event, spelling: Spelling | None) -> None:
    names = [
        attempt.episode_id or f"ep_{digest(started.run_id, attempt.key, spelling is not None)}" for attempt in attempts
    ]
    wanted = pa.table({"id": pa.array(names, pa.string())})
    query = "select episode_id from episodes where episode_id in (select id from _wanted)"
    there = set(book.sql(query, _wanted=wanted)["episode_id"].to_pylist())
    events: list[Event] = []
    for name, attempt in zip(names, attempts, strict=True):
        if name in there:
            outcome.n_there += 1
            continue
        there.add(name)
        events += _events(name, attempt, outcome, started.run_id, spelling)
        outcome.n_episodes += 1
    if events:
        is_known = book.sql("select 1 from runs where run_id = ?", [started.run_id]).num_rows
        book.log.append_blocking(*([] if is_known else [started]), *events)
        book.catch_up()


def _events(name: str, attempt: Attempt, outcome: Imported, run_id: str, spelling: Spelling | None) -> list[Event]:
    now = time.time_ns() // 1000
    began = min((call.at for call in attempt.calls if call.at), default=now)
    made: list[Event] = []

    def add(fact: Fact, what: str, at: int | None = None, **columns: Any) -> None:
        stamp = max(made[-1].recorded_at + 1 if made else began, at or 0)
        made.append(
            Event(
                run_id=run_id, episode_id=name, fact=fact, event_id=event_id(name, what), recorded_at=stamp, **columns
            )
        )

    opened = EpisodeOpened(
        task_id=attempt.task_id,
        group_id=attempt.group_id,
        is_eval=attempt.is_eval,
        version=attempt.version,
        task=attempt.task,
    )
    add(opened, "opened")
    index = TreeIndex()
    ids: list[str] = []
    paths: dict[str, Int32s] = {}
    texts: dict[str, tuple[str, Int32s]] = {}
    for n, call in enumerate(attempt.calls):
        own = call.interaction_id or f"call_{digest(name)[:24]}_{n}"
        ids.append(own)
        above = None if call.above is None else ids[call.above]
        match = index.resolve(call.messages, call.tools)
        parent = above or match.parent_id
        if call.output_ids is None and spelling is not None:
            spelled = spelling.spell(call, texts.get(parent or ""))
            if spelled is not None:
                texts[own] = spelled
        path = paths.get(parent or "", _NONE)
        reply_hash = index.add(own, match, call.reply)
        fact = _recorded(call, match, parent, path, reply_hash, is_told=above is not None)
        add(fact, f"call {n}", at=call.at, interaction_id=own, **_columns(call, match, fact))
        _note(call, outcome)
        outcome.n_interactions += 1
        paths[own] = np.concatenate([_ids(call.prompt_ids), _ids(call.output_ids)])
        if call.reward is not None:
            add(RewardGiven(value=call.reward, source="import"), f"reward {n}", interaction_id=own)
    for reward, value, weight in attempt.rewards:
        add(RewardGiven(value=value, name=reward, weight=weight, source="import"), f"reward {reward}")
    add(EpisodeClosed(state=attempt.state, reason=attempt.reason), "closed")
    return made


_NONE: Int32s = np.empty(0, np.int32)


def _ids(ids: Int32s | None) -> Int32s:
    return _NONE if ids is None else ids


def _recorded(
    call: Call, match: Match, parent: str | None, path: Int32s, reply_hash: str, *, is_told: bool
) -> InteractionRecorded:
    """path: the parent's tokens. is_told: the source says what the parent is, and messages do not."""
    prompt = _ids(call.prompt_ids)
    if is_told:
        shared = shared_prefix(path, prompt)
        edge, cause = ("extends", None) if shared == len(path) else ("rerendered", "rendered anew")
    else:
        placed = classify(match, path, prompt)
        edge, cause, shared = placed.edge, placed.cause, placed.shared  # type: ignore[assignment]
    return InteractionRecorded(
        parent_id=parent,
        edge=edge,  # type: ignore[arg-type]
        cause=cause,
        shared=shared,
        prompt_length=len(prompt),
        prefix_hash=match.prefix_hash,
        reply_hash=reply_hash,
        dialect=IMPORTED,
        role=call.role,
        finish_reason=call.finish_reason,
        is_trainable=call.logprobs is not None,
        capture="incomplete" if call.logprobs is None else "complete",
    )


def _columns(call: Call, match: Match, fact: InteractionRecorded) -> dict[str, Any]:
    output = _ids(call.output_ids)
    unknown = np.full(len(output), np.nan, np.float32)
    said = Messages(
        request=list(call.messages[match.n_matched :]),
        reply=call.reply,
        tools=call.tools if fact.parent_id is None or match.kept == 0 else None,
        resent=match.resent,
        kept=match.kept,
    )
    return {
        "messages": encode_messages(said),
        "prompt_ids": _ids(call.prompt_ids)[fact.shared :],
        "output_ids": output,
        "logprobs": unknown if call.logprobs is None else call.logprobs,
        "versions": np.full(len(output), -1, np.int32) if call.versions is None else call.versions,
    }


def _note(call: Call, outcome: Imported) -> None:
    if call.output_ids is None:
        outcome.notes[NO_TOKENS] += 1
        return
    if call.logprobs is None:
        outcome.notes[NO_LOGPROBS] += 1
    elif call.versions is None:
        outcome.notes[NO_VERSION] += 1
    if not call.messages and not call.reply.get("content"):
        outcome.notes[NO_MESSAGES] += 1
