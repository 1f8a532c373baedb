"""uvicorn with what it lacks against broken or hostile clients: limits on connections and headers, and on the time to
send them."""

import errno
import re
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from .wire import Header, Scope

HEADER_S = 15.0
"""How long a client may take over a request's headers."""


MOST_WAITING = 64
"""Requests of one connection that wait for the answer to one before them."""

_FULL = (
    b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b"
)
_WHY = (
    b'{"error":{"message":"this server has as many connections as it may; come back, or keep fewer open",'
    b'"type":"rate_limit_error","param":null,"code":"too_many_connections"}}'
)
_FULL = _FULL % (len(_WHY), _WHY)

_FILES_KEPT = 256
"""Descriptors that the log, the engine and the like may need beside connections."""


def most_connections(wanted: int) -> int:
    """As many as are wanted, or as the process may have files for."""
    try:
        import resource
    except ImportError:
        return wanted
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, max(16, soft - _FILES_KEPT))


_GONE = getattr(select, "POLLRDHUP", 0)
"""What a socket says whose other end was closed, before all that came is read; Linux knows it."""

_UPGRADE = re.compile(rb"(?i)\r\nupgrade:")


class _Flow(FlowControl):
    """Nothing more is read while requests wait behind the one that is answered: each would be held in memory."""

    def __init__(self, transport: Any, waiting: "deque[Any]") -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if not self._waiting:
            super().resume_reading()


class _ToTheEnd(RequestResponseCycle):
    """An answer to HTTP/1.0, which knows no chunks: one without a length ends with its connection."""

    is_open_ended = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            names = [name.lower() for name, _ in message.get("headers", ())]
            self.is_open_ended = b"content-length" not in names
            if self.is_open_ended:
                self.chunked_encoding = False
        elif self.is_open_ended:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class Protocol(HttpToolsProtocol):
    """One connection. Its headers have a limit, and a time that `sweep` looks at: no timer per request."""

    max_header_bytes = 64 << 10
    max_connections = 1 << 30
    headers_since: float | None = None  # monotonic; None while no headers are due
    _header_bytes = 0
    _on_lost: Callable[[], None] | None = None
    _is_lost = False
    _is_in_body = False
    _answered: RequestResponseCycle | None = None  # the request that is being answered; `cycle` is the newest

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)
        self.headers_since = time.monotonic()
        if len(self.connections) > self.max_connections:
            transport.write(_FULL)
            transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _cut_off(self) -> None:
        """Whoever answers writes nothing more: uvloop raises where a transport is closed."""
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(msg)
        self._cut_off()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._cut_off()
        super().connection_lost(exc)
        if self._on_lost is not None:
            self._on_lost()

    def has_left_unread(self) -> bool:
        """Whether the client is gone, where it cannot show: nothing is read while requests wait for their turn."""
        if not _GONE or not self.pipeline or self.transport.is_closing():
            return False
        looking = select.poll()
        looking.register(self.transport.get_extra_info("socket"), _GONE)
        return bool(looking.poll(0))

    def watch(self, leave: Callable[[], None]) -> Callable[[], None]:
        """Call `leave` when the connection is lost, until what is returned is called."""
        if self._is_lost:
            leave()
        self._on_lost = leave
        self.flow.resume_reading()  # who does not read does not notice
        return self._unwatch

    def _unwatch(self) -> None:
        self._on_lost = None

    def body(self, scope: Scope) -> bytes | None:
        """See `wire.Connection`."""
        cycle = self.cycle
        if cycle.scope is not scope or cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        return body

    def answer(self, scope: Scope, status: int, headers: Iterable[Header], body: bytes) -> bool:
        """See `wire.Connection`."""
        cycle = self.cycle
        if cycle.scope is not scope or cycle.response_started or cycle.disconnected or self.flow.write_paused:
            return False
        if scope["method"] == "HEAD":  # has no body
            return False
        head = [STATUS_LINE[status], b"content-length: %d\r\n" % len(body)]
        for header in headers:
            if header[0] == b"connection":
                cycle.keep_alive = False
            else:
                head.append(b"%b: %b\r\n" % header)
        if not cycle.keep_alive:
            head.append(b"connection: close\r\n")
        head += (b"\r\n", body)
        self.transport.write(b"".join(head))
        cycle.response_started = True
        self._complete()
        return True

    def write(self, scope: Scope, body: bytes, *, is_last: bool) -> bool:
        """See `wire.Connection`."""
        cycle = self.cycle
        if cycle.scope is not scope or not cycle.chunked_encoding or cycle.disconnected or self.flow.write_paused:
            return False
        self.transport.write(b"%x\r\n%b\r\n%b" % (len(body), body, b"0\r\n\r\n" if is_last else b""))
        if is_last:
            self._complete()
        return True

    def _complete(self) -> None:
        """As uvicorn does it at the end of an answer."""
        cycle = self.cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["rollbook.connection"] = self  # type: ignore[typeddict-unknown-key]
        self._header_bytes = 0
        if self.headers_since is None:
            self.headers_since = time.monotonic()

    def on_url(self, url: bytes) -> None:
        self._header_bytes += len(url)
        if self._header_bytes <= self.max_header_bytes:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + 32
        if self._header_bytes <= self.max_header_bytes:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.headers_since = None
        if self._header_bytes > self.max_header_bytes:
            raise ValueError("headers over the limit")  # the parser stops; `data_received` answers and closes
        if len(self.pipeline) >= MOST_WAITING:
            raise ValueError("too many requests at once")  # likewise
        self._is_in_body = True
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = _ToTheEnd  # its task has not begun

    def on_message_complete(self) -> None:
        self._is_in_body = False
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if not self._is_in_body and (end := data.find(b"\r\n\r\n")) > 0 and b"pgrade:" in data[:end]:
            # Java's client offers HTTP/2 with every request. Who does not want that goes on as if it had not been said,
            # but the parser would take the request to end with its headers.
            data = _UPGRADE.sub(b"\r\nx-pgrad:", data[:end]) + data[end:]
        super().data_received(data)
        if self._header_bytes > self.max_header_bytes and not self.transport.is_closing():
            self.send_400_response("The request's headers are over the limit.")


class Server(uvicorn.Server):
    """A server inside a program that has its own signals."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_listening = anyio.Event()
        self._stop = anyio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_listening.set()

    async def main_loop(self) -> None:
        while not self._stop.is_set():
            late = time.monotonic() - HEADER_S
            for connection in list(self.server_state.connections):
                assert isinstance(connection, Protocol)
                since = connection.headers_since
                if since is not None and since < late:
                    connection.transport.close()
                elif connection.has_left_unread():
                    connection.transport.abort()
            with anyio.move_on_after(1):
                await self._stop.wait()

    def stop(self) -> None:
        """Take no more, and let what is in progress finish."""
        self.should_exit = True
        self._stop.set()


def bind(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """A socket that listens; port 0 is one that is free. Raises OSError, naming the address.

    is_shared: other processes listen there as well, and each gets some of the connections.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind((host, port))
        listening.listen(2048)
        listening.setblocking(False)
    except OverflowError as error:
        listening.close()
        raise OSError(errno.EINVAL, f"cannot listen on port {port}: it must be 0 to 65535; choose another") from error
    except OSError as error:
        listening.close()
        raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror}; choose another") from error
    return listening
