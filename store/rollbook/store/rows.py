"""Events as bytes: one Arrow IPC message, laid out by hand.

An event becomes a `Row` in the thread that has it, while the disk is busy with others; a commit only puts rows side
by side. With pyarrow's builders that took a third of a commit, and little of it could be done ahead. What comes out is
a record batch of SCHEMA that any Arrow reads.

    0xFFFFFFFF | length | flatbuffer: Message(RecordBatch(rows, nodes, buffers)) | buffers, each padded to 8 bytes

The layout is that of Arrow's format/Message.fbs, metadata version 5.
"""

import struct
from collections.abc import Sequence
from itertools import chain, repeat
from types import NoneType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from .errors import BadEvent
from .events import (
    KINDS,
    SCHEMA,
    SCHEMA_VERSION,
    Event,
    Lengths,
    RewardGiven,
    check,
    decode_fact,
    decode_messages,
    encode_fact,
    new_event_ids,
)

Row = tuple[bytes, ...]
"""`_FIXED`, the event id, and one piece for each of `_COLUMNS`: copies, so what the caller does with its arrays
afterwards changes nothing."""

_TEXTS = ("kind", "run_id", "episode_id", "interaction_id", "payload", "messages")
_LISTS = ("prompt_ids", "output_ids", "logprobs", "versions", "entropies")
_COLUMNS = _TEXTS + _LISTS
_PRUNED = {"messages", *_LISTS} - {"versions"}
_FIXED = struct.Struct("<qi11i")  # recorded_at; one bit for each column that is null; values in each column
_KINDS = {fact: name.encode() for name, fact in KINDS.items()}
_TYPES: dict[str, tuple[type, ...]] = {
    "event_id": (bytes,),
    "run_id": (str,),
    "episode_id": (str, NoneType),
    "interaction_id": (str, NoneType),
    "recorded_at": (int,),
    "messages": (bytes, NoneType),
}
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


def admit(event: Event) -> Row:
    """The row of an event that may enter a log. Fact and messages are read back as every reader will, so that what was
    taken can be read. Raises BadEvent."""
    row = encode(event)
    try:
        fact = decode_fact(event.kind, row[6])
    except BadEvent as error:
        raise _unreadable(event, error) from error
    if event.messages is not None:
        decode_messages(event.messages)
    columns = (event.prompt_ids, event.output_ids, event.logprobs, event.versions, event.entropies)
    lengths = Lengths(*[None if column is None else len(column) for column in columns])
    check(fact, event.run_id, event.episode_id, event.interaction_id, event.recorded_at, lengths)
    return row


_REWARDS = pa.schema(
    [
        pa.field("run_id", pa.string(), nullable=False),
        pa.field("episode_id", pa.string(), nullable=False),
        pa.field("value", pa.float64(), nullable=False),
    ]
)


def admit_rewards(given: pa.Table, fact: RewardGiven) -> list[Row]:
    """The rows of new events that give each of these episodes `fact` with a value of its own.

    They are what `admit` makes of such events one by one, and what it refuses is refused here. But all that they have
    in common is read back once, and the rest is looked at by column: a tenth of the cost. given: `_REWARDS`, and
    perhaps more. Raises BadEvent.
    """
    try:
        given = given.select(_REWARDS.names)
        if given.schema.types != _REWARDS.types:
            raise ValueError(f"they have the types {', '.join(map(str, given.schema.types))}")
        given = given.cast(_REWARDS)  # refuses nulls
        given.validate(full=True)  # also that text is UTF-8
    except (pa.ArrowException, ValueError, KeyError) as error:
        raise BadEvent(f"rewards need a run_id, an episode_id and a value each, as columns: {error}") from error
    if not (n := given.num_rows):
        return []
    runs, episodes, values = (column.combine_chunks() for column in given.columns)
    if not pc.all(pc.is_finite(values)).as_py():
        raise BadEvent("value of RewardGiven must be a finite number; NaN or an infinity came")
    # Of ids the rules ask whether they are empty, so the shortest stand for all.
    run, episode = (ids[int(np.argmin(pc.binary_length(ids)))].as_py() for ids in (runs, episodes))
    first = admit(Event(run_id=run, episode_id=episode, fact=msgspec.structs.replace(fact, value=0.0)))
    fixed, _, kind, _, _, interaction, payload, *rest = first
    before, zero, after = payload.partition(b"0.0")  # `value` is the first field
    texts = msgspec.json.encode(values.to_pylist())[1:-1].split(b",")
    numbers = np.tile(np.frombuffer(fixed, np.int32), (n, 1))
    numbers[:, 4], numbers[:, 5] = pc.binary_length(runs), pc.binary_length(episodes)
    numbers[:, 7] += np.fromiter(map(len, texts), np.int32, n) - len(zero)
    return list(
        zip(
            numbers.view(f"V{_FIXED.size}").ravel().tolist(),
            new_event_ids(n),
            repeat(kind, n),
            runs.cast(pa.binary()).to_pylist(),
            episodes.cast(pa.binary()).to_pylist(),
            repeat(interaction, n),
            [before + text + after for text in texts],
            *(repeat(one, n) for one in rest),
            strict=True,
        )
    )


def encode(event: Event) -> Row:
    """Raises BadEvent for what cannot be stored: a fact that is no JSON, text that is no UTF-8, tokens that are no
    int32. Leaves what it says to `admit`."""
    try:
        return _encode(event)
    except (TypeError, ValueError, KeyError, OverflowError, RecursionError, AttributeError, struct.error) as error:
        raise _unstorable(event, error) from error


def _unreadable(event: Event, error: BadEvent) -> BadEvent:
    """JSON has no NaN and no infinity: such a number became null, which says little to who sent it."""
    for name in event.fact.__struct_fields__:
        value = getattr(event.fact, name)
        if isinstance(value, float) and not np.isfinite(value):
            return BadEvent(f"{name} of {event.kind} must be a finite number, got {value}")
    return BadEvent(f"{error} (NaN and infinities are null)") if "`null`" in str(error) else error


def _unstorable(event: Event, error: Exception) -> BadEvent:
    if isinstance(error, BadEvent):
        return error
    if not isinstance(event, Event):
        return BadEvent(f"expected an Event, got {type(event).__name__}")
    if type(event.fact) not in _KINDS:
        return BadEvent(f"unknown kind {event.kind!r}; expected one of {', '.join(KINDS)}")
    for name, kinds in _TYPES.items():
        if not isinstance(value := getattr(event, name), kinds):
            wanted = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
            return BadEvent(f"{name} of an event must be {wanted}, got {type(value).__name__}")
    return BadEvent(f"{event.kind} cannot be stored: {error}")


def _encode(event: Event) -> Row:
    """One straight line, since every event of every task comes through here: 3 us."""
    nulls = 0
    if (text := event.episode_id) is not None:
        episode = str.encode(text)
    else:
        episode, nulls = b"", nulls | 4
    if (text := event.interaction_id) is not None:
        interaction = str.encode(text)
    else:
        interaction, nulls = b"", nulls | 8
    if (messages := event.messages) is None:
        messages, nulls = b"", nulls | 32
    elif type(messages) is not bytes:
        raise TypeError
    elif not messages.isascii():
        messages.decode()
    if type(event_id := event.event_id) is not bytes or len(event_id) != 16:
        raise BadEvent(f"event_id must be 16 bytes, got {event_id!r}; use new_event_id()")
    if (prompt := _numbers("prompt_ids", event.prompt_ids, _INT32)) is None:
        prompt, nulls = b"", nulls | 64
    if (output := _numbers("output_ids", event.output_ids, _INT32)) is None:
        output, nulls = b"", nulls | 128
    if (logprobs := _numbers("logprobs", event.logprobs, _FLOAT32)) is None:
        logprobs, nulls = b"", nulls | 256
    if (versions := _numbers("versions", event.versions, _INT32)) is None:
        versions, nulls = b"", nulls | 512
    if (entropies := _numbers("entropies", event.entropies, _FLOAT32)) is None:
        entropies, nulls = b"", nulls | 1024
    kind, run, payload = _KINDS[type(event.fact)], str.encode(event.run_id), encode_fact(event.fact)
    fixed = _FIXED.pack(
        event.recorded_at,
        nulls,
        len(kind),
        len(run),
        len(episode),
        len(interaction),
        len(payload),
        len(messages),
        len(prompt) >> 2,
        len(output) >> 2,
        len(logprobs) >> 2,
        len(versions) >> 2,
        len(entropies) >> 2,
    )
    return (
        *(fixed, event_id, kind, run, episode, interaction, payload, messages),
        *(prompt, output, logprobs, versions, entropies),
    )


def _numbers(name: str, values: "npt.NDArray[Any] | None", dtype: "np.dtype[Any]") -> bytes | None:
    if values is None:
        return None
    if type(values) is not np.ndarray or values.dtype is not dtype or values.ndim != 1:
        values = _narrowed(name, np.asarray(values), dtype)
    return values.tobytes()


def _narrowed(name: str, values: "npt.NDArray[Any]", dtype: "np.dtype[Any]") -> "npt.NDArray[Any]":
    if values.ndim != 1:
        raise BadEvent(f"{name} must have one dimension, got {values.ndim}")
    with np.errstate(over="ignore"):  # of logprobs: what float32 does not hold is infinite
        narrow = values.astype(dtype) if not len(values) or np.can_cast(values.dtype, dtype, "same_kind") else None
    if narrow is None or (dtype == _INT32 and not np.array_equal(narrow, values)):
        raise BadEvent(f"{name} must be {dtype} numbers, got {values.dtype} that do not fit")
    return narrow


def size_bytes(rows: Sequence[Row]) -> int:
    """What the rows add to a message, about."""
    return sum(map(len, chain.from_iterable(rows))) + 48 * len(rows)


# ---- the message ---------------------------------------------------------------------------------------------------

_N_NODES = len(SCHEMA) + len(_LISTS)
_N_BUFFERS = 4 * 2 + 7 * 3 + len(_LISTS) * 4
_HEAD = struct.Struct(
    "<Ii"  # continuation, bytes of metadata
    "I 6H 5H 2x"  # offset of the root table; two vtables: Message, RecordBatch
    "iqIhBx"  # Message: vtable, bodyLength, header, version, header_type
    "4x iqII"  # RecordBatch: vtable, length, nodes, buffers
    f"4x I {2 * _N_NODES}q"  # nodes: length and nulls of each
    f"4x I {2 * _N_BUFFERS}q"  # buffers: offset and length of each
)
_PADDED_HEAD = _HEAD.size + -_HEAD.size % 64
_NODES_AT = 8 + 76
_BUFFERS_AT = _NODES_AT + 4 + 16 * _N_NODES + 4
_TABLES = (
    *(28, 12, 20, 16, 18, 12, 4, 10, 20, 4, 12, 16),  # the root is at 28; the vtables at 4 and 16
    *(28 - 4,),
)
_JOINED_BYTES = 512  # shorter values are copied into one piece: cheaper than so many pieces
_ZEROS = [bytes(n) for n in range(64)]


def message(rows: Sequence[Row], writer: str, first_position: int) -> list[bytes]:
    """Rows as one encapsulated IPC message of a multiple of 64 bytes, in pieces; positions count up from
    `first_position`."""
    n = len(rows)
    fixed, ids, *columns = zip(*rows, strict=True)
    numbers = np.frombuffer(b"".join(fixed), np.int32).reshape(n, 14)
    ends = np.zeros((11, n + 1), np.int32)
    np.cumsum(numbers[:, 3:].T, axis=1, out=ends[:, 1:])
    totals = ends[:, n].tolist()
    is_null = np.bitwise_or.reduce(numbers[:, 2])

    nodes: list[int] = []
    spans: list[int] = []
    parts: list[bytes] = [b""]  # the head comes here
    at = 0

    def put(size: int, *pieces: bytes) -> None:
        nonlocal at
        spans.append(at)
        spans.append(size)
        parts.extend(pieces)
        if padding := -size % 8:
            parts.append(_ZEROS[padding])
        at += size + padding

    def fixed_size(data: bytes) -> None:
        nodes.extend((n, 0))
        spans.extend((at, 0))
        put(len(data), data)

    def varying(i: int) -> None:
        """`_COLUMNS[i]`"""
        if is_null >> i & 1:
            is_there = numbers[:, 2] >> i & 1 == 0
            nodes.extend((n, n - int(np.count_nonzero(is_there))))
            put((n + 7) // 8, np.packbits(is_there, bitorder="little").tobytes())
        else:
            nodes.extend((n, 0))
            spans.extend((at, 0))
        put(4 * n + 4, ends[i].tobytes())
        size = totals[i]
        if i >= len(_TEXTS):
            nodes.extend((size, 0))
            spans.extend((at, 0))
            size *= 4
        if size < n * _JOINED_BYTES:
            put(size, b"".join(columns[i]))
        else:  # the kernel may put them together
            put(size, *columns[i])

    fixed_size(np.arange(first_position, first_position + n, dtype=np.int64).tobytes())
    fixed_size(b"".join(ids))
    name = writer.encode()
    nodes.extend((n, 0))
    spans.extend((at, 0))
    put(4 * n + 4, np.arange(0, (n + 1) * len(name), len(name), dtype=np.int32).tobytes())
    put(n * len(name), name * n)
    varying(0)
    fixed_size(SCHEMA_VERSION.to_bytes(2, "little") * n)
    varying(1)
    varying(2)
    varying(3)
    fixed_size(numbers[:, :2].tobytes())
    for i in range(4, 11):
        varying(i)
    parts[0] = _head(n, at, nodes, spans)
    parts.append(_ZEROS[-(_PADDED_HEAD + at) % 64])
    return parts


def _head(n: int, size: int, nodes: list[int], spans: list[int]) -> bytes:
    return _HEAD.pack(
        *(0xFFFFFFFF, _PADDED_HEAD - 8),
        *_TABLES,
        *(size, 52 - 40, 4, 3),
        *(52 - 16, n, _NODES_AT - 8 - 64, _BUFFERS_AT - 8 - 68),
        _N_NODES,
        *nodes,
        _N_BUFFERS,
        *spans,
    ).ljust(_PADDED_HEAD, b"\0")


def decode(data: "bytes | pa.Buffer") -> pa.RecordBatch:
    """Reverse of `message`, zero copy: the batch keeps `data` alive."""
    return pa.ipc.read_record_batch(pa.ipc.read_message(data), SCHEMA)


# ---- where the tokens are ------------------------------------------------------------------------------------------

TOKENS = ("prompt_ids", "output_ids", "logprobs", "versions")

_SPANS_AT = _BUFFERS_AT + 4 + 16 * (_N_BUFFERS - 4 * len(_LISTS))
_SPANS = struct.Struct("<" + "16xq24xq8x" * len(TOKENS))  # where the offsets and the values of a list begin
_ENDS = struct.Struct("<ii")
_FIXED_PARTS = (slice(0, 40), slice(48, 64), slice(72, 88), slice(_BUFFERS_AT, _BUFFERS_AT + 4))
_FIXED_HEAD = [_head(0, 0, [0] * 2 * _N_NODES, [0] * 2 * _N_BUFFERS)[part] for part in _FIXED_PARTS]
"""What these are in every message that was laid out here."""


def token_places(data: pa.Buffer, n: int) -> "npt.NDArray[np.int64] | None":
    """See `log.TokenPlaces`; without Arrow, which takes 40 us to look into a message. None for a message that was not
    laid out here: what its tables and offsets are says where everything else is, so those are compared."""
    view = memoryview(data).cast("B")
    if [view[part] for part in _FIXED_PARTS] != _FIXED_HEAD:
        return None
    spans = _SPANS.unpack_from(view, _SPANS_AT)
    base = data.address + _PADDED_HEAD
    if n == 1:  # most of a session that has just ended: each turn was a commit of its own
        (p, p_end), (o, o_end), (k, _), (v, _) = (_ENDS.unpack_from(view, _PADDED_HEAD + at) for at in spans[::2])
        prompt, output, logprobs, versions = spans[1::2]
        return np.array(
            [
                (
                    *(base + prompt + 4 * p, base + output + 4 * o, base + logprobs + 4 * k, base + versions + 4 * v),
                    *(p_end - p, o_end - o),
                )
            ]
        )
    places = np.empty((n, 6), np.int64)
    for i in range(len(TOKENS)):
        _put(places, i, np.frombuffer(data, np.int32, n + 1, _PADDED_HEAD + spans[2 * i]), base + spans[2 * i + 1])
    return places


def token_places_of(batch: pa.RecordBatch) -> "npt.NDArray[np.int64]":
    """See `log.TokenPlaces`."""
    n = batch.num_rows
    places = np.empty((n, 6), np.int64)
    for i, name in enumerate(TOKENS):
        column = batch.column(name)
        buffers = column.buffers()
        at = column.offset
        ends = np.frombuffer(buffers[1], np.int32)[at : at + n + 1]
        _put(places, i, ends, (0 if buffers[3] is None else buffers[3].address) + 4 * column.values.offset)
        if i < 2 and column.null_count:  # a list that is not there has no tokens, whatever its offsets say
            places[pc.is_null(column).to_numpy(zero_copy_only=False), 4 + i] = 0
    return places


def _put(places: "npt.NDArray[np.int64]", i: int, ends: "npt.NDArray[np.int32]", base: int) -> None:
    places[:, i] = ends[:-1]
    places[:, i] *= 4
    places[:, i] += base
    if i < 2:
        np.subtract(ends[1:], ends[:-1], out=places[:, 4 + i])


def to_batch(events: "Sequence[Event]", *, writer: str, first_position: int) -> pa.RecordBatch:
    """Events as one Arrow batch of SCHEMA, positions counting up from `first_position`. Raises BadEvent as `admit`."""
    return batch_of([admit(event) for event in events], writer, first_position)


def batch_of(admitted: Sequence[Row], writer: str, first_position: int) -> pa.RecordBatch:
    """Rows as one Arrow batch of SCHEMA, positions counting up from `first_position`."""
    return decode(b"".join(message(admitted, writer, first_position)))


def difference(row: Row, stored: Row) -> str | None:
    """In which column an event is another one than the stored event of its id, None where it is the same.

    When it was recorded may differ, as may the spelling of its JSON; of a stored event without a column nobody knows
    whether that was pruned, so there it may say anything.
    """
    for i, name in enumerate(_COLUMNS, start=2):
        if row[i] == stored[i] or (not stored[i] and name in _PRUNED):
            continue
        if name == "payload" and row[2] == stored[2]:
            kind = row[2].decode()
            if decode_fact(kind, row[i]) == decode_fact(kind, stored[i]):
                continue
        if name == "messages" and decode_messages(row[i]) == decode_messages(stored[i]):
            continue
        return name
    return None
