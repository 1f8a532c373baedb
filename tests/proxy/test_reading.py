"""SQL and export over HTTP: what was acknowledged is what one reads, as often as one likes."""

from contextlib import ExitStack
from functools import partial

import anyio
import httpx
import pytest

from proxy_serving import said, serving
from rollbook.proxy import reading
from rollbook.proxy.client import ProxyClient
from rollbook.proxy.errors import BadRequest, Busy, Forbidden, NotFound
from rollbook.store import TablesDamaged
from rollbook.store.sql import Limits, run_query

pytestmark = pytest.mark.anyio


async def talk(served, key, *texts, reply="ok", **more):
    """A conversation of as many turns; returns the ids of its answers."""
    messages, ids = [], []
    async with httpx.AsyncClient(timeout=60, base_url=served.url, trust_env=False) as http:
        for text in texts:
            messages.append({"role": "user", "content": text})
            answer = (
                await http.post("/chat/completions", json={"messages": messages, **more}, headers={"x-api-key": key})
            ).json()
            messages.append(answer["choices"][0]["message"])
            ids.append(answer["id"])
    return ids


async def test_sql_sees_what_was_acknowledged():
    async with serving(lambda _: said("ok")) as served:
        started = await served.client.start_session("t1", group_id="g")
        ids = await talk(served, started.api_key, "a", "b")
        await served.client.set_reward(started.api_key, 0.5)
        table = await served.client.sql("select interaction_id, edge from interactions order by depth")
        assert table.to_pylist() == [
            {"interaction_id": ids[0], "edge": None},
            {"interaction_id": ids[1], "edge": "extends"},
        ]
        await served.client.end_session(started.api_key)
        table = await served.client.sql("select task_id, group_id, state, reward from episodes")
        assert table.to_pylist() == [{"task_id": "t1", "group_id": "g", "state": "done", "reward": 0.5}]


async def test_sql_is_the_admins_and_only_reads():
    async with serving(lambda _: said("ok")) as served:
        started = await served.client.start_session("t1")
        async with ProxyClient(served.url, started.api_key) as session:
            with pytest.raises(Forbidden):
                await session.sql("select 1")
        for query in ("drop table episodes", "select * from read_csv('/etc/passwd')", "select 1; select 2", "nonsense"):
            with pytest.raises(BadRequest):
                await served.client.sql(query)


async def test_tables_that_are_damaged_are_the_servers_fault_and_it_says_so(monkeypatch):
    def damaged(*_):
        raise TablesDamaged("views.duckdb is damaged; open the book again")

    async with serving(lambda _: said("ok")) as served:
        monkeypatch.setattr(reading, "run_query", damaged)
        key = {"authorization": f"Bearer {served.service.admin_key}"}
        async with httpx.AsyncClient(timeout=60, base_url=served.url, trust_env=False) as http:
            answer = await http.post("/sql", json={"query": "select 1"}, headers=key)
        assert (answer.status_code, "is damaged; open the book again" in answer.text) == (500, True)


async def test_queries_that_wait_for_one_another_hold_up_nothing_else(monkeypatch):
    async with serving(lambda _: said("ok")) as served:
        started = await served.client.start_session("t1")
        await talk(served, started.api_key, "a")
        answers = []
        key = {"authorization": f"Bearer {served.service.admin_key}"}
        unlimited = httpx.Limits(max_connections=None)  # as many clients have
        async with httpx.AsyncClient(base_url=served.url, trust_env=False, timeout=600, limits=unlimited) as http:

            async def ask():
                answers.append(await http.post("/sql", json={"query": "select 1 as n"}, headers=key))

            with ExitStack() as taken:
                for _ in range(4):  # all processes that there may be
                    taken.enter_context(served.service.book.views.guest(300))
                with monkeypatch.context() as patched:
                    patched.setattr(reading, "run_query", partial(run_query, limits=Limits(timeout_s=0.1)))
                    with pytest.raises(Busy, match="ask again"):
                        await served.client.sql("select 1 as n")
                monkeypatch.setattr(reading, "run_query", partial(run_query, limits=Limits(timeout_s=300)))
                async with anyio.create_task_group() as group:
                    for _ in range(48):  # more than there are threads for all else
                        group.start_soon(ask)
                    await anyio.sleep(1)
                    with anyio.fail_after(600):
                        await served.client.export(started.session_id)
                    assert not answers
                    taken.close()
        assert [answer.status_code for answer in answers] == [200] * 48


async def test_a_session_is_exported_in_every_style_and_again():
    async with serving(lambda _: said("ok")) as served:
        started = await served.client.start_session("t1")
        first, second = await talk(served, started.api_key, "a", "b")
        await talk(served, started.api_key, "not to be trained on", store=False)
        await served.client.set_reward(started.api_key, 1.0, interaction_id=second)
        events = {event.interaction_id: event for event in served.events("InteractionRecorded")}
        individual = await served.client.export(started.session_id, discount=0.5)
        assert list(individual) == [first, second]
        assert [sample["rewards"] for sample in individual.values()] == [[0.5], [1.0]]
        [ids], [mask], [logprobs] = (individual[second][name] for name in ("input_ids", "loss_mask", "logprobs"))
        assert [token for token, m in zip(ids, mask, strict=True) if m] == events[second].output_ids.tolist()
        got = [logprob for logprob, m in zip(logprobs, mask, strict=True) if m]
        assert got == pytest.approx(events[second].logprobs.tolist())
        concat = await served.client.export(started.session_id, style="concat")
        assert list(concat) == [second]
        assert sum(concat[second]["loss_mask"][0]) == sum(len(events[name].output_ids) for name in (first, second))
        tree = await served.client.export(started.session_id, style="tree")
        assert len(tree) == 1
        assert await served.client.export(started.session_id, discount=0.5) == individual
        await served.client.end_session(started.api_key)
        assert await served.client.export(started.session_id, discount=0.5) == individual


async def test_wrong_exports_are_refused():
    async with serving(lambda _: said("ok")) as served:
        started = await served.client.start_session("t1")
        assert await served.client.export(started.session_id) == {}
        await talk(served, started.api_key, "a")
        assert (await served.client.export(started.session_id)).popitem()[1]["rewards"] == [None]
        with pytest.raises(NotFound):
            await served.client.export("ep_unknown")
        with pytest.raises(BadRequest, match="Invalid export interactions style"):
            await served.client.export(started.session_id, style="sideways")
        async with httpx.AsyncClient(timeout=60, base_url=served.url, trust_env=False) as http:
            admin = {"x-api-key": served.service.admin_key}
            assert (await http.post("/export_trajectories", json={}, headers=admin)).status_code == 422
            key = {"x-api-key": started.api_key}
            body = {"session_id": started.session_id}
            assert (await http.post("/export_trajectories", json=body, headers=key)).status_code == 403
