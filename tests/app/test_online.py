"""Online runs: a person's chat application is the agent, over `rollbook train` from start to trained steps."""

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from rollbook.app.config import GRPOConfig
from rollbook.learner import PPOTrainer
from rollbook.learner.errors import BadSetting
from rollbook.store import open_book

CONFIG = """
experiment_name: chat
trial_name: t
algorithm: reinforce
total_train_steps: 2
train_dataset: {batch_size: 2}
gconfig: {n_samples: 1, max_new_tokens: 32}
rollout: {backend: "scripted:rollbook.app.demo:calculator", max_head_offpolicyness: 1, agent: {mode: online}}
actor: {path: tiny, dtype: float32}
"""


def train(folder: Path, *words: str) -> "subprocess.Popen[str]":
    (folder / "config.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "rollbook.app.cli", "train", "config.yaml", f"cluster.fileroot={folder}", *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def online(folder: Path, trainer: "subprocess.Popen[str]", after: float = 0.0) -> dict[str, Any]:
    """What the run says of itself, once it is there and newer than `after`."""
    path = folder / "chat" / "t" / "online.json"
    while True:
        if path.is_file() and path.stat().st_mtime > after:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            said: dict[str, Any] = json.loads(path.read_text())
            return said
        assert trainer.poll() is None, trainer.communicate()[0]
        time.sleep(0.01)


class Application:
    """A chat application: it has a key and an address, and says when a conversation is over."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.said = said
        self.openai = OpenAI(base_url=said["base_url"], api_key=said["api_key"], max_retries=4)
        self.messages: list[Any] = []
        self.http = httpx.Client(timeout=60, base_url=said["base_url"], trust_env=False)

    def __enter__(self) -> "Application":
        return self

    def __exit__(self, *_: object) -> None:
        self.openai.close()
        self.http.close()

    def post(self, path: str, key: str, **body: Any) -> dict[str, Any]:
        answer = self.http.post(path, json=body, headers={"authorization": f"Bearer {key}"})
        assert answer.is_success, answer.text
        said: dict[str, Any] = answer.json()
        return said

    def talk(self, question: str, reward: float, *, goes_on: bool = False) -> None:
        """A call and what somebody thought of the answer."""
        self.messages = [*(self.messages if goes_on else []), {"role": "user", "content": question}]
        answer = self.openai.chat.completions.create(model="any", messages=self.messages)
        self.messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        self.post("/rl/set_reward", self.said["api_key"], reward=reward)


@pytest.mark.slow
def test_an_application_trains_the_policy_that_answers_it_over_a_kill(tmp_path: Path) -> None:
    first = train(tmp_path)
    with Application(online(tmp_path, first)) as app:
        key, admin = app.said["api_key"], app.said["admin_key"]
        for i in range(2):  # it ends its conversations itself
            app.talk(f"What is 3 * {i} + 5?", float(i))
            app.post("/rl/end_session", key)
        with open_book(tmp_path / "chat" / "t" / "book") as book:
            trained = "select count(*) n from batches where trained_at is not null"
            while book.sql(trained)["n"].to_pylist() != [1]:
                book.catch_up()
                assert first.poll() is None, first.communicate()[0]
                time.sleep(0.01)
        app.talk("What is 3 * 7 + 5?", 1.0)  # and is in the middle of one when the trainer is killed
        first.kill()
        first.communicate()
        second = train(tmp_path)
        said = online(tmp_path, second, after=(tmp_path / "chat/t/online.json").stat().st_mtime)
        assert said == app.said, "the application goes on with the address and key that it has"
        app.talk("And times two?", 0.5, goes_on=True)
        # AReaL's way: starting the next session on the same key ends the one before.
        app.post("/rl/start_session", admin, task_id="next", api_key=key)
        app.talk("What is 3 * 8 + 5?", 0.0)
        app.post("/rl/start_session", admin, task_id="after", api_key=key)
        output = second.communicate()[0]
    assert second.returncode == 0, output
    assert f"OPENAI_BASE_URL={said['base_url']}" in output
    with open_book(tmp_path / "chat" / "t" / "book") as book:
        batches = book.sql("select n_rows, trained_at is not null t from batches order by step").to_pylist()
        assert batches == [{"n_rows": 2, "t": True}, {"n_rows": 3, "t": True}]
        episodes = book.sql(
            "select reward, n_interactions n from episodes where state = 'done' and n_interactions > 0 "
            "order by opened_at"
        ).to_pylist()
        assert episodes == [{"reward": r, "n": n} for r, n in ((0.0, 1), (1.0, 1), (1.5, 2), (0.0, 1))]
        assert app.said["api_key"] not in str(book.sql("select config from runs").to_pylist())


def test_an_online_run_says_what_it_needs() -> None:
    config = GRPOConfig()
    config.rollout.agent.mode = "online"
    with pytest.raises(BadSetting, match="set total_train_steps"):
        PPOTrainer(config)
    config.total_train_steps = 1
    config.gconfig = type(config.gconfig)(n_samples=4)
    with pytest.raises(BadSetting, match="n_samples is 4"):
        PPOTrainer(config)
