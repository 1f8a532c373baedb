"""Processes that run strangers' queries on the tables, each of which may be killed; `sandboxed.py` is what they are.

A process is started when one is needed, and kept for the next query. A query has it for itself, until its time is over:
then the process is told to stop, and killed where it does not listen. What comes back is Arrow and JSON, which is read
as from any stranger.
"""

import json
import os
import pickle
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from .errors import QueriesBusy, QueryRefused

GRACE_S = 0.5
"""For which an answer may come after its time: that it was too late, most often."""

_AT_ONCE = 4  # processes of one book; more queries wait for one of them
_LENGTH = struct.Struct("<Q")
_PROGRAM = Path(__file__).with_name("sandboxed.py")
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "TMPDIR")


class Died(Exception):
    """The process ended, or was killed since it was late, before it answered."""


class Guest:
    """One process. A user at a time."""

    def __init__(self, path: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            process_group=0,  # Ctrl-C is for us
        )
        self.state: int | None = None
        """Of which state of the tables it knows."""
        self.is_leaving = False
        """It ends by itself, after its last answer."""

    @property
    def is_up(self) -> bool:
        return self._process.poll() is None

    def ask(self, until: float, most_bytes: int, name: str, *arguments: Any) -> tuple[dict[str, Any], bytes]:
        """The answer to a request and what comes with it. until: of `time.monotonic`. Raises Died, TimeoutError."""
        data = pickle.dumps((name, arguments))
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(_LENGTH.pack(len(data)) + data)
            self._process.stdin.flush()
        except OSError as error:
            raise Died from error
        said, body = (self._read(until, most_bytes) for _ in range(2))
        answer: dict[str, Any] = json.loads(said)
        self.is_leaving = answer.pop("is_last", False)
        return answer, bytes(body)

    def _read(self, until: float, most_bytes: int) -> bytearray:
        (size,) = _LENGTH.unpack(self._exactly(_LENGTH.size, until))
        if size > most_bytes:
            raise Died
        return self._exactly(size, until)

    def _exactly(self, size: int, until: float) -> bytearray:
        assert self._process.stdout is not None
        found = bytearray(size)
        fd, at, view = self._process.stdout.fileno(), 0, memoryview(found)
        ready = select.poll()
        ready.register(fd, select.POLLIN)
        while at < size:
            left = until - time.monotonic()
            if left <= 0 or not ready.poll(left * 1000):
                raise TimeoutError
            n = os.readv(fd, [view[at:]])
            if not n:
                raise Died
            at += n
        return found

    def stop(self) -> None:
        """End it, from any thread; its user then meets Died."""
        self._process.kill()

    def close(self) -> None:
        """End it and give its pipes back. By its user."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Sandbox:
    """The processes of one file of tables. Close it. Safe to use from several threads."""

    def __init__(self) -> None:
        self._turn = threading.BoundedSemaphore(_AT_ONCE)
        self._lock = threading.Lock()
        self._idle: list[Guest] = []
        self._all: set[Guest] = set()
        self._is_closed = False

    @contextmanager
    def guest(self, path: str, wait_s: float) -> Iterator[Guest]:
        """A process that reads the tables at `path`, the same at each call. It is killed where the block raises Died or
        TimeoutError. Raises QueriesBusy where none is free in time.
        """
        if not self._turn.acquire(timeout=wait_s):
            raise QueriesBusy(f"{_AT_ONCE} other queries have run for {wait_s:g} s; ask again when they have ended")
        try:
            guest = self._take(path)
            is_well = False
            try:
                yield guest
                is_well = True
            except QueryRefused:
                is_well = True
                raise
            finally:
                self._give(guest, is_well)
        finally:
            self._turn.release()

    def _take(self, path: str) -> Guest:
        with self._lock:
            while self._idle:
                guest = self._idle.pop()
                if guest.is_up:
                    return guest
                self._all.discard(guest)
                guest.close()
            if self._is_closed:
                raise QueryRefused("the book is closed; open it again")
            guest = Guest(path)
            self._all.add(guest)
            return guest

    def _give(self, guest: Guest, is_well: bool) -> None:
        with self._lock:
            if is_well and not guest.is_leaving and not self._is_closed:
                self._idle.append(guest)
                return
            self._all.discard(guest)
        guest.close()

    def close(self) -> None:
        """End them, also those that are at work. Twice is once."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            self._all.difference_update(idle)
            for guest in self._all:
                guest.stop()
        for guest in idle:
            guest.close()


def read_answer(body: bytes) -> pa.Table:
    """The Arrow stream of an answer, checked: a process that was taken over could write anything."""
    with pa.ipc.open_stream(pa.py_buffer(body)) as stream:
        table = stream.read_all()
    table.validate(full=True)
    return table
