"""`rollbook serve --workers 2`: one address, whichever worker a connection comes to."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollbook.store import open_book
from rollbook.store.verify import verify

ADMIN = "admin-key-of-the-tests"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@contextmanager
def two_workers(folder: Path, *more: str) -> Iterator[dict[str, Any]]:
    """Serve `folder`/book; gives the addresses."""
    command = [sys.executable, "-m", "rollbook.app.cli", "serve", "book", "--workers", "2", "--port", "0"]
    command += ["--model", "tiny", "--engine", "scripted", "--script", "answers:script"]
    command += ["--address-file", "address.json", *more]
    (folder / "answers.py").write_text(
        "def script(tokenizer):\n    return lambda g: [*tokenizer.encode('well').tolist(), tokenizer.eos_ids[0]]\n"
    )
    environment = {**os.environ, "ROLLBOOK_ADMIN_KEY": ADMIN, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    program = subprocess.Popen(command, cwd=folder, env=environment)
    try:
        while not (folder / "address.json").exists():
            assert program.poll() is None
            time.sleep(0.05)
        yield json.loads((folder / "address.json").read_text())
    finally:
        program.send_signal(signal.SIGTERM)
        assert program.wait(800) == 0
    assert verify(folder / "book").is_whole


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], Path]]:
    folder = tmp_path_factory.mktemp("workers")
    with two_workers(folder) as address:
        yield address, folder / "book"
    HTTP.close()


# Each request on a connection of its own, so that the kernel deals it to any worker.
HTTP = httpx.Client(timeout=60, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


def call(method: str, url: str, key: str, body: Any = None) -> httpx.Response:
    return HTTP.request(method, url, headers={"authorization": f"Bearer {key}"}, json=body)


def test_sessions_live_at_one_worker_and_are_reached_through_any(workers: tuple[dict[str, Any], Path]) -> None:
    address, book_path = workers
    url, urls = address["url"], address["urls"]
    assert len(set(urls)) == 2
    homes: set[str] = set()
    sessions = 0
    while sessions < 8 or len(homes) < 2:  # the kernel deals connections as it likes
        assert sessions < 200, "one worker has all the work"
        i, sessions = sessions, sessions + 1
        key = f"sk-a-key-of-the-client-{i}" if i % 2 else None
        started = call("POST", f"{url}/rl/start_session", ADMIN, {"task_id": f"t{i}", "api_key": key}).json()
        homes.add(started["base_url"])
        for _turn in range(3):
            reply = call("POST", f"{url}/v1/chat/completions", started["api_key"], CHAT)
            assert reply.status_code == 200, reply.text
        direct = call("POST", f"{started['base_url']}/chat/completions", started["api_key"], CHAT)
        assert direct.json()["choices"][0]["message"]["content"] == "well"
        wrong = next(one for one in urls if not started["base_url"].startswith(one))
        assert call("POST", f"{wrong}/v1/chat/completions", started["api_key"], CHAT).status_code == 401
        body = {"reward": 0.5, "interaction_id": direct.json()["id"]}
        rewarded = call("POST", f"{url}/rl/set_reward", started["api_key"], body)
        assert rewarded.json()["interaction_id"] == direct.json()["id"]
        by_id = {"session_id": started["session_id"], "reward": 1.0, "name": "late"}
        assert call("POST", f"{url}/rl/set_reward", ADMIN, by_id).status_code == 200
        ended = call("POST", f"{url}/rl/end_session", ADMIN, {"session_id": started["session_id"]})
        assert ended.json()["interaction_count"] == 4
        assert call("POST", f"{url}/v1/chat/completions", started["api_key"], CHAT).status_code == 410
    assert {home.removesuffix("/v1") for home in homes} == set(urls)
    with open_book(str(book_path)) as book:
        table = book.sql("select count(distinct writer) as writers, count(*) as n from interactions")
    assert table.to_pylist() == [{"writers": 2, "n": sessions * 4}]


def test_a_stream_comes_piece_by_piece_through_the_other_worker(workers: tuple[dict[str, Any], Path]) -> None:
    url = workers[0]["url"]
    started = call("POST", f"{url}/rl/start_session", ADMIN, {"task_id": "t"}).json()
    said = [call("POST", f"{url}/v1/chat/completions", started["api_key"], {**CHAT, "stream": True}) for _ in range(6)]
    for reply in said:
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.text.endswith("data: [DONE]\n\n")


def requests_in(metrics: str) -> dict[str, float]:
    """Chat calls that were answered, by worker."""
    families = {family.name: family.samples for family in text_string_to_metric_families(metrics)}
    return {
        sample.labels.get("worker", ""): sample.value
        for sample in families["rollbook_requests"]
        if (sample.labels["api"], sample.labels["status"]) == ("chat", "200")
    }


def test_the_shared_address_counts_for_all_workers(workers: tuple[dict[str, Any], Path]) -> None:
    url, urls = workers[0]["url"], workers[0]["urls"]
    homes: set[str] = set()
    for i in range(8):  # whose they are is in the keys
        asked = {"task_id": "t", "api_key": f"sk-a-key-that-is-counted-{i}"}
        started = call("POST", f"{url}/rl/start_session", ADMIN, asked).json()
        homes.add(started["base_url"])
        assert call("POST", f"{url}/v1/chat/completions", started["api_key"], CHAT).status_code == 200
    assert len(homes) == 2
    own = {str(i): requests_in(HTTP.get(f"{one}/metrics").text)[""] for i, one in enumerate(urls, 1)}
    for path in ("/metrics", "/v1/metrics", "/metrics"):
        assert requests_in(HTTP.get(url + path).text) == own
    reply = HTTP.get(f"{url}/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    assert reply.text.endswith("# EOF\n")


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_new_weights_reach_every_worker_and_who_is_started_again(workers: tuple[dict[str, Any], Path]) -> None:
    address, _ = workers

    def version(url: str) -> int:
        found: int = call("GET", f"{url}/rl/weights", ADMIN).json()["version"]
        return found

    reply = call("POST", f"{address['url']}/rl/weights", ADMIN, {"path": "/weights", "version": 5})
    assert reply.json() == {"version": 5}
    assert [version(url) for url in address["urls"]] == [5, 5]
    [worker] = children(children(address["pid"])[0])  # a keeper has one
    words = Path(f"/proc/{worker}/cmdline").read_text().split("\0")
    first = Path(words[words.index("--address-file") + 1])
    os.kill(worker, signal.SIGKILL)
    while not (again := [path for path in first.parent.parent.glob("*/address.json") if path != first]):
        time.sleep(0.05)
    assert version(json.loads(again[0].read_text())["url"]) == 5

    kept = Path(words[words.index("--front") + 1].split(":", 2)[2]).with_name("weights.json")
    kept.unlink()
    kept.mkdir()  # now it cannot be written
    newer = {"path": "/weights", "version": 6}
    refused = call("POST", f"{address['url']}/rl/weights", ADMIN, newer)
    assert (refused.status_code, "see to the disk and send them again" in refused.text) == (503, True)
    kept.rmdir()
    assert call("POST", f"{address['url']}/rl/weights", ADMIN, newer).json() == {"version": 6}


def test_permits_are_those_of_all_workers_whoever_grants_and_whoever_takes(tmp_path: Path) -> None:
    with two_workers(tmp_path, "--set", "needs_permit=true") as address:
        everywhere = [address["url"], *address["urls"]]

        def start(url: str) -> int:
            return call("POST", f"{url}/rl/start_session", ADMIN, {"task_id": "t"}).status_code

        assert [start(url) for url in everywhere] == [429] * 3
        granted = [call("POST", f"{url}/grant_capacity", ADMIN).json()["capacity"] for url in everywhere]
        assert granted == [1, 2, 3]
        first, second = address["urls"]
        assert [start(first) for _ in range(2)] == [200, 200]
        assert start(second) == 200
        assert [start(url) for url in everywhere] == [429] * 3
        for _ in range(6):
            call("POST", f"{address['url']}/grant_capacity", ADMIN)
        assert [start(address["url"]) for _ in range(7)] == [200] * 6 + [429]


def test_what_is_refused_is_refused_as_by_one_server(workers: tuple[dict[str, Any], Path]) -> None:
    url = workers[0]["url"]
    for i in range(4):
        assert call("POST", f"{url}/v1/chat/completions", f"sk-nobody-has-{i}", CHAT).status_code == 401
        assert call("POST", f"{url}/rl/start_session", ADMIN, {"task_id": ""}).status_code == 400
        assert call("POST", f"{url}/rl/end_session", ADMIN, {"session_id": "ep_nobody"}).status_code == 404
    assert HTTP.get(f"{url}/health").json()["status"] == "ok"


@pytest.mark.parametrize(("workers", "status"), [(1, 0), (2, 130)])
def test_a_server_whose_engine_never_comes_can_be_stopped(workers: int, status: int, tmp_path: Path) -> None:
    asked = threading.Event()

    class NotYet(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(503)
            asked.set()

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), NotYet) as engine:
        threading.Thread(target=engine.serve_forever, daemon=True).start()
        command = [sys.executable, "-m", "rollbook.app.cli", "serve", "book", "--port", "0", "--workers", str(workers)]
        command += ["--model", "tiny", "--engine", "vllm", "--engine-url", f"http://127.0.0.1:{engine.server_port}"]
        environment = {**os.environ, "ROLLBOOK_ADMIN_KEY": ADMIN, "PYTHONPATH": os.pathsep.join(sys.path)}
        program = subprocess.Popen(command, cwd=tmp_path, env=environment)
        try:
            assert asked.wait(800)
            program.send_signal(signal.SIGTERM)
            assert program.wait(800) == status
        finally:
            program.kill()
            engine.shutdown()
