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
import threading
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .errors import BadEvent

SCHEMA_VERSION = 1
"""Of new events. A change of a fact's shape raises it and adds one upcast; see `upcasts.py` once there is one."""

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]

Integer = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
"""Any number that a fact has: as large as the tables' columns are."""

Edge = Literal["extends", "rerendered", "compacts", "retries"]
EpisodeState = Literal["done", "failed", "abandoned", "lost"]

END_OF_TIME = 253_402_300_800_000_000
"""The first microsecond of the year 10000: later times are none to Python, and break DuckDB's sums of them."""

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


_telling = threading.Lock()
_told_us = 0


def now_us() -> int:
    """Microseconds since the epoch, more each time: time is the order of facts, and a clock may be set back."""
    global _told_us
    with _telling:
        _told_us = max(time.time_ns() // 1000, _told_us + 1)
        return _told_us


def new_event_id() -> bytes:
    """A UUIDv7 (RFC 9562): 48 bits of Unix milliseconds, then random."""
    stamp = (now_us() // 1000).to_bytes(6, "big")
    random = bytearray(os.urandom(10))
    random[0] = 0x70 | (random[0] & 0x0F)
    random[2] = 0x80 | (random[2] & 0x3F)
    return stamp + bytes(random)


def new_event_ids(n: int) -> list[bytes]:
    """As many as `new_event_id` gives one by one, of one millisecond."""
    ids = np.empty((n, 16), np.uint8)
    ids[:, :6] = np.frombuffer((now_us() // 1000).to_bytes(6, "big"), np.uint8)
    ids[:, 6:] = np.frombuffer(os.urandom(10 * n), np.uint8).reshape(n, 10)
    ids[:, 6] = 0x70 | (ids[:, 6] & 0x0F)
    ids[:, 8] = 0x80 | (ids[:, 8] & 0x3F)
    found: list[bytes] = ids.view("V16").ravel().tolist()
    return found


def new_id(prefix: str) -> str:
    """An unguessable id that sorts by time, e.g. `ep_01985d0c...`."""
    return f"{prefix}_{new_event_id().hex()}"


def made_at(id_: str) -> float | None:
    """When `new_id` made it, in seconds since the epoch; None for an id that is not of that form."""
    stamp = id_[-32:]
    if len(id_) < 33 or id_[-33] != "_" or stamp[12] != "7":
        return None
    try:
        return (int(stamp, 16) >> 80) / 1000
    except ValueError:
        return None


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
    attempt: Integer = 1
    is_eval: bool = False
    version: Integer | None = None  # policy version when it began
    task: dict[str, Any] | None = None  # the dataset row, where it is small enough to keep
    key_sha256: str | None = None  # of the session key; never the key
    origin_interaction_id: str | None = None  # continued from this node of another episode


class InteractionRecorded(Fact, frozen=True, kw_only=True):
    """One model call was answered: a node of the episode's conversation tree."""

    parent_id: str | None = None
    edge: Edge | None = None  # None for a root
    cause: str | None = None  # why the edge is not `extends`, in words that group well
    shared: Integer = 0  # tokens of the prompt that are the first ones of the parent's path
    prompt_length: Integer  # tokens of the whole prompt
    prefix_hash: str | None = None  # hex, chain over the canonical request messages
    reply_hash: str | None = None  # hex, the same chain carried over the reply
    dialect: str = "chat"
    model: str = "default"
    role: str | None = None  # which of several agents asked, where the client says so
    sampling: dict[str, Any] = {}
    logprobs_mode: Literal["processed", "raw", "invented"] = "processed"  # invented: a script's, of no model
    finish_reason: str | None = None
    is_trainable: bool = True
    capture: Literal["complete", "incomplete"] = "complete"
    delivered: Integer | None = None  # output tokens that reached the client, where it left early
    request_sha256: str | None = None  # of the body as it came
    idempotency_key: str | None = None  # the client's name for the call: a retry by that name gets this answer
    origin_id: str | None = None  # answered from the record: the interaction of the forked episode that it repeats
    seconds: float | None = None  # from request to last token
    first_token_seconds: float | None = None


class InteractionFailed(Fact, frozen=True, kw_only=True):
    """A model call got no usable answer."""

    error: str
    message: str
    status: Integer
    dialect: str = "chat"
    parent_id: str | None = None


def failed_judgement(source: str, reason: str) -> InteractionFailed:
    """Of an episode that got no reward because whoever judges (source) failed."""
    return InteractionFailed(error="RewardFailed", message=f"{source}: {reason}", status=0, dialect="reward")


class RewardGiven(Fact, frozen=True, kw_only=True):
    """A judged value on an episode, an interaction (by the envelope's id) or a span of its output tokens."""

    value: float
    name: str = "reward"
    weight: float = 1.0
    source: str = "agent"  # who judged: agent, client, a function's id + version + hash
    start: Integer | None = None  # span of output tokens [start, end)
    end: Integer | None = None
    details: dict[str, Any] | None = None


class EpisodeClosed(Fact, frozen=True, kw_only=True):
    """An attempt ended. Its data stays whatever the state."""

    state: EpisodeState
    reason: str | None = None


class PolicyPublished(Fact, frozen=True, kw_only=True):
    """Weights got a version. Version 0 is the model that the run began with."""

    version: Integer
    path: str
    policy: str = "default"
    step: Integer = 0


class BatchRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a learner trains of one interaction."""

    interaction_id: str
    credit: float
    advantage: float
    weight: float = 1.0


class BatchTaken(Fact, frozen=True, kw_only=True):
    """A learner took a batch. With this event the batch can be built again, byte for byte."""

    batch_id: str
    step: Integer
    version: Integer  # of the learner's weights when it was taken
    rows: list[BatchRow]
    selection: dict[str, Any] = {}
    discarded: dict[str, Integer] = {}  # reason -> episodes left out


class BatchTrained(Fact, frozen=True, kw_only=True):
    """The step over that batch is in the weights that follow."""

    batch_id: str
    step: Integer
    metrics: dict[str, float | None] = {}  # None: not known; a NaN is recorded as that


class TokensScored(Fact, frozen=True, kw_only=True):
    """Logprobs (and entropies) of an interaction's output under other weights than those that sampled it."""

    version: Integer | None = None  # of the run, where the weights are one of its policies
    scorer: str = "learner"
    batch_id: str | None = None
    weights_sha256: str | None = None  # of the weights' files, where they were read from a folder


class InteractionsPruned(Fact, frozen=True, kw_only=True):
    """A person had the messages and tokens of these interactions of an episode removed for good: see `prune`."""

    interaction_ids: list[str]


class EventLost(Fact, frozen=True, kw_only=True):
    """An acknowledged event stood at this position and is lost, and a person chose to go on without it: see `losses`.

    Its run is not known either; the envelope says `lost`.
    """

    reason: str


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
        InteractionsPruned,
        EventLost,
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
    kept: Annotated[int, msgspec.Meta(ge=0)] | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Envelope, fact and columns. Build with keywords; every log takes it through `rows.admit`."""

    run_id: str
    fact: Fact
    episode_id: str | None = None
    interaction_id: str | None = None
    event_id: bytes = msgspec.field(default_factory=new_event_id)
    recorded_at: int = msgspec.field(default_factory=now_us)
    messages: bytes | None = None  # encoded `Messages`
    prompt_ids: Int32s | None = None
    output_ids: Int32s | None = None
    logprobs: Float32s | None = None
    versions: Int32s | None = None
    entropies: Float32s | None = None

    @property
    def kind(self) -> str:
        return type(self.fact).__name__


class Lengths(NamedTuple):
    """Of an event's list columns; None for one that is not there."""

    prompt_ids: int | None = None
    output_ids: int | None = None
    logprobs: int | None = None
    versions: int | None = None
    entropies: int | None = None


def check(
    fact: Fact, run_id: str, episode_id: str | None, interaction_id: str | None, recorded_at: int, lengths: Lengths
) -> None:
    """Refuse what would make the book lie. The one set of rules: `rows.admit` asks before an event is taken, `verify`
    of those that are there, both of the fact as it is read. Raises BadEvent, by name and lengths."""
    kind = type(fact).__name__
    if not run_id:
        raise BadEvent(f"{kind} needs a run_id; an empty one came")
    if episode_id == "" or interaction_id == "":
        raise BadEvent(f"{kind} has an empty episode_id or interaction_id; give its id, or None where it has none")
    if not 0 <= recorded_at < END_OF_TIME:
        raise BadEvent(f"recorded_at is microseconds since 1970, before the year 10000; got {recorded_at}")
    if isinstance(fact, InteractionRecorded):
        if interaction_id is None or episode_id is None:
            raise BadEvent("InteractionRecorded needs an episode_id and an interaction_id")
        n_prompt, n_output = lengths.prompt_ids or 0, lengths.output_ids or 0
        if (lengths.logprobs or 0) != n_output or (lengths.versions or 0) != n_output:
            name, n = ("logprobs", lengths.logprobs or 0)
            if n == n_output:
                name, n = ("versions", lengths.versions or 0)
            raise BadEvent(
                f"interaction {interaction_id}: {n_output} output_ids but {n} {name}; each output token needs its own"
            )
        if lengths.entropies is not None and lengths.entropies != n_output:
            raise BadEvent(
                f"interaction {interaction_id}: {n_output} output_ids but {lengths.entropies} entropies; "
                "give one for each, or none at all"
            )
        if fact.shared < 0 or fact.shared + n_prompt != fact.prompt_length:
            raise BadEvent(
                f"interaction {interaction_id}: prompt_length {fact.prompt_length} is not "
                f"shared {fact.shared} + prompt_ids {n_prompt}"
            )
        if fact.shared and fact.parent_id is None:
            raise BadEvent(f"interaction {interaction_id}: shares {fact.shared} tokens but names no parent")
    elif isinstance(fact, TokensScored):
        if lengths.logprobs is None or interaction_id is None:
            raise BadEvent("TokensScored needs an interaction_id and logprobs")
        if lengths.entropies is not None and lengths.entropies != lengths.logprobs:
            raise BadEvent(
                f"TokensScored of {interaction_id}: {lengths.logprobs} logprobs but {lengths.entropies} entropies"
            )
    elif isinstance(fact, RewardGiven):
        if episode_id is None:
            raise BadEvent("RewardGiven needs an episode_id")
        if not fact.name:
            raise BadEvent("RewardGiven needs a name; an empty one came")
        if fact.start is not None or fact.end is not None:
            if fact.start is None or fact.end is None or not 0 <= fact.start < fact.end:
                raise BadEvent(f"reward span must be 0 <= start < end, got [{fact.start}, {fact.end})")
            if interaction_id is None:
                raise BadEvent(f"the span [{fact.start}, {fact.end}) needs an interaction_id: whose tokens are judged")
    elif isinstance(fact, InteractionsPruned) and not fact.interaction_ids:
        raise BadEvent("InteractionsPruned needs interaction_ids; none came")
    elif (
        isinstance(fact, EpisodeOpened | EpisodeClosed | InteractionFailed | InteractionsPruned) and episode_id is None
    ):
        raise BadEvent(f"{kind} needs an episode_id")


def before_pruning(fact: InteractionRecorded, lengths: Lengths) -> tuple[Lengths, bool]:
    """The lengths that an interaction was recorded with, and whether `prune` has removed it since: versions stay."""
    n_output, n_prompt = lengths.versions or 0, fact.prompt_length - fact.shared
    if (lengths.output_ids is None and n_output > 0) or (lengths.prompt_ids is None and n_prompt > 0):
        return Lengths(n_prompt, n_output, n_output, n_output), True
    return lengths, False


_encoder = msgspec.json.Encoder()
_decoders = {name: msgspec.json.Decoder(kind) for name, kind in KINDS.items()}
_messages = msgspec.json.Decoder(Messages)
_UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)


def encode_messages(messages: Messages) -> bytes:
    """JSON for the `messages` column."""
    return _encoder.encode(messages)


def decode_messages(text: str | bytes) -> Messages:
    """Reverse of `encode_messages`. Raises BadEvent."""
    try:
        return _messages.decode(text)
    except _UNREADABLE as error:
        raise BadEvent(f"messages are no JSON with request and reply: {error}") from error


def encode_fact(fact: Fact) -> bytes:
    """JSON for the `payload` column."""
    return _encoder.encode(fact)


def decode_fact(kind: str, payload: str | bytes) -> Fact:
    """Reverse of `encode_fact`. Unknown fields are ignored: an older reader survives a newer writer's extras. Raises
    BadEvent."""
    decoder = _decoders.get(kind)
    if decoder is None:
        raise BadEvent(f"unknown kind {kind!r}; expected one of {', '.join(KINDS)}")
    try:
        return decoder.decode(payload)
    except _UNREADABLE as error:
        raise BadEvent(f"the payload of an event is no {kind}: {error}") from error


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
