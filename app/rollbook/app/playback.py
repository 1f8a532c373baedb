"""`rollbook replay`: an agent runs again on the record of an episode, with no engine.

For agents, parsers and reward code: the recorded model calls answer, the agent's own code runs, and what it does is
compared. The replayed calls go to a log in memory, so the book is only read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import anyio

from rollbook.agents.data import Task
from rollbook.agents.runner import Runner
from rollbook.proxy.client import ProxyClient
from rollbook.proxy.config import ServeConfig
from rollbook.proxy.replay import Recorded, ReplayEngine, recorded
from rollbook.proxy.server import Service, serve
from rollbook.proxy.tokenizer import Tokenizer
from rollbook.store import Book, MemoryLog
from rollbook.store.episodes import Episode

RUN = "replay"


@dataclass(frozen=True)
class Playback:
    """How an episode went the second time. `divergence` shows both requests where the agent asked something else."""

    episode: Episode  # as recorded
    again: Episode  # as replayed
    divergence: str | None
    n_unasked: int  # recorded calls that the agent did not make this time

    @property
    def is_same(self) -> bool:
        """Whether every call was made again and every reply was the same."""
        said = [one.reply.get("content") for one in self.episode.interactions]
        return (
            self.divergence is None
            and self.n_unasked == 0
            and said == [one.reply.get("content") for one in self.again.interactions]
        )

    @property
    def failure(self) -> str | None:
        """What the agent failed with this time, where it had not when it was recorded."""
        failed_now, failed_then = (one.row["state"] == "failed" for one in (self.again, self.episode))
        reason: str = self.again.row["reason"]
        return reason if failed_now and not failed_then else None


def record_of(episode: Episode) -> list[Recorded]:
    """What a replay engine answers with."""
    return [recorded(one) for one in episode.interactions]


def replay(
    book: Book,
    episode_id: str,
    workflow: Any,
    *,
    tokenizer: str,
    row: Mapping[str, Any] | None = None,
    workflow_kwargs: Mapping[str, Any] | None = None,
) -> Playback:
    """Run `workflow` on the task of a recorded episode, answered from the record.

    tokenizer: the model folder that the episode was recorded with. row: the task's dataset row; None: the one in the
    book. Raises KeyError for an unknown episode, ValueError where the book kept no row.
    """
    episode = book.episode(episode_id)
    if row is None:
        if not episode.row.get("task"):
            raise ValueError(f"the book kept no dataset row of {episode_id}; pass it as row=...")
        row = json.loads(episode.row["task"])
    spelled = Tokenizer.load(tokenizer)
    engine = ReplayEngine(record_of(episode), decode=spelled.decode)
    log = MemoryLog()

    async def run() -> None:
        service = Service(log=log, engine=engine, tokenizer=spelled, config=ServeConfig(run_id=RUN))
        async with serve(service) as url, ProxyClient(url, service.admin_key) as client:
            runner = Runner(client, workflow, run_id=RUN, workflow_kwargs=workflow_kwargs)
            await runner.run([Task(task_id=episode.row.get("task_id") or "replay", index=0, row=row)])

    anyio.run(run)
    with Book(log) as again:
        (name,) = again.sql("select episode_id from episodes")["episode_id"].to_pylist()
        return Playback(episode, again.episode(name), engine.divergence, engine.n_left)
