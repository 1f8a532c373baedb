"""SGLang as an `engine.Engine`: what is SGLang's own of `served.ServedEngine`, through its native `/generate`.

Written from the source of SGLang 0.5.23 and tested against a fake of it: it has not yet spoken to a real server
(its wheels need CUDA). What differs from vLLM:

- Events are cumulative unless the server streams increments; `completion_tokens` tells which, event by event.
- `ignore_eos` would switch off stop tokens as well, so the model's own end token always stops.
- Logprobs are of the temperature but not of top_k, top_p and min_p: those are refused, unless the server shows that
  its logprobs follow them. Seeds mean something only with --enable-deterministic-inference, and are refused else.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollbook.store.events import Int32s

from .engine import Form, Sampling
from .errors import BadRequest, EngineFailed, EngineUnavailable
from .form import structural_tag
from .served import Broken, ServedEngine, Upstream, said


class _Finish(msgspec.Struct):
    type: str
    message: str = ""


class _Meta(msgspec.Struct):
    completion_tokens: int
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[float, int, Any]] = []
    weight_version: str | None = None


class _Event(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


class SGLangEngine(ServedEngine):
    """See `ServedEngine`. The routes for weights are open to whoever reaches the server unless it has an API key:
    keep it on loopback or a private network."""

    name = "SGLang"
    own_env = {"HF_HUB_OFFLINE": "1"}  # noqa: RUF012

    _follows_cuts = False  # logprobs are renormalised after top_k, top_p, min_p
    _has_seeds = False

    def _command(self, port: int) -> list[str]:
        return [
            *("-m", "sglang.launch_server", "--model-path", str(self._model), "--served-model-name", "policy"),
            *("--host", "127.0.0.1", "--port", str(port)),
        ]

    async def _look(self) -> None:
        models = await self._json("GET", "/v1/models")
        self._max_context = (models.get("data") or [{}])[0].get("max_model_len") or 0
        if not self._max_context:
            raise EngineUnavailable(f"{self._url}/v1/models names no max_model_len: is it an SGLang server?")
        info = await self._json("GET", "/server_info")
        self._has_seeds = bool(info.get("enable_deterministic_inference"))
        if self._is_paused:
            return
        # The likeliest token alone, at two temperatures: 0 where logprobs follow the cut, equal where they are raw.
        self._follows_cuts = True  # or the question would be refused
        try:
            one, two = [
                (await self._first(Sampling(temperature=t, top_k=1, max_tokens=1), None))[1][0] for t in (1.0, 2.0)
            ]
        except Broken as error:
            raise EngineUnavailable(f"SGLang at {self._url} does not answer with tokens: {error}") from error
        self._follows_cuts = one == 0 == two
        self.logprobs_mode = "raw" if one == two and one != 0 else "processed"

    def _check(self, sampling: Sampling) -> None:
        if sampling.seed is not None and not self._has_seeds:
            raise BadRequest(
                "this SGLang server ignores seeds: start it with --enable-deterministic-inference", param="seed"
            )
        if self.logprobs_mode == "processed" and not self._follows_cuts and sampling.temperature > 0:
            for field, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
                if getattr(sampling, field) != off:
                    raise BadRequest(
                        f"{field} is refused with SGLang, whose logprobs do not follow it: what was recorded would not "
                        f"be what was sampled; leave it at {off}",
                        param=field,
                    )

    async def _check_forms(self) -> None:
        """A server that did not know the parameter would refuse the request."""

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
        self._check(sampling)
        parameters: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens,
            "min_new_tokens": sampling.min_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "min_p": sampling.min_p,
            "stop_token_ids": list(sampling.stop_token_ids),
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "skip_special_tokens": False,
        }
        if form is not None:
            is_json = form.schema is not None and not form.calls and form.thought == "none"
            told = {"json_schema": json.dumps(form.schema)} if is_json else {"structural_tag": structural_tag(form)}
            parameters |= {**told, "min_new_tokens": 0}
        if sampling.seed is not None:
            parameters["sampling_seed"] = sampling.seed % (1 << 31)
        body = {
            "rid": name,
            "input_ids": ids,
            "sampling_params": parameters,
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": True,
        }
        n = 0

        def read(events: list[bytes]) -> Upstream:
            nonlocal n
            pieces: list[Upstream] = []
            for data in events:
                event = _decode_event(data)
                if event.error is not None or event.meta_info is None:
                    raise Broken(said(data))
                pieces.append(self._piece(event.output_ids, event.meta_info, n, version))
                n = event.meta_info.completion_tokens
                if event.meta_info.finish_reason is not None:
                    break
            if len(pieces) == 1:
                return pieces[0]
            ids, logprobs, reasons = zip(*pieces, strict=True)
            return np.concatenate(ids), np.concatenate(logprobs), reasons[-1]

        return self._stream("/generate", body, read, is_streamed=is_streamed)

    def _piece(self, output_ids: list[int], meta: _Meta, n: int, version: int | None) -> Upstream:
        """What is new since n tokens, of an event that may hold all of them or only the new ones."""
        new = meta.completion_tokens - n
        ids = output_ids[len(output_ids) - new :] if new else []
        logprobs = meta.output_token_logprobs[len(meta.output_token_logprobs) - new :] if new else []
        if len(ids) != new or [entry[1] for entry in logprobs] != ids:
            raise EngineFailed(
                f"SGLang at {self._url} says {new} new tokens and sent {len(output_ids)} ids with "
                f"{len(meta.output_token_logprobs)} logprobs; each token needs its own"
            )
        if version is not None and meta.finish_reason is not None and meta.weight_version not in (None, str(version)):
            raise EngineFailed(
                f"SGLang at {self._url} says that version {meta.weight_version} answered, expected {version}: somebody "
                "else changed its weights"
            )
        reason = meta.finish_reason.type if meta.finish_reason is not None else None
        return np.asarray(ids, np.int32), np.asarray([entry[0] for entry in logprobs], np.float32), reason

    async def _freeze(self) -> None:
        await self._post("/pause_generation", {"mode": "retract"})

    async def _thaw(self) -> None:
        await self._post("/continue_generation", {})

    async def _end_all(self) -> None:
        await self._post("/abort_request", {"rid": "", "abort_all": True})

    async def _put(self, weights: Path | None, version: int) -> None:
        label = str(version)
        if weights is None:
            await self._post("/update_weight_version", {"new_version": label, "abort_all_requests": False})
        else:
            body = {"model_path": str(weights), "weight_version": label, "flush_cache": True, "keep_pause": True}
            answer = await self._post("/update_weights_from_disk", body)
            if answer.get("success") is not True:
                raise EngineFailed(f"SGLang did not load {weights}: {answer.get('message')}")
        info = await self._json("GET", "/model_info")
        if info.get("weight_version") != label:
            raise EngineFailed(f"SGLang says its weights are {info.get('weight_version')}, expected {label}")
