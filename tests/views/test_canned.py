"""Canned views on one small run whose numbers a person can check."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rollbook.store import (
    BadSelection,
    BatchRow,
    BatchTaken,
    BatchTrained,
    EpisodeClosed,
    EpisodeOpened,
    Event,
    MemoryLog,
    Messages,
    QueryRefused,
    RewardGiven,
    RunStarted,
    TokensScored,
)
from rollbook.store.book import Book
from rollbook.store.canned import CANNED
from rollbook.store.events import encode_messages
from rollbook.store.sql import run_query
from rollbook.store.tools import is_tool_error
from views_books import event, interaction

SECOND = 1_000_000


def asks(*calls: tuple[str, str, str], results: tuple[tuple[str, str], ...] = ()) -> bytes:
    """An answer with tool calls (id, tool, arguments), to a request with tool results (id, content)."""
    return encode_messages(
        Messages(
            request=[{"role": "tool", "tool_call_id": call, "content": content} for call, content in results],
            reply={
                "role": "assistant",
                "tool_calls": [{"id": i, "function": {"name": tool, "arguments": a}} for i, tool, a in calls],
            },
        )
    )


@pytest.fixture(scope="module")
def book() -> Iterator[Book]:
    log = MemoryLog()

    def episode(name: str, group: str, version: int, *, at: int, is_eval: bool = False) -> None:
        opened = EpisodeOpened(task_id=f"t-{group}", group_id=group, version=version, is_eval=is_eval)
        log.append_blocking(event(opened, episode_id=name, at=at))

    def end(name: str, reward: float | None, *, at: int, state: Any = "done") -> None:
        if reward is not None:
            log.append_blocking(event(RewardGiven(value=reward), episode_id=name, at=at - 1))
        log.append_blocking(event(EpisodeClosed(state=state), episode_id=name, at=at))

    log.append_blocking(event(RunStarted(name="first")))
    episode("a1", "a", 0, at=0)
    first = asks(("c1", "search", '{"q": 1}'), ("c2", "search", "{broken"))
    second = asks(("c3", "run", "{}"), results=(("c1", "found"), ("c2", "Error: no such thing")))
    log.append_blocking(
        interaction("a1.0", "a1", n_output=4, at=1, finish_reason="tool_calls", seconds=2.0, messages=first),
        interaction("a1.1", "a1", parent="a1.0", edge="extends", shared=8, n_output=2, at=2, version=1,
                    finish_reason="stop", seconds=0.5, messages=second),
        interaction("a1.2", "a1", parent="a1.1", edge="retries", shared=12, n_new=0, n_output=2, at=3, version=1,
                    finish_reason="stop"),
        interaction("a1.3", "a1", parent="a1.2", edge="rerendered", cause="reasoning removed", shared=5, n_new=9,
                    n_output=1, at=4, version=1, finish_reason="length"),
    )  # fmt: skip
    end("a1", 1.0, at=10 * SECOND)
    episode("a2", "a", 0, at=0)
    log.append_blocking(interaction("a2.0", "a2", n_output=3, at=1, finish_reason="stop"))
    end("a2", 0.0, at=11 * SECOND)
    for name in ("b1", "b2"):
        episode(name, "b", 1, at=5)
        log.append_blocking(interaction(f"{name}.0", name, n_output=3, version=1, at=6, finish_reason="length"))
        end(name, 1.0, at=12 * SECOND)
    episode("c1", "c", 1, at=7)
    episode("d1", "d", 1, at=7)
    end("d1", None, at=13 * SECOND, state="failed")
    episode("v", "v", 1, at=8, is_eval=True)
    end("v", 0.5, at=14 * SECOND)
    rows = [BatchRow(interaction_id=i, credit=1.0, advantage=0.5) for i in ("a1.0", "a1.2", "a2.0")]
    discarded = {"stale": 3, "zero_variance": 2}
    log.append_blocking(
        event(BatchTaken(batch_id="k1", step=1, version=2, rows=rows, discarded=discarded), at=20),
        event(BatchTaken(batch_id="k2", step=2, version=3, rows=[], discarded={"stale": 1}), at=21),
        event(BatchTrained(batch_id="k1", step=1), at=22),
        event(TokensScored(version=2, batch_id="k1"), interaction_id="a1.0", episode_id="a1",
              logprobs=np.full(4, -0.25, np.float32), entropies=np.full(4, 2.0, np.float32)),
        event(TokensScored(version=2, batch_id="k1"), interaction_id="a2.0", episode_id="a2",
              logprobs=np.full(3, -1.0, np.float32), entropies=np.full(3, 1.0, np.float32)),
        event(RewardGiven(value=0.25, name="reward_v2", source="judge@1"), episode_id="a1", at=15 * SECOND),
        event(RewardGiven(value=0.0, name="reward_v2", source="judge@1"), episode_id="a2", at=9 * SECOND),
    )  # fmt: skip
    with Book(log) as book:
        yield book


def rows(book: Book, name: str, *columns: str, **params: Any) -> list[tuple[Any, ...]]:
    return [tuple(row[column] for column in columns) for row in book.canned(name, **params).to_pylist()]


EXPECTED: dict[str, tuple[tuple[str, ...], list[tuple[Any, ...]]]] = {
    "reward_by_turns": (
        ("turns", "episodes", "rewarded", "reward_mean"),
        [(0, 2, 1, 0.5), (1, 3, 3, 2 / 3), (4, 1, 1, 1.0)],
    ),
    "task_curve": (
        ("is_eval", "version", "episodes", "reward_mean"),
        [(False, 0, 2, 0.5), (False, 1, 3, 1.0), (True, 1, 1, 0.5)],
    ),
    "pass_at_k": (("k", "tasks", "pass_at_k"), [(1, 3, 0.5), (2, 2, 1.0)]),
    "tool_errors": (
        ("tool", "calls", "bad_arguments", "results", "errors"),
        [("search", 2, 1, 2, 1), ("run", 1, 0, 0, 0)],
    ),
    "truncation": (
        ("version", "finish_reason", "interactions", "share"),
        [(0, "stop", 1, 0.5), (0, "tool_calls", 1, 0.5), (1, "length", 3, 0.6), (1, "stop", 2, 0.4)],
    ),
    "group_health": (
        ("health", "groups", "episodes"),
        [("all equal", 2, 3), ("informative", 1, 2), ("no reward", 1, 1), ("waiting", 1, 1)],
    ),
    "discards": (("reason", "episodes", "batches", "last_step"), [("stale", 4, 2, 2), ("zero_variance", 2, 1, 1)]),
    "drift_causes": (
        ("edge", "cause", "interactions", "tokens_again_mean"),
        [("rerendered", "reasoning removed", 1, 9.0), ("retries", "", 1, 0.0)],
    ),
    "rows_per_trajectory": (("n_interactions", "trajectories", "output_mean"), [(1, 4, 2.5), (2, 1, 6.0)]),
    "staleness": (("step", "interactions", "oldest_mean", "oldest_max"), [(1, 3, 5 / 3, 2)]),
    "logprob_gap_by_staleness": (("staleness", "interactions", "gap_mean", "gap_abs_mean"), [(2, 2, -0.125, 0.375)]),
    "entropy_by_step": (("step", "interactions", "entropy_mean"), [(1, 2, 11 / 7)]),
    "token_ledger": (
        ("version", "sampled", "trainable", "taken", "trained", "prompt", "prompt_new"),
        [(0, 7, 7, 7, 7, 8, 8), (1, 11, 9, 2, 2, 46, 21)],
    ),
    "late_rewards": (("episode_id", "name", "seconds_late"), [("a1", "reward_v2", 5.0)]),
    "orphans": (("interaction_id", "n_output"), [("a1.1", 2)]),
    "reward_versions_diff": (("episode_id", "before", "after", "change"), [("a1", 1.0, 0.25, -0.75)]),
    "run_compare": (
        ("name", "episodes", "failed", "train_reward", "eval_reward", "interactions", "tokens", "steps"),
        [("first", 7, 1, 0.75, 0.5, 7, 16, 1)],
    ),
    "slowest": (("interaction_id", "seconds", "tokens_per_s"), [("a1.0", 2.0, 2.0), ("a1.1", 0.5, 4.0)]),
    "best_worst": (("which", "episode_id", "reward"), [("best", "a1", 1.0), ("worst", "a2", 0.0)]),
}


@pytest.mark.parametrize("name", CANNED)
def test_a_canned_view_gives_the_numbers_of_this_run(book: Book, name: str) -> None:
    columns, expected = EXPECTED[name]
    limit = {"limit": 1} if name == "best_worst" else {}
    found = rows(book, name, *columns, **limit)
    assert found == [tuple(pytest.approx(v) if isinstance(v, float) else v for v in row) for row in expected]
    assert rows(book, name, *columns, run="another", **limit) == []


@pytest.mark.parametrize("name", CANNED)
def test_no_number_of_a_canned_view_is_a_decimal(book: Book, name: str) -> None:
    assert not [field for field in book.canned(name).schema if pa.types.is_decimal(field.type)]


def test_every_canned_view_has_one_line_of_help() -> None:
    for canned in CANNED.values():
        assert canned.help.endswith((".", "?"))
        assert "\n" not in canned.help


def test_a_wrong_name_or_parameter_is_answered_with_the_right_ones(book: Book) -> None:
    with pytest.raises(BadSelection, match="task_curve"):
        book.canned("learning_curve")
    with pytest.raises(BadSelection, match="has no parameter 'k'"):
        book.canned("pass_at_k", k=3)


def test_tokens_are_rows_where_they_were_brought(book: Book) -> None:
    tokens = book.tokens(["a1.3"])
    found = book.sql(
        "select count(*) as n, count(*) filter (is_sampled) as sampled, min(place) as first, max(place) as last, "
        "count(logprob) as logprobs, max(version) as version from tokens",
        tokens=tokens,
    ).to_pylist()
    assert found == [{"n": 10, "sampled": 1, "first": 5, "last": 14, "logprobs": 1, "version": 1}]
    assert (
        book.tokens().num_rows
        == book.sql("select sum(n_prompt - n_shared + n_output) as n from interactions")["n"][0].as_py()
    )
    assert book.tokens([]).num_rows == 0


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("Error: no", True),
        ("fine", False),
        ('{"error": "no"}', True),
        ('{"error": null, "rows": []}', False),
        ([{"type": "text", "text": "Traceback (most recent call last)"}], True),
        (None, False),
    ],
)
def test_a_tools_answer_is_read_as_an_error_where_it_says_so(content: Any, expected: bool) -> None:
    assert is_tool_error(content) is expected


def test_tokens_are_a_table_by_their_name(book: Book) -> None:
    assert book.sql("from tokens limit 5").num_rows == 5
    assert book.sql("select count(*) as n from Tokens join interactions using (interaction_id)").to_pylist() == [
        {"n": book.tokens().num_rows}
    ]
    assert book.sql("with tokens as (select 1 as one) from tokens").to_pylist() == [{"one": 1}]
    assert book.sql("select n_output as tokens from interactions limit 1").num_rows == 1
    few = book.tokens(["a1.3"])
    assert book.sql("from tokens", tokens=few).num_rows == few.num_rows


def test_a_table_of_too_many_tokens_is_refused(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollbook.store.book.MAX_TOKENS", 3)
    with pytest.raises(BadSelection, match="more than 3; read those of some interactions"):
        book.sql("from tokens limit 5")


def test_a_server_says_where_tokens_are_to_be_had(book: Book) -> None:
    with pytest.raises(QueryRefused, match="`rollbook sql`, beside the book"):
        run_query(book.views, "from tokens limit 5")
    assert run_query(book.views, "with tokens as (select 1 as one) from tokens").num_rows == 1


def test_reward_versions_differ_by_what_episode_rewards_says() -> None:
    """On interactions and episodes, given again, tied in time, of an episode that nobody opened."""
    rng = np.random.default_rng(0)
    book = Book(MemoryLog("w"))
    for _ in range(400):
        target = None if rng.random() < 0.3 else f"i{rng.integers(3)}"
        book.log.append_blocking(
            Event(
                run_id="r",
                episode_id=f"e{rng.integers(20)}",
                interaction_id=target,
                recorded_at=int(rng.integers(1, 30)),
                fact=RewardGiven(value=float(rng.integers(4)), name=str(rng.choice(["reward", "reward_v2", "other"]))),
            )
        )
    book.catch_up()
    expected = book.sql("""
        select episode_id, a.reward as before, b.reward as after, b.reward - a.reward as change
        from (from episode_rewards where name = 'reward') a join (from episode_rewards where name = 'reward_v2') b
          using (episode_id) where change <> 0 order by abs(change) desc, episode_id
    """)
    assert expected.num_rows > 5
    found = book.canned("reward_versions_diff").select(expected.column_names)
    assert found.to_pylist() == expected.to_pylist()
    book.close()
