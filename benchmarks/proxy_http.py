"""CPU per durable completion over HTTP, on the scripted engine: families P1 (whole) and P2 (streamed).

    python benchmarks/proxy_http.py [--tokenizer FOLDER] [--connections 1 16] [--stream] [--seconds 4]

Sessions of 8 turns; each turn sends the grown history (about 2.8 to 16 KB) and gets 300 tokens, which are in a
directory log, synced, before the reply. The server is a process of its own; its CPU is user + system time from /proc
over completions. The load generator speaks plain sockets, so that it is never what is measured. Before any figure
is printed, the book is read back: every reply that came must be in it, with its tokens, each turn extending the last.

Machines and their other work differ, so each figure comes beside an anchor of the same minute: the same server program
(uvicorn, uvloop, httptools) answering "hello" to 8 KB requests. Compare ratios.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ADMIN = "benchmark-admin-key"
TURNS = 8
OUTPUT = 300
WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "it",
    "was",
    "for",
    "on",
    "are",
    "with",
    "as",
    "his",
    "they",
    "be",
    "at",
    "one",
    "have",
    "this",
    "from",
    "or",
    "had",
    "by",
]


def serve(book: str, tokenizer_path: str, chunk: int) -> None:
    """The program that is measured."""
    import anyio

    from rollbook.proxy.config import ServeConfig
    from rollbook.proxy.scripted import ScriptedEngine
    from rollbook.proxy.server import Service, serve_until_stopped
    from rollbook.proxy.tokenizer import Tokenizer
    from rollbook.store.directory import DirectoryLog

    tokenizer = Tokenizer.load(tokenizer_path)
    rng = random.Random(1)
    answers = [
        [*tokenizer.encode(" ".join(rng.choices(WORDS, k=OUTPUT * 3))).tolist()[: OUTPUT - 1], tokenizer.eos_ids[0]]
        for _ in range(16)
    ]
    log = DirectoryLog(book, writer="proxy")
    service = Service(
        log=log,
        engine=ScriptedEngine(lambda g: answers[len(g.prompt_ids) % 16], chunk_tokens=chunk),
        tokenizer=tokenizer,
        config=ServeConfig(admin_key=ADMIN),
    )
    anyio.run(
        lambda: serve_until_stopped(service, announce=lambda url: print(url, flush=True)),
        backend_options={"use_uvloop": True},
    )
    log.close()


def greet() -> None:
    """The anchor: no framework, no work."""
    import uvicorn

    from rollbook.proxy.listener import bind

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": b"hello"})

    listening = bind("127.0.0.1", 0)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    config = uvicorn.Config(
        app, loop="uvloop", http="httptools", lifespan="off", log_level="critical", access_log=False
    )
    uvicorn.Server(config).run([listening])


def anchor_us(connections: int) -> float:
    """CPU of one greeting, in microseconds."""
    server = subprocess.Popen([sys.executable, __file__, "--greet"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        host, port = server.stdout.readline().strip().removeprefix("http://").split(":")

        async def greeted(seconds: float) -> int:
            n, end = 0, time.perf_counter() + seconds

            async def one() -> None:
                nonlocal n
                connection = Connection(host, int(port))
                await connection.open()
                while time.perf_counter() < end:
                    await connection.post("/", "none", b"a" * 8000)
                    n += 1
                connection.writer.close()

            async with asyncio.TaskGroup() as tasks:
                for _ in range(connections):
                    tasks.create_task(one())
            return n

        asyncio.run(greeted(0.3))
        before = cpu_seconds(server.pid)
        n = asyncio.run(greeted(1.5))
        return 1e6 * (cpu_seconds(server.pid) - before) / n
    finally:
        server.kill()
        server.wait()


class Connection:
    """One keep-alive connection; one request at a time."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port

    async def open(self) -> None:
        self.reader, self.writer = await asyncio.open_connection(self.host, self.port, limit=1 << 22)

    async def post(self, path: str, key: str, body: bytes) -> bytes:
        head = f"POST {path} HTTP/1.1\r\nhost: b\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        headers = await self.reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in headers[:20]:
            raise RuntimeError(headers.decode() + (await self.reader.read(2000)).decode())
        at = headers.find(b"content-length: ")
        if at >= 0:
            return await self.reader.readexactly(int(headers[at + 16 : headers.index(b"\r\n", at)]))
        parts = []
        while True:
            size = int(await self.reader.readline(), 16)
            parts.append(await self.reader.readexactly(size))
            await self.reader.readexactly(2)
            if not size:
                return b"".join(parts)


async def load(
    url: str, connections: int, seconds: float, is_stream: bool
) -> tuple[list[tuple[str, str]], list[float]]:
    """Closed loop: (session, interaction) of each reply, and how long each took in seconds."""
    host, port = url.removeprefix("http://").split(":")
    done: list[tuple[str, str]] = []
    took: list[float] = []
    end = time.perf_counter() + seconds
    rng = random.Random(2)
    system = {"role": "system", "content": " ".join(rng.choices(WORDS, k=350))}

    async def one() -> None:
        connection = Connection(host, int(port))
        await connection.open()
        while time.perf_counter() < end:
            started = json.loads(await connection.post("/rl/start_session", ADMIN, b'{"task_id":"t"}'))
            key, session = started["api_key"], started["session_id"]
            messages = [system]
            for _ in range(TURNS):
                messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=70))})
                body = json.dumps({"model": "m", "messages": messages, "stream": is_stream}).encode()
                began = time.perf_counter()
                answer = await connection.post("/v1/chat/completions", key, body)
                took.append(time.perf_counter() - began)
                if is_stream:
                    chunks = [json.loads(line[6:]) for line in answer.split(b"\n\n") if line.startswith(b"data: {")]
                    said = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
                    done.append((session, chunks[0]["id"]))
                else:
                    reply = json.loads(answer)
                    said = reply["choices"][0]["message"]["content"]
                    done.append((session, reply["id"]))
                messages.append({"role": "assistant", "content": said})
            await connection.post("/rl/end_session", key, b"{}")
        connection.writer.close()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(connections):
            tasks.create_task(one())
    return done, took


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def check(book: str, done: list[tuple[str, str]]) -> None:
    """What was answered is in the book, and each session is one trajectory."""
    from rollbook.store.directory import DirectoryLog
    from rollbook.store.events import from_batch

    log = DirectoryLog(book)
    found = {}
    for batch in log.read():
        for event in from_batch(batch):
            if event.kind == "InteractionRecorded":
                found[event.interaction_id] = (event.episode_id, event.fact.edge, len(event.output_ids))
    log.close()
    for session, interaction in done:
        episode, edge, n = found[interaction]
        assert episode == session
        assert n == OUTPUT, n
        assert edge in (None, "extends"), edge
    roots = sum(edge is None for _, edge, _ in found.values())
    assert roots == len({episode for episode, _, _ in found.values()}), "a turn began a tree of its own"


def measure(tokenizer: str, connections: int, seconds: float, is_stream: bool) -> None:
    """One run, printed as one line."""
    anchor = anchor_us(connections)
    folder = tempfile.mkdtemp(prefix="rollbook-bench-")
    chunk = 1 if is_stream else OUTPUT
    command = [sys.executable, __file__, "--serve", folder, "--tokenizer", tokenizer, "--chunk", str(chunk)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        asyncio.run(load(url, connections, 1.0, is_stream))  # warm
        before, memory = cpu_seconds(server.pid), rss_mb(server.pid)
        done, took = asyncio.run(load(url, connections, seconds, is_stream))
        cpu, grown = cpu_seconds(server.pid) - before, rss_mb(server.pid) - memory
        server.terminate()
        server.wait(20)
        check(folder, done)
        took.sort()
        kind, each = "stream" if is_stream else "whole", 1e6 * cpu / len(done)
        print(
            f"{kind} c={connections}: {each:6.0f} us CPU each = {each / anchor:.0f} anchors of {anchor:.0f} us, "
            f"{len(done) / seconds:6.0f}/s, "
            f"p50 {1e3 * took[len(took) // 2]:.2f} ms, p99 {1e3 * took[-len(took) // 100 - 1]:.2f} ms, "
            f"memory +{1e4 * grown / len(done):.0f} MB per 10,000, load {os.getloadavg()[0]:.1f}, n={len(done)}",
            flush=True,
        )
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--greet", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--chunk", type=int, default=OUTPUT, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.greet:
        greet()
    elif given.serve:
        serve(given.serve, given.tokenizer, given.chunk)
    else:
        for n in given.connections:
            measure(given.tokenizer, n, given.seconds, given.stream)
