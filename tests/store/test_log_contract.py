"""What every log promises. A new implementation adds one line to `LOGS` and passes all of it."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollbook.store import SCHEMA, BadEvent, DirectoryLog, Event, Log, LogClosed, MemoryLog, RunStarted
from rollbook.store.events import InteractionRecorded, from_batch
from rollbook.store.http import HttpLog
from rollbook.store.log import advance
from rollbook.store.rows import admit
from store_histories import events, interaction, same
from store_served import KEY, Server

Books = Callable[[], Callable[[str], Log]]


def memory_books(tmp_path: Path) -> Callable[[str], Log]:
    book = MemoryLog("first")
    return lambda writer: book if writer == "first" else book.sibling(writer)


def directory_books(tmp_path: Path) -> Callable[[str], Log]:
    number = len(list(tmp_path.iterdir()))
    return lambda writer: DirectoryLog(tmp_path / f"book{number}", writer)


def sealing_books(tmp_path: Path) -> Callable[[str], Log]:
    """Each frame is a segment, sealed in the background as soon as the next is begun."""
    number = len(list(tmp_path.iterdir()))
    return lambda writer: DirectoryLog(tmp_path / f"book{number}", writer, roll_bytes=1, live_bytes=0)


def lake_books(tmp_path: Path) -> Callable[[str], Log]:
    """A lake of its own in the PostgreSQL server that ROLLBOOK_TEST_LAKE names."""
    from lakes import new_lake
    from rollbook.store.lake import LakeLog

    book = new_lake(os.environ["ROLLBOOK_TEST_LAKE"], tmp_path)
    return lambda writer: LakeLog(book, writer)


LOGS = {"memory": memory_books, "directory": directory_books, "sealing": sealing_books, "http": directory_books}
if "ROLLBOOK_TEST_LAKE" in os.environ:  # `make test-lake`: in an environment of its own
    LOGS = {"lake": lake_books}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(params=LOGS)
def new_book(request: pytest.FixtureRequest, tmp_path: Path, server: Server) -> Iterator[Books]:
    """Makes empty books: a function from a writer's name to its log."""
    opened: list[Log] = []

    def new() -> Callable[[str], Log]:
        open_as = LOGS[request.param](tmp_path)

        def open_log(writer: str) -> Log:
            opened.append(open_as(writer))
            if request.param == "http":
                opened.append(HttpLog(server.add(opened[-1]), KEY))
            return opened[-1]

        return open_log

    yield new
    for log in reversed(opened):
        log.close()


@pytest.fixture
def log(new_book: Books) -> Log:
    return new_book()("first")


def rows(log: Log, cursor: Any = None) -> list[tuple[str, int, Event]]:
    found = []
    for batch in log.read(cursor or {}):
        assert batch.schema.equals(SCHEMA)
        writers, positions = batch.column("writer").to_pylist(), batch.column("position").to_pylist()
        found += list(zip(writers, positions, from_batch(batch), strict=True))
    return found


many = st.lists(st.lists(events(), min_size=1, max_size=4), min_size=1, max_size=6)
with_books = settings(
    max_examples=5 if "lake" in LOGS else 15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@with_books
@given(history=many)
def test_what_is_appended_is_read_back_bit_for_bit(new_book: Books, history: list[list[Event]]) -> None:
    log = new_book()("first")
    expected = 0
    for group in history:
        assert log.append_blocking(*group) == list(range(expected, expected + len(group)))
        expected += len(group)
    found = rows(log)
    assert [(w, p) for w, p, _ in found] == [("first", i) for i in range(expected)]
    assert all(same(a, b) for (_, _, a), b in zip(found, [e for group in history for e in group], strict=True))
    log.close()


@with_books
@given(history=many, data=st.data())
def test_duplicate_append_changes_nothing(new_book: Books, history: list[list[Event]], data: st.DataObject) -> None:
    log = new_book()("first")
    flat = [e for group in history for e in group]
    where = {e.event_id: log.append_blocking(e)[0] for e in flat}
    again = data.draw(st.lists(st.sampled_from(flat), max_size=6))
    assert log.append_blocking(*again) == [where[e.event_id] for e in again]
    assert [e.event_id for _, _, e in rows(log)] == [e.event_id for e in flat]
    log.close()


def test_one_append_may_hold_an_event_twice(log: Log) -> None:
    a, b = interaction(), interaction()
    assert log.append_blocking(a, b, a, b) == [0, 1, 0, 1]
    assert [e.event_id for _, _, e in rows(log)] == [a.event_id, b.event_id]


def test_events_that_are_admitted_already_are_appended_as_any(log: Log) -> None:
    a, b = interaction(), interaction()
    assert log.append_rows_blocking([]) == []
    assert log.append_rows_blocking([admit(a), admit(b), admit(a)]) == [0, 1, 0]
    assert log.append_blocking(b, a) == [1, 0]
    assert all(same(e, once) for (_, _, e), once in zip(rows(log), [a, b], strict=True))
    other = msgspec.structs.replace(a, run_id="another")
    with pytest.raises(BadEvent, match="already at position 0"):
        log.append_rows_blocking([admit(interaction()), admit(other)])
    log.close()
    with pytest.raises(LogClosed):
        log.append_rows_blocking([admit(interaction())])


@with_books
@given(history=many, data=st.data())
def test_a_cursor_continues_where_reading_stopped(
    new_book: Books, history: list[list[Event]], data: st.DataObject
) -> None:
    open_log = new_book()
    logs = [open_log(name) for name in ("first", "second", "third")]
    for group in history:
        data.draw(st.sampled_from(logs)).append_blocking(*group)
    everything = rows(logs[0])
    cursor: dict[str, int] = {}
    found = []
    for batch in logs[0].read():
        if data.draw(st.booleans()):
            break
        cursor = advance(cursor, batch)
        found += [(w.as_py(), p.as_py()) for w, p in zip(batch["writer"], batch["position"], strict=True)]
    found += [(w, p) for w, p, _ in rows(logs[1], cursor)]
    assert sorted(found) == sorted((w, p) for w, p, _ in everything)
    assert len(set(found)) == len(found)
    middle = {w: p for w, p, _ in everything[: len(everything) // 2]}
    assert [(w, p) for w, p, _ in rows(logs[0], middle)] == [(w, p) for w, p, _ in everything if p >= middle.get(w, 0)]
    for log in logs:
        log.close()


def test_order_holds_within_each_writer_and_all_writers_are_read(new_book: Books) -> None:
    open_log = new_book()
    first, second = open_log("first"), open_log("second")
    expected: dict[str, list[bytes]] = {"first": [], "second": []}
    for i in range(20):
        log = (first, second)[i % 3 == 0]
        event = interaction()
        log.append_blocking(event)
        expected[str(log.writer)].append(event.event_id)
    for reader in (first, second):
        found = rows(reader)
        assert {w: [e.event_id for v, _, e in found if v == w] for w in expected} == expected


@with_books
@given(history=many, data=st.data())
def test_gather_gives_the_rows_asked_for_in_that_order(
    new_book: Books, history: list[list[Event]], data: st.DataObject
) -> None:
    open_log = new_book()
    logs = [open_log(name) for name in ("first", "second")]
    for group in history:
        data.draw(st.sampled_from(logs)).append_blocking(*group)
    where = {(w, p): e for w, p, e in rows(logs[0])}
    asked = data.draw(st.lists(st.sampled_from(sorted(where)), max_size=10))
    table = logs[1].gather(asked)
    assert table.schema.equals(SCHEMA)
    assert list(zip(table["writer"].to_pylist(), table["position"].to_pylist(), strict=True)) == asked
    found = [e for batch in table.to_batches() for e in from_batch(batch)]
    assert all(same(e, where[key]) for e, key in zip(found, asked, strict=True))
    for log in logs:
        log.close()


def test_the_places_of_tokens_are_where_they_are(log: Log) -> None:
    history = [interaction() for _ in range(8)]
    history[2], history[4] = (Event(run_id="r", fact=RunStarted(name="x")) for _ in range(2))  # these have none
    log.append_blocking(*history[:3])
    log.append_blocking(*history[3:7])
    log.append_blocking(history[7])
    for position in range(8):
        found = log.token_places("first", position)
        assert found.first <= position < found.first + len(found.places)
        assert min(found.memory_bytes, found.mapped_bytes) >= 0
        for event, (*addresses, n_prompt, n_output) in zip(history[found.first :], found.places.tolist(), strict=False):
            lists = (event.prompt_ids, event.output_ids, event.logprobs, event.versions)
            for address, n, values in zip(addresses, (n_prompt, *[n_output] * 3), lists, strict=True):
                there = pa.foreign_buffer(address, 4 * n).to_pybytes() if n else b""
                assert there == (b"" if values is None else values.tobytes())
    with pytest.raises(KeyError, match="position 8 of writer 'first'"):
        log.token_places("first", 8)


def test_what_a_caller_does_with_its_arrays_afterwards_changes_nothing(log: Log) -> None:
    ids, logprobs = np.arange(3, dtype=np.int32), np.full(3, -1, np.float32)
    fact = InteractionRecorded(prompt_length=3)
    event = Event(
        run_id="r",
        episode_id="e",
        interaction_id="i",
        fact=fact,
        prompt_ids=ids,
        output_ids=ids[::-1],
        logprobs=logprobs,
        versions=ids,
    )
    log.append_blocking(event)
    ids[:], logprobs[:] = 9, -9
    [batch] = log.read()
    [kept] = from_batch(batch)
    for name, expected in (("prompt_ids", [0, 1, 2]), ("output_ids", [2, 1, 0]), ("versions", [0, 1, 2])):
        assert getattr(kept, name).tolist() == expected, name
    assert kept.logprobs is not None
    assert kept.logprobs.tolist() == [-1, -1, -1]


def test_long_batches_are_read_whole(log: Log) -> None:
    """Over a wire they come in pieces of any size."""
    history = [interaction(4001, 3999, "long " * 5000) for _ in range(40)]
    for at in range(0, 40, 20):
        log.append_blocking(*history[at : at + 20])
    assert all(same(found, event) for (_, _, found), event in zip(rows(log), history, strict=True))


def test_gather_names_what_is_not_there(log: Log) -> None:
    log.append_blocking(interaction())
    for pointer in (("first", 1), ("first", -1), ("nobody", 0)):
        with pytest.raises(KeyError, match=f"position {pointer[1]} of writer '{pointer[0]}'"):
            log.gather([("first", 0), pointer])


def test_a_bad_event_is_refused_and_nothing_of_its_append_is_written(log: Log) -> None:
    good = interaction()
    short = Event(
        run_id="run",
        episode_id="ep",
        interaction_id="i",
        fact=interaction(3, 0).fact,
        prompt_ids=np.arange(3, dtype=np.int32),
        output_ids=np.arange(5, dtype=np.int32),
        logprobs=np.zeros(4, np.float32),
        versions=np.zeros(5, np.int32),
    )
    with pytest.raises(BadEvent, match="5 output_ids but 4 logprobs"):
        log.append_blocking(good, short)
    assert rows(log) == []
    assert log.append_blocking(good) == [0]


@pytest.mark.parametrize(
    "bad",
    [
        Event(run_id="run", fact=RunStarted(name="x", config={"not json": object()})),
        Event(run_id="run", fact=RunStarted(name="x"), messages=b"\xff not utf-8"),
        Event(run_id="run", fact=RunStarted(name="\ud800")),
        Event(run_id=3, fact=RunStarted(name="x")),  # type: ignore[arg-type]
        Event(run_id="run", fact=RunStarted(name="x"), recorded_at=2**63),
        Event(run_id="run", fact=RunStarted(name="x"), prompt_ids=np.array([0.5, 1.5])),  # type: ignore[arg-type]
        Event(run_id="run", fact=RunStarted(name="x"), prompt_ids=np.array([2**31], np.int64)),  # type: ignore[arg-type]
    ],
    ids=["no json", "no utf-8", "lone surrogate", "no text", "no time", "fractions as ids", "ids too big"],
)
@pytest.mark.anyio
async def test_an_event_that_cannot_be_stored_is_refused_alone(log: Log, bad: Event) -> None:
    good = [interaction() for _ in range(8)]
    refused: list[BadEvent] = []

    async def append(event: Event) -> None:
        try:
            await log.append(event)
        except BadEvent as error:
            refused.append(error)

    async with anyio.create_task_group() as tasks:
        for event in [*good[:4], bad, *good[4:]]:
            tasks.start_soon(append, event)
    assert len(refused) == 1
    assert {e.event_id for _, _, e in rows(log)} == {e.event_id for e in good}


@pytest.mark.anyio
async def test_concurrent_tasks_get_distinct_positions_without_gaps(log: Log) -> None:
    got: dict[bytes, int] = {}

    async def task() -> None:
        for _ in range(5):
            a, b = interaction(), interaction()
            got[a.event_id], got[b.event_id] = await log.append(a, b)
            assert got[b.event_id] == got[a.event_id] + 1

    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(task)
    assert sorted(got.values()) == list(range(200))
    assert {e.event_id: p for _, p, e in rows(log)} == got


def test_threads_may_append_together(log: Log) -> None:
    got: list[int] = []
    threads = [
        threading.Thread(target=lambda: got.extend(log.append_blocking(interaction())[0] for _ in range(10)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(40))


@pytest.mark.anyio
async def test_a_cancelled_caller_does_not_undo_the_append(log: Log) -> None:
    event = interaction()
    task = asyncio.create_task(log.append(event))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await log.append(event) == [0]
    assert len(rows(log)) == 1


@pytest.mark.anyio
async def test_follow_gives_what_was_there_and_what_comes(new_book: Books) -> None:
    open_log = new_book()
    first, second = open_log("first"), open_log("second")
    early = [interaction() for _ in range(3)]
    await first.append(*early)
    late = [interaction() for _ in range(10)]
    found: list[Event] = []

    async def write() -> None:
        for i, event in enumerate(late):
            await (first, second)[i % 2].append(event)
            await anyio.sleep(0.001)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        async for batch in first.follow({"first": 1}):
            found += from_batch(batch)
            if len(found) == 12:
                break
    assert {e.event_id for e in found} == {e.event_id for e in early[1:] + late}


@pytest.mark.anyio
async def test_follow_ends_when_the_log_is_closed_after_giving_everything(log: Log) -> None:
    found: list[pa.RecordBatch] = []

    async def read() -> None:
        async for batch in log.follow():
            found.append(batch)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await log.append(interaction())
        await log.append(interaction())
        log.close()
    assert sum(b.num_rows for b in found) == 2


def test_a_closed_log_takes_nothing_and_closes_twice(log: Log) -> None:
    log.append_blocking(interaction())
    log.close()
    log.close()
    with pytest.raises(LogClosed, match="open the book again"):
        log.append_blocking(interaction())


def test_appending_nothing_is_nothing(log: Log) -> None:
    assert log.append_blocking() == []
    assert rows(log) == []
