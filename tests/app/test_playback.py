"""An episode plays again from the record with the engine off, and says where it does not."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.played import record
from rollbook.app.playback import replay


@pytest.mark.parametrize("workflow", ["openai_agents_math.MathAgent", "langchain_math.MathAgent"])
def test_an_agent_ends_as_it_did_byte_for_byte(workflow: str) -> None:
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("played.py"), workflow],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    played = json.loads(done.stdout)
    assert played["divergence"] is None
    assert played["same"]
    assert played["rewards"] == [1.0, 1.0]
    old, new = played["said"]
    assert len(old) == 3
    assert [call[1:] for call in new] == [call[1:] for call in old]
    assert new[-1][0]["content"] == old[-1][0]["content"]
    assert [len(call[0].get("tool_calls") or []) for call in new] == [1, 1, 0]


class Asks:
    """Asks one question, and then `also`."""

    def __init__(self, also: str) -> None:
        self.also = also

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, **_: Any) -> float:
        messages = list(data["messages"])
        async with httpx.AsyncClient(timeout=60, headers={"Authorization": f"Bearer {api_key}"}) as client:
            for also in (None, self.also):
                messages += [{"role": "user", "content": also}] if also else []
                answer = await client.post(f"{base_url}/chat/completions", json={"model": "m", "messages": messages})
                answer.raise_for_status()
                messages.append(answer.json()["choices"][0]["message"])
        return 1.0


def test_an_agent_that_fails_this_time_is_said_to() -> None:
    class Falls(Asks):
        async def run(self, data: dict[str, Any], **more: Any) -> float:
            await super().run(data, **more)
            raise ValueError("of its own")

    book, name = record(Asks("and then?"))
    played = replay(book, name, Falls("and then?"), tokenizer="bytes")
    assert played.is_same
    assert played.failure is not None
    assert played.failure.startswith("ValueError: of its own (test_playback.py")
    assert replay(book, name, Asks("and then?"), tokenizer="bytes").failure is None
    book, name = record(Falls("and then?"))
    assert replay(book, name, Falls("and then?"), tokenizer="bytes").failure is None, "it failed then, too"


def test_an_agent_that_asks_something_else_is_stopped_with_both_requests() -> None:
    book, name = record(Asks("and then?"))
    assert replay(book, name, Asks("and then?"), tokenizer="bytes").is_same
    played = replay(book, name, Asks("and when?"), tokenizer="bytes")
    assert not played.is_same
    assert played.n_unasked == 1
    assert played.again.row["state"] == "failed"
    assert played.divergence is not None
    assert re.search(r"Asked: .*>>> when\?.*recorded in .*>>> then\?", played.divergence)
    assert played.episode.interactions[1].interaction_id in played.divergence
