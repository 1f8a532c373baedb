"""Agents against the real server: what the book says after each of them."""

import math
import sys

import aiohttp
import anyio
import pytest
from openai import AsyncOpenAI

import agents_jobs
from agents_scripts import counting, text_of
from ports import free_port
from proxy_serving import said, serving
from rollbook.agents.config import AgentConfig
from rollbook.agents.data import tasks_of
from rollbook.agents.errors import BadReward, RewardFailed, WorkflowError
from rollbook.agents.judge import model_judge
from rollbook.agents.modes import workflow_of
from rollbook.agents.online import keep_open
from rollbook.agents.rewards import AsyncRewardWrapper
from rollbook.agents.runner import Runner
from rollbook.agents.subprocesses import SubprocessAgent
from rollbook.proxy.client import ProxyClient
from rollbook.proxy.config import ServeConfig
from rollbook.proxy.errors import EngineUnavailable
from rollbook.store.book import Book
from rollbook.store.directory import DirectoryLog

pytestmark = pytest.mark.anyio
TASKS = tasks_of([{"id": f"t{i}", "messages": [{"role": "user", "content": f"What is {i}?"}]} for i in range(3)])


async def talk(data, base_url, api_key, n_turns=2, **_):
    """A conversation of some turns; the last reply counts."""
    messages = list(data["messages"])
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _turn in range(n_turns):
            reply = await client.chat.completions.create(model="default", messages=messages)
            messages += [
                {"role": "assistant", "content": reply.choices[0].message.content},
                {"role": "user", "content": "And?"},
            ]
    return float(reply.choices[0].message.content == f"turn {n_turns}")


async def test_every_call_reward_and_end_is_in_the_book():
    async with serving(counting) as served:
        runner = Runner(served.client, talk, run_id="run", n_samples=2)
        episodes = await runner.run(TASKS)
        assert [(e.state, e.reward, e.n_interactions) for e in episodes] == [("done", 1.0, 2)] * 6
        opened = served.events("EpisodeOpened")
        assert {(e.run_id, e.fact.group_id, e.fact.attempt) for e in opened} == {
            ("run", f"run/epoch-0/{i}", 1) for i in range(3)
        }
        assert [e.fact.task["id"] for e in opened if e.fact.task_id == "t1"] == ["t1", "t1"]
        assert len(served.events("InteractionRecorded")) == 12
        rewards = served.events("RewardGiven")
        last = {e.episode_id: e.interaction_id for e in served.events("InteractionRecorded")}
        assert {e.episode_id: e.interaction_id for e in rewards} == last
        assert {(e.fact.value, e.fact.source) for e in rewards} == {(1.0, f"agent {__name__}.talk")}
        assert [e.fact.state for e in served.events("EpisodeClosed")] == ["done"] * 6


async def test_rewards_by_interaction_id_reach_their_interactions():
    ids = []

    async def agent(data, base_url, api_key):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for _ in range(2):
                ids.append((await client.chat.completions.create(model="m", messages=data["messages"])).id)
        return {ids[0]: 0.25, "chatcmpl-unknown": 1.0, ids[1]: 0.75}

    async with serving(counting) as served:
        (episode,) = await Runner(served.client, agent, run_id="run").run(TASKS[:1])
        assert episode.state == "failed"
        assert "'chatcmpl-unknown'" in episode.reason
        given = {e.interaction_id: e.fact.value for e in served.events("RewardGiven")}
        assert given == {ids[0]: 0.25, ids[1]: 0.75}


async def test_a_reward_without_a_call_fails_and_no_call_without_a_reward_is_done():
    async def rewarded(data):
        return 1.0

    async def idle(data):
        return None

    async with serving(counting) as served:
        (episode,) = await Runner(served.client, rewarded, run_id="run").run(TASKS[:1])
        assert "found no model call" in episode.reason
        (episode,) = await Runner(served.client, idle, run_id="run").run(TASKS[:1])
        assert (episode.state, episode.reward, episode.n_interactions) == ("done", None, 0)


async def test_a_call_after_the_end_is_refused_and_harms_nobody():
    kept = {}

    async def leaves_its_client_open(data, base_url, api_key):
        kept["client"] = client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        await client.chat.completions.create(model="m", messages=data["messages"])
        return 1.0

    async with serving(counting) as served:
        (episode,) = await Runner(served.client, leaves_its_client_open, run_id="run").run(TASKS[:1])
        assert episode.state == "done"
        async with kept["client"] as client:
            with pytest.raises(Exception, match="410"):
                await client.chat.completions.create(model="m", messages=TASKS[0].row["messages"])
        assert len(served.events("InteractionRecorded")) == 1


async def test_a_hung_agent_is_stopped_and_what_it_said_stays():
    async def hangs(data, base_url, api_key):
        await talk(data, base_url, api_key, n_turns=1)
        await anyio.sleep(3600)

    async with serving(counting) as served:
        for time_limit_s in (2, 8, 32):  # as long as this machine takes for a call
            (episode,) = await Runner(served.client, hangs, run_id="run", time_limit_s=time_limit_s).run(TASKS[:1])
            closed = served.events("EpisodeClosed")[-1]
            assert (closed.fact.state, closed.fact.reason) == (episode.state, episode.reason)
            assert episode.state == "failed"
            if episode.n_interactions:
                break
        assert episode.n_interactions == 1


async def test_an_engine_that_dies_fails_the_episodes_that_ask_it_and_no_others():
    n = iter(range(1000))

    def dies_once(generation):
        if next(n) == 3:
            raise EngineUnavailable("the engine's process is gone")
        return counting(generation)

    async with serving(dies_once) as served:

        async def agent(data, base_url, api_key):
            async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
                await client.chat.completions.create(model="m", messages=data["messages"])
            return 1.0

        episodes = await Runner(served.client, agent, run_id="run", n_samples=2, max_attempts=2).run(TASKS)
        assert sum(e.state == "failed" for e in episodes) == 1
        (failed,) = [e for e in episodes if e.state == "failed"]
        assert "503" in failed.reason
        assert sum(e.state == "done" for e in episodes) == 6
        assert [e.attempt for e in episodes if e.group_id == failed.group_id and e.state == "done"].count(2) == 1


async def test_an_episode_goes_on_over_a_restart_of_the_server(tmp_path):
    at_half, restarted = anyio.Event(), anyio.Event()

    async def agent(data, base_url, api_key):
        messages = list(data["messages"])
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=6) as client:
            for turn in range(4):
                if turn == 2:
                    at_half.set()
                reply = await client.chat.completions.create(model="m", messages=messages)
                messages += [
                    {"role": "assistant", "content": reply.choices[0].message.content},
                    {"role": "user", "content": "And?"},
                ]
        return float(reply.choices[0].message.content == "turn 4")

    async def hold(generation):
        if "turn 2" in (text := text_of(generation)) and not restarted.is_set():
            await anyio.sleep(30)
        return said(f"turn {text.count('<|im_start|>assistant')}")

    key = "admin-key-of-the-tests"
    config = ServeConfig(admin_key=key, port=free_port())
    log = DirectoryLog(tmp_path / "book", writer="proxy")
    async with anyio.create_task_group() as group:
        episodes = []
        async with serving(hold, log=log, config=config) as served:
            client = ProxyClient(served.url, key)

            async def run():
                episodes.extend(await Runner(client, agent, run_id="run").run(TASKS[:1]))

            group.start_soon(run)
            await at_half.wait()
            await anyio.sleep(0.1)
        log.close()
        restarted.set()
        log = DirectoryLog(tmp_path / "book", writer="proxy")
        async with serving(hold, log=log, config=config) as served:
            with anyio.fail_after(250):
                while not episodes:  # noqa: ASYNC110
                    await anyio.sleep(0.02)
            assert [(e.state, e.reward, e.n_interactions) for e in episodes] == [("done", 1.0, 4)]
            recorded = served.events("InteractionRecorded")
            assert len({e.interaction_id for e in recorded}) == 4
            assert {e.episode_id for e in recorded} == {episodes[0].episode_id}
        log.close()
        await client.aclose()


async def test_a_proxy_that_goes_away_for_good_stops_the_runner():
    begun, gone = anyio.Event(), anyio.Event()

    async def agent(data):
        begun.set()
        await gone.wait()
        return 1.0

    async def outlive():
        async with anyio.create_task_group() as group:
            async with serving(counting) as served:
                client = ProxyClient(served.url, served.service.admin_key)
                group.start_soon(Runner(client, agent, run_id="run").run, TASKS[:1])
                await begun.wait()
            gone.set()

    with pytest.raises(BaseExceptionGroup) as caught:
        await outlive()
    assert caught.group_contains(EngineUnavailable, match="is the server up")


async def test_sync_agents_talk_from_subprocesses():
    agent = SubprocessAgent("agents_jobs.ask", max_workers=2)
    async with serving(counting) as served:
        episodes = await Runner(served.client, agent, run_id="run").run(TASKS)
    agent.close()
    assert [(e.state, e.reward, e.n_interactions) for e in episodes] == [("done", 1.0, 1)] * 3


async def test_two_hundred_episodes_at_once_lose_nothing():
    async with serving(counting) as served, aiohttp.ClientSession() as http:

        async def agent(data, api_key):
            for _ in range(2):
                body = {"model": "m", "messages": data["messages"]}
                headers = {"authorization": f"Bearer {api_key}"}
                async with http.post(f"{served.base_url}/chat/completions", json=body, headers=headers) as answer:
                    answer.raise_for_status()
            return 1.0

        episodes = await Runner(served.client, agent, run_id="run", n_samples=200).run(TASKS[:1])
        assert {(e.state, e.n_interactions) for e in episodes} == {("done", 2)}
        assert len({e.interaction_id for e in served.events("InteractionRecorded")}) == 400


async def test_an_application_keeps_its_key_over_many_sessions():
    key, opened = "sk-my-chat-application", []
    async with serving(counting) as served, AsyncOpenAI(base_url=served.base_url, api_key=key) as client:
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: keep_open(served.client, key, run_id="run", look_s=0.01, on_open=opened.append))
            for n in range(1, 4):
                with anyio.fail_after(600):
                    while len(opened) < n:  # noqa: ASYNC110
                        await anyio.sleep(0.005)
                reply = await client.chat.completions.create(model="m", messages=TASKS[0].row["messages"])
                assert reply.choices[0].message.content == "turn 1"
                await served.client.set_reward(key, n)
                await served.client.end_session(key)
            group.cancel_scope.cancel()
        recorded = served.events("InteractionRecorded")
        assert [e.episode_id for e in recorded] == opened[:3]
        assert [e.fact.value for e in served.events("RewardGiven")] == [1.0, 2.0, 3.0]
        groups = [e.fact.group_id for e in served.events("EpisodeOpened")]
        assert len(set(groups)) == len(groups)


@pytest.mark.parametrize(
    ("judge", "says"),
    [
        ("crash", "RewardFailed: reward crash raised ValueError: no"),
        ("hang", "RewardFailed: reward hang: took longer than 0.5 s"),
        ("nan", "BadReward: the returned reward is nan"),
        ("die", "RewardFailed: reward die: its process ended (exit code -9)"),
    ],
)
async def test_a_reward_that_fails_is_missing_with_its_reason(judge, says):
    timeout_s = 0.5 if judge == "hang" else 200.0
    wrapped = AsyncRewardWrapper(getattr(agents_jobs, judge), timeout_seconds=timeout_s, max_retries=0)

    async def agent(data, base_url, api_key):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            await client.chat.completions.create(model="m", messages=data["messages"])
        return await wrapped()

    async with serving(counting) as served:
        (episode,) = await Runner(served.client, agent, run_id="run").run(TASKS[:1])
        assert (episode.state, episode.reward, episode.n_interactions) == ("failed", None, 1)
        assert says in episode.reason
        assert served.events("RewardGiven") == []
        assert [e.fact.reason for e in served.events("EpisodeClosed")] == [episode.reason]


async def test_the_config_says_how_agents_run():
    async with serving(counting) as served:
        for config, workflow in [
            (AgentConfig(), "agents_jobs.Asking"),
            (AgentConfig(mode="subproc", subproc_max_workers=1), "agents_jobs.Asking"),
            (AgentConfig(mode="command", command=[sys.executable, "-c", agents_jobs.ASKING]), None),
        ]:
            agent = workflow_of(config, workflow)
            try:
                (episode,) = await Runner(served.client, agent, run_id="run").run(TASKS[:1])
            finally:
                agent.close()
            assert (episode.reason, episode.state, episode.reward) == (None, "done", 1.0)
    for config, says in [
        (AgentConfig(mode="command"), "names no program"),
        (AgentConfig(mode="online"), "there is none to run"),
    ]:
        with pytest.raises(WorkflowError, match=says):
            workflow_of(config, "agents_jobs.Asking")


def judging(generation):
    """The answer, or as the judge of it a mark."""
    text = text_of(generation)
    if "You judge answers" not in text:
        return said("maybe 4")
    return said("I give it a 7" if "maybe 4" in text else "no idea")


async def test_a_model_judges_as_a_role_of_its_own_that_is_not_trained():
    async def agent(data, base_url, api_key):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            reply = await client.chat.completions.create(model="m", messages=data["messages"])
        content = reply.choices[0].message.content
        asked = data["messages"][0]["content"]
        with pytest.raises(RewardFailed, match="said 'no idea'"):
            await model_judge(asked, "something else", base_url=base_url, api_key=api_key)
        return await model_judge(asked, content, base_url=base_url, api_key=api_key)

    async with serving(judging) as served:
        (episode,) = await Runner(served.client, agent, run_id="run").run(TASKS[:1])
        assert (episode.state, episode.reason, episode.reward) == ("done", None, 0.7)
        work, *judged = served.events("InteractionRecorded")
        assert [(e.fact.role, e.fact.is_trainable) for e in judged] == [("judge", False)] * 2
        (given,) = served.events("RewardGiven")
        assert given.interaction_id == work.interaction_id


async def test_an_agent_rewards_its_episode_as_it_goes_in_parts_with_weights():
    ids = []

    async def agent(data, base_url, api_key, episode):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            messages = list(data["messages"])
            for _ in range(2):
                reply = await client.chat.completions.create(model="m", messages=messages)
                ids.append(reply.id)
                messages += [{"role": "assistant", "content": reply.choices[0].message.content}, messages[0]]
        assert await episode.reward(0.25, interaction_id=ids[0], details={"judge": "a"}) == ids[0]
        parts = {"correct": True, "form": 0.5}
        assert await episode.reward(parts, weights={"correct": 0.8, "form": 0.2}) == ids[1]
        for wrong, says in [
            ({"value": math.nan}, "is nan"),
            ({"value": 1.0, "interaction_id": "chatcmpl-nobody"}, "no interaction 'chatcmpl-nobody'"),
            ({"value": {"correct": 1.0}, "weights": {"form": 1.0}}, "weights for form, but the parts are correct"),
            ({"value": 1.0, "weights": {"form": 1.0}}, "weights are for named parts"),
            ({"value": {"reward": 1.0}}, "give the part another name"),
        ]:
            with pytest.raises(BadReward, match=says):
                await episode.reward(**wrong)

    async with serving(counting) as served:
        (episode,) = await Runner(served.client, agent, run_id="run").run(TASKS[:1])
        assert (episode.reason, episode.state) == (None, "done")
        given = [(e.interaction_id, e.fact.name, e.fact.value) for e in served.events("RewardGiven")]
        assert given == [
            (ids[0], "reward", 0.25),
            (ids[1], "correct", 1.0),
            (ids[1], "form", 0.5),
            (ids[1], "reward", pytest.approx(0.9)),
        ]
        book = Book(served.log)
        assert book.sql("select reward from episodes")["reward"].to_pylist() == [pytest.approx(1.15)]
        again = book.credits(reward="0.5 * correct + 0.5 * form")
        assert set(again["credit"].to_pylist()) == {0.75}, "the parts are weighed anew by SQL"


async def test_a_program_that_is_not_async_rewards_its_episode_from_its_environment():
    agent = workflow_of(AgentConfig(mode="command", command=[sys.executable, "-c", agents_jobs.REWARDING]), None)
    async with serving(counting) as served:
        (episode,) = await Runner(served.client, agent, run_id="run").run(TASKS[:1])
        assert (episode.reason, episode.state) == (None, "done")
        assert {e.fact.name: e.fact.value for e in served.events("RewardGiven")} == {"correct": 1.0, "reward": 2.0}
