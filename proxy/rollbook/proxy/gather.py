"""Answers that end close together become durable together.

A commit costs about as much for one event as for ten: a frame, a write, a sync, and two handovers between threads. So
an event waits a moment for those of other calls, as long as there are others in progress; one that is alone, and the
last of them, go at once. (PostgreSQL has the same as commit_delay and commit_siblings.)
"""

import asyncio

from rollbook.store import BadEvent, Event, Log

WAIT_S = 0.002
"""How long the first event of a commit waits for others. A commit takes about half of this."""


class Gather:
    """Appends to a log for the calls of one event loop. `begin` and `end` tell how many calls are in progress."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._waiting: list[tuple[tuple[Event, ...], asyncio.Future[list[int]]]] = []
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
        """As `Log.append`: durable when it returns. A caller that is cancelled meanwhile takes nothing back."""
        if self._n_calls <= 1 and not self._waiting:
            return await self._log.append(*events)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[int]] = loop.create_future()
        self._waiting.append((events, future))
        if len(self._waiting) >= self._n_calls:
            self._flush()
        elif self._timer is None:
            self._timer = loop.call_later(WAIT_S, self._flush)
        return await future

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            batch, self._waiting = self._waiting, []
            task = asyncio.get_running_loop().create_task(self._commit(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _commit(self, batch: list[tuple[tuple[Event, ...], "asyncio.Future[list[int]]"]]) -> None:
        try:
            positions = await self._log.append(*(event for events, _ in batch for event in events))
        except BadEvent as error:
            if len(batch) == 1:
                _fail(batch, error)
                return
            for one in batch:  # one of them is bad: the others must not suffer for it
                await self._commit([one])
        except BaseException as error:
            _fail(batch, error)
            if not isinstance(error, Exception):
                raise
        else:
            begin = 0
            for events, future in batch:
                if not future.done():  # else its caller was cancelled; the events stay
                    future.set_result(positions[begin : begin + len(events)])
                begin += len(events)


def _fail(batch: list[tuple[tuple[Event, ...], "asyncio.Future[list[int]]"]], error: BaseException) -> None:
    for _, future in batch:
        if not future.done():
            if isinstance(error, asyncio.CancelledError):
                future.cancel()
            else:
                future.set_exception(error)
