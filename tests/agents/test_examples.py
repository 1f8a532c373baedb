"""Every example runs as it stands, against the real server and a scripted model."""

import re

import pytest

from rollbook.agents.data import get_custom_dataset
from sdk_checks import EXAMPLES, run_example


@pytest.mark.parametrize(
    ("name", "script", "dialect"),
    [
        ("openai_agents_math", "calculator", "responses"),
        ("langchain_math", "calculator", "chat"),
        ("pydantic_ai_math", "calculator", "chat"),
        ("smolagents_math", "finishing", "chat"),
    ],
)
def test_an_agent_with_tools_is_recorded_call_by_call_and_rewarded(name, script, dialect):
    result = run_example(f"{name}.MathAgent", script)
    assert result["episodes"] == [["done", None, 1.0, 3]] * 2
    assert result["n_recorded"] == 6
    assert result["is_whole"]
    assert result["dialects"] == [dialect]
    if name != "smolagents_math":  # it rewrites its history as text
        assert sorted(map(str, result["edges"])) == ["None"] * 2 + ["extends"] * 4


def test_the_seeds_agent_runs_on_an_event_loop_outside_the_main_thread():
    assert (
        run_example("openai_agents_math.MathAgent", "calculator", "thread")["episodes"] == [["done", None, 1.0, 3]] * 2
    )


@pytest.mark.parametrize(
    ("workflow", "script", "reward"),
    [
        ("openai_agents_math.MathAgent", "calculator", 1.0),
        ("langchain_math.MathAgent", "calculator", 1.0),
        ("pydantic_ai_math.MathAgent", "calculator", 1.0),
    ],
)
def test_the_same_agent_is_deployed_with_only_its_vendors_variables(workflow, script, reward):
    assert run_example(workflow, script, "vendor")["returned"] == reward


def test_planner_and_workers_are_recorded_and_rewarded_by_role():
    result = run_example("planner_workers.PlannerAndWorkers", "planning")
    assert result["episodes"] == [["done", None, 3.0, 4]] * 2
    assert result["rewards"] == [["planner", 1.0]] * 4 + [["worker", 0.0]] * 2 + [["worker", 1.0]] * 2


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
