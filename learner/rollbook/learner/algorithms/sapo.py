"""SAPO: a smooth gate in the place of the clip.

    gate = (4 / tau) sigmoid(tau (rho - 1));   L = -A gate,   tau = sapo_tau_pos where A > 0, sapo_tau_neg elsewhere

At rho = 1 the gate's slope is 1, as without a gate, and falls off to both sides; negative advantages, which push many
tokens up at once, are damped more.

Gao et al. 2025, "Soft Adaptive Policy Optimization", section 3.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from rollbook.learner.config import NormConfig

from . import Tokens
from .parts import behaviour_weight, log_ratio, with_extras
from .recipe import Recipe


class Algorithm(Recipe):
    """See `algorithms.Algorithm`."""

    reward_norm: ClassVar[NormConfig] = NormConfig(mean_level="group", std_level="group")

    def loss(self, tokens: Tokens) -> tuple[Tensor, Mapping[str, Tensor]]:
        t = tokens
        ratio_E = log_ratio(t, self.actor.importance_sampling_level or "token").exp()
        tau_E = torch.full_like(ratio_E, self.actor.sapo_tau_neg)
        tau_E[t.advantages_E > 0] = self.actor.sapo_tau_pos
        gate_E = 4.0 / tau_E * torch.sigmoid(tau_E * (ratio_E - 1.0))
        weight_E, report = behaviour_weight(t, self.actor.rejection_sampling)
        loss = -(t.weight_E * weight_E * t.advantages_E * gate_E).sum()
        return with_extras(loss, t, self.actor, {**report, "weight": (t.mean_E * weight_E).sum()})
