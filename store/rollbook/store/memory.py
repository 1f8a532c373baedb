"""A log in memory: for tests, notebooks and programs that want no files. Durable as long as the process.

Several writers share one book through `MemoryLog.sibling`, as several processes share a directory.
"""

import threading
from bisect import bisect_right
from collections.abc import AsyncGenerator, Iterator, Sequence

import anyio
import pyarrow as pa

from .appending import Numbering
from .errors import LogClosed
from .events import Event
from .log import START, Cursor, TokenPlaces, advance, gather_rows
from .rows import Row, admit, batch_of, token_places_of


class MemoryLog:
    """See `log.Log`."""

    def __init__(self, writer: str = "memory", *, _book: dict[str, list[pa.RecordBatch]] | None = None) -> None:
        self._writer = writer
        self._book: dict[str, list[pa.RecordBatch]] = {} if _book is None else _book
        self._book.setdefault(writer, [])
        self._next = sum(b.num_rows for b in self._book[writer])
        self._seen: dict[bytes, int] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def sibling(self, writer: str) -> "MemoryLog":
        """Another writer of the same book."""
        return MemoryLog(writer, _book=self._book)

    @property
    def writer(self) -> str:
        return self._writer

    async def append(self, *events: Event) -> list[int]:
        return self.append_blocking(*events)

    def append_blocking(self, *events: Event) -> list[int]:
        return self.append_rows_blocking([admit(event) for event in events])

    def append_rows_blocking(self, admitted: Sequence[Row]) -> list[int]:
        with self._lock:
            if self._is_closed:
                raise LogClosed(f"log of writer {self._writer!r} is closed; open the book again to append")
            numbering = Numbering(self._next, self._seen.get, self._stored)
            positions = numbering.take(admitted)
            if numbering.fresh:
                batch = batch_of(numbering.fresh, self._writer, self._next)
                self._book[self._writer].append(batch)
                self._next += len(numbering.fresh)
                self._seen.update(numbering.taken)
            return positions

    def _stored(self, position: int) -> pa.RecordBatch:
        first, batch = self._batch_at(self._writer, position)
        return batch.slice(position - first, 1)

    def read(self, cursor: Cursor = START) -> Iterator[pa.RecordBatch]:
        for writer in list(self._book):
            start = cursor.get(writer, 0)
            for batch in list(self._book[writer]):
                first = batch.column("position")[0].as_py()
                if first + batch.num_rows > start:
                    yield batch.slice(max(0, start - first))

    async def follow(self, cursor: Cursor = START) -> AsyncGenerator[pa.RecordBatch, None]:
        while True:
            for batch in self.read(cursor):
                cursor = advance(cursor, batch)
                yield batch
            if self._is_closed:
                return
            await anyio.sleep(0.002)

    def gather(self, pointers: Sequence[tuple[str, int]]) -> pa.Table:
        return gather_rows(pointers, self._batch_at)

    def token_places(self, writer: str, position: int) -> TokenPlaces:
        first, batch = self._batch_at(writer, position)
        return TokenPlaces(first, token_places_of(batch), batch, 0, 0)

    def _batch_at(self, writer: str, position: int) -> tuple[int, pa.RecordBatch]:
        batches = self._book.get(writer, [])
        k = bisect_right(batches, position, key=lambda b: b.column("position")[0].as_py()) - 1
        if k >= 0:
            first = batches[k].column("position")[0].as_py()
            if position < first + batches[k].num_rows:
                return first, batches[k]
        raise KeyError(f"no event at position {position} of writer {writer!r}")

    def close(self) -> None:
        self._is_closed = True
