"""Placing many nodes at once gives what one finds by walking up from each."""

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.store.placing import COMPACTS, EXTENDS, NO_MAX, NO_MIN, RETRIES, Above, Places, find_broken, place

N_ABOVE = 2


def walk(i: int, parent: list[int], edge: list[int]) -> tuple[int, int]:
    """(up, its edge) of a node: a retry stands on what the node that it repeats stands on."""
    while i < len(parent) and edge[i] == RETRIES and parent[i] >= 0:
        i = parent[i]
    return (-1, -1) if i >= len(parent) else (parent[i], edge[i] if parent[i] >= 0 else -1)


def cut_circles(ids: list[str], parent: list[int]) -> list[int]:
    parent = list(parent)
    for i in range(len(parent)):
        way = [i]
        while 0 <= parent[way[-1]] < len(parent):
            after = parent[way[-1]]
            if after in way:
                circle = way[way.index(after) :]
                parent[min(circle, key=ids.__getitem__)] = -1
                break
            way.append(after)
    return parent


def expected(ids: list[str], parent: list[int], edge: list[int], amounts: list[int], i: int) -> dict[str, Any]:
    """The place of node i; the nodes above are roots of depth 0 with one node of 100 tokens and of versions 3 to 5."""
    n = len(parent)
    up, up_edge = walk(i, parent, edge)
    own = {"up": up, "up_edge": up_edge, "depth": 0, "top": i, "root": i, "start": i, "path_n": 1}
    own |= {"path_output": amounts[i], "path_version_min": amounts[i], "path_version_max": amounts[i]}
    if up < 0:
        return own
    if up >= n:
        over = {"depth": 0, "top": up + N_ABOVE, "root": up + 2 * N_ABOVE, "start": up + 3 * N_ABOVE, "path_n": 1}
        over |= {"path_output": 100, "path_version_min": 3, "path_version_max": 5}
    else:
        over = expected(ids, parent, edge, amounts, up)
    own |= {"depth": over["depth"] + 1, "top": over["top"]}
    if up_edge != COMPACTS:
        own["root"] = over["root"]
    if up_edge == EXTENDS:
        own |= {"start": over["start"], "path_n": over["path_n"] + 1}
        own["path_output"] += over["path_output"]
        own["path_version_min"] = min(own["path_version_min"], over["path_version_min"])
        own["path_version_max"] = max(own["path_version_max"], over["path_version_max"])
    return own


def placed(ids: list[str], parent: list[int], edge: list[int], amounts: list[int]) -> Places:
    ones = np.ones(N_ABOVE, np.int64)
    above = Above(
        up=-ones, up_edge=-ones, depth=0 * ones, path_n=ones, path_output=100 * ones, path_version_min=3 * ones,
        path_version_max=5 * ones,
    )  # fmt: skip
    numbers = np.array(amounts, np.int64)
    return place(pa.array(ids), np.array(parent), np.array(edge), numbers, numbers, numbers, above)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 9))
def test_every_node_stands_where_a_walk_up_from_it_leads(data: st.DataObject, n: int) -> None:
    ids = data.draw(st.permutations([f"i{k}" for k in range(n)]))
    parent = data.draw(st.lists(st.integers(-1, n + N_ABOVE - 1), min_size=n, max_size=n))
    edge = data.draw(st.lists(st.integers(-1, 3), min_size=n, max_size=n))
    amounts = data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    places = placed(ids, parent, edge, amounts)
    acyclic = cut_circles(ids, parent)
    for i in range(n):
        want = expected(ids, acyclic, edge, amounts, i)
        assert {name: int(getattr(places, name)[i]) for name in want} == want


def test_a_node_without_tokens_has_no_versions_and_takes_none_away() -> None:
    nothing = np.zeros(0, np.int64)
    above = Above(nothing, nothing, nothing, nothing, nothing, nothing, nothing)
    places = place(
        pa.array(["a", "b"]), np.array([-1, 0]), np.array([-1, EXTENDS]), np.array([0, 2]),
        np.array([NO_MIN, 4]), np.array([NO_MAX, 4]), above,
    )  # fmt: skip
    assert places.path_version_min.tolist() == [NO_MIN, 4]
    assert places.path_version_max.tolist() == [NO_MAX, 4]


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 9))
def test_a_node_is_broken_where_a_walk_up_meets_tokens_that_nobody_has(data: st.DataObject, n: int) -> None:
    parent = data.draw(st.lists(st.integers(-1, n + N_ABOVE - 1), min_size=n, max_size=n))
    shared = data.draw(st.lists(st.integers(0, 6), min_size=n, max_size=n))
    paths = data.draw(st.lists(st.integers(2, 6), min_size=n + N_ABOVE, max_size=n + N_ABOVE))
    above = data.draw(st.lists(st.booleans(), min_size=N_ABOVE, max_size=N_ABOVE))

    def is_broken(i: int, steps: int = 0) -> bool:
        if i >= n:
            return above[i - n]
        if shared[i] == 0:
            return False
        return parent[i] < 0 or shared[i] > paths[parent[i]] or steps > n or is_broken(parent[i], steps + 1)

    found = find_broken(np.array(parent), np.array(shared), np.array(paths), np.array(above))
    assert found.tolist() == [is_broken(i) for i in range(n)]
