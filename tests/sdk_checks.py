"""Running examples and scripts as programs of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
EXAMPLES = TESTS.parent / "examples"


def environment() -> dict[str, str]:
    """Ours, with the examples importable, nothing sent anywhere, and one thread for torch."""
    path = os.pathsep.join([str(EXAMPLES), *sys.path])
    return {**os.environ, "PYTHONPATH": path, "OPENAI_AGENTS_DISABLE_TRACING": "1", "OMP_NUM_THREADS": "1"}


def run_example(*arguments: str, timeout_s: float = 800) -> dict[str, Any]:
    """What `agents_example.py` prints last."""
    command = [sys.executable, str(TESTS / "agents_example.py"), *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def run_areal(folder: Path, script: str, config: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    """`rollbook run-areal train.py --config config.yaml ...` in a folder."""
    (folder / "train.py").write_text(script)
    (folder / "config.yaml").write_text(config.replace("FOLDER", str(folder)))
    command = [sys.executable, "-m", "rollbook.app.cli", "run-areal", "train.py", "--config", "config.yaml", *overrides]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=800)
