"""Which episodes a selection takes, why it leaves others out, and what it says of those it takes."""

from typing import Any

import msgspec
import pyarrow as pa
import pytest

from rollbook.store import BadSelection, BatchRow, BatchTaken, EpisodeClosed, EpisodeOpened, MemoryLog, RewardGiven
from rollbook.store.book import Book
from rollbook.store.selection import Credit, Selection, selection_from
from views_books import event, interaction


def episode(
    name: str,
    group: str | None,
    reward: float | None,
    *,
    state: str | None = "done",
    version: int = 5,
    at: int = 0,
    turns: int = 1,
    **opened: Any,
) -> list[Any]:
    """The events of one episode that is a chain of `turns` interactions, each of 3 sampled tokens."""
    events = [event(EpisodeOpened(task_id=f"task-{group}", group_id=group, **opened), episode_id=name, at=at)]
    for turn in range(turns):
        parent = f"{name}.{turn - 1}" if turn else None
        edge = "extends" if turn else None
        events.append(interaction(f"{name}.{turn}", name, parent=parent, edge=edge, version=version, at=at + turn))
    if reward is not None:
        events.append(event(RewardGiven(value=reward), episode_id=name, at=at))
    if state is not None:
        events.append(event(EpisodeClosed(state=state), episode_id=name, at=at + 10))  # type: ignore[arg-type]
    return events


@pytest.fixture
def book() -> Book:
    log = MemoryLog()
    row = BatchRow(interaction_id="f1.0", credit=1.0, advantage=1.0)
    log.append_blocking(
        *episode("a1", "a", 1.0, at=0, turns=3),
        *episode("a2", "a", 0.0, at=5),
        *episode("b1", "b", 1.0, at=1),
        *episode("b2", "b", 1.0, at=1),
        *episode("c1", "c", 1.0, at=2),
        *episode("c2", "c", None, state=None, at=2),
        *episode("d1", "d", 0.5, version=1, at=3),
        *episode("d2", "d", 0.75, at=3),
        *episode("f1", "f", 1.0, at=4),
        *episode("f2", "f", 0.0, at=4),
        *episode("f3", "f", None, state="failed", at=4),
        *episode("x", "x", 1.0, at=9, is_eval=True),
        *episode("n", "n", None, at=9),
        event(BatchTaken(batch_id="b", step=0, version=5, rows=[row])),
    )
    return Book(log)


def chosen(book: Book, **how: Any) -> list[str]:
    return book.select(Selection(rows="episodes", **how))["episode_id"].to_pylist()


def reasons(book: Book, **how: Any) -> dict[str, str]:
    found = book.discards(Selection(rows="episodes", **how))
    return dict(zip(found["episode_id"].to_pylist(), found["reason"].to_pylist(), strict=True))


def test_the_default_takes_what_is_done_and_not_for_evaluation(book: Book) -> None:
    assert sorted(chosen(book)) == ["a1", "a2", "b1", "b2", "c1", "d1", "d2", "f1", "f2", "n"]
    assert reasons(book) == {"c2": "open", "f3": "state"}
    assert chosen(book, is_eval=True) == ["x"]


def test_what_a_learner_asks_for_and_why_the_rest_is_left_out(book: Book) -> None:
    how: dict[str, Any] = {
        "current_version": 6, "max_staleness": 2, "group_size": 2, "drops_equal": True, "is_untaken": True,
    }  # fmt: skip
    assert chosen(book, **how) == ["a1", "a2"]
    assert reasons(book, **how) == {
        "b1": "zero_variance",
        "b2": "zero_variance",
        "c1": "incomplete",
        "c2": "open",
        "d1": "stale",
        "d2": "zero_variance",
        "f1": "taken",
        "f2": "zero_variance",
        "f3": "state",
        "n": "no_reward",
    }


def test_a_group_with_failures_is_complete_and_its_statistics_are_over_the_rest(book: Book) -> None:
    rows = book.select(Selection(group_ids=("f",), group_size=3, rows="episodes")).to_pylist()
    assert [(row["episode_id"], row["group_n"], row["group_mean"]) for row in rows] == [("f1", 2, 0.5), ("f2", 2, 0.5)]


def test_every_episode_in_scope_is_chosen_or_has_a_reason(book: Book) -> None:
    for how in (
        {},
        {"limit": 2},
        {"group_size": 2, "drops_equal": True},
        {"max_staleness": 1, "current_version": 6, "needs_reward": True},
        {"where": "reward > 0.6", "states": ("done", "failed", "open")},
        {"reward": "1 - reward", "needs_reward": True, "order": "random", "limit": 3},
    ):
        left_out = reasons(book, **how)
        taken = chosen(book, **how)
        assert sorted([*taken, *left_out]) == sorted(set(taken) | set(left_out))
        assert len(taken) + len(left_out) == 12


def test_a_limit_draws_whole_groups_and_a_seed_draws_the_same_ones_again(book: Book) -> None:
    assert chosen(book, limit=1) == ["b1", "b2"]
    assert chosen(book, limit=1, order="newest") == ["n"]
    drawn = {tuple(chosen(book, limit=2, order="random", seed=seed)) for seed in range(8)}
    assert len(drawn) > 1
    assert chosen(book, limit=2, order="random", seed=3) == chosen(book, limit=2, order="random", seed=3)


@pytest.mark.parametrize("rows", ["interactions", "trajectories", "episodes"])
def test_no_number_of_a_selection_is_a_decimal(book: Book, rows: Any) -> None:
    found = book.select(Selection(rows=rows, credit=Credit()))
    assert not [field for field in found.schema if pa.types.is_decimal(field.type)]


def test_the_weights_of_an_episode_sum_to_one(book: Book) -> None:
    rows = book.select(Selection(group_ids=("a",), credit=Credit(gamma=0.5))).to_pylist()
    assert [row["interaction_id"] for row in rows] == ["a1.0", "a1.1", "a1.2", "a2.0"]
    assert [row["weight"] for row in rows] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1])
    assert [row["credit"] for row in rows] == pytest.approx([0.25, 0.5, 1.0, 0.0])
    assert [row["group_mean"] for row in rows] == [0.5] * 4
    assert [row["advantage_mean"] for row in rows] == [0.5, 0.5, 0.5, -0.5]


def test_trajectories_are_rows_too(book: Book) -> None:
    rows = book.select(Selection(group_ids=("a",), rows="trajectories", credit=Credit())).to_pylist()
    assert [(row["leaf_id"], row["n_interactions"], row["n_output"], row["credit"]) for row in rows] == [
        ("a1.2", 3, 9, 1.0),
        ("a2.0", 1, 3, 0.0),
    ]


def test_rows_may_be_chosen_by_edge(book: Book) -> None:
    roots = book.select(Selection(episode_ids=("a1",), edges=("root",)))
    assert roots["interaction_id"].to_pylist() == ["a1.0"]


def test_a_reward_expression_decides_what_is_chosen(book: Book) -> None:
    rows = book.select(Selection(group_ids=("a",), reward="reward - 0.1 * n_interactions", rows="episodes")).to_pylist()
    assert [row["reward"] for row in rows] == pytest.approx([0.7, -0.1])


def test_a_selection_is_plain_data(book: Book) -> None:
    selection = selection_from({"group_ids": ["a"], "limit": 1, "credit": {"gamma": 0.5}})
    assert selection == Selection(group_ids=("a",), limit=1, credit=Credit(gamma=0.5))
    with pytest.raises(BadSelection, match="max_age"):
        selection_from({"max_age": 3})
    with pytest.raises(BadSelection, match="needs current_version"):
        selection_from({"max_staleness": 3})
    with pytest.raises(BadSelection, match="colour"):
        Selection(where="colour = 'red'")
    with pytest.raises(BadSelection):
        Selection(where="true) or (select true")
    assert chosen(book, task_ids=("task-a' or true or '",)) == []


def test_episodes_are_rewarded_again_by_an_expression_and_the_first_reward_stays(book: Book) -> None:
    assert book.rereward("1 - reward", name="reversed", source="judge@2", selection=Selection(group_ids=("a",))) == (
        2,
        0,
    )
    rows = book.sql("select * from episode_rewards where episode_id = 'a1' order by name").to_pylist()
    assert [(row["name"], row["reward"]) for row in rows] == [("reversed", 0.0), ("reward", 1.0)]
    assert book.rereward("reversed * 10", name="reversed") == (2, 0)
    values = book.sql(
        "select value from rewards where episode_id = 'a2' and name = 'reversed' order by given_at"
    ).to_pydict()
    assert values == {"value": [1.0, 10.0]}
    assert book.rereward("null", name="nothing") == (0, 0)
    with pytest.raises(BadSelection):
        book.rereward("(select 1)", name="x")


@pytest.mark.parametrize("wrong", ["nonsense(reward)", "factorial(-n_interactions - 1)", "state::double"])
def test_an_expression_that_cannot_be_computed_is_a_bad_selection(book: Book, wrong: str) -> None:
    for ask in (
        lambda: book.select(Selection(reward=wrong)),
        lambda: book.select(Selection(where=f"{wrong} > 0")),
        lambda: book.discards(Selection(where=f"{wrong} > 0")),
        lambda: book.credits(reward=wrong),
        lambda: book.credits(reward=wrong, episode_ids=["a1"]),
        lambda: book.rereward(wrong, name="x"),
        lambda: book.rereward("1", name="x", selection=Selection(where=f"{wrong} > 0")),
    ):
        with pytest.raises(BadSelection, match=r"cannot be computed: .*Error: [^\n]*$"):
            ask()


@pytest.mark.parametrize("odd", ["'nan'::double", "1 / 0"])
def test_an_expression_that_gives_no_number_gives_no_reward_and_spoils_no_group(book: Book, odd: str) -> None:
    def rows(where_not: str) -> list[dict[str, Any]]:
        expression = f"case when episode_id <> 'a1' then reward else {where_not} end"
        found = book.select(Selection(reward=expression, needs_reward=True, rows="episodes", credit=Credit()))
        return found.to_pylist()

    assert rows(odd) == rows("null") != []
    assert "a1" not in [row["episode_id"] for row in rows(odd)]
    odd_credits, no_credits = (
        book.credits(scheme=scheme, reward=f"case when episode_id = 'a1' then {value} else 1 end").to_pylist()
        for scheme, value in (("tree", odd), ("tree", "null"))
    )
    assert odd_credits == no_credits


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"limit": "3"}, "selection: limit = '3': Expected `int | null`, got `str`"),
        ({"task_ids": "t1"}, "task_ids = 't1': Expected `array | null`"),
        ({"states": ["won"]}, r"states = \['won'\].*expected open, done, failed, abandoned, lost"),
        ({"states": "done"}, "states = 'done'"),
        ({"rows": 3}, "rows = 3.*expected interactions, trajectories, episodes"),
        ({"order": "best"}, "order = 'best'.*expected oldest, newest, random"),
        ({"run_id": 7}, "run_id = 7"),
        ({"needs_reward": "yes"}, "needs_reward = 'yes'"),
        ({"where": 1}, "where = 1"),
        ({"credit": {"gamma": "1"}}, "credit = "),
        ({"max_staleness": True, "current_version": 1}, "max_staleness = True"),
    ],
)
def test_a_wrong_type_is_one_sentence_that_names_the_field(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadSelection, match=said) as caught:
        Selection(**given)
    assert "\n" not in str(caught.value)
    with pytest.raises(BadSelection, match="credit: gamma = '1'"):
        Credit(gamma="1")  # type: ignore[arg-type]
    with pytest.raises(BadSelection, match="gamma must be a finite number, got nan"):
        Credit(gamma=float("nan"))


@pytest.mark.parametrize("harm", ["lost", "too much", "circle", "elsewhere", "its parent"])
def test_what_cannot_be_rebuilt_is_left_out(harm: str) -> None:
    log = MemoryLog()
    log.append_blocking(*episode("sound", None, 1.0, turns=2), event(RewardGiven(value=1.0), episode_id="harmed"))
    book = Book(log)
    how = {
        "lost": [{"parent": "nobody", "shared": 1}],
        "too much": [{"parent": "fine", "shared": 8}],
        "circle": [{"parent": "h1", "shared": 1}, {"parent": "h0", "shared": 1}],
        "elsewhere": [{"parent": "sound.0", "shared": 1}],
        "its parent": [{"parent": "nobody", "shared": 1}, {"parent": "h0", "shared": 1}],
    }[harm]
    log.append_blocking(
        event(EpisodeOpened(task_id="t"), episode_id="harmed"),
        *(interaction(f"h{i}", "harmed", edge="rerendered", **each) for i, each in enumerate(how)),
        event(EpisodeClosed(state="done"), episode_id="harmed"),
    )
    book.catch_up()
    assert reasons(book) == {"harmed": "no_data"}
    log.append_blocking(interaction("fine", "harmed"))
    book.catch_up()
    assert reasons(book) == {}
    for rows, names in (
        ("interactions", ["sound.0", "sound.1", "fine"]),
        ("trajectories", ["sound.1", "fine"]),
    ):
        found = book.select(Selection(rows=rows, credit=Credit()))  # type: ignore[arg-type]
        ids = found["leaf_id" if rows == "trajectories" else "interaction_id"].to_pylist()
        assert sorted(ids) == sorted(names)
        assert book.load(ids).row_ids == ids


def test_a_trajectory_whose_end_cannot_be_rebuilt_is_offered_as_far_as_it_can() -> None:
    log = MemoryLog()
    log.append_blocking(
        event(EpisodeOpened(task_id="t"), episode_id="e"),
        *episode("sound", None, 1.0, turns=2),
        interaction("a", at=0),
        interaction("b", parent="a", edge="extends", shared=7, at=1),
        interaction("too much", parent="b", edge="extends", shared=99, at=2),
        interaction("below", parent="too much", edge="extends", shared=106, at=3),
        interaction("c", at=4),  # goes on in two ways, one of them sound
        interaction("c bad", parent="c", edge="extends", shared=99, at=5),
        interaction("c good", parent="c", edge="extends", shared=7, at=6),
        interaction("d", at=7),  # its next call was repeated, in vain
        interaction("orphan", parent="d", edge="extends", shared=7, at=8),
        interaction("again", parent="orphan", edge="retries", shared=99, at=9),
        event(EpisodeClosed(state="done"), episode_id="e"),
    )
    book = Book(log)
    found = book.select(Selection(rows="trajectories", episode_ids=("e", "sound")))
    ids = found["leaf_id"].to_pylist()
    assert sorted(ids) == ["b", "c good", "d", "sound.1"]
    tokens = book.load(ids, form="trajectory")
    assert dict(zip(ids, found["n_tokens"].to_pylist(), strict=True)) == {"b": 14, "c good": 14, "d": 7, "sound.1": 7}
    assert tokens.n_tokens == sum(found["n_tokens"].to_pylist())
    assert sum(found["weight"].to_pylist()) == pytest.approx(2)


def test_an_answer_that_was_not_recorded_whole_is_no_data() -> None:
    log = MemoryLog()
    log.append_blocking(*episode("e", None, 1.0), interaction("torn", "e", n_output=5, version=7, capture="incomplete"))
    log.append_blocking(
        event(EpisodeOpened(task_id="t"), episode_id="none"),
        interaction("torn too", "none", capture="incomplete"),
        event(EpisodeClosed(state="done"), episode_id="none"),
    )
    book = Book(log)
    assert reasons(book) == {"none": "no_data"}
    assert book.sql("select n_output, version_max from episodes where episode_id = 'e'").to_pylist() == [
        {"n_output": 3, "version_max": 5}
    ]
    assert book.select(Selection(rows="episodes"))["episode_id"].to_pylist() == ["e"]


def test_what_was_broken_is_offered_once_its_parent_has_come() -> None:
    log = MemoryLog()
    log.append_blocking(
        event(EpisodeOpened(task_id="t"), episode_id="e"),
        event(EpisodeClosed(state="done"), episode_id="e"),
        interaction("c", parent="b", edge="extends", shared=14),
        interaction("b", parent="a", edge="extends", shared=7),
    )
    book = Book(log)
    assert reasons(book) == {"e": "no_data"}
    log.append_blocking(interaction("a"))
    book.catch_up()
    ids = book.select(Selection())["interaction_id"].to_pylist()
    assert sorted(ids) == ["a", "b", "c"]
    assert book.load(ids).n_tokens == 7 + 14 + 21


def test_groups_of_two_runs_with_one_id_are_two_groups() -> None:
    log = MemoryLog()
    for run, rewards in (("one", (0.0, 1.0)), ("two", (10.0, 11.0)), ("three", (5.0, 5.0))):
        for i, reward in enumerate(rewards):
            state = None if run == "three" and not i else "done"
            events = episode(f"{run}{i}", "0", reward, state=state)
            log.append_blocking(*(msgspec.structs.replace(one, run_id=run) for one in events))
    book = Book(log)
    rows = book.select(Selection(rows="episodes", where="run_id <> 'three'")).to_pylist()
    assert {row["episode_id"]: row["advantage_mean"] for row in rows} == {
        "one0": -0.5, "one1": 0.5, "two0": -0.5, "two1": 0.5,
    }  # fmt: skip
    assert {row["group_n"] for row in rows} == {2}
    for order in ("oldest", "newest", "random"):
        found = book.select(Selection(rows="episodes", order=order, limit=1))["run_id"].to_pylist()  # type: ignore[arg-type]
        assert len(set(found)) == 1
    assert reasons(book, group_size=2, drops_equal=True) == {"three0": "open", "three1": "incomplete"}
