"""vLLM as an `engine.Engine`: what is vLLM's own of `served.ServedEngine`.

Token ids go in, ids and logprobs come out, through `/inference/v1/generate` or, where a server lacks it, through
`/v1/completions` with `return_token_ids`. What a server can do is found out when it is first met. The version that
vLLM reports is checked against ours, and every request carries its version as cache salt, a second guard against keys
and values of old weights.

On a CPU vLLM keeps a repacked copy of the head and does not renew it when the weights of a model with tied embeddings
are reloaded (seen in 0.32: logits of new hidden states through the old head). There the model is served untied, from
a folder of links with the head written out; a tied server that was given by URL takes no new weights.
"""

import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import anyio.to_thread
import msgspec
import numpy as np

from rollbook.store.events import Int32s

from .checkpoint import is_adapter, is_tied, write_untied
from .engine import Form, Sampling, refuse_twice
from .errors import BadRequest, EngineFailed, EngineUnavailable
from .form import structural_tag
from .served import Broken, ServedEngine, Upstream, said


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Logprob] | None = None  # from /inference/v1/generate
    token_logprobs: list[float] | None = None  # from /v1/completions


class _Span(msgspec.Struct, gc=False):
    version: str


class _Choice(msgspec.Struct, gc=False):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_INTERVAL = 64
"""Tokens per event of an answer that nobody reads before its end (`stream_interval`); older servers send each."""

_decode_chunk = msgspec.json.Decoder(_Chunk).decode


def adapter_name(version: int | None) -> str:
    """What an adapter is called in vLLM."""
    return f"v{version}"


class VLLMEngine(ServedEngine):
    """See `ServedEngine`. Weight updates need a server with VLLM_SERVER_DEV_MODE=1, as ours have; that opens
    routes without a key, so keep it on loopback or a private network. A server on a CPU needs VLLM_TARGET_DEVICE=cpu in
    `env` or in our own environment.
    """

    name = "vLLM"
    own_env = {  # noqa: RUF012
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    _missing_route = ": start it with VLLM_SERVER_DEV_MODE=1, on loopback or a private network only"

    _served = ""
    _has_generate = False
    _has_versions = False
    _has_forms = False
    _forms_in = 0  # the life in which that was found out
    _is_untied = False
    _is_stuck = False  # reloading would leave the old head

    async def __aenter__(self) -> Self:
        refuse_twice(self._session is not None)
        self._scratch = tempfile.TemporaryDirectory(prefix="rollbook-untied-")
        self._serves = self._model
        try:
            if (
                self._is_ours
                and {**os.environ, **self._env}.get("VLLM_TARGET_DEVICE") == "cpu"
                and is_tied(self._model)
            ):
                self._serves = Path(self._scratch.name) / "model"
                await anyio.to_thread.run_sync(write_untied, self._model, self._model, self._serves)
            return await super().__aenter__()
        except BaseException as error:
            self._scratch.cleanup()
            if isinstance(error, OSError):
                raise EngineUnavailable(f"no model at {self._model}: {error}") from error
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        self._scratch.cleanup()

    def _command(self, port: int) -> list[str]:
        return [
            *(
                "-m",
                "vllm.entrypoints.openai.api_server",
                "--model",
                str(self._serves),
                "--served-model-name",
                "policy",
            ),
            *("--host", "127.0.0.1", "--port", str(port)),
            # Tokens in and out; logprobs of what was drawn from; no sampling defaults out of the model's folder.
            *("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        ]

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
            _, logprobs, _ = await self._first(only, None)
        except Broken as error:
            raise EngineUnavailable(f"vLLM at {self._url} does not answer with tokens: {error}") from error
        self.logprobs_mode = "processed" if not logprobs.any() else "raw"

    async def _is_on_cpu(self) -> bool:
        if await self._status("GET", "/server_info") != 200:
            return False  # without the dev routes there are no new weights either
        info = await self._json("GET", "/server_info?config_format=json")
        config = info.get("vllm_config")
        device = config.get("device_config", {}) if isinstance(config, dict) else {}
        return "cpu" in (device.get("device_type"), device.get("device"))

    async def _check_forms(self) -> None:
        if self._forms_in != self._lives:
            # What cannot be a form is refused by a server that knows the parameter, and ignored by one that does not.
            asked = self._sampling(Sampling(max_tokens=1)) | {"structured_outputs": {"structural_tag": "no JSON"}}
            path, body = self._request([1, 2, 3], asked, "look")
            self._has_forms = await self._status("POST", path, body) == 400
            self._forms_in = self._lives
        if not self._has_forms:
            raise BadRequest(
                f"vLLM at {self._url} does not know structured_outputs, so it cannot hold an answer to a form: use a "
                "newer one (0.12 or later), or leave out response_format and ask for tools with tool_choice auto",
                param="response_format",
            )

    def _sampling(self, sampling: Sampling) -> dict[str, Any]:
        return {
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

    def _request(self, ids: Int32s | list[int], parameters: dict[str, Any], name: str) -> tuple[str, dict[str, Any]]:
        """(path, body) of one that generates."""
        if self._has_generate:
            own = {"sampling_params": {**parameters, "detokenize": False}, "request_id": name}
            return "/inference/v1/generate", {"token_ids": ids, **own}
        return "/v1/completions", {
            "model": self._served,
            "prompt": ids,
            "return_token_ids": True,
            **parameters,
        }

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
        parameters = self._sampling(sampling)
        if form is not None:
            is_json = form.schema is not None and not form.calls and form.thought == "none"
            told = {"json": form.schema} if is_json else {"structural_tag": structural_tag(form)}
            parameters |= {"structured_outputs": told, "min_tokens": 0}
        if self._has_generate and not is_streamed:
            parameters["stream_interval"] = _INTERVAL
        salt = {} if version is None else {"cache_salt": f"v{version}"}
        path, body = self._request(ids, parameters, name)
        if version in self._adapters:
            body["model"] = adapter_name(version)
        return self._stream(
            path, {**body, **salt, "stream": True}, partial(self._read, version), is_streamed=is_streamed
        )

    def _read(self, version: int | None, events: list[bytes]) -> Upstream:
        """What some events say together."""
        ids: list[int] = []
        logprobs: list[float] = []
        reason = None
        for data in events:
            chunk = _decode_chunk(data)
            if chunk.error is not None:
                raise Broken(said(data))
            for choice in chunk.choices:
                if choice.finish_reason == "error":
                    raise Broken("the request failed in the server")
                if choice.token_ids is not None:
                    ids += choice.token_ids
                if choice.logprobs is not None:
                    # Either list, and from a generate the long way: an object for each token.
                    logprobs += choice.logprobs.token_logprobs or [x.logprob for x in choice.logprobs.content or ()]
                if len(ids) != len(logprobs):
                    self._refuse_piece(choice)
                if choice.weight_versions is not None:
                    self._check_version(version, choice.weight_versions)
                reason = choice.finish_reason
            if reason is not None:
                break
        return np.array(ids, np.int32), np.array(logprobs, np.float32), reason

    def _refuse_piece(self, choice: _Choice) -> None:
        given = choice.logprobs or _Logprobs()
        raise EngineFailed(
            f"vLLM at {self._url} sent {len(choice.token_ids or ())} token ids and "
            f"{len(given.token_logprobs or given.content or ())} logprobs in one piece; every token needs both: is "
            "return_token_ids known to this server?"
        )

    def _check_version(self, version: int | None, spans: list[_Span]) -> None:
        if version in self._adapters:
            version = self._base_version  # vLLM counts the base's
        if version is not None and self._has_versions:
            made_by = {span.version for span in spans}
            if made_by - {str(version)}:
                raise EngineFailed(
                    f"vLLM at {self._url} says that version {', '.join(sorted(made_by))} answered, expected {version}: "
                    "somebody else changed its weights"
                )

    async def load_weights(self, path: str, version: int) -> None:
        """See `ServedEngine`."""
        if not await anyio.to_thread.run_sync(is_adapter, Path(path)):
            self._refuse_if_stuck()
        await super().load_weights(path, version)

    def _refuse_if_stuck(self) -> None:
        if self._is_stuck:
            raise EngineFailed(
                f"vLLM at {self._url} runs a model with tied embeddings on a CPU and would keep the old head: start it "
                "from a folder whose config.json says tie_word_embeddings false, with lm_head.weight written out, or "
                "let us start it with VLLM_TARGET_DEVICE=cpu in the environment"
            )

    async def _freeze(self) -> None:
        await self._post("/pause?mode=keep")

    async def _thaw(self) -> None:
        await self._post("/resume")

    async def _end_all(self) -> None:
        await self._post("/abort_requests", {})

    async def _put(self, weights: Path | None, version: int) -> None:
        if weights is not None:
            await self._reload(weights)
        if self._has_versions:
            await self._post("/update_weight_version", {"new_version": str(version)})
            info = await self._json("GET", "/weight_info")
            if info.get("weight_version") != str(version):
                raise EngineFailed(f"vLLM says its weights are {info.get('weight_version')}, expected {version}")

    async def _add_adapter(self, adapter: Path, version: int) -> None:
        body = {
            "lora_name": adapter_name(version),
            "lora_path": str(adapter),
            "load_inplace": version in self._adapters,
        }
        status, why = await self._asked("/v1/load_lora_adapter", body)
        if status != 200:
            raise EngineFailed(
                f"vLLM at {self._url} did not take the adapter in {adapter} ({status}: {why}): start it with "
                "--enable-lora, a --max-lora-rank that is enough, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True; the old "
                "weights answer"
            )

    async def _drop_adapter(self, version: int) -> None:
        await self._asked("/v1/unload_lora_adapter", {"lora_name": adapter_name(version)})

    async def _asked(self, path: str, body: object) -> tuple[int, str]:
        """Status and text of a route that does not answer with JSON."""
        try:
            timeout = aiohttp.ClientTimeout(total=120)
            async with self._http.post(self._url + path, json=body, timeout=timeout) as answer:
                return answer.status, said(await answer.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFailed(f"vLLM at {self._url} did not answer {path}: {error}") from error

    async def _reload(self, weights: Path) -> None:
        self._refuse_if_stuck()
        target = None
        if self._is_untied:
            target = Path(tempfile.mkdtemp(dir=self._scratch.name)) / "weights"
            await anyio.to_thread.run_sync(write_untied, self._model, weights, target)
        kwargs = {"weights_path": str(target or weights)}
        await self._post("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
        if target is not None:
            await anyio.to_thread.run_sync(shutil.rmtree, target.parent)
        answer = await self._post("/reset_prefix_cache?reset_running_requests=true")
        if answer.get("success") is False:
            raise EngineFailed("vLLM could not drop its prefix cache")
