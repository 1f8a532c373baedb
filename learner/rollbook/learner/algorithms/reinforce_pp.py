"""REINFORCE++: no groups and no critic; advantages are normalised over the whole batch.

    A_t = r - kl_ctl * (sum of KL to the reference from t on),  then (A - mean_batch) / (std_batch + eps) over tokens

with the clipped surrogate. KL is taken where `ref` is set and kl_ctl > 0.

Hu et al. 2025, "REINFORCE++: An Efficient RLHF Algorithm with Robustness to Both Prompt and Reward Models", section 3.
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

    adv_norm: ClassVar[NormConfig | None] = NormConfig(mean_level="batch", std_level="batch")

    def loss(self, tokens: Tokens) -> tuple[Tensor, Mapping[str, Tensor]]:
        t, (low, high) = tokens, self.clip
        ratio_E = log_ratio(t, self.actor.importance_sampling_level or "token").exp()
        loss_E, is_clipped = clipped_surrogate(ratio_E, t.advantages_E, low=low, high=high, c_clip=self.actor.c_clip)
        weight_E, report = behaviour_weight(t, self.actor.rejection_sampling)
        loss = (t.weight_E * weight_E * loss_E).sum()
        report = {**report, "clipped": (t.mean_E * is_clipped).sum(), "weight": (t.mean_E * weight_E).sum()}
        return with_extras(loss, t, self.actor, report)
