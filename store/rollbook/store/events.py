"""The facts a book is made of, and their one Arrow schema.

An event is an envelope (who, when, about what), a small fact (JSON in the `payload` column) and typed columns
for what is big: messages as JSON text, tokens as int32, logprobs as float32 at full precision. Facts are in the
past tense, written once and never edited. Lengths are checked here, before anything reaches a log.

An interaction stores only what its parent does not have. Its full prompt is

    path(parent)[:shared] + prompt_ids      where path(n) = full prompt of n + output_ids of n

so an `extends` edge has shared == len(path(parent)), and its messages are those of the parent, the parent's
reply, and then `messages.request`.
"""

import os
import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .errors import BadEvent

SCHEMA_VERSION = 1
"""Of new events. A change of a fact's shape raises it and adds one upcast; see `upcasts.py` once there is one."""

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]

Edge = Literal["extends", "rerendered", "compacts", "retries"]
EpisodeState = Literal["done", "failed", "abandoned", "lost"]

SCHEMA = pa.schema(
    [
        pa.field("position", pa.int64(), nullable=False),  # gap-free within its writer, from 0
        pa.field("event_id", pa.binary(16), nullable=False),  # UUIDv7, given where the event is born
        pa.field("writer", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("schema_version", pa.int16(), nullable=False),
        pa.field("run_id", pa.string(), nullable=False),
        pa.field("episode_id", pa.string()),
        pa.field("interaction_id", pa.string()),
        pa.field("recorded_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("payload", pa.string(), nullable=False),  # the fact as JSON
        pa.field("messages", pa.string()),  # JSON, see `Messages`
        pa.field("prompt_ids", pa.list_(pa.int32())),  # the prompt after `shared` tokens of the parent's path
        pa.field("output_ids", pa.list_(pa.int32())),
        pa.field("logprobs", pa.list_(pa.float32())),  # one per output token
        pa.field("versions", pa.list_(pa.int32())),  # policy version that sampled each output token
        pa.field("entropies", pa.list_(pa.float32())),  # one per output token, where somebody computed them
    ]
)


def new_event_id() -> bytes:
    """A UUIDv7 (RFC 9562): 48 bits of Unix milliseconds, then random."""
    stamp = (time.time_ns() // 1_000_000).to_bytes(6, "big")
    random = bytearray(os.urandom(10))
    random[0] = 0x70 | (random[0] & 0x0F)
    random[2] = 0x80 | (random[2] & 0x3F)
    return stamp + bytes(random)


def new_id(prefix: str) -> str:
    """An unguessable id that sorts by time, e.g. `ep_01985d0c...`."""
    return f"{prefix}_{new_event_id().hex()}"


class Fact(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The small part of an event. The kind of the event is the name of the class."""


class RunStarted(Fact, frozen=True, kw_only=True):
    """One experiment/trial began (or began again: the config of a restart is a new fact)."""

    name: str
    config: dict[str, Any] = {}


class EpisodeOpened(Fact, frozen=True, kw_only=True):
    """One attempt at a task by an agent began."""

    task_id: str
    group_id: str | None = None  # the episodes drawn together for one task
    attempt: int = 1
    is_eval: bool = False
    version: int | None = None  # policy version when it began
    task: dict[str, Any] | None = None  # the dataset row, where it is small enough to keep
    key_sha256: str | None = None  # of the session key; never the key
    origin_interaction_id: str | None = None  # continued from this node of another episode


class InteractionRecorded(Fact, frozen=True, kw_only=True):
    """One model call was answered: a node of the episode's conversation tree."""

    parent_id: str | None = None
    edge: Edge | None = None  # None for a root
    cause: str | None = None  # why the edge is not `extends`, in words that group well
    shared: int = 0  # tokens of the prompt that are the first ones of the parent's path
    prompt_length: int  # tokens of the whole prompt
    prefix_hash: str | None = None  # hex, chain over the canonical request messages
    reply_hash: str | None = None  # hex, the same chain carried over the reply
    dialect: str = "chat"
    model: str = "default"
    role: str | None = None  # which of several agents asked, where the client says so
    sampling: dict[str, Any] = {}
    logprobs_mode: Literal["processed", "raw"] = "processed"
    finish_reason: str | None = None
    is_trainable: bool = True
    capture: Literal["complete", "incomplete"] = "complete"
    delivered: int | None = None  # output tokens that reached the client, where it left early
    request_sha256: str | None = None  # of the body as it came
    idempotency_key: str | None = None  # the client's name for the call: a retry by that name gets this answer
    origin_id: str | None = None  # answered from the record: the interaction of the forked episode that it repeats
    seconds: float | None = None  # from request to last token
    first_token_seconds: float | None = None


class InteractionFailed(Fact, frozen=True, kw_only=True):
    """A model call got no usable answer."""

    error: str
    message: str
    status: int
    dialect: str = "chat"
    parent_id: str | None = None


class RewardGiven(Fact, frozen=True, kw_only=True):
    """A judged value on an episode, an interaction (by the envelope's id) or a span of its output tokens."""

    value: float
    name: str = "reward"
    weight: float = 1.0
    source: str = "agent"  # who judged: agent, client, a function's id + version + hash
    start: int | None = None  # span of output tokens [start, end)
    end: int | None = None
    details: dict[str, Any] | None = None


class EpisodeClosed(Fact, frozen=True, kw_only=True):
    """An attempt ended. Its data stays whatever the state."""

    state: EpisodeState
    reason: str | None = None


class PolicyPublished(Fact, frozen=True, kw_only=True):
    """Weights got a version. Version 0 is the model that the run began with."""

    version: int
    path: str
    policy: str = "default"
    step: int = 0


class BatchRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a learner trains of one interaction."""

    interaction_id: str
    credit: float
    advantage: float
    weight: float = 1.0


class BatchTaken(Fact, frozen=True, kw_only=True):
    """A learner took a batch. With this event the batch can be built again, byte for byte."""

    batch_id: str
    step: int
    version: int  # of the learner's weights when it was taken
    rows: list[BatchRow]
    selection: dict[str, Any] = {}
    discarded: dict[str, int] = {}  # reason -> episodes left out


class BatchTrained(Fact, frozen=True, kw_only=True):
    """The step over that batch is in the weights that follow."""

    batch_id: str
    step: int
    metrics: dict[str, float] = {}


class TokensScored(Fact, frozen=True, kw_only=True):
    """Logprobs (and entropies) of an interaction's output under other weights than those that sampled it."""

    version: int | None = None  # of the run, where the weights are one of its policies
    scorer: str = "learner"
    batch_id: str | None = None
    weights_sha256: str | None = None  # of the weights' files, where they were read from a folder


KINDS: dict[str, type[Fact]] = {
    fact.__name__: fact
    for fact in (
        RunStarted,
        EpisodeOpened,
        InteractionRecorded,
        InteractionFailed,
        RewardGiven,
        EpisodeClosed,
        PolicyPublished,
        BatchTaken,
        BatchTrained,
        TokensScored,
    )
}


class Messages(msgspec.Struct, frozen=True, omit_defaults=True):
    """The `messages` column: what was said, beyond what the parent already says.

    request: the messages after the parent's reply, as the client sent them (all of them for a root).
    reply: the assistant message we answered, in chat-completions form.
    tools: the tool list of the request; None where it is the parent's.
    resent: the parent's reply as the client sent it back, where that differs from what we answered.
    kept: leading messages of the parent (its request, then its reply) that this one begins with, where not all:
        0 after compaction or under another system prompt; all but the reply for a retry.
    """

    request: list[dict[str, Any]]
    reply: dict[str, Any]
    tools: list[dict[str, Any]] | None = None
    resent: dict[str, Any] | None = None
    kept: int | None = None


_NO_INTS: Int32s = np.empty(0, np.int32)


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Envelope, fact and columns. Build with keywords; `check` runs in every log before the event is taken."""

    run_id: str
    fact: Fact
    episode_id: str | None = None
    interaction_id: str | None = None
    event_id: bytes = msgspec.field(default_factory=new_event_id)
    recorded_at: int = msgspec.field(default_factory=lambda: time.time_ns() // 1000)  # us since the epoch
    messages: bytes | None = None  # encoded `Messages`
    prompt_ids: Int32s | None = None
    output_ids: Int32s | None = None
    logprobs: Float32s | None = None
    versions: Int32s | None = None
    entropies: Float32s | None = None

    @property
    def kind(self) -> str:
        return type(self.fact).__name__


def check(event: Event) -> None:
    """Refuse an event that would make the book lie. Raises BadEvent, by name and lengths."""
    if len(event.event_id) != 16:
        raise BadEvent(f"event_id must be 16 bytes, got {len(event.event_id)}; use new_event_id()")
    if event.kind not in KINDS:
        raise BadEvent(f"unknown kind {event.kind!r}; expected one of {', '.join(KINDS)}")
    if not event.run_id:
        raise BadEvent(f"{event.kind} needs a run_id; an empty one came")
    fact = event.fact
    if isinstance(fact, InteractionRecorded):
        if event.interaction_id is None or event.episode_id is None:
            raise BadEvent("InteractionRecorded needs an episode_id and an interaction_id")
        output = _NO_INTS if event.output_ids is None else event.output_ids
        prompt = _NO_INTS if event.prompt_ids is None else event.prompt_ids
        for name, column in (("logprobs", event.logprobs), ("versions", event.versions)):
            have = 0 if column is None else len(column)
            if have != len(output):
                raise BadEvent(
                    f"interaction {event.interaction_id}: {len(output)} output_ids but {have} {name}; "
                    "each output token needs its own"
                )
        if fact.shared < 0 or fact.shared + len(prompt) != fact.prompt_length:
            raise BadEvent(
                f"interaction {event.interaction_id}: prompt_length {fact.prompt_length} is not "
                f"shared {fact.shared} + prompt_ids {len(prompt)}"
            )
        if fact.shared and fact.parent_id is None:
            raise BadEvent(f"interaction {event.interaction_id}: shares {fact.shared} tokens but names no parent")
    elif isinstance(fact, TokensScored):
        if event.logprobs is None or event.interaction_id is None:
            raise BadEvent("TokensScored needs an interaction_id and logprobs")
        if event.entropies is not None and len(event.entropies) != len(event.logprobs):
            raise BadEvent(
                f"TokensScored of {event.interaction_id}: {len(event.logprobs)} logprobs "
                f"but {len(event.entropies)} entropies"
            )
    elif isinstance(fact, RewardGiven):
        if event.episode_id is None:
            raise BadEvent("RewardGiven needs an episode_id")
        if not np.isfinite(fact.value):
            raise BadEvent(f"reward {fact.name!r} must be a finite number, got {fact.value}")
        if (fact.start is None) != (fact.end is None) or (
            fact.start is not None and fact.end is not None and not 0 <= fact.start < fact.end
        ):
            raise BadEvent(f"reward span must be 0 <= start < end, got [{fact.start}, {fact.end})")
    elif isinstance(fact, EpisodeOpened | EpisodeClosed) and event.episode_id is None:
        raise BadEvent(f"{event.kind} needs an episode_id")


_encoder = msgspec.json.Encoder()
_decoders = {name: msgspec.json.Decoder(kind) for name, kind in KINDS.items()}


def encode_messages(messages: Messages) -> bytes:
    """JSON for the `messages` column."""
    return _encoder.encode(messages)


def decode_messages(text: str | bytes) -> Messages:
    """Reverse of `encode_messages`."""
    return msgspec.json.decode(text, type=Messages)


def encode_fact(fact: Fact) -> bytes:
    """JSON for the `payload` column."""
    return _encoder.encode(fact)


def decode_fact(kind: str, payload: str | bytes) -> Fact:
    """Reverse of `encode_fact`. Unknown fields are ignored: an older reader survives a newer writer's extras."""
    decoder = _decoders.get(kind)
    if decoder is None:
        raise BadEvent(f"unknown kind {kind!r}; expected one of {', '.join(KINDS)}")
    return decoder.decode(payload)


def _row(column: pa.ListArray, i: int) -> Any:
    return column[i].values.to_numpy() if column[i].is_valid else None


def from_batch(batch: pa.RecordBatch) -> list[Event]:
    """Reverse of `rows.to_batch`; array columns are views of the batch's memory."""
    get: Mapping[str, Any] = {name: batch.column(name) for name in batch.schema.names}
    plain = {
        name: get[name].to_pylist()
        for name in ("event_id", "kind", "run_id", "episode_id", "interaction_id", "payload", "messages")
    }
    stamps = get["recorded_at"].view(pa.int64()).to_numpy()
    return [
        Event(
            run_id=plain["run_id"][i],
            fact=decode_fact(plain["kind"][i], plain["payload"][i]),
            episode_id=plain["episode_id"][i],
            interaction_id=plain["interaction_id"][i],
            event_id=plain["event_id"][i],
            recorded_at=int(stamps[i]),
            messages=None if plain["messages"][i] is None else plain["messages"][i].encode(),
            prompt_ids=_row(get["prompt_ids"], i),
            output_ids=_row(get["output_ids"], i),
            logprobs=_row(get["logprobs"], i),
            versions=_row(get["versions"], i),
            entropies=_row(get["entropies"], i),
        )
        for i in range(batch.num_rows)
    ]
