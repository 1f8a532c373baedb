"""The segments of a writer: where each position lies, in files that grow, are closed or are sealed.

    BOOK/log/<writer>/<first>.log                  frames; only a writer's last one grows
    BOOK/sealed/<writer>/<first>-<next>.parquet    the same events, compressed, written once

`first` is the position of the first event, `next` the one after the last. Segments of a writer have no gaps between
them; where a sealed one and its log exist both (a kill came between), they hold the same and the log is read. Both
kinds have one shape here: numbered frames, which are record batches in order of position.
"""

import functools
import os
import stat
import struct
import threading
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from . import frames
from ._version import __version__
from .errors import BookTooNew, LogCorrupt
from .events import SCHEMA

fdatasync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)

Ids = tuple["np.ndarray[Any, Any]", pa.Array]
"""Event ids in order: their fingerprints (see `frames.id_keys`) and themselves."""


SYNCED = "synced"
"""Beside a writer's logs: the position up to which its events are durable; see `Said`.

Without it a reader in another process could act on an event that a power cut then takes away, and that others take
the position of. It is written after the sync and not synced itself, so it may lag behind, after a power cut far (see
`Segment.extend`), and is never ahead: a log that ends before it has lost what was acknowledged.
"""
_SAID = struct.Struct("<QQI")  # position; inode of the file; CRC-32 of these two
_DAMAGED = ("bad checksum", "bad header checksum")  # of bytes that are there, not of a file that ends too early


class Said(NamedTuple):
    """What `SYNCED` says. is_own: its writer wrote it here. A copy of the file has another inode, and a copy of a live
    book holds it as it was some moments before or after the segments beside it."""

    position: int
    is_own: bool


NOTHING_SAID = Said(0, False)


def encode_said(position: int, inode: int) -> bytes:
    body = _SAID.pack(position, inode, 0)[:16]
    return body + crc32(body).to_bytes(4, "little")


def decode_said(data: bytes, inode: int) -> Said:
    """NOTHING_SAID where the file is empty, half-written or damaged."""
    if len(data) == 8:  # of Rollbook before November 2026
        return Said(int.from_bytes(data, "little"), False)
    if len(data) < _SAID.size:
        return NOTHING_SAID
    position, own, crc = _SAID.unpack_from(data)
    return Said(position, own == inode) if crc == crc32(data[:16]) else NOTHING_SAID


NOT_SYNCED = "not synced yet"
GO_ON = "go on without what is lost by `rollbook verify BOOK --accept-loss`"


def log_name(first: int) -> str:
    return f"{first:020d}.log"


def sealed_name(first: int, next_: int) -> str:
    return f"{first:020d}-{next_:020d}.parquet"


class _File:
    """A descriptor that is closed when nobody uses it any more, in whichever thread that is."""

    def __init__(self, path: Path) -> None:
        # A pipe would be waited for.
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        found = os.fstat(self.fd)
        if not stat.S_ISREG(found.st_mode):
            raise LogCorrupt(f"{path} is no file; remove what stands there and restore the file from a copy")
        self.inode = found.st_ino

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


class Segment:
    """One file of frames and where in it each position lies. The last of a writer may grow; others are closed.

    Frames of a growing segment are verified before they are listed. Frames of a closed one are listed by their
    headers and verified when first read. A frame once listed stays where it is, also if the file is unlinked.
    """

    written = (0, 0)
    """Once, see `Sealed.written`."""

    def __init__(self, path: Path, first: int) -> None:
        self.path = path
        self.first = first
        self.next = first  # the position after the last listed frame
        self.end = 0  # the offset after the last listed frame
        self.lowest = b""
        self.highest = b""
        self.newest = b""  # the highest id in this and all earlier segments of the writer
        self._firsts = array("q")
        self._offsets = array("q")
        # Closing is letting go of these two, the map last made before the file is dropped; so a reader in another
        # thread that took either first goes on with it.
        self._file: _File | None = _File(path)
        self._map: pa.Buffer | None = None
        self._waiting_since = 0.0  # when a frame was first seen that its writer has not said to be synced
        self._verified: bytearray | None = None  # one flag per frame; None where all were verified when listed

    def close(self) -> None:
        """The file has got its last frame."""
        self.map()
        self._file = None

    def __len__(self) -> int:
        return len(self._firsts)

    def add(self, frame: frames.Frame) -> None:
        """List the frame that lies at `end`."""
        self.lowest = min(self.lowest, frame.lowest) if len(self) else frame.lowest
        self.highest = max(self.highest, frame.highest)
        self.newest = max(self.newest, frame.highest)
        self._offsets.append(self.end)
        self._firsts.append(frame.first)
        self.end += frame.size
        self.next = frame.first + frame.rows

    def extend(self, synced: int | None = None, patience_s: float = 0.0) -> str | None:
        """List what a growing segment has beyond `end`, verified and durable.

        synced: the position up to which the writer has said that events are durable; None where they are known to
        be. A frame beyond it is waited for until it has been seen for `patience_s`, then it is synced from here: its
        writer may have died before it could say so.

        Returns why it stopped before the end of the file, None if it did not. Raises LogCorrupt where good frames
        follow a bad one: a torn tail has nothing after it, since a frame is synced before the next is begun.
        """
        if self._file is None:
            return None
        size = os.fstat(self._file.fd).st_size
        while self.end < size:
            frame, fault = self._check(self.end, size)
            if frame is None:
                rest = os.pread(self._file.fd, size - self.end, self.end)
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
            if synced is not None and frame.first + frame.rows > synced:
                self._waiting_since = self._waiting_since or time.monotonic()
                if time.monotonic() - self._waiting_since < patience_s:
                    return NOT_SYNCED
                fdatasync(self._file.fd)  # all of `size` is durable then
                synced = None
            self._waiting_since = 0.0
            self.add(frame)
        return None

    def _check(self, offset: int, size: int) -> tuple[frames.Frame | None, str | None]:
        frame = frames.decode_header(self._read(offset, frames.SIZE))
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
        assert self._file is not None
        self._map = self._mapped(self._file)
        self._file = None
        data = memoryview(self._map)
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
        """Map what is listed; the map outlives the file's name. What is not listed may yet be cut off by an opening
        writer, and touching a mapped page that has been cut kills the process."""
        if self._file is not None and (self._map is None or self._map.size < self.end):
            self._map = self._mapped(self._file).slice(0, self.end)

    def _mapped(self, file: _File) -> pa.Buffer:
        if not os.fstat(file.fd).st_size:
            return pa.py_buffer(b"")
        # By descriptor: the name may have gone, since a sealed segment's log is removed.
        with pa.memory_map(f"/dev/fd/{file.fd}") as mapped:
            return mapped.read_buffer()

    def finish(self) -> None:
        """The writer has gone on to the next segment: this one is whole now, or damaged."""
        fault = self.extend()
        if fault is not None:
            raise LogCorrupt(
                f"{self.path} at offset {self.end}: {fault} in a segment that others follow; "
                "restore the file from a copy"
            )
        self.close()

    @property
    def is_growing(self) -> bool:
        return self._file is not None

    @property
    def is_unlinked(self) -> bool:
        return self._file is not None and os.fstat(self._file.fd).st_nlink == 0

    def batch(self, k: int) -> pa.RecordBatch:
        """Frame `k`. Zero copy where the file is mapped. Raises LogCorrupt."""
        return frames.decode_body(*self.frame(k))

    def frame(self, k: int) -> tuple[frames.Frame, pa.Buffer]:
        """Header and body of frame `k`, verified. Raises LogCorrupt."""
        offset = self._offsets[k]
        frame = frames.decode_header(self._read(offset, frames.SIZE))
        body = None if frame is None else self._read(offset + frames.SIZE, frame.length)
        is_verified = self._verified is None or self._verified[k]
        if frame is None or body is None or not (is_verified or frames.is_body_good(frame, body)):
            raise LogCorrupt(
                f"{self.path} at offset {offset}: bad checksum in the frame of position {self._firsts[k]}; "
                "restore the file from a copy"
            )
        if self._verified is not None:
            self._verified[k] = 1
        return frame, body

    def _read(self, offset: int, length: int) -> pa.Buffer:
        """Shorter where the file ends."""
        file, mapped = self._file, self._map
        if mapped is not None and (file is None or mapped.size >= offset + length):
            return mapped.slice(offset, min(length, mapped.size - offset))
        if file is None:
            return pa.py_buffer(b"")
        buffer = pa.allocate_buffer(length)
        view, done = memoryview(buffer), 0
        while done < length:
            n = os.preadv(file.fd, [view[done:]], offset + done)
            if n == 0:
                return buffer.slice(0, done)
            done += n
        return buffer

    def frame_of(self, position: int) -> int:
        """Which frame holds a position that is in [first, next)."""
        return bisect_right(self._firsts, position) - 1

    def ids(self) -> Ids:
        columns = [self.batch(k).column("event_id") for k in range(len(self))]
        ids = pa.concat_arrays(columns) if columns else pa.array([], pa.binary(16))
        return frames.id_keys(ids), ids


class Sealed:
    """One Parquet file. Its footer is read when first needed: a book has thousands of these."""

    def __init__(self, path: Path, first: int, next_: int) -> None:
        self.path = path
        self.first = first
        self.next = next_

    def __len__(self) -> int:
        return self._file().n_frames

    @property
    def lowest(self) -> bytes:
        return self._file().lowest

    @property
    def highest(self) -> bytes:
        return self._file().highest

    @property
    def newest(self) -> bytes:
        return self._file().newest

    @property
    def content_crc(self) -> int:
        """See `sealing.content_crc`: of all row groups in order, when they were written."""
        return self._file().content_crc

    @property
    def written(self) -> tuple[int, int]:
        """Which writing of the file is there now: another one after `prune`."""
        found = os.stat(self.path)
        return found.st_ino, found.st_mtime_ns

    def _file(self) -> "_ParquetFile":
        file = _open_parquet(str(self.path), *self.written)
        if (file.first, file.n_rows) != (self.first, self.next - self.first):
            raise LogCorrupt(
                f"{self.path} holds {file.n_rows} events from position {file.first} on, and not what its name says; "
                "restore the file from a copy"
            )
        return file

    def frame_of(self, position: int) -> int:
        """Which row group holds a position that is in [first, next)."""
        return bisect_right(self._file().starts, position - self.first) - 1

    def batch(self, k: int, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Row group `k`, decoded, or only some columns of it. Raises LogCorrupt."""
        return self._file().read(k, None if columns is None else list(columns))

    def first_of(self, k: int) -> int:
        """Position of the first row of row group `k`."""
        return self.first + self._file().starts[k]

    def ids(self) -> Ids:
        file = self._file()
        columns = [file.read(k, ["event_id"]).column(0) for k in range(file.n_frames)]
        ids = pa.concat_arrays(columns)
        return frames.id_keys(ids), ids

    def map(self) -> None:
        """Nothing to do: see `Segment.map`."""

    def close(self) -> None:
        """Nothing is held."""


class _ParquetFile:
    """An open sealed file: mapped, so that it can be replaced (by `prune`) while it is read."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            with pa.memory_map(path) as file:
                self._file = pq.ParquetFile(pa.BufferReader(file.read_buffer()), page_checksum_verification=True)
            footer = self._file.metadata
            notes = footer.metadata or {}
            self.content_crc = int(notes[SEALED_CRC], 16)
            self.lowest, self.highest, self.newest = (bytes.fromhex(notes[k].decode()) for k in SEALED_IDS)
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise self._corrupt(error) from error
        self.n_frames, self.n_rows = footer.num_row_groups, footer.num_rows
        about = footer.row_group(0).column(0).statistics if self.n_frames else None  # of `position`
        self.first = None if about is None else about.min
        self.starts = [0]
        for k in range(self.n_frames - 1):
            self.starts.append(self.starts[-1] + footer.row_group(k).num_rows)
        self._lock = threading.Lock()

    def read(self, k: int, columns: list[str] | None) -> pa.RecordBatch:
        try:
            with self._lock:
                table = self._file.read_row_group(k, columns=columns)
            table = table.cast(pa.schema([SCHEMA.field(name) for name in table.column_names]))
            (batch,) = table.combine_chunks().to_batches()
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise self._corrupt(error) from error
        return batch

    def _corrupt(self, error: Exception) -> LogCorrupt:
        reason = " ".join(str(error).split())
        return LogCorrupt(f"{self.path}: not a readable sealed segment ({reason}); restore the file from a copy")


SEALED_IDS = (b"rollbook.lowest", b"rollbook.highest", b"rollbook.newest")
"""What a sealed file's footer says about the event ids in it, in hex; the last is of all earlier segments too."""
SEALED_CRC = b"rollbook.content_crc"


@functools.lru_cache(maxsize=64)
def _open_parquet(path: str, inode: int, mtime_ns: int) -> _ParquetFile:
    return _ParquetFile(path)


class Chain:
    """The segments of one writer, in order and without gaps. Whoever calls `refresh` holds a lock."""

    def __init__(self, book: Path, writer: str) -> None:
        self.writer = writer
        self.folder = book / "log" / writer
        self.sealed_folder = book / "sealed" / writer
        self.segments: list[Segment | Sealed] = []
        self._synced: _File | None = None
        self.said = NOTHING_SAID
        """When `refresh` last began."""

    @property
    def next(self) -> int:
        return self.segments[-1].next if self.segments else 0

    def refresh(self, patience_s: float = 0.0) -> str | None:
        """List what the writer has made durable since. Returns why the last segment's tail was left out, if it was.

        Raises LogCorrupt for damage, and for an end below what the writer has said to be durable.
        """
        fault = self.look(patience_s)
        lost = self.lost(fault)
        if lost is not None:
            # On a shared file system another machine may show an old size of a file that has long been open.
            self.segments, self._synced = [], None
            fault = self.look(patience_s)
            lost = self.lost(fault)
            if lost is not None:
                raise LogCorrupt(f"{lost}: restore the folder from a copy, or {GO_ON}")
        return fault

    def lost(self, fault: str | None) -> str | None:
        """What is wrong with the end of the log, where it is below what was acknowledged. fault: of `look`.

        The end of a copy proves nothing, unless the bytes that follow are damaged.
        """
        if self.next >= self.said.position or not (self.said.is_own or fault in _DAMAGED):
            return None
        last = self.segments[-1] if self.segments else None
        where = f"at offset {last.end} of {last.path}: {fault}" if isinstance(last, Segment) and fault else "files end"
        return (
            f"{self.folder}: the log of {self.writer!r} ends at position {self.next} ({where}), but its events up to "
            f"position {self.said.position} were acknowledged"
        )

    def look(self, patience_s: float = 0.0) -> str | None:
        """`refresh`, wherever the log ends."""
        self.said = said = self._read_said()  # before looking: what it speaks of is there to be seen then
        last = self.segments[-1] if self.segments else None
        if isinstance(last, Segment):
            fault = last.extend(said.position, patience_s)
            if (last.next == last.first or not (self.folder / log_name(last.next)).exists()) and not last.is_unlinked:
                return fault
        self._list()
        last = self.segments[-1] if self.segments else None
        return last.extend(self._read_said().position, patience_s) if isinstance(last, Segment) else None

    def _read_said(self) -> Said:
        """What the writer said last, see `SYNCED`."""
        if self._synced is None:
            try:
                self._synced = _File(self.folder / SYNCED)
            except FileNotFoundError:
                return NOTHING_SAID
        said = decode_said(os.pread(self._synced.fd, 64, 0), self._synced.inode)
        if said is NOTHING_SAID:  # the writer may have been at it
            said = decode_said(os.pread(self._synced.fd, 64, 0), self._synced.inode)
        return said

    def _list(self) -> None:
        """Read the folders. A log may be sealed and removed while we look: then we look again."""
        for attempt in range(20):
            try:
                self.segments = self._listed()
                return
            except FileNotFoundError as error:
                if attempt == 19:
                    raise LogCorrupt(f"{error.filename} leads nowhere; restore the file from a copy") from error

    def _listed(self) -> list["Segment | Sealed"]:
        known = {(type(s), s.first): s for s in self.segments}
        # The logs first: what is sealed between the two looks is seen at least once.
        logs = {int(n[:-4]) for n in _listdir(self.folder) if n.endswith(".log") and n[:-4].isdigit()}
        sealed = {}
        for name in _listdir(self.sealed_folder):
            begin, _, end = name.removesuffix(".parquet").partition("-")
            if name.endswith(".parquet") and begin.isdigit() and end.isdigit():
                if int(begin) in sealed:
                    raise LogCorrupt(
                        f"{self.sealed_folder} has two files that begin at position {int(begin)}; remove the wrong one"
                    )
                sealed[int(begin)] = int(end)
        firsts = sorted(logs | sealed.keys())
        segments: list[Segment | Sealed] = []
        for first in firsts:
            before = segments[-1] if segments else None
            expected = before.next if before else 0
            if first != expected:
                raise LogCorrupt(
                    f"{self.folder}: expected a segment that begins at position {expected}, found {first}; "
                    "a segment is missing: restore it from a copy"
                )
            segment: Segment | Sealed
            if first in logs:
                old = known.get((Segment, first))
                segment = old if isinstance(old, Segment) else Segment(self.folder / log_name(first), first)
                if before is not None and not len(segment):
                    segment.newest = before.newest
                if first != firsts[-1] and segment.is_growing:
                    if len(segment):
                        segment.finish()
                    else:
                        segment.list_closed()
            else:
                next_position = sealed[first]
                segment = Sealed(self.sealed_folder / sealed_name(first, next_position), first, next_position)
            segments.append(segment)
        return segments

    def find(self, position: int) -> "Segment | Sealed | None":
        segments = self.segments
        i = bisect_right(segments, position, key=lambda s: s.first) - 1
        return segments[i] if i >= 0 and position < segments[i].next else None

    def batches(self, start: int) -> Iterator[pa.RecordBatch]:
        """What is listed now at or after `start`."""
        stop = self.next
        while start < stop:
            segment = self.find(start)
            if segment is None:
                return
            batch = segment.batch(segment.frame_of(start))
            writer = batch.column("writer")[0].as_py()
            if writer != self.writer:
                raise LogCorrupt(
                    f"{segment.path} holds events of {writer!r}, not of {self.writer!r}: a folder of a log that was "
                    "renamed or copied; give it its name back, or remove the copy"
                )
            batch = batch.slice(start - batch.column("position")[0].as_py())
            start += batch.num_rows
            yield batch


def _listdir(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []
