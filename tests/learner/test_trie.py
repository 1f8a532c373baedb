"""A token computed once counts exactly as if it were computed in every row."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from learner.tiny import make_rows, random_rows, tiny_model
from rollbook.learner.backend import segments
from rollbook.learner.backend.attention import NAME, attend, block_mask, dense_mask
from rollbook.learner.backend.head import Distribution
from rollbook.learner.backend.model import TreeModel
from rollbook.learner.rows import Draw, Rows
from rollbook.learner.trie import Trie, build, micro_batches, pack


def row_by_row(model: nn.Module, rows: Rows, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The plain computation: one forward pass per interaction."""
    logprobs, entropies = [], []
    for r in range(len(rows)):
        path = torch.as_tensor(rows.path(r), dtype=torch.int64)[None]
        n = int(rows.n_prompt[r])
        logits = model(input_ids=path).logits[0, n - 1 : -1] / temperature
        logp = logits.log_softmax(-1)
        logprobs.append(logp.gather(-1, path[0, n:, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def by_trie(
    model: nn.Module, rows: Rows, tries: list[Trie], d: Distribution, *, in_segments: bool | None = None
) -> tuple[Tensor, Tensor]:
    tree = TreeModel(model, d)
    tree.in_segments = in_segments
    n = int(rows.n_output.sum())
    logprobs, entropies = torch.zeros(2, n, dtype=torch.float64).unbind(0)
    for trie in tries:
        logprob_E, entropy_E = tree(trie)
        index = torch.as_tensor(trie.entry_E)
        logprobs = logprobs.index_copy(0, index, logprob_E)
        entropies = entropies.index_copy(0, index, entropy_E)
    return logprobs, entropies


def gradients(model: nn.Module, value: Tensor) -> Tensor:
    model.zero_grad()
    value.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("form", ["trie", "paths"])
@pytest.mark.parametrize("budget", [10_000, 12])
@pytest.mark.parametrize("seed", range(6))
def test_logprobs_entropies_and_gradient_are_those_of_row_by_row(seed: int, budget: int, form: str) -> None:
    model = tiny_model(seed=seed, dtype=torch.float64)
    rows = random_rows(seed)
    temperature = 0.7
    tries = list(micro_batches(rows, max_tokens=budget, form=form))  # type: ignore[arg-type]
    weight = torch.as_tensor(np.random.default_rng(seed).normal(size=len(rows.logprobs)))
    plain = row_by_row(model, rows, temperature)
    shared = by_trie(model, rows, tries, Distribution(temperature=temperature))
    for one, other in zip(plain, shared, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    expected = gradients(model, (weight * (plain[0] ** 2 + plain[1] ** 2)).sum())
    got = gradients(model, (weight * (shared[0] ** 2 + shared[1] ** 2)).sum())
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-10)


def ragged_forward(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float) -> Any:
    """What kernels of ragged batches do, a segment at a time."""
    assert longest == int(starts.diff().max())
    found = [segments.PLAIN.forward(*(x[:, :, a:b] for x in (q, k, v)), True, scale) for a, b in pairwise(starts)]
    return torch.cat([out for out, _ in found], 2), torch.cat([lse for _, lse in found], 2)


def ragged_backward(*args: Any) -> Any:
    *tensors, starts, _, scale = args
    found = [segments.PLAIN.backward(*(x[:, :, a:b] for x in tensors), True, scale) for a, b in pairwise(starts)]
    return tuple(torch.cat(parts, 2) for parts in zip(*found, strict=True))


RAGGED = replace(segments.PLAIN, ragged=segments.Ragged(ragged_forward, ragged_backward))


def in_pieces_as_row_by_row(rows: Rows, tries: list[Trie], seed: int, *, is_compiled: bool = False) -> None:
    model = tiny_model(seed=seed, dtype=torch.float64)
    model.config._attn_implementation = NAME
    plain = row_by_row(model, rows)
    if is_compiled:
        for layer in model.get_decoder().layers:  # type: ignore[operator]
            layer.compile(fullgraph=True, backend="aot_eager")
    weight = torch.as_tensor(np.random.default_rng(seed).normal(size=len(rows.logprobs)))

    def loss(logprobs_E: Tensor, entropies_E: Tensor) -> Tensor:
        return (weight * (logprobs_E**2 + entropies_E**2)).sum()

    pieces = by_trie(model, rows, tries, Distribution(), in_segments=True)
    for one, other in zip(plain, pieces, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    expected = gradients(model, loss(*plain))
    torch.testing.assert_close(gradients(model, loss(*pieces)), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kernel", [segments.PLAIN, RAGGED], ids=["padded", "ragged"])
@pytest.mark.parametrize("seed", range(8))
def test_a_tree_in_dense_pieces_is_the_tree(
    seed: int, kernel: segments.Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "kernel_for", lambda *_: kernel)
    rows = random_rows(seed, n_turns=5)
    least, budget = 1 + seed % 3, 10_000 if seed % 2 else 40
    in_pieces_as_row_by_row(rows, list(micro_batches(rows, max_tokens=budget, form="trie", least=least)), seed)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own look at its inputs
def test_a_compiled_layer_is_one_graph_whatever_the_tree() -> None:
    torch.compiler.reset()
    for seed in range(2):
        rows = random_rows(seed, n_turns=5)
        in_pieces_as_row_by_row(rows, list(micro_batches(rows, max_tokens=60, form="trie")), seed, is_compiled=True)


def test_a_long_segment_is_a_call_of_its_own_and_a_single_token_is_never_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "LONG", 8)
    rng = np.random.default_rng(0)
    tails = [rng.integers(0, 32, n).tolist() for n in (12, 12, 11, 6, 5, 1)]
    rows = make_rows([(list(range(9)), [i, *tail]) for i, tail in enumerate(tails)])
    trie = build(rows)
    triangles = segments.plan(trie.depth_T, trie.end_T, torch.device("cpu")).triangles
    assert [(t.count, t.index_BL is None) for t in triangles] == [
        (2, True),
        (1, True),
        (1, True),
        (2, False),
        (1, False),
    ]
    assert triangles[-1].index_BL is not None
    assert triangles[-1].index_BL.shape == (1, 2)
    in_pieces_as_row_by_row(rows, [trie], 0)


def test_siblings_of_one_length_are_a_view() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 32, 9).tolist()
    rows = make_rows([(prompt, [i, *rng.integers(0, 32, 6).tolist()]) for i in range(5)])
    trie = build(rows)
    (triangles, above) = segments.plan(trie.depth_T, trie.end_T, torch.device("cpu")).triangles[::-1]
    assert (triangles.start, triangles.stop, triangles.count, triangles.index_BL) == (9, 39, 5, None)
    assert (above.start, above.stop, above.count) == (0, 9, 1)
    in_pieces_as_row_by_row(rows, [trie], 0)


@pytest.mark.parametrize("seed", range(3))
def test_each_row_has_the_distribution_it_was_drawn_from(seed: int) -> None:
    model = tiny_model(seed=seed, dtype=torch.float64)
    rows = random_rows(seed)
    kinds = (Draw(temperature=0.6), None, Draw(temperature=1.3, top_k=5), Draw(top_p=0.8))
    draws = [kinds[i] for i in np.random.default_rng(seed).integers(0, len(kinds), len(rows))]
    tries = list(micro_batches(replace(rows, draws=draws), max_tokens=10_000))
    together = by_trie(model, rows, tries, Distribution(temperature=0.9))
    for draw in kinds:
        d = Distribution(temperature=0.9) if draw is None else Distribution(draw.temperature, draw.top_p, draw.top_k)
        mine = np.flatnonzero([one == draw for one in draws])
        alone = by_trie(model, rows, [build(rows, mine)], d)
        at = np.flatnonzero(np.isin(rows.row_E, mine))
        for one, other in zip(together, alone, strict=True):
            torch.testing.assert_close(one[at], other[at], rtol=1e-10, atol=1e-12)


def test_a_fork_that_saves_little_is_made_further_up() -> None:
    prompt = list(range(20))
    rows = make_rows([(prompt, [21, 22, 1]), (prompt, [21, 23, 1]), (prompt, [24, 25, 1]), ([0, 1, 31], [5, 6])])
    assert build(rows).n_nodes == 20 + 3 + 2 + 2
    few = build(rows, least=3)
    assert few.n_nodes == 20 + 2 + 2 + 2 + 4
    assert segments.plan(few.depth_T, few.end_T, torch.device("cpu")).rectangles == [segments.Rectangle(0, 20, 26)]


@pytest.mark.parametrize("implementation", ["eager", NAME])
def test_other_attention_agrees_too(implementation: str) -> None:
    model = tiny_model(dtype=torch.float64)
    rows = random_rows(3)
    expected = row_by_row(model, rows)[0]
    model.config._attn_implementation = implementation
    torch.testing.assert_close(by_trie(model, rows, [build(rows)], Distribution())[0], expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_compiled_layers_keep_plain_attention_out_of_their_graph() -> None:
    """On a GPU a graph expects other strides than cuDNN gives with one plan for many lengths, and dies."""
    rows = random_rows(1)
    tries = list(micro_batches(rows, max_tokens=10_000, form="paths"))
    model, called = tiny_model(dtype=torch.float64), set()
    model.config._attn_implementation = NAME
    expected = by_trie(model, rows, tries, Distribution(), in_segments=False)

    def remember(graph: Any, _: Any) -> Any:
        called.update(str(node.target) for node in graph.graph.nodes)
        return graph

    for layer in model.model.layers:
        layer.compile(backend=remember)
    got = by_trie(model, rows, tries, Distribution(), in_segments=False)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert called
    assert not any("scaled_dot_product" in target for target in called)


def test_a_prompt_shared_by_a_group_is_computed_once() -> None:
    prompt = list(range(20))
    rows = make_rows([(prompt, [21, 22]), (prompt, [21, 23]), (prompt, [24, 25])])
    trie = build(rows)
    assert trie.n_nodes == 20 + 2  # 21 once, 24; last tokens predict nothing
    assert len(trie.node_P) == 3  # after the prompt, after 21, after 24
    assert len(trie.entry_E) == 6


def test_a_history_of_many_turns_is_linear_in_its_length() -> None:
    history: list[int] = [1]
    paths = []
    for turn in range(50):
        paths.append((list(history), [2, turn % 30]))
        history = [*history, 2, turn % 30, 3]
    assert build(make_rows(paths)).n_nodes == len(history) - 2


def test_the_cheaper_form_is_chosen() -> None:
    shared, own = list(range(20)), [[i] * 20 for i in range(21, 25)]
    (much,) = micro_batches(make_rows([(shared, [21 + i, 1]) for i in range(4)]), max_tokens=1000)
    assert much.n_nodes == 24
    (little,) = micro_batches(make_rows([([1, *o], [1, 2]) for o in own]), max_tokens=1000)
    assert little.n_nodes == 4 * 22
    assert pack(little).is_causal


def test_turns_that_go_on_from_one_another_are_one_path_and_fill_the_budget() -> None:
    def turns(first: int) -> list[tuple[list[int], list[int]]]:
        said = list(range(first, first + 40))
        return [(said[: 10 * n + 8], said[10 * n + 8 : 10 * n + 10]) for n in range(4)]

    rows = make_rows([turn for k in range(6) for turn in turns(1 + 50 * k)])
    for form in (None, "paths"):
        tries = list(micro_batches(rows, max_tokens=3 * 39, form=form))  # type: ignore[arg-type]
        assert [(trie.n_nodes, trie.is_forked) for trie in tries] == [(3 * 39, False)] * 2


@pytest.mark.parametrize("form", ["trie", "paths", None])
def test_a_conversation_longer_than_the_budget_is_computed_once(form: str | None) -> None:
    """Of its turns none can be alone with less than its whole history, and the last needs all of it anyway."""

    def conversation(first: int, n_turns: int) -> list[tuple[list[int], list[int]]]:
        path = np.random.default_rng(first).integers(0, 9, 10 * n_turns).tolist()
        return [([first, *path[: 10 * t + 4]], path[10 * t + 4 : 10 * t + 9]) for t in range(n_turns)]

    rows = make_rows([*conversation(10, 3), *conversation(11, 40), *conversation(12, 3), *conversation(13, 30)])
    tries = list(micro_batches(rows, max_tokens=100, form=form))  # type: ignore[arg-type]
    assert sorted(trie.n_nodes for trie in tries) == [29, 29, 299, 399]
    assert sum(len(trie.entry_E) for trie in tries) == len(rows.logprobs)


def test_the_same_body_twice_keeps_two_entries() -> None:
    rows = make_rows([([1, 2], [3, 4]), ([1, 2], [3, 4])])
    trie = build(rows)
    assert trie.n_nodes == 3
    assert trie.predictor_E.tolist() == [0, 1, 0, 1]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 60), st.integers(1, 4))
def test_micro_batches_hold_every_entry_once_within_the_budget(seed: int, budget: int, at_least: int) -> None:
    rows = random_rows(seed)
    tries = list(micro_batches(rows, max_tokens=budget, at_least=at_least))
    assert sorted(np.concatenate([t.entry_E for t in tries]).tolist()) == list(range(len(rows.logprobs)))
    longest = int(np.diff(rows.starts).max()) - 1
    assert all(t.n_nodes <= max(budget, longest) for t in tries)
    for trie in tries:
        assert (trie.target_E == rows.output_ids[trie.entry_E]).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 64))
def test_every_node_sees_exactly_its_path(seed: int, length: int) -> None:
    rows = random_rows(seed)
    trie = build(rows)
    layout = pack(trie, length=length)
    ids, end = layout.ids_BL, layout.end_BL
    q = np.arange(ids.shape[1])
    sees = (q[None, None, :] <= q[None, :, None]) & (q[None, :, None] < end[:, None, :])
    assert sees.any(-1).all()  # padding sees itself, so no softmax runs over nothing
    seen = {}
    for e, p in enumerate(trie.predictor_E):
        b, at = divmod(int(layout.place_P[p]), ids.shape[1])
        seen[int(trie.entry_E[e])] = ids[b][sees[b, at]].tolist()
        assert layout.depth_BL[b, at] + 1 == sees[b, at].sum()
    for r in range(len(rows)):
        for j in range(int(rows.n_output[r])):
            entry = int(rows.output_starts[r]) + j
            assert seen[entry] == rows.path(r)[: rows.n_prompt[r] + j].tolist()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_blocks_are_skipped_only_where_nothing_is_seen(seed: int) -> None:
    rows = random_rows(seed, n_groups=8, n_samples=8, n_turns=6)
    layout = pack(build(rows), length=512)
    end = torch.as_tensor(layout.end_BL)
    dense = dense_mask(end)[:, 0]
    blocks = block_mask(end)
    n = end.shape[1] // 128
    tiles = dense.reshape(len(dense), n, 128, n, 128)
    seen, full = tiles.any(4).any(2), tiles.all(4).all(2)

    def listed(count: Tensor | None, index: Tensor | None) -> Tensor:
        assert count is not None
        assert index is not None
        out = torch.zeros_like(seen)
        for b in range(len(seen)):
            for q in range(n):
                out[b, q, index[b, 0, q, : int(count[b, 0, q])].long()] = True
        return out

    partial = listed(blocks.kv_num_blocks, blocks.kv_indices)
    whole = listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    assert not (partial & whole).any()
    assert torch.equal(partial | whole, seen)
    assert torch.equal(whole, full)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_blocked_attention_is_the_dense_one() -> None:
    layout = pack(build(random_rows(7, n_groups=6, n_samples=8, n_turns=5)), length=256)
    end = torch.as_tensor(layout.end_BL)
    torch.manual_seed(0)
    query = torch.randn(len(end), 4, end.shape[1], 8)
    key, value = torch.randn(2, len(end), 2, end.shape[1], 8)
    blocked, _ = attend(None, query, key, value, block_mask(end), scaling=0.3)
    dense, _ = attend(None, query, key, value, dense_mask(end), scaling=0.3)
    torch.testing.assert_close(blocked, dense, rtol=1e-4, atol=1e-5)
