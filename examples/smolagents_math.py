"""A smolagents agent. It is synchronous: each episode gets a thread of its own.

pip install 'rollbook[agents-smolagents]'
rollbook train examples/tools.yaml workflow=smolagents_math.MathAgent
"""

import os

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: float, b: float) -> float:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


@tool
def multiply(a: float, b: float) -> float:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


class MathAgent:
    def run(self, data, base_url=None, api_key=None, **extra_kwargs):
        model = OpenAIModel(
            model_id="default",
            api_base=base_url or os.getenv("OPENAI_BASE_URL"),
            api_key=api_key or os.getenv("OPENAI_API_KEY"),
        )
        agent = ToolCallingAgent(tools=[add, multiply], model=model, max_steps=4, verbosity_level=0)
        answer = agent.run(data["messages"][-1]["content"])
        try:
            return float(abs(float(answer) - float(data["answer"])) < 1e-6)
        except (TypeError, ValueError):
            return 0.0  # it answered, and not with a number
