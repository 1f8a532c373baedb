"""Anthropic Messages: POST /messages and /messages/count_tokens. Blocks become chat messages, a reply blocks again.

A user turn that holds tool results becomes one tool message per result and a user message for what else it says. The
role "system" may stand inside the list (Claude's command line sends it). Threads are refused in the form that makes
Anthropic's SDK send its history instead.
"""

from typing import Any

import msgspec

from rollbook.proxy.errors import BadRequest, ContextOverflow, ProxyError
from rollbook.proxy.request import Message, Piece, Reply, Request, ToolCall

from . import Body as SharedBody
from . import (
    Context,
    Spell,
    check_messages,
    check_tool_choice,
    check_tools,
    decoder,
    event,
    kind_of,
    refuse_unless,
    request_of,
    template_variables,
)

_encode = msgspec.json.Encoder().encode

INVALID = "INVALID_JSON"
"""Where a call's arguments are no JSON object, its input is {INVALID: their text}; the same comes back as the text."""


class ThreadRefused(BadRequest):
    """The client wants the server to keep its history; it can send it instead."""


class Body(SharedBody, kw_only=True, forbid_unknown_fields=True):
    """What the API takes, of all its versions."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    thread: dict[str, Any] | None = None
    # They change nothing about an answer.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None  # the chat template decides what of the history is shown
    diagnostics: Any = None
    inference_geo: str | None = None
    speed: str | None = None
    betas: list[str] | None = None
    billing_policy: Any = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    # Known, and refused where they ask for something.
    container: Any = None
    mcp_servers: list[Any] | None = None
    compaction: Any = None
    fallbacks: Any = None
    fallback_credit_token: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


_decode = decoder(Body)


class Messages:
    """See `dialects.Dialect`."""

    name = "messages"
    reads_on = False

    def __init__(self, spell: Spell) -> None:
        self._spell = spell

    def parse(self, body: bytes, context: Context) -> Request:
        asked = _decode(body)
        if asked.thread is not None:
            raise ThreadRefused("threads are not kept here: send the whole list of messages", param="thread")
        refuse_unless(asked.container is None, "container", "the model answers alone")
        refuse_unless(not asked.mcp_servers, "mcp_servers", "give its tools as tools")
        refuse_unless(asked.compaction is None, "compaction", "the history is used as it is sent")
        refuse_unless(not asked.fallbacks, "fallbacks", "this server has one model")
        messages = _read_system(asked.system) + read_messages(asked.messages)
        check_messages(messages)
        tools = _read_tools(asked.tools or [], asked.messages)
        check_tools(tools)
        output = asked.output_config or {}
        form = _read_format(output.get("format") or asked.output_format)
        choice = check_tool_choice(_read_tool_choice(asked.tool_choice), tools)
        return request_of(
            asked,
            context,
            dialect=self.name,
            messages=messages,
            max_tokens=asked.max_tokens,
            stop=asked.stop_sequences,
            tools=tools,
            tool_choice=choice,
            response_format=form,
            role=context.headers.get(b"x-claude-code-agent-id", b"").decode("latin-1") or None,
            template=template_variables(
                asked.chat_template_kwargs,
                tool_choice=choice,
                response_format=form,
                may_call_in_parallel=not (asked.tool_choice or {}).get("disable_parallel_tool_use"),
                enable_thinking=None if asked.thinking is None else asked.thinking.get("type") != "disabled",
                reasoning_effort=output.get("effort"),
            ),
        )

    def render(self, request: Request, replies: list[Reply]) -> bytes:
        reply = replies[0]
        content: list[dict[str, Any]] = []
        if reply.reasoning:
            content.append({"type": "thinking", "thinking": reply.reasoning, "signature": _sign(reply)})
        if reply.content:
            content.append({"type": "text", "text": reply.content})
        content += [_tool_use(call) for call in reply.tool_calls]
        reason, sequence = self.stop_reason(request, reply)
        return _encode(
            {
                "id": reply.interaction_id,
                "type": "message",
                "role": "assistant",
                "model": request.model,
                "content": content,
                "stop_reason": reason,
                "stop_sequence": sequence,
                "usage": _usage(reply.prompt_tokens, reply.n_output),
            }
        )

    def stop_reason(self, request: Request, reply: Reply) -> tuple[str, str | None]:
        """Why it stopped, and the stop sequence if it was one."""
        if reply.tool_calls:
            return "tool_use", None
        if reply.finish_reason == "length":
            return "max_tokens", None
        if request.stop:
            text = b"".join(self._spell(token) for token in reply.output_ids).decode("utf-8", "replace")
            for sequence in request.stop:
                if sequence in text:
                    return "stop_sequence", sequence
        return "end_turn", None

    def stream(self, request: Request) -> "MessagesStream":
        return MessagesStream(self, request)

    def refuse(self, error: ProxyError) -> tuple[int, bytes]:
        status = 529 if error.status == 503 and error.retry_after_s is not None else error.status
        return status, _encode(_error(error))


def _error(error: ProxyError) -> dict[str, Any]:
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = f"prompt is too long: {error.message}" if isinstance(error, ContextOverflow) else error.message
    said: dict[str, Any] = {"type": kind, "message": message}
    if isinstance(error, ThreadRefused):
        said["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": said, "request_id": None}


_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def _usage(prompt: int, output: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt,
        "output_tokens": output,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _sign(reply: Reply) -> str:
    # Clients send a thinking block back only if it is signed; ours is checked by what it says.
    return f"rb-{reply.interaction_id}"


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": msgspec.Raw(_input(call.arguments))}


def _input(arguments: str) -> bytes:
    """A call's arguments as a JSON object, whatever the model wrote."""
    text = arguments.encode("utf-8", "replace")
    if not text.strip():
        return b"{}"
    try:
        is_object = isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        is_object = False
    return text if is_object else _encode({INVALID: arguments})


def _arguments(given: Any, where: str) -> str:
    if not isinstance(given, dict):
        raise BadRequest(f"{where}.input must be an object, got {type(given).__name__}", param=f"{where}.input")
    if len(given) == 1 and isinstance(given.get(INVALID), str):
        text: str = given[INVALID]
        return text
    return _encode(given).decode()


def _read_system(system: str | list[dict[str, Any]] | None) -> list[Message]:
    if not system:
        return []
    return [{"role": "system", "content": _read_text(system, "system")}]


def _read_text(content: Any, where: str) -> Any:
    """Text blocks as text; several stay several."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a string or a list of blocks, got {type(content).__name__}", param=where)
    texts: list[str] = []
    for j, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "tool_reference":
            texts.append(str(block.get("tool_name", "")))
        else:
            raise _unsupported(kind, f"{where}[{j}]")
    return _parts(texts)


def _parts(texts: list[str]) -> Any:
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _unsupported(kind: Any, where: str) -> BadRequest:
    return BadRequest(
        f"{where} of type {kind!r} is not supported: this server takes text, tool_use, tool_result and thinking, "
        "no images or documents",
        param=where,
    )


def read_messages(messages: list[dict[str, Any]]) -> list[Message]:
    """Messages of blocks as chat messages. Raises BadRequest for blocks that have no such form."""
    read: list[Message] = []
    for i, message in enumerate(messages):
        role, content, where = message.get("role"), message.get("content"), f"messages[{i}]"
        if role not in ("user", "assistant", "system"):
            raise BadRequest(f"{where}.role must be user, assistant or system, got {role!r}", param=f"{where}.role")
        if content is None or isinstance(content, str):
            read.append({"role": role, "content": content})
        elif not isinstance(content, list):
            raise BadRequest(f"{where}.content must be a string or a list of blocks", param=f"{where}.content")
        elif role == "assistant":
            read.append(_read_assistant(content, f"{where}.content"))
        else:
            read += _read_user(role, content, f"{where}.content")
    return read


def _read_assistant(content: list[Any], where: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for j, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        here = f"{where}[{j}]"
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "redacted_thinking":
            continue  # nobody can read it, the model neither
        elif kind == "tool_use" and isinstance(block.get("name"), str):
            arguments = _arguments(block.get("input", {}), here)
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        else:
            raise _unsupported(kind, here)
    message: Message = {"role": "assistant", "content": _parts(texts) if texts else None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _read_user(role: str, content: list[Any], where: str) -> list[Message]:
    read: list[Message] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            read.append({"role": role, "content": _parts(texts)})
            texts.clear()

    for j, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        here = f"{where}[{j}]"
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "tool_result" and role == "user":
            flush()
            result = {
                "role": "tool",
                "tool_call_id": block.get("tool_use_id"),
                "content": _read_text(block.get("content"), f"{here}.content"),
            }
            read.append(result)
        else:
            raise _unsupported(kind, here)
    flush()
    return read or [{"role": role, "content": ""}]


def _read_tools(tools: list[dict[str, Any]], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Custom tools. One whose loading is deferred is there once a result has referred to it."""
    read: list[dict[str, Any]] = []
    referred: set[str] | None = None
    for i, tool in enumerate(tools):
        if tool.get("type", "custom") not in ("custom", None):
            raise BadRequest(
                f"tools[{i}] of type {tool.get('type')!r} is not supported: only custom tools", param=f"tools[{i}]"
            )
        if tool.get("defer_loading"):
            if referred is None:
                referred = _referred(messages)
            if str(tool.get("name")) not in referred:
                continue
        function = {"name": tool.get("name")}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        if tool.get("input_schema") is not None:
            function["parameters"] = tool["input_schema"]
        read.append({"type": "function", "function": function})
    return read


def _referred(messages: list[dict[str, Any]]) -> set[str]:
    names: set[str] = set()
    for message in messages:
        blocks = message.get("content")
        for block in blocks if isinstance(blocks, list) else ():
            results = block.get("content") if isinstance(block, dict) else None
            for part in results if isinstance(results, list) else ():
                if isinstance(part, dict) and part.get("type") == "tool_reference":
                    names.add(str(part.get("tool_name")))
    return names


def _read_tool_choice(choice: dict[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    known = {"auto": "auto", "any": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in known:
        raise BadRequest(f"tool_choice.type must be auto, any, tool or none, got {kind!r}", param="tool_choice")
    return known[kind]


def _read_format(form: Any) -> dict[str, Any] | None:
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise BadRequest("output_config.format.type must be json_schema", param="output_config.format")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.get("schema", {})}}


class MessagesStream:
    """See `dialects.Streamer`. One block is open at a time. A call's input goes out whole: it must be an object."""

    def __init__(self, messages: Messages, request: Request) -> None:
        self._messages = messages
        self._request = request
        self._id = ""
        self._index = -1
        self._open: str | None = None  # see kind_of
        self._arguments: list[str] = []
        self._delta_head = b""

    def begin(self, first: Piece) -> bytes:
        self._id = first.interaction_id or ""
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(first.prompt_tokens, 0),
        }
        return event("message_start", message=message)

    def piece(self, choice: int, piece: Piece) -> bytes:
        kind, said = kind_of(piece)
        if kind is None:
            return b""
        out = b""
        if kind != self._open:
            out = self._close() + self._begin(kind, piece)
        if kind.startswith("call"):
            self._arguments.append(said)
            return out
        return b"%b%b%b}}\n\n" % (out, self._delta_head, _encode(said))

    def _begin(self, kind: str, piece: Piece) -> bytes:
        self._open = kind
        self._index += 1
        block: dict[str, Any]
        name = b"text"
        if kind == "text":
            block = {"type": "text", "text": ""}
        elif kind == "reasoning":
            name, block = b"thinking", {"type": "thinking", "thinking": "", "signature": ""}
        else:
            self._arguments = []
            block = {"type": "tool_use", "id": piece.tool_id, "name": piece.tool_name, "input": {}}
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d' % self._index
        self._delta_head = b'%b,"delta":{"type":"%b_delta","%b":' % (head, name, name)
        return event("content_block_start", index=self._index, content_block=block)

    def _delta(self, **delta: Any) -> bytes:
        return event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        out = b""
        if self._open == "reasoning":
            out = self._delta(type="signature_delta", signature=f"rb-{self._id}")
        elif self._open.startswith("call"):
            given = _input("".join(self._arguments)).decode()
            out = self._delta(type="input_json_delta", partial_json=given)
        self._open = None
        return out + event("content_block_stop", index=self._index)

    def end(self, replies: list[Reply]) -> bytes:
        reply = replies[0]
        reason, sequence = self._messages.stop_reason(self._request, reply)
        return (
            self._close()
            + event(
                "message_delta",
                delta={"stop_reason": reason, "stop_sequence": sequence},
                usage=_usage(reply.prompt_tokens, reply.n_output),
            )
            + event("message_stop")
        )

    def fail(self, error: ProxyError) -> bytes:
        return b"event: error\ndata: %b\n\n" % _encode(_error(error))
