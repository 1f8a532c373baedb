"""Two proxies and two agent hosts, each a network namespace; a host is cut off mid-run: `make test-namespaces`, root.

The book is a DuckLake: its catalogue a PostgreSQL here, its data a folder that all hosts see. A proxy's host has a
BOOK folder of its own. The runner is here, too. A host is cut off at its wire: what it holds open stays open.
"""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import psycopg
import pytest

from lake.with_postgres import postgres
from rollbook.agents.command import CommandAgent
from rollbook.agents.data import tasks_of
from rollbook.agents.errors import AgentFailed
from rollbook.agents.runner import Runner
from rollbook.agents.workflow import Session, Workflow
from rollbook.app.launch import ADMIN_KEY, Program
from rollbook.app.launch_local import LocalLauncher
from rollbook.app.proxies import Proxies
from rollbook.store import BookBusy, Event, RunStarted, open_book
from rollbook.store.lake import LakeLog, create_lake_book
from rollbook.store.verify import verify

KEY = "an-admin-key-for-two-hosts-0123456789"
HERE = Path(__file__).parent
OURS = "10.231.0.1"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Host:
    """A namespace at `address`; it and the others hang on a bridge that is ours."""

    def __init__(self, number: int, bridge: str, stack: ExitStack) -> None:
        self.namespace = f"rb{os.getpid()}-{number}"
        self.address = f"10.231.0.{number + 1}"
        self.wire, there = f"rbh{os.getpid() % 100000}{number}", f"rbt{os.getpid() % 100000}{number}"
        ip("netns", "add", self.namespace)
        stack.callback(ip, "netns", "delete", self.namespace)
        ip("link", "add", self.wire, "type", "veth", "peer", "name", there, "netns", self.namespace)
        stack.callback(ip, "link", "delete", self.wire)
        ip("link", "set", self.wire, "master", bridge, "up")
        for words in (
            ("link", "set", "lo", "up"),
            ("address", "add", f"{self.address}/24", "dev", there),
            ("link", "set", there, "up"),
        ):
            ip("-n", self.namespace, *words)

    def command(self, *words: str) -> list[str]:
        """These words as a program of this host."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def cut(self) -> None:
        ip("link", "set", self.wire, "down")


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with ExitStack() as stack:
        bridge = f"rbb{os.getpid() % 100000}"
        ip("link", "add", bridge, "type", "bridge")
        stack.callback(ip, "link", "delete", bridge)
        ip("address", "add", f"{OURS}/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        yield [Host(number, bridge, stack) for number in (1, 2, 3, 4)]


@pytest.fixture
def books(hosts: list[Host], tmp_path: Path) -> Iterator[list[Path]]:
    """A BOOK folder for each proxy and one for us, all of one lake."""
    with postgres(OURS, friends="10.231.0.0/24") as server:
        with psycopg.connect(f"{server} dbname=postgres", autocommit=True) as connection:
            connection.execute("create database book")
        paths = [tmp_path / name for name in ("book-1", "book-2", "book")]
        for path in paths:
            create_lake_book(path, f"{server} dbname=book", tmp_path / "data")
        yield paths


class OnHosts(Workflow):
    """The agent as a program of one of several hosts: that with the fewest failures, then the least to do."""

    def __init__(self, hosts: list[Host], notes: Path) -> None:
        super().__init__("lonely agent")
        self._notes = [notes / f"agents-{i}" for i in range(len(hosts))]
        program = [sys.executable, "-S", str(HERE / "lonely_agent.py")]
        self._agents = [
            CommandAgent(host.command(*program, str(notes))) for host, notes in zip(hosts, self._notes, strict=True)
        ]
        self._failed = [0 for _ in hosts]
        self._running = [0 for _ in hosts]

    async def run(self, data: Mapping[str, Any], session: Session) -> Any:
        at = min(range(len(self._agents)), key=lambda i: (self._failed[i], self._running[i]))
        self._running[at] += 1
        try:
            return await self._agents[at].run(data, session)
        except AgentFailed:
            self._failed[at] += 1
            raise
        finally:
            self._running[at] -= 1

    def noted(self) -> list[list[tuple[str, str]]]:
        """By host: (proxy, interaction) of every answer that an agent there got."""
        return [
            [(words[0], words[1]) for words in map(str.split, path.read_text().splitlines())] if path.exists() else []
            for path in self._notes
        ]


_HOLDING = """
import sys, time
from rollbook.store.lake import LakeLog
log = LakeLog(sys.argv[1], "first")
with log._name.turn():
    print("held", flush=True)
    time.sleep(300)
"""


def test_a_host_cut_off_in_its_turn_to_commit_frees_turn_and_name_within_seconds(
    hosts: list[Host], books: list[Path]
) -> None:
    command = hosts[0].command(sys.executable, "-c", _HOLDING, str(books[0]))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder, ExitStack() as stack:
        stack.callback(holder.kill)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        hosts[0].cut()
        began = time.monotonic()
        with pytest.raises(BookBusy):
            LakeLog(books[2], "first")
        while True:
            try:
                log = LakeLog(books[2], "first")
                break
            except BookBusy:
                time.sleep(0.5)
        assert time.monotonic() - began < 30
        began = time.monotonic()
        log.append_blocking(Event(run_id="r", fact=RunStarted(name="r")))
        assert time.monotonic() - began < 1.5, "nobody waits for its turn any more"
        log.close()


@pytest.mark.anyio
@pytest.mark.parametrize("cut_off", ["a proxy", "agents"])
async def test_a_host_cut_off_mid_run_loses_nothing_acknowledged_and_the_run_finishes(
    hosts: list[Host], books: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_off: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *sys.path]))
    n_tasks, n_samples = 20, 4
    with LocalLauncher() as launcher:
        programs: list[Program] = []
        for i, host in enumerate(hosts[:2]):
            command = host.command(sys.executable, "-m", "rollbook.app.cli", "serve", str(books[i]))
            command += ["--engine", "scripted", "--script", "scripted_agent:script", "--model", "tiny", "--run", "r"]
            command += ["--host", host.address, "--writer", f"proxy-{i + 1}"]
            programs += launcher.start(command, log_path=tmp_path / f"host-{i + 1}.log", env={ADMIN_KEY: KEY})
        agents = OnHosts(hosts[2:], tmp_path)
        async with Proxies(programs, KEY, back_s=4.0) as proxies:
            runner = Runner(proxies, agents, run_id="r", n_samples=n_samples, max_concurrent=16, max_attempts=3)
            proxies.on_lost = runner.stop_agents

            async def cut() -> None:
                while sum(map(len, agents.noted())) < 60:  # noqa: ASYNC110 - files of other programs
                    await anyio.sleep(0.05)
                hosts[0 if cut_off == "a proxy" else 2].cut()

            async with anyio.create_task_group() as group:
                group.start_soon(cut)
                rows = [{"messages": [{"role": "user", "content": f"say {i}"}]} for i in range(n_tasks)]
                episodes = await runner.run(tasks_of(rows))
    noted = agents.noted()
    assert all(noted), "both agent hosts had work"
    acknowledged = [interaction for host in noted for _, interaction in host]
    assert len({url for host in noted for url, _ in host}) == 2, "both proxies had work"
    states = Counter(episode.state for episode in episodes)
    assert states["done"] == n_tasks * n_samples
    assert states["lost"] > 0 if cut_off == "a proxy" else states["failed"] > 0, states
    assert sum(states.values()) == len({episode.episode_id for episode in episodes})
    with open_book(str(books[2])) as book:
        known = Counter(book.sql("select interaction_id from interactions")["interaction_id"].to_pylist())
        ended = book.sql("select state, count(*) as n from episodes group by 1 order by 1").to_pylist()
        writers = book.sql("select distinct writer from events order by 1")["writer"].to_pylist()
    assert writers == ["proxy-1", "proxy-2"]
    assert len(acknowledged) == len(set(acknowledged)) > 3 * n_tasks * n_samples
    assert set(acknowledged) <= known.keys()
    assert max(known.values()) == 1
    assert {row["state"]: row["n"] for row in ended} == dict(states)
    assert verify(books[2]).is_whole
