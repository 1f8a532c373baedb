"""Answers that end close together become durable together.

A commit costs about as much for one event as for ten: a frame, a write, a sync, and two handovers between threads. So
an event waits a moment for those of other calls, as long as there are others in progress; one that is alone, and the
last of them, go at once. (PostgreSQL has the same as commit_delay and commit_siblings.)
"""

import asyncio
from collections.abc import Sequence

from rollbook.store import BadEvent, Event, Log

WAIT_S = 0.002
"""How long the first event of a commit waits for others. A commit takes about half of this."""


class _Append:
    """One caller's events, and who waits for them."""

    __slots__ = ("error", "events", "positions", "waiter")

    def __init__(self, events: tuple[Event, ...]) -> None:
        self.events = events
        self.positions: list[int] | None = None
        self.error: BaseException | None = None
        self.waiter: asyncio.Future[None] | None = None

    async def wait(self) -> list[int]:
        cancelled: asyncio.CancelledError | None = None
        while self.positions is None and self.error is None:
            self.waiter = asyncio.get_running_loop().create_future()
            try:
                await self.waiter
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        if self.error is not None:
            raise self.error
        assert self.positions is not None
        return self.positions

    def end(self, error: BaseException | None = None) -> None:
        self.error = error
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Gather:
    """Appends to a log for the calls of one event loop. `begin` and `end` tell how many calls are in progress."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._waiting: list[_Append] = []
        self._timer: asyncio.TimerHandle | None = None
        self._n_calls = 0
        self._tasks: set[asyncio.Task[None]] = set()  # commits in progress; who appended waits for them

    def begin(self) -> None:
        """A call is in progress: it may append soon."""
        self._n_calls += 1

    def end(self) -> None:
        """It is through."""
        self._n_calls -= 1

    async def append(self, *events: Event) -> list[int]:
        """As `Log.append`: durable when it returns. A caller that is cancelled meanwhile takes nothing back: it is held
        until the events are durable, so that what comes after it knows them, and is cancelled then."""
        loop = asyncio.get_running_loop()
        one = _Append(events)
        self._waiting.append(one)
        if len(self._waiting) >= self._n_calls:
            self._flush()
        elif self._timer is None:
            self._timer = loop.call_later(WAIT_S, self._flush)
        return await one.wait()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            batch, self._waiting = self._waiting, []
            task = asyncio.get_running_loop().create_task(self._commit(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _commit(self, batch: "Sequence[_Append]") -> None:
        try:
            positions = await self._log.append(*(event for one in batch for event in one.events))
        except BadEvent as error:
            if len(batch) == 1:
                batch[0].end(error)
                return
            for one in batch:  # one of them is bad: the others must not suffer for it
                await self._commit([one])
        except BaseException as error:
            for one in batch:
                one.end(error)
            if not isinstance(error, Exception):
                raise
        else:
            begin = 0
            for one in batch:
                end = begin + len(one.events)
                one.positions, begin = positions[begin:end], end
                one.end()
