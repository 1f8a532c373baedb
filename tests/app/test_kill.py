"""kill -9 of a whole training run, and the same command again."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.launcher_contract import command_lines, until
from rollbook.store import open_book
from rollbook.store.verify import verify

HERE = Path(__file__).parent
STEPS = 6
SAMPLES = 3

CONFIG = f"""
experiment_name: kill
trial_name: t
total_train_steps: {STEPS}
total_train_epochs: 10
workflow: killed_agent.Agent
rollout: {{backend: "scripted:killed_agent:script", max_head_offpolicyness: 1}}
train_dataset: {{path: "killed_agent:rows", batch_size: 2}}
gconfig: {{n_samples: {SAMPLES}, max_new_tokens: 8}}
recover: {{freq_steps: 2}}
actor:
  path: tiny
  dtype: float32
  optimizer: {{lr: 1e-3}}
"""


def start(folder: Path, most: int = 1000) -> subprocess.Popen[bytes]:
    """A run that does not go on after `most` acknowledged calls."""
    environment = {
        **os.environ,
        "MOST": str(most),
        "ACKNOWLEDGED": str(folder / "acknowledged"),
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "rollbook.app.cli", "train", "config.yaml", f"cluster.fileroot={folder}"]
    return subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True)


def in_state(book_path: Path, state: str) -> set[str]:
    with open_book(book_path) as book:
        return set(book.sql("select episode_id from episodes where state = ?", [state])["episode_id"].to_pylist())


def test_a_run_that_is_told_to_end_takes_its_servers_along(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    acknowledged = tmp_path / "acknowledged"
    acknowledged.touch()
    process = start(tmp_path)
    while process.poll() is None and not acknowledged.read_text():
        time.sleep(0.02)
    process.terminate()
    assert process.wait(800) == 130
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nobody is left of its session
    assert verify(tmp_path / "kill" / "t" / "book").is_whole


@pytest.mark.slow
def test_killed_runs_lose_nothing_redo_nothing_and_finish(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    acknowledged = tmp_path / "acknowledged"
    acknowledged.touch()
    generator = random.Random(5)
    left_open: set[str] = set()
    for n, wanted in enumerate((5, 25, 45)):
        process = start(tmp_path, most=wanted + 20)
        while process.poll() is None and len(acknowledged.read_text().splitlines()) < wanted:
            time.sleep(0.01)
        time.sleep(generator.random())
        assert process.poll() is None
        process.kill() if n % 2 else os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        until(lambda: not any(str(tmp_path) in line for line in command_lines()))  # nobody writes any more
        left_open |= in_state(tmp_path / "kill" / "t" / "book", "open")
    last = start(tmp_path)
    assert last.wait(800) == 0

    book_path = tmp_path / "kill" / "t" / "book"
    with open_book(book_path) as book:
        known = set(book.sql("select interaction_id from interactions")["interaction_id"].to_pylist())
        assert set(acknowledged.read_text().split()) <= known
        steps = book.sql("select step from batches where trained_at is not null order by step")["step"].to_pylist()
        assert steps == list(range(STEPS))
        assert book.sql("select max(version) v from policies")["v"][0].as_py() == STEPS
        twice = book.sql("select interaction_id from batch_rows group by 1 having count(*) > 1")
        assert twice.num_rows == 0
        groups = book.sql(
            "select group_id, count(*) n from episodes where state = 'done' group by group_id having n > ?", [SAMPLES]
        )
        assert groups.num_rows == 0, "a finished episode was drawn again"
        states = set(book.sql("select distinct state from episodes")["state"].to_pylist())
        assert states <= {"done", "lost", "abandoned"}  # lost by a kill; abandoned when the run was over
    assert in_state(book_path, "lost") == left_open, "what a kill leaves open is what the next start calls lost"
    assert verify(book_path).is_whole
