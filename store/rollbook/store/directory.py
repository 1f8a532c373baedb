"""The log as a directory: framed Arrow segments, one folder per writer, no lock between writers.

    BOOK/book.json                                 which format the book has
    BOOK/book.writers                              the names of those who append, see `writers`
    BOOK/log/<writer>/<first>.log                  segments of frames; only the last one of a writer grows
    BOOK/log/<writer>/synced                       how far its events are durable, for readers in other processes
    BOOK/sealed/<writer>/<first>-<next>.parquet    older segments, compressed in the background

Appends go to one thread, which takes what is waiting, writes it as one frame, syncs once and answers everybody
(group commit). An event is acknowledged when its frame is synced, and read in this process no sooner. A failed
write or sync stops the log for good: after it nobody knows what the disk holds, so nothing more may be promised.

Opening a writer repairs the only damage that a kill or a power cut can do, a half-written last frame; anything else,
and an end below what `synced` says, is LogCorrupt and left as it is (`losses` is the way to go on). Readers never
repair: they stop before the frame that a live writer is writing.
"""

import contextlib
import errno
import json
import logging
import os
import queue
import re
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import numpy as np
import pyarrow as pa

from . import frames, locks, rows, writers
from ._version import __version__
from .appending import WRITER_NAME, Appending, Numbering, Request, answer
from .errors import BookBusy, BookNotFound, BookTooNew, LogClosed, LogCorrupt, LogWriteFailed, StoreError
from .events import SCHEMA
from .log import START, Cursor, Log, TokenPlaces, advance
from .sealing import SealingStopped, seal, sync_folder
from .segments import SYNCED, Chain, Sealed, Segment, encode_said, fdatasync, log_name

FORMAT = 1
"""Of the directory. A reader refuses a newer one by name."""
LAKE_FORMAT = 2
"""Of a book.json that names a lake instead; see `lake`."""

_URL = re.compile(r"[a-z][a-z0-9+.-]+:/")  # as a Path has it
_OF_A_BOOK = ("book", "log", "sealed", "views", "policies")
"""What may be in a folder before it is made a book, or where its book.json was lost."""

_log = logging.getLogger("rollbook.store")
_DRAIN_BYTES = 32 << 20
_SPLIT_BYTES = 512 << 10  # more than this is not written at once where others would wait meanwhile: see `_share`
_IOV_MAX = min(1024, os.sysconf("SC_IOV_MAX"))  # buffers that one call writes
_POLL_S = (0.0005, 0.005)  # followers wait between these, longer the longer nothing comes
_PATIENCE_S = 0.1  # followers wait for a writer to say that a frame is synced, then sync it themselves
_PARSED_BYTES = 256 << 20  # of decoded row groups that `gather` keeps
_VIEW_COST = 20_000  # what a kept frame of a mapped file costs: Arrow's objects, no data
_KEY_SETS = 16  # closed segments whose ids are kept sorted in memory; others are read again when needed


@dataclass(frozen=True)
class Repair:
    """A torn tail that opening the writer cut off. Nothing in it had been acknowledged."""

    path: Path
    offset: int  # the segment's size now
    dropped_bytes: int
    reason: str


# ---- the folder ----------------------------------------------------------------------------------------------------


def check_book(path: Path) -> None:
    """Raise BookNotFound or BookTooNew unless `path` holds a book whose log is this folder."""
    if "lake" in read_manifest(path):
        raise StoreError(
            f"the events of {path} are in a lake, not in files of this folder, which is what this works on; "
            "open_book reads it, and DuckDB keeps its files (docs/lake.md)"
        )


def read_manifest(path: Path) -> dict[str, Any]:
    """A book's book.json. Raises BookNotFound, BookTooNew, LogCorrupt."""
    _refuse_url(path)
    manifest = path / "book.json"
    try:
        data: dict[str, Any] = json.loads(manifest.read_bytes())
        found, by = int(data["format"]), str(data.get("created_by", "an unknown version"))
    except (FileNotFoundError, NotADirectoryError):
        raise BookNotFound(
            f"no book at {path} (it has no book.json); check the path. `rollbook serve`, a training run and "
            "open_book(path, writer=...) make one"
        ) from None
    except (ValueError, KeyError, TypeError, IsADirectoryError) as error:
        raise LogCorrupt(f'{manifest} is not a manifest ({error}); restore it: {{"format": {FORMAT}}}') from error
    if found > LAKE_FORMAT:
        raise BookTooNew(
            f"{path} has format {found}, written by {by}; this is rollbook {__version__}, which reads up to format "
            f"{LAKE_FORMAT}: upgrade rollbook to open it"
        )
    return data


def _refuse_url(path: Path) -> None:
    """Raises BookNotFound for the URL of a served book, or of a bucket."""
    if _URL.match(str(path)):
        raise BookNotFound(
            f"expected the folder of a book, got the URL {str(path).replace(':/', '://', 1)}; do this where the folder "
            "is. What only looks at a book (sql, show, rewards, export, the lists) takes the URL of a served one, too"
        )


def create_book(path: Path) -> None:
    """Make `path` a book unless it is one. Safe when several processes do it at once."""
    if not (path / "book.json").exists():
        write_manifest(path, {"format": FORMAT})


def write_manifest(path: Path, data: dict[str, Any]) -> None:
    """Give the folder `path`, created where there is none, its book.json unless it has one."""
    _refuse_url(path)
    manifest = path / "book.json"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    strange = sorted(n for n in os.listdir(path) if not n.startswith(".") and n.partition(".")[0] not in _OF_A_BOOK)
    if strange and not manifest.exists():
        some = ", ".join([*strange[:3], *(["..."] if len(strange) > 3 else [])])
        raise StoreError(
            f"{path} is no book and has other things in it ({some}); give the path of a book, of an empty folder, or "
            "of one that is not there yet"
        )
    scratch = path / f".book.json.{os.getpid()}.{threading.get_ident()}"
    scratch.write_bytes(json.dumps({**data, "created_by": f"rollbook {__version__}"}).encode() + b"\n")
    with open(scratch, "rb") as file:
        os.fsync(file.fileno())
    with contextlib.suppress(FileExistsError):
        os.link(scratch, manifest)
    scratch.unlink()
    sync_folder(path)


# ---- which ids a writer has seen -----------------------------------------------------------------------------------


class SeenIds:
    """Event id -> first position, for every event of a writer, in bounded memory.

    Ids of the last segment are in a dict. Of the others only the range of ids is known: event ids begin with the
    time, so a new event lies above all of them and needs one comparison. An id within a range is looked up in that
    segment's sorted fingerprints, which are read when first needed, and a hit is confirmed by the id itself.
    """

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        last = chain.segments[-1]
        self.recent: dict[bytes, int] = {id_: last.first + i for i, id_ in enumerate(last.ids()[1].to_pylist())}
        self._newest = chain.segments[-2].newest if len(chain.segments) > 1 else b""  # of all but the last segment
        self._sorted: OrderedDict[int, tuple[Any, Any, pa.Array]] = OrderedDict()

    def find(self, event_id: bytes) -> int | None:
        position = self.recent.get(event_id)
        if position is not None or event_id > self._newest:
            return position
        for segment in reversed(self._chain.segments[:-1]):
            if event_id > segment.newest:  # of this and all before it
                return None
            if segment.lowest <= event_id <= segment.highest:
                position = self._find_in(segment, event_id)
                if position is not None:
                    return position
        return None

    def begin_segment(self) -> None:
        """The last segment has been closed: its ids are looked up there."""
        self._newest = self._chain.segments[-2].newest
        self.recent.clear()

    def _find_in(self, segment: Segment | Sealed, event_id: bytes) -> int | None:
        found = self._sorted.get(segment.first)
        if found is None:
            keys, ids = segment.ids()
            order = np.argsort(keys, kind="stable")
            found = self._sorted[segment.first] = (keys[order], order, ids)
            if len(self._sorted) > _KEY_SETS:
                self._sorted.popitem(last=False)
        self._sorted.move_to_end(segment.first)
        keys, order, ids = found
        key = frames.id_keys(pa.array([event_id], pa.binary(16)))[0]
        at = int(np.searchsorted(keys, key))
        while at < len(keys) and keys[at] == key:
            if ids[int(order[at])].as_py() == event_id:
                return segment.first + int(order[at])
            at += 1
        return None


# ---- the log -------------------------------------------------------------------------------------------------------


class _Commit(NamedTuple):
    """What one sync makes durable: a frame, and who waits for it. Without rows it has nothing to write."""

    requests: list[Request]
    taken: dict[bytes, int]  # event id -> position
    buffers: list[bytes]  # of the frame


class DirectoryLog(Appending):
    """See `log.Log`. With a writer name it appends under that name, alone; without one it only reads.

    roll_bytes: a segment that has reached it is closed and the next begun.
    live_bytes: of this writer's newest events are kept as frames, which are read without a copy; older segments are
        sealed, which makes them several times smaller. None: nothing is sealed but by `seal`.
    sync: what makes a file descriptor's data durable; another one is for tests of failing disks.

    Raises BookNotFound, BookTooNew, BookBusy (the writer name is taken by a live process), LogCorrupt and, where the
    folder can't be written, LogWriteFailed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        writer: str | None = None,
        *,
        roll_bytes: int = 64 << 20,
        live_bytes: int | None = 512 << 20,
        sync: Callable[[int], None] = fdatasync,
    ) -> None:
        super().__init__(Path(path), writer, "the disk")
        self.repairs: list[Repair] = []
        self.written_bytes = 0  # by this log since it was opened
        self._roll_bytes = roll_bytes
        self._live_bytes = live_bytes
        self._sync = sync
        self._chains: dict[str, Chain] = {}
        self._reading = threading.RLock()  # around the chains; batches are read outside
        self._sealer: threading.Thread | None = None
        self._sealing = threading.Lock()  # one segment at a time
        self._to_seal = threading.Event()
        self._parsed: OrderedDict[tuple[Path, tuple[int, int], int], tuple[int, pa.RecordBatch, int]] = OrderedDict()
        self._parsed_bytes = 0
        if writer is None:
            check_book(self.path)
            writers.check_all_there(self.path)
        else:
            try:
                self._open_writer(writer)
            except OSError as error:
                if isinstance(error, BookNotFound):
                    raise
                raise LogWriteFailed(
                    f"cannot open {self.path} to append as {writer!r}: {error.strerror or error}; make the folder "
                    "writable and the disk not full, or open it without a writer to read"
                ) from error
            self._thread = threading.Thread(target=self._write_loop, name=f"rollbook-log-{writer}", daemon=True)
            self._thread.start()
            if live_bytes is not None:
                self._sealer = threading.Thread(target=self._seal_loop, name=f"rollbook-seal-{writer}", daemon=True)
                self._sealer.start()
                self._to_seal.set()

    def _open_writer(self, writer: str) -> None:
        create_book(self.path)
        check_book(self.path)
        writers.check_all_there(self.path)
        folder = self.path / "log" / writer
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            sync_folder(folder.parent)
            sync_folder(self.path)
        self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._fd = self._synced_fd = -1
        try:
            owner = locks.take(self._folder_fd)
            if owner is not None:
                raise BookBusy(
                    f"{owner} appends to {self.path} as {writer!r}; give this one another name, or close that one"
                )
            chain = self._chains[writer] = Chain(self.path, writer)
            fault = chain.refresh()  # raises where what was acknowledged is gone; nothing has been touched then
            next(chain.batches(max(0, chain.next - 1)), None)  # raises where they are another writer's
            last = chain.segments[-1] if chain.segments else None
            if isinstance(last, Segment):
                self._fd = os.open(last.path, os.O_WRONLY | os.O_CLOEXEC)
                self._cut(chain, last, fault)
            else:
                self._begin_segment(chain)
            self._seen = SeenIds(chain)
            self._synced_fd = os.open(folder / SYNCED, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._synced_inode = os.fstat(self._synced_fd).st_ino
            self._say_synced(chain.next)
            writers.name_all(self.path)
        except BaseException:
            for fd in (self._fd, self._synced_fd, self._folder_fd):
                if fd >= 0:
                    os.close(fd)
            raise

    def _say_synced(self, next_: int) -> None:
        os.pwrite(self._synced_fd, encode_said(next_, self._synced_inode), 0)

    def _cut(self, chain: Chain, last: Segment, fault: str | None) -> None:
        size = os.fstat(self._fd).st_size
        if size > last.end:
            os.ftruncate(self._fd, last.end)
            repair = Repair(last.path, last.end, size - last.end, fault or "bytes after the last frame")
            self.repairs.append(repair)
            _log.warning(
                "%s: cut %d bytes of an interrupted write at offset %d (%s); %s",
                repair.path,
                repair.dropped_bytes,
                repair.offset,
                repair.reason,
                "nothing in them was acknowledged"
                if chain.said.position <= chain.next
                else f"the folder is a copy, made while its writer went on to position {chain.said.position}",
            )
        # Frames that were written but not synced when the process died are kept, so they must be durable now.
        self._sync(self._fd)

    def _begin_segment(self, chain: Chain) -> Segment:
        path = chain.folder / log_name(chain.next)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.fsync(self._folder_fd)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        segment = Segment(path, chain.next)
        with self._reading:
            if chain.segments:
                last = chain.segments[-1]
                segment.newest = last.newest
                last.close()
            chain.segments = [*chain.segments, segment]
        return segment

    # ---- append

    def _write_loop(self) -> None:
        """The writer's thread: take what is waiting, commit it, answer. Ends on None or after a failure.

        The next frame is laid out before the last one is answered: answering wakes event loops, and while they have
        the interpreter this thread could not; so they get it when the disk has work.
        """
        waiting: deque[Request] = deque()
        synced: list[Request] = []  # durable, not answered yet
        is_open = True
        while is_open or waiting:
            is_open = self._drain(waiting, may_block=not synced and not waiting) and is_open
            if not waiting:  # nothing to lay out before
                answer(synced)
                synced = []
                continue
            requests = _share(waiting, synced)
            try:
                commit = self._lay_out(requests)
                answer(synced)
                synced = []
                if commit.buffers:
                    self._write(commit)
                if not all(request.rows for request in requests):
                    self._roll()
            except Exception as error:  # whatever it is, nobody may wait for ever, and no more may be promised
                answer(synced)
                requests.extend(waiting)
                self._stop(requests, error)
                answer(requests)
                return
            synced = requests
        answer(synced)

    def _drain(self, waiting: "deque[Request]", may_block: bool) -> bool:
        """Move what is queued to `waiting`. False once the log is closed."""
        try:
            item = self._queue.get(may_block)
            while item is not None:
                waiting.append(item)
                item = self._queue.get_nowait()
        except queue.Empty:
            return True
        return False

    def _lay_out(self, requests: list[Request]) -> _Commit:
        """Give positions to what is new, and the bytes to write."""
        chain = self._chains[self._writer or ""]
        first = chain.next
        numbering = Numbering(first, self._seen.find, self._stored)
        numbering.take_all(requests)
        fresh, taken = numbering.fresh, numbering.taken
        if not fresh:
            return _Commit(requests, taken, [])
        message = rows.message(fresh, chain.writer, first)
        return _Commit(requests, taken, frames.encode(message, len(fresh), first, min(taken), max(taken)))

    def _stored(self, position: int) -> pa.RecordBatch:
        first, batch, _ = self._frame_at(self._writer or "", position)
        return batch.slice(position - first, 1)

    def _roll(self) -> Segment:
        chain = self._chains[self._writer or ""]
        last = chain.segments[-1]
        if last.next > last.first:
            last = self._begin_segment(chain)
            self._seen.begin_segment()
            self._to_seal.set()
        assert isinstance(last, Segment)
        return last

    def _write(self, commit: _Commit) -> None:
        """Durable when this returns, and found by readers."""
        segment = self._chains[self._writer or ""].segments[-1]
        assert isinstance(segment, Segment)
        if segment.end >= self._roll_bytes:
            segment = self._roll()
        frame = frames.decode_header(commit.buffers[0])
        assert frame is not None
        try:
            _write_at(self._fd, commit.buffers, segment.end)
            self._sync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):  # the next opener would cut it too
                os.ftruncate(self._fd, segment.end)
            raise
        self._say_synced(frame.first + frame.rows)
        segment.add(frame)
        self._seen.recent.update(commit.taken)
        self.written_bytes += frame.size

    def _stop(self, requests: list[Request], error: Exception) -> None:
        what = str(error)
        if isinstance(error, OSError):
            what = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or what
        message = (
            f"could not write to the log in {self.path}: {what}; nothing of this append is acknowledged and the log "
            "takes no more: free or repair the disk, then open the book again and append the same events again"
        )
        self._fail(requests, what, message, error)

    # ---- read

    def read(self, cursor: Cursor = START) -> Iterator[pa.RecordBatch]:
        self._refresh()
        yield from self._read_listed(cursor)

    def _read_listed(self, cursor: Cursor) -> Iterator[pa.RecordBatch]:
        for writer, chain in sorted(self._chains.items()):
            yield from chain.batches(cursor.get(writer, 0))

    def _refresh(self, patience_s: float = 0.0) -> None:
        with self._reading:
            for writer in {name for folder in ("log", "sealed") for name in _listdir(self.path / folder)}:
                if writer not in self._chains and WRITER_NAME.fullmatch(writer) and self._is_folder(writer):
                    self._chains[writer] = Chain(self.path, writer)
                # Our own segments are listed as they become durable.
                if writer in self._chains and (writer != self._writer or self._is_closed):
                    before = self._chains[writer].segments
                    self._chains[writer].refresh(patience_s)
                    for segment in before:
                        if self._parsed and segment not in self._chains[writer].segments:
                            self._forget(segment)

    def _is_folder(self, writer: str) -> bool:
        return any((self.path / folder / writer).is_dir() for folder in ("log", "sealed"))

    async def follow(self, cursor: Cursor = START) -> AsyncGenerator[pa.RecordBatch, None]:
        wait_s = _POLL_S[0]
        await anyio.to_thread.run_sync(self._refresh, _PATIENCE_S)  # verifies what was there; later looks are short
        while True:
            is_last = self._is_closed
            self._refresh(_PATIENCE_S)
            if any(chain.next > cursor.get(writer, 0) for writer, chain in list(self._chains.items())):
                wait_s = _POLL_S[0]
                batches = self._read_listed(cursor)
                # In a thread: what is far behind comes from a disk.
                while (batch := await anyio.to_thread.run_sync(next, batches, None)) is not None:
                    cursor = advance(cursor, batch)
                    yield batch
            if is_last:
                return
            await anyio.sleep(wait_s)
            wait_s = min(wait_s * 1.3, _POLL_S[1])

    def gather(self, pointers: Sequence[tuple[str, int]]) -> pa.Table:
        slices: list[pa.RecordBatch] = []
        begin = end = start = 0  # rows of `batch`, which begins at position `start`, that are asked for next
        batch: pa.RecordBatch | None = None
        owner = ""
        for writer, position in pointers:
            row = position - start
            if batch is not None and row == end and writer == owner and row < batch.num_rows:
                end += 1
                continue
            if batch is not None:
                slices.append(batch.slice(begin, end - begin))
            start, batch, _ = self._frame_at(writer, position)
            owner, begin = writer, position - start
            end = begin + 1
        if batch is not None:
            slices.append(batch.slice(begin, end - begin))
        return pa.Table.from_batches(slices, SCHEMA)

    def token_places(self, writer: str, position: int) -> TokenPlaces:
        with self._reading:
            segment = self._require(writer, position)
            segment.map()
        k = segment.frame_of(position)
        if isinstance(segment, Sealed):
            batch = segment.batch(k, rows.TOKENS)
            return TokenPlaces(segment.first_of(k), rows.token_places_of(batch), batch, batch.nbytes, 0)
        frame, body = segment.frame(k)
        places = rows.token_places(body, frame.rows) if frame.layout == frames.LAYOUT else None
        if places is None:
            places = rows.token_places_of(frames.decode_body(frame, body))  # zero copy: it is `body` that holds them
        return TokenPlaces(frame.first, places, body, 0, frame.length)

    def _frame_at(self, writer: str, position: int) -> tuple[int, pa.RecordBatch, int]:
        """The frame that holds a position, and the position of its first row. Lately used ones are kept parsed."""
        with self._reading:
            segment = self._require(writer, position)
            k = segment.frame_of(position)
            # By path and writing: a segment's frames are other ones once it is sealed, or pruned.
            key = (segment.path, segment.written, k)
            found = self._parsed.get(key)
            if found is not None:
                self._parsed.move_to_end(key)
                return found
            segment.map()
        batch = segment.batch(k)
        start = batch.column("position")[0].as_py()
        cost = batch.nbytes if isinstance(segment, Sealed) else _VIEW_COST
        with self._reading:
            if key not in self._parsed:
                self._parsed[key] = (start, batch, cost)
                self._parsed_bytes += cost
            while self._parsed_bytes > _PARSED_BYTES:
                self._parsed_bytes -= self._parsed.popitem(last=False)[1][2]
        return start, batch, cost

    def _forget(self, segment: Segment | Sealed) -> None:
        """Let go of a segment's parsed frames: they keep its file mapped, and so on the disk, when it is removed."""
        for key in [key for key in self._parsed if key[0] == segment.path]:
            self._parsed_bytes -= self._parsed.pop(key)[2]

    def _require(self, writer: str, position: int) -> Segment | Sealed:
        segment = self._find(writer, position)
        if segment is None:
            self._refresh()
            segment = self._find(writer, position)
        if segment is None:
            raise KeyError(f"no event at position {position} of writer {writer!r}")
        return segment

    def _find(self, writer: str, position: int) -> Segment | Sealed | None:
        chain = self._chains.get(writer)
        return None if chain is None else chain.find(position)

    # ---- seal

    def seal(self) -> None:
        """Close the segment being written and seal everything of this writer: before archiving or copying a book.

        Raises LogClosed, LogCorrupt, LogWriteFailed (the disk refused; the log goes on and keeps its segments).
        """
        future: Future[list[int]] = Future()
        self._submit(Request([], 0, future, None))
        future.result()
        try:
            self._seal_down_to(0)
        except OSError as error:
            raise LogWriteFailed(
                f"could not seal {self.path}: {error.strerror or error}; nothing is lost: free the disk and seal again"
            ) from error
        except SealingStopped:
            raise LogClosed(
                f"log of writer {self._writer!r} was closed while sealing; open it and seal again"
            ) from None

    def _seal_loop(self) -> None:
        """The sealer's thread. What fails stays as it is until the next segment is full."""
        with contextlib.suppress(OSError, AttributeError):  # where threads have priorities of their own: yield to all
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while True:
            self._to_seal.wait()
            self._to_seal.clear()
            if self._is_closed:
                return
            try:
                self._seal_down_to(self._live_bytes or 0)
            except SealingStopped:
                return
            except (OSError, LogCorrupt) as error:
                _log.warning("could not seal a segment of %s, it stays a log: %s", self.path, error)

    def _seal_down_to(self, live_bytes: int) -> None:
        chain = self._chains[self._writer or ""]
        with self._sealing:
            while True:
                live = [s for s in chain.segments if isinstance(s, Segment)]
                if len(live) < 2 or sum(s.end for s in live[1:]) < live_bytes:
                    return
                self._seal_one(chain, live[0])

    def _seal_one(self, chain: Chain, segment: Segment) -> None:
        if not chain.sealed_folder.is_dir():
            chain.sealed_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            sync_folder(chain.sealed_folder.parent)
            sync_folder(self.path)
        sealed = seal(segment, chain.sealed_folder, is_stopping=lambda: self._is_closed)
        with self._reading:
            chain.segments = [sealed if s is segment else s for s in chain.segments]
            self._forget(segment)
        segment.path.unlink()
        sync_folder(chain.folder)

    # ---- close

    def close(self) -> None:
        if not self._stop_accepting():
            return
        self._to_seal.set()
        if self._sealer is not None:
            self._sealer.join()
        if self._thread is not None:
            self._thread.join()
            os.close(self._fd)
            with contextlib.suppress(OSError):  # it may lag behind
                fdatasync(self._synced_fd)
            os.close(self._synced_fd)
            os.close(self._folder_fd)  # gives the writer's name back
        with self._reading:
            self._chains.clear()  # reading goes on to work: it lists the files anew
            self._parsed.clear()
            self._parsed_bytes = 0


def _listdir(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []


def _write_at(fd: int, buffers: Sequence[bytes], offset: int) -> None:
    """All of them, one behind the other."""
    for i in range(0, len(buffers), _IOV_MAX):
        some = buffers[i : i + _IOV_MAX]
        size = sum(map(len, some))
        written = os.pwritev(fd, some, offset)
        offset += size
        if written < size:  # by a signal, a full disk, or more than 2 GiB
            rest = memoryview(b"".join(some))[written:]
            while rest:
                rest = rest[os.pwrite(fd, rest, offset - len(rest)) :]


def _share(waiting: "deque[Request]", synced: list[Request]) -> list[Request]:
    """Take from `waiting` what goes into the next frame: all of it, or half of what is outstanding where that is much.

    Tasks that wait for one commit come back together. If every frame took all of them, disk and tasks would wait for
    one another; with half of them, one half is written while the other comes back.
    """
    outstanding = sum(r.size_bytes for r in waiting) + sum(r.size_bytes for r in synced)
    most = min(max(outstanding // 2, _SPLIT_BYTES), _DRAIN_BYTES)
    taken: list[Request] = []
    size = 0
    while waiting and (not taken or size + waiting[0].size_bytes <= most):
        taken.append(waiting.popleft())
        size += taken[-1].size_bytes
        if not taken[-1].rows:  # from `seal`
            break
    return taken


def open_log(path: str | os.PathLike[str], writer: str | None = None) -> Log:
    """The log of the book at a path: its own folder, or the lake that its book.json names. Raises as `open_book`."""
    if (Path(path) / "book.json").exists() and "lake" in read_manifest(Path(path)):
        from .lake import LakeLog

        return LakeLog(path, writer)
    return DirectoryLog(path, writer)
