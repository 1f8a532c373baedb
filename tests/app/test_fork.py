"""New samples from the middle of an old episode: what was before is repeated, what follows is today's policy's."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from proxy_serving import BYTES, Served, said, serving
from rollbook.agents.data import Task
from rollbook.agents.runner import Episode, Runner
from rollbook.app.examples import examples_folder
from rollbook.app.fork import Again, NotForked, fork, fork_on, task_of, todays_policy, way_to
from rollbook.app.models import prepare_model
from rollbook.learner.batches import load_rows
from rollbook.learner.config import CreditConfig
from rollbook.proxy.config import ServeConfig
from rollbook.proxy.engine import Generation
from rollbook.proxy.errors import NotFound
from rollbook.store import EpisodeOpened, Event, InteractionRecorded, MemoryLog, PolicyPublished, open_book, prune
from rollbook.store.book import Book
from rollbook.store.selection import Selection

pytestmark = pytest.mark.anyio

CONFIG = ServeConfig(admin_key="admin-key-of-the-tests", run_id="r")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


class Policy:
    """Calls the tool twice and answers by its version and a count, so that no two of its answers are alike."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.n = 0

    def __call__(self, generation: Generation) -> Sequence[int]:
        self.n += 1
        results = BYTES.decode(generation.prompt_ids).count("seen")
        return said(f"v{self.version} call {self.n}. {CALL}" if results < 2 else f"v{self.version} answer {self.n}")


class Looks:
    """Uses its tool until there is an answer, which is worth what its number says."""

    def __init__(self, greeting: str = "begin") -> None:
        self.greeting = greeting

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, **_: Any) -> float:
        messages: list[dict[str, Any]] = [*data["messages"], {"role": "user", "content": self.greeting}]
        async with httpx.AsyncClient(timeout=60, headers={"Authorization": f"Bearer {api_key}"}) as client:
            while True:
                body = {"model": "m", "messages": messages, "tools": [TOOL]}
                answer = await client.post(f"{base_url}/chat/completions", json=body)
                answer.raise_for_status()
                messages.append(answer.json()["choices"][0]["message"])
                calls = messages[-1].get("tool_calls")
                if not calls:
                    return float(str(messages[-1]["content"]).split()[-1])
                messages += [{"role": "tool", "tool_call_id": call["id"], "content": "seen"} for call in calls]


TASK = Task(task_id="t", index=0, row={"messages": [{"role": "system", "content": "Look twice."}]})


@asynccontextmanager
async def recorded() -> AsyncIterator[tuple[MemoryLog, Book, list[str]]]:
    """A log with one episode of three calls by version 0, its book, and their ids."""
    log = MemoryLog(writer="proxy")
    async with serving(Policy(0), log=log, config=CONFIG) as served:
        [episode] = await Runner(served.client, Looks(), run_id="r").run([TASK])
    assert episode.state == "done"
    with Book(log) as book:
        ids = book.sql("select interaction_id from interactions order by depth")["interaction_id"].to_pylist()
        assert len(ids) == 3
        yield log, book, ids


async def forked(served: Served, book: Book, origin: str, agent: Any, n: int = 3) -> list[Episode]:
    task = task_of(book, origin)
    assert task.row == TASK.row
    return await fork_on(served.client, origin, agent, task, run_id="f", group_id="f/g", n=n)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("has_agent", [True, False], ids=["agent", "request"])
async def test_a_fork_repeats_the_record_and_goes_on_with_todays_policy(at: int, has_agent: bool) -> None:
    async with recorded() as (log, book, ids):
        agent = Looks() if has_agent else Again(way_to(book, ids[at]))
        async with serving(Policy(7), log=log, config=CONFIG, version=7) as served:
            episodes = await forked(served, book, ids[at], agent)
        assert [one.state for one in episodes] == ["done"] * 3
        book.catch_up()
        old = book.interaction(ids[0]).row["episode_id"]
        before = book.episode(old).interactions
        for one in episodes:
            new = book.episode(one.episode_id)
            assert new.row["origin_interaction_id"] == ids[at]
            assert (new.row["group_id"], new.row["task_id"], new.row["run_id"]) == ("f/g", "t", "f")
            assert len(new.interactions) == (3 if has_agent else at + 1)
            for i, (was, now) in enumerate(zip(before, new.interactions, strict=False)):
                assert now.row["origin_id"] == (was.interaction_id if i < at else None)
                assert now.row["is_trainable"] == (i >= at)
                assert now.row["edge"] == was.row["edge"]
                if i <= at:
                    assert (now.prompt_ids == was.prompt_ids).all()
                if i < at:
                    assert (now.output_ids == was.output_ids).all()
                    assert (now.logprobs == was.logprobs).all()
                    assert set(now.versions.tolist()) == {0}
                else:
                    assert set(now.versions.tolist()) == {7}
                    assert str(now.reply["content"]).startswith("v7")
            assert new.row["version_min"] == 7
            assert new.row["main_id"] == new.interactions[-1].interaction_id
        answers = {book.episode(one.episode_id).interactions[at].reply["content"] for one in episodes}
        assert len(answers) == 3


async def test_forks_are_a_group_that_trains_on_what_was_sampled_now() -> None:
    async with recorded() as (log, book, ids):
        async with serving(Policy(7), log=log, config=CONFIG, version=7) as served:
            episodes = await forked(served, book, ids[1], Looks())
        book.catch_up()
        assert all(one.reward is not None for one in episodes)
        [group] = book.sql("select n_episodes, n_rewarded, reward_std from groups where run_id = 'f'").to_pylist()
        assert (group["n_episodes"], group["n_rewarded"]) == (3, 3)
        assert group["reward_std"] > 0
        selected = book.select(Selection(run_id="f"))
        assert selected.num_rows == 3 * 2
        rows = load_rows(book, episode_ids=[one.episode_id for one in episodes], credit=CreditConfig(), run_id="f")
        assert len(rows) == 3 * 2
        assert set(rows.versions.tolist()) == {7}
        assert np.isfinite(rows.credits).all()


async def test_an_agent_that_never_comes_to_the_origin_is_stopped() -> None:
    async with recorded() as (log, book, ids):
        async with serving(Policy(7), log=log, config=CONFIG) as served:
            [episode] = await forked(served, book, ids[1], Looks("start"), n=1)
        assert episode.state == "failed"
        book.catch_up()
        [failure] = book.sql("select message from failures").to_pylist()
        assert f"the fork never came to {ids[1]}" in failure["message"]
        assert ">>> start" in failure["message"]
        assert ">>> begin" in failure["message"]


async def test_a_fork_goes_on_after_a_restart_of_the_server() -> None:
    async with recorded() as (log, book, ids):
        way = list(Again(way_to(book, ids[2]))._asked)
        key = "sk-rb-a-key-of-the-fork"

        async def ask(served: Served, messages: list[dict[str, Any]]) -> dict[str, Any]:
            async with httpx.AsyncClient(timeout=60, headers={"Authorization": f"Bearer {key}"}) as client:
                body = way[0].body | {"messages": messages}
                answer = await client.post(f"{served.base_url}/chat/completions", json=body)
            answer.raise_for_status()
            message: dict[str, Any] = answer.json()["choices"][0]["message"]
            return message

        messages = [*way[0].body["messages"]]
        for _ in range(3):
            async with serving(Policy(7), log=log, config=CONFIG, version=7) as served:
                if len(messages) == 2:
                    await served.client.start_session("t", api_key=key, origin_interaction_id=ids[2])
                messages.append(await ask(served, messages))
                calls = messages[-1].get("tool_calls") or ()
                messages += [{"role": "tool", "tool_call_id": call["id"], "content": "seen"} for call in calls]
        book.catch_up()
        rows = book.sql("select origin_id from interactions where origin_id is not null order by depth")
        assert rows["origin_id"].to_pylist() == ids[:2]
        assert messages[-1]["content"].startswith("v7 answer")


@pytest.mark.parametrize("agent", [None, Looks()])
def test_what_was_pruned_cannot_be_forked(tmp_path: Path, agent: Looks | None) -> None:
    with open_book(tmp_path / "book", writer="test") as book:
        tokens = {"prompt_ids": np.zeros(1, np.int32)}
        fact = InteractionRecorded(prompt_length=1)
        book.log.append_blocking(
            Event(run_id="r", episode_id="ep", fact=EpisodeOpened(task_id="t", task={"messages": []})),
            Event(run_id="r", episode_id="ep", interaction_id="call", fact=fact, **tokens),
        )
    prune(tmp_path / "book", interaction_ids=["call"])
    with pytest.raises(NotForked, match="the prompt of call was pruned"):
        fork(tmp_path / "book", "call", agent, serve_args=[])


async def test_what_is_not_in_the_book_cannot_be_forked() -> None:
    async with recorded() as (log, book, ids):
        async with serving(Policy(7), log=log, config=CONFIG) as served:
            with pytest.raises(NotFound, match="no interaction 'nothing' to fork"):
                await served.client.start_session("t", origin_interaction_id="nothing")
        with pytest.raises(NotForked, match="no interaction 'nothing'"):
            way_to(book, "nothing")
        with pytest.raises(NotForked, match="say with --model"):
            todays_policy(book, ids[0])
        with pytest.raises(NotForked, match="at least 1 sample, got 0"):
            fork(Path("book"), ids[0], n=0)


@pytest.mark.slow
def test_the_command_forks_an_episode_of_a_book(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(examples_folder()), *sys.path])}

    def rollbook(*words: str) -> str:
        command = [sys.executable, "-m", "rollbook.app.cli", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    row = {"messages": [{"role": "user", "content": "What is 3 * 10 + 5?"}], "answer": "35"}
    (tmp_path / "test.jsonl").write_text(json.dumps(row) + "\n")
    engine = ["--model", "tiny", "--script", "rollbook.app.demo:calculator"]
    rollbook("eval", "openai_agents_math.MathAgent", "test.jsonl", "--book", "book", *engine)
    told = rollbook("fork", "book", "last", "--n", "2", "--agent", "openai_agents_math.MathAgent", *engine)
    assert "2 of 2 samples" in told
    assert "rewards 1 to 1" in told
    assert "no rewards yet" in rollbook("fork", "book", "last", "--n", "2", *engine)
    with open_book(tmp_path / "book") as book:
        rows = book.sql(
            "select group_id, count(*) as n, min(n_interactions) as calls, count(origin_interaction_id) as origins "
            "from episodes where run_id = 'fork' group by all order by group_id"
        ).to_pylist()
    assert [(row["n"], row["calls"], row["origins"]) for row in rows] == [(2, 3, 2), (2, 3, 2)]
    policy = PolicyPublished(version=3, path=str(prepare_model("tiny")))
    with open_book(tmp_path / "book", writer="test") as book:
        book.log.append_blocking(Event(run_id="eval", fact=policy))
    rollbook("fork", "book", "last", "--n", "1", "--run", "short", *engine[2:], "--set", "gconfig.max_new_tokens=1")
    with open_book(tmp_path / "book") as book:
        short = book.sql("select n_output, version_min from episodes where run_id = 'short'").to_pylist()
    # Two calls are repeated as they were; the third is today's policy's, by the script and with the setting.
    assert [(row["version_min"], row["n_output"]) for row in short] == [(3, 1)], short
