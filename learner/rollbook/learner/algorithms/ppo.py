"""PPO with a critic: generalised advantage estimation over the tokens of an interaction.

    delta_t = reward_t + discount * V_t+1 - V_t;   A_t = sum over l of (discount * gae_lambda)^l delta_t+l

The reward of the last token is the interaction's credit; every token pays kl_ctl * KL to the reference. Tokens that are
not trained are skipped, as if the next trained one followed at once. Advantages are normalised over the batch's tokens.
The critic learns A + V, its change clipped.

    L = max(-A rho, -A clip(rho, 1 - eps, 1 + eps_higher)),  rho = exp(logp - prox)

Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7; GAE: Schulman et al. 2016, equation 16.
"""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from rollbook.learner.config import NormConfig
from rollbook.learner.rows import Floats, Rows

from . import Tokens
from .parts import (
    behaviour_weight,
    clipped_surrogate,
    gae,
    kl_estimate_numpy,
    log_ratio,
    terminal_rewards,
    with_extras,
)
from .recipe import Recipe, Scores


class Algorithm(Recipe):
    """See `algorithms.Algorithm`."""

    needs_critic: ClassVar[bool] = True
    adv_norm: ClassVar[NormConfig | None] = NormConfig(mean_level="batch", std_level="batch")

    def spread(self, rows: Rows, mask_E: Floats, scores: Scores) -> Floats:
        assert scores.values_E is not None
        rewards_E = terminal_rewards(rows.advantages, rows, mask_E)
        if self.actor.kl_ctl and scores.ref_E is not None and scores.now_E is not None:
            kl_E = mask_E * kl_estimate_numpy(scores.now_E, scores.ref_E, self.actor.kl_estimator)
            rewards_E = rewards_E - self.actor.kl_ctl * kl_E
        return gae(rewards_E, scores.values_E, mask_E, rows, discount=self.actor.discount, lam=self.actor.gae_lambda)

    def loss(self, tokens: Tokens) -> tuple[Tensor, Mapping[str, Tensor]]:
        t, (low, high) = tokens, self.clip
        ratio_E = log_ratio(t, self.actor.importance_sampling_level or "token").exp()
        loss_E, is_clipped = clipped_surrogate(ratio_E, t.advantages_E, low=low, high=high, c_clip=self.actor.c_clip)
        weight_E, report = behaviour_weight(t, self.actor.rejection_sampling)
        loss = (t.weight_E * weight_E * loss_E).sum()
        report = {**report, "clipped": (t.mean_E * is_clipped).sum(), "weight": (t.mean_E * weight_E).sum()}
        return with_extras(loss, t, self.actor, report)
