"""A model as the judge, asked through the same proxy: its calls stand in the book under the role `judge`, untrained."""

import re

import httpx

from .episode import http_client
from .errors import RewardFailed

RUBRIC = (
    "You judge answers. Reply with one whole number from 0 (wrong or useless) to 10 (right and complete), no words."
)


async def model_judge(
    question: str,
    answer: str,
    *,
    base_url: str,
    api_key: str,
    rubric: str = RUBRIC,
    highest: float = 10.0,
    model: str = "default",
    timeout_s: float = 120.0,
) -> float:
    """0 to 1: the number that the model ends its reply with, divided by `highest`. Raises RewardFailed.

    base_url, api_key: the episode's own, or those of any OpenAI-compatible server.
    """
    body = {
        "model": model,
        "store": False,  # answered and recorded, not trained
        "messages": [
            {"role": "system", "content": rubric},
            {"role": "user", "content": f"Question:\n{question}\n\nAnswer:\n{answer}"},
        ],
    }
    headers = {"authorization": f"Bearer {api_key}", "x-rollbook-role": "judge"}
    try:
        async with http_client(base_url, timeout_s) as http:
            reply = await http.post(f"{base_url}/chat/completions", json=body, headers=headers)
            reply.raise_for_status()
        said: str = reply.json()["choices"][0]["message"]["content"] or ""
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        raise RewardFailed(f"the judge gave no answer: {error!r}") from error
    numbers = re.findall(r"-?\d+(?:\.\d+)?", said)
    if not numbers:
        raise RewardFailed(f"the judge said {said[:80]!r}; expected a number from 0 to {highest:g}")
    score = float(numbers[-1]) / highest
    if not 0 <= score <= 1:
        raise RewardFailed(f"the judge said {numbers[-1]}; expected a number from 0 to {highest:g}")
    return score
