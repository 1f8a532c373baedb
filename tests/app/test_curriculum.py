"""A curriculum is a query over the book: what was too easy or too hard is not drawn again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollbook.app.config import GRPOConfig
from rollbook.learner import PPOTrainer
from rollbook.learner.errors import BadSetting
from rollbook.store import open_book

AGENT = """
from openai import AsyncOpenAI


class Agent:
    # Task "hard" is never right, "easy" always, "fair" every other time.
    def __init__(self):
        self.n = 0

    async def run(self, data, base_url, api_key):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            await client.chat.completions.create(model="m", messages=data["messages"])
        self.n += data["id"] == "fair"
        return {"hard": 0.0, "easy": 1.0, "fair": self.n % 2}[data["id"]]
"""

CONFIG = """
experiment_name: curriculum
trial_name: t
total_train_steps: 2
workflow: agent.Agent
rollout: {backend: "scripted:rollbook.app.demo:calculator"}
gconfig: {n_samples: 2, max_new_tokens: 16}
actor: {path: tiny, dtype: float32}
train_dataset:
  path: tasks.jsonl
  batch_size: 3
  curriculum: select task_id, cast(avg(reward_mean) between .2 and .8 as int) from groups group by task_id
"""


@pytest.mark.slow
def test_only_tasks_that_are_neither_too_easy_nor_too_hard_are_drawn_again(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "config.yaml").write_text(CONFIG)
    row = '{"id": "%s", "messages": [{"role": "user", "content": "What is 3 * 4 + 5?"}]}\n'
    (tmp_path / "tasks.jsonl").write_text("".join(row % name for name in ("hard", "fair", "easy")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "rollbook.app.cli", "train", "config.yaml", f"cluster.fileroot={tmp_path}"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with open_book(tmp_path / "curriculum" / "t" / "book") as book:
        drawn = book.sql(
            "select task_id, count(distinct group_id) n from batch_rows join interactions using (interaction_id) "
            "join episodes using (episode_id) group by task_id order by task_id"
        ).to_pylist()
    assert drawn == [{"task_id": "easy", "n": 1}, {"task_id": "fair", "n": 4}, {"task_id": "hard", "n": 1}]


def test_a_curriculum_needs_a_number_of_steps() -> None:
    config = GRPOConfig()
    config.train_dataset.curriculum = "select 1, 2"
    with pytest.raises(BadSetting, match="set total_train_steps"):
        PPOTrainer(config, [{"messages": []}])
