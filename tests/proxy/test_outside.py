"""Parsers of other libraries behind the parsing seam: transformers' own code, and a stand-in for vLLM's module, which
`make test-vllm` replaces by the real one."""

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from proxy.talk import BASH, Talk, user
from rollbook.proxy.capture import CaptureSettings
from rollbook.proxy.parsing import Scene
from rollbook.proxy.render import Renderer
from rollbook.proxy.tokenizer import TOKENIZERS, Tokenizer

pytestmark = pytest.mark.anyio

TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True},
        "content": {"content": "text"},
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(TOKENIZERS / "bytes", tmp_path / "model")
    config = tmp_path / "model" / "tokenizer_config.json"
    known = json.loads(config.read_text()) if config.exists() else {}
    config.write_text(json.dumps({**known, "response_template": TEMPLATE}))
    return tmp_path / "model"


SAID = '<think>hm</think>I add.<tool_call>{"name": "bash", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize("chunk", [1, 1000])
async def test_transformers_response_template_reads_thoughts_text_and_calls(folder: Path, chunk: int) -> None:
    settings = CaptureSettings(tool_parser="transformers")
    async with Talk(SAID, "plain", folder=folder, settings=settings, chunk_tokens=chunk) as talk:
        items = await talk.items([user("a")], tools=[BASH], is_stream=True)
        reply = items[-1]
        assert (reply.reasoning, reply.content, reply.finish_reason) == ("hm", "I add.", "tool_calls")
        assert [(c.name, json.loads(c.arguments)) for c in reply.tool_calls] == [("bash", {"a": 1})]
        if chunk == 1:
            assert sum(bool(item.text) for item in items[:-1]) > 1, "text streams"
        assert (await talk.ask([user("b")])).content == "plain"
        talk.check_book()


async def test_what_does_not_fit_the_response_template_stays_text(folder: Path) -> None:
    said = "so<tool_call>{not json</tool_call> then"
    async with Talk(said, folder=folder, settings=CaptureSettings(tool_parser="transformers"), chunk_tokens=3) as talk:
        reply = await talk.ask([user("a")], tools=[BASH])
        assert (reply.content, reply.tool_calls) == (said, ())


def test_settings_that_cannot_be_met_say_why(folder: Path, tmp_path: Path) -> None:
    bare = Tokenizer.load("bytes")
    with pytest.raises(ValueError, match="has no response_template"):
        Renderer(bare, tool_parser="transformers")
    with pytest.raises(ValueError, match="cannot import vLLM"):
        Renderer(bare, tool_parser="vllm:hermes")
    with pytest.raises(ValueError, match="reasoning_parser is 'vllm:qwen3'"):
        Renderer(bare, reasoning_parser="vllm:qwen3")
    with pytest.raises(ValueError, match="vllm:NAME, transformers"):
        Renderer(bare, tool_parser="hermse")


class _Tools:
    def __init__(self, tokenizer: Any, tools: Any) -> None:
        assert tokenizer.get_vocab()

    def extract_tool_calls(self, text: str, request: Any) -> Any:
        said, mark, rest = text.partition("[[")
        if "boom" in rest:
            raise IndexError
        calls = [SimpleNamespace(function=SimpleNamespace(name="bash", arguments=rest.removesuffix("]]")))]
        return SimpleNamespace(tools_called=bool(mark), tool_calls=calls, content=said or None)


class _Thoughts:
    start_token = "<think>"

    def __init__(self, tokenizer: Any) -> None: ...

    def extract_reasoning(self, text: str, request: Any) -> tuple[str | None, str | None]:
        thought, mark, said = text.removeprefix("<think>").partition("</think>")
        return (thought, said or None) if mark else (None, text)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(kind: Any, known: str) -> Any:
        def find(name: str) -> Any:
            if name != known:
                raise KeyError(f"{name} not found")
            return kind

        return find

    modules = {
        "vllm": {},
        "vllm.tool_parsers": {"ToolParserManager": SimpleNamespace(get_tool_parser=get(_Tools, "brackets"))},
        "vllm.reasoning": {"ReasoningParserManager": SimpleNamespace(get_reasoning_parser=get(_Thoughts, "thinker"))},
        "vllm.entrypoints": {},
        "vllm.entrypoints.openai": {},
        "vllm.entrypoints.openai.protocol": {"ChatCompletionRequest": SimpleNamespace},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


async def test_vllms_parsers_read_replies(vllm: None) -> None:
    settings = CaptureSettings(tool_parser="vllm:brackets", reasoning_parser="vllm:thinker")
    said = "<think>hm</think>I add (3 < 4).[[{}]]"
    async with Talk(said, "no call", "x [[boom]]", settings=settings, chunk_tokens=2) as talk:
        reply = await talk.ask([user("a")], tools=[BASH])
        assert (reply.reasoning, reply.content) == ("hm", "I add (3 < 4).")
        assert [(c.name, c.arguments) for c in reply.tool_calls] == [("bash", "{}")]
        assert (await talk.ask([user("b")], tools=[BASH])).content == "no call"
        assert (await talk.ask([user("c")], tools=[BASH])).content == "x [[boom]]"
        talk.check_book()
    with pytest.raises(ValueError, match="which this vLLM does not have"):
        Renderer(Tokenizer.load("bytes"), tool_parser="vllm:other")
    renderer = Renderer(Tokenizer.load("bytes"), reasoning_parser="vllm:thinker", tool_parser="none")
    [parser] = renderer.parsers(renderer.tokenizer.encode("<|im_start|>assistant\n<think>\n"), [])
    parser.feed("hm</think>ok")
    assert [type(s).__name__ for s in parser.end()] == ["Reasoning", "Text"]
    assert Scene().prompt() == ""
