"""Reading the book over HTTP, for its admin: SQL on its tables, and a session's samples in AReaL's form.

Both see everything that was acknowledged before the question. Reading changes nothing, so it may be repeated. The work
is done in a thread: the event loop has calls to answer.
"""

from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import pyarrow as pa
from anyio.lowlevel import RunVar
from litestar import Request, Response, post
from litestar.datastructures import State

from rollbook.store.book import Book
from rollbook.store.sql import run_query
from rollbook.store.stream import export

from .bodies import Export, Query
from .dialects import decoder
from .errors import BadRequest, NotFound
from .wire import bearer

ARROW = "application/vnd.apache.arrow.stream"

_AT_ONCE = 32  # queries that run or wait for their turn; more wait for a thread
_threads: RunVar[anyio.CapacityLimiter] = RunVar("threads of queries")

_decode_query = decoder(Query)
_decode_export = decoder(Export)
_encode = msgspec.json.Encoder(enc_hook=lambda array: np.asarray(array).tolist()).encode


@post(["/sql", "/v1/sql"], status_code=200)
async def sql(request: Request[Any, Any, Any], state: State) -> Response[bytes]:
    """Run one read-only statement; the answer is an Arrow IPC stream."""
    service = state.service
    service.sessions.require_admin(bearer(dict(request.scope["headers"])))
    asked = _decode_query(await request.body())

    def read() -> bytes:
        book: Book = service.book
        book.catch_up()
        table = run_query(book.views, asked.query)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue().to_pybytes()

    return Response(await anyio.to_thread.run_sync(read, limiter=_query_threads()), media_type=ARROW)


def _query_threads() -> anyio.CapacityLimiter:
    """Threads of their own: queries that wait for one another hold up nothing else that needs a thread."""
    try:
        return _threads.get()
    except LookupError:
        _threads.set(anyio.CapacityLimiter(_AT_ONCE))
        return _threads.get()


@post(["/export_trajectories", "/v1/export_trajectories"], status_code=200)
async def export_trajectories(request: Request[Any, Any, Any], state: State) -> Response[bytes]:
    """A session's samples; with tokens, logprobs, versions and credited rewards."""
    service = state.service
    service.sessions.require_admin(bearer(dict(request.scope["headers"])))
    asked = _decode_export(await request.body())
    if asked.session_id is None:
        wrong = BadRequest("session_id is missing; say which session to export", param="session_id")
        wrong.status = 422
        raise wrong
    return Response(await anyio.to_thread.run_sync(_export, service.book, asked), media_type="application/json")


def _export(book: Book, asked: Export) -> bytes:
    book.catch_up()
    session_id = asked.session_id
    rows = book.sql(
        "select interaction_id, is_trainable from interactions where episode_id = ? order by recorded_at, event_id",
        [session_id],
    ).to_pylist()
    if not rows and not book.sql("select 1 from episodes where episode_id = ?", [session_id]).num_rows:
        raise NotFound(f"the book has no session {session_id!r}")
    samples: dict[str, Any] = {}
    if rows:
        credits = book.credits(asked.credit, asked.discount, asked.fork, asked.reward, episode_ids=[str(session_id)])
        rewards = dict(zip(*credits.select(["interaction_id", "credit"]).to_pydict().values(), strict=True))
        try:
            samples = export(book.nodes([rows[0]["interaction_id"]]), rewards, style=asked.style)
        except ValueError as error:
            raise BadRequest(str(error), param="style") from error
        if asked.style != "tree":
            # What nobody waited for, and what was asked with `store: false`, is in the book and no sample.
            trained = {row["interaction_id"] for row in rows if row["is_trainable"]}
            samples = {name: sample for name, sample in samples.items() if name in trained}
    return _encode({"session_id": session_id, "style": asked.style, "interactions": samples})


HANDLERS = [sql, export_trajectories]
