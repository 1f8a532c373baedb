"""Programs as processes of this machine."""

import os
import subprocess
from collections.abc import Sequence

from .launch import END_S, Job, LaunchFailed, Supervisor, Ticket, let_go


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
        let_go(self._process, wait_s)


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
