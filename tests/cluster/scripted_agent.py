"""An agent and a script whose answers are a function of what was asked and how often: the same under any scheduler."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx

from rollbook.proxy.engine import Generation
from rollbook.proxy.scripted import Script
from rollbook.proxy.tokenizer import Tokenizer


def rows() -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": f"say {i}"}], "answer": str(i)} for i in range(6)]


def script(tokenizer: Tokenizer) -> Script:
    """The k-th answer to a prompt is the digit k mod 3 and one of the prompt's own, then the end of the turn."""
    asked: Counter[bytes] = Counter()

    def answer(generation: Generation) -> Sequence[int]:
        prompt = generation.prompt_ids.tobytes()
        asked[prompt] += 1
        text = f"{asked[prompt] % 3}{int(generation.prompt_ids.sum()) % 10}"
        return tokenizer.encode(text + "<|im_end|>").tolist()

    return answer


class Agent:
    """Two turns in a conversation; the reward is a digit of the first answer."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, **_: Any) -> float:
        messages = list(data["messages"])
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}, timeout=300) as client:
            for _turn in range(2):
                response = await client.post(f"{base_url}/chat/completions", json={"model": "m", "messages": messages})
                response.raise_for_status()
                messages += [response.json()["choices"][0]["message"], {"role": "user", "content": "again"}]
        return int(messages[1]["content"][0]) / 2
