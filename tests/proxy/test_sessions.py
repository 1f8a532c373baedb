"""Sessions over HTTP: who may do what, what the book gets, and what a restart knows."""

import asyncio
import hashlib

import anyio
import httpx
import pytest

from proxy_serving import BYTES, said, serving
from rollbook.proxy.client import ProxyClient
from rollbook.proxy.config import ServeConfig
from rollbook.proxy.errors import BadRequest, Busy, Conflict, Forbidden, NotFound, SessionEnded, Unauthorized
from rollbook.proxy.server import Service
from rollbook.store import DirectoryLog, MemoryLog, prune

pytestmark = pytest.mark.anyio
ADMIN = "admin-key-of-the-tests"


def answer(_):
    return said("ok")


async def ask(served, key, text="hi", **body):
    async with httpx.AsyncClient(timeout=60, base_url=served.url, trust_env=False) as http:
        return await http.post(
            "/v1/chat/completions",
            headers={"authorization": f"Bearer {key}"},
            json={"messages": [{"role": "user", "content": text}], **body},
        )


async def test_an_episode_is_opened_rewarded_and_closed_in_the_book():
    async with serving(answer) as served:
        client = served.client
        started = await client.start_session("t1", group_id="g", attempt=2, task={"q": 1}, run_id="r")
        said_id = (await ask(served, started.api_key)).json()["id"]
        assert await client.set_reward(started.api_key, 0.5) == said_id
        assert await client.set_reward(started.api_key, 1, name="style", interaction_id=said_id) == said_id
        assert await client.set_reward(started.api_key, 2, target="episode") is None
        assert await client.end_session(started.api_key) == 1
        events = served.events()
    assert [e.kind for e in events] == [
        "EpisodeOpened",
        "InteractionRecorded",
        "RewardGiven",
        "RewardGiven",
        "RewardGiven",
        "EpisodeClosed",
    ]
    assert {e.run_id for e in events} == {"r"}
    assert {e.episode_id for e in events} == {started.session_id}
    opened = events[0].fact
    assert (opened.task_id, opened.group_id, opened.attempt, opened.task) == ("t1", "g", 2, {"q": 1})
    assert opened.key_sha256 == hashlib.sha256(started.api_key.encode()).hexdigest()
    assert started.api_key not in repr(events)
    assert [(e.fact.value, e.interaction_id) for e in events[2:5]] == [(0.5, said_id), (1, said_id), (2, None)]


async def test_after_the_end_calls_are_refused_and_rewards_are_welcome():
    async with serving(answer) as served:
        started = await served.client.start_session("t1")
        await ask(served, started.api_key)
        await served.client.end_session(started.api_key)
        assert await served.client.end_session(started.api_key) == 1
        refused = await ask(served, started.api_key)
        assert refused.status_code == 410
        assert refused.headers["x-should-retry"] == "false"
        assert refused.json()["error"]["code"] == "session_ended"
        assert await served.client.set_reward(started.api_key, 1) is not None
        assert await served.client.set_reward(None, 2, session_id=started.session_id) is not None
        assert [e.kind for e in served.events()].count("EpisodeClosed") == 1


async def test_of_ended_sessions_only_the_last_are_known_by_their_keys_and_all_by_their_ids():
    log, config = MemoryLog(), ServeConfig(admin_key=ADMIN, max_ended=2)
    async with serving(answer, log=log, config=config) as served:
        ended = [await served.client.start_session(f"t{i}") for i in range(3)]
        for one in ended:
            await ask(served, one.api_key)
            await served.client.end_session(one.api_key)
        assert [(await ask(served, one.api_key)).status_code for one in ended] == [401, 410, 410]
        assert await served.client.set_reward(None, 1, session_id=ended[0].session_id) is not None
    async with serving(answer, log=log, config=config) as served:  # and the same after a restart
        assert [(await ask(served, one.api_key)).status_code for one in ended] == [401, 410, 410]


async def test_keys_open_only_their_own_doors():
    async with serving(answer) as served:
        started = await served.client.start_session("t1")
        other = await served.client.start_session("t2")
        async with ProxyClient(served.url, started.api_key) as no_admin, ProxyClient(served.url) as nobody:
            with pytest.raises(Forbidden):
                await no_admin.start_session("t")
            with pytest.raises(Forbidden):
                await no_admin.grant_capacity()
            with pytest.raises(Forbidden):
                await no_admin.end_session(None, session_id=other.session_id)
            with pytest.raises(Unauthorized):
                await nobody.grant_capacity()
            with pytest.raises(Unauthorized):
                await nobody.set_reward("sk-rb-nobody-issued-this", 1)
        assert (await ask(served, ADMIN)).status_code == 403
        assert (await ask(served, "sk-rb-nobody-issued-this")).status_code == 401
        with pytest.raises(BadRequest):
            await served.client.start_session("t", api_key=ADMIN)
        with pytest.raises(NotFound):
            await served.client.end_session(None, session_id="ep_unknown")


async def test_a_key_may_come_in_either_header_on_either_path():
    forms = [
        {"authorization": "bEaReR {}"},
        {"x-api-key": "{}"},
        {"Authorization": "Bearer {}", "x-api-key": "other"},
    ]
    async with serving(answer) as served, httpx.AsyncClient(timeout=60, base_url=served.url, trust_env=False) as http:
        started = await served.client.start_session("t1")
        for headers in forms:
            for path in ("/chat/completions", "/v1/chat/completions"):
                sent = {name: value.format(started.api_key) for name, value in headers.items()}
                reply = await http.post(path, headers=sent, json={"messages": [{"role": "user", "content": "hi"}]})
                assert reply.status_code == 200


async def test_a_key_is_bound_to_one_open_session_and_free_after_it():
    async with serving(answer) as served:
        first = await served.client.start_session("t1", api_key="sk-rb-mine-mine")
        with pytest.raises(Conflict):
            await served.client.start_session("t2", api_key="sk-rb-mine-mine")
        await served.client.end_session("sk-rb-mine-mine")
        second = await served.client.start_session("t2", api_key="sk-rb-mine-mine")
        assert first.session_id != second.session_id
        assert (await ask(served, "sk-rb-mine-mine")).status_code == 200
        assert await served.client.end_session(None, session_id=first.session_id) == 0
        assert await served.client.end_session(None, session_id=second.session_id) == 1


async def test_an_online_key_goes_from_session_to_session():
    async with serving(answer, config=ServeConfig(admin_key=ADMIN, is_online=True)) as served:
        first = await served.client.start_session("t1", api_key="sk-rb-the-app")
        second = await served.client.start_session("t1", api_key="sk-rb-the-app")
        [closed] = served.events("EpisodeClosed")
        assert closed.episode_id == first.session_id
        assert (await ask(served, "sk-rb-the-app")).status_code == 200
        [event] = served.events("InteractionRecorded")
        assert event.episode_id == second.session_id
        assert await served.client.end_session("sk-rb-the-app") == 1
        assert (await ask(served, "sk-rb-the-app")).status_code == 200, "the next one is open when the end is answered"
        groups = [event.fact.group_id for event in served.events("EpisodeOpened")]
        assert len(groups) == len(set(groups)) == 3, "each conversation is a group of its own"


async def test_starts_on_one_key_at_once_leave_one_session_open():
    async with serving(answer, config=ServeConfig(admin_key=ADMIN, is_online=True)) as served:

        async def starts() -> list[str]:
            return [(await served.client.start_session("t", api_key="sk-rb-the-app")).session_id for _ in range(8)]

        ids = {session_id for some in await asyncio.gather(*(starts() for _ in range(6))) for session_id in some}
        ended = {event.episode_id for event in served.events("EpisodeClosed")}
        assert len(ids) == 48
        assert len(ids - ended) == 1
        assert (await ask(served, "sk-rb-the-app")).status_code == 200
        [event] = served.events("InteractionRecorded")
        assert {event.episode_id} == ids - ended


async def test_an_idle_online_key_stays_open_without_an_episode_after_another():
    async with serving(answer, config=ServeConfig(admin_key=ADMIN, is_online=True, idle_s=0.2)) as served:
        await served.client.start_session("t1", api_key="sk-rb-one-app")
        used = await served.client.start_session("t1", api_key="sk-rb-other-app")
        assert (await ask(served, "sk-rb-other-app")).status_code == 200
        with anyio.fail_after(600):
            while len(served.events("EpisodeOpened")) < 3:  # noqa: ASYNC110 - the book has no event for this
                await anyio.sleep(0.1)
        assert [event.episode_id for event in served.events("EpisodeClosed")] == [used.session_id]
        for key in ("sk-rb-one-app", "sk-rb-other-app"):
            assert (await ask(served, key)).status_code == 200


async def test_starting_twice_with_the_same_ids_is_starting_once():
    async with serving(answer) as served, httpx.AsyncClient(timeout=60, base_url=served.url, trust_env=False) as http:
        body = {"task_id": "t", "session_id": "ep_1", "api_key": "sk-rb-chosen"}
        for _ in range(2):
            reply = await http.post("/rl/start_session", headers={"x-api-key": ADMIN}, json=body)
            assert reply.json() == {"session_id": "ep_1", "api_key": "sk-rb-chosen"}
        assert len(served.events("EpisodeOpened")) == 1


async def test_a_reward_sent_twice_is_given_once():
    async with serving(answer) as served, httpx.AsyncClient(timeout=60, base_url=served.url, trust_env=False) as http:
        started = await served.client.start_session("t1")
        await ask(served, started.api_key)
        for _ in range(2):
            reply = await http.post(
                "/rl/set_reward", headers={"x-api-key": started.api_key}, json={"reward": 1, "event_id": "ab" * 16}
            )
            assert reply.status_code == 200
        assert len(served.events("RewardGiven")) == 1


async def test_a_wrong_reward_is_refused_and_not_recorded():
    wrong = [
        {"reward": 1},  # there are no interactions
        {"reward": 1, "interaction_id": "chatcmpl-unknown"},
        {"reward": "high"},
        {"reward": 1, "start": 3, "end": 1, "target": "episode"},
        {"reward": 1, "event_id": "short", "target": "episode"},
        {"reward": 1, "target": "episode", "interaction_id": "x"},
        {},
        [],
    ]
    async with serving(answer) as served, httpx.AsyncClient(timeout=60, base_url=served.url, trust_env=False) as http:
        started = await served.client.start_session("t1")
        for body in wrong:
            reply = await http.post("/rl/set_reward", headers={"x-api-key": started.api_key}, json=body)
            assert reply.status_code == 400, body
            assert reply.json()["error"]["type"] == "invalid_request_error"
        assert not served.events("RewardGiven")


async def test_permits_gate_sessions_and_run_out():
    config = ServeConfig(admin_key=ADMIN, needs_permit=True, permit_s=2)
    async with serving(answer, config=config) as served:
        with pytest.raises(Busy) as busy:
            await served.client.start_session("t1")
        assert busy.value.retry_after_s
        assert await served.client.grant_capacity() == 1
        assert await served.client.grant_capacity() == 2
        await served.client.start_session("t1")
        await anyio.sleep(2.2)
        with pytest.raises(Busy):
            await served.client.start_session("t2")


async def test_more_sessions_than_there_may_be_are_refused_also_at_once(tmp_path):
    config = ServeConfig(admin_key=ADMIN, max_sessions=3)
    log = DirectoryLog(tmp_path / "book", writer="server")
    try:
        async with serving(answer, config=config, log=log) as served:
            headers = {"authorization": f"Bearer {ADMIN}"}
            async with httpx.AsyncClient(timeout=60, base_url=served.url, trust_env=False, headers=headers) as http:
                starts = (http.post("/rl/start_session", json={"task_id": "t"}) for _ in range(12))
                statuses = [reply.status_code for reply in await asyncio.gather(*starts)]
            assert sorted(statuses) == [200] * 3 + [429] * 9
    finally:
        log.close()


async def test_a_start_that_is_refused_costs_no_permit_and_ends_no_session():
    async with serving(answer, config=ServeConfig(admin_key=ADMIN, needs_permit=True)) as served:
        await served.client.grant_capacity()
        held = await served.client.start_session("t1")
        await served.client.grant_capacity()
        with pytest.raises(NotFound):
            await served.client.start_session(
                "t1", api_key=held.api_key, refresh=True, origin_interaction_id="chatcmpl_nobody"
            )
        await served.client.start_session("t2")
        with pytest.raises(Busy):
            await served.client.start_session("t1", api_key=held.api_key, refresh=True)
        assert (await ask(served, held.api_key)).status_code == 200
        assert not served.events("EpisodeClosed")
        await served.client.grant_capacity()
        await served.client.start_session("t1", api_key=held.api_key, refresh=True)


async def test_an_online_session_ends_where_no_permit_is_left_for_the_next():
    async with serving(answer, config=ServeConfig(admin_key=ADMIN, needs_permit=True, is_online=True)) as served:
        await served.client.grant_capacity()
        held = await served.client.start_session("t1")
        await ask(served, held.api_key)
        assert await served.client.end_session(held.api_key) == 1
        assert (await ask(served, held.api_key)).status_code == 410
        await served.client.grant_capacity()
        await served.client.start_session("t1", api_key=held.api_key)
        assert (await ask(served, held.api_key)).status_code == 200


async def test_a_reward_may_be_true_or_false():
    async with serving(answer) as served, httpx.AsyncClient(timeout=60, base_url=served.url, trust_env=False) as http:
        started = await served.client.start_session("t1")
        await ask(served, started.api_key)
        for reward in (True, False):
            body = {"reward": reward}
            assert (await http.post("/rl/set_reward", headers={"x-api-key": started.api_key}, json=body)).is_success
        assert [event.fact.value for event in served.events("RewardGiven")] == [1.0, 0.0]


async def test_an_idle_session_is_abandoned_with_its_data():
    async with serving(answer, config=ServeConfig(admin_key=ADMIN, idle_s=2)) as served:
        started = await served.client.start_session("t1")
        await ask(served, started.api_key)
        with anyio.fail_after(600):
            while not served.events("EpisodeClosed"):  # noqa: ASYNC110 - the book has no event for this
                await anyio.sleep(0.1)
        [closed] = served.events("EpisodeClosed")
        assert closed.fact.state == "abandoned"
        assert (await ask(served, started.api_key)).status_code == 410
        assert await served.client.set_reward(started.api_key, 1) is not None


async def test_a_server_that_comes_back_knows_its_sessions():
    log = MemoryLog()
    async with serving(answer, log=log) as served:
        going = await served.client.start_session("t1")
        first = (await ask(served, going.api_key)).json()["id"]
        ended = await served.client.start_session("t2")
        await ask(served, ended.api_key)
        await served.client.end_session(ended.api_key)
    async with serving(answer, log=log) as served:
        assert (await ask(served, ended.api_key)).status_code == 410
        assert await served.client.set_reward(going.api_key, 1) == first
        assert (await ask(served, going.api_key, "again")).status_code == 200
        assert await served.client.end_session(going.api_key) == 2
        for reward in (1, 2):
            assert await served.client.set_reward(ended.api_key, reward) is not None
        with pytest.raises(SessionEnded):
            served.service.sessions.require_open(ended.api_key)


async def test_an_episode_that_was_pruned_takes_rewards(tmp_path):
    log = DirectoryLog(tmp_path, writer="one")
    async with serving(answer, log=log) as served:
        started = await served.client.start_session("t1")
        said_id = (await ask(served, started.api_key)).json()["id"]
        await served.client.end_session(started.api_key)
    log.close()
    assert prune(tmp_path, episode_ids=[started.session_id]).n_events == 1
    log = DirectoryLog(tmp_path, writer="one")
    async with serving(answer, log=log) as served:
        assert await served.client.set_reward(started.api_key, 1, interaction_id=said_id) == said_id
        assert await served.client.set_reward(started.api_key, 1, target="episode") is None
        with pytest.raises(BadRequest, match="were pruned; give an interaction_id"):
            await served.client.set_reward(started.api_key, 1)
    log.close()


async def test_servers_of_one_book_leave_each_others_sessions_alone_and_reward_any():
    log = MemoryLog("one")
    config = ServeConfig(admin_key=ADMIN, idle_s=0.2)
    async with serving(answer, log=log) as one:
        started = await one.client.start_session("t1")
        first = (await ask(one, started.api_key)).json()["id"]
        async with serving(answer, log=log.sibling("two"), config=config) as two:
            await anyio.sleep(0.5)
            assert not one.events("EpisodeClosed")
            assert (await ask(two, started.api_key)).status_code == 401
            with pytest.raises(NotFound):
                await two.client.end_session(None, session_id=started.session_id)
            assert await two.client.set_reward(None, 1, session_id=started.session_id) == first
            assert await two.client.end_session(None, session_id=started.session_id, state="lost") == 1
            assert [event.fact.state for event in two.events("EpisodeClosed")] == ["lost"]
            with pytest.raises(NotFound):
                await two.client.set_reward(None, 1, session_id="ep_unknown")
        assert (await ask(one, started.api_key, "again")).status_code == 200


async def test_two_servers_never_give_the_same_admin_key():
    first, second = (Service(log=MemoryLog(), engine=None, tokenizer=BYTES) for _ in range(2))
    assert first.admin_key != second.admin_key
    assert len(first.admin_key) > 40


def test_a_weak_admin_key_serves_loopback_only():
    config = ServeConfig(host="0.0.0.0", admin_key="secret")
    with pytest.raises(ValueError, match="too weak"):
        Service(log=MemoryLog(), engine=None, tokenizer=BYTES, config=config)
    Service(log=MemoryLog(), engine=None, tokenizer=BYTES, config=ServeConfig(admin_key="secret"))
