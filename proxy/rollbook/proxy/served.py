"""A sampling server as an `engine.Engine`: what is the same whoever made it. `vllm.py` and `sglang.py` add its API.

New weights: close the gate for new requests, freeze the scheduler, end what is running (the server then sends all
tokens so far), load, drop the prefix cache, set the version, thaw, ask for one token, open the gate. A request that
was ended goes on as a new one from the tokens it has, exactly as it does when the server died under it. So each
upstream request belongs to one version, whole, and no token's label is a guess.

A folder with a LoRA adapter is taken beside the base, where the server can: nothing pauses, what is running ends under
the version it began with, and an adapter is dropped when no request uses it.

A server that we started is ended with us, even by kill -9 (`tether.py`), and started again when it dies; one that was
given by its URL is waited for. Either gets the weights and the version that it had.

An answer that is held to a form (`engine.Form`) cannot go on in another request, since the server would begin the form
anew: new weights wait for such answers a little, and one that is interrupted all the same fails, to be asked again.

Requests with a seed repeat as long as they are not interrupted: the server's dice start anew where an answer goes on.
"""

import abc
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import anyio
import anyio.to_thread
import msgspec
import numpy as np
import orjson

from rollbook.store.events import Float32s, Int32s

from .checkpoint import Canary, check_fits, compare_canaries, is_adapter, read_adapter, read_canaries
from .engine import (
    EMPTY_IDS,
    EMPTY_LOGPROBS,
    FinishReason,
    Form,
    Generation,
    Health,
    LogprobsMode,
    Sampled,
    Sampling,
    check_sampling,
    drawable,
    refuse_twice,
)
from .errors import BadRequest, ContextOverflow, EngineFailed, EngineUnavailable
from .upstream import Events
from .upstream import Upstream as Server

MAX_BREAKS = 3
"""How often one request may lose its server without a token in between: then it is taken for what kills it."""

FORMS_S = 10.0
"""How long new weights wait for answers that are held to a form."""

REST_S = 30.0
"""How long a server that did not come back is left alone."""

STREAM_S, WHOLE_S = 0.003, 0.05
"""Tokens that come closer together than this are taken together; the latter where nobody reads on the way."""

NO_LOGPROB = -9000.0
"""vLLM writes -9999 where there is no distribution (logits that are no numbers); no logprob is as low as this."""

Upstream = tuple[Int32s, Float32s, str | None]
"""A piece as the server sends it: ids, logprobs, and the server's word for why it ended, in the last one."""

_ABOUT_FORMS = re.compile("grammar|schema|structur", re.IGNORECASE)
"""Servers find out late that they cannot follow a form, and call it an error of their own."""

_TETHER = Path(__file__).with_name("tether.py")
_ENDINGS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}


class _Error(msgspec.Struct, frozen=True):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _Error = _Error()
    message: str = ""


class Broken(Exception):
    """The connection broke, or the server said that it failed, in the middle of an answer."""


class ServedEngine(abc.ABC):
    """See `engine.Engine`. Runs on asyncio.

    model: the folder of the model; what new weights must fit. Without `url` it is also what the server serves.
    url: of a running server, e.g. http://127.0.0.1:8000.
    weights, version: a folder of newer weights to start with, and which version they are; None: the model's own.
    python: the interpreter that has the server, often of an environment of its own; None: ours.
    args: flags passed to the server as they are, e.g. ("--dtype", "bfloat16").
    env: added to the server's environment.
    start_s: how long a server may take to start, or a given one to come back.
    output: file that the server's output goes to; None: a temporary one, named when the server fails.
    """

    name: str
    own_env: Mapping[str, str] = {}
    _missing_route = ""  # what to do about a route that is not there

    def __init__(
        self,
        model: str | Path,
        *,
        url: str | None = None,
        weights: str | Path | None = None,
        version: int = 0,
        python: str | Path | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        start_s: float = 600.0,
        output: str | Path | None = None,
    ) -> None:
        self.logprobs_mode: LogprobsMode = "processed"
        self._model = Path(model)
        self._is_ours = url is None
        self._url = (url or "").rstrip("/")
        self._python = str(python or sys.executable)
        self._args = tuple(args)
        self._env = dict(env or {})
        self._start_s = start_s
        self._output = Path(output) if output is not None else None
        self._temporary: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._weights = None if weights is None else Path(os.path.abspath(weights))  # None: those it starts with
        self._version = version
        self._base_version = version  # of the whole weights that the server has
        self._adapters: dict[int, Path] = {}  # that the server has, by version; the newest answers if it is `_version`
        if self._weights is not None and is_adapter(self._weights):
            self._adapters, self._weights, self._base_version = {version: self._weights}, None, 0
        self._in_use: Counter[int | None] = Counter()  # upstream requests by version
        self._reason: str | None = "not started"
        self._max_context = 0
        self._vocab_size: int | None = None
        self._is_paused = False
        self._gate = asyncio.Event()  # closed while weights change and while the server is away
        self._changing = asyncio.Lock()  # held by who changes the server: an update, a recovery, pause, resume
        self._down: tuple[float, str] | None = None  # (until when nobody tries again, why)
        self._lives = 0  # how often the server has come up
        self._updates = 0
        self._running = 0
        self._server: Server | None = None  # the connections that answers come by
        self._upstream = 0  # requests that the server has
        self._formed = 0  # of these, those that are held to a form

    # -- what a kind of server adds

    @abc.abstractmethod
    def _command(self, port: int) -> list[str]:
        """How to start one, without the interpreter."""

    @abc.abstractmethod
    async def _look(self) -> None:
        """Find out what the server is and can do: `_max_context`, and `logprobs_mode` unless it is paused."""

    @abc.abstractmethod
    def _ask(
        self,
        ids: Int32s,
        sampling: Sampling,
        name: str,
        version: int | None,
        form: Form | None,
        *,
        is_streamed: bool = True,
    ) -> AsyncIterator[Upstream]:
        """One upstream request, by `_stream`. Raises Broken, BadRequest, EngineFailed.

        is_streamed: see `Generation`.
        """

    @abc.abstractmethod
    async def _check_forms(self) -> None:
        """Raises BadRequest where the server does not hold answers to a form, and would say nothing."""

    @abc.abstractmethod
    async def _freeze(self) -> None:
        """Stop sampling, keep requests."""

    @abc.abstractmethod
    async def _thaw(self) -> None:
        """Go on."""

    @abc.abstractmethod
    async def _end_all(self) -> None:
        """End every request that the server has, each with what it has so far."""

    @abc.abstractmethod
    async def _put(self, weights: Path | None, version: int) -> None:
        """These weights (None: those there are) under this version; nothing cached of others. The server is idle.

        Raises EngineFailed if the server does not say that they are in.
        """

    async def _add_adapter(self, adapter: Path, version: int) -> None:
        """Take a LoRA adapter beside what there is; requests of this version use it. Raises EngineFailed."""
        raise EngineFailed(f"{self.name} takes no adapters here; publish whole weights")

    async def _drop_adapter(self, version: int) -> None:
        """Nobody uses it any more."""
        raise EngineFailed(f"{self.name} has no adapters here")

    # -- being there

    async def __aenter__(self) -> Self:
        refuse_twice(self._session is not None)
        # No limits and no clock of aiohttp's: a paused stream may be silent for as long as weights take.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60), timeout=aiohttp.ClientTimeout(total=None)
        )
        try:
            self._vocab_size = json.loads((self._model / "config.json").read_bytes()).get("vocab_size")
            for adapter in self._adapters.values():
                await anyio.to_thread.run_sync(read_adapter, adapter)
            if self._weights is not None:
                await anyio.to_thread.run_sync(check_fits, self._model, self._weights)
            async with self._changing:
                await self._bring_up()
        except OSError as error:
            await self._close()
            raise EngineUnavailable(f"no model at {self._model}: {error}") from error
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()
        if self._temporary is not None:  # after a failure to start it stays: the message names it
            self._temporary.unlink(missing_ok=True)

    async def _close(self) -> None:
        self._reason = "not started"
        self._lives += 1
        session, self._session = self._session, None
        if self._server is not None:
            self._server.close()
        self._gate.set()  # who waits for it finds us gone
        with anyio.CancelScope(shield=True):
            if session is not None:
                await session.close()
            await self._end_process()

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()  # the tether ends the server
            await anyio.to_thread.run_sync(process.wait)

    def _start_process(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        if self._output is None:
            descriptor, name = tempfile.mkstemp(prefix=f"rollbook-{self.name.lower()}-", suffix=".log")
            os.close(descriptor)
            self._output = self._temporary = Path(name)
        command = [sys.executable, "-P", str(_TETHER), self._python, *self._command(port), *self._args]
        env = {**os.environ, **self.own_env, **self._env}
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=env
            )

    async def _bring_up(self) -> None:
        """A server that answers, with the version and weights that it should have. Holding `_changing`."""
        self._gate.clear()
        if self._is_ours and (self._process is None or self._process.poll() is not None):
            await self._end_process()
            self._start_process()
        await self._until_healthy()
        await self._look()
        self._lives += 1
        # A server that came back has the weights it starts with, not those it had.
        await self._put(self._weights, self._base_version)
        self._adapters = {v: path for v, path in self._adapters.items() if v == self._version}
        for version, adapter in self._adapters.items():
            await self._add_adapter(adapter, version)
        if self._is_paused:
            await self._freeze()
        self._reason = None
        self._gate.set()

    async def _until_healthy(self) -> None:
        deadline = anyio.current_time() + self._start_s
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with self._http.get(self._url + "/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                    if answer.status == 200:
                        return
            if self._process is not None and self._process.poll() is not None:
                raise EngineUnavailable(
                    f"{self.name} ended while it started (status {self._process.returncode}): {self._tail()}"
                )
            if anyio.current_time() > deadline:
                where = f"; its output is in {self._output}" if self._is_ours else ""
                raise EngineUnavailable(
                    f"no {self.name} at {self._url} after {self._start_s:.0f} s{where}", retry_after_s=30
                )
            await anyio.sleep(0.25)

    def _tail(self) -> str:
        assert self._output is not None
        lines = self._output.read_text("utf-8", "replace").strip().splitlines()
        errors = [line for line in lines if "Error" in line]
        said = (errors or lines or ["it said nothing"])[-1].strip()
        return f"{said[-300:]} (all of it is in {self._output})"

    async def _first(self, sampling: Sampling, version: int | None) -> Upstream:
        """All of a short answer at once, in a piece; for looking at what a server answers."""
        pieces = [piece async for piece in self._ask(np.array([1, 2, 3], np.int32), sampling, "look", version, None)]
        ids, logprobs, reasons = zip(*pieces, strict=True)
        return np.concatenate(ids), np.concatenate(logprobs), reasons[-1]

    # -- answers

    def generate(self, generation: Generation) -> AsyncIterator[Sampled]:
        """See `engine.Engine`."""
        check_sampling(generation.sampling)
        if self._session is None:
            raise EngineUnavailable(f"the {self.name} engine is not running; enter it with `async with` first")
        n_prompt = len(generation.prompt_ids)
        if n_prompt == 0:
            raise BadRequest("the prompt has no tokens; at least one is needed to sample the next")
        if n_prompt >= self._max_context:
            raise ContextOverflow(
                f"the prompt has {n_prompt} tokens and the context is {self._max_context}, output included; shorten it"
            )
        return self._answer(generation)

    async def _answer(self, generation: Generation) -> AsyncIterator[Sampled]:
        """An answer out of as many upstream requests as it takes."""
        sampling, prompt = drawable(generation.sampling, self._vocab_size), np.asarray(generation.prompt_ids, np.int32)
        room = self._max_context - len(prompt)
        limit = min(sampling.max_tokens or room, room)
        parts, n, breaks, part, version, form = [prompt], 0, 0, 0, self._version, generation.form
        self._running += 1
        try:
            while True:
                await self._gate.wait()
                if self._session is None:
                    yield _end("abort", version)
                    return
                last = int(parts[-1][-1])
                if n and (n == limit or last in sampling.stop_token_ids):
                    # The server was lost between the last token and the word that it was the last.
                    yield _end("stop" if last in sampling.stop_token_ids else "length", version)
                    return
                if form is not None:
                    if n:
                        raise EngineUnavailable(
                            "the answer was interrupted, and its form cannot be taken up in the middle; ask again",
                            retry_after_s=1,
                        )
                    await self._check_forms()
                parts = [np.concatenate(parts)] if n else parts
                version, life, updates = self._version, self._lives, self._updates
                rest = msgspec.structs.replace(
                    sampling, max_tokens=limit - n, min_tokens=min(limit - n, max(0, sampling.min_tokens - n))
                )
                name = generation.request_id if part == 0 else f"{generation.request_id}-{part}"
                part += 1
                self._formed += form is not None
                self._in_use[version] += 1
                try:
                    answers = self._ask(parts[0], rest, name, version, form, is_streamed=generation.is_streamed)
                    async with aclosing(answers) as pieces:  # type: ignore[type-var]
                        async for more, logprobs, reason in pieces:
                            if len(more):
                                self._check_logprobs(logprobs)
                                parts.append(more)
                                n, breaks = n + len(more), 0
                            ending = _ENDINGS.get(reason)
                            if len(more) or ending:
                                yield Sampled(ids=more, logprobs=logprobs, version=version, finish_reason=ending)
                            if ending:
                                return
                except Broken as error:
                    if form is not None and n == 0 and _ABOUT_FORMS.search(str(error)) and await self._is_alive():
                        raise BadRequest(
                            f"{self.name} cannot hold an answer to this form: {error}", param="response_format"
                        ) from error
                    await self._recover(life, breaks + 1, error)
                    breaks += 1
                    continue
                finally:
                    self._formed -= form is not None
                    self._in_use[version] -= 1
                if self._updates == updates and self._lives == life:
                    # Somebody else ended it: an administrator, or another client of the same server.
                    yield _end("abort", version)
                    return
        finally:
            self._running -= 1

    def _check_logprobs(self, logprobs: Float32s) -> None:
        lowest = float(logprobs.min())  # NaN if one is
        if not lowest > NO_LOGPROB:
            raise EngineFailed(
                f"{self.name} at {self._url} sampled a token with logprob {lowest:g}, which is none: look at the "
                "weights that were loaded last, and at the request's penalties"
            )

    async def _recover(self, life: int, breaks: int, cause: Exception) -> None:
        """Return when a server is there again. Raises EngineFailed if it was never away, EngineUnavailable if gone."""
        if self._session is None:
            return
        async with self._changing:
            if self._lives != life or self._session is None:
                return  # somebody else brought it back
            await anyio.sleep(0.1)  # a server that dies closes its connections before it is gone
            if breaks >= MAX_BREAKS:
                raise EngineFailed(f"{self.name} failed {breaks} times at this request: {cause}") from cause
            if await self._is_alive():
                raise EngineFailed(f"{self.name} at {self._url} broke off: {cause}") from cause
            await self._restart(cause)

    async def _restart(self, cause: Exception) -> None:
        """Holding `_changing`. After a failure nobody tries again for a while, so that all who wait hear of it soon."""
        if self._down is not None and anyio.current_time() < self._down[0]:
            raise EngineUnavailable(self._down[1], retry_after_s=REST_S)
        self._reason = f"restarting after: {cause}"
        try:
            if self._is_ours:
                await self._end_process()
            await self._bring_up()
        except (EngineUnavailable, EngineFailed) as error:
            self._reason = f"down: {error}"
            self._down = (anyio.current_time() + REST_S, self._reason)
            self._gate.set()  # who waits for it finds the server away, and then this
            raise EngineUnavailable(self._reason, retry_after_s=REST_S) from error

    async def _is_alive(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            return False
        try:
            return await self._status("GET", "/health", timeout_s=5) == 200
        except EngineFailed:
            return False

    # -- pausing and weights

    async def pause(self) -> None:
        async with self._changing:
            if not self._is_paused:
                await self._freeze()
                self._is_paused = True

    async def resume(self) -> None:
        async with self._changing:
            if self._is_paused:
                await self._thaw()
                self._is_paused = False

    async def load_weights(self, path: str, version: int) -> None:
        """See the seam. `path` must be readable by the server under the same name."""
        weights = Path(os.path.abspath(path))  # noqa: ASYNC240 (asks the disk for nothing)
        if await anyio.to_thread.run_sync(is_adapter, weights):
            await self._load_adapter(weights, version)
            return
        await anyio.to_thread.run_sync(check_fits, self._model, weights)
        async with self._changing:
            if self._session is None:
                raise EngineUnavailable(f"the {self.name} engine is not running; enter it with `async with` first")
            self._gate.clear()
            try:
                # Half of it would leave the server frozen; every wait in it has an end.
                with anyio.CancelScope(shield=True):
                    await self._change_weights(weights, version)
            finally:
                self._gate.set()

    async def _load_adapter(self, adapter: Path, version: int) -> None:
        """The light path: nothing is paused, and what is running goes on under the version it began with."""
        await anyio.to_thread.run_sync(read_adapter, adapter)
        async with self._changing:
            if self._session is None:
                raise EngineUnavailable(f"the {self.name} engine is not running; enter it with `async with` first")
            with anyio.CancelScope(shield=True):
                await self._add_adapter(adapter, version)
                self._adapters[version] = adapter
                try:
                    if not self._is_paused:
                        await self._ask_canary(adapter, version)
                except EngineFailed as error:
                    await self._drop_adapter(version)
                    del self._adapters[version]
                    raise EngineFailed(
                        f"{self.name} could not use {adapter} ({error}); the old weights answer"
                    ) from error
                self._version = version
                for old in [v for v in self._adapters if v != version and not self._in_use[v]]:
                    await self._drop_adapter(old)
                    del self._adapters[old]

    async def _change_weights(self, weights: Path, version: int) -> None:
        self._updates += 1
        try:
            if not self._is_paused:
                with anyio.move_on_after(FORMS_S):  # they cannot go on in another request
                    while self._formed:  # noqa: ASYNC110 - each is read by somebody else
                        await anyio.sleep(0.01)
                await self._freeze()
            with anyio.fail_after(60):
                while self._upstream:
                    await self._end_all()
                    await anyio.sleep(0.01)
            await self._put(weights, version)
            if not self._is_paused:
                await self._thaw()
                await self._ask_canary(weights, version)
        except (EngineFailed, TimeoutError) as error:
            await self._fall_back(weights, error)
        self._weights, self._version, self._base_version = weights, version, version

    async def _fall_back(self, weights: Path, cause: Exception) -> None:
        """The old weights again, on a new server if the old one died of the new ones. Always raises."""
        is_back = False
        if await self._is_alive():
            with suppress(EngineFailed):  # then it is treated as one that died
                await self._put(self._weights or self._model, self._base_version)
                if not self._is_paused:
                    await self._thaw()
                is_back = True
        if not is_back:
            await self._restart(cause)
        raise EngineFailed(f"{self.name} could not use {weights} ({cause}); the old weights answer") from cause

    async def _ask_canary(self, weights: Path, version: int) -> None:
        """The new weights give numbers under the new version, and those that the learner's own forward pass gives.

        A server may say that weights are in and answer with others (`vllm.py`): only a comparison shows it.
        """
        canaries = await anyio.to_thread.run_sync(read_canaries, weights)
        found = []
        for canary in canaries or [Canary([1, 2, 3], 0.0)]:
            prompt = np.asarray(canary.prompt_ids, np.int32)
            try:
                asked = self._ask(prompt, Sampling(temperature=0.0, max_tokens=1), "canary", version, None)
                logprobs = np.concatenate([piece[1] async for piece in asked])
            except Broken as error:
                raise EngineFailed(f"one token of version {version} was asked for: {error}") from error
            if len(logprobs) != 1 or not logprobs[0] > NO_LOGPROB:
                raise EngineFailed(
                    f"one token of version {version} has logprob {logprobs.tolist()}, expected one finite number"
                )
            found.append(float(logprobs[0]))
        if canaries:
            compare_canaries(canaries, found, version)

    async def health(self) -> Health:
        return Health(
            is_ready=self._reason is None,
            version=self._version,
            model=self._model.name,
            max_context=self._max_context,
            vocab_size=self._vocab_size,
            running=self._upstream,
            waiting=self._running - self._upstream,
            reason=self._reason,
        )

    # -- http

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise EngineUnavailable(f"the {self.name} engine is not running; enter it with `async with` first")
        return self._session

    async def _status(self, method: str, path: str, body: object = None, timeout_s: float = 60.0) -> int:
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._http.request(method, self._url + path, json=body, timeout=timeout) as answer:
                return answer.status
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFailed(f"{self.name} at {self._url} did not answer {path}: {error}") from error

    async def _json(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        try:
            timeout = aiohttp.ClientTimeout(total=600)  # weights may come from a slow disk
            async with self._http.request(method, self._url + path, json=body, timeout=timeout) as answer:
                data = await answer.read()
                if answer.status == 404:
                    raise EngineFailed(f"{self.name} at {self._url} has no {path}{self._missing_route}")
                if answer.status != 200:
                    raise EngineFailed(f"{self.name} at {self._url} answered {path} with {answer.status}: {said(data)}")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFailed(f"{self.name} at {self._url} did not answer {path}: {error}") from error
        try:
            return msgspec.json.decode(data, type=dict[str, Any]) if data else {}
        except msgspec.DecodeError as error:
            raise EngineFailed(
                f"{self.name} at {self._url} answered {path} with what is not JSON: {data[:80]!r}"
            ) from error

    async def _post(self, path: str, body: object = None) -> dict[str, Any]:
        return await self._json("POST", path, body)

    async def _stream(
        self, path: str, body: object, read: Callable[[list[bytes]], Upstream], *, is_streamed: bool
    ) -> AsyncIterator[Upstream]:
        """An answer, piece by piece: what came together is one. body: JSON, with arrays. read: the data of events."""
        if self._server is None or self._server.url != self._url:
            self._server = Server(self._url)
        server, answer = self._server, None
        self._upstream += 1
        try:
            try:
                data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
                answer = await server.post(path, data, self._ended, pace_s=STREAM_S if is_streamed else WHOLE_S)
            finally:
                if answer is None:
                    self._ended()
            if answer.status != 200:
                why = said(await answer.read())
                if answer.status == 400:
                    raise BadRequest(f"{self.name} refused the request: {why}")
                raise Broken(f"status {answer.status}: {why}")
            events = Events()
            while not events.is_done and (more := await answer.more()):
                if found := events.feed(more):
                    piece = read(found)
                    if piece[2] is not None:
                        answer.drain()
                        yield piece
                        return
                    yield piece
        except (OSError, ValueError) as error:
            if isinstance(error, msgspec.DecodeError):
                raise EngineFailed(f"{self.name} at {self._url} answered what is not its API: {error}") from error
            raise Broken(str(error)) from error
        finally:
            if answer is not None:
                answer.close()
        raise Broken("the stream ended without a finish reason")

    def _ended(self) -> None:
        self._upstream -= 1


def _end(reason: FinishReason, version: int) -> Sampled:
    return Sampled(ids=EMPTY_IDS, logprobs=EMPTY_LOGPROBS, version=version, finish_reason=reason)


def said(data: bytes) -> str:
    """The message of an error body, or its beginning."""
    with suppress(msgspec.DecodeError):
        body = msgspec.json.decode(data, type=_ErrorBody)
        if message := body.error.message or body.message:
            return message
    return data[:200].decode("utf-8", "replace") or "nothing"
