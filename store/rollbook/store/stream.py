"""From events to packed arrays: the tokens of interactions and trajectories, as a learner eats them.

An event holds only what its parent does not have. Here whole prompts are put together again by copying runs of
tokens from where they lie (a mapped segment, most often) into packed arrays: no Python per token, nothing decoded.

Shapes: N nodes, R rows, T packed tokens. A row is an interaction (`individual`: its prompt and its output) or a
trajectory (`trajectory`: a root-to-leaf path of `extends` edges, every output on it trained). As a `Trie` each token
of a forest stands once. This module is free of torch: arrays are NumPy, and `torch.from_numpy` takes them as they are.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from .errors import LogCorrupt, PayloadPruned
from .events import Float32s, Int32s
from .log import Log, TokenPlaces
from .placing import find_broken
from .tree import shared_prefix

Bools = npt.NDArray[np.bool_]
Longs = npt.NDArray[np.int64]
Form = Literal["individual", "trajectory"]

NODE_COLUMNS = ("interaction_id", "parent_id", "edge", "n_prompt", "n_shared", "n_output", "writer", "position")
"""What is read of the `interactions` table."""


@dataclass(frozen=True)
class Tokens:
    """R rows, packed: row r is `[cu_seqlens[r]:cu_seqlens[r+1]]` of the arrays over T.

    logprobs and versions are those of the policy that sampled, in the order of the book; 0.0 and -1 where
    loss_mask is False. Two loads of the same rows are equal byte for byte, whatever happened in between.
    """

    row_ids: list[str]  # R: the interaction, or the leaf of the trajectory
    cu_seqlens: Int32s  # R+1
    input_ids: Int32s  # T
    loss_mask: Bools  # T: sampled in this row's trajectory
    logprobs: Float32s  # T
    versions: Int32s  # T
    interaction_ids: list[str]  # N
    run_nodes: Int32s  # runs of tokens, in the order in which they lie packed: index into interaction_ids
    run_lengths: Int32s

    def __len__(self) -> int:
        return len(self.row_ids)

    @property
    def n_tokens(self) -> int:
        return len(self.input_ids)

    @cached_property
    def positions(self) -> Int32s:
        """T: place of a token within its row."""
        lengths = np.diff(self.cu_seqlens)
        return np.arange(self.n_tokens, dtype=np.int32) - np.repeat(self.cu_seqlens[:-1], lengths)

    @cached_property
    def rows(self) -> Int32s:
        """T: the row of each token."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.cu_seqlens))

    @cached_property
    def nodes(self) -> Int32s:
        """T: the interaction that brought each token, as an index into interaction_ids."""
        return np.repeat(self.run_nodes, self.run_lengths)

    @cached_property
    def first_mask(self) -> Bools:
        """T: loss_mask, but every sampled token only in the first row that has it: what is shared is trained once."""
        is_output = self.run_nodes.copy()
        is_output[0::2] = -1  # runs come in pairs: prompt, output
        is_output[self.run_lengths == 0] = -1
        first = np.zeros(len(is_output), np.bool_)
        first[np.unique(is_output, return_index=True)[1]] = True
        return self.loss_mask & np.repeat(first & (is_output >= 0), self.run_lengths)

    def row(self, r: int) -> slice:
        """Where row r lies in the arrays over T."""
        return slice(int(self.cu_seqlens[r]), int(self.cu_seqlens[r + 1]))


@dataclass(frozen=True)
class Trie:
    """The tokens of a forest, each once. Runs are depth first: a token sees the tokens before it, as far as `ends`.

    Run k holds `[starts[k]:starts[k+1]]` and continues the last token of run `parents[k]` (-1: it begins a tree).
    A token of it sees a token of run j < k iff k < ends[j], and the tokens before it in its own run.
    """

    input_ids: Int32s  # T
    loss_mask: Bools  # T
    logprobs: Float32s  # T
    versions: Int32s  # T
    positions: Int32s  # T: place in the path from the root
    starts: Int32s  # runs + 1
    parents: Int32s  # runs
    ends: Int32s  # runs: one past the last run of its subtree
    run_nodes: Int32s  # runs: index into interaction_ids
    interaction_ids: list[str]  # N

    @property
    def n_tokens(self) -> int:
        return len(self.input_ids)


# ---------------------------------------------------------------- where the bytes lie


def copy_runs(addresses: Longs, lengths: Longs) -> Int32s:
    """Runs of 4-byte values, given by address and number, one after the other in a new array (view it as you like).

    Whoever calls keeps the memory behind the addresses alive.
    """
    total = 4 * int(lengths.sum())
    n = len(lengths)
    if not total:
        return np.empty(0, np.int32)
    # To Arrow the runs are every second string of a column that begins at the lowest address; to take them is one
    # memcpy each, some 20 times cheaper than a slice in Python. The strings between them are never looked at.
    addresses = np.where(lengths > 0, addresses, addresses.max())  # where nothing is, the address may be anything
    low = int(addresses.min())
    ends = addresses + 4 * lengths
    offsets = np.empty(2 * n + 2, np.int64)
    offsets[1:-1:2] = addresses - low
    offsets[2:-1:2] = ends - low
    # Arrow reserves by the mean length that first and last offset imply: let that be the mean run's, and some more.
    offsets[0], offsets[-1] = 0, (2 * n + 1) * (total // n + 64)
    size = max(int(offsets[-1]), int(ends.max()) - low)
    strings = pa.Array.from_buffers(
        pa.large_binary(), 2 * n + 1, [None, pa.py_buffer(offsets), pa.foreign_buffer(low, size)]
    )
    taken = strings.take(pa.array(np.arange(1, 2 * n + 1, 2)))
    return np.asarray(_Owned(taken.buffers()[2], total // 4))


class _Owned:
    """Shows NumPy a buffer that nobody else has, so that the array may be written and torch takes it without a copy."""

    def __init__(self, buffer: pa.Buffer, n: int) -> None:
        self._buffer = buffer
        self.__array_interface__ = {"version": 3, "shape": (n,), "typestr": "<i4", "data": (buffer.address, False)}


_FEW_ROWS = 8  # whose paths are walked in Python

_FEW_FRAMES = 4096  # that are kept apart before they are joined to the others

_FIRST, _STOP, _ROW, _TICK, _MEMORY, _MAPPED = range(6)


class _Frames:
    """The frames of one writer that are held, and the places of their rows, in the order of arrival."""

    def __init__(self) -> None:
        # Sorted by position: first position, one past the last, row of the first in `places`, when it was last asked
        # for, bytes of memory, bytes of a mapped file. `newest` is the same for frames behind all of these, and is
        # joined to them now and then: most frames that come are new ones, and `table` may be long.
        self.newest = self.table = np.empty((0, 6), np.int64)
        self.firsts = self.table[:, _FIRST]  # of `table`, in one piece: what is searched is copied where it is not
        self.sizes = np.zeros(2, np.int64)  # sums of the last two
        self.held: dict[int, object] = {}  # by row
        self.n_rows = 0
        self.places = np.empty((1024, 6), np.int64)

    def look_up(self, positions: Longs, tick: int) -> Longs:
        """[N, 6] The frames that hold these positions, which are asked for now; -1 as row for none."""
        found = np.full((len(positions), 6), -1, np.int64)
        for table, firsts in ((self.table, self.firsts), (self.newest, self.newest[:, _FIRST])):
            if len(table):
                k = np.searchsorted(firsts, positions, side="right") - 1
                is_here = (k >= 0) & (positions < table[k, _STOP])
                table[k[is_here], _TICK] = tick
                found[is_here] = table[k[is_here]]
        return found

    def insert(self, frames: list[TokenPlaces], tick: int) -> None:
        """Hold more frames, in the order of their positions; what they overlap (a segment sealed since) is let go."""
        counts = [len(frame.places) for frame in frames]
        begin, self.n_rows = self.n_rows, self.n_rows + sum(counts)
        while self.n_rows > len(self.places):
            self.places = np.resize(self.places, (2 * len(self.places), 6))
        np.concatenate([frame.places for frame in frames], out=self.places[begin : self.n_rows])
        rows = list(accumulate(counts[:-1], initial=begin))
        self.held.update(zip(rows, (frame.held for frame in frames), strict=True))
        added = np.array(
            [
                (frame.first, frame.first + n, row, tick, frame.memory_bytes, frame.mapped_bytes)
                for frame, n, row in zip(frames, counts, rows, strict=True)
            ],
            np.int64,
        )
        self.sizes += added[:, _MEMORY:].sum(axis=0)
        last = self.newest if len(self.newest) else self.table
        if not len(last) or added[0, _FIRST] >= last[-1, _STOP]:
            self.newest = np.concatenate([self.newest, added])
            if len(self.newest) > _FEW_FRAMES:
                self.join()
            return
        self.join()
        held = self.table
        after = np.searchsorted(held[:, _STOP], added[:, _FIRST], side="right")
        before = np.searchsorted(held[:, _FIRST], added[:, _STOP], side="left")
        if (after < before).any():
            is_kept = np.ones(len(held), np.bool_)
            for a, b in zip(after.tolist(), before.tolist(), strict=True):
                is_kept[a:b] = False
            self.drop(~is_kept)
        table = np.concatenate([self.table, added])
        self._keep(table[np.argsort(table[:, _FIRST], kind="stable")])

    def _keep(self, table: Longs) -> None:
        self.table, self.firsts = table, table[:, _FIRST].copy()

    def join(self) -> None:
        """Make the newest part of the others."""
        if len(self.newest):
            self._keep(np.concatenate([self.table, self.newest]))
            self.newest = self.newest[:0]

    def drop(self, chosen: Bools) -> None:
        """Let go of these frames of `table`."""
        for row in self.table[chosen, _ROW].tolist():
            del self.held[row]
        self.sizes -= self.table[chosen, _MEMORY:].sum(axis=0)
        self._keep(self.table[~chosen])

    def pack(self) -> None:
        """Move the rows together once there are more holes than rows."""
        counts = self.table[:, _STOP] - self.table[:, _FIRST]
        if self.n_rows <= 1024 or 2 * counts.sum() >= self.n_rows:
            return
        starts = np.cumsum(counts) - counts
        taken = np.repeat(self.table[:, _ROW] - starts, counts) + np.arange(counts.sum())
        self.held = {
            new: self.held[old] for new, old in zip(starts.tolist(), self.table[:, _ROW].tolist(), strict=True)
        }
        self.table[:, _ROW] = starts
        self.n_rows = len(taken)
        self.places = np.resize(self.places[taken], (max(1024, self.n_rows), 6))


class Payloads:
    """Where the tokens of a log's events lie in memory. Holds the frames that were asked for, within a budget.

    memory_bytes: of frames that had to be decoded. mapped_bytes: of frames that are views of mapped files; they cost
    no memory of ours, but a sealed segment's old file keeps its place on the disk while it is mapped.
    """

    def __init__(self, log: Log, *, memory_bytes: int = 512 << 20, mapped_bytes: int = 4 << 30) -> None:
        self._log = log
        self._budget = np.array([memory_bytes, mapped_bytes])
        self._writers: dict[str, _Frames] = {}
        self._tick = 0
        self._lock = threading.Lock()

    def locate(self, writers: pa.Array, positions: Longs) -> tuple[Longs, list[object]]:
        """The places [N, 6] of events' tokens, see `TokenPlaces`, and what must be held while they are used. Raises
        KeyError for an event that is not there."""
        with self._lock:
            self._tick += 1
            names = set(writers.to_pylist())
            if len(names) == 1:
                return self._locate(names.pop(), positions)
            codes = writers.dictionary_encode()
            places = np.empty((len(positions), 6), np.int64)
            held: list[object] = []
            for code, writer in enumerate(codes.dictionary.to_pylist()):
                mine = np.flatnonzero(codes.indices.to_numpy() == code)
                places[mine], theirs = self._locate(writer, positions[mine])
                held += theirs
            return places, held

    def _locate(self, writer: str, positions: Longs) -> tuple[Longs, list[object]]:
        frames = self._writers.setdefault(writer, _Frames())
        found = frames.look_up(positions, self._tick)
        is_missing = found[:, _ROW] < 0
        if is_missing.any():
            frames.insert(self._fetch(writer, positions[is_missing]), self._tick)
            found = frames.look_up(positions, self._tick)
        rows = found[:, _ROW] + (positions - found[:, _FIRST])
        places = frames.places[rows]
        held = [frames.held[row] for row in set(found[:, _ROW].tolist())]
        if is_missing.any():
            self._shrink()
        return places, held

    def _fetch(self, writer: str, positions: Longs) -> list[TokenPlaces]:
        found: list[TokenPlaces] = []
        stop = -1
        for position in np.sort(positions).tolist():
            if position >= stop:
                frame = self._log.token_places(writer, position)
                found.append(frame)
                stop = frame.first + len(frame.places)
        return found

    def _shrink(self) -> None:
        """Let go of what was not asked for the longest, until the rest is within budget."""
        if (sum(frames.sizes for frames in self._writers.values()) <= self._budget).all():
            return
        for frames in self._writers.values():
            frames.join()
        table = np.concatenate([frames.table for frames in self._writers.values()])
        sizes = table[:, _MEMORY:]
        newest_first = np.argsort(-table[:, _TICK], kind="stable")
        is_dropped = np.empty(len(table), np.bool_)
        is_dropped[newest_first] = (np.cumsum(sizes[newest_first], axis=0) > self._budget).any(axis=1)
        at = 0
        for frames in self._writers.values():
            n = len(frames.table)
            frames.drop(is_dropped[at : at + n])
            frames.pack()
            at += n


# ---------------------------------------------------------------- the tree


@dataclass(frozen=True)
class Nodes:
    """N interactions and all above them whose tokens they share, with the places of what each brought."""

    interaction_ids: list[str]
    parent: Longs  # index, -1 for none
    is_root: Bools  # begins a tree: it has no parent, or `compacts` one
    is_continuing: Bools  # `extends`, or `retries`, which takes the place of its parent: outputs above stay trained
    n_shared: Longs
    n_prompt: Longs
    n_output: Longs
    addresses: Longs  # [N, 4]
    is_pruned: Bools  # what it brought is gone for good
    is_broken: Bools  # it, or what it stands on, shares tokens that no parent here has: its prompt cannot be rebuilt
    held: list[object]  # what lies at the addresses

    @classmethod
    def read(cls, table: pa.Table, payloads: Payloads) -> "Nodes":
        """From rows of `interactions` (NODE_COLUMNS); what shares tokens of a parent that is not there is broken."""
        ids, parents, edges, *sizes, writers, positions = (_array(table.column(name)) for name in NODE_COLUMNS)
        parent = pc.index_in(parents, ids).fill_null(-1).to_numpy()
        edge = pc.index_in(edges, _EDGES).fill_null(-1).to_numpy()
        n_prompt, n_shared, n_output = (column.to_numpy().astype(np.int64) for column in sizes)
        places, held = payloads.locate(writers, positions.to_numpy())
        addresses, lengths = places[:, :4], places[:, 4:]
        names = ids.to_pylist()
        is_pruned = (lengths == 0).all(axis=1) & (n_prompt - n_shared + n_output > 0)
        is_wrong = (lengths[:, 0] != n_prompt - n_shared) | (lengths[:, 1] != n_output)
        wrong = np.flatnonzero(is_wrong & ~is_pruned)
        if len(wrong):
            i = wrong[0]
            raise LogCorrupt(
                f"{names[i]}: the views say {n_prompt[i] - n_shared[i]} new prompt and {n_output[i]} output tokens, "
                f"the log has {lengths[i, 0]} and {lengths[i, 1]}; rebuild the views"
            )
        return cls(
            interaction_ids=names,
            parent=parent.astype(np.int64),
            is_root=(parent < 0) | (edge == 2),
            is_continuing=(edge == 0) | (edge == 1),
            n_shared=n_shared,
            n_prompt=n_prompt,
            n_output=n_output,
            addresses=addresses,
            is_pruned=is_pruned,
            is_broken=find_broken(parent, n_shared, n_prompt + n_output),
            held=held,
        )

    def __len__(self) -> int:
        return len(self.interaction_ids)

    def find(self, interaction_ids: Sequence[str]) -> Longs:
        """Where these are among the nodes. Raises KeyError for one that is not."""
        found = pc.index_in(pa.array(interaction_ids, pa.string()), pa.array(self.interaction_ids, pa.string()))
        if found.null_count:
            missing = [name for name, k in zip(interaction_ids, found.to_pylist(), strict=True) if k is None]
            raise KeyError(
                f"no interaction {missing[0]!r} in this book ({len(missing)} of {len(interaction_ids)} asked)"
            )
        return found.to_numpy().astype(np.int64)

    def leaves(self) -> Longs:
        """Where trajectories end: nodes that none extends, and none takes the place of; those that can be rebuilt."""
        return np.setdiff1d(np.flatnonzero(~self.is_broken), self.parent[self.is_continuing & ~self.is_broken])

    def _ends(self, rows: Sequence[int] | Longs | None) -> Longs:
        """Raises LogCorrupt for a broken one that is asked for."""
        if rows is None:
            return np.flatnonzero(~self.is_broken)
        ends = np.asarray(rows, np.int64)
        if self.is_broken[ends].any():
            name = self.interaction_ids[int(ends[np.flatnonzero(self.is_broken[ends])[0]])]
            raise LogCorrupt(
                f"{name} or what it stands on shares tokens that no parent has, or whose parent is not there, so its "
                "prompt cannot be rebuilt; leave it out (`rollbook verify` names all of these)"
            )
        return ends

    def load(self, rows: Sequence[int] | Longs | None = None, *, form: Form = "individual") -> Tokens:
        """The rows that end at these nodes (default: all but the broken), packed in this order."""
        ends = self._ends(rows)
        _, node, limit, is_trained = self._paths(ends, every_output=form == "trajectory")
        self._check_there(node)
        # Each node brings two runs: what its prompt adds, and its output; a branch may leave in the middle of either.
        n_shared, n_prompt = self.n_shared[node], self.n_prompt[node]
        lengths = np.empty((len(node), 2), np.int64)
        np.minimum(limit, n_prompt, out=lengths[:, 0])
        lengths[:, 0] -= n_shared
        np.maximum(lengths[:, 0], 0, out=lengths[:, 0])
        np.minimum(limit - n_prompt, self.n_output[node], out=lengths[:, 1])
        np.maximum(lengths[:, 1], 0, out=lengths[:, 1])
        totals = self.n_prompt[ends] + self.n_output[ends]
        cu_seqlens = np.zeros(len(ends) + 1, np.int32)
        np.cumsum(totals, out=cu_seqlens[1:])
        places = self.addresses[node]
        ids, mask, logprobs, versions = _pack(lengths, places[:, 0], places[:, 1:], is_trained)
        names = self.interaction_ids
        return Tokens(
            row_ids=[names[i] for i in ends.tolist()],
            cu_seqlens=cu_seqlens,
            input_ids=ids,
            loss_mask=mask,
            logprobs=logprobs,
            versions=versions,
            interaction_ids=names,
            run_nodes=np.repeat(node.astype(np.int32), 2),
            run_lengths=lengths.ravel().astype(np.int32),
        )

    def output(self, i: int) -> tuple[Int32s, Float32s, Int32s]:
        """Output ids, logprobs and versions of one node."""
        self._check_there(np.array([i]))
        n = int(self.n_output[i])
        ids, logprobs, versions = copy_runs(self.addresses[i, 1:], np.full(3, n)).reshape(3, n)
        return ids, logprobs.view(np.float32), versions

    def _paths(self, ends: Longs, every_output: bool) -> tuple[Longs, Longs, Longs, Bools]:
        """Every (row, node) on the way from each end to its root, root first; how many tokens of the path up to the
        node's output the row has; and whether the node's output is trained in that row."""
        if len(ends) <= _FEW_ROWS:
            return self._paths_one_by_one(ends, every_output)
        row, node = np.arange(len(ends)), ends
        limit = np.full(len(ends), np.iinfo(np.int64).max)
        trained = np.ones(len(ends), np.bool_)
        levels = []
        while len(node):
            levels.append((row, node, limit, trained))
            shared = self.n_shared[node]
            limit = np.minimum(limit, shared)
            trained = trained & self.is_continuing[node] if every_output else np.zeros(len(node), np.bool_)
            node = self.parent[node]
            up = limit > 0
            if not up.all():
                row, node, limit, trained = row[up], node[up], limit[up], trained[up]
        if not levels:
            return row, node, limit, trained
        row, node, limit, trained = (np.concatenate(parts) for parts in zip(*reversed(levels), strict=True))
        order = np.argsort(row, kind="stable")
        return row[order], node[order], limit[order], trained[order]

    def packs(
        self, rows: Sequence[int] | Longs | None = None, *, max_tokens: int, form: Form = "individual"
    ) -> Iterator[Tokens]:
        """`load` in pieces of at most `max_tokens` tokens, in order; a longer row comes alone."""
        ends = self._ends(rows)
        until = np.cumsum(self.n_prompt[ends] + self.n_output[ends])
        at, done = 0, 0
        while at < len(ends):
            stop = max(at + 1, int(np.searchsorted(until, done + max_tokens, side="right")))
            yield self.load(ends[at:stop], form=form)
            at, done = stop, int(until[stop - 1])

    def trie(self, rows: Sequence[int] | Longs | None = None) -> Trie:
        """The forest above these nodes (default: all but the broken), every token once; only their outputs are trained.

        Prompts that begin alike are one there, too: the prompt of a group, or of samples of one request.
        """
        chosen = np.unique(self._ends(rows))
        parent, shared = self.parent.copy(), self.n_shared.copy()
        is_used = np.zeros(len(self), np.bool_)
        level = chosen
        while len(level):
            is_used[level] = True
            level = parent[level[shared[level] > 0]]
            level = np.unique(level[~is_used[level]])
        self._check_there(np.flatnonzero(is_used))
        used = np.flatnonzero(is_used).tolist()
        self._merge_prompts(used, parent, shared)
        # A node's own tokens are the stretch [shared, end) of its path; it is cut where others branch off.
        end = self.n_prompt + self.n_output
        branches: dict[int, dict[int, list[int]]] = {}  # node -> where it is cut -> who branches off there
        trees = []
        for i in used:
            at = int(shared[i])
            above = int(parent[i])
            while above >= 0 and shared[above] >= at:
                above = int(parent[above])
            if above < 0:
                trees.append(i)
            else:
                branches.setdefault(above, {}).setdefault(at, []).append(i)
        run_node: list[int] = []
        run_from: list[int] = []
        run_to: list[int] = []
        parents: list[int] = []
        stack = [(i, int(shared[i]), -1) for i in reversed(trees)]
        while stack:
            i, at, above = stack.pop()
            cuts = branches.get(i, {})
            stop = min((c for c in cuts if c > at), default=int(end[i]))
            if stop > at:
                run_node.append(i)
                run_from.append(at)
                run_to.append(stop)
                parents.append(above)
                above = len(parents) - 1
            if stop < end[i]:
                stack.append((i, stop, above))
            stack.extend((child, int(shared[child]), above) for child in reversed(cuts.get(stop, ())))
        ends = list(range(1, len(parents) + 1))
        for k in range(len(parents) - 1, -1, -1):
            if parents[k] >= 0:
                ends[parents[k]] = max(ends[parents[k]], ends[k])
        return self._trie_arrays(np.isin(np.arange(len(self)), chosen), run_node, run_from, run_to, parents, ends)

    def _merge_prompts(self, used: list[int], parent: Longs, shared: Longs) -> None:
        """Hang nodes that branch at one point, and whose prompts begin alike there, on one another."""
        siblings: dict[tuple[int, int], list[int]] = {}
        for i in used:
            siblings.setdefault((int(parent[i]) if shared[i] else -1, int(shared[i])), []).append(i)
        for (above, at), group in siblings.items():
            if above < 0:
                parent[group] = -1
            if len(group) < 2:
                continue
            prompts = {i: self._prompt(i) for i in group}
            ordered = sorted(group, key=lambda i: prompts[i].tobytes())  # any total order puts like beginnings together
            for before, i in pairwise(ordered):
                common = shared_prefix(prompts[before], prompts[i])
                if common:
                    parent[i], shared[i] = before, at + common

    def _prompt(self, i: int) -> Int32s:
        n = self.n_prompt[i] - self.n_shared[i]
        return copy_runs(self.addresses[i : i + 1, 0], np.array([n]))

    def _trie_arrays(
        self,
        is_chosen: Bools,
        run_node: list[int],
        run_from: list[int],
        run_to: list[int],
        parents: list[int],
        ends: list[int],
    ) -> Trie:
        node, start, stop = (np.array(a, np.int64) for a in (run_node, run_from, run_to))
        n_prompt = self.n_prompt[node]
        lengths = np.empty((len(node), 2), np.int64)
        lengths[:, 0] = np.maximum(np.minimum(stop, n_prompt) - start, 0)
        lengths[:, 1] = np.maximum(stop - np.maximum(start, n_prompt), 0)
        skipped = np.maximum(start - n_prompt, 0)  # output tokens of the node in runs before this one
        addresses = self.addresses[node]
        is_trained = is_chosen[node]
        ids, mask, logprobs, versions = _pack(
            lengths,
            addresses[:, 0] + 4 * (start - self.n_shared[node]),
            addresses[:, 1:] + 4 * skipped[:, None],
            is_trained,
        )
        sizes = stop - start
        starts = np.zeros(len(node) + 1, np.int32)
        np.cumsum(sizes, out=starts[1:])
        positions = np.arange(len(ids)) + np.repeat(start - starts[:-1], sizes)
        return Trie(
            input_ids=ids,
            loss_mask=mask,
            logprobs=logprobs,
            versions=versions,
            positions=positions.astype(np.int32),
            starts=starts,
            parents=np.array(parents, np.int32),
            ends=np.array(ends, np.int32),
            run_nodes=node.astype(np.int32),
            interaction_ids=self.interaction_ids,
        )

    def _paths_one_by_one(self, ends: Longs, every_output: bool) -> tuple[Longs, Longs, Longs, Bools]:
        """The same for few rows: a long path is shorter in steps of Python than in calls of NumPy."""
        ways: list[tuple[int, int, int, bool]] = []
        for row, node in enumerate(ends.tolist()):
            way, limit, is_trained = [], np.iinfo(np.int64).max, True
            while node >= 0 and limit > 0:
                way.append((row, node, limit, is_trained))
                limit = min(limit, self.n_shared.item(node))
                is_trained = is_trained and every_output and self.is_continuing.item(node)
                node = self.parent.item(node)
            ways += reversed(way)
        table = np.array(ways, np.int64).reshape(-1, 4)
        return table[:, 0], table[:, 1], table[:, 2], table[:, 3].astype(np.bool_)

    def _check_there(self, node: Longs) -> None:
        gone = self.is_pruned[node]
        if gone.any():
            name = self.interaction_ids[int(node[np.flatnonzero(gone)[0]])]
            raise PayloadPruned(f"the tokens of {name} were pruned; its facts are in the tables, its tokens are gone")


def _array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _pack(lengths: Longs, prompts: Longs, outputs: Longs, is_trained: Bools) -> tuple[Int32s, Bools, Float32s, Int32s]:
    """Ids, mask, logprobs and versions of runs. lengths [K, 2]: of prompt and output; prompts [K], outputs [K, 3]:
    addresses of prompt_ids, and of output_ids, logprobs and versions."""
    # What is not trained has no logprob: its runs are copied from a stretch of zeros, and of -1 for versions.
    longest = int(lengths.max(initial=1))
    blank = np.zeros((2, longest), np.int32)
    blank[1] = -1
    zeros, none = blank.ctypes.data, blank.ctypes.data + 4 * longest
    sources = np.empty((3, *lengths.shape), np.int64)
    sources[0, :, 0] = prompts
    sources[1, :, 0] = zeros
    sources[2, :, 0] = none
    sources[:, :, 1] = outputs.T
    if not is_trained.all():
        sources[1, ~is_trained, 1] = zeros
        sources[2, ~is_trained, 1] = none
    flat = lengths.ravel()
    ids, logprobs, versions = copy_runs(sources.ravel(), np.concatenate([flat, flat, flat])).reshape(3, -1)
    mask = np.zeros(lengths.shape, np.bool_)
    mask[:, 1] = is_trained
    return ids, np.repeat(mask.ravel(), flat), logprobs.view(np.float32), versions


_EDGES = pa.array(["extends", "retries", "compacts"])


# ---------------------------------------------------------------- AReaL's forms


def export(
    nodes: Nodes, rewards: Mapping[str, float | None], *, style: str = "individual"
) -> dict[str, dict[str, npt.NDArray[Any]]]:
    """One session's samples as AReaL's users expect them: interaction id -> arrays with a batch dimension of 1.

    input_ids, loss_mask, logprobs and versions as in `Tokens`, attention_mask, and rewards [1] (NaN where there is
    none). `individual`: every interaction. `concat`: the leaves, with every output on the way; all edges must be
    token-exact. `tree`: the whole forest once, under the id of its first interaction, with the runs of `Trie`.
    Raises ValueError for another style, and for `concat` where a history was rendered anew.
    """
    if style == "tree":
        trie = nodes.trie()
        if not trie.n_tokens:
            return {}
        fields = ("input_ids", "loss_mask", "logprobs", "versions", "positions", "starts", "parents", "ends")
        arrays = {name: np.asarray(getattr(trie, name))[None] for name in fields}
        arrays["attention_mask"] = np.ones((1, trie.n_tokens), np.bool_)
        values = [rewards.get(trie.interaction_ids[k]) for k in trie.run_nodes.tolist()]
        arrays["rewards"] = np.array([np.nan if v is None else v for v in values], np.float32)
        return {trie.interaction_ids[int(trie.run_nodes[0])]: arrays}
    if style == "individual":
        tokens = nodes.load()
    elif style == "concat":
        is_exact = nodes.is_continuing | nodes.is_root
        if not is_exact.all():
            raise ValueError(
                "Cannot export interactions in 'concat' style: "
                f"{nodes.interaction_ids[int(np.flatnonzero(~is_exact)[0])]} was rendered anew from its messages, so "
                "its prompt is not its parent's tokens; use style 'individual'"
            )
        tokens = nodes.load(nodes.leaves(), form="trajectory")
    else:
        raise ValueError(f"Invalid export interactions style {style!r}; expected 'individual', 'concat' or 'tree'")
    samples = {}
    for r, name in enumerate(tokens.row_ids):
        at = tokens.row(r)
        reward = rewards.get(name)
        samples[name] = {
            "input_ids": tokens.input_ids[None, at],
            "loss_mask": tokens.loss_mask[None, at].astype(np.int32),
            "logprobs": tokens.logprobs[None, at],
            "versions": tokens.versions[None, at],
            "attention_mask": np.ones((1, at.stop - at.start), np.bool_),
            "rewards": np.array([np.nan if reward is None else reward], np.float32),
        }
    return samples
