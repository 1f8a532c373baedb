"""Old rollouts, new rewards."""

from pathlib import Path

import pytest

from rollbook.app.cli import main
from rollbook.app.rereward import Outcome, difference, judge_of, reward_by_function, reward_by_sql
from rollbook.store import BadSelection, EpisodeClosed, EpisodeOpened, Event, RewardGiven, open_book

JUDGES = """
async def late(episode):
    return 1.0

def score(episode):
    return episode.row["reward"] + 1

def picky(episode):
    if episode.row["episode_id"] == "ep_1":
        raise ValueError("not this one")
    return None if episode.row["episode_id"] == "ep_2" else True

def wrong(episode):
    return float("nan")
"""


@pytest.fixture
def book_path(tmp_path: Path) -> str:
    path = tmp_path / "book"
    with open_book(path, writer="test") as book:
        for i in range(4):
            book.log.append_blocking(
                Event(run_id="r", episode_id=f"ep_{i}", fact=EpisodeOpened(task_id=f"t{i % 2}")),
                Event(run_id="r", episode_id=f"ep_{i}", fact=RewardGiven(value=i)),
            )
            if i < 3:
                book.log.append_blocking(Event(run_id="r", episode_id=f"ep_{i}", fact=EpisodeClosed(state="done")))
    (tmp_path / "my_rewards.py").write_text(JUDGES)
    return str(path)


def rewards(book_path: str, name: str) -> dict[str, float]:
    with open_book(book_path) as book:
        table = book.sql("select episode_id, reward from episode_rewards where name = ?", [name])
        return dict(zip(table["episode_id"].to_pylist(), table["reward"].to_pylist(), strict=True))


def judged(outcome: Outcome) -> tuple[int, int, int, int]:
    return outcome.n_judged, outcome.n_failed, outcome.n_no_opinion, outcome.n_skipped


def test_a_function_judges_ended_episodes_and_the_old_reward_stays(book_path: str, tmp_path: Path) -> None:
    function = f"{tmp_path}/my_rewards.py:score"
    outcome = reward_by_function(book_path, function, name="v2", processes=2)
    assert judged(outcome) == (3, 0, 0, 0)
    assert rewards(book_path, "v2") == {"ep_0": 1, "ep_1": 2, "ep_2": 3}
    assert rewards(book_path, "reward")["ep_1"] == 1
    assert outcome.source == judge_of(function)[1]
    assert judged(reward_by_function(book_path, function, name="v2", processes=1)) == (0, 0, 0, 3), "twice is once"


def test_failures_are_recorded_and_tried_again(book_path: str, tmp_path: Path) -> None:
    function = f"{tmp_path}/my_rewards.py:picky"
    assert judged(reward_by_function(book_path, function, name="p", processes=1)) == (1, 1, 1, 0)
    assert rewards(book_path, "p") == {"ep_0": 1}
    with open_book(book_path) as book:
        (failure,) = book.sql("select episode_id, error, message from failures").to_pylist()
    assert (failure["episode_id"], failure["error"]) == ("ep_1", "RewardFailed")
    assert "not this one" in failure["message"]
    assert judged(reward_by_function(book_path, function, name="p", processes=1)) == (0, 1, 1, 1)


def test_a_function_may_be_async_and_nan_is_a_failure(book_path: str, tmp_path: Path) -> None:
    file = f"{tmp_path}/my_rewards.py"
    assert judged(reward_by_function(book_path, f"{file}:late", name="l", processes=1, timeout_s=5)) == (3, 0, 0, 0)
    assert judged(reward_by_function(book_path, f"{file}:wrong", name="w", processes=1)) == (0, 3, 0, 0)
    assert rewards(book_path, "w") == {}


def test_sql_judges_by_columns_and_other_rewards(book_path: str) -> None:
    assert judged(reward_by_sql(book_path, "case when reward > 0 then reward * 10 end", name="ten")) == (2, 0, 1, 0)
    assert rewards(book_path, "ten") == {"ep_1": 10, "ep_2": 20}
    assert reward_by_sql(book_path, "case when reward > 0 then reward * 10 end", name="ten").n_judged == 0
    assert judged(reward_by_sql(book_path, "ten + reward", name="sum", where="task_id = 't1'")) == (1, 0, 0, 0)
    assert rewards(book_path, "sum") == {"ep_1": 11}
    with open_book(book_path) as book:
        rows = difference(book, "reward", "ten").to_pylist()
    assert rows == [
        {"task_id": "t0", "episodes": 1, "old": 2.0, "new": 20.0, "moved": 1},
        {"task_id": "t1", "episodes": 1, "old": 1.0, "new": 10.0, "moved": 1},
    ]
    with pytest.raises(BadSelection):
        reward_by_sql(book_path, "nonsense(", name="x")
    assert judged(reward_by_sql(book_path, "1", name="all", where="true -- a comment")) == (3, 0, 0, 0)


def test_the_commands(book_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["reward", book_path, f"{tmp_path}/my_rewards.py:score", "--name", "v2", "--processes", "1"])
    assert "3 episodes judged as 'v2' by my_rewards:score@" in " ".join(capsys.readouterr().out.split())
    main(["reward", book_path, "reward * 2", "--sql", "--name", "double"])
    main(["rewards", book_path, "v2", "double", "--format", "csv"])
    assert "t0,2,2.0,2.0,2" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["reward", book_path, f"{tmp_path}/none.py:score", "--name", "v2"])
    assert "there is no file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["reward", "BOOK", "broken.py:f", "--name", "v"], "importing broken.py failed: SyntaxError"),
        (["reward", "BOOK", "my_rewards.py:late", "--name", "v", "--where", "nope = 1"], 'column "nope" not found'),
        (["reward", "BOOK", "reward * 2", "--sql", "--name", "v", "--where", "nope = 1"], 'column "nope" not found'),
        (["reward", "BOOK", "rewrad * 2", "--sql", "--name", "v"], "the book has no reward rewrad; it has reward"),
        (["rewards", "BOOK", "reward", "v2"], "the book has no reward v2; it has reward"),
        (["replay", "BOOK", "ep_0", "json.JSONDecoder", "--tokenizer", "tiny"], "kept no dataset row of ep_0"),
        (["run-areal", "none.py"], "there is no script none.py"),
    ],
)
def test_a_wrong_word_is_one_sentence_and_gives_no_reward(
    words: list[str],
    expected: str,
    book_path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("def f(:")
    with pytest.raises(SystemExit) as stopped:
        main([book_path if word == "BOOK" else word for word in words])
    said = capsys.readouterr().err.strip()
    assert stopped.value.code == 1
    assert said.startswith("rollbook: ")
    assert expected in said
    assert "Traceback" not in said
    assert rewards(book_path, "v") == {}
