"""One address for several servers of a book: `rollbook serve --workers N`.

Each worker is a server with an address of its own, and all of them also listen on the shared one; the kernel deals
connections out. A session belongs to the worker that its key says (a hash), so that its conversation, its tokens and
its engine's prefix cache are in one place. A request that came to another worker is passed on to it over loopback; who
wants to save that hop uses the `base_url` that starting a session answers. Nothing is kept here: every worker can tell
every key's owner.
"""

import asyncio
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import anyio
import msgspec

from .bodies import Started, StartSession
from .config import ServeConfig
from .dialects import decoder, refuse_as_openai
from .errors import EngineUnavailable, ProxyError
from .metrics import merged
from .sessions import Sessions, hash_key
from .wire import ClientGone, Message, Receive, Room, Scope, Send, answer, bearer, error_headers, read_body, watch

_HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"host", b"content-length", b"upgrade", b"te", b"trailer"}
_decode_start = decoder(StartSession)


@dataclass(frozen=True)
class Shared:
    """The shared port, the file in which all workers' addresses will be, and which of them is ours."""

    port: int
    peers: Path
    index: int

    @property
    def weights(self) -> Path:
        """The file with the weights that all workers were given last, for one that is started again."""
        return self.peers.with_name("weights.json")


class Front:
    """The ASGI application of the shared address. An async context manager: it holds the connections to the others.

    app: this worker's own. peers: the addresses of all workers.
    """

    def __init__(self, app: Any, sessions: Sessions, config: ServeConfig, peers: Sequence[str], shared: Shared) -> None:
        self._app = app
        self._sessions = sessions
        self._config = config
        self._peers = [url.rstrip("/") for url in peers]
        self._index = shared.index
        self._weights = shared.weights
        self._room = Room(config.max_bodies_bytes)
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._http is not None:
            await self._http.close()

    def owner(self, key: str) -> int:
        """Which worker has the sessions of a key."""
        return int.from_bytes(hash_key(key)[:8]) % len(self._peers)

    def key_of_ours(self) -> str:
        """A new key whose sessions are this worker's."""
        while True:
            key = "sk-rb-" + secrets.token_urlsafe(32)
            if self.owner(key) == self._index:
                return key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._route(scope, receive, send)
        except ClientGone:
            pass
        except ProxyError as error:
            status, refusal = refuse_as_openai(error)
            await answer(scope, send, status, refusal, error_headers(error))

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        key = bearer(headers)
        path = scope["path"].removeprefix("/v1").rstrip("/")
        if path == "/metrics" and scope["method"] == "GET":
            await self._metrics(scope, send)
            return
        if key is None or path in ("/health", "/models"):
            await self._app(scope, receive, send)
            return
        if not self._sessions.is_admin(key):
            owner = self.owner(key)
            if owner == self._index:
                await self._app(scope, receive, send)
            else:
                await self._pass_on(owner, scope, receive, send)
            return
        if scope["method"] != "POST" or path not in _ROUTED:
            await self._app(scope, receive, send)  # any worker can say it
            return
        body = await self._body(scope, headers, receive)
        if path == "/rl/start_session":
            await self._start(body, scope, send)
        elif path == "/rl/weights":
            await self._to_all(body, scope, send)
        else:
            await self._to_who_knows(body, scope, send)

    async def _body(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        config, held = self._config, self._room.hold()
        try:
            return await read_body(
                scope, headers, receive, held, max_bytes=config.max_body_bytes, seconds=config.body_s
            )
        finally:
            held.give_back()

    async def _start(self, body: bytes, scope: Scope, send: Send) -> None:
        """A session begins where its key says; without a key, here."""
        asked = _decode_start(body)
        key = asked.api_key or self.key_of_ours()
        owner = self.owner(key)
        status, headers, said = await self._ask(
            owner, msgspec.json.encode(msgspec.structs.replace(asked, api_key=key)), scope
        )
        if status == 200:
            started = msgspec.json.decode(said, type=Started)
            said = msgspec.json.encode(msgspec.structs.replace(started, base_url=self._peers[owner] + "/v1"))
        await answer(scope, send, status, said, headers)

    async def _to_all(self, body: bytes, scope: Scope, send: Send) -> None:
        """Every worker has engines. The first refusal is the answer."""
        answers = await asyncio.gather(*(self._ask(i, body, scope) for i in range(len(self._peers))))
        status, headers, said = next((a for a in answers if a[0] != 200), answers[self._index])
        if status == 200:
            beside = self._weights.with_suffix(f".{self._index}")
            try:
                beside.write_bytes(body)
                beside.replace(self._weights)
            except OSError as error:
                raise EngineUnavailable(
                    f"all workers have these weights, and {self._weights}, from which one that is started again takes "
                    f"them, cannot be written: {error.strerror}; see to the disk and send them again",
                    retry_after_s=1,
                ) from error
        await answer(scope, send, status, said, headers)

    async def _metrics(self, scope: Scope, send: Send) -> None:
        """What all workers count; one that is away is left out."""
        headers = [pair for pair in scope["headers"] if pair[0] != b"accept"]
        plain = {**scope, "headers": [*headers, (b"accept", b"text/plain")]}

        async def told(i: int) -> tuple[int, bytes]:
            try:
                return i, (await self._ask(i, b"", plain))[2]
            except EngineUnavailable:
                return i, b""

        texts = {i: text.decode() for i, text in await asyncio.gather(*map(told, range(len(self._peers))))}
        said, kind = merged(texts, dict(scope["headers"]).get(b"accept", b"text/plain").decode("latin-1"))
        await answer(scope, send, 200, said, [(b"content-type", kind.encode())])

    async def _to_who_knows(self, body: bytes, scope: Scope, send: Send) -> None:
        """What an admin asks about a session by its id: of us first, then of the others, until one knows it."""
        order = [self._index, *(i for i in range(len(self._peers)) if i != self._index)]
        for i in order:
            status, headers, said = await self._ask(i, body, scope)
            if status != 404:
                break
        await answer(scope, send, status, said, headers)

    async def _ask(self, i: int, body: bytes, scope: Scope) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """A whole answer of a worker, ours included."""
        if i == self._index:
            return await self._ask_ourselves(body, scope)
        try:
            async with self._request(i, body, scope) as response:
                return response.status, _passed(response), await response.read()
        except aiohttp.ClientError as error:
            raise self._away(i) from error

    async def _ask_ourselves(self, body: bytes, scope: Scope) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        headers.append((b"content-length", b"%d" % len(body)))
        await self._app({**scope, "headers": headers, "rollbook.connection": None}, receive, send)
        said = b"".join([message.get("body", b"") for message in sent[1:]])
        return sent[0]["status"], [pair for pair in sent[0]["headers"] if pair[0].lower() not in _HOP], said

    async def _pass_on(self, owner: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the owner does, piece by piece; the client leaving leaves there as well."""
        body = await self._body(scope, dict(scope["headers"]), receive)
        relaying = asyncio.ensure_future(self._relay(owner, body, scope, send))
        unwatch = watch(scope, receive, lambda: _cancel(relaying))
        try:
            await asyncio.wait([relaying])
        finally:
            unwatch()
            relaying.cancel()
        if not relaying.cancelled():
            relaying.result()

    async def _relay(self, owner: int, body: bytes, scope: Scope, send: Send) -> None:
        try:
            async with self._request(owner, body, scope) as response:
                headers = _passed(response)
                length = response.headers.get("content-length")
                if length is not None:
                    headers.append((b"content-length", length.encode()))
                await send({"type": "http.response.start", "status": response.status, "headers": headers})
                async for piece in response.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except aiohttp.ClientError as error:
            raise self._away(owner) from error
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _request(self, i: int, body: bytes, scope: Scope) -> Any:
        assert self._http is not None
        query = scope.get("query_string", b"").decode("latin-1")
        url = self._peers[i] + scope["path"] + (f"?{query}" if query else "")
        headers = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in scope["headers"] if n not in _HOP]
        return self._http.request(scope["method"], url, data=body, headers=headers, allow_redirects=False)

    def _away(self, i: int) -> EngineUnavailable:
        return EngineUnavailable(f"worker {i + 1} of this server is away; come back in a moment", retry_after_s=1)


_ROUTED = {"/rl/start_session", "/rl/weights", "/rl/set_reward", "/rl/end_session", "/export_trajectories"}


def _passed(response: Any) -> list[tuple[bytes, bytes]]:
    return [(n.lower(), v) for n, v in response.raw_headers if n.lower() not in _HOP]


async def peers_of(path: Path) -> list[str]:
    """The workers' addresses, once all are known and written there."""
    while True:
        try:
            found: list[str] = json.loads(await anyio.Path(path).read_text())
            return found
        except FileNotFoundError:
            await anyio.sleep(0.05)


def _cancel(task: "asyncio.Future[None]") -> None:
    task.cancel()
