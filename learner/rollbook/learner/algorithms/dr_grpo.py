"""Dr.GRPO: GRPO without what biases it.

    A = r - mean_group                  no division by the deviation: easy and hard tasks keep their own scale
    L = sum over tokens / (rows * fixed length)     no division by the answer's length: long wrong answers pay in full

The fixed length is actor.fixed_length, else max_new_tokens.

Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective", section 3.
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

    loss_agg: ClassVar[str] = "fixed_length"
    reward_norm: ClassVar[NormConfig] = NormConfig(mean_level="group", std_level=None)

    def loss(self, tokens: Tokens) -> tuple[Tensor, Mapping[str, Tensor]]:
        t, (low, high) = tokens, self.clip
        ratio_E = log_ratio(t, self.actor.importance_sampling_level or "token").exp()
        loss_E, is_clipped = clipped_surrogate(ratio_E, t.advantages_E, low=low, high=high, c_clip=self.actor.c_clip)
        weight_E, report = behaviour_weight(t, self.actor.rejection_sampling)
        loss = (t.weight_E * weight_E * loss_E).sum()
        report = {**report, "clipped": (t.mean_E * is_clipped).sum(), "weight": (t.mean_E * weight_E).sum()}
        return with_extras(loss, t, self.actor, report)
