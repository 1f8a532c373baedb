"""The hot way to a sampling server: JSON out, server-sent events in, over kept-alive HTTP/1.1 connections.

One protocol object per connection and nothing else: no task, no queue, no timer per request. What comes is kept until
it is read, and events that came together are read together, so a reader that takes its time holds up nobody. Whatever
a server is asked besides answers goes through aiohttp (`served.py`).
"""

import asyncio
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

import httptools

_IDLE = 256
"""Connections that are kept for the next request."""


class Upstream:
    """Connections to one server, e.g. http://127.0.0.1:8000. Made when they are needed, kept while they live."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.url = url
        self._host, self._port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._base = parts.path.rstrip("/").encode()
        self._name = parts.netloc.rpartition("@")[2].encode()
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._is_closed = False

    async def post(self, path: str, body: bytes, on_end: Callable[[], None], *, pace_s: float = 0.0) -> "Answer":
        """Send a request; returns when the answer's head is there. `on_end` is called once, when the answer is whole,
        broken off or closed, and not where this raises. pace_s: see `Answer`. Raises OSError, and ValueError for what
        is no HTTP."""
        head = b"POST %b%b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (
            self._base,
            path.encode(),
            self._name,
            len(body),
        )
        while True:
            connection, is_fresh = await self._connection()
            answer = Answer(connection, pace_s)
            connection.answer = answer
            connection.transport.writelines((head, body))
            try:
                await answer.head()
            except ConnectionError:
                if is_fresh or answer.has_begun or self._is_closed:
                    raise
                continue  # the server had closed the connection before it had the request
            except BaseException:
                answer.close()
                raise
            if answer.is_over:
                on_end()
            else:
                answer.on_end = on_end
            return answer

    async def _connection(self) -> "tuple[_Connection, bool]":
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                return connection, False
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: _Connection(self), self._host, self._port, ssl=self._tls
        )
        return connection, True

    def close(self) -> None:
        """Cut every connection; answers in progress raise ConnectionError where they are read."""
        self._is_closed = True
        for connection in list(self._all):
            connection.transport.abort()
        self._idle.clear()

    def keep(self, connection: "_Connection") -> None:
        """A connection that is free again."""
        if len(self._idle) < _IDLE and not self._is_closed:
            self._idle.append(connection)
        else:
            connection.transport.abort()


class Answer:
    """An answer on its way. Close it when nobody reads on; one that is whole gives its connection back by itself.

    pace_s: what comes closer together than this is read together. The first, what comes after a silence, and the end
    wait for nothing.
    """

    __slots__ = (
        "_connection",
        "_error",
        "_pace_s",
        "_parts",
        "_read_at",
        "_timer",
        "_waiter",
        "has_begun",
        "is_over",
        "on_end",
        "status",
    )

    def __init__(self, connection: "_Connection", pace_s: float = 0.0) -> None:
        self._connection: _Connection | None = connection
        self._pace_s = pace_s
        self._read_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._parts: list[bytes] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.has_begun = False
        self.is_over = False  # nothing more comes
        self.on_end: Callable[[], None] | None = None
        self.status = 0

    async def head(self) -> None:
        """Wait for the status."""
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def more(self) -> bytes:
        """What has come since, at least a byte; b"" at the end. Raises ConnectionError where it breaks off."""
        while not self._parts:
            if self._error is not None:
                raise self._error
            if self.is_over:
                return b""
            await self._wait()
        parts, self._parts = self._parts, []
        if self._pace_s:
            self._read_at = asyncio.get_running_loop().time()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def read(self) -> bytes:
        """All that is left."""
        parts = []
        while part := await self.more():
            parts.append(part)
        return b"".join(parts)

    def drain(self) -> None:
        """What is left says nothing: it is thrown away, and the connection kept. For who has read the end."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.answer = Answer(connection)
            connection.answer.on_end, self.on_end = self.on_end, None
            connection.answer.status = self.status

    def close(self) -> None:
        """Nobody reads on. Closing the connection is how a server learns of it. Twice is once."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.answer = None
            connection.transport.abort()
            self.finish(None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    # What its connection tells it

    def begin(self, status: int) -> None:
        self.status = status
        self._wake()

    def feed(self, data: bytes) -> None:
        self._parts.append(data)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def wake(self) -> None:
        """All that came at once has been fed."""
        if self._waiter is None or not self._parts or self._timer is not None:
            return
        if self._pace_s:
            loop = asyncio.get_running_loop()
            wait_s = self._read_at + self._pace_s - loop.time()
            if wait_s > 0:
                self._timer = loop.call_later(wait_s, self._wake)
                return
        self._wake()

    def finish(self, error: Exception | None) -> None:
        self._connection, self._error, self.is_over = None, error, True
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()
        self._wake()


class _Connection(asyncio.Protocol):
    transport: asyncio.Transport
    answer: Answer | None = None

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._upstream._all.add(self)

    def data_received(self, data: bytes) -> None:
        answer = self.answer
        if answer is None:
            self.transport.abort()  # nobody asked
            return
        answer.has_begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(ValueError(f"the server at {self._upstream.url} does not speak HTTP: {error}"))
            self.transport.abort()
            return
        answer.wake()

    def eof_received(self) -> bool:
        # An answer without a length ends here; the parser knows of no other way to say so.
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._upstream._all.discard(self)
        if self in self._upstream._idle:
            self._upstream._idle.remove(self)
        self._end(
            ConnectionError(f"the server at {self._upstream.url} closed the connection{f': {error}' if error else ''}")
        )

    def _end(self, error: Exception | None) -> None:
        answer, self.answer = self.answer, None
        if answer is not None:
            answer.finish(error)

    # The parser's callbacks

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self.answer is not None and status >= 200:
            self.answer.begin(status)

    def on_body(self, data: bytes) -> None:
        if self.answer is not None:
            self.answer.feed(data)

    def on_message_complete(self) -> None:
        if self.answer is not None and not self.answer.status:
            return  # 100 Continue and its like
        self._end(None)
        if self._parser.should_keep_alive():
            self._parser = httptools.HttpResponseParser(self)
            self._upstream.keep(self)
        else:
            self.transport.close()


class Events:
    """Cuts what comes of a streamed answer into the data of its server-sent events."""

    __slots__ = ("_rest", "is_done")

    def __init__(self) -> None:
        self._rest = b""
        self.is_done = False  # [DONE] came

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that are now whole."""
        if self._rest:
            data = self._rest + data
        found: list[bytes] = []
        at = 0
        while (end := data.find(b"\n", at)) >= 0:  # `split` looks at byte after byte, and answers are long
            if data.startswith(b"data:", at):
                event = data[at + 5 : end].strip()
                if event == b"[DONE]":
                    self.is_done = True
                    break
                found.append(event)
            at = end + 1
        self._rest = data[at:]
        return found
