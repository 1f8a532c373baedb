"""Sealing changes how events lie on the disk and nothing else."""

import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollbook.store import DirectoryLog, Event, LogClosed, LogCorrupt, LogWriteFailed
from rollbook.store.events import SCHEMA, from_batch
from store_histories import events, interaction, same
from store_load import numbered


def no_sync(fd: int) -> None:
    """Power cuts are not what is tested here."""


def read_all(log: DirectoryLog) -> list[tuple[int, Event]]:
    return [
        (position, event)
        for batch in log.read()
        for position, event in zip(batch["position"].to_pylist(), from_batch(batch), strict=True)
    ]


def files(path: Path, kind: str) -> list[Path]:
    return sorted(p for p in (path / kind / "w").iterdir() if p.suffix in (".log", ".parquet"))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=st.lists(st.lists(events(), min_size=1, max_size=3), min_size=1, max_size=5), data=st.data())
def test_sealed_events_are_the_same_bit_for_bit(
    tmp_path: Path, history: list[list[Event]], data: st.DataObject
) -> None:
    path = tmp_path / str(len(list(tmp_path.iterdir())))
    log = DirectoryLog(path, "w", live_bytes=None, sync=no_sync)
    for group in history:
        log.append_blocking(*group)
        if data.draw(st.booleans()):
            log.seal()
    flat = [e for group in history for e in group]
    for reader in (log, DirectoryLog(path)):
        found = read_all(reader)
        assert [p for p, _ in found] == list(range(len(flat)))
        assert all(same(a, b) for (_, a), b in zip(found, flat, strict=True))
        order = data.draw(st.permutations(range(len(flat))))
        table = reader.gather([("w", i) for i in order])
        gathered = [e for batch in table.to_batches() for e in from_batch(batch)]
        assert all(same(a, flat[i]) for a, i in zip(gathered, order, strict=True))
    assert [log.append_blocking(e) for e in flat] == [[i] for i in range(len(flat))]
    log.close()


def test_segments_beyond_the_live_ones_are_sealed_while_appends_go_on(tmp_path: Path) -> None:
    path = tmp_path / "book"
    log = DirectoryLog(path, "w", roll_bytes=50_000, live_bytes=120_000, sync=no_sync)
    for n in range(400):
        log.append_blocking(numbered(1, n))
    live = 250_000
    while live >= 250_000:
        with suppress(FileNotFoundError):  # one that is sealed while we look
            live = sum(p.stat().st_size for p in files(path, "log"))
        threading.Event().wait(0.02)
    assert live > 100_000
    assert len(files(path, "sealed")) > 5
    assert [(p, e.recorded_at) for p, e in read_all(log)] == [(n, n) for n in range(400)]
    assert [(p, e.recorded_at) for p, e in read_all(DirectoryLog(path))] == [(n, n) for n in range(400)]
    log.close()
    log = DirectoryLog(path, "w")
    assert log.append_blocking(numbered(1, 0), numbered(1, 200), numbered(1, 400)) == [0, 200, 400]
    log.close()


@pytest.mark.anyio
async def test_sealing_takes_in_what_was_appended_before_it_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "book"
    is_slow = threading.Event()

    def sync(fd: int) -> None:
        is_slow.wait(0.02)  # so that appends and the order to seal queue up together

    log = DirectoryLog(path, "w", live_bytes=None, sync=sync)
    async with anyio.create_task_group() as tasks:
        for n in range(20):
            tasks.start_soon(log.append, numbered(1, n))
        await anyio.sleep(0.005)
        tasks.start_soon(anyio.to_thread.run_sync, log.seal)
    assert [p for p, _ in read_all(log)] == list(range(20))
    assert [p.name for p in files(path, "log")] == [f"{20:020d}.log"]
    log.close()


@pytest.fixture
def sealed(tmp_path: Path) -> Iterator[tuple[Path, DirectoryLog, list[Event]]]:
    """A book whose 30 events are sealed in three segments."""
    path = tmp_path / "book"
    log = DirectoryLog(path, "w", live_bytes=None, sync=no_sync)
    events = [numbered(5, n) for n in range(30)]
    for i in range(0, 30, 10):
        log.append_blocking(*events[i : i + 10])
        log.seal()
    yield path, log, events
    log.close()


Fixture = tuple[Path, DirectoryLog, list[Event]]


def test_any_tool_reads_a_sealed_segment(sealed: Fixture) -> None:
    path, _, events = sealed
    names = [p.name for p in files(path, "sealed")]
    assert names == [f"{i:020d}-{i + 10:020d}.parquet" for i in (0, 10, 20)]
    assert [p.name for p in files(path, "log")] == [f"{30:020d}.log"]
    table = pq.read_table(files(path, "sealed")[1])
    assert table["output_ids"].to_pylist() == [e.output_ids.tolist() for e in events[10:20] if e.output_ids is not None]
    column = pq.ParquetFile(files(path, "sealed")[0]).metadata.row_group(0).column
    by_name = {column(i).path_in_schema: column(i) for i in range(len(SCHEMA))}
    assert "BYTE_STREAM_SPLIT" in by_name["logprobs.list.element"].encodings
    assert "RLE_DICTIONARY" not in by_name["output_ids.list.element"].encodings
    assert {c.compression for c in by_name.values()} == {"ZSTD"}


def test_a_reader_survives_that_its_segment_is_sealed_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "book"
    log = DirectoryLog(path, "w", roll_bytes=30_000, live_bytes=None, sync=no_sync)
    for n in range(60):
        log.append_blocking(numbered(2, n))
    reader = DirectoryLog(path)
    batches = reader.read()
    begun = [next(batches) for _ in range(3)]
    held = reader.gather([("w", n) for n in range(60)])
    log.seal()
    for n in range(60, 90):
        log.append_blocking(numbered(2, n))
    log.seal()
    log.append_blocking(numbered(2, 90))
    assert [p.name for p in files(path, "log")] == [f"{90:020d}.log"]
    rest = [*begun, *batches]
    assert [p for b in rest for p in b["position"].to_pylist()] == list(range(60))
    assert [e.recorded_at for b in held.to_batches() for e in from_batch(b)] == list(range(60))
    assert [p for p, _ in read_all(reader)] == list(range(91))
    assert reader.gather([("w", 75), ("w", 3), ("w", 90)])["position"].to_pylist() == [75, 3, 90]
    log.close()


@pytest.mark.anyio
async def test_follow_crosses_from_live_to_sealed_segments(tmp_path: Path) -> None:
    path = tmp_path / "book"
    log = DirectoryLog(path, "w", roll_bytes=20_000, live_bytes=0, sync=no_sync)
    reader = DirectoryLog(path)
    found: list[int] = []

    async def read() -> None:
        async for batch in reader.follow():
            found.extend(batch["position"].to_pylist())
            if len(found) == 200:
                return

    with anyio.fail_after(600):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            for n in range(200):
                await log.append(numbered(3, n))
    assert found == list(range(200))
    log.close()


def test_other_processes_read_right_while_a_writer_seals(tmp_path: Path) -> None:
    """Readers list, read and gather again and again while segments are sealed and removed under them."""
    path = tmp_path / "book"
    log = DirectoryLog(path, "w", roll_bytes=20_000, live_bytes=0, sync=no_sync)
    log.append_blocking(numbered(4, 0))
    code = (
        "import sys\n"
        "from rollbook.store import DirectoryLog\n"
        "from rollbook.store.events import from_batch\n"
        "held = DirectoryLog(sys.argv[1])\n"
        "n = 0\n"
        "while n < 120:\n"
        "    for log in (held, DirectoryLog(sys.argv[1])):\n"
        "        found = [e.recorded_at for b in log.read() for e in from_batch(b)]\n"
        "        assert found == list(range(len(found))) and len(found) >= n, (n, found)\n"
        "        n = len(found)\n"
        "        some = [('w', i) for i in range(0, n, 7)]\n"
        "        assert log.gather(some)['recorded_at'].cast('int64').to_pylist() == [i for _, i in some]\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    readers = [subprocess.Popen([sys.executable, "-c", code, str(path)], env=env) for _ in range(2)]
    for n in range(1, 120):
        log.append_blocking(numbered(4, n))
        threading.Event().wait(0.005)
    assert [reader.wait(800) for reader in readers] == [0, 0]
    log.close()


def test_a_kill_between_renaming_and_removing_leaves_a_book_that_reads_right(sealed: Fixture, tmp_path: Path) -> None:
    path, log, events = sealed
    other = DirectoryLog(tmp_path / "other", "w", sync=no_sync)
    other.append_blocking(*events[:10])
    other.close()
    log.close()
    (tmp_path / "other" / "log" / "w" / f"{0:020d}.log").rename(path / "log" / "w" / f"{0:020d}.log")
    scratch = path / "sealed" / "w" / f".{0:020d}-{10:020d}.parquet.part"
    scratch.write_bytes(b"half written")
    assert [p for p, _ in read_all(DirectoryLog(path))] == list(range(30))
    log = DirectoryLog(path, "w", live_bytes=0)
    log.seal()
    assert [p.name for p in files(path, "log")] == [f"{30:020d}.log"]
    assert not scratch.exists()
    assert [p for p, _ in read_all(log)] == list(range(30))
    log.close()


def test_damage_in_a_sealed_segment_is_named_and_never_read_as_data(sealed: Fixture) -> None:
    path, log, events = sealed
    file = files(path, "sealed")[1]
    whole = file.read_bytes()
    rng = random.Random(0)
    n_named = 0
    for at in [len(whole) - 2, *(rng.randrange(len(whole)) for _ in range(60))]:
        file.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
        try:
            found = read_all(DirectoryLog(path))
        except LogCorrupt as error:
            n_named += bool(re.search(r"00010-.*parquet: not a readable sealed segment .*restore", str(error)))
        else:  # a byte of the footer that says nothing about data
            assert all(same(a, b) for (_, a), b in zip(found, events, strict=True))
    assert n_named > 30
    assert log.gather([("w", 0), ("w", 29)]).num_rows == 2


def test_damage_is_not_sealed_over(tmp_path: Path) -> None:
    path = tmp_path / "book"
    log = DirectoryLog(path, "w", live_bytes=None, sync=no_sync)
    log.append_blocking(*(interaction() for _ in range(5)))
    log.close()
    (segment,) = files(path, "log")
    log = DirectoryLog(path, "w", roll_bytes=1, live_bytes=None, sync=no_sync)
    log.append_blocking(interaction())
    log.close()
    log = DirectoryLog(path, "w", live_bytes=None)
    with open(segment, "r+b") as file:
        file.seek(2000)
        file.write(b"damage")
    with pytest.raises(LogCorrupt, match="bad checksum"):
        log.seal()
    assert segment.exists()
    log.close()


def test_a_disk_that_refuses_sealing_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "book"
    log = DirectoryLog(path, "w", live_bytes=None, sync=no_sync)
    log.append_blocking(*(interaction() for _ in range(5)))
    (path / "sealed").write_text("a file where the folder should be")
    with pytest.raises(LogWriteFailed, match=r"could not seal .*nothing is lost"):
        log.seal()
    (path / "sealed").unlink()
    log.append_blocking(interaction())
    log.seal()
    assert [p for p, _ in read_all(log)] == list(range(6))
    log.close()
    with pytest.raises(LogClosed):
        log.seal()


def test_sealed_interactions_are_small(tmp_path: Path) -> None:
    """The layout's own cost: what is random can't be made smaller than it is."""
    path = tmp_path / "book"
    log = DirectoryLog(path, "w", live_bytes=None, sync=no_sync)
    rng = np.random.default_rng(0)
    for _ in range(20):
        log.append_blocking(*(interaction(50, 50, rng.bytes(8).hex()) for _ in range(100)))
    log.seal()
    size = sum(p.stat().st_size for p in files(path, "sealed"))
    assert size / 2000 < 250
    assert pa.total_allocated_bytes() < 1 << 30
    log.close()
