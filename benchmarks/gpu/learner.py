"""The learner on one GPU: tries against rows against paths, the same loss. Prints a table.

PYTHONPATH=learner:store python benchmarks/gpu/learner.py [--turns 8 32] [--quick] [--compile] [--checkpointing]

A Llama of 0.89 B random parameters (hidden 2048, 16 layers, 16/8 heads, FF 5632, vocabulary 32,000), bf16 with float32
masters, AdamW; policy-gradient loss over the sampled tokens; forward + backward + optimiser step; the median of three
steps after one warm-up.

    turns T   one group of 8 episodes with a shared prompt of 1,024 tokens; each turn samples 300 and reads 200
    wide      16 samples of 300 tokens behind one prompt of 8,192
    flat      32 independent sequences of 2,048 tokens, 1,024 of them sampled: nothing to share

rows: one row per interaction; paths: one row per episode; trie: every token once. Floors beside each figure: FLOPs
(6 N per token and the attention that the mask needs, at --peak), and bytes (16 B of weights and moments per parameter
read and written once, at --bandwidth). Needs torch, transformers and numpy only.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import msgspec  # noqa: F401
except ModuleNotFoundError:  # the settings need two names of it
    shim: Any = types.ModuleType("msgspec")

    class _Struct:
        def __init_subclass__(cls, **_: Any) -> None:
            dataclasses.dataclass(kw_only=True)(cls)

    shim.Struct, shim.field = _Struct, dataclasses.field
    sys.modules["msgspec"] = shim

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollbook.learner.algorithms import find_algorithm
from rollbook.learner.backend.attention import NAME
from rollbook.learner.backend.model import recompute_activations
from rollbook.learner.backend.single import SingleBackend
from rollbook.learner.config import ActorConfig, MicroBatchSpec, OptimizerConfig
from rollbook.learner.learn import learn
from rollbook.learner.rows import Rows
from rollbook.learner.trie import Trie, build, micro_batches

VOCABULARY = 32_000


def rows_from(paths: list[tuple[np.ndarray, np.ndarray]], episodes: list[str]) -> Rows:
    """Rows of one group, rewards at random."""
    rng = np.random.default_rng(1)
    n, n_entries = len(paths), sum(len(output) for _, output in paths)
    rewards = rng.random(n)
    rows = Rows(
        interaction_ids=[f"i{r}" for r in range(n)],
        episode_ids=episodes,
        group_ids=["g"] * n,
        ids=np.concatenate([np.concatenate(path) for path in paths]).astype(np.int32),
        starts=np.concatenate([[0], np.cumsum([len(p) + len(o) for p, o in paths])]),
        n_prompt=np.array([len(p) for p, _ in paths]),
        logprobs=np.full(n_entries, -np.log(VOCABULARY)),
        versions=np.zeros(n_entries, np.int32),
        credits=rewards,
        rewards=rewards,
        is_cut=np.zeros(n, np.bool_),
    )
    return dataclasses.replace(rows, advantages=rng.normal(size=n))


def turns(n_turns: int, *, n_episodes: int = 8, n_prompt: int = 1024, n_sampled: int = 300, n_read: int = 200) -> Rows:
    """Conversations of one group: a row per interaction."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCABULARY, n_prompt)
    paths, episodes = [], []
    for episode in range(n_episodes):
        history = prompt
        for _ in range(n_turns):
            output = rng.integers(0, VOCABULARY, n_sampled)
            paths.append((history, output))
            episodes.append(f"e{episode}")
            history = np.concatenate([history, output, rng.integers(0, VOCABULARY, n_read)])
    return rows_from(paths, episodes)


def flat(n: int, *, n_prompt: int, n_sampled: int, is_shared: bool) -> Rows:
    """Single calls, behind one prompt or each behind its own."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCABULARY, n_prompt)
    paths = [
        (prompt if is_shared else rng.integers(0, VOCABULARY, n_prompt), rng.integers(0, VOCABULARY, n_sampled))
        for _ in range(n)
    ]
    return rows_from(paths, [f"e{i}" for i in range(n)])


def one_by_one(rows: Rows, max_tokens: int) -> Iterator[Trie]:
    """Every interaction a row of its own, sorted by length, cut by padded tokens: nothing is shared."""
    lengths = np.diff(rows.starts) - 1
    part: list[int] = []
    for r in np.argsort(-lengths, kind="stable").tolist():
        if part and lengths[part[0]] * (len(part) + 1) > max_tokens:
            yield apart(rows, np.array(part))
            part = []
        part.append(r)
    yield apart(rows, np.array(part))


def apart(rows: Rows, chosen: np.ndarray) -> Trie:
    """A forest of one chain per row."""
    chains = [build(rows, np.array([r])) for r in chosen]
    sizes = np.cumsum([0] + [c.n_nodes for c in chains])
    predictors = np.cumsum([0] + [len(c.node_P) for c in chains])

    def joined(name: str, shift: np.ndarray | None = None) -> np.ndarray:
        shifts = np.zeros(len(chains), np.int64) if shift is None else shift
        return np.concatenate([getattr(chain, name) + by for chain, by in zip(chains, shifts, strict=False)])

    return Trie(
        row_indices=chosen,
        ids_T=joined("ids_T"),
        depth_T=joined("depth_T"),
        end_T=joined("end_T", sizes),
        node_P=joined("node_P", sizes),
        predictor_E=joined("predictor_E", predictors),
        target_E=joined("target_E"),
        row_E=joined("row_E", np.arange(len(chains))),
        entry_E=joined("entry_E"),
    )


def pairs_seen(tries: list[Trie]) -> int:
    """(query, key) pairs that the masks let through: each node sees its path."""
    return sum(int((trie.depth_T + 1).sum()) for trie in tries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--forms", nargs="*", default=["rows", "paths", "trie", "chosen"])
    parser.add_argument("--works", nargs="*", default=["turns", "wide", "flat"])
    parser.add_argument("--max-tokens", type=int, default=32_768)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--peak", type=float, default=790e12, help="FLOP/s that a good matmul reaches")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes/s")
    parser.add_argument("--compile", action="store_true", help="torch.compile the decoder layers")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--quick", action="store_true", help="a small model and little work: does it run?")
    parser.add_argument("--out", type=Path, help="a JSON-lines file for the table's rows")
    options = parser.parse_args()
    small = options.quick
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256 if small else 2048,
        intermediate_size=704 if small else 5632,
        num_hidden_layers=2 if small else 16,
        num_attention_heads=4 if small else 16,
        num_key_value_heads=2 if small else 8,
        max_position_embeddings=65_536,
        tie_word_embeddings=False,
    )
    shape._attn_implementation = NAME
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = LlamaForCausalLM(shape)
    model.config.use_cache = False
    if options.checkpointing:
        recompute_activations(model)
    if options.compile:
        for layer in model.model.layers:
            layer.compile()
    config = ActorConfig(logprob_gap_stop=1e9, mb_spec=MicroBatchSpec(max_tokens_per_mb=options.max_tokens))
    backend = SingleBackend(config, optimizer=OptimizerConfig(lr=1e-9), model=model)
    n_parameters = sum(p.numel() for p in model.parameters())
    algorithm = find_algorithm("grpo", config)

    works: dict[str, Rows] = {}
    if "turns" in options.works:
        works |= {
            f"turns {t}": turns(t, n_prompt=64, n_sampled=20, n_read=10) if small else turns(t) for t in options.turns
        }
    if "wide" in options.works:
        works["wide"] = flat(16, n_prompt=512 if small else 8192, n_sampled=20 if small else 300, is_shared=True)
    if "flat" in options.works:
        n = 64 if small else 1024
        works["flat"] = flat(4 if small else 32, n_prompt=n, n_sampled=n, is_shared=False)

    print(
        f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, torch {torch.__version__}, "
        f"{n_parameters / 1e9:.2f} B parameters, micro-batches of {options.max_tokens} tokens, "
        f"compile {options.compile}, checkpointing {options.checkpointing}"
    )
    print(
        f"{'work':9s} {'form':7s} {'tokens':>9s} {'trained':>8s} {'s/step':>8s} {'floor s':>8s} {'tok/s':>9s} "
        f"{'trained/s':>9s} {'MFU 6N':>6s} {'GiB':>6s} {'x rows':>6s} {'x tok':>6s} {'loss':>10s} {'gnorm':>8s}"
    )
    from rollbook.learner import learn as module

    for work, rows in works.items():
        base: tuple[float, int] | None = None
        for form in options.forms:
            if form == "rows":
                tries = list(one_by_one(rows, options.max_tokens))
            else:
                tries = list(
                    micro_batches(rows, max_tokens=options.max_tokens, form=None if form == "chosen" else form)
                )
            module.tries_of = lambda *_, tries=tries: tries  # type: ignore[attr-defined]
            seconds, learned = [], None
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            for _ in range(options.steps + 1):
                if device == "cuda":
                    torch.cuda.synchronize()
                began = time.perf_counter()
                learned = learn(rows, actor=backend, algorithm=algorithm, config=config, version=0, seed=0)
                if device == "cuda":
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - began)
            assert learned is not None
            took = statistics.median(seconds[1:])
            tokens = sum(trie.n_nodes for trie in tries)
            trained = len(rows.logprobs)
            attention = 12 * shape.num_hidden_layers * shape.hidden_size * pairs_seen(tries)
            compute = (6 * n_parameters * tokens + attention) * (4 / 3 if options.checkpointing else 1) / options.peak
            moved = 2 * 16 * n_parameters / options.bandwidth
            if base is None:
                base = (took, tokens)
            row = {
                "work": work,
                "form": form,
                "tokens": tokens,
                "trained": trained,
                "seconds": took,
                "floor_s": max(compute, moved),
                "floor_flops_s": compute,
                "floor_bytes_s": moved,
                "mfu": 6 * n_parameters * tokens / took / options.peak,
                "gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0,
                "loss": learned.metrics["loss"],
                "grad_norm": learned.metrics["grad_norm"],
            }
            print(
                f"{work:9s} {form:7s} {tokens:9d} {trained:8d} {took:8.3f} {row['floor_s']:8.3f} {tokens / took:9.0f} "
                f"{trained / took:9.0f} {row['mfu']:6.2f} {row['gib']:6.1f} {base[0] / took:6.2f} "
                f"{base[1] / tokens:6.2f} {row['loss']:10.6f} {row['grad_norm']:8.4f}",
                flush=True,
            )
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
