"""Runs a model's code in a process with limits, for rewards by execution.

The limits are those of an operating-system process: CPU and wall time, memory, file size, a folder of its own, no
environment, output cut at a length, everything it started killed at the end. It keeps accidents in, not attackers: a
process may still read files and use the network. For untrusted models run the whole agent in a container.
"""

import asyncio
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import anyio
import msgspec

from .command import end_group

_LIMITER = """
import resource, runpy, sys
cpu_s, memory, size = (int(a) for a in sys.argv[1:4])
resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
sys.argv = ["main.py"]
runpy.run_path("main.py", run_name="__main__")
"""


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """How a piece of code ended. exit_code: negative: by that signal; None: stopped at its time limit."""

    exit_code: int | None
    stdout: str
    stderr: str

    @property
    def is_ok(self) -> bool:
        """It ended by itself, without an error."""
        return self.exit_code == 0


async def run_code(
    code: str,
    *,
    stdin: str = "",
    timeout_s: float = 10.0,
    memory_bytes: int = 1 << 30,
    output_bytes: int = 1 << 20,
) -> Ran:
    """Run Python code as a program. Never raises for what the code does."""
    with tempfile.TemporaryDirectory(prefix="rollbook-code-") as folder:
        _prepare(Path(folder), code, stdin)
        limits = [str(max(1, int(timeout_s + 0.999))), str(memory_bytes), str(output_bytes)]
        with ExitStack() as files:
            source, out, errors = (
                files.enter_context(open(Path(folder, name), mode))  # noqa: ASYNC230, small and local
                for name, mode in (("stdin", "rb"), ("stdout", "wb"), ("stderr", "wb"))
            )
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-c", _LIMITER, *limits, cwd=folder, env={"PATH": os.defpath},
                stdin=source, stdout=out, stderr=errors, start_new_session=True,
            )  # fmt: skip
        code_: int | None = None
        try:
            with anyio.move_on_after(timeout_s):
                code_ = await process.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await end_group(process, grace_s=0)
        return Ran(exit_code=code_, stdout=_read(Path(folder, "stdout")), stderr=_read(Path(folder, "stderr")))


def _prepare(folder: Path, code: str, stdin: str) -> None:
    (folder / "main.py").write_text(code, encoding="utf-8")
    (folder / "stdin").write_text(stdin, encoding="utf-8")


def _read(path: Path) -> str:
    return path.read_bytes().decode(errors="replace")


async def passed_tests(code: str, tests: list[tuple[str, str]], *, timeout_s: float = 10.0) -> float:
    """The share of (stdin, expected stdout) pairs that a program gets right; blanks at line ends do not count."""
    if not tests:
        raise ValueError("expected at least one (stdin, stdout) pair, got none")
    right = 0
    for given, expected in tests:
        ran = await run_code(code, stdin=given, timeout_s=timeout_s)
        right += ran.is_ok and _lines(ran.stdout) == _lines(expected)
    return right / len(tests)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
