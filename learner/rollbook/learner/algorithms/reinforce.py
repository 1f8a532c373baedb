"""REINFORCE with the batch's mean reward as its baseline.

    A = r - mean_batch;    L = -A rho, whose gradient on fresh data is that of -A log pi

Williams 1992, "Simple statistical gradient-following algorithms", section 4.
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

    reward_norm: ClassVar[NormConfig] = NormConfig(mean_level="batch", std_level=None)

    def loss(self, tokens: Tokens) -> tuple[Tensor, Mapping[str, Tensor]]:
        t = tokens
        ratio_E = log_ratio(t, self.actor.importance_sampling_level or "token").exp()
        weight_E, report = behaviour_weight(t, self.actor.rejection_sampling)
        loss = -(t.weight_E * weight_E * t.advantages_E * ratio_E).sum()
        return with_extras(loss, t, self.actor, {**report, "weight": (t.mean_E * weight_E).sum()})
