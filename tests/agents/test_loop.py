"""The loop of a training run: how far ahead it goes, and what a restart does."""

import threading
from collections import Counter

import anyio
import pytest

from agents_proxy import KeepingProxy
from rollbook.agents.config import RolloutConfig
from rollbook.agents.data import order, tasks_of
from rollbook.agents.errors import RolloutsFailing
from rollbook.agents.loop import RolloutLoop
from rollbook.agents.runner import Runner

pytestmark = pytest.mark.anyio
TASKS = tasks_of([{"id": f"t{i}", "i": i} for i in range(12)])


async def good(data):
    return 1.0


def make(workflow=good, proxy=None, *, n_samples=2, max_attempts=1, config=None, **kwargs):
    proxy = proxy or KeepingProxy()
    runner = Runner(proxy, workflow, run_id="run", n_samples=n_samples, max_attempts=max_attempts)
    config = config or RolloutConfig(consumer_batch_size=4)
    return proxy, RolloutLoop(runner, TASKS, config, **{"total_epochs": 1, **kwargs})


async def settled(loop):
    """Until nothing runs and nothing more may begin."""
    await anyio.wait_all_tasks_blocked()
    assert loop.progress.running == 0


def groups(proxy):
    return list(dict.fromkeys(s["group_id"] for s in proxy.sessions.values()))


async def test_groups_begin_as_staleness_allows_and_a_new_version_lets_more_begin():
    proxy, loop = make()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await settled(loop)
        assert len(groups(proxy)) == 4
        loop.on_version(1)
        await settled(loop)
        assert len(groups(proxy)) == 8
        loop.on_version(0)  # old news
        await settled(loop)
        assert loop.progress.version == 1
        loop.reject(2)
        await settled(loop)
        assert len(groups(proxy)) == 10
        loop.on_version(9)
    assert len(groups(proxy)) == 12
    assert loop.progress.accepted == 10


async def test_another_thread_may_announce_a_version():
    proxy, loop = make()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await settled(loop)
        thread = threading.Thread(target=loop.on_version, args=(5,))
        thread.start()
        await anyio.to_thread.run_sync(thread.join)
    assert len(groups(proxy)) == 12


async def test_groups_start_in_the_order_of_seed_and_epoch():
    config = RolloutConfig(consumer_batch_size=100, max_concurrent_rollouts=1)
    proxy, loop = make(config=config, seed=3, total_epochs=2)
    await loop.run()
    expected = [f"run/epoch-{e}/{i}" for e in range(2) for i in order(12, epoch=e, seed=3).tolist()]
    assert groups(proxy) == expected


async def test_a_restart_redoes_nothing_that_ended_and_skips_nothing():
    config = RolloutConfig(consumer_batch_size=100, max_concurrent_rollouts=3)
    proxy, loop = make(config=config, n_samples=3, total_epochs=2)
    with anyio.CancelScope() as scope:

        def stop_midway(group_id, episodes):
            if len(groups(proxy)) > 14:
                scope.cancel()

        loop._on_group = stop_midway
        await loop.run()
    ended = {}
    for session in proxy.sessions.values():
        ended.setdefault(session["group_id"], []).append((session["attempt"], session["state"]))
    n_done = Counter(g for g, e in ended.items() for a, s in e if s == "done")
    assert 0 < sum(n_done.values()) < 72
    _, again = make(proxy=proxy, config=config, n_samples=3, total_epochs=2, ended=ended)
    assert again.progress.accepted == sum(n == 3 for n in n_done.values())
    await again.run()
    done = Counter(s["group_id"] for s in proxy.sessions.values() if s["state"] == "done")
    assert done == {f"run/epoch-{e}/{i}": 3 for e in range(2) for i in range(12)}


async def test_a_group_without_a_good_sample_is_rejected_and_its_place_filled():
    async def agent(data):
        if data["i"] < 4:
            raise ValueError("no")
        return 1.0

    proxy, loop = make(agent)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await settled(loop)
        progress = loop.progress
        assert progress.accepted == 4
        assert len(groups(proxy)) == 4 + progress.rejected
        tasks.cancel_scope.cancel()


async def test_when_everything_fails_the_loop_stops_with_the_reason():
    async def agent(data):
        raise ImportError("no module named tool_box")

    _, loop = make(agent, config=RolloutConfig(max_concurrent_rollouts=2), total_epochs=None)
    with anyio.fail_after(600), pytest.raises(BaseExceptionGroup) as caught:
        await loop.run()
    assert caught.group_contains(RolloutsFailing, match=r"the last 32 episodes .*ImportError: no module named tool_box")


async def test_weights_choose_the_rows_of_an_epoch():
    asked = []

    def weights(epoch):
        asked.append((epoch, threading.current_thread() is threading.main_thread()))
        return [1.0 if i in (epoch, 7) else 0.0 for i in range(12)]

    proxy, loop = make(config=RolloutConfig(consumer_batch_size=99), weights=weights, total_epochs=2)
    await loop.run()
    assert asked == [(0, False), (1, False)]
    assert set(groups(proxy)) == {"run/epoch-0/0", "run/epoch-0/7", "run/epoch-1/1", "run/epoch-1/7"}
