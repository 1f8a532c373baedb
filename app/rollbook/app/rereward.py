"""New rewards for stored episodes: a Python function in processes, or one SQL expression. No engine, no GPU.

A function gets an `Episode` (its row, its interactions with messages and tokens, its rewards so far) and returns a
number, {interaction_id: number}, or None for no opinion; it may be async. Rewards are appended as events under a name,
with the function's id and the hash of its source, so that versions stand side by side and training chooses by name.
Doing it again judges only what this very function did not judge last; what it failed on is recorded and tried again.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any

import duckdb

from rollbook.agents.errors import WorkflowError
from rollbook.store import BadSelection, Book, Event, QueryRefused, RewardGiven, open_book
from rollbook.store.credit import EPISODE_COLUMNS, computed_rewards_query, is_equal_sql, is_reward_name
from rollbook.store.directory import read_manifest
from rollbook.store.episodes import EpisodeRows
from rollbook.store.events import failed_judgement
from rollbook.store.expressions import in_parentheses, literal, parse
from rollbook.store.schema import current_rewards_sql, is_judge_sql

from .judging import Judged, Pace, is_async, judge_of

ROWS_OF = 4096
"""Episodes whose rows are asked for with one query per table, at most; some 10 MB."""

_AHEAD = 4  # chunks that a process has; all but one to go on with while we ask the tables and append

_BEGIN = (
    "import sys; from multiprocessing.connection import Connection; connection = Connection(int(sys.argv[1])); "
    "sys.path[:] = connection.recv(); from rollbook.app.judging import serve; serve(connection)"
)


@dataclass
class Outcome:
    """What a pass over the book did."""

    source: str
    n_judged: int = 0
    n_failed: int = 0
    n_no_opinion: int = 0
    n_skipped: int = 0  # judged by this very judge, and by no other since
    n_pruned: int = 0  # left out: what was said in them is gone


class _Process:
    """One that judges. It starts anew, not forked (we have threads), and does not import our main program."""

    def __init__(self, book_path: str, function: str, pace: Pace) -> None:
        self.n_asked = 0
        self.connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BEGIN, str(theirs.fileno())], pass_fds=[theirs.fileno()], process_group=0
            )
        self.connection.send(sys.path)
        self.connection.send((book_path, function, pace))

    def ask(self, rows: EpisodeRows) -> None:
        self.connection.send(rows)
        self.n_asked += 1

    def answer(self) -> list[Judged]:
        found: list[Judged] | Exception = self.connection.recv()
        self.n_asked -= 1
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        self.connection.close()  # which ends it
        self._process.wait()


class _Judges:
    """Processes that judge. They start while the caller opens its book, and need of it only the log."""

    def __init__(self, book_path: str, function: str, pace: Pace) -> None:
        self._function = function
        self._pace = pace
        self._processes = [_Process(book_path, function, pace) for _ in range(pace.processes)]

    def __enter__(self) -> "_Judges":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for process in self._processes:
            process.close()

    def judge(self, book: Book, ids: Sequence[str]) -> Iterator[list[Judged]]:
        """Judgements as they come, of a chunk at a time. Raises WorkflowError when a process dies."""
        # Of few episodes each process gets some; a chunk keeps as many async judgements going as are allowed.
        pace = self._pace
        least = max(pace.concurrency if is_async(judge_of(self._function)[0]) else 1, pace.batch or 1)
        size = max(least, min(pace.chunk, len(ids) // (4 * pace.processes)))
        chunks = _chunks(book, ids, size)
        try:
            while True:
                for n in range(_AHEAD):
                    for process in self._processes:
                        if process.n_asked <= n and (chunk := next(chunks, None)) is not None:
                            process.ask(chunk)
                asked = [process for process in self._processes if process.n_asked]
                if not asked:
                    return
                ready = wait([process.connection for process in asked])
                for process in asked:
                    if process.connection in ready:
                        yield process.answer()
        except (EOFError, ConnectionError) as error:
            raise WorkflowError(
                f"a process that judged by {self._function} died, not by an exception (killed? out of memory?); "
                "what was judged is in the book, and the same command judges the rest"
            ) from error


def _chunks(book: Book, ids: Sequence[str], size: int) -> Iterator[EpisodeRows]:
    """The rows of `size` episodes at a time; the tables are asked for many at once, the first time for few."""
    at, n = 0, 4 * size
    while at < len(ids):
        rows = book.episode_rows(ids[at : at + n])
        for start in range(0, len(rows.ids), size):
            yield rows.slice(start, start + size)
        at, n = at + n, max(n, min(4 * n, ROWS_OF // size * size))


def reward_by_function(
    book_path: str,
    function: str,
    *,
    name: str,
    where: str | None = None,
    processes: int | None = None,
    timeout_s: float | None = None,
    retries: int = 0,
    concurrency: int = 8,
    rate_per_s: float | None = None,
    batch: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Judge the ended episodes for which the SQL condition `where` is true, but those that were pruned, of which a
    function would see less than there was; how fast is `Pace`'s.

    What is judged is appended chunk by chunk, so that after a kill the same call judges the rest. progress: called with
    (done, of). Raises WorkflowError for a function that cannot be had, or whose process dies.
    """
    pace = Pace(timeout_s, retries, concurrency, rate_per_s, batch, processes or os.cpu_count() or 1)
    read_manifest(Path(book_path))  # a wrong path must not become a book
    _, source = judge_of(function)
    with (
        _Judges(book_path, function, pace) as judges,
        open_book(book_path, writer=f"reward-{os.getpid()}") as book,
    ):
        whole = f"{_ended(where)} and episode_id not in (select episode_id from interactions where is_pruned)"
        ids: list[str] = _ask(book, f"{whole} order by opened_at, episode_id")["episode_id"].to_pylist()
        judged: set[str] = set(book.sql(_judged_last(name, source))["episode_id"].to_pylist())
        run_of = dict(
            zip(*(column.to_pylist() for column in book.sql("select episode_id, run_id from episodes")), strict=True)
        )
        n_pruned = _count(book, _ended(where)) - len(ids)
        outcome = Outcome(source, n_skipped=sum(i in judged for i in ids), n_pruned=n_pruned)
        ids = [i for i in ids if i not in judged]
        done = 0
        for chunk in judges.judge(book, ids):
            events: list[Event] = []
            for episode_id, values, reason in chunk:
                run_id = run_of[episode_id]
                if reason is not None:
                    outcome.n_failed += 1
                    fact = failed_judgement(source, reason)
                    events.append(Event(run_id=run_id, episode_id=episode_id, fact=fact))
                elif not values:
                    outcome.n_no_opinion += 1
                else:
                    outcome.n_judged += 1
                for target, value in values.items():
                    given = RewardGiven(value=value, name=name, source=source)
                    events.append(Event(run_id=run_id, episode_id=episode_id, interaction_id=target, fact=given))
            if events:
                book.log.append_blocking(*events)
            done += len(chunk)
            if progress is not None:
                progress(done, len(ids))
    return outcome


def reward_by_sql(book_path: str, expression: str, *, name: str, where: str | None = None) -> Outcome:
    """Judge ended episodes by an expression over the episodes table and the names of other rewards. NULL: no opinion;
    what is no finite number has failed, as with a function.

    What it judged before it judges again where its value is another now, since what it reads may have been corrected;
    but not where it reads the reward that it gives.

    Raises BadSelection for an expression that cannot be read or names a reward that the book does not have.
    """
    source = f"sql@{hashlib.sha256(expression.encode()).hexdigest()[:12]}"
    ended, judged = _ended(where), _judged_last(name, source)
    read_manifest(Path(book_path))
    with open_book(book_path, writer=f"reward-{os.getpid()}") as book:
        if expression.lower() in EPISODE_COLUMNS - {"reward"} - _given(book):
            expression = f"({expression})"  # or it would be a reward's name
        if is_reward_name(expression):
            read = names = [expression.strip('"')]
        else:
            parsed = parse(expression)
            read, names = list(parsed.columns), parsed.beyond(EPISODE_COLUMNS)
        _want_rewards(book, *names)
        wanted, known = f"{ended} except {judged}", f"{ended} intersect {judged}"
        n_known = _count(book, known)
        if n_known and name.lower() not in {column.lower() for column in read}:  # or it would feed on itself
            mine = f"(from rewards where name = {literal(name)} and source = {literal(source)})"
            is_same = is_equal_sql("least(c.value, r.value)", "greatest(c.value, r.value)")
            wanted = f"""({wanted}) union (
                select episode_id from ({computed_rewards_query(expression, known)}) c
                join ({current_rewards_sql(mine)}) r using (episode_id)
                where not isfinite(c.value) or not {is_same}
            )"""
        n_wanted = _count(book, wanted)
        n_judged, n_failed = book.rereward(expression, name=name, source=source, episodes=wanted)
        n_skipped = _count(book, ended) - n_wanted
    return Outcome(source, n_judged, n_failed, n_wanted - n_judged - n_failed, n_skipped)


def _ended(where: str | None) -> str:
    """SQL for the ids of the ended episodes for which a condition holds. Raises BadSelection."""
    condition = f" and {in_parentheses(where)}" if where else ""
    return f"select episode_id from episodes where state <> 'open'{condition}"


def _judged_last(name: str, source: str) -> str:
    """SQL for the ids of the episodes that no other judge has judged under this name since this one did.

    Who is no judge of ours (an agent, a person who corrects) does not count, or the next pass would undo it.
    """
    return f"""select episode_id from rewards
        where name = {literal(name)} and {is_judge_sql("source")}
        group by episode_id having arg_max(source, {{'at': given_at, 'id': event_id}}) = {literal(source)}"""


def _ask(book: Book, statement: str) -> Any:
    try:
        return book.sql(statement)
    except duckdb.Error as error:
        raise QueryRefused(f"{str(error).strip()} (docs/sql.md lists the columns of `episodes`)") from error


def _count(book: Book, query: str) -> int:
    n: int = _ask(book, f"select count(*) as n from ({query})")["n"][0].as_py()
    return n


def _want_rewards(book: Book, *names: str) -> None:
    known = ["reward", *sorted(_given(book) - {"reward"})]
    for name in sorted(names):
        if name not in known:
            raise BadSelection(f"the book has no reward {name}; it has {', '.join(known)}")


def _given(book: Book) -> set[str]:
    return set(book.sql("select distinct name from rewards")["name"].to_pylist())


def difference(book: Book, old: str, new: str) -> Any:
    """Per task: how many episodes have both rewards, their means, and how many moved. An Arrow table.

    Raises BadSelection for a reward that the book does not have.
    """
    _want_rewards(book, old, new)
    return book.sql(
        "select e.task_id, count(*) as episodes, avg(a.reward) as old, avg(b.reward) as new, "
        "count(*) filter (where abs(a.reward - b.reward) > 1e-9) as moved "
        "from episode_rewards a join episode_rewards b using (episode_id) join episodes e using (episode_id) "
        "where a.name = ? and b.name = ? group by e.task_id order by abs(avg(b.reward) - avg(a.reward)) desc, task_id",
        [old, new],
    )
