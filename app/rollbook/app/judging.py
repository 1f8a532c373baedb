"""Judging: what a process does that runs somebody's reward function over episodes.

It imports what reading episodes takes and no more (no DuckDB, no SQLAlchemy), since every `rollbook reward` starts such
processes. `rereward.py` asks the tables, hands episodes out, and appends what comes back.
"""

import asyncio
import gc
import hashlib
import inspect
import math
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rollbook.agents.errors import WorkflowError, said
from rollbook.agents.naming import load
from rollbook.store import BadSelection
from rollbook.store.directory import open_log
from rollbook.store.episodes import Episode, EpisodeRows
from rollbook.store.stream import Payloads

CHUNK = 64
"""Episodes that a process reads and judges at a time."""

Judge = Callable[[Any], Any]  # an Episode, or a list of them
Judged = tuple[str, dict[str | None, float], str | None]
"""Episode id, value by interaction id (None: the episode itself), why it failed."""


def judge_of(function: str) -> tuple[Judge, str]:
    """The function that a name stands for (`agents.naming.load`), and its id: name@hash of its source."""
    judge = load(function, "judge")
    if not callable(judge):
        raise WorkflowError(f"{function} is a {type(judge).__name__}; expected a function that takes an episode")
    try:
        text = inspect.getsource(judge)
    except (OSError, TypeError):
        text = repr(judge)
    where, _, name = function.rpartition(":" if ":" in function else ".")
    module_name = Path(where).stem if where.endswith(".py") else where
    return judge, f"{module_name}:{name}@{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Pace:
    """How judgements are made. What is not finite does not limit."""

    timeout_s: float | None = None  # of one try, sync or async
    retries: int = 0  # more tries for a judgement that fails
    concurrency: int = 8  # async judgements at once, per process
    rate_per_s: float | None = None  # tries that begin per second, in all processes together
    batch: int | None = None  # the function takes lists of so many episodes and returns as many values
    processes: int = 1

    def __post_init__(self) -> None:
        for name in ("timeout_s", "rate_per_s", "batch", "concurrency", "processes"):
            value = getattr(self, name)
            if value is not None and not value > 0:  # nor NaN
                raise BadSelection(f"{name} must be more than 0, got {value}")
        if self.retries < 0:
            raise BadSelection(f"retries must not be negative, got {self.retries}")

    @property
    def chunk(self) -> int:
        """Episodes that a process reads and judges at a time: enough to keep it busy, few enough to lose to a kill."""
        if self.rate_per_s is not None:
            return max(self.concurrency, self.batch or 1, 4)
        return max(CHUNK, 4 * self.concurrency, self.batch or 1)


class _Slots:
    """When the next try may begin, in this process's share of the rate."""

    def __init__(self, pace: Pace) -> None:
        self._every_s = 0.0 if pace.rate_per_s is None else pace.processes / pace.rate_per_s
        self._next = time.monotonic()

    def wait_s(self) -> float:
        """Take the next slot; how long it is till then."""
        now = time.monotonic()
        self._next = max(self._next, now) + self._every_s
        return self._next - self._every_s - now


def judge_episodes(judge: Judge, episodes: Sequence[Episode], pace: Pace, slots: _Slots | None = None) -> list[Judged]:
    """Whatever the function raises is that episode's (or that list's) failure, after `retries` more tries."""
    slots = slots or _Slots(pace)
    size = pace.batch or 1
    pieces = [list(episodes[at : at + size]) for at in range(0, len(episodes), size)]
    if is_async(judge):
        judged = asyncio.run(_judge_together(judge, pieces, pace, slots))
    else:
        # No event loop around code that may start one.
        judged = [_finish(_judge_piece(judge, piece, pace, slots, _sleep, _settle)) for piece in pieces]
    return [one for piece in judged for one in piece]


def is_async(judge: Judge) -> bool:
    return inspect.iscoroutinefunction(judge) or inspect.iscoroutinefunction(getattr(judge, "__call__", None))  # noqa: B004


async def _judge_piece(
    judge: Judge,
    piece: list[Episode],
    pace: Pace,
    slots: _Slots,
    sleep: Callable[[float], Awaitable[None]],
    settle: Callable[[Awaitable[Any], float | None], Awaitable[Any]],
) -> list[Judged]:
    """One episode, or one list. sleep, settle: how to wait for a time, and for what an async function returned."""
    reason = ""
    for attempt in range(pace.retries + 1):
        await sleep(_backoff_s(attempt) + slots.wait_s())
        try:
            with _alarm(pace.timeout_s):
                value = judge(piece if pace.batch else piece[0])
            if inspect.isawaitable(value):
                value = await settle(_contained(value), pace.timeout_s)
            return _judgements(value, piece, pace)
        except BaseException as error:  # a judge's exit() ends its own judgement, as does what a library throws
            reason = said(error)
    return [(episode.episode_id, {}, reason) for episode in piece]


async def _contained(value: Awaitable[Any]) -> Any:
    try:
        return await value
    except Exception:
        raise
    except BaseException as error:  # which would end the event loop
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # ours: it took too long
        raise RuntimeError(said(error)) from error


async def _judge_together(judge: Judge, pieces: list[list[Episode]], pace: Pace, slots: _Slots) -> list[list[Judged]]:
    free = asyncio.Semaphore(pace.concurrency)

    async def one(piece: list[Episode]) -> list[Judged]:
        async with free:
            return await _judge_piece(judge, piece, pace, slots, asyncio.sleep, asyncio.wait_for)

    return await asyncio.gather(*(one(piece) for piece in pieces))


async def _sleep(seconds: float) -> None:
    time.sleep(seconds)  # noqa: ASYNC251 - there is no event loop, see `_finish`


async def _settle(value: Awaitable[Any], timeout_s: float | None) -> Any:
    async def in_time() -> Any:
        return await asyncio.wait_for(value, timeout_s)

    return asyncio.run(in_time())


def _finish(work: Coroutine[Any, Any, list[Judged]]) -> list[Judged]:
    """The result of a coroutine that waits for no event loop."""
    try:
        work.send(None)
    except StopIteration as done:
        found: list[Judged] = done.value
        return found
    raise AssertionError("it waits for an event loop")


def _backoff_s(attempt: int) -> float:
    return min(30.0, 0.5 * 2**attempt) if attempt else 0.0


def _judgements(value: Any, piece: list[Episode], pace: Pace) -> list[Judged]:
    if pace.batch is None:
        return [(piece[0].episode_id, _values(value, piece[0]), None)]
    values = list(value)
    if len(values) != len(piece):
        raise ValueError(f"expected {len(piece)} values for a list of {len(piece)} episodes, got {len(values)}")
    return [(one.episode_id, _values(own, one), None) for own, one in zip(values, piece, strict=True)]


@contextmanager
def _alarm(timeout_s: float | None) -> Iterator[None]:
    """Raises TimeoutError in Python code that takes longer. Workers judge in their main thread, which gets signals."""
    if timeout_s is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(signum: int, frame: Any) -> None:
        raise TimeoutError(f"took longer than {timeout_s:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _values(value: Any, episode: Episode) -> dict[str | None, float]:
    if value is None:
        return {}
    pairs: dict[str | None, Any] = dict(value) if isinstance(value, Mapping) else {None: value}
    known = {one.interaction_id for one in episode.interactions} if isinstance(value, Mapping) else set()
    for target, number in pairs.items():
        if target is not None and target not in known:
            raise ValueError(f"a reward for {target!r}, which is no interaction of the episode")
        if isinstance(number, str) or not math.isfinite(float(number)):
            raise ValueError(f"expected a finite number, {{interaction_id: number}} or None, got {number!r}")
    return {target: float(number) for target, number in pairs.items()}


def serve(connection: Connection) -> None:
    """Judge what comes, in the order in which it comes, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program that appends; it ends us
    os.dup2(2, 1)  # what a judge prints is no part of what the program prints
    book_path, function, pace = connection.recv()
    log = open_log(book_path)
    payloads, judge, slots = Payloads(log), judge_of(function)[0], _Slots(pace)
    waiting: SimpleQueue[EpisodeRows] = SimpleQueue()
    gc.freeze()  # what was imported stays, and need not be looked through again
    threading.Thread(target=_receive, args=(connection, waiting), daemon=True).start()
    while True:
        rows = waiting.get()
        try:
            answer: list[Judged] | Exception = judge_episodes(judge, rows.read(log, payloads), pace, slots)
        except Exception as error:  # of the book; what the function raises is in the answer
            answer = error
        connection.send(answer)


def _receive(connection: Connection, waiting: "SimpleQueue[EpisodeRows]") -> None:
    """Read ahead, so that the next episodes are here when these are judged; and end with whoever sent them."""
    with suppress(EOFError, OSError):
        while True:
            waiting.put(connection.recv())
    os._exit(0)
