"""What every launcher promises (`rollbook.app.launch.Launcher`), as tests that each implementation runs."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollbook.app.launch import LaunchFailed, Program, Supervisor

PROGRAM = str(Path(__file__).with_name("launched.py"))


def command(how: str, *rest: str) -> list[str]:
    return [sys.executable, PROGRAM, how, *rest]


def pids(program: Program) -> list[int]:
    """Of the program and its child, as it printed them last."""
    said = [line for line in program.logs(100).splitlines() if line.startswith("pids ")]
    return [int(word) for word in said[-1].split()[1:]]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def until(is_so: Callable[[], bool], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"it did not come about within {seconds} s"
        time.sleep(0.05)


class LauncherContract:
    """Run by each implementation's test class. Programs run on this machine, whoever starts them."""

    def make(self, *, max_restarts: int = 2) -> Supervisor:
        raise NotImplementedError

    @pytest.fixture
    def launcher(self) -> Iterator[Supervisor]:
        with self.make() as launcher:
            yield launcher

    def test_a_program_has_answered_when_start_returns_and_is_gone_when_stop_does(
        self, launcher: Supervisor, tmp_path: Path
    ) -> None:
        [program] = launcher.start(command("serves"), log_path=tmp_path / "log", env={"SECRET": "s3cret"})
        assert program.url == f"http://127.0.0.1:{pids(program)[0]}"
        assert program.is_up
        assert "SECRET=s3cret" in program.logs()
        program.check()
        started = pids(program)
        assert all(is_alive(pid) for pid in started)
        program.stop()
        program.stop()
        until(lambda: not any(is_alive(pid) for pid in started))  # what was killed takes a moment to die
        assert not program.is_up
        assert program.wait(0)

    def test_replicas_are_started_together_and_each_has_its_address_and_log(
        self, launcher: Supervisor, tmp_path: Path
    ) -> None:
        programs = launcher.start(command("serves", "number-{index}"), log_path=tmp_path / "server.log", n=2)
        assert len({program.url for program in programs}) == 2
        assert sorted(path.name for path in tmp_path.glob("*.log")) == ["server-2.log", "server.log"]
        launcher.close()
        until(lambda: not any(is_alive(pid) for program in programs for pid in pids(program)))
        assert not list(tmp_path.glob("programs/**/*")), "what launcher and keeper shared is tidied up"

    def test_programs_that_are_started_one_right_after_the_other_are_all_up(
        self, launcher: Supervisor, tmp_path: Path
    ) -> None:
        # What a scheduler said a moment ago does not know the younger one.
        started = [launcher.start(command("serves"), log_path=tmp_path / f"log-{i}")[0] for i in range(2)]
        assert [(program.is_up, program.n_starts) for program in started] == [(True, 1)] * 2

    def test_a_program_that_ends_before_it_answers_is_an_error_with_its_last_words(
        self, launcher: Supervisor, tmp_path: Path
    ) -> None:
        (tmp_path / "log").write_text("what an earlier start of the same run said\n")
        with pytest.raises(LaunchFailed, match=r"(?s)ended with status 3 before it answered.*ends with SECRET") as told:
            launcher.start(command("ends"), log_path=tmp_path / "log")
        assert "earlier start" not in str(told.value)
        assert (tmp_path / "log").read_text().startswith("what an earlier start of the same run said\n")

    def test_a_program_that_is_not_there_is_an_error_that_says_so(self, launcher: Supervisor, tmp_path: Path) -> None:
        with pytest.raises(LaunchFailed, match="cannot start /nowhere/python: No such file"):
            launcher.start(["/nowhere/python", "-m", "rollbook"], log_path=tmp_path / "log")

    def test_servers_that_die_together_are_all_started_again(self, launcher: Supervisor, tmp_path: Path) -> None:
        programs = launcher.start(command("serves"), log_path=tmp_path / "log", n=4)
        for program in programs:
            os.kill(pids(program)[0], signal.SIGKILL)
        until(lambda: all(program.n_starts == 2 and program.is_up for program in programs))
        for program in programs:
            program.check()

    def test_a_program_that_does_not_answer_is_an_error_and_is_ended(
        self, launcher: Supervisor, tmp_path: Path
    ) -> None:
        with pytest.raises(LaunchFailed, match="did not answer within 1 s"):
            launcher.start(command("silent"), log_path=tmp_path / "log", wait_s=1)
        until(lambda: not any(str(tmp_path) in line for line in command_lines()))

    def test_work_is_done_when_it_ended_well(self, launcher: Supervisor, tmp_path: Path) -> None:
        [program] = launcher.start(command("works", str(tmp_path / "out")), log_path=tmp_path / "log", is_server=False)
        assert program.wait(600)
        program.check()
        assert (tmp_path / "out").read_text() == "done"

    def test_a_server_that_dies_is_started_again_until_it_dies_too_often(self, tmp_path: Path) -> None:
        with self.make(max_restarts=1) as launcher:
            [program] = launcher.start(command("serves"), log_path=tmp_path / "log")
            first, n = pids(program), program.n_starts
            os.kill(first[0], signal.SIGKILL)
            until(lambda: program.is_up and program.n_starts == n + 1)
            second = pids(program)
            assert second[0] != first[0]
            until(lambda: not is_alive(first[1]))  # what a dead server had started is ended
            program.check()
            os.kill(second[0], signal.SIGKILL)
            assert program.wait(600)
            with pytest.raises(LaunchFailed, match="not started again after 1 restarts"):
                program.check()

    def test_a_host_that_gives_no_sign_is_taken_for_lost(self, tmp_path: Path) -> None:
        with self.make() as launcher:
            launcher.lost_s = 3.0
            [program] = launcher.start(command("serves"), log_path=tmp_path / "log")
            n = program.n_starts
            keeper = next(pid for pid, line in processes() if "rollbook.app.keeper" in line and str(tmp_path) in line)
            os.kill(keeper, signal.SIGSTOP)
            try:
                until(lambda: program.n_starts > n and program.is_up)
            finally:
                if is_alive(keeper):
                    os.kill(keeper, signal.SIGCONT)


def processes() -> list[tuple[int, str]]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.append((int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()))
            except OSError:
                continue
    # The keeper itself, not what wraps it.
    return [(pid, line) for pid, line in found if not line.startswith(("srun", "sh ", "/bin/sh"))]


def command_lines() -> list[str]:
    return [line for _, line in processes()]
