"""vLLM as an `engine.Engine`: a server that we start and look after, or one given by its URL.

Token ids go in, ids and logprobs come out, through `/inference/v1/generate` or, where a server lacks it, through
`/v1/completions` with `return_token_ids`. What a server can do is found out when it is first met.

New weights: close the gate for new requests, freeze the scheduler, end what is running (vLLM then sends all tokens so
far), load, drop the prefix cache, set the version, thaw, ask for one token, open the gate. A request that was ended
goes on as a new one from the tokens it has, exactly as it does when the server died under it. So each upstream request
belongs to one version, whole, and no token's label is a guess; the version that vLLM reports is checked against ours.
Every request carries its version as cache salt, a second guard against keys and values of old weights.

On a CPU vLLM keeps a repacked copy of the head and does not renew it when the weights of a model with tied embeddings
are reloaded (seen in 0.32: logits of new hidden states through the old head). There the model is served untied, from
a folder of links with the head written out; a tied server that was given by URL takes no new weights.

Requests with a seed repeat as long as they are not interrupted: vLLM's dice start anew where an answer goes on.
"""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import anyio
import anyio.to_thread
import msgspec
import numpy as np

from .checkpoint import check_fits, is_tied, write_untied
from .engine import (
    EMPTY_IDS,
    EMPTY_LOGPROBS,
    FinishReason,
    Generation,
    Health,
    LogprobsMode,
    Sampled,
    Sampling,
    check_sampling,
)
from .errors import BadRequest, ContextOverflow, EngineFailed, EngineUnavailable

MAX_BREAKS = 3
"""How often one request may lose its server without a token in between: then it is taken for what kills it."""


REST_S = 30.0
"""How long a server that did not come back is left alone."""


class _Logprob(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None  # from /inference/v1/generate
    token_logprobs: list[float] | None = None  # from /v1/completions


class _Span(msgspec.Struct):
    version: str


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


class _Error(msgspec.Struct, frozen=True):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _Error = _Error()


class _Broken(Exception):
    """The connection broke, or the server said that it failed, in the middle of an answer."""


_ENDINGS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}
_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class VLLMEngine:
    """See `engine.Engine`. Runs on asyncio.

    model: the folder of the model; what new weights must fit. Without `url` it is also what the server serves.
    url: of a running server, e.g. http://127.0.0.1:8000. Weight updates need it started with VLLM_SERVER_DEV_MODE=1,
        which opens routes without a key: keep it on loopback or a private network.
    version: of the weights that the server starts with.
    python: the interpreter that has vLLM, often of an environment of its own; None: ours.
    args: flags passed to vLLM as they are, e.g. ("--dtype", "bfloat16", "--max-model-len", "4096").
    env: added to the server's environment. A server on a CPU needs {"VLLM_TARGET_DEVICE": "cpu"}.
    start_s: how long a server may take to start, or a given one to come back.
    output: file that the server's output goes to; None: a temporary one, named when the server fails.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        url: str | None = None,
        version: int = 0,
        python: str | Path | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        start_s: float = 600.0,
        output: str | Path | None = None,
    ) -> None:
        self.logprobs_mode: LogprobsMode = "processed"
        self._model = self._serves = Path(model)
        self._is_ours = url is None
        self._url = (url or "").rstrip("/")
        self._python = str(python or sys.executable)
        self._args = tuple(args)
        self._env = dict(env or {})
        self._start_s = start_s
        self._output = Path(output) if output is not None else None
        self._process: subprocess.Popen[bytes] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._weights: Path | None = None  # None: those that the server starts with
        self._version = version
        self._untied: tempfile.TemporaryDirectory[str] | None = None  # where a server has a head of its own
        self._is_untied = False
        self._is_stuck = False  # reloading would leave the old head
        self._reason: str | None = "not started"
        self._max_context = 0
        self._vocab_size: int | None = None
        self._served = ""
        self._has_generate = False
        self._has_versions = False
        self._is_paused = False
        self._gate = asyncio.Event()  # closed while weights change and while the server is away
        self._changing = asyncio.Lock()  # held by who changes the server: an update, a recovery, pause, resume
        self._down: tuple[float, str] | None = None  # (until when nobody tries again, why)
        self._lives = 0  # how often the server has come up
        self._updates = 0
        self._running = 0
        self._tasks: set[asyncio.Task[None]] = set()  # one for each running request, which awaits it
        self._upstream = 0  # requests that the server has

    # -- being there

    async def __aenter__(self) -> "VLLMEngine":
        # No limits and no clock of aiohttp's: a paused stream may be silent for as long as weights take.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60), timeout=aiohttp.ClientTimeout(total=None)
        )
        try:
            config = json.loads((self._model / "config.json").read_bytes())
            self._untied = tempfile.TemporaryDirectory(prefix="rollbook-untied-")
            if self._is_ours and is_tied(self._model) and self._env.get("VLLM_TARGET_DEVICE") == "cpu":
                self._serves = Path(self._untied.name) / "model"
                await anyio.to_thread.run_sync(write_untied, self._model, self._model, self._serves)
            self._vocab_size = config.get("vocab_size")
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

    async def _close(self) -> None:
        self._reason = "not started"
        self._lives += 1
        session, self._session = self._session, None
        for task in self._tasks:
            task.cancel()
        with anyio.CancelScope(shield=True):
            if session is not None:
                await session.close()
            await self._end_process()
            if self._untied is not None:
                self._untied.cleanup()

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
            descriptor, name = tempfile.mkstemp(prefix="rollbook-vllm-", suffix=".log")
            os.close(descriptor)
            self._output = Path(name)
        command = [
            *(sys.executable, "-m", "rollbook.proxy.tether"),
            *(self._python, "-m", "vllm.entrypoints.openai.api_server"),
            *(
                "--model",
                str(self._serves),
                "--served-model-name",
                "policy",
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
            ),
            # Tokens in and out; logprobs of what was drawn from; no sampling defaults out of the model's folder.
            *("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
            *self._args,
        ]
        ours = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        roots = os.pathsep.join(path for path in sys.path if path)
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": roots, **ours, **self._env}
                if self._python == sys.executable
                else {**os.environ, **ours, **self._env},
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
        if self._weights is not None:
            # A server that came back has the weights it starts with, not those it had.
            await self._put(self._weights)
        if self._has_versions:
            await self._post("/update_weight_version", {"new_version": str(self._version)})
        if self._is_paused:
            await self._post("/pause?mode=keep")
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
                    f"vLLM ended while it started (status {self._process.returncode}): {self._tail()}"
                )
            if anyio.current_time() > deadline:
                where = f"; its output is in {self._output}" if self._is_ours else ""
                raise EngineUnavailable(f"no vLLM at {self._url} after {self._start_s:.0f} s{where}", retry_after_s=30)
            await anyio.sleep(0.25)

    def _tail(self) -> str:
        assert self._output is not None
        lines = self._output.read_text("utf-8", "replace").strip().splitlines()
        errors = [line for line in lines if "Error" in line]
        said = (errors or lines or ["it said nothing"])[-1].strip()
        return f"{said[-300:]} (all of it is in {self._output})"

    async def _look(self) -> None:
        """What this server is and can do."""
        models = await self._json("GET", "/v1/models")
        first = (models.get("data") or [{}])[0]
        self._served = first.get("id", "")
        self._max_context = first.get("max_model_len") or 0
        if not self._max_context:
            raise EngineUnavailable(f"{self._url}/v1/models names no max_model_len: is it a vLLM server?")
        self._has_generate = await self._status("POST", "/inference/v1/generate", {}) != 404
        self._has_versions = await self._status("GET", "/weight_info") == 200
        root = Path(first.get("root") or self._model)
        was_tied = is_tied(self._model)
        self._is_untied = was_tied and (root / "config.json").is_file() and not is_tied(root)
        self._is_stuck = was_tied and not self._is_untied and await self._is_on_cpu()
        if self._is_paused:
            return  # it would not answer, and was asked before
        # With one token to choose from, processed logprobs are 0 and raw ones are not.
        only = Sampling(temperature=1.0, top_k=1, max_tokens=4)
        try:
            pieces = [piece async for piece in self._stream(np.array([1, 2, 3], np.int32), only, "look", None)]
        except (_Broken, aiohttp.ClientError) as error:
            raise EngineUnavailable(f"vLLM at {self._url} does not answer with tokens: {error}") from error
        logprobs = np.concatenate([logprobs for _, logprobs, _ in pieces])
        self.logprobs_mode = "processed" if not logprobs.any() else "raw"

    async def _is_on_cpu(self) -> bool:
        if await self._status("GET", "/server_info") != 200:
            return False  # without the dev routes there are no new weights either
        info = await self._json("GET", "/server_info?config_format=json")
        config = info.get("vllm_config")
        device = config.get("device_config", {}) if isinstance(config, dict) else {}
        return "cpu" in (device.get("device_type"), device.get("device"))

    # -- answers

    async def generate(self, generation: Generation) -> AsyncIterator[Sampled]:
        check_sampling(generation.sampling)
        if self._session is None:
            raise EngineUnavailable("the vLLM engine is not running; enter it with `async with` first")
        n_prompt = len(generation.prompt_ids)
        if n_prompt == 0:
            raise BadRequest("the prompt has no tokens; at least one is needed to sample the next")
        if n_prompt >= self._max_context:
            raise ContextOverflow(
                f"the prompt has {n_prompt} tokens and the context is {self._max_context}, output included; shorten it"
            )
        # Read by a task of its own: a reader that takes its time must not hold up new weights for everybody.
        answers: asyncio.Queue[Sampled | Exception] = asyncio.Queue()
        task = asyncio.create_task(self._pump(generation, answers))
        self._tasks.add(task)
        try:
            while True:
                answer = await answers.get()
                if isinstance(answer, Exception):
                    raise answer
                yield answer
                if answer.finish_reason is not None:
                    return
        finally:
            self._tasks.discard(task)
            task.cancel()
            await asyncio.wait([task])

    async def _pump(self, generation: Generation, answers: "asyncio.Queue[Sampled | Exception]") -> None:
        self._running += 1
        try:
            async with aclosing(self._answer(generation)) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    answers.put_nowait(piece)
        except asyncio.CancelledError:
            if self._session is None:  # not the reader has gone, we have
                answers.put_nowait(_end("abort", self._version))
            raise
        except Exception as error:  # the task's outermost frame: the reader raises it
            answers.put_nowait(error)
        finally:
            self._running -= 1

    async def _answer(self, generation: Generation) -> AsyncIterator[Sampled]:
        """An answer out of as many upstream requests as it takes."""
        sampling, prompt = generation.sampling, np.asarray(generation.prompt_ids, np.int32)
        room = self._max_context - len(prompt)
        limit = min(sampling.max_tokens or room, room)
        ids, n, breaks, part, version = prompt, 0, 0, 0, self._version
        while True:
            await self._gate.wait()
            if n and (n == limit or int(ids[-1]) in sampling.stop_token_ids):
                # The server was lost between the last token and the word that it was the last.
                yield _end("stop" if int(ids[-1]) in sampling.stop_token_ids else "length", version)
                return
            version, life, updates = self._version, self._lives, self._updates
            rest = msgspec.structs.replace(
                sampling, max_tokens=limit - n, min_tokens=min(limit - n, max(0, sampling.min_tokens - n))
            )
            name = generation.request_id if part == 0 else f"{generation.request_id}-{part}"
            part += 1
            try:
                async with aclosing(self._stream(ids, rest, name, version)) as pieces:  # type: ignore[type-var]
                    async for more, logprobs, reason in pieces:
                        ids, n = np.concatenate([ids, more]), n + len(more)
                        breaks = 0 if len(more) else breaks
                        ending = _ENDINGS.get(reason)
                        if len(more) or ending:
                            yield Sampled(ids=more, logprobs=logprobs, version=version, finish_reason=ending)
                        if ending:
                            return
            except (_Broken, aiohttp.ClientError) as error:
                await self._recover(life, breaks + 1, error)
                breaks += 1
                continue
            if self._updates == updates and self._lives == life:
                # Somebody else ended it: an administrator, or another client of the same server.
                yield _end("abort", version)
                return

    async def _stream(
        self, ids: np.ndarray, sampling: Sampling, name: str, version: int | None
    ) -> AsyncIterator[tuple[Any, Any, str | None]]:
        """One upstream request: (ids int32, logprobs float32, finish reason) as they come. The last has a reason."""
        parameters: dict[str, Any] = {
            "max_tokens": sampling.max_tokens,
            "min_tokens": sampling.min_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": max(0, sampling.top_k),
            "min_p": sampling.min_p,
            "seed": None if sampling.seed is None else sampling.seed % (1 << 63),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,  # the seam stops at stop_token_ids and nowhere else
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "logprobs": 0,
        }
        salt = {} if version is None else {"cache_salt": f"v{version}"}
        if self._has_generate:
            path = "/inference/v1/generate"
            body = {
                "token_ids": ids.tolist(),
                "sampling_params": {**parameters, "detokenize": False},
                "request_id": name,
            }
        else:
            path = "/v1/completions"
            body = {"model": self._served, "prompt": ids.tolist(), "return_token_ids": True, **parameters}
        self._upstream += 1
        try:
            async with self._http.post(self._url + path, json={**body, **salt, "stream": True}) as answer:
                if answer.status != 200:
                    said = _said(await answer.read())
                    if answer.status == 400:
                        raise BadRequest(f"vLLM refused the request: {said}")
                    raise _Broken(f"status {answer.status}: {said}")
                async for line in answer.content:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        break
                    chunk = _decode_chunk(data)
                    if chunk.error is not None:
                        raise _Broken(_said(data))
                    for choice in chunk.choices:
                        if choice.finish_reason == "error":
                            raise _Broken("the request failed in the server")
                        yield self._piece(choice, version)
                        if choice.finish_reason is not None:
                            return
                raise _Broken("the stream ended without a finish reason")
        except msgspec.DecodeError as error:
            raise EngineFailed(f"vLLM at {self._url} answered what is not its API: {error}") from error
        finally:
            self._upstream -= 1

    def _piece(self, choice: _Choice, version: int | None) -> tuple[Any, Any, str | None]:
        ids = choice.token_ids or []
        given = choice.logprobs or _Logprobs()
        logprobs = given.token_logprobs or [entry.logprob for entry in given.content or []]
        if len(ids) != len(logprobs):
            raise EngineFailed(
                f"vLLM at {self._url} sent {len(ids)} token ids and {len(logprobs)} logprobs in one piece; every "
                "token needs both: is return_token_ids known to this server?"
            )
        made_by = {span.version for span in choice.weight_versions or []}
        if version is not None and self._has_versions and made_by - {str(version)}:
            raise EngineFailed(
                f"vLLM at {self._url} says that version {', '.join(sorted(made_by))} answered, expected {version}: "
                "somebody else changed its weights"
            )
        return np.asarray(ids, np.int32), np.asarray(logprobs, np.float32), choice.finish_reason

    async def _recover(self, life: int, breaks: int, cause: Exception) -> None:
        """Return when a server is there again. Raises EngineFailed if it was never away, EngineUnavailable if gone."""
        if self._session is None:
            return
        async with self._changing:
            if self._lives != life or self._session is None:
                return  # somebody else brought it back
            await anyio.sleep(0.1)  # a server that dies closes its connections before it is gone
            if breaks >= MAX_BREAKS:
                raise EngineFailed(f"vLLM failed {breaks} times at this request: {cause}") from cause
            if await self._is_alive():
                raise EngineFailed(f"vLLM at {self._url} broke off: {cause}") from cause
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
                await self._post("/pause?mode=keep")
                self._is_paused = True

    async def resume(self) -> None:
        async with self._changing:
            if self._is_paused:
                await self._post("/resume")
                self._is_paused = False

    async def load_weights(self, path: str, version: int) -> None:
        """See the seam. `path` must be readable by the server under the same name."""
        if self._is_stuck:
            raise EngineFailed(
                f"vLLM at {self._url} runs a model with tied embeddings on a CPU and would keep the old head: start it "
                "from a folder whose config.json says tie_word_embeddings false, with lm_head.weight written out, or "
                "let us start it with VLLM_TARGET_DEVICE=cpu in `env`"
            )
        weights = Path(os.path.abspath(path))  # noqa: ASYNC240 (asks the disk for nothing)
        await anyio.to_thread.run_sync(check_fits, self._model, weights)
        async with self._changing:
            if self._session is None:
                raise EngineUnavailable("the vLLM engine is not running; enter it with `async with` first")
            self._gate.clear()
            try:
                # Half of it would leave the server frozen; every wait in it has an end.
                with anyio.CancelScope(shield=True):
                    await self._change_weights(weights, version)
            finally:
                self._gate.set()

    async def _change_weights(self, weights: Path, version: int) -> None:
        self._updates += 1
        try:
            if not self._is_paused:
                await self._post("/pause?mode=keep")
            with anyio.fail_after(60):
                while self._upstream:
                    await self._post("/abort_requests", {})
                    await anyio.sleep(0.01)
            await self._reload(weights, version)
            if not self._is_paused:
                await self._post("/resume")
                await self._ask_canary(version)
        except (EngineFailed, TimeoutError) as error:
            await self._fall_back(weights, error)
        self._weights, self._version = weights, version

    async def _put(self, weights: Path) -> None:
        """Make the server read these weights."""
        target = None
        if self._is_untied:
            assert self._untied is not None
            target = Path(tempfile.mkdtemp(dir=self._untied.name)) / "weights"
            await anyio.to_thread.run_sync(write_untied, self._model, weights, target)
        kwargs = {"weights_path": str(target or weights)}
        await self._post("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
        if target is not None:
            await anyio.to_thread.run_sync(shutil.rmtree, target.parent)

    async def _reload(self, weights: Path, version: int) -> None:
        await self._put(weights)
        answer = await self._post("/reset_prefix_cache?reset_running_requests=true")
        if answer.get("success") is False:
            raise EngineFailed("vLLM could not drop its prefix cache")
        if self._has_versions:
            await self._post("/update_weight_version", {"new_version": str(version)})
            info = await self._json("GET", "/weight_info")
            if info.get("weight_version") != str(version):
                raise EngineFailed(f"vLLM says its weights are {info.get('weight_version')}, expected {version}")

    async def _fall_back(self, weights: Path, cause: Exception) -> None:
        """The old weights again, on a new server if the old one died of the new ones. Always raises."""
        if await self._is_alive():
            await self._reload(self._weights or self._model, self._version)
            if not self._is_paused:
                await self._post("/resume")
        else:
            await self._restart(cause)
        raise EngineFailed(f"vLLM could not use {weights} ({cause}); the old weights answer") from cause

    async def _ask_canary(self, version: int) -> None:
        """One greedy token: the new weights give numbers, and the server answers under the new version."""
        one = Sampling(temperature=0.0, max_tokens=1)
        try:
            pieces = [piece async for piece in self._stream(np.array([1, 2, 3], np.int32), one, "canary", version)]
        except (_Broken, aiohttp.ClientError) as error:
            raise EngineFailed(f"one token of version {version} was asked for: {error}") from error
        logprobs = [x for _, logprobs, _ in pieces for x in logprobs.tolist()]
        if len(logprobs) != 1 or not np.isfinite(logprobs).all():
            raise EngineFailed(f"one token of version {version} has logprob {logprobs}, expected one finite number")

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
            raise EngineUnavailable("the vLLM engine is not running; enter it with `async with` first")
        return self._session

    async def _status(self, method: str, path: str, body: object = None, timeout_s: float = 60.0) -> int:
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._http.request(method, self._url + path, json=body, timeout=timeout) as answer:
                return answer.status
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFailed(f"vLLM at {self._url} did not answer {path}: {error}") from error

    async def _json(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        try:
            timeout = aiohttp.ClientTimeout(total=600)  # weights may come from a slow disk
            async with self._http.request(method, self._url + path, json=body, timeout=timeout) as answer:
                data = await answer.read()
                if answer.status == 404:
                    raise EngineFailed(
                        f"vLLM at {self._url} has no {path}: start it with VLLM_SERVER_DEV_MODE=1, on loopback or a "
                        "private network only"
                    )
                if answer.status != 200:
                    raise EngineFailed(f"vLLM at {self._url} answered {path} with {answer.status}: {_said(data)}")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFailed(f"vLLM at {self._url} did not answer {path}: {error}") from error
        try:
            return msgspec.json.decode(data, type=dict[str, Any]) if data else {}
        except msgspec.DecodeError as error:
            raise EngineFailed(f"vLLM at {self._url} answered {path} with what is not JSON: {data[:80]!r}") from error

    async def _post(self, path: str, body: object = None) -> dict[str, Any]:
        return await self._json("POST", path, body)


def _end(reason: FinishReason, version: int) -> Sampled:
    return Sampled(ids=EMPTY_IDS, logprobs=EMPTY_LOGPROBS, version=version, finish_reason=reason)


def _said(data: bytes) -> str:
    """The message of an error body, or its beginning."""
    with suppress(msgspec.DecodeError):
        if message := msgspec.json.decode(data, type=_ErrorBody).error.message:
            return message
    return data[:200].decode("utf-8", "replace") or "nothing"
