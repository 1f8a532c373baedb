"""Programs on this machine: the launchers' contract, and that nothing outlives a killed parent."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.launcher_contract import PROGRAM, LauncherContract, command, command_lines, is_alive, pids, until
from rollbook.app.keeper import read, write
from rollbook.app.launch import Job, LaunchFailed, Supervisor, Ticket
from rollbook.app.launch_local import LocalLauncher


class TestLocal(LauncherContract):
    def make(self, *, max_restarts: int = 2) -> Supervisor:
        return LocalLauncher(max_restarts=max_restarts)


class Refusing(LocalLauncher):
    """A scheduler that refuses the next `n` submissions."""

    n = 0

    def submit(self, jobs: Sequence[Job]) -> Sequence[Ticket]:
        if self.n:
            self.n -= 1
            raise LaunchFailed("the scheduler is away")
        return super().submit(jobs)


def test_a_scheduler_that_is_away_at_a_restart_is_asked_again(tmp_path: Path) -> None:
    with Refusing(max_restarts=3) as launcher:
        [program] = launcher.start(command("serves"), log_path=tmp_path / "log")
        launcher.n = 1
        os.kill(pids(program)[0], signal.SIGKILL)
        until(lambda: program.n_starts == 3 and program.is_up)
        program.check()
        launcher.n = 1
        os.kill(pids(program)[0], signal.SIGKILL)
        assert program.wait(600)
        with pytest.raises(LaunchFailed, match="the scheduler is away, and is not started again after 3 restarts"):
            program.check()


def test_a_sign_of_life_needs_no_room_on_the_disk(tmp_path: Path) -> None:
    with LocalLauncher() as launcher:
        launcher.start(command("serves"), log_path=tmp_path / "log")
        [beat] = tmp_path.glob("programs/*/*/*/beat")
        before, inode = read(beat), beat.stat().st_ino
        until(lambda: read(beat) != before)
        assert beat.stat().st_ino == inode


def test_a_file_that_several_replace_at_once_is_always_whole(tmp_path: Path) -> None:
    path = tmp_path / "lease"

    def replace(text: str) -> None:
        for _ in range(200):
            write(path, text)
            assert read(path) in ("a" * 100, "b" * 1000)

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(replace, text) for text in ("a" * 100, "b" * 1000)]:
            done.result()
    assert [one.name for one in tmp_path.iterdir()] == ["lease"]


def test_no_program_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, PROGRAM, "parent", str(tmp_path / "log")], env=environment)
    until((tmp_path / "child").exists)
    child = int((tmp_path / "child").read_text())
    assert is_alive(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not is_alive(child))
    until(lambda: not any(str(tmp_path) in line for line in command_lines()))
