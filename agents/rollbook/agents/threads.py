"""Threads for code that blocks: daemon, one per call, so that a hung agent neither fills a pool nor holds the
program open. Cancelling leaves such a thread behind, for Python cannot end one.
"""

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[[], T], *, name: str) -> T:
    """Await `function()`, run in a thread of its own. Raises what it raises."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def body() -> None:
        result, error = None, None
        try:
            result = context.run(function)
        except Exception as raised:
            error = raised
        except BaseException as raised:  # SystemExit and the like end the call, not the program
            error = RuntimeError(f"{name} raised {raised!r}")
            error.__cause__ = raised
        if isinstance(error, StopIteration):  # a future cannot hold one
            stop, error = error, RuntimeError(f"{name} raised StopIteration")
            error.__cause__ = stop
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            if not loop.is_closed():  # a closed loop: nobody awaits any more
                raise

    threading.Thread(target=body, name=name, daemon=True).start()
    return await future


async def in_thread_loop(start: Callable[[], Awaitable[T]], *, name: str) -> T:
    """Await `start()` on an event loop of its own in a thread; cancelling cancels it there."""
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []

    async def main() -> T:
        task: asyncio.Task[T] | None = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task))
        return await start()

    def body() -> T:
        try:
            return asyncio.run(main())
        except asyncio.CancelledError as error:
            raise RuntimeError(f"{name} was cancelled") from error

    try:
        return await in_thread(body, name=name)
    except asyncio.CancelledError:
        for loop, task in running:
            if not loop.is_closed():
                loop.call_soon_threadsafe(task.cancel)
        raise
