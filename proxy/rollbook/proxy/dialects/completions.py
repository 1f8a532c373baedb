"""OpenAI's legacy completions: POST /completions. A prompt as text or token ids, and no chat template.

The request's one message has the raw prompt as its content: text, or a list of ids.
"""

import time
from typing import Any

import msgspec

from rollbook.proxy.errors import BadRequest, ProxyError
from rollbook.proxy.request import Piece, Reply, Request

from . import (
    Context,
    OpenAIBody,
    OpenAIDialect,
    check_n,
    decoder,
    openai_failure,
    refuse_logit_bias,
    refuse_unless,
    request_of,
)
from .chat import StreamOptions, extra_of, usage

_encode = msgspec.json.Encoder().encode


class Body(OpenAIBody, kw_only=True, forbid_unknown_fields=True):
    """What the API takes."""

    prompt: str | list[Any]
    n: int | None = None
    max_tokens: int | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None  # refused where it asks for something
    return_token_ids: bool | None = None
    logprobs: int | None = None
    # Known, and refused where they ask for something.
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


_decode = decoder(Body)


class Completions(OpenAIDialect):
    """See `dialects.Dialect`."""

    name = "completions"
    reads_on = False

    def parse(self, body: bytes, context: Context) -> Request:
        asked = _decode(body)
        refuse_unless(not asked.echo, "echo", "the client has the prompt")
        refuse_unless(not asked.suffix, "suffix", "answers go on after the prompt")
        refuse_unless(asked.best_of in (None, 1, asked.n), "best_of", "every sample is given; use n")
        refuse_logit_bias(asked.logit_bias)
        refuse_unless((asked.logprobs or 0) <= 1, "logprobs", "engines report the sampled token's only: use 0 or 1")
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
        return request_of(
            asked,
            context,
            dialect=self.name,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=asked.max_tokens,
            stop=asked.stop,
            n=check_n(asked.n),
            wants_logprobs=asked.logprobs is not None,
            extra=extra_of(asked.stream, asked.stream_options, asked.return_token_ids),
        )

    def render(self, request: Request, replies: list[Reply]) -> bytes:
        first = replies[0]
        choices = []
        for i, reply in enumerate(replies):
            choice: dict[str, Any] = {
                "index": i,
                "text": reply.content or "",
                "logprobs": self.logprobs(reply.output_ids, reply.logprobs) if request.wants_logprobs else None,
                **_end(replies, reply),
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


def _end(replies: list[Reply], reply: Reply) -> dict[str, Any]:
    """How a choice ended, and where there are several, the interaction that it is."""
    end: dict[str, Any] = {"finish_reason": reply.finish_reason}
    return end if len(replies) == 1 else {**end, "interaction_id": reply.interaction_id}


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
            self._chunk([{"index": i, "text": "", "logprobs": None, **_end(replies, reply)}])
            for i, reply in enumerate(replies)
        )
        if self._request.extra.get("include_usage"):
            out += self._chunk([], usage=usage(replies))
        return out + b"data: [DONE]\n\n"

    def fail(self, error: ProxyError) -> bytes:
        return openai_failure(error)
