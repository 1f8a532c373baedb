"""A LangChain (LangGraph) agent with two tools.

pip install 'rollbook[agents-langchain,math]'
rollbook train examples/tools.yaml workflow=langchain_math.MathAgent
"""

import os

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from math_verify import parse, verify


@tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


@tool
def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


class MathAgent:
    async def run(self, data, base_url=None, api_key=None, **extra_kwargs):
        model = ChatOpenAI(
            model="default",
            base_url=base_url or os.getenv("OPENAI_BASE_URL"),
            api_key=api_key or os.getenv("OPENAI_API_KEY"),
        )
        agent = create_agent(model, tools=[add, multiply], system_prompt="Use the tools for every calculation.")
        result = await agent.ainvoke({"messages": data["messages"]}, {"recursion_limit": 20})
        return float(verify(parse(data["answer"]), parse(result["messages"][-1].text)))
