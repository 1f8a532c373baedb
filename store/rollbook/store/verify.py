"""Is a book whole? Reads every byte of the log and reports what does not hold; changes nothing.

Checked: checksums; positions without gaps and in order; no event twice within a writer; known kinds and readable
facts; as many logprobs and versions as output tokens; and that every prompt can be rebuilt, that is, for each
interaction, prompt_length = shared + its prompt tokens, and shared is within its parent's path (all of it where the
edge is `extends`). Pruned interactions have lost their tokens, not their lengths (see `prune`).
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from .directory import read_manifest
from .errors import BadEvent, LogCorrupt
from .events import (
    InteractionRecorded,
    InteractionsPruned,
    Lengths,
    TokensScored,
    before_pruning,
    check,
    decode_fact,
    decode_messages,
)
from .frames import id_keys
from .sealing import content_crc
from .segments import GO_ON, Chain, Sealed, Segment
from .writers import find_missing, say_missing

_SHOWN = 20  # problems of one sort and writer; the rest is counted


@dataclass
class WriterReport:
    writer: str
    n_events: int = 0
    n_segments: int = 0
    n_sealed: int = 0
    size_bytes: int = 0


@dataclass
class Report:
    """What `verify` found. `problems` are sentences that name the place; `notes` are no problems."""

    path: Path
    writers: list[WriterReport] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    n_interactions: int = 0
    n_pruned: int = 0

    @property
    def is_whole(self) -> bool:
        return not self.problems

    @property
    def n_events(self) -> int:
        return sum(w.n_events for w in self.writers)

    def __str__(self) -> str:
        size_mb = sum(w.size_bytes for w in self.writers) / 1e6
        lines = [
            f"{self.path}: {self.n_events} events of {len(self.writers)} writers, {size_mb:.1f} MB, "
            f"{self.n_interactions} interactions rebuilt" + (f", {self.n_pruned} pruned" if self.n_pruned else ""),
            *(f"note: {note}" for note in self.notes),
            *(f"problem: {problem}" for problem in self.problems),
            "whole" if self.is_whole else f"NOT WHOLE: {len(self.problems)} problems",
        ]
        return "\n".join(lines)


def verify(path: str | os.PathLike[str]) -> Report:
    """Check a whole book. Raises BookNotFound and BookTooNew; everything else that is wrong is in the report."""
    report = Report(Path(path))
    nodes = _Nodes()
    if "lake" in read_manifest(report.path):
        _verify_lake(report, nodes)
    else:
        folders = [report.path / "log", report.path / "sealed"]
        for writer in sorted({p.name for folder in folders if folder.is_dir() for p in folder.iterdir() if p.is_dir()}):
            _verify_writer(report, writer, nodes)
        gone, elsewhere = find_missing(report.path)
        report.problems += [f"{say_missing(report.path, w)}; restore the folder from a copy, or {GO_ON}" for w in gone]
        report.notes += [f"this is a copy without log/{w}, which the original had" for w in elsewhere]
    report.n_interactions = len(nodes)
    report.n_pruned = nodes.n_pruned
    report.problems += nodes.problems()
    report.notes += nodes.notes()
    return report


def _verify_lake(report: Report, nodes: "_Nodes") -> None:
    """A lake's events, one writer after the other. Its checksums are those of the Parquet pages."""
    from .lake import LakeLog

    with contextlib.closing(LakeLog(report.path)) as log:
        about = WriterReport("")
        keys: dict[str, list[npt.NDArray[np.uint64]]] = {}
        try:
            for batch in log.read():
                writer = batch.column("writer")[0].as_py()
                if writer != about.writer:
                    about = WriterReport(writer)
                    report.writers.append(about)
                wrong = _wrong_envelope(batch, writer, about.n_events)
                if wrong:
                    report.problems.append(f"the lake: {wrong}")
                keys.setdefault(writer, []).append(id_keys(batch.column("event_id")))
                report.problems += nodes.add(batch)
                about.n_events += batch.num_rows
        except LogCorrupt as error:
            report.problems.append(str(error))
        for writer, found in keys.items():
            n_twice = sum(map(len, found)) - len(np.unique(np.concatenate(found)))
            if n_twice:
                report.problems.append(f"the lake: {n_twice} events of writer {writer!r} are there twice")
        files = log.files()
    report.notes.append(f"a lake of {len(files)} files, {sum(size for _, size in files) / 1e6:.1f} MB")


def _verify_writer(report: Report, writer: str, nodes: "_Nodes") -> None:
    about = WriterReport(writer)
    report.writers.append(about)
    chain = Chain(report.path, writer)
    try:
        fault = chain.look()
    except LogCorrupt as error:
        report.problems.append(str(error))
        return
    lost = chain.lost(fault)
    if lost is not None:
        report.problems.append(f"{lost}; restore the folder from a copy, or {GO_ON}")
    elif chain.next < chain.said.position:
        report.notes.append(
            f"{chain.folder} is a copy that ends at position {chain.next}; its writer had gone on to position "
            f"{chain.said.position} before the copy was done"
        )
    elif fault is not None:
        last = chain.segments[-1]
        report.notes.append(
            f"{last.path} ends in an interrupted write ({fault}); its writer is at it, or cuts it when it opens"
        )
    keys: list[npt.NDArray[np.uint64]] = []
    n_lost = 0
    for segment in chain.segments:
        about.n_segments += 1
        about.n_sealed += not isinstance(segment, Segment)
        about.size_bytes += os.stat(segment.path).st_size
        expected, crc = segment.first, 0
        try:
            for k in range(len(segment)):
                batch = segment.batch(k)
                wrong = _wrong_envelope(batch, writer, expected)
                if wrong:
                    report.problems.append(f"{segment.path}: {wrong}")
                keys.append(id_keys(batch.column("event_id")))
                report.problems += nodes.add(batch)
                n_lost += pc.sum(pc.equal(batch.column("kind"), "EventLost")).as_py()
                expected += batch.num_rows
                about.n_events += batch.num_rows
                if isinstance(segment, Sealed):
                    crc = content_crc(pa.Table.from_batches([batch]), crc)
            if isinstance(segment, Sealed) and crc != segment.content_crc:
                report.problems.append(f"{segment.path}: does not say what was sealed; restore the file from a copy")
            if expected != segment.next:
                report.problems.append(
                    f"{segment.path}: {expected - segment.first} events, expected {segment.next - segment.first}"
                )
        except LogCorrupt as error:
            report.problems.append(str(error))
    if n_lost:
        report.notes.append(f"{n_lost} events of {writer!r} were lost and given up; EventLost stands in their places")
    report.problems += _duplicates(chain, keys)


def _wrong_envelope(batch: pa.RecordBatch, writer: str, first: int) -> str | None:
    positions = batch.column("position").to_numpy()
    if not np.array_equal(positions, np.arange(first, first + len(positions))):
        return f"positions {positions[0]} to {positions[-1]} where {first} to {first + len(positions) - 1} belong"
    writers = pc.unique(batch.column("writer")).to_pylist()
    if writers != [writer]:
        return f"events of writer {writers} in the folder of {writer!r}"
    return None


def _duplicates(chain: Chain, keys: list[npt.NDArray[np.uint64]]) -> Iterator[str]:
    if not keys:
        return
    found = np.concatenate(keys)
    ordered = np.sort(found)
    suspects = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(suspects):
        return
    seen: dict[bytes, int] = {}
    for segment in chain.segments:
        own, ids = segment.ids()
        for i in np.flatnonzero(np.isin(own, suspects)):
            id_, position = ids[int(i)].as_py(), segment.first + int(i)
            if id_ in seen:
                yield f"{segment.path}: event {id_.hex()} at position {position} is already at {seen[id_]}"
            seen.setdefault(id_, position)


class _Nodes:
    """All interactions of the book as columns, so that parents of any writer are found whatever the order."""

    def __init__(self) -> None:
        self._columns: list[tuple[npt.NDArray[Any], ...]] = []
        self._names: list[pa.Array] = []
        self._taken: set[int] = set()  # which `prune` took, by their events
        self.n_pruned = 0

    def __len__(self) -> int:
        return sum(len(names) for names in self._names)

    def add(self, batch: pa.RecordBatch) -> Iterator[str]:
        n_lists = {
            name: pc.list_value_length(batch.column(name)).to_pylist()
            for name in ("prompt_ids", "output_ids", "logprobs", "versions", "entropies")
        }
        texts = (batch.column(name).to_pylist() for name in ("kind", "payload", "messages"))
        about = (batch.column(name).to_pylist() for name in ("run_id", "episode_id", "interaction_id"))
        stamps = batch.column("recorded_at").view(pa.int64()).to_pylist()
        found: list[tuple[int, InteractionRecorded, Lengths, bool]] = []
        for i, (kind, payload, messages, run, episode, interaction, at, *n) in enumerate(
            zip(*texts, *about, stamps, *n_lists.values(), strict=True)
        ):
            lengths, is_pruned = Lengths(*n), False
            try:
                fact = decode_fact(kind, payload)
                if messages is not None:
                    decode_messages(messages)
                if isinstance(fact, InteractionRecorded):
                    lengths, is_pruned = before_pruning(fact, lengths)
                    found.append((i, fact, lengths, is_pruned))
                elif isinstance(fact, TokensScored) and lengths.logprobs is None:
                    lengths = Lengths(logprobs=0)
                elif isinstance(fact, InteractionsPruned):
                    self._taken.update(map(_hash, fact.interaction_ids))
                check(fact, run, episode, interaction, at, lengths)
            except BadEvent as error:
                yield f"{_place(batch, i)}: {error}"
        if not found:
            return
        rows, facts, all_lengths, pruned = zip(*found, strict=True)
        was_pruned = np.array(pruned)
        self.n_pruned += int(was_pruned.sum())
        n_output = np.array([n.output_ids or 0 for n in all_lengths], np.int64)
        shared = np.array([fact.shared for fact in facts], np.int64)
        prompt_length = np.array([fact.prompt_length for fact in facts], np.int64)
        names = batch.column("interaction_id").take(pa.array(rows, pa.int64()))
        parents = [fact.parent_id for fact in facts]
        self._names.append(names)
        self._columns.append(
            (
                np.array([_hash(n) for n in names.to_pylist()], np.uint64),
                np.array([0 if p is None else _hash(p) for p in parents], np.uint64),
                np.array([p is not None for p in parents]),
                np.array([fact.edge == "extends" for fact in facts]),
                shared,
                prompt_length + n_output,
                was_pruned,
                prompt_length - shared + n_output > 0,
            )
        )

    @cached_property
    def _joined(self) -> tuple[npt.NDArray[Any], ...]:
        """The columns, where each one's parent is among them, and whether it is; asked for when all were added."""
        columns = [np.concatenate(column) for column in zip(*self._columns, strict=True)]
        own, parent, *_ = columns
        order = np.argsort(own, kind="stable")
        index = order[np.minimum(np.searchsorted(own[order], parent), len(own) - 1)]
        return (*columns, index, own[index] == parent)

    def notes(self) -> Iterator[str]:
        if not self._columns:
            return
        own, _, has_parent, _, shared, _, is_pruned, has_tokens, index, is_found = self._joined
        n_lost = int((has_parent & is_found & (shared > 0) & is_pruned[index] & ~is_pruned).sum())
        if n_lost:
            yield f"{n_lost} interactions share tokens of a pruned parent, so their prompts cannot be rebuilt"
        is_taken = np.isin(own, np.fromiter(self._taken, np.uint64, len(self._taken)))
        n_begun = int((is_taken & has_tokens & ~is_pruned).sum())
        if n_begun:
            yield (
                f"{n_begun} interactions are to be pruned and still have their tokens: the command was ended, or their "
                "writer was at work; `rollbook prune BOOK --where false` removes them"
            )
        n_unknown = int((is_pruned & ~is_taken).sum())
        if n_unknown:
            yield (
                f"{n_unknown} interactions were pruned by an earlier version, of which the tables do not know; "
                "`rollbook prune BOOK --where false` tells them"
            )

    def problems(self) -> Iterator[str]:
        if not self._columns:
            return
        _, _, has_parent, extends, shared, path_length, _, _, index, is_found = self._joined
        names = pa.chunked_array(self._names)
        wrong = [
            (has_parent & ~is_found, "its parent is not in the book"),
            (has_parent & is_found & (shared > path_length[index]), "it shares more tokens than its parent's path has"),
            (
                has_parent & is_found & extends & (shared != path_length[index]),
                "its edge is `extends`, but it does not share all of its parent's path",
            ),
        ]
        for mask, sentence in wrong:
            found = np.flatnonzero(mask)
            for i in found[:_SHOWN]:
                yield f"interaction {names[int(i)].as_py()}: {sentence}"
            if len(found) > _SHOWN:
                yield f"and {len(found) - _SHOWN} more interactions: {sentence}"


def _hash(name: str) -> int:
    return xxhash.xxh64_intdigest(name.encode())


def _place(batch: pa.RecordBatch, row: Any) -> str:
    i = int(row)
    return f"writer {batch.column('writer')[i].as_py()!r} position {batch.column('position')[i].as_py()}"
