"""CAMEL-AI the direct way of AReaL's scripts: the workflow makes the client, rewards through it, exports what it saw.

pip install 'rollbook[serve,train,agents-camel]'
rollbook train examples/tools.yaml workflow=camel_direct.CamelWorkflow credit.gamma=0.9

In new code prefer camel_math.py: there the agent knows nothing of training.
"""

from camel.agents import ChatAgent
from camel.toolkits import FunctionTool

from rollbook.agents.camel import AReaLOpenAICompatibleModel
from rollbook.agents.direct import ArealOpenAI
from rollbook.agents.rewards import AsyncRewardWrapper
from rollbook.agents.workflow import RolloutWorkflow


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


def math_reward(said: str, answer: str) -> float:
    """1 where the answer is among the words said."""
    return float(answer in said.replace("{", " ").replace("}", " ").replace(".", " ").split())


class CamelWorkflow(RolloutWorkflow):
    def __init__(self):
        self.reward = AsyncRewardWrapper(math_reward)  # in worker processes, with a time limit

    async def arun_episode(self, engine, data):
        async with ArealOpenAI(engine=engine) as client:
            agent = ChatAgent(
                system_message="Use the tools for every calculation.",
                model=AReaLOpenAICompatibleModel(openai_client=client),
                tools=[FunctionTool(add), FunctionTool(multiply)],
            )
            response = await agent.astep(data["messages"][-1]["content"])
            client.set_last_reward(await self.reward(response.msg.content, data["answer"]))
            client.apply_reward_discount(turn_discount=0.9)
            return client.export_interactions(style="individual")
