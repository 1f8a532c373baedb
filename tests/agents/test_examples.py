"""Every example runs as it stands, against the real server and a scripted model."""

import gc
import re
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from agents_scripts import calculator, call, text_of
from proxy_serving import said, serving
from rollbook.agents.data import get_custom_dataset, tasks_of
from rollbook.agents.runner import Runner
from rollbook.agents.threads import in_thread_loop

pytestmark = pytest.mark.anyio
EXAMPLES = Path(__file__).parents[2] / "examples"
TASKS = tasks_of([{"messages": [{"role": "user", "content": "What is 3 * 4 + 5?"}], "answer": "17"}])


@pytest.fixture(autouse=True)
def examples_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")


@asynccontextmanager
async def served_by(script):
    """A server; clients that an agent never closed are closed before its loop goes."""
    async with serving(script) as served:
        yield served
        gc.collect()
        await anyio.sleep(0.05)


def finishing(generation):
    """What smolagents asks for: every turn is a tool call, the last one to final_answer."""
    n = len(re.findall("Observation:|Tool calls response|tool-response", text_of(generation)))
    return said([call("multiply", a=3, b=4), call("add", a=12, b=5), call("final_answer", answer="17")][min(n, 2)])


def planning(generation):
    """A planner's and its workers' side of a conversation."""
    text = text_of(generation)
    if "What is the answer?" in text:
        return said("17")
    if "Split the question" in text:
        return said("- 3 * 4\n- 12 + 5")
    return said("12" if "3 * 4" in text.rsplit("<|im_start|>user", 1)[1] else "18")


@pytest.mark.parametrize(
    ("workflow", "script", "n_calls"),
    [
        ("openai_agents_math.MathAgent", calculator, 3),
        ("langchain_math.MathAgent", calculator, 3),
        ("pydantic_ai_math.MathAgent", calculator, 3),
        ("smolagents_math.MathAgent", finishing, 3),
    ],
)
async def test_an_agent_with_tools_is_recorded_call_by_call_and_rewarded(workflow, script, n_calls):
    async with served_by(script) as served:
        episodes = await Runner(served.client, workflow, run_id="run", n_samples=2, time_limit_s=50).run(TASKS)
        assert [(e.state, e.reason, e.reward, e.n_interactions) for e in episodes] == [("done", None, 1.0, n_calls)] * 2
        recorded = served.events("InteractionRecorded")
        assert len({e.interaction_id for e in recorded}) == 2 * n_calls
        assert all(len(e.output_ids) == len(e.logprobs) for e in recorded)


async def test_the_seeds_agent_runs_on_an_event_loop_outside_the_main_thread():
    async with served_by(calculator) as served:
        runner = Runner(served.client, "openai_agents_math.MathAgent", run_id="run")
        session = await served.client.start_session("t")
        data = TASKS[0].row
        call_ = runner.workflow._call
        reward = await in_thread_loop(
            lambda: call_(data, base_url=served.client.base_url, api_key=session.api_key), name="agent"
        )
        assert reward == 1.0


async def test_planner_and_workers_are_recorded_and_rewarded_by_role():
    async with served_by(planning) as served:
        (episode,) = await Runner(served.client, "planner_workers.PlannerAndWorkers", run_id="run").run(TASKS)
        assert (episode.state, episode.reason, episode.n_interactions) == ("done", None, 4)
        roles = {e.interaction_id: e.fact.role for e in served.events("InteractionRecorded")}
        assert sorted(roles.values()) == ["planner", "planner", "worker", "worker"]
        rewards = sorted((roles[e.interaction_id], e.fact.value) for e in served.events("RewardGiven"))
        assert rewards == [("planner", 1.0), ("planner", 1.0), ("worker", 0.0), ("worker", 1.0)]


def test_every_example_is_short_and_says_how_to_run_it():
    for path in sorted(EXAMPLES.glob("*.py")):
        text = path.read_text()
        assert len(text.splitlines()) < 80, path
        assert "rollbook " in text.split('"""')[1], f"{path} does not say its command"


def test_the_examples_rows_can_be_read():
    rows = get_custom_dataset("train", path=str(EXAMPLES / "tools.jsonl"))
    assert len(rows) == 40
    for row in rows:
        a, b, c = map(int, re.findall(r"\d+", row["messages"][0]["content"]))
        assert row["answer"] == str(a * b + c)
