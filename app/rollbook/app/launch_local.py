"""Programs as processes of this machine."""

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from .launch import END_S, Job, LaunchFailed, Supervisor, Ticket


class _Process:
    """A keeper that we hold by its standard input: when we are gone, by kill -9 too, so is all that it keeps."""

    def __init__(self, job: Job) -> None:
        try:
            self._process = subprocess.Popen(
                job.kept("--stdin"),
                env={**os.environ, **job.env},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C in the terminal is ours to answer
            )
        except OSError as error:
            raise LaunchFailed(f"cannot start a process: {error}") from error

    def why_ended(self) -> str | None:
        status = self._process.poll()
        return None if status is None else f"its keeper ended with status {status}"

    def end(self, wait_s: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class LocalLauncher(Supervisor):
    """See `Launcher`. Resources are not divided here: all programs have the machine."""

    keeps_ports = True

    def submit(self, jobs: Sequence[Job]) -> Sequence[Ticket]:
        begun: list[_Process] = []
        try:
            for job in jobs:
                begun.append(_Process(job))
        except LaunchFailed:
            for process in begun:
                process.end(END_S)
            raise
        return begun
