"""One GRPO step on a CPU: trie against one row per sample, forward + backward + optimiser.

python benchmarks/learner_step.py MODEL_FOLDER [--threads 2] [--dtype bfloat16]

The work is the demo's: 6 prompts of 30-60 tokens, 16 samples of 8 tokens each. Prints seconds (wall and CPU) of one
step after a warm-up, nodes computed, and the largest difference between the two forms' logprobs.
"""

import argparse
import os
import time
from dataclasses import replace

import numpy as np
import torch

from rollbook.learner.algorithms import find_algorithm
from rollbook.learner.backend.single import SingleBackend
from rollbook.learner.config import ActorConfig, OptimizerConfig
from rollbook.learner.learn import learn
from rollbook.learner.rows import Rows
from rollbook.learner.trie import build


def demo_rows(vocabulary: int, *, n_prompts: int, n_samples: int, n_output: int, seed: int = 0) -> Rows:
    """Samples share first tokens as those of one prompt do: each is drawn from eight candidates per place."""
    rng = np.random.default_rng(seed)
    paths, groups = [], []
    for g in range(n_prompts):
        prompt = rng.integers(0, vocabulary, int(rng.integers(30, 61)))
        likely = rng.integers(0, vocabulary, (n_output, 8))
        for _ in range(n_samples):
            output = likely[np.arange(n_output), np.minimum(rng.geometric(0.5, n_output) - 1, 7)]
            paths.append((prompt, output))
            groups.append(f"g{g}")
    n = len(paths)
    rewards = rng.random(n)
    return Rows(
        interaction_ids=[f"i{r}" for r in range(n)],
        episode_ids=[f"e{r}" for r in range(n)],
        group_ids=groups,
        ids=np.concatenate([np.concatenate(path) for path in paths]).astype(np.int32),
        starts=np.concatenate([[0], np.cumsum([len(p) + len(o) for p, o in paths])]),
        n_prompt=np.array([len(p) for p, _ in paths]),
        logprobs=rng.normal(-2.0, 0.1, n * n_output),
        versions=np.zeros(n * n_output, np.int32),
        credits=rewards,
        rewards=rewards,
        is_cut=np.zeros(n, np.bool_),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--outputs", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = ActorConfig(path=options.model, dtype=options.dtype, logprob_gap_stop=1e9)
    backend = SingleBackend(config, optimizer=OptimizerConfig(lr=0.0, weight_decay=0.0))
    algorithm = find_algorithm("grpo", config)
    rows = demo_rows(
        backend.model.vocabulary, n_prompts=options.prompts, n_samples=options.samples, n_output=options.outputs
    )
    rows = replace(rows, advantages=algorithm.advantages(rows))
    learned = {}
    for name in ("trie", "rows"):
        seconds, cpu = [], []
        for _ in range(options.steps + 1):
            wall, used = time.perf_counter(), time.process_time()
            if name == "trie":
                learned[name] = learn(rows, actor=backend, algorithm=algorithm, config=config, version=0, seed=0)
            else:
                learned[name] = learn_row_by_row(backend, algorithm, config, rows)
            seconds.append(time.perf_counter() - wall)
            cpu.append(time.process_time() - used)
        nodes = build(rows).n_nodes if name == "trie" else int(np.diff(rows.starts).sum()) - len(rows)
        print(
            f"{name:5s} {min(seconds[1:]):7.2f} s wall {min(cpu[1:]):7.2f} s CPU  {nodes:6d} nodes  "
            f"grad norm {learned[name].metrics['grad_norm']:.5f}  load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    difference_E = np.abs(learned["rows"].logprobs - learned["trie"].logprobs)
    print(f"logprobs differ by {difference_E.mean():.1e} on average, {difference_E.max():.1e} at most")


def learn_row_by_row(backend, algorithm, config, rows):  # type: ignore[no-untyped-def]
    """The same loss with one padded row per sample and nothing shared."""
    from rollbook.learner import learn as module

    kept = module.tries_of
    # A batch of rows without sharing: each row's first token is its own tree.
    module.tries_of = lambda rows, spec, backend, part=None: [without_sharing(rows)]
    try:
        return learn(rows, actor=backend, algorithm=algorithm, config=config, version=0, seed=0)
    finally:
        module.tries_of = kept


def without_sharing(rows: Rows):  # type: ignore[no-untyped-def]
    from rollbook.learner.trie import Trie

    paths = [rows.path(r)[:-1] for r in range(len(rows))]
    starts = np.concatenate([[0], np.cumsum([len(p) for p in paths])])
    nodes = np.concatenate([np.arange(starts[r] + rows.n_prompt[r] - 1, starts[r + 1]) for r in range(len(rows))])
    return Trie(
        row_indices=np.arange(len(rows)),
        ids_T=np.concatenate(paths),
        depth_T=np.concatenate([np.arange(len(p)) for p in paths]),
        end_T=np.repeat(starts[1:], [len(p) for p in paths]),
        node_P=nodes,
        predictor_E=np.arange(len(nodes)),
        target_E=rows.output_ids,
        row_E=rows.row_E,
        entry_E=np.arange(len(nodes)),
    )


if __name__ == "__main__":
    main()
