"""Several proxies of one book: where sessions go, and what becomes of them when a proxy goes."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest

from ports import free_ports
from proxy_serving import Served, said, serving
from rollbook.agents.data import tasks_of
from rollbook.agents.runner import Runner
from rollbook.app.launch import LaunchFailed
from rollbook.app.proxies import Proxies
from rollbook.proxy.bodies import Started
from rollbook.proxy.client import SessionLost
from rollbook.proxy.config import ServeConfig
from rollbook.store import MemoryLog

pytestmark = pytest.mark.anyio
ADMIN = "admin-key-of-the-tests"


class Host:
    """A `Program` whose server can be taken away and brought back, here or elsewhere."""

    def __init__(self, log: MemoryLog) -> None:
        self.log = log
        self.url = ""
        self.is_up = False
        self.n_starts = 0
        self.is_gone = False
        self.served: Served | None = None
        self._life: asyncio.Task[None] | None = None
        self._end = anyio.Event()

    async def start(self, *, port: int = 0) -> None:
        if not port:  # another than it had
            port = next(one for one in free_ports(2) if not self.url.endswith(f":{one}"))
        config = ServeConfig(admin_key=ADMIN, port=port)
        has_begun, self._end = anyio.Event(), anyio.Event()

        async def live() -> None:
            async with serving(self.answer, log=self.log, config=config) as self.served:
                has_begun.set()
                await self._end.wait()

        self._life = asyncio.create_task(live())
        await has_begun.wait()
        assert self.served is not None
        self.url, self.is_up, self.n_starts = self.served.url, True, self.n_starts + 1

    async def lose(self, *, for_good: bool = True) -> None:
        self.is_up, self.is_gone = False, for_good
        self._end.set()
        if self._life is not None:
            await self._life

    async def answer(self, _: Any) -> list[int]:
        return said("ok")

    def check(self) -> None:
        if self.is_gone:
            raise LaunchFailed("its host is gone")

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.is_gone

    def logs(self, lines: int = 15) -> str:
        return ""

    def stop(self) -> None:
        self.is_gone = True


@asynccontextmanager
async def hosts(n: int) -> AsyncIterator[list[Host]]:
    log = MemoryLog("proxy-1")
    made = [Host(log if i == 0 else log.sibling(f"proxy-{i + 1}")) for i in range(n)]
    try:
        for host in made:
            await host.start()
        yield made
    finally:
        for host in made:
            await host.lose()


async def ask(base_url: str, api_key: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        return await http.post(
            f"{base_url}/chat/completions",
            headers={"authorization": f"Bearer {api_key}"},
            json={"messages": [{"role": "user", "content": "hi"}]},
        )


def states(host: Host) -> Counter[str]:
    assert host.served is not None
    closed = {event.episode_id: event.fact.state for event in host.served.events("EpisodeClosed")}
    return Counter(closed.values())


async def test_a_group_begins_at_one_proxy_and_tasks_spread_over_all() -> None:
    async with hosts(3) as made, Proxies(made, ADMIN) as proxies:
        for task in range(12):
            urls = {(await proxies.start_session(f"t{task}", group_id=f"g{task}")).base_url for _ in range(4)}
            assert len(urls) == 1, "the samples of a group share their prompt"
        assert sum(proxies.n_open) == 48
        assert max(proxies.n_open) <= 1.25 * 16 + 4, "no proxy has much more than its share"


async def test_a_task_comes_back_to_where_its_prompt_is_cached() -> None:
    async with hosts(3) as made, Proxies(made, ADMIN) as proxies:
        places: dict[str, set[str | None]] = {}
        for n in range(3):
            for task in range(8):
                started = await proxies.start_session(f"t{task}", group_id=f"g{task}-{n}")
                places.setdefault(f"t{task}", set()).add(started.base_url)
                await proxies.end_session(started.api_key)
        assert {len(urls) for urls in places.values()} == {1}
        assert len(set[str | None]().union(*places.values())) > 1


async def test_episodes_of_a_lost_proxy_are_lost_and_drawn_again_elsewhere() -> None:
    n_tasks, n_samples = 6, 2
    async with hosts(2) as made, Proxies(made, ADMIN) as proxies:
        lost = made[0]
        acknowledged: list[str] = []

        class Agent:
            async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, **_: Any) -> float:
                reply = await ask(base_url, api_key)
                reply.raise_for_status()
                acknowledged.append(reply.json()["id"])
                if base_url.startswith(lost.url):
                    await anyio.sleep_forever()  # its proxy is lost while it thinks
                return 1.0

        runner = Runner(proxies, Agent(), run_id="r", n_samples=n_samples)
        proxies.on_lost = runner.stop_agents

        async def cut_off() -> None:
            while proxies.n_open[0] < 2 or len(acknowledged) < n_tasks * n_samples:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            await lost.lose()

        async with anyio.create_task_group() as group:
            group.start_soon(cut_off)
            with anyio.fail_after(250):
                episodes = await runner.run(tasks_of([{"messages": [], "n": i} for i in range(n_tasks)]))
        n_lost = sum(episode.state == "lost" for episode in episodes)
        assert n_lost >= 2
        done = [episode for episode in episodes if episode.state == "done"]
        assert Counter(episode.group_id for episode in done) == dict.fromkeys((e.group_id for e in done), n_samples)
        assert len(done) == n_tasks * n_samples
        assert {episode.attempt for episode in episodes} == {1}, "a loss is not the agent's failure"
        assert states(made[1]) == {"done": len(done), "lost": n_lost}
        served = made[1].served
        assert served is not None
        known = {event.interaction_id for event in served.events("InteractionRecorded")}
        assert set(acknowledged) <= known, "what was acknowledged is in the book"


@asynccontextmanager
async def wire(url: str) -> AsyncIterator[tuple[str, anyio.Event]]:
    """A way to a server that can be cut: connections stay, and nothing goes through them any more."""
    cut = anyio.Event()
    host, port = url.removeprefix("http://").split(":")

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if cut.is_set():
                await anyio.sleep_forever()
            writer.write(data)
        writer.close()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        ways = [asyncio.ensure_future(pump(reader, back)), asyncio.ensure_future(pump(there, writer))]
        carried.extend(ways)
        ends.extend([writer, back])
        await asyncio.wait(ways)

    ends: list[asyncio.StreamWriter] = []
    carried: list[asyncio.Future[None]] = []
    server = await asyncio.start_server(carry, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", cut
    finally:
        server.close()
        for way in carried:
            way.cancel()
        await asyncio.gather(*carried, return_exceptions=True)
        for end in ends:
            end.close()
        await asyncio.gather(*(end.wait_closed() for end in ends), return_exceptions=True)


async def test_a_host_that_is_cut_off_loses_its_episodes_and_the_run_finishes() -> None:
    async with hosts(2) as made, wire(made[0].url) as (url, cut):
        made[0].url = url  # its process lives on, and says so: only its network is cut
        async with Proxies(made, ADMIN, back_s=1.0) as proxies:
            acknowledged: list[str] = []

            class Agent:
                async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, **_: Any) -> float:
                    for _turn in range(2):
                        reply = await ask(base_url, api_key)
                        acknowledged.append(reply.json()["id"])
                        if base_url.startswith(url):
                            cut.set()
                    return 1.0

            runner = Runner(proxies, Agent(), run_id="r", n_samples=2)
            proxies.on_lost = runner.stop_agents
            with anyio.fail_after(250):
                episodes = await runner.run(tasks_of([{"messages": [], "n": i} for i in range(6)]))
        assert sum(episode.state == "done" for episode in episodes) == 12
        assert any(episode.state == "lost" for episode in episodes)
        assert cut.is_set()
        served = made[1].served
        assert served is not None
        assert set(acknowledged) <= {event.interaction_id for event in served.events("InteractionRecorded")}


async def test_a_proxy_that_comes_back_elsewhere_has_left_its_sessions_and_gets_the_policy_first() -> None:
    async with hosts(2) as made, Proxies(made, ADMIN) as proxies:
        await proxies.load_weights("/weights/v3", 3)
        started = [await proxies.start_session(f"t{i}") for i in range(8)]
        theirs = [one for one in started if (one.base_url or "").startswith(made[0].url)]
        assert theirs
        await made[0].lose(for_good=False)
        await made[0].start()
        with anyio.fail_after(250):
            while proxies.n_open[0]:  # noqa: ASYNC110
                await anyio.sleep(0.05)
        with pytest.raises(SessionLost):
            await proxies.end_session(theirs[0].api_key, state="failed", reason="no answer")
        assert await proxies.version() == 3
        on_it: list[str | None] = []
        while made[0].url not in on_it:  # until one begins there
            on_it.append(((await proxies.start_session(f"new{len(on_it)}")).base_url or "").removesuffix("/v1"))
        assert made[0].served is not None
        assert await made[0].served.client.version() == 3
        others = [one for one in started if one not in theirs]
        assert await proxies.end_session(others[0].api_key) == 0


async def test_sessions_go_on_at_a_proxy_that_comes_back_at_its_address() -> None:
    async with hosts(2) as made, Proxies(made, ADMIN) as proxies:
        started = [await proxies.start_session(f"t{i}") for i in range(8)]
        one = next(one for one in started if (one.base_url or "").startswith(made[0].url))
        assert (await ask(one.base_url or "", one.api_key)).status_code == 200
        port = int(made[0].url.rsplit(":", 1)[1])
        await made[0].lose(for_good=False)
        await made[0].start(port=port)
        await anyio.sleep(0.5)
        assert (await ask(one.base_url or "", one.api_key)).status_code == 200
        assert await proxies.end_session(one.api_key) == 2
        assert states(made[1]) == {"done": 1}


async def test_proxies_join_and_leave_while_sessions_run() -> None:
    async with hosts(2) as made, Proxies(made[:1], ADMIN) as proxies:
        await proxies.load_weights("/weights/v2", 2)
        first = await proxies.start_session("t0")
        await proxies.add(made[1])
        assert made[1].served is not None
        assert await made[1].served.client.version() == 2, "a proxy that joins gets the policy before its first session"
        async with anyio.create_task_group() as group:
            group.start_soon(proxies.remove, made[0])
            await anyio.sleep(0.1)
            later = [await proxies.start_session(f"t{i}") for i in range(4)]
            assert {one.base_url for one in later} == {f"{made[1].url}/v1"}, "who leaves gets no more sessions"
            assert (await ask(first.base_url or "", first.api_key)).status_code == 200
            assert await proxies.end_session(first.api_key) == 1
        assert proxies.n_open == [4]


async def test_a_proxy_that_leaves_waits_for_the_session_that_is_just_starting_there() -> None:
    async with hosts(2) as made, Proxies(made[:1], ADMIN) as proxies, anyio.create_task_group() as group:
        started: list[Started] = []
        has_begun, has_left = anyio.Event(), anyio.Event()

        async def begin() -> None:
            started.append(await proxies.start_session("t0"))
            has_begun.set()

        async def leave() -> None:
            await proxies.remove(made[0])
            has_left.set()

        group.start_soon(begin)  # asks made[0], and waits for its answer while it is told to leave
        group.start_soon(leave)
        await has_begun.wait()
        await proxies.add(made[1])
        assert not has_left.is_set()
        [one] = started
        assert (await ask(one.base_url or "", one.api_key)).status_code == 200
        assert await proxies.end_session(one.api_key) == 1
        await has_left.wait()


async def test_without_any_proxy_the_reason_is_said() -> None:
    async with hosts(1) as made, Proxies(made, ADMIN) as proxies:
        await made[0].lose()
        with pytest.raises(LaunchFailed, match="its host is gone"):
            await proxies.start_session("t")
