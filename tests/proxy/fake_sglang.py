"""SGLang's native HTTP surface as far as we use it, without a model: shapes as in the source of SGLang 0.5.23.

It shares what it samples, and how it dies, with `fake_vllm.py`.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from proxy.fake_vllm import FakeVLLM
from rollbook.proxy.checkpoint import read_shapes


@dataclass(eq=False)
class FakeSGLang(FakeVLLM):
    """See FakeVLLM. mode: processed, raw, or tempered (SGLang's own: of the temperature, before top_k and its like)."""

    mode: str = "tempered"
    is_incremental: bool = False
    is_deterministic: bool = False
    sent: WeakKeyDictionary[Any, tuple[list[int], list[float]]] = field(default_factory=WeakKeyDictionary)

    limit_name = "max_new_tokens"

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self._ok),
            web.get("/v1/models", self._models),
            web.get("/server_info", self._server),
            web.get("/model_info", self._model_info),
            web.post("/generate", self._native),
            web.post("/pause_generation", self._pause_generation),
            web.post("/continue_generation", self._resume),
            web.post("/abort_request", self._abort_request),
            web.post("/update_weights_from_disk", self._from_disk),
            web.post("/update_weight_version", self._set_version),
        ]

    async def _server(self, request: web.Request) -> web.Response:
        return web.json_response({"enable_deterministic_inference": self.is_deterministic})

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": str(self.model), "weight_version": self.version})

    async def _pause_generation(self, request: web.Request) -> web.Response:
        assert (await request.json())["mode"] == "retract"
        self.calls.append("pause")
        self._thawed.clear()
        return web.json_response({"status": "ok"})

    async def _abort_request(self, request: web.Request) -> web.Response:
        assert (await request.json())["abort_all"] is True
        self.calls.append("abort")
        for event in self._aborts.values():
            event.set()
        return web.Response()

    async def _from_disk(self, request: web.Request) -> web.Response:
        body = await request.json()
        path = Path(body["model_path"])
        assert body["flush_cache"]
        self.calls.append(f"reload {path.name}")
        if (path / "poison").exists():
            return web.json_response({"success": False, "message": "Failed to update weights"}, status=400)
        self.reloaded.append(read_shapes(path))
        self.weights, self.version = path.name, body["weight_version"]
        if not body["keep_pause"]:
            self._thawed.set()
        return web.json_response({"success": True, "message": "ok", "num_paused_requests": 0})

    async def _native(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["return_logprob"]
        assert "ignore_eos" not in body["sampling_params"]  # it would switch off stop_token_ids
        return await self._answer(request, body, body["input_ids"], body["sampling_params"])

    def _logprob(self, logprob: float, sampling: dict[str, Any]) -> float:
        if self.mode == "processed":
            return 0.0 if sampling["top_k"] == 1 else logprob
        return logprob if self.mode == "raw" or not sampling["temperature"] else logprob / sampling["temperature"]

    async def _event(
        self, answer: web.StreamResponse, ids: list[int], logprobs: list[float], reason: str | None
    ) -> None:
        all_ids, all_logprobs = self.sent.setdefault(answer, ([], []))
        all_ids += ids
        all_logprobs += logprobs
        if not self.is_incremental:
            ids, logprobs = all_ids, all_logprobs
        meta = {
            "id": "x",
            "finish_reason": None if reason is None else {"type": reason},
            "completion_tokens": len(all_ids),
            "weight_version": self.reports or self.version,
            "output_token_logprobs": [[x, i, None] for i, x in zip(ids, logprobs, strict=True)],
        }
        await answer.write(f"data: {json.dumps({'text': '', 'output_ids': ids, 'meta_info': meta})}\n\n".encode())
