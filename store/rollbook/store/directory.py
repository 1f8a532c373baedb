"""The log as a directory: framed Arrow segments, one folder per writer, no lock between writers.

    BOOK/book.json                      which format the book has
    BOOK/log/<writer>/<first>.log       segments, named by the position of their first event; only the last one grows

Appends go to one thread, which takes what is waiting, writes it as one frame, syncs once and answers everybody
(group commit). An event is acknowledged when its frame is synced, and read in this process no sooner. A failed
write or sync stops the log for good: after it nobody knows what the disk holds, so nothing more may be promised.

Opening a writer repairs the only damage that a kill or a power cut can do, a half-written last frame; anything else
is LogCorrupt and left as it is. Readers never repair: they stop before the frame that a live writer is writing.
"""

import asyncio
import contextlib
import errno
import fcntl
import json
import logging
import os
import queue
import re
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pyarrow as pa

from . import frames
from ._version import __version__
from .errors import BadEvent, BookBusy, BookNotFound, BookTooNew, LogClosed, LogCorrupt, LogWriteFailed
from .events import SCHEMA, Event, check, to_batch
from .log import START, Cursor, advance

FORMAT = 1
"""Of the directory. A reader refuses a newer one by name."""

_log = logging.getLogger("rollbook.store")
_WRITER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DRAIN_EVENTS = 512
_DRAIN_BYTES = 32 << 20
_POLL_S = (0.0005, 0.005)  # followers wait between these, longer the longer nothing comes
_KEY_SETS = 16  # closed segments whose ids are kept sorted in memory; others are read again when needed

fdatasync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)


@dataclass(frozen=True)
class Repair:
    """A torn tail that opening the writer cut off. Nothing in it had been acknowledged."""

    path: Path
    offset: int  # the segment's size now
    dropped_bytes: int
    reason: str


# ---- the folder ----------------------------------------------------------------------------------------------------


def check_book(path: Path) -> None:
    """Raise BookNotFound or BookTooNew unless `path` holds a book that this version reads."""
    manifest = path / "book.json"
    try:
        data = json.loads(manifest.read_bytes())
        found, by = int(data["format"]), str(data.get("created_by", "an unknown version"))
    except (FileNotFoundError, NotADirectoryError):
        raise BookNotFound(
            f"no book at {path} (it has no book.json); check the path, or open it with a writer name to create one"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise LogCorrupt(f'{manifest} is not a manifest ({error}); restore it: {{"format": {FORMAT}}}') from error
    if found > FORMAT:
        raise BookTooNew(
            f"{path} has format {found}, written by {by}; this is rollbook {__version__}, which reads up to format "
            f"{FORMAT}: upgrade rollbook to open it"
        )


def create_book(path: Path) -> None:
    """Make `path` a book unless it is one. Safe when several processes do it at once."""
    manifest = path / "book.json"
    if manifest.exists():
        return
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    data = json.dumps({"format": FORMAT, "created_by": f"rollbook {__version__}"}).encode()
    scratch = path / f".book.json.{os.getpid()}.{threading.get_ident()}"
    scratch.write_bytes(data + b"\n")
    with open(scratch, "rb") as file:
        os.fsync(file.fileno())
    with contextlib.suppress(FileExistsError):
        os.link(scratch, manifest)
    scratch.unlink()
    sync_folder(path)


def sync_folder(path: Path) -> None:
    """Make names created, renamed or removed in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ---- segments ------------------------------------------------------------------------------------------------------


class Segment:
    """One file of frames and where in it each position lies. The last of a writer may grow; others are closed.

    Frames of a growing segment are verified before they are listed. Frames of a closed one are listed by their
    headers and verified when first read. A frame once listed stays where it is, also if the file is unlinked.
    """

    def __init__(self, path: Path, first: int) -> None:
        self.path = path
        self.first = first
        self.next = first  # the position after the last listed frame
        self.end = 0  # the offset after the last listed frame
        self.lowest: bytes | None = None
        self.highest = b""
        self._firsts = array("q")
        self._offsets = array("q")
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._map: pa.Buffer | None = None
        self._verified: bytearray | None = None  # one flag per frame; None where all were verified when listed

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __len__(self) -> int:
        return len(self._firsts)

    def add(self, frame: frames.Frame) -> None:
        """List the frame that lies at `end`."""
        self._offsets.append(self.end)
        self._firsts.append(frame.first)
        self.lowest = frame.lowest if self.lowest is None else min(self.lowest, frame.lowest)
        self.highest = max(self.highest, frame.highest)
        self.end += frame.size
        self.next = frame.first + frame.rows

    def extend(self) -> str | None:
        """List what a growing segment has beyond `end`, verified.

        Returns why it stopped before the end of the file, None if it did not. Raises LogCorrupt where good frames
        follow a bad one: a torn tail has nothing after it, since a frame is synced before the next is begun.
        """
        size = os.fstat(self._fd).st_size
        while self.end < size:
            frame, fault = self._check(self.end, size)
            if frame is None:
                rest = os.pread(self._fd, size - self.end, self.end)
                later = frames.find_frame(rest)
                if later is None:
                    return fault
                # The writer may have finished this frame and another since we looked.
                frame, fault = self._check(self.end, size)
                if frame is None:
                    raise LogCorrupt(
                        f"{self.path} at offset {self.end}: {fault}, but a good frame follows at "
                        f"{self.end + later}; this is damage, not an interrupted write: restore the file from a copy"
                    )
            self.add(frame)
        return None

    def _check(self, offset: int, size: int) -> tuple[frames.Frame | None, str | None]:
        frame = frames.decode_header(os.pread(self._fd, frames.SIZE, offset))
        if frame is None:
            return None, "short header" if size - offset < frames.SIZE else "bad header checksum"
        if offset + frame.size > size:
            return None, "short frame"
        self._check_header(frame, offset)
        if not frames.is_body_good(frame, self._read(offset + frames.SIZE, frame.length)):
            return None, "bad checksum"
        return frame, None

    def _check_header(self, frame: frames.Frame, offset: int) -> None:
        if frame.first != self.next:
            raise LogCorrupt(
                f"{self.path} at offset {offset}: expected position {self.next}, found {frame.first}; "
                "a frame is missing: restore the file from a copy"
            )
        if frame.layout not in frames.LAYOUTS:
            raise BookTooNew(
                f"{self.path} at offset {offset} has columns of layout {frame.layout}; this is rollbook {__version__}, "
                f"which knows up to {max(frames.LAYOUTS)}: upgrade rollbook to read it"
            )

    def list_closed(self) -> None:
        """List a closed segment by its headers."""
        self.map()
        data = memoryview(self._map) if self._map is not None else memoryview(b"")
        while self.end < len(data):
            frame = frames.decode_header(data[self.end : self.end + frames.SIZE])
            if frame is None or self.end + frame.size > len(data):
                raise LogCorrupt(
                    f"{self.path} at offset {self.end}: bad header checksum in a segment that others follow; "
                    "restore the file from a copy"
                )
            self._check_header(frame, self.end)
            self.add(frame)
        self._verified = bytearray(len(self))

    def map(self) -> None:
        """Map the file as far as frames are listed, all of it where none are. The map outlives the file's name."""
        if (self._map is None or self._map.size < self.end) and os.fstat(self._fd).st_size:
            with pa.memory_map(f"/proc/self/fd/{self._fd}" if self._is_unlinked() else str(self.path)) as file:
                self._map = file.read_buffer()

    def _is_unlinked(self) -> bool:
        return os.fstat(self._fd).st_nlink == 0

    def batch(self, k: int) -> pa.RecordBatch:
        """Frame `k`. Zero copy where the file is mapped. Raises LogCorrupt."""
        offset = self._offsets[k]
        if self._map is not None and self._map.size >= self.end:
            header = memoryview(self._map)[offset : offset + frames.SIZE]
        else:
            header = memoryview(os.pread(self._fd, frames.SIZE, offset))
        frame = frames.decode_header(header)
        body = None if frame is None else self._read(offset + frames.SIZE, frame.length)
        is_verified = self._verified is None or self._verified[k]
        if frame is None or body is None or not (is_verified or frames.is_body_good(frame, body)):
            raise LogCorrupt(
                f"{self.path} at offset {offset}: bad checksum in the frame of position {self._firsts[k]}; "
                "restore the file from a copy"
            )
        if self._verified is not None:
            self._verified[k] = 1
        return frames.decode_body(frame, body)

    def _read(self, offset: int, length: int) -> pa.Buffer:
        if self._map is not None and self._map.size >= offset + length:
            return self._map.slice(offset, length)
        body = pa.allocate_buffer(length)
        view, done = memoryview(body), 0
        while done < length:
            n = os.preadv(self._fd, [view[done:]], offset + done)
            if n == 0:
                return body.slice(0, done)
            done += n
        return body

    def frame_of(self, position: int) -> int:
        """Which frame holds a position that is in [first, next)."""
        return bisect_right(self._firsts, position) - 1

    def ids(self) -> tuple["np.ndarray[Any, Any]", pa.Array]:
        """All event ids in order, as fingerprints and as they are."""
        columns = [self.batch(k).column("event_id") for k in range(len(self))]
        ids = pa.concat_arrays(columns) if columns else pa.array([], pa.binary(16))
        return frames.id_keys(ids), ids


class Chain:
    """The segments of one writer, in order and without gaps."""

    def __init__(self, book: Path, writer: str) -> None:
        self.writer = writer
        self.folder = book / "log" / writer
        self.segments: list[Segment] = []

    @property
    def next(self) -> int:
        return self.segments[-1].next if self.segments else 0

    def close(self) -> None:
        for segment in self.segments:
            segment.close()

    def refresh(self) -> str | None:
        """List what the writer has written since. Returns why the last segment's tail was left out, if it was."""
        if not self.segments:
            self._append_listed(self._names())
        while self.segments:
            last = self.segments[-1]
            fault = last.extend()
            # Only after `last` was seen complete, so that what was written to it before the next began is not missed.
            if last.next == last.first or not (self.folder / _name(last.next)).exists():
                return fault
            fault = last.extend()
            if fault is not None:
                raise LogCorrupt(
                    f"{last.path} at offset {last.end}: {fault} in a segment that others follow; "
                    "restore the file from a copy"
                )
            last.map()
            last.close()
            self._append_listed([name for name in self._names() if name >= last.next])
        return None

    def _names(self) -> list[int]:
        try:
            return sorted(int(n[:-4]) for n in os.listdir(self.folder) if n.endswith(".log") and n[:-4].isdigit())
        except FileNotFoundError:
            return []

    def _append_listed(self, firsts: list[int]) -> None:
        for i, first in enumerate(firsts):
            if first != self.next:
                raise LogCorrupt(
                    f"{self.folder}: expected a segment that begins at position {self.next}, found {_name(first)}; "
                    "a segment is missing: restore it from a copy"
                )
            segment = Segment(self.folder / _name(first), first)
            if i + 1 < len(firsts):
                segment.list_closed()
                segment.close()
            self.segments.append(segment)

    def find(self, position: int) -> Segment | None:
        i = bisect_right(self.segments, position, key=lambda s: s.first) - 1
        return self.segments[i] if i >= 0 and position < self.segments[i].next else None

    def batches(self, start: int) -> Iterator[pa.RecordBatch]:
        """What is listed now at or after `start`."""
        stop = self.next
        while start < stop:
            segment = self.find(start)
            if segment is None:
                return
            batch = segment.batch(segment.frame_of(start))
            batch = batch.slice(start - batch.column("position")[0].as_py())
            start += batch.num_rows
            yield batch


def _name(first: int) -> str:
    return f"{first:020d}.log"


# ---- which ids a writer has seen -----------------------------------------------------------------------------------


class SeenIds:
    """Event id -> first position, for every event of a writer, in bounded memory.

    Ids of the last segment are in a dict. Of closed segments only the range of ids is kept: event ids begin with the
    time, so a new event lies above all of them and needs one comparison. An id within a range is looked up in the
    segment's sorted fingerprints, which are read when first needed, and a hit is confirmed by the id itself.
    """

    def __init__(self) -> None:
        self.recent: dict[bytes, int] = {}
        self._closed: list[Segment] = []
        self._newest = b""
        self._sorted: OrderedDict[int, tuple[Any, Any, pa.Array]] = OrderedDict()

    def close_segment(self, segment: Segment) -> None:
        """A segment got its last event: forget its ids, remember their range."""
        self._closed.append(segment)
        self._newest = max(self._newest, segment.highest)
        self.recent.clear()

    def find(self, event_id: bytes) -> int | None:
        position = self.recent.get(event_id)
        if position is not None or event_id > self._newest:
            return position
        for segment in self._closed:
            if segment.lowest is not None and segment.lowest <= event_id <= segment.highest:
                position = self._find_in(segment, event_id)
                if position is not None:
                    return position
        return None

    def _find_in(self, segment: Segment, event_id: bytes) -> int | None:
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


@dataclass(eq=False, slots=True)
class _Request:
    events: tuple[Event, ...]
    future: "asyncio.Future[list[int]] | Future[list[int]]"
    loop: asyncio.AbstractEventLoop | None  # None: the future belongs to a thread
    positions: list[int] = field(default_factory=list)
    error: BaseException | None = None


class DirectoryLog:
    """See `log.Log`. With a writer name it appends under that name, alone; without one it only reads.

    roll_bytes: a segment that has reached it is closed and the next begun.
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
        sync: Callable[[int], None] = fdatasync,
    ) -> None:
        self.path = Path(path)
        self.repairs: list[Repair] = []
        self._writer = writer
        self._roll_bytes = roll_bytes
        self._sync = sync
        self._chains: dict[str, Chain] = {}
        self._reading = threading.RLock()  # around the chains; batches are read outside
        self._accepting = threading.Lock()  # around the queue and the two below
        self._is_closed = False
        self._failure: str | None = None
        self._queue: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if writer is None:
            check_book(self.path)
        else:
            if not _WRITER_NAME.fullmatch(writer):
                raise ValueError(
                    f"a writer name is 1 to 100 letters, digits, dots, dashes and underscores, got {writer!r}"
                )
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

    def _open_writer(self, writer: str) -> None:
        create_book(self.path)
        check_book(self.path)
        folder = self.path / "log" / writer
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            sync_folder(folder.parent)
            sync_folder(self.path)
        self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._fd = -1
        try:
            try:
                fcntl.flock(self._folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BookBusy(
                    f"another process appends to {self.path} as {writer!r}; give this one another writer name, "
                    "or stop the other"
                ) from None
            chain = self._chains[writer] = Chain(self.path, writer)
            fault = chain.refresh()
            if not chain.segments:
                self._begin_segment(chain)
                last = chain.segments[-1]
            else:
                last = chain.segments[-1]
                self._fd = os.open(last.path, os.O_WRONLY | os.O_CLOEXEC)
                self._cut(last, fault)
            self._seen = SeenIds()
            for segment in chain.segments[:-1]:
                self._seen.close_segment(segment)
            self._seen.recent = {id_: last.first + i for i, id_ in enumerate(last.ids()[1].to_pylist())}
        except BaseException:
            if self._fd >= 0:
                os.close(self._fd)
            os.close(self._folder_fd)
            raise

    def _cut(self, last: Segment, fault: str | None) -> None:
        size = os.fstat(self._fd).st_size
        if size > last.end:
            os.ftruncate(self._fd, last.end)
            repair = Repair(last.path, last.end, size - last.end, fault or "bytes after the last frame")
            self.repairs.append(repair)
            _log.warning(
                "%s: cut %d bytes of an interrupted write at offset %d (%s); nothing in them was acknowledged",
                repair.path,
                repair.dropped_bytes,
                repair.offset,
                repair.reason,
            )
        # Frames that were written but not synced when the process died are kept, so they must be durable now.
        self._sync(self._fd)

    def _begin_segment(self, chain: Chain) -> None:
        path = chain.folder / _name(chain.next)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.fsync(self._folder_fd)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        with self._reading:
            if chain.segments:
                chain.segments[-1].map()
                chain.segments[-1].close()
            chain.segments.append(Segment(path, chain.next))

    # ---- append

    @property
    def writer(self) -> str | None:
        return self._writer

    async def append(self, *events: Event) -> list[int]:
        if not events:
            return []
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[int]] = loop.create_future()
        self._submit(_Request(events, future, loop))
        return await future

    def append_blocking(self, *events: Event) -> list[int]:
        if not events:
            return []
        future: Future[list[int]] = Future()
        self._submit(_Request(events, future, None))
        return future.result()

    def _submit(self, request: _Request) -> None:
        for event in request.events:
            check(event)
        with self._accepting:
            if self._failure is not None:
                raise LogClosed(
                    f"the log of writer {self._writer!r} stopped after a failed write ({self._failure}); "
                    "see to the disk, then open the book again"
                )
            if self._is_closed or self._thread is None:
                raise LogClosed(
                    f"{self.path} was opened without a writer; open it with a writer name to append"
                    if self._writer is None
                    else f"log of writer {self._writer!r} is closed; open the book again to append"
                )
            self._queue.put(request)

    def _write_loop(self) -> None:
        """The writer's thread: take what is waiting, commit it, answer. Ends on None or after a failure."""
        is_open = True
        while is_open:
            requests: list[_Request] = []
            n_events = n_bytes = 0
            item = self._queue.get()
            while True:
                if item is None:
                    is_open = False
                    break
                requests.append(item)
                n_events += len(item.events)
                n_bytes += sum(map(_size_bytes, item.events))
                if n_events >= _DRAIN_EVENTS or n_bytes >= _DRAIN_BYTES:
                    break
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
            try:
                self._commit(requests)
            except OSError as error:
                self._stop(requests, error)
                is_open = False
            _answer(requests)

    def _commit(self, requests: list[_Request]) -> None:
        chain = self._chains[self._writer or ""]
        fresh: dict[bytes, Event] = {}
        taken: dict[bytes, int] = {}
        first = chain.next
        for request in requests:
            request.positions = []
            for event in request.events:
                id_ = event.event_id
                position = self._seen.find(id_)
                if position is None:
                    position = taken.get(id_)
                if position is None:
                    position = taken[id_] = first + len(fresh)
                    fresh[id_] = event
                request.positions.append(position)
        if not fresh:
            return
        try:
            batch = to_batch(list(fresh.values()), writer=chain.writer, first_position=first)
        except BadEvent as error:
            if len(requests) == 1:
                requests[0].error = error
                return
            for request in requests:  # one of them is bad: the others must not suffer for it
                self._commit([request])
            return
        if chain.segments[-1].end >= self._roll_bytes:
            self._begin_segment(chain)
            self._seen.close_segment(chain.segments[-2])
        self._write(chain.segments[-1], frames.encode(batch, first, min(fresh), max(fresh)))
        self._seen.recent.update(taken)

    def _write(self, segment: Segment, buffers: "list[bytes | memoryview]") -> None:
        frame = frames.decode_header(buffers[0])
        assert frame is not None
        offset, left = segment.end, buffers
        try:
            while left:
                n = os.pwritev(self._fd, left, offset)
                offset += n
                while left and n >= len(left[0]):
                    n -= len(left[0])
                    left = left[1:]
                if n:
                    left = [memoryview(left[0])[n:], *left[1:]]
            self._sync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):  # the next opener would cut it too
                os.ftruncate(self._fd, segment.end)
            raise
        segment.add(frame)

    def _stop(self, requests: list[_Request], error: OSError) -> None:
        what = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        message = (
            f"could not write to the log in {self.path}: {what}; nothing of this append is acknowledged and the log "
            "takes no more: free or repair the disk, then open the book again and append the same events again"
        )
        with self._accepting:
            self._failure = what
            while True:
                try:
                    waiting = self._queue.get_nowait()
                except queue.Empty:
                    break
                if waiting is not None:
                    requests.append(waiting)
        for request in requests:
            request.error = LogWriteFailed(message)
            request.error.__cause__ = error
        _log.error("%s", message)

    # ---- read

    def read(self, cursor: Cursor = START) -> Iterator[pa.RecordBatch]:
        self._refresh()
        for writer, chain in sorted(self._chains.items()):
            yield from chain.batches(cursor.get(writer, 0))

    def _refresh(self) -> None:
        with self._reading:
            try:
                writers = os.listdir(self.path / "log")
            except FileNotFoundError:
                writers = []
            for writer in writers:
                if writer not in self._chains and _WRITER_NAME.fullmatch(writer):
                    self._chains[writer] = Chain(self.path, writer)
                # Our own segments are listed as they become durable.
                if writer in self._chains and (writer != self._writer or self._is_closed):
                    self._chains[writer].refresh()

    async def follow(self, cursor: Cursor = START) -> AsyncIterator[pa.RecordBatch]:
        wait_s = _POLL_S[0]
        while True:
            is_last = self._is_closed
            self._refresh()
            if any(chain.next > cursor.get(writer, 0) for writer, chain in list(self._chains.items())):
                wait_s = _POLL_S[0]
                batches = self.read(cursor)
                # In a thread: what is far behind comes from a disk.
                while (batch := await anyio.to_thread.run_sync(next, batches, None)) is not None:
                    cursor = advance(cursor, batch)
                    yield batch
            if is_last:
                return
            await anyio.sleep(wait_s)
            wait_s = min(wait_s * 1.3, _POLL_S[1])

    def gather(self, pointers: Sequence[tuple[str, int]]) -> pa.Table:
        rows: list[pa.RecordBatch] = []
        parsed: dict[tuple[str, int, int], pa.RecordBatch] = {}
        is_fresh = False
        for writer, position in pointers:
            segment = self._find(writer, position)
            if segment is None and not is_fresh:
                self._refresh()
                is_fresh = True
                segment = self._find(writer, position)
            if segment is None:
                raise KeyError(f"no event at position {position} of writer {writer!r}")
            k = segment.frame_of(position)
            batch = parsed.get((writer, segment.first, k))
            if batch is None:
                with self._reading:
                    segment.map()
                batch = parsed[writer, segment.first, k] = segment.batch(k)
            rows.append(batch.slice(position - batch.column("position")[0].as_py(), 1))
        return pa.Table.from_batches(rows, SCHEMA)

    def _find(self, writer: str, position: int) -> Segment | None:
        chain = self._chains.get(writer)
        return None if chain is None else chain.find(position)

    # ---- close

    def close(self) -> None:
        with self._accepting:
            if self._is_closed:
                return
            self._is_closed = True
            self._queue.put(None)
        if self._thread is not None:
            self._thread.join()
            os.close(self._fd)
            os.close(self._folder_fd)  # gives the writer's name back
        with self._reading:
            self._chains.clear()  # reading goes on to work: it lists the files anew


def _size_bytes(event: Event) -> int:
    arrays = (event.prompt_ids, event.output_ids, event.logprobs, event.versions, event.entropies)
    return len(event.messages or b"") + 4 * sum(len(a) for a in arrays if a is not None)


def _answer(requests: list[_Request]) -> None:
    """Wake who waits: threads one by one, each event loop once for all of its tasks."""
    loops: dict[asyncio.AbstractEventLoop, list[_Request]] = {}
    for request in requests:
        if request.loop is not None:
            loops.setdefault(request.loop, []).append(request)
        else:
            _resolve([request])
    for loop, theirs in loops.items():
        with contextlib.suppress(RuntimeError):  # that loop has been closed: nobody waits there any more
            loop.call_soon_threadsafe(_resolve, theirs)


def _resolve(requests: list[_Request]) -> None:
    for request in requests:
        if request.future.done():  # its caller was cancelled; the events stay
            continue
        if request.error is not None:
            request.future.set_exception(request.error)
        else:
            request.future.set_result(request.positions)
