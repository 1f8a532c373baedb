"""Notices an agent that blocks the event loop, says where, and moves it.

`timed` drives an agent's coroutine and measures each step between two awaits: a step is the agent's own doing, however
busy the loop is. After the second long step its later episodes run on loops in threads of their own, where blocking
hurts nobody else (once may be an import or a first connection). A thread looks at the stack meanwhile, to say where.
Steps of tasks that the agent starts itself are not seen.
"""

import asyncio
import logging
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_log = logging.getLogger("rollbook.agents")

BLOCKED_S = 1.0
"""A step that takes longer blocks the loop."""
STRIKES = 2

_HERE = os.path.dirname(os.path.abspath(__file__))
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_LOOP_FILES = tuple(os.path.join("asyncio", name) for name in ("events.py", "base_events.py", "runners.py"))


class Blocking:
    """What is known of an agent's steps."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.strikes = 0
        self.since: float | None = None  # monotonic; the step that runs now
        self.where: str | None = None

    @property
    def is_proven(self) -> bool:
        """Whether to keep the agent off the loop."""
        return self.strikes >= STRIKES

    def ended(self, seconds: float) -> None:
        """A step took so long."""
        if seconds < BLOCKED_S or self.is_proven:
            return
        self.strikes += 1
        if self.is_proven:
            _log.warning(
                "%s blocked the event loop for %.1f s%s; its next episodes run in threads of their own. "
                "Use async calls there, or the subproc mode.",
                self.name,
                seconds,
                f" at {self.where}" if self.where else "",
            )


class timed(Generator[Any, Any, T]):
    """`await timed(coroutine, blocking)` is `await coroutine`, with each step measured."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], blocking: Blocking) -> None:
        self._coroutine = coroutine
        self._blocking = blocking

    def __await__(self) -> "timed[T]":
        return self

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._coroutine.throw, *error)

    def close(self) -> None:
        self._coroutine.close()

    def _step(self, advance: Any, *value: Any) -> Any:
        blocking = self._blocking
        began = blocking.since = time.monotonic()
        try:
            return advance(*value)
        finally:
            blocking.since = None
            blocking.ended(time.monotonic() - began)


@contextmanager
def watching(blocking: Blocking | None) -> Iterator[None]:
    """Look where the running loop's thread is whenever a step takes long."""
    if blocking is None or blocking.is_proven:
        yield
        return
    asyncio.get_running_loop()
    done = threading.Event()
    watch = threading.Thread(
        target=_look, args=(blocking, threading.get_ident(), done), name="watch for blocking agents", daemon=True
    )
    watch.start()
    try:
        yield
    finally:
        done.set()


def _look(blocking: Blocking, thread_id: int, done: threading.Event) -> None:
    while not (done.wait(BLOCKED_S / 4) or blocking.is_proven):
        since = blocking.since
        if since is not None and time.monotonic() - since > BLOCKED_S / 2:
            blocking.where = _place(sys._current_frames().get(thread_id)) or blocking.where


def _place(frame: FrameType | None) -> str | None:
    """The innermost code of a stack that is neither Python's, nor an installed package's, nor ours."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.endswith(_LOOP_FILES):
            return None
        if not name.startswith((_HERE, *_LIBRARIES, "<")):
            return f"{os.path.basename(name)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return None
