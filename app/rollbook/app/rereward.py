"""New rewards for stored episodes: a Python function in processes, or one SQL expression. No engine, no GPU.

A function gets an `Episode` (its row, its interactions with messages and tokens, its rewards so far) and returns a
number, {interaction_id: number}, or None for no opinion; it may be async. Rewards are appended as events under a name,
with the function's id and the hash of its source, so that versions stand side by side and training chooses by name.
Doing it again judges only what this very function has not judged yet; what it failed on is recorded and tried again.
"""

import asyncio
import hashlib
import importlib.util
import inspect
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any

import duckdb

from rollbook.agents.errors import WorkflowError, describe
from rollbook.agents.workflow import load
from rollbook.store import BadSelection, Book, Event, InteractionFailed, QueryRefused, RewardGiven, open_book
from rollbook.store.book import open_log
from rollbook.store.credit import EPISODE_COLUMNS, is_reward_name
from rollbook.store.episodes import Episode, EpisodeRows
from rollbook.store.expressions import literal, parse
from rollbook.store.log import Log
from rollbook.store.stream import Payloads

CHUNK = 64
"""Episodes that a process reads and judges at a time."""

ROWS_OF = 1024
"""Episodes whose rows are asked for with one query per table."""

Judge = Callable[[Any], Any]  # an Episode, or a list of them
Judged = tuple[str, dict[str | None, float], str | None]
"""Episode id, value by interaction id (None: the episode itself), why it failed."""


@dataclass
class Outcome:
    """What a pass over the book did."""

    source: str
    n_judged: int = 0
    n_failed: int = 0
    n_no_opinion: int = 0
    n_skipped: int = 0  # judged by this very function before


def judge_of(function: str) -> tuple[Judge, str]:
    """The function that `file.py:name` or `module:name` means, and its id: name@hash of its source."""
    where, _, name = function.rpartition(":")
    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise WorkflowError(f"there is no file {path}; give FILE.py:FUNCTION or MODULE:FUNCTION")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # whatever the file's own code raises
            raise WorkflowError(f"importing {path} failed: {describe(error)}") from error
        judge = getattr(module, name, None)
        if judge is None:
            raise WorkflowError(f"{path} has no function {name!r}")
    else:
        judge = load(function, "judge")
    if not callable(judge):
        raise WorkflowError(f"{function} is a {type(judge).__name__}; expected a function that takes an episode")
    try:
        text = inspect.getsource(judge)
    except (OSError, TypeError):
        text = repr(judge)
    module_name = Path(where).stem if where.endswith(".py") else where
    return judge, f"{module_name}:{name}@{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Pace:
    """How judgements are made. What is not finite does not limit."""

    timeout_s: float | None = None  # of one try, sync or async
    retries: int = 0  # more tries for a judgement that fails
    concurrency: int = 8  # async judgements at once, per process
    rate_per_s: float | None = None  # tries that begin per second, in all processes together
    batch: int | None = None  # the function takes lists of so many episodes and returns as many values
    processes: int = 1

    def __post_init__(self) -> None:
        for name in ("timeout_s", "rate_per_s", "batch", "concurrency", "processes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise BadSelection(f"{name} must be more than 0, got {value}")

    @property
    def chunk(self) -> int:
        """Episodes that a process reads and judges at a time: enough to keep it busy, few enough to lose to a kill."""
        if self.rate_per_s is not None:
            return max(self.concurrency, self.batch or 1, 4)
        return max(CHUNK, 4 * self.concurrency, self.batch or 1)


class _Slots:
    """When the next try may begin, in this process's share of the rate."""

    def __init__(self, pace: Pace) -> None:
        self._every_s = 0.0 if pace.rate_per_s is None else pace.processes / pace.rate_per_s
        self._next = time.monotonic()

    def wait_s(self) -> float:
        """Take the next slot; how long it is till then."""
        now = time.monotonic()
        self._next = max(self._next, now) + self._every_s
        return self._next - self._every_s - now


def judge_episodes(judge: Judge, episodes: Sequence[Episode], pace: Pace, slots: _Slots | None = None) -> list[Judged]:
    """Whatever the function raises is that episode's (or that list's) failure, after `retries` more tries."""
    slots = slots or _Slots(pace)
    size = pace.batch or 1
    pieces = [list(episodes[at : at + size]) for at in range(0, len(episodes), size)]
    if _is_async(judge):
        judged = asyncio.run(_judge_async(judge, pieces, pace, slots))
    else:
        judged = [_judge_piece(judge, piece, pace, slots) for piece in pieces]
    return [one for piece in judged for one in piece]


def _is_async(judge: Judge) -> bool:
    return inspect.iscoroutinefunction(judge) or inspect.iscoroutinefunction(getattr(judge, "__call__", None))  # noqa: B004


def _judge_piece(judge: Judge, piece: list[Episode], pace: Pace, slots: _Slots) -> list[Judged]:
    reason = ""
    for attempt in range(pace.retries + 1):
        time.sleep(_backoff_s(attempt) + slots.wait_s())
        try:
            with _alarm(pace.timeout_s):
                value = judge(piece if pace.batch else piece[0])
                if inspect.isawaitable(value):
                    value = asyncio.run(_in_time(value, pace.timeout_s))
            return _judgements(value, piece, pace)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
    return [(episode.episode_id, {}, reason) for episode in piece]


async def _judge_async(judge: Judge, pieces: list[list[Episode]], pace: Pace, slots: _Slots) -> list[list[Judged]]:
    free = asyncio.Semaphore(pace.concurrency)

    async def one(piece: list[Episode]) -> list[Judged]:
        reason = ""
        async with free:
            for attempt in range(pace.retries + 1):
                await asyncio.sleep(_backoff_s(attempt) + slots.wait_s())
                try:
                    value = await _in_time(judge(piece if pace.batch else piece[0]), pace.timeout_s)
                    return _judgements(value, piece, pace)
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}"
        return [(episode.episode_id, {}, reason) for episode in piece]

    return await asyncio.gather(*(one(piece) for piece in pieces))


def _backoff_s(attempt: int) -> float:
    return min(30.0, 0.5 * 2**attempt) if attempt else 0.0


def _judgements(value: Any, piece: list[Episode], pace: Pace) -> list[Judged]:
    if pace.batch is None:
        return [(piece[0].episode_id, _values(value, piece[0]), None)]
    values = list(value)
    if len(values) != len(piece):
        raise ValueError(f"expected {len(piece)} values for a list of {len(piece)} episodes, got {len(values)}")
    return [(one.episode_id, _values(own, one), None) for own, one in zip(values, piece, strict=True)]


@contextmanager
def _alarm(timeout_s: float | None) -> Iterator[None]:
    """Raises TimeoutError in Python code that takes longer. Workers judge in their main thread, which gets signals."""
    if timeout_s is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(signum: int, frame: Any) -> None:
        raise TimeoutError(f"took longer than {timeout_s:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


async def _in_time(value: Any, timeout_s: float | None) -> Any:
    return await asyncio.wait_for(value, timeout_s)


def _values(value: Any, episode: Episode) -> dict[str | None, float]:
    if value is None:
        return {}
    pairs: dict[str | None, Any] = dict(value) if isinstance(value, Mapping) else {None: value}
    known = {one.interaction_id for one in episode.interactions} if isinstance(value, Mapping) else set()
    for target, number in pairs.items():
        if target is not None and target not in known:
            raise ValueError(f"a reward for {target!r}, which is no interaction of the episode")
        if isinstance(number, str) or not math.isfinite(float(number)):
            raise ValueError(f"expected a finite number, {{interaction_id: number}} or None, got {number!r}")
    return {target: float(number) for target, number in pairs.items()}


_worker: tuple[Log, Payloads, Judge, Pace, _Slots] | None = None


def _start_worker(book_path: str, function: str, pace: Pace, env: Mapping[str, str]) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program that appends; it ends us
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    os.environ.update(env)  # the process that we were forked from may have older ones
    log = open_log(book_path)
    _worker = log, Payloads(log), judge_of(function)[0], pace, _Slots(pace)


def _judge_chunk(rows: EpisodeRows) -> list[Judged]:
    assert _worker is not None
    log, payloads, judge, pace, slots = _worker
    return judge_episodes(judge, rows.read(log, payloads), pace, slots)


class _Judges:
    """Processes that judge. They start while the caller opens its book, and need of it only the log."""

    def __init__(self, book_path: str, function: str, pace: Pace) -> None:
        self._function = function
        self._pace = pace
        # Forked from a process that has imported everything once and does nothing else: not from this one, which has
        # threads, and not each with an import of its own, a second of CPU.
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pool = ProcessPoolExecutor(
            pace.processes, context, _start_worker, (book_path, function, pace, dict(os.environ))
        )
        self._starting = threading.Thread(target=self._start, daemon=True)
        self._starting.start()

    def _start(self) -> None:
        for _ in range(self._pace.processes):
            self._pool.submit(int)

    def __enter__(self) -> "_Judges":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._starting.join()
        self._pool.shutdown()

    def judge(self, book: Book, ids: Sequence[str]) -> Iterator[list[Judged]]:
        """Judgements as they come, of one chunk or of several that were ready together.

        Raises WorkflowError when a process dies.
        """
        # Of few episodes each process gets some; a chunk keeps as many async judgements going as are allowed.
        pace = self._pace
        least = max(pace.concurrency if _is_async(judge_of(self._function)[0]) else 1, pace.batch or 1)
        size = max(least, min(pace.chunk, len(ids) // (4 * pace.processes)))
        chunks = _chunks(book, ids, size)
        running: set[Future[list[Judged]]] = set()
        try:
            self._starting.join()
            while True:
                while len(running) < 2 * pace.processes and (chunk := next(chunks, None)) is not None:
                    running.add(self._pool.submit(_judge_chunk, chunk))
                if not running:
                    return
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                yield [one for future in finished for one in future.result()]
        except BrokenProcessPool as error:
            raise WorkflowError(
                f"a process that judged by {self._function} died, not by an exception (killed? out of memory?); "
                "what was judged is in the book, and the same command judges the rest"
            ) from error


def _chunks(book: Book, ids: Sequence[str], size: int) -> Iterator[EpisodeRows]:
    """The rows of `size` episodes at a time; the tables are asked for many at once."""
    at_once = size * max(1, ROWS_OF // size)
    for at in range(0, len(ids), at_once):
        rows = book.episode_rows(ids[at : at + at_once])
        for start in range(0, len(rows.ids), size):
            yield rows.slice(start, start + size)


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
    """Judge the ended episodes for which the SQL condition `where` is true; how fast is `Pace`'s.

    What is judged is appended chunk by chunk, so that after a kill the same call judges the rest. progress: called with
    (done, of). Raises WorkflowError for a function that cannot be had, or whose process dies.
    """
    pace = Pace(timeout_s, retries, concurrency, rate_per_s, batch, processes or os.cpu_count() or 1)
    _, source = judge_of(function)
    with (
        _Judges(book_path, function, pace) as judges,
        open_book(book_path, writer=f"reward-{os.getpid()}") as book,
    ):
        condition = f"and ({where})" if where else ""
        ids: list[str] = _ask(
            book, f"select episode_id from episodes where state <> 'open' {condition} order by opened_at, episode_id"
        )["episode_id"].to_pylist()
        judged: set[str] = set(
            book.sql("select distinct episode_id from rewards where name = ? and source = ?", [name, source])[
                "episode_id"
            ].to_pylist()
        )
        run_of = dict(
            zip(*(column.to_pylist() for column in book.sql("select episode_id, run_id from episodes")), strict=True)
        )
        outcome = Outcome(source, n_skipped=sum(i in judged for i in ids))
        ids = [i for i in ids if i not in judged]
        done = 0
        for chunk in judges.judge(book, ids):
            events: list[Event] = []
            for episode_id, values, reason in chunk:
                run_id = run_of[episode_id]
                if reason is not None:
                    outcome.n_failed += 1
                    fact = InteractionFailed(
                        error="RewardFailed", message=f"{source}: {reason}", status=0, dialect="reward"
                    )
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
    """Judge ended episodes by an expression over the episodes table and the names of other rewards. NULL: no opinion.

    Raises BadSelection for an expression that cannot be read or names a reward that the book does not have.
    """
    source = f"sql@{hashlib.sha256(expression.encode()).hexdigest()[:12]}"
    condition = f"and ({where}\n)" if where else ""
    wanted = (
        f"select episode_id from episodes where state <> 'open' {condition} except "
        f"select episode_id from rewards where name = {literal(name)} and source = {literal(source)}"
    )
    with open_book(book_path, writer=f"reward-{os.getpid()}") as book:
        names = {expression} if is_reward_name(expression) else parse(expression).columns - EPISODE_COLUMNS
        _want_rewards(book, *names)
        n_wanted: int = _ask(book, f"select count(*) as n from ({wanted})")["n"][0].as_py()
        n_judged = book.rereward(expression, name=name, source=source, episodes=wanted)
    return Outcome(source, n_judged=n_judged, n_no_opinion=n_wanted - n_judged)


def _ask(book: Book, statement: str) -> Any:
    try:
        return book.sql(statement)
    except duckdb.Error as error:
        raise QueryRefused(f"{str(error).strip()} (docs/sql.md lists the columns of `episodes`)") from error


def _want_rewards(book: Book, *names: str) -> None:
    given = book.sql("select distinct name from rewards where name <> 'reward' order by 1")["name"].to_pylist()
    known = ["reward", *given]
    for name in sorted(names):
        if name.strip('"') not in known:
            raise BadSelection(f"the book has no reward {name}; it has {', '.join(known)}")


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
