"""What the scripted engine says to the agents of the tests and examples."""

import json

from proxy_serving import BYTES, said
from rollbook.proxy.engine import Generation


def text_of(generation: Generation) -> str:
    """The prompt as text, special tokens spelled out."""
    return BYTES.decode(generation.prompt_ids.tolist())


def call(name: str, **arguments: object) -> str:
    """A tool call as the model writes it."""
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def calculator(generation: Generation) -> list[int]:
    """3 * 4 + 5 with the tools `multiply` and `add`, then the answer 17."""
    n_results = text_of(generation).count("<|im_start|>tool")
    return said([call("multiply", a=3, b=4), call("add", a=12, b=5), r"The answer is \boxed{17}."][min(n_results, 2)])


def counting(generation: Generation) -> list[int]:
    """Which turn of the conversation this is."""
    return said(f"turn {text_of(generation).count('<|im_start|>assistant')}")


def finishing(generation: Generation) -> list[int]:
    """What smolagents asks for: every turn is a tool call, the last one to final_answer.

    It requires a tool call, so the prompt may end where the model is to go on: inside the call.
    """
    text = text_of(generation)
    n = text.rsplit("New task:", 1)[1].count("Observation:")
    answer = [call("multiply", a=3, b=4), call("add", a=12, b=5), call("final_answer", answer="17")][min(n, 2)]
    begun = text.rsplit("<|im_start|>assistant\n", 1)[1]
    return said(answer.removeprefix(begun))


def planning(generation):
    """A planner's and its workers' side of a conversation."""
    text = text_of(generation)
    if "What is the answer?" in text:
        return said("17")
    if "Split the question" in text:
        return said("- 3 * 4\n- 12 + 5")
    return said("12" if "3 * 4" in text.rsplit("<|im_start|>user", 1)[1] else "18")


def claude_calculator(generation: Generation) -> list[int]:
    """The calculator under the names that Claude's SDK gives tools of an MCP server."""
    n_results = text_of(generation).count("<|im_start|>tool")
    name = "mcp__calculator__"
    calls = [call(f"{name}multiply", a=3, b=4), call(f"{name}add", a=12, b=5), r"The answer is \boxed{17}."]
    return said(calls[min(n_results, 2)])


def claude_titled(generation: Generation) -> list[int]:
    """The same, where the SDK also asks for a title of the session: without tools, and as JSON."""
    has_tools = "mcp__calculator__" in text_of(generation)
    return claude_calculator(generation) if has_tools else said('{"title": "A sum"}')
