"""Groups of episodes against a proxy that keeps what it is told."""

import asyncio
import math
import os
import subprocess
import sys
import threading

import anyio
import numpy as np
import pytest

from agents_proxy import KeepingProxy
from rollbook.agents import runner as runner_module
from rollbook.agents.data import tasks_of
from rollbook.agents.runner import Runner, group_id_of, remaining_attempts
from rollbook.proxy.errors import EngineUnavailable

pytestmark = pytest.mark.anyio
TASKS = tasks_of([{"id": f"t{i}", "x": i} for i in range(3)])


def runner(workflow, proxy=None, **kwargs):
    return Runner(proxy or KeepingProxy(), workflow, run_id="run", **kwargs)


async def test_every_task_gets_a_group_of_samples_with_one_group_id():
    proxy = KeepingProxy()
    seen = []

    async def agent(data, base_url, api_key):
        seen.append((base_url, api_key))
        return data["x"]

    episodes = await runner(agent, proxy, n_samples=4).run(TASKS)
    assert len(episodes) == 12
    assert {e.group_id for e in episodes} == {"run/epoch-0/0", "run/epoch-0/1", "run/epoch-0/2"}
    assert len({key for _, key in seen}) == 12
    assert {url for url, _ in seen} == {"http://127.0.0.1:1/v1"}
    for episode in episodes:
        assert (episode.state, episode.reward, episode.n_interactions) == ("done", float(episode.task_id[1:]), 1)
    assert {s["state"] for s in proxy.sessions.values()} == {"done"}
    assert {s["run_id"] for s in proxy.sessions.values()} == {"run"}
    assert proxy.sessions["sk-0"]["task"] == {"id": "t0", "x": 0}


async def test_samples_of_a_group_run_in_parallel():
    barrier = asyncio.Barrier(8)

    async def agent(data):
        await barrier.wait()
        return 1

    assert len(await runner(agent, n_samples=8).run(TASKS[:1])) == 8


async def test_max_concurrent_bounds_episodes_over_all_groups():
    running, most = 0, 0

    async def agent(data):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await anyio.sleep(0.001)
        running -= 1

    await runner(agent, n_samples=4, max_concurrent=3).run(TASKS)
    assert most == 3


async def test_one_failing_sample_fails_alone_with_its_reason():
    proxy = KeepingProxy()
    n = iter(range(100))

    async def agent(data):
        if next(n) == 2:
            raise ValueError("no such tool")
        return 1.0

    episodes = await runner(agent, proxy, n_samples=4).run(TASKS[:1])
    failed = [e for e in episodes if e.state == "failed"]
    assert len(failed) == 1
    assert failed[0].reason.startswith("ValueError: no such tool (test_runner.py:")
    assert failed[0].reward is None
    assert sum(s["state"] == "done" for s in proxy.sessions.values()) == 3
    assert [s["reason"] for s in proxy.sessions.values() if s["state"] == "failed"] == [failed[0].reason]


@pytest.mark.parametrize("value", [1.0, 1, True, np.float32(1), np.int8(1)])
async def test_numbers_of_every_kind_are_rewards(value):
    async def agent(data):
        return value

    (episode,) = await runner(agent).run(TASKS[:1])
    assert (episode.state, episode.reward) == ("done", 1.0)


async def test_none_is_a_reward_that_comes_later():
    async def agent(data):
        return None

    proxy = KeepingProxy()
    (episode,) = await runner(agent, proxy).run(TASKS[:1])
    assert (episode.state, episode.reward) == ("done", None)
    assert proxy.sessions["sk-0"]["rewards"] == {}


@pytest.mark.parametrize(
    ("value", "says"), [(math.nan, "is nan"), ("good", r"'good' (str)"), ([1], "[1] (list)"), (object, "(type)")]
)
async def test_a_return_value_that_is_no_reward_fails_the_episode_and_is_not_tried_again(value, says):
    async def agent(data):
        return value

    (episode,) = await runner(agent, max_attempts=3).run(TASKS[:1])
    assert episode.state == "failed"
    assert "BadReward" in episode.reason
    assert says in episode.reason


async def test_an_unknown_interaction_id_is_an_error_and_the_known_ones_keep_their_reward():
    async def agent(data):
        return {"i0": 0.5, "i9": 1.0}

    proxy = KeepingProxy()
    (episode,) = await runner(agent, proxy).run(TASKS[:1])
    assert episode.state == "failed"
    assert "'i9'" in episode.reason
    assert proxy.sessions["sk-0"]["rewards"] == {"i0": 0.5}


async def test_a_reward_without_a_model_call_fails_the_episode():
    async def agent(data):
        return 1.0

    (episode,) = await runner(agent, KeepingProxy(calls=0)).run(TASKS[:1])
    assert episode.state == "failed"
    assert "found no model call" in episode.reason


async def test_an_agent_that_hangs_is_stopped_at_its_time_limit():
    async def agent(data):
        await anyio.sleep(3600)

    (episode,) = await runner(agent, time_limit_s=0.05).run(TASKS[:1])
    assert (episode.state, episode.reason) == ("failed", "AgentStopped: the agent took longer than 0.05 s")


async def test_an_agent_that_ignores_cancellation_is_left_behind(monkeypatch):
    monkeypatch.setattr(runner_module, "STOP_S", 0.05)
    release = asyncio.Event()

    async def stubborn(data):
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    it = runner(stubborn, time_limit_s=0.05)
    with anyio.fail_after(600):
        (episode,) = await it.run(TASKS[:1])
    assert episode.state == "failed"
    release.set()
    await asyncio.wait(it._left_behind, timeout=60)


def test_an_agent_that_is_left_behind_keeps_no_program_from_ending():
    program = """
import asyncio
from agents_proxy import KeepingProxy
from rollbook.agents import runner
from rollbook.agents.data import tasks_of

runner.STOP_S = 0.05

async def stubborn(data):
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue

it = runner.Runner(KeepingProxy(), stubborn, run_id="run", time_limit_s=0.05)
(episode,) = asyncio.run(it.run(tasks_of([{"id": "t"}])))
print(episode.state)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (ended.returncode, ended.stdout) == (0, "failed\n"), ended.stderr


async def test_a_sync_agent_that_hangs_holds_nobody_up():
    release = threading.Event()

    def agent(data):
        return float(release.wait(250)) if data["x"] == 0 else 1.0

    episodes = await runner(agent, time_limit_s=3).run(TASKS)
    assert [e.state for e in episodes] == ["failed", "done", "done"]
    release.set()


async def test_an_agents_own_timeout_is_its_own_error():
    async def agent(data):
        async with asyncio.timeout(0.01):
            await anyio.sleep(3600)

    (episode,) = await runner(agent, time_limit_s=60).run(TASKS[:1])
    assert episode.reason.startswith("TimeoutError")


async def test_an_agent_cannot_end_the_program_nor_cancel_its_neighbours():
    async def agent(data):
        if data["x"] == 0:
            sys.exit(3)
        if data["x"] == 1:
            raise asyncio.CancelledError
        return 1.0

    episodes = await runner(agent).run(TASKS)
    assert [e.state for e in episodes] == ["failed", "failed", "done"]
    assert "exit code 3" in episodes[0].reason
    assert "cancelled itself" in episodes[1].reason


async def test_a_panic_of_an_extension_is_one_episodes_failure():
    class Panic(BaseException):
        """As Rust extensions raise it."""

    async def agent(data):
        if data["x"] == 0:
            raise Panic("out of bounds")
        return 1.0

    episodes = await runner(agent).run(TASKS)
    assert [e.state for e in episodes] == ["failed", "done", "done"]
    assert "Panic: out of bounds" in episodes[0].reason


def test_a_keyboard_interrupt_of_an_agent_is_no_persons_where_none_can_be():
    async def agent(data):
        if data["x"] == 0:
            raise KeyboardInterrupt
        return 1.0

    found = []
    thread = threading.Thread(target=lambda: found.extend(asyncio.run(runner(agent).run(TASKS))))
    thread.start()
    thread.join()
    assert [e.state for e in found] == ["failed", "done", "done"]
    assert found[0].reason == "AgentStopped: the agent raised KeyboardInterrupt"


async def test_what_an_error_says_is_text_whatever_it_says():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("nothing to say")

    async def agent(data):
        raise [ValueError("half a \ud83d"), Mute(), ExceptionGroup("\udc80", [Mute()])][data["x"]]

    half, mute, group = (episode.reason for episode in await runner(agent).run(TASKS))
    assert half.startswith("ValueError: half a ? (test_runner.py:")
    assert mute.startswith("Mute: (its text cannot be had: RuntimeError) (test_runner.py:")
    assert group.startswith("ExceptionGroup: ? (1 sub-exception)")
    assert "; Mute: (its text" in group


async def test_failed_samples_are_tried_again_with_their_attempt_number():
    tried = []

    async def agent(data):
        tried.append(data["x"])
        if len(tried) < 3:
            raise OSError("flaky")
        return 1.0

    proxy = KeepingProxy()
    await runner(agent, proxy, max_attempts=5).run(TASKS[:1])
    assert proxy.ended() == [("t0", 1, "failed"), ("t0", 2, "failed"), ("t0", 3, "done")]


async def test_a_busy_proxy_is_asked_again_and_no_attempt_is_lost():
    async def agent(data):
        return 1.0

    proxy = KeepingProxy(busy=3)
    (episode,) = await runner(agent, proxy).run(TASKS[:1])
    assert (episode.state, episode.attempt) == ("done", 1)
    assert len(proxy.sessions) == 1


async def test_cancelling_the_runner_closes_every_session():
    started = asyncio.Event()
    proxy = KeepingProxy()

    async def agent(data):
        started.set()
        await anyio.sleep(3600)

    async with anyio.create_task_group() as group:
        group.start_soon(runner(agent, proxy, n_samples=4).run, TASKS)
        await started.wait()
        group.cancel_scope.cancel()
    assert len(proxy.sessions) >= 4
    assert {(s["state"], s["reason"]) for s in proxy.sessions.values()} == {("abandoned", "cancelled")}


async def test_a_session_whose_opening_was_on_its_way_when_the_runner_was_cancelled_is_closed(monkeypatch):
    """The proxy has opened it, and its answer is late or never comes."""
    monkeypatch.setattr(runner_module, "STOP_S", 2)
    proxy = KeepingProxy()
    opened, answered = asyncio.Event(), asyncio.Event()

    class Late:
        base_url = proxy.base_url
        end_session = staticmethod(proxy.end_session)

        async def start_session(self, task_id, **facts):
            started = await proxy.start_session(task_id, **facts)
            opened.set()
            if task_id == "t1":
                await anyio.sleep(3600)
            await answered.wait()
            return started

    async with anyio.create_task_group() as group:
        group.start_soon(runner(lambda data: 1, Late()).run, TASKS)
        await opened.wait()
        asyncio.get_running_loop().call_later(0.05, answered.set)
        group.cancel_scope.cancel()
    by_task = {session["task_id"]: (session["state"], session["reason"]) for session in proxy.sessions.values()}
    assert by_task == {"t0": ("abandoned", "cancelled"), "t1": ("open", None), "t2": ("abandoned", "cancelled")}
    assert not [task for task in asyncio.all_tasks() if "start_session" in repr(task)]


async def test_a_session_that_the_proxy_closed_ends_that_episode_alone():
    proxy = KeepingProxy()

    async def agent(data, api_key):
        if data["x"] == 0:
            proxy.sessions[api_key]["state"] = "abandoned"
        return 1.0

    episodes = await runner(agent, proxy).run(TASKS)
    assert [e.state for e in episodes] == ["failed", "done", "done"]
    assert "SessionEnded" in episodes[0].reason


async def test_a_proxy_that_is_gone_stops_the_runner():
    async def agent(data):
        return 1.0

    with pytest.raises(BaseExceptionGroup) as caught:
        await runner(agent, KeepingProxy(is_gone=True)).run(TASKS[:1])
    assert caught.group_contains(EngineUnavailable)


async def test_every_ended_episode_is_told_of():
    told = []

    async def agent(data):
        return 1.0

    episodes = await runner(agent, n_samples=2, on_episode=told.append).run(TASKS)
    assert sorted(e.episode_id for e in told) == sorted(e.episode_id for e in episodes)


async def test_what_an_agent_prints_is_printed(capsys):
    async def agent(data):
        print("thinking about", data["x"])

    await runner(agent).run(TASKS[:1])
    assert capsys.readouterr().out == "thinking about 0\n"


def test_group_ids_are_a_function_of_run_epoch_and_task():
    assert group_id_of("r", 2, 5) == group_id_of("r", 2, 5)
    assert len({group_id_of("r", e, i) for e in range(3) for i in range(3)}) == 9
    assert group_id_of("r", 0, 0, is_eval=True) != group_id_of("r", 0, 0)


@pytest.mark.parametrize(
    ("ended", "n", "most", "expected"),
    [
        ([], 3, 1, [1, 1, 1]),
        ([(1, "done")], 3, 1, [1, 1]),
        ([(1, "failed"), (1, "done")], 3, 1, [1]),
        ([(1, "failed"), (1, "done")], 2, 2, [2]),
        ([(1, "failed"), (2, "failed"), (1, "done")], 2, 2, []),
        ([(1, "failed"), (2, "failed")], 2, 3, [1, 3]),
        ([(1, "lost"), (1, "abandoned"), (1, "done")], 2, 1, [1]),
        ([(1, "done")] * 5, 3, 2, []),
    ],
)
def test_a_restart_starts_only_what_has_not_ended(ended, n, most, expected):
    assert remaining_attempts(ended, n_samples=n, max_attempts=most) == expected
