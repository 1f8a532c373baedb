"""The tables are a function of the set of events, whatever order they came in."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.store import (
    BatchRow,
    BatchTaken,
    BatchTrained,
    BookBusy,
    EpisodeClosed,
    EpisodeOpened,
    Event,
    InteractionFailed,
    InteractionsPruned,
    MemoryLog,
    Messages,
    PolicyPublished,
    RewardGiven,
    RunStarted,
    TokensScored,
)
from rollbook.store.book import Book, open_book
from rollbook.store.events import encode_messages
from rollbook.store.schema import metadata
from rollbook.store.views import Views
from views_books import event, interaction

NAMES = [f"i{n}" for n in range(6)]
EPISODES = ["e0", "e1"]
KINDS = [
    "interaction",
    "interaction",
    "reward",
    "opened",
    "closed",
    "taken",
    "trained",
    "score",
    "prune",
    "run",
    "policy",
    "fail",
]


@st.composite
def messages(draw: Any) -> bytes | None:
    """Of an interaction, with tool calls and results whose ids clash."""
    ids = st.sampled_from(["c0", "c1"])
    said = st.sampled_from(["fine", "Error: no", '{"error": "no"}'])
    results = draw(st.lists(st.tuples(ids, said), max_size=2))
    calls = draw(st.lists(ids, max_size=2))
    if not results and not calls and draw(st.booleans()):
        return None
    return encode_messages(
        Messages(
            request=[{"role": "tool", "tool_call_id": name, "content": text} for name, text in results],
            reply={"role": "assistant", "tool_calls": [{"id": n, "function": {"name": n}} for n in calls]},
        )
    )


@st.composite
def events(draw: Any) -> Event:
    """Any event, over so few names that events clash and refer to each other in every direction."""
    at = draw(st.integers(0, 5))
    key = draw(st.integers(0, 10**9))
    episode = draw(st.sampled_from(EPISODES))
    name = draw(st.sampled_from(NAMES))
    common = {"at": at, "key": str(key)}
    match draw(st.sampled_from(KINDS)):
        case "run":
            return event(RunStarted(name=str(key), config={"lr": key}), **common)
        case "policy":
            return event(PolicyPublished(version=draw(st.integers(0, 1)), path=str(key), step=key % 7), **common)
        case "opened":
            fact = EpisodeOpened(task_id=str(key), group_id=draw(st.sampled_from([None, "g"])), version=key % 5)
            return event(fact, episode_id=episode, **common)
        case "closed":
            state = draw(st.sampled_from(["done", "failed", "lost"]))
            return event(EpisodeClosed(state=state, reason=str(key)), episode_id=episode, **common)
        case "interaction":
            parent = draw(st.sampled_from([None, *NAMES]))
            edge = None if parent is None else draw(st.sampled_from(["extends", "rerendered", "compacts", "retries"]))
            n_output = draw(st.integers(0, 4))
            shared = 0 if parent is None else draw(st.integers(0, 9))
            return interaction(
                name, episode, parent=parent, edge=edge, shared=shared, n_output=n_output,
                version=draw(st.integers(0, 3)), logprob=-0.25 * n_output,
                is_trainable=draw(st.booleans()), messages=draw(messages()), **common,
            )  # fmt: skip
        case "reward":
            target = draw(st.sampled_from([None, name]))
            span = {} if target is None or draw(st.booleans()) else {"start": 0, "end": 2}
            fact = RewardGiven(
                value=float(draw(st.integers(-3, 3))), name=draw(st.sampled_from(["reward", "style"])),
                source=draw(st.sampled_from(["agent", "a@0123456789ab", "b@0123456789ab"])), **span
            )  # fmt: skip
            return event(fact, episode_id=episode, interaction_id=target, **common)
        case "taken":
            rows = [
                BatchRow(interaction_id=n, credit=1.0, advantage=0.5)
                for n in draw(st.lists(st.sampled_from(NAMES), unique=True))
            ]
            batch = draw(st.sampled_from(["b0", "b1"]))
            return event(BatchTaken(batch_id=batch, step=key % 9, version=1, rows=rows), **common)
        case "trained":
            return event(
                BatchTrained(batch_id=draw(st.sampled_from(["b0", "b1"])), step=key % 9, metrics={"loss": 1.0}),
                **common,
            )
        case "score":
            fact = TokensScored(version=key % 3, scorer=draw(st.sampled_from(["learner", "reference"])))
            return event(
                fact, episode_id=episode, interaction_id=name, logprobs=np.full(2, -0.125, np.float32), **common
            )
        case "prune":
            names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True))
            return event(InteractionsPruned(interaction_ids=names), episode_id=episode, **common)
        case _:
            return event(
                InteractionFailed(error="Overflow", message=str(key), status=400), episode_id=episode, **common
            )


def contents(book: Book) -> dict[str, list[dict[str, Any]]]:
    """All rows of all tables, in an order of their own, without the numbers that a rebuild gives anew."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for name, table in metadata.tables.items():
        columns = [f'"{c.name}"' for c in table.columns if c.name not in ("node", "up_node", "main_node")]
        if name != "cursors":
            tables[name] = sorted(book.sql(f"select {', '.join(columns)} from {name}").to_pylist(), key=repr)
    return tables


def links(book: Book) -> set[tuple[Any, ...]]:
    """What the numbers say, said with ids."""
    found = book.sql("""
        select i.interaction_id, u.interaction_id as up_id from interactions i left join interactions u
        on u.node = i.up_node
        union all select e.episode_id, m.interaction_id from episodes e left join interactions m on m.node = e.main_node
    """)
    return set(zip(*found.to_pydict().values(), strict=True))


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(
            events(), st.sets(st.integers(0, 2), min_size=1, max_size=2), st.integers(0, 4).map(lambda n: n == 0)
        ),
        max_size=25,
        unique_by=lambda step: step[0].event_id,
    )
)
def test_any_interleaving_gives_the_tables_of_a_rebuild(history: list[tuple[Event, set[int], bool]]) -> None:
    first = MemoryLog("w0")
    logs = [first, first.sibling("w1"), first.sibling("w2")]
    live = Book(first)
    for one, writers, is_time_to_look in history:
        for writer in sorted(writers, reverse=True):
            logs[writer].append_blocking(one)
        if is_time_to_look:
            live.catch_up()
    live.catch_up()
    rebuilt = Book(first)
    backwards = MemoryLog("w0")
    others = [backwards, backwards.sibling("w1"), backwards.sibling("w2")]
    late = Book(backwards)
    for batch_writer in (2, 1, 0):  # whole writers become visible one after the other, the last one first
        others[batch_writer].append_blocking(*[one for one, writers, _ in history if batch_writer in writers])
        late.catch_up()
    assert contents(live) == contents(rebuilt) == contents(late)
    assert links(live) == links(rebuilt) == links(late)
    assert live.views.position == rebuilt.views.position


def test_a_retry_stands_where_the_request_that_it_repeats_stands() -> None:
    log = MemoryLog()
    log.append_blocking(
        interaction("m1"),
        interaction("m2", parent="m1", edge="extends", shared=7),
        interaction("again", parent="m2", edge="retries", shared=11, n_new=0),
        interaction("m3", parent="again", edge="extends", shared=14),
    )
    book = Book(log)
    rows = {row["leaf_id"]: row for row in book.sql("from trajectories").to_pylist()}
    assert rows.keys() == {"m2", "m3"}
    assert rows["m2"]["is_orphan"]
    assert not rows["m3"]["is_orphan"]
    assert (rows["m3"]["start_id"], rows["m3"]["n_interactions"], rows["m3"]["n_output"]) == ("m1", 3, 9)


def test_an_episode_has_its_own_reward_or_the_sum_of_its_interactions_or_none() -> None:
    log = MemoryLog()
    for name in ("own", "sum", "none"):
        log.append_blocking(event(EpisodeOpened(task_id="t"), episode_id=name))
    log.append_blocking(
        event(RewardGiven(value=1.0), episode_id="own", interaction_id="a", at=1),
        event(RewardGiven(value=5.0), episode_id="own", at=2),
        event(RewardGiven(value=1.0), episode_id="sum", interaction_id="b", at=1),
        event(RewardGiven(value=0.25), episode_id="sum", interaction_id="c", at=2),
        event(RewardGiven(value=2.0, weight=0.5), episode_id="sum", interaction_id="b", at=3),
        event(RewardGiven(value=9.0, name="style"), episode_id="none", at=3),
    )
    rows = Book(log).sql("select episode_id, reward from episodes order by 1").to_pylist()
    assert [row["reward"] for row in rows] == [None, 5.0, 1.25]


def test_a_result_answers_the_latest_call_of_its_id_and_the_first_result_counts() -> None:
    def said(calls: list[str], results: dict[str, str]) -> bytes:
        return encode_messages(
            Messages(
                request=[{"role": "tool", "tool_call_id": i, "content": text} for i, text in results.items()],
                reply={"role": "assistant", "tool_calls": [{"id": i, "function": {"name": "run"}} for i in calls]},
            )
        )

    history = [
        interaction("i0", at=0, messages=said(["a", "b"], {})),
        interaction("i1", at=1, parent="i0", edge="extends", messages=said(["a"], {"a": "fine", "b": "Error: no"})),
        interaction("branch", at=2, parent="i0", edge="extends", messages=said([], {"b": "fine", "never asked": "x"})),
        interaction("i2", at=3, parent="i1", edge="extends", messages=said(["a"], {"a": "Error: no"})),
        interaction("other", "f", at=4, messages=said([], {"a": "fine"})),
    ]
    for order in (history, history[::-1]):
        log = MemoryLog()
        with Book(log) as book:
            for one in order:
                log.append_blocking(one)
                book.catch_up()
            found = book.sql("select interaction_id, call, is_error from tool_calls order by 1, 2").to_pydict()
            assert found == {
                "interaction_id": ["i0", "i0", "i1", "i2"],
                "call": [0, 1, 0, 0],
                "is_error": [False, True, True, None],
            }
            assert book.sql("select count(*) as n from tool_results").to_pylist() == [{"n": 6}]


def test_calls_and_results_of_any_shape_are_read_as_far_as_they_go() -> None:
    asked = [1, {"id": 3}, {"id": "a", "function": []}, {"id": "b", "function": {"name": None, "arguments": {"x": 1}}}]
    back = [
        {"role": "tool", "tool_call_id": 3, "content": [{"type": "text", "text": "Error: no"}, "?"]},
        {"role": "user", "tool_call_id": "a", "content": "Error: not a tool's"},
        {"role": "tool", "tool_call_id": "a", "content": {"error": "?"}, "is_error": True},
        {"role": "tool", "tool_call_id": "b", "content": '{"error": null'},
        {"role": ["tool"]},
    ]
    log = MemoryLog()
    log.append_blocking(
        interaction("i0", at=0, messages=encode_messages(Messages(request=[], reply={"tool_calls": asked}))),
        interaction("no list", at=1, messages=encode_messages(Messages(request=[], reply={"tool_calls": "x"}))),
        interaction("i1", at=2, parent="i0", edge="extends", messages=encode_messages(Messages(back, {"role": "a"}))),
    )
    with Book(log) as book:
        calls = book.sql("select call, tool, is_json, is_error from tool_calls order by call").to_pylist()
        assert [tuple(call.values()) for call in calls] == [
            (1, "None", False, True),
            (2, "None", False, True),
            (3, "None", True, False),
        ]
        results = book.sql("select place, is_error from tool_results order by place").to_pylist()
        assert [tuple(result.values()) for result in results] == [(0, True), (2, True), (3, False)]


def test_a_long_conversation_is_placed_without_recursion() -> None:
    log = MemoryLog()
    log.append_blocking(
        *[interaction("n0")],
        *[interaction(f"n{n}", parent=f"n{n - 1}", edge="extends", n_output=1) for n in range(5000, 0, -1)],
    )
    rows = Book(log).sql("from trajectories").to_pylist()
    assert [(row["leaf_id"], row["n_interactions"], row["n_output"]) for row in rows] == [("n5000", 5001, 5003)]


def test_a_file_keeps_its_place_and_has_one_owner(tmp_path: Any) -> None:
    log = MemoryLog()
    log.append_blocking(event(EpisodeOpened(task_id="t"), episode_id="e"))
    views = Views(log, tmp_path / "views.duckdb")
    assert views.catch_up() == 1
    with pytest.raises(BookBusy, match="owned by this process"):
        Views(log, tmp_path / "views.duckdb")
    views.close()
    again = Views(log, tmp_path / "views.duckdb")
    assert again.catch_up() == 0
    assert again.cursor().execute("select count(*) from episodes").fetchone() == (1,)
    again.close()


def test_a_disk_that_is_full_for_the_tables_is_one_sentence(tmp_path: Path) -> None:
    """The limit on file size stands for the disk; it is set once the log is written, so the tables meet it."""
    code = (
        "import resource, signal, sys\n"
        "from rollbook.store import *\n"
        "opened = [Event(run_id='r', episode_id=f'e{i}', fact=EpisodeOpened(task_id='t')) for i in range(5000)]\n"
        "with open_book(sys.argv[1], writer='w') as book:\n"
        "    book.log.append_blocking(*opened)\n"
        "    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "    try: book.catch_up()\n"
        "    except LogWriteFailed as error: print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "book")], env=environment, capture_output=True, text=True
    )
    assert "tables of the book could not be written" in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_book_on_a_full_disk_is_read_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "book"
    with open_book(path, writer="w") as book:
        book.log.append_blocking(event(EpisodeOpened(task_id="t"), episode_id="e"))
        book.catch_up()
        book.log.append_blocking(event(EpisodeOpened(task_id="t"), episode_id="f"))
    before = (path / "views.duckdb").read_bytes()
    code = (
        "import resource, signal, sys\n"
        "from rollbook.store import *\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "with open_book(sys.argv[1]) as book: print(book.sql('from episodes').num_rows)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, str(path)], env=environment, capture_output=True, text=True)
    assert done.stdout == "2\n", done.stderr
    assert "has no room for the tables; they are computed in memory" in done.stderr
    assert (path / "views.duckdb").read_bytes() == before, "what is there is not thrown away"


def test_events_keep_their_order_when_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    log = MemoryLog()
    began = time.time_ns()
    for hours, fact in enumerate([EpisodeOpened(task_id="t"), RewardGiven(value=0.3), RewardGiven(value=0.7)]):
        monkeypatch.setattr(time, "time_ns", lambda now=began - hours * 3600 * 10**9: now)
        log.append_blocking(Event(run_id="r", episode_id="e", fact=fact))
    assert Book(log).sql("select reward from episodes").to_pylist() == [{"reward": 0.7}]
