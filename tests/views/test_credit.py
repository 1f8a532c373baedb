"""Rewards spread over trees: known numbers, and SQL equal to a plain reference on random forests."""

import math
import time
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.store import BadSelection, EpisodeOpened, MemoryLog, RewardGiven, credit
from rollbook.store.book import Book
from rollbook.store.credit import Turn, credit_episode, group_statistics_query
from views_books import event, interaction


def forest(nodes: dict[str, str | None], rewards: dict[str | None, float], edges: dict[str, str] | None = None) -> Book:
    """An episode `e` with these nodes (id -> parent) and rewards (id, or None for the episode's)."""
    log = MemoryLog()
    log.append_blocking(event(EpisodeOpened(task_id="t", group_id="g"), episode_id="e", at=0))
    for at, (name, parent) in enumerate(nodes.items()):
        edge = None if parent is None else (edges or {}).get(name, "extends")
        log.append_blocking(interaction(name, parent=parent, edge=edge, at=at))
    for at, (name, value) in enumerate(rewards.items()):
        log.append_blocking(event(RewardGiven(value=value), episode_id="e", interaction_id=name, at=100 + at))
    return Book(log)


def credits(book: Book, **how: Any) -> dict[str, float | None]:
    found = book.credits(**how)
    return dict(zip(found["interaction_id"].to_pylist(), found["credit"].to_pylist(), strict=True))


def approx(values: dict[str, float | None]) -> Any:
    return {name: value if value is None else pytest.approx(value, rel=1e-12) for name, value in values.items()}


def test_a_fork_gets_the_discounted_mean_of_its_branches() -> None:
    book = forest({"r": None, "a": "r", "b": "r"}, {"a": 0.0, "b": 1.0})
    assert credits(book, gamma=0.5) == approx({"r": 0.25, "a": 0.0, "b": 1.0})
    assert credits(book, gamma=0.5, fork="sum") == approx({"r": 0.5, "a": 0.0, "b": 1.0})
    assert credits(book, gamma=0.5, fork="max") == approx({"r": 0.5, "a": 0.0, "b": 1.0})


def test_a_sub_agents_reward_does_not_reach_the_main_agent() -> None:
    book = forest({"m1": None, "s1": None, "m2": "m1"}, {"m2": 1.0, "s1": -1.0})
    assert credits(book, gamma=0.9) == approx({"m1": 0.9, "m2": 1.0, "s1": -1.0})


@pytest.mark.parametrize(
    ("rewards", "gamma", "expected"),
    [([None, None, 10.0], 0.9, [8.1, 9.0, 10.0]), ([None, 1.5, 2.5], 0.85, [3.08125, 3.625, 2.5])],
)
def test_arrival_order_gives_areals_numbers(rewards: list[float | None], gamma: float, expected: list[float]) -> None:
    names = ["i0", "i1", "i2"]
    known = {name: value for name, value in zip(names, rewards, strict=True) if value is not None}
    book = forest(dict.fromkeys(names), known)  # three roots: arrival does not look at the tree
    assert credits(book, scheme="arrival", gamma=gamma) == approx(dict(zip(names, expected, strict=True)))


def test_rewards_on_an_inner_turn_and_on_the_last_are_both_kept() -> None:
    book = forest({"a": None, "b": "a", "c": "b"}, {"b": 0.3, "c": 1.0})
    assert credits(book, scheme="none") == approx({"a": None, "b": 0.3, "c": 1.0})
    assert credits(book) == approx({"a": 1.3, "b": 1.3, "c": 1.0})


def test_a_title_call_gets_nothing_of_the_episodes_reward_by_accident() -> None:
    book = forest({"title": None, "m1": None, "m2": "m1", "late": None}, {None: 1.0})
    assert credits(book, gamma=0.5) == approx({"title": None, "m1": 0.5, "m2": 1.0, "late": None})
    assert credits(book, scheme="broadcast") == approx(dict.fromkeys(["title", "m1", "m2", "late"], 1.0))


def test_credit_crosses_compaction_unless_told_otherwise() -> None:
    book = forest({"a": None, "b": "a", "c": "b"}, {"c": 1.0}, {"b": "compacts"})
    assert credits(book, gamma=0.5) == approx({"a": 0.25, "b": 0.5, "c": 1.0})
    assert credits(book, gamma=0.5, compacts=False) == approx({"a": None, "b": 0.5, "c": 1.0})


def test_an_orphan_keeps_what_it_was_given_and_passes_nothing_on() -> None:
    nodes = {"m1": None, "m2": "m1", "again": "m2", "m3": "again"}
    book = forest(nodes, {"m2": -5.0, "m3": 1.0}, {"again": "retries"})
    assert credits(book, gamma=0.5) == approx({"m1": 0.25, "m2": -5.0, "again": 0.5, "m3": 1.0})


def test_missing_is_missing_until_the_reward_comes() -> None:
    book = forest({"a": None, "b": "a"}, {})
    assert credits(book) == {"a": None, "b": None}
    book.log.append_blocking(event(RewardGiven(value=1.0), episode_id="e", interaction_id="b", at=600_000_000))
    book.catch_up()
    assert credits(book) == {"a": 1.0, "b": 1.0}


def test_a_reward_may_be_an_expression_over_names_and_columns() -> None:
    book = forest({"a": None, "b": "a"}, {})
    book.log.append_blocking(
        event(RewardGiven(value=1.0, name="accuracy"), episode_id="e", at=9),
        event(RewardGiven(value=0.5, name="style"), episode_id="e", interaction_id="b", at=9),
    )
    book.catch_up()
    assert credits(book, reward="accuracy - 0.1 * n_interactions + style") == approx({"a": 1.3, "b": 1.3})
    assert credits(book, reward="style", gamma=0.5) == approx({"a": 0.25, "b": 0.5})
    assert credits(book, reward="accuracy + nobody_gave_this") == {"a": None, "b": None}


@pytest.mark.parametrize(
    "reward",
    [
        "1; drop table episodes",
        "(select 1)",
        "read_text('/etc/passwd')",
        "getenv('HOME')",
        "1) from episodes --",
        "reward /*",
        "sum(reward) over ()",
        "*",
        "episodes.reward",
        "1 from (select 1)",
        "",
    ],
)
def test_a_reward_expression_that_is_more_than_a_value_is_refused(reward: str) -> None:
    book = forest({"a": None}, {})
    with pytest.raises(BadSelection):
        book.credits(reward=reward)


def test_an_unknown_scheme_is_named() -> None:
    book = forest({"a": None}, {})
    with pytest.raises(BadSelection, match="tree, arrival, broadcast, none"):
        book.credits(scheme="magic")
    with pytest.raises(BadSelection, match="between 0 and 1"):
        book.credits(gamma=1.5)


def reference(
    ups: dict[str, str | None], own: dict[str, float], orphans: set[str], gamma: float, fork: str
) -> dict[str, float | None]:
    """The definition, word by word."""

    def gain(name: str) -> float | None:
        below = [gain(child) for child, up in ups.items() if up == name and child not in orphans]
        known = [value for value in below if value is not None]
        if not known:
            return own.get(name)
        spread = {"mean": sum(known) / len(known), "sum": sum(known), "max": max(known)}[fork]
        return own.get(name, 0.0) + gamma * spread

    return {name: gain(name) for name in ups}


@st.composite
def forests(draw: Any) -> tuple[dict[str, str | None], dict[str, str], dict[str, float]]:
    n = draw(st.integers(1, 12))
    names = [f"n{i}" for i in range(n)]
    nodes = {name: draw(st.sampled_from([None, *names[:i]])) for i, name in enumerate(names)}
    edges = {name: draw(st.sampled_from(["extends", "extends", "rerendered", "retries", "compacts"])) for name in names}
    value = st.integers(-8, 8).map(lambda v: v / 4)
    return nodes, edges, draw(st.dictionaries(st.sampled_from(names), value, max_size=n))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(forests(), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.sampled_from(["mean", "sum", "max"]),
    st.sampled_from([0, 1, 64]),
)
def test_sql_online_and_definition_agree_on_random_forests(drawn: Any, gamma: float, fork: Any, levels: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(credit, "_LEVELS", levels)  # from how deep on chains are stepped over
        check_random_forests(drawn, gamma, fork)


def check_random_forests(drawn: Any, gamma: float, fork: Any) -> None:
    log = MemoryLog()
    for e, (nodes, edges, rewards) in enumerate(drawn):
        log.append_blocking(event(EpisodeOpened(task_id="t"), episode_id=f"e{e}"))
        for at, (name, parent) in enumerate(nodes.items()):
            up = None if parent is None else f"{e}.{parent}"
            edge = None if parent is None else edges[name]
            log.append_blocking(interaction(f"{e}.{name}", f"e{e}", parent=up, edge=edge, at=at))
        for name, value in rewards.items():
            log.append_blocking(event(RewardGiven(value=value), episode_id=f"e{e}", interaction_id=f"{e}.{name}"))
    book = Book(log)
    by_sql = credits(book, gamma=gamma, fork=fork)
    assert len(by_sql) == sum(len(nodes) for nodes, _, _ in drawn)
    for e, (nodes, edges, rewards) in enumerate(drawn):

        def up_of(name: str, nodes: Any = nodes, edges: Any = edges) -> str | None:
            parent = nodes[name]
            return up_of(parent) if parent is not None and edges[name] == "retries" else parent

        ups = {name: up_of(name) for name in nodes}
        extended = {parent for name, parent in nodes.items() if parent and edges[name] == "extends"}
        orphans = {parent for name, parent in nodes.items() if parent and edges[name] == "retries"} - extended
        expected = reference(ups, rewards, orphans, gamma, fork)
        assert {name: by_sql[f"{e}.{name}"] for name in nodes} == approx(expected)
        turns = [Turn(name, ups[name], rewards.get(name), edges[name], name in orphans) for name in nodes]
        assert credit_episode(turns, gamma=gamma, fork=fork) == approx(expected)
        arrival = credits(book, scheme="arrival", gamma=gamma)
        online = credit_episode(turns, scheme="arrival", gamma=gamma)
        assert {name: arrival[f"{e}.{name}"] for name in nodes} == approx(online)


@pytest.mark.parametrize("gamma", [0.5, 0.99, 1.0])
def test_a_long_conversation_takes_no_round_for_each_turn(gamma: float) -> None:
    """With a fork in the middle. A round took .2 ms, on a big book far more."""
    n = 5000
    ups: list[int | None] = [None, *range(n - 1)]
    ups[3000] = 1000
    turns = [
        Turn(f"i{i}", None if up is None else f"i{up}", float(i % 7) if i % 10 == 9 else None)
        for i, up in enumerate(ups)
    ]
    with Book(MemoryLog()) as book, book.views.cursor() as cursor:
        rows = [(i, up, turn.interaction_id, turn.reward) for i, (up, turn) in enumerate(zip(ups, turns, strict=True))]
        made = pa.table(
            dict(zip(["node", "up_node", "interaction_id", "reward"], zip(*rows, strict=True), strict=True))
        )
        cursor.register("made", made)
        cursor.execute(
            "insert into interactions by name select node, up_node, interaction_id, 'e' as episode_id, "
            "false as is_leaf, false as is_retried, case when node < 3000 then node else node - 1999 end as depth "
            "from made"
        )
        cursor.execute(
            "insert into rewards by name select uuid() as event_id, 'e' as episode_id, interaction_id, "
            "'reward' as name, reward as value, 1.0 as weight, now() as given_at from made where reward is not null"
        )
        began = time.process_time()
        by_sql = credits(book, gamma=gamma)
        assert time.process_time() - began < 1  # .05 s; 1.6 with a round for each turn
    assert by_sql == {
        name: value if value is None else pytest.approx(value, rel=1e-9)
        for name, value in credit_episode(turns, gamma=gamma).items()
    }


def statistics(groups: dict[str, list[float | None]]) -> list[dict[str, Any]]:
    rows = [(f"{g}.{i}", g, r) for g, rewards in groups.items() for i, r in enumerate(rewards)]
    table = pa.table(dict(zip(["episode_id", "group_id", "reward"], map(list, zip(*rows, strict=True)), strict=True)))
    table = table.append_column("run_id", pa.array(["r"] * table.num_rows))
    query = group_statistics_query("select * from given")
    return Book(MemoryLog()).sql(f"{query} order by episode_id", given=table).to_pylist()


def test_group_statistics_stay_finite_where_rewards_are_all_equal_or_nearly_so() -> None:
    nearly = [0.1 + 0.2, 0.3, 0.3, 0.3]
    for rewards in ([1.0] * 4, [0.95] * 8, nearly, [7.5]):
        for row in statistics({"g": list(rewards)}):
            assert row["is_equal"]
            assert (row["advantage_std"], row["advantage_mean"], row["advantage_others"]) == (0.0, 0.0, 0.0)
    rows = statistics({"g": [0.0] + [0.95] * 7})
    assert not rows[0]["is_equal"]
    for row in rows:
        assert all(
            math.isfinite(row[f"advantage_{kind}"]) and abs(row[f"advantage_{kind}"]) < 3
            for kind in ("std", "mean", "others")
        )


def test_leave_one_out_and_rank_are_those_of_the_papers() -> None:
    rows = statistics({"g": [1.0, 2.0, 3.0, 4.0]})
    assert [row["advantage_others"] for row in rows] == pytest.approx([-2, -2 / 3, 2 / 3, 2])
    assert [row["group_rank"] for row in rows] == pytest.approx([0, 1 / 3, 2 / 3, 1])


def test_statistics_are_over_the_episodes_that_have_a_reward() -> None:
    rows = statistics({"g": [1.0, None, 0.0, None], "h": [2.0, None]})
    assert [row["group_mean"] for row in rows] == [0.5, 0.5, 0.5, 0.5, 2.0, 2.0]
    assert [row["group_n"] for row in rows] == [2, 2, 2, 2, 1, 1]
    assert [row["advantage_mean"] for row in rows] == [0.5, None, -0.5, None, 0.0, None]


def test_rewards_within_the_tolerance_are_ties() -> None:
    third = 0.1 + 0.2  # 5e-17 above .3
    rows = statistics({"g": [third, 0.3, 1.0, 0.0, None], "big": [3e9, 3e9 + 1, 4e9], "low": [None, None]})
    ranks = {row["episode_id"]: row["group_rank"] for row in rows}
    assert [ranks[f"g.{i}"] for i in range(5)] == [0.5, 0.5, 1.0, 0.0, None]
    assert [ranks[f"big.{i}"] for i in range(3)] == [0.25, 0.25, 1.0]
    assert [ranks[f"low.{i}"] for i in range(2)] == [None, None]
    equal = statistics({"g": [third, 0.3, 0.3]})
    assert [row["group_rank"] for row in equal] == [0.5, 0.5, 0.5]
