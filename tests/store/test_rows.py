"""Events laid out as Arrow by hand: any Arrow reads them, and they are what Arrow itself would build."""

import os
import time
import zlib
from pathlib import Path

import anyio
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.store import SCHEMA, DirectoryLog, Event, frames, rows
from rollbook.store.events import SCHEMA_VERSION, encode_fact, from_batch, made_at, new_id
from store_histories import events, interaction, same

LISTS = ("prompt_ids", "output_ids", "logprobs", "versions", "entropies")


def built_by_arrow(history: list[Event], first: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [
            {
                "position": first + i,
                "event_id": e.event_id,
                "writer": "wé",
                "kind": e.kind,
                "schema_version": SCHEMA_VERSION,
                "run_id": e.run_id,
                "episode_id": e.episode_id,
                "interaction_id": e.interaction_id,
                "recorded_at": e.recorded_at,
                "payload": encode_fact(e.fact).decode(),
                "messages": None if e.messages is None else e.messages.decode(),
                **{n: None if getattr(e, n) is None else getattr(e, n).tolist() for n in LISTS},
            }
            for i, e in enumerate(history)
        ],
        SCHEMA,
    )


@settings(max_examples=80, deadline=None)
@given(history=st.lists(events(), min_size=1, max_size=20), first=st.integers(0, 2**62))
def test_rows_are_the_batch_that_arrow_would_build(history: list[Event], first: int) -> None:
    data = b"".join(rows.message([rows.encode(e) for e in history], "wé", first))
    assert len(data) % frames.ALIGNMENT == 0
    batch = rows.decode(data)
    batch.validate(full=True)
    whole = batch.drop_columns(["logprobs", "entropies"])  # NaN equals nothing; `same` compares those
    assert whole.equals(built_by_arrow(history, first).drop_columns(["logprobs", "entropies"]))
    assert all(same(a, b) for a, b in zip(from_batch(batch), history, strict=True))
    held = pa.py_buffer(data)
    places, expected = rows.token_places(held, len(history)), rows.token_places_of(rows.decode(held))
    assert places is not None
    assert places[:, 4:].tolist() == expected[:, 4:].tolist()
    for i, name in enumerate(rows.TOKENS):
        is_there = pa.compute.fill_null(pa.compute.list_value_length(batch.column(name)), 0).to_numpy() > 0
        assert places[is_there, i].tolist() == expected[is_there, i].tolist()
    with pa.ipc.open_stream(SCHEMA.serialize().to_pybytes() + data) as stream:  # as another program would read it
        assert stream.read_next_batch().drop_columns(["logprobs", "entropies"]).equals(whole)


def test_a_message_that_another_arrow_laid_out_has_no_places_of_ours() -> None:
    history = [interaction() for _ in range(3)]
    theirs = built_by_arrow(history, 0).serialize()
    assert rows.token_places(theirs, 3) is None
    cut = rows.token_places(pa.py_buffer(b""), 0)
    assert cut is None


def test_the_fast_checksum_is_that_of_zlib() -> None:
    for size in (0, 1, 63, 64, 1000, 100_003):
        data = os.urandom(size)
        assert frames.crc32(data, 7) == zlib.crc32(data, 7)


@pytest.mark.parametrize("n", [1, 150, 2500])
def test_long_values_and_many_events_are_written_whole(tmp_path: Path, n: int) -> None:
    """More pieces than one call may write."""
    log = DirectoryLog(tmp_path / "book", "w", sync=lambda fd: None)
    history = [interaction(300, 300, "x" * 2000) for _ in range(n)]
    assert log.append_blocking(*history) == list(range(n))
    log.close()
    found = [e for batch in DirectoryLog(tmp_path / "book").read() for e in from_batch(batch)]
    assert len(found) == n
    assert all(same(a, b) for a, b in zip(found, history, strict=True))


@pytest.mark.anyio
async def test_much_that_waits_is_written_in_parts_and_all_of_it_is_acknowledged(tmp_path: Path) -> None:
    """So that one part is written while the tasks of the other come back."""
    log = DirectoryLog(tmp_path / "book", "w")
    got: list[int] = []

    async def task() -> None:
        for _ in range(4):
            got.extend(await log.append(interaction(2000, 2000, "y" * 4000)))

    async with anyio.create_task_group() as tasks:
        for _ in range(64):
            tasks.start_soon(task)
    sizes = [batch.num_rows for batch in log.read()]
    log.close()
    assert sorted(got) == list(range(256))
    assert sum(sizes) == 256
    assert max(sizes) <= 40


def test_an_id_says_when_it_was_made() -> None:
    before = time.time()
    made = made_at(new_id("chatcmpl"))
    assert made is not None
    assert before - 0.001 <= made <= time.time()
    assert [made_at(id_) for id_ in ("", "mine", "c_" + "7" * 31, "c_" + "z" * 12 + "7" + "0" * 19)] == [None] * 4
