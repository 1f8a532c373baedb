"""Many inline episodes at once: are all recorded, and does the event loop stay responsive?

1,000 episodes of 8 turns run in this process against `rollbook serve` with the scripted engine (0.25 s per answer) in
another. Prints what the book holds at the end, the loop's lag (a task that sleeps 5 ms and looks how late it wakes),
the CPU that the loop's thread used in between (the lag on a machine that is otherwise idle), CPU per episode, memory.

http: agents speak plain HTTP over shared connections. openai: each episode builds its own AsyncOpenAI, as agents do.
subproc: synchronous agents in 32 worker processes, which start before the clock; how long that takes is printed.

Run: python benchmarks/agents.py [http|openai|subproc] [episodes] [turns]
"""

import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import anyio
import numpy as np
from agents_blocking import blocking

from rollbook.agents.data import tasks_of
from rollbook.agents.runner import Runner
from rollbook.agents.subprocesses import SubprocessAgent
from rollbook.proxy.client import ProxyClient
from rollbook.proxy.engine import Generation
from rollbook.proxy.tokenizer import Tokenizer
from rollbook.store import open_book

ANSWER_S = 0.25
N_WORKERS = 32
KEY = "the-admin-key-of-the-agents-benchmark"


def script(tokenizer: Tokenizer):
    """For the server: the same 40 tokens for everyone, after a while."""
    ids = tokenizer.encode("The next step follows from the last one<|im_end|>").tolist()

    async def answer(generation: Generation) -> Sequence[int]:
        await anyio.sleep(ANSWER_S)
        return ids

    return answer


class Lag:
    """How late a sleeping task wakes, and what its thread computed meanwhile, in seconds."""

    def __init__(self) -> None:
        self.late: list[float] = []
        self.busy: list[float] = []

    async def watch(self) -> None:
        while True:
            wall, cpu = time.monotonic(), time.thread_time()
            await asyncio.sleep(0.005)
            self.late.append(max(0.0, time.monotonic() - wall - 0.005))
            self.busy.append(time.thread_time() - cpu)


async def run(kind: str, n_episodes: int, n_turns: int, url: str) -> tuple[list, Lag, float, float]:
    """The episodes, the lag, the CPU seconds of this process, and how long it took."""
    lag = Lag()
    connector = aiohttp.TCPConnector(limit=0)
    async with ProxyClient(url, KEY) as client, aiohttp.ClientSession(connector=connector) as session:

        async def plain(data, base_url, api_key):
            messages = list(data["messages"])
            headers = {"authorization": f"Bearer {api_key}"}
            for _ in range(n_turns):
                body = {"model": "m", "messages": messages}
                async with session.post(f"{base_url}/chat/completions", json=body, headers=headers) as answer:
                    answer.raise_for_status()
                    reply = await answer.json()
                messages += [reply["choices"][0]["message"], {"role": "user", "content": "And then?"}]
            return 1.0

        async def sdk(data, base_url, api_key):
            from openai import AsyncOpenAI

            messages = list(data["messages"])
            async with AsyncOpenAI(base_url=base_url, api_key=api_key) as openai:
                for _ in range(n_turns):
                    reply = await openai.chat.completions.create(model="m", messages=messages)
                    said = reply.choices[0].message.content
                    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
            return 1.0

        row = {"messages": [{"role": "user", "content": "Begin."}]}
        agents = {"http": plain, "openai": sdk, "subproc": None}
        agent = agents[kind] or SubprocessAgent(blocking, max_workers=N_WORKERS)
        if kind == "subproc":  # the processes start with their first call
            warm = Runner(client, agent, run_id="warm", n_samples=N_WORKERS)
            began = time.monotonic()
            await warm.run(tasks_of([{**row, "n_turns": 1}]))
            print(f"{N_WORKERS} workers started and asked once in {time.monotonic() - began:.1f} s")
        tasks = tasks_of([{**row, "n_turns": n_turns}])
        runner = Runner(client, agent, run_id="bench", n_samples=n_episodes)
        began = time.monotonic()
        cpu = time.process_time()
        async with anyio.create_task_group() as group:
            group.start_soon(lag.watch)
            episodes = await runner.run(tasks)
            group.cancel_scope.cancel()
        seconds = time.monotonic() - began
        runner.workflow.close()
    return episodes, lag, time.process_time() - cpu, seconds


def peak_mb(pid: int) -> float:
    """Peak resident memory of a process (Linux)."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def main(kind: str = "http", n_episodes: int = 1000, n_turns: int = 8) -> None:
    with tempfile.TemporaryDirectory(prefix="rollbook-bench-") as folder:
        address = Path(folder, "address.json")
        command = [sys.executable, "-m", "rollbook.app.cli", "serve", f"{folder}/book", "--engine", "scripted"]
        command += ["--script", "agents:script", "--model", "tiny", "--port", "0", "--address-file", str(address)]
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        env = {**os.environ, "ROLLBOOK_ADMIN_KEY": KEY, "PYTHONPATH": path}
        with subprocess.Popen(command, env=env, cwd=folder) as server:
            try:
                while not address.exists() and server.poll() is None:
                    time.sleep(0.05)
                url = json.loads(address.read_text())["url"]
                episodes, lag, cpu, seconds = asyncio.run(run(kind, n_episodes, n_turns, url))
                server_peak = peak_mb(server.pid)
            finally:
                server.terminate()
        with open_book(f"{folder}/book") as book:
            (held,) = book.sql(
                "select count(*) filter (state = 'done') as done, sum(n_interactions)::int as calls, "
                "count(reward) as rewarded from episodes where run_id = 'bench'"
            ).to_pylist()
    lost = [e for e in episodes if e.state != "done" or e.n_interactions != n_turns]
    milliseconds = {name: np.percentile(np.array(values) * 1000, [50, 99, 100]) for name, values in vars(lag).items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{kind}: {n_episodes} episodes x {n_turns} turns in {seconds:.1f} s, load {os.getloadavg()[0]:.1f}")
    print(f"  in the book: {held}; not as they should be: {len(lost)}")
    for name, (p50, p99, most) in milliseconds.items():
        print(f"  loop {name}: p50 {p50:.1f} ms, p99 {p99:.1f} ms, most {most:.1f} ms")
    print(
        f"  CPU of this process: {cpu:.1f} s, {cpu / n_episodes * 1000:.1f} ms an episode; peak memory {peak:.0f} MB, "
        f"the server's {server_peak:.0f} MB"
    )
    assert not lost
    assert held == {"done": n_episodes, "calls": n_episodes * n_turns, "rewarded": n_episodes}


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:4]))
