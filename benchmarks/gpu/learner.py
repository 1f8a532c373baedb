"""The learner on GPUs: tries against rows against paths, the same loss; memory; two GPUs. Prints a table.

PYTHONPATH=learner:store python3 benchmarks/gpu/learner.py --only turns8 wide [--compile] [--quick] [--out FILE]

A Llama of 0.89 B random parameters (hidden 2048, 16 layers, 16/8 heads, FF 5632, vocabulary 32,000), bf16 with float32
masters, AdamW; policy-gradient loss over the sampled tokens; forward + backward + optimiser step; the median of three
steps after one warm-up.

    kernels   attention kernels for the shapes of `turns8` and `wide`: time, and error against float32
    constant  what a step costs beside its tokens: the head, norm and clip, AdamW, the copy to bf16
    turns8    one group of 8 episodes with a shared prompt of 1,024 tokens; each of 8 turns samples 300 and reads 200
    wide      16 samples of 300 tokens behind one prompt of 8,192
    flat      32 independent sequences of 2,048 tokens, 1,024 of them sampled: nothing to share
    turns32   as turns8, with 32 turns and activations computed again (rows alone take a minute per step)
    ragged    as turns8, every length between half and one and a half of it, others in every step: no shape comes twice
    memory    peak of turns8, wide and flat: this learner, plain padding, TRL's loss, a loss over whole logits;
              equal: this learner with as many tokens at once as TRL's largest micro-batch has
    two       4 groups of turns8, and flat twice: one GPU against two (fsdp:d2)
    profile   the kernels that take longest in a step of `wide` and of `turns8` as tries

rows: one row per interaction; paths: one row per episode; trie: every token once; chosen: what the learner chooses.
Floors beside each figure: FLOPs (6 N per token and the attention that the mask needs, at --peak), and bytes (16 B of
weights and moments per parameter read and written once, at --bandwidth). Needs torch, transformers, numpy, msgspec.
"""

import argparse
import dataclasses
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollbook.learner import learn as learning
from rollbook.learner.algorithms import find_algorithm
from rollbook.learner.backend import head, segments
from rollbook.learner.backend.attention import NAME
from rollbook.learner.backend.loading import recompute_activations
from rollbook.learner.backend.single import SingleBackend
from rollbook.learner.config import ActorConfig, MicroBatchSpec, OptimizerConfig
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


def turns(
    n_turns: int,
    *,
    n_episodes: int = 8,
    n_prompt: int = 1024,
    n_sampled: int = 300,
    n_read: int = 200,
    n_groups: int = 1,
    seed: int | None = None,
) -> Rows:
    """Conversations of groups of episodes with one prompt each: a row per interaction. With a seed lengths differ."""
    rng = np.random.default_rng(seed or 0)
    paths, episodes = [], []

    def length(n: int) -> int:
        return n if seed is None else int(rng.integers(n // 2, n + n // 2))

    for group in range(n_groups):
        prompt = rng.integers(0, VOCABULARY, length(n_prompt))
        for episode in range(n_episodes):
            history = prompt
            for _ in range(length(n_turns)):
                output = rng.integers(0, VOCABULARY, length(n_sampled))
                paths.append((history, output))
                episodes.append(f"{group}.{episode}")
                history = np.concatenate([history, output, rng.integers(0, VOCABULARY, length(n_read))])
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


class Bench:
    """The options, the model's shape, and how a step is timed and told."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        small = options.quick
        self.shape = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256 if small else 2048,
            intermediate_size=704 if small else 5632,
            num_hidden_layers=2 if small else 16,
            num_attention_heads=4 if small else 16,
            num_key_value_heads=2 if small else 8,
            max_position_embeddings=65_536,
            tie_word_embeddings=False,
        )
        self.shape._attn_implementation = NAME
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.n_parameters = 0

    # ---- works

    def turns(self, n: int, *, n_groups: int = 1, seed: int | None = None) -> Rows:
        small = {"n_prompt": 64, "n_sampled": 20, "n_read": 10} if self.options.quick else {}
        return turns(n, n_groups=n_groups, seed=seed, **small)

    def wide(self) -> Rows:
        small = self.options.quick
        return flat(16, n_prompt=512 if small else 8192, n_sampled=20 if small else 300, is_shared=True)

    def flat(self, n: int = 32) -> Rows:
        size = 64 if self.options.quick else 1024
        return flat(n, n_prompt=size, n_sampled=size, is_shared=False)

    # ---- a model

    def backend(self, *, checkpointing: bool = False) -> SingleBackend:
        torch.manual_seed(0)
        with torch.device(self.device):
            model = LlamaForCausalLM(self.shape)
        model.config.use_cache = False
        if checkpointing:
            recompute_activations(model)
        if self.options.compile:
            for layer in model.model.layers:
                layer.compile()
        self.n_parameters = sum(p.numel() for p in model.parameters())
        return SingleBackend(self.config(), optimizer=OptimizerConfig(lr=1e-9), model=model)

    def config(self, **settings: Any) -> ActorConfig:
        spec = MicroBatchSpec(max_tokens_per_mb=self.options.max_tokens)
        return ActorConfig(logprob_gap_stop=1e9, mb_spec=spec, **settings)

    def tries(self, rows: Rows, form: str, backend: Any, max_tokens: int | None = None) -> list[Trie]:
        if form == "rows":
            return list(one_by_one(rows, self.options.max_tokens))
        return list(
            micro_batches(
                rows,
                max_tokens=max_tokens or self.options.max_tokens,
                form=None if form == "chosen" else form,  # type: ignore[arg-type]
                ranks=backend.ranks,
                hidden=backend.hidden,
                least=backend.least_shared,
            )
        )

    # ---- a step

    def sync(self) -> None:
        if self.device.type == "cuda":
            for i in range(torch.cuda.device_count()):
                torch.cuda.synchronize(i)

    def timed(self, step: Callable[[], Any], n: int | None = None, warm: int = 1) -> tuple[float, Any]:
        """Median seconds after `warm` steps, and what the last returned."""
        seconds, result = [], None
        for i in range(warm + (n or self.options.steps)):
            if i == warm and self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self.sync()
            began = time.perf_counter()
            result = step()
            self.sync()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds[warm:]), result

    def learn(self, rows: Rows, tries: list[Trie], backend: Any) -> Any:
        config = self.config()
        learning.tries_of = lambda *_: tries  # type: ignore[assignment]
        algorithm = find_algorithm("grpo", config)
        return learning.learn(rows, actor=backend, algorithm=algorithm, config=config, version=0, seed=0)

    def floors(self, tries: list[Trie], *, again: bool = False) -> tuple[float, float]:
        """Seconds that the arithmetic and the bytes would take."""
        tokens = sum(trie.n_nodes for trie in tries)
        attention = 12 * self.shape.num_hidden_layers * self.shape.hidden_size * pairs_seen(tries)
        flops = (6 * self.n_parameters * tokens + attention) * (4 / 3 if again else 1)
        return flops / self.options.peak, 2 * 16 * self.n_parameters / self.options.bandwidth

    def tell(self, row: dict[str, Any]) -> None:
        if self.options.out:
            with self.options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")

    # ---- pieces

    def work(self, name: str, works: list[Rows], forms: list[str], *, checkpointing: bool = False) -> None:
        """A table row per form. Of several works each step takes the next."""
        backend = self.backend(checkpointing=checkpointing)
        print(
            f"{'work':8s} {'form':7s} {'tokens':>9s} {'trained':>8s} {'s/step':>8s} {'FLOPs s':>8s} {'bytes s':>8s} "
            f"{'tok/s':>9s} {'MFU 6N':>6s} {'GiB':>6s} {'x rows':>6s} {'x tok':>6s} {'loss':>10s} {'gnorm':>8s}"
        )
        base: tuple[float, int] | None = None
        for form in forms:
            turn = cycle([(rows, self.tries(rows, form, backend)) for rows in works])
            n = 1 if form == "rows" and checkpointing else None
            took, learned = self.timed(lambda turn=turn: self.learn(*next(turn), backend), n)
            all_tries = [trie for _, tries in islice(turn, len(works)) for trie in tries]
            tokens = sum(trie.n_nodes for trie in all_tries) // len(works)
            base = base or (took, tokens)
            compute, moved = self.floors(all_tries, again=checkpointing)
            compute /= len(works)
            row = {
                "work": name,
                "form": form,
                "compile": self.options.compile,
                "tokens": tokens,
                "trained": sum(len(rows.logprobs) for rows in works) // len(works),
                "seconds": took,
                "floor_flops_s": compute,
                "floor_bytes_s": moved,
                "mfu": 6 * self.n_parameters * tokens / took / self.options.peak,
                "gib": self.peak(),
                "x_rows": base[0] / took,
                "x_tokens": base[1] / tokens,
                "loss": learned.metrics["loss"],
                "grad_norm": learned.metrics["grad_norm"],
            }
            self.tell(row)
            print(
                f"{name:8s} {form:7s} {tokens:9d} {row['trained']:8d} {took:8.3f} {compute:8.3f} {moved:8.3f} "
                f"{tokens / took:9.0f} {row['mfu']:6.2f} {row['gib']:6.1f} {row['x_rows']:6.2f} {row['x_tokens']:6.2f} "
                f"{row['loss']:10.6f} {row['grad_norm']:8.4f}",
                flush=True,
            )

    def peak(self) -> float:
        return torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0

    def kernels(self) -> None:
        """Each attention kernel on a cut of `turns8` (8 chains of 3,800 behind 1,024) and of `wide`."""
        heads, key_heads = self.shape.num_attention_heads, self.shape.num_key_value_heads
        dim = self.shape.hidden_size // heads
        kind = (heads, key_heads, dim, torch.bfloat16, self.device)
        for kernel in segments.ON_GPU:
            print(f"{kernel.name:24s} error {segments.error_of(kernel, *kind):.4f}", flush=True)
        chosen = segments.fast_kernel(*kind)
        print(f"chosen: {chosen.name if chosen else 'none'}")
        from rollbook.learner.backend.attention import _flex, block_mask

        for name, rows in (("turns8", self.turns(8)), ("wide", self.wide())):
            (trie,) = micro_batches(rows, max_tokens=10**9, form="trie")
            n = trie.n_nodes
            pieces = segments.Segments(segments.plan(trie.depth_T, trie.end_T, self.device), n)
            padded = -(-n // 1024) * 1024
            end = torch.arange(1, padded + 1, device=self.device)
            end[:n] = torch.as_tensor(trie.end_T, device=self.device)
            mask = block_mask(end[None])
            flops = 4 * heads * dim * pairs_seen([trie])

            def made(n_heads: int, length: int) -> torch.Tensor:
                x = torch.randn(1, length, n_heads, dim, device=self.device, dtype=torch.bfloat16)
                return x.transpose(1, 2).requires_grad_()

            def both(attend: Callable[..., torch.Tensor], length: int) -> tuple[float, float]:
                q, k, v = made(heads, length), made(key_heads, length), made(key_heads, length)
                slope = torch.randn_like(q)
                forward, _ = self.timed(lambda: attend(q, k, v), 10, 3)
                # A graph that was compiled gives its buffers away: it cannot be gone through twice.
                whole, _ = self.timed(lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), slope), 10, 3)
                return forward, whole - forward

            found = {}
            if self.device.type == "cuda":  # it has no backward pass on a CPU
                found["flex"] = both(lambda q, k, v, mask=mask: _flex(q, k, v, mask, None, True), padded)
            for kernel in segments.ON_GPU if self.device.type == "cuda" else (segments.PLAIN,):
                if segments.error_of(kernel, *kind) < 0.02:
                    segments._chosen[kind] = kernel
                    found[kernel.name] = both(partial(segments.attend, mask=pieces, scale=None), n)
            segments._chosen[kind] = chosen
            for attend, (forward, backward) in found.items():
                row = {"work": name, "kernel": attend, "forward_s": forward, "backward_s": backward}
                self.tell(row)
                print(
                    f"{name:7s} {attend:24s} forward {1e3 * forward:7.3f} ms ({flops / forward / 1e12:4.0f} TFLOP/s)  "
                    f"backward {1e3 * backward:7.3f} ms ({2.5 * flops / backward / 1e12:4.0f} TFLOP/s)",
                    flush=True,
                )

    def constant(self) -> None:
        """The parts of a step that do not depend on its tokens, and the head of 4,784 and of 19,200 predictors."""
        backend = self.backend()
        for master in backend.masters.values():
            master.grad = torch.randn_like(master)
        assert backend.optimizer is not None
        optimizer, limit = backend.optimizer, 1e9
        parts: dict[str, Callable[[], Any]] = {
            "norm and clip": lambda: backend._clip(limit),
            "AdamW": optimizer.step,
            "copy to bf16": backend._copy_down,
        }
        for name, part in parts.items():
            took, _ = self.timed(part, 5, 2)
            self.tell({"part": name, "seconds": took})
            print(f"{name:16s} {1e3 * took:7.2f} ms", flush=True)
        weight = torch.randn(VOCABULARY, self.shape.hidden_size, device=self.device, dtype=torch.bfloat16) / 50
        weight.requires_grad_()
        for n in (4784, 19200):
            hidden = torch.randn(n, self.shape.hidden_size, device=self.device, dtype=torch.bfloat16).requires_grad_()
            rng = np.random.default_rng(0)
            at, to = np.arange(n), rng.integers(0, VOCABULARY, n)

            def step(hidden: torch.Tensor = hidden, at: np.ndarray = at, to: np.ndarray = to) -> None:
                logprobs, _ = head.logprobs_and_entropies(hidden, weight, None, at, to, head.Distribution())
                torch.autograd.grad(logprobs.sum(), (hidden, weight))

            took, _ = self.timed(step, 5, 2)
            floor = 6 * n * VOCABULARY * self.shape.hidden_size / self.options.peak
            print(f"head of {n:6d}   {1e3 * took:7.2f} ms, its products alone {1e3 * floor:.2f} ms", flush=True)

    def memory(self) -> None:
        """Peak memory and time: the same weights, optimiser and micro-batch budget, other ways to compute the loss."""
        backend = self.backend()
        forms: dict[str, Callable[..., Any]] = {"trl": trl_pass, "logits": logits_pass}
        print(f"{'work':8s} {'form':9s} {'tokens':>9s} {'s/step':>8s} {'GiB':>6s}")
        for work, rows in (("turns8", self.turns(8)), ("wide", self.wide()), ("flat", self.flat())):
            padding = list(whole_episodes(rows, self.options.max_tokens))  # what fits is counted with its padding
            largest = max((trie.depth_T == 0).sum() * (trie.depth_T.max() + 1) for trie in padding)
            for form in ("chosen", "equal", "paths", "rows", "trl", "logits"):
                if form in forms:
                    tries = padding
                elif form == "equal":
                    tries = self.tries(rows, "chosen", backend, int(largest))
                else:
                    tries = self.tries(rows, form, backend)
                try:
                    step = (
                        partial(forms[form], backend, tries)
                        if form in forms
                        else partial(self.learn, rows, tries, backend)
                    )
                    took, _ = self.timed(step)
                except ModuleNotFoundError as error:
                    print(f"{work:8s} {form:9s} not measured: {error}")
                    continue
                except torch.OutOfMemoryError:
                    print(f"{work:8s} {form:9s} out of memory")
                    for master in backend.masters.values():
                        master.grad = None
                    continue
                tokens = sum(trie.n_nodes for trie in tries)
                self.tell({"work": work, "memory": form, "gib": self.peak(), "seconds": took})
                print(f"{work:8s} {form:9s} {tokens:9d} {took:8.3f} {self.peak():6.1f}", flush=True)

    def two(self) -> None:
        """One GPU against two ranks, the same batch."""
        from rollbook.learner.backend.sharded import ShardedBackend
        from rollbook.learner.backend.team import Team

        works = {"turns8 x4": self.turns(8, n_groups=4), "flat x2": self.flat(64)}
        one: dict[str, tuple[float, Any]] = {}
        backend: Any = self.backend()
        for name, rows in works.items():
            one[name] = self.timed(partial(self.learn, rows, self.tries(rows, "chosen", backend), backend))
            print(f"{name:10s} one GPU   {one[name][0]:7.3f} s  {self.peak():5.1f} GiB", flush=True)
        del backend
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        with tempfile.TemporaryDirectory() as path:
            self.shape.architectures = ["LlamaForCausalLM"]
            self.shape.save_pretrained(path)
            config = self.config(
                path=path,
                init_from_scratch=True,
                compile=self.options.compile,
                device=self.device.type,
                gather_once=not self.options.gather_often,
            )
            began = time.perf_counter()
            team = Team.start(2, device=self.device.type, log_folder=Path(path))
            try:
                many = ShardedBackend(team, config, optimizer=OptimizerConfig(lr=1e-9))
                print(f"two ranks are there after {time.perf_counter() - began:.1f} s", flush=True)
                for name, rows in works.items():
                    tries = self.tries(rows, "chosen", many)
                    took, learned = self.timed(partial(self.learn, rows, tries, many))
                    row = {"work": name, "one_s": one[name][0], "two_s": took, "x": one[name][0] / took}
                    self.tell(row)
                    print(
                        f"{name:10s} two GPUs  {took:7.3f} s  {self.peak():5.1f} GiB  {row['x']:5.2f} x one; "
                        f"{len(tries)} micro-batches of {sum(t.n_nodes for t in tries)} tokens; "
                        f"gnorm {learned.metrics['grad_norm']:.4f}",
                        flush=True,
                    )
            finally:
                team.close()

    def profile(self) -> None:
        """Where the time of a step goes."""
        backend = self.backend()
        for name, rows in (("wide", self.wide()), ("turns8", self.turns(8))):
            tries = self.tries(rows, "trie", backend)
            self.timed(partial(self.learn, rows, tries, backend), 1, 1)
            with torch.profiler.profile() as profiler:
                self.learn(rows, tries, backend)
                self.sync()
            key = "self_device_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
            print(name)
            print(profiler.key_averages().table(sort_by=key, row_limit=22, max_name_column_width=70))

    def run(self, piece: str) -> None:
        forms = self.options.forms
        if piece == "turns8":
            self.work("turns8", [self.turns(8)], forms or ["rows", "paths", "trie"])
        elif piece == "wide":
            self.work("wide", [self.wide()], forms or ["rows", "trie"])
        elif piece == "flat":
            self.work("flat", [self.flat()], forms or ["rows", "chosen"])
        elif piece == "turns32":
            self.work("turns32", [self.turns(32)], forms or ["rows", "trie", "chosen"], checkpointing=True)
        elif piece == "ragged":
            works = [self.turns(8, seed=seed) for seed in range(1, self.options.steps + 2)]
            self.work("ragged", works, forms or ["rows", "paths", "trie"])
        else:
            getattr(self, piece)()


def whole_episodes(rows: Rows, max_tokens: int) -> Iterator[Trie]:
    """Each episode's longest path as one padded row, its sampled tokens the entries; as many rows as fit."""
    lengths = np.diff(rows.starts)
    last: dict[str, int] = {}
    for r in range(len(rows)):
        if rows.episode_ids[r] not in last or lengths[r] > lengths[last[rows.episode_ids[r]]]:
            last[rows.episode_ids[r]] = r
    members: dict[str, list[int]] = {}
    for r, episode in enumerate(rows.episode_ids):
        members.setdefault(episode, []).append(r)
    order = sorted(last, key=lambda episode: -lengths[last[episode]])
    part: list[str] = []
    for episode in order:
        if part and lengths[last[part[0]]] * (len(part) + 1) > max_tokens:
            yield build(rows, np.concatenate([members[e] for e in part]), form="paths")
            part = []
        part.append(episode)
    yield build(rows, np.concatenate([members[e] for e in part]), form="paths")


def padded(backend: Any, trie: Trie) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids [B, L] with one row per tree, and labels that are -100 wherever no token was sampled."""
    roots = np.flatnonzero(trie.depth_T == 0)
    sizes = np.diff(np.append(roots, trie.n_nodes))
    ids = np.zeros((len(roots), int(sizes.max()) + 1), np.int64)
    labels = np.full(ids.shape, -100, np.int64)
    nodes = trie.node_P[trie.predictor_E]
    tree = np.searchsorted(roots, nodes, side="right") - 1
    for b, (root, size) in enumerate(zip(roots, sizes, strict=True)):
        ids[b, :size] = trie.ids_T[root : root + size]
    ids[tree, nodes - roots[tree] + 1] = trie.target_E
    labels[tree, nodes - roots[tree] + 1] = trie.target_E
    return torch.as_tensor(ids, device=backend.device), torch.as_tensor(labels, device=backend.device)


def surrogate(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """GRPO's clipped ratio with an advantage of 1."""
    ratio = (logprobs - logprobs.detach()).exp()
    return -(torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * mask).sum() / mask.sum()


def trl_pass(backend: Any, tries: list[Trie]) -> None:
    """One step with the forward pass of TRL's GRPOTrainer: its own fused head over padded rows."""
    from trl.trainer.utils import add_fused_lm_head

    model = backend.model.model
    if not hasattr(model, "_is_patched"):
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        model._is_patched = True
    backend.model.train()
    for trie in tries:
        ids, labels = padded(backend, trie)
        found = model(input_ids=ids, labels=labels, fused_lm_head=True)
        logprobs = found.log_probs
        mask = (labels[:, -logprobs.shape[1] :] != -100).to(logprobs.dtype)
        surrogate(logprobs, mask).backward()
    backend.step()


def logits_pass(backend: Any, tries: list[Trie]) -> None:
    """One step with whole logits: log_softmax over [B, K, V], as trainers without a fused head do."""
    backend.model.train()
    for trie in tries:
        ids, labels = padded(backend, trie)
        first = int((labels != -100).any(0).nonzero()[0])
        logits = backend.model.model(input_ids=ids, logits_to_keep=ids.shape[1] - first + 1).logits[:, :-1]
        kept = labels[:, first:]
        mask = (kept != -100).to(logits.dtype)
        logprobs = logits.log_softmax(-1).gather(-1, kept.clamp(min=0)[..., None])[..., 0]
        surrogate(logprobs, mask).backward()
    backend.step()


PIECES = ("kernels", "constant", "turns8", "wide", "flat", "turns32", "ragged", "memory", "two", "profile")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=["kernels", "constant", "turns8", "wide", "flat"], choices=PIECES)
    parser.add_argument("--forms", nargs="*", help="rows, paths, trie, chosen; by default what a piece is about")
    parser.add_argument("--max-tokens", type=int, default=32_768)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--peak", type=float, default=790e12, help="FLOP/s that a good matmul reaches")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes/s")
    parser.add_argument(
        "--kernel", choices=["cudnn", "ragged", "flash"], help="of trees, instead of the learner's choice"
    )
    parser.add_argument("--gather-often", action="store_true", help="two: weights and gradients per micro-batch")
    parser.add_argument("--compile", action="store_true", help="torch.compile the decoder layers")
    parser.add_argument("--quick", action="store_true", help="a small model and little work: does it run?")
    parser.add_argument("--out", type=Path, help="a JSON-lines file for the table's rows")
    options = parser.parse_args()
    if options.kernel:
        kernels = {"cudnn": segments.CUDNN, "ragged": segments.RAGGED, "flash": segments.FLASH}
        segments.ON_GPU = (kernels[options.kernel],)
    bench = Bench(options)
    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, micro-batches of {options.max_tokens} tokens, compile {options.compile}")
    for piece in options.only:
        began = time.perf_counter()
        print(f"\n== {piece}", flush=True)
        bench.run(piece)
        gc.collect()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"({piece} took {time.perf_counter() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
