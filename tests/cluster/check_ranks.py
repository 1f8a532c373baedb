"""A learner of two ranks, each a program under a launcher, trains what one process trains: `make test-cluster`.

The ranks are torchrun's, one node each, as on two hosts. The run is that of rank 0, wherever the scheduler put it, and
starts its servers from there under the same scheduler.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import ray

from cluster.check_books import CONFIG, HERE, STEPS, content
from cluster.slurm_node import slurm_of_one_node
from ports import free_port
from rollbook.app.launch import Supervisor
from rollbook.app.launch_local import LocalLauncher
from rollbook.app.launch_ray import RayLauncher
from rollbook.app.launch_slurm import SlurmLauncher
from rollbook.store import open_book


def trained(launcher: Supervisor, folder: Path, overrides: Sequence[str], *, n_ranks: int) -> Path:
    """The book of a run whose ranks were `n_ranks` programs of the launcher."""
    (folder / "config.yaml").write_text(CONFIG)
    port = free_port()
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={n_ranks}", "--nproc-per-node=1"]
    torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
    torchrun += ["--rdzv-conf=timeout=200", "-m"]  # to connect: the other may start a minute later on a busy machine
    train = ["rollbook.app.cli", "train", str(folder / "config.yaml"), f"cluster.fileroot={folder}"]
    train += [f"actor.backend=fsdp:d{n_ranks}", "actor.device=cpu", "scheduler.host=127.0.0.1", *overrides]
    env = {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1"}
    with launcher:
        ranks = launcher.start(
            [*torchrun, *train], n=n_ranks, env=env, log_path=folder / "rank.log", wait_s=60, is_server=False
        )
        for rank in ranks:
            assert rank.wait(800), rank.logs()
            rank.check()
    return folder / "cluster" / "t" / "book"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The book of one process."""
    folder = tmp_path_factory.mktemp("alone")
    return trained(LocalLauncher(max_restarts=0), folder, ["actor.backend=single"], n_ranks=1)


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Supervisor, list[str]]]:
    """A launcher, and what makes the run use the same scheduler for its servers."""
    with ExitStack() as stack:
        if request.param == "slurm":
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for name, value in stack.enter_context(slurm_of_one_node(tmp_path / "slurm")).items():
                patch.setenv(name, value)
            yield SlurmLauncher(max_restarts=0), ["scheduler.type=slurm"]
        else:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
            stack.callback(ray.shutdown)
            address = ray.get_runtime_context().gcs_address
            yield RayLauncher(max_restarts=0), ["scheduler.type=ray", f"scheduler.address={address}"]


def losses(path: Path) -> list[float]:
    with open_book(path) as book:
        rows = book.sql("select metrics from batches where trained_at is not null order by step")
    return [json.loads(text)["loss"] for text in rows.column(0).to_pylist()]


@pytest.mark.parametrize("cluster", ["slurm", "ray"], indirect=True)
def test_two_ranks_under_a_launcher_train_what_one_process_trains(
    cluster: tuple[Supervisor, list[str]], alone: Path, tmp_path: Path
) -> None:
    launcher, overrides = cluster
    book = trained(launcher, tmp_path, overrides, n_ranks=2)
    one, two = content(alone), content(book)
    assert [row["version"] for row in one["policies"]] == list(range(STEPS + 1))
    assert two == one
    assert losses(book) == pytest.approx(losses(alone), rel=1e-4, abs=1e-6)
