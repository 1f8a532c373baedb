"""Agents that block, crash, fork, shout or are programs: each harms its own episode at most."""

import logging
import os
import sys
import textwrap
import threading
import time
import warnings

import anyio
import pytest

from agents_jobs import gone
from agents_proxy import KeepingProxy
from rollbook.agents import watch
from rollbook.agents.command import CommandAgent
from rollbook.agents.data import tasks_of
from rollbook.agents.errors import WorkflowError
from rollbook.agents.runner import Runner
from rollbook.agents.subprocesses import SubprocessAgent

pytestmark = pytest.mark.anyio
TASKS = tasks_of([{"id": f"t{i}", "x": i} for i in range(3)])


async def run(workflow, tasks=TASKS[:1], **kwargs):
    proxy = KeepingProxy()
    try:
        return await Runner(proxy, workflow, run_id="run", **kwargs).run(tasks)
    finally:
        workflow.close()


# Subprocess


async def test_a_subprocess_agent_finds_the_proxy_in_its_environment():
    (episode,) = await run(SubprocessAgent("agents_jobs.Environment"))
    assert (episode.state, episode.reward) == ("done", 3.0)


async def test_a_subprocess_agent_keeps_its_state_as_long_as_its_worker():
    episodes = await run(SubprocessAgent("agents_jobs.Counter", {"start": 10}, max_workers=1), TASKS, max_concurrent=1)
    assert [e.reward for e in episodes] == [11.0, 12.0, 13.0]


async def test_sync_and_async_agents_run_in_subprocesses_side_by_side(tmp_path):
    agent = SubprocessAgent("agents_jobs.meet", max_workers=3)
    tasks = tasks_of([{"id": str(i), "at": str(tmp_path), "n": 3} for i in range(3)])
    assert [e.reward for e in await run(agent, tasks)] == [3.0] * 3
    (episode,) = await run(SubprocessAgent("agents_jobs.later"))
    assert episode.reward == 0.0


@pytest.mark.parametrize(
    ("agent", "state", "says"),
    [
        ("crash_agent", "failed", "ValueError: no (agents_jobs.py"),
        ("die", "failed", "exit code -9"),
        ("leave", "failed", "SystemExit: 3"),
        ("fork", "done", None),
        ("shout", "done", None),
        ("nan", "failed", "is nan"),
        ("unpicklable_agent", "failed", "was returned that pickle cannot send"),
    ],
)
async def test_what_a_subprocess_agent_does_wrong_is_its_episodes_reason(agent, state, says, capfd):
    (episode,) = await run(SubprocessAgent(f"agents_jobs.{agent}"))
    assert episode.state == state
    assert says is None or says in episode.reason
    if agent == "shout":
        assert capfd.readouterr().out.count("x" * 100) == 20_000


async def test_a_subprocess_agent_that_hangs_is_killed_at_its_time_limit():
    agent = SubprocessAgent("agents_jobs.hang_for", max_workers=1)
    hangs, ends = (tasks_of([{"id": "a", "seconds": seconds}]) for seconds in (3600, 0))
    try:
        (episode,) = await Runner(KeepingProxy(), agent, run_id="run", time_limit_s=2).run(hangs)
        assert (episode.state, "took longer than 2 s" in episode.reason) == ("failed", True)
        (episode,) = await Runner(KeepingProxy(), agent, run_id="run").run(ends)
        assert episode.state == "done", "its place was taken by a worker that lives"
    finally:
        agent.close()


def test_what_cannot_be_sent_to_a_subprocess_is_said_at_once():
    with pytest.raises(WorkflowError, match="give an import string"):
        SubprocessAgent(lambda data: 1.0)
    with pytest.raises(WorkflowError, match="has no 'Nothing'"):
        SubprocessAgent("agents_jobs.Nothing")


# Command


def program(text: str) -> CommandAgent:
    return CommandAgent([sys.executable, "-c", textwrap.dedent(text)])


async def test_a_program_gets_its_task_and_leaves_its_reward(capfd):
    agent = program("""
        import json, os, sys
        task = json.load(open(os.environ["ROLLBOOK_TASK_FILE"]))
        assert os.environ["OPENAI_API_KEY"].startswith("sk-")
        print("out", task["x"]); print("err", task["x"], file=sys.stderr)
        open(os.environ["ROLLBOOK_REWARD_FILE"], "w").write(str(task["x"] / 2))
    """)
    episodes = await run(agent, TASKS)
    assert [e.reward for e in episodes] == [0.0, 0.5, 1.0]
    shown = capfd.readouterr()
    assert sorted(shown.out.split("\n")) == ["", "out 0", "out 1", "out 2"]
    assert "err 2" in shown.err


@pytest.mark.parametrize(
    ("text", "state", "says"),
    [
        ("pass", "done", None),
        ("import sys; sys.exit('no such tool')", "failed", "ended with exit code 1: no such tool"),
        ("import os; os.kill(os.getpid(), 9)", "failed", "was ended by SIGKILL"),
        ("import os; open(os.environ['ROLLBOOK_REWARD_FILE'], 'w').write('good')", "failed", "holds 'good'"),
        ("import os; open(os.environ['ROLLBOOK_REWARD_FILE'], 'w').write('NaN')", "failed", "is nan"),
        ("import os; open(os.environ['ROLLBOOK_REWARD_FILE'], 'w').write('{\"i0\": 0.5}')", "done", None),
    ],
)
async def test_how_a_program_ends_is_how_its_episode_ends(text, state, says):
    (episode,) = await run(program(text))
    assert episode.state == state
    assert says is None or says in episode.reason


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_a_program_that_writes_without_end_is_shown_to_a_limit_and_does_not_wait_for_a_reader(stream, capfd):
    agent = program(f"""
        import sys
        for i in range(100_000):
            print(f"line {{i:>90}}", file=sys.{stream})
        sys.exit(f"the end")
    """)
    (episode,) = await run(agent)
    assert episode.reason.endswith("the end")
    shown = getattr(capfd.readouterr(), {"stdout": "out", "stderr": "err"}[stream])
    assert f"line {0:>90}\nline {1:>90}\n" in shown
    assert f"the rest of {sys.executable}'s {stream} in this episode is not shown" in shown
    assert len(shown) < 70_000


async def test_the_reason_ends_with_the_last_words_of_a_program_however_long_its_name(tmp_path):
    folder = tmp_path.joinpath(*["folder-" * 20] * 6)
    folder.mkdir(parents=True)
    loud = folder / "loud"
    loud.write_text(
        "#!/bin/sh\nfor i in 1 2 3 4 5 6 7 8 9; do printf '%0200d\\n' $i >&2; done; echo the end >&2; exit 1\n"
    )
    loud.chmod(0o755)
    (episode,) = await run(CommandAgent([str(loud)]))
    assert episode.reason.startswith("AgentFailed: /")
    assert episode.reason.endswith("9\nthe end")
    assert len(episode.reason) == 2000


async def test_a_program_that_cannot_start_is_named():
    (episode,) = await run(CommandAgent(["no-such-program"]))
    assert "cannot start 'no-such-program': No such file or directory" in episode.reason


async def test_a_program_that_hangs_is_ended_with_what_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr("rollbook.agents.command.STOP_S", 0.2)
    # A shell: it has begun within its time on any machine.
    agent = CommandAgent(["sh", "-c", f"trap '' TERM; sleep 3600 & echo $! > {tmp_path}/pid; wait"])
    (episode,) = await run(agent, time_limit_s=3)
    assert "took longer than 3 s" in episode.reason
    await anyio.to_thread.run_sync(gone, int((tmp_path / "pid").read_text()))


async def test_what_a_program_leaves_running_ends_with_it(tmp_path):
    agent = program(f"""
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
    """)
    (episode,) = await run(agent)
    assert episode.state == "done"
    await anyio.to_thread.run_sync(gone, int((tmp_path / "pid").read_text()))


# Blocking code on the event loop


async def test_an_agent_that_blocks_the_loop_is_noticed_and_moved_to_threads(monkeypatch, caplog):
    monkeypatch.setattr(watch, "BLOCKED_S", 0.05)
    threads = []

    async def blocks(data):
        threads.append(threading.current_thread() is threading.main_thread())
        time.sleep(0.3)  # noqa: ASYNC251
        return 1.0

    with caplog.at_level(logging.WARNING, "rollbook.agents"):
        it = Runner(KeepingProxy(), blocks, run_id="run", max_concurrent=1)
        episodes = await it.run(tasks_of([{"id": str(i)} for i in range(4)]))
    assert [e.reward for e in episodes] == [1.0] * 4
    assert threads[0] is True
    assert threads[-1] is False
    assert "test_modes.py" in caplog.text
    assert "in blocks" in caplog.text


async def test_a_loop_that_someone_else_blocks_is_not_the_agents_fault(monkeypatch):
    monkeypatch.setattr(watch, "BLOCKED_S", 0.5)  # so long no step of the agent takes, if it is put aside by others

    async def agent(data):
        await anyio.sleep(0.01)
        return 1.0

    it = Runner(KeepingProxy(), agent, run_id="run", max_concurrent=1, on_episode=lambda e: time.sleep(0.7))
    await it.run(tasks_of([{"id": str(i)} for i in range(3)]))
    assert it.workflow.blocking.strikes == 0


async def test_an_agent_that_forks_on_the_loop_is_one_agent():
    async def agent(data):
        if os.fork() == 0:
            return 2.0
        return 1.0

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 and later, for the fork itself
        (episode,) = await Runner(KeepingProxy(), agent, run_id="run").run(TASKS[:1])
    assert episode.reward == 1.0
