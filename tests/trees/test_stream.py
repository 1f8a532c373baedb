"""Packed tokens equal what a plain loop over the tree gives."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rollbook.store import Event, InteractionRecorded, MemoryLog, Messages
from rollbook.store.directory import DirectoryLog
from rollbook.store.errors import LogCorrupt
from rollbook.store.events import encode_messages, from_batch
from rollbook.store.stream import NODE_COLUMNS, Nodes, Payloads, export


class Forest:
    """Interactions in a log, their table, and each one's whole path kept the plain way."""

    def __init__(self) -> None:
        self.log = MemoryLog("w")
        self.second = self.log.sibling("v")
        self.table: list[dict[str, Any]] = []
        self.paths: dict[str, list[tuple[int, str | None, float, int]]] = {}  # token, who sampled it, logprob, version
        self.lengths: dict[str, int] = {}
        self.edges: dict[str, tuple[str | None, str | None]] = {}

    def add(
        self,
        name: str,
        parent: str | None,
        prompt: list[int],
        output: list[int],
        *,
        edge: str | None = "extends",
        shared: int | None = None,
        version: int = 0,
    ) -> None:
        above = [] if parent is None else self.paths[parent]
        edge = None if parent is None else edge
        if shared is None:
            shared = self.lengths[parent] if edge == "retries" and parent else len(above)
        kept = above[:shared]
        logprobs = np.array([-0.25 * (i + 1) - len(self.table) for i in range(len(output))], np.float32)
        log = self.second if len(self.table) % 3 == 2 else self.log
        [position] = log.append_blocking(
            Event(
                run_id="r",
                episode_id="e",
                interaction_id=name,
                fact=InteractionRecorded(
                    parent_id=parent, edge=edge, shared=shared, prompt_length=shared + len(prompt)
                ),
                prompt_ids=np.array(prompt, np.int32),
                output_ids=np.array(output, np.int32),
                logprobs=logprobs,
                versions=np.full(len(output), version, np.int32),
            )
        )
        self.table.append(
            {
                "interaction_id": name,
                "parent_id": parent,
                "edge": edge,
                "n_prompt": shared + len(prompt),
                "n_shared": shared,
                "n_output": len(output),
                "writer": log.writer,
                "position": position,
            }
        )
        self.lengths[name] = shared + len(prompt)
        self.edges[name] = (parent, edge)
        sampled = [(t, name, float(p), version) for t, p in zip(output, logprobs, strict=True)]
        self.paths[name] = kept + [(t, None, 0.0, -1) for t in prompt] + sampled

    def nodes(self) -> Nodes:
        columns = {name: [row[name] for row in self.table] for name in NODE_COLUMNS}
        table = pa.table(columns, schema=pa.schema(list(_TYPES.items())))
        return Nodes.read(table, Payloads(self.log))

    def trained(self, name: str) -> set[str]:
        """Whose outputs are trained in the trajectory that ends at `name`."""
        names: set[str] = set()
        at: str | None = name
        while at is not None:
            names.add(at)
            parent, edge = self.edges[at]
            at = parent if edge in ("extends", "retries") else None
        return names

    def rows(self, name: str, form: str) -> list[tuple[int, bool, float, int]]:
        trained = {name} if form == "individual" else self.trained(name)
        return [(t, True, p, v) if who in trained else (t, False, 0.0, -1) for t, who, p, v in self.paths[name]]


_TYPES = {n: pa.int64() if n.startswith("n_") or n == "position" else pa.string() for n in NODE_COLUMNS}


def same(a: Any, b: Any) -> bool:
    """Byte for byte."""
    return all(
        getattr(a, name).tobytes() == getattr(b, name).tobytes()
        for name in ("input_ids", "loss_mask", "logprobs", "versions", "cu_seqlens", "positions", "nodes")
    )


def areal_example() -> Forest:
    forest = Forest()
    forest.add("1", None, [1, 2], [53122, 316])
    forest.add("2", "1", [3], [4, 5])
    forest.add("3", None, [1, 2], [6])
    forest.add("4", "2", [7], [8, 9, 10], version=2)
    return forest


@st.composite
def forests(draw: st.DrawFn) -> Forest:
    forest = Forest()
    ids = st.lists(st.integers(0, 3), max_size=5)
    for i in range(draw(st.integers(0, 12))):
        parent = draw(st.sampled_from([None, *forest.paths])) if i else None
        edge = draw(st.sampled_from(["extends", "extends", "rerendered", "compacts", "retries"])) if parent else None
        shared, prompt = None, draw(ids)
        if edge in ("rerendered", "compacts") and parent:
            shared = draw(st.integers(0, len(forest.paths[parent]))) if edge == "rerendered" else 0
        if edge == "retries":
            prompt = []
        forest.add(f"i{i}", parent, prompt, draw(ids), edge=edge, shared=shared, version=i)
    return forest


def as_rows(tokens: Any) -> list[list[tuple[int, bool, float, int]]]:
    flat = list(
        zip(
            tokens.input_ids.tolist(),
            tokens.loss_mask.tolist(),
            tokens.logprobs.tolist(),
            tokens.versions.tolist(),
            strict=True,
        )
    )
    return [flat[tokens.row(r)] for r in range(len(tokens))]


@given(forests(), st.sampled_from(["individual", "trajectory"]), st.randoms())
@settings(max_examples=60, deadline=None)
def test_packed_rows_equal_the_paths_put_together_one_by_one(forest: Forest, form: Any, random: Any):
    nodes = forest.nodes()
    picked = [random.randrange(len(nodes)) for _ in range(len(nodes))]
    tokens = nodes.load(picked, form=form)
    names = [forest.table[i]["interaction_id"] for i in picked]
    assert tokens.row_ids == names
    assert as_rows(tokens) == [forest.rows(name, form) for name in names]
    assert tokens.positions.tolist() == [p for name in names for p in range(len(forest.paths[name]))]
    assert tokens.rows.tolist() == [r for r, name in enumerate(names) for _ in forest.paths[name]]


@given(forests())
@settings(max_examples=60, deadline=None)
def test_every_sampled_token_is_first_in_one_row_only(forest: Forest):
    tokens = forest.nodes().load(form="trajectory")
    first = tokens.first_mask
    assert not (first & ~tokens.loss_mask).any()
    trained = [tokens.interaction_ids[n] for n in tokens.nodes[first].tolist()]
    expected = sorted(name for row in forest.table for name in [row["interaction_id"]] * row["n_output"])
    assert sorted(trained) == expected


@given(forests(), st.randoms())
@settings(max_examples=100, deadline=None)
def test_a_trie_holds_each_token_once_and_every_path_can_be_read_from_it(forest: Forest, random: Any):
    nodes = forest.nodes()
    chosen = sorted(random.sample(range(len(nodes)), random.randint(0, len(nodes))))
    trie = nodes.trie(chosen)
    n_runs = len(trie.parents)
    names = [forest.table[i]["interaction_id"] for i in chosen]
    # Outputs of the chosen stand once, with their own logprobs and versions.
    got = sorted(
        zip(
            trie.input_ids[trie.loss_mask].tolist(),
            trie.logprobs[trie.loss_mask].tolist(),
            trie.versions[trie.loss_mask].tolist(),
            strict=True,
        )
    )
    want = sorted((t, p, v) for name in names for t, who, p, v in forest.paths[name] if who == name)
    assert got == want
    # The chain of runs above the last run of a node is its path; `ends` says the same as `parents`.
    paths = []
    for k in range(n_runs):
        chain, at = [], k
        while at >= 0:
            chain.append(at)
            assert k < trie.ends[at]
            at = int(trie.parents[at])
        visible = [j for j in range(k + 1) if k < trie.ends[j]]
        assert visible == sorted(chain)
        where = np.concatenate([np.arange(trie.starts[j], trie.starts[j + 1]) for j in visible])
        assert trie.positions[where].tolist() == list(range(len(where)))
        paths.append(trie.input_ids[where].tolist())
    for name in names:
        tokens = [t for t, *_ in forest.paths[name]]
        assert not tokens or any(path[: len(tokens)] == tokens for path in paths)


def test_a_trie_shares_prompts_that_begin_alike():
    forest = Forest()
    forest.add("a", None, [1, 2, 3, 4], [9])
    forest.add("b", None, [1, 2, 3, 4], [8])
    forest.add("c", None, [1, 2, 5], [7, 7])
    forest.add("a2", "a", [6], [6])
    forest.add("a3", "a", [6], [5])
    trie = forest.nodes().trie()
    assert trie.n_tokens == 4 + 1 + 1 + (1 + 2) + 1 + 1 + 1
    assert trie.loss_mask.sum() == 6
    assert (trie.parents == -1).sum() == 1


def test_shared_history_stands_once_in_a_trie():
    forest = Forest()
    forest.add("t0", None, list(range(100)), [1] * 50)
    for turn in range(1, 20):
        forest.add(f"t{turn}", f"t{turn - 1}", [2] * 20, [3] * 50)
    nodes = forest.nodes()
    assert nodes.trie().n_tokens == 100 + 50 + 19 * 70
    assert nodes.load([19], form="trajectory").n_tokens == nodes.trie().n_tokens
    assert nodes.load().n_tokens == sum(len(p) for p in forest.paths.values())


def test_a_branch_inside_the_parents_output_is_cut_there():
    forest = Forest()
    forest.add("a", None, [1, 2], [3, 4, 5])
    forest.add("b", "a", [9], [8], edge="rerendered", shared=3)
    tokens = forest.nodes().load([1], form="trajectory")
    assert tokens.input_ids.tolist() == [1, 2, 3, 9, 8]
    assert tokens.loss_mask.tolist() == [False, False, False, False, True]
    assert tokens.logprobs.tolist()[:4] == [0.0] * 4


def test_arrays_may_be_written_and_lie_in_one_piece():
    tokens = areal_example().nodes().load(form="trajectory")
    for array in (tokens.input_ids, tokens.loss_mask, tokens.logprobs, tokens.versions):
        assert array.flags.writeable  # or torch.from_numpy would warn and share what must not change
        assert array.flags.c_contiguous
    before = areal_example().nodes().load(form="trajectory").input_ids.tolist()
    tokens.input_ids[:] = 0
    assert areal_example().nodes().load(form="trajectory").input_ids.tolist() == before


def test_packs_keep_order_and_budget():
    forest = areal_example()
    nodes = forest.nodes()
    packs = list(nodes.packs(max_tokens=9))
    assert [len(p) for p in packs] == [1, 1, 1, 1][: len(packs)] or sum(map(len, packs)) == 4
    assert all(p.n_tokens <= 9 or len(p) == 1 for p in packs)
    assert [name for p in packs for name in p.row_ids] == ["1", "2", "3", "4"]
    assert np.concatenate([p.input_ids for p in packs]).tolist() == nodes.load().input_ids.tolist()


def test_a_deep_conversation_needs_no_recursion():
    forest = Forest()
    forest.add("t0", None, [1], [2])
    for turn in range(1, 3000):
        forest.paths[f"t{turn}"] = []  # the plain way would be quadratic
        before = 2 * turn
        [position] = forest.log.append_blocking(
            Event(
                run_id="r",
                episode_id="e",
                interaction_id=f"t{turn}",
                fact=InteractionRecorded(
                    parent_id=f"t{turn - 1}", edge="extends", shared=before, prompt_length=before + 1
                ),
                prompt_ids=np.array([turn], np.int32),
                output_ids=np.array([turn], np.int32),
                logprobs=np.zeros(1, np.float32),
                versions=np.zeros(1, np.int32),
            )
        )
        forest.table.append(
            dict(
                zip(
                    NODE_COLUMNS,
                    (f"t{turn}", f"t{turn - 1}", "extends", before + 1, before, 1, "memory", position),
                    strict=True,
                )
            )
        )
        forest.table[-1]["writer"] = "w"
    nodes = forest.nodes()
    assert nodes.load([2999], form="trajectory").n_tokens == 6000
    assert nodes.trie().n_tokens == 6000


def test_a_wrong_length_is_named():
    forest = areal_example()
    forest.table[1]["n_output"] = 3
    with pytest.raises(LogCorrupt, match="rebuild the views"):
        forest.nodes()


def circle(events: list[Event]) -> None:
    """The first turn names the last one as its parent."""
    fact = replace(events[0].fact, parent_id=events[-1].interaction_id, edge="extends", shared=1)
    events[0] = replace(events[0], fact=replace(fact, prompt_length=fact.prompt_length + 1))


def too_much(events: list[Event]) -> None:
    """The second turn shares more than the first one has."""
    fact = replace(events[1].fact, shared=10**6)
    events[1] = replace(events[1], fact=replace(fact, prompt_length=10**6 + len(events[1].prompt_ids)))


def lost(events: list[Event]) -> None:
    """The first turn is not in the book."""
    del events[0]


@pytest.mark.parametrize("harm", [circle, too_much, lost])
def test_what_cannot_be_rebuilt_harms_nobody_else(harm):
    sound = [replace(e, episode_id="ep") for e in linear(1, 3)]
    harmed = [replace(e, episode_id="ep", interaction_id=f"h{e.interaction_id}") for e in linear(1, 4)]
    for i, event in enumerate(harmed[1:]):
        harmed[i + 1] = replace(event, fact=replace(event.fact, parent_id=harmed[i].interaction_id))
    harm(harmed)
    log = MemoryLog("w")
    log.append_blocking(*sound, *harmed)
    nodes = Nodes.read(table_of(log), Payloads(log))
    expected = Nodes.read(table_of(log).slice(0, 3), Payloads(log))
    n_sound = 1 if harm is too_much else 0
    names = [e.interaction_id for e in [*sound, *harmed[:n_sound]]]
    assert nodes.load().row_ids == names
    assert nodes.load().input_ids[: expected.load().n_tokens].tolist() == expected.load().input_ids.tolist()
    assert list(export(nodes, {}, style="individual")) == names
    assert len(export(nodes, {}, style="concat")) == 1 + n_sound
    assert nodes.trie().n_tokens > 0
    for i in range(3 + n_sound, len(nodes)):
        with pytest.raises(LogCorrupt, match=f"{nodes.interaction_ids[i]} or what it stands on.*leave it out"):
            nodes.load([i])
        with pytest.raises(LogCorrupt, match="leave it out"):
            nodes.trie([0, i])


def test_export_individual_has_areals_fields():
    samples = export(areal_example().nodes(), {"1": None, "2": 1.5, "3": 0.0, "4": 1.0})
    assert list(samples) == ["1", "2", "3", "4"]
    two = samples["2"]
    assert two["input_ids"].tolist() == [[1, 2, 53122, 316, 3, 4, 5]]
    assert two["loss_mask"].tolist() == [[0, 0, 0, 0, 0, 1, 1]]
    assert two["versions"].tolist() == [[-1, -1, -1, -1, -1, 0, 0]]
    assert two["logprobs"][0, :5].tolist() == [0.0] * 5
    assert two["attention_mask"].dtype == np.bool_
    assert two["rewards"].tolist() == [1.5]
    assert np.isnan(samples["1"]["rewards"][0])


def test_export_concat_gives_the_leaves():
    samples = export(areal_example().nodes(), {"3": 0.0, "4": 1.0}, style="concat")
    assert list(samples) == ["3", "4"]
    assert samples["4"]["loss_mask"].tolist() == [[0, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1]]
    assert samples["4"]["versions"].tolist() == [[-1, -1, 0, 0, -1, 0, 0, -1, 2, 2, 2]]


def test_a_compaction_begins_a_trajectory_and_a_retry_takes_the_place_of_what_it_repeats():
    forest = areal_example()
    forest.add("5", "4", [1, 2], [3], edge="compacts", shared=0)
    forest.add("6", "5", [4], [5])
    forest.add("7", "6", [], [6, 7], edge="retries")
    samples = export(forest.nodes(), {}, style="concat")
    assert list(samples) == ["3", "4", "7"]
    assert samples["7"]["input_ids"].tolist() == [[1, 2, 3, 4, 6, 7]]
    assert samples["7"]["loss_mask"].tolist() == [[0, 0, 1, 0, 1, 1]]


def test_export_refuses_concat_of_rendered_history_and_unknown_styles():
    forest = areal_example()
    forest.add("5", "4", [1], [2], edge="rerendered", shared=1)
    with pytest.raises(ValueError, match="Cannot export interactions in 'concat' style"):
        export(forest.nodes(), {}, style="concat")
    with pytest.raises(ValueError, match="Invalid export interactions style"):
        export(forest.nodes(), {}, style="padded")


def test_export_tree_holds_every_token_once():
    [(name, arrays)] = export(areal_example().nodes(), {"4": 1.0}, style="tree").items()
    assert name in ("1", "3")
    assert arrays["input_ids"].shape == (1, 2 + 2 + 3 + 1 + 4)  # "3" begins as "1" does
    assert arrays["loss_mask"].sum() == 8


def linear(n_episodes: int, n_turns: int) -> list[Event]:
    events = []
    for e in range(n_episodes):
        length = 0
        for t in range(n_turns):
            output = np.arange(4, dtype=np.int32) + 100 * e + t
            events.append(
                Event(
                    run_id="r",
                    episode_id=f"e{e}",
                    interaction_id=f"e{e}t{t}",
                    fact=InteractionRecorded(
                        parent_id=f"e{e}t{t - 1}" if t else None,
                        edge="extends" if t else None,
                        shared=length,
                        prompt_length=length + 3,
                    ),
                    messages=encode_messages(Messages(request=[], reply={"role": "assistant", "content": "x" * 500})),
                    prompt_ids=np.arange(3, dtype=np.int32) + 7 * t,
                    output_ids=output,
                    logprobs=-output.astype(np.float32) / 7,
                    versions=np.full(4, e, np.int32),
                )
            )
            length += 7
    return events


def table_of(log: Any) -> pa.Table:
    rows = []
    for batch in log.read():
        for event, position in zip(from_batch(batch), batch.column("position").to_pylist(), strict=True):
            fact = event.fact
            assert isinstance(fact, InteractionRecorded)
            rows.append(
                {
                    "interaction_id": event.interaction_id,
                    "parent_id": fact.parent_id,
                    "edge": fact.edge,
                    "n_prompt": fact.prompt_length,
                    "n_shared": fact.shared,
                    "n_output": len(event.output_ids),
                    "writer": batch.column("writer")[0].as_py(),
                    "position": position,
                }
            )
    return pa.Table.from_pylist(rows, schema=pa.schema(list(_TYPES.items())))


def test_the_same_bytes_come_from_memory_from_mapped_files_and_from_sealed_ones(tmp_path: Path):
    events = linear(40, 5)
    memory = MemoryLog("w")
    memory.append_blocking(*events)
    expected = Nodes.read(table_of(memory), Payloads(memory)).load()
    with closing(DirectoryLog(tmp_path, "w", roll_bytes=20_000, live_bytes=None)) as log:
        for i in range(0, len(events), 7):
            log.append_blocking(*events[i : i + 7])
        table = table_of(log)
        payloads = Payloads(log)
        mapped = Nodes.read(table, payloads)
        assert same(mapped.load(), expected)
        log.seal()
        assert any((tmp_path / "sealed").rglob("*.parquet"))
        assert same(mapped.load(), expected)  # the files that it looks at are gone, what they held is not
        assert same(Nodes.read(table, payloads).load(), expected)
        assert same(Nodes.read(table, Payloads(log)).load(), expected)
    with closing(DirectoryLog(tmp_path)) as reader:
        assert same(Nodes.read(table, Payloads(reader)).load(), expected)


def test_a_session_that_is_partly_sealed_is_one_session(tmp_path: Path):
    events = linear(1, 6)
    memory = MemoryLog("w")
    memory.append_blocking(*events)
    expected = Nodes.read(table_of(memory), Payloads(memory)).load()
    with closing(DirectoryLog(tmp_path, "w", live_bytes=None)) as log:
        log.append_blocking(*events[:2])
        log.seal()
        for event in events[2:]:
            log.append_blocking(event)
        assert same(Nodes.read(table_of(log), Payloads(log)).load(), expected)


@pytest.mark.parametrize("budget", [0, 10_000, 100_000])
def test_a_small_budget_changes_nothing_but_speed(tmp_path: Path, budget: int):
    events = linear(30, 4)
    with closing(DirectoryLog(tmp_path, "w", roll_bytes=20_000, live_bytes=None)) as log:
        for i in range(0, len(events), 7):
            log.append_blocking(*events[i : i + 7])
        table = table_of(log)
        payloads = Payloads(log, memory_bytes=budget, mapped_bytes=budget)
        whole = Nodes.read(table, Payloads(log)).load()
        parts = []
        for e in range(30):
            parts.append(Nodes.read(table.slice(4 * e, 4), payloads).load().input_ids)
        assert np.concatenate(parts).tolist() == whole.input_ids.tolist()
        for frames in payloads._writers.values():
            table = np.concatenate([frames.table, frames.newest])
            assert (table[:, 4:].sum(axis=0) <= budget).all()
            assert len(frames.held) == len(table)
            assert (table[:, 1] - table[:, 0]).sum() <= frames.n_rows
