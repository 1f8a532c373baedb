"""Programs as tasks of a Slurm cluster, through its own commands: sbatch, srun, squeue, sacct, scancel.

Programs that are alike are one job array. A restart is an array of the one index that ended. The environment travels
with `--export=ALL`, never on a command line. What Slurm can do beyond resources (partitions, accounts, containers) is
passed through as it is: `options` to sbatch, `step_options` to srun.
"""

import logging
import os
import shlex
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .keeper import rise, write
from .launch import LOST_S, PATIENT_S, Job, LaunchFailed, SchedulerConfig, Supervisor, Ticket
from .local import LocalRollouts

_ALIVE = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESV_DEL_HOLD"}
_LOOK_S = 2.0
"""How old an answer of squeue may be."""

LEASE_S = 120.0
"""How long programs go on without a sign of whoever launched them."""

_log = logging.getLogger(__name__)


def slurm(*command: str, text: str = "", env: dict[str, str] | None = None) -> str:
    """Run one of Slurm's commands and return what it prints. Raises LaunchFailed."""
    try:
        done = subprocess.run(
            command, input=text, env=env, capture_output=True, text=True, timeout=120, start_new_session=True
        )
    except FileNotFoundError as error:
        raise LaunchFailed(
            f"there is no command {command[0]} here; scheduler.type=slurm runs on a Slurm host"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise LaunchFailed(f"{command[0]} did not answer within 120 s; is slurmctld up?") from error
    if done.returncode:
        raise LaunchFailed(f"{shlex.join(command[:4])} ... failed ({done.returncode}): {done.stderr.strip()[-500:]}")
    return done.stdout


class _Queue:
    """What Slurm says of our jobs, asked at most every `_LOOK_S` whoever wants to know."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: dict[str, tuple[str, str]] = {}
        self._asked = -_LOOK_S

    def state(self, task: str, *, since: float) -> tuple[str | None, str]:
        """The state of `job_index`, submitted at `since`, and Slurm's reason; None where Slurm no longer lists it.

        Raises LaunchFailed where Slurm does not answer now.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._asked >= _LOOK_S or self._asked < since:  # an answer from before does not know it
                lines = slurm(
                    "squeue", "--me", "--noheader", "--array", "--states=all", "--format=%F_%K %T %r"
                ).splitlines()
                found = [line.split(maxsplit=2) for line in lines if line.strip()]
                self._states = {name: (state, "".join(reason)) for name, state, *reason in found}
                self._asked = now
            return self._states.get(task, (None, ""))


class _Task:
    """One index of one array."""

    def __init__(self, queue: _Queue, job_id: str, index: int, folder: Path) -> None:
        self._queue = queue
        self._name = f"{job_id}_{index}"
        self._folder = folder
        self._submitted = time.monotonic()
        self._is_ended = False
        self._has_told = False

    def why_ended(self) -> str | None:
        try:
            state, reason = self._queue.state(self._name, since=self._submitted)
        except LaunchFailed:
            return None  # the controller is away; the keeper's beat says whether the program lives
        if state == "PENDING" and not self._has_told and time.monotonic() - self._submitted > PATIENT_S:
            self._has_told = True
            _log.warning(
                "job %s waits in Slurm's queue (%s); it begins when there is room, and never where no node has what "
                "it asks for: see scheduler.cpus, gpus, memory_gb and options",
                self._name,
                reason,
            )
        if state in _ALIVE:
            return None
        return f"ended: Slurm says {state or self._accounted()} of job {self._name}{self._said()}"

    def _accounted(self) -> str:
        """Of a job that squeue has forgotten."""
        try:
            found = slurm("sacct", "--noheader", "--parsable2", "-X", "-j", self._name, "--format=State,ExitCode")
        except LaunchFailed:
            found = ""  # accounting is off
        return found.splitlines()[0].replace("|", ", exit code ") if found.strip() else "nothing more"

    def _said(self) -> str:
        """What Slurm or the shell printed, where it is not the program's."""
        try:
            said = self._folder.with_suffix(".out").read_text(errors="replace").strip()
        except OSError:
            return ""
        return f": {said[-500:]}" if said else ""

    def end(self, wait_s: float) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        if (self._folder / "status.json").exists():
            return
        try:
            slurm("scancel", "--quiet", self._name)
            deadline = time.monotonic() + wait_s
            while time.monotonic() < deadline and not (self._folder / "status.json").exists():
                if self._queue.state(self._name, since=self._submitted)[0] not in _ALIVE:
                    return
                time.sleep(0.1)
            slurm("scancel", "--quiet", "--signal=KILL", "--full", self._name)
        except LaunchFailed:
            return  # Slurm is away; without a lease the keeper ends it


class SlurmLauncher(Supervisor):
    """See `Launcher`. The log's folder must be one that all nodes see, as the book's must.

    python: the interpreter on the nodes, or in the container that `step_options` name; None: this one.
    lease_s: how long a program goes on without a sign of us.
    """

    look_s = 0.5

    def __init__(
        self,
        *,
        options: Sequence[str] = (),
        step_options: Sequence[str] = (),
        python: str | None = None,
        max_restarts: int = 3,
        lost_s: float = LOST_S,
        lease_s: float = LEASE_S,
    ) -> None:
        super().__init__(max_restarts=max_restarts, lost_s=lost_s)
        self._options = list(options)
        self._step_options = list(step_options)
        self._python = python
        self._lease_s = lease_s
        self._queue = _Queue()
        self._leases: dict[Path, int] = {}
        self._closing = threading.Event()
        self._signs: threading.Thread | None = None

    def submit(self, jobs: Sequence[Job]) -> Sequence[Ticket]:
        first = jobs[0]
        lease = first.folder.parent.parent / "lease"
        self._hold(lease)
        for job in jobs:
            write(job.folder / "command", shlex.join(self._kept(job, lease)))
        needs = first.resources
        options = [
            "--parsable",
            f"--job-name=rollbook-{first.log_path.stem}",
            f"--array={','.join(str(job.index) for job in jobs)}",
            "--ntasks=1",
            f"--cpus-per-task={needs.cpus}",
            "--no-requeue",  # a restart is ours to make
            "--export=ALL",
            f"--output={first.folder.parent.parent}/%a/{first.folder.name}.out",
            "--open-mode=append",
        ]
        if needs.gpus:
            options.append(f"--gpus-per-task={needs.gpus}")
        if needs.memory_gb is not None:
            options.append(f"--mem={round(needs.memory_gb * 1024)}M")
        step = shlex.join(["srun", f"--cpus-per-task={needs.cpus}", *self._step_options])
        place = shlex.quote(str(first.folder.parent.parent))
        script = (
            f'#!/bin/sh\nexec {step} sh -c "exec $(cat {place}/$SLURM_ARRAY_TASK_ID/{first.folder.name}/command)"\n'
        )
        env = {**os.environ, **first.env}
        job_id = slurm("sbatch", *options, *self._options, text=script, env=env).strip().split(";")[0]
        return [_Task(self._queue, job_id, job.index, job.folder) for job in jobs]

    def _kept(self, job: Job, lease: Path) -> list[str]:
        return job.kept("--lease", str(lease), "--lease-s", str(self._lease_s), python=self._python)

    def _hold(self, lease: Path) -> None:
        self._leases.setdefault(lease, 0)
        rise(lease, 0)
        if self._signs is None:
            self._signs = threading.Thread(target=self._give_signs, name="signs of life", daemon=True)
            self._signs.start()

    def _give_signs(self) -> None:
        beat = 0
        while not self._closing.wait(min(2.0, self._lease_s / 4)):
            beat += 1
            for lease in list(self._leases):
                if lease.parent.is_dir():
                    with suppress(OSError):  # the folder may be away for a moment
                        rise(lease, beat)

    def close(self) -> None:
        super().close()
        self._closing.set()
        if self._signs is not None:
            self._signs.join()
        for lease in self._leases:
            lease.unlink(missing_ok=True)
            lease.parent.rmdir() if lease.parent.is_dir() and not any(lease.parent.iterdir()) else None


class SlurmRollouts(LocalRollouts):
    """See `rollbook.learner.rollouts.Rollouts`: servers are Slurm tasks, agents run beside the learner."""

    def launcher_of(self, config: Any) -> SlurmLauncher:
        scheduler: SchedulerConfig = config.scheduler
        return SlurmLauncher(
            options=scheduler.options,
            step_options=scheduler.step_options,
            python=scheduler.python,
            max_restarts=scheduler.max_restarts,
        )

    def host_of(self, config: Any) -> str:
        return config.scheduler.host or "{node}"
