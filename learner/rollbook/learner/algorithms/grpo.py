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

from rollbook.learner.config import ActorConfig, NormConfig
from rollbook.learner.rows import Floats, Rows

from . import Tokens
from .parts import behaviour_weight, clipped_surrogate, normalise, normalise_advantages, shape_rewards, with_extras


class Algorithm:
    """See `algorithms.Algorithm`."""

    needs_critic: ClassVar[bool] = False
    drop_all_equal: ClassVar[bool] = False
    loss_agg: ClassVar[str] = "token_mean"

    def __init__(self, actor: ActorConfig) -> None:
        self.actor = actor

    def advantages(self, rows: Rows) -> Floats:
        norm = self.actor.reward_norm or NormConfig(mean_level="group", std_level="group")
        values = shape_rewards(rows.credits, self.actor)
        advantages = normalise(values, rows, norm, shape_rewards(rows.rewards, self.actor))
        if self.actor.adv_norm is not None:
            advantages = normalise_advantages(advantages, rows, self.actor.adv_norm)
        return advantages

    def loss(self, tokens: Tokens) -> tuple[Tensor, Mapping[str, Tensor]]:
        t, actor = tokens, self.actor
        ratio = (t.logprobs_E - t.prox_E).exp()
        high = actor.eps_clip if actor.eps_clip_higher is None else actor.eps_clip_higher
        loss_E, is_clipped = clipped_surrogate(
            ratio, t.advantages_E, low=actor.eps_clip, high=high, c_clip=actor.c_clip
        )
        weight, report = behaviour_weight(t, actor.rejection_sampling)
        loss = (t.weight_E * weight * loss_E).sum()
        report = {**report, "clipped": (t.mean_E * is_clipped).sum(), "weight": (t.mean_E * weight).sum()}
        return with_extras(loss, t, actor, report)
