"""HTTP as the completion routes speak it: bare ASGI messages, read and written without a framework in between.

Limits are kept here: body size and time, what a key looks like, how long a client may take nothing.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, Protocol

from .errors import BadRequest, Busy, ProxyError, TooLarge, WrongMethod

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]

JSON: Header = (b"content-type", b"application/json")
SSE: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class ClientGone(Exception):
    """The connection closed before its request was whole."""


def bearer(headers: Mapping[bytes, bytes]) -> str | None:
    """The key that came: `Authorization: Bearer KEY` (in any case) or `x-api-key: KEY`."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer" or not key.strip():
        key = headers.get(b"x-api-key", b"")
    return key.strip().decode("latin-1") or None


class Connection(Protocol):
    """What our own server (`listener.Protocol`) can do beyond ASGI, in a scope's `rollbook.connection`. It does at once
    what would take several messages, coroutines and timers. A scope that is not of the request that the connection is
    at gets nothing."""

    def body(self, scope: Scope) -> bytes | None:
        """The request's body, if all of it has come; once."""
        ...

    def answer(self, scope: Scope, status: int, headers: Iterable[Header], body: bytes) -> bool:
        """Give a whole answer. False where that must be waited for, and nothing was done."""
        ...

    def write(self, scope: Scope, body: bytes, *, is_last: bool) -> bool:
        """Give more of an answer that has begun. False where that must be waited for, and nothing was done."""
        ...

    def watch(self, leave: Callable[[], None]) -> Callable[[], None]:
        """Have `leave` called when the client goes; returns what ends that."""
        ...


class Room:
    """Memory for the bodies of all requests that are read or answered now. Others are told to come back."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used = 0

    def hold(self) -> "Held":
        return Held(self)


class Held:
    """What one request holds of the room, until it gives it back."""

    __slots__ = ("_room", "n")

    def __init__(self, room: Room) -> None:
        self._room = room
        self.n = 0

    def grow(self, n: int) -> None:
        """Hold n bytes, if that is more than now. Raises Busy."""
        room, more = self._room, n - self.n
        if more <= 0:
            return
        if room.used + more > room.max_bytes and room.used > self.n:
            raise Busy(
                f"requests of {room.used} bytes are being answered, and with this one it would be more than "
                f"{room.max_bytes}; come back in a moment",
                retry_after_s=1,
            )
        room.used += more
        self.n = n

    def give_back(self) -> None:
        """Twice is once."""
        self._room.used -= self.n
        self.n = 0


def connection_of(scope: Scope) -> Connection | None:
    """None under another server."""
    connection: Connection | None = scope.get("rollbook.connection")
    return connection


async def read_body(
    scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, held: Held, *, max_bytes: int, seconds: float
) -> bytes:
    """The whole request body, which `held` then holds. Raises TooLarge, Busy, BadRequest if it takes too long, and
    ClientGone."""
    encoding = headers.get(b"content-encoding", b"identity")
    if encoding.lower() != b"identity":
        raise BadRequest(f"content-encoding {encoding.decode('latin-1')!r} is not taken; send the body as it is")
    length = headers.get(b"content-length", b"")
    told = int(length) if length.isdigit() and len(length) < 20 else 0
    if told > max_bytes:
        if told <= 4 * max_bytes:
            await _discard(receive)
        raise TooLarge(f"the body has {told} bytes, the most is {max_bytes}; shorten the request")
    held.grow(told)
    connection = connection_of(scope)
    if connection is not None and (whole := connection.body(scope)) is not None:
        if len(whole) > max_bytes:
            raise TooLarge(f"the body has {len(whole)} bytes, the most is {max_bytes}; shorten the request")
        held.grow(len(whole))
        return whole
    try:
        async with asyncio.timeout(seconds):
            message = await receive()
            body: bytes = message.get("body", b"")
            if message.get("more_body"):
                parts, size = [body], len(body)
                while message.get("more_body") and size <= max_bytes:
                    message = await receive()
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    held.grow(size)
                body = b"".join(parts)
    except TimeoutError:
        raise BadRequest(f"the body did not come within {seconds:g} s; send the request again") from None
    if message["type"] == "http.disconnect":
        raise ClientGone
    if len(body) > max_bytes:
        await _discard(receive)
        raise TooLarge(f"the body has more than {max_bytes} bytes; shorten the request")
    return body


async def _discard(receive: Receive) -> None:
    """Take what is on its way for a moment, so that the client comes to read the refusal."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1):
            while (await receive()).get("more_body"):
                pass


def watch(scope: Scope, receive: Receive, leave: Callable[[], None]) -> Callable[[], None]:
    """Have `leave` called when the client of a whole request goes; returns what ends that.

    Our own server tells without a task (`listener.Protocol`); under another one the next message tells.
    """
    connection = connection_of(scope)
    if connection is not None:
        return connection.watch(leave)
    task = asyncio.ensure_future(receive())
    task.add_done_callback(lambda _: leave())
    return task.cancel  # type: ignore[return-value]


async def answer(scope: Scope, send: Send, status: int, body: bytes, headers: Iterable[Header] = (JSON,)) -> None:
    """A whole answer at once."""
    connection = connection_of(scope)
    if connection is not None and connection.answer(scope, status, headers, body):
        return
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, (b"content-length", b"%d" % len(body))],
        }
    )
    await send({"type": "http.response.body", "body": body})


def error_headers(error: ProxyError) -> list[Header]:
    """Tell SDKs whether asking again can help, and when; and of a wrong method which are right."""
    can_retry = error.retry_after_s is not None
    headers = [JSON, (b"x-should-retry", b"true" if can_retry else b"false")]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, round(error.retry_after_s))))
        headers.append((b"retry-after-ms", b"%d" % round(error.retry_after_s * 1000)))
    if isinstance(error, WrongMethod):
        headers.append((b"allow", error.allow.encode()))
    if error.status in (408, 413):
        headers.append((b"connection", b"close"))  # what is left of the body is not wanted
    return headers
