"""Run a command beside a PostgreSQL server of its own: `python with_postgres.py CMD...`.

The server lives in a temporary folder, on a free loopback port, and ends with the command. ROLLBOOK_TEST_LAKE says how
to reach it. Needs PostgreSQL's server programs (Debian: postgresql).
"""

import contextlib
import glob
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def postgres(address: str = "127.0.0.1", *, friends: str | None = None) -> Iterator[str]:
    """A server on this address of ours; gives a connection string without a database.

    friends: a network whose hosts may connect too, like 10.0.0.0/24.
    """
    found = shutil.which("postgres") or next(iter(sorted(glob.glob("/usr/lib/postgresql/*/bin/postgres"))[::-1]), None)
    if found is None:
        sys.exit("no PostgreSQL server on this machine: install it (Debian: apt-get install postgresql)")
    programs = Path(found).parent
    folder = Path(tempfile.mkdtemp(prefix="rollbook-postgres-"))
    with socket.socket() as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    # PostgreSQL does not run as root.
    owner: list[str] = []
    if os.getuid() == 0:
        shutil.chown(folder, "postgres")
        owner = ["runuser", "-u", "postgres", "--"]
    data = folder / "data"

    def run(*command: str) -> None:
        subprocess.run([*owner, *command], check=True, stdout=subprocess.DEVNULL, cwd=folder)

    try:
        run(str(programs / "initdb"), "-D", str(data), "-A", "trust", "-U", "rollbook")
        if friends is not None:
            with (data / "pg_hba.conf").open("a") as rules:
                rules.write(f"host all all {friends} trust\n")
        options = f"-p {port} -k {folder} -c listen_addresses={address}"
        run(str(programs / "pg_ctl"), "-D", str(data), "-o", options, "-l", str(folder / "log"), "-w", "start")
        try:
            yield f"host={address} port={port} user=rollbook"
        finally:
            run(str(programs / "pg_ctl"), "-D", str(data), "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    with postgres() as server:
        status = subprocess.run(sys.argv[1:], env={**os.environ, "ROLLBOOK_TEST_LAKE": server}).returncode
    sys.exit(status)
