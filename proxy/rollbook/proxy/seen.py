"""What an episode's last requests began with, so that of the next one only what is new is read.

A turn of a long conversation sends all of it again, byte for byte, and a little more. Whether a body begins as an
earlier one did is told by a hash of those bytes (15 GB/s); then JSON is decoded, and messages checked, from there on
only. What is read is exactly what the whole body says: the text up to the end of the known messages stands for them.
"""

import hashlib
from typing import Any

import msgspec
from xxhash import xxh3_128_digest

from .request import Message

_KEPT = 8
"""Conversations of an episode that are told apart: sub-agents take turns."""

_LEAST = 4_000
"""Bytes of a body below which nothing is gained."""


class _Listed(msgspec.Struct):
    messages: msgspec.Raw


_find_messages = msgspec.json.Decoder(_Listed).decode


class _Known(msgspec.Struct, frozen=True, gc=False):
    """A body up to the end of its last message: `end` bytes, and what they said."""

    end: int
    mark: bytes  # the last bytes of it, for a quick no
    digest: bytes
    head: bytes  # up to the bracket that opens the list
    messages: list[Message]
    sha: Any  # hashlib's state after these bytes

    def begins(self, body: bytes) -> bool:
        end = self.end
        return (
            body[end : end + 1] == b","
            and body.startswith(self.mark, end - len(self.mark))
            and xxh3_128_digest(memoryview(body)[:end]) == self.digest
        )


class Rest(msgspec.Struct, frozen=True, gc=False):
    """What is new in a body: JSON without the messages that are known."""

    text: bytes
    listed: int  # bytes of its list of messages
    known: _Known

    @property
    def messages(self) -> list[Message]:
        """The known ones; not to be written to."""
        return self.known.messages


class Seen:
    """The newest requests of one episode."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: list[_Known] = []

    def recall(self, body: bytes) -> Rest | None:
        """What is new, where the body begins as an earlier one did and more messages follow."""
        known = next((known for known in self._known if known.begins(body)), None)
        if known is None:
            return None
        text = known.head + body[known.end + 1 :]
        place = _place(text)
        # Another list of messages may come later in the body, and would be the one that counts.
        return Rest(text, place[1], known) if place is not None and place[0] == len(known.head) - 1 else None

    def keep(self, read: "Read") -> None:
        """Remember a body whose request was answered. One that was not may be anything, and of any size."""
        if read.known is not None:
            self._known = [known for known in self._known if known is not read.known]
        if read.now is not None:
            self._known.insert(0, read.now)
            del self._known[_KEPT:]


class Read(msgspec.Struct, frozen=True, gc=False):
    """A body that was read. sha256: hex."""

    sha256: str
    now: _Known | None
    known: _Known | None


def read(body: bytes, rest: Rest | None, messages: list[Message]) -> Read:
    """What is to be remembered of a body and all of its messages; rest: what `recall` said."""
    known = None
    if rest is not None:
        known = rest.known
        sha, done, head = known.sha.copy(), known.end, known.head
        end = len(body) - len(rest.text) + len(head) + rest.listed - 2
    else:
        sha, done = hashlib.sha256(), 0
        place = _place(body) if len(body) >= _LEAST else None
        if place is None:
            sha.update(body)
            return Read(sha.hexdigest(), None, None)
        head = body[: place[0] + 1]
        end = place[0] + place[1] - 1
    view = memoryview(body)
    sha.update(view[done:end])
    now = _Known(end, body[max(0, end - 64) : end], xxh3_128_digest(view[:end]), head, messages, sha.copy())
    sha.update(view[end:])
    return Read(sha.hexdigest(), now, known)


def _place(text: bytes) -> tuple[int, int] | None:
    """Where a body's list of messages begins, and its length, both in bytes; None where that is not certain."""
    try:
        listed = bytes(_find_messages(text).messages)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # the whole body will say what is wrong
        return None
    return (text.find(listed), len(listed)) if text.count(listed) == 1 else None
