"""Tokens per second of the embedded engine beside transformers' own generate, on the same model, prompts and cores.

    python benchmarks/engine.py [--model smollm2-135m] [--dtype bfloat16] [--threads 2] [--rounds 3]

For each batch size B: B requests of `--prompt` tokens, `--new` tokens each, drawn at temperature 1. `grouped` is a GRPO
step: B requests over B / 16 prompts. transformers' generate gets all prompts at once, padded to nothing (they have the
same length), with its static batch and as many OpenMP threads. Rounds of the contestants take turns; the best round of
each is printed, since a busy machine only ever makes a round slower. tok/cpu-s is per second of CPU time of this
process, which is what other load disturbs least.
"""

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rollbook.app.models import prepare_model
from rollbook.proxy.embedded import EmbeddedEngine
from rollbook.proxy.engine import Generation, Sampling

Round = Callable[[int], Awaitable[None]]


def prompts(n: int, n_different: int, length: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    different = rng.integers(20, 250, (n_different, length)).astype(np.int32)
    return [different[i % n_different] for i in range(n)]


def embedded(engine: EmbeddedEngine, n: int, n_different: int, length: int, new: int) -> Round:
    async def one(name: str, prompt: np.ndarray) -> int:
        asked = Generation(request_id=name, prompt_ids=prompt, sampling=Sampling(max_tokens=new))
        n_ids = 0
        async with aclosing(engine.generate(asked)) as pieces:
            async for piece in pieces:
                n_ids += len(piece.ids)
        return n_ids

    async def round_(seed: int) -> None:
        asked = prompts(n, n_different, length, seed)
        counts = await asyncio.gather(*(one(str(i), prompt) for i, prompt in enumerate(asked)))
        assert counts == [new] * n

    return round_


def static(model: Any, n: int, n_different: int, length: int, new: int, threads: int) -> Round:
    def generate(seed: int) -> None:
        torch.set_num_threads(threads)
        ids = torch.from_numpy(np.stack(prompts(n, n_different, length, seed))).long()
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,  # what logprobs would be taken from
        )
        assert output.sequences.shape == (n, length + new)

    async def round_(seed: int) -> None:
        await asyncio.to_thread(generate, seed)

    return round_


async def measure(rounds: dict[str, Round], n_rounds: int, n_tokens: int) -> None:
    best: dict[str, tuple[float, float]] = {}
    for seed in range(n_rounds):
        for name, round_ in rounds.items():
            wall, cpu = time.perf_counter(), time.process_time()
            await round_(seed)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            old = best.get(name, (0.0, 0.0))
            best[name] = max(old[0], n_tokens / wall), max(old[1], n_tokens / cpu)
    for name, (per_wall, per_cpu) in best.items():
        print(f"  {name:34} {per_wall:8.0f} tok/s {per_cpu:8.0f} tok/cpu-s", flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompt", type=int, default=35)
    parser.add_argument("--new", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 96])
    parser.add_argument("--no-static", action="store_true", help="only the embedded engine")
    args = parser.parse_args()
    folder: Path = prepare_model(args.model)
    print(f"{args.model} {args.dtype}, {args.threads} threads, prompt {args.prompt}, new {args.new}", end=", ")
    print(f"load average at start {os.getloadavg()[0]:.1f}")
    model = None
    if not args.no_static:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype))
    async with EmbeddedEngine(folder, dtype=args.dtype, threads=args.threads) as engine:
        for n in args.batches:
            print(f"B={n}")
            shape = (args.prompt, args.new)
            rounds = {"embedded": embedded(engine, n, n, *shape)}
            if n >= 32:
                rounds["embedded, grouped by 16"] = embedded(engine, n, n // 16, *shape)
            if model is not None:
                rounds["transformers generate, static"] = static(model, n, n, *shape, args.threads)
            await measure(rounds, args.rounds, n * args.new)


if __name__ == "__main__":
    asyncio.run(main())
