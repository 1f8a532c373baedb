"""OpenAI chat completions: POST /chat/completions."""

import time
from contextlib import suppress
from typing import Any

import msgspec

from rollbook.proxy.errors import BadRequest, ProxyError
from rollbook.proxy.request import Piece, Reply, Request, ToolCall
from rollbook.proxy.seen import Rest

from . import (
    Context,
    OpenAIDialect,
    TurnBody,
    check_messages,
    check_n,
    check_tool_choice,
    check_tools,
    decoder,
    openai_failure,
    refuse_logit_bias,
    refuse_unless,
    request_of,
    template_variables,
)

_encode = msgspec.json.Encoder().encode


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


def extra_of(is_stream: bool | None, options: StreamOptions | None, return_token_ids: bool | None) -> dict[str, Any]:
    """What the rendering of choices needs to know."""
    return {
        "include_usage": bool(is_stream and options and options.include_usage),
        "return_token_ids": bool(return_token_ids),
    }


class Body(TurnBody, kw_only=True, forbid_unknown_fields=True):
    """What the API takes."""

    messages: list[dict[str, Any]]
    n: int | None = None
    max_tokens: int | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None  # refused where it asks for something
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    reasoning_effort: str | None = None
    # They change nothing about an answer.
    verbosity: str | None = None
    # Known, and refused where they ask for something.
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: Any = None


_decode = decoder(Body)


def _read(body: bytes, known: Rest | None) -> Body:
    """The body, its messages checked. Raises BadRequest."""
    if known is not None:
        with suppress(BadRequest):  # said again below, of the whole body
            asked = _decode(known.text)
            check_messages(asked.messages, first=len(known.messages))
            asked.messages = [*known.messages, *asked.messages]
            return asked
    asked = _decode(body)
    check_messages(asked.messages)
    return asked


class Chat(OpenAIDialect):
    """See `dialects.Dialect`."""

    name = "chat"
    reads_on = True

    def parse(self, body: bytes, context: Context) -> Request:
        asked = _read(body, context.known)
        tools = asked.tools or []
        check_tools(tools)
        refuse_unless(asked.modalities in (None, ["text"]), "modalities", "answers are text")
        refuse_unless(not asked.audio, "audio", "answers are text")
        refuse_unless(not asked.prediction, "prediction", "the policy samples every token")
        refuse_unless(asked.web_search_options is None, "web_search_options", "the model answers alone")
        refuse_unless(not asked.functions, "functions", "use tools")
        refuse_unless(not asked.function_call, "function_call", "use tool_choice")
        refuse_logit_bias(asked.logit_bias)
        refuse_unless(not asked.top_logprobs, "top_logprobs", "engines report the logprob of the sampled token only")
        form = asked.response_format
        if form is not None and form.get("type") not in ("text", "json_object", "json_schema"):
            raise BadRequest(
                f"response_format.type must be text, json_object or json_schema, got {form.get('type')!r}",
                param="response_format",
            )
        form = None if form is None or form["type"] == "text" else form
        choice = check_tool_choice(asked.tool_choice, tools)
        return request_of(
            asked,
            context,
            dialect=self.name,
            messages=asked.messages,
            max_tokens=asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens,
            stop=asked.stop,
            tools=tools,
            tool_choice=choice,
            n=check_n(asked.n),
            wants_logprobs=bool(asked.logprobs),
            store=asked.store is not False,
            response_format=form,
            template=template_variables(
                asked.chat_template_kwargs,
                tool_choice=choice,
                response_format=form,
                may_call_in_parallel=asked.parallel_tool_calls is not False,
                reasoning_effort=asked.reasoning_effort,
            ),
            extra=extra_of(asked.stream, asked.stream_options, asked.return_token_ids),
        )

    def render(self, request: Request, replies: list[Reply]) -> bytes:
        first = replies[0]
        answer: dict[str, Any] = {
            "id": first.interaction_id,
            "object": "chat.completion",
            "created": first.created,
            "model": first.model,
            "choices": [self._choice(request, i, reply) for i, reply in enumerate(replies)],
            "usage": usage(replies),
        }
        if request.extra.get("return_token_ids"):
            answer["prompt_token_ids"] = first.prompt_ids
            answer["policy_version"] = first.version
        return _encode(answer)

    def _choice(self, request: Request, index: int, reply: Reply) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
        if reply.reasoning is not None:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = [tool_call(call) for call in reply.tool_calls]
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": finish_reason(reply),
        }
        if request.wants_logprobs:
            choice["logprobs"] = {"content": self.spelt_logprobs(reply.output_ids, reply.logprobs), "refusal": None}
        if request.extra.get("return_token_ids"):
            choice["token_ids"] = reply.output_ids
        if request.n > 1:
            choice["interaction_id"] = reply.interaction_id  # each sample is its own interaction
        return choice

    def stream(self, request: Request) -> "ChatStream":
        return ChatStream(self, request)


def tool_call(call: ToolCall) -> dict[str, Any]:
    """A call in chat-completions form."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def finish_reason(reply: Reply) -> str:
    """stop, length or tool_calls."""
    return "tool_calls" if reply.tool_calls and reply.finish_reason == "stop" else reply.finish_reason


def usage(replies: list[Reply]) -> dict[str, Any]:
    """Tokens of the prompt (once) and of all answers."""
    prompt = replies[0].prompt_tokens
    output = sum(reply.n_output for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


class ChatStream:
    """See `dialects.Streamer`. Chunks are put together from bytes: there may be one per token."""

    def __init__(self, chat: Chat, request: Request) -> None:
        self._chat = chat
        self._request = request
        self._head = b""
        self._tail = b'],"usage":null}\n\n' if request.extra.get("include_usage") else b"]}\n\n"

    def _chunk(self, choice: int, delta: bytes, logprobs: bytes = b"null", end: bytes = b"null") -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._head,
            choice,
            delta,
            logprobs,
            end,
            self._tail,
        )

    def begin(self, first: Piece) -> bytes:
        head = {
            "id": first.interaction_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": self._request.model,
        }
        self._head = b'data: %b,"choices":[' % _encode(head)[:-1]
        return b"".join(
            self._chunk(i, b'{"role":"assistant","content":"","refusal":null}') for i in range(self._request.n)
        )

    def piece(self, choice: int, piece: Piece) -> bytes:
        logprobs = b"null"
        if self._request.wants_logprobs and piece.token_ids:
            logprobs = _encode({"content": self._chat.spelt_logprobs(piece.token_ids, piece.logprobs), "refusal": None})
        if piece.text:
            delta = b'{"content":%b}' % _encode(piece.text)
        elif piece.reasoning:
            delta = b'{"reasoning_content":%b}' % _encode(piece.reasoning)
        elif piece.tool_index is not None:
            call: dict[str, Any] = {"index": piece.tool_index}
            function: dict[str, Any] = {"arguments": piece.tool_arguments}
            if piece.tool_id is not None:
                call |= {"id": piece.tool_id, "type": "function"}
                function["name"] = piece.tool_name
            call["function"] = function
            delta = b'{"tool_calls":[%b]}' % _encode(call)
        elif logprobs != b"null":
            delta = b'{"content":""}'
        else:
            return b""
        return self._chunk(choice, delta, logprobs)

    def end(self, replies: list[Reply]) -> bytes:
        parts = []
        for i, reply in enumerate(replies):
            end = _encode(finish_reason(reply))
            if len(replies) > 1:
                end += b',"interaction_id":%b' % _encode(reply.interaction_id)
            parts.append(self._chunk(i, b"{}", end=end))
        if self._request.extra.get("include_usage"):
            parts.append(b'%b],"usage":%b}\n\n' % (self._head, _encode(usage(replies))))
        parts.append(b"data: [DONE]\n\n")
        return b"".join(parts)

    def fail(self, error: ProxyError) -> bytes:
        return openai_failure(error)
