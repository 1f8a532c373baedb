"""What a log takes can be read, verified and projected; what it refuses, it refuses by name and writes nothing of."""

import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.store import BadEvent, BatchRow, BatchTaken, DirectoryLog, Event, MemoryLog, RewardGiven, RunStarted
from rollbook.store.book import Book
from rollbook.store.canned import CANNED
from rollbook.store.events import (
    END_OF_TIME,
    BatchTrained,
    EpisodeClosed,
    EpisodeOpened,
    InteractionFailed,
    InteractionRecorded,
    Messages,
    PolicyPublished,
    TokensScored,
    encode_messages,
    from_batch,
    made_at,
    new_event_id,
)
from rollbook.store.rows import Row, admit, admit_rewards
from rollbook.store.verify import verify
from rollbook.store.views import Views
from store_histories import interaction


def _deep(n: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(n):
        found = {"in": found}
    return found


class Foreign(msgspec.Struct, frozen=True):
    """No fact of ours, under a name that is."""


Foreign.__name__ = "RunStarted"

# What a bug may put anywhere.
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 7, 2**31 - 1, 2**31, -(2**31) - 1, 2**63, 2**70, 0.5, -0.0, 1e308, 1e39),
    *(float("nan"), float("inf"), "", "a", "\ud800", "\0", "日本", "done", "extends", "nonsense", b"", b"a", b"\xff"),
    *(
        [],
        [1],
        ["a"],
        {},
        {"a": 1.0},
        {"a": float("nan")},
        {1: 2},
        {"a": "\ud800"},
        (),
        object(),
        _deep(3),
        _deep(2000),
    ),
    *(np.float64(1.5), np.int64(3), np.array([1], np.int32), np.array([1.5]), np.array([[1]]), np.array(["a"])),
    *(
        BatchRow(interaction_id="i", credit=1, advantage=float("nan")),
        [BatchRow(interaction_id="", credit=1, advantage=0)],
    ),
    *(np.array([2**40]), np.array([1e300]), np.array([None]), [[1], [2, 3]], bytes(16), "x" * 16, bytearray(16)),
    *(b"{}", b'{"request":[],"reply":{}}', b'{"request":[1],"reply":{}}', b'{"request":[],"reply":{},"kept":-1}'),
    *(
        b'{"request":[],"reply":{"content":1e999}}',
        bytearray(b'{"request":[],"reply":{}}'),
        END_OF_TIME,
        END_OF_TIME - 1,
    ),
]
plain = st.sampled_from(
    [None, True, 0, 1, -1, 2**31 - 1, 0.5, 1e308, "", "a", "\0", "日本", "done", {}, {"a": 0.5}, [], {1: 2}]
)
odd = st.sampled_from(ODD) | plain | plain
GOOD: dict[str, Any] = {
    "RunStarted": RunStarted(name="x"),
    "EpisodeOpened": EpisodeOpened(task_id="t"),
    "InteractionRecorded": InteractionRecorded(prompt_length=2),
    "RewardGiven": RewardGiven(value=1),
    "EpisodeClosed": EpisodeClosed(state="done"),
    "BatchTaken": BatchTaken(batch_id="b", step=0, version=0, rows=[]),
    "BatchTrained": BatchTrained(batch_id="b", step=0),
    "PolicyPublished": PolicyPublished(version=0, path="p"),
    "InteractionFailed": InteractionFailed(error="e", message="m", status=500),
    "TokensScored": TokensScored(),
}


@st.composite
def wild(draw: st.DrawFn) -> Any:
    """An event of any kind with one or two things in it that may be anything."""
    kind = draw(st.sampled_from(sorted(GOOD)))
    fact = GOOD[kind]
    if draw(st.booleans()):
        fact = msgspec.structs.replace(fact, **{draw(st.sampled_from(fact.__struct_fields__)): draw(odd)})
    event = msgspec.structs.replace(interaction(2, 2), fact=fact)
    if draw(st.booleans()):
        event = msgspec.structs.replace(event, **{draw(st.sampled_from(event.__struct_fields__)): draw(odd)})
    return event


ELSEWHERE = ("its parent", "than its parent's path", "of its parent's path")
"""Whether these hold, no log can know: a parent may be in another writer's."""


@settings(max_examples=60, deadline=None)
@given(history=st.lists(wild(), min_size=1, max_size=25))
def test_what_is_taken_can_be_read_and_what_is_refused_leaves_nothing(history: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "book"
        taken: list[Event] = []
        refusals: list[str] = []
        with closing(DirectoryLog(path, "w", live_bytes=None, sync=lambda fd: None)) as log:
            for event in history:
                try:
                    positions = log.append_blocking(event)
                except BadEvent as error:
                    refusals.append(str(error))
                    continue
                if positions == [len(taken)]:  # else the odd id of an event that is there
                    taken.append(event)
            found = [event for batch in log.read() for event in from_batch(batch)]
            assert [e.event_id for e in found] == [e.event_id for e in taken]
            assert [type(e.fact) for e in found] == [type(e.fact) for e in taken]
            with closing(Views(log)) as views:
                views.catch_up()
        problems = [p for p in verify(path).problems if not any(words in p for words in ELSEWHERE)]
        assert problems == []
        assert all(said and "\n" not in said for said in refusals)


NAN = float("nan")
NOT_KNOWN = BatchRow(interaction_id="i", credit=NAN, advantage=0)
REFUSED: dict[str, Any] = {
    "a bool as reward": ({"fact": RewardGiven(value=True)}, "no RewardGiven"),
    "a reward that is no number": ({"fact": RewardGiven(value=float("nan"))}, "value of .*finite number, got nan"),
    "an endless weight": ({"fact": RewardGiven(value=1, weight=float("inf"))}, "weight of .*must be a finite"),
    "no weight": ({"fact": RewardGiven(value=1, weight=None)}, "no RewardGiven.*weight"),  # type: ignore[arg-type]
    "a reward without a name": ({"fact": RewardGiven(value=1, name="")}, "needs a name"),
    "a span of an episode": ({"fact": RewardGiven(value=1, start=0, end=1)}, "needs an interaction_id"),
    "an unknown state": ({"fact": EpisodeClosed(state="won")}, "no EpisodeClosed.*'won'"),  # type: ignore[arg-type]
    "credit that is no number": (
        {"fact": BatchTaken(batch_id="b", step=0, version=0, rows=[NOT_KNOWN])},
        "no BatchTaken.*NaN and inf",
    ),
    "a number no column holds": ({"fact": EpisodeOpened(task_id="t", attempt=2**31)}, "no EpisodeOpened.*attempt"),
    "a time after time": ({"recorded_at": 2**63 - 1}, "before the year 10000; got 9223372036854775807"),
    "a time before time": ({"recorded_at": -1}, "microseconds since 1970"),
    "a time that is no number": ({"recorded_at": 1.5}, "recorded_at of an event must be int, got float"),
    "an id that is no text": ({"episode_id": 3}, "episode_id of an event must be str or None, got int"),
    "an empty id": ({"episode_id": ""}, "empty episode_id"),
    "a text as event_id": ({"event_id": "x" * 16}, "event_id must be 16 bytes"),
    "messages that are no JSON": ({"messages": b"hello"}, "messages are no JSON with request and reply"),
    "messages that are text": ({"messages": "{}"}, "messages of an event must be bytes or None, got str"),
    "somebody else's fact": ({"fact": Foreign()}, "unknown kind 'RunStarted'"),
    "entropies of some tokens": (
        {"fact": InteractionRecorded(prompt_length=0), "interaction_id": "i", "entropies": np.zeros(2, np.float32)},
        "0 output_ids but 2 entropies",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_reader_could_use_is_refused_by_name(case: str) -> None:
    fields, message = REFUSED[case]
    log = MemoryLog()
    event = msgspec.structs.replace(Event(run_id="r", episode_id="e", fact=RunStarted(name="x")), **fields)
    with pytest.raises(BadEvent, match=message):
        log.append_blocking(event)
    assert list(log.read()) == []
    with pytest.raises(BadEvent, match="expected an Event, got str"):
        log.append_blocking("an event")  # type: ignore[arg-type]


def test_a_metric_that_is_no_number_is_recorded_as_not_known() -> None:
    log = MemoryLog()
    log.append_blocking(
        Event(run_id="r", fact=BatchTrained(batch_id="b", step=0, metrics={"loss": float("nan"), "n": 1}))
    )
    [batch] = log.read()
    [event] = from_batch(batch)
    assert event.fact == BatchTrained(batch_id="b", step=0, metrics={"loss": None, "n": 1})


def test_every_view_answers_on_the_largest_values_that_are_taken() -> None:
    log = MemoryLog()
    first = interaction(2, 2, episode_id="e")
    for at in (0, END_OF_TIME - 1):
        for fact in (
            RunStarted(name="x"),
            EpisodeOpened(task_id="t", group_id="g", attempt=2**31 - 1, version=-(2**31)),
            RewardGiven(value=1e308, weight=1e308),
            RewardGiven(value=-1e308, weight=1e308),
            EpisodeClosed(state="done"),
        ):
            log.append_blocking(Event(run_id="run", episode_id="e", fact=fact, recorded_at=at))
        event = msgspec.structs.replace(first, recorded_at=at, interaction_id=f"i{at}", event_id=new_event_id())
        log.append_blocking(event)
        rows = [BatchRow(interaction_id=f"i{at}", credit=1e308, advantage=-1e308)]
        taken = BatchTaken(batch_id=f"b{at}", step=2**31 - 1, version=2**31 - 1, rows=rows)
        log.append_blocking(Event(run_id="run", fact=taken, recorded_at=at))
    with closing(Book(log)) as book:
        for question in CANNED:
            book.canned(question)


# ---- many rewards at once

some_text = st.sampled_from(["a", "", "日本", "\0", "ep_1"]) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=5
)
some_value = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, -0.0, 5e-324, 1e308, 1e16, 1e-5])
facts = st.builds(
    RewardGiven,
    value=st.sampled_from([0.0, 7.5]),
    name=some_text,
    weight=st.sampled_from([1.0, 0.5, float("inf")]),
    source=some_text,
    start=st.sampled_from([None, None, None, 0]),
    details=st.sampled_from([None, {}, {"expression": '"value":0.0', "n": 0.5}, {"a": float("nan")}, {1: "\ud800"}]),
)


def rewards(values: list[tuple[Any, Any, Any]], kind: pa.DataType | None = None) -> pa.Table:
    columns = list(zip(*values, strict=True)) or [()] * 3
    kinds = {"run_id": pa.string(), "episode_id": pa.string(), "value": kind or pa.float64()}
    return pa.table({n: pa.array(c, k) for (n, k), c in zip(kinds.items(), columns, strict=True)})


@settings(max_examples=150, deadline=None)
@given(
    fact=facts,
    values=st.lists(st.tuples(some_text, some_text, some_value), max_size=8),
)
def test_rewards_by_column_are_those_that_are_admitted_one_by_one(
    fact: RewardGiven, values: list[tuple[Any, Any, Any]]
) -> None:
    expected: list[Row] = []
    refused = False
    for run, episode, value in values:
        try:
            said = msgspec.structs.replace(fact, value=value)
            expected.append(admit(Event(run_id=run, episode_id=episode, fact=said)))
        except BadEvent:
            refused = True
    if refused:
        with pytest.raises(BadEvent):
            admit_rewards(rewards(values), fact)
        return
    found = admit_rewards(rewards(values), fact)
    assert [(row[0][8:], *row[2:]) for row in found] == [(row[0][8:], *row[2:]) for row in expected]
    assert len({row[1] for row in found}) == len(found)
    log = MemoryLog()
    assert log.append_rows_blocking(found) == list(range(len(values)))
    assert log.append_rows_blocking(found) == list(range(len(values)))
    events = [event for batch in log.read() for event in from_batch(batch)]
    assert [e.event_id for e in events] == [row[1] for row in found]
    now = time.time()
    for event in events:
        assert made_at("x_" + event.event_id.hex()) == pytest.approx(now, abs=60)
        assert event.recorded_at / 1e6 == pytest.approx(now, abs=60)


NO_TEXT = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, 1], np.int32)), pa.py_buffer(b"\xff"))
NO_REWARDS: dict[str, tuple[pa.Table, str]] = {
    "text that is none": (rewards([("r", "e", 1.0)]).set_column(1, "episode_id", NO_TEXT), "UTF8"),
    "no column of values": (rewards([("r", "e", 1.0)]).drop_columns(["value"]), '"value" does not exist'),
    "bools as values": (rewards([("r", "e", True)], pa.bool_()), "types string, string, bool"),
    "texts as values": (rewards([("r", "e", "1")], pa.string()), "types string, string, string"),
    "one without a run": (rewards([("r", "e", 1.0), (None, "e", 1.0)]), "'run_id' with null"),
    "one without an episode": (rewards([("r", None, 1.0), ("r", "e", 1.0)]), "'episode_id' with null"),
    "one without a value": (rewards([("r", "e", 1.0), ("r", "e", None)]), "'value' with null"),
    "one that is no number": (rewards([("r", "e", 1.0), ("r", "e", float("nan"))]), "value .*finite number"),
    "an endless one": (rewards([("r", "e", float("-inf")), ("r", "e", 1.0)]), "value .*finite number"),
    "an empty episode": (rewards([("r", "e", 1.0), ("r", "", 1.0)]), "empty episode_id"),
    "an empty run": (rewards([("", "e", 1.0), ("r", "e", 1.0)]), "needs a run_id"),
}


@pytest.mark.parametrize("case", NO_REWARDS)
def test_rewards_that_no_reader_could_use_are_refused_whole(case: str) -> None:
    table, message = NO_REWARDS[case]
    with pytest.raises(BadEvent, match=message):
        admit_rewards(table, RewardGiven(value=0))


# ---- an id that is there


def test_the_same_id_with_other_content_is_refused_and_the_first_stays(tmp_path: Path) -> None:
    path = tmp_path / "book"
    log = DirectoryLog(path, "w", roll_bytes=1, live_bytes=None)
    first = Event(run_id="r", episode_id="e", fact=RewardGiven(value=1), recorded_at=5)
    other = msgspec.structs.replace(first, fact=RewardGiven(value=2))
    elsewhere = msgspec.structs.replace(first, episode_id="f")
    assert log.append_blocking(first, first) == [0, 0]
    fresh = interaction()
    for again in (
        other,
        elsewhere,
        msgspec.structs.replace(fresh, event_id=first.event_id),
    ):
        with pytest.raises(BadEvent, match=r"is already at position 0, and with another .*under an id of its own"):
            log.append_blocking(again, interaction())
        with pytest.raises(BadEvent, match="is already at position 1"):
            log.append_blocking(fresh, msgspec.structs.replace(fresh, run_id="s"))
    # The same fact told again, at another time or in other words, is the same.
    later = msgspec.structs.replace(first, fact=RewardGiven(value=1.0), recorded_at=9)
    assert log.append_blocking(later) == [0]
    assert log.append_blocking(fresh) == [1]
    spaced = b'{"reply": {"content": "hello"}, "request": [{"content": "hello", "role": "user"}]}'
    assert log.append_blocking(msgspec.structs.replace(fresh, messages=spaced)) == [1]
    assert [e.event_id for batch in log.read() for e in from_batch(batch)] == [first.event_id, fresh.event_id]
    log.seal()
    log.close()
    log = DirectoryLog(path, "w")
    assert log.append_blocking(first, fresh) == [0, 1]
    with pytest.raises(BadEvent, match="is already at position 1, and with another logprobs"):
        log.append_blocking(msgspec.structs.replace(fresh, logprobs=np.zeros(50, np.float32)))
    log.close()
    memory = MemoryLog()
    memory.append_blocking(first)
    with pytest.raises(BadEvent, match="is already at position 0, and with another payload"):
        memory.append_blocking(other)
    assert memory.append_blocking(encoded()) == [1]


def encoded() -> Event:
    return msgspec.structs.replace(interaction(), messages=encode_messages(Messages(request=[], reply={})))
