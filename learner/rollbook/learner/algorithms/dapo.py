"""DAPO: GRPO with a higher upper clip, no groups that agree with themselves, and a soft limit on length.

    L = max(-A rho, -A clip(rho, 1 - .2, 1 + .28)), summed over all tokens of the batch and divided by their number

Groups whose rewards are all equal are rejected and drawn anew, until a step has drawn actor.dynamic_sampling_draws
batches: a policy that has learnt its tasks agrees with itself, and would draw for ever. With actor.overlong_tokens set,
an answer in that zone before max_new_tokens loses up to overlong_penalty_factor.

Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", section 3.
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

    drop_all_equal: ClassVar[bool] = True
    eps_clip_higher: ClassVar[float | None] = 0.28
    overlong: ClassVar[bool] = True
    reward_norm: ClassVar[NormConfig] = NormConfig(mean_level="group", std_level="group")

    def loss(self, tokens: Tokens) -> tuple[Tensor, Mapping[str, Tensor]]:
        t, (low, high) = tokens, self.clip
        ratio_E = log_ratio(t, self.actor.importance_sampling_level or "token").exp()
        loss_E, is_clipped = clipped_surrogate(ratio_E, t.advantages_E, low=low, high=high, c_clip=self.actor.c_clip)
        weight_E, report = behaviour_weight(t, self.actor.rejection_sampling)
        loss = (t.weight_E * weight_E * loss_E).sum()
        report = {**report, "clipped": (t.mean_E * is_clipped).sum(), "weight": (t.mean_E * weight_E).sum()}
        return with_extras(loss, t, self.actor, report)
