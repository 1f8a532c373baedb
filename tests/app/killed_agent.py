"""An agent and a script for the scripted engine that test_kill.py trains, kills and trains on.

The agent notes the id of every reply that it got: those are the acknowledged interactions.
"""

import os
import random
from collections.abc import Sequence
from typing import Any

import anyio
import httpx

from rollbook.proxy.engine import Generation
from rollbook.proxy.scripted import Script
from rollbook.proxy.tokenizer import Tokenizer


def rows() -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": f"say {i}"}], "answer": str(i)} for i in range(8)]


def script(tokenizer: Tokenizer) -> Script:
    """Answers with two digits that depend on the request, then the end of the turn."""

    def answer(generation: Generation) -> Sequence[int]:
        digits = random.Random(generation.request_id).choices("0123456789", k=2)
        return tokenizer.encode("".join(digits) + "<|im_end|>").tolist()

    return answer


class Agent:
    """Two turns in a conversation; the reward is a digit of the last answer."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, **_: Any) -> float:
        messages = list(data["messages"])
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}, timeout=300) as client:
            for _turn in range(2):
                with open(os.environ["ACKNOWLEDGED"]) as file:
                    if len(file.readlines()) >= int(os.environ["MOST"]):
                        await anyio.sleep_forever()  # it is to be killed before it is done
                response = await client.post(f"{base_url}/chat/completions", json={"model": "m", "messages": messages})
                response.raise_for_status()
                body = response.json()
                with open(os.environ["ACKNOWLEDGED"], "a") as file:
                    file.write(body["id"] + "\n")
                messages += [body["choices"][0]["message"], {"role": "user", "content": "again"}]
        return int(messages[-2]["content"][0]) / 10
