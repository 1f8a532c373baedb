"""CPU of one completion inside the capture: parent, prompt, tokenising what is new, reading the reply, the event.

The engine and the log are as cheap as they can be, so what is measured is ours. A turn adds about 72 prompt tokens and
300 sampled ones. Prints microseconds of CPU per completion around turns 8, 32 and 200 of one session, with tools and
without; per completion streamed in 300 pieces; and the memory that open sessions of 8 turns keep.
Run: python benchmarks/capture.py [tokenizer folder]
"""

import asyncio
import gc
import resource
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import numpy as np

from rollbook.proxy.capture import Capture, Episode
from rollbook.proxy.engine import Generation, Health, LogprobsMode, Sampled
from rollbook.proxy.request import Reply, Request
from rollbook.proxy.tokenizer import Tokenizer
from rollbook.store import Event

AT = (8, 32, 200)
QUESTION = "What follows from the step before, and which file should be opened next? "
ANSWER = "The function reads the file, checks its length and gives the lines back in order. "
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{n}",
            "description": "Does one thing well. " * 20,
            "parameters": {"type": "object", "properties": {f"x{i}": {"type": "string"} for i in range(8)}},
        },
    }
    for n in range(12)
]


class CheapEngine:
    """Answers at once with the same tokens, in pieces of a size."""

    logprobs_mode: LogprobsMode = "processed"

    def __init__(self, ids: np.ndarray, size: int = 8) -> None:
        self._pieces = [
            Sampled(ids=part, logprobs=np.full(len(part), -0.5, np.float32), version=0)
            for part in np.split(ids, range(size, len(ids), size))
        ]
        self._last = Sampled(
            ids=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), version=0, finish_reason="stop"
        )

    async def generate(self, generation: Generation) -> AsyncIterator[Sampled]:
        for piece in self._pieces:
            yield piece
        yield self._last

    async def health(self) -> Health:
        return Health(is_ready=True, version=0, model="cheap", max_context=1 << 24)


class NoLog:
    """Takes events and forgets them."""

    writer = "none"

    def __init__(self) -> None:
        self.n = 0

    async def append(self, *events: Event) -> list[int]:
        self.n += len(events)
        return list(range(self.n - len(events), self.n))


async def turn(
    capture: Capture, episode: Episode, told: list[dict[str, Any]], tools: list[Any], is_stream: bool = False
) -> Reply:
    request = Request(dialect="chat", messages=told, tools=tools, body_sha256="00", is_stream=is_stream)
    last: Any = None
    async with aclosing(capture.stream(episode, request)) as items:  # type: ignore[type-var]
        async for item in items:
            last = item
    return last


async def session(capture: Capture, name: str, n_turns: int, tools: list[Any], is_stream: bool = False) -> list[float]:
    """CPU seconds of each turn."""
    episode = capture.open(name)
    told = [{"role": "system", "content": "You read code. " * 60}, {"role": "user", "content": QUESTION * 3}]
    spent = []
    for _ in range(n_turns):
        # A real request is decoded anew each turn: no object is the one of the turn before.
        fresh = [dict(m) for m in told]
        begin = time.process_time()
        reply = await turn(capture, episode, fresh, tools, is_stream)
        spent.append(time.process_time() - begin)
        told += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": QUESTION * 3}]
    KEPT.append(episode)
    return spent


KEPT: list[Episode] = []


async def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else "bytes"
    tokenizer = Tokenizer.load(folder, chat_template="chatml_tools")
    text = tokenizer.encode(ANSWER * 100)[:299]
    ids = np.append(text, tokenizer.eos_ids[0]).astype(np.int32)
    capture = Capture(log=NoLog(), engine=CheapEngine(ids), tokenizer=tokenizer, run_id="r")  # type: ignore[arg-type]
    for name, tools in (("no tools", []), ("12 tools", TOOLS)):
        await session(capture, "warm", 40, tools)
        runs = [await session(capture, f"s{n}", max(AT) + 3, tools) for n in range(3)]
        for at in AT:
            around = sorted(run[t] for run in runs for t in range(at - 3, at + 3))
            median = around[len(around) // 2] * 1e6
            print(f"{name}, {folder}: turn {at:>3}: {median:7.0f} us CPU per completion (median of {len(around)})")
        print(f"{name}, {folder}: session of {max(AT)} turns: {sum(runs[0][: max(AT)]) * 1e3:.0f} ms CPU")
    streaming = Capture(log=NoLog(), engine=CheapEngine(ids, 1), tokenizer=tokenizer, run_id="r")  # type: ignore[arg-type]
    for name, tools in (("no tools", []), ("12 tools", TOOLS)):
        runs = [await session(streaming, f"t{n}", 8, tools, True) for n in range(6)]
        spent = sorted(t for run in runs for t in run[2:])
        print(
            f"{name}, {folder}: streamed in {len(ids)} pieces: {spent[len(spent) // 2] * 1e6:.0f} us CPU per completion"
        )
    KEPT.clear()
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin, n = time.process_time(), 1250
    for i in range(n):
        await session(capture, f"m{i}", 8, [])
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(
        f"{n} open sessions of 8 turns: {used:.0f} MB more, {(time.process_time() - begin) / n / 8 * 1e6:.0f} us each"
    )


if __name__ == "__main__":
    asyncio.run(main())
