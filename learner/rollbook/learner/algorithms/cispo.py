"""CISPO: the weight is clipped, never the gradient of a token.

    L = -stop_gradient(min(rho, 1 + cispo_eps_max)) A log pi

Every token keeps a gradient, also the rare ones whose ratio a clip would have cut off.

MiniMax 2025, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", section 3.1.
"""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from rollbook.learner.config import NormConfig

from . import Tokens
from .parts import behaviour_weight, log_ratio, with_extras
from .recipe import Recipe


class Algorithm(Recipe):
    """See `algorithms.Algorithm`."""

    reward_norm: ClassVar[NormConfig] = NormConfig(mean_level="group", std_level="group")

    def loss(self, tokens: Tokens) -> tuple[Tensor, Mapping[str, Tensor]]:
        t, most = tokens, 1.0 + self.actor.cispo_eps_max
        ratio_E = log_ratio(t, self.actor.importance_sampling_level or "token").exp().detach()
        weight_E, report = behaviour_weight(t, self.actor.rejection_sampling)
        loss = -(t.weight_E * weight_E * ratio_E.clamp(max=most) * t.advantages_E * t.logprobs_E).sum()
        report = {**report, "clipped": (t.mean_E * (ratio_E > most)).sum(), "weight": (t.mean_E * weight_E).sum()}
        return with_extras(loss, t, self.actor, report)
