"""Run a command beside a PostgreSQL server of its own: `python with_postgres.py CMD...`.

The server lives in a temporary folder, on a free loopback port, and ends with the command. ROLLBOOK_TEST_LAKE says how
to reach it. Needs PostgreSQL's server programs (Debian: postgresql).
"""

import glob
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> int:
    found = shutil.which("postgres") or next(iter(sorted(glob.glob("/usr/lib/postgresql/*/bin/postgres"))[::-1]), None)
    if found is None:
        sys.exit("no PostgreSQL server on this machine: install it (Debian: apt-get install postgresql)")
    programs = Path(found).parent
    folder = Path(tempfile.mkdtemp(prefix="rollbook-postgres-"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # PostgreSQL does not run as root.
    owner: list[str] = []
    if os.getuid() == 0:
        shutil.chown(folder, "postgres")
        owner = ["runuser", "-u", "postgres", "--"]
    data = folder / "data"

    def run(*command: str) -> None:
        subprocess.run([*owner, *command], check=True, stdout=subprocess.DEVNULL, cwd=folder)

    run(str(programs / "initdb"), "-D", str(data), "-A", "trust", "-U", "rollbook")
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1"
    run(str(programs / "pg_ctl"), "-D", str(data), "-o", options, "-l", str(folder / "log"), "-w", "start")
    try:
        server = f"host=127.0.0.1 port={port} user=rollbook"
        return subprocess.run(sys.argv[1:], env={**os.environ, "ROLLBOOK_TEST_LAKE": server}).returncode
    finally:
        run(str(programs / "pg_ctl"), "-D", str(data), "-m", "immediate", "stop")
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
