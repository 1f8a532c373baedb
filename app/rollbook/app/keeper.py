"""`python -m rollbook.app.keeper FOLDER ... -- COMMAND`: run one program for a launcher, on whatever host.

A launcher and its programs share a folder and nothing else. Here the keeper writes `beat` (a number that rises while
the program runs) and `status.json` (how it ended), and the program `address.json`. Whoever watches measures with its
own clock how long a number has not changed, so hosts need not agree on the time.

The program must not outlive whoever launched it: it is ended, with all that it started, when our standard input
closes (`--stdin`), when the number in `--lease` stops rising, and on SIGTERM. POSIX; imports nothing heavy.
"""

import argparse
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

BEAT_S = 1.0
GRACE_S = 10.0
"""How long a program may take to end when it is asked to."""

_NOT_STARTED = 127  # as shells say it
_PR_SET_PDEATHSIG = 1  # prctl(2)


def write(path: Path, text: str) -> None:
    """Replace a file whole: a reader sees the old or the new, whoever else writes it now."""
    beside = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    beside.write_text(text)
    beside.replace(path)


def rise(path: Path, number: int) -> None:
    """Write a number over the one in a file. A sign of life must need no room: a full disk is no dead program."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(fd, b"%20d" % number, 0)
    finally:
        os.close(fd)


def read(path: Path) -> str | None:
    """What is in a file; None where there is none."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


class Rising:
    """Whether the text of a file has changed within some seconds, by our own clock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: str | None = None
        self._since = time.monotonic()

    def still_s(self) -> float:
        """How long it has not changed."""
        now = read(self._path)
        if now is not None and now != self._last:
            self._last, self._since = now, time.monotonic()
        return time.monotonic() - self._since


def _die_with_parent() -> None:
    """In the child: SIGTERM when the keeper is gone, even by kill -9 (Linux; elsewhere it does nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def keep(command: list[str], *, folder: Path, log_path: Path, is_held: bool, lease: Path | None, lease_s: float) -> int:
    """Run `command` until it ends or must end; returns its status."""
    with log_path.open("ab") as log:
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        except OSError as error:
            log.write(f"cannot start {command[0]}: {error.strerror}\n".encode())
            write(folder / "status.json", json.dumps({"status": _NOT_STARTED, "told": None}))
            return _NOT_STARTED
    changed = threading.Event()
    told: list[str] = []

    def end(why: str) -> None:
        told.append(why)
        changed.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: end("it was told to stop"))

    def held() -> None:
        while os.read(0, 1024):
            pass
        end("whoever launched it is gone")

    def waited() -> None:
        child.wait()
        changed.set()

    threading.Thread(target=waited, daemon=True).start()
    if is_held:
        threading.Thread(target=held, daemon=True).start()
    rising = Rising(lease) if lease is not None else None
    beat = 0
    while child.poll() is None and not told:
        beat += 1
        with contextlib.suppress(
            OSError
        ):  # a shared folder may be away for a moment; for long, and we are taken for lost
            rise(folder / "beat", beat)
        if rising is not None and rising.still_s() > lease_s:
            told.append(f"whoever launched it gave no sign for {lease_s:g} s")
        else:
            changed.wait(BEAT_S)
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # itself, or what it left behind
    status = child.wait()
    if folder.is_dir():  # whoever launched it may have tidied up already
        write(folder / "status.json", json.dumps({"status": status, "told": told[0] if told else None}))
    return status if status >= 0 else 128 - status


def main(argv: list[str]) -> int:
    words, command = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--stdin", action="store_true")
    parser.add_argument("--lease", type=Path)
    parser.add_argument("--lease-s", type=float, default=120.0)
    given = parser.parse_args(words)
    # Only here is it known which host this is.
    command = [socket.gethostname() if word == "{node}" else word for word in command]
    given.folder.mkdir(parents=True, exist_ok=True)
    return keep(
        command,
        folder=given.folder,
        log_path=given.log,
        is_held=given.stdin,
        lease=given.lease,
        lease_s=given.lease_s,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
