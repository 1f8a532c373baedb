"""Retention: remove the payload of chosen interactions for good; never called but by a person's command.

What was said and sampled goes (messages, prompt and output tokens, logprobs, entropies). The facts stay: ids,
rewards, states, reasons, the policy version of every output token and so every length. Sealed segments are rewritten
whole, verified and renamed; positions do not change. Events of a writer that is at work and has not sealed them yet
stay and are counted in the answer.
"""

import fcntl
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .directory import DirectoryLog, check_book
from .errors import BadSelection, BookBusy
from .events import SCHEMA, InteractionRecorded, decode_fact
from .sealing import write_sealed
from .segments import SEALED_IDS, Chain, Sealed

PAYLOAD = ("messages", "prompt_ids", "output_ids", "logprobs", "entropies")
_NAMES = ["kind", "episode_id", "interaction_id"]


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


def plan_prune(
    path: str | os.PathLike[str], *, episode_ids: Collection[str] = (), interaction_ids: Collection[str] = ()
) -> PrunePlan:
    """What `prune` would remove if every writer were at rest; changes nothing, seals nothing. Raises BadSelection."""
    book = Path(path)
    check_book(book)
    chains = _chains(book, _writers(book))
    chosen = _chosen(chains, set(episode_ids), set(interaction_ids))
    n_events = payload_bytes = 0
    for chain in chains:
        for batch in chain.batches(0):
            mask = _has_payload(batch, chosen)
            n = int(mask.sum())
            if n:
                n_events += n
                payload_bytes += batch.select(PAYLOAD).filter(pa.array(mask)).nbytes
    return PrunePlan(n_events, payload_bytes)


def prune(
    path: str | os.PathLike[str], *, episode_ids: Collection[str] = (), interaction_ids: Collection[str] = ()
) -> Pruned:
    """Remove the payload of these interactions and of all interactions of these episodes.

    Raises BadSelection where an interaction that stays is built on one that would go: its prompt would be lost too.
    """
    book = Path(path)
    check_book(book)
    writers = _writers(book)
    for writer in writers:
        try:
            log = DirectoryLog(book, writer, live_bytes=None)
        except BookBusy:
            continue  # at work: what it has not sealed is left
        log.seal()
        log.close()
    chains = _chains(book, writers)
    chosen = _chosen(chains, set(episode_ids), set(interaction_ids))
    n_events = n_left = freed = 0
    for chain in chains:
        for segment in chain.segments:
            if isinstance(segment, Sealed):
                n, bytes_ = _prune_segment(segment, chosen)
                n_events += n
                freed += bytes_
            else:
                for k in range(len(segment)):
                    n_left += int(_has_payload(segment.batch(k), chosen).sum())
    return Pruned(n_events, n_left, freed)


def _writers(book: Path) -> list[str]:
    return sorted({p.name for folder in ("log", "sealed") for p in (book / folder).glob("*") if p.is_dir()})


def _chains(book: Path, writers: list[str]) -> list[Chain]:
    chains = [Chain(book, writer) for writer in writers]
    for chain in chains:
        chain.refresh()
    return chains


def _chosen(chains: list[Chain], episodes: set[str], interactions: set[str]) -> pa.Array:
    """All chosen interaction ids. Raises BadSelection."""
    known = set()
    parents: dict[str, str] = {}
    for chain in chains:
        for batch in chain.batches(0):
            columns = (batch.column(name).to_pylist() for name in (*_NAMES, "payload"))
            for kind, episode, interaction, payload in zip(*columns, strict=True):
                if interaction is not None and (episode in episodes or interaction in interactions):
                    known.add(interaction)
                if kind == "InteractionRecorded":
                    fact = decode_fact(kind, payload)
                    if isinstance(fact, InteractionRecorded) and fact.shared and fact.parent_id is not None:
                        parents[interaction] = fact.parent_id
    for child, parent in parents.items():
        if parent in known and child not in known:
            raise BadSelection(
                f"interaction {child} is built on {parent}, which would be pruned; choose it too, or whole episodes"
            )
    missing = interactions - known
    if missing:
        raise BadSelection(f"no interaction {min(missing)} in the book; choose ids that are there")
    return pa.array(sorted(known), pa.string())


def _has_payload(batch: pa.RecordBatch, chosen: pa.Array) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    is_chosen = pc.is_in(batch.column("interaction_id"), value_set=chosen).to_numpy(zero_copy_only=False)
    has_any = np.zeros(batch.num_rows, np.bool_)
    for name in PAYLOAD:
        has_any |= batch.column(name).is_valid().to_numpy(zero_copy_only=False)
    return is_chosen & has_any


def _prune_segment(segment: Sealed, chosen: pa.Array) -> tuple[int, int]:
    """Rewrite one file without these payloads; returns events pruned and bytes freed."""
    with open(segment.path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # against another prune
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


def _without(
    batches: list[pa.RecordBatch], masks: "list[np.ndarray[tuple[int], np.dtype[np.bool_]]]"
) -> Iterator[pa.Table]:
    for batch, mask in zip(batches, masks, strict=True):
        keep = pa.array(~mask)
        columns = [
            pc.if_else(keep, batch.column(name), pa.scalar(None, SCHEMA.field(name).type))
            if name in PAYLOAD
            else batch.column(name)
            for name in SCHEMA.names
        ]
        yield pa.Table.from_batches([pa.RecordBatch.from_arrays(columns, schema=SCHEMA)])
