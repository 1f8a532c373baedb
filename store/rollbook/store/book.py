"""The one door to a book: its log and the tables computed from it.

    with open_book("runs/gsm8k", writer="learner") as book:
        book.sql("select task_id, avg(reward) from episodes group by all")

A book is asked through its tables (`sql`) and, for tokens and messages, through the log (`load`, `interaction`).
"""

import errno
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from .canned import find_canned
from .credit import Fork, Scheme, computed_rewards_query, credit_query
from .directory import open_log
from .episodes import Episode, EpisodeRows, Interaction
from .errors import BadSelection, BookBusy, QueryRefused, TablesDamaged
from .events import Event, RewardGiven, failed_judgement
from .expressions import UNCOMPUTABLE, why_uncomputable
from .log import Log
from .relations import names_tokens, read_tokens
from .rows import admit_rewards
from .selection import Selection, discards_query, episodes_query, select_query
from .stream import NODE_COLUMNS, Form, Nodes, Payloads, Tokens
from .views import Views, is_full

_log = logging.getLogger("rollbook.store")

_ROWS_AT_ONCE = 8192
"""Rows whose trees `packs` looks up with one query."""


MAX_TOKENS = 5_000_000
"""Rows of `tokens` that a query may get by its name; about 300 MB."""

_BULK = 8192  # events per append of a re-reward


class Book:
    """A log and its views. Close it, or use it as a context manager. Safe to use from several threads."""

    def __init__(self, log: Log, views: Views | None = None) -> None:
        self.log = log
        self.views = Views(log) if views is None else views
        self._payloads = Payloads(log)
        self._asked: set[duckdb.DuckDBPyConnection] = set()
        try:
            self.catch_up()
        except BaseException:
            self.views.close()
            raise

    def __enter__(self) -> "Book":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def catch_up(self) -> int:
        """Project what is new in the log, of all writers. Returns the events read."""
        return self.views.catch_up()

    def sql(self, query: str, params: Sequence[Any] | Mapping[str, Any] | None = None, **tables: pa.Table) -> pa.Table:
        """Run one trusted query on the views; `tables` are there under their names. `sql.py` is for untrusted ones.

        A SELECT that names `tokens` gets them from the log, whole. Raises BadSelection where that would be more than
        MAX_TOKENS rows, QueryRefused for what would write: the tables say what the log says.
        """
        if "tokens" not in tables and names_tokens(query):
            tables = {**tables, "tokens": self.all_tokens()}
        with self.views.cursor() as cursor:
            for name, table in tables.items():
                cursor.register(name, table)
            cursor.execute("begin transaction read only")
            self._asked.add(cursor)
            try:
                relation = cursor.sql(query, params=params) if params is not None else cursor.sql(query)
                return pa.table({}) if relation is None else relation.to_arrow_table()
            except duckdb.Error as error:
                if "read-only" in str(error):
                    raise QueryRefused(
                        "the tables are computed from the log and only read here; append events to change what they say"
                    ) from error
                damage = self.views.damage(error)
                if damage is not None:
                    raise damage from error
                raise
            finally:
                self._asked.discard(cursor)

    def interrupt(self) -> None:
        """End the queries that other threads ask by `sql` at this moment, with duckdb.InterruptException.

        One that is between two steps goes on: repeat it until the thread is back.
        """
        for cursor in list(self._asked):
            with suppress(duckdb.ConnectionException):  # it has its answer and was closed
                cursor.interrupt()

    def _compute(self, query: str, **tables: pa.Table) -> pa.Table:
        """`sql` of a query with somebody's expressions in it. Raises BadSelection for one that cannot be computed."""
        try:
            return self.sql(query, **tables)
        except UNCOMPUTABLE as error:
            raise BadSelection(f"a reward or a condition cannot be computed: {why_uncomputable(error)}") from error

    def select(self, selection: Selection) -> pa.Table:
        """The rows of a selection, groups together; columns in `selection.select_query`. Raises BadSelection."""
        return self._compute(select_query(selection))

    def discards(self, selection: Selection) -> pa.Table:
        """(episode_id, group_id, task_id, reason) of the episodes in its scope that a selection leaves out."""
        return self._compute(discards_query(selection))

    def credits(
        self,
        scheme: Scheme = "tree",
        gamma: float = 1.0,
        fork: Fork = "mean",
        reward: str | None = None,
        *,
        compacts: bool = True,
        episode_ids: Sequence[str] | None = None,
    ) -> pa.Table:
        """(interaction_id, credit) of all interactions, or of those of some episodes; see `credit.py`.

        credit is NULL where it is missing. reward: a name or an SQL expression; None: the name 'reward'. compacts:
        whether credit crosses compaction. Raises BadSelection.
        """
        if episode_ids is None:
            return self._compute(credit_query(scheme=scheme, gamma=gamma, fork=fork, reward=reward, compacts=compacts))
        query = credit_query(
            scheme=scheme, gamma=gamma, fork=fork, reward=reward, compacts=compacts, episodes="select id from _wanted"
        )
        return self._compute(query, _wanted=pa.table({"id": pa.array(list(episode_ids), pa.string())}))

    def rereward(
        self,
        expression: str,
        *,
        name: str,
        source: str = "sql",
        selection: Selection | None = None,
        episodes: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> tuple[int, int]:
        """Give stored episodes another reward, computed by an SQL expression; the earlier ones stay as they are.

        expression: over the columns of `episodes` and the names of rewards, as in `credit.py`; where it is NULL no
        reward is given, where it is no finite number the failure is recorded (`failures`). name: of the new reward. Of
        which episodes says selection or episodes, an SQL query for their ids (default: of all). Durable when this
        returns, and in the tables. Returns how many were given and how many failed. Raises BadSelection, and LogClosed
        for a reader.
        """
        if selection is not None and episodes is not None:
            raise BadSelection("expected a selection or a query for the episodes, got both; put one into the other")
        only = episodes if selection is None else "select episode_id from _chosen"
        tables = {} if selection is None else {"_chosen": self._compute(episodes_query(selection))}
        found = self._compute(
            f"select e.run_id, e.episode_id, r.value from ({computed_rewards_query(expression, only)}) r "
            "join episodes e using (episode_id) where r.value is not null order by e.episode_id",
            **tables,
        )
        is_number = pc.is_finite(found["value"])
        given, failed = found.filter(is_number), found.filter(pc.invert(is_number))
        fact = RewardGiven(value=0.0, name=name, source=source, details={"expression": expression, **(details or {})})
        for start in range(0, given.num_rows, _BULK):
            self.log.append_rows_blocking(admit_rewards(given.slice(start, _BULK), fact))
        for start in range(0, failed.num_rows, _BULK):
            events = [
                Event(
                    run_id=one["run_id"],
                    episode_id=one["episode_id"],
                    fact=failed_judgement(source, f"expected a finite number or NULL, got {one['value']}"),
                )
                for one in failed.slice(start, _BULK).to_pylist()
            ]
            self.log.append_blocking(*events)
        self.catch_up()
        return given.num_rows, failed.num_rows

    def canned(self, name: str, **params: Any) -> pa.Table:
        """The answer to one of the questions of `canned.py`. Raises BadSelection."""
        question = find_canned(name)
        return self.sql(question.sql, question.bind(params))

    def tokens(self, interaction_ids: Sequence[str] | None = None) -> pa.Table:
        """One row per token of these interactions (default: of all), columns in `relations.TOKENS`. Reads the log."""
        query = "select interaction_id, n_shared, writer, position from interactions"
        if interaction_ids is None:
            return read_tokens(self.log, self.sql(f"{query} order by recorded_at, event_id"))
        wanted = pa.table({"id": pa.array(list(interaction_ids), pa.string())})
        query = f"{query} where interaction_id in (select id from _wanted) order by recorded_at, event_id"
        return read_tokens(self.log, self.sql(query, _wanted=wanted))

    def all_tokens(self) -> pa.Table:
        """`tokens` of the whole book. Raises BadSelection where that would be more than MAX_TOKENS rows."""
        found = self.sql("select coalesce(sum(n_prompt - n_shared + n_output), 0)::bigint as n from interactions")
        n = found["n"][0].as_py()
        if n > MAX_TOKENS:
            raise BadSelection(
                f"the table tokens would have {n:,} rows, more than {MAX_TOKENS:,}; read those of some interactions in "
                "Python: book.sql(query, tokens=book.tokens(interaction_ids))"
            )
        return self.tokens()

    def scores(self, scorer: str, interaction_ids: Sequence[str] | None = None) -> pa.Table:
        """What somebody's weights thought of answers: interaction_id, version, logprobs and entropies of the output.

        One row per interaction, of several scorings the last; interaction_ids None: all that were scored. See
        `rollbook rescore` and the view `scores`.
        """
        only, tables = "", {}
        if interaction_ids is not None:
            only = "and interaction_id in (select id from _wanted)"
            tables = {"_wanted": pa.table({"id": pa.array(list(interaction_ids), pa.string())})}
        rows = self.sql(
            f"select interaction_id, version, writer, position from scored where scorer = $scorer {only} "
            "qualify row_number() over (partition by interaction_id order by scored_at desc, event_id desc) = 1 "
            "order by interaction_id",
            {"scorer": scorer},
            **tables,
        )
        stored = self.log.gather(list(zip(rows["writer"].to_pylist(), rows["position"].to_pylist(), strict=True)))
        found = rows.select(["interaction_id", "version"])
        for name in ("logprobs", "entropies"):
            column = stored[name] if rows.num_rows else pa.nulls(0, pa.list_(pa.float32()))
            found = found.append_column(name, column)
        return found

    def nodes(self, interaction_ids: Iterable[str]) -> Nodes:
        """The trees of these interactions, ready to be packed; see `stream.Nodes`."""
        rows = self.sql(
            f"select {', '.join(NODE_COLUMNS)} from interactions where episode_id in "
            "(select episode_id from interactions where interaction_id in (select id from _wanted)) "
            "order by recorded_at, event_id",
            _wanted=pa.table({"id": pa.array(list(interaction_ids), pa.string())}),
        )
        return Nodes.read(rows, self._payloads)

    def load(self, interaction_ids: Sequence[str], *, form: Form = "individual") -> Tokens:
        """The tokens of these interactions (or of the trajectories that end in them), packed, in this order.

        Raises KeyError for an id that the book does not have.
        """
        nodes = self.nodes(interaction_ids)
        return nodes.load(nodes.find(interaction_ids), form=form)

    def packs(self, interaction_ids: Sequence[str], *, max_tokens: int, form: Form = "individual") -> Iterator[Tokens]:
        """`load` in pieces of at most `max_tokens` tokens, in order; a longer row comes alone.

        Raises KeyError for an id that the book does not have.
        """
        for at in range(0, len(interaction_ids), _ROWS_AT_ONCE):
            wanted = interaction_ids[at : at + _ROWS_AT_ONCE]
            nodes = self.nodes(wanted)
            yield from nodes.packs(nodes.find(wanted), max_tokens=max_tokens, form=form)

    def batch(self, batch_id: str, *, form: Form = "individual") -> tuple[pa.Table, Tokens]:
        """What a learner took: interaction_id, credit, advantage and weight of each row, and their tokens.

        The same bytes at any later time, whatever rewards came since. Raises KeyError.
        """
        rows = self.sql(
            "select interaction_id, credit, advantage, weight from batch_rows where batch_id = ? order by rowid",
            [batch_id],
        )
        if not rows.num_rows and not self.sql("select 1 from batches where batch_id = ?", [batch_id]).num_rows:
            raise KeyError(f"no batch {batch_id!r} in this book")
        return rows, self.load(rows["interaction_id"].to_pylist(), form=form)

    def interaction(self, interaction_id: str) -> Interaction:
        """One model call with its whole request, reply and tokens. Raises KeyError."""
        found = self.sql("select episode_id from interactions where interaction_id = ?", [interaction_id])
        if not found.num_rows:
            raise KeyError(f"no interaction {interaction_id!r} in this book")
        episode = self.episode(found["episode_id"][0].as_py())
        return next(one for one in episode.interactions if one.interaction_id == interaction_id)

    def episode(self, episode_id: str) -> Episode:
        """One attempt with its whole tree. Raises KeyError."""
        return self.episodes([episode_id])[0]

    def episodes(self, episode_ids: Sequence[str]) -> list[Episode]:
        """These attempts with their whole trees, in this order; some hundreds at a time. Raises KeyError."""
        return self.episode_rows(episode_ids).read(self.log, self._payloads, is_lasting=True)

    def episode_rows(self, episode_ids: Sequence[str]) -> EpisodeRows:
        """What the tables hold of these attempts; `EpisodeRows.read` makes them, also in another process.

        The way for many readers of one book, of whom only one asks its tables.
        """
        ids = list(episode_ids)
        wanted = pa.table({"id": pa.array(ids, pa.string()), "n": pa.array(range(len(ids)), pa.int32())})

        def rows(table: str, order: str) -> pa.Table:
            query = f"select t.*, w.n from {table} t join _wanted w on t.episode_id = w.id order by w.n{order}"
            return self.sql(query, _wanted=wanted)

        return EpisodeRows(
            ids,
            rows("episodes", ""),
            rows("interactions", ", recorded_at, event_id"),
            rows("rewards", ", given_at, event_id"),
            rows("failures", ", failed_at, event_id"),
        )

    def close(self) -> None:
        """Give files and locks back. Twice is once."""
        self.views.close()
        self.log.close()


def open_book(path: str | os.PathLike[str], writer: str | None = None) -> Book:
    """Open the book at a path; with a writer name, to append to it too, creating it where there is none.

    The tables are those of BOOK/views.duckdb if no other process owns them and they can be written, else a private copy
    in memory. Raises BookNotFound, BookTooNew, BookBusy (somebody else appends under that name), LogCorrupt.
    """
    log = open_log(path, writer)
    try:
        try:
            return Book(log, _open_views(log, Path(path)))
        except TablesDamaged as error:
            _log.warning("%s", error)
            return Book(log, _open_views(log, Path(path)))
    except BaseException:
        log.close()
        raise


def _open_views(log: Log, path: Path) -> Views:
    if {"?", "\\"} & set(str(path.absolute())):
        _log.warning("%s: DuckDB reads ? and \\ in a path in its own way; the tables are computed in memory", path)
        return Views(log)
    try:
        return Views(log, path / "views.duckdb")
    except (BookBusy, PermissionError):
        return Views(log)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.ENOSPC, errno.EDQUOT):
            raise
        return Views(log)
    except duckdb.Error as error:
        if not is_full(error):
            raise
        _log.warning("%s has no room for the tables; they are computed in memory", path)
        return Views(log)
