"""LitePPO: the group's mean, the batch's deviation, every token equal.

    A = (r - mean_group) / (std_batch + eps)

with the clipped surrogate and no critic. The batch's deviation does not vanish where one group agrees with itself.

Liu et al. 2025, "Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning", section 5.
"""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from rollbook.learner.config import NormConfig

from . import Tokens
from .parts import behaviour_weight, clipped_surrogate, log_ratio, with_extras
from .recipe import Recipe


class Algorithm(Recipe):
    """See `algorithms.Algorithm`."""

    reward_norm: ClassVar[NormConfig] = NormConfig(mean_level="group", std_level="batch")

    def loss(self, tokens: Tokens) -> tuple[Tensor, Mapping[str, Tensor]]:
        t, (low, high) = tokens, self.clip
        ratio_E = log_ratio(t, self.actor.importance_sampling_level or "token").exp()
        loss_E, is_clipped = clipped_surrogate(ratio_E, t.advantages_E, low=low, high=high, c_clip=self.actor.c_clip)
        weight_E, report = behaviour_weight(t, self.actor.rejection_sampling)
        loss = (t.weight_E * weight_E * loss_E).sum()
        report = {**report, "clipped": (t.mean_E * is_clipped).sum(), "weight": (t.mean_E * weight_E).sum()}
        return with_extras(loss, t, self.actor, report)
