"""The program that runs strangers' SQL: one process per query at a time, which its parent may kill.

It opens the tables read-only, can write no file, has no network functions, and gets from the kernel no more memory
than a query is allowed. DuckDB's own limit does not count what aggregates and functions hold, and an interrupt does not
reach into one call of a function; a limit of the process holds for all of them. What may be asked is not decided here:
the parent reads the parsed query first (`sql.py`).

Requests come on stdin as pickles of a method's name and its arguments; an answer is JSON on stdout, and for `run` an
Arrow stream behind it; all with their length in front. It runs as a file, without importing the rest of the store,
which would take a second.
"""

import json
import os
import pickle
import resource
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import duckdb
import pyarrow as pa

RETIRE_BYTES = 512 << 20
"""A process that still holds so much after an answer ends; the next query gets a fresh one."""

_LATE_S = 1.0  # after an interrupt that was not heard; the parent does not wait that long
_LENGTH = struct.Struct("<Q")


class _Over(Exception):
    """A limit that the answer went over: rows or result_bytes."""


class Tables:
    """The tables of one book, as they were when `open` was called last."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._con = duckdb.connect(config={"temp_directory": "", "threads": str(min(4, os.cpu_count() or 1))})
        with suppress(duckdb.Error):  # of DuckDB 2: threads that a file on a local disk does not need
            self._con.execute("set async_threads = 1")
        for statement in (
            "set TimeZone = 'UTC'",
            "set python_enable_replacements = false",
            f"set allowed_paths = ['{_quoted(path)}', '{_quoted(path)}.wal']",
            "set enable_external_access = false",
        ):
            self._con.execute(statement)
        self._is_open = False
        self._base = data_bytes()

    def open(self) -> dict[str, Any]:
        if self._is_open:
            self._con.execute("use memory")
            self._con.execute("detach tables")
        self._con.execute(f"attach '{_quoted(self._path)}' as tables (read_only)")
        self._con.execute("use tables")
        self._is_open = True
        return {}

    def parse(self, query: str) -> dict[str, Any]:
        found = self._con.execute("select json_serialize_sql(?::varchar)", [query]).fetchone()
        assert found is not None
        return {"tree": found[0]}

    def run(
        self,
        query: str,
        params: Sequence[Any] | Mapping[str, Any] | None,
        timeout_s: float,
        memory_bytes: int,
        rows: int,
        result_bytes: int,
    ) -> tuple[dict[str, Any], pa.Buffer | None]:
        """Why there is no answer ('time', 'memory', 'rows', 'size', or what DuckDB says), or the answer."""
        self._con.execute(f"set memory_limit = '{memory_bytes} B'")
        is_late, is_done = threading.Event(), threading.Event()
        watch = threading.Thread(target=self._end, args=(timeout_s, is_late, is_done), daemon=True)
        with _at_most(memory_bytes):
            watch.start()
            try:
                return {}, self._read(query, params, rows, result_bytes)
            except _Over as error:
                return {"over": str(error)}, None
            except (MemoryError, duckdb.OutOfMemoryException):
                return {"over": "memory"}, None
            except (duckdb.Error, pa.ArrowException, RuntimeError, OSError) as error:
                if is_late.is_set():
                    return {"over": "time"}, None
                said = str(error).strip()
                if "Out of Memory" in said or "bad_alloc" in said:
                    return {"over": "memory"}, None
                return _failed(error), None
            finally:
                is_done.set()
                watch.join()

    def _read(
        self, query: str, params: Sequence[Any] | Mapping[str, Any] | None, rows: int, result_bytes: int
    ) -> pa.Buffer:
        relation = self._con.sql(query, params=params) if params else self._con.sql(query)
        sink = pa.BufferOutputStream()
        n = 0
        with relation.to_arrow_reader(8192) as reader, pa.ipc.new_stream(sink, reader.schema) as writer:
            for batch in reader:
                n += batch.num_rows
                if n > rows:
                    raise _Over("rows")
                if sink.tell() + batch.nbytes > result_bytes:
                    raise _Over("size")
                writer.write_batch(batch)
        return sink.getvalue()

    def _end(self, timeout_s: float, is_late: threading.Event, is_done: threading.Event) -> None:
        if is_done.wait(timeout_s):
            return
        is_late.set()
        until = time.monotonic() + _LATE_S
        while not is_done.wait(0.02):
            if time.monotonic() > until:  # nobody is there any more who would kill us
                os._exit(1)
            self._con.interrupt()  # again and again: an interrupt between two steps of the query is forgotten

    def is_full(self) -> bool:
        """Whether this process holds more than one that is new."""
        return data_bytes() - self._base > RETIRE_BYTES


@contextmanager
def _at_most(size_bytes: int) -> Iterator[None]:
    """Within the block this process gets so many bytes more from the kernel than it has."""
    if now := data_bytes():
        resource.setrlimit(resource.RLIMIT_DATA, (now + size_bytes, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def data_bytes() -> int:
    """Private writable memory of this process, as RLIMIT_DATA counts it; 0 where no kernel says (it is not Linux)."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    except (OSError, StopIteration):
        return 0


def _failed(error: Exception) -> dict[str, Any]:
    return {"failed": str(error).strip().split("\n\n")[0], "kind": type(error).__name__}


def _quoted(text: str) -> str:
    return text.replace("'", "''")


def main() -> None:
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    tables = Tables(sys.argv[1])
    while len(head := requests.read(_LENGTH.size)) == _LENGTH.size:
        name, arguments = pickle.loads(requests.read(*_LENGTH.unpack(head)))  # from our parent
        body: pa.Buffer | None = None
        try:
            found = getattr(tables, name)(*arguments)
            said, body = found if isinstance(found, tuple) else (found, None)
        except duckdb.Error as error:
            said = _failed(error)
        is_last = name == "run" and tables.is_full()
        if is_last:
            said["is_last"] = True
        for part in (json.dumps(said).encode(), body if body is not None else b""):
            view = memoryview(part).cast("B")
            answers.write(_LENGTH.pack(len(view)))
            answers.write(view)
        answers.flush()
        if is_last:
            return


if __name__ == "__main__":
    main()
