"""The projection: narrow tables kept in step with the log, in one DuckDB database.

`Views.catch_up` reads what the log has beyond its cursor and applies it, rows and cursor in one transaction. Its
result is a function of the *set* of events: whatever order writers' events come in (a reward before its
interaction, an end before its beginning) and however they are cut into transactions, the tables are those of a
rebuild. Three rules give that: an event_id counts once; where several events speak of one thing, the order is
(recorded_at, event_id), not arrival; and everything derived (depth, trajectories, an episode's reward) is computed
again for what a change touches.

A file has one owner, held by a lock beside it. Readers in the process take `cursor()`, one per thread or task.
"""

import fcntl
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from . import migrate
from .errors import BookBusy
from .events import KINDS, SCHEMA_VERSION, BatchTaken, BatchTrained, Fact, InteractionRecorded, TokensScored
from .log import Cursor, Log
from .schema import PROJECTION, create_statements, metadata, view_statements
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

_log = logging.getLogger("rollbook.store")
_json = msgspec.json.Encoder()


class Views:
    """The tables over a log. path None: in memory, private to this object.

    Raises BookBusy if another owner holds the file. A file of another revision is migrated where that is possible
    and rebuilt where it is not.
    """

    def __init__(self, log: Log, path: str | os.PathLike[str] | None = None) -> None:
        self._log = log
        self._lock = threading.RLock()
        self._owner: int | None = None
        if path is None:
            self._con = duckdb.connect()
        else:
            self._owner = _own(Path(path))
            try:
                self._con = _open(Path(path))
            except BaseException:
                os.close(self._owner)
                raise
        self._con.execute("set TimeZone = 'UTC'")
        self._con.execute("set python_enable_replacements = false")  # a query never means a Python variable
        _prepare(self._con)
        self._cursor = dict(self._con.execute("select writer, position from cursors").fetchall())
        self._waiting = self._load_waiting()
        found = self._con.execute("select coalesce(max(node), -1) + 1 from interactions").fetchone()
        self._next_node: int = 0 if found is None else found[0]

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
            for chunk in _chunks(self._log.read(self._cursor)):
                self._apply(chunk)
                applied += sum(batch.num_rows for batch in chunk)
        return applied

    def close(self) -> None:
        """Give the file back. Twice is once."""
        with self._lock:
            self._con.close()
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
            projection = _Projection(self._con, self._waiting, self._next_node)
            projection.apply(chunk)
            for writer, position in cursor.items():
                if self._cursor.get(writer) is None:
                    self._con.execute("insert into cursors values (?, ?)", [writer, position])
                elif self._cursor[writer] != position:
                    self._con.execute("update cursors set position = ? where writer = ?", [position, writer])
            self._con.commit()
        except BaseException:
            self._con.rollback()
            self._waiting = self._load_waiting()
            raise
        self._cursor = cursor
        self._next_node = projection.next_node


def _own(path: Path) -> int:
    owner = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(owner)
        raise BookBusy(
            f"{path} is owned by another process; ask that one over /sql, or open the book without the file "
            "(open_book then computes the tables in memory)"
        ) from None
    return owner


_UNREADABLE = (duckdb.IOException, duckdb.SerializationException, duckdb.InternalException, duckdb.FatalException)


def _open(path: Path) -> duckdb.DuckDBPyConnection:
    """The database with the tables of this version: as it is, migrated, or empty where neither can be."""
    try:
        con = duckdb.connect(str(path))
        found = _revision(con)
        if found in (PROJECTION, None):
            return con
        con.close()
        if found in migrate.revisions():
            migrate.upgrade(path)
            return duckdb.connect(str(path))
        _log.warning(
            "%s has tables of revision %s, which this version does not know; computing them again", path, found
        )
    except (
        duckdb.IOException,
        duckdb.SerializationException,
        duckdb.InternalException,
        duckdb.FatalException,
    ) as error:
        _log.warning("%s cannot be read (%s); computing it again from the log", path, str(error).split("\n")[0])
    for name in (path, path.with_name(path.name + ".wal")):
        with suppress(FileNotFoundError):
            name.unlink()
    return duckdb.connect(str(path))


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


class _Recorded(InteractionRecorded, frozen=True, kw_only=True):
    """The same with its sampling settings left as JSON, which is what the table has."""

    sampling: msgspec.Raw = msgspec.Raw(b"{}")  # type: ignore[assignment]


class _Node(NamedTuple):
    """What placing a node in its tree takes."""

    parent: str | None
    edge: str | None
    n_output: int
    version_min: int | None
    version_max: int | None


class _Place(NamedTuple):
    """Where a node is in its tree; named as the columns."""

    node: int
    up_node: int | None
    up: str | None
    up_edge: str | None
    depth: int
    top: str
    root: str
    start: str
    path_n: int
    path_output: int
    path_version_min: int | None
    path_version_max: int | None


class _Known(NamedTuple):
    """A row of `interactions` as far as placing others takes it."""

    node: _Node
    place: _Place
    is_leaf: bool
    is_retried: bool
    recorded_at: int  # us
    event_id: bytes


PLACE_COLUMNS = (
    "node", "up_node", "up_id", "up_edge", "depth", "top_id", "root_id", "start_id", "path_n", "path_output",
    "path_version_min", "path_version_max",
)  # fmt: skip


class _Projection:
    """One transaction's worth of events applied to the tables."""

    def __init__(self, con: duckdb.DuckDBPyConnection, waiting: set[str], next_node: int) -> None:
        self._con = con
        self._waiting = waiting
        self.next_node = next_node
        self._touched: set[str] = set()  # episodes about which something new was learned

    @contextmanager
    def _staged(self, **tables: pa.Table) -> Iterator[None]:
        for name, table in tables.items():
            self._con.register(name, table)
        yield
        for name in tables:  # not after an error: the transaction is lost, and the next table of that name replaces it
            self._con.unregister(name)

    def apply(self, chunk: list[pa.RecordBatch]) -> None:
        fresh = self._fresh(pa.Table.from_batches([batch.select(NARROW) for batch in chunk]).combine_chunks())
        kinds = pc.dictionary_encode(fresh["kind"]).combine_chunks()
        names = kinds.dictionary.to_pylist()
        codes = kinds.indices.to_numpy()
        at = {name: np.flatnonzero(codes == code) for code, name in enumerate(names)}
        lists = _Lists(chunk)
        for kind, project in (
            ("RunStarted", self._runs),
            ("PolicyPublished", self._policies),
            ("InteractionFailed", self._failures),
            ("EpisodeOpened", self._opened),
            ("EpisodeClosed", self._closed),
            ("InteractionRecorded", self._interactions),
            ("RewardGiven", self._rewards),
            ("BatchTaken", self._taken),
            ("BatchTrained", self._trained),
            ("TokensScored", self._scored),
        ):
            rows = at.get(kind)
            if rows is not None and len(rows):
                mine = fresh.take(pa.array(rows))
                if kind in TOUCHING:
                    self._touched.update(mine["episode_id"].unique().to_pylist())
                project(mine, _facts(kind, mine), lists)
        self._refresh_episodes()

    def _fresh(self, table: pa.Table) -> pa.Table:
        """The events that the tables do not have, each once; they are in `events` when this returns.

        An event that two writers hold is kept where (writer, position) is smallest, whichever came first.
        """
        ids = table["event_id"].to_pylist()
        table = table.append_column("row", pa.array(np.arange(table.num_rows)))
        if len(set(ids)) < len(ids):
            first: dict[bytes, int] = {}
            places = list(zip(table["writer"].to_pylist(), table["position"].to_pylist(), strict=True))
            for row, event_id in enumerate(ids):
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

    def _runs(self, rows: pa.Table, facts: Sequence[Any], _: object) -> None:
        with self._staged(_new=_with(rows, name=[f.name for f in facts], config=[_text(f.config) for f in facts])):
            self._con.execute("""
                merge into runs r using (
                    select run_id, min(recorded_at) as first_at, max(recorded_at) as last_at,
                      arg_max({'name': name, 'config': config, 'event_id': event_id},
                              {'at': recorded_at, 'id': event_id}) as last
                    from _new group by run_id
                ) n on r.run_id = n.run_id
                when matched and (n.last_at, n.last.event_id) > (r.restarted_at, r.event_id) then update set
                    name = n.last.name, config = n.last.config, event_id = n.last.event_id,
                    restarted_at = n.last_at, started_at = least(r.started_at, n.first_at)
                when matched then update set started_at = least(r.started_at, n.first_at)
                when not matched then insert (run_id, name, config, started_at, restarted_at, event_id)
                    values (n.run_id, n.last.name, n.last.config, n.first_at, n.last_at, n.last.event_id)
            """)

    def _policies(self, rows: pa.Table, facts: Sequence[Any], _: object) -> None:
        new = _with(
            rows,
            policy=[f.policy for f in facts],
            version=pa.array([f.version for f in facts], pa.int32()),
            path=[f.path for f in facts],
            step=pa.array([f.step for f in facts], pa.int32()),
        )
        with self._staged(_new=new):
            self._con.execute("""
                merge into policies p using (
                    select run_id, policy, version, max(recorded_at) as at,
                      arg_max({'path': path, 'step': step, 'event_id': event_id},
                              {'at': recorded_at, 'id': event_id}) as last
                    from _new group by run_id, policy, version
                ) n on p.run_id = n.run_id and p.policy = n.policy and p.version = n.version
                when matched and (n.at, n.last.event_id) > (p.published_at, p.event_id) then update set
                    path = n.last.path, step = n.last.step, published_at = n.at, event_id = n.last.event_id
                when not matched then insert (run_id, policy, version, path, step, published_at, event_id)
                    values (n.run_id, n.policy, n.version, n.last.path, n.last.step, n.at, n.last.event_id)
            """)

    def _failures(self, rows: pa.Table, facts: Sequence[Any], _: object) -> None:
        new = _with(
            rows,
            error=[f.error for f in facts],
            message=[f.message for f in facts],
            status=pa.array([f.status for f in facts], pa.int32()),
            dialect=[f.dialect for f in facts],
        )
        with self._staged(_new=new):
            self._con.execute("""
                insert into failures by name
                select run_id, episode_id, error, message, status, dialect, recorded_at as failed_at, event_id from _new
            """)

    def _opened(self, rows: pa.Table, facts: Sequence[Any], _: object) -> None:
        """Of several openings of one episode the first stands."""
        new = _with(
            rows,
            task_id=[f.task_id for f in facts],
            group_id=pa.array([f.group_id for f in facts], pa.string()),
            attempt=pa.array([f.attempt for f in facts], pa.int32()),
            is_eval=pa.array([f.is_eval for f in facts], pa.bool_()),
            version=pa.array([f.version for f in facts], pa.int32()),
            task=pa.array([None if f.task is None else _text(f.task) for f in facts], pa.string()),
            key_sha256=pa.array([f.key_sha256 for f in facts], pa.string()),
            origin_interaction_id=pa.array([f.origin_interaction_id for f in facts], pa.string()),
        )
        with self._staged(_new=new):
            self._con.execute("""
                merge into episodes e using (
                    select * from _new
                    qualify row_number() over (partition by episode_id order by recorded_at, event_id) = 1
                ) n on e.episode_id = n.episode_id
                when matched and (e.opened_by is null or (n.recorded_at, n.event_id) < (e.opened_at, e.opened_by))
                  then update set
                    run_id = n.run_id, task_id = n.task_id, group_id = n.group_id, attempt = n.attempt,
                    is_eval = n.is_eval, version = n.version, task = n.task, key_sha256 = n.key_sha256,
                    origin_interaction_id = n.origin_interaction_id, opened_at = n.recorded_at, opened_by = n.event_id
                when not matched then insert (episode_id, run_id, task_id, group_id, attempt, is_eval, version, task,
                    key_sha256, origin_interaction_id, opened_at, opened_by, state, n_interactions, n_output, n_taken)
                  values (n.episode_id, n.run_id, n.task_id, n.group_id, n.attempt, n.is_eval, n.version, n.task,
                    n.key_sha256, n.origin_interaction_id, n.recorded_at, n.event_id, 'open', 0, 0, 0)
            """)

    def _closed(self, rows: pa.Table, facts: Sequence[Any], _: object) -> None:
        """Of several ends of one episode the last stands."""
        new = _with(rows, state=[f.state for f in facts], reason=pa.array([f.reason for f in facts], pa.string()))
        with self._staged(_new=new):
            self._con.execute("""
                merge into episodes e using (
                    select * from _new
                    qualify row_number() over (partition by episode_id order by recorded_at desc, event_id desc) = 1
                ) n on e.episode_id = n.episode_id
                when matched and (e.closed_by is null or (n.recorded_at, n.event_id) > (e.closed_at, e.closed_by))
                  then update set
                    run_id = case when e.opened_by is null then n.run_id else e.run_id end,
                    state = n.state, reason = n.reason, closed_at = n.recorded_at, closed_by = n.event_id
                when not matched then insert (episode_id, run_id, state, reason, closed_at, closed_by, n_interactions,
                    n_output, n_taken)
                  values (n.episode_id, n.run_id, n.state, n.reason, n.recorded_at, n.event_id, 0, 0, 0)
            """)

    def _rewards(self, rows: pa.Table, facts: Sequence[Any], _: object) -> None:
        # `episodes` has the reward of that name only.
        episodes = rows["episode_id"].to_pylist()
        self._touched.update(e for e, fact in zip(episodes, facts, strict=True) if fact.name == "reward")
        new = _with(
            rows,
            start=pa.array([f.start for f in facts], pa.int32()),
            end=pa.array([f.end for f in facts], pa.int32()),
            name=[f.name for f in facts],
            value=pa.array([f.value for f in facts], pa.float64()),
            weight=pa.array([f.weight for f in facts], pa.float64()),
            source=[f.source for f in facts],
            details=pa.array([None if f.details is None else _text(f.details) for f in facts], pa.string()),
        )
        with self._staged(_new=new):
            self._con.execute("""
                insert into rewards by name
                select event_id, run_id, episode_id, interaction_id, start, "end", name, value, weight, source, details,
                  recorded_at as given_at
                from _new
            """)

    def _interactions(self, rows: pa.Table, facts: Sequence[_Recorded], lists: "_Lists") -> None:
        ids: list[str] = rows["interaction_id"].to_pylist()
        # Of several events of one interaction the first recorded stands: its children were built on it.
        chosen = dict(zip(ids, range(len(ids)), strict=True))
        if len(chosen) < len(ids):
            keys = _keys(rows)
            for row, name in enumerate(ids):
                if keys[row] < keys[chosen[name]]:
                    chosen[name] = row
        wanted = set(ids)
        wanted.update(fact.parent_id for fact in facts if fact.parent_id is not None)
        known = self._load("select id from _wanted", _wanted=pa.table({"id": pa.array(list(wanted), pa.string())}))
        left: set[str] = set()  # former parents of rows that are replaced
        replaced: list[str] = []
        again = [name for name in chosen if name in known]
        keys = _keys(rows) if again else []
        for name in again:
            one = known[name]
            if keys[chosen[name]] < (one.recorded_at, one.event_id):
                replaced.append(name)
                if one.node.parent is not None:
                    left.add(one.node.parent)
            else:
                del chosen[name]
        if replaced:
            with self._staged(_gone=pa.table({"id": replaced})):
                gone = self._con.execute(
                    "delete from interactions where interaction_id in (select id from _gone) returning episode_id"
                ).fetchall()
            self._touched.update(episode_id for (episode_id,) in gone)

        taken = np.fromiter(chosen.values(), np.int64, len(chosen))
        facts = [facts[row] for row in chosen.values()]
        mine = rows.take(pa.array(taken))
        at = mine["row"].to_numpy()
        n_output = lists.lengths("versions", at)
        version_min = lists.reduce(np.minimum, "versions", at, np.int32)
        version_max = lists.reduce(np.maximum, "versions", at, np.int32)
        parents = [fact.parent_id for fact in facts]
        edges = [fact.edge for fact in facts]
        sizes = (n_output.tolist(), version_min.to_pylist(), version_max.to_pylist())
        nodes = dict(zip(chosen, map(_Node, parents, edges, *sizes), strict=True))

        # Nodes that hang on what is only now here (or is now different) are placed again.
        moved = self._descendants([name for name in chosen if name in self._waiting] + replaced)
        nodes.update({name: one.node for name, one in moved.items() if name not in nodes})
        # A retry stands on what the repeated node stands on, which may be one step further up than `known` reaches.
        repeated = {node.parent for node in nodes.values() if node.edge == "retries"}
        further = {known[name].place.up for name in repeated if name in known} - known.keys() - nodes.keys() - {None}
        if further:
            known |= self._load(
                "select id from _wanted", _wanted=pa.table({"id": pa.array(list(further), pa.string())})
            )
        numbers = dict(zip(chosen, range(self.next_node, self.next_node + len(chosen)), strict=True))
        self.next_node += len(chosen)
        numbers |= {name: one.place.node for name, one in moved.items() if name not in chosen}
        places = _place(nodes, numbers, {name: one.place for name, one in known.items() if name not in nodes})

        for name in chosen:
            self._waiting.discard(name)
        for node in nodes.values():
            if node.parent is not None and node.parent not in nodes and node.parent not in known:
                self._waiting.add(node.parent)

        extended = {node.parent for node in nodes.values() if node.edge == "extends"}
        retried = {node.parent for node in nodes.values() if node.edge == "retries"}
        new = _with(
            mine,
            parent_id=pa.array(parents, pa.string()),
            edge=pa.array(edges, pa.string()),
            cause=pa.array([f.cause for f in facts], pa.string()),
            version_min=version_min,
            version_max=version_max,
            n_prompt=pa.array([f.prompt_length for f in facts], pa.int32()),
            n_shared=pa.array([f.shared for f in facts], pa.int32()),
            n_output=pa.array(n_output, pa.int32()),
            finish_reason=pa.array([f.finish_reason for f in facts], pa.string()),
            model=[f.model for f in facts],
            role=pa.array([f.role for f in facts], pa.string()),
            dialect=[f.dialect for f in facts],
            is_trainable=pa.array([f.is_trainable for f in facts], pa.bool_()),
            capture=[f.capture for f in facts],
            delivered=pa.array([f.delivered for f in facts], pa.int32()),
            logprobs_mode=[f.logprobs_mode for f in facts],
            sampling=pa.array([bytes(f.sampling) for f in facts], pa.binary()).cast(pa.string()),
            mean_logprob=lists.mean("logprobs", at),
            seconds=pa.array([f.seconds for f in facts], pa.float64()),
            first_token_seconds=pa.array([f.first_token_seconds for f in facts], pa.float64()),
            is_leaf=pa.array([name not in extended for name in chosen], pa.bool_()),
            is_retried=pa.array([name in retried for name in chosen], pa.bool_()),
            **_place_columns([places[name] for name in chosen]),
        )
        columns = ", ".join(f'"{c.name}"' for c in metadata.tables["interactions"].columns)
        with self._staged(_new=new):
            self._con.execute(f"insert into interactions by name select {columns} from _new")
        moved_names = [name for name in moved if name not in chosen]
        if moved_names:
            again = pa.table({"id": moved_names, **_place_columns([places[name] for name in moved_names])})
            with self._staged(_moved=again):
                sets = ", ".join(f"{column} = m.{column}" for column in PLACE_COLUMNS)
                shifted = self._con.execute(
                    f"update interactions i set {sets} from _moved m where i.interaction_id = m.id returning episode_id"
                ).fetchall()
            self._touched.update(episode_id for (episode_id,) in shifted)
        # Normally a parent that was a leaf is none any more; a replaced or late node may also undo or bring such facts.
        changed = {name for name in extended if name in known and known[name].is_leaf}
        changed |= {name for name in retried if name in known and not known[name].is_retried}
        changed |= left
        if changed:
            with self._staged(_changed=pa.table({"id": pa.array(list(changed), pa.string())})):
                flagged = self._con.execute("""
                    update interactions i set is_leaf = not k.is_extended, is_retried = k.is_retried
                    from (
                        select t.id, coalesce(bool_or(c.edge = 'extends'), false) as is_extended,
                          coalesce(bool_or(c.edge = 'retries'), false) as is_retried
                        from _changed t left join interactions c on c.parent_id = t.id group by t.id
                    ) k where i.interaction_id = k.id returning i.episode_id
                """).fetchall()
            self._touched.update(episode_id for (episode_id,) in flagged)

    def _load(self, ids: str, **tables: pa.Table) -> dict[str, _Known]:
        """Rows of `interactions` by a query for their ids."""
        with self._staged(**tables):
            found = self._con.execute(f"""
                select interaction_id, parent_id, edge, n_output, version_min, version_max,
                  {", ".join(PLACE_COLUMNS)},
                  is_leaf, is_retried, epoch_us(recorded_at), event_id
                from interactions where interaction_id in ({ids})
            """).fetchall()
        return {
            row[0]: _Known(_Node(*row[1:6]), _Place(*row[6:-4]), row[-4], row[-3], row[-2], row[-1].bytes)
            for row in found
        }

    def _descendants(self, ids: list[str]) -> dict[str, _Known]:
        if not ids:
            return {}
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

    def _taken(self, rows: pa.Table, facts: Sequence[BatchTaken], _: object) -> None:
        """Of several events of one batch the first stands."""
        keys = _keys(rows)
        chosen: dict[str, int] = {}
        for row, fact in enumerate(facts):
            if fact.batch_id not in chosen or keys[row] < keys[chosen[fact.batch_id]]:
                chosen[fact.batch_id] = row
        with self._staged(_wanted=pa.table({"id": list(chosen)})):
            known = self._con.execute("""
                select batch_id, epoch_us(taken_at), taken_by from batches
                where batch_id in (select id from _wanted) and taken_by is not null
            """).fetchall()
        for batch_id, at, taken_by in known:
            if keys[chosen[batch_id]] < (at, taken_by.bytes):
                self._touch_members("select interaction_id from batch_rows where batch_id = ?", [batch_id])
                self._con.execute("delete from batch_rows where batch_id = ?", [batch_id])
            else:
                del chosen[batch_id]
        if not chosen:
            return
        facts = [facts[row] for row in chosen.values()]
        new = _with(
            rows.take(pa.array(list(chosen.values()), pa.int64())),
            batch_id=[f.batch_id for f in facts],
            step=pa.array([f.step for f in facts], pa.int32()),
            version=pa.array([f.version for f in facts], pa.int32()),
            n_rows=pa.array([len(f.rows) for f in facts], pa.int32()),
            selection=[_text(f.selection) for f in facts],
            discarded=[_text(f.discarded) for f in facts],
        )
        members = pa.table(
            {
                "batch_id": pa.array([f.batch_id for f in facts for _ in f.rows], pa.string()),
                "interaction_id": pa.array([r.interaction_id for f in facts for r in f.rows], pa.string()),
                "credit": pa.array([r.credit for f in facts for r in f.rows], pa.float64()),
                "advantage": pa.array([r.advantage for f in facts for r in f.rows], pa.float64()),
                "weight": pa.array([r.weight for f in facts for r in f.rows], pa.float64()),
            }
        )
        with self._staged(_new=new, _members=members):
            self._con.execute("""
                merge into batches b using _new n on b.batch_id = n.batch_id
                when matched then update set run_id = n.run_id, step = n.step, version = n.version,
                    taken_at = n.recorded_at, n_rows = n.n_rows, selection = n.selection, discarded = n.discarded,
                    taken_by = n.event_id
                when not matched then insert (batch_id, run_id, step, version, taken_at, n_rows, selection, discarded,
                    taken_by)
                  values (n.batch_id, n.run_id, n.step, n.version, n.recorded_at, n.n_rows, n.selection, n.discarded,
                    n.event_id)
            """)
            self._con.execute("insert into batch_rows by name select * from _members")
            self._touch_members("select interaction_id from _members", [])

    def _touch_members(self, ids: str, params: list[str]) -> None:
        found = self._con.execute(
            f"select distinct episode_id from interactions where interaction_id in ({ids})", params
        ).fetchall()
        self._touched.update(episode_id for (episode_id,) in found)

    def _trained(self, rows: pa.Table, facts: Sequence[BatchTrained], _: object) -> None:
        """Of several trainings of one batch the last stands: a restart trains it again."""
        new = _with(
            rows,
            batch_id=[f.batch_id for f in facts],
            step=pa.array([f.step for f in facts], pa.int32()),
            metrics=[_text(f.metrics) for f in facts],
        )
        with self._staged(_new=new):
            self._con.execute("""
                merge into batches b using (
                    select * from _new
                    qualify row_number() over (partition by batch_id order by recorded_at desc, event_id desc) = 1
                ) n on b.batch_id = n.batch_id
                when matched and (b.trained_by is null or (n.recorded_at, n.event_id) > (b.trained_at, b.trained_by))
                  then update set trained_at = n.recorded_at, trained_by = n.event_id, metrics = n.metrics,
                    run_id = case when b.taken_by is null then n.run_id else b.run_id end,
                    step = case when b.taken_by is null then n.step else b.step end
                when not matched then insert (batch_id, run_id, step, trained_at, metrics, trained_by)
                  values (n.batch_id, n.run_id, n.step, n.recorded_at, n.metrics, n.event_id)
            """)

    def _scored(self, rows: pa.Table, facts: Sequence[TokensScored], lists: "_Lists") -> None:
        at = rows["row"].to_numpy()
        new = _with(
            rows,
            version=pa.array([f.version for f in facts], pa.int32()),
            scorer=[f.scorer for f in facts],
            batch_id=pa.array([f.batch_id for f in facts], pa.string()),
            mean_logprob=lists.mean("logprobs", at),
            mean_entropy=lists.mean("entropies", at),
        )
        with self._staged(_new=new):
            self._con.execute("""
                insert into scored by name
                select interaction_id, run_id, version, scorer, batch_id, mean_logprob, mean_entropy,
                  recorded_at as scored_at, writer, position, event_id
                from _new
            """)

    def _refresh_episodes(self) -> None:
        """Compute again what `episodes` says of the episodes that this transaction touched."""
        if not self._touched:
            return
        with self._staged(_touched=pa.table({"episode_id": pa.array(list(self._touched), pa.string())})):
            self._con.execute("""
                update episodes e set n_interactions = f.n_interactions, n_output = f.n_output,
                    version_min = f.version_min, version_max = f.version_max, reward = f.reward, n_taken = f.n_taken,
                main_id = f.main_id, main_node = f.main_node
                from (
                    with d as (select episode_id from _touched),
                    i as (
                        select episode_id, interaction_id, node, top_id, recorded_at, event_id, n_output, version_min,
                          version_max, is_trainable and not (is_retried and is_leaf) as is_trained
                        from interactions where episode_id in (select episode_id from d)
                    ),
                    n as (
                        select episode_id, count(*) as n_interactions,
                          coalesce(sum(n_output) filter (is_trained), 0) as n_output,
                          min(version_min) filter (is_trained) as version_min,
                          max(version_max) filter (is_trained) as version_max
                        from i group by episode_id
                    ),
                    r as (
                        select episode_id, interaction_id,
                          arg_max(value * weight, {'at': given_at, 'id': event_id}) as value
                        from rewards where name = 'reward' and episode_id in (select episode_id from d)
                        group by episode_id, interaction_id, "start", "end"
                    ),
                    s as (
                        select episode_id,
                          coalesce(sum(value) filter (where interaction_id is null), sum(value)) as reward
                        from r group by episode_id
                    ),
                    trees as (
                        select episode_id, top_id, count(*) = 1 as is_single,
                          min({'at': recorded_at, 'id': event_id}) as first,
                          arg_max({'id': interaction_id, 'node': node}, {'at': recorded_at, 'id': event_id}) as last
                        from i where is_trained group by episode_id, top_id
                    ),
                    m as (
                        select episode_id, arg_min(last, {'is_single': is_single, 'first': first}) as last
                        from trees group by episode_id
                    ),
                    b as (
                        select episode_id, count(*) as n_taken
                        from i join batch_rows using (interaction_id) group by episode_id
                    )
                    select episode_id, coalesce(n_interactions, 0) as n_interactions, coalesce(n_output, 0) as n_output,
                      version_min, version_max, reward, coalesce(n_taken, 0) as n_taken,
                  m.last.id as main_id, m.last.node as main_node
                    from d left join n using (episode_id) left join s using (episode_id) left join b using (episode_id)
                    left join m using (episode_id)
                ) f where e.episode_id = f.episode_id
            """)


def _place(nodes: dict[str, _Node], numbers: dict[str, int], above: dict[str, _Place]) -> dict[str, _Place]:
    """Where nodes are in their trees. numbers: of the nodes; above: nodes placed already that may be their parents.

    A node whose parent is not known (yet) stands as a root; so does the smallest id of a circle of parents.
    """
    places = dict(above)
    for first, node in nodes.items():
        if first in places:
            continue
        if node.parent is None:
            places[first] = _below(first, numbers[first], node, None, places)
            continue
        up = places.get(node.parent)
        if up is not None:  # as the events of one writer come, always
            low, high = node.version_min, node.version_max
            low_up, high_up = up.path_version_min, up.path_version_max
            if node.edge == "extends" and low is not None and high is not None and low_up is not None:
                places[first] = _Place(
                    numbers[first], up.node, node.parent, "extends", up.depth + 1, up.top, up.root, up.start,
                    up.path_n + 1, up.path_output + node.n_output, low if low < low_up else low_up,
                    high if high_up is None or high > high_up else high_up,
                )  # fmt: skip
            else:
                places[first] = _below(first, numbers[first], node, node.parent, places)
            continue
        stack = [first]
        on_stack = {first}
        while stack:
            name = stack[-1]
            if name in places:
                stack.pop()
                on_stack.discard(name)
                continue
            node = nodes[name]
            parent = node.parent
            if parent is not None and parent not in places and parent in nodes:
                if parent not in on_stack:
                    stack.append(parent)
                    on_stack.add(parent)
                    continue
                circle = stack[stack.index(parent) :]
                name = min(circle)
                node = nodes[name]
                parent = None
            places[name] = _below(name, numbers[name], node, None if parent not in places else parent, places)
    return places


def _below(name: str, number: int, node: _Node, parent: str | None, places: dict[str, _Place]) -> _Place:
    own = (node.n_output, node.version_min, node.version_max)
    edge = node.edge
    if parent is not None and edge == "retries":
        # It stands beside the node that it repeats, on what that one stands on.
        repeated = places[parent]
        parent, edge = repeated.up, repeated.up_edge
    if parent is None:
        return _Place(number, None, None, None, 0, name, name, name, 1, *own)
    up = places[parent]
    root = name if edge == "compacts" else up.root
    if edge != "extends":
        return _Place(number, up.node, parent, edge, up.depth + 1, up.top, root, name, 1, *own)
    return _Place(
        number,
        up.node,
        parent,
        edge,
        up.depth + 1,
        up.top,
        root,
        up.start,
        up.path_n + 1,
        up.path_output + node.n_output,
        _least(up.path_version_min, node.version_min),
        _most(up.path_version_max, node.version_max),
    )


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _most(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else max(a, b)


def _place_columns(places: Sequence[_Place]) -> dict[str, pa.Array]:
    kinds = (
        pa.int64(), pa.int64(), pa.string(), pa.string(), pa.int32(), pa.string(), pa.string(), pa.string(), pa.int32(),
        pa.int64(), pa.int32(), pa.int32(),
    )  # fmt: skip
    return {
        name: pa.array([place[i] for place in places], kind)
        for i, (name, kind) in enumerate(zip(PLACE_COLUMNS, kinds, strict=True))
    }


_many: dict[str, msgspec.json.Decoder[list[Fact]]] = {
    name: msgspec.json.Decoder(list[kind])  # type: ignore[valid-type]
    for name, kind in {**KINDS, "InteractionRecorded": _Recorded}.items()
}


def _keys(rows: pa.Table) -> list[tuple[int, bytes]]:
    """(recorded_at, event_id): the order of events that speak of one thing."""
    ids = pa.chunked_array([chunk.storage for chunk in rows["event_id"].chunks], pa.binary(16))
    return list(zip(rows["recorded_at"].cast(pa.int64()).to_pylist(), ids.to_pylist(), strict=True))


def _facts(kind: str, rows: pa.Table) -> list[Any]:
    payloads = rows["payload"].cast(pa.binary()).to_pylist()
    if pc.any(pc.not_equal(rows["schema_version"], SCHEMA_VERSION)).as_py():
        versions = rows["schema_version"].to_pylist()
        payloads = [upcast(kind, version, payload) for version, payload in zip(versions, payloads, strict=True)]
    return _many[kind].decode(b"[" + b",".join(payloads) + b"]")


def _text(value: Any) -> str:
    return _json.encode(value).decode()


def _uuids(column: pa.ChunkedArray) -> pa.Array:
    return pa.ExtensionArray.from_storage(pa.uuid(), column.combine_chunks())


def _with(rows: pa.Table, **columns: Any) -> pa.Table:
    for name, values in columns.items():
        rows = rows.append_column(name, values if isinstance(values, pa.Array) else pa.array(values, pa.string()))
    return rows


class _Lists:
    """The list columns of a chunk, each put together once and never picked apart by row."""

    def __init__(self, chunk: list[pa.RecordBatch]) -> None:
        self._chunk = chunk
        self._flat: dict[str, tuple[npt.NDArray[Any], npt.NDArray[np.int64]]] = {}

    def flat(self, name: str) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """All values of a column, and [n + 1] offsets into them."""
        if name not in self._flat:
            column = pa.chunked_array([batch.column(name) for batch in self._chunk]).combine_chunks()
            lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
            offsets = np.zeros(len(lengths) + 1, np.int64)
            np.cumsum(lengths, out=offsets[1:])
            self._flat[name] = (column.flatten().to_numpy(), offsets)
        return self._flat[name]

    def lengths(self, name: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.diff(self.flat(name)[1])[rows]

    def reduce(self, how: np.ufunc, name: str, rows: npt.NDArray[np.int64], dtype: Any) -> pa.Array:
        """The ufunc over each row's values; null where it has none."""
        values, offsets = self.flat(name)
        lengths = np.diff(offsets)
        full = np.flatnonzero(lengths)
        reduced = np.zeros(len(lengths), dtype)
        if len(full) and how is not np.add and values.min() == values.max():  # one version: nothing to look for
            reduced[full] = values[0]
            full = full[:0]
        for at in range(0, len(full), 256):  # blocks that stay in the cache where the type is widened
            rows_here = full[at : at + 256]
            first, last = offsets[rows_here[0]], offsets[rows_here[-1] + 1]
            reduced[rows_here] = how.reduceat(values[first:last].astype(dtype, copy=False), offsets[rows_here] - first)
        return pa.array(reduced[rows], mask=lengths[rows] == 0)

    def mean(self, name: str, rows: npt.NDArray[np.int64]) -> pa.Array:
        """The mean of each row's values; null where it has none."""
        sums = self.reduce(np.add, name, rows, np.float64)
        return pc.divide(sums, pa.array(np.maximum(self.lengths(name, rows), 1), pa.float64()))
