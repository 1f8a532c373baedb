"""`python -m rollbook.proxy.tether COMMAND...`: run a command that must not outlive us.

Whoever starts it holds its standard input. When that closes, because it was let go or because its holder was killed,
the command and everything it started is ended. Exits as the command did. POSIX.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

GRACE_S = 10.0


def run(command: list[str]) -> int:
    """Run `command` in a process group of its own until it ends or standard input closes."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def end() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()
    status = child.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # what the command left behind
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    for quiet in (signal.SIGINT, signal.SIGTERM):
        # A Ctrl-C in the terminal is the holder's to answer. Not SIG_IGN, which the command would inherit.
        signal.signal(quiet, lambda *_: None)
    sys.exit(run(sys.argv[1:]))
