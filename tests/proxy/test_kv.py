"""Keys and values are found again by exactly the text they were computed for."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.proxy.kv import KVShape, PrefixTree, Rows

SHAPE = KVShape(n_layers=1, n_heads=1, head_size=1, dtype=torch.float64, device=torch.device("cpu"))
texts = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=12), min_size=1, max_size=12)


def kv_of(ids: list[int]) -> torch.Tensor:
    """[2, 1, 1, T, 1], each place a number that names all ids up to it, as a real model's would depend on them."""
    values = [float(int("".join(map(str, ids[: n + 1])))) for n in range(len(ids))]
    return torch.tensor(values, dtype=torch.float64).reshape(1, 1, 1, -1, 1).expand(2, 1, 1, -1, 1).clone()


def n_common(a: list[int], b: list[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def matched(tree: PrefixTree, ids: list[int]) -> torch.Tensor:
    return torch.cat([SHAPE.piece(0), *tree.match(np.array(ids, np.int32))], 3)


@settings(max_examples=60, deadline=None)
@given(texts, texts)
def test_the_longest_known_beginning_is_found_with_its_own_values(
    known: list[list[int]], asked: list[list[int]]
) -> None:
    tree = PrefixTree(SHAPE)
    for ids in known:
        tree.insert(np.array(ids, np.int32), kv_of(ids))
    assert tree.n_tokens == len({tuple(ids[: n + 1]) for ids in known for n in range(len(ids))})
    for ids in asked:
        n = max(n_common(ids, other) for other in known)
        assert torch.equal(matched(tree, ids), kv_of(ids)[..., :n, :])


@settings(max_examples=60, deadline=None)
@given(texts, st.integers(0, 20))
def test_a_shrunk_tree_is_small_and_still_true(known: list[list[int]], most: int) -> None:
    tree = PrefixTree(SHAPE)
    for ids in known:
        tree.insert(np.array(ids, np.int32), kv_of(ids))
        tree.shrink(most)
        assert tree.n_tokens <= most
    for ids in known:
        found = matched(tree, ids)
        assert torch.equal(found, kv_of(ids)[..., : found.shape[3], :])


def test_what_was_used_last_is_forgotten_last() -> None:
    tree = PrefixTree(SHAPE)
    for ids in ([1, 1, 1], [2, 2, 2], [3, 3, 3]):
        tree.insert(np.array(ids, np.int32), kv_of(ids))
    matched(tree, [1, 1, 1])
    tree.shrink(7)
    assert [matched(tree, ids).shape[3] for ids in ([1, 1, 1], [2, 2, 2], [3, 3, 3])] == [3, 0, 3]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 100)), max_size=40))
def test_rows_stay_dense_and_keep_what_they_hold(steps: list[tuple[bool, int]]) -> None:
    rows: Rows[int] = Rows(SHAPE, 4)
    held: list[int] = []
    for number, (is_add, pick) in enumerate(steps):
        if is_add or not held:
            rows.resize(rows.wanted_slots())
            slot = rows.add(number)
            rows.slot(slot)[:] = number
            held.append(number)
        else:
            gone = held.pop(pick % len(held))
            rows.remove(rows.sequences.index(gone))
        assert sorted(rows.sequences) == sorted(held)
        for slot, sequence in enumerate(rows.sequences):
            assert (rows.slot(slot) == sequence).all()
        if held:
            keys, values = rows.layer(0)
            assert keys.shape == values.shape == (len(held), 1, 4, 1)
