"""Keeps groups coming for a training run: as many at once as concurrency and staleness allow, in a fixed order.

The order is a function of seed, epoch and dataset, and a group's id of run, epoch and row, so a restart that is told
which episodes have ended goes on where the run stopped: nothing that finished is drawn again, nothing is skipped.
`run` belongs on an event loop; `on_version` and `reject` may be called from any thread.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import anyio
import msgspec
import numpy.typing as npt

from .capacity import capacity
from .config import RolloutConfig
from .data import Task, order
from .errors import RolloutsFailing
from .runner import Episode, Runner, group_id_of, remaining_attempts
from .watch import watching

Ended = Mapping[str, Sequence[tuple[int, str]]]
"""group_id -> (attempt, state) of each of its episodes that ended."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Groups running, accepted and rejected, and the version that decides how far ahead they may run."""

    version: int
    running: int
    accepted: int
    rejected: int


class RolloutLoop:
    """One training run's groups.

    consumer_batch_size: where the config leaves it open.
    total_epochs: passes over the tasks; None: for ever. ended: what earlier processes of this run ended.
    rejected: groups among those that the learner took and could not use.
    weights: epoch -> one weight per task, asked when the epoch begins (in a thread); see `data.order`.
    """

    def __init__(
        self,
        runner: Runner,
        tasks: Sequence[Task],
        config: RolloutConfig,
        *,
        consumer_batch_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        total_epochs: int | None = None,
        version: int = 0,
        ended: Ended | None = None,
        rejected: int = 0,
        weights: Callable[[int], npt.ArrayLike] | None = None,
        on_group: Callable[[str, list[Episode]], None] | None = None,
    ) -> None:
        if not tasks:
            raise ValueError("expected at least one task, got none")
        self.runner = runner
        self._tasks = tasks
        self._batch = config.consumer_batch_size or consumer_batch_size
        self._eta = config.max_head_offpolicyness
        self._concurrency = config.max_concurrent_rollouts or self._batch * (self._eta + 1)
        self._seed = seed
        self._shuffle = shuffle
        self._total_epochs = total_epochs
        self._weights = weights
        self._on_group = on_group
        self._ended = dict(ended or {})
        self._lock = threading.Lock()
        self._version = version
        self._running = 0
        self._rejected = rejected
        self._accepted = sum(self._is_usable(group) for group in self._ended.values()) - rejected
        self._home: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._failed_in_a_row: Counter[str] = Counter()
        self._patience = max(32, 4 * runner.n_samples)

    @property
    def progress(self) -> Progress:
        """Now."""
        with self._lock:
            return Progress(
                version=self._version, running=self._running, accepted=self._accepted, rejected=self._rejected
            )

    def on_version(self, version: int) -> None:
        """The learner published `version`: more groups may begin. An older version changes nothing."""
        with self._lock:
            self._version = max(self._version, version)
        self._wake()

    def reject(self, n_groups: int = 1) -> None:
        """The learner cannot use so many of the groups that were counted as accepted; others take their place."""
        with self._lock:
            self._accepted -= n_groups
            self._rejected += n_groups
        self._wake()

    async def run(self) -> None:
        """Until the epochs are over. Raises RolloutsFailing, or what the proxy raises when it is gone."""
        self._home = asyncio.get_running_loop()
        with watching(self.runner.workflow.blocking):
            await self._draw()

    async def _draw(self) -> None:
        async with anyio.create_task_group() as group:
            epoch = 0
            while self._total_epochs is None or epoch < self._total_epochs:
                weights = None
                if self._weights is not None:
                    await self._room()  # until then groups of the epoch before end, and their rewards count
                    weights = await anyio.to_thread.run_sync(self._weights, epoch)
                n_drawn = 0
                for task, ended in self._plan(epoch, weights):
                    await self._room()
                    with self._lock:
                        self._running += 1
                    group.start_soon(self._run_group, task, epoch, ended)
                    n_drawn += 1
                if not n_drawn and weights is not None:
                    await anyio.sleep(1.0)  # every weight is 0: later rewards may change them
                epoch += 1

    def _plan(self, epoch: int, weights: npt.ArrayLike | None) -> Iterator[tuple[Task, Sequence[tuple[int, str]]]]:
        """The epoch's tasks in order, without groups that are complete; with each, what of its group has ended."""
        rows = order(len(self._tasks), epoch=epoch, seed=self._seed, shuffle=self._shuffle, weights=weights)
        for i in rows.tolist():
            task = self._tasks[i]
            ended = self._ended.get(group_id_of(self.runner.run_id, epoch, task.index), ())
            if self._remaining(ended):
                yield task, ended

    def _remaining(self, ended: Sequence[tuple[int, str]]) -> list[int]:
        return remaining_attempts(ended, n_samples=self.runner.n_samples, max_attempts=self.runner.max_attempts)

    def _is_usable(self, ended: Sequence[tuple[int, str]]) -> bool:
        return not self._remaining(ended) and any(state == "done" for _, state in ended)

    async def _room(self) -> None:
        while True:
            self._changed.clear()
            with self._lock:
                free = capacity(
                    concurrency=self._concurrency,
                    consumer_batch_size=self._batch,
                    max_head_offpolicyness=self._eta,
                    version=self._version,
                    accepted=self._accepted,
                    running=self._running,
                )
            if free > 0:
                return
            await self._changed.wait()

    async def _run_group(self, task: Task, epoch: int, ended: Sequence[tuple[int, str]]) -> None:
        is_usable = False
        try:
            episodes = await self.runner.run_group(task, epoch=epoch, ended=ended)
            is_usable = any(state == "done" for _, state in ended) or any(e.state == "done" for e in episodes)
        finally:
            with self._lock:
                self._running -= 1
                self._accepted += is_usable
                self._rejected += not is_usable
            self._changed.set()
        self._watch(episodes)
        if self._on_group is not None:
            self._on_group(group_id_of(self.runner.run_id, epoch, task.index), episodes)

    def _watch(self, episodes: Sequence[Episode]) -> None:
        if any(episode.state == "done" for episode in episodes):
            self._failed_in_a_row.clear()
        self._failed_in_a_row.update(episode.reason or "" for episode in episodes if episode.state == "failed")
        n = self._failed_in_a_row.total()
        if n >= self._patience:
            reason, times = self._failed_in_a_row.most_common(1)[0]
            raise RolloutsFailing(
                f"the last {n} episodes of {self.runner.workflow.name} failed; {times} of them with: {reason}"
            )

    def _wake(self) -> None:
        home = self._home
        if home is not None and not home.is_closed():
            home.call_soon_threadsafe(self._changed.set)


def ended_episodes(book: Any, run_id: str) -> dict[str, list[tuple[int, str]]]:
    """What a run's earlier processes ended, for `RolloutLoop(ended=...)`: a query over the book."""
    table = book.sql(
        "SELECT group_id, attempt, state FROM episodes "
        "WHERE run_id = ? AND group_id IS NOT NULL AND NOT is_eval AND state <> 'open'",
        [run_id],
    )
    ended: dict[str, list[tuple[int, str]]] = {}
    for group_id, attempt, state in zip(*(table.column(i).to_pylist() for i in range(3)), strict=True):
        ended.setdefault(group_id, []).append((attempt, state))
    return ended
