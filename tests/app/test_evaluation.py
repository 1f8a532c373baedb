"""How well an agent does: the numbers, and the command on the scripted engine."""

import json
import os
import re
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

from rollbook.app.cli import _print_evaluation
from rollbook.app.evaluation import interval, pass_at_k
from rollbook.app.examples import examples_folder
from rollbook.store import open_book


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [(4, 0, 1, 0), (4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 2, 2, 5 / 6), (4, 3, 2, 1), (4, 4, 4, 1)],
)
def test_pass_at_k_is_the_share_of_draws_with_a_solution(n: int, c: int, k: int, value: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(value)


@pytest.mark.parametrize(
    ("values", "n_episodes", "low", "high"),
    [
        ([0.0, 1.0], 2, 0.054, 0.946),  # one trial has so much variance
        ([1.0] * 10, 80, 0.722, 1.0),  # ten tasks, however often each was tried
        ([0.0, 1.0] * 50, 100, 0.403, 0.597),  # a hundred tasks: as the textbook
        ([0.5] * 4, 16, 0.280, 0.720),  # tasks that agree are known no better than their episodes
        ([0.4, 0.6] * 50, 1600, 0.475, 0.525),
    ],
)
def test_the_interval_is_over_tasks_and_stays_between_0_and_1(
    values: list[float], n_episodes: int, low: float, high: float
) -> None:
    assert interval(values, n_episodes) == pytest.approx((sum(values) / len(values), low, high), abs=2e-3)


def test_the_interval_of_other_rewards_is_the_normal_one() -> None:
    assert interval([-1.0, 3.0]) == pytest.approx((1.0, 1.0 - 1.96 * 2, 1.0 + 1.96 * 2))


def test_an_evaluation_that_is_told_to_end_takes_its_server_along(tmp_path: Path) -> None:
    row = '{"messages": [{"role": "user", "content": "What is 3 * 10 + 5?"}], "answer": "35"}\n'
    (tmp_path / "test.jsonl").write_text(row)
    command = [sys.executable, "-m", "rollbook.app.cli", "eval", "agents_jobs.Endless", "test.jsonl"]
    command += ["--model", "tiny", "--script", "rollbook.app.demo:calculator"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True)
    while process.poll() is None and not (tmp_path / "begun").exists():
        time.sleep(0.02)
    process.terminate()
    assert process.wait(800) == 130
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.mark.slow
def test_the_command_measures_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = '{"messages": [{"role": "user", "content": "What is %d * 10 + 5?"}], "answer": "%d"}\n'
    (tmp_path / "test.jsonl").write_text("".join(row % (a, 10 * a + 5) for a in (3, 9)))
    command = [sys.executable, "-m", "rollbook.app.cli", "eval", "openai_agents_math.MathAgent", "test.jsonl"]
    command += ["--model", "tiny", "--script", "rollbook.app.demo:calculator", "--samples", "2", "--format", "json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(examples_folder()), *sys.path])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    measures = {row["measure"]: row["value"] for row in json.loads(done.stdout)}
    # The scripted model adds to 30 and forgets to add to 90.
    assert measures == {"pass@1": 0.5, "pass@2": 0.5, "mean reward": 0.5}
    with open_book(tmp_path / "runs/eval/book") as book:
        rows = book.sql("select is_eval, state, count(*) n from episodes group by all").to_pylist()
        _print_evaluation(book, Namespace(run="eval", samples=2, solved_at=1.0, format="table"))
        names = book.sql("select task_id, max(reward) best from episodes group by all order by best").to_pylist()
    # The table by task, the worst first: its name, episodes, those with a reward, those solved, the mean.
    printed = [re.findall(r"[\w.-]+", line) for line in capsys.readouterr().out.splitlines()]
    by_task = [words for words in printed if words and words[0] in {row["task_id"] for row in names}]
    assert [words[0] for words in by_task] == [row["task_id"] for row in names]
    assert [[float(word) for word in words[1:]] for words in by_task] == [[2, 2, 0, 0], [2, 2, 2, 1]]
    assert rows == [{"is_eval": True, "state": "done", "n": 4}]


AGENT = """
import asyncio, json, urllib.request

class Mine:  # without an SDK, whose import alone may take its time on a busy machine
    def __init__(self, value):
        self.value = value

    async def run(self, data, *, base_url, api_key, **_):
        body = {"model": "default", "messages": [{"role": "user", "content": "What is 3 * 10 + 5?"}]}
        headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
        request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).close()
        await asyncio.sleep(3600 if data["answer"] == "late" else 0)
        return self.value
"""


@pytest.mark.slow
def test_the_agent_is_run_as_a_training_run_would(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(AGENT)
    (tmp_path / "test.jsonl").write_text("".join(f'{{"answer": "{a}"}}\n' for a in ("now", "late")))
    command = [sys.executable, "-m", "rollbook.app.cli", "eval", "mine.Mine", "test.jsonl", "--model", "tiny"]
    command += ["--script", "rollbook.app.demo:calculator", "--mode", "subproc", "--workers", "2"]
    command += ["--arg", "value=0.25", "--time-limit", "15"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with open_book(tmp_path / "runs/eval/book") as book:
        rows = book.sql("select state, reward, reason from episodes order by state").to_pylist()
    assert [(row["state"], row["reward"]) for row in rows] == [("done", 0.25), ("failed", None)]
    assert "15 s" in rows[1]["reason"]
