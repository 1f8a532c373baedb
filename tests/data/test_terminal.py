"""A book in the terminal: lists, one episode, what happens now, what is wrong."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from commands import printed
from rollbook.app import cli
from rollbook.app.reading import print_table, show_episode
from rollbook.app.terminal.doctor import examine
from rollbook.store import (
    EpisodeClosed,
    EpisodeOpened,
    Event,
    InteractionFailed,
    Messages,
    RewardGiven,
    RunStarted,
    TokensScored,
    open_book,
)
from rollbook.store.events import encode_messages
from views_books import event, interaction
from web_book import TOKENIZER


@pytest.mark.parametrize("name", ["runs", "groups", "episodes"])
def test_lists_say_the_same_as_tables_csv_and_json(
    name: str, shown_book: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = printed(capsys, name, str(shown_book), "--json", "--limit", "0")
    rows = json.loads(text)
    assert status == 0
    with open_book(shown_book) as book:
        table = "(select distinct run_id from events)" if name == "runs" else name
        assert len(rows) == book.sql(f"from {table}").num_rows > 1
    run = rows[0]["run_id"]
    _, text = printed(capsys, name, str(shown_book), "--run", run, "--json", "--limit", "0")
    assert json.loads(text) == [row for row in rows if row["run_id"] == run]
    _, text = printed(capsys, name, str(shown_book), "--limit", "1")
    assert rows[0][f"{name[:-1]}_id"][:20] in text
    assert max(map(len, text.splitlines())) > 80, "what is piped is not folded"
    status, text = printed(capsys, name, str(shown_book), "--where", "nope = 1")
    assert (status, "nope" in text, "Traceback" in text) == (1, True, False)


def test_episodes_are_filtered(shown_book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, text = printed(capsys, "episodes", str(shown_book), "--json", "--limit", "0")
    rows = json.loads(text)
    for words, keep in (
        (["--state", "failed"], lambda row: row["state"] == "failed"),
        (
            ["--where", "reward > .5 and n_interactions > 1"],
            lambda row: (row["reward"] or 0) > 0.5 and row["calls"] > 1,
        ),
        (["--task", rows[0]["task_id"] or ""], lambda row: row["task_id"] == rows[0]["task_id"]),
    ):
        _, text = printed(capsys, "episodes", str(shown_book), "--json", "--limit", "0", *words)
        assert [row["episode_id"] for row in json.loads(text)] == [row["episode_id"] for row in rows if keep(row)], (
            words
        )


def test_a_table_shows_what_a_narrow_terminal_has_room_for(shown_book: Path) -> None:
    with open_book(shown_book) as book:
        table = book.sql("from episodes limit 3")
    text = io.StringIO()
    print_table(table, "table", Console(file=text, width=80, force_terminal=True, color_system=None))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "episode_id" in lines[1]
    assert "not shown for want of width" in text.getvalue()


def shown(book: Path, name: str, **how: Any) -> str:
    text = io.StringIO()
    show_episode(str(book), name, Console(file=text, width=200, force_terminal=True, color_system="256"), **how)
    return text.getvalue()


@pytest.mark.parametrize("colour", ["probability", "credit", "version"])
def test_tokens_are_coloured_and_spelled(colour: str, shown_book: Path) -> None:
    with open_book(shown_book) as book:
        (name,) = book.sql(
            "select episode_id from episodes where n_interactions > 1 and reward is not null order by opened_at limit 1"
        )["episode_id"].to_pylist()
        said = book.episode(name).interactions[0].reply["content"] or ""
    spelled = shown(shown_book, name, colour=colour, tokenizer=str(TOKENIZER))
    assert f"colour is {colour}" in spelled
    assert spelled.count("│") > 10
    assert "\x1b[" in spelled
    bare = shown(shown_book, name, colour=colour)
    assert "tokens:" not in bare, "without a tokenizer there are no bare ids"
    assert said.split()[0] in bare if said else True
    assert "tokens:" not in shown(shown_book, name, tokenizer=str(TOKENIZER), n_tokens=0)


def test_colours_differ_by_what_they_say(tmp_path: Path) -> None:
    said = encode_messages(
        Messages(
            request=[{"role": "user", "content": "hi"}], reply={"role": "assistant", "content": "ab\x1b]0;pwned\x07c"}
        )
    )
    with open_book(tmp_path / "book", writer="w") as book:
        sure, unsure = (interaction(n, n, logprob=p, messages=said) for n, p in (("sure", -0.01), ("unsure", -5.0)))
        for call in (sure, unsure):
            book.log.append_blocking(event(EpisodeOpened(task_id="t"), episode_id=call.episode_id), call)
    sure, unsure = (shown(tmp_path / "book", name).replace(name, "") for name in ("sure", "unsure"))
    assert sure != unsure
    assert "pwned" in sure
    assert "\x1b]" not in sure, "what a model says never commands the terminal"
    assert "\x07" not in sure


def test_no_color_is_obeyed_and_a_pipe_gets_plain_text(shown_book: Path) -> None:
    words = [sys.executable, "-m", "rollbook.app.cli", "show", str(shown_book), "last", "--tokenizer", str(TOKENIZER)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "\x1b[" not in done.stdout


def test_tail_prints_the_past_and_follows(tmp_path: Path) -> None:
    path = tmp_path / "book"
    with open_book(path, writer="live") as book:
        book.log.append_blocking(Event(run_id="r", episode_id="ep_1", fact=EpisodeOpened(task_id="before")))
        words = [sys.executable, "-m", "rollbook.app.cli", "tail", str(path), "--json", "--run", "r"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as tail:
            assert tail.stdout is not None
            assert json.loads(tail.stdout.readline())["fact"]["task_id"] == "before"
            book.log.append_blocking(Event(run_id="other", episode_id="ep_2", fact=EpisodeOpened(task_id="not mine")))
            book.log.append_blocking(Event(run_id="r", episode_id="ep_1", fact=RewardGiven(value=0.5)))
            line = json.loads(tail.stdout.readline())
            assert (line["kind"], line["fact"]["value"]) == ("RewardGiven", 0.5)
            tail.terminate()


def test_tail_of_a_finished_book_is_a_line_each(shown_book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = printed(
        capsys, "tail", str(shown_book), "--no-follow", "-n", "7", "--only", "calls", "--only", "rewards"
    )
    assert status == 0
    assert len(text.splitlines()) == 7
    assert all("call" in line or " by " in line for line in text.splitlines())


def test_tail_finds_the_last_of_a_kind_however_long_ago(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_book(tmp_path / "book", writer="w") as book:
        for name in ("one", "two"):
            book.log.append_blocking(event(EpisodeOpened(task_id="t"), episode_id=name, at=0))
        for at in range(1, 100):
            book.log.append_blocking(event(RewardGiven(value=1.0), episode_id="one", at=at))
    for words in (["--only", "episodes"], ["--episode", "tw"]):
        _, text = printed(capsys, "tail", str(tmp_path / "book"), "--no-follow", "-n", "1", "--json", *words)
        assert json.loads(text)["episode_id"] == "two"


def test_stats(shown_book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = printed(capsys, "stats", str(shown_book), "--json")
    found = json.loads(text)
    with open_book(shown_book) as book:
        assert found["calls"]["interactions"] == book.sql("from interactions").num_rows
        assert sum(found["states"].values()) == found["episodes"] == book.sql("from episodes").num_rows
        run = book.sql("select run_id from episodes limit 1")["run_id"][0].as_py()
    assert status == 0
    assert found["disk_bytes"]["log"] > 1000
    _, text = printed(capsys, "stats", str(shown_book), "--run", run)
    assert "sampled_tokens" in text


def test_verify_as_json(shown_book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = printed(capsys, "verify", str(shown_book), "--json")
    assert (status, json.loads(text)["is_whole"], json.loads(text)["problems"]) == (0, True, [])


def findings(*events: Event) -> dict[str, str]:
    from rollbook.store import MemoryLog
    from rollbook.store.book import Book

    log = MemoryLog("w")
    log.append_blocking(*events)
    with Book(log) as book:
        return {finding.name: f"{finding.level}: {finding.found} {finding.do}" for finding in examine(book, "http://x")}


def attempt(name: str, *more: Event, state: str = "done", reward: float | None = None, **call: Any) -> list[Event]:
    made = [event(EpisodeOpened(task_id="t", group_id="g"), episode_id=name, at=1)]
    made.append(interaction(f"{name}_1", name, at=2, **call))
    if reward is not None:
        made.append(event(RewardGiven(value=reward), episode_id=name, at=3))
    return [*made, *more, event(EpisodeClosed(state=state), episode_id=name, at=9)]  # type: ignore[arg-type]


def test_a_healthy_run_has_nothing_to_find() -> None:
    assert findings(*attempt("a", reward=0.0), *attempt("b", reward=1.0)) == {}
    assert list(findings(event(RunStarted(name="r")))) == ["empty"]


def test_the_doctor_finds_what_is_wrong() -> None:
    found = findings(*attempt("a"), *attempt("b", state="lost"), *attempt("c", state="failed"))
    assert found.keys() == {"no reward", "lost", "failed"}
    found = findings(*attempt("a", reward=1.0), *attempt("b", reward=1.0))
    assert found.keys() == {"constant reward"}
    found = findings(*attempt("a", reward=1.0, finish_reason="length"), *attempt("b", reward=0.0))
    assert found["cut"].startswith("look: 1 of 2 (50%) answers were cut by length")
    second = interaction("a_2", "a", parent="a_1", edge="rerendered", cause="reasoning removed", shared=2, at=4)
    found = findings(*attempt("a", second, reward=1.0), *attempt("b", reward=0.0))
    assert "1 of 1 (100%) calls do not go on" in found["drift"]
    assert "history=exact" in found["drift"]
    failed = event(InteractionFailed(error="ContextOverflow", message="too long", status=400), episode_id="a", at=5)
    assert "ContextOverflow" in findings(*attempt("a", failed, reward=1.0), *attempt("b", reward=0.0))["call failures"]
    scored = event(
        TokensScored(version=0), episode_id="a", interaction_id="a_1", at=6, logprobs=np.full(3, -2.0, np.float32)
    )
    found = findings(*attempt("a", scored, reward=1.0), *attempt("b", reward=0.0))
    assert found["gap"].startswith("wrong: engine and trainer differ by 1.500")
    groups = [one for name, reward in (("a", 1.0), ("b", 1.0)) for one in attempt(name, reward=reward)]
    other = event(EpisodeOpened(task_id="u"), episode_id="z", at=1), interaction("z_1", "z", at=2)
    ends = event(RewardGiven(value=0.0), episode_id="z", at=3), event(EpisodeClosed(state="done"), episode_id="z", at=4)
    assert "1 of 1 (100%) groups" in findings(*groups, *other, *ends)["equal groups"]


def test_the_doctor_says_1_where_something_is_wrong(
    shown_book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_book(tmp_path / "book", writer="w") as book:
        book.log.append_blocking(*attempt("a"))
    status, text = printed(capsys, "doctor", str(tmp_path / "book"), "--json")
    assert (status, [one["name"] for one in json.loads(text)]) == (1, ["no reward"])
    status, text = printed(capsys, "doctor", str(tmp_path / "book"))
    assert (status, "set_reward" in text) == (1, True)


def test_output_that_is_piped_is_wide() -> None:
    assert cli.out.width > 1000
