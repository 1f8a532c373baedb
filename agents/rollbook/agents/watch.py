"""Notices an agent that blocks the event loop, and names it.

A thread asks the loop for a sign of life. When none comes in time it looks at what the loop's thread is doing; if an
agent's code is on that stack, that agent blocks. The second time it is moved: its later episodes run on loops in
threads of their own, where blocking hurts nobody else. (Once may be an import or a first connection.)
"""

import asyncio
import logging
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from .workflow import AsyncAgent, Workflow

_log = logging.getLogger("rollbook.agents")

BLOCKED_S = 0.5
"""A loop that gives no sign of life for this long is blocked."""

_HERE = os.path.dirname(os.path.abspath(__file__))
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_LOOP_FILES = tuple(os.path.join("asyncio", name) for name in ("events.py", "base_events.py", "runners.py"))


@contextmanager
def watching(workflow: Workflow) -> Iterator[None]:
    """Watch the running loop meanwhile."""
    if not isinstance(workflow, AsyncAgent) or workflow.is_moved:
        yield
        return
    watch = _Watch(workflow)
    try:
        yield
    finally:
        watch.closed.set()


class _Watch:
    def __init__(self, agent: AsyncAgent) -> None:
        self.closed = threading.Event()
        self._agent = agent
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._times_blocked = 0
        threading.Thread(target=self._run, name="loop watch", daemon=True).start()

    def _run(self) -> None:
        while not (self.closed.is_set() or self._agent.is_moved):
            alive = threading.Event()
            try:
                self._loop.call_soon_threadsafe(alive.set)
            except RuntimeError:
                return  # the loop is closed
            if not alive.wait(BLOCKED_S):
                self._look()
                while not alive.wait(0.1):
                    if self.closed.is_set() or self._loop.is_closed():
                        return
            self.closed.wait(BLOCKED_S / 5)

    def _look(self) -> None:
        frame = sys._current_frames().get(self._thread_id)
        where = None if frame is None else agent_code(frame, self._agent)
        if where is None:
            return
        self._times_blocked += 1
        if self._times_blocked == 2:
            self._agent.is_moved = True
            _log.warning(
                "%s blocked the event loop for more than %.1f s at %s; its next episodes run in threads of their own. "
                "Use async calls there, or the subproc mode.",
                self._agent.name,
                BLOCKED_S,
                where,
            )


def agent_code(frame: FrameType | None, agent: AsyncAgent) -> str | None:
    """Where in a person's code the stack is, if it is in the agent's; None if the loop is busy with something else.

    A task that the agent started has no frame of ours below it: then any code that belongs neither to Python, nor to
    installed packages, nor to us is taken for the agent's.
    """
    where, is_agents = None, False
    while frame is not None:
        name = frame.f_code.co_filename
        if name.endswith(_LOOP_FILES):
            break
        if name.startswith(_HERE):
            is_agents = is_agents or (frame.f_code is AsyncAgent.run.__code__ and frame.f_locals.get("self") is agent)
        elif where is None and not name.startswith((*_LIBRARIES, "<")):
            where = f"{os.path.basename(name)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return where or ("code of a package that it calls" if is_agents else None)
