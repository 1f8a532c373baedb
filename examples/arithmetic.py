"""The agent that the demo trains: one question, one answer, on the OpenAI SDK. Nothing in it knows of training.

rollbook train examples/arithmetic.yaml

With OPENAI_BASE_URL and OPENAI_API_KEY set, the same class runs against any vendor.
"""

import random
from typing import Any

from math_verify import parse, verify
from openai import AsyncOpenAI


def questions(n: int, *, seed: int) -> list[dict[str, Any]]:
    """n rows of one-digit addition, shuffled by seed: `messages` and `answer`."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    random.Random(seed).shuffle(pairs)
    return [
        {"messages": [{"role": "user", "content": f"{a}+{b}=? Reply with the number only."}], "answer": str(a + b)}
        for a, b in (pairs * (n // len(pairs) + 1))[:n]
    ]


def reward(text: str, *, is_finished: bool, answer: str) -> float:
    """0 to 1: .4 for the right number (math_verify), .2 each for ending, beginning with a digit, being only a number.

    The shaping matters: a model that has never answered in this form gets a slope to climb.
    """
    said = text.strip()
    is_right = verify(parse(answer), parse(said))
    return 0.2 * is_finished + 0.2 * said[:1].isdigit() + 0.2 * said.isdigit() + 0.4 * bool(is_right)


class ArithmeticAgent:
    """`run` is called once per episode; the client's connections are shared by all of them."""

    def __init__(self) -> None:
        self._client = AsyncOpenAI(api_key="set per episode", base_url="http://set.per.episode", max_retries=3)

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, **_: Any) -> float:
        client = self._client.with_options(base_url=base_url, api_key=api_key)
        answer = await client.chat.completions.create(
            model="default", messages=data["messages"], max_completion_tokens=8
        )
        choice = answer.choices[0]
        return reward(choice.message.content or "", is_finished=choice.finish_reason == "stop", answer=data["answer"])


def rows() -> list[dict[str, Any]]:
    """All one hundred, for `train_dataset.path: arithmetic:rows`."""
    return questions(100, seed=1)
