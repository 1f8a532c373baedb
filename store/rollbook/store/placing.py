"""Where nodes stand in their trees: depth, top, root, start of the trajectory and what lies from there to the node.

All nodes of a chunk at once, by jumps that double: after k rounds every node knows what lies 2^k nodes above it, so
a conversation of 10,000 turns takes 14 rounds, and none of them is a loop in Python.

A node whose parent is not known (yet) stands as a root, and so does the node with the smallest id of a circle of
parents. A retry stands beside the node that it repeats, on what that one stands on.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Index = npt.NDArray[np.int64]

EDGES = pa.array(["extends", "rerendered", "compacts", "retries"])
"""An edge as a number is its place here; -1 for none."""

EXTENDS, COMPACTS, RETRIES = 0, 2, 3

NO_MIN, NO_MAX = 2**31 - 1, -(2**31)
"""Of a node without sampled tokens: its oldest and newest version."""


@dataclass(frozen=True)
class Above:
    """[M] Nodes that are placed already and may be parents. up: as `Places.up`; the rest as the columns."""

    up: Index
    up_edge: Index
    depth: Index
    path_n: Index
    path_output: Index
    path_version_min: Index
    path_version_max: Index


@dataclass(frozen=True)
class Places:
    """[N] Where each node is. up, top, root, start: which node; -1 for none.

    top, root and start may be those of a node above: N + M + m for top, N + 2 M + m for root, N + 3 M + m for start of
    the m-th of them.
    """

    up: Index
    up_edge: Index
    depth: Index
    top: Index
    root: Index
    start: Index
    path_n: Index
    path_output: Index
    path_version_min: Index
    path_version_max: Index


def place(
    ids: pa.Array, parent: Index, edge: Index, n_output: Index, version_min: Index, version_max: Index, above: Above
) -> Places:
    """Place N nodes. parent: [N] which node, n + m for the m-th node above, -1 for none; ids: of the nodes."""
    n, m = len(parent), len(above.depth)
    parent = _without_circles(ids, parent)
    own = np.arange(n + m)
    # A retry repeats a node, which may itself be a retry.
    repeated = own.copy()
    is_retry = np.flatnonzero((edge == RETRIES) & (parent >= 0))
    repeated[is_retry] = parent[is_retry]
    (repeated,) = _ends(repeated)
    up = np.concatenate([parent, above.up])[repeated[:n]]
    up_edge = np.where(up >= 0, np.concatenate([edge, above.up_edge])[repeated[:n]], -1)

    def links(condition: npt.NDArray[np.bool_]) -> Index:
        link = own.copy()
        link[:n] = np.where(condition, up, own[:n])
        return link

    # What stands above is where a way ends: what it says holds for all below.
    top, hops = _ends(links(up >= 0), np.ones(n + m, np.int64))
    depth = hops[:n] + np.concatenate([np.zeros(n, np.int64), above.depth])[top[:n]]
    (root,) = _ends(links((up >= 0) & (up_edge != COMPACTS)))
    link = links((up >= 0) & (up_edge == EXTENDS))
    start, n_path, output = _ends(link, np.ones(n + m, np.int64), np.concatenate([n_output, above.path_output]))
    version_min = _over(np.minimum, link, np.concatenate([version_min, above.path_version_min]))
    version_max = _over(np.maximum, link, np.concatenate([version_max, above.path_version_max]))
    top, root, start = top[:n], root[:n], start[:n]
    return Places(
        up=up,
        up_edge=up_edge,
        depth=depth,
        top=np.where(top >= n, top + m, top),
        root=np.where(root >= n, root + 2 * m, root),
        start=np.where(start >= n, start + 3 * m, start),
        path_n=n_path[:n] + np.concatenate([np.ones(n, np.int64), above.path_n])[start],
        path_output=output[:n] + np.concatenate([n_output, above.path_output])[start],
        path_version_min=version_min[:n],
        path_version_max=version_max[:n],
    )


def find_broken(
    parent: Index, n_shared: Index, n_path: Index, above: npt.NDArray[np.bool_] | None = None
) -> npt.NDArray[np.bool_]:
    """[N] Which nodes cannot be rebuilt: they share tokens of no node that is here, more than the path of their parent
    has, or of a circle of parents, or share tokens of a node that cannot be rebuilt.

    parent, n_shared: [N], as in `place`; n_path: [N + M] tokens of each node's prompt and output; above: [M] which of
    the nodes above cannot be rebuilt.
    """
    n, own = len(parent), np.arange(len(n_path))
    is_sharing = n_shared > 0
    link = own.copy()
    link[:n] = np.where(is_sharing & (parent >= 0), parent, own[:n])
    is_broken = np.zeros(len(n_path), np.bool_)
    if above is not None:
        is_broken[n:] = above
    is_broken[:n] = is_sharing & ((parent < 0) | (parent == own[:n]) | (n_shared > n_path[parent]))
    if (link > own)[:n].any():  # parents come first, else look for circles; the nodes above are in none
        jump = link
        for _ in range(len(n_path).bit_length()):
            jump = jump[jump]
        is_broken |= link[jump] != jump
    if not is_broken.any():
        return is_broken[:n]
    return _over(np.logical_or, np.where(is_broken, own, link), is_broken)[:n]


def find_pruned(
    parent: Index, n_shared: Index, is_broken: npt.NDArray[np.bool_], is_taken: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """[N] Which nodes were pruned, or share tokens of one that was.

    parent, n_shared, is_broken: [N], as in `find_broken`; is_taken: [N + M] which nodes `prune` took, of those above:
    which were found here.
    """
    link = np.arange(len(is_taken))
    is_linked = (n_shared > 0) & (parent >= 0) & ~is_broken  # what is not broken is in no circle
    link[: len(parent)][is_linked] = parent[is_linked]
    return _over(np.logical_or, link, is_taken)[: len(parent)]


def _ends(link: Index, *amounts: Index) -> tuple[Index, ...]:
    """Where each way along `link` ends (there it leads to itself), and the amounts on the way, the end's left out."""
    sums = [np.where(link == np.arange(len(link)), 0, amount) for amount in amounts]
    while not np.array_equal(further := link[link], link):
        sums = [total + total[link] for total in sums]
        link = further
    return link, *sums


def _over(how: np.ufunc, link: Index, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`how` (minimum or maximum) over each way along `link`, its end with it."""
    while True:
        values = how(values, values[link])
        if np.array_equal(further := link[link], link):
            return values
        link = further


def _without_circles(ids: pa.Array, parent: Index) -> Index:
    n = len(parent)
    if (np.where(parent < n, parent, -1) < np.arange(n)).all():  # as the events of one writer come, always
        return parent
    jump = np.append(np.where((parent >= 0) & (parent < n), parent, n), n)
    for _ in range(n.bit_length()):
        jump = jump[jump]
    inside = set(jump[jump < n].tolist())  # whoever has not come to an end after n jumps is in a circle
    if not inside:
        return parent
    parent = parent.copy()
    while inside:
        circle = [inside.pop()]
        while (after := int(parent[circle[-1]])) != circle[0]:
            circle.append(after)
        inside.difference_update(circle)
        parent[min(circle, key=lambda node: str(ids[node]))] = -1
    return parent
