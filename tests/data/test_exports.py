"""What other tools get of a book: every form against its own documentation and against the book."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from rollbook.app.cli import main
from rollbook.app.exports import export_book
from rollbook.store import BadSelection, EpisodeOpened, Event, InteractionRecorded, open_book
from rollbook.store.events import Messages, encode_messages
from rollbook.store.prune import prune
from rollbook.store.selection import Selection


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_chat_lines_are_the_trajectories_in_openai_shape(shown_book: Path, tmp_path: Path) -> None:
    with open_book(shown_book) as book:
        done = export_book(book, "chat", tmp_path / "chat.jsonl")
        expected = book.select(Selection(rows="trajectories"))
        written = lines(done.files[0])
        assert done.n_rows == len(written) == expected.num_rows > 0
        for line, leaf in zip(written, expected["leaf_id"].to_pylist(), strict=True):
            assert line.keys() <= {"messages", "tools"}
            last = book.interaction(leaf)
            assert len(line["messages"]) == len(last.messages) + 1
            for message in line["messages"]:
                assert message.keys() <= {"role", "content", "name", "tool_calls", "tool_call_id", "refusal", "weight"}
                for call in message.get("tool_calls", ()):
                    assert isinstance(call["function"]["arguments"], str)
            assert line["messages"][-1]["role"] == "assistant"
            assert line.get("tools", []) == last.tools
        assert sum(done.left_out.values()) == book.discards(Selection()).num_rows


def test_reasoning_ids_and_rewards_are_kept_where_asked(shown_book: Path, tmp_path: Path) -> None:
    with open_book(shown_book) as book:
        plain = export_book(book, "chat", tmp_path / "plain.jsonl")
        full = export_book(book, "chat", tmp_path / "full.jsonl", all_fields=True)
    assert "reasoning" not in plain.files[0].read_text()
    assert any("reasoning" in note for note in plain.notes)
    assert "reasoning_content" in full.files[0].read_text()
    assert full.notes == []
    assert all(line["episode_id"] and "reward" in line for line in lines(full.files[0]))


@pytest.mark.parametrize("rows", ["trajectories", "interactions"])
def test_trl_rows_load_as_conversations(rows: str, shown_book: Path, tmp_path: Path) -> None:
    with open_book(shown_book) as book:
        done = export_book(book, "trl", tmp_path / "trl.jsonl", rows=rows)
    found = datasets.load_dataset("json", data_files=str(done.files[0]), split="train", cache_dir=str(tmp_path / "hf"))
    assert found.num_rows == done.n_rows
    for row, line in zip(found, lines(done.files[0]), strict=True):
        assert row["completion"][0]["role"] == "assistant"
        assert row["prompt"] == line["prompt"]
        calls = [call for message in line["completion"] for call in message.get("tool_calls") or ()]
        assert all(isinstance(call["function"]["arguments"], dict) for call in calls)
        if rows == "interactions":
            assert len(line["completion"]) == 1


def test_preferences_pair_one_question_with_two_rewards(shown_book: Path, tmp_path: Path) -> None:
    with open_book(shown_book) as book:
        done = export_book(book, "trl", tmp_path / "dpo.jsonl", kind="preference")
        query = "select interaction_id, reward from interactions join episodes using (episode_id)"
        rewards = dict(zip(*book.sql(query).columns, strict=True))
        written = lines(done.files[0])
        assert written
        known = {name.as_py(): value.as_py() for name, value in rewards.items()}
        for line in written:
            best, worst = line["id"].split()
            assert line["score_chosen"] == known[best] > line["score_rejected"] == known[worst]
            assert line["chosen"][0]["role"] == line["rejected"][0]["role"] == "assistant"
        used = [name for line in written for name in line["id"].split()]
        assert len(set(used)) == len(used), "no episode is in two pairs"


def test_verl_tensors_have_its_layout(shown_book: Path, tmp_path: Path) -> None:
    with open_book(shown_book) as book:
        done = export_book(book, "verl", tmp_path / "verl", pad_id=9)
        (file,) = [file for file in done.files if file.suffix == ".pt"]
        data = torch.load(file, weights_only=True)
        index = lines(tmp_path / "verl" / "rows.jsonl")
        leaves = [row["row_id"] for row in index]
        tokens = book.load(leaves, form="trajectory")
    tensors = data["tensors"]
    n, p = tensors["prompts"].shape
    assert n == done.n_rows == len(leaves)
    assert torch.equal(tensors["input_ids"], torch.cat([tensors["prompts"], tensors["responses"]], dim=1))
    for name in ("prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids"):
        assert tensors[name].dtype == torch.int64, name
    for r in range(n):
        there = tensors["attention_mask"][r].bool()
        where = tokens.row(r)
        assert torch.equal(tensors["input_ids"][r][there], torch.from_numpy(tokens.input_ids[where]).long())
        assert torch.equal(tensors["position_ids"][r][there], torch.arange(int(there.sum())))
        assert there[p - 1]
        assert there[p]
        assert (tensors["input_ids"][r][~there] == 9).all()
        response = there[p:]
        n_response = int(response.sum())
        assert response[:n_response].all(), "responses are padded on the right"
        assert tensors["response_mask"][r][0] == 1, "a response begins with what was sampled"
        mask = tensors["response_mask"][r][response].bool().numpy()
        assert np.array_equal(mask, tokens.loss_mask[where][-n_response:])
        assert np.array_equal(tensors["rollout_log_probs"][r][response].numpy(), tokens.logprobs[where][-n_response:])
        scores = tensors["rm_scores"][r]
        assert scores[n_response - 1] == index[r]["reward"] == scores.sum()
    assert data["non_tensors"]["uid"] == [f"{row['run_id']} {row['group_id'] or row['episode_id']}" for row in index]
    assert all(len(values) == n for values in data["non_tensors"].values())


@pytest.mark.parametrize(("rows", "form"), [("interactions", "individual"), ("trajectories", "trajectory")])
def test_areal_rows_have_its_layout(rows: str, form: Any, shown_book: Path, tmp_path: Path) -> None:
    with open_book(shown_book) as book:
        done = export_book(book, "areal", tmp_path / "areal", rows=rows)
        samples = [row for file in done.files if file.suffix == ".pt" for row in torch.load(file, weights_only=True)]
        index = lines(tmp_path / "areal" / "rows.jsonl")
        tokens = book.load([row["row_id"] for row in index], form=form)
    assert len(samples) == done.n_rows == len(index) > 0
    kinds = {"input_ids": "int64", "loss_mask": "int64", "logprobs": "float32", "versions": "int64"}
    for r, sample in enumerate(samples):
        assert sample.keys() == {*kinds, "attention_mask", "rewards"}
        for name, kind in kinds.items():
            assert sample[name].dtype == getattr(torch, kind)
            expected = getattr(tokens, name)[tokens.row(r)]
            assert np.array_equal(sample[name].numpy(), expected[None])
        assert sample["attention_mask"].dtype == torch.bool
        assert sample["rewards"].tolist() == pytest.approx([index[r]["credit" if rows == "interactions" else "reward"]])


def test_parquet_has_every_table_and_the_tokens(shown_book: Path, tmp_path: Path) -> None:
    with open_book(shown_book) as book:
        export_book(book, "parquet", tmp_path / "tables")
        for name in [
            "runs",
            "policies",
            "episodes",
            "interactions",
            "rewards",
            "batches",
            "batch_rows",
            "scored",
            "failures",
            "pruned",
            "tool_calls",
            "tool_results",
        ]:
            assert pq.read_table(tmp_path / "tables" / f"{name}.parquet").num_rows == book.sql(f"from {name}").num_rows
        n_calls = book.sql("from interactions").num_rows
        n_events = book.sql("select count(*) as n from events")["n"][0].as_py()
        some = export_book(book, "parquet", tmp_path / "some", selection=Selection(where="reward > .5", is_eval=None))
        episodes = pq.read_table(tmp_path / "some" / "episodes.parquet")
        assert 0 < episodes.num_rows < book.sql("from episodes").num_rows
        assert min(episodes["reward"].to_pylist()) > 0.5
        assert some.notes
    assert pq.read_table(tmp_path / "tables" / "events.parquet").num_rows == n_events
    tokens = pq.read_table(tmp_path / "tables" / "tokens.parquet")
    assert tokens.num_rows == pq.read_table(tmp_path / "tables" / "messages.parquet").num_rows == n_calls


@pytest.mark.parametrize("form", ["chat", "trl"])
def test_rows_whose_messages_are_gone_are_left_out_and_said(form: str, own_book: Path, tmp_path: Path) -> None:
    with open_book(own_book) as book:
        leaves = book.select(Selection(rows="trajectories"))["episode_id"].to_pylist()
    said = encode_messages(Messages(request=[{"role": "user", "content": "on"}], reply={"role": "assistant"}))
    ids = np.arange(3, dtype=np.int32)
    fact = InteractionRecorded(parent_id="nobody", edge="extends", shared=2, prompt_length=5)
    tokens = {"prompt_ids": ids, "output_ids": ids, "logprobs": np.zeros(3, np.float32), "versions": ids}
    with open_book(own_book, writer="late") as book:
        book.log.append_blocking(
            *(
                Event(run_id="late", fact=fact, episode_id=leaves[0], interaction_id=name, messages=said, **tokens)
                for name in ("alone", "alone too")
            )
        )
    gone = leaves[-1]
    prune(own_book, episode_ids=[gone])
    with open_book(own_book) as book:
        selection = Selection(is_trainable=None)  # also what no learner takes
        done = export_book(book, form, tmp_path / "after", selection=selection)
        n_all = book.select(Selection(is_trainable=None, rows="trajectories")).num_rows
        assert not book.interaction("alone").has_messages
    assert all("role" in m for line in lines(done.files[0]) for m in line.get("messages", line.get("completion")))
    n_gone = 2 + leaves.count(gone)
    assert n_all - done.n_rows == n_gone
    assert any(note.startswith(f"{n_gone} rows are left out, since the book has not all") for note in done.notes)


def test_a_book_of_evaluations_says_why_nothing_comes_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_book(tmp_path / "book", writer="test") as book:
        opened = EpisodeOpened(task_id="t", is_eval=True)
        book.log.append_blocking(Event(run_id="r", episode_id="ep", fact=opened))
    main(["export", str(tmp_path / "book"), "--format", "chat", "--out", str(tmp_path / "x.jsonl")])
    assert "1 episodes are evaluations" in " ".join(capsys.readouterr().out.split())


def test_what_cannot_be_is_one_sentence_and_leaves_nothing(shown_book: Path, tmp_path: Path) -> None:
    with open_book(shown_book) as book:
        with pytest.raises(BadSelection, match="no format 'csv'"):
            export_book(book, "csv", tmp_path / "x")
        with pytest.raises(BadSelection, match="chat takes no option 'kind'"):
            export_book(book, "chat", tmp_path / "x", kind="messages")
        (tmp_path / "there").write_text("mine")
        with pytest.raises(FileExistsError):
            export_book(book, "chat", tmp_path / "there")
    assert (tmp_path / "there").read_text() == "mine"
    assert not (tmp_path / "x").exists()


def test_the_command(shown_book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "best.jsonl"
    main(["export", str(shown_book), "--format", "chat", "--where", "reward > .5", "--out", str(out)])
    said = capsys.readouterr().out
    assert f"{len(lines(out))} rows in 1 files" in said
    assert "left out:" in said
    words = ["--format", "trl", "--type", "preference", "--selection", '{"is_eval": null}']
    main(["export", str(shown_book), *words, "--out", str(tmp_path / "dpo.jsonl"), "--json"])
    assert json.loads(capsys.readouterr().out)["n_rows"] == len(lines(tmp_path / "dpo.jsonl"))
    with pytest.raises(SystemExit):
        main(["export", str(shown_book), "--format", "chat", "--where", "nope = 1", "--out", str(tmp_path / "x")])
    assert "nope" in capsys.readouterr().err
