"""The same config under local, a real Slurm and Ray: the same rewards and the same books, up to ids and times."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.slurm_node import slurm_of_one_node
from rollbook.store import open_book
from rollbook.store.verify import verify

HERE = Path(__file__).parent
STEPS = 3

CONFIG = f"""
experiment_name: cluster
trial_name: t
total_train_steps: {STEPS}
total_train_epochs: 1
workflow: scripted_agent.Agent
rollout: {{backend: "scripted:scripted_agent:script", max_head_offpolicyness: 0}}
scheduler: {{proxies: 2}}
train_dataset: {{path: "scripted_agent:rows", batch_size: 2}}
gconfig: {{n_samples: 3, max_new_tokens: 8}}
actor:
  path: tiny
  dtype: float32
  optimizer: {{lr: 1e-3}}
"""


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """One run of the config under each scheduler."""
    found = {}
    with slurm_of_one_node(tmp_path_factory.mktemp("slurm")) as slurm:
        for scheduler in ("local", "slurm", "ray"):
            folder = tmp_path_factory.mktemp(scheduler)
            (folder / "config.yaml").write_text(CONFIG)
            environment = {
                **os.environ,
                **slurm,
                "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
                "OMP_NUM_THREADS": "1",
            }
            overrides = [f"cluster.fileroot={folder}", f"scheduler.type={scheduler}", "scheduler.host=127.0.0.1"]
            done = subprocess.run(
                [sys.executable, "-m", "rollbook.app.cli", "train", "config.yaml", *overrides],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=800,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            found[scheduler] = folder / "cluster" / "t" / "book"
        yield found


def content(path: Path) -> dict[str, Any]:
    """What a book says, without ids and times: what was said and sampled, by task; rewards; batches; policies."""
    with open_book(path) as book:
        rows = book.sql("""
            select i.interaction_id, e.task_id, e.attempt, e.state, e.reward, e.version, i.depth, i.edge, i.n_prompt,
              i.n_shared, i.n_output, i.finish_reason, i.version_min, i.version_max
            from episodes e left join interactions i using (episode_id) where e.state = 'done'
        """).to_pylist()
        tokens = book.load([row["interaction_id"] for row in rows])
        ends = tokens.cu_seqlens.tolist()
        said = {
            row_id: [tokens.input_ids[a:b].tolist(), tokens.logprobs[a:b].tolist(), tokens.versions[a:b].tolist()]
            for row_id, a, b in zip(tokens.row_ids, ends[:-1], ends[1:], strict=True)
        }
        episodes = Counter(json.dumps([said[row.pop("interaction_id")], row]) for row in rows)
        batches = book.sql("""
            select b.step, b.version, e.task_id, i.depth, e.reward, round(r.credit, 6) as credit,
              round(r.advantage, 5) as advantage, r.weight
            from batches b join batch_rows r using (batch_id) join interactions i using (interaction_id)
              join episodes e using (episode_id) where b.trained_at is not null order by all
        """).to_pylist()
        policies = book.sql("select version, step from policies order by version").to_pylist()
        writers = book.sql("select distinct writer from events where kind = 'InteractionRecorded' order by 1")
    return {
        "episodes": episodes,
        "batches": batches,
        "policies": policies,
        "writers": writers.column(0).to_pylist(),
    }


def test_local_slurm_and_ray_make_the_same_book(books: dict[str, Path]) -> None:
    local, slurm, ray = (content(books[scheduler]) for scheduler in ("local", "slurm", "ray"))
    assert [row["version"] for row in local["policies"]] == list(range(STEPS + 1))
    assert sum(local["episodes"].values()) == STEPS * 2 * 3 * 2  # groups, samples, turns
    assert local["writers"] == ["proxy-1", "proxy-2"], "both proxies had work"
    assert len({row["reward"] for row in local["batches"]}) == 3
    assert slurm == local
    assert ray == local
    assert all(verify(path).is_whole for path in books.values())
