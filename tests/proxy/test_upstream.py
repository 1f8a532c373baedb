"""The hot way to a sampling server keeps connections, notices every end, and reads events however they are cut."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.proxy.upstream import Events, Upstream

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


async def request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[tuple[Upstream, list[int]]]:
    """A server, and a list with an entry for every connection that it got."""
    met: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.append(len(met))
        try:
            await handler(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    upstream = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield upstream, met
    finally:
        upstream.close()
        server.close()
        await server.wait_closed()


class Ends:
    def __init__(self) -> None:
        self.n, self.told = 0, asyncio.Event()

    def __call__(self) -> None:
        self.n += 1
        self.told.set()


@pytest.mark.anyio
async def test_a_connection_is_used_again_and_every_end_is_told_once():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            assert await request(reader) == b"{}"
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" + OK)

    async with serving(answer) as (upstream, met):
        ended = Ends()
        for n in range(3):
            got = await upstream.post("/x", b"{}", ended)
            assert (got.status, await got.read()) == (200, b"hi")
            got.close()
            assert ended.n == n + 1
        assert len(met) == 1


@pytest.mark.anyio
async def test_a_connection_that_the_server_closed_is_replaced_without_a_word():
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(OK)

    async with serving(once) as (upstream, met):
        for _ in range(3):
            assert await (await upstream.post("/x", b"{}", Ends())).read() == b"hi"
        assert len(met) == 3


@pytest.mark.anyio
async def test_a_server_that_hangs_up_on_a_new_connection_is_an_error():
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)

    async with serving(never) as (upstream, met):
        ended = Ends()
        with pytest.raises(ConnectionError, match="closed the connection"):
            await upstream.post("/x", b"{}", ended)
        assert (len(met), ended.n) == (1, 0)


@pytest.mark.anyio
async def test_an_answer_that_breaks_off_is_an_error_and_what_came_is_read_first():
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n")
        await writer.drain()

    async with serving(half) as (upstream, _):
        ended = Ends()
        answer = await upstream.post("/x", b"{}", ended)
        assert await answer.more() == b"hi"
        with pytest.raises(ConnectionError):
            await answer.more()
        assert ended.n == 1


@pytest.mark.anyio
async def test_what_is_not_http_is_an_error():
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(b"SSH-2.0-OpenSSH\r\n")
        await writer.drain()

    async with serving(other) as (upstream, _):
        with pytest.raises(ValueError, match="does not speak HTTP"):
            await upstream.post("/x", b"{}", Ends())


@pytest.mark.anyio
@pytest.mark.parametrize("drains", [False, True])
async def test_a_reader_that_leaves_closes_and_one_that_has_read_the_end_keeps_the_connection(drains):
    go_on, gone = asyncio.Event(), asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await request(reader)
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n")
                await go_on.wait()
                writer.write(b"4\r\nmore\r\n0\r\n\r\n")
        finally:
            gone.set()

    async with serving(slow) as (upstream, met):
        ended = Ends()
        answer = await upstream.post("/x", b"{}", ended)
        assert await answer.more() == b"hi"
        if drains:
            answer.drain()
        answer.close()
        answer.close()
        assert ended.n == (0 if drains else 1)
        go_on.set()
        if not drains:
            await asyncio.wait_for(gone.wait(), 60)
        else:
            await asyncio.wait_for(ended.told.wait(), 60)
        assert await (await upstream.post("/x", b"{}", Ends())).read() == b"himore"
        assert len(met) == (1 if drains else 2)


@settings(deadline=None)
@given(data=st.lists(st.sampled_from([b"a", b'{"x":1}', b""]), max_size=6), cuts=st.lists(st.integers(0, 80)))
def test_events_are_the_same_wherever_the_stream_is_cut(data, cuts):
    stream = b"".join(b"data: %b\r\n\n" % event for event in data) + b": a comment\n\ndata: [DONE]\n\n"
    places = sorted({0, len(stream), *(c for c in cuts if c < len(stream))})
    events, found = Events(), []
    for begin, end in zip(places, places[1:], strict=False):  # noqa: RUF007
        found += events.feed(stream[begin:end])
    assert (found, events.is_done) == (data, True)
