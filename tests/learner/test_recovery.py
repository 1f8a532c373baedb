"""kill -9 anywhere, the same command again: the curve of an uninterrupted run, no sample trained twice or skipped."""

import json
import multiprocessing
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from learner import killed
from learner.echo import EchoRollouts, echo_config, echo_tasks
from learner.tiny import tiny_folder
from rollbook.learner import PPOTrainer, batches
from rollbook.learner.backend.single import SingleBackend
from rollbook.learner.checkpoint import Meta, newest_checkpoint, read_checkpoint, write_checkpoint
from rollbook.learner.config import ModelConfig, OptimizerConfig
from rollbook.learner.errors import BadCheckpoint
from rollbook.learner.folders import appears_whole, keep_newest
from rollbook.store import Event, RewardGiven
from rollbook.store.book import open_book

# A server that has imported everything once forks a process per run.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["learner.killed"])

# Two whole runs each; a machine that does other work beside is no reason to fail.

FACTS = ("loss", "reward", "grad_norm", "entropy", "lr", "n_rows")


def run(root: Path, model: str, point: str, count: int) -> int:
    process = PROCESSES.Process(target=killed.main, args=(str(root), model, point, str(count)))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def curve(root: Path) -> list[dict[str, Any]]:
    with open_book(root / "echo" / "t" / "book") as book:
        rows = book.sql("select step, metrics from batches order by step").to_pylist()
        assert all(row["metrics"] for row in rows)
        twice = book.sql("select interaction_id from batch_rows group by all having count(*) > 1")
        assert not twice.num_rows
        unused = book.sql(
            "select count(*) as n from interactions i join episodes e using (episode_id) "
            "where e.state = 'done' and interaction_id not in (select interaction_id from batch_rows)"
        )
        assert unused["n"].to_pylist() == [0]
        versions = book.sql("select version from policies order by version")["version"].to_pylist()
        assert versions == list(range(9))
    metrics = [msgspec.json.decode(row["metrics"]) for row in rows]
    assert [row["step"] for row in rows] == list(range(8))
    return [{name: m[name] for name in FACTS} for m in metrics]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("whole")
    model = tiny_folder(root / "model")
    assert run(root, model, "never", 0) == 0
    return model, curve(root)


@pytest.mark.parametrize(
    ("point", "count"),
    [
        ("taken", 3),
        pytest.param("checkpoint half written", 7, marks=pytest.mark.slow),
        ("checkpoint written", 4),
        pytest.param("weights written", 2, marks=pytest.mark.slow),
        pytest.param("announced", 5, marks=pytest.mark.slow),
        ("published", 5),  # two steps after the last checkpoint: both are trained again from the book
    ],
)
def test_a_killed_run_ends_as_one_that_was_not(
    tmp_path: Path, uninterrupted: tuple[str, list[dict[str, Any]]], point: str, count: int
) -> None:
    model, expected = uninterrupted
    assert run(tmp_path, model, point, count) == -signal.SIGKILL
    assert run(tmp_path, model, "never", 0) == 0
    assert curve(tmp_path) == expected


def test_a_group_cut_in_the_middle_is_finished_not_redone(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "model")
    assert run(tmp_path, model, "half a group", 25) == -signal.SIGKILL
    with open_book(tmp_path / "echo" / "t" / "book") as book:
        before = book.sql("select episode_id from episodes where state = 'done'")["episode_id"].to_pylist()
        assert book.sql("select 1 from episodes where state = 'open'").num_rows
    assert run(tmp_path, model, "never", 0) == 0
    with open_book(tmp_path / "echo" / "t" / "book") as book:
        assert book.sql("select * from batches where trained_at is null").num_rows == 0
        again = book.sql("select interaction_id from interactions group by all having count(*) > 1")
        assert not again.num_rows
        trained = book.sql("select interaction_id from batch_rows")["interaction_id"].to_pylist()
        assert {f"{episode}.1" for episode in before} <= set(trained)
        assert len(trained) == len(set(trained))


def small(model: str, **kwargs: Any) -> SingleBackend:
    config = ModelConfig(path=model, dtype="float32", init_from_scratch=True)
    return SingleBackend(config, optimizer=OptimizerConfig(), **kwargs)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    one, two = tiny_folder(tmp_path / "one"), tiny_folder(tmp_path / "two", hidden=32)
    folder = write_checkpoint(tmp_path / "c", Meta(run_id="r", step=1), actor=small(one), critic=None, keep=1)
    with pytest.raises(ValueError, match=r"is of another model: .* is \(.*\) there and \(.*\) here"):
        read_checkpoint(folder, run_id="r", actor=small(two), critic=None)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "m")
    folder = write_checkpoint(tmp_path / "c", Meta(run_id="r", step=1), actor=small(model), critic=None, keep=1)
    with pytest.raises(BadCheckpoint, match="is of run 'r', this run is 's'"):
        read_checkpoint(folder, run_id="s", actor=small(model), critic=None)


@pytest.mark.parametrize("harm", ["half", "empty", "one bit"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, harm: str) -> None:
    model = tiny_folder(tmp_path / "m")
    folder = write_checkpoint(tmp_path / "c", Meta(run_id="r", step=1), actor=small(model), critic=None, keep=1)
    state = bytearray((folder / "state.pt").read_bytes())
    state[len(state) // 2] ^= 1
    (folder / "state.pt").write_bytes({"half": state[: len(state) // 2], "empty": b"", "one bit": state}[harm])
    with pytest.raises(BadCheckpoint, match=r"state.pt is damaged \(.+\); remove .* to go on from an older one"):
        read_checkpoint(folder, run_id="r", actor=small(model), critic=None)


def test_a_checkpoint_keeps_a_number_that_is_none_and_the_settings_of_today(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "m")
    meta = Meta(run_id="r", step=1, metrics={"loss": 0.5, "grad_norm": float("inf")})
    folder = write_checkpoint(tmp_path / "c", meta, actor=small(model), critic=None, keep=1)
    for kind in ("adamw", "sgd"):
        today = OptimizerConfig(type=kind, lr=0.1, weight_decay=0.25)
        actor = SingleBackend(ModelConfig(path=model, dtype="float32"), optimizer=today)
        read = read_checkpoint(folder, run_id="r", actor=actor, critic=None)
        assert read.metrics == {"loss": 0.5, "grad_norm": None}
        for master in actor.masters.values():
            master.grad = master.new_zeros(master.shape)
        weight = next(master for master in actor.masters.values() if master.ndim > 1)
        before = weight.detach().clone()
        lr = actor.step()["lr"]
        assert weight.detach().allclose(before * (1 - lr * 0.25), rtol=1e-5, atol=0)


def test_a_disk_that_is_full_is_told_as_that(tmp_path: Path) -> None:
    actor = small(tiny_folder(tmp_path / "m"))
    (tmp_path / "state.pt").symlink_to("/dev/full")
    (tmp_path / "model.safetensors").mkdir()  # cannot be written, either
    with pytest.raises(OSError, match=r"state.pt could not be written \(.*\); is the disk full"):
        actor.save(tmp_path)
    with pytest.raises(OSError, match=r"model.safetensors could not be written"):
        actor.export(tmp_path)


def test_a_checkpoint_without_a_critic_says_so(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "m")
    folder = write_checkpoint(tmp_path / "c", Meta(run_id="r", step=1), actor=small(model), critic=None, keep=1)
    with pytest.raises(BadCheckpoint, match="has no critic, so another algorithm wrote it"):
        read_checkpoint(folder, run_id="r", actor=small(model), critic=small(model, has_values=True))


class Killed(BaseException):
    """Stands for kill -9."""


def test_an_export_and_an_evaluation_that_a_kill_cut_off_are_made_up_for(tmp_path: Path) -> None:
    config = echo_config(tmp_path, tiny_folder(tmp_path / "m"), gconfig__n_samples=2, total_train_epochs=2)
    config.saver.freq_steps = config.evaluator.freq_steps = 1

    def run(rollouts: EchoRollouts) -> EchoRollouts:
        with suppress(Killed), PPOTrainer(config, echo_tasks(10), echo_tasks(3), rollouts=rollouts) as trainer:
            trainer.train(workflow="agent")
        return rollouts

    class Dies(EchoRollouts):
        def publish(self, path: str, version: int) -> None:
            if version == 2:
                raise Killed
            super().publish(path, version)

    def done() -> tuple[list[str], list[int]]:
        with open_book(config.book_path) as book:
            evaluated = book.sql("select version from episodes where is_eval order by all")["version"].to_pylist()
        return sorted(path.name for path in (Path(config.run_path) / "saved").iterdir()), evaluated

    run(Dies())
    assert done() == (["step-00000001"], [1, 1, 1])
    whole = (["step-00000001", "step-00000002"], [1, 1, 1, 2, 2, 2])
    assert run(EchoRollouts()).published == [2]
    assert done() == whole
    shutil.rmtree(Path(config.run_path) / "best")  # cut off while the better one took the other's place
    assert run(EchoRollouts()).published == []
    assert done() == whole
    assert (Path(config.run_path) / "best" / "evaluation.json").is_file()


def test_a_checkpoint_without_its_book_is_refused(tmp_path: Path) -> None:
    config = echo_config(tmp_path, tiny_folder(tmp_path / "m"), gconfig__n_samples=2)
    with PPOTrainer(config, echo_tasks(10), rollouts=EchoRollouts()) as trainer:
        trainer.train(workflow="agent")
    shutil.rmtree(config.book_path)
    with (
        pytest.raises(BadCheckpoint, match=r"written after step 0, of which the book .* knows nothing"),
        PPOTrainer(config, echo_tasks(10), rollouts=EchoRollouts()) as trainer,
    ):
        trainer.train(workflow="agent")


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with suppress(RuntimeError), appears_whole(tmp_path / "step-1") as building:
        (building / "half").write_text("x")
        raise RuntimeError
    assert newest_checkpoint(tmp_path) is None
    for step in (1, 2, 10):
        with appears_whole(tmp_path / f"step-{step}") as building:
            (building / "whole").write_text(str(step))
    assert newest_checkpoint(tmp_path) == tmp_path / "step-10"
    keep_newest(tmp_path, "step-[0-9]*", keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-2"]


def test_a_batch_that_is_trained_again_has_the_rewards_that_it_was_taken_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_folder(tmp_path / "m")
    source = echo_config(tmp_path, model, gconfig__n_samples=4)
    with PPOTrainer(source, echo_tasks(10), rollouts=EchoRollouts(lambda task, output: float(output))) as trainer:
        trainer.train(workflow="agent")
    with open_book(source.book_path, writer="judge") as book:
        judged = book.sql("select run_id, episode_id from episodes").to_pylist()
        values = np.random.default_rng(0).normal(size=len(judged)).tolist()
        book.log.append_blocking(
            *(Event(**row, fact=RewardGiven(value=value, name="v2")) for row, value in zip(judged, values, strict=True))
        )

    def metrics(trial: str) -> dict[str, Any]:
        config = echo_config(
            tmp_path, model, trial_name=trial, book=source.book_path, algorithm="dpo", credit__reward="v2",
            scheduler__type="none",
        )  # fmt: skip
        with suppress(Killed), PPOTrainer(config) as trainer:
            trainer.train()
        found: dict[str, Any] = json.loads((Path(config.run_path) / "metrics.jsonl").read_text() or "{}")
        return {name: value for name, value in found.items() if not name.endswith(("_s", "at"))}

    def die(*args: Any, **kwargs: Any) -> None:
        take(*args, **kwargs)
        raise Killed

    alone, take = metrics("alone"), batches.take
    with monkeypatch.context() as patched:
        patched.setattr(batches, "take", die)
        assert metrics("killed") == {}
    assert metrics("killed") == alone
