"""OpenAI's legacy completions: POST /completions. A prompt as text or token ids, and no chat template.

The request's one message has the raw prompt as its content: text, or a list of ids.
"""

import time
from typing import Any

import msgspec

from rollbook.proxy.config import Asked, settle
from rollbook.proxy.errors import BadRequest, ProxyError
from rollbook.proxy.request import Piece, Reply, Request

from . import Context, Spell, decoder, openai_error, refuse_as_openai, refuse_unless, stop_strings
from .chat import StreamOptions, usage

_encode = msgspec.json.Encoder().encode


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the API takes."""

    prompt: str | list[Any]
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logprobs: int | None = None
    user: str | None = None
    # Known, and refused where they ask for something.
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logit_bias: dict[str, float] | None = None
    # The names that vLLM and SGLang have for what OpenAI's API has no word for.
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    return_token_ids: bool | None = None


_decode = decoder(Body)


class Completions:
    """See `dialects.Dialect`."""

    name = "completions"

    def __init__(self, spell: Spell) -> None:
        self._spell = spell

    def parse(self, body: bytes, context: Context) -> Request:
        asked = _decode(body)
        refuse_unless(not asked.echo, "echo", "the client has the prompt")
        refuse_unless(not asked.suffix, "suffix", "answers go on after the prompt")
        refuse_unless(asked.best_of in (None, 1, asked.n), "best_of", "every sample is given; use n")
        refuse_unless(not asked.logit_bias, "logit_bias", "tokens are drawn as the policy says")
        refuse_unless((asked.logprobs or 0) <= 1, "logprobs", "engines report the sampled token's only: use 0 or 1")
        if asked.n is not None and not 1 <= asked.n <= 128:
            raise BadRequest(f"n must be between 1 and 128, got {asked.n}", param="n")
        prompt = asked.prompt
        if isinstance(prompt, list):
            if len(prompt) == 1 and isinstance(prompt[0], str | list):
                prompt = prompt[0]
            if isinstance(prompt, list) and not (
                prompt and all(type(token) is int and 0 <= token < 1 << 31 for token in prompt)
            ):
                raise BadRequest("prompt must be one text or one list of token ids", param="prompt")
        if not prompt:
            raise BadRequest("prompt must not be empty", param="prompt")
        sampling, stop = settle(
            Asked(
                temperature=asked.temperature,
                top_p=asked.top_p,
                top_k=asked.top_k,
                min_p=asked.min_p,
                max_tokens=asked.max_tokens,
                min_tokens=asked.min_tokens,
                seed=asked.seed,
                stop=stop_strings(asked.stop),
                stop_token_ids=None if asked.stop_token_ids is None else tuple(asked.stop_token_ids),
                frequency_penalty=asked.frequency_penalty,
                presence_penalty=asked.presence_penalty,
                repetition_penalty=asked.repetition_penalty,
            ),
            context.defaults,
        )
        return Request(
            dialect=self.name,
            messages=[{"role": "user", "content": prompt}],
            model=asked.model or "default",
            sampling=sampling,
            stop=stop,
            n=asked.n or 1,
            is_stream=bool(asked.stream),
            wants_logprobs=asked.logprobs is not None,
            max_total_tokens=context.defaults.max_tokens,
            extra={
                "include_usage": bool(asked.stream and asked.stream_options and asked.stream_options.include_usage),
                "return_token_ids": bool(asked.return_token_ids),
            },
        )

    def render(self, request: Request, replies: list[Reply]) -> bytes:
        first = replies[0]
        choices = []
        for i, reply in enumerate(replies):
            choice: dict[str, Any] = {
                "index": i,
                "text": reply.content or "",
                "logprobs": self.logprobs(reply.output_ids, reply.logprobs) if request.wants_logprobs else None,
                "finish_reason": reply.finish_reason,
            }
            if request.extra.get("return_token_ids"):
                choice |= {"token_ids": reply.output_ids, "prompt_token_ids": reply.prompt_ids}
            choices.append(choice)
        return _encode(
            {
                "id": first.interaction_id,
                "object": "text_completion",
                "created": first.created,
                "model": first.model,
                "choices": choices,
                "usage": usage(replies),
            }
        )

    def logprobs(self, ids: list[int], logprobs: list[float]) -> dict[str, Any]:
        tokens = [self._spell(token).decode("utf-8", "replace") for token in ids]
        offsets, place = [], 0
        for token in tokens:
            offsets.append(place)
            place += len(token)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}

    def stream(self, request: Request) -> "CompletionsStream":
        return CompletionsStream(self, request)

    def refuse(self, error: ProxyError) -> tuple[int, bytes]:
        return refuse_as_openai(error)


class CompletionsStream:
    """See `dialects.Streamer`."""

    def __init__(self, completions: Completions, request: Request) -> None:
        self._completions = completions
        self._request = request
        self._head: dict[str, Any] = {}

    def begin(self, first: Piece) -> bytes:
        self._head = {
            "id": first.interaction_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._request.model,
        }
        return b""

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: %b\n\n" % _encode({**self._head, "choices": choices, **more})

    def piece(self, choice: int, piece: Piece) -> bytes:
        if not piece.text and not (self._request.wants_logprobs and piece.token_ids):
            return b""
        logprobs = None
        if self._request.wants_logprobs:
            logprobs = self._completions.logprobs(piece.token_ids, piece.logprobs)
        return self._chunk([{"index": choice, "text": piece.text, "logprobs": logprobs, "finish_reason": None}])

    def end(self, replies: list[Reply]) -> bytes:
        out = b"".join(
            self._chunk([{"index": i, "text": "", "logprobs": None, "finish_reason": reply.finish_reason}])
            for i, reply in enumerate(replies)
        )
        if self._request.extra.get("include_usage"):
            out += self._chunk([], usage=usage(replies))
        return out + b"data: [DONE]\n\n"

    def fail(self, error: ProxyError) -> bytes:
        return b"data: %b\n\n" % _encode({"error": openai_error(error)})
