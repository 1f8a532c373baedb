"""Stored answers under other weights: the numbers of a plain forward pass, written once, and good to train against."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.echo import EchoRollouts, echo_config, echo_tasks
from learner.tiny import tiny_folder, tiny_model
from rollbook.app.cli import main
from rollbook.app.models import prepare_model
from rollbook.app.rescore import rescore, weights_sha256
from rollbook.learner import PPOTrainer
from rollbook.learner.config import ModelConfig
from rollbook.learner.errors import BadSetting, NothingToTrain
from rollbook.store import (
    BookNotFound,
    EpisodeClosed,
    EpisodeOpened,
    Event,
    InteractionRecorded,
    QueryRefused,
    RewardGiven,
    open_book,
    prune,
)

PROMPT, FIRST, MORE, SECOND = [1, 2, 3], [4, 5], [6], [7, 8, 9]


@pytest.fixture
def book_path(tmp_path: Path) -> Path:
    """One episode of two turns, the first drawn at temperature .5, the second with the model's own logprobs."""

    def turn(name: str, prompt: list[int], output: list[int], at: int, **fact: Any) -> Event:
        return Event(
            run_id="r",
            episode_id="e",
            interaction_id=name,
            recorded_at=at,
            fact=InteractionRecorded(**fact),
            prompt_ids=np.array(prompt, np.int32),
            output_ids=np.array(output, np.int32),
            logprobs=np.full(len(output), -1.0, np.float32),
            versions=np.zeros(len(output), np.int32),
        )

    path = tmp_path / "book"
    with open_book(path, writer="w") as book:
        book.log.append_blocking(
            Event(run_id="r", episode_id="e", fact=EpisodeOpened(task_id="t", group_id="g")),
            turn("i1", PROMPT, FIRST, 1, prompt_length=3, sampling={"temperature": 0.5}),
            turn(
                "i2",
                MORE,
                SECOND,
                2,
                parent_id="i1",
                edge="extends",
                shared=5,
                prompt_length=6,
                sampling={"temperature": 0.5},
                logprobs_mode="raw",
            ),
            Event(run_id="r", episode_id="e", fact=EpisodeClosed(state="done")),
        )
    return path


@torch.no_grad()
def plain(model: str, prompt: list[int], output: list[int], temperature: float) -> tuple[list[float], list[float]]:
    """Logprobs and entropies of an output by a forward pass of transformers' own."""
    auto: Any = AutoModelForCausalLM
    logits = auto.from_pretrained(model, dtype=torch.float32)(input_ids=torch.tensor([prompt + output])).logits[0]
    logp = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp[range(len(output)), output].tolist(), entropy.tolist()


def test_scores_are_those_of_a_plain_forward_pass_under_each_answers_distribution(
    tmp_path: Path, book_path: Path
) -> None:
    model = tiny_folder(tmp_path / "other", seed=3)
    done = rescore(book_path, model, dtype="float32")
    assert (done.name, done.n_scored, done.n_tokens, done.n_skipped) == ("other", 2, 5, 0)
    with open_book(book_path) as book:
        table = book.scores("other")
        wanted = [plain(model, PROMPT, FIRST, 0.5), plain(model, PROMPT + FIRST + MORE, SECOND, 1.0)]
        assert table["interaction_id"].to_pylist() == ["i1", "i2"]
        for row, (logprobs, entropies) in zip(table.to_pylist(), wanted, strict=True):
            assert row["logprobs"] == pytest.approx(logprobs, abs=1e-5)
            assert row["entropies"] == pytest.approx(entropies, abs=1e-5)
            assert row["version"] is None
        rows = book.sql("select * from scores order by interaction_id").to_pylist()
        assert [row["mean_logprob"] for row in rows] == pytest.approx([np.mean(w[0]) for w in wanted], abs=1e-5)
        assert [row["mean_gap"] for row in rows] == pytest.approx([np.mean(w[0]) + 1 for w in wanted], abs=1e-5)
        assert {row["weights_sha256"] for row in rows} == {weights_sha256(Path(model))}
        assert done.mean_gap == pytest.approx(np.mean(wanted[0][0] + wanted[1][0]) + 1, abs=1e-5)
        assert book.scores("other", ["i2"])["interaction_id"].to_pylist() == ["i2"]
        assert book.scores("nobody").num_rows == 0


def test_the_same_weights_score_once_and_others_again(tmp_path: Path, book_path: Path) -> None:
    first, second = (tiny_folder(tmp_path / f"m{seed}", seed=seed) for seed in (1, 2))
    assert rescore(book_path, first, name="x", where="task_id = 'another'").n_scored == 0
    assert rescore(book_path, first, name="x").n_scored == 2
    again = rescore(book_path, first, name="x")
    assert (again.n_scored, again.n_skipped) == (0, 2)
    assert rescore(book_path, second, name="x").n_scored == 2
    with open_book(book_path) as book:
        assert book.sql("select count(*) as n from scores")["n"].to_pylist() == [4]
        [last] = book.scores("x", ["i1"])["logprobs"].to_pylist()
        assert last == pytest.approx(plain(second, PROMPT, FIRST, 0.5)[0], abs=0.05)  # computed in bfloat16
    with pytest.raises(QueryRefused, match=r"docs/sql\.md"):
        rescore(book_path, first, where="no_such_column = 1")


def answers(path: Path, *said: dict[str, Any]) -> Path:
    """A book of one episode, a call for each answer."""
    with open_book(path, writer="w") as book:
        of: dict[str, Any] = {"run_id": "r", "episode_id": "e"}
        book.log.append_blocking(
            Event(**of, fact=EpisodeOpened(task_id="t")),
            *(
                Event(
                    **of,
                    interaction_id=f"i{i}",
                    recorded_at=i,
                    fact=InteractionRecorded(
                        prompt_length=len(one.get("prompt", PROMPT)), sampling=one.get("sampling", {"temperature": 1.0})
                    ),
                    prompt_ids=np.array(one.get("prompt", PROMPT), np.int32),
                    output_ids=np.array(one.get("output", FIRST), np.int32),
                    logprobs=np.full(2, one.get("logprob", -1.0), np.float32),
                    versions=np.zeros(2, np.int32),
                )
                for i, one in enumerate(said)
            ),
            Event(**of, fact=EpisodeClosed(state="done")),
        )
    return path


def test_settings_of_any_form_beside_one_another_are_scored(tmp_path: Path) -> None:
    odd = [
        {"top_p": None},
        {"top_p": 0.9},
        {"top_k": None},
        {"top_k": 3},
        {"temperature": "hot"},
        {"temperature": None},
    ]
    book = answers(
        tmp_path / "book",
        *({"sampling": {"temperature": 1.0} | one} for one in odd),
        {"logprob": np.nan},
        {"prompt": []},
    )
    model = tiny_folder(tmp_path / "m", seed=1)
    done = rescore(book, model, name="x", dtype="float32", where="true -- all of them")
    assert (done.n_scored, np.isfinite(done.mean_gap)) == (7, True)  # not the one without a prompt
    with open_book(book) as opened:
        found = opened.scores("x")["logprobs"].to_pylist()
    whole = plain(model, PROMPT, FIRST, 1.0)[0]
    for i in (0, 2, 4, 5, 6):
        assert found[i] == pytest.approx(whole, abs=1e-5)
    assert found[1] != pytest.approx(whole, abs=1e-5)
    assert found[3] != pytest.approx(whole, abs=1e-5)


def test_a_model_that_cannot_score_an_answer_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    model, broken = tiny_folder(tmp_path / "m"), tiny_model()
    broken.lm_head.weight.data[5] = torch.nan  # type: ignore[union-attr, operator, index]
    broken.save_pretrained(tmp_path / "broken")  # type: ignore[operator]
    book = answers(tmp_path / "book", {}, {"output": [4, 40]})
    with pytest.raises(BadSetting, match="the book has token id 40, but the model's vocabulary has 32"):
        rescore(book, model, name="x")
    with pytest.raises(BadSetting, match="gives 2 of 2 tokens a logprob that is no finite number"):
        rescore(answers(tmp_path / "other", {}), tmp_path / "broken", name="x")
    with pytest.raises(BadSetting, match=r"has no config\.json"):
        rescore(book, tmp_path / "nowhere", name="x")
    for path in (book, tmp_path / "other"):
        with open_book(path) as opened:
            assert opened.scores("x").num_rows == 0


def test_what_cannot_be_rebuilt_is_left_out(tmp_path: Path, book_path: Path) -> None:
    prune(book_path, interaction_ids=["i2"])
    with open_book(book_path, writer="w") as book:
        fact = InteractionRecorded(parent_id="gone", edge="extends", shared=1, prompt_length=1)
        tokens = {"logprobs": np.zeros(1, np.float32), "versions": np.zeros(1, np.int32)}
        one = np.ones(1, np.int32)
        book.log.append_blocking(
            Event(run_id="r", episode_id="e", interaction_id="i3", fact=fact, output_ids=one, **tokens)
        )
    assert rescore(book_path, tiny_folder(tmp_path / "m", seed=1), name="x").n_scored == 1


def test_a_policy_of_the_run_is_known_by_its_version_and_training_takes_scores_as_its_reference(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "model", hidden=32)
    config = echo_config(tmp_path, model, total_train_epochs=2)
    with PPOTrainer(config, echo_tasks(10), rollouts=EchoRollouts()) as trainer:
        trainer.train(workflow="agent")
    folder = Path(config.book_path) / "policies" / "echo" / "t" / "v1"
    rescore(config.book_path, folder, name="then", dtype="float32", where="version = 1")
    with open_book(config.book_path) as book:
        scores = book.sql("select version, mean_gap from scores where scorer = 'then'").to_pylist()
    assert {row["version"] for row in scores} == {1}
    assert len(scores) == 160
    assert max(abs(row["mean_gap"]) for row in scores) < 1e-5  # those weights sampled these answers

    def off_policy(trial: str, **more: Any) -> dict[str, float]:
        again = echo_config(tmp_path, model, trial_name=trial, book=config.book_path, **more)
        again.scheduler.type = "none"
        again.selection.runs, again.selection.where = ["echo/t"], "version = 1"
        again.actor.kl_loss_coef, again.actor.kl_ctl = 0.1, 0.1
        with PPOTrainer(again) as trainer:
            trainer.train()
        metrics: dict[str, float] = json.loads((Path(again.run_path) / "metrics.jsonl").read_text().splitlines()[0])
        return metrics

    by_model = off_policy("by-model", ref=ModelConfig(path=str(folder), dtype="float32"))
    by_scores = off_policy("by-scores", ref_scores="then")
    assert by_model["kl_ref"] != 0
    for name in by_model.keys() - {"train_s", "tokens_per_s", "computed_per_s", "mfu", "waited_s", "time"}:
        assert by_scores[name] == pytest.approx(by_model[name], rel=1e-4, abs=1e-7), name
    with pytest.raises(NothingToTrain, match="rollbook rescore BOOK --model REFERENCE --name never"):
        off_policy("without", ref_scores="never")


def test_a_model_without_a_chat_template_scores_and_learns_from_a_book_but_does_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    book = tmp_path / "book"
    with open_book(book, writer="w") as recorded:
        for i in range(2):
            of: dict[str, Any] = {"run_id": "r", "episode_id": f"e{i}"}
            recorded.log.append_blocking(
                Event(**of, fact=EpisodeOpened(task_id="t", group_id="g")),
                Event(
                    **of,
                    interaction_id=f"i{i}",
                    fact=InteractionRecorded(prompt_length=3, finish_reason="stop", sampling={"temperature": 1.0}),
                    prompt_ids=np.array(PROMPT, np.int32),
                    output_ids=np.array(FIRST, np.int32),
                    logprobs=np.full(len(FIRST), -5.0, np.float32),
                    versions=np.zeros(len(FIRST), np.int32),
                ),
                Event(**of, fact=RewardGiven(value=i)),
                Event(**of, fact=EpisodeClosed(state="done")),
            )
    model = tmp_path / "model"
    shutil.copytree(prepare_model("tiny", cache_dir=tmp_path / "cache"), model)
    (model / "chat_template.jinja").unlink()
    main(["rescore", str(book), "--model", str(model), "--name", "x", "--dtype", "float32"])
    assert "2 answers of 4 tokens scored as 'x'" in capsys.readouterr().out
    config = tmp_path / "config.yaml"
    config.write_text(
        f"{{book: {book}, scheduler: {{type: none}}, train_dataset: {{batch_size: 1}}, total_train_epochs: 1, "
        f"cluster: {{fileroot: {tmp_path}}}, actor: {{path: {model}, dtype: float32, logprob_gap_stop: 99}}}}"
    )
    main(["train", str(config)])
    with open_book(book) as trained:
        assert trained.sql("select 1 from batches where trained_at is not null").num_rows == 1
    with pytest.raises(SystemExit):
        main(["serve", str(tmp_path / "served"), "--model", str(model), "--port", "0"])
    assert "lacks chat_template.jinja" in " ".join(capsys.readouterr().err.split())


def test_the_command_says_what_it_did(tmp_path: Path, book_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["rescore", str(book_path), "--model", "tiny", "--name", "tiny", "--dtype", "float32"])
    told = capsys.readouterr().out
    assert "2 answers of 5 tokens scored as 'tiny'" in told
    assert "nats per token" in told


def test_a_wrong_path_does_not_become_a_book(tmp_path: Path) -> None:
    with pytest.raises(BookNotFound, match="no book at"):
        rescore(tmp_path / "none", tiny_folder(tmp_path / "model"))
    assert not (tmp_path / "none").exists()
