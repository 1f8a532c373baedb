"""Worker processes that can be killed one by one: for reward functions, subprocess agents and untrusted code.

The standard process pool loses every worker when one dies and cannot end a hung call. Here a call owns its worker
while it runs; a time-out or a cancelled caller kills that process, what it started, and nothing else. Workers are
started anew, not forked (the caller has threads), stay warm, and answer over a pipe, so what they print stays print.
They import what their calls need, and the main program only for a call of something that is defined in it: 32 workers
that each imported the command line were half a minute of CPU. One pool may be used from several event loops.
"""

import asyncio
import concurrent.futures
import contextlib
import inspect
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing import spawn
from multiprocessing.connection import Connection
from typing import Any

from .errors import WorkerTraceback, said, where
from .threads import in_thread


class WorkerTimeout(Exception):
    """A call took longer than it may; its process was killed."""


class WorkerDied(Exception):
    """The process ended before it answered."""


START_S = 300.0
"""How long a worker may take to start, on a machine that does much else."""

_BEGIN = "import pickle, sys; given = pickle.load(sys.stdin.buffer); sys.path[:] = given[0]; "
_BEGIN += "from rollbook.agents.pool import _serve; _serve(*given[1:])"

_imports_main = False  # a worker, at this moment


class _Worker:
    """One process. All methods block; `kill` may be called from any thread at any time, twice is once."""

    def __init__(self) -> None:
        if _imports_main:
            raise RuntimeError(
                "a worker process imported the main program, which started to do its work; it must stand under "
                '`if __name__ == "__main__":`, or what the worker calls in a module of its own'
            )
        self.connection, theirs = multiprocessing.Pipe()
        watched, self._alive = multiprocessing.Pipe(duplex=False)  # ours closes with this process, however it ends
        given = spawn.get_preparation_data("worker")
        main = {name: value for name, value in given.items() if name.startswith("init_main")}
        with theirs, watched:
            fds = theirs.fileno(), watched.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BEGIN],
                stdin=subprocess.PIPE,
                pass_fds=fds,
                start_new_session=True,  # a group of its own, so that what a job forks is killed with it
            )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.process.stdin as stdin:  # wait_ready says that it is gone
            pickle.dump((given["sys_path"], *fds, given["sys_argv"], main), stdin)

    @property
    def exit_code(self) -> int | None:
        """Of a process that has gone, or is about to; None: it has not within 5 s."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(5)
        return None

    @property
    def is_alive(self) -> bool:
        """Whether it may be called."""
        return self.process.poll() is None

    def wait_ready(self) -> None:
        """Until it takes calls. Raises WorkerDied."""
        try:
            if self.connection.poll(START_S):
                self.connection.recv_bytes()
                return
            self.kill()
            raise WorkerDied(f"its process did not start within {START_S:g} s")
        except (EOFError, OSError) as error:
            raise WorkerDied(f"its process ended (exit code {self.exit_code}) while it started") from error

    def call(self, job: bytes) -> tuple[bool, Any, WorkerTraceback | None]:
        """Raises EOFError or OSError when the process is gone."""
        self.connection.send_bytes(job)
        answer: tuple[bool, Any, WorkerTraceback | None] = pickle.loads(self.connection.recv_bytes())
        return answer

    def kill(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        threading.Thread(target=lambda: self.exit_code, daemon=True).start()  # reap it without waiting


class ProcessPool:
    """At most `max_workers` processes, started when first needed; `call` waits for a free one."""

    def __init__(self, max_workers: int) -> None:
        self.max_workers = max(1, max_workers)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._free = self.max_workers
        self._waiting: deque[concurrent.futures.Future[None]] = deque()
        self._workers: set[_Worker] = set()
        weakref.finalize(self, _end_all, self._workers)  # at the latest when this program ends

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
                raise WorkerDied(f"its process ended (exit code {worker.exit_code}) before it answered") from error
            with self._lock:
                self._idle.append(worker)
            worker = None
        finally:
            if worker is not None:
                self._workers.discard(worker)
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
        self._workers.clear()

    def _start(self) -> None:
        worker = _Worker()
        self._workers.add(worker)
        try:
            worker.wait_ready()
        except WorkerDied:
            self._workers.discard(worker)
            raise
        with self._lock:
            self._idle.append(worker)

    def _idle_worker(self) -> _Worker | None:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive:
                    return worker
                self._workers.discard(worker)
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


def _kill_all(workers: set[_Worker]) -> None:
    for worker in list(workers):
        worker.kill()


def _end_all(workers: set[_Worker]) -> None:
    _kill_all(workers)
    for worker in list(workers):
        _ = worker.exit_code  # reaped


def _serve(calls_fd: int, parent_fd: int, argv: list[str], main: dict[str, str]) -> None:
    """The worker's whole life: jobs in, answers out, gone with its parent.

    main: what `multiprocessing.spawn.prepare` needs to import the main program.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(calls_fd, False)
    os.set_inheritable(parent_fd, False)
    connection = Connection(calls_fd)
    threading.Thread(target=_die_with, args=(parent_fd,), daemon=True).start()
    sys.argv = argv
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
        env: dict[str, str] = {}
        try:
            if main and b"__main__" in job:
                _import_main(main)
                main = {}
            function, args, kwargs, env = pickle.loads(job)
            os.environ.update(env)
            value = function(*args, **kwargs)
            if inspect.isawaitable(value):
                value = loop.run(_await(value))
            answer = _returned(value)
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


def _returned(value: Any) -> bytes:
    try:
        return pickle.dumps((True, value, None))
    except Exception as error:  # objects raise what they like
        raise TypeError(
            f"a {type(value).__name__} was returned that pickle cannot send from a worker process ({error}); return "
            "numbers, text, or lists and dicts of them"
        ) from error


def _raised(error: BaseException) -> bytes:
    trace = WorkerTraceback(traceback.format_exc(), where(error))
    if isinstance(error, Exception):
        with contextlib.suppress(Exception):  # many exceptions do not survive a pickle
            answer = pickle.dumps((False, error, trace))
            pickle.loads(answer)
            return answer
    return pickle.dumps((False, RuntimeError(said(error)), trace))


def _import_main(main: dict[str, str]) -> None:
    global _imports_main
    _imports_main = True
    try:
        spawn.prepare(main)
    finally:
        _imports_main = False


def _die_with(parent_fd: int) -> None:
    os.read(parent_fd, 1)  # nothing is ever written: it returns when the parent has gone
    os.killpg(os.getpid(), signal.SIGKILL)
