"""RLOO: the baseline of an episode is the mean of the others in its group.

    A_i = r_i - mean of r_j, j != i;    L = -A rho, whose gradient on fresh data is that of -A log pi

Rewards 1, 2, 3, 4 give -2, -2/3, 2/3, 2. A group of one teaches nothing.

Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization", equation 5.
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

    reward_norm: ClassVar[NormConfig] = NormConfig(mean_level="group", std_level=None, mean_leave1out=True)

    def loss(self, tokens: Tokens) -> tuple[Tensor, Mapping[str, Tensor]]:
        t = tokens
        ratio_E = log_ratio(t, self.actor.importance_sampling_level or "token").exp()
        weight_E, report = behaviour_weight(t, self.actor.rejection_sampling)
        loss = -(t.weight_E * weight_E * t.advantages_E * ratio_E).sum()
        return with_extras(loss, t, self.actor, {**report, "weight": (t.mean_E * weight_E).sum()})
