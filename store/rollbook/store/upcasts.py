"""Old facts read as new ones. An event is never rewritten; what changed since it was recorded is applied on reading.

A new shape of a fact raises `events.SCHEMA_VERSION` and adds one function here, from the JSON of the version before to
that of the next, and one golden book in `tests/golden`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ._version import __version__
from .errors import BookTooNew
from .events import SCHEMA_VERSION

Upcast = Callable[[dict[str, Any]], dict[str, Any]]

UPCASTS: Mapping[tuple[str, int], Upcast] = {}
"""(kind, version) -> the fact of that version as one of the next. A kind that did not change needs none."""


def upcast(
    kind: str,
    version: int,
    payload: bytes,
    *,
    upcasts: Mapping[tuple[str, int], Upcast] = UPCASTS,
    current: int = SCHEMA_VERSION,
) -> bytes:
    """The payload of an event of an older version as one of the current version. Raises BookTooNew for a newer one."""
    if version > current:
        raise BookTooNew(
            f"the book has events of version {version}; this is rollbook {__version__}, which reads up to {current}: "
            "upgrade rollbook to read it"
        )
    steps = [upcasts[kind, step] for step in range(version, current) if (kind, step) in upcasts]
    if not steps:
        return payload
    fact = msgspec.json.decode(payload)
    for step in steps:
        fact = step(fact)
    return msgspec.json.encode(fact)
