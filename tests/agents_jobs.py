"""What the tests send to worker processes: it must be importable there."""

import asyncio
import os
import signal
import subprocess
import sys
import time


def add(a: float, b: float = 0.0) -> float:
    return a + b


async def add_later(a: float, b: float) -> float:
    await asyncio.sleep(0.001)
    return a + b


def pid(*_: object) -> int:
    return os.getpid()


def hang(seconds: float = 3600.0) -> float:
    time.sleep(seconds)
    return 1.0


def hang_with_child(path: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    with open(path, "w") as file:
        file.write(str(child.pid))
    time.sleep(3600)


def crash(message: str = "no") -> float:
    raise ValueError(message)


def die(*_: object) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def fork(*_: object) -> float:
    os.fork()
    return 1.0


def leave(*_: object) -> float:
    sys.exit(3)


def shout(*_: object) -> float:
    for _ in range(20_000):
        print("x" * 100)
    return 1.0


def nan(*_: object) -> float:
    return float("nan")


def unpicklable() -> object:
    return lambda: 1


def variable(name: str) -> str | None:
    return os.environ.get(name)


def dies_once(path: str) -> float:
    if not os.path.exists(path):
        open(path, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.5


class Environment:
    async def run(self, data, **extra):
        assert os.environ["OPENAI_BASE_URL"] == extra["base_url"]
        assert os.environ["OPENAI_API_KEY"] == os.environ["ANTHROPIC_API_KEY"] == extra["api_key"]
        assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == extra["base_url"]
        return 3.0


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.n = start

    def run(self, data):
        self.n += 1
        return self.n


def hang_for(data):
    time.sleep(data["seconds"])
    return data["seconds"]


def meet(data):
    """Ends when as many as are to meet are here at once."""
    open(os.path.join(data["at"], data["id"]), "w").close()
    while len(os.listdir(data["at"])) < data["n"]:
        time.sleep(0.01)
    return data["n"]


async def later(data):
    await asyncio.sleep(0.001)
    return data["x"]


def crash_agent(data):
    raise ValueError("no")


def unpicklable_agent(data):
    return lambda: 1


def gone(pid: int) -> None:
    """Waits for a process to be no more."""
    for _ in range(60_000):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return
        except FileNotFoundError:
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} is still there")


def ask(data):
    """Reads where to call from its environment, as scripts do."""
    from openai import OpenAI

    with OpenAI() as client:
        reply = client.chat.completions.create(model="m", messages=data["messages"])
    return float(reply.choices[0].message.content == "turn 1")


class Asking:
    """The same agent in every mode."""

    async def run(self, data, base_url, api_key, **extra):
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            reply = await client.chat.completions.create(model="m", messages=data["messages"])
        return float(reply.choices[0].message.content == "turn 1")


ASKING = """
import json, os
from openai import OpenAI
task = json.load(open(os.environ["ROLLBOOK_TASK_FILE"]))
with OpenAI() as client:
    reply = client.chat.completions.create(model="m", messages=task["messages"])
open(os.environ["ROLLBOOK_REWARD_FILE"], "w").write(str(float(reply.choices[0].message.content == "turn 1")))
"""

REWARDING = """
import json, os
from openai import OpenAI
from rollbook.agents.episode import EpisodeClient
task = json.load(open(os.environ["ROLLBOOK_TASK_FILE"]))
with OpenAI() as client:
    client.chat.completions.create(model="m", messages=task["messages"])
EpisodeClient().reward_blocking({"correct": True}, weights={"correct": 2.0})
"""


class Endless:
    """Says that it has begun, in the working folder, and never ends."""

    async def run(self, data, **extra):
        open("begun", "w").close()
        await asyncio.sleep(3600)
