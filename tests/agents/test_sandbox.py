"""A model's code: judged by what it prints, kept within its limits."""

import anyio
import pytest

from agents_jobs import gone
from rollbook.agents.sandbox import passed_tests, run_code

pytestmark = pytest.mark.anyio


async def test_code_is_judged_by_what_it_prints():
    double = "print(int(input()) * 2)"
    assert await passed_tests(double, [("2\n", "4\n"), ("5", "10 ")]) == 1.0
    assert await passed_tests(double, [("2", "4"), ("5", "11")]) == 0.5
    assert await passed_tests("this is no code", [("2", "4")]) == 0.0
    with pytest.raises(ValueError, match="at least one"):
        await passed_tests(double, [])


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise ValueError('no')", "ValueError: no"),
        ("x = bytearray(2 << 30)", "MemoryError"),
        ("import sys; sys.exit('stop')", "stop"),
    ],
)
async def test_what_code_does_wrong_is_told_and_not_raised(code, says):
    ran = await run_code(code)
    assert not ran.is_ok
    assert says in ran.stderr


async def test_code_sees_no_environment(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    ran = await run_code("import os; print(sorted(os.environ))")
    assert "OPENAI_API_KEY" not in ran.stdout


async def test_code_that_does_not_end_is_ended_with_what_it_started():
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '3600']).pid, flush=True); time.sleep(3600)"
    for timeout_s in (2, 8, 32):  # as long as this machine takes to start it
        ran = await run_code(code, timeout_s=timeout_s)
        assert ran.exit_code is None
        if ran.stdout:
            break
    await anyio.to_thread.run_sync(gone, int(ran.stdout))
    assert (await run_code("while True: pass", timeout_s=1)).exit_code != 0


async def test_output_without_end_is_cut():
    ran = await run_code("while True: print('x' * 1000)", output_bytes=100_000, timeout_s=10)
    assert not ran.is_ok
    assert len(ran.stdout) <= 100_000
