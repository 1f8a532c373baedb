"""Any OpenAI-compatible server that gives token ids, as an `engine.Engine`: what is its own of `served.ServedEngine`.

Token ids go in and come out through `/v1/completions` with `return_token_ids`, as vLLM named it and others followed. A
server that takes text only, or gives no ids or no logprobs, is refused at the start with the reason: what it says could
not be trained on. It cannot be paused and takes no new weights here; its version stays the one it was given.
"""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np

from rollbook.store.events import Int32s

from .engine import EMPTY_IDS, EMPTY_LOGPROBS, Form, Sampling
from .errors import BadRequest, EngineFailed, EngineUnavailable
from .served import Broken, ServedEngine, Upstream, said


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class CompatibleEngine(ServedEngine):
    """See `ServedEngine`; `url` is needed. model: the folder with the tokenizer and config.json of what it serves.

    max_context: prompt and output together, where the server's /v1/models names no max_model_len.
    """

    name = "the server"

    def __init__(self, model: str | Path, *, url: str, max_context: int | None = None, **settings: Any) -> None:
        super().__init__(model, url=url, **settings)
        if self._weights is not None or self._adapters:
            raise EngineFailed("an OpenAI-compatible server takes no weights here: start it with those it should have")
        self._given_context = max_context
        self._served = ""

    def _command(self, port: int) -> list[str]:
        raise NotImplementedError("it is given by its URL, never started")

    async def _look(self) -> None:
        models = await self._json("GET", "/v1/models")
        first = (models.get("data") or [{}])[0]
        self._served = first.get("id", "")
        self._max_context = self._given_context or first.get("max_model_len") or 0
        if not self._max_context:
            raise EngineUnavailable(f"{self._url}/v1/models names no max_model_len: give max_context")
        try:
            one, two = [await self._first(Sampling(temperature=t, top_k=1, max_tokens=2), None) for t in (1.0, 2.0)]
        except (Broken, BadRequest, EngineFailed, aiohttp.ClientError) as error:
            raise EngineUnavailable(
                f"{self._url} cannot be recorded from: {error}. Use a server that takes token ids at /v1/completions "
                "and answers return_token_ids and logprobs, as vLLM does"
            ) from error
        # One token to choose from: certain where logprobs follow the sampling parameters.
        self.logprobs_mode = "processed" if not one[1].any() and not two[1].any() else "raw"

    async def _check_forms(self) -> None:
        raise BadRequest(
            f"whether {self._url} holds answers to a form is not known: leave out response_format, and ask for tools "
            "with tool_choice auto",
            param="response_format",
        )

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
        prompt = ids.tolist()
        body = {
            "model": self._served,
            "prompt": prompt,
            "return_token_ids": True,
            "logprobs": 0,
            "stream": True,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,  # the seam stops at stop_token_ids and nowhere else
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed % (1 << 63)
        for field, off in (("top_k", 0), ("min_p", 0.0), ("min_tokens", 0), ("repetition_penalty", 1.0)):
            if (value := getattr(sampling, field)) != off:
                body[field] = value
        return self._stream("/v1/completions", body, partial(self._read, prompt), is_streamed=is_streamed)

    def _read(self, prompt: list[int], events: list[bytes]) -> Upstream:
        """What some events say together."""
        pieces: list[Upstream] = []
        for data in events:
            chunk = _decode_chunk(data)
            if chunk.error is not None:
                raise Broken(said(data))
            pieces += [self._piece(choice, prompt) for choice in chunk.choices]
            if pieces and pieces[-1][2] is not None:
                break
        if not pieces:
            return EMPTY_IDS, EMPTY_LOGPROBS, None
        ids, logprobs, reasons = zip(*pieces, strict=True)
        return np.concatenate(ids), np.concatenate(logprobs), reasons[-1]

    def _piece(self, choice: _Choice, prompt: list[int]) -> Upstream:
        if choice.prompt_token_ids is not None and choice.prompt_token_ids != prompt:
            raise EngineFailed(
                f"it was sent {len(prompt)} prompt ids and read them as {len(choice.prompt_token_ids)} others: the "
                "prompt that was answered is not the one that would be recorded"
            )
        if choice.token_ids is None and choice.finish_reason is None:
            raise EngineFailed("it gives no token_ids: return_token_ids is not known to it")
        ids = choice.token_ids or []
        logprobs = (choice.logprobs or _Logprobs()).token_logprobs or []
        if len(ids) != len(logprobs) or None in logprobs:
            raise EngineFailed(f"it gave {len(ids)} token ids with {len(logprobs)} logprobs; every token needs its own")
        return np.asarray(ids, np.int32), np.asarray(logprobs, np.float32), choice.finish_reason

    async def load_weights(self, path: str, version: int) -> None:
        """Raises EngineFailed, always."""
        raise EngineFailed(
            f"{self._url} takes no new weights here; train with the embedded engine, vLLM or SGLang. The old ones stay"
        )

    async def _freeze(self) -> None:
        raise EngineFailed(f"{self._url} cannot be paused from here")

    async def _thaw(self) -> None:
        """It was never paused."""

    async def _end_all(self) -> None:
        """Requests end when their connections close."""

    async def _put(self, weights: Path | None, version: int) -> None:
        """It has what it has."""
