"""The HTTP surface: routes, who may use them, and the program that serves them.

Model calls go straight through ASGI (`complete`): no framework object is made for them. All else are ordinary Litestar
handlers. Every path is served bare and under /v1. Errors leave in the shape of the vendor whose route it is.
"""

import asyncio
import gc
import hashlib
import ipaddress
import itertools
import logging
import secrets
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TypeAlias

import anyio
import msgspec
import uvicorn
from litestar import Litestar, Request, Response, Router, asgi, get, post
from litestar.datastructures import State
from litestar.di import NamedDependency, Provide
from litestar.exceptions import HTTPException
from litestar.params import FromPath
from litestar.types import ASGIApp

from rollbook.store import Log, LogClosed, LogWriteFailed, QueriesBusy, StoreError, TablesDamaged, __version__
from rollbook.store.book import Book
from rollbook.store.views import Views

from .bodies import Ended, EndSession, SetReward, Started, StartSession, Weights
from .calls import Calls, Client
from .capture import Capture, CaptureSettings
from .config import ServeConfig
from .dialects import Context, Dialect, decoder, refuse_as_openai
from .dialects.chat import Chat
from .dialects.completions import Completions
from .dialects.messages import Messages
from .dialects.responses import Responses
from .engine import Engine
from .errors import (
    BadRequest,
    Busy,
    Conflict,
    EngineFailed,
    Forbidden,
    NotFound,
    NotRecorded,
    ProxyError,
    TooLarge,
    WrongMethod,
)
from .events import HANDLERS as EVENTS
from .front import Front, Shared, peers_of
from .listener import Protocol, Server, bind, most_connections
from .metrics import Exposition, Metrics, exposition
from .parsing import Vocabulary
from .permits import Permits
from .reading import HANDLERS as READING
from .request import Piece
from .seen import read
from .sessions import Session, Sessions
from .spans import Spans
from .tokenizer import Tokenizer
from .wire import (
    SSE,
    ClientGone,
    Receive,
    Room,
    Scope,
    Send,
    answer,
    bearer,
    connection_of,
    error_headers,
    read_body,
    watch,
)

AnyRequest: TypeAlias = Request[Any, Any, Any]

_log = logging.getLogger("rollbook.proxy")
_QUERIES_END_S = 1.0  # after which it is worth asking again where too many queries ran


class Service:
    """A server's parts and their life. Owns the engine; the log (and its book) stay the caller's.

    permits: those that the workers of one server share; None: its own.

    Enter it with `async with`: the engine starts, and the sessions that the book has open are known again.
    """

    def __init__(
        self,
        *,
        log: Log,
        engine: Engine,
        tokenizer: Tokenizer,
        config: ServeConfig | None = None,
        capture: CaptureSettings | None = None,
        book: Book | None = None,
        permits: Permits | None = None,
    ) -> None:
        config = config or ServeConfig()
        check_admin_key(config)
        self.admin_key = config.admin_key or "sk-rb-admin-" + secrets.token_urlsafe(32)
        self.log = log
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config
        self.metrics = Metrics()
        self.spans = Spans() if config.tracing else None
        self._book = book
        self._views: Views | None = None  # our own, where nobody gave a book
        self._reading = threading.Lock()
        self.capture = Capture(
            log=log,
            engine=engine,
            tokenizer=tokenizer,
            run_id=config.run_id,
            settings=capture or CaptureSettings(model=config.model),
            metrics=self.metrics,
            spans=self.spans,
        )
        self.sessions = Sessions(log, self.capture, config, admin_key=self.admin_key, permits=permits)
        self.calls = Calls(self.capture, self.sessions, config)
        self.sessions.on_close = self.calls.stop_session
        self.sessions.book = lambda: self.book
        self.chat = Chat(self._spell)
        self.responses = Responses(self._spell)
        self.messages = Messages(self._spell)
        self.completions = Completions(self._spell)
        self.dialects: dict[str, Dialect] = {
            f"{prefix}/{path}": dialect
            for prefix in ("", "/v1")
            for path, dialect in (
                ("chat/completions", self.chat),
                ("responses", self.responses),
                ("messages", self.messages),
                ("completions", self.completions),
            )
        }
        self.room = Room(config.max_bodies_bytes)
        self.started = time.time()
        self._pieces = Vocabulary(tokenizer).pieces
        self._loading = anyio.Lock()
        self._stack = AsyncExitStack()

    @property
    def book(self) -> Book:
        """The log's book; its tables are built at the first question. Blocks then: ask in a thread."""
        with self._reading:
            if self._book is None:
                self._views = Views(self.log)
                self._book = Book(self.log, self._views)
            return self._book

    def _spell(self, token: int) -> bytes:
        if self._pieces is not None and 0 <= token < len(self._pieces):
            return self._pieces[token]
        return self.tokenizer.decode([token]).encode()

    async def __aenter__(self) -> "Service":
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.engine)  # type: ignore[arg-type]
            self.sessions.version = (await self.engine.health()).version
            await anyio.to_thread.run_sync(self.sessions.remember)
            stack.callback(self._close_views)
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(tasks.cancel_scope.cancel)
            await stack.enter_async_context(self.calls)
            tasks.start_soon(self._tidy)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What failed outside is not for the tasks in here to wrap: it goes on by itself.
        await self._stack.__aexit__(None, None, None)

    def _close_views(self) -> None:
        if self._views is not None:
            self._views.close()
            self._views = self._book = None

    async def _tidy(self) -> None:
        """Close what nobody uses."""
        while True:
            await anyio.sleep(min(1.0, self.config.idle_s / 4))
            for session in self.sessions.idle():
                try:
                    await self.sessions.end(session, "abandoned", f"idle for {self.config.idle_s:g} s")
                except Exception as error:
                    _log.error("session %s is idle but its end cannot be recorded: %s", session.episode_id, error)

    async def load_weights(self, weights: Weights) -> int:
        """Answer with these weights from now on. The same version twice is once. Raises Conflict for an older one."""
        async with self._loading:
            now = (await self.engine.health()).version
            if weights.version < now:
                raise Conflict(f"the engine has version {now}; a version only rises, got {weights.version}")
            if weights.version > now:
                await self.engine.load_weights(weights.path, weights.version)
            self.sessions.version = weights.version
            return weights.version


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address that we listen on."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_weak(key: str) -> bool:
    """Whether a key could be guessed."""
    return len(key) < 24 or len(set(key)) < 8


def check_admin_key(config: ServeConfig) -> None:
    """Raises ValueError for a weak one where others than this machine can try it."""
    if config.admin_key is not None and not is_loopback(config.host) and is_weak(config.admin_key):
        raise ValueError(
            f"the admin key is too weak to serve on {config.host}: give 24 or more random characters, "
            "or none to get a random one"
        )


# Model calls


async def complete(service: Service, dialect: Dialect, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer one model call, streamed or whole."""
    began = time.perf_counter()
    held = service.room.hold()
    client: Client | None = None
    status, wrong = 500, None
    headers = dict(scope["headers"])
    span = None if service.spans is None else service.spans.begin(dialect.name, headers)
    try:
        _require_post(scope)
        session = service.sessions.require_open(bearer(headers))
        config = service.config
        body = await read_body(scope, headers, receive, held, max_bytes=config.max_body_bytes, seconds=config.body_s)
        seen = session.episode.seen if session.episode is not None and dialect.reads_on else None
        known = None if seen is None else seen.recall(body)
        asked = dialect.parse(body, Context(defaults=config.gconfig, headers=headers, known=known))
        was_read = None if seen is None else read(body, known, asked.messages)
        request = msgspec.structs.replace(
            asked,
            body_sha256=hashlib.sha256(body).hexdigest() if was_read is None else was_read.sha256,
            idempotency_key=headers.get(b"idempotency-key", b"").decode("latin-1") or None,
            retries=_retries(headers.get(b"x-stainless-retry-count", b"0")),
            role=headers.get(b"x-rollbook-role", b"").decode("latin-1") or asked.role,
        )
        client = service.calls.begin(session, request)
        await _serve_call(client, dialect, scope, receive, send, config)
        status, wrong = (499 if client.has_left else 200), client.call.error
        if seen is not None and was_read is not None and client.is_served:
            seen.keep(was_read)
    except ClientGone:
        status = 499
    except ProxyError as error:
        wrong = error
        status, refusal = dialect.refuse(error)
        await answer(scope, send, status, refusal, error_headers(error))
    except Exception as error:
        if client is not None and client.call.request.is_stream:
            raise  # the answer may have begun; the connection is cut
        _log.error("a model call failed in a way that nobody foresaw", exc_info=error)
        wrong = ProxyError("the server failed; its log says why")
        status, refusal = dialect.refuse(wrong)
        await answer(scope, send, status, refusal, error_headers(wrong))
    finally:
        held.give_back()
        if client is not None:
            service.calls.finish(client)
        kind = None if wrong is None else type(wrong).__name__
        service.metrics.answered(dialect.name, status, kind, time.perf_counter() - began)
        if span is not None and service.spans is not None:
            service.spans.end(span, dialect.name, client, status, wrong)


def _retries(said: bytes) -> int:
    return int(said) if said.isdigit() and len(said) < 10 else 1


async def _serve_call(
    client: Client, dialect: Dialect, scope: Scope, receive: Receive, send: Send, config: ServeConfig
) -> None:
    """Give a call's answer to its client. Raises the call's error while nothing has been sent."""
    call, request = client.call, client.call.request
    unwatch = watch(scope, receive, client.leave)
    try:
        if request.is_stream:
            await _stream_call(client, dialect, scope, send, config)
            return
        while not call.is_done and not client.has_left:
            await client.wait()
        if client.has_left:
            return
        if call.error is not None:
            raise call.error
        await answer(scope, send, 200, dialect.render(request, call.answer))
        client.is_served = True
    finally:
        unwatch()


async def _stream_call(client: Client, dialect: Dialect, scope: Scope, send: Send, config: ServeConfig) -> None:
    call, connection = client.call, connection_of(scope)
    while not (call.first and call.pieces) and not call.is_done and not client.has_left:
        await client.wait()
    if client.has_left:
        return
    call.gather()
    if call.first is None or not (call.pieces or call.error is None):
        raise call.error or EngineFailed("the call ended without an answer")  # nothing is said yet: it has a status
    stream = dialect.stream(call.request)
    await send({"type": "http.response.start", "status": 200, "headers": SSE})
    sent, out = 0, stream.begin(call.first)
    while True:
        # Look before sending, so that what came with the end goes out with it.
        call.gather()
        is_done, pieces = call.is_done, call.pieces[sent:]
        sent += len(pieces)
        out += b"".join([stream.piece(choice, piece) for choice, piece in join_pieces(pieces)])
        if is_done:
            out += stream.end(call.answer) if call.error is None else stream.fail(call.error)
        if out and not (connection is not None and connection.write(scope, out, is_last=is_done)):
            try:
                async with asyncio.timeout(config.stall_s):
                    await send({"type": "http.response.body", "body": out, "more_body": not is_done})
            except TimeoutError:
                raise ClientGone from None  # it takes nothing any more
        if out and not client.has_left:
            call.n_sent = max(call.n_sent, sent)
        out = b""
        if is_done:
            client.is_served = not client.has_left and call.error is None
            return
        # The first token goes at once, and so does one after a silence; those that come close together share a write.
        if sent and not call.is_done and not client.has_left:
            await client.pause(config.pace_s)
            call.gather()
        if sent == len(call.pieces) and not call.is_done and not client.has_left:
            await client.wait()
        if client.has_left:
            return


def join_pieces(pieces: list[tuple[int, Piece]]) -> list[tuple[int, Piece]]:
    """Neighbours of the same choice and kind as one piece, in order."""
    if len(pieces) < 2:
        return pieces
    joined: list[tuple[int, Piece]] = []
    for (choice, _), group in itertools.groupby(pieces, _kind):
        run = [piece for _, piece in group]
        first = run[0]
        if len(run) > 1:
            first = msgspec.structs.replace(
                first,
                text="".join([piece.text for piece in run]),
                reasoning="".join([piece.reasoning for piece in run]),
                tool_arguments="".join([piece.tool_arguments for piece in run]),
                token_ids=[token for piece in run for token in piece.token_ids],
                logprobs=[logprob for piece in run for logprob in piece.logprobs],
            )
        joined.append((choice, first))
    return joined


def _kind(item: tuple[int, Piece]) -> tuple[int, int]:
    choice, piece = item
    return choice, -2 if piece.reasoning else -1 if piece.tool_index is None else piece.tool_index


def _require_post(scope: Scope) -> None:
    if scope["method"] != "POST":
        raise WrongMethod(f"this route takes POST, not {scope['method']}", allow="POST")


def _service(scope: Scope) -> Service:
    service: Service = scope["litestar_app"].state.service
    return service


@asgi(["/chat/completions", "/v1/chat/completions"], copy_scope=False)
async def chat_completions(scope: Scope, receive: Receive, send: Send) -> None:
    """OpenAI chat completions."""
    service = _service(scope)
    await complete(service, service.chat, scope, receive, send)


@asgi(["/responses", "/v1/responses"], copy_scope=False)
async def responses(scope: Scope, receive: Receive, send: Send) -> None:
    """OpenAI Responses."""
    service = _service(scope)
    await complete(service, service.responses, scope, receive, send)


@asgi(["/messages", "/v1/messages"], copy_scope=False)
async def messages(scope: Scope, receive: Receive, send: Send) -> None:
    """Anthropic Messages."""
    service = _service(scope)
    await complete(service, service.messages, scope, receive, send)


@asgi(["/messages/count_tokens", "/v1/messages/count_tokens"], copy_scope=False)
async def count_tokens(scope: Scope, receive: Receive, send: Send) -> None:
    """How long the prompt of an Anthropic Messages request is."""
    service = _service(scope)
    dialect, config, held = service.messages, service.config, service.room.hold()
    try:
        _require_post(scope)
        headers = dict(scope["headers"])
        service.sessions.require_open(bearer(headers))
        body = await read_body(scope, headers, receive, held, max_bytes=config.max_body_bytes, seconds=config.body_s)
        request = dialect.parse(body, Context(defaults=config.gconfig, headers=headers))
        await answer(scope, send, 200, msgspec.json.encode({"input_tokens": await service.capture.count(request)}))
    except ClientGone:
        pass
    except ProxyError as error:
        status, refusal = dialect.refuse(error)
        await answer(scope, send, status, refusal, error_headers(error))
    finally:
        held.give_back()


@asgi(["/completions", "/v1/completions"], copy_scope=False)
async def completions(scope: Scope, receive: Receive, send: Send) -> None:
    """OpenAI's legacy completions."""
    service = _service(scope)
    await complete(service, service.completions, scope, receive, send)


Served: TypeAlias = NamedDependency[Service]


# Sessions


def _key(request: AnyRequest) -> str | None:
    return bearer(dict(request.scope["headers"]))


_decode_start = decoder(StartSession)
_decode_reward = decoder(SetReward)
_decode_end = decoder(EndSession)
_decode_weights = decoder(Weights)


@post(["/grant_capacity", "/v1/grant_capacity"], status_code=200)
async def grant_capacity(request: AnyRequest, service: Served) -> dict[str, int]:
    """Add one permit."""
    service.sessions.require_admin(_key(request))
    return {"capacity": service.sessions.permits.grant()}


async def start_session(service: Service, key: str | None, body: bytes) -> Started:
    """Open an episode and give its key."""
    service.sessions.require_admin(key)
    return await service.sessions.start(_decode_start(body))


async def set_reward(service: Service, key: str | None, body: bytes) -> dict[str, str | None]:
    """Judge an interaction or an episode, open or ended."""
    is_admin = service.sessions.is_admin(key)
    asked = _decode_reward(body)
    session = await _session_known(service, key, is_admin, asked.session_id)
    target = await service.sessions.reward(session, asked)
    return {"message": "success", "interaction_id": target}


async def end_session(service: Service, key: str | None, body: bytes) -> Ended:
    """Close an episode. Twice is once."""
    is_admin = service.sessions.is_admin(key)
    asked = _decode_end(body or b"{}")
    if asked.state == "lost":
        session = await _session_known(service, key, is_admin, asked.session_id)
    else:  # of a session that another server has, only its loss is ours to record
        session = _session_meant(service, key, is_admin, asked.session_id)
    return Ended(message="success", interaction_count=await service.sessions.end(session, asked.state, asked.reason))


_SESSION_ROUTES: dict[str, Callable[[Service, str | None, bytes], Awaitable[object]]] = {
    "/rl/start_session": start_session,
    "/rl/set_reward": set_reward,
    "/rl/end_session": end_session,
}
"""Every episode asks for these, so they go without the framework as model calls do."""


async def manage(
    service: Service,
    route: Callable[[Service, str | None, bytes], Awaitable[object]],
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Answer one of the routes above."""
    config, held = service.config, service.room.hold()
    try:
        _require_post(scope)
        headers = dict(scope["headers"])
        key = bearer(headers)
        if not service.sessions.is_admin(key):
            service.sessions.find(key)  # a stranger's body is not read
        body = await read_body(scope, headers, receive, held, max_bytes=config.max_body_bytes, seconds=config.body_s)
        said = msgspec.json.encode(await route(service, key, body))
    except ClientGone:
        return
    except Exception as error:
        wrong = _translated(error)
        status, refusal = refuse_as_openai(wrong)
        await answer(scope, send, status, refusal, error_headers(wrong))
    else:
        await answer(scope, send, 200, said)
    finally:
        held.give_back()


@asgi([prefix + path for path in _SESSION_ROUTES for prefix in ("", "/v1")], copy_scope=False)
async def session_routes(scope: Scope, receive: Receive, send: Send) -> None:
    """The same, where they came the long way."""
    route = _SESSION_ROUTES[scope["path"].rstrip("/").removeprefix("/v1")]
    await manage(_service(scope), route, scope, receive, send)


def _session_meant(service: Service, key: str | None, is_admin: bool, session_id: str | None) -> Session:
    if is_admin and session_id is not None:
        return service.sessions.by_id(session_id)
    session = service.sessions.find(key)
    if session_id is not None and session_id != session.episode_id:
        raise Forbidden("a session's key speaks for its own session only; leave session_id out")
    return session


async def _session_known(service: Service, key: str | None, is_admin: bool, session_id: str | None) -> Session:
    """The same, or one that this server has forgotten, or that another server of the book had."""
    try:
        return _session_meant(service, key, is_admin, session_id)
    except NotFound:
        return await service.sessions.in_book(session_id or "", lambda: service.book)


# The policy


@post(["/rl/weights", "/v1/rl/weights"], status_code=200)
async def post_weights(request: AnyRequest, service: Served) -> dict[str, int]:
    """Answer with these weights from now on."""
    service.sessions.require_admin(_key(request))
    return {"version": await service.load_weights(_decode_weights(await request.body()))}


@get(["/rl/weights", "/v1/rl/weights"])
async def get_weights(request: AnyRequest, service: Served) -> dict[str, int]:
    """The version that the engine has."""
    service.sessions.require_admin(_key(request))
    return {"version": (await service.engine.health()).version}


@get(["/health", "/v1/health"])
async def health(service: Served) -> Response[dict[str, Any]]:
    """Whether the server answers; 503 while its engine does not, and when its log takes no more."""
    engine, log_failure = await service.engine.health(), service.calls.log_failure
    is_well = engine.is_ready and log_failure is None
    return Response(
        {
            "status": "ok" if is_well else "starting" if log_failure is None else "failed",
            "reason": log_failure or engine.reason,
            "version": engine.version,
            "run_id": service.config.run_id,
            "sessions": len(service.sessions.open),
            "calls": service.calls.running,
            "engine": msgspec.to_builtins(engine),
        },
        status_code=200 if is_well else 503,
    )


@get(["/metrics", "/v1/metrics"])
async def metrics(request: AnyRequest, service: Served) -> Response[bytes]:
    """What was counted and how things stand, for Prometheus."""
    engine = await service.engine.health()
    open_ = service.sessions.open
    info = {
        "version": __version__,
        "engine": type(service.engine).__name__.removesuffix("Engine").lower(),
        "model": engine.model,
        "run_id": service.config.run_id,
    }
    gauges = {
        "sessions_open": ("Sessions that are open", float(len(open_))),
        "calls_running": ("Model calls in progress", float(service.calls.running)),
        "calls_waiting": ("Model calls that wait for their turn", float(sum(one.waiting for one in open_))),
        "permits_free": ("Permits that nobody took", float(service.sessions.permits.free())),
    }
    content, kind = exposition(
        Exposition(service.metrics, engine, info, gauges), request.headers.get("accept", "text/plain")
    )
    return Response(content, media_type=kind)


@get(["/models", "/v1/models"])
async def models(request: AnyRequest, service: Served) -> dict[str, Any]:
    """The policy, under the name that the server gives it; requests may use any other."""
    _require_any(request, service)
    model = _model(service)
    return {"object": "list", "data": [model], "has_more": False, "first_id": model["id"], "last_id": model["id"]}


@get(["/models/{name:path}", "/v1/models/{name:path}"])
async def model(request: AnyRequest, service: Served, name: FromPath[str]) -> dict[str, Any]:
    """One model; there is one."""
    _require_any(request, service)
    if name.strip("/") != service.config.model:
        raise NotFound(f"no model {name.strip('/')!r}; this server has {service.config.model!r}")
    return _model(service)


def _require_any(request: AnyRequest, service: Service) -> None:
    key = _key(request)
    if not service.sessions.is_admin(key):
        service.sessions.find(key)


def _model(service: Service) -> dict[str, Any]:
    began = datetime.fromtimestamp(int(service.started), UTC)
    return {
        "id": service.config.model,
        "object": "model",
        "created": int(service.started),
        "owned_by": "rollbook",
        "type": "model",
        "display_name": service.config.model,
        "created_at": began.isoformat().replace("+00:00", "Z"),
    }


# The application


def provide_service(state: State) -> Service:
    """What route handlers get as `service`."""
    service: Service = state.service
    return service


def refuse(request: AnyRequest, error: Exception) -> Response[bytes]:
    """Any error of a Litestar handler, in OpenAI's shape."""
    if isinstance(error, HTTPException):
        said = f"{request.method} {request.url.path}: {error.detail}"
        wrong: ProxyError
        if error.status_code == 405:
            allow = (error.headers or {}).get("allow", "")
            wrong = WrongMethod(said, allow=allow.replace("GET", "GET, HEAD"))
        else:
            wrong = {404: NotFound, 413: TooLarge}.get(error.status_code, BadRequest)(said)
            wrong.status = error.status_code
    else:
        wrong = _translated(error)
    status, content = refuse_as_openai(wrong)
    headers = {name.decode(): value.decode() for name, value in error_headers(wrong)}
    return Response(content, status_code=status, headers=headers, media_type="application/json")


def _translated(error: Exception) -> ProxyError:
    """Any error of a route that is no model call."""
    if isinstance(error, ProxyError):
        return error
    if isinstance(error, LogWriteFailed | LogClosed):
        _log.error("a fact could not be recorded: %s", error)
        return NotRecorded(f"it could not be recorded, so it did not happen: {error}")
    if isinstance(error, QueriesBusy):
        return Busy(str(error), retry_after_s=_QUERIES_END_S)
    if isinstance(error, TablesDamaged):
        _log.error("%s", error)
        return ProxyError(str(error))
    if isinstance(error, StoreError):
        return BadRequest(str(error))
    _log.error("a request failed in a way that nobody foresaw", exc_info=error)
    return ProxyError("the server failed; its log says why")


HANDLERS = [
    chat_completions,
    responses,
    messages,
    count_tokens,
    completions,
    grant_capacity,
    session_routes,
    post_weights,
    get_weights,
    health,
    metrics,
    models,
    model,
    *READING,
    *EVENTS,
]


class App(Litestar):
    """Litestar, but that model calls and sessions do not go through its routing and middleware.

    They are its routes all the same: a path with a trailing slash, say, comes to them the long way.
    """

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            service: Service = self.state.service
            dialect = service.dialects.get(scope["path"])
            if dialect is not None:
                await complete(service, dialect, scope, receive, send)
                return
            route = _SESSION_ROUTES.get(scope["path"].removeprefix("/v1"))
            if route is not None:
                await manage(service, route, scope, receive, send)
                return
            if scope["method"] == "HEAD":  # GET without a body, which the server beneath leaves out
                scope = {**scope, "method": "GET"}
        await super().__call__(scope, receive, send)


def create_app(service: Service, routes: Sequence[Router] = ()) -> App:
    """The ASGI application of a service, which must be entered before it is called. routes: more than the proxy's."""
    return App(
        [*HANDLERS, *routes],
        state=State({"service": service}),
        dependencies={"service": Provide(provide_service, sync_to_thread=False)},
        exception_handlers={Exception: refuse},
        request_max_body_size=service.config.max_body_bytes,
        openapi_config=None,
        logging_config=None,
    )


# The program


@asynccontextmanager
async def listen(
    app: ASGIApp, listening: socket.socket, *, max_header_bytes: int, stop_s: float, max_connections: int = 1024
) -> AsyncIterator[str]:
    """Serve an application on a socket until left; gives the address, e.g. http://127.0.0.1:8000.

    Leaving lets answers in progress finish for `stop_s`, then cuts them.
    """
    host, port = listening.getsockname()[:2]
    server = Server(
        uvicorn.Config(
            app,
            http=type(
                "Protocol",
                (Protocol,),
                {"max_header_bytes": max_header_bytes, "max_connections": most_connections(max_connections)},
            ),
            ws="none",
            loop="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, round(stop_s)),
        )
    )
    serving = asyncio.ensure_future(server.serve([listening]))
    serving.add_done_callback(lambda _: server.is_listening.set())
    try:
        await server.is_listening.wait()
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        # Told to stop, not cancelled: clients get the answers that are on their way.
        server.stop()
        with anyio.CancelScope(shield=True):
            await serving


@asynccontextmanager
async def serve(service: Service, routes: Sequence[Router] = ()) -> AsyncIterator[str]:
    """Enter a service and serve it until left; gives the address. routes: more than the proxy's.

    Raises OSError if the address is taken.
    """
    async with _serve_app(service, create_app(service, routes)) as url:
        yield url


@asynccontextmanager
async def _serve_app(service: Service, app: App) -> AsyncIterator[str]:
    config = service.config
    listening = bind(config.host, config.port)
    try:
        async with (
            service,
            listen(
                app,
                listening,
                max_header_bytes=config.max_header_bytes,
                stop_s=config.stop_s,
                max_connections=config.max_connections,
            ) as url,
        ):
            yield url
    finally:
        listening.close()


async def serve_until_stopped(
    service: Service,
    *,
    announce: Callable[[str], None] = print,
    routes: Sequence[Router] = (),
    shared: Shared | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, also while the engine starts. For the program; `announce` is told the address.

    shared: of an address that several workers listen on, beside their own.
    """
    app = create_app(service, routes)
    stopping = anyio.Event()
    is_up = False

    async def listen_to_signals(everything: anyio.CancelScope) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                stopping.set()
                if not is_up:  # an engine may take minutes, and one that is not there never comes
                    everything.cancel()

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen_to_signals, tasks.cancel_scope)
            async with _serve_app(service, app) as url:
                is_up = True
                # What is alive now stays: collections need not look at it again, and stay short.
                gc.collect()
                gc.freeze()
                gc.set_threshold(20_000, 50, 100)  # an answer makes hundreds of objects, and hardly ever a cycle
                announce(url)
                async with anyio.create_task_group() as fronts:
                    if shared is not None:
                        fronts.start_soon(_serve_front, service, app, shared)
                    await stopping.wait()
                    fronts.cancel_scope.cancel()
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as errors:
        if len(errors.exceptions) == 1:  # what the start raises is one error, not a group of one
            raise errors.exceptions[0] from None
        raise


async def _serve_front(service: Service, app: App, shared: Shared) -> None:
    config, peers = service.config, await peers_of(shared.peers)
    listening = bind(config.host, shared.port, is_shared=True)
    try:
        async with (
            Front(app, service.sessions, config, peers, shared) as front,
            listen(
                front,  # type: ignore[arg-type]
                listening,
                max_header_bytes=config.max_header_bytes,
                stop_s=config.stop_s,
                max_connections=config.max_connections,
            ),
        ):
            await anyio.sleep_forever()
    finally:
        listening.close()
