"""The book's log over HTTP, for its admin: read, follow and append. The client is `rollbook.store.http`."""

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pyarrow as pa
from litestar import Request, Response, get, post
from litestar.datastructures import State
from litestar.params import FromQuery
from litestar.response import Stream

from rollbook.store.events import from_batch
from rollbook.store.http import decode_stream, encode_stream, encode_stream_parts
from rollbook.store.log import Cursor, Log

from .errors import BadRequest, NotFound
from .wire import bearer

ARROW = "application/vnd.apache.arrow.stream"

_decode_cursor = msgspec.json.Decoder(dict[str, int])
_decode_rows = msgspec.json.Decoder(list[tuple[str, int]])


def _log(request: Request[Any, Any, Any], state: State) -> Log:
    state.service.sessions.require_admin(bearer(dict(request.scope["headers"])))
    log: Log = state.service.log
    return log


@get(["/events", "/v1/events"])
async def read_events(
    request: Request[Any, Any, Any], state: State, cursor: FromQuery[str] = "{}", wait_s: FromQuery[float] = 0.0
) -> Stream:
    """Everything at or after the cursor; where there is nothing, what comes within `wait_s`."""
    log = _log(request, state)
    try:
        start: Cursor = _decode_cursor.decode(cursor)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BadRequest(
            f'cursor must be JSON like {{"writer": 17}}, got {cursor!r}: {error}', param="cursor"
        ) from None
    batches = log.read(start)
    first = await anyio.to_thread.run_sync(next, batches, None)
    if first is None and wait_s > 0:
        with anyio.move_on_after(min(wait_s, 60.0)):
            async with aclosing(log.follow(start)) as news:
                await anext(news, None)
        batches = log.read(start)
        first = await anyio.to_thread.run_sync(next, batches, None)
    found: Iterator[pa.RecordBatch] = batches if first is None else itertools.chain([first], batches)
    return Stream(_in_thread(encode_stream_parts(found)), media_type=ARROW)


async def _in_thread(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (part := await anyio.to_thread.run_sync(next, parts, None)) is not None:
        yield part


@post(["/events", "/v1/events"], status_code=200)
async def append_events(request: Request[Any, Any, Any], state: State) -> dict[str, Any]:
    """Append under the server's writer name; answered when durable. Positions in the body mean nothing."""
    log = _log(request, state)
    events = [event for batch in decode_stream(await request.body()) for event in from_batch(batch)]
    return {"writer": log.writer, "positions": await log.append(*events)}


@post(["/events/rows", "/v1/events/rows"], status_code=200)
async def gather_events(request: Request[Any, Any, Any], state: State) -> Response[bytes]:
    """The events at these (writer, position), in this order."""
    log = _log(request, state)
    try:
        pointers = _decode_rows.decode(await request.body())
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BadRequest(f'the body must be JSON like [["writer", 17]]: {error}') from None
    try:
        table = await anyio.to_thread.run_sync(log.gather, pointers)
    except KeyError as error:
        raise NotFound(str(error.args[0])) from None
    body = encode_stream(table.combine_chunks().to_batches())
    return Response(body, media_type=ARROW, headers={"rollbook-writer": log.writer or ""})


HANDLERS = [read_events, append_events, gather_events]
