"""Several ranks (gloo, on CPU) compute what one computes: loss, gradient, step, checkpoint, export."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from learner.tiny import make_rows, random_rows, tiny_folder, tiny_model
from rollbook.learner.algorithms import find_algorithm
from rollbook.learner.backend import make_backend
from rollbook.learner.backend.sharded import ShardedBackend, deal
from rollbook.learner.backend.single import SingleBackend
from rollbook.learner.backend.team import Team
from rollbook.learner.config import ActorConfig, CriticConfig, LoraConfig, MicroBatchSpec, OptimizerConfig
from rollbook.learner.errors import BadCheckpoint, RankLost
from rollbook.learner.learn import learn
from rollbook.learner.rows import Rows
from rollbook.learner.trie import cost, micro_batches


@pytest.fixture(scope="module", params=[2, 3])
def team(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    made = Team.start(request.param, device="cpu", log_folder=tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


def double() -> torch.nn.Module:
    return tiny_model(dtype=torch.float64)


def config(**settings: Any) -> ActorConfig:
    return ActorConfig(
        **{"dtype": "float64", "device": "cpu", "mb_spec": MicroBatchSpec(max_tokens_per_mb=30), **settings}
    )


def pair(team: Team, settings: ActorConfig, **kwargs: Any) -> tuple[Any, Any]:
    """One process and several, of the same weights."""
    kwargs = {"optimizer": OptimizerConfig(lr=1e-2, gradient_clipping=0.05), "model": double, **kwargs}
    return SingleBackend(settings, **kwargs), ShardedBackend(team, settings, **kwargs)


def whole(backend: Any) -> dict[str, torch.Tensor]:
    """Masters of rank 0's shard: compared where they lie."""
    return backend.masters if isinstance(backend, SingleBackend) else backend.local.masters


def same_weights(one: Any, many: Any, tolerance: float = 1e-12) -> None:
    mine, theirs = whole(one), whole(many)
    assert mine.keys() == theirs.keys()
    for name, master in mine.items():
        shard = theirs[name]
        assert isinstance(shard, DTensor)
        local = shard.to_local()
        torch.testing.assert_close(local, master.detach()[: len(local)], rtol=tolerance, atol=tolerance)


def step(backend: Any, rows: Rows, settings: ActorConfig, name: str = "grpo", **kwargs: Any) -> Any:
    algorithm = find_algorithm(name, settings)
    rows = replace(rows, advantages=algorithm.advantages(rows))
    return learn(rows, actor=backend, algorithm=algorithm, config=settings, version=0, seed=0, **kwargs)


@pytest.mark.parametrize(("name", "once"), [("grpo", True), ("grpo", False), ("gspo", True), ("dapo", True)])
def test_loss_gradient_and_step_are_those_of_one_rank(team: Team, name: str, once: bool) -> None:
    settings = config(entropy_coef=0.01, kl_loss_coef=0.1, gather_once=once)
    one, many = pair(team, settings)
    refs = pair(team, settings, optimizer=None)
    for seed in range(2):  # the second step sees the moments of the first
        rows = random_rows(seed)
        a, b = step(one, rows, settings, name, reference=refs[0]), step(many, rows, settings, name, reference=refs[1])
        assert a.metrics.keys() == b.metrics.keys()
        for key, value in a.metrics.items():
            if key != "n_computed":  # ranks that share a prefix each compute it
                assert b.metrics[key] == pytest.approx(value, rel=1e-12, abs=1e-12), key
        np.testing.assert_allclose(b.logprobs, a.logprobs, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(b.entropies, a.entropies, rtol=1e-12, atol=1e-12)
        same_weights(one, many)


def collectives(many: Any, rows: Rows, settings: ActorConfig) -> tuple[int, int]:
    """How often rank 0 gathered weights and summed gradients in a step."""
    with torch.profiler.profile() as profiler:
        step(many, rows, settings)
    names = [event.name for event in profiler.events()]  # type: ignore[union-attr]
    return names.count("c10d::_allgather_base_"), names.count("c10d::_reduce_scatter_base_")


def test_weights_are_gathered_and_gradients_summed_once_a_step_where_memory_allows(team: Team) -> None:
    rows, counts = random_rows(0, n_groups=8), {}
    for once in (True, False):
        settings = config(gather_once=once)
        many = pair(team, settings)[1]
        step(many, rows, settings)
        counts[once] = collectives(many, rows, settings)
    n = len(list(micro_batches(rows, max_tokens=30, ranks=team.size, hidden=16))) // team.size
    assert n > 1
    assert counts[True] == (3, 3)  # two layers and the rest
    assert counts[False] == (n * 5, n * 3), counts


def test_minibatches_and_a_critic_are_those_of_one_rank(team: Team) -> None:
    settings = config(ppo_n_minibatches=2)
    one, many = pair(team, settings)
    values = CriticConfig(dtype="float64", device="cpu")
    critics = pair(team, settings, has_values=True)  # type: ignore[arg-type]
    for seed in range(2):
        rows = random_rows(seed)
        a = step(one, rows, settings, "ppo", critic=critics[0], critic_config=values)
        b = step(many, rows, settings, "ppo", critic=critics[1], critic_config=values)
        for key, value in a.metrics.items():
            if key != "n_computed":
                assert b.metrics[key] == pytest.approx(value, rel=1e-11, abs=1e-12), key
    same_weights(one, many)
    same_weights(critics[0], critics[1])


def test_more_ranks_than_rows_is_no_reason_to_fail(team: Team) -> None:
    settings = config()
    one, many = pair(team, settings)
    rows = make_rows([([1, 2], [3])], rewards=[1.0])
    a, b = step(one, rows, settings, "reinforce"), step(many, rows, settings, "reinforce")
    assert b.metrics["loss"] == pytest.approx(a.metrics["loss"], abs=1e-12)
    same_weights(one, many)


def test_a_checkpoint_goes_on_bit_for_bit_and_from_one_rank_to_several(team: Team, tmp_path: Path) -> None:
    settings = config()
    one, many = pair(team, settings)
    for backend, folder in ((one, tmp_path / "one"), (many, tmp_path / "many")):
        step(backend, random_rows(0), settings)
        folder.mkdir()
        backend.save(folder)
        step(backend, random_rows(1), settings)
    again, of_one = pair(team, settings)[1], pair(team, settings)[1]
    again.load(tmp_path / "many")
    of_one.load(tmp_path / "one")
    step(again, random_rows(1), settings)
    step(of_one, random_rows(1), settings)
    assert again.local.steps == many.local.steps == 2
    for name, master in whole(many).items():
        assert torch.equal(master.to_local(), whole(again)[name].to_local())  # type: ignore[attr-defined]
    same_weights(one, of_one)
    with pytest.raises(BadCheckpoint, match="was written by several ranks; go on with"):
        one.load(tmp_path / "many")
    other = pair(team, settings, model=other_model)[1]
    with pytest.raises(BadCheckpoint, match=r"is of another model: .* is \(.*\) there and \(.*\) here"):
        other.load(tmp_path / "many")


@pytest.mark.parametrize(
    ("file", "harm", "said"),
    [
        ("shards/__*.distcp", "one bit", "is damaged: its checksum"),
        ("shards/__*.distcp", "removed", "cannot be read"),
        ("shards/.metadata", "one bit", "is damaged: its checksum"),
        ("shards/rest.pt", "half", "is damaged: its checksum"),
        ("shards/checksums.json", "half", "cannot be read"),
        ("shards/checksums.json", "removed", "cannot be read"),
        ("state.pt", "one bit", "is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_ranks_live_on(
    team: Team, tmp_path: Path, file: str, harm: str, said: str
) -> None:
    one, many = pair(team, config())
    (one if file == "state.pt" else many).save(tmp_path)
    path = max(tmp_path.glob(file))  # of shards that of the last rank
    held = bytearray(path.read_bytes())
    held[len(held) // 2] ^= 1
    path.write_bytes(held[: len(held) // 2] if harm == "half" else held)
    if harm == "removed":
        path.unlink()
    with pytest.raises(BadCheckpoint, match=f"{path.name} {said}"):
        many.load(tmp_path)
    step(many, random_rows(0), config())


def other_model() -> torch.nn.Module:
    return tiny_model(dtype=torch.float64, hidden=32)


def test_what_is_published_is_one_folder_of_whole_weights(team: Team, tmp_path: Path) -> None:
    settings = config(dtype="bfloat16")
    one, many = pair(team, settings, model=tiny_model)
    for backend, folder in ((one, tmp_path / "one"), (many, tmp_path / "many")):
        folder.mkdir()
        backend.export(folder)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "many"))
    assert a.keys() == b.keys()
    assert "lm_head.weight" not in a  # tied
    for name, value in a.items():
        assert value.dtype == b[name].dtype == torch.bfloat16
        assert torch.equal(value, b[name])
    mine, theirs = (json.loads((tmp_path / name / "canary.json").read_text()) for name in ("one", "many"))
    assert [c["prompt_ids"] for c in mine] == [c["prompt_ids"] for c in theirs]
    np.testing.assert_allclose([c["logprob"] for c in mine], [c["logprob"] for c in theirs], atol=0.02)


def test_adapters_are_sharded_too_and_published_merged(team: Team, tmp_path: Path) -> None:
    settings = config(lora=LoraConfig(r=2, alpha=4))
    one, many = pair(team, settings)
    for backend, folder in ((one, tmp_path / "one"), (many, tmp_path / "many")):
        for seed in range(2):
            step(backend, random_rows(seed), settings)
        folder.mkdir()
        backend.export(folder)
    same_weights(one, many)
    assert all(".lora_" in name for name in whole(many))
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "many"))
    assert a.keys() == b.keys()
    assert not any("lora" in name for name in a)
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_work_is_dealt_by_cost_not_by_number(n: int) -> None:
    rng = np.random.default_rng(0)
    paths = []
    for _ in range(6):  # conversations of very different length
        history = rng.integers(0, 32, int(rng.integers(5, 200))).tolist()
        for _ in range(int(rng.integers(1, 12))):
            output = rng.integers(0, 32, int(rng.integers(1, 40))).tolist()
            paths.append((history, output))
            history = history + output
    rows = make_rows(paths)
    tries = list(micro_batches(rows, max_tokens=700, ranks=n, hidden=16))
    shares = deal(tries, n, 16)
    assert len({len(share.tries) for share in shares}) == 1
    entries = np.concatenate([share.entries for share in shares])
    assert sorted(entries.tolist()) == list(range(len(rows.logprobs)))
    assert max(trie.n_nodes for trie in tries) <= max(700, int(np.diff(rows.starts).max()) - 1)
    costs = [sum(cost(trie, 16) for trie in share.tries) for share in shares]
    longest = max(
        cost(trie, 16) for trie in micro_batches(rows, np.array([int(np.diff(rows.starts).argmax())]), max_tokens=9999)
    )
    assert max(costs) <= 1.35 * sum(costs) / n or max(costs) <= 1.01 * longest


def test_no_thread_of_a_team_outlives_it() -> None:
    # The last to hold torch's objects while Python ends makes that status -6. In a process that has no other team.
    code = """
import threading
from rollbook.learner.backend.team import Team

Team.start(1, device="cpu").close()
assert "ranks" not in {thread.name for thread in threading.enumerate()}
"""
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=True
    )


def test_fewer_devices_than_ranks_is_a_clear_error_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match=r"asks for 64 GPUs on this machine and there are \d+; ask for fewer ranks"):
        Team.start(64)
    with pytest.raises(ValueError, match=r"'fsdp:p2' *; expected single, or fsdp:dN"):
        make_backend("fsdp:p2", config())


def test_the_folder_of_a_model_is_loaded_by_all(team: Team, tmp_path: Path) -> None:
    path = tiny_folder(tmp_path)
    one, many = pair(team, config(path=path, dtype="float32"), model=None)
    tries = list(micro_batches(random_rows(0), max_tokens=40))
    np.testing.assert_allclose(many.score(tries)[0], one.score(tries)[0], rtol=1e-4)


def test_a_rank_that_dies_ends_the_run_with_one_sentence(team: Team) -> None:
    """The last test of a team."""
    many = pair(team, config())[1]
    os.kill(team._children[-1].process.pid, signal.SIGKILL)
    last = team.size - 1
    said = rf"^rank {last} of {team.size} was ended by SIGKILL \(.*rank-{last}\.log\), so the run ends\. Nothing in .*$"
    with pytest.raises(RankLost, match=said):
        step(many, random_rows(0), config())
