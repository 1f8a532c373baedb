"""Retention: remove the payload of chosen interactions for good; never called but by a person's command.

What was said and sampled goes (messages, prompt and output tokens, logprobs, entropies). The facts stay: ids,
rewards, states, reasons, the policy version of every output token and so every length. Sealed segments are rewritten
whole, verified and renamed; positions do not change. Events of a writer that is at work and has not sealed them yet
stay and are counted in the answer.

The decision is an event, `InteractionsPruned`, durable before the first payload goes: no reader of the tables is ever
offered what is gone, whenever the command was killed. What was decided and is still there, the next `prune` removes,
whatever it was asked for; and it records what a version without these events removed.
"""

import os
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .directory import DirectoryLog, check_book
from .errors import BadSelection, BookBusy
from .events import SCHEMA, Event, InteractionRecorded, InteractionsPruned, Lengths, before_pruning, decode_fact
from .sealing import write_sealed
from .segments import SEALED_IDS, Chain, Sealed

PAYLOAD = ("messages", "prompt_ids", "output_ids", "logprobs", "entropies")
Bools = npt.NDArray[np.bool_]

_WRITER = "prune"
_EVENTS_AT_ONCE = 4096


@dataclass(frozen=True)
class Pruned:
    """What `prune` did."""

    n_events: int  # whose payload is gone
    n_left: int  # of the chosen ones, in logs of writers at work: prune again once they are sealed
    freed_bytes: int


@dataclass(frozen=True)
class PrunePlan:
    """What `prune` would remove."""

    n_events: int  # whose payload would go
    payload_bytes: int  # of it, before compression; files shrink by less
    n_begun: int = 0  # of these events, those that an earlier prune was to remove, and did not
    n_unknown: int = 0  # interactions of which no event says yet that an earlier version pruned them


def plan_prune(
    path: str | os.PathLike[str], *, episode_ids: Collection[str] = (), interaction_ids: Collection[str] = ()
) -> PrunePlan:
    """What `prune` would remove if every writer were at rest; changes nothing, seals nothing. Raises BadSelection."""
    book = Path(path)
    check_book(book)
    chains = _chains(book, _writers(book))
    choice = _choose(chains, set(episode_ids), set(interaction_ids))
    n_events = n_begun = payload_bytes = 0
    for chain in chains:
        for batch in chain.batches(0):
            mask = _has_payload(batch, choice.all)
            n = int(mask.sum())
            if n:
                n_events += n
                n_begun += n - int(_has_payload(batch, choice.asked).sum())
                payload_bytes += batch.select(PAYLOAD).filter(pa.array(mask)).nbytes
    return PrunePlan(n_events, payload_bytes, n_begun, choice.n_unknown)


def prune(
    path: str | os.PathLike[str], *, episode_ids: Collection[str] = (), interaction_ids: Collection[str] = ()
) -> Pruned:
    """Remove the payload of these interactions and of all interactions of these episodes, and end earlier prunes.

    Raises BadSelection where an interaction that stays is built on one that would go: its prompt would be lost too;
    BookBusy while another prune is at work.
    """
    book = Path(path)
    check_book(book)
    with closing(_own_log(book)) as log:
        for writer in _writers(book):
            try:
                other = DirectoryLog(book, writer, live_bytes=None)
            except BookBusy:
                continue  # at work: what it has not sealed is left
            other.seal()
            other.close()
        chains = _chains(book, _writers(book))
        choice = _choose(chains, set(episode_ids), set(interaction_ids))
        for start in range(0, len(choice.unsaid), _EVENTS_AT_ONCE):
            log.append_blocking(*choice.unsaid[start : start + _EVENTS_AT_ONCE])
        n_events = n_left = freed = 0
        for chain in chains:
            for segment in chain.segments:
                if isinstance(segment, Sealed):
                    n, bytes_ = _prune_segment(segment, choice.all)
                    n_events += n
                    freed += bytes_
                else:
                    for k in range(len(segment)):
                        n_left += int(_has_payload(segment.batch(k), choice.all).sum())
    return Pruned(n_events, n_left, freed)


def _own_log(book: Path) -> DirectoryLog:
    """Who has it prunes alone: of two that rewrite one segment, the second would bring back what the first removed."""
    try:
        return DirectoryLog(book, _WRITER)
    except BookBusy as error:
        raise BookBusy(f"another prune of {book} is at work ({error}); wait for its end") from error


def _writers(book: Path) -> list[str]:
    return sorted({p.name for folder in ("log", "sealed") for p in (book / folder).glob("*") if p.is_dir()})


def _chains(book: Path, writers: list[str]) -> list[Chain]:
    chains = [Chain(book, writer) for writer in writers]
    for chain in chains:
        chain.refresh()
    return chains


class _Choice(NamedTuple):
    """asked: ids of what this call is for; all: of what earlier ones were for, too; unsaid: events for the log."""

    asked: pa.Array
    all: pa.Array
    unsaid: list[Event]
    n_unknown: int  # interactions that are pruned already, and no event says so


def _choose(chains: list[Chain], episodes: set[str], interactions: set[str]) -> _Choice:
    """Raises BadSelection."""
    asked: set[str] = set()
    said: set[str] = set()  # those of earlier prunes
    gone: set[str] = set()
    parents: dict[str, str] = {}
    whose: dict[str, tuple[str, str]] = {}  # run and episode of what has or had a payload and may have to be said
    for chain in chains:
        for batch in chain.batches(0):
            names = ("kind", "run_id", "episode_id", "interaction_id", "payload")
            columns = (batch.column(name).to_pylist() for name in names)
            lists = (pc.list_value_length(batch.column(name)).to_pylist() for name in Lengths._fields)
            has = _has_any(batch).tolist()
            for kind, run, episode, interaction, payload, has_any, *n in zip(*columns, has, *lists, strict=True):
                is_asked = interaction is not None and (episode in episodes or interaction in interactions)
                if is_asked:
                    asked.add(interaction)
                if kind == "InteractionsPruned":
                    fact = decode_fact(kind, payload)
                    assert isinstance(fact, InteractionsPruned)
                    said.update(fact.interaction_ids)
                elif kind == "InteractionRecorded":
                    fact = decode_fact(kind, payload)
                    assert isinstance(fact, InteractionRecorded)
                    if fact.shared and fact.parent_id is not None:
                        parents[interaction] = fact.parent_id
                    _, is_gone = before_pruning(fact, Lengths(*n))
                    if is_gone:
                        gone.add(interaction)
                    if is_gone or (is_asked and has_any):
                        whose.setdefault(interaction, (run, episode))
    for child, parent in parents.items():
        if parent in asked and not (child in asked or child in said or child in gone):
            raise BadSelection(
                f"interaction {child} is built on {parent}, which would be pruned; choose it too, or whole episodes"
            )
    missing = interactions - asked
    if missing:
        raise BadSelection(f"no interaction {min(missing)} in the book; choose ids that are there")
    unsaid: dict[tuple[str, str], list[str]] = {}
    for interaction, about in whose.items():
        if interaction not in said:
            unsaid.setdefault(about, []).append(interaction)
    return _Choice(
        pa.array(sorted(asked), pa.string()),
        pa.array(sorted(asked | said), pa.string()),
        [
            Event(run_id=run, episode_id=episode, fact=InteractionsPruned(interaction_ids=ids))
            for (run, episode), ids in unsaid.items()
        ],
        len(gone - said - asked),
    )


def _has_any(batch: pa.RecordBatch) -> Bools:
    """[N] Which rows have a payload."""
    has_any = np.zeros(batch.num_rows, np.bool_)
    for name in PAYLOAD:
        has_any |= batch.column(name).is_valid().to_numpy(zero_copy_only=False)
    return has_any


def _has_payload(batch: pa.RecordBatch, chosen: pa.Array) -> Bools:
    is_chosen = pc.is_in(batch.column("interaction_id"), value_set=chosen).to_numpy(zero_copy_only=False)
    return _has_any(batch) & is_chosen


def _prune_segment(segment: Sealed, chosen: pa.Array) -> tuple[int, int]:
    """Rewrite one file without these payloads; returns events pruned and bytes freed."""
    batches = [segment.batch(k) for k in range(len(segment))]
    masks = [_has_payload(batch, chosen) for batch in batches]
    n = int(sum(mask.sum() for mask in masks))
    if not n:
        return 0, 0
    before = segment.path.stat().st_size
    notes = pq.read_metadata(segment.path).metadata
    ids = {key: bytes.fromhex(notes[key].decode()) for key in SEALED_IDS}
    write_sealed(segment.path, _without(batches, masks), ids)
    return n, before - segment.path.stat().st_size


def _without(batches: list[pa.RecordBatch], masks: list[Bools]) -> Iterator[pa.Table]:
    for batch, mask in zip(batches, masks, strict=True):
        keep = pa.array(~mask)
        columns = [
            pc.if_else(keep, batch.column(name), pa.scalar(None, SCHEMA.field(name).type))
            if name in PAYLOAD
            else batch.column(name)
            for name in SCHEMA.names
        ]
        yield pa.Table.from_batches([pa.RecordBatch.from_arrays(columns, schema=SCHEMA)])
