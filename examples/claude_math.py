"""Anthropic's Claude Agent SDK with calculator tools from an MCP server in this process.

pip install 'rollbook[agents-claude,math]'
rollbook train examples/tools.yaml workflow=claude_math.MathAgent
"""

import os

from claude_agent_sdk import (
    AssistantMessage,
    ClaudeAgentOptions,
    ResultMessage,
    TextBlock,
    create_sdk_mcp_server,
    query,
    tool,
)
from math_verify import parse, verify

NUMBERS = {"a": float, "b": float}


@tool("add", "Add two numbers.", NUMBERS)
async def add(args):
    return {"content": [{"type": "text", "text": str(args["a"] + args["b"])}]}


@tool("multiply", "Multiply two numbers.", NUMBERS)
async def multiply(args):
    return {"content": [{"type": "text", "text": str(args["a"] * args["b"])}]}


class MathAgent:
    async def run(self, data, base_url=None, api_key=None, **extra_kwargs):
        names = ["mcp__calculator__add", "mcp__calculator__multiply"]
        options = ClaudeAgentOptions(
            model="my-policy",  # any name but the aliases of the real models
            system_prompt="Use the tools for every calculation.",
            mcp_servers={"calculator": create_sdk_mcp_server("calculator", tools=[add, multiply])},
            tools=names,
            allowed_tools=names,
            max_turns=8,
            env={
                "ANTHROPIC_BASE_URL": (base_url or os.environ["ANTHROPIC_BASE_URL"]).removesuffix("/v1"),
                "ANTHROPIC_API_KEY": api_key or os.environ["ANTHROPIC_API_KEY"],
                # No title call of its own, and nothing sent elsewhere.
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            },
        )
        said = ""
        async for message in query(prompt=data["messages"][-1]["content"], options=options):
            if isinstance(message, AssistantMessage):
                said = "".join(block.text for block in message.content if isinstance(block, TextBlock)) or said
            elif isinstance(message, ResultMessage) and message.is_error:
                raise RuntimeError(message.result or message.subtype)
        return float(verify(parse(data["answer"]), parse(said)))
