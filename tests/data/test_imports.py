"""Rollouts from elsewhere: twice is once, a round trip is the same, and what is missing is said."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from rollbook.app.cli import main
from rollbook.app.exports import export_book
from rollbook.app.imports import import_into
from rollbook.store import EpisodeOpened, StoreError, TokensScored, open_book, prune, verify
from rollbook.store.selection import Selection
from views_books import event, interaction

BYTES = "bytes"
EVERYTHING = Selection(states=("open", "done", "failed", "abandoned", "lost"), is_eval=None, is_trainable=None)
CALL = {"id": "c1", "type": "function", "function": {"name": "calc", "arguments": '{"a": 1}'}}
CHAT = [
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "2", "tool_call_id": "c1"},
            {"role": "assistant", "content": "2"},
        ],
        "tools": [{"type": "function", "function": {"name": "calc", "parameters": {}}}],
    },
    {
        "messages": [
            {"role": "user", "content": "Like this?"},
            {"role": "assistant", "content": "an example", "weight": 0},
            {"role": "user", "content": "Now you."},
            {"role": "assistant", "content": "mine"},
        ]
    },
    {"messages": [{"role": "user", "content": "Same."}, {"role": "assistant", "content": "same"}]},
    {"messages": [{"role": "user", "content": "Same."}, {"role": "assistant", "content": "same"}]},
]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def samples(folder: Path) -> list[dict[str, torch.Tensor]]:
    return [row for file in sorted(folder.glob("*.pt")) for row in torch.load(file, weights_only=True)]


def count(path: Path) -> int:
    with open_book(path) as book:
        return int(book.sql("select count(*) as n from events")["n"][0].as_py())


def event_ids(path: Path) -> set[bytes]:
    with open_book(path) as book:
        return {one for batch in book.log.read() for one in batch["event_id"].to_pylist()}


def test_what_is_left_out_is_said_also_where_nothing_else_was_there(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "chat.jsonl", [{"messages": [{"role": "user", "content": "nobody answered"}]}])
    done = import_into(tmp_path / "book", source)
    assert (done.n_episodes, done.n_there) == (0, 0)
    assert dict(done.notes) == {"lines have no assistant message that was sampled: nothing to record": 1}


def test_chat_there_and_back_is_the_same(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "chat.jsonl", CHAT)
    done = import_into(tmp_path / "book", source)
    assert (done.format, done.n_episodes, done.n_interactions, done.n_there) == ("chat", 4, 5, 0)
    assert any("no token ids: not trainable" in note for note in done.notes)
    n = count(tmp_path / "book")
    again = import_into(tmp_path / "book", source)
    assert (again.n_episodes, again.n_there, count(tmp_path / "book")) == (0, 4, n), "twice is once"
    import_into(tmp_path / "other", source)
    assert event_ids(tmp_path / "other") == event_ids(tmp_path / "book"), "also where two books meet later"
    with open_book(tmp_path / "book") as book:
        out = export_book(book, "chat", tmp_path / "again.jsonl").files[0]
        assert book.select(Selection(rows="interactions")).num_rows == 0, "without tokens nothing is trainable"
    assert [json.loads(line) for line in out.read_text().splitlines()] == CHAT
    assert verify(tmp_path / "book").is_whole


def test_chat_of_a_book_there_and_back_is_the_same(shown_book: Path, tmp_path: Path) -> None:
    with open_book(shown_book) as book:
        first = export_book(book, "chat", tmp_path / "1.jsonl", all_fields=True, selection=Selection(order="oldest"))
    done = import_into(tmp_path / "book", first.files[0])
    assert done.n_interactions >= first.n_rows > 0
    with open_book(tmp_path / "book") as book:
        second = export_book(book, "chat", tmp_path / "2.jsonl", all_fields=True)

    def rows(path: Path) -> list[str]:
        read = [json.loads(line) for line in path.read_text().splitlines()]
        return sorted(json.dumps({**row, "run_id": None}, sort_keys=True) for row in read)

    assert rows(second.files[0]) == rows(first.files[0])


def test_text_can_be_given_tokens_for_supervised_training(tmp_path: Path) -> None:
    done = import_into(tmp_path / "book", write_lines(tmp_path / "chat.jsonl", CHAT), tokenizer=BYTES)
    assert list(done.notes) == [
        "interactions have tokens but no logprobs: not trainable by policy gradients, fit for supervised training"
    ]
    from rollbook.proxy.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(BYTES)
    with open_book(tmp_path / "book") as book:
        rows = book.select(Selection(is_trainable=None, rows="trajectories")).to_pylist()
        tokens = book.load([row["leaf_id"] for row in rows], form="trajectory")
        spelled = [tokenizer.decode(tokens.input_ids[tokens.row(r)]) for r in range(len(tokens))]
        (first,) = [r for r, text in enumerate(spelled) if "1 + 1?" in text]
        at = tokens.row(first)
        sampled = tokenizer.decode(tokens.input_ids[at][tokens.loss_mask[at]])
        assert "calc" in sampled
        assert "2" in sampled
        assert "Be brief" not in sampled
        assert np.isnan(tokens.logprobs[at][tokens.loss_mask[at]]).all(), "unknown, not zero"
        assert book.sql("select count(mean_logprob) as n from interactions")["n"][0].as_py() == 0
        assert book.select(Selection()).num_rows == 0
    assert verify(tmp_path / "book").is_whole


@pytest.mark.parametrize("rows", ["interactions", "trajectories"])
def test_areal_tensors_there_and_back_are_the_same(rows: str, shown_book: Path, tmp_path: Path) -> None:
    with open_book(shown_book) as book:
        export_book(book, "areal", tmp_path / "1", rows=rows)
    done = import_into(tmp_path / "book", tmp_path / "1", run="old")
    first = samples(tmp_path / "1")
    assert (done.format, done.n_episodes) == ("areal", len(first))
    assert import_into(tmp_path / "book", tmp_path / "1", run="old").n_there == len(first)
    with open_book(tmp_path / "book") as book:
        export_book(book, "areal", tmp_path / "2", rows="trajectories")
        assert book.sql("select distinct run_id from episodes")["run_id"].to_pylist() == ["old"]
    second = samples(tmp_path / "2")

    def plain(sample: dict[str, torch.Tensor]) -> str:
        return json.dumps({name: value.tolist() for name, value in sorted(sample.items())})

    assert sorted(map(plain, second)) == sorted(map(plain, first))
    assert verify(tmp_path / "book").is_whole


def test_a_padded_batch_and_an_http_export_of_areal_are_read(tmp_path: Path) -> None:
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 0], [5, 6, 7, 8]]),
        "loss_mask": torch.tensor([[0, 0, 1, 0], [0, 1, 0, 1]]),
        "logprobs": torch.tensor([[0, 0, -0.5, 0], [0, -0.25, 0, -1.0]]),
        "versions": torch.tensor([[-1, -1, 3, -1], [-1, 3, -1, 4]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool(),
        "rewards": torch.tensor([1.0, 0.0]),
    }
    torch.save(batch, tmp_path / "batch.pt")
    sent = {"interactions": {"a": {name: value[:1].tolist() for name, value in batch.items()}}}
    (tmp_path / "answer.json").write_text(json.dumps(sent))
    done = import_into(tmp_path / "book", tmp_path / "batch.pt", run="r")
    assert (done.n_episodes, done.n_interactions) == (2, 3)
    assert import_into(tmp_path / "book", tmp_path / "answer.json", run="r").n_there == 1, "the same row again"
    with open_book(tmp_path / "book") as book:
        rows = book.select(Selection(rows="trajectories", order="oldest")).to_pylist()
        tokens = book.load([row["leaf_id"] for row in rows], form="trajectory")
        found = {
            tuple(tokens.input_ids[tokens.row(r)].tolist()): tokens.versions[tokens.row(r)].tolist() for r in (0, 1)
        }
    assert found == {(5, 6, 7): [-1, -1, 3], (5, 6, 7, 8): [-1, 3, -1, 4]}
    assert sorted(row["reward"] for row in rows) == [0.0, 1.0]


def test_areal_text_dumps_keep_what_was_said(tmp_path: Path) -> None:
    (tmp_path / "dump" / "3").mkdir(parents=True)
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    row = {
        "task_id": 7, "sample_idx": 0, "seqlen": 9, "prompt_len": 5, "head_version": 2, "tail_version": 3,
        "reward": 1.0, "prompt": prompt, "completion": "2<|im_end|>",
    }  # fmt: skip
    write_lines(tmp_path / "dump" / "3" / "7.jsonl", [row, {**row, "sample_idx": 1, "prompt": "raw text"}])
    done = import_into(tmp_path / "book", tmp_path / "dump")
    assert (done.format, done.n_episodes) == ("areal", 2)
    with open_book(tmp_path / "book") as book:
        found = book.episodes(book.sql("select episode_id from episodes order by task")["episode_id"].to_pylist())
        said = [[m["content"] for m in episode.interactions[0].messages] for episode in found]
        assert said == [["Be brief.", "1 + 1?"], ["raw text"]]
        assert [episode.interactions[0].reply["content"] for episode in found] == ["2", "2"]
        assert [episode.row["reward"] for episode in found] == [1.0, 1.0]
        assert [episode.row["version"] for episode in found] == [2, 2]
        assert len({episode.row["group_id"] for episode in found}) == 1


TRACE = {
    "id": "e1",
    "task": {"type": "T", "data": {"question": "1 + 1?"}, "key": "q1"},
    "group": {"id": "g1"},
    "run": {"type": "train", "id": "r", "work": {"type": "train", "step": 4, "policy": {"start": 5, "end": 6}}},
    "ok": True,
    "traces": [
        {
            "agent": {"name": "solver"},
            "rewards": {"correct": {"score": 1.0, "weight": 2.0}, "style": None},
            "metrics": {"n_calls": 1.0},
            "calls": [{"node": 1, "finish_reason": "tool_calls"}, {"node": 3, "finish_reason": "stop"}],
            "nodes": [
                {"message": {"role": "user", "content": "1 + 1?"}, "token_ids": [1, 2], "mask": [False, False]},
                {
                    "parent": 0, "sampled": True, "timestamp": 1.5,
                    "message": {
                        "role": "assistant", "content": None,
                        "tool_calls": [{"id": "c", "type": "function", "name": "calc", "arguments": "{}"}],
                    },
                    "token_ids": [3, 4, 5, 6], "mask": [False, True, True, False], "logprobs": [-0.5, -0.25],
                },
                {
                    "parent": 1, "message": {"role": "tool", "tool_call_id": "c", "content": "2"},
                    "token_ids": [7], "mask": [False],
                },
                {
                    "parent": 2, "sampled": True, "timestamp": 2.5, "message": {"role": "assistant", "content": "2"},
                    "token_ids": [8, 9], "mask": [False, True], "logprobs": [-0.125],
                },
            ],
        }
    ],
}  # fmt: skip


def test_verifiers_traces_bring_their_tokens(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "traces.jsonl", [TRACE])
    done = import_into(tmp_path / "book", source)
    assert (done.format, done.n_episodes, done.n_interactions) == ("verifiers", 1, 2)
    assert any("the oldest" in note for note in done.notes)
    assert import_into(tmp_path / "book", source).n_there == 1
    with open_book(tmp_path / "book") as book:
        (row,) = book.select(Selection(rows="trajectories")).to_pylist()
        tokens = book.load([row["leaf_id"]], form="trajectory")
        episode = book.episode("vf_e1")
        names = {r["name"]: r["value"] * r["weight"] for r in episode.rewards}
    assert tokens.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert tokens.loss_mask.tolist() == [i in (4, 5, 9) for i in range(1, 10)]
    assert tokens.logprobs[tokens.loss_mask].tolist() == [-0.5, -0.25, -0.125]
    assert tokens.versions[tokens.loss_mask].tolist() == [5, 5, 5]
    assert (row["reward"], row["group_id"], row["task_id"]) == (2.0, "g1", "q1")
    assert names == {"reward": 2.0, "correct": 1.0, "n_calls": 1.0}
    assert episode.interactions[0].reply["tool_calls"][0]["function"] == {"name": "calc", "arguments": "{}"}
    assert [one.row["edge"] for one in episode.interactions] == [None, "extends"]
    assert verify(tmp_path / "book").is_whole


def test_older_results_of_verifiers_are_read(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "1 + 1?"}]
    replied = [{"role": "assistant", "content": "2"}]
    result = {
        "example_id": 3,
        "prompt": asked,
        "completion": replied,
        "reward": 0.5,
        "metrics": {"format": 1.0},
        "answer": "2",
    }
    step = {
        "prompt": asked, "completion": replied,
        "tokens": {"prompt_ids": [1, 2], "completion_ids": [3], "completion_logprobs": [-0.5]},
    }  # fmt: skip
    rows = [result, result, {**result, "trajectory": [step]}, {**result, "error": {"error": "TimeoutError"}}]
    done = import_into(tmp_path / "book", write_lines(tmp_path / "results.jsonl", rows))
    assert (done.format, done.n_episodes, done.n_interactions) == ("verifiers", 4, 4)
    with open_book(tmp_path / "book") as book:
        assert book.sql("from groups").to_pylist()[0]["n_episodes"] == 4
        assert sorted(book.sql("select state from episodes")["state"].to_pylist()) == ["done"] * 3 + ["failed"]
        (row,) = book.select(Selection()).to_pylist()
        assert book.load([row["interaction_id"]]).input_ids.tolist() == [1, 2, 3]
        assert row["reward"] == 0.5


def test_a_book_in_a_book_answers_alike(shown_book: Path, tmp_path: Path) -> None:
    with open_book(shown_book) as book:
        export_book(book, "parquet", tmp_path / "tables")
        names = ["episodes", "interactions", "current_rewards", "batch_rows", "failures", "scored", "policies", "runs"]
        left = "exclude (writer, position, node, up_node)"
        asked = {
            name: f"select * {left if name == 'interactions' else 'exclude (main_node)' if name == 'episodes' else ''} "
            f"{'exclude (writer, position)' if name == 'scored' else ''} from {name} order by all"
            for name in names
        }
        expected = {name: book.sql(query) for name, query in asked.items()}
        tokens = book.tokens().sort_by([("interaction_id", "ascending"), ("place", "ascending")])
    for source in (shown_book, tmp_path / "tables"):
        target = tmp_path / f"in-{source.name}"
        done = import_into(target, source)
        assert done.format == "book"
        assert done.n_episodes == expected["episodes"].num_rows
        n = count(target)
        assert import_into(target, source).n_there == done.n_episodes
        assert count(target) == n
        with open_book(target) as book:
            for name, query in asked.items():
                assert book.sql(query) == expected[name], name
            assert book.tokens().sort_by([("interaction_id", "ascending"), ("place", "ascending")]) == tokens
            export_book(book, "parquet", tmp_path / f"again-{source.name}")
        assert verify(target).is_whole
    events = (
        "event_id",
        "kind",
        "payload",
        "messages",
        "prompt_ids",
        "output_ids",
        "logprobs",
        "versions",
        "recorded_at",
    )

    first = pq.read_table(tmp_path / "tables" / "events.parquet", columns=list(events)).sort_by("event_id")
    assert (
        pq.read_table(tmp_path / "again-tables" / "events.parquet", columns=list(events)).sort_by("event_id") == first
    )


def test_a_book_of_many_commits_is_not_projected_commit_by_commit(tmp_path: Path) -> None:
    with open_book(tmp_path / "old", writer="w") as old:
        for i in range(300):
            old.log.append_blocking(event(EpisodeOpened(task_id="t", group_id="g"), episode_id=f"e{i}"))
    assert import_into(tmp_path / "new", tmp_path / "old").n_episodes == 300
    with open_book(tmp_path / "new") as new:
        frames = list(new.log.read())
    assert sum(frame.num_rows for frame in frames) == 300
    assert len(frames) < 10


def test_what_was_pruned_is_left_out_and_counted(tmp_path: Path) -> None:
    source = tmp_path / "source"
    with open_book(source, "w") as book:
        for name in ("gone", "there"):
            book.log.append_blocking(
                event(EpisodeOpened(task_id="t"), episode_id=name),
                interaction(name, name),
                event(TokensScored(version=1), interaction_id=name, logprobs=np.zeros(3, np.float32)),
            )
    prune(source, episode_ids=["gone"])
    done = import_into(tmp_path / "book", source)
    assert done.n_interactions == 1
    assert sum(done.notes.values()) == 4  # what the episode had, and that it was pruned
    with open_book(tmp_path / "book") as book:
        assert book.sql("select interaction_id from scores")["interaction_id"].to_pylist() == ["there"]
        assert book.sql("select count(*) as n from pruned")["n"].to_pylist() == [0]


def test_half_a_character_is_replaced_and_said(tmp_path: Path) -> None:
    whole, half = '{"role": "user", "content": "\\ud83d\\ude00"}', '{"role": "assistant", "content": "cut \\uD83D"}'
    (tmp_path / "chat.jsonl").write_text(f'{{"messages": [{whole}, {half}]}}\n')
    done = import_into(tmp_path / "book", tmp_path / "chat.jsonl")
    assert [n for note, n in done.notes.items() if "half a character" in note] == [1]
    with open_book(tmp_path / "book") as book:
        [name] = book.sql("select episode_id from episodes")["episode_id"].to_pylist()
        [call] = book.episode(name).interactions
    assert call.messages[0]["content"] == "\N{GRINNING FACE}"
    assert call.reply["content"] == "cut \N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", "{}\n", "no rollout that we know"),
        ("a.jsonl", "nonsense\n", "expected a JSON object"),
        ("a.jsonl", '{"messages": []}\n{"messages": 3}\n', "line 2: expected \"messages\""),
        ("a.jsonl", '{"traces": [{}], "id": 1}\n', "not as verifiers writes it"),
        ("a.json", '{"interactions": {}}', "expected rows with input_ids and loss_mask"),
        ("a.jsonl", '{"messages": [{"role": 3}]}\n', "line 1: expected \"messages\""),
        ("a.jsonl", '{"messages": [], "reward": "high"}\n', "line 1: expected \"reward\", a number, got 'high'"),
        ("a.jsonl", '{"messages": [], "tools": 3}\n', "line 1: expected \"tools\", a list"),
        ("a.jsonl", b"\x7fELF\xd0", "expected a JSON object a line"),
        ("a.jsonl", b'{"messages": []}\n\xd0\n', "line 2: expected a JSON object"),
        ("a.json", "nonsense", "not as AReaL writes it"),
        ("a.pt", b"\x7fELF\xd0", "not as AReaL writes it"),
        ("a.jsonl", '{"completion": 3, "prompt_len": 1, "task_id": 1, "prompt": 2, "reward": 1}\n', "not as AReaL"),
    ],
)  # fmt: skip
def test_a_wrong_source_is_one_sentence(name: str, text: str | bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(StoreError, match=said):
        import_into(tmp_path / "book", tmp_path / name)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "chat.jsonl", CHAT)
    main(["import", str(tmp_path / "book"), str(source), "--run", "old"])
    said = capsys.readouterr().out
    assert "4 episodes with 5 interactions imported" in said
    assert "5 interactions have no token ids: not trainable" in said
    main(["import", str(tmp_path / "book"), str(source), "--run", "old", "--json"])
    assert json.loads(capsys.readouterr().out)["n_there"] == 4
    with pytest.raises(SystemExit):
        main(["import", str(tmp_path / "book"), str(tmp_path / "none")])
    assert "there is nothing at" in capsys.readouterr().err
