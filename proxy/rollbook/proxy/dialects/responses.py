"""OpenAI Responses: POST /responses. Items become chat messages, and a reply becomes items again.

An assistant turn is one message here and up to three kinds of items there: reasoning, then text, then calls. Ids of
items are made from the response's, so that one that comes back says where it is from. `previous_response_id` names the
parent; the capture has what came before it.

`store` is the vendor's retention and changes nothing: what is asked of this server is in the book.
"""

import time
from typing import Any

import msgspec

from rollbook.proxy.errors import BadRequest, ProxyError
from rollbook.proxy.request import Message, Piece, Reply, Request

from . import (
    Context,
    OpenAIDialect,
    TurnBody,
    check_messages,
    check_parts,
    check_tool_choice,
    check_tools,
    decoder,
    event,
    kind_of,
    openai_error,
    refuse_unless,
    request_of,
    template_variables,
)

_encode = msgspec.json.Encoder().encode


class Body(TurnBody, kw_only=True, forbid_unknown_fields=True):
    """What the API takes."""

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    include: list[str] | None = None
    # They change nothing about an answer.
    stream_options: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    # Known, and refused where they ask for something.
    truncation: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: dict[str, Any] | None = None
    context_management: Any = None


_decode = decoder(Body)


class Responses(OpenAIDialect):
    """See `dialects.Dialect`."""

    name = "responses"
    reads_on = False

    def parse(self, body: bytes, context: Context) -> Request:
        asked = _decode(body)
        refuse_unless(not asked.background, "background", "answers are given while the client waits")
        refuse_unless(asked.conversation is None, "conversation", "use previous_response_id, or send the history")
        refuse_unless(asked.prompt is None, "prompt", "this server keeps no prompt templates")
        refuse_unless(not asked.context_management, "context_management", "the history is used as it is sent")
        refuse_unless(asked.truncation in (None, "disabled"), "truncation", "the history is used as it is sent")
        refuse_unless(not asked.top_logprobs, "top_logprobs", "engines report the logprob of the sampled token only")
        messages = read_items(asked.input)
        if asked.instructions:
            messages.insert(0, {"role": "system", "content": asked.instructions})
        check_messages(messages, "input")
        tools = [_read_tool(i, tool) for i, tool in enumerate(asked.tools or [])]
        check_tools(tools)
        choice = asked.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        choice = check_tool_choice(choice, tools)
        form = _read_format(asked.text)
        return request_of(
            asked,
            context,
            dialect=self.name,
            messages=messages,
            max_tokens=asked.max_output_tokens,
            stop=asked.stop,
            tools=tools,
            tool_choice=choice,
            wants_logprobs="message.output_text.logprobs" in (asked.include or ()),
            parent_id=asked.previous_response_id,
            response_format=form,
            template=template_variables(
                asked.chat_template_kwargs,
                tool_choice=choice,
                response_format=form,
                may_call_in_parallel=asked.parallel_tool_calls is not False,
                reasoning_effort=(asked.reasoning or {}).get("effort"),
            ),
            extra={
                "instructions": asked.instructions,
                "previous_response_id": asked.previous_response_id,
                "tools": asked.tools or [],
                "tool_choice": asked.tool_choice or "auto",
                "parallel_tool_calls": asked.parallel_tool_calls is not False,
                "text": asked.text or {"format": {"type": "text"}},
                "reasoning": asked.reasoning or {"effort": None, "summary": None},
                "max_output_tokens": asked.max_output_tokens,
                "metadata": asked.metadata or {},
                "store": asked.store is not False,
                "user": asked.user,
                "truncation": "disabled",
            },
        )

    def render(self, request: Request, replies: list[Reply]) -> bytes:
        return _encode(self.response(request, replies[0]))

    def response(self, request: Request, reply: Reply) -> dict[str, Any]:
        """The whole response object."""
        is_cut = reply.finish_reason == "length"
        return {
            **_shell(request, reply.interaction_id, reply.created),
            "completed_at": int(time.time()),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self.items(request, reply),
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": reply.n_output,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reply.prompt_tokens + reply.n_output,
            },
        }

    def items(self, request: Request, reply: Reply) -> list[dict[str, Any]]:
        """The output items of a reply."""
        tail = reply.interaction_id.removeprefix("resp_")
        items: list[dict[str, Any]] = []
        if reply.reasoning:
            items.append(_reasoning_item(tail, reply.reasoning))
        if reply.content or not reply.tool_calls:
            logprobs = self.spelt_logprobs(reply.output_ids, reply.logprobs) if request.wants_logprobs else []
            items.append(_message_item(tail, reply.content or "", logprobs))
        for i, call in enumerate(reply.tool_calls):
            items.append(_call_item(tail, i, call.id, call.name, call.arguments))
        return items

    def stream(self, request: Request) -> "ResponsesStream":
        return ResponsesStream(self, request)


def read_items(items: str | list[dict[str, Any]] | None) -> list[Message]:
    """Input items as chat messages. Raises BadRequest for kinds that have no such form."""
    if items is None:
        return []
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    turn: Message | None = None  # the assistant turn that is being put together

    def assistant() -> Message:
        nonlocal turn
        if turn is None:
            turn = {"role": "assistant", "content": None}
            messages.append(turn)
        return turn

    for i, item in enumerate(items):
        kind, where = item.get("type", "message"), f"input[{i}]"
        if kind == "message":
            content = _read_content(item.get("content"), f"{where}.content")
            if item.get("role") == "assistant":
                if turn is not None and (turn["content"] is not None or "tool_calls" in turn):
                    turn = None
                assistant()["content"] = content
            else:
                turn = None
                messages.append({"role": item.get("role"), "content": content})
        elif kind == "reasoning":
            if turn is not None:
                turn = None
            text = _reasoning_text(item, where)
            if text:
                assistant()["reasoning_content"] = text
            else:
                assistant()
        elif kind == "function_call":
            if not isinstance(item.get("name"), str) or not isinstance(item.get("arguments"), str):
                raise BadRequest(f"{where} must have a name and arguments as text", param=where)
            call = {
                "id": item.get("call_id") or item.get("id"),
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            }
            assistant().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            turn = None
            content = _read_content(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        else:
            raise BadRequest(
                f"{where} of type {kind!r} is not supported: messages, reasoning and function calls are", param=where
            )
    return messages


def _read_content(content: Any, where: str) -> Any:
    """Text parts as text; several stay several."""
    if content is None or isinstance(content, str):
        return content
    check_parts(content, where)
    texts = [part.get("refusal" if part["type"] == "refusal" else "text") or "" for part in content]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _reasoning_text(item: dict[str, Any], where: str) -> str:
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
        raise BadRequest(f"{where} must have a content of parts with a text", param=where)
    return "".join(part["text"] for part in parts)


def _read_tool(i: int, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise BadRequest(
            f"tools[{i}] of type {tool.get('type')!r} is not supported: only 'function'", param=f"tools[{i}].type"
        )
    if isinstance(tool.get("function"), dict):
        return tool
    known = ("name", "description", "parameters", "strict")
    return {
        "type": "function",
        "function": {name: tool[name] for name in known if tool.get(name) is not None},
    }


def _read_format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    form = (text or {}).get("format")
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind == "json_schema":
        return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}
    raise BadRequest(f"text.format.type must be text, json_object or json_schema, got {kind!r}", param="text.format")


def _shell(request: Request, interaction_id: str | None, created: int) -> dict[str, Any]:
    return {
        "id": interaction_id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": request.model,
        "output": [],
        "usage": None,
        "temperature": request.sampling.temperature,
        "top_p": request.sampling.top_p,
        **request.extra,
    }


def _reasoning_item(tail: str, text: str | None, status: str = "completed") -> dict[str, Any]:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{tail}", "type": "reasoning", "summary": [], "content": content, "status": status}


def _message_item(tail: str, text: str | None, logprobs: list[Any], status: str = "completed") -> dict[str, Any]:
    content = [] if text is None else [_text_part(text, logprobs)]
    return {"id": f"msg_{tail}", "type": "message", "role": "assistant", "content": content, "status": status}


def _text_part(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _call_item(tail: str, i: int, call_id: str, name: str, arguments: str, status: str = "completed") -> dict[str, Any]:
    return {
        "id": f"fc_{tail}_{i}",
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


class ResponsesStream:
    """See `dialects.Streamer`. One item is open at a time; a piece of another kind closes it."""

    def __init__(self, responses: Responses, request: Request) -> None:
        self._responses = responses
        self._request = request
        self._tail = ""
        self._created = int(time.time())
        self._n = 0  # events so far
        self._index = -1  # of the open item
        self._open: str | None = None  # see kind_of
        self._said: list[str] = []  # of the open item
        self._logprobs: list[Any] = []
        self._call: tuple[int, str, str] = (0, "", "")  # index, id, name
        self._delta_head = b""

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._n += 1
        return event(kind, sequence_number=self._n - 1, **fields)

    def begin(self, first: Piece) -> bytes:
        self._tail = (first.interaction_id or "").removeprefix("resp_")
        shell = _shell(self._request, first.interaction_id, self._created)
        return self._event("response.created", response=shell) + self._event("response.in_progress", response=shell)

    def piece(self, choice: int, piece: Piece) -> bytes:
        kind, said = kind_of(piece)
        if kind is None:
            return b""
        out = b""
        if kind != self._open:
            out = self._close() + self._begin(kind, piece)
        if not said:
            return out
        self._said.append(said)
        logprobs: list[Any] = []
        if self._request.wants_logprobs and kind == "text":
            logprobs = self._responses.spelt_logprobs(piece.token_ids, piece.logprobs)
            self._logprobs += logprobs
        out += b'%b%d,"delta":%b%b}\n\n' % (
            self._delta_head,
            self._n,
            _encode(said),
            b',"logprobs":%b' % _encode(logprobs) if kind == "text" else b"",
        )
        self._n += 1
        return out

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": self._index, "content_index": 0}

    @property
    def _item_id(self) -> str:
        if self._open == "text":
            return f"msg_{self._tail}"
        return f"rs_{self._tail}" if self._open == "reasoning" else f"fc_{self._tail}_{self._call[0]}"

    def _begin(self, kind: str, piece: Piece) -> bytes:
        self._open = kind
        self._index += 1
        self._said, self._logprobs = [], []
        if kind == "text":
            item, delta = _message_item(self._tail, None, [], "in_progress"), "response.output_text.delta"
        elif kind == "reasoning":
            item, delta = _reasoning_item(self._tail, None, "in_progress"), "response.reasoning_text.delta"
        else:
            self._call = (piece.tool_index or 0, piece.tool_id or "", piece.tool_name or "")
            item = _call_item(self._tail, *self._call, "", "in_progress")
            delta = "response.function_call_arguments.delta"
        place: dict[str, Any] = {"item_id": self._item_id, "output_index": self._index}
        if not kind.startswith("call"):
            place["content_index"] = 0
        head = _encode({"type": delta, **place})[:-1]
        self._delta_head = b'event: %b\ndata: %b,"sequence_number":' % (delta.encode(), head)
        out = self._event("response.output_item.added", output_index=self._index, item=item)
        if kind == "text":
            out += self._event("response.content_part.added", **self._place(), part=_text_part("", []))
        elif kind == "reasoning":
            part = {"type": "reasoning_text", "text": ""}
            out += self._event("response.content_part.added", **self._place(), part=part)
        return out

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        text = "".join(self._said)
        if self._open == "text":
            item = _message_item(self._tail, text, self._logprobs)
            out = self._event("response.output_text.done", **self._place(), text=text, logprobs=self._logprobs)
            out += self._event("response.content_part.done", **self._place(), part=_text_part(text, self._logprobs))
        elif self._open == "reasoning":
            item = _reasoning_item(self._tail, text)
            part = {"type": "reasoning_text", "text": text}
            out = self._event("response.reasoning_text.done", **self._place(), text=text)
            out += self._event("response.content_part.done", **self._place(), part=part)
        else:
            item = _call_item(self._tail, *self._call, text)
            out = self._event(
                "response.function_call_arguments.done",
                item_id=self._item_id,
                output_index=self._index,
                name=self._call[2],
                arguments=text,
            )
        out += self._event("response.output_item.done", output_index=self._index, item=item)
        self._open = None
        return out

    def end(self, replies: list[Reply]) -> bytes:
        out = b""
        if self._index < 0 and self._open is None:
            out = self._begin("text", Piece())  # an empty answer is a message all the same
        out += self._close()
        response = self._responses.response(self._request, replies[0])
        response["created_at"] = self._created
        kind = "response.incomplete" if response["status"] == "incomplete" else "response.completed"
        return out + self._event(kind, response=response)

    def fail(self, error: ProxyError) -> bytes:
        said = openai_error(error)
        return self._event("error", code=said["code"], message=said["message"], param=said["param"], error=said)
