"""`make test-examples`: every example by the command of its README, on the real small model, to a trained step.

Each environment runs the examples whose packages it has. SmolLM2-135M hardly ever answers right: what is looked at is
that every call is recorded, episodes end as they should, and the learner steps. And a copy with another tool trains.
"""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from rollbook.store import open_book
from sdk_checks import EXAMPLES, environment

ALL = [
    ("arithmetic.yaml", "arithmetic.ArithmeticAgent", "openai"),
    ("tools.yaml", "openai_agents_math.MathAgent", "openai-agents"),
    ("tools.yaml", "langchain_math.MathAgent", "langchain"),
    ("tools.yaml", "pydantic_ai_math.MathAgent", "pydantic-ai-slim"),
    ("tools.yaml", "smolagents_math.MathAgent", "smolagents"),
    ("tools.yaml", "planner_workers.PlannerAndWorkers", "openai-agents"),
    ("tools.yaml", "camel_math.MathAgent", "camel-ai"),
    ("tools.yaml", "camel_direct.CamelWorkflow", "camel-ai"),
    ("tools.yaml", "claude_math.MathAgent", "claude-agent-sdk"),
]


def is_here(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


HERE = [
    (config, workflow)
    for config, workflow, package in ALL
    if is_here(package) and (package != "openai" or is_here("openai-agents"))
]


def train(folder: Path, config: Path, workflow: str, *words: str) -> tuple[str, list[dict[str, object]]]:
    """What was printed, and the episodes that ended."""
    command = [sys.executable, "-m", "rollbook.app.cli", "train", str(config), f"workflow={workflow}"]
    command += [f"cluster.fileroot={folder}", "total_train_steps=1", "train_dataset.batch_size=1"]
    command += ["gconfig.n_samples=2", "gconfig.max_new_tokens=64", *words]
    there = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    there["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path.startswith(str(EXAMPLES.parent)))
    done = subprocess.run(command, cwd=EXAMPLES.parent, env=there, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (book_path,) = folder.rglob("book")
    with open_book(book_path) as book:
        assert book.sql("select count(*) n from batches where trained_at is not null")["n"].to_pylist() == [1]
        whole = "select count(*) n from interactions where capture <> 'complete'"
        assert book.sql(whole)["n"].to_pylist() == [0]
        return done.stderr, book.sql(
            "select state, reason, reward, n_interactions n from episodes where state in ('done', 'failed')"
        ).to_pylist()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("config", "workflow"), HERE, ids=[workflow for _, workflow in HERE])
def test_an_example_trains_the_real_small_model(config: str, workflow: str, tmp_path: Path) -> None:
    said, episodes = train(tmp_path, EXAMPLES / config, workflow)
    print(f"{workflow}: {said.strip().splitlines()[-1]}; {[(e['state'], e['reward'], e['n']) for e in episodes]}")
    assert any(e["state"] == "done" and e["reward"] is not None for e in episodes), episodes


if is_here("openai-agents"):

    @pytest.mark.timeout(600)
    def test_a_copy_with_another_tool_trains(tmp_path: Path) -> None:
        """What a person does first: copy an example and its config, change the tool, train."""
        text = (EXAMPLES / "openai_agents_math.py").read_text()
        mine = text.replace("multiply", "power").replace("return a * b", "return a**b")
        (tmp_path / "my_agent.py").write_text(mine)
        (tmp_path / "my.yaml").write_text((EXAMPLES / "tools.yaml").read_text())
        train(tmp_path / "runs", tmp_path / "my.yaml", "my_agent.MathAgent")
        with open_book(next((tmp_path / "runs").rglob("book"))) as book:
            (first, *_) = book.sql("select interaction_id i from interactions where parent_id is null")["i"].to_pylist()
            offered = {tool.get("function", tool)["name"] for tool in book.interaction(first).tools}
        assert offered == {"add", "power"}
