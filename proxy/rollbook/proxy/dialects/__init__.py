"""Dialects: between a vendor's JSON and `Request`, `Piece`, `Reply`. One file each; none knows HTTP or the engine.

A parameter that a dialect does not know is refused by its name. What it knows and cannot do is refused by its name.
What changes nothing about an answer (metadata, cache hints) is taken and left alone.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import msgspec

from rollbook.proxy.config import Asked, GenerationHyperparameters, settle
from rollbook.proxy.errors import BadRequest, ProxyError
from rollbook.proxy.request import Message, Piece, Reply, Request
from rollbook.proxy.seen import Rest

T = TypeVar("T")

Spell = Callable[[int], bytes]
"""The bytes that a token stands for."""


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """What a dialect may ask of the server while it parses."""

    defaults: GenerationHyperparameters
    headers: Mapping[bytes, bytes]  # names in lower case
    known: Rest | None = None  # what the body begins with, for a dialect that `reads_on`


class Streamer(Protocol):
    """Renders one streamed answer. Every method returns whole SSE events; b"" for nothing."""

    def begin(self, first: Piece) -> bytes:
        """first has the interaction_id and prompt_tokens."""
        ...

    def piece(self, choice: int, piece: Piece) -> bytes: ...

    def end(self, replies: list[Reply]) -> bytes: ...

    def fail(self, error: ProxyError) -> bytes: ...


class Dialect(Protocol):
    """Implementations: chat, completions, responses, messages."""

    name: str
    reads_on: bool  # takes `Context.known`: the request's messages are those of the body, one by one

    def parse(self, body: bytes, context: Context) -> Request:
        """Raises BadRequest, naming the parameter."""
        ...

    def render(self, request: Request, replies: list[Reply]) -> bytes: ...

    def stream(self, request: Request) -> Streamer: ...

    def refuse(self, error: ProxyError) -> tuple[int, bytes]:
        """Status and body of an error, as this vendor's SDKs expect them."""
        ...


# ---------------------------------------------------------------- bodies


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What every API takes, and takes under the same name."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    # The names that vLLM and SGLang have for what a vendor's API may have no word for.
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None


class OpenAIBody(Body, kw_only=True, forbid_unknown_fields=True):
    """What OpenAI's APIs have in common besides."""

    stop: str | list[str] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    user: str | None = None  # it changes nothing about an answer


class TurnBody(OpenAIBody, kw_only=True, forbid_unknown_fields=True):
    """What OpenAI's APIs for agents have in common besides."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    top_logprobs: int | None = None  # refused where it asks for something
    # They change nothing about an answer.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None


def request_of(
    asked: Body,
    context: Context,
    *,
    dialect: str,
    messages: list[Message],
    max_tokens: int | None,
    stop: str | list[str] | None,
    **more: Any,
) -> Request:
    """A request out of what every body has, the run's defaults and caps, and what is the dialect's own."""
    penalised = asked if isinstance(asked, OpenAIBody) else None
    sampling, stops = settle(
        Asked(
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            min_p=asked.min_p,
            max_tokens=max_tokens,
            min_tokens=asked.min_tokens,
            seed=asked.seed,
            stop=None if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=None if asked.stop_token_ids is None else tuple(asked.stop_token_ids),
            frequency_penalty=penalised.frequency_penalty if penalised else None,
            presence_penalty=penalised.presence_penalty if penalised else None,
            repetition_penalty=asked.repetition_penalty,
        ),
        context.defaults,
    )
    return Request(
        dialect=dialect,
        messages=messages,
        model=asked.model or "default",
        sampling=sampling,
        stop=stops,
        is_stream=bool(asked.stream),
        max_total_tokens=context.defaults.max_tokens,
        **more,
    )


_UNKNOWN = re.compile(r"unknown field `(.*?)`")
_PLACE = re.compile(r" - at `\$\.?(.*?)`$")


def decoder(type: type[T]) -> Callable[[bytes], T]:
    """A JSON decoder that raises BadRequest, with the place in the body."""
    decode = msgspec.json.Decoder(type).decode

    def parse(body: bytes) -> T:
        try:
            return decode(body)
        except msgspec.ValidationError as error:
            raise _explain(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadRequest(f"the body is not JSON: {error}") from None
        except RecursionError:
            raise BadRequest("the body is nested too deeply") from None

    return parse


def _explain(text: str) -> BadRequest:
    place = _PLACE.search(text)
    param = place[1] if place else None
    unknown = _UNKNOWN.search(text)
    if unknown:
        name = f"{param}.{unknown[1]}" if param else unknown[1]
        return BadRequest(f"unknown parameter {name!r}; this server does not have it, so leave it out", param=name)
    return BadRequest(f"{text[: place.start()] if place else text}{f' at {param!r}' if param else ''}", param=param)


def refuse_unless(is_fine: bool, name: str, why: str) -> None:
    """Refuse a parameter that this server knows and cannot do."""
    if not is_fine:
        raise BadRequest(f"{name} is not supported: {why}", param=name)


_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "reasoning"})
_TEXT_FIELDS = frozenset({"tool_call_id", "name", "reasoning_content", "reasoning"})
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def check_messages(messages: list[Message], where: str = "messages", *, first: int = 0) -> None:
    """Refuse what no chat template could be given, by place; first: of the first one. Fields that nobody knows are
    fine."""
    if not messages:
        raise BadRequest(f"{where} must hold at least one message", param=where)
    for i, message in enumerate(messages, first):
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise BadRequest(
                f"{where}[{i}].role must be system, developer, user, assistant or tool, got {role!r}",
                param=f"{where}[{i}].role",
            )
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            check_parts(content, f"{where}[{i}].content")
        if message.get("tool_calls"):
            _check_tool_calls(message["tool_calls"], f"{where}[{i}].tool_calls")
        for name in _TEXT_FIELDS & message.keys():
            if not isinstance(message[name], str | None):
                raise BadRequest(f"{where}[{i}].{name} must be text", param=f"{where}[{i}].{name}")
        if message.get("function_call"):
            raise BadRequest(
                f"{where}[{i}].function_call is not supported: use tool_calls", param=f"{where}[{i}].function_call"
            )


def check_parts(content: Any, where: str) -> None:
    """Content that is a list: text parts only."""
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a string or a list of parts, got {type(content).__name__}", param=where)
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            raise BadRequest(
                f"{where}[{j}] of type {kind!r} is not supported: this server takes text, no images, audio or files",
                param=f"{where}[{j}]",
            )
        text = part.get("refusal" if kind == "refusal" else "thinking" if kind == "thinking" else "text", "")
        if text is not None and not isinstance(text, str):
            raise BadRequest(f"{where}[{j}] must have a text that is a string", param=f"{where}[{j}]")


def _check_tool_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, list):
        raise BadRequest(f"{where} must be a list, got {type(calls).__name__}", param=where)
    for j, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not isinstance(function.get("arguments", ""), str | None)
            or not isinstance(call.get("id"), str | None)
        ):
            raise BadRequest(
                f"{where}[{j}] must be {{id, type: 'function', function: {{name, arguments: text}}}}",
                param=f"{where}[{j}]",
            )


def check_tools(tools: list[dict[str, Any]]) -> None:
    """Function tools in chat-completions form."""
    for i, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise BadRequest(
                f"tools[{i}] of type {tool.get('type')!r} is not supported: only 'function'", param=f"tools[{i}].type"
            )
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"tools[{i}].function must have a name", param=f"tools[{i}].function")
        if not isinstance(function.get("parameters"), dict | None):
            raise BadRequest(f"tools[{i}].function.parameters must be a JSON schema", param=f"tools[{i}].function")


def check_tool_choice(choice: Any, tools: list[dict[str, Any]]) -> str | dict[str, Any]:
    """auto, none, required, or one function by name, which must be among the tools."""
    if choice is None:
        return "auto"
    wrong = BadRequest(
        f"tool_choice must be auto, none, required or one function of the tools, got {choice!r}", param="tool_choice"
    )
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise wrong
        if choice == "required" and not tools:
            raise BadRequest("tool_choice is 'required' but there are no tools", param="tool_choice")
        return choice
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or all(tool["function"]["name"] != name for tool in tools):
        raise wrong
    return {"type": "function", "function": {"name": name}}


# ---------------------------------------------------------------- what OpenAI's APIs share


class OpenAIDialect:
    """How OpenAI's APIs spell tokens and refuse."""

    def __init__(self, spell: Spell) -> None:
        self._spell = spell

    def spelt_logprobs(self, ids: list[int], logprobs: list[float]) -> list[dict[str, Any]]:
        """Each token with its text, its bytes and its logprob."""
        content = []
        for token, logprob in zip(ids, logprobs, strict=True):
            spelt = self._spell(token)
            text = spelt.decode("utf-8", "replace")
            content.append({"token": text, "logprob": logprob, "bytes": list(spelt), "top_logprobs": []})
        return content

    def refuse(self, error: ProxyError) -> tuple[int, bytes]:
        return refuse_as_openai(error)


def check_n(n: int | None) -> int:
    """How many choices. Raises BadRequest."""
    if n is not None and not 1 <= n <= 128:
        raise BadRequest(f"n must be between 1 and 128, got {n}", param="n")
    return n or 1


def refuse_logit_bias(bias: dict[str, float] | None) -> None:
    refuse_unless(not bias, "logit_bias", "tokens are drawn as the policy says")


def refuse_as_openai(error: ProxyError) -> tuple[int, bytes]:
    """OpenAI's error body."""
    return error.status, msgspec.json.encode({"error": openai_error(error)})


_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


def openai_error(error: ProxyError) -> dict[str, Any]:
    """OpenAI's error object."""
    other = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "message": error.message,
        "type": _OPENAI_TYPES.get(error.status, other),
        "param": error.param,
        "code": error.code,
    }


def openai_failure(error: ProxyError) -> bytes:
    """The event that ends a stream that failed."""
    return b"data: %b\n\n" % msgspec.json.encode({"error": openai_error(error)})


# ---------------------------------------------------------------- chat templates


_TEMPLATES_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


def template_variables(
    given: dict[str, Any] | None,
    *,
    tool_choice: str | dict[str, Any],
    response_format: dict[str, Any] | None,
    may_call_in_parallel: bool,
    **wishes: Any,
) -> dict[str, Any]:
    """What the chat template is told besides messages and tools: wishes of the API's own (None: not said), then what
    the client gives it by name. A template takes what it knows. Raises BadRequest for names that are not the client's.
    """
    told = {name: wish for name, wish in wishes.items() if wish is not None}
    if response_format is not None:
        told["response_format"] = response_format
    if tool_choice != "auto":
        told["tool_choice"] = tool_choice
    if not may_call_in_parallel:
        told["parallel_tool_calls"] = False
    for name in given or ():
        if name in _TEMPLATES_OWN:
            param = f"chat_template_kwargs.{name}"
            raise BadRequest(f"{param} is made from the request; leave it out", param=param)
    return told | (given or {})


# ---------------------------------------------------------------- streams of named events


def event(kind: str, **fields: Any) -> bytes:
    """A server-sent event that has its name inside as well."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))


def kind_of(piece: Piece) -> tuple[str | None, str]:
    """What a piece adds to, text | reasoning | call:INDEX, and what it says; None where it says nothing."""
    if piece.text:
        return "text", piece.text
    if piece.reasoning:
        return "reasoning", piece.reasoning
    if piece.tool_index is not None:
        return f"call:{piece.tool_index}", piece.tool_arguments
    return None, ""
