"""Old rollouts, new rewards."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollbook.agents.errors import WorkflowError
from rollbook.app.cli import main
from rollbook.app.judging import Pace, judge_episodes, judge_of
from rollbook.app.rereward import Outcome, difference, reward_by_function, reward_by_sql
from rollbook.store import (
    BadSelection,
    EpisodeClosed,
    EpisodeOpened,
    Event,
    InteractionRecorded,
    Messages,
    PayloadPruned,
    RewardGiven,
    open_book,
    prune,
)
from rollbook.store.events import encode_messages
from rollbook.store.selection import Selection

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

def own_loop(episode):
    import asyncio
    return asyncio.run(late(episode))

def returns_a_coroutine(episode):
    return late(episode)

def tells_imports(episode):
    import sys
    return float(any(name in sys.modules for name in ("duckdb", "sqlalchemy", "rollbook.app.cli", "litestar")))
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


@pytest.mark.parametrize("name", ["own_loop", "returns_a_coroutine"])
def test_a_plain_function_may_start_an_event_loop_or_leave_it_to_us(book_path: str, tmp_path: Path, name: str) -> None:
    reward_by_function(book_path, f"{tmp_path}/my_rewards.py:{name}", name="v2", processes=1, timeout_s=5)
    assert rewards(book_path, "v2") == {"ep_0": 1.0, "ep_1": 1.0, "ep_2": 1.0}


def test_a_process_that_judges_imports_neither_the_database_nor_the_command_line(
    book_path: str, tmp_path: Path
) -> None:
    reward_by_function(book_path, f"{tmp_path}/my_rewards.py:tells_imports", name="heavy", processes=1)
    assert rewards(book_path, "heavy") == {"ep_0": 0.0, "ep_1": 0.0, "ep_2": 0.0}


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


def test_going_back_to_an_earlier_judge_brings_its_rewards_back(book_path: str, tmp_path: Path) -> None:
    function = f"{tmp_path}/my_rewards.py:score"
    for n_again in (0, 3):
        assert judged(reward_by_function(book_path, function, name="v2", processes=1)) == (3, 0, 0, 0)
        assert rewards(book_path, "v2") == {"ep_0": 1, "ep_1": 2, "ep_2": 3}
        assert judged(reward_by_sql(book_path, "reward * 10", name="v2")) == (3, 0, 0, 0)
        assert rewards(book_path, "v2") == {"ep_0": 0, "ep_1": 10, "ep_2": 20}
        assert judged(reward_by_sql(book_path, "reward * 10", name="v2")) == (0, 0, 0, 3), n_again
    with open_book(book_path, writer="person") as book:
        corrected = RewardGiven(value=7.0, name="v2", source="somebody")
        book.log.append_blocking(Event(run_id="r", episode_id="ep_0", fact=corrected))
    assert judged(reward_by_sql(book_path, "reward * 10", name="v2")) == (0, 0, 0, 3)
    assert rewards(book_path, "v2")["ep_0"] == 7, "what somebody corrected stays"


def test_of_several_judges_under_one_name_only_the_last_counts_whatever_it_judged(tmp_path: Path) -> None:
    path = str(tmp_path / "book")
    with open_book(path, writer="test") as book:
        book.log.append_blocking(
            Event(run_id="r", episode_id="ep", fact=EpisodeOpened(task_id="t")),
            Event(run_id="r", episode_id="ep", interaction_id="i1", fact=InteractionRecorded(prompt_length=0)),
            Event(run_id="r", episode_id="ep", interaction_id="i2", fact=InteractionRecorded(prompt_length=0)),
            Event(run_id="r", episode_id="ep", fact=EpisodeClosed(state="done")),
        )
    (tmp_path / "judges.py").write_text(
        "def each(e): return {'i1': 1, 'i2': 2}\n"
        "def second(e): return {'i2': 4}\n"
        "def whole(e): return 0.5\n"
        "def nothing(e): return None\n"
    )

    def stands() -> tuple[dict[str, float], dict[str, float | None]]:
        with open_book(path) as book:
            of = dict(zip(*book.credits("none", reward="v2").to_pydict().values(), strict=True))
            for (row,) in [book.canned("reward_versions_diff", before="zero", after="v2").to_pylist()]:
                assert row["after"] == rewards(path, "v2")["ep"]
            (reward,) = book.sql("select reward from episodes")["reward"].to_pylist()
        assert reward == rewards(path, "v2")["ep"], "judged under both names"
        return rewards(path, "v2"), of

    reward_by_sql(path, "0", name="zero")
    expected: list[tuple[str, float, dict[str, float | None]]] = [
        ("each", 3, {"i1": 1, "i2": 2}),
        ("whole", 0.5, {"i1": 0.5, "i2": None}),  # of calls that do not hang together the first is the main one
        ("each", 3, {"i1": 1, "i2": 2}),
        ("second", 4, {"i1": None, "i2": 4}),
        ("nothing", 4, {"i1": None, "i2": 4}),
    ]
    for function, reward, of in expected:
        for name in ("v2", "reward"):
            reward_by_function(path, f"{tmp_path}/judges.py:{function}", name=name, processes=1)
        assert stands() == ({"ep": reward}, of), function
    with open_book(path, writer="person") as book:
        for name in ("v2", "reward"):
            corrected = RewardGiven(value=7.0, name=name, source="somebody")
            book.log.append_blocking(Event(run_id="r", episode_id="ep", interaction_id="i1", fact=corrected))
    assert stands() == ({"ep": 11}, {"i1": 7, "i2": 4}), "a person is no judge that others replace"


def test_sql_judges_again_where_what_it_reads_was_corrected(book_path: str) -> None:
    assert judged(reward_by_sql(book_path, "reward + 1", name="up")) == (3, 0, 0, 0)
    assert judged(reward_by_sql(book_path, "up + 1", name="upper")) == (3, 0, 0, 0)
    with open_book(book_path, writer="person") as book:
        book.log.append_blocking(Event(run_id="r", episode_id="ep_1", fact=RewardGiven(value=5.0)))
    assert judged(reward_by_sql(book_path, "reward + 1", name="up")) == (1, 0, 0, 2)
    assert judged(reward_by_sql(book_path, "up + 1", name="upper")) == (1, 0, 0, 2)
    assert rewards(book_path, "upper") == {"ep_0": 2, "ep_1": 7, "ep_2": 4}
    assert judged(reward_by_sql(book_path, "up * 2", name="up")) == (3, 0, 0, 0)
    assert judged(reward_by_sql(book_path, "up * 2", name="up")) == (0, 0, 0, 3), "it does not feed on itself"


def test_sql_knows_names_as_they_are_written_and_columns_by_themselves(book_path: str) -> None:
    assert judged(reward_by_sql(book_path, "reward + 1", name="Acc")) == (3, 0, 0, 0)
    assert judged(reward_by_sql(book_path, "Acc * 2", name="twice")) == (3, 0, 0, 0)
    assert rewards(book_path, "twice") == {"ep_0": 2, "ep_1": 4, "ep_2": 6}
    assert judged(reward_by_sql(book_path, "n_interactions", name="length")) == (3, 0, 0, 0)
    assert rewards(book_path, "length") == {"ep_0": 0, "ep_1": 0, "ep_2": 0}
    with open_book(book_path) as book:
        discards = book.discards(Selection(reward="Acc - 1", is_trainable=False)).to_pylist()
    assert [(one["episode_id"], one["reason"]) for one in discards] == [("ep_3", "open")]


def test_a_function_does_not_judge_what_was_pruned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_book(tmp_path / "book", writer="test") as book:
        for name in ("ep_0", "ep_1"):
            said = Messages(request=[], reply={"role": "assistant", "content": "hello"})
            call = InteractionRecorded(prompt_length=0)
            book.log.append_blocking(
                Event(run_id="r", episode_id=name, fact=EpisodeOpened(task_id="t")),
                Event(run_id="r", episode_id=name, interaction_id=name, fact=call, messages=encode_messages(said)),
                Event(run_id="r", episode_id=name, fact=EpisodeClosed(state="done")),
            )
    prune(tmp_path / "book", episode_ids=["ep_0"])
    (tmp_path / "brief.py").write_text("def brief(e): return 10 - len(e.interactions[-1].reply.get('content') or '')")
    main(["reward", str(tmp_path / "book"), f"{tmp_path}/brief.py:brief", "--name", "brief", "--processes", "1"])
    assert "1 left out since they were pruned" in " ".join(capsys.readouterr().out.split())
    assert rewards(str(tmp_path / "book"), "brief") == {"ep_1": 5}
    with open_book(tmp_path / "book") as book:
        gone, there = (book.episode(name).interactions[0] for name in ("ep_0", "ep_1"))
        assert (gone.is_pruned, there.is_pruned, there.reply["content"]) == (True, False, "hello")
        for name in ("request", "reply", "messages", "tools"):
            with pytest.raises(PayloadPruned, match="the messages of ep_0 were pruned"):
                getattr(gone, name)


@pytest.mark.parametrize(("expression", "got"), [("1 / reward", "inf"), ("0 / reward", "nan"), ("ln(reward)", "-inf")])
def test_sql_that_gives_no_finite_number_is_a_recorded_failure_and_null_is_no_opinion(
    book_path: str, expression: str, got: str
) -> None:
    only_two = f"case when episode_id <> 'ep_2' then {expression} end"
    assert judged(reward_by_sql(book_path, only_two, name="w")) == (1, 1, 1, 0)
    assert rewards(book_path, "w").keys() == {"ep_1"}
    with open_book(book_path) as book:
        (failure,) = book.sql("select episode_id, error, message from failures").to_pylist()
    assert (failure["episode_id"], failure["error"]) == ("ep_0", "RewardFailed")
    assert failure["message"].endswith(f"expected a finite number or NULL, got {got}")
    assert judged(reward_by_sql(book_path, only_two, name="w")) == (0, 1, 1, 1), "what failed is tried again"


def test_the_commands(book_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["reward", book_path, f"{tmp_path}/my_rewards.py:score", "--name", "v2", "--processes", "1"])
    assert "3 episodes judged as 'v2' by my_rewards:score@" in " ".join(capsys.readouterr().out.split())
    main(["reward", book_path, "reward * 2", "--sql", "--name", "double"])
    main(["rewards", book_path, "v2", "double", "--format", "csv"])
    assert "t0,2,2.0,2.0,2" in capsys.readouterr().out
    main(["rewards", book_path, "v2", "double", "--json"])
    assert json.loads(capsys.readouterr().out)[0]["moved"] == 2
    main(["reward", book_path, "reward * 2", "--sql", "--name", "double", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert (said["name"], said["n_judged"], said["n_skipped"]) == ("double", 0, 3)
    main(["sql", book_path, "select count(*) as n from episodes", "--json"])
    assert json.loads(capsys.readouterr().out) == [{"n": 4}]
    main(["reward", book_path, f"{tmp_path}/my_rewards.py:score", "--name", "v2", "--json"])  # nothing is left to judge
    assert json.loads(capsys.readouterr().out)["n_skipped"] == 3
    with pytest.raises(SystemExit):
        main(["reward", book_path, f"{tmp_path}/none.py:score", "--name", "v2"])
    assert "there is no file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["reward", "BOOK", "broken.py:f", "--name", "v"], "importing broken.py failed"),
        (["reward", "BOOK", "my_rewards.py:late", "--name", "v", "--where", "nope = 1"], 'column "nope" not found'),
        (["reward", "BOOK", "reward * 2", "--sql", "--name", "v", "--where", "nope = 1"], 'column "nope" not found'),
        (["reward", "BOOK", "rewrad * 2", "--sql", "--name", "v"], "the book has no reward rewrad; it has reward"),
        (
            ["reward", "BOOK", "1 // (reward - reward)", "--sql", "--name", "v"],
            "cannot be computed: Invalid Input Error",
        ),
        (["reward", "BOOK", "state::double", "--sql", "--name", "v"], "Could not convert string 'done'"),
        (
            ["reward", "BOOK", "unnest([reward, 1])", "--sql", "--name", "v"],
            "has an unnest; expected a value of one row",
        ),
        (["reward", "BOOK", "1", "--sql", "--name", "v", "--where", "false) or (true"], "got 'false) or (true'"),
        (["reward", "BOOK", "my_rewards.py:score", "--name", "v", "--where", "false) or (true"], "false) or (true"),
        (["reward", "BOOK", "reward) + (1", "--sql", "--name", "v"], "got 'reward) + (1'"),
        (["reward", "BOOK", "V1 + v1", "--sql", "--name", "v"], "names V1 and v1, which are one column in SQL"),
        (["reward", "BOOK", "nonsense(reward)", "--sql", "--name", "v"], "nonsense does not exist"),
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


PACED = """
import asyncio, os, pathlib, time

HERE = pathlib.Path(__file__).parent

def note(episode, what):
    with open(HERE / what, "a") as file:
        file.write(f"{episode.row['episode_id']} {time.monotonic()}\\n")

def hangs(episode):
    if episode.row["episode_id"] == "ep_1":
        while True:
            pass
    return 1.0

together = 0

async def meets(episode):  # returns when three are at it at once
    global together
    together += 1
    while together < 3:
        await asyncio.sleep(0.001)
    return 1.0

here = 0

async def alone(episode):  # how many are at it
    global here
    here += 1
    try:
        await asyncio.sleep(0.02)
        return float(here)
    finally:
        here -= 1

async def hangs_async(episode):
    await asyncio.sleep(60)

def flaky(episode):
    mark = HERE / f"tried-{episode.row['episode_id']}"
    if not mark.exists():
        mark.touch()
        raise RuntimeError("429")
    return 1.0

def listed(episodes):
    note(episodes[0], "lists")
    return [len(episodes)] * len(episodes)

def short(episodes):
    return [1.0]

async def listed_async(episodes):
    return [None if e.row["episode_id"] == "ep_0" else 2.0 for e in episodes]

def dies(episode):
    if episode.row["episode_id"] == "ep_2":
        os._exit(3)
    return 1.0

def leaves(episode):
    print("noise")
    if episode.row["episode_id"] == "ep_1":
        raise SystemExit(3)
    return 1.0

async def leaves_async(episode):
    return leaves(episode)

async def cancels(episode):
    if episode.row["episode_id"] == "ep_1":
        raise asyncio.CancelledError
    return 1.0

def mute(episode):
    class Mute(Exception):
        def __str__(self):
            raise KeyError("message")
    if episode.row["episode_id"] == "ep_1":
        raise Mute
    return 1.0

def half_a_character(episode):
    if episode.row["episode_id"] == "ep_1":
        raise ValueError("no tool \\ud83d")
    return 1.0

def throws(episode):
    if episode.row["episode_id"] == "ep_1":
        raise BaseException("as pytest.fail does")
    return 1.0

def timed(episode):
    note(episode, "times")
    return 1.0
"""


@pytest.fixture
def paced(book_path: str, tmp_path: Path) -> str:
    (tmp_path / "paced.py").write_text(PACED)
    return f"{tmp_path}/paced.py"


def noted(tmp_path: Path, what: str) -> list[float]:
    return sorted(float(line.split()[1]) for line in (tmp_path / what).read_text().splitlines())


def tried(book_path: str, function: str, **pace: Any) -> dict[str, tuple[dict[str | None, float], str | None]]:
    """What the function says of the ended episodes, in this process."""
    with open_book(book_path) as book:
        episodes = book.episodes(["ep_0", "ep_1", "ep_2"])
        return {
            name: (values, why) for name, values, why in judge_episodes(judge_of(function)[0], episodes, Pace(**pace))
        }


def values(answers: dict[str, tuple[dict[str | None, float], str | None]]) -> list[float | None]:
    return [given.get(None) for given, _ in answers.values()]


@pytest.mark.parametrize(("function", "expected"), [("hangs", [1, None, 1]), ("hangs_async", [None] * 3)])
def test_a_judgement_that_takes_too_long_fails(
    function: str, expected: list[float | None], book_path: str, paced: str
) -> None:
    answers = tried(book_path, f"{paced}:{function}", timeout_s=0.3)
    assert values(answers) == expected
    assert "TimeoutError" in str(answers["ep_1"][1])


@pytest.mark.parametrize("function", ["leaves", "leaves_async", "cancels", "throws"])
def test_a_judge_that_exits_fails_one_judgement_and_prints_into_no_answer(
    function: str, book_path: str, paced: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["reward", book_path, f"{paced}:{function}", "--name", "v2", "--processes", "1", "--timeout", "9", "--json"]
    main(words)
    said = json.loads(capfd.readouterr().out)
    assert (said["n_judged"], said["n_failed"]) == (2, 1)
    assert rewards(book_path, "v2") == {"ep_0": 1.0, "ep_2": 1.0}


@pytest.mark.parametrize(
    ("function", "says"),
    [("mute", "Mute: (its text cannot be had: KeyError)"), ("half_a_character", "ValueError: no tool ?")],
)
def test_what_cannot_be_said_of_a_failure_ends_no_other_judgement(
    function: str, says: str, book_path: str, paced: str
) -> None:
    assert judged(reward_by_function(book_path, f"{paced}:{function}", name="v2", processes=1)) == (2, 1, 0, 0)
    with open_book(book_path) as book:
        assert says in book.sql("select message from failures")["message"][0].as_py()


@pytest.mark.parametrize("words", [["reward", "none", "1", "--sql"], ["reward", "none", "my_rewards.py:score"]])
def test_a_wrong_path_does_not_become_a_book(
    words: list[str],
    book_path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    with pytest.raises(SystemExit):
        main([*words, "--name", "v"])
    assert "no book at none" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_async_judgements_run_at_once_as_many_as_allowed(book_path: str, paced: str) -> None:
    assert values(tried(book_path, f"{paced}:meets", concurrency=3)) == [1, 1, 1], "three at once"
    assert values(tried(book_path, f"{paced}:alone", concurrency=1)) == [1, 1, 1], "one after the other"


def test_a_judgement_that_fails_is_tried_again(book_path: str, paced: str) -> None:
    assert values(tried(book_path, f"{paced}:flaky")) == [None] * 3
    for mark in Path(paced).parent.glob("tried-ep_0"):
        mark.unlink()
    assert values(tried(book_path, f"{paced}:flaky", retries=1)) == [1, 1, 1]


def test_a_function_may_judge_lists(book_path: str, paced: str) -> None:
    assert values(tried(book_path, f"{paced}:listed", batch=2)) == [2, 2, 1]
    assert values(tried(book_path, f"{paced}:listed_async", batch=2)) == [None, 2, 2]
    assert values(tried(book_path, f"{paced}:short", batch=2)) == [None, None, 1], "a list of the wrong length fails"


def test_a_rate_is_kept_over_all_processes(book_path: str, paced: str, tmp_path: Path) -> None:
    reward_by_function(book_path, f"{paced}:timed", name="r", processes=1, rate_per_s=2)
    times = noted(tmp_path, "times")
    assert times[-1] - times[0] >= 0.5, "1 s, and the first may be noted late"


def test_a_process_that_dies_is_one_sentence_and_the_rest_is_judged_next_time(
    book_path: str, paced: str, tmp_path: Path
) -> None:
    with pytest.raises(WorkflowError, match="died, not by an exception"):
        reward_by_function(book_path, f"{paced}:dies", name="d", processes=1)
    done = len(rewards(book_path, "d"))
    seen: list[tuple[int, int]] = []
    (tmp_path / "paced.py").write_text(PACED.replace("os._exit(3)", "pass"))
    outcome = reward_by_function(
        book_path, f"{paced}:dies", name="d", processes=1, progress=lambda *count: seen.append(count)
    )
    assert len(rewards(book_path, "d")) == 3
    assert outcome.n_judged + outcome.n_skipped >= 3 - done
    assert seen[-1][0] == seen[-1][1]


def test_a_pace_that_cannot_be_is_refused(book_path: str, paced: str) -> None:
    with pytest.raises(BadSelection, match="rate_per_s must be more than 0"):
        reward_by_function(book_path, f"{paced}:timed", name="x", rate_per_s=0)
    with pytest.raises(BadSelection, match="timeout_s must be more than 0, got nan"):
        reward_by_function(book_path, f"{paced}:timed", name="x", timeout_s=float("nan"))
    with pytest.raises(BadSelection, match="retries must not be negative"):
        reward_by_function(book_path, f"{paced}:timed", name="x", retries=-1)
