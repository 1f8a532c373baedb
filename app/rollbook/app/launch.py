"""Starting the programs of a run and keeping them up: the seam `Launcher`, and what all of its implementations share.

A program is started by a scheduler (`launch_local.py`, `launch_slurm.py`, `launch_ray.py`) under a keeper (`keeper.py`)
that says, in a folder which both can read, that it lives and how it ended. Watching that, restarts with back-off and
the limit on them, logs and the end are the same for every scheduler and stand here, once.
Programs end when whoever launched them ends, however it ends.
"""

import abc
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import msgspec

from .keeper import GRACE_S, Rising, read

ADMIN_KEY = "ROLLBOOK_ADMIN_KEY"
"""The variable by which a server is given its admin key; a command line could be read by others."""

LOST_S = 30.0
"""A program whose keeper gave no sign for so long is taken for lost, with its host."""

PATIENT_S = 15.0
"""For which a program may wait in a scheduler's queue before it is said why."""

END_S = GRACE_S + 5.0
"""How long a program has to end before its scheduler ends it by force."""

_PROVEN_S = 600.0  # who was up for so long has all its restarts again
_LOOK_S = 0.05


class LaunchFailed(RuntimeError):
    """A program did not come up, or died more often than it may; carries the end of its log."""


class SchedulerConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Who starts the other programs of a run, and how many. What a scheduler is told beyond that is passed through."""

    type: str = "local"  # a name of the entry-point group rollbook.schedulers; `none`: train from the book alone
    proxies: int = 1
    """Servers at the start, each with an engine of its own (or several: rollout.backend). While a run goes on, the
    number in the file `proxies` of its folder is followed."""
    update: Literal["rolling", "barrier"] = "rolling"
    """How a server with several engines gets new weights: one engine after the other, or all while none samples."""
    cpus: int = 1  # for each server
    gpus: int = 0
    memory_gb: float | None = None
    max_restarts: int = 3  # of each server, one after the other; ten good minutes give them back
    host: str | None = None  # where servers listen; null: 127.0.0.1 under local, else the name of their host
    python: str | None = None  # the interpreter on their hosts or in their container; null: this one
    address: str | None = None  # ray: of a running cluster; null: one that is started here
    options: list[str] = []  # slurm: of sbatch, as they are, e.g. ["--partition=gpu", "--account=rl"]
    step_options: list[str] = []  # slurm: of srun, e.g. ["--container-image=/images/rollbook.sqsh"]

    def __post_init__(self) -> None:
        for name in ("proxies", "cpus"):
            if getattr(self, name) < 1:
                raise ValueError(f"scheduler.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("gpus", "max_restarts"):
            if getattr(self, name) < 0:
                raise ValueError(f"scheduler.{name} must be 0 or more, got {getattr(self, name)}")
        if self.memory_gb is not None and not self.memory_gb > 0:
            raise ValueError(f"scheduler.memory_gb must be above 0, or null, got {self.memory_gb}")


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """What one program needs. memory_gb None: as much as the scheduler gives by default."""

    cpus: int = 1
    gpus: int = 0
    memory_gb: float | None = None


ONE_CPU = Resources()


class Program(Protocol):
    """A started program."""

    @property
    def url(self) -> str:
        """Where it listens, or did when it was last up: after a restart it may be elsewhere."""
        ...

    @property
    def is_up(self) -> bool:
        """Whether it has answered and, as far as is known, lives."""
        ...

    @property
    def n_starts(self) -> int:
        """How often it was started; who finds this changed talks to another process."""
        ...

    def check(self) -> None:
        """Raise LaunchFailed if it is gone for good."""
        ...

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until it has ended and is not started again; whether that is so. `check` says whether it ended well."""
        ...

    def logs(self, lines: int = 15) -> str:
        """The end of what it printed."""
        ...

    def stop(self) -> None:
        """Ask it to end, wait, then make it. Twice is once."""
        ...


class Launcher(Protocol):
    """Implementations: local, slurm, ray; one contract suite."""

    def start(
        self,
        command: Sequence[str],
        *,
        log_path: Path,
        n: int = 1,
        env: Mapping[str, str] | None = None,
        wait_s: float = 600.0,
        resources: Resources = ONE_CPU,
        is_server: bool = True,
    ) -> list[Program]:
        """Start `n` of `command`; return once all answer.

        A server is told `--address-file FILE` and `--port N` and answers by writing {"url": ...} there; it is started
        again whenever it ends. What is no server is up when it runs and, having ended with status 0, has done its work.
        wait_s: how long a program may take to answer from when it runs; waiting in a queue does not count.
        log_path: of the first; the others' are beside it, with their number. It must lie where all hosts see it.
        Raises LaunchFailed; nothing is left running then.
        """
        ...

    def close(self) -> None:
        """Stop all programs that it started. Twice is once."""
        ...


def let_go(keeper: subprocess.Popen[bytes], wait_s: float) -> None:
    """End a keeper that is held by its standard input, and with it the program; killed where that takes longer."""
    assert keeper.stdin is not None
    keeper.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        keeper.wait(wait_s)
    if keeper.poll() is None:
        keeper.kill()
        keeper.wait()


class Ticket(Protocol):
    """One start of one program, as the scheduler sees it."""

    def why_ended(self) -> str | None:
        """None while it is queued or running as far as the scheduler knows, else what it says of the end."""
        ...

    def end(self, wait_s: float) -> None:
        """Ask it to end; return when it has, or, after `wait_s`, when it was made to. Twice is once."""
        ...


@dataclass(frozen=True, kw_only=True)
class Job:
    """One start of one program: what a scheduler is told. folder: what keeper and launcher share."""

    command: Sequence[str]
    env: Mapping[str, str]
    folder: Path
    log_path: Path
    index: int
    resources: Resources

    def kept(self, *words: str, python: str | None = None) -> list[str]:
        """The keeper's command line."""
        keeper = [python or sys.executable, "-m", "rollbook.app.keeper", str(self.folder), "--log", str(self.log_path)]
        return [*keeper, *words, "--", *self.command]


class Supervised:
    """See `Program`: whatever started it, it is watched by a thread of ours, by its folder and its ticket."""

    def __init__(self, launcher: "Supervisor", folder: Path, job: Job, *, wait_s: float, is_server: bool) -> None:
        self._launcher = launcher
        self._folder = folder
        self._job = job
        self._wait_s = wait_s
        self._is_server = is_server
        self._lives = 0
        self._log_start = job.log_path.stat().st_size if job.log_path.is_file() else 0  # earlier runs' words
        self._url: str | None = None
        self._failure: str | None = None
        self._has_answered = threading.Event()  # for the first time, or never will
        self._stopping = threading.Event()
        self._gone = threading.Event()
        self._is_up = False
        self._thread = threading.Thread(target=self._keep_up, name=f"launcher of {folder.name}", daemon=True)
        self._ticket: Ticket | None = None

    # -- what the launcher calls

    def next_job(self) -> Job:
        """For the scheduler: the next start of the program."""
        self._lives += 1
        folder = self._folder / f"start-{self._lives}"
        folder.mkdir(parents=True)
        command = list(self._job.command)
        if self._is_server:
            # It keeps its port where it can, so that who talks to it need not notice.
            port = self._url.rsplit(":", 1)[1] if self._url is not None and self._launcher.keeps_ports else "0"
            command += ["--address-file", str(folder / "address.json"), "--port", port]
        return Job(
            command=command,
            env=self._job.env,
            folder=folder,
            log_path=self._job.log_path,
            index=self._job.index,
            resources=self._job.resources,
        )

    def watch(self, ticket: Ticket) -> None:
        """It has been submitted; from here on it is watched."""
        self._ticket = ticket
        self._thread.start()

    def answered(self) -> None:
        """Return when it answers. Raises LaunchFailed when it will not."""
        self._has_answered.wait()
        self.check()

    # -- Program

    @property
    def url(self) -> str:
        return self._url or ""

    @property
    def is_up(self) -> bool:
        return self._is_up

    @property
    def n_starts(self) -> int:
        return self._lives

    def check(self) -> None:
        if self._failure is not None:
            raise LaunchFailed(f"{self._failure}; the end of {self._job.log_path}:\n{self.logs()}")

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._gone.wait(timeout_s)

    def logs(self, lines: int = 15) -> str:
        try:
            with self._job.log_path.open("rb") as file:
                file.seek(self._log_start)
                text = file.read().decode(errors="replace")
        except OSError:
            text = ""
        return "\n".join(text.splitlines()[-lines:]) or "(no log was written)"

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- one life after the other

    def _keep_up(self) -> None:
        try:
            self._live()
        except LaunchFailed as error:
            self._failure = str(error)
        except Exception as error:  # the thread's outermost frame: `check` raises it
            self._failure = f"watching the program failed: {type(error).__name__}: {error}"
        finally:
            self._is_up = False
            self._gone.set()
            self._has_answered.set()

    def _live(self) -> None:
        restarts_left, delay_s = self._launcher.max_restarts, 0.5
        while True:
            began = time.monotonic()
            why = self._one_life()
            if self._stopping.is_set() or why is None:
                return
            if not self._has_answered.is_set():
                raise LaunchFailed(why)
            if time.monotonic() - began > _PROVEN_S:
                restarts_left, delay_s = self._launcher.max_restarts, 0.5
            while restarts_left:
                restarts_left -= 1
                if self._stopping.wait(delay_s):
                    return
                delay_s = min(2 * delay_s, 30.0)
                try:
                    [self._ticket] = self._launcher.submit([self.next_job()])
                    break
                except (LaunchFailed, OSError) as error:  # scheduler or shared folder may be away for a moment
                    why = str(error)
            else:
                raise LaunchFailed(f"{why}, and is not started again after {self._launcher.max_restarts} restarts")

    def _one_life(self) -> str | None:
        """From submission to end. Returns why it ended; None if that is as it should be."""
        ticket, folder = self._ticket, self._folder / f"start-{self._lives}"
        assert ticket is not None
        beat, name = Rising(folder / "beat"), " ".join(self._job.command[:4])
        running_since: float | None = None
        try:
            while True:
                if self._stopping.wait(_LOOK_S if not self._is_up else self._launcher.look_s):
                    ticket.end(END_S)
                    return None
                now = time.monotonic()
                if running_since is None and (folder / "beat").exists():
                    running_since = now
                if not self._is_up and running_since is not None:
                    self._is_up = self._answers(folder)
                    if self._is_up:
                        self._has_answered.set()
                    elif now - running_since > self._wait_s:
                        ticket.end(END_S)
                        return f"{name} ... did not answer within {self._wait_s:.0f} s"
                status = read(folder / "status.json")
                if status is not None:
                    ticket.end(END_S)
                    return self._verdict(name, json.loads(status))
                if running_since is not None and beat.still_s() > self._launcher.lost_s:
                    ticket.end(1.0)  # nobody may be there to listen
                    return f"{name} ... gave no sign for {self._launcher.lost_s:g} s; its host is taken for lost"
                why = ticket.why_ended()
                if why is not None:
                    ticket.end(END_S)
                    # The keeper's own word, where it came through, says more.
                    status = read(folder / "status.json")
                    return self._verdict(name, json.loads(status)) if status else f"{name} ... {why}"
        finally:
            self._is_up = False

    def _answers(self, folder: Path) -> bool:
        if not self._is_server:
            return True
        address = read(folder / "address.json")
        if address is None:
            return False
        self._url = json.loads(address)["url"]
        return True

    def _verdict(self, name: str, said: Mapping[str, Any]) -> str | None:
        if not self._is_server and said["status"] == 0:
            return None
        how = f"ended with status {said['status']}" + (f" since {said['told']}" if said["told"] else "")
        return f"{name} ... {how}" + ("" if self._has_answered.is_set() else " before it answered")


class Supervisor(abc.ABC):
    """What the launchers share: see `Launcher`. One that adds `submit` is one."""

    keeps_ports = False  # whether a restart can have the port it had
    look_s = 0.2  # how often a program that is up is looked at

    def __init__(self, *, max_restarts: int = 3, lost_s: float = LOST_S) -> None:
        self.max_restarts = max_restarts
        self.lost_s = lost_s
        self._programs: list[Supervised] = []

    @abc.abstractmethod
    def submit(self, jobs: Sequence[Job]) -> Sequence[Ticket]:
        """Hand programs that are alike over to the scheduler. Raises LaunchFailed, and nothing is left running."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(
        self,
        command: Sequence[str],
        *,
        log_path: Path,
        n: int = 1,
        env: Mapping[str, str] | None = None,
        wait_s: float = 600.0,
        resources: Resources = ONE_CPU,
        is_server: bool = True,
    ) -> list[Program]:
        log_path = log_path.resolve()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        group = log_path.parent / "programs" / f"{log_path.stem}-{secrets.token_hex(4)}"
        programs = []
        for i in range(n):
            log = log_path if i == 0 else log_path.with_stem(f"{log_path.stem}-{i + 1}")
            words = [word.replace("{index}", str(i + 1)) for word in command]
            job = Job(command=words, env=dict(env or {}), folder=group, log_path=log, index=i, resources=resources)
            programs.append(Supervised(self, group / str(i), job, wait_s=wait_s, is_server=is_server))
        try:
            for program, ticket in zip(programs, self.submit([p.next_job() for p in programs]), strict=True):
                program.watch(ticket)
            for program in programs:
                program.answered()
        except BaseException:
            self._stop(programs)
            raise
        self._programs += programs
        return list(programs)

    def close(self) -> None:
        programs, self._programs = self._programs, []
        self._stop(programs)

    def _stop(self, programs: Sequence[Supervised]) -> None:
        """All at once: each may take its time."""
        stops = [threading.Thread(target=program.stop) for program in programs]
        for stop in stops:
            stop.start()
        for stop in stops:
            stop.join()
        for folder in {program._folder.parent for program in programs}:
            with contextlib.suppress(OSError):
                folder.rmdir()
                folder.parent.rmdir()


def start_servers(
    launcher: Launcher,
    book_path: str,
    arguments: Sequence[str],
    *,
    log_path: Path,
    wait_s: float,
    n: int = 1,
    resources: Resources = ONE_CPU,
    python: str | None = None,
    admin_key: str | None = None,
) -> tuple[list[Program], str]:
    """n times `rollbook serve BOOK ...` under one key, made for them if not given; returns programs and admin key."""
    admin_key = admin_key or secrets.token_urlsafe(32)
    command = [python or sys.executable, "-m", "rollbook.app.cli", "serve", os.path.abspath(book_path), *arguments]
    env = {ADMIN_KEY: admin_key}
    return launcher.start(command, n=n, env=env, log_path=log_path, wait_s=wait_s, resources=resources), admin_key
