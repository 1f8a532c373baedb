"""Worker processes: killed one by one, warm, and never holding anybody up."""

import asyncio
import gc
import os
import subprocess
import sys

import anyio
import pytest

import agents_jobs as jobs
from rollbook.agents.errors import BadReward, RewardFailed, WorkerTraceback
from rollbook.agents.pool import ProcessPool, WorkerDied, WorkerTimeout
from rollbook.agents.rewards import AsyncRewardWrapper

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def pool():
    pool = ProcessPool(2)
    yield pool
    pool.close()


async def test_calls_are_answered_by_warm_processes(pool):
    assert await pool.call(jobs.add, (1,), {"b": 2}) == 3
    assert await pool.call(jobs.add_later, (1, 2)) == 3
    pids = {await pool.call(jobs.pid) for _ in range(6)}
    assert len(pids) == 1
    assert os.getpid() not in pids


async def test_more_callers_than_workers_wait_their_turn(pool):
    results = []

    async def one(i):
        results.append(await pool.call(jobs.add, (i,)))

    async with anyio.create_task_group() as group:
        for i in range(20):
            group.start_soon(one, i)
    assert sorted(results) == list(range(20))


async def test_an_exception_comes_back_with_its_traceback(pool):
    with pytest.raises(ValueError, match=r"^no$") as caught:
        await pool.call(jobs.crash)
    assert isinstance(caught.value.__cause__, WorkerTraceback)
    assert "agents_jobs.py" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        await pool.call(jobs.leave)


async def test_a_call_that_takes_too_long_is_killed_with_what_it_started(pool, tmp_path):
    await pool.call(jobs.pid)  # a worker that is warm is asked next, and has begun within its time on any machine
    with pytest.raises(WorkerTimeout, match=r"longer than 3 s"):
        await pool.call(jobs.hang_with_child, (str(tmp_path / "pid"),), timeout_s=3.0)
    child = int((tmp_path / "pid").read_text())
    await anyio.to_thread.run_sync(jobs.gone, child)
    assert await pool.call(jobs.add, (1, 1)) == 2


async def test_a_cancelled_caller_gives_its_worker_up(pool):
    with anyio.move_on_after(0.3) as scope:
        await pool.call(jobs.hang)
    assert scope.cancelled_caught
    assert await pool.call(jobs.add, (1, 1)) == 2
    waiting = [anyio.CancelScope() for _ in range(5)]

    async def wait(scope):
        with scope:
            await pool.call(jobs.hang, (0.2,))

    async with anyio.create_task_group() as group:
        for scope in waiting:
            group.start_soon(wait, scope)
        await anyio.sleep(0.05)
        for scope in waiting:
            scope.cancel()
    assert await pool.call(jobs.add, (2, 1)) == 3
    assert pool._free == 2


async def test_a_killed_process_harms_only_its_own_call(pool):
    results = {}

    async def one(name, job, *args):
        try:
            results[name] = await pool.call(job, args)
        except WorkerDied as error:
            results[name] = error

    async with anyio.create_task_group() as group:
        group.start_soon(one, "sleeps", jobs.hang, 0.5)
        group.start_soon(one, "dies", jobs.die)
    assert results["sleeps"] == 1.0
    assert "exit code -9" in str(results["dies"])


async def test_a_job_that_forks_answers_once(pool):
    assert await pool.call(jobs.fork) == 1.0
    assert await pool.call(jobs.add, (1, 1)) == 2


async def test_the_environment_of_a_call_is_its_own(pool):
    assert await pool.call(jobs.variable, ("ROLLBOOK_X",), env={"ROLLBOOK_X": "1"}) == "1"
    assert await pool.call(jobs.variable, ("ROLLBOOK_X",)) is None


async def test_what_cannot_be_pickled_is_named(pool):
    with pytest.raises(TypeError, match="at the top level of a module"):
        await pool.call(lambda: 1)
    with pytest.raises(Exception, match="lambda"):
        await pool.call(jobs.unpicklable)


async def test_a_reward_function_judges_in_another_process():
    judge = AsyncRewardWrapper(jobs.add)
    assert await judge(1, b=0.5) == 1.5
    assert await AsyncRewardWrapper(jobs.pid)() != os.getpid()


async def test_a_reward_that_fails_is_a_failure_and_not_zero(tmp_path):
    with pytest.raises(RewardFailed, match="reward crash raised ValueError: no"):
        await AsyncRewardWrapper(jobs.crash)()
    with pytest.raises(RewardFailed, match=r"reward hang: took longer than 0.2 s.*tried 2 times"):
        await AsyncRewardWrapper(jobs.hang, timeout_seconds=0.2, max_retries=1)()
    with pytest.raises(RewardFailed, match="exit code -9"):
        await AsyncRewardWrapper(jobs.die, max_retries=0)()
    with pytest.raises(BadReward, match="is nan"):
        await AsyncRewardWrapper(jobs.nan)()
    assert await AsyncRewardWrapper(jobs.dies_once)(str(tmp_path / "once")) == 0.5


def test_a_main_program_without_a_guard_is_told_so(tmp_path):
    (tmp_path / "main.py").write_text(
        "import asyncio\nfrom rollbook.agents.rewards import AsyncRewardWrapper\n"
        "def judge():\n    return 1.0\nprint(asyncio.run(AsyncRewardWrapper(judge, max_retries=0)()))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "must stand under `if __name__" in done.stderr
    guarded = (tmp_path / "main.py").read_text().replace("print(", "if __name__ == '__main__':\n    print(")
    (tmp_path / "main.py").write_text(guarded)
    done = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == "1.0\n", done.stderr


def test_workers_end_with_a_killed_parent(tmp_path):
    (tmp_path / "main.py").write_text(
        "import asyncio, agents_jobs\nfrom rollbook.agents.pool import ProcessPool\n"
        "async def main():\n    pool = ProcessPool(1)\n    print(await pool.call(agents_jobs.pid), flush=True)\n"
        "    await pool.call(agents_jobs.hang)\n"
        "if __name__ == '__main__':\n    asyncio.run(main())\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "main.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        parent.kill()
    jobs.gone(worker)


async def test_a_worker_whose_first_call_cannot_be_read_says_why(tmp_path, monkeypatch):
    (tmp_path / "gone_later.py").write_text("def judge():\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import gone_later

    (tmp_path / "gone_later.py").write_text("import a_package_that_is_not_there\n")
    fresh = ProcessPool(1)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        await fresh.call(gone_later.judge)
    fresh.close()


def test_the_main_program_is_imported_for_what_it_defines_and_for_nothing_else(tmp_path):
    (tmp_path / "judges.py").write_text(
        "import sys\ndef n_imported():\n    return float(hasattr(sys.modules['__main__'], 'mine'))\n"
    )
    (tmp_path / "main.py").write_text(
        "import asyncio, judges, sys\nfrom rollbook.agents.pool import ProcessPool\n"
        "def mine():\n    return judges.n_imported()\n"
        "async def main():\n    pool = ProcessPool(1)\n"
        "    print([await pool.call(each) for each in (judges.n_imported, mine, judges.n_imported)], sys.argv)\n"
        "if __name__ == '__main__':\n    asyncio.run(main())\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", "main.py", "x"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[0.0, 1.0, 1.0] ['main.py', 'x']\n", "")


def test_a_pool_that_nobody_holds_any_more_takes_its_workers_along():
    pool = ProcessPool(1)
    worker = asyncio.run(pool.call(jobs.pid))
    del pool
    gc.collect()
    jobs.gone(worker)
