"""The guide's script in our own names: a my_agent.py, a config, PPOTrainer as a context manager."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollbook.app.examples import examples_folder
from rollbook.store import open_book

SCRIPT = """
import sys

from rollbook.agents.data import get_custom_dataset
from rollbook.app.config import GRPOConfig, load_expr_config
from rollbook.app.models import prepare_model
from rollbook.learner import PPOTrainer


def main(args):
    config, _ = load_expr_config(args, GRPOConfig)
    config.actor.path = str(prepare_model(config.actor.path))
    train_dataset = get_custom_dataset(split="train", dataset_config=config.train_dataset)
    with PPOTrainer(config, train_dataset=train_dataset) as trainer:
        trainer.train(workflow="my_agent.MathAgent")


if __name__ == "__main__":
    main(sys.argv[1:])
"""

CONFIG = """
experiment_name: native
trial_name: t
total_train_steps: 1
rollout: {backend: "scripted:rollbook.app.demo:calculator"}
train_dataset: {path: tasks.jsonl, batch_size: 1, shuffle: false}
gconfig: {n_samples: 2}
actor:
  path: tiny
  dtype: float32
"""


@pytest.mark.slow
def test_the_guides_agent_and_script_train_a_step(tmp_path: Path) -> None:
    (tmp_path / "my_agent.py").write_text((examples_folder() / "openai_agents_math.py").read_text())
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "config.yaml").write_text(CONFIG)
    row = '{"messages": [{"role": "user", "content": "What is %d * 4 + 5?"}], "answer": "%d"}\n'
    (tmp_path / "tasks.jsonl").write_text("".join(row % (a, 4 * a + 5) for a in (3, 16)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "train.py", "--config", "config.yaml", f"cluster.fileroot={tmp_path}"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with open_book(tmp_path / "native" / "t" / "book") as book:
        episodes = book.sql("select state, reward, n_interactions from episodes").to_pylist()
        assert episodes == 2 * [{"state": "done", "reward": 1.0, "n_interactions": 3}]
        edges = book.sql("select edge, count(*) n from interactions group by edge order by edge").to_pylist()
        assert edges == [{"edge": "extends", "n": 4}, {"edge": None, "n": 2}]
        dialects = book.sql("select distinct dialect from interactions")["dialect"].to_pylist()
        assert dialects == ["responses"], "the SDK speaks Responses by default"
        assert book.sql("select max(version) v from policies")["v"][0].as_py() == 1


PROGRAM = """
import json, os
from openai import OpenAI

task = json.load(open(os.environ["ROLLBOOK_TASK_FILE"]))
tool = {"type": "function", "function": {"name": "multiply", "parameters": {"type": "object"}}}
with OpenAI() as client:
    reply = client.chat.completions.create(model="m", messages=task["messages"], tools=[tool]).choices[0].message
with open(os.environ["ROLLBOOK_REWARD_FILE"], "w") as file:
    file.write(str(float("<tool_call>" in (reply.content or ""))))
"""


@pytest.mark.slow
def test_a_program_is_trained_without_a_workflow_and_its_replies_are_read_as_the_config_says(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "tasks.jsonl").write_text('{"messages": [{"role": "user", "content": "What is 3 * 4 + 5?"}]}\n')
    command = [sys.executable, "-m", "rollbook.app.cli", "train", "config.yaml", f"cluster.fileroot={tmp_path}"]
    command += ["rollout.agent.mode=command", f"rollout.agent.command=[{sys.executable}, agent.py]"]
    command += ["rollout.agent.tool_call_parser=none"]  # so that calls stay text; by itself the template tells hermes
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with open_book(tmp_path / "native" / "t" / "book") as book:
        episodes = book.sql("select state, reward, n_interactions from episodes").to_pylist()
        assert episodes == 2 * [{"state": "done", "reward": 1.0, "n_interactions": 1}]
        assert book.sql("select max(version) v from policies")["v"][0].as_py() == 1
