"""A pydantic-ai agent with two tools and a checked answer type.

pip install 'rollbook[agents-pydantic-ai]'
rollbook train examples/tools.yaml workflow=pydantic_ai_math.MathAgent
"""

import os

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

agent = Agent(system_prompt="Use the tools for every calculation. End with the number.", retries=2)


@agent.tool_plain
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


@agent.tool_plain
def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


class MathAgent:
    async def run(self, data, base_url=None, api_key=None, **extra_kwargs):
        provider = OpenAIProvider(
            base_url=base_url or os.getenv("OPENAI_BASE_URL"), api_key=api_key or os.getenv("OPENAI_API_KEY")
        )
        result = await agent.run(data["messages"][-1]["content"], model=OpenAIChatModel("default", provider=provider))
        return float(data["answer"] in result.output)
