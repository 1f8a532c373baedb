"""A run from the first step to the last: it learns, writes down what it does, and refuses what cannot be trained."""

import json
import re
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from learner.echo import EchoRollouts, echo_config, echo_tasks, right_digit
from learner.tiny import tiny_folder, tiny_model
from rollbook.learner import PPOTrainer, TrainConfig, batches
from rollbook.learner.batches import drawn, rows_of, was_held
from rollbook.learner.config import CriticConfig, LoraConfig, ModelConfig, RejectionConfig
from rollbook.learner.errors import BadCheckpoint, BadSetting, NothingToTrain, PoliciesDisagree
from rollbook.learner.metrics import Report, check_writers
from rollbook.learner.rows import Draw
from rollbook.learner.train import throughput, without_keys
from rollbook.store import prune
from rollbook.store.book import Book, open_book
from rollbook.store.errors import BadEvent
from rollbook.store.events import EpisodeClosed, EpisodeOpened, Event, InteractionRecorded, RewardGiven, TokensScored


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("model"), hidden=32)


def run(config: TrainConfig, rollouts: EchoRollouts, *, n_tasks: int = 10, **kwargs: Any) -> list[dict[str, Any]]:
    valid = echo_tasks(10) if config.evaluator.freq_steps else None
    with PPOTrainer(config, echo_tasks(n_tasks), valid, rollouts=rollouts) as trainer:
        trainer.train(workflow="agent", **kwargs)
    lines = (Path(config.run_path) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_reward_rises(tmp_path: Path, model: str) -> None:
    config = echo_config(tmp_path, model, total_train_epochs=34)
    metrics = run(config, EchoRollouts())
    rewards = [m["reward"] for m in metrics]
    assert np.mean(rewards[:5]) < 0.2
    assert np.mean(rewards[-5:]) > 0.8


def test_every_step_is_in_the_book(tmp_path: Path, model: str) -> None:
    config = echo_config(tmp_path, model, total_train_epochs=3, evaluator__freq_steps=3, actor__device="cpu")
    rollouts = EchoRollouts()
    metrics = run(config, rollouts)
    assert [m["step"] for m in metrics] == [0, 1, 2]
    # One first token; an output predicts nothing. (On a GPU beginnings as short as this are not shared.)
    assert all(m["n_computed"] == 1 + 10 * 2 for m in metrics)
    assert all(m["tokens_per_s"] > m["computed_per_s"] > 0 for m in metrics)
    assert rollouts.published == [0, 1, 2, 3]
    with open_book(config.book_path) as book:
        ledger = book.sql("select step, n_rows, trained_at is not null as ok from batches order by step").to_pylist()
        assert ledger == [{"step": s, "n_rows": 160, "ok": True} for s in range(3)]
        twice = book.sql("select interaction_id from batch_rows group by all having count(*) > 1")
        assert not twice.num_rows
        policies = book.sql("select version, path from policies order by version").to_pylist()
        assert [p["version"] for p in policies] == [0, 1, 2, 3]
        assert (Path(policies[-1]["path"]) / "model.safetensors").is_file()
        scores = book.sql("select count(*) as n, max(abs(mean_gap)) as gap from scores").to_pylist()[0]
        assert scores["n"] == 480
        assert scores["gap"] < 1e-4  # engine and learner are one model in one precision
        evals = book.sql("select count(*) as n from episodes where is_eval and version = 3").to_pylist()[0]
        assert evals["n"] == 10
    assert (Path(config.run_path) / "best" / "model.safetensors").is_file()


def test_a_taken_batch_can_be_built_again(tmp_path: Path, model: str) -> None:
    config = echo_config(tmp_path, model, total_train_epochs=2)
    run(config, EchoRollouts())
    with open_book(config.book_path) as book:
        batch = book.sql("select batch_id from batches where step = 1").to_pylist()[0]["batch_id"]
        one, two = rows_of(book, batch), rows_of(book, batch)
        assert one.interaction_ids == two.interaction_ids
        for name in ("ids", "starts", "n_prompt", "logprobs", "versions", "credits", "advantages"):
            assert getattr(one, name).tobytes() == getattr(two, name).tobytes()
        by_group: dict[str, list[float]] = {}
        for group, advantage in zip(one.group_ids, one.advantages, strict=True):
            by_group.setdefault(group, []).append(float(advantage))
        assert all(abs(sum(a)) < 1e-9 for a in by_group.values())


def test_a_finished_run_started_again_does_nothing(tmp_path: Path, model: str) -> None:
    config = echo_config(tmp_path, model, total_train_epochs=2)
    before = run(config, EchoRollouts())
    again = EchoRollouts()
    after = run(config, again)
    assert again.n_drawn == 0
    assert [m["loss"] for m in after] == [m["loss"] for m in before]


def test_a_run_goes_on_when_what_it_trained_was_pruned(tmp_path: Path, model: str) -> None:
    config = echo_config(tmp_path, model, total_train_epochs=2)
    run(config, EchoRollouts())
    with open_book(config.book_path) as book:
        trained = book.sql("select episode_id from episodes where n_taken > 0")["episode_id"].to_pylist()
    assert prune(config.book_path, episode_ids=trained).n_events
    config.total_train_epochs = 3
    assert len(run(config, EchoRollouts())) == 3
    (Path(config.run_path) / "checkpoints" / "step-00000003").rename(tmp_path / "lost")
    with open_book(config.book_path) as book:
        trained = book.sql("select episode_id from episodes where n_taken > 0")["episode_id"].to_pylist()
    assert prune(config.book_path, episode_ids=trained).n_events
    with pytest.raises(BadCheckpoint, match="step 2 is newer than the newest checkpoint and cannot be trained again"):
        run(config, EchoRollouts())


def test_two_ranks_go_on_where_one_was_and_train_the_same(tmp_path: Path, model: str) -> None:
    whole = run(echo_config(tmp_path / "one", model, total_train_epochs=4), EchoRollouts())
    config = echo_config(tmp_path / "two", model, total_train_epochs=4, actor__device="cpu")
    config.total_train_steps = 2
    run(config, EchoRollouts())
    config.total_train_steps, config.actor.backend = None, "fsdp:d2"
    parts = run(config, EchoRollouts())
    for name in ("loss", "grad_norm", "reward", "entropy"):
        assert [m[name] for m in parts] == pytest.approx([m[name] for m in whole], rel=1e-3, abs=1e-5)
    with open_book(config.book_path) as book:
        assert book.sql("select version from policies order by 1")["version"].to_pylist() == [0, 1, 2, 3, 4]
    assert (Path(config.run_path) / "rank-1.log").is_file()


def test_fewer_gpus_than_asked_is_a_clear_error_before_anything_is_made(tmp_path: Path, model: str) -> None:
    config = echo_config(tmp_path, model, actor__backend="fsdp:d64")
    with pytest.raises(ValueError, match=r"asks for 64 GPUs on this machine and there are \d+; ask for fewer ranks"):
        run(config, EchoRollouts())
    assert not list(tmp_path.iterdir())


def test_staleness_lets_rollouts_run_ahead(tmp_path: Path, model: str) -> None:
    config = echo_config(tmp_path, model, total_train_epochs=4, rollout__max_head_offpolicyness=2)
    metrics = run(config, EchoRollouts())
    assert len(metrics) == 4
    assert max(m["staleness_max"] for m in metrics) <= 2


def test_rejected_groups_are_replaced_and_counted(tmp_path: Path, model: str) -> None:
    config = echo_config(tmp_path, model, total_train_epochs=4, actor__dynamic_sampling=True, gconfig__n_samples=4)
    metrics = run(config, EchoRollouts())
    assert sum(m.get("discarded_zero_variance", 0) for m in metrics) > 0
    full = [m for m in metrics[:-1] if m.get("n_groups")]
    assert all(m["n_groups"] == 10 for m in full)  # the last batch has what is left
    with open_book(config.book_path) as book:
        selections = [json.loads(s) for s in book.sql("select selection from batches")["selection"].to_pylist()]
    used = [g for s in selections for g in s["groups"] + s["rejected"]]
    assert len(used) == len(set(used)) == 40


def test_a_step_whose_groups_all_agree_draws_a_few_batches_and_goes_on(tmp_path: Path, model: str) -> None:
    settings = {"actor__dynamic_sampling": True, "actor__dynamic_sampling_draws": 2, "gconfig__n_samples": 2}
    config = echo_config(tmp_path, model, total_train_epochs=100, **settings)
    config.total_train_steps = 3
    rollouts = EchoRollouts(lambda *_: 0.5)
    metrics = run(config, rollouts)
    assert [m["n_groups"] for m in metrics] == [10, 10, 10]
    assert [m["discarded_zero_variance"] for m in metrics] == [40, 40, 40]  # episodes
    assert rollouts.n_drawn <= 3 * 30


def test_a_filter_of_the_caller_decides_too(tmp_path: Path, model: str) -> None:
    config = echo_config(tmp_path, model, total_train_epochs=1, train_dataset__batch_size=5)
    run(config, EchoRollouts(), dynamic_filter_fn=lambda group: group.task["digit"] % 2 == 0)
    with open_book(config.book_path) as book:
        selection = json.loads(book.sql("select selection from batches")["selection"].to_pylist()[0])
    assert len(selection["groups"]) == 5


def failed(config: TrainConfig, n: int) -> None:
    """What an earlier process of the run left: groups of which every sample failed."""
    with open_book(config.book_path, writer="old") as book:
        for group in range(n):
            for sample in range(config.gconfig.n_samples):
                opened = EpisodeOpened(task_id=f"task-{group}", group_id=f"echo/t/epoch-0/{group}", version=0)
                facts = (opened, EpisodeClosed(state="failed", reason="ImportError: no module named tool_box"))
                episode = f"old-{group}-{sample}"
                book.log.append_blocking(*(Event(run_id="echo/t", episode_id=episode, fact=fact) for fact in facts))


def test_groups_that_failed_whole_are_drawn_again_by_the_same_command(tmp_path: Path, model: str) -> None:
    config = echo_config(tmp_path, model, total_train_epochs=1, gconfig__n_samples=4)
    failed(config, 10)
    (metrics,) = run(config, EchoRollouts())
    assert metrics["n_groups"] == 10
    assert metrics["n_episodes"] == 40
    with open_book(config.book_path) as book:
        assert not book.sql(
            "select 1 from batch_rows join interactions using (interaction_id) where episode_id like 'old-%'"
        ).num_rows


def test_a_run_whose_episodes_all_failed_says_so(tmp_path: Path, model: str) -> None:
    config = echo_config(tmp_path, model, total_train_epochs=1, gconfig__n_samples=2)
    rollouts = EchoRollouts()

    rollouts.check = lambda: failed(config, 10)  # type: ignore[method-assign]
    with pytest.raises(
        NothingToTrain,
        match=r"^no step was trained: 20 of 20 episodes failed, the last with ImportError.*draws them again$",
    ):
        run(config, rollouts)


def test_missing_rewards_are_missing_not_zero(tmp_path: Path, model: str) -> None:
    def half(task: Mapping[str, Any], output: int) -> float | None:
        return None if output % 2 else right_digit(task, output)

    config = echo_config(tmp_path, model, total_train_epochs=1)
    metrics = run(config, EchoRollouts(half))
    assert metrics[0]["discarded_no_reward"] + metrics[0]["n_rows"] == 160


def test_the_reward_may_be_an_expression(tmp_path: Path, model: str) -> None:
    config = echo_config(tmp_path, model, total_train_epochs=1, credit__reward="2 * reward - n_interactions")
    metrics = run(config, EchoRollouts())
    with open_book(config.book_path) as book:
        mean = book.sql("select avg(reward) as r from episodes")["r"].to_pylist()[0]
        credits = book.sql("select distinct credit from batch_rows order by 1")["credit"].to_pylist()
    assert metrics[0]["reward"] == pytest.approx(2 * mean - 1)
    assert credits == [-1, 1]


def test_no_reward_at_all_is_a_clear_error_before_any_training(tmp_path: Path, model: str) -> None:
    config = echo_config(tmp_path, model)
    with pytest.raises(NothingToTrain, match=r"10 groups of run echo/t ended \(160 done\) and none .* has a reward"):
        run(config, EchoRollouts(lambda task, output: None))
    with open_book(config.book_path) as book:
        assert not book.sql("select * from batches").num_rows


def test_a_recorded_book_teaches_without_an_engine(tmp_path: Path, model: str) -> None:
    first = echo_config(tmp_path, model, total_train_epochs=2, actor__optimizer__lr=0.0)
    before = run(first, EchoRollouts())
    offline = echo_config(tmp_path, model, total_train_epochs=10, trial_name="offline", scheduler__type="none")
    offline.book = first.book_path
    offline.train_dataset.batch_size = 5
    with PPOTrainer(offline) as trainer:
        trainer.train()
    with open_book(first.book_path) as book:
        trained = book.sql("select count(*) as n from batches where run_id = 'echo/offline' and trained_at is not null")
        assert trained["n"].to_pylist() == [40]
        policies = book.sql("select path from policies where run_id = 'echo/offline' order by version")["path"]
    later = echo_config(tmp_path, policies[-1].as_py(), total_train_epochs=1, trial_name="later")
    after = run(later, EchoRollouts())
    assert after[0]["reward"] > before[0]["reward"] + 0.1


def test_an_empty_selection_is_a_clear_error(tmp_path: Path, model: str) -> None:
    config = echo_config(tmp_path, model, scheduler__type="none")
    with pytest.raises(NothingToTrain, match="finds no ended episode in the book"), PPOTrainer(config) as trainer:
        trainer.train()


def record(folder: Path, *answers: Mapping[str, Any]) -> str:
    """A book of one group, an episode of one call for each answer: prompt, output, reward and whatever is odd. An
    answer may say that it is of another group or run, and what its episode is called."""
    with open_book(folder, writer="recorder") as book:
        for i, said in enumerate(answers):
            prompt, output = said.get("prompt", [1, 2]), said.get("output", [3, 4])
            names: dict[str, Any] = {"run_id": said.get("run", "recorded"), "episode_id": said.get("name", f"e{i}")}
            fact = InteractionRecorded(
                prompt_length=len(prompt), finish_reason="stop", sampling=said.get("sampling", {"temperature": 1.0})
            )
            book.log.append_blocking(
                Event(**names, fact=EpisodeOpened(task_id="t", group_id=said.get("group", "g"), version=0)),
                Event(
                    **names,
                    interaction_id=f"{names['episode_id']}.1",
                    fact=fact,
                    prompt_ids=np.array(prompt, np.int32),
                    output_ids=np.array(output, np.int32),
                    logprobs=np.array(said.get("logprobs", [-3.4] * len(output)), np.float32),
                    versions=np.zeros(len(output), np.int32),
                ),
                *(
                    Event(**names, fact=RewardGiven(value=value))
                    for value in [said.get("reward", float(i))]
                    if value is not None
                ),
                Event(**names, fact=EpisodeClosed(state=said.get("state", "done"))),
            )
    return str(folder)


def n_taken(book: str) -> int:
    with open_book(book) as opened:
        return opened.sql("select * from batches").num_rows


def off_policy(tmp_path: Path, model: str, book: str, **overrides: Any) -> dict[str, Any]:
    """One step on it without an engine; its metrics."""
    config = echo_config(tmp_path, model, scheduler__type="none", book=book, **overrides)
    with PPOTrainer(config) as trainer:
        trainer.train()
    (line,) = (Path(config.run_path) / "metrics.jsonl").read_text().splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.parametrize(
    "odd", [{"prompt": []}, {"logprobs": [float("nan"), -1.0]}, {"logprobs": [-1.0, -np.inf]}, {"output": []}]
)
def test_an_answer_that_cannot_be_trained_is_left_out_and_counted(tmp_path: Path, model: str, odd: Any) -> None:
    metrics = off_policy(tmp_path, model, record(tmp_path / "book", {}, odd, {}))
    assert (metrics["n_rows"], metrics["discarded_untrainable"], metrics["is_skipped"]) == (2, 1, 0)
    assert np.isfinite(metrics["loss"])


def test_a_step_without_anything_to_train_says_why(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = off_policy(tmp_path, model, record(tmp_path / "book", {"state": "failed"}))
    assert metrics["discarded_failed"] == 1
    assert "nothing to train (episodes left out: 1 failed)" in " ".join(capsys.readouterr().err.split())


def test_a_step_whose_tokens_are_all_left_out_moves_no_weight(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    book = record(tmp_path / "book", {}, {})
    metrics = off_policy(tmp_path, model, book, actor__max_staleness=0, actor__optimizer__weight_decay=0.5)
    assert (metrics["n_trained_tokens"], metrics["is_skipped"]) == (0, 1)
    assert "step 0 trains none of its tokens: they are too old" in " ".join(capsys.readouterr().err.split())
    before, after = load_file(f"{model}/model.safetensors"), load_file(f"{book}/policies/echo/t/v1/model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_gradient_that_is_no_number_is_told_and_the_run_goes_on_from_there(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    book = record(tmp_path / "book", {"reward": 1e100}, {})
    huge: dict[str, Any] = {"actor__reward_clip": 1e101, "algorithm": "reinforce"}
    for _ in range(2):  # again as after a kill, from the checkpoint
        metrics = off_policy(tmp_path, model, book, **huge)
        assert metrics["grad_norm"] is None
    assert "step 0 met a gradient that is no finite number" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("algorithm", ["m2po", "grpo", "reinforce", "gspo", "sapo", "cispo"])
@pytest.mark.parametrize("is_decoupled", [True, False])
def test_a_token_whose_logprob_is_far_off_leaves_the_gradient_a_number(
    tmp_path: Path, model: str, algorithm: str, is_decoupled: bool
) -> None:
    book = record(tmp_path / "book", {}, {"logprobs": [-9999.0, -3.4]})
    score(book, "x", [-9999.0, -1.0], [-1.0, -1.0])
    far: dict[str, Any] = {"ref_scores": "x", "actor__kl_loss_coef": 0.1, "actor__kl_estimator": "k3"}
    metrics = off_policy(
        tmp_path, model, book, algorithm=algorithm, actor__use_decoupled_loss=is_decoupled,
        actor__rejection_sampling=None, **far,
    )  # fmt: skip
    assert metrics["is_skipped"] == 0
    assert np.isfinite([metrics["loss"], metrics["grad_norm"], metrics["kl_ref"]]).all()


def test_weights_that_are_no_numbers_are_refused_before_a_step(tmp_path: Path) -> None:
    broken = tiny_model(hidden=32)
    broken.lm_head.weight.data[5] = torch.nan  # type: ignore[union-attr, operator, index]
    broken.save_pretrained(tmp_path / "broken")  # type: ignore[operator]
    book = record(tmp_path / "book", {}, {})
    with pytest.raises(PoliciesDisagree, match="the model gives 4 of 4 tokens a logprob that is no finite number"):
        off_policy(tmp_path, str(tmp_path / "broken"), book)


def test_runs_whose_names_differ_by_a_dash_share_no_weights(tmp_path: Path, model: str) -> None:
    book = record(tmp_path / "book", {}, {})
    for names in ({"experiment_name": "a-b", "trial_name": "c"}, {"experiment_name": "a", "trial_name": "b-c"}):
        off_policy(tmp_path, model, book, **names)
    with open_book(book) as opened:
        paths = opened.sql("select path from policies where version = 1")["path"].to_pylist()
    assert len(set(paths)) == 2
    assert all((Path(path) / "model.safetensors").is_file() for path in paths)


def test_a_recorded_group_without_a_reward_is_left_out_and_the_run_goes_on(tmp_path: Path, model: str) -> None:
    answers = [
        {"group": g, "reward": None if g == "unjudged" else float(i)} for g in ("a", "unjudged", "b") for i in (0, 1)
    ]
    book = record(tmp_path / "book", *answers)
    config = echo_config(tmp_path, model, scheduler__type="none", book=book, total_train_epochs=1)
    config.train_dataset.batch_size = 1
    with PPOTrainer(config) as trainer:
        trainer.train()
    with open_book(book) as opened:
        steps = opened.sql("select n_rows, discarded from batches where trained_at is not null").to_pylist()
    assert sorted(step["n_rows"] for step in steps) == [0, 2, 2]
    assert [json.loads(step["discarded"]) for step in steps if not step["n_rows"]] == [{"no_reward": 2}]
    config.trial_name, config.selection.where = "none-at-all", "group_id = 'unjudged'"
    with (
        pytest.raises(NothingToTrain, match=r"^1 groups of the selection ended \(2 done\) and none of"),
        PPOTrainer(config) as trainer,
    ):
        trainer.train()


def test_a_reward_that_is_no_number_is_a_missing_one(tmp_path: Path, model: str) -> None:
    book = record(tmp_path / "book", {"reward": 0.0}, {"reward": 1.0}, {"reward": 2.0})
    metrics = off_policy(
        tmp_path, model, book, credit__reward="case when reward = 1 then 'nan'::double else reward end"
    )
    assert (metrics["n_rows"], metrics["discarded_no_reward"], metrics["reward"]) == (2, 1, 1.0)
    with pytest.raises(NothingToTrain, match="none of their episodes has a reward"):
        off_policy(tmp_path, model, book, credit__reward="'nan'::double", trial_name="other")


@pytest.mark.parametrize("answer", [{"prompt": [1, -2]}, {"output": [3, 400], "logprobs": [-1.0, -1.0]}])
def test_tokens_of_another_model_are_refused(tmp_path: Path, model: str, answer: Any) -> None:
    book = record(tmp_path / "book", {}, answer)
    with pytest.raises(BadSetting, match="but the model's vocabulary has 32"):
        off_policy(tmp_path, model, book)
    assert n_taken(book) == 0


def test_tokens_that_the_reference_or_the_critic_do_not_know_are_refused(tmp_path: Path, model: str) -> None:
    small = tiny_folder(tmp_path / "small", vocabulary=4)
    book = record(tmp_path / "book", {}, {"output": [30]})
    ref, critic = ModelConfig(path=small, dtype="float32"), CriticConfig(path=small, dtype="float32")
    with pytest.raises(BadSetting, match="but the reference's vocabulary has 4"):
        off_policy(tmp_path, model, book, ref=ref, actor__kl_loss_coef=0.1, trial_name="ref")
    with pytest.raises(BadSetting, match="but the critic's vocabulary has 4"):
        off_policy(tmp_path, model, book, critic=critic, algorithm="ppo", trial_name="critic")
    assert n_taken(book) == 0


def test_stored_scores_that_are_missing_are_refused_before_the_batch_is_taken(tmp_path: Path, model: str) -> None:
    book = record(tmp_path / "book", {}, {})
    with pytest.raises(NothingToTrain, match="have no scores 'nobody'"):
        off_policy(tmp_path, model, book, ref_scores="nobody", actor__kl_loss_coef=0.1)
    assert n_taken(book) == 0
    with pytest.raises(BadSetting, match=r"^ref_scores are of answers that the book has"):
        run(echo_config(tmp_path, model, ref_scores="nobody", trial_name="live"), EchoRollouts())


def score(book: str, name: str, *stored: list[float]) -> None:
    """Scores of the answers of `record`."""
    with open_book(book, writer="scores") as opened:
        opened.log.append_blocking(
            *(
                Event(
                    run_id="recorded",
                    episode_id=f"e{i}",
                    interaction_id=f"e{i}.1",
                    fact=TokensScored(scorer=name),
                    logprobs=np.array(values, np.float32),
                )
                for i, values in enumerate(stored)
            )
        )


@pytest.mark.parametrize("odd", [[-1.0], [-1.0, -1.0, -1.0], [-1.0, float("nan")], [-np.inf, -1.0]])
def test_stored_scores_that_do_not_fit_an_answer_are_none(tmp_path: Path, model: str, odd: list[float]) -> None:
    book = record(tmp_path / "book", {}, {}, {})
    score(book, "x", [-1.0, -1.0], odd, [-1.0, -1.0])
    with pytest.raises(NothingToTrain, match="1 of 3 interactions of the batch have no scores 'x', or not a finite"):
        off_policy(tmp_path, model, book, ref_scores="x", actor__kl_loss_coef=0.1)
    assert n_taken(book) == 0


def test_stored_scores_are_read_once_a_step(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    book = record(tmp_path / "book", {}, {})
    score(book, "x", [-1.0, -1.0], [-2.0, -2.0])
    read: list[str] = []
    scores = Book.scores

    def counted(self: Book, scorer: str, *args: Any) -> Any:
        read.append(scorer)
        return scores(self, scorer, *args)

    monkeypatch.setattr(Book, "scores", counted)
    off_policy(tmp_path, model, book, ref_scores="x", actor__kl_loss_coef=0.1)
    assert read == ["x"]


def test_groups_of_two_runs_with_one_id_are_two_groups(tmp_path: Path, model: str) -> None:
    answers = [{"run": run, "reward": reward} for run in ("one", "two") for reward in (0.0, 1.0)]
    for far in answers[2:]:
        far["reward"] += 10.0
    book = record(tmp_path / "book", *answers)
    config = echo_config(tmp_path, model, scheduler__type="none", book=book, algorithm="rloo", total_train_epochs=1)
    config.train_dataset.batch_size = 2
    with PPOTrainer(config) as trainer:
        trainer.train()
    with open_book(book) as opened:
        rows = opened.sql("select advantage from batch_rows order by interaction_id")["advantage"].to_pylist()
        assert rows == [-1.0, 1.0, -1.0, 1.0]
        again = rows_of(opened, opened.sql("select batch_id from batches")["batch_id"][0].as_py(), config.run_id)
        assert len(set(again.group_ids)) == 2


def test_a_book_that_grows_while_a_run_without_an_engine_is_down_skips_no_group_and_repeats_none(
    tmp_path: Path, model: str
) -> None:
    def groups(*names: str) -> list[dict[str, Any]]:
        return [{"group": g, "name": f"{g}-{i}", "reward": float(i)} for g in names for i in (0, 1)]

    book = record(tmp_path / "book", *groups("²", "1", "2", "3"))
    config = echo_config(tmp_path, model, scheduler__type="none", book=book, total_train_epochs=2)
    config.train_dataset.batch_size, config.saver.freq_epochs, config.total_train_steps = 2, 1, 1

    def go_on() -> list[list[str]]:
        with PPOTrainer(config) as trainer:
            trainer.train()
        with open_book(book) as opened:
            stored = opened.sql("select selection from batches order by step")["selection"].to_pylist()
        return [[json.loads(group)[1] for group in json.loads(one)["groups"]] for one in stored]

    first = go_on()
    record(tmp_path / "book", *groups("5", "6", "7"))
    config.total_train_steps = None
    steps = go_on()
    assert steps[:1] == first
    used = [group for step in steps for group in step]
    assert sorted(used[:7]) == sorted(["²", "1", "2", "3", "5", "6", "7"])  # all once before any comes again
    assert sorted(used[7:]) == sorted(used[:7])
    assert all(len(set(step)) == 2 for step in steps)
    saved = sorted(path.name for path in (Path(config.run_path) / "saved").iterdir())
    assert saved == ["step-00000003", "step-00000006"]


@pytest.mark.parametrize("wrong", ["nonsense(reward)", "1 // (n_interactions - n_interactions)"])
def test_a_reward_that_cannot_be_computed_ends_a_run_with_a_clear_error(tmp_path: Path, model: str, wrong: str) -> None:
    config = echo_config(tmp_path, model, credit__reward=wrong)
    with pytest.raises(BadSetting, match=r"^credit.reward '.*' cannot be computed: .*docs/sql.md"):
        run(config, EchoRollouts())
    assert n_taken(config.book_path) == 0


def test_a_condition_that_cannot_be_computed_is_a_clear_error(tmp_path: Path, model: str) -> None:
    with pytest.raises(BadSetting, match=r"selection.where 'colour = 1'.*\"colour\" not found.*docs/sql.md"):
        off_policy(tmp_path, model, record(tmp_path / "book", {}), selection__where="colour = 1")


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("actor__optimizer__lr", -1.0, "actor.optimizer.lr: expected `float` >= 0.0, got -1.0"),
        ("actor__temperature", float("nan"), "actor.temperature: expected `float` > 0.0, got nan"),
        ("actor__ppo_n_minibatches", 0, "actor.ppo_n_minibatches: expected `int` >= 1, got 0"),
        ("actor__optimizer__lr", float("inf"), "actor.optimizer.lr is inf; give it a finite number"),
        ("actor__entropy_coef", float("nan"), "actor.entropy_coef is nan; give it a finite number"),
        ("actor__c_clip", 0.5, "actor.c_clip: expected `float` >= 1.0, got 0.5"),
        (
            "actor__rejection_sampling",
            RejectionConfig(metric="kl_k1"),
            "action clamp caps a ratio, and metric is kl_k1",
        ),
        ("actor__rejection_sampling", RejectionConfig(upper=0.5, lower=2.0), "lower is 2.0 and upper 0.5: no token"),
        ("seed", -5, "seed: expected `int` >= 0, got -5"),
        ("train_dataset__batch_size", 0, "train_dataset.batch_size: expected `int` >= 1, got 0"),
        ("total_train_steps", -1, "total_train_steps: expected `int` >= 1, got -1"),
        ("trial_name", "../../away", "trial_name is '../../away'; it names a folder"),
        ("trial_name", "", "trial_name is ''; it names a folder"),
        ("algorithm", None, "algorithm: expected `str`, got `null`"),
        ("trial_name", object(), "the config holds what is no setting"),
        ("actor__loss_agg", "fixed_length", "set actor.fixed_length or actor.max_new_tokens"),
        ("actor__overlong_reward_penalty", True, "actor.overlong_reward_penalty is set without a zone"),
        ("tokenizer_path", "nowhere", "tokenizer_path 'nowhere' is no folder"),
        ("algorithm", "json.JSONDecoder", "algorithm 'json.JSONDecoder' cannot be made"),
        ("algorithm", "types.SimpleNamespace", "algorithm 'types.SimpleNamespace'"),
    ],
)
def test_a_setting_out_of_range_is_named_before_anything_is_written(
    tmp_path: Path, model: str, setting: str, value: Any, said: str
) -> None:
    config = echo_config(tmp_path, model, **{setting: value})
    with pytest.raises(BadSetting, match=re.escape(said)):
        run(config, EchoRollouts())
    assert not list(tmp_path.rglob("*.log"))  # no book was opened


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("actor__device", "cuda:99", "device is 'cuda:99' and there are"),
        ("actor__device", "abacus", "device is 'abacus'; expected auto, cpu"),
        ("actor__lora", LoraConfig(target_modules=["nothing"]), "actor.lora cannot be put into this model"),
    ],
)
def test_what_this_machine_or_model_has_not_is_a_clear_error(
    tmp_path: Path, model: str, setting: str, value: Any, said: str
) -> None:
    with pytest.raises(BadSetting, match=said):
        off_policy(tmp_path, model, record(tmp_path / "book", {}), **{setting: value})


@pytest.mark.parametrize("tasks", [iter([{"digit": 1}]), {"digit": 1}, "train.jsonl", ["one", "two"]])
def test_tasks_that_are_no_list_of_dicts_are_refused(tmp_path: Path, model: str, tasks: Any) -> None:
    with pytest.raises(BadSetting, match=r"train_dataset .* dict"):
        PPOTrainer(echo_config(tmp_path, model), tasks)


def test_a_config_that_is_none_is_refused() -> None:
    wrong: Any = {"algorithm": "grpo"}
    with pytest.raises(BadSetting, match="config is a dict; expected a TrainConfig"):
        PPOTrainer(wrong, echo_tasks(10))


def test_a_run_of_which_a_filter_took_nothing_says_so(tmp_path: Path, model: str) -> None:
    config = echo_config(tmp_path, model, gconfig__n_samples=2)
    with pytest.raises(NothingToTrain, match="none of the groups of 20 episodes was taken"):
        run(config, EchoRollouts(), dynamic_filter_fn=lambda group: False)


def test_a_trainer_may_be_asked_twice(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = echo_config(tmp_path, model, gconfig__n_samples=2)
    with PPOTrainer(config, echo_tasks(10), rollouts=EchoRollouts()) as trainer:
        trainer.train(workflow="agent")
        trainer.train(workflow="agent")
    assert "the run has trained its 1 steps" in " ".join(capsys.readouterr().err.split())


def test_no_dataset_is_a_clear_error() -> None:
    with pytest.raises(ValueError, match="train_dataset has no rows"):
        PPOTrainer(TrainConfig())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"algorithm": "ppo"}, r"'ppo' needs a value model; set critic\.path"),
        ({"actor__kl_ctl": 0.1}, r"asks for a reference model; set ref\.path"),
    ],
)
def test_a_model_that_is_needed_is_asked_for_by_name(
    tmp_path: Path, model: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        run(echo_config(tmp_path, model, **settings), EchoRollouts())
    assert not list(tmp_path.iterdir())


def test_the_book_says_what_tokens_were_drawn_from() -> None:
    assert drawn('{"temperature": 0.7, "top_p": 0.9, "top_k": 20}', "processed") == Draw(0.7, 0.9, 20)
    assert drawn('{"temperature": 0.7}', "raw") == drawn('{"temperature": 0.0}', "processed") == Draw()
    assert drawn("{}", "processed") is None is drawn(None, None)
    assert drawn('{"temperature": 0.7, "top_p": null, "top_k": -1}', "processed") == Draw(0.7)  # -1: all, as in vLLM
    assert drawn('{"temperature": "hot"}', "raw") is None is drawn('{"temperature": -1}', "processed")
    assert was_held('{"temperature": 0.7, "is_held": true}', "processed")
    assert not was_held('{"temperature": 0.7, "is_held": true}', "raw")
    assert not was_held('{"temperature": 0.7}', "processed")
    assert not was_held(None, None)
    assert was_held('{"temperature": 0.7}', "invented")  # a script's are of no model


def test_mfu_is_six_operations_per_parameter_and_computed_token() -> None:
    backend = SimpleNamespace(n_parameters=10**9, peak_flops=1e15)
    metrics = {"n_tokens": 3e5, "n_computed": 1e5, "train_s": 2.0}
    found = throughput(metrics, backend)  # type: ignore[arg-type]
    assert found == {"tokens_per_s": 1.5e5, "computed_per_s": 5e4, "mfu": pytest.approx(0.3)}


def test_a_nan_reward_is_refused_where_it_enters_the_book(tmp_path: Path, model: str) -> None:
    with pytest.raises(BadEvent, match="must be a finite number, got nan"):
        run(echo_config(tmp_path, model), EchoRollouts(lambda task, output: float("nan")))


def test_a_writer_that_is_not_installed_is_named_before_anything_is_loaded() -> None:
    config = TrainConfig()
    check_writers(config)
    config.stats_logger.tensorboard.path = "anywhere"
    with pytest.raises(ValueError, match=r"stats_logger\.tensorboard\.path is set and the package no_such is not here"):
        check_writers(config, {"no_such": "stats_logger.tensorboard.path"})


def test_engine_and_learner_that_differ_are_told(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(echo_config(tmp_path, model, total_train_epochs=1, actor__logprob_gap_warn=-1.0), EchoRollouts())
    assert "engine and learner differ by 0.000 nats per token on fresh tokens" in capsys.readouterr().err


def test_an_unknown_algorithm_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"algorithm is 'gpro'; expected one of .*grpo"):
        PPOTrainer(TrainConfig(algorithm="gpro"), echo_tasks(1))


def test_importing_the_learner_imports_no_torch() -> None:
    code = "import rollbook.learner, sys; assert 'torch' not in sys.modules; rollbook.learner.TrainConfig()"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_keys_do_not_reach_the_book() -> None:
    config = {"rollout": {"agent": {"admin_api_key": "secret", "mode": "inline"}}, "tags": [{"api_key": "secret"}]}
    assert without_keys(config) == {"rollout": {"agent": {"mode": "inline"}}, "tags": [{}]}


def test_rewards_that_never_differ_are_named_once(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = echo_config(tmp_path, model, total_train_epochs=3)
    run(config, EchoRollouts(lambda task, output: 0.25))
    said = capsys.readouterr().err
    assert said.count("teaches nothing: the reward 'reward' is 0.25 in every episode") == 1


def test_a_second_learner_on_a_book_is_told_of_the_first(tmp_path: Path, model: str) -> None:
    config = echo_config(tmp_path, model, total_train_epochs=1)
    with (
        open_book(config.book_path, writer="learner"),
        pytest.raises(BadSetting, match=r"another training run writes to the book .*book at this moment"),
    ):
        run(config, EchoRollouts())


def test_whoever_watches_sees_what_runs_and_what_failed(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes what is captured for a terminal
    monkeypatch.setattr(Report, "waiting", lambda _, line: shown.append(line))
    config = echo_config(tmp_path, model, total_train_epochs=1, gconfig__n_samples=8)
    run(config, EchoRollouts())
    assert any(re.fullmatch(r"\d+ of 10 groups for step 0  running \d+  failed 0.*  tok/s \d+", one) for one in shown)
    with open_book(config.book_path, writer="more") as book:
        (before,) = book.sql("select avg(reward) r, sum(n_output) n from episodes where not is_eval").to_pylist()
        for name in ("runs", "fails"):
            book.log.append_blocking(Event(run_id=config.run_id, episode_id=name, fact=EpisodeOpened(task_id="t")))
        failed = EpisodeClosed(state="failed", reason="no")
        book.log.append_blocking(Event(run_id=config.run_id, episode_id="fails", fact=failed))
        book.catch_up()
        now = re.fullmatch(r"running 1  failed 1  reward (.*)  tok/s (.*)", batches.under_way(book, config.run_id))
        assert now is not None
        assert float(now[1]) == pytest.approx(before["r"], abs=1e-3)
        assert 0 < float(now[2]) <= before["n"]
        assert batches.under_way(book, "another run") == "running 0  failed 0  tok/s 0"


def test_tensorboard_and_weights_and_biases_get_every_step(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ERROR_REPORTING", "false"), ("SILENT", "true"), ("DATA_DIR", str(tmp_path))):
        monkeypatch.setenv(f"WANDB_{name}", value)
    config = echo_config(tmp_path, model, total_train_epochs=2)
    config.stats_logger.tensorboard.path = str(tmp_path / "events")
    config.stats_logger.wandb.mode = "offline"
    told = run(config, EchoRollouts())
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(config.stats_logger.tensorboard.path).Reload()
    for name in ("loss", "reward", "grad_norm"):
        points = [(point.step, point.value) for point in events.Scalars(name)]
        assert points == [(m["step"], pytest.approx(m[name], rel=1e-6)) for m in told]
    (file,) = (Path(config.run_path) / "wandb").glob("offline-run-*/run-echo-t.wandb")
    written = offline_history(file)
    assert [(int(row["_step"]), row["loss"], row["reward"]) for row in written] == [
        (m["step"], m["loss"], m["reward"]) for m in told
    ]


def offline_history(file: Path) -> list[dict[str, Any]]:
    """What `wandb sync` would send. A LevelDB log: behind 7 bytes, blocks of 32 KiB of pieces of records."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record, rows = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            told = Record.FromString(record)
            record = b""
            if told.WhichOneof("record_type") == "history":
                rows.append({".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in told.history.item})
    return rows
