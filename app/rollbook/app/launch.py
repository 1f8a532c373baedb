"""Starting a program of a run and keeping it up: the seam `Launcher`, and the one for this machine.

A launched program says where it listens by writing a small JSON file (`--address-file`); a scheduler that starts it on
another host hands over the same file on a shared folder. Programs end when whoever launched them ends, however it ends.
"""

import contextlib
import ctypes
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

ADMIN_KEY = "ROLLBOOK_ADMIN_KEY"
"""The variable by which a server is given its admin key; a command line could be read by others."""

_PR_SET_PDEATHSIG = 1  # prctl(2)


class LaunchFailed(RuntimeError):
    """A program did not come up, or died more often than it may; carries the end of its log."""


class Program(Protocol):
    """A started program."""

    url: str

    def check(self) -> None:
        """Raise LaunchFailed if it is gone for good."""
        ...

    def stop(self) -> None:
        """Ask it to end, wait, then make it. Twice is once."""
        ...


class Launcher(Protocol):
    """Implementations: `LocalLauncher`; others start the same command elsewhere."""

    def start(self, command: Sequence[str], *, env: Mapping[str, str], log_path: Path, wait_s: float) -> Program:
        """Start `command` (it is given `--address-file` and `--port`), return once it answers."""
        ...


def start_server(
    launcher: Launcher, book_path: str, arguments: Sequence[str], *, log_path: Path, wait_s: float
) -> tuple[Program, str]:
    """`rollbook serve BOOK ...` under a key made for it; returns the program and that admin key."""
    admin_key = secrets.token_urlsafe(32)
    command = [sys.executable, "-m", "rollbook.app.cli", "serve", book_path, *arguments]
    return launcher.start(command, env={ADMIN_KEY: admin_key}, log_path=log_path, wait_s=wait_s), admin_key


def _die_with_parent() -> None:
    """In the child: get SIGTERM when the parent is gone, even by kill -9 (Linux; elsewhere it does nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _tail(path: Path, lines: int = 15) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no log was written)"


class LocalProgram:
    """A child process, restarted on the same port when it dies, at most `max_restarts` times."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], log_path: Path, wait_s: float, max_restarts: int
    ) -> None:
        self._command = list(command)
        self._env = {**os.environ, **env}
        self._log_path = log_path
        self._wait_s = wait_s
        self._restarts_left = max_restarts
        self._failure: str | None = None
        self._is_stopped = False
        self._lock = threading.Lock()
        self._process, self.url = self._launch(port=0)
        self._watch = threading.Thread(target=self._keep_up, name="launcher", daemon=True)
        self._watch.start()

    def _launch(self, port: int) -> tuple[subprocess.Popen[bytes], str]:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            address = Path(folder, "address.json")
            with self._log_path.open("ab") as log:
                process = subprocess.Popen(
                    [*self._command, "--address-file", str(address), "--port", str(port)],
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    preexec_fn=_die_with_parent,
                )
            give_up = time.monotonic() + self._wait_s
            while not address.exists():
                if process.poll() is not None:
                    raise LaunchFailed(
                        f"{' '.join(self._command[:4])} ... ended with status {process.returncode} before it "
                        f"answered; the end of {self._log_path}:\n{_tail(self._log_path)}"
                    )
                if time.monotonic() > give_up:
                    process.kill()
                    raise LaunchFailed(
                        f"{' '.join(self._command[:4])} ... did not answer within {self._wait_s:.0f} s; the end of "
                        f"{self._log_path}:\n{_tail(self._log_path)}"
                    )
                time.sleep(0.02)
            return process, json.loads(address.read_text())["url"]

    def _keep_up(self) -> None:
        delay_s = 0.5
        while True:
            self._process.wait()
            with self._lock:
                if self._is_stopped:
                    return
                if not self._restarts_left:
                    self._failure = f"the program died again (status {self._process.returncode}) and is not restarted"
                    return
                self._restarts_left -= 1
                time.sleep(delay_s)
                delay_s = min(2 * delay_s, 10)
                try:
                    self._process, self.url = self._launch(port=int(self.url.rsplit(":", 1)[1]))
                except LaunchFailed as error:
                    self._failure = str(error)
                    return

    def check(self) -> None:
        if self._failure:
            raise LaunchFailed(f"{self._failure}; the end of {self._log_path}:\n{_tail(self._log_path)}")

    def stop(self) -> None:
        with self._lock:
            if self._is_stopped:
                return
            self._is_stopped = True
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._watch.join()


class LocalLauncher:
    """See `Launcher`: subprocesses of this one."""

    def __init__(self, *, max_restarts: int = 3) -> None:
        self._max_restarts = max_restarts

    def start(self, command: Sequence[str], *, env: Mapping[str, str], log_path: Path, wait_s: float) -> LocalProgram:
        return LocalProgram(command, env=env, log_path=log_path, wait_s=wait_s, max_restarts=self._max_restarts)
