"""How agent SDKs send a turn back, one small case each, and which rules it takes to know it again.

Measured on 564 exchanges of 24 SDK versions; see docs/decisions on the tree. Each case is (reply as given, reply as
it came back); the first turn's request stays as it was.
"""

import copy
from typing import Any

import pytest

from rollbook.store.tree import TreeIndex, differences

Message = dict[str, Any]

ASK: list[Message] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2*3?"}]


def said(text: Any = "six", **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def called(arguments: Any = '{"b": 4,"a":  3.0}', *, text: Any = None, call_id: Any = "call_1", **more: Any) -> Message:
    call = {"id": call_id, "type": "function", "function": {"name": "multiply", "arguments": arguments}}
    if call_id is None:
        del call["id"]
    return {"role": "assistant", "content": text, "tool_calls": [call], **more}


def without(message: Message, *names: str) -> Message:
    return {k: v for k, v in message.items() if k not in names}


TEXT = "I will multiply first. \n"

FORM = {
    "openai: echoed as it is": (said(), said()),
    "openai: every null field echoed": (
        said(),
        said(refusal=None, annotations=None, audio=None, function_call=None, tool_calls=None),
    ),
    "openai: vLLM's extras echoed": (
        said(),
        said(reasoning=None, reasoning_content=None, tool_calls=[], stop_reason=None, token_ids=None),
    ),
    "openai stream helper: parsed fields": (called(), called(parsed=None)),
    "openai stream helper: call index": (
        called(),
        {**called(), "tool_calls": [{**called()["tool_calls"][0], "index": 0}]},
    ),
    "camel, litellm: null content as empty text": (called(), called(text="")),
    "adk, exclude_none: null content absent": (called(), without(called(), "content")),
    "strands, OpenHands: text as a parts list": (said(), said([{"type": "text", "text": "six"}])),
    "anthropic: cache_control on the last block": (
        said(),
        said([{"type": "text", "text": "six", "cache_control": {"type": "ephemeral"}}]),
    ),
    "langchain anthropic: citations dropped": (
        said([{"type": "text", "text": "six", "citations": None}]),
        said("six"),
    ),
    "responses: output_text parts": (said(), said([{"type": "output_text", "text": "six", "annotations": []}])),
    "two text parts for one": (said(), said([{"type": "text", "text": "s"}, {"type": "text", "text": "ix"}])),
    "pydantic-ai: keeps reasoning, drops reasoning_content": (
        said(reasoning="hm", reasoning_content="hm"),
        said(reasoning="hm"),
    ),
    "anthropic: thinking echoed with its signature": (
        said([{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "six"}]),
        said([{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "six"}]),
    ),
    "openai-agents: malformed arguments verbatim": (called('{"b": 4,'), called('{"b": 4,')),
}

LOSSY = {
    "openai, camel, langchain: reasoning_content dropped": (said(reasoning_content="hm"), said(), "reasoning"),
    "vLLM: reasoning dropped": (said(reasoning="hm"), said(), "reasoning"),
    "thinking blocks dropped": (
        said([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "six"}]),
        said([{"type": "text", "text": "six"}]),
        "reasoning",
    ),
    "think tags cut from the text": (said("<think>hm</think>\n\nsix"), said("six"), "reasoning"),
    "think tag that the template opened": (said("hm</think>six"), said("six"), "reasoning"),
    "langchain, camel: arguments spaced anew": (called('{"b":4,"a":3}'), called('{"b": 4, "a": 3}'), "arguments"),
    "pydantic-ai: arguments minified": (called(), called('{"b":4,"a":3.0}'), "arguments"),
    "arguments sorted": (called('{"b":4,"a":3}'), called('{"a":3,"b":4}'), "arguments"),
    "unicode escapes": (called('{"a":"Z\\u00fcrich"}'), called('{"a":"Zürich"}'), "arguments"),
    "anthropic dialect: arguments as an object": (
        called('{"a":[1,{"b":2}]}'),
        called({"a": [1, {"b": 2}]}),
        "arguments",
    ),
    "Claude CLI: 3.0 is 3": (called('{"b":4,"a":3.0}'), called('{"b":4,"a":3}'), "numbers"),
    "Claude CLI: 3.0 is 3, deep down": (called('{"a":[{"b":[2.0]}]}'), called('{"a":[{"b":[2]}]}'), "numbers"),
    "no arguments as an empty object": (called(""), called("{}"), "arguments"),
    "inspect-ai: a leading line break": (said("six"), said("\nsix"), "whitespace"),
    "smolagents: text stripped": (said("six \n"), said("six"), "whitespace"),
    "camel stream: text of a call turn dropped": (called(text=TEXT), called(text=""), "text"),
    "crewai: text of a call turn null": (called(text=TEXT), called(text=None), "text"),
    "pydantic-ai: bad arguments replaced": (called("{bad"), called('{"INVALID_JSON": "{bad"}'), "arguments"),
    "call ids changed": (called(), called(call_id="other"), "call ids"),
    "call ids missing": (called(), called(call_id=None), "call ids"),
}


def link(first: Message, back: Message) -> Any:
    index = TreeIndex()
    index.add("n1", index.resolve(ASK), first)
    history = [copy.deepcopy(m) for m in ASK]
    follow_up = (
        {"role": "tool", "tool_call_id": back["tool_calls"][0].get("id", ""), "content": "12.0"}
        if back.get("tool_calls")
        else {"role": "user", "content": "more"}
    )
    return index.resolve([*history, back, follow_up])


@pytest.mark.parametrize("name", FORM)
def test_a_change_of_form_is_no_change(name: str):
    first, back = FORM[name]
    match = link(first, back)
    assert (match.parent_id, match.edge, match.cause, match.is_lossy) == ("n1", "extends", None, False)


@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_rewrite_is_the_same_turn_and_is_marked(name: str):
    first, back, rule = LOSSY[name]
    match = link(first, back)
    assert (match.parent_id, match.edge) == ("n1", "extends")
    assert match.is_lossy
    assert rule in match.rules
    assert match.resent == back


def test_differences_of_equal_replies_are_none():
    assert differences(called(text=TEXT), called(text=TEXT)) == ()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"role": "system", "content": "be brief"}, {"role": "developer", "content": "be brief"}),
        (
            {"role": "system", "content": "be brief"},
            {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
        ),
        (
            {"role": "system", "content": "x-anthropic-billing-header: cc_version=1;\nbe brief"},
            {"role": "system", "content": "x-anthropic-billing-header: cc_version=2;\nbe brief"},
        ),
        (
            {"role": "system", "content": "be brief\n Today's date is 2026-11-28."},
            {"role": "system", "content": "be brief\n Today’s date is 2026-11-29."},
        ),
    ],
)
def test_a_system_message_sent_in_another_form_stays_one_conversation(first: Message, second: Message):
    index = TreeIndex()
    index.add("n1", index.resolve([first, ASK[1]]), said())
    match = index.resolve([second, ASK[1], said(), {"role": "user", "content": "more"}])
    assert (match.parent_id, match.edge) == ("n1", "extends")


def test_names_tell_speakers_apart_but_not_tools():
    index = TreeIndex()
    index.add("n1", index.resolve([*ASK, {"role": "user", "name": "ann", "content": "hi"}]), said())
    bob = index.resolve([*ASK, {"role": "user", "name": "bob", "content": "hi"}, said(), ASK[1]])
    assert bob.parent_id is None
    index.add("n2", index.resolve(ASK), called())
    result = {"role": "tool", "tool_call_id": "call_1", "content": "12"}
    index.add("n3", index.resolve([*ASK, called(), result]), said())
    assert index.resolve([*ASK, called(), {**result, "name": "multiply"}, said(), ASK[1]]).parent_id == "n3"


def test_camel_puts_the_answer_before_the_call_and_links_to_the_older_node():
    index = TreeIndex()
    result = {"role": "tool", "tool_call_id": "call_1", "content": "12"}
    index.add("n1", index.resolve(ASK), called())
    index.add("n2", index.resolve([*ASK, called(), result]), called('{"a":1}', call_id="call_2"))
    second = called('{"a":1}', call_id="call_2")
    after = {"role": "tool", "tool_call_id": "call_2", "content": "13"}
    index.add("n3", index.resolve([*ASK, called(), result, second, after]), said("13"))
    reordered = [*ASK, called(), result, said("13"), second, after, {"role": "user", "content": "and now?"}]
    match = index.resolve(reordered)
    assert (match.parent_id, match.edge, match.cause) == ("n1", "extends", "history edited")


def test_smolagents_tells_its_calls_as_text_and_begins_anew():
    index = TreeIndex()
    index.add("n1", index.resolve(ASK), called())
    told = said([{"type": "text", "text": "Calling tools: multiply"}])
    match = index.resolve([*ASK, told, {"role": "user", "content": "Observation: 12"}])
    assert (match.parent_id, match.cause) == (None, "history edited")


def test_a_handoff_changes_system_and_tools_and_keeps_the_talk():
    tool = {"type": "function", "function": {"name": "multiply", "parameters": {}}}
    index = TreeIndex()
    index.add("n1", index.resolve(ASK, [tool]), said())
    match = index.resolve(
        [{"role": "system", "content": "another agent"}, ASK[1], said(), {"role": "user", "content": "more"}], []
    )
    assert (match.parent_id, match.edge, match.cause, match.kept) == ("n1", "rerendered", "handoff", 0)


def test_dspy_asks_afresh_each_time():
    index = TreeIndex()
    for step in range(3):
        match = index.resolve([{"role": "system", "content": "fields"}, {"role": "user", "content": f"step {step}"}])
        assert (match.parent_id, match.cause) == (None, None)
        index.add(f"n{step}", match, said(f"thought {step}"))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": 7},
        {"role": "user", "content": [7, None, {"type": "image_url", "image_url": {"url": "data:x"}}]},
        {"role": "user", "content": "\ud800"},
        {"role": "user"},
        {},
        {"role": "assistant", "content": None, "tool_calls": ["x", {}, {"function": None}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '"\\ud800"'}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "1e999"}}]},
        {"role": "assistant", "tool_calls": [{"custom": {"name": "f", "input": "x"}}]},
        {"role": "tool", "content": "x"},
    ],
)
def test_odd_messages_are_messages_too(message: Message):
    index = TreeIndex()
    match = index.resolve([*ASK, message])
    index.add("n1", match, message)
    assert index.resolve([*ASK, message]).repeats_id == "n1"
    assert index.resolve([*ASK, copy.deepcopy(message), {"role": "user", "content": "more"}]).prefix_hash


def test_long_system_prompts_on_one_line_are_quick():
    index = TreeIndex()
    for k in range(50):
        index.resolve([{"role": "system", "content": f"{k} " + "current " * 10_000}, ASK[1]])
