"""What a kill, a full or failing disk and other processes may do to the log: nothing acknowledged is lost."""

import errno
import itertools
import logging
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import pytest

import store_load
from rollbook.store import (
    BookBusy,
    BookNotFound,
    BookTooNew,
    DirectoryLog,
    Event,
    LogClosed,
    LogCorrupt,
    LogWriteFailed,
    StoreError,
    open_book,
    verify,
)
from rollbook.store.events import from_batch
from store_histories import interaction, same
from store_load import numbered


def python(code: str, *args: object, **options: Any) -> "subprocess.Popen[str]":
    """Another process with our modules, its output piped."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def found(path: Path, writer: str) -> list[Event]:
    log = DirectoryLog(path)
    events, expected = [], 0
    for batch in log.read():
        if batch["writer"][0].as_py() == writer:
            assert batch["position"].to_pylist() == list(range(expected, expected + batch.num_rows))
            expected += batch.num_rows
            events += from_batch(batch)
    log.close()
    return events


def segments(path: Path, writer: str = "w") -> list[Path]:
    return sorted((path / "log" / writer).glob("*.log"))


# ---- kill -9


def kill_and_check(path: Path, seed: int) -> None:
    """Start a writer under load, kill it at a random moment; what it acknowledged must be there, whole and once."""
    rng = random.Random(seed)
    writer = subprocess.Popen(
        [sys.executable, store_load.__file__, str(path), "w", str(seed), str(rng.choice([40_000, 10**9]))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    lines = [writer.stdout.readline()]  # it is under way
    time.sleep(rng.uniform(0, 0.4))
    writer.kill()
    lines += writer.stdout.readlines()
    writer.stdout.close()
    writer.wait()
    acknowledged = {int(n) for line in lines if line.endswith("\n") for n in line.split()}
    assert acknowledged

    before = found(path, "w")  # a reader, before anything was repaired
    log = DirectoryLog(path, "w")
    after = found(path, "w")
    assert [e.event_id for e in before] == [e.event_id for e in after]
    mine = {e.recorded_at: e for e in after if e.run_id == str(seed)}
    assert acknowledged <= mine.keys()
    assert len(mine) == sum(e.run_id == str(seed) for e in after)
    assert all(same(event, numbered(seed, n)) for n, event in mine.items())
    # A client that saw no answer appends again: what is there keeps its place.
    where = {e.event_id: i for i, e in enumerate(after)}
    n = max(mine)
    again = [numbered(seed, i) for i in (*rng.choices(sorted(mine), k=3), n + 1000)]
    assert log.append_blocking(*again) == [*(where[e.event_id] for e in again[:3]), len(after)]
    log.close()


def test_a_killed_writer_loses_nothing_acknowledged(tmp_path: Path) -> None:
    for seed in range(4):  # one book: each finds what the killed ones before it left
        kill_and_check(tmp_path / "book", seed)


@pytest.mark.slow
def test_fifty_killed_writers_lose_nothing_acknowledged(tmp_path: Path) -> None:
    for seed in range(100, 150):
        kill_and_check(tmp_path / f"book{seed % 5}", seed)


# ---- torn tails and damage


class Torn(NamedTuple):
    path: Path
    segment: Path
    start: int  # of the last frame
    events: list[Event]
    synced: bytes  # as it was before the last frame

    def forget_last(self) -> None:
        """As if the writer had been killed before it acknowledged the last frame."""
        (self.path / "log" / "w" / "synced").write_bytes(self.synced)


@pytest.fixture
def torn(tmp_path: Path) -> Torn:
    """A book of three frames, one event each; the last one may be torn."""
    path = tmp_path / "book"
    log = DirectoryLog(path, "w")
    events = [interaction(2, 2, "x") for _ in range(3)]
    for event in events[:2]:
        log.append_blocking(event)
    (segment,) = segments(path)
    start, synced = segment.stat().st_size, (path / "log" / "w" / "synced").read_bytes()
    log.append_blocking(events[2])
    log.close()
    found = Torn(path, segment, start, events, synced)
    found.forget_last()
    return found


def no_sync(fd: int) -> None:
    """Kills are what is tested here, not power cuts; and thousands of syncs take minutes."""


def reopened(path: Path, n_whole: int, cut_at: int | None) -> None:
    assert sum(b.num_rows for b in DirectoryLog(path).read()) == n_whole  # a reader stops before the tear
    log = DirectoryLog(path, "w", sync=no_sync)
    assert [r.offset for r in log.repairs] == ([] if cut_at is None else [cut_at])
    assert log.append_blocking(NEW) == [n_whole]
    assert [b["position"][0].as_py() for b in log.read()] == list(range(n_whole + 1))
    log.close()


NEW = interaction(2, 2, "new")


def test_a_tail_torn_at_any_byte_is_cut_and_reported(torn: Torn) -> None:
    path, segment, start = torn[:3]
    whole = segment.read_bytes()
    logging.getLogger("rollbook.store").setLevel(logging.ERROR)
    for size in range(start, len(whole) + 1):
        segment.write_bytes(whole[:size])
        torn.forget_last()
        is_whole = size == len(whole)
        reopened(path, 3 if is_whole else 2, None if is_whole or size == start else start)
    logging.getLogger("rollbook.store").setLevel(logging.NOTSET)


def test_a_tail_of_zeros_is_cut_wherever_they_begin(torn: Torn) -> None:
    """What a power cut leaves where the size was written and the data was not."""
    path, segment, start = torn[:3]
    whole = segment.read_bytes()
    logging.getLogger("rollbook.store").setLevel(logging.ERROR)
    for size in range(start, len(whole), 5):
        torn_bytes = whole[:size] + bytes(len(whole) - size)
        if torn_bytes == whole:  # the last bytes of a frame are zeros anyway
            break
        segment.write_bytes(torn_bytes)
        torn.forget_last()
        reopened(path, 2, start)
    assert len(whole) - size < 200
    logging.getLogger("rollbook.store").setLevel(logging.NOTSET)


def test_a_repair_is_reported_with_place_and_size(torn: Torn, caplog: pytest.LogCaptureFixture) -> None:
    path, segment, start = torn[:3]
    os.truncate(segment, start + 100)
    log = DirectoryLog(path, "w")
    (repair,) = log.repairs
    assert (repair.path, repair.offset, repair.dropped_bytes, repair.reason) == (segment, start, 100, "short frame")
    assert f"cut 100 bytes of an interrupted write at offset {start}" in caplog.text
    log.close()


def test_damage_before_a_good_frame_is_no_torn_tail(torn: Torn) -> None:
    """Cutting there would drop what was acknowledged."""
    path, segment, start = torn[:3]
    whole = segment.read_bytes()
    for at in (0, 30, 70, start - 200):
        segment.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        for writer in ("w", None):
            with pytest.raises(LogCorrupt, match=r"\.log at offset .*damage.*restore"):
                list(DirectoryLog(path, writer).read())
        assert segment.stat().st_size == len(whole)


def test_damage_in_a_closed_segment_names_the_place(tmp_path: Path) -> None:
    path = tmp_path / "book"
    log = DirectoryLog(path, "w", roll_bytes=1)
    for _ in range(3):
        log.append_blocking(interaction())
    log.close()
    first, second, _ = segments(path)
    whole = second.read_bytes()
    second.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    log = DirectoryLog(path)
    with pytest.raises(LogCorrupt, match=r"00001\.log at offset 0: bad checksum in the frame of position 1;"):
        list(log.read())
    with pytest.raises(LogCorrupt, match="position 1"):
        log.gather([("w", 1)])
    assert log.gather([("w", 0), ("w", 2)]).num_rows == 2  # the rest is there
    second.write_bytes(whole[:-1])
    with pytest.raises(LogCorrupt, match=r"00001\.log at offset 0"):
        list(DirectoryLog(path).read())
    first.rename(first.with_suffix(".gone"))
    with pytest.raises(LogCorrupt, match="a segment is missing"):
        DirectoryLog(path, "w")


def swap(a: Path, b: Path) -> None:
    a.rename(a.with_suffix(".x"))
    b.rename(a)
    a.with_suffix(".x").rename(b)


def instead(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Of a book's last segment."""

    def do(path: Path) -> None:
        segment = segments(path)[-1]
        segment.unlink()
        make(segment)

    return do


STRANGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "two segments swapped": (lambda path: swap(*segments(path)[:2]), "expected position 0, found 1"),
    "a segment twice": (
        lambda path: shutil.copy(segments(path)[1], path / "log/w/7.log"),
        "begins at position 3, found 7",
    ),
    "a folder": (instead(Path.mkdir), "is no file; remove"),
    "a pipe": (instead(os.mkfifo), "is no file; remove"),
    "a link to nowhere": (instead(lambda path: path.symlink_to("/nowhere")), "leads nowhere"),
    "another writer's folder": (
        lambda path: shutil.copytree(path / "log/w", path / "log/v"),
        "holds events of 'w', not of 'v'",
    ),
    "two sealed files swapped": (
        lambda path: swap(*sorted((path / "sealed/w").iterdir())[::2]),
        "not what its name says",
    ),
    "a sealed file twice": (
        lambda path: shutil.copy(min((path / "sealed/w").iterdir()), path / f"sealed/w/{0:020d}-{9:020d}.parquet"),
        "two files that begin at position 0",
    ),
    "a folder for book.json": (
        lambda path: ((path / "book.json").unlink(), (path / "book.json").mkdir()),
        "is not a manifest",
    ),
}


@pytest.mark.parametrize("what", STRANGE)
def test_files_that_are_not_what_they_were_are_one_clear_sentence(tmp_path: Path, what: str) -> None:
    harm, message = STRANGE[what]
    path = tmp_path / "book"
    log = DirectoryLog(path, "w", roll_bytes=1, live_bytes=None, sync=no_sync)
    for _ in range(3):
        log.append_blocking(interaction())
    if "sealed" in what:
        log.seal()
    log.close()
    harm(path)
    with pytest.raises(LogCorrupt, match=message):
        list(DirectoryLog(path).read())
    if what == "a folder for book.json":
        return
    report = verify(path)
    assert report.problems
    if "another" not in what:
        with pytest.raises(LogCorrupt, match=message):
            DirectoryLog(path, "w", live_bytes=None, sync=no_sync)


def test_strange_names_beside_the_logs_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "book"
    log = DirectoryLog(path, "w")
    log.append_blocking(interaction())
    (path / "log" / "notes").write_text("x")
    (path / "log" / "übung").mkdir()
    (path / "sealed").mkdir()
    (path / "sealed" / "x.parquet").write_text("")
    assert len(found(path, "w")) == 1
    log.close()


def test_damage_met_while_looking_for_a_duplicate_stops_the_log(tmp_path: Path) -> None:
    """Whether the event is new cannot be known, so neither answer may be given; and nobody waits for ever."""
    path = tmp_path / "book"
    log = DirectoryLog(path, "w", roll_bytes=1, live_bytes=None)
    old = [interaction(), interaction()]
    for event in old:
        log.append_blocking(event)
    log.close()
    segment = segments(path)[0]
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    log = DirectoryLog(path, "w", live_bytes=None)
    assert log.append_blocking(interaction()) == [2]
    with pytest.raises(LogWriteFailed, match=r"00000\.log at offset 0: bad checksum.*nothing of this append"):
        log.append_blocking(old[0])
    with pytest.raises(LogClosed, match="stopped after a failed write"):
        log.append_blocking(interaction())
    log.close()


# ---- disks


def test_a_full_disk_stops_the_log_with_one_clear_sentence(tmp_path: Path) -> None:
    code = """
        import os, resource, sys
        from rollbook.store import DirectoryLog, LogClosed, LogWriteFailed
        from store_load import numbered
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        log = DirectoryLog(sys.argv[1], "w")
        for n in range(10_000):
            try:
                log.append_blocking(numbered(1, n))
            except LogWriteFailed as error:
                print("failed", n, error)
                break
        try:
            log.append_blocking(numbered(1, n))
        except LogClosed as error:
            print("closed", error)
        assert [b["position"][0].as_py() for b in log.read()][-1] == n - 1
        log.close()
    """
    process = python(code, tmp_path / "book")
    out, _ = process.communicate()
    assert process.returncode == 0
    failed, closed = out.splitlines()
    assert "File too large; nothing of this append is acknowledged" in failed
    assert "stopped after a failed write" in closed
    n = int(failed.split()[1])
    assert [e.recorded_at for e in found(tmp_path / "book", "w")] == list(range(n))
    log = DirectoryLog(tmp_path / "book", "w")
    assert log.repairs == []  # the failed write was taken back
    assert log.append_blocking(numbered(1, n - 1), numbered(1, n)) == [n - 1, n]
    log.close()


@pytest.mark.anyio
async def test_a_failed_sync_stops_the_log_and_answers_everybody(tmp_path: Path) -> None:
    is_broken = False
    is_syncing, have_queued = threading.Event(), threading.Event()

    def sync(fd: int) -> None:
        if is_broken:
            is_syncing.set()
            have_queued.wait()
            raise OSError(errno.EIO, "Input/output error")
        os.fdatasync(fd)

    log = DirectoryLog(tmp_path / "book", "w", sync=sync)
    good = [interaction() for _ in range(3)]
    await log.append(*good)
    is_broken = True
    failures: list[Exception] = []

    async def task() -> None:
        try:
            await log.append(interaction())
        except (LogWriteFailed, LogClosed) as error:
            failures.append(error)

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(task)
        await anyio.to_thread.run_sync(is_syncing.wait)
        for _ in range(4):
            tasks.start_soon(task)
        await anyio.wait_all_tasks_blocked()
        have_queued.set()
    assert [type(e) for e in failures] == [LogWriteFailed] * 8
    assert "Input/output error; nothing of this append is acknowledged" in str(failures[0])
    is_broken = False  # a later sync that succeeds proves nothing: the log stays stopped
    with pytest.raises(LogClosed, match="stopped after a failed write"):
        await log.append(interaction())
    assert sum(b.num_rows for b in log.read()) == 3
    log.close()
    assert [e.event_id for e in found(tmp_path / "book", "w")] == [e.event_id for e in good]


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that another user can reach; pytest's own are private."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def test_a_read_only_folder_can_be_read_and_says_why_it_takes_no_writer(shared_folder: Path) -> None:
    path = shared_folder / "book"
    log = DirectoryLog(path, "w")
    log.append_blocking(interaction())
    log.close()
    for folder, _, files in os.walk(path):
        Path(folder).chmod(0o555)
        for name in files:
            (Path(folder) / name).chmod(0o444)
    code = """
        import os, sys
        from rollbook.store import DirectoryLog, LogWriteFailed
        if os.getuid() == 0:
            os.setuid(65534)  # root may write anywhere
        assert sum(b.num_rows for b in DirectoryLog(sys.argv[1]).read()) == 1
        for path, writer in ((sys.argv[1], "w"), (sys.argv[1], "other"), (sys.argv[1] + "/new", "w")):
            try:
                DirectoryLog(path, writer)
            except LogWriteFailed as error:
                print(error)
    """
    process = python(code, path)
    out, _ = process.communicate()
    assert process.returncode == 0
    assert out.count("Permission denied; make the folder writable") == 3
    for folder, _, _ in os.walk(path):
        Path(folder).chmod(0o755)


def test_a_writer_needs_few_open_files(tmp_path: Path) -> None:
    log = DirectoryLog(tmp_path / "book", "w", roll_bytes=1, sync=no_sync)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    n = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        log.append_blocking(interaction())
    kept = [b for _ in range(20) for b in DirectoryLog(tmp_path / "book").read()]
    assert len(os.listdir("/proc/self/fd")) - n < 30 < soft
    assert len(kept) == 1000
    log.close()


# ---- other openers


def test_one_writer_name_has_one_owner(tmp_path: Path) -> None:
    log = DirectoryLog(tmp_path / "book", "w")
    with pytest.raises(BookBusy, match=r"this process appends to .* give this one another name, or close that one"):
        DirectoryLog(tmp_path / "book", "w")
    code = """
        import sys
        from rollbook.store import BookBusy, DirectoryLog
        try:
            DirectoryLog(sys.argv[1], "w")
        except BookBusy as error:
            print(error)
        DirectoryLog(sys.argv[1], "other").close()
    """
    process = python(code, tmp_path / "book")
    said = process.communicate()[0]
    assert f"another process ({os.getpid()}) appends to" in said
    assert process.returncode == 0
    log.close()
    DirectoryLog(tmp_path / "book", "w").close()


def test_a_forked_child_is_told_to_open_the_book_itself(tmp_path: Path) -> None:
    code = """
        import os, sys, warnings
        from rollbook.store import DirectoryLog, LogClosed
        from store_load import numbered
        warnings.simplefilter("ignore")
        log = DirectoryLog(sys.argv[1], "w")
        log.append_blocking(numbered(1, 0))
        child = os.fork()
        if child == 0:
            try:
                log.append_blocking(numbered(1, 1))
            except LogClosed as error:
                os._exit(0 if "open the book again here" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert log.append_blocking(numbered(1, 1)) == [1]
        log.close()
    """
    process = python(code, tmp_path / "book")
    process.communicate()
    assert process.returncode == 0


def test_writers_in_many_processes_share_a_book(tmp_path: Path) -> None:
    code = """
        import sys
        from rollbook.store import DirectoryLog
        from store_load import numbered
        log = DirectoryLog(sys.argv[1], "w" + sys.argv[2], roll_bytes=50_000)
        for n in range(100):
            log.append_blocking(numbered(int(sys.argv[2]), n))
        log.close()
    """
    processes = [python(code, tmp_path / "book", i) for i in range(4)]
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    for i in range(4):
        assert [e.recorded_at for e in found(tmp_path / "book", f"w{i}")] == list(range(100))


def test_a_reader_in_another_process_follows_live(tmp_path: Path) -> None:
    path = tmp_path / "book"
    log = DirectoryLog(path, "w", roll_bytes=100_000)
    code = """
        import sys, anyio
        from rollbook.store import DirectoryLog
        from rollbook.store.events import from_batch
        from store_histories import same
        from store_load import numbered
        async def main():
            n = 0
            print("ready", flush=True)
            async for batch in DirectoryLog(sys.argv[1]).follow():
                for event in from_batch(batch):
                    assert same(event, numbered(7, n)), n
                    n += 1
                if n == 300:
                    return
        anyio.run(main)
        print("all")
    """
    process = python(code, path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for n in range(300):
        log.append_blocking(numbered(7, n))
    assert process.communicate()[0] == "all\n"
    log.close()


def test_a_reader_never_touches_a_tail_that_is_being_written(torn: Torn) -> None:
    path, segment, start, events = torn[:4]
    whole = segment.read_bytes()
    os.truncate(segment, start)
    reader = DirectoryLog(path)
    sizes = [*range(start, len(whole), 37), len(whole)]
    for before, size in itertools.pairwise(sizes):
        with open(segment, "ab") as file:
            file.write(whole[before:size])
        n = sum(b.num_rows for b in reader.read())
        assert n == (3 if size == len(whole) else 2)
        assert segment.stat().st_size == size
    assert from_batch(list(reader.read())[2])[0].event_id == events[2].event_id


@pytest.mark.anyio
async def test_followers_wait_until_an_event_is_durable(tmp_path: Path) -> None:
    """Else a power cut could take away what others have acted on."""
    is_allowed, has_begun, has_read = threading.Event(), threading.Event(), anyio.Event()
    is_allowed.set()

    def sync(fd: int) -> None:
        has_begun.set()
        is_allowed.wait(60)
        os.fdatasync(fd)

    path = tmp_path / "book"
    log = DirectoryLog(path, "w", sync=sync)
    await log.append(interaction())
    seen: list[tuple[int, float]] = []

    async def follow() -> None:
        async for batch in DirectoryLog(path).follow():
            seen.extend((p, time.monotonic()) for p in batch["position"].to_pylist())
            has_read.set()
            if len(seen) == 2:
                return

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        await has_read.wait()
        is_allowed.clear()
        has_begun.clear()
        tasks.start_soon(log.append, interaction())
        await anyio.to_thread.run_sync(has_begun.wait)  # the frame is in the file
        await anyio.sleep(0.04)
        allowed_at = time.monotonic()
        is_allowed.set()
    assert [p for p, _ in seen] == [0, 1]
    assert seen[1][1] > allowed_at
    assert sum(b.num_rows for b in log.read()) == 2
    log.close()


def test_what_a_killed_writer_could_not_call_durable_is_read(tmp_path: Path) -> None:
    path = tmp_path / "book"
    log = DirectoryLog(path, "w")
    log.append_blocking(interaction())
    log.append_blocking(interaction())
    log.close()
    (path / "log" / "w" / "synced").write_bytes((1).to_bytes(8, "little"))
    assert len(found(path, "w")) == 2
    (path / "log" / "w" / "synced").unlink()
    assert len(found(path, "w")) == 2


# ---- the folder


def test_a_folder_that_is_no_book_says_what_to_do(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(BookNotFound, match=r"no book at .*has no book\.json.*writer="):
            DirectoryLog(path)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "https://host/book", "s3://bucket/book"])
def test_a_url_is_no_folder_and_does_not_become_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.chdir(tmp_path)
    for writer in (None, "w"):
        with pytest.raises(BookNotFound, match=f"expected the folder of a book, got the URL {url}; do this where"):
            open_book(url, writer)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_other_things_in_it_does_not_become_a_book(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match=r"is no book and has other things in it \(thesis\.tex\); give the path of"):
        DirectoryLog(tmp_path, "w")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    for name in (".hidden", "policies"):  # what a desktop and a training run leave there before the book is made
        (tmp_path / name / name).mkdir(parents=True)
        DirectoryLog(tmp_path / name, "w").close()
    (tmp_path / "policies" / "book.json").unlink()
    DirectoryLog(tmp_path / "policies", "w").close()


def test_a_newer_book_names_both_versions(tmp_path: Path) -> None:
    DirectoryLog(tmp_path / "book", "w").close()
    (tmp_path / "book" / "book.json").write_text('{"format": 99, "created_by": "rollbook 9.9"}')
    for writer in (None, "w"):
        with pytest.raises(BookTooNew, match=r"format 99, written by rollbook 9\.9; this is rollbook .*upgrade"):
            DirectoryLog(tmp_path / "book", writer)


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "x" * 200, "a\n"])
def test_a_writer_name_is_a_plain_file_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="a writer name is"):
        DirectoryLog(tmp_path / "book", name)
    assert not (tmp_path / "book").exists()


def test_a_duplicate_is_found_in_closed_segments_and_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "book"
    log = DirectoryLog(path, "w", roll_bytes=5_000, sync=no_sync)
    events = [numbered(3, n) for n in range(60)]  # hashes as ids: in no order, each within every range
    for event in events:
        log.append_blocking(event)
    assert len(segments(path)) > 20
    assert [log.append_blocking(e) for e in events] == [[n] for n in range(60)]
    log.close()
    log = DirectoryLog(path, "w")
    assert log.append_blocking(*reversed(events)) == list(reversed(range(60)))
    assert log.append_blocking(numbered(3, 60)) == [60]
    log.close()
