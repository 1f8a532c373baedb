"""The log of a served book, for programs that don't share its disk.

Events are appended under the server's writer name; it gives the positions and keeps them durable before it answers.
Ids are given here, so a call whose answer was lost is simply made again.

    GET  /events?cursor={"w": 3}&wait_s=1   -> Arrow IPC stream from the cursor on; empty after wait_s of nothing
    POST /events       Arrow IPC stream     -> {"writer": "serve", "positions": [17, 18]}
    POST /events/rows  [["serve", 17]]      -> Arrow IPC stream of those events
"""

import io
import json
import ssl
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import anyio.to_thread
import httpx
import pyarrow as pa

from .errors import BadEvent, BookNotFound, LogClosed, LogWriteFailed, StoreError
from .events import SCHEMA, Event
from .log import START, Cursor, TokenPlaces, advance
from .rows import Row, admit, batch_of, token_places_of

_WAIT_S = 1.0  # that a follower's request waits for news; so long `close` may take to end it
_FRAME_ROWS = 256


class HttpLog:
    """See `log.Log`.

    url: the server's address; key: its admin key.

    Raises BookNotFound where nobody answers there, or not to this key.
    """

    def __init__(self, url: str, key: str, *, timeout_s: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self._key = key
        self._timeout_s = timeout_s
        self._tls = ssl.create_default_context() if self.url.startswith("https:") else False  # made once: it is slow
        self._is_closed = False
        self._ends: dict[str, int] = {}  # writer -> the next position, of what was read
        self._client = self._connect()
        try:
            self._writer = self._writer_there()
        except BaseException:
            self._client.close()
            raise

    def _connect(self) -> httpx.Client:
        return httpx.Client(
            headers={"authorization": f"Bearer {self._key}"},
            timeout=self._timeout_s,
            transport=httpx.HTTPTransport(retries=2, verify=self._tls),  # retries of connecting
        )

    def _writer_there(self) -> str | None:
        try:
            answer = self._client.post(f"{self.url}/events/rows", content=b"[]")
        except httpx.HTTPError as error:
            raise BookNotFound(f"no book is served at {self.url} ({error}); check the address") from error
        if answer.status_code != 200:
            raise BookNotFound(
                f"{self.url} does not serve its events to this key: {answer.status_code}, {_message(answer)}"
            )
        return answer.headers.get("rollbook-writer")

    @property
    def writer(self) -> str | None:
        return self._writer

    async def append(self, *events: Event) -> list[int]:
        return await anyio.to_thread.run_sync(self.append_blocking, *events)

    def append_blocking(self, *events: Event) -> list[int]:
        return self.append_rows_blocking([admit(event) for event in events])

    def append_rows_blocking(self, admitted: Sequence[Row]) -> list[int]:
        if not admitted:
            return []
        batch = batch_of(admitted, self._writer or "", 0)
        self._require_open()
        try:
            answer = self._client.post(f"{self.url}/events", content=encode_stream([batch]))
        except httpx.HTTPError as error:
            raise LogWriteFailed(
                f"no answer from {self.url} ({error}); the events may be recorded or not: append the same ones again"
            ) from error
        if answer.status_code in (400, 413):
            raise BadEvent(_message(answer))
        if answer.status_code != 200:
            raise LogWriteFailed(
                f"{self.url} did not record the events: {answer.status_code}, {_message(answer)}; "
                "append the same ones again"
            )
        positions: list[int] = answer.json()["positions"]
        return positions

    def read(self, cursor: Cursor = START) -> Iterator[pa.RecordBatch]:
        return self._read(cursor, 0)

    def _read(self, cursor: Cursor, wait_s: float) -> Iterator[pa.RecordBatch]:
        query: dict[str, Any] = {"cursor": json.dumps(dict(cursor)), "wait_s": wait_s}
        try:
            # On a connection of its own: what is being read when the log is closed is read to its end.
            with self._connect() as client, client.stream("GET", f"{self.url}/events", params=query) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise StoreError(f"{self.url} gave no events: {answer.status_code}, {_message(answer)}")
                # Buffered: Arrow takes a short read for the end.
                body = io.BufferedReader(_Body(answer.iter_bytes(1 << 20)), 1 << 20)
                for batch in pa.ipc.open_stream(pa.PythonFile(body, mode="r")):
                    self._ends = {**self._ends, **advance({}, batch)}
                    yield batch
        except httpx.HTTPError as error:
            raise StoreError(f"{self.url} stopped answering ({error}); read on from the cursor reached") from error

    async def follow(self, cursor: Cursor = START) -> AsyncGenerator[pa.RecordBatch, None]:
        while True:
            is_last = self._is_closed
            batches = self._read(cursor, 0 if is_last else _WAIT_S)
            while (batch := await anyio.to_thread.run_sync(next, batches, None)) is not None:
                cursor = advance(cursor, batch)
                yield batch
            if is_last:
                return

    def gather(self, pointers: Sequence[tuple[str, int]]) -> pa.Table:
        self._require_open()
        try:
            answer = self._client.post(f"{self.url}/events/rows", content=json.dumps(list(pointers)).encode())
        except httpx.HTTPError as error:
            raise StoreError(f"no answer from {self.url} ({error}); ask again") from error
        if answer.status_code == 404:
            raise KeyError(_message(answer))
        if answer.status_code != 200:
            raise StoreError(f"{self.url} gave no events: {answer.status_code}, {_message(answer)}")
        return pa.ipc.open_stream(answer.content).read_all()

    def token_places(self, writer: str, position: int) -> TokenPlaces:
        # With its neighbours, as far as they are known to be there: whoever reads one row comes back for the next.
        end = min(self._ends.get(writer, 0), position + _FRAME_ROWS)
        stored = self.gather([(writer, at) for at in range(position, max(end, position + 1))])
        (batch,) = stored.combine_chunks().to_batches()
        return TokenPlaces(position, token_places_of(batch), batch, batch.get_total_buffer_size(), 0)

    def _require_open(self) -> None:
        if self._is_closed:
            raise LogClosed(f"log at {self.url} is closed; open the book again")

    def close(self) -> None:
        self._is_closed = True
        self._client.close()


class _Body(io.RawIOBase):
    """An answer's bytes as a file, as they come."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = parts
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            self._rest = memoryview(next(self._parts, b""))
        n = min(len(buffer), len(self._rest))
        buffer[:n] = self._rest[:n]
        self._rest = self._rest[n:]
        return n


def encode_stream(batches: "Iterator[pa.RecordBatch] | list[pa.RecordBatch]") -> bytes:
    """Batches of SCHEMA as one Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def encode_stream_parts(batches: Iterator[pa.RecordBatch]) -> Iterator[bytes]:
    """The same piece by piece, a batch at a time in memory."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        for batch in batches:
            writer.write_batch(batch)
            yield sink.getvalue()
            sink.seek(0)
            sink.truncate()
    yield sink.getvalue()


def decode_stream(body: bytes) -> list[pa.RecordBatch]:
    """Reverse of `encode_stream`. Raises BadEvent for anything but a whole stream of SCHEMA."""
    try:
        reader = pa.ipc.open_stream(body)
        if not reader.schema.equals(SCHEMA):
            raise BadEvent(f"expected an Arrow stream with the columns {', '.join(SCHEMA.names)}; got {reader.schema}")
        batches = list(reader)
        for batch in batches:
            batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, BadEvent):
            raise
        raise BadEvent(f"expected an Arrow IPC stream of events, got {len(body)} other bytes: {error}") from error
    return batches


def _message(answer: httpx.Response) -> str:
    try:
        message: str = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
    return message
