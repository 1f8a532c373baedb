"""Permits to start a session: each is granted, taken by one start, and void after a while.

One server keeps them in memory. The workers of one (`front.py`) share a file, so that it does not matter which of them
grants and which takes; the clock is the machine's, the same in all of its processes.
"""

import fcntl
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class Permits:
    """seconds: how long one is good for. path: of the file of workers that share them; None: they are this object's."""

    def __init__(self, seconds: float, path: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._path = path
        self._clock = clock
        self._ends = array("d")  # when each is void, oldest first

    def grant(self) -> int:
        """Add one, and return how many are free."""
        with self._held() as ends:
            ends.append(self._clock() + self._seconds)
            return len(ends)

    def take(self) -> bool:
        """Take the one that is void first; whether there was one."""
        with self._held() as ends:
            if ends:
                ends.pop(0)
                return True
            return False

    def free(self) -> int:
        """How many nobody took."""
        with self._held() as ends:
            return len(ends)

    @contextmanager
    def _held(self) -> Iterator["array[float]"]:
        if self._path is None:
            self._drop_void(self._ends)
            yield self._ends
            return
        with self._path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            ends = array("d", file.read())
            self._drop_void(ends)
            yield ends
            file.truncate(0)
            file.write(ends.tobytes())

    def _drop_void(self, ends: "array[float]") -> None:
        now = self._clock()
        while ends and ends[0] <= now:
            ends.pop(0)
