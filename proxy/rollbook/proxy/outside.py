"""Parsers of other libraries behind `parsing.Parser`: vLLM's, and transformers' response templates.

`vllm:NAME` is any tool or reasoning parser that vLLM has, where vLLM is installed beside us. They are asked for whole
replies, as vLLM asks them without streaming: text before the first mark still streams, calls and thoughts come at the
end. `transformers` reads tools and thoughts as the `response_template` in the model's tokenizer_config.json says, and
streams. What one of them does not understand, or fails on, stays text.
"""

import importlib
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from .parsing import Arguments, CallBegun, NewParser, Reasoning, Scene, Segment, Text
from .request import Tool
from .tokenizer import Tokenizer

_MARK = re.compile(r"[<\[{|]")
"""What calls begin with, whatever the family."""


def tool_parser(name: str, tokenizer: Tokenizer) -> NewParser | None:
    """What makes parsers for a setting, None if it is not one of these. Raises ValueError."""
    if name == "transformers":
        return _response_template(tokenizer)
    if not name.startswith("vllm:"):
        return None
    kind = _from_vllm("tool_parser", name, (".tool_parsers", ".entrypoints.openai.tool_parsers"), "ToolParserManager")
    theirs, marks = _their_tokenizer(tokenizer), _marks(tokenizer)
    return _tried(name, lambda scene: VLLMToolParser(kind, theirs, scene.tools, marks))


def reasoning_parser(name: str, tokenizer: Tokenizer) -> NewParser | None:
    """The same for thoughts."""
    if not name.startswith("vllm:"):
        return None
    kind = _from_vllm("reasoning_parser", name, (".reasoning",), "ReasoningParserManager")
    theirs, marks = _their_tokenizer(tokenizer), _marks(tokenizer)
    return _tried(name, lambda scene: VLLMReasoningParser(kind, theirs, scene, marks))


def _tried(name: str, make: NewParser) -> NewParser:
    """A parser that cannot be made for this model is told of at the start, not in the first answer."""
    try:
        make(Scene())
    except Exception as error:  # theirs, of any kind
        raise ValueError(f"{name} cannot read this model: {error}") from error
    return make


def _marks(tokenizer: Tokenizer) -> tuple[str, ...]:
    """All special tokens but the ends: these parsers want to see them."""
    return tuple(mark for mark, i in tokenizer.added.items() if i not in tokenizer.eos_ids)


def _their_tokenizer(tokenizer: Tokenizer) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend)  # type: ignore[no-untyped-call]


def _from_vllm(setting: str, name: str, places: Sequence[str], manager: str) -> Any:
    found = None
    for place in places:
        try:
            found = getattr(importlib.import_module("vllm" + place), manager)
            break
        except ImportError:
            continue
    if found is None:
        raise ValueError(f"{setting} is {name!r}, but this Python cannot import vLLM: install it, or use another")
    get = found.get_tool_parser if setting == "tool_parser" else found.get_reasoning_parser
    try:
        return get(name.removeprefix("vllm:"))
    except KeyError as error:
        raise ValueError(f"{setting} is {name!r}, which this vLLM does not have: {error}") from None


def _their_request(tools: Sequence[Tool]) -> Any:
    """A request as vLLM's parsers want to see one."""
    for place in ("vllm.entrypoints.openai.chat_completion.protocol", "vllm.entrypoints.openai.protocol"):
        try:
            kind = importlib.import_module(place).ChatCompletionRequest
        except ImportError:
            continue
        return kind(model="m", messages=[{"role": "user", "content": "u"}], tools=list(tools) or None)
    raise ValueError("this vLLM has its ChatCompletionRequest in a place that is not known here")


class VLLMToolParser:
    """See `parsing.Parser`."""

    def __init__(self, kind: Any, tokenizer: Any, tools: Sequence[Tool], markers: tuple[str, ...]) -> None:
        self.markers = markers
        self._request = _their_request(tools)
        self._parser = kind(tokenizer, self._request.tools)
        self._said = ""  # text that has been let through
        self._held = ""

    @property
    def wakes_at(self) -> str | None:
        return "<[{|" if not self._held else None

    def feed(self, text: str) -> list[Segment]:
        if not self._held:
            mark = _MARK.search(text)
            at = len(text) if mark is None else mark.start()
            self._said += text[:at]
            self._held = text[at:]
            return [Text(text[:at])] if at else []
        self._held += text
        return []

    def end(self) -> list[Segment]:
        held, self._held = self._held, ""
        if not held:
            return []
        try:
            found = self._parser.extract_tool_calls(self._said + held, self._request)
        except Exception:  # whatever it is, it is theirs, and the text is still there
            return [Text(held)]
        if not found.tools_called or not found.tool_calls:
            return [Text(held)]
        content = found.content or ""
        rest = content[len(self._said) :] if content.startswith(self._said) else ""
        segments: list[Segment] = [Text(rest)] if rest else []
        for call in found.tool_calls:
            segments += [CallBegun(call.function.name), Arguments(call.function.arguments or "{}")]
        return segments


class VLLMReasoningParser:
    """See `parsing.Parser`. The whole reply is read at its end."""

    def __init__(self, kind: Any, tokenizer: Any, scene: Scene, markers: tuple[str, ...]) -> None:
        self.markers = markers
        self._parser = kind(tokenizer)
        self._request = _their_request(scene.tools)
        # A thought that the prompt has begun: their parsers look for its beginning in the reply.
        self._begun = (getattr(self._parser, "start_token", None) or "") if scene.is_thinking else ""
        self._text = ""

    @property
    def wakes_at(self) -> str | None:
        return None

    def feed(self, text: str) -> list[Segment]:
        self._text += text
        return []

    def end(self) -> list[Segment]:
        text, self._text = self._text, ""
        extract = getattr(self._parser, "extract_reasoning", None) or self._parser.extract_reasoning_content
        try:
            reasoning, content = extract(self._begun + text, self._request)
        except Exception:  # as above
            reasoning, content = None, text
        return [*([Reasoning(reasoning)] if reasoning else []), *([Text(content)] if content else [])]


_THOUGHTS = ("thinking", "reasoning", "reasoning_content")


def _response_template(tokenizer: Tokenizer) -> NewParser:
    try:
        from transformers.utils.chat_parsing import ResponseParser
        from transformers.utils.chat_parsing.response_templates import load_response_template
    except ImportError as error:
        raise ValueError(f"tool_parser is 'transformers', which needs transformers 5.20 or later: {error}") from None
    if tokenizer.response_template is None:
        raise ValueError(
            "tool_parser is 'transformers', but the model's tokenizer_config.json has no response_template; use another"
        )
    try:
        template = load_response_template(tokenizer.response_template)
    except ValueError as error:
        raise ValueError(f"the response_template in the model's tokenizer_config.json is no good: {error}") from None
    marks = _marks(tokenizer)
    return lambda scene: ResponseTemplateParser(ResponseParser, template, scene, marks)


class ResponseTemplateParser:
    """See `parsing.Parser`. Reads thoughts, text and calls."""

    def __init__(self, kind: Any, template: Any, scene: Scene, markers: tuple[str, ...]) -> None:
        self.markers = markers
        self._parser = kind(template, prefix=scene.prompt(), tools=list(scene.tools) or None)
        self._raw = ""  # fed, and not given on
        self._is_lost = False  # it has failed: the rest is text

    @property
    def wakes_at(self) -> str | None:
        return "" if self._is_lost else None

    def feed(self, text: str) -> list[Segment]:
        if self._is_lost:
            return [Text(text)] if text else []
        self._raw += text
        return self._read(lambda: self._parser.feed(text))

    def end(self) -> list[Segment]:
        return [] if self._is_lost else self._read(lambda: self._parser.finalize()[1])

    def _read(self, events: Any) -> list[Segment]:
        found: list[Segment] = []
        try:
            for event in events():
                found += self._segments(event)
        except Exception:  # a call that is not what the template says
            self._is_lost = True
            rest, self._raw = self._raw, ""
            if rest:
                found.append(Text(rest))
        return found

    def _segments(self, event: dict[str, Any]) -> list[Segment]:
        name, kind = event["field"], event["type"]
        if name == "tool_calls":
            if kind != "region_close":
                return []
            self._raw = ""
            value = event["value"]
            return [segment for call in (value if isinstance(value, list) else [value]) for segment in _call(call)]
        if kind != "region_chunk":
            return []
        text = event["text"]
        self._raw = self._raw.partition(text)[2]
        return [Reasoning(text) if name in _THOUGHTS else Text(text)]


def _call(call: dict[str, Any]) -> list[Segment]:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return [CallBegun(str(function["name"])), Arguments(arguments)]
