"""Input that nobody should send: no 5xx, no leak, and the server goes on."""

import asyncio
import contextlib
import copy
import gc
import json
import socket
import time

import anyio
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy_serving import said, serving
from rollbook.proxy import listener
from rollbook.proxy.config import ServeConfig

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BODIES = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "1"},
        ],
        "tools": TOOLS,
        "tool_choice": "auto",
        "stop": ["x"],
        "max_tokens": 5,
        "temperature": 1.0,
        "chat_template_kwargs": {"enable_thinking": True, "bos_token": "b"},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
    },
    "/v1/responses": {
        "model": "m",
        "instructions": "s",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}],
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 5,
    },
    "/v1/messages": {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "1"}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {}}}],
        "tool_choice": {"type": "auto"},
    },
    "/v1/completions": {"model": "m", "prompt": [1, 2, 3], "max_tokens": 5, "logprobs": 1},
    "/rl/set_reward": {"reward": 1.0, "target": "episode", "name": "r", "details": {"a": 1}},
}

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(
        ["user", "tool", "assistant", "text", "image_url", "function", "required", "\x00", "\ud7ff", "💥"]
    )
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for i in range(len(value)):
            yield from places(value[i], (*path, i))


@st.composite
def spoilt(draw, body):
    """A body with one to three places replaced, removed or added to."""
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(sorted(places(body), key=repr)[1:] or [()]))
        if not path:
            break
        at = body
        for step in path[:-1]:
            at = at[step]
        match draw(st.sampled_from(["replace", "replace", "remove", "add"])):
            case "replace":
                at[path[-1]] = draw(values)
            case "remove":
                del at[path[-1]]
            case "add" if isinstance(at, dict):
                at[draw(st.text(max_size=5))] = draw(values)
            case _:
                at.append(draw(values)) if isinstance(at, list) else None
    return body


@pytest.fixture(scope="module")
def running():
    """One server for the whole module, in a thread: (address, key, http client, whether it is well)."""
    config = ServeConfig(
        admin_key="admin-key-of-the-tests", max_body_bytes=1 << 20, body_s=2, max_header_bytes=16 << 10
    )
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serving(lambda _: said("ok"), config=config)) as served,
        httpx.Client(base_url=served.url, trust_env=False, timeout=60) as http,
    ):
        yield served, portal.call(served.client.start_session, "t").api_key, http


@pytest.mark.parametrize("kind", [[], {}, [{}], 1, None, "auto "])
def test_a_tool_choice_of_no_known_type_is_refused_by_its_name(running, kind):
    _, key, http = running
    body = {**BODIES["/v1/messages"], "tool_choice": {"type": kind}}
    reply = http.post("/v1/messages", json=body, headers={"x-api-key": key})
    assert reply.status_code == 400
    assert "tool_choice.type must be auto" in reply.json()["error"]["message"]
    deferred = [{"name": kind, "defer_loading": True}]
    reply = http.post("/v1/messages", json={**body, "tools": deferred}, headers={"x-api-key": key})
    assert reply.status_code == 400


@pytest.mark.parametrize("path", BODIES)
def test_spoilt_bodies_are_refused_in_the_vendors_shape(running, path):
    _, key, http = running

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(spoilt(BODIES[path]), st.booleans())
    def check(body, is_stream):
        if is_stream and "rl" not in path:
            body = {**body, "stream": True}
        reply = http.post(path, content=json.dumps(body), headers={"x-api-key": key})
        assert reply.status_code < 500, (reply.text, body)
        if reply.status_code != 200:
            said = reply.json()
            assert said["error"]["message"]
            assert said["error"]["type"]
        elif reply.headers["content-type"].startswith("text/event-stream"):
            assert '"error":{' not in reply.text.replace(" ", ""), (reply.text, body)

    check()


@pytest.mark.parametrize("path", [*BODIES, "/v1/rl/start_session"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe\x00",
        b'{"messages": "\xff"}',
        b'{"messages":' + b"[" * 100_000,
        b'{"messages":' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"max_tokens": 1e400, "messages": [{"role": "user", "content": "a"}]}',
        b'{"max_tokens": 123456789012345678901234567890, "messages": [{"role": "user", "content": "a"}]}',
        b'{"temperature": NaN, "messages": [{"role": "user", "content": "a"}]}',
        b'{"messages": [{"role": "user", "content": "a"}]} trailing',
        b"a" * (1 << 20) + b"a",
    ],
    ids=lambda body: repr(body[:24]),
)
def test_bytes_that_are_no_body_are_refused(running, path, body):
    served, key, http = running
    who = served.service.admin_key if path.endswith("start_session") else key
    reply = http.post(path, content=body, headers={"x-api-key": who})
    assert 400 <= reply.status_code < 500, reply.text
    assert reply.json()["error"]["message"]


def speak(served, *pieces):
    """Send raw bytes, and read until the server closes or has answered."""
    host, port = served.url.removeprefix("http://").split(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        with contextlib.suppress(ConnectionError):  # it may have answered before it was sent everything
            for piece in pieces:
                connection.sendall(piece)
        with contextlib.suppress(ConnectionError):
            while b"\r\n\r\n" not in answer and (got := connection.recv(65536)):
                answer += got
    return answer


def speak_twice(served, first, second):
    """Send the second request when the first has its answer; both answers."""
    host, port = served.url.removeprefix("http://").split(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        for n, request in enumerate((first, second), 1):
            connection.sendall(request)
            while answer.count(b"HTTP/1.1 ") < n or b"\r\n\r\n" not in answer.rpartition(b"HTTP/1.1 ")[2]:
                if not (got := connection.recv(65536)):
                    return answer
                answer += got
    return answer


def head(key, length, path="/v1/chat/completions", more=""):
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n{more}content-length: {length}\r\n\r\n"
    ).encode()


def test_a_body_that_is_announced_too_large_is_not_waited_for(running):
    served, key, _ = running
    assert b" 413 " in speak(served, head(key, 1 << 40))  # one that is waited for is 408


def test_a_body_that_does_not_come_is_not_waited_for_forever(running):
    served, key, _ = running
    answer = speak(served, head(key, 100), b"{")
    assert b" 400 " in answer


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages/count_tokens", "/rl/start_session", "/rl/set_reward"]
)
def test_a_stranger_is_refused_before_the_body_is_read(running, path):
    served, _, _ = running
    assert b" 401 " in speak(served, head("nobody", 1 << 40, path))


def test_bodies_that_are_too_many_together_are_told_to_come_back():
    config = ServeConfig(admin_key="admin-key-of-the-tests", max_bodies_bytes=300_000, body_s=20)
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serving(lambda _: said("ok"), config=config)) as served,
    ):
        key = portal.call(served.client.start_session, "t").api_key
        host, port = served.url.removeprefix("http://").split(":")
        body = json.dumps({"messages": [{"role": "user", "content": "x" * 400_000}]}).encode()
        with socket.create_connection((host, int(port)), timeout=60) as slow:
            slow.sendall(head(key, 250_000) + b"{")
            while not served.service.room.used:
                time.sleep(0.01)
            refused = speak(served, head(key, 100_000))
            assert b" 429 " in refused
            assert b"retry-after: 1" in refused
            small = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
            assert b" 200 " in speak(served, head(key, len(small)) + small)
        while served.service.room.used:
            time.sleep(0.01)
        # One that is larger than all of the room is taken where it is alone.
        assert b" 200 " in speak(served, head(key, len(body)) + body)
        while served.service.room.used:
            time.sleep(0.01)


def test_a_chunked_body_that_comes_at_once_has_a_limit():
    config = ServeConfig(admin_key="admin-key-of-the-tests", max_body_bytes=1_000, body_s=20)
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serving(lambda _: said("ok"), config=config)) as served,
    ):
        key = portal.call(served.client.start_session, "t").api_key
        chunked = head(key, 0).replace(b"content-length: 0", b"transfer-encoding: chunked")
        began = time.monotonic()
        assert b" 413 " in speak(served, chunked + b"7d0\r\n" + b"x" * 2_000 + b"\r\n0\r\n\r\n")
        assert time.monotonic() - began < 15


def test_requests_that_wait_behind_another_are_few(running):
    """Each would be held in memory, a stranger's as well."""
    served, key, _ = running
    host, port = served.url.removeprefix("http://").split(":")
    one = head(key, 2, "/rl/set_reward") + b"{}"
    answered = []
    for n in (50, 2_000):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            answer = b""
            with contextlib.suppress(OSError):  # it may be cut off before all is sent
                connection.sendall(one * n)
                connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while got := connection.recv(1 << 16):
                    answer += got
                    if answer.count(b"HTTP/1.1 ") == 50:
                        break
            answered.append(answer.count(b"HTTP/1.1 400 "))
    assert answered[0] == 50
    assert answered[1] < 50


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_an_upgrade_that_is_offered_changes_nothing(running, protocol):
    """Java's own client offers HTTP/2 with every request."""
    served, key, _ = running
    body = json.dumps({"messages": [{"role": "user", "content": "hi\r\nUpgrade: x"}]}).encode()
    more = f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {protocol}\r\nHTTP2-Settings: AAEAAEAA\r\n"
    request = head(key, len(body), more=more) + body
    assert speak_twice(served, request, request).count(b"HTTP/1.1 200 ") == 2


def test_a_flood_of_headers_is_cut_off(running):
    served, key, _ = running
    flood = "".join(f"x-{i}: {'y' * 100}\r\n" for i in range(1000))
    assert b" 400 " in speak(served, head(key, 2, more=flood) + b"{}")
    assert b" 400 " in speak(served, b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")


def test_headers_that_do_not_come_are_not_waited_for_forever(running, monkeypatch):
    served, _, _ = running
    monkeypatch.setattr(listener, "HEADER_S", 0.2)
    assert speak(served, b"GET /health HTTP/1.1\r\nhost") == b""


def test_connections_over_the_limit_are_told_to_come_back():
    config = ServeConfig(max_connections=3)
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serving(lambda _: said("ok"), config=config)) as served,
        contextlib.ExitStack() as held,
    ):
        host, port = served.url.removeprefix("http://").split(":")
        connections = [held.enter_context(socket.create_connection((host, int(port)), timeout=60)) for _ in range(8)]
        answer = b"".join(iter(lambda: connections[-1].recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after: 1" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        for connection in connections:
            connection.close()
        with httpx.Client(base_url=served.url, trust_env=False, timeout=60) as http:
            while http.get("/health").status_code == 429:
                time.sleep(0.05)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})])
async def test_who_is_cut_off_while_he_is_answered_leaves_no_error_behind(anyio_backend):
    """uvloop raises where asyncio only warns."""
    errors = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    async with serving(lambda g: said("ok" * 20), token_s=0.1) as served:
        started = await served.client.start_session("t")
        body = b'{"messages":[{"role":"user","content":"hi"}]}'
        requests = (head(started.api_key, len(body)) + body) * (3 * listener.MOST_WAITING)
        answer = await anyio.to_thread.run_sync(speak, served, requests)
        assert b" 400 " in answer.partition(b"\r\n")[0]
    gc.collect()  # tasks say what nobody took from them when they go
    assert not errors


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True}), "asyncio"], ids=["uvloop", "asyncio"])
async def test_who_leaves_while_more_of_his_requests_wait_is_noticed(anyio_backend):
    gate = anyio.Event()

    async def never(_):
        await gate.wait()
        return said("ok")

    config = ServeConfig(admin_key="admin-key-of-the-tests", grace_s=0.05)
    async with serving(never, config=config) as served:
        started = await served.client.start_session("t")
        body = b'{"messages":[{"role":"user","content":"hi"}]}'
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall((head(started.api_key, len(body)) + body) * 3)
            with anyio.fail_after(600):
                while not served.service.calls.running:  # noqa: ASYNC110 - there is no event for it
                    await anyio.sleep(0.01)
        with anyio.fail_after(600):
            while served.service.calls.running:  # noqa: ASYNC110 - nor for this
                await anyio.sleep(0.01)


def test_what_is_no_http_is_refused(running):
    served, _, _ = running
    for sent in (b"\x00" * 100, b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"GET \xff HTTP/1.1\r\n\r\n"):
        assert b" 400 " in speak(served, sent)


def test_an_unknown_path_and_a_wrong_method_are_the_clients_mistake(running):
    _, key, http = running
    for method, path, status in [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/messages", 405),
        ("GET", "/rl/start_session", 405),
        ("POST", "/v1/threads", 404),
    ]:
        reply = http.request(method, path, headers={"x-api-key": key})
        assert reply.status_code == status
        assert reply.json()["error"]["message"]
        assert ("allow" in reply.headers) == (status == 405)
    assert http.get("/rl/start_session").headers["allow"] == "POST"
    assert set(http.delete("/health").headers["allow"].split(", ")) == {"GET", "HEAD", "OPTIONS"}
    assert http.head("/v1/messages").headers["allow"] == "POST"


def test_head_is_get_without_a_body(running):
    _, _, http = running
    for path in ("/health", "/v1/health", "/models", "/nothing"):
        told, asked = http.head(path), http.get(path)
        assert told.status_code == asked.status_code
        assert told.headers["content-length"] == asked.headers["content-length"]
        assert told.content == b""


@pytest.mark.parametrize("more", ["", "connection: keep-alive\r\n"])
def test_a_stream_for_a_client_of_http_1_0_is_not_chunked_and_ends_with_its_connection(running, more):
    served, key, _ = running
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head(key, len(body), more=more).replace(b"HTTP/1.1", b"HTTP/1.0") + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    told, _, said = answer.partition(b"\r\n\r\n")
    assert told.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in told
    assert b"connection: close" in told
    assert said.startswith(b"data: {")
    assert said.endswith(b"data: [DONE]\n\n")
    assert all(line.startswith(b"data: ") for line in said.split(b"\n\n")[:-1])


def test_an_answer_to_head_has_no_body_and_the_next_one_is_read_right(running):
    served, key, _ = running
    more = head(key, 2, "/rl/set_reward") + b"{}"
    for path in ("/v1/chat/completions", "/rl/start_session", "/health"):
        answer = speak_twice(served, f"HEAD {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode(), more)
        assert answer.count(b"HTTP/1.1 ") == 2
        assert answer.partition(b"\r\n\r\n")[2].startswith(b"HTTP/1.1 400 ")


def test_no_page_of_another_origin_may_read_an_answer(running):
    _, key, http = running
    asked = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    body = {"messages": [{"role": "user", "content": "hi"}]}
    for reply in (
        http.options("/v1/chat/completions", headers=asked),
        http.options("/rl/start_session", headers=asked),
        http.post("/v1/chat/completions", json=body, headers={**asked, "x-api-key": key}),
        http.get("/health", headers=asked),
    ):
        assert reply.status_code < 500
        assert not [name for name in reply.headers if name.startswith("access-control-")]


def test_sessions_see_nothing_of_each_other(running):
    served, key, http = running
    own = http.post("/v1/responses", json={"input": "secret-of-one"}, headers={"x-api-key": key}).json()["id"]
    admin = {"x-api-key": served.service.admin_key}
    other = http.post("/rl/start_session", json={"task_id": "t"}, headers=admin).json()["api_key"]
    for path, body in [
        ("/v1/responses", {"input": "go on", "previous_response_id": own}),
        ("/rl/set_reward", {"reward": 1, "interaction_id": own}),
    ]:
        reply = http.post(path, json=body, headers={"x-api-key": other})
        assert 400 <= reply.status_code < 500
        assert "secret" not in reply.text


def test_after_all_that_the_server_is_well(running):
    _, key, http = running
    assert http.get("/health").json()["status"] == "ok"
    body = {"messages": [{"role": "user", "content": "hi"}]}
    reply = http.post("/v1/chat/completions", json=body, headers={"x-api-key": key})
    assert reply.json()["choices"][0]["message"]["content"] == "ok"
    assert json.loads(reply.content)
