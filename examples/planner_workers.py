"""Several agents in one episode: a planner splits the question, workers solve the parts at the same time, the planner
concludes. Each says who it is in the header `x-rollbook-role`, so that the book can tell them apart:

rollbook train examples/tools.yaml workflow=planner_workers.PlannerAndWorkers
rollbook sql runs/tools/first/book "select role, count(*), avg(value) from interactions
    join rewards using (interaction_id) group by role"

Each call is rewarded for what that agent did: a worker for its own part, the planner for the answer.
"""

import ast
import asyncio
import os
import re

from openai import AsyncOpenAI

PLAN = "Split the question into steps that need one calculation each. Write one step a line, as `- 3 * 4`."
WORK = "Do this one calculation. Reply with the number only."


def number(text: str) -> float | None:
    """The last number of a text."""
    found = re.findall(r"-?\d+(?:\.\d+)?", text)
    return float(found[-1]) if found else None


def value(step: str) -> float | None:
    """What a step such as `3 * 4` comes to; None where it is no such step."""
    try:
        left, right = (n.value for n in ast.walk(ast.parse(step, mode="eval")) if isinstance(n, ast.Constant))
        return {"+": left + right, "-": left - right, "*": left * right}.get(step.split()[1])
    except (SyntaxError, ValueError, TypeError, IndexError):
        return None


class PlannerAndWorkers:
    async def run(self, data, base_url=None, api_key=None, **extra_kwargs):
        client = AsyncOpenAI(
            base_url=base_url or os.getenv("OPENAI_BASE_URL"), api_key=api_key or os.getenv("OPENAI_API_KEY")
        )
        question = data["messages"][-1]["content"]

        async def ask(role, *messages):
            reply = await client.chat.completions.create(
                model="default", messages=list(messages), extra_headers={"x-rollbook-role": role}
            )
            return reply.id, reply.choices[0].message.content or ""

        async with client:
            plan = [{"role": "system", "content": PLAN}, {"role": "user", "content": question}]
            plan_id, text = await ask("planner", *plan)
            steps = [line[2:].strip() for line in text.splitlines() if line.startswith("- ")][:4]
            rewards = {plan_id: float(bool(steps))}

            async def work(step):
                work_id, said = await ask(
                    "worker", {"role": "system", "content": WORK}, {"role": "user", "content": step}
                )
                rewards[work_id] = float(value(step) is not None and number(said) == value(step))
                return f"{step} = {said}"

            results = await asyncio.gather(*map(work, steps))
            final_id, answer = await ask(
                "planner", *plan, {"role": "assistant", "content": text},
                {"role": "user", "content": "\n".join(results) + "\nWhat is the answer? The number only."},
            )  # fmt: skip
            rewards[final_id] = float(number(answer) == float(data["answer"]))
        return rewards
