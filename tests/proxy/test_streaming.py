"""Streams: the first token at once, nothing lost in joining, and a client that takes nothing is let go."""

import asyncio
import contextlib
import json

import anyio
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy_serving import said, serving
from rollbook.proxy.config import ServeConfig
from rollbook.proxy.request import Piece
from rollbook.proxy.server import join_pieces

text = st.text(max_size=3)
ids = st.lists(st.integers(0, 9), max_size=2)
pieces = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.builds(lambda t, i: Piece(text=t, token_ids=i, logprobs=[-1.0] * len(i)), text, ids)
        | st.builds(lambda t, i: Piece(reasoning=t, token_ids=i, logprobs=[-2.0] * len(i)), text, ids)
        | st.builds(lambda k, t: Piece(tool_index=k, tool_arguments=t), st.integers(0, 2), text),
    ),
    max_size=12,
)


def story(items, choice):
    """What a choice says, in order: (kind, text), neighbours of a kind together."""
    told = []
    for i, piece in items:
        if i == choice:
            kind = "reasoning" if piece.reasoning else "text" if piece.tool_index is None else piece.tool_index
            said_here = piece.text + piece.reasoning + piece.tool_arguments
            if not said_here:
                continue
            if told and told[-1][0] == kind:
                told[-1] = (kind, told[-1][1] + said_here)
            else:
                told.append((kind, said_here))
    return told


@settings(deadline=None)
@given(pieces)
def test_joined_pieces_say_the_same(items):
    joined = join_pieces(items)
    assert len(joined) <= len(items)
    for choice in (0, 1):
        assert story(joined, choice) == story(items, choice)
        for name in ("token_ids", "logprobs"):
            flat = [[x for i, p in some if i == choice for x in getattr(p, name)] for some in (joined, items)]
            assert flat[0] == flat[1]


class Held:
    """An engine that gives its second token when it is told to go on."""

    def __init__(self, engine):
        self._engine, self.go_on = engine, anyio.Event()
        self.logprobs_mode = engine.logprobs_mode

    async def health(self):
        return await self._engine.health()

    async def generate(self, generation):
        async with contextlib.aclosing(self._engine.generate(generation)) as pieces:
            yield await anext(pieces)
            await self.go_on.wait()
            async for piece in pieces:
                yield piece


@pytest.mark.anyio
async def test_the_first_token_does_not_wait_for_the_others():
    async with serving(lambda _: said("y" * 40), chunk_tokens=1) as served:
        key = (await served.client.start_session("t")).api_key
        engine = served.service.capture._engine = Held(served.service.engine)
        seen = ""
        async with (
            httpx.AsyncClient(timeout=60, base_url=served.url, trust_env=False) as http,
            http.stream(
                "POST",
                "/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "hi"}], "stream": True},
                headers={"x-api-key": key},
            ) as reply,
        ):
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    seen += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                if seen:
                    engine.go_on.set()
        assert seen == "y" * 40


@pytest.mark.anyio
async def test_a_client_that_takes_nothing_is_let_go():
    config = ServeConfig(admin_key="admin-key-of-the-tests", stall_s=0.3, grace_s=0.05)
    async with serving(lambda _: said("y" * 200_000), config=config, chunk_tokens=2000, token_s=1e-6) as served:
        key = (await served.client.start_session("t")).api_key
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True, "logprobs": True}).encode()
        head = f"POST /chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()
        with anyio.fail_after(600):
            while served.service.calls.running:  # noqa: ASYNC110 - a call that ends has no event for others
                await anyio.sleep(0.05)
            await anyio.sleep(1)
            writer.transport.resume_reading()
            with contextlib.suppress(ConnectionError):
                rest = b""
                while got := await reader.read(1 << 16):
                    rest = rest[-100:] + got
        assert b"[DONE]" not in rest
        writer.transport.abort()
        assert (await served.client.health())["status"] == "ok"
