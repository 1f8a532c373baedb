"""Best-of-n (rejection fine-tuning): imitate the best episodes of each group.

    L = -log pi(token) over the episodes whose reward is their group's highest and at least actor.best_of

Dong et al. 2023, "RAFT: Reward rAnked FineTuning", section 3; Yuan et al. 2023, "Scaling relationship on learning
mathematical reasoning", section 3.2.
"""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from rollbook.learner.rows import Floats, Rows

from . import Tokens
from .parts import group_max, with_extras
from .recipe import Recipe, Scores


class Algorithm(Recipe):
    """See `algorithms.Algorithm`."""

    imitates = True

    def advantages(self, rows: Rows) -> Floats:
        best_R = group_max(rows.rewards, rows)
        return ((rows.rewards >= best_R) & (rows.rewards >= self.actor.best_of)).astype(np.float64)

    def mask(self, rows: Rows, mask_E: Floats, scores: Scores) -> Floats:
        return mask_E * rows.advantages[rows.row_E]

    def loss(self, tokens: Tokens) -> tuple[Tensor, Mapping[str, Tensor]]:
        t = tokens
        loss = -(t.weight_E * t.logprobs_E).sum()
        return with_extras(loss, t, self.actor, {})
