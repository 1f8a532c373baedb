"""Two proxies on two hosts (network namespaces), one book; a host is cut off mid-run: `make test-namespaces`, root."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from rollbook.agents.data import tasks_of
from rollbook.agents.runner import Runner
from rollbook.app.launch import ADMIN_KEY, Program
from rollbook.app.launch_local import LocalLauncher
from rollbook.app.proxies import Proxies
from rollbook.store import open_book
from rollbook.store.verify import verify

KEY = "an-admin-key-for-two-hosts-0123456789"
HERE = Path(__file__).parent


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str, str]]]:
    """(namespace, its address, our end of its wire) of two hosts; each reaches us and nobody else."""
    made = []
    with ExitStack() as stack:
        for i in (1, 2):
            name, here, there = f"rb{os.getpid()}-{i}", f"rbh{os.getpid() % 100000}{i}", f"rbt{os.getpid() % 100000}{i}"
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
            ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
            stack.callback(ip, "link", "delete", here)
            ip("address", "add", f"10.231.{i}.1/24", "dev", here)
            ip("link", "set", here, "up")
            for words in (
                ("link", "set", "lo", "up"),
                ("address", "add", f"10.231.{i}.2/24", "dev", there),
                ("link", "set", there, "up"),
            ):
                ip("-n", name, *words)
            made.append((name, f"10.231.{i}.2", here))
        yield made


class Agent:
    """Three turns, with a moment between; what it was answered is noted."""

    def __init__(self) -> None:
        self.acknowledged: list[str] = []
        self.urls: Counter[str] = Counter()

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, **_: Any) -> float:
        messages = list(data["messages"])
        headers = {"Authorization": f"Bearer {api_key}"}
        async with httpx.AsyncClient(headers=headers, timeout=120, trust_env=False) as client:
            for _turn in range(3):
                reply = await client.post(f"{base_url}/chat/completions", json={"model": "m", "messages": messages})
                reply.raise_for_status()
                self.acknowledged.append(reply.json()["id"])
                self.urls[base_url] += 1
                messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "again"}]
                await anyio.sleep(0.2)
        return 1.0


@pytest.mark.timeout(150)
@pytest.mark.anyio
async def test_a_host_cut_off_mid_run_loses_nothing_acknowledged_and_the_run_finishes(
    hosts: list[tuple[str, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *sys.path]))
    n_tasks, n_samples = 30, 4
    book_path = tmp_path / "book"
    with LocalLauncher() as launcher:
        programs: list[Program] = []
        for i, (namespace, address, _) in enumerate(hosts):
            command = [
                "ip",
                "netns",
                "exec",
                namespace,
                sys.executable,
                "-m",
                "rollbook.app.cli",
                "serve",
                str(book_path),
            ]
            command += ["--engine", "scripted", "--script", "scripted_agent:script", "--model", "tiny", "--run", "r"]
            command += ["--host", address, "--writer", f"proxy-{i + 1}"]
            programs += launcher.start(command, log_path=tmp_path / f"host-{i + 1}.log", env={ADMIN_KEY: KEY})
        agent = Agent()
        async with Proxies(programs, KEY, back_s=4.0) as proxies:
            runner = Runner(proxies, agent, run_id="r", n_samples=n_samples, max_concurrent=24)
            proxies.on_lost = runner.stop_agents

            async def cut() -> None:
                while len(agent.acknowledged) < 90:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                ip("link", "set", hosts[0][2], "down")

            async with anyio.create_task_group() as group:
                group.start_soon(cut)
                rows = [{"messages": [{"role": "user", "content": f"say {i}"}]} for i in range(n_tasks)]
                episodes = await runner.run(tasks_of(rows))
        assert len(agent.urls) == 2, "both hosts had work"
    states = Counter(episode.state for episode in episodes)
    assert states["done"] == n_tasks * n_samples
    assert states["lost"] > 0
    assert states["failed"] == 0
    with open_book(str(book_path)) as book:
        known = Counter(book.sql("select interaction_id from interactions")["interaction_id"].to_pylist())
        ended = book.sql("select state, count(*) as n from episodes group by 1 order by 1").to_pylist()
    assert set(agent.acknowledged) <= known.keys()
    assert max(known.values()) == 1
    assert {row["state"]: row["n"] for row in ended} == dict(states)
    assert verify(book_path).is_whole
