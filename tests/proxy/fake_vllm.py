"""vLLM's HTTP surface as far as we use it, without a model: shapes and habits as seen from vLLM 0.32 on a CPU.

What it samples is a function of the weights and of all ids so far, so that an answer that went on on another server,
or after other weights, can be told from one that was made wrong. The real server runs the same contract in
`make test-vllm`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from aiohttp import web
from aiohttp.typedefs import Handler

from ports import free_port
from rollbook.proxy.checkpoint import read_shapes


def next_token(weights: str, ids: list[int]) -> tuple[int, float]:
    """(id, logprob): never 2, unless the ids so far end in 77."""
    if ids[-1] == 77:
        return 2, -0.5
    value = (sum(ids) * 31 + len(ids) * 17 + sum(weights.encode())) % 251 + 3
    return value, -0.01 - value / 100


async def until(claim: Callable[[], bool], within_s: float = 600) -> None:
    with anyio.fail_after(within_s):
        while not claim():  # noqa: ASYNC110 - what is waited for happens on the other side of a socket
            await anyio.sleep(0.001)


def answer(weights: str, prompt: list[int], n: int) -> list[int]:
    ids = list(prompt)
    for _ in range(n):
        ids.append(next_token(weights, ids)[0])
    return ids[len(prompt) :]


@dataclass(eq=False)
class FakeVLLM:
    """One server; `lives` again at the same port after `die`."""

    model: Path
    max_model_len: int = 256
    has_generate: bool = True
    has_versions: bool = True
    is_dev: bool = True
    mode: str = "processed"
    token_s: float = 0.001
    dies_after: int | None = None  # tokens, all requests together
    breaks_with: str | None = None  # an error event after one token
    reports: str | None = None  # a version that nobody set
    logprob: float | None = None  # of every token; -9999 is what the real one says where its logits are no numbers
    root: Path | None = None  # the folder it serves, if not the model's
    is_on_cpu: bool = False
    reloaded: list[dict[str, tuple[int, ...]]] = field(default_factory=list)  # names and shapes
    calls: list[str] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    has_forms: bool = True
    has_lora: bool = True
    adapters: dict[str, str] = field(default_factory=dict)  # folder by name
    limit_name = "max_tokens"

    def __post_init__(self) -> None:
        self._runner: web.AppRunner | None = None
        self._port = free_port()
        self._restart()

    def _restart(self) -> None:
        self.weights = self.model.name
        self.version = "default"
        self.adapters.clear()
        self._aborts: dict[str, asyncio.Event] = {}
        self._transports: set[asyncio.Transport] = set()
        self._thawed = asyncio.Event()
        self._thawed.set()

    async def live(self) -> None:
        self._restart()
        app = web.Application(middlewares=[self._note])
        app.add_routes(self._routes())
        self._runner = web.AppRunner(app, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self.url = f"http://127.0.0.1:{self._port}"

    def _routes(self) -> list[web.RouteDef]:
        routes = [web.get("/health", self._ok), web.get("/v1/models", self._models)]
        routes.append(web.post("/v1/completions", self._complete))
        if self.has_generate:
            routes.append(web.post("/inference/v1/generate", self._generate))
        if self.is_dev:
            routes += [
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.post("/abort_requests", self._abort),
                web.post("/collective_rpc", self._rpc),
                web.post("/reset_prefix_cache", self._reset),
                web.get("/server_info", self._server_info),
            ]
        if self.has_lora:
            routes.append(web.post("/v1/load_lora_adapter", self._load_lora))
            routes.append(web.post("/v1/unload_lora_adapter", self._unload_lora))
        if self.is_dev and self.has_versions:
            routes += [web.post("/update_weight_version", self._set_version), web.get("/weight_info", self._info)]
        return routes

    async def die(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            for site in [*runner.sites]:
                await site.stop()
            for transport in self._transports:
                transport.abort()
            await runner.cleanup()

    @web.middleware
    async def _note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        assert request.transport is not None
        self._transports.add(request.transport)
        return await handler(request)

    async def _fall_dead(self) -> None:
        """In the middle of a request, which is never answered."""
        self._dying = asyncio.create_task(self.die())
        await asyncio.Event().wait()

    async def _ok(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"data": [{"id": "policy", "max_model_len": self.max_model_len, "root": str(self.root or self.model)}]}
        )

    async def _server_info(self, request: web.Request) -> web.Response:
        device = "cpu" if self.is_on_cpu else "cuda"
        return web.json_response({"vllm_config": {"device_config": {"device": device, "device_type": device}}})

    async def _pause(self, request: web.Request) -> web.Response:
        assert request.query["mode"] == "keep"
        self.calls.append("pause")
        self._thawed.clear()
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self.calls.append("resume")
        self._thawed.set()
        return web.json_response({"status": "resumed"})

    async def _abort(self, request: web.Request) -> web.Response:
        assert await request.json() == {}
        self.calls.append("abort")
        for event in self._aborts.values():
            event.set()
        return web.json_response({"status": "aborted"})

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        path = Path(body["kwargs"]["weights_path"])
        self.calls.append(f"reload {path.name}")
        if (path / "poison").exists():  # vLLM dies of weights it cannot read
            await self._fall_dead()
        self.reloaded.append(read_shapes(path))
        self.weights = path.name
        return web.json_response({"results": [None]})

    async def _load_lora(self, request: web.Request) -> web.Response:
        body = await request.json()
        path = Path(body["lora_path"])
        self.calls.append(f"load {body['lora_name']}")
        if (path / "poison").exists():
            return self._refuse("rank 64 is larger than max_lora_rank 16")
        self.adapters[body["lora_name"]] = path.name
        return web.Response(text=f"Success: LoRA adapter '{body['lora_name']}' added successfully.")

    async def _unload_lora(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        self.calls.append(f"unload {name}")
        del self.adapters[name]
        return web.Response(text="Success")

    async def _reset(self, request: web.Request) -> web.Response:
        self.calls.append("reset")
        return web.json_response({"success": True})

    async def _set_version(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        self.calls.append(f"version {self.version}")
        return web.json_response({"success": True, "new_version": self.version})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    def _refuse(self, message: str) -> web.Response:
        return web.json_response({"error": {"message": message, "type": "BadRequestError", "code": 400}}, status=400)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "token_ids" not in body:
            return self._refuse("1 validation error: token_ids")
        return await self._answer(request, body, body["token_ids"], body["sampling_params"])

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["return_token_ids"]
        return await self._answer(request, body, body["prompt"], body)

    async def _answer(
        self, request: web.Request, body: dict[str, Any], prompt: list[int], sampling: dict[str, Any]
    ) -> web.StreamResponse:
        if sampling["temperature"] > 2:
            return self._refuse("temperature must be in [0, 2]")
        form = sampling.get("structured_outputs")
        if form is not None and self.has_forms:
            try:
                json.loads(form.get("structural_tag", "{}"))
            except ValueError:
                return self._refuse("structural_tag is not valid JSON")
        if len(prompt) >= self.max_model_len:
            return self._refuse("the prompt is longer than the maximum model length")
        self.prompts.append(prompt)
        self.bodies.append(body)
        name, aborted = f"{id(request)}", asyncio.Event()
        self._aborts[name] = aborted
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        size = json.loads((self.model / "config.json").read_text())["vocab_size"]
        if beyond := [i for i in sampling["stop_token_ids"] if not 0 <= i < size]:
            error = {"message": f"token_id(s) {beyond} in stop_token_ids contain out-of-vocab token ids"}
            await answer.write(f"data: {json.dumps({'error': error})}\n\ndata: [DONE]\n\n".encode())
            del self._aborts[name]
            return answer
        ids, reason = list(prompt), None
        weights = self.adapters.get(body.get("model", ""), "")
        try:
            while reason is None:
                waiting = [asyncio.ensure_future(event.wait()) for event in (aborted, self._thawed)]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in waiting:
                    task.cancel()
                if aborted.is_set():
                    await self._event(answer, [], [], "abort")
                    break
                await asyncio.sleep(self.token_s)
                token, logprob = next_token(self.weights + weights, ids)
                logprob = self._logprob(logprob, sampling)
                ids.append(token)
                if token in sampling["stop_token_ids"]:
                    reason = "stop"
                elif len(ids) - len(prompt) == sampling[self.limit_name]:
                    reason = "length"
                await self._event(answer, [token], [logprob], reason)
                if self.dies_after is not None:
                    self.dies_after -= 1
                    if self.dies_after == 0:
                        self.dies_after = None
                        await self._fall_dead()
                if self.breaks_with is not None:
                    await answer.write(f"data: {json.dumps({'error': {'message': self.breaks_with}})}\n\n".encode())
                    break
            await answer.write(b"data: [DONE]\n\n")
        finally:
            del self._aborts[name]
        return answer

    def _logprob(self, logprob: float, sampling: dict[str, Any]) -> float:
        if self.logprob is not None:
            return self.logprob
        return 0.0 if sampling.get("top_k") == 1 and self.mode == "processed" else logprob

    async def _event(
        self, answer: web.StreamResponse, ids: list[int], logprobs: list[float], reason: str | None
    ) -> None:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "stop_reason": None, "token_ids": ids}
        if self.has_generate:
            content = [{"token_id": i, "logprob": x, "rank": 1} for i, x in zip(ids, logprobs, strict=True)]
            choice["logprobs"] = {"content": content}
            versions = [{"version": self.reports or self.version, "start": 0, "end": 1}]
            choice["weight_versions"] = versions if reason and self.has_versions else None
        else:
            choice["logprobs"] = {"token_logprobs": logprobs, "tokens": ["?"] * len(ids)} if ids else None
        await answer.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())


@asynccontextmanager
async def serving(fake: FakeVLLM) -> AsyncIterator[FakeVLLM]:
    await fake.live()
    try:
        yield fake
    finally:
        await fake.die()
