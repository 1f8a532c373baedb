"""GSPO: one ratio per sequence, the geometric mean of its tokens'.

    s = exp(mean over the row of (logp - prox));  L = max(-A s, -A clip(s, 1 - eps, 1 + eps_higher))

A is the row's mean advantage, every row weighs the same. The ratio of a sequence moves far less than a token's: the
authors clip at 3e-4 below and 4e-4 above (actor.eps_clip, actor.eps_clip_higher).

Zheng et al. 2025, "Group Sequence Policy Optimization", section 4.1.
"""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from rollbook.learner.config import NormConfig

from . import Tokens
from .parts import behaviour_weight, clipped_surrogate, log_ratio, sequence_mean, with_extras
from .recipe import Recipe


class Algorithm(Recipe):
    """See `algorithms.Algorithm`."""

    loss_agg: ClassVar[str] = "sequence_mean"
    reward_norm: ClassVar[NormConfig] = NormConfig(mean_level="group", std_level="group")

    def loss(self, tokens: Tokens) -> tuple[Tensor, Mapping[str, Tensor]]:
        t, (low, high) = tokens, self.clip
        ratio_E = log_ratio(t, self.actor.importance_sampling_level or "sequence").exp()
        advantages_E = sequence_mean(t.advantages_E, t)
        loss_E, is_clipped = clipped_surrogate(ratio_E, advantages_E, low=low, high=high, c_clip=self.actor.c_clip)
        weight_E, report = behaviour_weight(t, self.actor.rejection_sampling)
        loss = (t.weight_E * weight_E * loss_E).sum()
        report = {**report, "clipped": (t.mean_E * is_clipped).sum(), "weight": (t.mean_E * weight_E).sum()}
        return with_extras(loss, t, self.actor, report)
