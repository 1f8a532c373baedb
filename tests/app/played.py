"""Records an episode of an agent on a scripted model and plays it again: `python played.py WORKFLOW`.

A program of its own, since the guide's agent leaves its HTTP client to the garbage collector.
"""

import json
import sys
from typing import Any

import anyio

from proxy_serving import BYTES, serving
from rollbook.agents.data import tasks_of
from rollbook.agents.runner import Runner
from rollbook.app import demo
from rollbook.app.examples import examples_folder, make_importable
from rollbook.app.playback import replay
from rollbook.proxy.config import ServeConfig
from rollbook.store import Book


def record(workflow: Any) -> tuple[Book, str]:
    """A book with one episode of a workflow, and its id."""
    books: list[Book] = []

    async def run() -> None:
        config = ServeConfig(admin_key="admin-key-of-the-tests", run_id="r")
        async with serving(demo.calculator(BYTES), config=config) as served:
            await Runner(served.client, workflow, run_id="r").run(tasks_of(demo.sums(1, seed=1)))
            books.append(Book(served.log))

    anyio.run(run)
    (name,) = books[0].sql("select episode_id from episodes")["episode_id"].to_pylist()
    return books[0], name


def main(workflow: str) -> None:
    make_importable(examples_folder())
    played = replay(*record(workflow), workflow, tokenizer="bytes")
    said = [
        [
            [one.reply, one.prompt_ids.tolist(), one.output_ids.tolist(), one.logprobs.tolist(), one.versions.tolist()]
            for one in episode.interactions
        ]
        for episode in (played.episode, played.again)
    ]
    rewards = [played.episode.row["reward"], played.again.row["reward"]]
    print(json.dumps({"same": played.is_same, "divergence": played.divergence, "said": said, "rewards": rewards}))


if __name__ == "__main__":
    main(sys.argv[1])
