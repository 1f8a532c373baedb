"""Any program in any language as an agent.

The program finds the proxy in its environment (`subprocesses.environment`), its task as JSON in the file
ROLLBOOK_TASK_FILE, and leaves its reward in the file ROLLBOOK_REWARD_FILE: a number, or a JSON object
{interaction_id: number}. Or it posts to /rl/set_reward and leaves no file. An exit code other than 0 is a failed
episode, whose reason ends with the last lines of stderr. What it writes is shown, of stdout and of stderr the first
SHOWN_BYTES; whatever it started ends with it.
"""

import asyncio
import contextlib
import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import anyio

from .errors import AgentFailed, BadReward
from .subprocesses import environment
from .workflow import Session, Workflow

_TAIL_BYTES = 1500
SHOWN_BYTES = 1 << 16
"""Of what an episode's program writes to stdout, and of what it writes to stderr."""

STOP_S = 2.0
"""Between asking a program to end and ending it."""


class CommandAgent(Workflow):
    """Runs `command` once per episode. `env` is added to this process's own."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        super().__init__(" ".join(command))
        self._command = list(command)
        self._env = dict(env or {})

    async def run(self, data: Mapping[str, Any], session: Session) -> Any:
        with tempfile.TemporaryDirectory(prefix="rollbook-") as folder:
            task, reward = Path(folder, "task.json"), Path(folder, "reward")
            _write_task(task, data)
            files = {"ROLLBOOK_TASK_FILE": str(task), "ROLLBOOK_REWARD_FILE": str(reward)}
            await self._run({**os.environ, **environment(session), **self._env, **files})
            return _read_reward_file(reward)

    async def _run(self, env: dict[str, str]) -> None:
        name = self._command[0]
        with _Shown(sys.stdout, f"{name}'s stdout") as stdout, _Shown(sys.stderr, f"{name}'s stderr") as stderr:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=stdout.fd, stderr=stderr.fd,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise AgentFailed(f"cannot start {name!r}: {error.strerror}") from error
            try:
                code = await process.wait()
            finally:
                with anyio.CancelScope(shield=True):
                    await end_group(process, grace_s=STOP_S)
        if code:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise AgentFailed(f"{name} {how}" + (f": {stderr.tail}" if stderr.tail else ""))


class _Shown:
    """A pipe for what a program writes: the first SHOWN_BYTES are passed on, the end is kept.

    A thread reads to the end, so that any program can write as much as it likes.
    """

    def __init__(self, to: TextIO, name: str) -> None:
        self._to, self._name = to, name
        self._source, self.fd = os.pipe()
        self._kept = bytearray()
        self._thread = threading.Thread(target=self._read, name=name, daemon=True)

    def __enter__(self) -> "_Shown":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)
        left, until = select.poll(), time.monotonic() + 10.0  # what writes for longer has left the group
        left.register(self._source, select.POLLIN)
        while self._thread.is_alive() and left.poll(0) and time.monotonic() < until:
            self._thread.join(0.05)
        self._thread.join(1.0)  # it goes on where something that left the group still holds the pipe

    @property
    def tail(self) -> str:
        """The last 1500 bytes."""
        return self._kept.decode(errors="replace").strip()

    def _read(self) -> None:
        n = 0
        with open(self._source, "rb") as source:
            while line := source.readline(1 << 12):  # by lines, so that those of several programs do not mix
                n += len(line)
                if n <= SHOWN_BYTES:
                    self._show(line.decode(errors="replace"))
                elif n - len(line) <= SHOWN_BYTES:
                    self._show(f"rollbook: the rest of {self._name} in this episode is not shown\n")
                self._kept += line
                del self._kept[:-_TAIL_BYTES]

    def _show(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads ours any more, which is no reason to stop the program
            self._to.write(text)
            self._to.flush()


async def end_group(process: asyncio.subprocess.Process, *, grace_s: float) -> None:
    """End a program that leads its own session, if it has not ended, and what it started."""
    if process.returncode is None and grace_s:
        _kill_group(process.pid, signal.SIGTERM)
        with anyio.move_on_after(grace_s):
            await process.wait()
    _kill_group(process.pid, signal.SIGKILL)
    await process.wait()


def _kill_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _write_task(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(data), ensure_ascii=False, default=str), encoding="utf-8")


def _read_reward_file(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    try:
        return json.loads(text) if text else None
    except ValueError as error:
        raise BadReward(
            f"the reward file holds {text[:60]!r}; expected a number, or a JSON object {{interaction_id: number}}"
        ) from error
