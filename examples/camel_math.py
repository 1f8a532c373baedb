"""A CAMEL-AI agent, pointed at the proxy by its base URL. CAMEL's pins need an environment of their own:

pip install 'rollbook[serve,train,agents-camel,math]'
rollbook train examples/tools.yaml workflow=camel_math.MathAgent
"""

import os

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from camel.utils import BaseTokenCounter
from math_verify import parse, verify


class Characters(BaseTokenCounter):
    """Counts without a download: CAMEL's own counter fetches a vocabulary at its first use."""

    def count_tokens_from_messages(self, messages):
        return sum(len(str(message.get("content") or "")) for message in messages) // 3

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids):
        return bytes(token_ids).decode(errors="replace")


def add(a: float, b: float) -> float:
    """Add two numbers.

    Args:
        a (float): The first number.
        b (float): The second number.
    """
    return a + b


def multiply(a: float, b: float) -> float:
    """Multiply two numbers.

    Args:
        a (float): The first number.
        b (float): The second number.
    """
    return a * b


class MathAgent:
    async def run(self, data, base_url=None, api_key=None, **extra_kwargs):
        model = ModelFactory.create(
            model_platform=ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
            model_type="default",
            url=base_url or os.getenv("OPENAI_BASE_URL"),
            api_key=api_key or os.getenv("OPENAI_API_KEY"),
            token_counter=Characters(),
        )
        agent = ChatAgent(
            system_message="Use the tools for every calculation.",
            model=model,
            tools=[FunctionTool(add), FunctionTool(multiply)],
        )
        response = await agent.astep(data["messages"][-1]["content"])
        return float(verify(parse(data["answer"]), parse(response.msg.content)))
