"""The projection: narrow tables kept in step with the log, in one DuckDB database.

`Views.catch_up` reads what the log has beyond its cursor and applies it, rows and cursor in one transaction. Its
result is a function of the *set* of events: whatever order writers' events come in (a reward before its
interaction, an end before its beginning) and however they are cut into transactions, the tables are those of a
rebuild. Three rules give that: an event_id counts once; where several events speak of one thing, the order is
(recorded_at, event_id), not arrival; and everything derived (depth, trajectories, an episode's reward) is computed
again for what a change touches.

A file has one owner, held by a lock beside it. Readers in the process take `cursor()`, one per thread or task; for
strangers' queries there are processes (`guest`) that read the same file.
"""

import errno
import fcntl
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from . import locks, migrate
from .errors import BookBusy, LogCorrupt, LogWriteFailed, QueryRefused, StoreError, TablesDamaged
from .events import KINDS, SCHEMA_VERSION
from .log import Cursor, Log
from .payloads import facts_query
from .placing import EDGES, EXTENDS, NO_MAX, NO_MIN, RETRIES, Above, Index, find_broken, find_pruned, place
from .sandbox import Guest, Sandbox
from .schema import (
    PROJECTION,
    create_statements,
    current_rewards_sql,
    episode_rewards_sql,
    metadata,
    view_statements,
)
from .tools import ANSWERS, MARK, read_tools
from .upcasts import upcast

CHUNK_EVENTS = 65_536
"""Events per transaction of a replay: enough to make the cost per transaction vanish, little enough to hold."""

NARROW = (
    "position", "event_id", "writer", "kind", "schema_version", "run_id", "episode_id", "interaction_id",
    "recorded_at", "payload",
)  # fmt: skip
"""What every kind needs of an event; the token columns are read for two kinds only."""

TOUCHING = {"EpisodeOpened", "EpisodeClosed", "InteractionRecorded"}
"""Kinds after which what `episodes` says of their episode is computed again."""

_PIECE_ROWS = 256

_WAL_BYTES = 16 << 20
"""Of committed transactions beside the file, until they are written into it."""

_MOST_WAL_BYTES = 16 * _WAL_BYTES
"""The same while guests read without a pause between them: then new ones wait."""

_GUEST_BYTES = 1 << 20
"""At most in a guest's answer to `open`."""

_log = logging.getLogger("rollbook.store")


class Views:
    """The tables over a log. path None: in memory, private to this object.

    Raises BookBusy if another owner holds the file. A file of another revision is migrated where that is possible
    and rebuilt where it is not, and so is one that is damaged or has what the log does not.
    """

    def __init__(self, log: Log, path: str | os.PathLike[str] | None = None) -> None:
        self._log = log
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._path = None if path is None else Path(path)
        self._sandbox = Sandbox()
        self._guests = 0
        self._guests_left = threading.Condition(self._lock)
        self._is_full = False
        self._readable: int | None = None  # a descriptor that holds a lock others may share
        self._copied: tuple[int, tempfile.TemporaryDirectory[str]] | None = None
        self._state = 0
        if self._path is None:
            self._start(duckdb.connect())
            return
        self._owner = _own(self._path)
        try:
            self._start_kept(self._path)
        except BaseException:
            os.close(self._owner)
            raise

    def _start(self, con: duckdb.DuckDBPyConnection) -> None:
        self._con = con
        if self._path is not None:
            # DuckDB would write its log into the file as it commits, also under a guest: `_checkpoint` does it.
            con.execute("set checkpoint_threshold = '1 TB'")
        con.execute("set TimeZone = 'UTC'")
        con.execute("set python_enable_replacements = false")  # a query never means a Python variable
        _prepare(con)
        self._cursor: dict[str, int] = dict(con.execute("select writer, position from cursors").fetchall())
        self._waiting = self._load_waiting()
        ((self._next_node,),) = con.execute("select coalesce(max(node), -1) + 1 from interactions").fetchall()
        self._has_pruned = con.execute("select 1 from pruned limit 1").fetchone() is not None

    def _start_kept(self, path: Path) -> None:
        """With the tables of a file if they can be read and are those of this log, else with empty ones."""
        con: duckdb.DuckDBPyConnection | None = None
        wrong: str | None = "is damaged"
        if path.is_dir():
            raise StoreError(f"{path} is a folder; remove it, and the tables are computed there")
        try:
            if not _mark(path).exists():
                con = _open(path)
                self._start(con)
                wrong = self._strangeness()
                if wrong is not None:  # what the log has lost may be nowhere else
                    con.close()
                    path.replace(path.with_name(path.name + ".old"))
                    wrong += f" (what it says is kept in {path.name}.old)"
        except duckdb.Error as error:
            if is_full(error) or not _is_unreadable(error):
                raise
            wrong = f"cannot be read ({str(error).splitlines()[0]})"
        if wrong is not None:
            _log.warning("%s %s; computing it again from the log", path, wrong)
            if con is not None:
                con.close()
            _remove(path)
            self._start(duckdb.connect(str(path)))

    def _strangeness(self) -> str | None:
        """Why the tables are not those of this log, None if they are: of each writer, the event that they have last is
        where they say. Else a log that lost its end, or was restored from an old copy, would go on under tables that
        have what it does not."""
        last: list[bytes] = []
        for writer, position in self._cursor.items():
            try:
                last.append(self._log.gather([(writer, position - 1)])["event_id"][0].as_py())
            except KeyError:
                return f"has {position} events of writer {writer!r}, and the log fewer"
            except LogCorrupt:  # nothing can be said; whoever needs that event will hear of it
                continue
        ids = [UUID(bytes=one) for one in set(last)]
        ((n,),) = self._con.execute(
            "select count(*) from events where event_id in (select unnest(?))", [ids]
        ).fetchall()
        return None if n == len(ids) else "has other events than the log"

    @property
    def position(self) -> Cursor:
        """How far the tables have followed the log: writer -> next position."""
        return dict(self._cursor)

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """A connection of its own to the tables, for one thread or task; close it when done."""
        return self._con.cursor()

    def catch_up(self) -> int:
        """Project what the log has beyond the cursor. Returns the events read. Safe from any thread."""
        applied = 0
        with self._lock:
            try:
                for chunk in _chunks(self._log.read(self._cursor)):
                    self._apply(chunk)
                    self._checkpoint()
                    applied += sum(batch.num_rows for batch in chunk)
                self._checkpoint(waits=True)  # the lock is given up meanwhile: not in the loop
            except duckdb.Error as error:
                damage = self.damage(error)
                if damage is not None:
                    raise damage from error
                raise
        return applied

    def damage(self, error: duckdb.Error) -> TablesDamaged | None:
        """What to raise where an error of DuckDB says that the file is damaged; the next opening makes a new one."""
        return self.damage_said(type(error).__name__, str(error))

    def damage_said(self, kind: str, text: str) -> TablesDamaged | None:
        """The same of an error that a guest met; kind: the name of its class."""
        if self._path is None or not _says_damage(kind, text):
            return None
        _mark(self._path).touch()
        return TablesDamaged(
            f"{self._path} is damaged ({text.splitlines()[0]}); open the book again, and its tables are computed "
            "from the log"
        )

    @contextmanager
    def guest(self, wait_s: float) -> Iterator[Guest]:
        """A process that reads the tables as they are now, for one query of a stranger.

        A guest opens the file as DuckDB would after a crash at this moment: what the last checkpoint says, and the log
        behind it. All of that stays as it is until the next checkpoint, which waits for the guests. Raises
        QueryRefused where no process is free for wait_s; TablesDamaged, Died, TimeoutError.
        """
        with self._sandbox.guest(str(self._place()), wait_s) as guest:
            with self._lock:
                while self._is_full:
                    self._guests_left.wait()
                self._guests += 1
            try:
                with self._lock:
                    self._share()
                    if guest.state != self._state:
                        said, _ = guest.ask(time.monotonic() + wait_s, _GUEST_BYTES, "open")
                        if said:
                            damage = self.damage_said(said["kind"], said["failed"])
                            if damage is not None:
                                raise damage
                            raise QueryRefused(f"the tables cannot be read: {said['failed']}; open the book again")
                        guest.state = self._state
                yield guest
            finally:
                with self._lock:
                    self._guests -= 1
                    self._guests_left.notify_all()

    def _place(self) -> Path:
        """The file that guests read; of tables in memory a copy, elsewhere."""
        if self._path is not None:
            return self._path
        with self._lock:
            if self._copied is None:
                self._copied = (-1, tempfile.TemporaryDirectory(prefix="rollbook-tables-"))
            return Path(self._copied[1].name) / "views.duckdb"

    def _share(self) -> None:
        """Make the file readable for guests."""
        if self._path is not None:
            if self._readable is None:
                # DuckDB's lock on the file keeps all others out, whose place is what `_own` holds. As a lock that can
                # be shared it lets in who opens it read-only. Locks are the process's: this one replaces DuckDB's.
                self._readable = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                fcntl.lockf(self._readable, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        path = self._place()
        assert self._copied is not None
        if self._copied[0] != self._state:
            new = path.with_name("new.duckdb")
            self._con.execute(f"attach '{new}' as copied")
            self._con.execute("copy from database memory to copied")
            self._con.execute("detach copied")
            new.replace(path)
            self._copied = (self._state, self._copied[1])

    def _checkpoint(self, *, waits: bool = False) -> None:
        """Write what was committed into the file, once it is enough and no guest reads what that would free.

        waits: for the guests to leave, where far too much was committed meanwhile.
        """
        if self._path is None:
            return
        try:
            size = self._path.with_name(self._path.name + ".wal").stat().st_size
        except FileNotFoundError:
            return
        if size < _WAL_BYTES or (self._guests and not (waits and size >= _MOST_WAL_BYTES)):
            return
        self._is_full = True
        try:
            while self._guests:  # each has its time
                self._guests_left.wait()
            self._con.execute("checkpoint")
            self._state += 1
        except duckdb.TransactionException:
            pass  # somebody writes in a transaction of his own; another time
        finally:
            self._is_full = False
            self._guests_left.notify_all()

    def close(self) -> None:
        """Give the file back. Twice is once."""
        self._sandbox.close()
        with self._lock:
            self._con.close()
            if self._readable is not None:
                os.close(self._readable)
                self._readable = None
            if self._copied is not None:
                self._copied[1].cleanup()
                self._copied = None
            if self._owner is not None:
                os.close(self._owner)
                self._owner = None

    def _load_waiting(self) -> set[str]:
        found = self._con.execute(
            "select distinct parent_id from interactions where depth = 0 and parent_id is not null"
        ).fetchall()
        return {parent for (parent,) in found}

    def _apply(self, chunk: list[pa.RecordBatch]) -> None:
        cursor = dict(self._cursor)
        for batch in chunk:
            writer = batch.column("writer")[0].as_py()
            cursor[writer] = batch.column("position")[batch.num_rows - 1].as_py() + 1
        self._con.begin()
        try:
            projection = _Projection(self._con, self._waiting, self._next_node, self._has_pruned)
            projection.apply(chunk)
            for writer, position in cursor.items():
                if self._cursor.get(writer) is None:
                    self._con.execute("insert into cursors values (?, ?)", [writer, position])
                elif self._cursor[writer] != position:
                    self._con.execute("update cursors set position = ? where writer = ?", [position, writer])
            self._con.commit()
        except BaseException as error:
            with suppress(duckdb.Error):  # a commit that failed has ended the transaction itself
                self._con.rollback()
            with suppress(duckdb.Error):  # nor can a database that gave up be asked
                self._waiting = self._load_waiting()
            is_damage = isinstance(error, duckdb.Error) and _is_damage(error)
            if not is_damage and isinstance(
                error, duckdb.IOException | duckdb.FatalException | duckdb.TransactionException
            ):
                raise LogWriteFailed(
                    f"the tables of the book could not be written: {str(error).splitlines()[0]}; make room on the disk "
                    "and open the book again (the log is whole, the tables are computed from it)"
                ) from error
            raise
        self._cursor = cursor
        self._next_node = projection.next_node
        self._has_pruned = projection.has_pruned
        self._state += 1


def _own(path: Path) -> int:
    owner = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    who = locks.take(owner)
    if who is not None:
        os.close(owner)
        raise BookBusy(
            f"{path} is owned by {who}; ask that one, over /sql where it serves, or open the book without the file "
            "(open_book then computes the tables in memory)"
        )
    return owner


def _open(path: Path) -> duckdb.DuckDBPyConnection:
    """The database with the tables of this version: as it is, migrated, or empty where neither can be."""
    con = duckdb.connect(str(path))
    found = _revision(con)
    if found in (PROJECTION, None):
        return con
    con.close()
    if found in migrate.revisions():
        migrate.upgrade(path)
    else:
        _log.warning(
            "%s has tables of revision %s, which this version does not know; computing them again", path, found
        )
        _remove(path)
    return duckdb.connect(str(path))


def is_full(error: duckdb.Error) -> bool:
    """Whether it says that a file has no room to grow."""
    return any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def _is_unreadable(error: duckdb.Error) -> bool:
    """Whether an error of opening a file speaks of the file."""
    kinds = (duckdb.IOException, duckdb.SerializationException, duckdb.InternalException, duckdb.FatalException)
    return isinstance(error, kinds) or _is_damage(error)


def _is_damage(error: duckdb.Error) -> bool:
    return _says_damage(type(error).__name__, str(error))


def _says_damage(kind: str, text: str) -> bool:
    """Whether a block of a file has another checksum than it should: DuckDB 2.0 has no class of its own for that. A
    query's own errors may say such words, too, but are of other classes."""
    return kind in ("Error", "IOException", "InternalException", "FatalException") and "Corrupt database file" in text


def _remove(path: Path) -> None:
    for name in (path, path.with_name(path.name + ".wal"), _mark(path)):
        name.unlink(missing_ok=True)


def _mark(path: Path) -> Path:
    """Beside a file that was found to be damaged while it was in use."""
    return path.with_name(path.name + ".damaged")


def _revision(con: duckdb.DuckDBPyConnection) -> str | None:
    """The revision of the tables; None for an empty database, 'unknown' for tables of somebody else."""
    tables = {name for (name,) in con.execute("select table_name from duckdb_tables()").fetchall()}
    if not tables:
        return None
    if "alembic_version" not in tables:
        return "unknown"
    found = con.execute("select version_num from alembic_version").fetchone()
    return "unknown" if found is None else str(found[0])


def _prepare(con: duckdb.DuckDBPyConnection) -> None:
    if _revision(con) == PROJECTION:
        statements = view_statements()  # they hold nothing and may have changed without a migration
    else:
        statements = [
            *create_statements(),
            "create table alembic_version (version_num varchar not null)",
            f"insert into alembic_version values ('{PROJECTION}')",
        ]
    for statement in statements:
        con.execute(statement)


def _chunks(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    chunk: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        chunk.append(batch)
        rows += batch.num_rows
        if rows >= CHUNK_EVENTS:
            yield chunk
            chunk, rows = [], 0
    if chunk:
        yield chunk


PLACE_COLUMNS = (
    "node", "up_node", "up_id", "up_edge", "depth", "top_id", "root_id", "start_id", "path_n", "path_output",
    "path_version_min", "path_version_max", "is_broken", "is_pruned",
)  # fmt: skip

ABOUT = (
    "n_interactions", "n_output", "n_pruned", "version_min", "version_max", "reward", "n_taken", "main_id", "main_node",
)  # fmt: skip
"""What `episodes` says of an episode's interactions, rewards and batches."""

_OWN = current_rewards_sql("(from rewards where name = 'reward' and episode_id in (select episode_id from d))")
_OWN_REWARDS = episode_rewards_sql(f"({_OWN})")

_FIELD_OF = {"n_prompt": "prompt_length", "n_shared": "shared"}
_INTERACTION_COLUMNS = ", ".join(
    f'"{_FIELD_OF.get(c.name, c.name)}" as "{c.name}"' for c in metadata.tables["interactions"].columns
)

_FACTS = {kind: facts_query(kind, "_rows") for kind in KINDS}
"""SQL for the events of a kind that are staged as `_rows`: envelope and fact, a column each."""


class _Projection:
    """One transaction's worth of events applied to the tables."""

    def __init__(self, con: duckdb.DuckDBPyConnection, waiting: set[str], next_node: int, has_pruned: bool) -> None:
        self._con = con
        self._waiting = waiting
        self.next_node = next_node
        self.has_pruned = has_pruned  # whether the table `pruned` has rows
        self._touched: set[str] = set()  # episodes about which something new was learned

    @contextmanager
    def _staged(self, **tables: pa.Table) -> Iterator[None]:
        for name, table in tables.items():
            self._con.register(name, table)
        yield
        for name in tables:  # not after an error: the transaction is lost, and the next table of that name replaces it
            self._con.unregister(name)

    def _read(self, kind: str, rows: pa.Table) -> pa.Table:
        """The events with the fields of their facts as columns; of a projection DuckDB keeps the order."""
        with self._staged(_payloads=rows.select(["payload"])):
            fields = self._con.sql(f"from {facts_query(kind, '_payloads')}").to_arrow_table().combine_chunks()
        for name in fields.column_names:
            rows = rows.append_column(name, fields[name])
        return rows.drop_columns(["payload"])

    def apply(self, chunk: list[pa.RecordBatch]) -> None:
        fresh = self._fresh(pa.Table.from_batches([batch.select(NARROW) for batch in chunk]).combine_chunks())
        kinds = pc.dictionary_encode(fresh["kind"]).combine_chunks()
        self._chunk = chunk
        names = kinds.dictionary.to_pylist()
        codes = kinds.indices.to_numpy()
        mine = {}
        for code, kind in enumerate(names):
            rows = fresh if len(names) == 1 else fresh.take(pa.array(np.flatnonzero(codes == code)))
            mine[kind] = _current(kind, rows)
            if kind in TOUCHING:
                self._touched.update(mine[kind]["episode_id"].unique().to_pylist())
        lists = _Lists(chunk)
        for kind, project in (
            ("RunStarted", self._runs),
            ("PolicyPublished", self._policies),
            ("InteractionFailed", self._failures),
            ("InteractionRecorded", self._interactions),
            ("RewardGiven", self._rewards),
            ("BatchTaken", self._taken),
            ("BatchTrained", self._trained),
            ("TokensScored", self._scored),
            ("InteractionsPruned", self._pruned),
        ):
            if kind in mine:
                project(mine[kind], lists)
        self._episodes(mine.get("EpisodeOpened"), mine.get("EpisodeClosed"))

    def _fresh(self, table: pa.Table) -> pa.Table:
        """The events that the tables do not have, each once; they are in `events` when this returns.

        An event that two writers hold is kept where (writer, position) is smallest, whichever came first.
        """
        table = table.append_column("row", pa.array(np.arange(table.num_rows)))
        if len(table["event_id"].unique()) < table.num_rows:
            first: dict[bytes, int] = {}
            places = list(zip(table["writer"].to_pylist(), table["position"].to_pylist(), strict=True))
            for row, event_id in enumerate(table["event_id"].to_pylist()):
                if event_id not in first or places[row] < places[first[event_id]]:
                    first[event_id] = row
            table = table.take(pa.array(sorted(first.values())))
        table = table.set_column(1, "event_id", _uuids(table["event_id"]))
        with self._staged(_events=table.drop_columns(["payload", "schema_version"])):
            # Materialized, because DuckDB 1.5 cannot push a join's filter on a UUID down into Arrow.
            again = self._con.execute(
                "with n as materialized (select event_id, writer, position from _events) "
                "select n.event_id, n.writer, n.position, (n.writer, n.position) < (e.writer, e.position) "
                "from n join events e using (event_id)"
            ).fetchall()
            for event_id, writer, position, is_earlier in again:
                if is_earlier:
                    for name in ("events", "interactions", "scored"):
                        self._con.execute(
                            f"update {name} set writer = ?, position = ? where event_id = ?",
                            [writer, position, event_id],
                        )
            if again:
                known = {event_id.bytes for event_id, *_ in again}
                keep = [
                    row for row, event_id in enumerate(table["event_id"].to_pylist()) if event_id.bytes not in known
                ]
                table = table.take(pa.array(keep, pa.int64()))
        with self._staged(_events=table.drop_columns(["payload", "schema_version"])):
            self._con.execute(
                "insert into events by name select event_id, writer, position, kind, run_id, episode_id, "
                "interaction_id, recorded_at from _events"
            )
        return table

    def _runs(self, rows: pa.Table, _: object) -> None:
        with self._staged(_rows=rows):
            self._con.execute(f"""
                merge into runs r using (
                    select run_id, min(recorded_at) as first_at, max(recorded_at) as last_at,
                      arg_max({{'name': name, 'config': config, 'event_id': event_id}},
                              {{'at': recorded_at, 'id': event_id}}) as last
                    from {_FACTS["RunStarted"]} group by run_id
                ) n on r.run_id = n.run_id
                when matched and (n.last_at, n.last.event_id) > (r.restarted_at, r.event_id) then update set
                    name = n.last.name, config = n.last.config, event_id = n.last.event_id,
                    restarted_at = n.last_at, started_at = least(r.started_at, n.first_at)
                when matched then update set started_at = least(r.started_at, n.first_at)
                when not matched then insert (run_id, name, config, started_at, restarted_at, event_id)
                    values (n.run_id, n.last.name, n.last.config, n.first_at, n.last_at, n.last.event_id)
            """)

    def _policies(self, rows: pa.Table, _: object) -> None:
        with self._staged(_rows=rows):
            self._con.execute(f"""
                merge into policies p using (
                    select run_id, policy, version, max(recorded_at) as at,
                      arg_max({{'path': path, 'step': step, 'event_id': event_id}},
                              {{'at': recorded_at, 'id': event_id}}) as last
                    from {_FACTS["PolicyPublished"]} group by run_id, policy, version
                ) n on p.run_id = n.run_id and p.policy = n.policy and p.version = n.version
                when matched and (n.at, n.last.event_id) > (p.published_at, p.event_id) then update set
                    path = n.last.path, step = n.last.step, published_at = n.at, event_id = n.last.event_id
                when not matched then insert (run_id, policy, version, path, step, published_at, event_id)
                    values (n.run_id, n.policy, n.version, n.last.path, n.last.step, n.at, n.last.event_id)
            """)

    def _failures(self, rows: pa.Table, _: object) -> None:
        with self._staged(_rows=rows):
            self._con.execute(f"""
                insert into failures by name
                select run_id, episode_id, error, message, status, dialect, recorded_at as failed_at, event_id
                from {_FACTS["InteractionFailed"]}
            """)

    def _rewards(self, rows: pa.Table, _: object) -> None:
        given = self._read("RewardGiven", rows)
        # `episodes` has the reward of that name only.
        counted = given["episode_id"].filter(pc.equal(given["name"], "reward"))
        self._touched.update(counted.unique().to_pylist())
        with self._staged(_given=given):
            self._con.execute("""
                insert into rewards by name
                select event_id, run_id, episode_id, interaction_id, start, "end", name, value, weight, source, details,
                  recorded_at as given_at
                from _given
            """)

    def _interactions(self, rows: pa.Table, lists: "_Lists") -> None:
        rows = self._first_of_each(self._read("InteractionRecorded", rows))
        known = self._load("select id from _wanted", _wanted=_names(rows["interaction_id"], rows["parent_id"]))
        rows, replaced, left = self._without_later(rows, known)
        ids = rows["interaction_id"]
        at = rows["row"].to_numpy()
        fresh = pa.table(
            {
                "interaction_id": ids,
                "parent_id": rows["parent_id"],
                "edge": rows["edge"],
                "node": pa.array(np.arange(self.next_node, self.next_node + len(ids))),
                "episode_id": rows["episode_id"],
                "n_prompt": rows["prompt_length"],
                "n_shared": rows["shared"],
                "n_output": pa.array(lists.lengths("versions", at)),
                "version_min": lists.reduce(np.minimum, "versions", at, np.int32),
                "version_max": lists.reduce(np.maximum, "versions", at, np.int32),
            }
        )
        self.next_node += len(ids)

        # Nodes that hang on what is only now here (or is now different) are placed again.
        come = [] if not self._waiting else _common(ids, self._waiting)
        moved = _without(self._descendants([*come, *replaced]), ids)
        nodes = pa.concat_tables([fresh, moved.select(fresh.column_names).cast(fresh.schema)]).combine_chunks()
        # A retry stands on what the repeated node stands on, which may be one step further up than `known` reaches.
        above = _without(known, nodes["interaction_id"])
        repeated = nodes["parent_id"].filter(pc.equal(nodes["edge"], "retries"))
        if len(repeated):
            further = above["up_id"].filter(pc.is_in(above["interaction_id"], repeated))
            more = self._load("select id from _wanted", _wanted=_names(further))
            above = pa.concat_tables(
                [above, _without(more, _names(nodes["interaction_id"], above["interaction_id"])["id"])]
            )
        taken = self._taken_by_prune(nodes["interaction_id"])
        placed, parent = _place(nodes, above, taken)

        self._waiting.difference_update(come)
        missing = nodes["parent_id"].filter(pa.array(parent < 0)).drop_null()
        self._waiting.update(missing.to_pylist())

        edge = _numbers(nodes["edge"], EDGES)
        has_next, is_retried = np.zeros((2, nodes.num_rows + above.num_rows), bool)
        has_next[parent[(parent >= 0) & (edge == EXTENDS)]] = True
        is_retried[parent[(parent >= 0) & (edge == RETRIES)]] = True
        n = len(ids)
        new = rows
        for name, column in (
            *((name, fresh[name]) for name in ("n_output", "version_min", "version_max")),
            *((name, column.slice(0, n)) for name, column in placed.items()),
            ("mean_logprob", pc.if_else(pa.array(taken[:n]), None, lists.mean("logprobs", at))),
            ("is_leaf", pa.array(~has_next[:n])),
            ("is_retried", pa.array(is_retried[:n])),
        ):
            new = new.append_column(name, column)
        with self._staged(_new=new):
            self._con.execute(f"insert into interactions by name select {_INTERACTION_COLUMNS} from _new")
        self._tools(rows.filter(pa.array(~taken[:n])), replaced)
        if moved.num_rows:
            again = pa.table({"id": moved["interaction_id"], **{c: a.slice(n) for c, a in placed.items()}})
            with self._staged(_moved=again):
                sets = ", ".join(f"{column} = m.{column}" for column in PLACE_COLUMNS)
                shifted = self._con.execute(
                    f"update interactions i set {sets} from _moved m where i.interaction_id = m.id returning episode_id"
                ).fetchall()
            self._touched.update(episode_id for (episode_id,) in shifted)
        # Normally a parent that was a leaf is none any more; a replaced or late node may also undo or bring such facts.
        stored = pa.concat_tables([moved, above])
        was_leaf, was_retried = (stored[name].to_numpy() for name in ("is_leaf", "is_retried"))
        changed = (has_next[n:] & was_leaf) | (is_retried[n:] & ~was_retried)
        wrong = [*stored["interaction_id"].filter(pa.array(changed)).to_pylist(), *left]
        if wrong:
            with self._staged(_changed=pa.table({"id": pa.array(wrong, pa.string())})):
                flagged = self._con.execute("""
                    update interactions i set is_leaf = not k.is_extended, is_retried = k.is_retried
                    from (
                        select t.id, coalesce(bool_or(c.edge = 'extends'), false) as is_extended,
                          coalesce(bool_or(c.edge = 'retries'), false) as is_retried
                        from (select distinct id from _changed) t left join interactions c on c.parent_id = t.id
                        group by t.id
                    ) k where i.interaction_id = k.id returning i.episode_id
                """).fetchall()
            self._touched.update(episode_id for (episode_id,) in flagged)

    def _tools(self, rows: pa.Table, gone: list[str]) -> None:
        """Tool calls and results of interactions that are new, and no more those of the gone: replaced or pruned."""
        left: list[int] = []  # keys of what is gone
        if gone:
            with self._staged(_gone=pa.table({"id": gone})):
                for name in ("tool_calls", "tool_results"):
                    delete = f"delete from {name} where interaction_id in (select id from _gone) returning key"
                    left += [key for (key,) in self._con.execute(delete).fetchall()]
        rows = rows.select(["row", "run_id", "episode_id", "interaction_id", "recorded_at"])
        rows = rows.filter(pc.is_in(rows["row"], self._speak_of_tools()))
        said = zip(rows["episode_id"].to_pylist(), self._messages(rows["row"]), strict=True)
        calls, results = (
            pa.table(
                {
                    **{name: rows[name].take(found["row"]) for name in rows.column_names if name != "row"},
                    **{name: found[name] for name in found.column_names if name != "row"},
                }
            )
            for found in read_tools(said)
        )
        keys = pa.chunked_array([*calls["key"].chunks, *results["key"].chunks, pa.array(left, pa.int64())]).unique()
        if not len(keys):
            return
        calls = calls.rename_columns({"recorded_at": "called_at"})
        results = results.rename_columns({"recorded_at": "answered_at"})
        with self._staged(_calls=calls, _results=results, _keys=pa.table({"key": keys})):
            if results.num_rows:
                self._con.execute("insert into tool_results by name from _results")
            asked = self._con.sql("""
                select key, interaction_id, call, called_at, true as is_stored, is_error from tool_calls
                where key in (select key from _keys)
                union all by name select key, interaction_id, call, called_at, false as is_stored from _calls
            """).to_arrow_table()
            with self._staged(_asked=asked):
                answered = self._con.sql(f"""
                    select q.interaction_id, q.call, q.key, q.is_stored, a.is_error,
                      q.is_stored and a.is_error is distinct from q.is_error as is_changed
                    from _asked q left join ({ANSWERS}) a using (interaction_id, call)
                """).to_arrow_table()
            with self._staged(_answered=answered):
                if calls.num_rows:
                    self._con.execute("""
                        insert into tool_calls by name
                        select c.*, a.is_error from _calls c join _answered a using (interaction_id, call)
                        where not a.is_stored
                    """)
                if pc.any(answered["is_changed"]).as_py():
                    self._con.execute("""
                        update tool_calls t set is_error = a.is_error from _answered a where a.is_changed
                          and t.key = a.key and t.interaction_id = a.interaction_id and t.call = a.call
                    """)

    def _speak_of_tools(self) -> pa.Array:
        """The rows of the chunk whose messages may have a call or a result."""
        said = pa.Table.from_batches([batch.select(["messages"]) for batch in self._chunk])
        said = said.append_column("n", pa.array(np.arange(said.num_rows)))
        with self._staged(_said=said):  # DuckDB looks through messages ten times as fast as Arrow does
            found = self._con.sql(f"select n from _said where contains(messages, '{MARK}')").to_arrow_table()
        return found["n"].combine_chunks()

    def _messages(self, rows: pa.ChunkedArray) -> Iterator[memoryview]:
        """Of these rows of the chunk, without a copy."""
        if not len(rows):
            return
        columns = [batch.column("messages") for batch in self._chunk]
        buffers = [column.buffers() for column in columns]
        ends = [np.frombuffer(b[1], np.int32)[c.offset :][: len(c) + 1] for b, c in zip(buffers, columns, strict=True)]
        texts = [memoryview(b[2] or b"") for b in buffers]
        at = rows.to_numpy()
        of = np.searchsorted(np.cumsum([len(column) for column in columns]), at, side="right").tolist()
        begins, stops = (np.concatenate(side)[at].tolist() for side in ([e[:-1] for e in ends], [e[1:] for e in ends]))
        for column, begin, stop in zip(of, begins, stops, strict=True):
            yield texts[column][begin:stop]

    def _first_of_each(self, rows: pa.Table) -> pa.Table:
        """Of several events of one interaction the first recorded stands: its children were built on it."""
        ids = rows["interaction_id"].combine_chunks()
        if len(ids.unique()) == len(ids):
            return rows
        keys = _keys(rows)
        chosen: dict[str, int] = {}
        for row, name in enumerate(ids.to_pylist()):
            if name not in chosen or keys[row] < keys[chosen[name]]:
                chosen[name] = row
        return rows.take(pa.array(list(chosen.values()), pa.int64()))

    def _without_later(self, rows: pa.Table, known: pa.Table) -> tuple[pa.Table, list[str], set[str]]:
        """The rows that stand against those the table has, which of these they replace, and the former parents."""
        again = known.filter(pc.is_in(known["interaction_id"], rows["interaction_id"]))
        if not again.num_rows:
            return rows, [], set()
        keys = _keys(rows)
        row_of = {name: row for row, name in enumerate(rows["interaction_id"].to_pylist())}
        replaced: list[str] = []
        left: set[str] = set()
        dropped: set[int] = set()
        for old, key in zip(again.select(["interaction_id", "parent_id"]).to_pylist(), _keys(again), strict=True):
            row = row_of[old["interaction_id"]]
            if keys[row] < key:
                replaced.append(old["interaction_id"])
                if old["parent_id"] is not None:
                    left.add(old["parent_id"])
            else:
                dropped.add(row)
        if replaced:
            with self._staged(_gone=pa.table({"id": replaced})):
                gone = self._con.execute(
                    "delete from interactions where interaction_id in (select id from _gone) returning episode_id"
                ).fetchall()
            self._touched.update(episode_id for (episode_id,) in gone)
        return rows.take(pa.array([r for r in range(rows.num_rows) if r not in dropped], pa.int64())), replaced, left

    def _load(self, ids: str, **tables: pa.Table) -> pa.Table:
        """Rows of `interactions`, as far as placing others takes them, by a query for their ids."""
        with self._staged(**tables):
            return self._con.sql(f"""
                select interaction_id, parent_id, episode_id, edge, n_prompt, n_shared, n_output, version_min,
                  version_max, {", ".join(PLACE_COLUMNS)}, is_leaf, is_retried, recorded_at, event_id
                from interactions where interaction_id in ({ids})
            """).to_arrow_table()

    def _descendants(self, ids: list[str]) -> pa.Table:
        if not ids:
            return self._load("select null")
        return self._load(
            """
            with recursive under(id) as (
                select interaction_id from interactions where parent_id in (select id from _above)
                union
                select i.interaction_id from interactions i join under on i.parent_id = under.id
            ) select id from under
            """,
            _above=pa.table({"id": pa.array(ids, pa.string())}),
        )

    def _taken(self, rows: pa.Table, _: object) -> None:
        """Of several events of one batch the first stands."""
        new = self._read("BatchTaken", rows)
        keys = _keys(new)
        chosen: dict[str, int] = {}
        for row, batch_id in enumerate(new["batch_id"].to_pylist()):
            if batch_id not in chosen or keys[row] < keys[chosen[batch_id]]:
                chosen[batch_id] = row
        with self._staged(_wanted=pa.table({"id": list(chosen)})):
            known = self._con.execute("""
                select batch_id, epoch_us(taken_at), taken_by from batches
                where batch_id in (select id from _wanted) and taken_by is not null
            """).fetchall()
        for batch_id, at, taken_by in known:
            if keys[chosen[batch_id]] < (at, taken_by):
                self._touch_members("select interaction_id from batch_rows where batch_id = ?", [batch_id])
                self._con.execute("delete from batch_rows where batch_id = ?", [batch_id])
            else:
                del chosen[batch_id]
        if not chosen:
            return
        with self._staged(_new=new.take(pa.array(list(chosen.values()), pa.int64()))):
            self._con.execute("""
                merge into batches b using _new n on b.batch_id = n.batch_id
                when matched then update set run_id = n.run_id, step = n.step, version = n.version,
                    taken_at = n.recorded_at, n_rows = len(n.rows), selection = n.selection, discarded = n.discarded,
                    taken_by = n.event_id
                when not matched then insert (batch_id, run_id, step, version, taken_at, n_rows, selection, discarded,
                    taken_by)
                  values (n.batch_id, n.run_id, n.step, n.version, n.recorded_at, len(n.rows), n.selection, n.discarded,
                    n.event_id)
            """)
            members = (
                "select batch_id, r.interaction_id, r.credit, r.advantage, coalesce(r.weight, 1.0) as weight "
                "from (select batch_id, unnest(rows) as r from _new)"
            )
            self._con.execute(f"insert into batch_rows by name {members}")
            self._touch_members(f"select interaction_id from ({members})", [])

    def _touch_members(self, ids: str, params: list[str]) -> None:
        found = self._con.execute(
            f"select distinct episode_id from interactions where interaction_id in ({ids})", params
        ).fetchall()
        self._touched.update(episode_id for (episode_id,) in found)

    def _trained(self, rows: pa.Table, _: object) -> None:
        """Of several trainings of one batch the last stands: a restart trains it again."""
        with self._staged(_rows=rows):
            self._con.execute(f"""
                merge into batches b using (
                    select * from {_FACTS["BatchTrained"]}
                    qualify row_number() over (partition by batch_id order by recorded_at desc, event_id desc) = 1
                ) n on b.batch_id = n.batch_id
                when matched and (b.trained_by is null or (n.recorded_at, n.event_id) > (b.trained_at, b.trained_by))
                  then update set trained_at = n.recorded_at, trained_by = n.event_id, metrics = n.metrics,
                    run_id = case when b.taken_by is null then n.run_id else b.run_id end,
                    step = case when b.taken_by is null then n.step else b.step end
                when not matched then insert (batch_id, run_id, step, trained_at, metrics, trained_by)
                  values (n.batch_id, n.run_id, n.step, n.recorded_at, n.metrics, n.event_id)
            """)

    def _scored(self, rows: pa.Table, lists: "_Lists") -> None:
        at = rows["row"].to_numpy()
        is_gone = pa.array(self._taken_by_prune(rows["interaction_id"]))
        for column, values in (("mean_logprob", "logprobs"), ("mean_entropy", "entropies")):
            rows = rows.append_column(column, pc.if_else(is_gone, None, lists.mean(values, at)))
        with self._staged(_rows=rows):
            self._con.execute(f"""
                insert into scored by name
                select interaction_id, run_id, version, scorer, weights_sha256, batch_id, mean_logprob, mean_entropy,
                  recorded_at as scored_at, writer, position, event_id
                from {_FACTS["TokensScored"]}
            """)

    def _pruned(self, rows: pa.Table, _: object) -> None:
        """Of several events that name one interaction the first stands. What only its payload tells leaves the tables,
        since a rebuild, which may come before or after the payload has gone, cannot have it."""
        self.has_pruned = True
        with self._staged(_rows=rows):
            found = self._con.sql(f"""
                select id as interaction_id, episode_id, run_id, recorded_at, event_id
                from (select * exclude (interaction_ids, interaction_id), unnest(interaction_ids) as id
                      from {_FACTS["InteractionsPruned"]})
                qualify row_number() over (partition by id order by recorded_at, event_id) = 1
            """).to_arrow_table()
        with self._staged(_found=found):
            self._con.execute("""
                merge into pruned p using (
                    select * replace (event_id::uuid as event_id) from _found  -- Arrow has it as text
                ) n on p.interaction_id = n.interaction_id
                when matched and (n.recorded_at, n.event_id) < (p.pruned_at, p.event_id) then update set
                    episode_id = n.episode_id, run_id = n.run_id, pruned_at = n.recorded_at, event_id = n.event_id
                when not matched then insert (interaction_id, episode_id, run_id, pruned_at, event_id)
                    values (n.interaction_id, n.episode_id, n.run_id, n.recorded_at, n.event_id)
            """)
            only = "interaction_id in (select interaction_id from _found)"
            self._con.execute(f"update interactions set mean_logprob = null where {only}")
            self._con.execute(f"update scored set mean_logprob = null, mean_entropy = null where {only}")
            marked = self._con.execute("""
                with recursive lost(id) as (
                    select interaction_id from _found
                    union
                    select i.interaction_id from interactions i join lost on i.parent_id = lost.id
                    where i.n_shared > 0 and not i.is_broken
                )
                update interactions set is_pruned = true where not is_pruned and interaction_id in (select id from lost)
                returning episode_id
            """).fetchall()
        self._touched.update(episode_id for (episode_id,) in marked)
        self._tools(rows.slice(0, 0), found["interaction_id"].to_pylist())

    def _taken_by_prune(self, ids: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
        """[N] Which of these `prune` took."""
        if not self.has_pruned:
            return np.zeros(len(ids), np.bool_)
        with self._staged(_wanted=pa.table({"id": ids})):
            found = self._con.sql(
                "select interaction_id from pruned where interaction_id in (select id from _wanted)"
            ).to_arrow_table()
        taken: npt.NDArray[np.bool_] = pc.is_in(ids, found["interaction_id"].combine_chunks()).to_numpy()
        return taken

    def _episodes(self, opened: pa.Table | None, closed: pa.Table | None) -> None:
        """Rows of episodes that were opened or ended, and for all that this transaction touched what is computed of
        their interactions and rewards.

        That comes first: to change a row that the same transaction made costs DuckDB ten times as much as to make it.
        """
        if not self._touched:
            return
        with self._staged(_touched=pa.table({"episode_id": pa.array(list(self._touched), pa.string())})):
            about = self._con.sql(f"""
                with d as (select episode_id from _touched),
                i as (
                    select episode_id, interaction_id, node, top_id, recorded_at, event_id, n_output, version_min,
                      version_max, is_trainable and not (is_retried and is_leaf) and not is_broken as is_trained,
                      is_trained and capture = 'complete' as is_whole, is_pruned, origin_id
                    from interactions where episode_id in (select episode_id from d)
                ),
                n as (
                    select episode_id, count(*) as n_interactions,
                      coalesce(sum(n_output) filter (is_whole), 0)::bigint as n_output,
                      coalesce(sum(n_output) filter (is_whole and is_pruned), 0)::bigint as n_pruned,
                      min(version_min) filter (is_whole) as version_min,
                      max(version_max) filter (is_whole) as version_max
                    from i group by episode_id
                ),
                s as ({_OWN_REWARDS}),
                trees as (
                    select episode_id, top_id, count(*) = 1 as is_single,
                      min({{'at': recorded_at, 'id': event_id}}) as first,
                      arg_max({{'id': interaction_id, 'node': node}}, {{'at': recorded_at, 'id': event_id}}) as last
                    from i where is_trained or origin_id is not null group by episode_id, top_id
                ),
                m as (
                    select episode_id, arg_min(last, {{'is_single': is_single, 'first': first}}) as last
                    from trees group by episode_id
                ),
                b as (
                    select episode_id, count(*) as n_taken
                    from i join batch_rows using (interaction_id) group by episode_id
                )
                select episode_id, coalesce(n_interactions, 0) as n_interactions, coalesce(n_output, 0) as n_output,
                  coalesce(n_pruned, 0) as n_pruned, version_min, version_max, reward,
                  coalesce(n_taken, 0) as n_taken, m.last.id as main_id, m.last.node as main_node
                from d left join n using (episode_id) left join s using (episode_id) left join b using (episode_id)
                left join m using (episode_id)
            """).to_arrow_table()
        with self._staged(_about=about):
            if opened is not None:
                self._opened(opened)
            if closed is not None:
                self._closed(closed)
            self._con.execute(f"""
                update episodes e set {", ".join(f"{name} = a.{name}" for name in ABOUT)} from _about a
                where e.episode_id = a.episode_id and ({" or ".join(f"e.{n} is distinct from a.{n}" for n in ABOUT)})
            """)

    def _opened(self, rows: pa.Table) -> None:
        """Of several openings of one episode the first stands."""
        with self._staged(_rows=rows):
            self._con.execute(f"""
                merge into episodes e using (
                    select * from {_FACTS["EpisodeOpened"]} join _about using (episode_id)
                    qualify row_number() over (partition by episode_id order by recorded_at, event_id) = 1
                ) n on e.episode_id = n.episode_id
                when matched and (e.opened_by is null or (n.recorded_at, n.event_id) < (e.opened_at, e.opened_by))
                  then update set
                    run_id = n.run_id, task_id = n.task_id, group_id = n.group_id, attempt = n.attempt,
                    is_eval = n.is_eval, version = n.version, task = n.task, key_sha256 = n.key_sha256,
                    origin_interaction_id = n.origin_interaction_id, opened_at = n.recorded_at, opened_by = n.event_id
                when not matched then insert (episode_id, run_id, task_id, group_id, attempt, is_eval, version, task,
                    key_sha256, origin_interaction_id, opened_at, opened_by, state,
                    {", ".join(ABOUT)})
                  values (n.episode_id, n.run_id, n.task_id, n.group_id, n.attempt, n.is_eval, n.version, n.task,
                    n.key_sha256, n.origin_interaction_id, n.recorded_at, n.event_id, 'open',
                    {", ".join(f"n.{name}" for name in ABOUT)})
            """)

    def _closed(self, rows: pa.Table) -> None:
        """Of several ends of one episode the last stands."""
        with self._staged(_rows=rows):
            self._con.execute(f"""
                merge into episodes e using (
                    select * from {_FACTS["EpisodeClosed"]} join _about using (episode_id)
                    qualify row_number() over (partition by episode_id order by recorded_at desc, event_id desc) = 1
                ) n on e.episode_id = n.episode_id
                when matched and (e.closed_by is null or (n.recorded_at, n.event_id) > (e.closed_at, e.closed_by))
                  then update set
                    run_id = case when e.opened_by is null then n.run_id else e.run_id end,
                    state = n.state, reason = n.reason, closed_at = n.recorded_at, closed_by = n.event_id
                when not matched then insert (episode_id, run_id, state, reason, closed_at, closed_by,
                    {", ".join(ABOUT)})
                  values (n.episode_id, n.run_id, n.state, n.reason, n.recorded_at, n.event_id,
                    {", ".join(f"n.{name}" for name in ABOUT)})
            """)


def _place(nodes: pa.Table, above: pa.Table, taken: npt.NDArray[np.bool_]) -> tuple[dict[str, pa.Array], Index]:
    """The place columns of nodes, and the parent of each as a place in nodes, then above; -1 where it is not known.

    above: rows that are placed already and may be their parents. taken: which of the nodes `prune` took.
    """
    ids = nodes["interaction_id"].combine_chunks()
    pool = pa.concat_arrays([ids, above["interaction_id"].combine_chunks()])
    parent = _numbers(nodes["parent_id"], pool)
    edge = _numbers(nodes["edge"], EDGES)
    places = place(
        ids,
        parent,
        edge,
        _filled(nodes["n_output"], 0),
        _filled(nodes["version_min"], NO_MIN),
        _filled(nodes["version_max"], NO_MAX),
        Above(
            up=_numbers(above["up_id"], pool),
            up_edge=_numbers(above["up_edge"], EDGES),
            depth=_filled(above["depth"], 0),
            path_n=_filled(above["path_n"], 0),
            path_output=_filled(above["path_output"], 0),
            path_version_min=_filled(above["path_version_min"], NO_MIN),
            path_version_max=_filled(above["path_version_max"], NO_MAX),
        ),
    )
    # Whoever reads an episode has no others: what shares tokens of one of theirs cannot be rebuilt.
    episode, episode_above = (_numbers(rows["episode_id"], nodes["episode_id"].unique()) for rows in (nodes, above))
    is_own = np.concatenate([episode, episode_above])[parent] == episode
    own_parent, n_shared = np.where(is_own, parent, -1), _filled(nodes["n_shared"], 0)
    is_broken = find_broken(
        own_parent,
        n_shared,
        np.concatenate([_filled(rows["n_prompt"], 0) + _filled(rows["n_output"], 0) for rows in (nodes, above)]),
        above["is_broken"].to_numpy(),
    )
    taken = np.concatenate([taken, above["is_pruned"].to_numpy()])
    is_pruned = find_pruned(own_parent, n_shared, is_broken, taken) if taken.any() else taken[: len(ids)]
    number = np.concatenate([_filled(nodes["node"], -1), _filled(above["node"], -1)])
    names = pa.concat_arrays([pool, *(above[name].combine_chunks() for name in ("top_id", "root_id", "start_id"))])
    is_top = places.up < 0
    up = pa.array(places.up, mask=is_top)
    columns = {
        "node": pa.array(number[: len(ids)]),
        "up_node": pa.array(number[places.up], mask=is_top),
        "up_id": names.take(up),
        "up_edge": EDGES.take(pa.array(places.up_edge, mask=places.up_edge < 0)),
        "depth": pa.array(places.depth),
        "top_id": names.take(pa.array(places.top)),
        "root_id": names.take(pa.array(places.root)),
        "start_id": names.take(pa.array(places.start)),
        "path_n": pa.array(places.path_n),
        "path_output": pa.array(places.path_output),
        "path_version_min": pa.array(places.path_version_min, mask=places.path_version_min == NO_MIN),
        "path_version_max": pa.array(places.path_version_max, mask=places.path_version_max == NO_MAX),
        "is_broken": pa.array(is_broken),
        "is_pruned": pa.array(is_pruned),
    }
    return columns, parent


def _numbers(values: pa.ChunkedArray, of: pa.Array) -> Index:
    """Where each value is in `of`; -1 for none."""
    found: Index = pc.fill_null(pc.index_in(values, of, skip_nulls=True), -1).to_numpy().astype(np.int64)
    return found


def _filled(values: pa.ChunkedArray, missing: int) -> Index:
    filled: Index = pc.fill_null(values, missing).to_numpy().astype(np.int64)
    return filled


def _names(*columns: pa.ChunkedArray) -> pa.Table:
    """A table of the ids in these columns."""
    return pa.table({"id": pa.chunked_array([chunk for column in columns for chunk in column.chunks], pa.string())})


def _without(rows: pa.Table, ids: pa.ChunkedArray) -> pa.Table:
    """Rows of `interactions` but those of these ids."""
    if not rows.num_rows:
        return rows
    return rows.filter(pc.invert(pc.is_in(rows["interaction_id"], ids.combine_chunks())))


def _common(ids: pa.ChunkedArray, names: set[str]) -> list[str]:
    found: list[str] = ids.filter(pc.is_in(ids, pa.array(list(names), pa.string()))).to_pylist()
    return found


def _keys(rows: pa.Table) -> list[tuple[int, UUID]]:
    """(recorded_at, event_id): the order of events that speak of one thing."""
    ids = (one if isinstance(one, UUID) else UUID(one) for one in rows["event_id"].to_pylist())
    return list(zip(rows["recorded_at"].cast(pa.int64()).to_pylist(), ids, strict=True))


def _current(kind: str, rows: pa.Table) -> pa.Table:
    """The events with payloads of today's shape."""
    if not pc.any(pc.not_equal(rows["schema_version"], SCHEMA_VERSION)).as_py():
        return rows
    versions = rows["schema_version"].to_pylist()
    payloads = rows["payload"].cast(pa.binary()).to_pylist()
    now = [upcast(kind, version, payload) for version, payload in zip(versions, payloads, strict=True)]
    column = pa.array(now, pa.binary()).cast(pa.string())
    return rows.set_column(rows.column_names.index("payload"), "payload", column)


def _uuids(column: pa.ChunkedArray) -> pa.Array:
    return pa.ExtensionArray.from_storage(pa.uuid(), column.combine_chunks())


class _Lists:
    """The list columns of a chunk, never picked apart by row."""

    def __init__(self, chunk: list[pa.RecordBatch]) -> None:
        self._pieces: list[list[pa.RecordBatch]] = []
        """Small batches go together; the lists of large ones are not copied: a chunk may be hundreds of megabytes."""
        rows = _PIECE_ROWS
        for batch in chunk:
            if rows >= _PIECE_ROWS:
                self._pieces.append([])
                rows = 0
            self._pieces[-1].append(batch)
            rows += batch.num_rows
        self._flat: dict[str, list[tuple[npt.NDArray[Any], npt.NDArray[np.int64]]]] = {}

    def _columns(self, name: str) -> list[tuple[npt.NDArray[Any], npt.NDArray[np.int64]]]:
        """By piece: all values of a column, and [n + 1] offsets into them."""
        if name not in self._flat:
            found = self._flat[name] = []
            for piece in self._pieces:
                column = pa.concat_arrays([b.column(name) for b in piece]) if len(piece) > 1 else piece[0].column(name)
                lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
                offsets = np.zeros(len(lengths) + 1, np.int64)
                np.cumsum(lengths, out=offsets[1:])
                found.append((column.flatten().to_numpy(), offsets))
        return self._flat[name]

    def lengths(self, name: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.concatenate([np.diff(offsets) for _, offsets in self._columns(name)])[rows]

    def reduce(self, how: np.ufunc, name: str, rows: npt.NDArray[np.int64], dtype: Any) -> pa.Array:
        """The ufunc over each row's values; null where it has none."""
        parts = []
        for values, offsets in self._columns(name):
            lengths = np.diff(offsets)
            full = np.flatnonzero(lengths)
            reduced = np.zeros(len(lengths), dtype)
            if len(full) and how is not np.add and values.min() == values.max():  # one version: nothing to look for
                reduced[full] = values[0]
                full = full[:0]
            for at in range(0, len(full), 256):  # blocks that stay in the cache where the type is widened
                rows_here = full[at : at + 256]
                first, last = offsets[rows_here[0]], offsets[rows_here[-1] + 1]
                block = values[first:last].astype(dtype, copy=False)
                reduced[rows_here] = how.reduceat(block, offsets[rows_here] - first)
            parts.append(reduced)
        return pa.array(np.concatenate(parts)[rows], mask=self.lengths(name, rows) == 0)

    def mean(self, name: str, rows: npt.NDArray[np.int64]) -> pa.Array:
        """The mean of each row's values; null where it has none, or does not know them (NaN, of an import)."""
        sums = self.reduce(np.add, name, rows, np.float64)
        means = pc.divide(sums, pa.array(np.maximum(self.lengths(name, rows), 1), pa.float64()))
        return pc.if_else(pc.is_nan(means), None, means)
