"""Worker processes that can be killed one by one: for reward functions, subprocess agents and untrusted code.

The standard process pool loses every worker when one dies and cannot end a hung call. Here a call owns its worker
while it runs; a time-out or a cancelled caller kills that process, what it started, and nothing else. Workers are
spawned, not forked (the caller has threads), stay warm, and answer over a pipe, so what they print stays print.
One pool may be used from several event loops.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from .errors import WorkerTraceback, where
from .threads import in_thread

_spawn = multiprocessing.get_context("spawn")


class WorkerTimeout(Exception):
    """A call took longer than it may; its process was killed."""


class WorkerDied(Exception):
    """The process ended before it answered."""


START_S = 300.0
"""How long a worker may take to start: it imports what the main program imports."""


class _Worker:
    """One process. All methods block; `kill` may be called from any thread at any time, twice is once."""

    def __init__(self) -> None:
        self.connection, theirs = _spawn.Pipe()
        self.process = _spawn.Process(target=_serve, args=(theirs,))  # a daemon could not start processes
        self.process.start()
        theirs.close()

    def wait_ready(self) -> None:
        """Until it takes calls. Raises WorkerDied."""
        try:
            if self.connection.poll(START_S):
                self.connection.recv_bytes()
                return
            self.kill()
            raise WorkerDied(f"its process did not start within {START_S:g} s")
        except (EOFError, OSError) as error:
            self.process.join(5)
            raise WorkerDied(
                f"its process ended (exit code {self.process.exitcode}) while it started. It imports the main program, "
                'whose work must stand under `if __name__ == "__main__":`'
            ) from error

    def call(self, job: bytes) -> tuple[bool, Any, WorkerTraceback | None]:
        """Raises EOFError or OSError when the process is gone."""
        self.connection.send_bytes(job)
        answer: tuple[bool, Any, WorkerTraceback | None] = pickle.loads(self.connection.recv_bytes())
        return answer

    def kill(self) -> None:
        pid = self.process.pid
        if pid is not None and self.process.exitcode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # not there yet while the worker starts
            self.process.kill()
        threading.Thread(target=self.process.join, args=(5,), daemon=True).start()  # reap it without waiting


class ProcessPool:
    """At most `max_workers` processes, started when first needed; `call` waits for a free one."""

    def __init__(self, max_workers: int) -> None:
        self.max_workers = max(1, max_workers)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._free = self.max_workers
        self._waiting: deque[concurrent.futures.Future[None]] = deque()
        self._workers: weakref.WeakSet[_Worker] = weakref.WeakSet()
        atexit.register(_kill_all, self._workers)

    async def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Any:
        """`function(*args, **kwargs)` in a worker, awaited there if it is a coroutine. `env` holds for this call.

        timeout_s counts from when the worker has started. Raises what the function raises, WorkerTimeout, WorkerDied,
        or TypeError for what cannot be pickled: functions go by name, so a worker must be able to import them.
        """
        try:
            job = pickle.dumps((function, args, dict(kwargs or {}), dict(env or {})))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"cannot send {getattr(function, '__qualname__', function)} to a worker process: {error}; "
                "use a function at the top level of a module, and plain arguments"
            ) from error
        await self._take_place()
        worker: _Worker | None = None
        try:
            while (worker := self._idle_worker()) is None:
                await in_thread(self._start, name="start a worker")
            try:
                async with asyncio.timeout(timeout_s):
                    is_ok, value, trace = await in_thread(partial(worker.call, job), name="wait for a worker")
            except TimeoutError as error:
                raise WorkerTimeout(f"took longer than {timeout_s:g} s; its process was killed") from error
            except (EOFError, OSError) as error:
                worker.process.join(5)
                raise WorkerDied(
                    f"its process ended (exit code {worker.process.exitcode}) before it answered"
                ) from error
            with self._lock:
                self._idle.append(worker)
            worker = None
        finally:
            if worker is not None:
                worker.kill()
            self._give_place()
        if is_ok:
            return value
        raise value from trace

    def close(self) -> None:
        """End every worker, also those at work."""
        with self._lock:
            self._idle.clear()
        _kill_all(self._workers)

    def _start(self) -> None:
        worker = _Worker()
        self._workers.add(worker)
        worker.wait_ready()
        with self._lock:
            self._idle.append(worker)

    def _idle_worker(self) -> _Worker | None:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.process.is_alive():
                    return worker
        return None

    async def _take_place(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn: concurrent.futures.Future[None] = concurrent.futures.Future()
            self._waiting.append(turn)
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            if not turn.cancel():  # it was given at the same moment
                self._give_place()
            raise

    def _give_place(self) -> None:
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    return
            self._free += 1


def _kill_all(workers: "weakref.WeakSet[_Worker]") -> None:
    for worker in list(workers):
        worker.kill()


def _serve(connection: Connection) -> None:
    """The worker's whole life: jobs in, answers out, gone with its parent."""
    os.setsid()  # a group of its own, so that what a job forks is killed with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_die_with, args=(parent.sentinel,), daemon=True).start()
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    pid = os.getpid()
    before = dict(os.environ)
    connection.send_bytes(b"ready")
    loop = asyncio.Runner()  # one for all jobs, so that a client which an agent keeps stays usable
    while True:
        try:
            job = connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            function, args, kwargs, env = pickle.loads(job)
            os.environ.update(env)
            value = function(*args, **kwargs)
            if inspect.isawaitable(value):
                value = loop.run(_await(value))
            answer = pickle.dumps((True, value, None))
        except BaseException as error:  # whatever it is, the caller raises it
            answer = _raised(error)
        if os.getpid() != pid:
            os._exit(0)  # a job forked and its child came back here
        for name in env:
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)
        sys.stdout.flush()
        connection.send_bytes(answer)


async def _await(awaitable: Any) -> Any:
    try:
        return await awaitable
    finally:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:  # a job's loose ends do not reach the next job
            task.cancel()


def _raised(error: BaseException) -> bytes:
    trace = WorkerTraceback(traceback.format_exc(), where(error))
    if isinstance(error, Exception):
        with contextlib.suppress(Exception):  # many exceptions do not survive a pickle
            answer = pickle.dumps((False, error, trace))
            pickle.loads(answer)
            return answer
    return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}"), trace))


def _die_with(sentinel: int) -> None:
    wait([sentinel])
    os.killpg(os.getpid(), signal.SIGKILL)
