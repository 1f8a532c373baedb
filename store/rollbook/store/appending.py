"""How events get into a log that one thread writes: callers turn them into rows and wait, the thread answers them.

What is waiting when the thread comes back for more shares its next commit.
"""

import asyncio
import contextlib
import logging
import os
import queue
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from . import rows
from .errors import BadEvent, LogClosed, LogWriteFailed
from .events import Event, from_batch

APPEND_BYTES = (1 << 31) - (32 << 20)  # of one append: Arrow's offsets have 31 bits, and others share its commit
WRITER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

_log = logging.getLogger("rollbook.store")


@dataclass(eq=False, slots=True)
class Request:
    """One append. Without rows it waits for its turn and nothing else."""

    rows: Sequence[rows.Row]
    size_bytes: int
    future: "asyncio.Future[list[int]] | Future[list[int]]"
    loop: asyncio.AbstractEventLoop | None  # None: the future belongs to a thread
    positions: list[int] = field(default_factory=list)
    error: BaseException | None = None


class Appending:
    """Base of such a log. The subclass starts `_thread`, which takes requests from `_queue` until None comes.

    place: what a person looks after when a write failed, e.g. "the disk".

    Raises ValueError for a name that is none.
    """

    def __init__(self, path: Path, writer: str | None, place: str) -> None:
        if writer is not None and not WRITER_NAME.fullmatch(writer):
            raise ValueError(f"a writer name is 1 to 100 letters, digits, dots, dashes and underscores, got {writer!r}")
        self.path = path
        self._writer = writer
        self._place = place
        self._pid = os.getpid()
        self._accepting = threading.Lock()  # around the three below
        self._is_closed = False
        self._failure: str | None = None
        self._queue: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def writer(self) -> str | None:
        return self._writer

    async def append(self, *events: Event) -> list[int]:
        """See `log.Log`."""
        if not events:
            return []
        admitted = [rows.admit(event) for event in events]
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[int]] = loop.create_future()
        self._submit(_request(admitted, future, loop))
        return await future

    def append_blocking(self, *events: Event) -> list[int]:
        """See `log.Log`."""
        return self.append_rows_blocking([rows.admit(event) for event in events])

    def append_rows_blocking(self, admitted: Sequence[rows.Row]) -> list[int]:
        """See `log.Log`."""
        if not admitted:
            return []
        future: Future[list[int]] = Future()
        self._submit(_request(admitted, future, None))
        return future.result()

    def _submit(self, request: Request) -> None:
        if os.getpid() != self._pid:  # forked: the thread that writes is the parent's
            raise LogClosed(f"{self.path} was opened by process {self._pid}, not by this one; open the book again here")
        with self._accepting:
            if self._failure is not None:
                raise LogClosed(
                    f"the log of writer {self._writer!r} stopped after a failed write ({self._failure}); "
                    f"see to {self._place}, then open the book again"
                )
            if self._is_closed or self._thread is None:
                raise LogClosed(
                    f"{self.path} was opened without a writer; open it with a writer name to append"
                    if self._writer is None
                    else f"log of writer {self._writer!r} is closed; open the book again to append"
                )
            self._queue.put(request)

    def _stop_accepting(self) -> bool:
        """Close the queue. False if it was closed before."""
        with self._accepting:
            if self._is_closed:
                return False
            self._is_closed = True
            self._queue.put(None)
        return True

    def _fail(self, requests: list[Request], what: str, message: str, cause: Exception) -> None:
        """Take no more. `requests`, to which those are added that still wait, get the message as LogWriteFailed."""
        with self._accepting:
            self._failure = what
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting = self._queue.get_nowait()
                    if waiting is not None:
                        requests.append(waiting)
        for request in requests:
            request.error = LogWriteFailed(message)
            request.error.__cause__ = cause
        _log.error("%s", message)


class Numbering:
    """Gives each event of a commit its position: a known one by `find`, else the next from `first` on.

    stored: the event at a known position, one row. An id that is there with other content is refused.
    """

    def __init__(
        self, first: int, find: Callable[[bytes], int | None], stored: Callable[[int], pa.RecordBatch]
    ) -> None:
        self._first = first
        self._find = find
        self._stored = stored
        self.fresh: list[rows.Row] = []  # those that are new, in order
        self.taken: dict[bytes, int] = {}  # event id -> position of them

    def take(self, events: Sequence[rows.Row]) -> list[int]:
        """The positions of the events of one append. Raises BadEvent, and then has taken none of them."""
        n = len(self.fresh)
        positions: list[int] = []
        try:
            for row in events:
                id_ = row[1]
                position = self._find(id_)
                if position is not None:
                    (event,) = from_batch(self._stored(position))
                    _refuse_other(row, rows.encode(event), position)
                elif (position := self.taken.get(id_)) is not None:
                    _refuse_other(row, self.fresh[position - self._first], position)
                else:
                    position = self.taken[id_] = self._first + len(self.fresh)
                    self.fresh.append(row)
                positions.append(position)
        except BadEvent:
            for row in self.fresh[n:]:
                del self.taken[row[1]]
            del self.fresh[n:]
            raise
        return positions

    def take_all(self, requests: Sequence[Request]) -> None:
        """Give every request its positions, or its error."""
        for request in requests:
            try:
                request.positions = self.take(request.rows)
            except BadEvent as error:
                request.error = error


def _refuse_other(row: rows.Row, stored: rows.Row, position: int) -> None:
    column = rows.difference(row, stored)
    if column is not None:
        raise BadEvent(
            f"event {row[1].hex()} is already at position {position}, and with another {column}; what is written "
            "stays: append the same event again, or a new one under an id of its own"
        )


def answer(requests: Sequence[Request]) -> None:
    """Wake who waits: threads one by one, each event loop once for all of its tasks."""
    loops: dict[asyncio.AbstractEventLoop, list[Request]] = {}
    for request in requests:
        if request.loop is not None:
            loops.setdefault(request.loop, []).append(request)
        else:
            _resolve([request])
    for loop, theirs in loops.items():
        with contextlib.suppress(RuntimeError):  # that loop has been closed: nobody waits there any more
            loop.call_soon_threadsafe(_resolve, theirs)


def _request(
    admitted: Sequence[rows.Row],
    future: "asyncio.Future[list[int]] | Future[list[int]]",
    loop: asyncio.AbstractEventLoop | None,
) -> Request:
    """Raises BadEvent."""
    size = rows.size_bytes(admitted)
    if size > APPEND_BYTES:
        raise BadEvent(f"one append of {size} bytes, the most is {APPEND_BYTES}; append fewer events at once")
    return Request(admitted, size, future, loop)


def _resolve(requests: list[Request]) -> None:
    for request in requests:
        if request.future.done():  # its caller was cancelled; the events stay
            continue
        if request.error is not None:
            request.future.set_exception(request.error)
        else:
            request.future.set_result(request.positions)
