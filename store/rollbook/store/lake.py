"""The log as a DuckLake: events as Parquet files in a folder that all machines share, listed in a PostgreSQL catalogue.

    BOOK/book.json     {"format": 2, "lake": {"catalogue": "host=db dbname=rollbook", "data": "/shared/rollbook"}}
    BOOK/views.duckdb  this machine's own tables, as beside any other log

Each machine has a BOOK folder of its own that names the same lake; any DuckDB reads the lake's table `events` too:

    attach 'ducklake:postgres:host=db dbname=rollbook' as lake; select kind, count(*) from lake.events group by kind

A commit is one Parquet file, written and synced by us, then made part of the lake by one transaction of the catalogue:
tens of milliseconds, so what waits shares one. DuckDB does not sync the files it writes itself, hence not `insert`.
A catalogue that is out of reach is asked again for `patience_s`; whether a commit whose answer was lost took place is
looked up, so nothing is written twice. A writer's name is held by an advisory lock of the catalogue.

Many small files are what group commit leaves behind: `compact` has DuckLake merge them.
Needs the extra `lake`: the extension exists for DuckDB 1.5.5 only, so this is an environment of its own.
"""

import contextlib
import glob
import importlib.util
import logging
import os
import queue
import re
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from . import rows
from .appending import Appending, Numbering, Request, answer
from .directory import LAKE_FORMAT, read_manifest, write_manifest
from .errors import BookBusy, BookNotFound, LogCorrupt, StoreError
from .events import SCHEMA
from .log import START, Cursor, TokenPlaces, advance, gather_rows
from .sealing import sync_folder

_log = logging.getLogger("rollbook.store")
_COMMIT_EVENTS = 4096
_BLOCK = 512  # positions that `frame` and `gather` read at once
_READ_ROWS = 4096  # events of a batch that `read` gives
_CACHED_BYTES = 256 << 20  # of blocks
_RECENT_IDS = 200_000  # event ids of this writer that are kept in memory
_POLL_S = (0.02, 0.2)  # followers ask for news between these, less often the longer nothing comes
_RETRY_S = (0.05, 2.0)  # between attempts to commit, or to read
_SETTLED_S = 3.0  # of a catalogue that answers: DuckDB may still hold connections from before
_EXTENSIONS = ("postgres_scanner", "ducklake")
# A silent end is given up after 5 + 3 * 2 s, by either.
_CLIENT_WATCH = {
    "connect_timeout": 10,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 11_000,
}
_SERVER_WATCH = {
    "tcp_keepalives_idle": 5,
    "tcp_keepalives_interval": 2,
    "tcp_keepalives_count": 3,
    "tcp_user_timeout": 11_000,
}

_SECRETS = {"password", "sslpassword"}

_CREATE = """create table if not exists lake.events (
    position bigint not null, event_id blob not null, writer varchar not null, kind varchar not null,
    schema_version smallint not null, run_id varchar not null, episode_id varchar, interaction_id varchar,
    recorded_at timestamptz not null, payload varchar not null, messages varchar, prompt_ids integer[],
    output_ids integer[], logprobs float[], versions integer[], entropies float[])"""


@dataclass(frozen=True)
class Lake:
    """Where a lake is.

    catalogue: a libpq connection string; passwords belong in PGPASSWORD or ~/.pgpass, not here.
    data: a folder by the same path on every machine.
    """

    catalogue: str
    data: str

    @property
    def shown(self) -> str:
        """The catalogue, for messages: without a password that stands in it after all."""
        given = _parsed(self.catalogue)
        if not _SECRETS & given.keys():
            return self.catalogue
        kept = {name: value for name, value in given.items() if name not in _SECRETS}
        return str(_psycopg().conninfo.make_conninfo("", **kept))


def create_lake_book(path: str | os.PathLike[str], catalogue: str, data: str | os.PathLike[str]) -> None:
    """Make the folder `path` a book whose log is this lake; the lake is created where there is none.

    Raises StoreError if the lake cannot be reached, the extra is missing, `path` is another book already, or the
    catalogue has a password in it.
    """
    folder = Path(path)
    lake = Lake(catalogue, str(Path(data).absolute()))
    if _SECRETS & _parsed(catalogue).keys():
        raise StoreError(
            "the connection string has a password, which would stand in book.json for all who read the book; leave it "
            "out and put it into PGPASSWORD or ~/.pgpass"
        )
    if (folder / "book.json").exists():
        found = lake_of(folder)
        if found != lake:
            whose = "its own folder" if found is None else f"the lake at {found.shown!r} with its data in {found.data}"
            raise StoreError(f"{folder} is a book of {whose} already; give another path")
    connect(lake, may_create=True).close()
    Path(lake.data).mkdir(parents=True, exist_ok=True)
    write_manifest(folder, {"format": LAKE_FORMAT, "lake": {"catalogue": lake.catalogue, "data": lake.data}})


def lake_of(path: Path) -> Lake | None:
    """The lake that a book's folder names; None for a book that is its own folder. Raises BookNotFound, BookTooNew."""
    data = read_manifest(path).get("lake")
    if data is None:
        return None
    try:
        return Lake(str(data["catalogue"]), str(data["data"]))
    except (KeyError, TypeError) as error:
        raise LogCorrupt(
            f'{path / "book.json"} names no lake ({error!r}); write "lake": {{"catalogue": ..., "data": ...}}'
        ) from error


def connect(lake: Lake, *, may_create: bool = False) -> duckdb.DuckDBPyConnection:
    """A DuckDB connection with the lake attached as `lake`. Raises StoreError."""
    con = duckdb.connect()
    try:
        for name in _EXTENSIONS:
            con.execute(f"load '{_extension(name)}'")
        con.execute("set TimeZone = 'UTC'")
        con.execute("set python_enable_replacements = false")
        options = f"data_path {_quoted(lake.data)}, data_inlining_row_limit 0" + (
            "" if may_create else ", create_if_not_exists false"
        )
        con.execute(f"attach {_quoted('ducklake:postgres:' + _watched(lake.catalogue))} as lake ({options})")
        if may_create:
            con.execute(_CREATE)
    except duckdb.Error as error:
        con.close()
        raise StoreError(
            f"cannot attach the lake at {lake.shown!r} with its data in {lake.data}: {_first_line(error)}; "
            "check that the catalogue answers and that the lake has been created"
        ) from error
    return con


def _psycopg() -> Any:
    try:
        import psycopg
    except ImportError as error:
        raise StoreError(f"a lake needs psycopg ({error}); pip install 'rollbook[lake]'") from error
    return psycopg


def _watched(catalogue: str) -> str:
    """The connection string, with what makes both ends notice within seconds that the other is gone.

    A host that is cut off says nothing. Without this the server would wait two hours for it, and every other writer
    for the locks and the unfinished transaction that it holds. What `catalogue` says itself comes first.
    """
    given = _parsed(catalogue)
    options = [*(f"-c {name}={value}" for name, value in _SERVER_WATCH.items()), str(given.pop("options", ""))]
    return str(
        _psycopg().conninfo.make_conninfo("", **{**_CLIENT_WATCH, **given, "options": " ".join(options).strip()})
    )


def _parsed(catalogue: str) -> dict[str, Any]:
    psycopg = _psycopg()
    try:
        return dict(psycopg.conninfo.conninfo_to_dict(catalogue))
    except psycopg.Error as error:
        # What it quotes may be of a password.
        why = re.sub(r'"[^"]*"', lambda m: m[0] if m[0] == '"="' else '"..."', _first_line(error))
        raise StoreError(
            f"the lake's catalogue is no connection string ({why}); give one like 'host=db dbname=rollbook'"
        ) from error


def _extension(name: str) -> str:
    """The file of an extension: of the wheel that carries it, else what DuckDB itself has installed."""
    spec = importlib.util.find_spec(f"duckdb_extension_{name}")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for found in glob.glob(f"{folder}/**/v{duckdb.__version__}/{name}.duckdb_extension", recursive=True):
            return found
        raise StoreError(
            f"duckdb is {duckdb.__version__}, and the wheel of its extension {name} is for another version; "
            "pip install 'rollbook[lake]' into an environment of its own"
        )
    return name


class LakeLog(Appending):
    """See `log.Log`. With a writer name it appends under that name, alone; without one it only reads.

    patience_s: how long an append goes on trying to reach a catalogue that does not answer before the log stops, and a
        read before it raises StoreError.

    Raises BookNotFound, BookTooNew, BookBusy (a live process holds the writer's name), StoreError.
    """

    def __init__(self, path: str | os.PathLike[str], writer: str | None = None, *, patience_s: float = 60.0) -> None:
        super().__init__(Path(path), writer, "the lake")
        lake = lake_of(self.path)
        if lake is None:
            raise BookNotFound(f"{self.path} is a book of its own folder, not of a lake; open it with open_book")
        self._lake = lake
        self._patience_s = patience_s
        self._con: duckdb.DuckDBPyConnection | None = connect(lake)
        self._n_cursors = 0
        self._reading = threading.RLock()  # around the five around here
        self._blocks: OrderedDict[tuple[str, int], pa.RecordBatch] = OrderedDict()
        self._blocks_bytes = 0
        self._known: tuple[int, dict[str, int]] = (-1, {})  # a snapshot, and where each writer ended in it
        if writer is not None:
            try:
                self._name = _Name(lake, writer)
                with self._cursor() as con:
                    self._next, self._newest = self._ask_own(con)
            except BaseException:
                self._con.close()
                raise
            self._recent: OrderedDict[bytes, int] = OrderedDict()
            self._thread = threading.Thread(target=self._write_loop, name=f"rollbook-lake-{writer}", daemon=True)
            self._thread.start()

    # ---- append

    def _write_loop(self) -> None:
        """The writer's thread: take what is waiting, commit it, answer. Ends on None or after a failure."""
        with self._cursor() as con:
            is_open = True
            while is_open:
                requests: list[Request] = []
                n_events = 0
                item = self._queue.get()
                while True:
                    if item is None:
                        is_open = False
                        break
                    requests.append(item)
                    n_events += len(item.rows)
                    if n_events >= _COMMIT_EVENTS:
                        break
                    try:
                        item = self._queue.get_nowait()
                    except queue.Empty:
                        break
                try:
                    self._commit(con, requests)
                except Exception as error:  # whatever it is, nobody may wait for ever, and no more may be promised
                    self._stop(requests, error)
                    is_open = False
                answer(requests)

    def _commit(self, con: duckdb.DuckDBPyConnection, requests: list[Request]) -> None:
        """One file and one transaction for all of these."""
        first = self._next
        numbering = Numbering(first, partial(self._find, con), partial(self._stored, con))
        numbering.take_all(requests)
        fresh = numbering.fresh
        if not fresh:
            return
        batch = rows.decode(b"".join(rows.message(fresh, self._writer or "", first)))
        self._publish(con, pa.Table.from_batches([batch], SCHEMA), first)
        self._next = first + len(fresh)
        self._recent.update(numbering.taken)
        while len(self._recent) > _RECENT_IDS:
            self._newest = max(self._newest, self._recent.popitem(last=False)[0])

    def _find(self, con: duckdb.DuckDBPyConnection, event_id: bytes) -> int | None:
        position = self._recent.get(event_id)
        # Ids begin with the time: a new one lies above all that are no longer in memory.
        if position is not None or event_id > self._newest:
            return position
        query = "select position from lake.events where writer = ? and event_id = ?"
        found = self._ask(con, query, [self._writer, event_id])
        return found[0][0].as_py() if found.num_rows else None

    def _stored(self, con: duckdb.DuckDBPyConnection, position: int) -> pa.RecordBatch:
        (batch,) = self._range(con, self._writer or "", position, position + 1)
        return batch

    def _publish(self, con: duckdb.DuckDBPyConnection, table: pa.Table, first: int) -> None:
        folder = Path(self._lake.data) / "events"
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            sync_folder(folder.parent)
        path = folder / f"{self._writer}-{first:020d}-{uuid.uuid4().hex[:8]}.parquet"
        pq.write_table(
            table,
            path,
            compression="zstd",
            row_group_size=table.num_rows,
            use_dictionary=["writer", "kind", "run_id", "episode_id"],
            write_statistics=["position", "writer", "recorded_at", "kind"],
            write_page_checksum=True,
        )
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        sync_folder(folder)
        began = time.monotonic()
        wait_s = _RETRY_S[0]
        while True:
            try:
                with self._name.turn():
                    con.execute(f"call ducklake_add_data_files('lake', 'events', {_quoted(str(path))})")
                return
            except (duckdb.Error, OSError) as error:
                if time.monotonic() - began > self._patience_s:
                    raise  # the file stays: the catalogue may have it; if not, DuckLake removes orphans
                if wait_s == _RETRY_S[0]:
                    _log.warning("the lake's catalogue did not take %s, trying on: %s", path.name, _first_line(error))
            time.sleep(wait_s)
            wait_s = min(wait_s * 2, _RETRY_S[1])
            with contextlib.suppress(duckdb.Error):
                con.execute("rollback")
            try:
                if self._is_published(con, table, first):
                    return
            except duckdb.Error:
                continue

    def _is_published(self, con: duckdb.DuckDBPyConnection, table: pa.Table, first: int) -> bool:
        """A transaction whose answer was lost may have been committed. Raises BookBusy if somebody else's was."""
        found = con.execute(
            "select event_id from lake.events where writer = ? and position = ?", [self._writer, first]
        ).fetchone()
        if found is None:
            return False
        if bytes(found[0]) != table["event_id"][0].as_py():
            raise BookBusy(
                f"another process has appended as {self._writer!r} while the catalogue was out of reach; "
                "open the book again under another writer name"
            )
        return True

    def _ask_own(self, con: duckdb.DuckDBPyConnection) -> tuple[int, bytes]:
        """This writer's next position and highest event id, as the catalogue has them."""
        found = con.execute(
            "select coalesce(max(position) + 1, 0), coalesce(max(event_id), ''::blob) from lake.events "
            "where writer = ?",
            [self._writer],
        ).fetchone()
        assert found is not None
        return int(found[0]), bytes(found[1])

    def _stop(self, requests: list[Request], error: Exception) -> None:
        what = _first_line(error)
        message = (
            f"could not write to the lake of {self.path}: {what}; nothing of this append is acknowledged and the log "
            "takes no more: see to the catalogue and the shared folder, then open the book again and append the same "
            "events again"
        )
        self._fail(requests, what, message, error)

    # ---- read

    @contextlib.contextmanager
    def _cursor(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A connection for one task. A closed log has given its own back, and reading from it goes on to work."""
        with self._reading:
            con = connect(self._lake) if self._con is None else self._con.cursor()
            self._n_cursors += 1
        try:
            yield con
        finally:
            con.close()
            with self._reading:
                self._n_cursors -= 1
                self._close_when_idle()

    def _close_when_idle(self) -> None:
        if self._is_closed and not self._n_cursors and self._con is not None:
            self._con.close()
            self._con = None

    def _ask(self, con: duckdb.DuckDBPyConnection, query: str, params: Sequence[Any] = ()) -> pa.Table:
        """The answer to a query. Waits for a catalogue that is away for a moment. Raises StoreError."""
        began = time.monotonic()
        answered_at: float | None = None  # since when the catalogue answers while the query does not
        wait_s = _RETRY_S[0]
        while True:
            try:
                return con.sql(query, params=list(params)).to_arrow_table()
            except duckdb.InterruptException:
                raise
            except duckdb.Error as error:
                now = time.monotonic()
                if not self._is_there():
                    answered_at = None
                elif answered_at is None:
                    answered_at = now
                elif now - answered_at > _SETTLED_S:
                    raise
                if answered_at is None and now - began > self._patience_s:
                    raise StoreError(
                        f"the catalogue of the lake at {self._lake.shown!r} does not answer: {_first_line(error)}; see "
                        "to it and open the book again"
                    ) from error
                if wait_s == _RETRY_S[0]:
                    _log.warning("the lake could not be read, trying on: %s", _first_line(error))
            time.sleep(wait_s)
            wait_s = min(wait_s * 2, _RETRY_S[1])

    def _is_there(self) -> bool:
        """Whether the catalogue answers."""
        psycopg = _psycopg()
        try:
            psycopg.connect(_watched(self._lake.catalogue)).close()
        except psycopg.Error:
            return False
        return True

    def read(self, cursor: Cursor = START) -> Iterator[pa.RecordBatch]:
        with self._cursor() as con:
            for writer, end in sorted(self._ends(con).items()):
                for at in range(cursor.get(writer, 0), end, _READ_ROWS):
                    yield from self._range(con, writer, at, min(at + _READ_ROWS, end))

    def _ends(self, con: duckdb.DuckDBPyConnection) -> dict[str, int]:
        """Where each writer ends now. Only the files that were added since the last look are looked at."""
        snapshot: int = self._ask(con, "select id from ducklake_current_snapshot('lake')")[0][0].as_py()
        with self._reading:
            seen, ends = self._known
        if snapshot == seen:
            return ends
        query = "select writer, max(position) + 1 from {} group by writer"
        since = f"ducklake_table_insertions('lake', 'main', 'events', {seen + 1}, {snapshot})"
        try:
            new = con.sql(query.format(since if seen >= 0 else "lake.events")).to_arrow_table()
        except duckdb.Error:  # that snapshot has expired
            new = self._ask(con, query.format("lake.events"))
        found = zip(*(column.to_pylist() for column in new.columns), strict=True)
        ends = {**ends, **{writer: max(end, ends.get(writer, 0)) for writer, end in found}}
        with self._reading:
            if snapshot > self._known[0]:
                self._known = snapshot, ends
        return ends

    def _range(
        self, con: duckdb.DuckDBPyConnection, writer: str, first: int, end: int, columns: Sequence[str] | None = None
    ) -> list[pa.RecordBatch]:
        names = SCHEMA.names if columns is None else [n for n in SCHEMA.names if n in {*columns, "writer", "position"}]
        schema = pa.schema([SCHEMA.field(n) for n in names])
        table = self._ask(
            con,
            f"select {', '.join(names)} from lake.events "
            "where writer = ? and position >= ? and position < ? order by position",
            [writer, first, end],
        )
        if table.num_rows != end - first:
            raise LogCorrupt(
                f"the lake has {table.num_rows} events of writer {writer!r} at positions {first} to {end - 1}, not "
                f"{end - first}; look for files that were removed from {self._lake.data}"
            )
        return table.cast(schema).combine_chunks().to_batches()

    async def follow(self, cursor: Cursor = START) -> AsyncGenerator[pa.RecordBatch, None]:
        wait_s = _POLL_S[0]
        while True:
            is_last = self._is_closed
            batches = self.read(cursor)
            while (batch := await anyio.to_thread.run_sync(next, batches, None)) is not None:
                wait_s = _POLL_S[0]
                cursor = advance(cursor, batch)
                yield batch
            if is_last:
                return
            await anyio.sleep(wait_s)
            wait_s = min(wait_s * 1.3, _POLL_S[1])

    def gather(self, pointers: Sequence[tuple[str, int]]) -> pa.Table:
        return gather_rows(pointers, self._block)

    def token_places(self, writer: str, position: int) -> TokenPlaces:
        first, batch = self._block(writer, position)
        return TokenPlaces(first, rows.token_places_of(batch), batch, batch.nbytes, 0)

    def _block(self, writer: str, position: int) -> tuple[int, pa.RecordBatch]:
        first = position - position % _BLOCK
        with self._reading:
            batch = self._blocks.get((writer, first))
            if batch is None or position >= first + batch.num_rows:
                batch = self._read_block(writer, first, position)
            else:
                self._blocks.move_to_end((writer, first))
        return first, batch

    def _read_block(self, writer: str, first: int, position: int) -> pa.RecordBatch:
        with self._cursor() as con:
            query = "select max(position) + 1 from lake.events where writer = ? and position >= ? and position < ?"
            end = self._ask(con, query, [writer, first, first + _BLOCK])[0][0].as_py()
            if position < 0 or end is None or position >= end:
                raise KeyError(f"no event at position {position} of writer {writer!r}")
            (batch,) = self._range(con, writer, first, end)
        old = self._blocks.pop((writer, first), None)
        self._blocks[writer, first] = batch
        self._blocks_bytes += batch.nbytes - (0 if old is None else old.nbytes)
        while self._blocks_bytes > _CACHED_BYTES and len(self._blocks) > 1:
            self._blocks_bytes -= self._blocks.popitem(last=False)[1].nbytes
        return batch

    # ---- keep

    def files(self) -> list[tuple[str, int]]:
        """The Parquet files that hold the events, with their sizes in bytes."""
        with self._cursor() as con:
            query = "select data_file, data_file_size_bytes from ducklake_list_files('lake', 'events')"
            return con.execute(query).fetchall()

    def compact(self, *, keep_s: float = 3600.0) -> int:
        """Have DuckLake merge small files. Files that no snapshot of the last `keep_s` seconds uses are removed.

        Returns the number of files that hold the events now. Safe while others append and read; a reader slower than
        `keep_s` must begin again. Raises StoreError.
        """
        with self._cursor() as con:
            try:
                con.execute("call ducklake_merge_adjacent_files('lake')")
                files = [Path(name) for name, _ in self.files()]
                for path in files:  # DuckDB does not: what replaces a synced file must be synced itself
                    with open(path, "rb") as file:
                        os.fsync(file.fileno())
                for folder in {path.parent for path in files}:
                    sync_folder(folder)
                older = f"older_than => now() - interval '{keep_s} seconds'"
                con.execute(f"call ducklake_expire_snapshots('lake', {older})")
                con.execute(f"call ducklake_cleanup_old_files('lake', {older})")
            except (duckdb.Error, OSError) as error:
                raise StoreError(f"the lake could not be compacted: {_first_line(error)}; nothing is lost") from error
        return len(files)

    # ---- close

    def close(self) -> None:
        if not self._stop_accepting():
            return
        if self._thread is not None:
            self._thread.join()
            self._name.close()
        with self._reading:
            self._blocks.clear()
            self._blocks_bytes = 0
            self._close_when_idle()


class _Name:
    """A writer's name, held while a connection to the catalogue lives."""

    def __init__(self, lake: Lake, writer: str) -> None:
        psycopg = self._psycopg = _psycopg()
        self._lake = lake
        self._writer = writer
        self._connection: Any = None
        try:
            self._take()
        except psycopg.Error as error:
            raise StoreError(f"the catalogue at {lake.shown!r} does not answer: {_first_line(error)}") from error

    def _take(self) -> None:
        connection = self._psycopg.connect(_watched(self._lake.catalogue), autocommit=True)
        connection.execute("set lock_timeout = '2s'")
        key = f"rollbook {self._lake.data} {self._writer}"
        found = connection.execute("select pg_try_advisory_lock(hashtextextended(%s, 0))", [key]).fetchone()
        if not found[0]:
            connection.close()
            raise BookBusy(
                f"another process appends to the lake at {self._lake.shown!r} as {self._writer!r}; give this one "
                "another writer name, or stop the other"
            )
        self._connection = connection

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """This writer's turn to commit: commits that meet are tried again by DuckLake, those that queue are not.

        A writer that keeps the others waiting for long is not waited for. Raises OSError if the catalogue is out of
        reach, BookBusy if the name has been taken meanwhile.
        """
        if self._connection.closed:
            try:
                self._take()
            except self._psycopg.Error as error:
                raise OSError(f"the catalogue does not answer: {_first_line(error)}") from error
        key = f"rollbook {self._lake.data} commits"
        try:
            with contextlib.suppress(self._psycopg.errors.LockNotAvailable):
                self._connection.execute("select pg_advisory_lock(hashtextextended(%s, 0))", [key])
            try:
                yield
            finally:
                self._connection.execute("select pg_advisory_unlock(hashtextextended(%s, 0))", [key])
        except self._psycopg.Error as error:
            self._connection.close()
            raise OSError(f"the catalogue does not answer: {_first_line(error)}") from error

    def close(self) -> None:
        self._connection.close()


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _first_line(error: BaseException) -> str:
    """What an error says, without the connection string of `_watched`, which DuckDB puts before it."""
    said = re.sub(r'.*-c tcp_keepalives_idle=[^"]*"[\s:]*', "", str(error), flags=re.DOTALL)
    return said.strip().split("\n")[0]
