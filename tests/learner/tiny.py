"""A language model of a few thousand weights, and rows to train it on."""

from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from rollbook.learner.rows import Rows


def tiny_model(
    *, vocabulary: int = 32, seed: int = 0, dtype: torch.dtype = torch.float32, hidden: int = 16
) -> nn.Module:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config)
    if dtype == torch.float64:
        _keep_double(model)
    return model.to(dtype)


def _keep_double(model: nn.Module) -> None:
    """The model's own norm computes in float32 whatever comes; torch's keeps float64."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)


def tiny_folder(folder: Path, **kwargs: int) -> str:
    tiny_model(**kwargs).save_pretrained(folder)  # type: ignore[arg-type, operator]
    return str(folder)


def make_rows(
    paths: list[tuple[list[int], list[int]]],
    *,
    groups: list[str] | None = None,
    episodes: list[str] | None = None,
    rewards: list[float] | None = None,
    seed: int = 0,
) -> Rows:
    """Rows from (prompt, output) pairs; by default each is an episode of one group."""
    rng = np.random.default_rng(seed)
    n = len(paths)
    n_entries = sum(len(output) for _, output in paths)
    return Rows(
        interaction_ids=[f"i{r}" for r in range(n)],
        episode_ids=episodes or [f"e{r}" for r in range(n)],
        group_ids=groups or ["g"] * n,
        ids=np.concatenate([np.array(p + o, np.int32) for p, o in paths]),
        starts=np.concatenate([[0], np.cumsum([len(p) + len(o) for p, o in paths])]),
        n_prompt=np.array([len(p) for p, _ in paths]),
        logprobs=rng.normal(-3.0, 0.3, n_entries),
        versions=np.zeros(n_entries, np.int32),
        credits=np.array(rewards if rewards is not None else rng.normal(size=n)),
        rewards=np.array(rewards if rewards is not None else rng.normal(size=n)),
        is_cut=np.zeros(n, np.bool_),
    )


def random_rows(seed: int, *, n_groups: int = 3, n_samples: int = 4, n_turns: int = 3, vocabulary: int = 32) -> Rows:
    """Groups with shared prompts, conversations with shared histories, forks, repeats and equal samples."""
    rng = np.random.default_rng(seed)

    def tokens(least: int, most: int) -> list[int]:
        return rng.integers(0, vocabulary, int(rng.integers(least, most + 1))).tolist()

    paths, groups, episodes = [], [], []
    for g in range(n_groups):
        prompt = tokens(1, 6)
        for s in range(n_samples):
            history = list(prompt)
            for _ in range(int(rng.integers(1, n_turns + 1))):
                output = tokens(1, 3) if rng.random() < 0.8 else [1]
                paths.append((list(history), output))
                groups.append(f"g{g}")
                episodes.append(f"g{g}e{s}")
                if rng.random() < 0.15:  # a fork: the next turn goes on from the same history
                    continue
                history = history + output + tokens(0, 3)
    order = rng.permutation(len(paths))
    return make_rows(
        [paths[i] for i in order], groups=[groups[i] for i in order], episodes=[episodes[i] for i in order], seed=seed
    )
