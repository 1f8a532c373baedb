"""What only a served log does: keys, other people's bodies, servers that go away."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pyarrow as pa
import pytest

from rollbook.store import BookNotFound, DirectoryLog, LogClosed, LogWriteFailed
from rollbook.store.events import from_batch
from rollbook.store.http import HttpLog, encode_stream
from rollbook.store.rows import to_batch
from store_histories import interaction
from store_served import KEY, Server


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def url(server: Server, tmp_path: Path) -> Iterator[str]:
    log = DirectoryLog(tmp_path / "book", "serve")
    yield server.add(log)
    log.close()


def post(url: str, path: str, body: bytes, key: str = KEY) -> httpx.Response:
    return httpx.post(url + path, content=body, headers={"authorization": f"Bearer {key}"}, timeout=60)


def test_events_are_appended_under_the_servers_name(url: str, tmp_path: Path) -> None:
    log = HttpLog(url, KEY)
    assert log.writer == "serve"
    event = interaction()
    assert log.append_blocking(event) == [0]
    (batch,) = DirectoryLog(tmp_path / "book").read()
    assert batch["writer"].to_pylist() == ["serve"]
    assert from_batch(batch)[0].event_id == event.event_id
    log.close()


def test_only_the_admins_key_reads_and_writes(url: str) -> None:
    with pytest.raises(BookNotFound, match="does not serve its events to this key: 403, this route needs"):
        HttpLog(url, "sk-rb-somebody")
    assert post(url, "/events", b"", "wrong").status_code == 403
    assert httpx.get(url + "/events", timeout=60).status_code == 403


def test_where_nobody_serves_is_no_book() -> None:
    with pytest.raises(BookNotFound, match=r"no book is served at http://127\.0\.0\.1:1 "):
        HttpLog("http://127.0.0.1:1", KEY)


def test_a_server_that_is_gone_is_said_to_be(server: Server, tmp_path: Path) -> None:
    log = DirectoryLog(tmp_path / "book", "serve")
    client = HttpLog(server.add(log), KEY)
    client.append_blocking(interaction())
    log.close()  # the server still answers, its log takes no more
    with pytest.raises(LogWriteFailed, match=r"503, it could not be recorded.*append the same ones again"):
        client.append_blocking(interaction())
    server.close()
    with pytest.raises(LogWriteFailed, match=r"no answer from .*append the same ones again"):
        client.append_blocking(interaction())
    client.close()
    with pytest.raises(LogClosed):
        client.gather([("serve", 0)])


def test_a_body_that_is_no_events_is_refused_by_name(url: str) -> None:
    good = encode_stream([to_batch([interaction()], writer="x", first_position=0)])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("a", pa.int64())])) as writer:
        writer.write_batch(pa.record_batch({"a": [1]}))
    table = to_batch([interaction()], writer="x", first_position=0)
    odd_kind = table.set_column(3, "kind", pa.array(["Invented"])).cast(table.schema)
    odd_fact = table.set_column(9, "payload", pa.array(["{}"])).cast(table.schema)
    for body, message in (
        (b"", "expected an Arrow IPC stream of events, got 0 other bytes"),
        (b"{}", "expected an Arrow IPC stream of events"),
        (good[: len(good) // 2], "expected an Arrow IPC stream of events"),
        (sink.getvalue().to_pybytes(), "expected an Arrow stream with the columns position, event_id"),
        (encode_stream([odd_kind]), "unknown kind 'Invented'"),
        (encode_stream([odd_fact]), "the payload of an event is no InteractionRecorded"),
    ):
        answer = post(url, "/events", body)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
    for body in (b"", b"{}", b'[["w"]]', b'[["w", "x"]]'):
        assert post(url, "/events/rows", body).status_code == 400
    headers = {"authorization": f"Bearer {KEY}"}
    for cursor in ("", "[]", '{"w": "x"}'):
        assert httpx.get(url + "/events", params={"cursor": cursor}, headers=headers, timeout=60).status_code == 400
    assert post(url, "/events", good).json() == {"writer": "serve", "positions": [0]}
