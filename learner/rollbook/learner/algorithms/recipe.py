"""What an algorithm says where the settings say nothing, and the parts that most of them share.

Each algorithm is a file with a class `Algorithm(Recipe)`: its defaults, and its loss. What it does differently, it
overrides. Shapes: R rows, E entries of the batch, e episodes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from rollbook.learner.config import ActorConfig, NormConfig
from rollbook.learner.rows import Floats, Rows

from . import Tokens
from .parts import (
    episode_sums,
    kl_estimate_numpy,
    normalise,
    overlong_penalty,
    shape_rewards,
    to_go,
)

NONE = NormConfig(mean_level=None, std_level=None)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What models said of the batch before the step; None where nobody needed it."""

    now_E: Floats | None = None  # logprobs of the weights about to be trained
    ref_E: Floats | None = None  # of the reference
    values_E: Floats | None = None  # of the critic, at the state before each token


class Recipe:
    """See `algorithms.Algorithm`."""

    needs_critic: ClassVar[bool] = False
    needs_scores: ClassVar[bool] = False
    drop_all_equal: ClassVar[bool] = False
    loss_agg: ClassVar[str] = "token_mean"
    reward_norm: ClassVar[NormConfig] = NONE
    adv_norm: ClassVar[NormConfig | None] = None
    eps_clip_higher: ClassVar[float | None] = None  # None: as eps_clip
    overlong: ClassVar[bool] = False
    imitates: ClassVar[bool] = False

    def __init__(self, actor: ActorConfig) -> None:
        self.actor = actor

    @property
    def clip(self) -> tuple[float, float]:
        """How far the ratio may go below and above 1."""
        higher = self.actor.eps_clip_higher
        if higher is None:
            higher = self.actor.eps_clip if self.eps_clip_higher is None else self.eps_clip_higher
        return self.actor.eps_clip, higher

    def advantages(self, rows: Rows) -> Floats:
        """R: shaped credits against the statistics of shaped episode rewards."""
        actor = self.actor
        penalty_R = np.zeros(len(rows))
        if (actor.overlong_reward_penalty or self.overlong) and actor.overlong_tokens and actor.max_new_tokens:
            penalty_R = overlong_penalty(
                rows.n_output,
                limit=actor.max_new_tokens,
                zone=actor.overlong_tokens,
                factor=actor.overlong_penalty_factor,
            )
        values = shape_rewards(rows.credits + penalty_R, actor)
        rewards = shape_rewards(rows.rewards + episode_sums(penalty_R, rows), actor)
        return normalise(values, rows, actor.reward_norm or self.reward_norm, rewards)

    def mask(self, rows: Rows, mask_E: Floats, scores: Scores) -> Floats:
        """E: which of the tokens count; 0 leaves one out."""
        return mask_E

    def spread(self, rows: Rows, mask_E: Floats, scores: Scores) -> Floats:
        """E: each token's advantage, before `adv_norm`: the row's, less the KL to the reference from here on."""
        advantages_E = rows.advantages[rows.row_E]
        if self.actor.kl_ctl and scores.ref_E is not None and scores.now_E is not None:
            kl_E = mask_E * kl_estimate_numpy(scores.now_E, scores.ref_E, self.actor.kl_estimator)
            advantages_E = advantages_E - self.actor.kl_ctl * to_go(kl_E, rows)
        return advantages_E

    def loss(self, tokens: Tokens) -> tuple[Tensor, Mapping[str, Tensor]]:
        """See `algorithms.Algorithm`."""
        raise NotImplementedError
