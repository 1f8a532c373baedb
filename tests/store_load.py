"""A program that appends until it is killed, for fault tests: python store_load.py BOOK WRITER SEED [roll_bytes].

Events are a function of (seed, number), so that whoever finds one can say whether it is whole. Each id is printed
after its append was acknowledged.
"""

import asyncio
import hashlib
import random
import sys

import numpy as np

from rollbook.store import DirectoryLog, Event, InteractionRecorded


def numbered(seed: int, n: int) -> Event:
    rng = np.random.default_rng([seed, n])
    length = int(rng.integers(1, 300))
    return Event(
        event_id=hashlib.sha256(f"{seed} {n}".encode()).digest()[:16],
        recorded_at=n,
        run_id=str(seed),
        episode_id="ep",
        interaction_id=str(n),
        fact=InteractionRecorded(prompt_length=length),
        messages=b'{"request":[],"reply":{"content":"' + b"x" * int(rng.integers(0, 4000)) + b'"}}',
        prompt_ids=rng.integers(0, 2**31 - 1, length, dtype=np.int32),
        output_ids=rng.integers(0, 2**31 - 1, length, dtype=np.int32),
        logprobs=rng.standard_normal(length, dtype=np.float32),
        versions=np.full(length, n, np.int32),
    )


async def main(path: str, writer: str, seed: int, roll_bytes: int) -> None:
    log = DirectoryLog(path, writer, roll_bytes=roll_bytes, live_bytes=roll_bytes)  # small ones seal all the time
    numbers = iter(range(10**9))
    rng = random.Random(seed)

    async def task() -> None:
        while True:
            group = [next(numbers) for _ in range(rng.randint(1, 4))]
            await log.append(*(numbered(seed, n) for n in group))
            print(*group, flush=True)

    await asyncio.gather(*(task() for _ in range(16)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
