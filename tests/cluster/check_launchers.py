"""The launchers' contract under a real Slurm and a real Ray on this machine: `make test-cluster`."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from app.launcher_contract import PROGRAM, LauncherContract, command, is_alive, pids, until
from cluster.slurm_node import slurm_of_one_node
from rollbook.app.launch import LaunchFailed, Resources, Supervisor
from rollbook.app.launch_ray import RayLauncher
from rollbook.app.launch_slurm import SlurmLauncher, slurm


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, slurm_of_one_node(tmp_path_factory.mktemp("slurm")) as environment:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        for name, value in environment.items():
            patch.setenv(name, value)
        yield


def killed_parent(importing: str, arguments: str, folder: Path) -> None:
    """A process launches a program and is killed; the program is gone soon after."""
    (folder / "parent.py").write_text(f"""
import sys, time
from pathlib import Path
{importing}
[program] = Launcher({arguments}).start([sys.executable, {PROGRAM!r}, "serves"], log_path=Path("log"))
Path("child").write_text(program.url.rsplit(":", 1)[1])
time.sleep(600)
""")
    parent = subprocess.Popen([sys.executable, "parent.py"], cwd=folder)
    until((folder / "child").exists)
    child = int((folder / "child").read_text())
    assert is_alive(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not is_alive(child))


class TestSlurm(LauncherContract):
    def make(self, *, max_restarts: int = 2) -> Supervisor:
        return SlurmLauncher(max_restarts=max_restarts)

    def test_replicas_are_one_array_and_options_are_passed_through(self, tmp_path: Path) -> None:
        options, steps = ["--partition=spare", "--comment=from-the-config"], ["--label"]
        with SlurmLauncher(options=options, step_options=steps) as launcher:
            launcher.start(command("serves"), log_path=tmp_path / "log", n=2, resources=Resources(cpus=1))
            listed = slurm("squeue", "--me", "--array", "--noheader", "--format=%F %K %P %k").split("\n")
        jobs = {tuple(line.split()) for line in listed if "spare" in line}
        assert len({job[0] for job in jobs}) == 1
        assert {job[1:] for job in jobs} == {("0", "spare", "from-the-config"), ("1", "spare", "from-the-config")}

    def test_a_job_that_slurm_ends_is_started_again(self, tmp_path: Path) -> None:
        with self.make() as launcher:
            [program] = launcher.start(command("serves"), log_path=tmp_path / "log")
            n, first = program.n_starts, pids(program)
            [job] = slurm("squeue", "--me", "--noheader", "--format=%F", "--states=running").split()
            slurm("scancel", job)
            until(lambda: program.n_starts > n and program.is_up)
            assert not is_alive(first[0])

    def test_a_job_that_waits_long_is_told_with_slurms_reason(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        def end_it_when_told() -> None:
            until(lambda: "waits in Slurm's queue (BeginTime)" in caplog.text, 50)
            slurm("scancel", "--me")

        ending = threading.Thread(target=end_it_when_told)
        with SlurmLauncher(options=["--begin=now+1hour"]) as launcher:
            ending.start()
            with pytest.raises(LaunchFailed):
                launcher.start(command("serves"), log_path=tmp_path / "log")
            ending.join()
        assert "BeginTime" in caplog.text

    def test_what_slurm_refuses_is_an_error_in_its_words(self, tmp_path: Path) -> None:
        with (
            SlurmLauncher(options=["--partition=nowhere"]) as launcher,
            pytest.raises(LaunchFailed, match="invalid partition"),
        ):
            launcher.start(command("serves"), log_path=tmp_path / "log")

    def test_no_program_outlives_a_launcher_that_is_killed(self, tmp_path: Path) -> None:
        killed_parent("from rollbook.app.launch_slurm import SlurmLauncher as Launcher", "lease_s=3", tmp_path)
        until(lambda: not slurm("squeue", "--me", "--noheader", "--states=running").strip())


def test_more_than_this_machine_has_room_for_is_an_error_at_once(tmp_path: Path) -> None:
    n = len(os.sched_getaffinity(0)) + 1
    with RayLauncher() as launcher, pytest.raises(LaunchFailed, match=f"room for {n - 1} programs .* {n} were asked"):
        launcher.start(command("serves"), log_path=tmp_path / "log", n=n)


N_CPUS = 8


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """The cluster that the launchers use."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init("local", num_cpus=N_CPUS, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_no_ray_is_is_an_error_at_once(scheme: str) -> None:
    began = time.monotonic()
    with pytest.raises(LaunchFailed, match=f"no Ray cluster answers at {scheme}127.0.0.1:1:"):
        RayLauncher(address=f"{scheme}127.0.0.1:1")
    assert time.monotonic() - began < 100


@pytest.mark.usefixtures("ray_here")
class TestRay(LauncherContract):
    def make(self, *, max_restarts: int = 2) -> Supervisor:
        return RayLauncher(max_restarts=max_restarts)

    def test_what_no_node_has_is_an_error_at_once(self, launcher: Supervisor, tmp_path: Path) -> None:
        with pytest.raises(LaunchFailed, match="no node of the Ray cluster has"):
            launcher.start(command("serves"), log_path=tmp_path / "log", resources=Resources(cpus=4096))

    def test_programs_that_wait_for_room_say_so_and_begin_when_there_is_some(
        self, launcher: Supervisor, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        others = placement_group([{"CPU": N_CPUS}])
        ray.get(others.ready())

        def make_room_when_told() -> None:
            until(lambda: "waits in Ray's queue for 1 x {'CPU': 1}" in caplog.text)
            remove_placement_group(others)

        making = threading.Thread(target=make_room_when_told)
        making.start()
        [program] = launcher.start(command("serves"), log_path=tmp_path / "log")
        making.join()
        assert program.is_up

    def test_a_running_cluster_is_used_by_its_address_and_nothing_outlives_a_killed_driver(
        self, tmp_path: Path
    ) -> None:
        address = ray.get_runtime_context().gcs_address
        importing = "from rollbook.app.launch_ray import RayLauncher as Launcher"
        killed_parent(importing, f"address={address!r}", tmp_path)
