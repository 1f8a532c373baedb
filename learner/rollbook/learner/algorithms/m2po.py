"""M2PO: stale data without clipping; the tokens that drifted most are left out.

    keep tokens, largest (logp - behaviour)^2 dropped first, until the mean of those kept is at most m2_threshold
    L = -A exp(logp - behaviour) over what is kept

Zheng et al. 2025, "Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?", section 4.
"""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from rollbook.learner.config import NormConfig
from rollbook.learner.rows import Floats, Rows

from . import Tokens
from .parts import apart, keep_second_moment, with_extras
from .recipe import Recipe, Scores


class Algorithm(Recipe):
    """See `algorithms.Algorithm`."""

    needs_scores: ClassVar[bool] = True
    reward_norm: ClassVar[NormConfig] = NormConfig(mean_level="group", std_level="group")

    def mask(self, rows: Rows, mask_E: Floats, scores: Scores) -> Floats:
        assert scores.now_E is not None
        return keep_second_moment((scores.now_E - rows.logprobs) ** 2, mask_E, self.actor.m2_threshold)

    def loss(self, tokens: Tokens) -> tuple[Tensor, Mapping[str, Tensor]]:
        t = tokens
        ratio_E = apart(t.logprobs_E, t.old_E).exp()
        loss = -(t.weight_E * t.advantages_E * ratio_E).sum()
        return with_extras(loss, t, self.actor, {"ratio": (t.mean_E * ratio_E.detach()).sum()})
