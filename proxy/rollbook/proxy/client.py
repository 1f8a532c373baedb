"""What agents and programs say to a server, over HTTP: sessions, rewards, export, weights, SQL.

Model calls are not made here: agents make them with whatever SDK they use. Calls that are safe to repeat are repeated
when the connection fails or the engine is away for a moment; starting a session and giving a reward are made safe by
an id that is chosen here. Errors are those of `errors.py`, as the server raised them, and `Unreachable`.
"""

import json
import secrets
from types import TracebackType
from typing import Any, Literal, Self

import anyio
import httpx
import msgspec
import pyarrow as pa

from rollbook.store import new_id
from rollbook.store.events import new_event_id

from . import errors
from .bodies import Started
from .errors import EngineUnavailable, ProxyError

_ATTEMPTS = 4
_BACK_OFF_S = 0.2
_AT_ONCE = 16
"""Requests on their way. httpx looks at all its connections and waiting requests at each step, so others wait here."""


class Unreachable(EngineUnavailable):
    """Nobody answers at that address."""

    code = "unreachable"


class SessionLost(EngineUnavailable):
    """The server that had the session is gone; what it acknowledged is in the book, and the episode is drawn again."""

    code = "session_lost"


_BY_CODE: dict[str, type[ProxyError]] = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ProxyError) and kind.code
}


class ProxyClient:
    """A connection to one server. An async context manager.

    base_url: as the server announced it, with or without /v1. admin_key: may be None for what needs none.
    """

    def __init__(self, base_url: str, admin_key: str | None = None, *, timeout_s: float = 60.0) -> None:
        self._root = base_url.rstrip("/").removesuffix("/v1")
        self._admin_key = admin_key
        self._http = httpx.AsyncClient(
            base_url=self._root,
            timeout=timeout_s,
            trust_env=False,
            limits=httpx.Limits(max_connections=_AT_ONCE, max_keepalive_connections=_AT_ONCE),
        )
        self._turns = anyio.Semaphore(_AT_ONCE)

    @property
    def base_url(self) -> str:
        """What an agent's SDK is given: the address with /v1."""
        return f"{self._root}/v1"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Give the connections back. Twice is once."""
        await self._http.aclose()

    async def start_session(
        self,
        task_id: str,
        *,
        group_id: str | None = None,
        attempt: int = 1,
        is_eval: bool = False,
        task: dict[str, Any] | None = None,
        run_id: str | None = None,
        api_key: str | None = None,
        refresh: bool | None = None,
        origin_interaction_id: str | None = None,
    ) -> Started:
        """Open an episode; with an origin as a fork of that interaction.

        refresh: end the open session of `api_key` first; None: as the server is set.
        Raises Busy without capacity, Conflict for a key that is in use, NotFound for an origin that the book lacks.
        """
        body = {
            "task_id": task_id,
            "group_id": group_id,
            "attempt": attempt,
            "is_eval": is_eval,
            "task": task,
            "run_id": run_id,
            "session_id": new_id("ep"),
            "api_key": api_key or "sk-rb-" + secrets.token_urlsafe(32),
            "origin_interaction_id": origin_interaction_id,
            "refresh": refresh,
        }
        return msgspec.convert(await self._post("/rl/start_session", self._admin_key, body), Started)

    async def set_reward(
        self,
        api_key: str | None,
        reward: float,
        *,
        interaction_id: str | None = None,
        name: str = "reward",
        target: Literal["interaction", "episode"] | None = None,
        session_id: str | None = None,
        source: str = "client",
        weight: float = 1.0,
        start: int | None = None,
        end: int | None = None,
        details: dict[str, Any] | None = None,
    ) -> str | None:
        """Judge the session of a key, or with the admin key (api_key None) any session by id.

        Returns the interaction that got the reward; None if the episode did. Raises BadRequest for an unknown
        interaction, and where there is none.
        """
        body = {
            "reward": reward,
            "interaction_id": interaction_id,
            "name": name,
            "target": target,
            "session_id": session_id,
            "source": source,
            "weight": weight,
            "start": start,
            "end": end,
            "details": details,
            "event_id": new_event_id().hex(),
        }
        answer = await self._post("/rl/set_reward", api_key or self._admin_key, body)
        target_id: str | None = answer["interaction_id"]
        return target_id

    async def end_session(
        self, api_key: str | None, *, state: str = "done", reason: str | None = None, session_id: str | None = None
    ) -> int:
        """Close the episode of a key, or with the admin key any by id; returns how many interactions it has."""
        body = {"state": state, "reason": reason, "session_id": session_id}
        answer = await self._post("/rl/end_session", api_key or self._admin_key, body)
        return int(answer["interaction_count"])

    async def grant_capacity(self) -> int:
        """Add a permit; returns how many are free."""
        # Not repeated: a lost answer may have granted.
        response = await self._send("POST", "/grant_capacity", self._admin_key, attempts=1)
        return int(json.loads(response.content)["capacity"])

    async def export(
        self, session_id: str, *, style: str = "individual", discount: float = 1.0, credit: str = "tree"
    ) -> dict[str, Any]:
        """A session's samples by interaction id, with tokens, logprobs and credited rewards (None where missing).

        Styles: individual, concat, tree. Raises NotFound, BadRequest. May be repeated; nothing is taken out.
        """
        body = {"session_id": session_id, "style": style, "discount": discount, "credit": credit}
        answer: dict[str, Any] = (await self._post("/export_trajectories", self._admin_key, body))["interactions"]
        return answer

    async def load_weights(self, path: str, version: int) -> int:
        """The engine answers with these weights when this returns. May take minutes: no time-out."""
        body = msgspec.json.encode({"path": path, "version": version})
        response = await self._send("POST", "/rl/weights", self._admin_key, body, timeout=httpx.Timeout(10, read=None))
        return int(json.loads(response.content)["version"])

    async def version(self) -> int:
        """The version that the engine has."""
        response = await self._send("GET", "/rl/weights", self._admin_key)
        return int(json.loads(response.content)["version"])

    async def health(self) -> dict[str, Any]:
        """What the server says of itself. Raises EngineUnavailable while its engine is not ready, Unreachable."""
        response = await self._send("GET", "/health", None, attempts=1)
        answer: dict[str, Any] = json.loads(response.content)
        return answer

    async def sql(self, query: str) -> pa.Table:
        """Run one read-only statement on the server's views."""
        response = await self._send("POST", "/sql", self._admin_key, msgspec.json.encode({"query": query}))
        with pa.ipc.open_stream(response.content) as reader:
            return reader.read_all()

    async def _post(self, path: str, key: str | None, body: dict[str, Any]) -> dict[str, Any]:
        sent = msgspec.json.encode({name: value for name, value in body.items() if value is not None})
        answer: dict[str, Any] = json.loads((await self._send("POST", path, key, sent)).content)
        return answer

    async def _send(
        self,
        method: str,
        path: str,
        key: str | None,
        body: bytes | None = None,
        *,
        attempts: int = _ATTEMPTS,
        timeout: httpx.Timeout | None = None,
    ) -> httpx.Response:
        headers = {"content-type": "application/json"} if body is not None else {}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        pause = _BACK_OFF_S
        while True:
            attempts -= 1
            try:
                async with self._turns:
                    response = await self._http.request(
                        method,
                        path,
                        content=body,
                        headers=headers,
                        timeout=httpx.USE_CLIENT_DEFAULT if timeout is None else timeout,
                    )
            except httpx.TransportError as error:
                if attempts <= 0:
                    raise Unreachable(
                        f"{method} {self._root}{path} got no answer: {error!r}; is the server up?"
                    ) from error
            else:
                if response.is_success:
                    return response
                wrong = _error_of(response)
                if attempts <= 0 or wrong.retry_after_s is None or isinstance(wrong, errors.Busy):
                    raise wrong  # what to do about a full server is the caller's to say
                pause = max(pause, wrong.retry_after_s)
            await anyio.sleep(pause)
            pause *= 2


def _error_of(response: httpx.Response) -> ProxyError:
    """The error that the server raised."""
    after = response.headers.get("retry-after-ms")
    retry_after_s = float(after) / 1000 if after else None
    try:
        said = json.loads(response.content)["error"]
        message, code, param = str(said["message"]), said.get("code"), said.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code, param = f"HTTP {response.status_code}: {response.text[:200]}", None, None
    kind = _BY_CODE.get(code) if code else None
    if kind is None:
        kind = {503: EngineUnavailable}.get(response.status_code, ProxyError)
    error = kind(message, param=param, retry_after_s=retry_after_s)
    error.status = response.status_code
    return error
