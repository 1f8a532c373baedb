"""GRPO: the group's own mean is the baseline, its deviation the unit.

    A = (r - mean_group) / (std_group + eps)        over the episodes of one group
    L = max(-A rho, -A clip(rho, 1 - eps, 1 + eps_higher)),  rho = exp(logp - prox)

weighted by exp(prox - behaviour) where the loss is decoupled, so that data from an engine in another precision or
of an older version is counted for what it is.

Shao et al. 2024, "DeepSeekMath", section 4.1. Decoupled: Hilton et al. 2022, "Batch size-invariance for policy
optimization", section 3; Fu et al. 2025, "AReaL", section 5.2. Truncated weight: Yao et al. 2025, "Your efficient RL
framework secretly brings you off-policy RL training".
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

    reward_norm: ClassVar[NormConfig] = NormConfig(mean_level="group", std_level="group")

    def loss(self, tokens: Tokens) -> tuple[Tensor, Mapping[str, Tensor]]:
        t, (low, high) = tokens, self.clip
        ratio_E = log_ratio(t, self.actor.importance_sampling_level or "token").exp()
        loss_E, is_clipped = clipped_surrogate(ratio_E, t.advantages_E, low=low, high=high, c_clip=self.actor.c_clip)
        weight_E, report = behaviour_weight(t, self.actor.rejection_sampling)
        loss = (t.weight_E * weight_E * loss_E).sum()
        report = {**report, "clipped": (t.mean_E * is_clipped).sum(), "weight": (t.mean_E * weight_E).sum()}
        return with_extras(loss, t, self.actor, report)
