"""Memory under hostile load, of a server in a process of its own: `make test-hostile`.

Not collected by a plain `pytest`: it fills sockets for a minute. Each test measures the server's memory while clients
misbehave, and asks afterwards whether it answers as ever.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

ADMIN = "admin-key-of-the-tests"
MB = 1 << 20
GROWTH_MB = 700
"""What bodies may take at most (`max_bodies_bytes` 256 MB, and what is parsed of one), and connections besides."""

_SERVER = f"""
import anyio, anyio.to_thread, sys
from proxy_serving import said, serving
from rollbook.proxy.config import ServeConfig
from rollbook.store.directory import DirectoryLog

async def main():
    log = DirectoryLog(sys.argv[1], writer="server")
    config = ServeConfig(admin_key="{ADMIN}", body_s=15.0, max_connections=6000, stall_s=20.0)
    async with serving(lambda g: said("word " * 4000), log=log, config=config) as served:
        print(served.url, flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)
    log.close()

anyio.run(main, backend_options={{"use_uvloop": True}})
"""


class Victim:
    """The server, and how it does."""

    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self.process, self.url = process, url
        host, port = url.removeprefix("http://").split(":")
        self.address = (host, int(port))
        self.http = httpx.Client(base_url=url, trust_env=False, timeout=20)
        self.key = self.http.post("/rl/start_session", json={"task_id": "t"}, headers=self.bearer(ADMIN)).json()[
            "api_key"
        ]
        self.answers()

    @staticmethod
    def bearer(key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"}

    def memory(self) -> float:
        """MB."""
        return psutil.Process(self.process.pid).memory_info().rss / MB

    def connect(self) -> socket.socket:
        connection = socket.create_connection(self.address, timeout=20)
        connection.settimeout(20)
        return connection

    def answers(self) -> float:
        """Seconds that a good client's call takes."""
        began = time.monotonic()
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        reply = self.http.post("/v1/chat/completions", json=body, headers=self.bearer(self.key))
        assert reply.status_code == 200, reply.text
        return time.monotonic() - began

    @contextlib.contextmanager
    def watched(self, *, growth_mb: float = GROWTH_MB) -> Iterator[None]:
        """Memory is looked at all the while."""
        before = self.memory()
        most, is_over = [before], threading.Event()

        def look() -> None:
            while not is_over.wait(0.02):
                most.append(self.memory())

        looking = threading.Thread(target=look)
        looking.start()
        try:
            yield
        finally:
            is_over.set()
            looking.join()
        took = self.answers()
        print(
            f"before {before:.0f} MB, at most {max(most):.0f}, afterwards {self.memory():.0f}; "
            f"a good call then took {took * 1e3:.0f} ms"
        )
        assert max(most) < before + growth_mb
        assert took < 5


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(tmp_path_factory.mktemp("book") / "book")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        assert process.stdout is not None
        try:
            found = Victim(process, process.stdout.readline().strip())
            with contextlib.closing(found.http):
                yield found
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(30)


def head(key: str, length: int, path: str = "/v1/chat/completions") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\n\r\n"
    ).encode()


def status(connection: socket.socket) -> int:
    """Of the answer; 0 where the connection was closed instead."""
    with contextlib.suppress(OSError):
        got = connection.recv(65536)
        return int(got.split(b" ", 2)[1]) if got else 0
    return 0


def at_once(n: int, work: Callable[[int], int]) -> list[int]:
    """The statuses of n clients in n threads."""
    found: list[int] = [0] * n

    def run(i: int) -> None:
        with contextlib.suppress(OSError):
            found[i] = work(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/rl/set_reward"])
def test_many_large_bodies_at_once(victim: Victim, path: str) -> None:
    text = b"x" * (20 * MB)

    def send(i: int) -> int:
        body = b'{"messages":[{"role":"user","content":"%b"}],"unknown":1}' % text
        with victim.connect() as connection:
            connection.sendall(head(victim.key, len(body), path) + body)
            return status(connection)

    with victim.watched():
        found = at_once(40, send)
    print({code: found.count(code) for code in set(found)})
    assert set(found) <= {0, 400, 429}
    assert 429 in found


def test_bodies_that_are_small_and_have_many_objects(victim: Victim) -> None:
    body = b'{"messages":[{"role":"user","content":[%b]}]}' % b",".join([b"[]"] * 4_000_000)

    def send(i: int) -> int:
        with victim.connect() as connection:
            connection.sendall(head(victim.key, len(body)) + body)
            return status(connection)

    with victim.watched(growth_mb=900):
        found = at_once(12, send)
    assert set(found) <= {0, 400, 429}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/rl/start_session", "/rl/end_session", "/sql", "/events"])
def test_bodies_of_strangers_are_not_kept(victim: Victim, path: str) -> None:
    piece = b"x" * MB

    def send(i: int) -> int:
        with victim.connect() as connection:
            connection.sendall(head("nobody", 30 * MB, path))
            for _ in range(30):
                connection.sendall(piece)
            return status(connection)

    with victim.watched(growth_mb=300):
        found = at_once(40, send)
    assert set(found) <= {0, 401, 403, 413}


def test_bodies_that_come_slowly(victim: Victim) -> None:
    with victim.watched(growth_mb=300), contextlib.ExitStack() as held:
        connections = [held.enter_context(victim.connect()) for _ in range(1000)]
        for connection in connections:
            connection.sendall(head(victim.key, 1_000_000) + b'{"messages":[')
        for _ in range(3):
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.sendall(b" " * 100)
            assert victim.answers() < 5
        found = {status(connection) for connection in connections[:20]}
    assert found <= {400, 429}


def test_headers_without_end(victim: Victim) -> None:
    flood = b"x-a: " + b"y" * 200 + b"\r\n"

    def send(i: int) -> int:
        with victim.connect() as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\n")
            for _ in range(50):
                connection.sendall(flood * 500)
            return status(connection)

    with victim.watched(growth_mb=200):
        found = at_once(60, send)
    assert set(found) <= {0, 400}


def test_headers_that_come_slowly_and_connections_that_say_nothing(victim: Victim) -> None:
    with victim.watched(growth_mb=300), contextlib.ExitStack() as held:
        connections = [held.enter_context(victim.connect()) for _ in range(3000)]
        for connection in connections[::2]:
            connection.sendall(b"GET /health HTTP/1.1\r\nx")
        for _ in range(4):
            assert victim.answers() < 5
            time.sleep(1)


def test_streams_that_nobody_reads(victim: Victim) -> None:
    body = json.dumps(
        {"messages": [{"role": "user", "content": "tell"}], "stream": True, "logprobs": True, "n": 4}
    ).encode()
    with victim.watched(), contextlib.ExitStack() as held:
        keys = [
            victim.http.post("/rl/start_session", json={"task_id": "t"}, headers=victim.bearer(ADMIN)).json()["api_key"]
            for _ in range(4)
        ]
        for i in range(60):
            connection = socket.socket()
            held.enter_context(connection)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(victim.address)
            connection.sendall(head(keys[i % 4], len(body)) + body)
        for _ in range(6):
            assert victim.answers() < 10
            time.sleep(1)


def test_requests_one_behind_the_other_without_reading(victim: Victim) -> None:
    body = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":50}'
    one = head(victim.key, len(body)) + body

    def send(i: int) -> int:
        with victim.connect() as connection:
            connection.settimeout(3)
            for _ in range(200):
                connection.sendall(one * 20)
            return status(connection)

    with victim.watched():
        found = at_once(20, send)
    assert set(found) <= {0, 200, 400, 429}  # 400: more than may wait came at once
