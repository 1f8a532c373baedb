"""Programs for the launchers' contract: `launched.py HOW` is one that a launcher starts."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def answer(at: Path, **more: object) -> None:
    beside = at.with_suffix(".part")
    beside.write_text(json.dumps({"url": f"http://127.0.0.1:{os.getpid()}", **more}))
    beside.replace(at)


def main(how: str, *rest: str) -> None:
    print(f"{how} with SECRET={os.environ.get('SECRET')}", flush=True)
    if how == "ends":
        sys.exit(3)
    if how == "silent":
        time.sleep(600)
    if how == "works":
        Path(rest[0]).write_text("done")
        return
    if how == "parent":  # a program that launches another and is then killed
        from rollbook.app.launch_local import LocalLauncher

        [program] = LocalLauncher().start([sys.executable, __file__, "serves"], log_path=Path(rest[0]))
        Path(rest[0]).with_name("child").write_text(program.url.rsplit(":", 1)[1])
        time.sleep(600)
    # A server with a child of its own, which must not outlive it.
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(f"pids {os.getpid()} {child.pid}", flush=True)
    answer(Path(rest[rest.index("--address-file") + 1]))
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
