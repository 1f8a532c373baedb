"""Rows as a trie in which every token is computed once.

Rows that begin alike (one prompt of a group, one history of a conversation) share those tokens; a token that stands in
several rows is one node, and each row keeps its own entries that point at it, so the loss weighs it exactly as if it
stood in each. The nodes are laid out depth first: a token sees the tokens before it whose subtree it lies in.

Shapes: R rows, E entries, T nodes, P predictors (nodes whose logits are needed), [B, L] the packed layout.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from .rows import Draw, Floats, Ints, Rows

Form = Literal["trie", "paths"]

TREE_COST = 1.15
"""What a node of a trie costs against one of a plain causal path: attention with a mask that depends on the data
(about 15 % of a step, measured on an H200). A trie that saves less is not made."""


@dataclass(frozen=True)
class Trie:
    """One forward pass. The last token of a path predicts nothing that is trained, so it is no node."""

    row_indices: Ints  # which rows of the batch, in the order of the entries here
    ids_T: Ints
    depth_T: Ints  # position in the path: what the model's position embedding sees
    end_T: Ints  # end of the node's subtree: node k is seen by q iff k <= q < end_T[k]
    node_P: Ints  # predictors, ascending; one for each distribution that is asked of a node
    predictor_E: Ints  # which predictor's logits an entry needs
    target_E: Ints  # the token sampled there
    row_E: Ints  # position in row_indices
    entry_E: Ints  # index of the entry in the batch
    draws: tuple[Draw | None, ...] = (None,)  # the distributions that its tokens were drawn from
    draw_P: Ints | None = None  # which of them a predictor has; None: the first

    @property
    def n_nodes(self) -> int:
        return len(self.ids_T)

    @property
    def is_forked(self) -> bool:
        """Whether any of its trees is more than one path."""
        roots = np.flatnonzero(self.depth_T == 0)
        tree_end = np.repeat(np.append(roots[1:], self.n_nodes), np.diff(np.append(roots, self.n_nodes)))
        return bool((self.end_T != tree_end).any())


def build(rows: Rows, row_indices: Ints | None = None, *, form: Form = "trie", least: int = 1) -> Trie:
    """The trie of some rows (default: all). A fork that saves fewer than `least` tokens is made further up.

    form="paths" shares only between rows of which one continues the other: one path per leaf, plain causal attention.
    """
    chosen = np.arange(len(rows)) if row_indices is None else np.asarray(row_indices)
    order = _depth_first(rows, chosen)
    shared = _shared_with_previous(rows, order, least)
    ids: list[Ints] = []
    depths: list[Ints] = []
    n_nodes = 0
    ends: list[tuple[Ints, int]] = []  # nodes whose subtree ends at that count
    path_nodes = np.empty(0, np.int64)  # nodes of the path being walked
    previous = np.empty(0, rows.ids.dtype)
    nodes: dict[int, Ints] = {}  # row -> predictor node of each of its entries
    for r, common in zip(order, shared.tolist(), strict=True):
        path = rows.path(r)[:-1]
        if form == "paths" and common < len(previous):
            common = 0
        fresh = len(path) - common
        ends.append((path_nodes[common:], n_nodes))
        path_nodes = np.concatenate([path_nodes[:common], np.arange(n_nodes, n_nodes + fresh)])
        ids.append(path[common:])
        depths.append(np.arange(common, len(path)))
        n_nodes += fresh
        nodes[int(r)] = path_nodes[rows.n_prompt[r] - 1 :]
        previous = path
    ends.append((path_nodes, n_nodes))
    end_T = np.empty(n_nodes, np.int64)
    for closed, at in ends:
        end_T[closed] = at
    out = rows.output_starts
    empty = np.empty(0, np.int64)
    node_E = np.concatenate([nodes[int(r)] for r in chosen]) if len(chosen) else empty
    entry_E = np.concatenate([np.arange(out[r], out[r + 1]) for r in chosen]) if len(chosen) else empty
    row_E = np.repeat(np.arange(len(chosen)), rows.n_output[chosen])
    drawn = [rows.draws[r] for r in chosen] if rows.draws else [None] * len(chosen)
    draws = tuple(dict.fromkeys(drawn)) or (None,)
    draw_E = np.array([draws.index(draw) for draw in drawn], np.int64)[row_E]
    asked_P, predictor_E = np.unique(node_E * len(draws) + draw_E, return_inverse=True)
    return Trie(
        row_indices=chosen,
        ids_T=np.concatenate(ids) if ids else empty,
        depth_T=np.concatenate(depths) if depths else empty,
        end_T=end_T,
        node_P=asked_P // len(draws),
        predictor_E=predictor_E,
        target_E=np.concatenate([rows.path(r)[rows.n_prompt[r] :] for r in chosen]) if len(chosen) else empty,
        row_E=row_E,
        entry_E=entry_E,
        draws=draws,
        draw_P=asked_P % len(draws),
    )


def cost(trie: Trie, hidden: int) -> float:
    """What a trie costs, in tokens of a model of this hidden size.

    A token takes 6 N operations and each token it sees 12 L H more; N is about 12 L H^2, so one seen token is 1 / 6H.
    """
    return trie.n_nodes + float((trie.depth_T + 1).sum()) / (6 * hidden)


def micro_batches(
    rows: Rows,
    row_indices: Ints | None = None,
    *,
    max_tokens: int,
    at_least: int = 1,
    ranks: int = 1,
    hidden: int = 1024,
    least: int = 1,
    form: Form | None = None,
) -> Iterator[Trie]:
    """Cut rows into tries of at most `max_tokens` nodes.

    A row never leaves its path: what its micro-batch lacks of a shared prefix is computed again there. A single path
    longer than the budget stands alone, with all rows that it goes on from. Neighbours in the tree stay together, so
    little is computed twice.
    Several ranks get a multiple of their number, all of about the same cost (for a model of this hidden size).
    least: see `build`. form None: the cheaper one, see TREE_COST.
    """
    chosen = np.arange(len(rows)) if row_indices is None else np.asarray(row_indices)
    if not len(chosen):
        return
    order = _depth_first(rows, chosen)
    lengths = np.diff(rows.starts)[order] - 1
    shared = _shared_with_previous(rows, order, least)
    continued = np.where(shared == np.append(0, lengths[:-1]), shared, 0)
    plans = {
        name: _plan(lengths, seen, continued > 0, max_tokens=max_tokens, at_least=at_least, ranks=ranks, hidden=hidden)
        for name, seen in (("trie", shared), ("paths", continued))
        if form in (None, name)
    }
    if form is None:
        form = "trie" if plans["trie"][1] * TREE_COST < plans["paths"][1] else "paths"
    for start, end in plans[form][0]:
        yield build(rows, np.sort(order[start:end]), form=form, least=least)


def _plan(
    lengths: Ints,
    seen: Ints,
    continues: npt.NDArray[np.bool_],
    *,
    max_tokens: int,
    at_least: int,
    ranks: int,
    hidden: int,
) -> tuple[list[tuple[int, int]], int]:
    """Where a depth-first order of rows is cut, and the nodes that are computed in all.

    seen: tokens of a row that the one before it computes. continues: a row goes on where the one before it ends. As few
    pieces as memory, `at_least` and a multiple of `ranks` allow, and of the ways to cut them the one whose dearest
    piece is cheapest.
    """

    def costs(start: Ints, end: Ints) -> Floats:
        pairs = (end * (end + 1) - start * (start + 1)) / 2
        return np.asarray(end - start + pairs / (6 * hidden))

    # A piece may hold so many tokens, and may cost so much.
    fresh = np.stack([lengths - seen, costs(seen, lengths)], axis=1)
    whole = np.stack([lengths, costs(np.zeros_like(lengths), lengths)], axis=1)
    limits = np.array([max_tokens, np.inf])
    cuts = _cut(fresh, whole, continues, limits)
    n_pieces = -(-max(len(cuts), at_least) // ranks) * ranks
    if n_pieces > 1:
        low, high = float(fresh[:, 1].sum()) / n_pieces, float(whole[:, 1].sum())
        while high - low > 0.01 * low:
            middle = (low + high) / 2
            tried = _cut(fresh, whole, continues, np.array([max_tokens, middle]))
            if len(tried) <= n_pieces:
                high, cuts = middle, tried
            else:
                low = middle
    total = sum(int(lengths[i]) for i in cuts) + int(np.delete(fresh[:, 0], cuts).sum())
    return list(zip(cuts, [*cuts[1:], len(lengths)], strict=True)), total


def _cut(fresh: Floats, whole: Floats, continues: npt.NDArray[np.bool_], limits: Floats) -> list[int]:
    """Where pieces begin if each takes what its limits allow.

    fresh, whole: what each row takes behind the one before it, and at the beginning of a piece: tokens and cost. Cuts
    fall between chains where a chain fits, since the row after a cut computes all of its prefix. A chain of more tokens
    than fit is a piece of its own: its last row alone takes as many.
    """
    starts = np.flatnonzero(~continues)
    chain = dict(zip(starts.tolist(), np.add.reduceat(fresh, starts), strict=True))
    cuts, size = [0], whole[0]
    for i in range(1, len(fresh)):
        more = fresh[i]
        if i in chain and (chain[i] <= limits).all():
            more = chain[i]
        is_over = size + more > limits
        if continues[i] and size[0] == whole[i - 1, 0]:  # the piece is one path, and this row goes on with it
            is_over[0] = False
        elif i in chain and chain[i][0] > limits[0]:
            is_over[0] = True
        if is_over.any():
            cuts.append(i)
            size = whole[i]
        else:
            size = size + fresh[i]
    return cuts


@dataclass(frozen=True)
class Layout:
    """Nodes packed into B sequences of L: whole trees side by side, the rest padding that sees only itself."""

    ids_BL: Ints
    depth_BL: Ints
    end_BL: Ints  # counted within the sequence
    place_P: Ints  # predictor -> b * L + l
    is_causal: bool  # each sequence is one path: no mask is needed

    @property
    def shape(self) -> tuple[int, int]:
        batch, length = self.ids_BL.shape
        return batch, length


def pack(trie: Trie, *, length: int | None = None, pad_id: int = 0) -> Layout:
    """Put a trie's trees into sequences. length None: the longest tree (attention is quadratic on a CPU)."""
    roots = np.flatnonzero(trie.depth_T == 0)
    sizes = np.diff(np.append(roots, trie.n_nodes))
    capacity = max(int(sizes.max()), length or 0)
    room: list[int] = []
    batch_of, offset_of = np.empty(len(roots), np.int64), np.empty(len(roots), np.int64)
    for tree in np.argsort(-sizes, kind="stable"):
        size = int(sizes[tree])
        b = next((b for b, free in enumerate(room) if free >= size), len(room))
        if b == len(room):
            room.append(capacity)
        batch_of[tree], offset_of[tree] = b, capacity - room[b]
        room[b] -= size
    tree_T = np.repeat(np.arange(len(roots)), sizes)
    within_T = np.arange(trie.n_nodes) - roots[tree_T] + offset_of[tree_T]
    shape = (len(room), capacity)
    ids_BL = np.full(shape, pad_id, np.int64)
    depth_BL = np.zeros(shape, np.int64)
    end_BL = np.broadcast_to(np.arange(1, capacity + 1), shape).copy()
    ids_BL[batch_of[tree_T], within_T] = trie.ids_T
    depth_BL[batch_of[tree_T], within_T] = trie.depth_T
    end_BL[batch_of[tree_T], within_T] = trie.end_T - roots[tree_T] + offset_of[tree_T]
    return Layout(
        ids_BL=ids_BL,
        depth_BL=depth_BL,
        end_BL=end_BL,
        place_P=batch_of[tree_T[trie.node_P]] * capacity + within_T[trie.node_P],
        is_causal=len(room) == len(roots) and not trie.is_forked,
    )


def in_one(trie: Trie) -> Layout:
    """All trees in one sequence, as they are."""
    return Layout(trie.ids_T[None], trie.depth_T[None], trie.end_T[None], trie.node_P, is_causal=False)


def _depth_first(rows: Rows, chosen: Ints) -> Ints:
    """Sorted by content, which puts rows that share a prefix beside each other and a prefix before its extensions."""
    keys = [rows.path(r)[:-1].astype(">u4").tobytes() for r in chosen]
    return chosen[np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)]


def _shared_with_previous(rows: Rows, order: Ints, least: int) -> Ints:
    """How many tokens each row (but for its last) has in common with the one before it.

    A fork less than `least` tokens below the fork above it is made there: a few tokens computed twice are cheaper than
    one more piece of attention. Rows that go on where the one before them ends are no forks.
    """
    shared = np.zeros(len(order), np.int64)
    is_fork = np.zeros(len(order), np.bool_)
    for i in range(1, len(order)):
        before = rows.path(order[i - 1])[:-1]
        shared[i] = _common_prefix(before, rows.path(order[i])[:-1])
        is_fork[i] = shared[i] < len(before)
    if least > 1:
        waiting = [(np.flatnonzero(is_fork), 0)]  # forks inside one subtree, and the depth of the fork above them
        while waiting:
            forks, above = waiting.pop()
            if not len(forks):
                continue
            depth = int(shared[forks].min())
            highest = shared[forks] == depth
            made = depth if depth - above >= least else above
            shared[forks[highest]] = made
            waiting += [(part[shared[part] > made], made) for part in np.split(forks, np.flatnonzero(highest))]
    return shared


def _common_prefix(a: Ints, b: Ints) -> int:
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n
