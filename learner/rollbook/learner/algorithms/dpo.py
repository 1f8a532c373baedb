"""DPO: the better of two episodes of a group shall be likelier than the worse, measured against the reference.

    h = beta [(log pi - log ref)(better) - (log pi - log ref)(worse)];   L = mean over pairs of -log sigmoid(h)

log pi of an episode is the sum over its trained tokens. Pairs: in each group the best against the worst, the next best
against the next worst, as long as the first has the higher reward. Without `ref` the policy that sampled is the
reference. The loss couples episodes of different micro-batches, so it is taken at its tangent: with
c = beta (1 - sigmoid(h)) from the weights before the step, the gradient of sum of -c log pi(better) + c log pi(worse)
is the gradient of L exactly.

Rafailov et al. 2023, "Direct Preference Optimization", equation 7.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
from torch import Tensor

from rollbook.learner.rows import Floats, Rows

from . import Tokens
from .parts import with_extras
from .recipe import Recipe, Scores


class Algorithm(Recipe):
    """See `algorithms.Algorithm`."""

    needs_scores: ClassVar[bool] = True
    drop_all_equal: ClassVar[bool] = True
    loss_agg: ClassVar[str] = "sum"

    def advantages(self, rows: Rows) -> Floats:
        """R: 1 for the better of a pair, -1 for the worse, 0 for an episode without a partner."""
        signs_R = np.zeros(len(rows))
        for better, worse in pairs(rows):
            signs_R[better] = 1.0
            signs_R[worse] = -1.0
        return signs_R

    def mask(self, rows: Rows, mask_E: Floats, scores: Scores) -> Floats:
        return mask_E * (rows.advantages[rows.row_E] != 0)

    def spread(self, rows: Rows, mask_E: Floats, scores: Scores) -> Floats:
        assert scores.now_E is not None
        reference_E = rows.logprobs if scores.ref_E is None else scores.ref_E
        margin_R = np.bincount(rows.row_E, mask_E * (scores.now_E - reference_E), minlength=len(rows))
        slope_R = np.zeros(len(rows))
        found = pairs(rows)
        for better, worse in found:
            h = self.actor.dpo_beta * (margin_R[better].sum() - margin_R[worse].sum())
            c = self.actor.dpo_beta / (1.0 + np.exp(h)) / len(found)
            slope_R[better] += c
            slope_R[worse] -= c
        return slope_R[rows.row_E]

    def loss(self, tokens: Tokens) -> tuple[Tensor, Mapping[str, Tensor]]:
        t = tokens
        loss = -(t.weight_E * t.advantages_E * t.logprobs_E).sum()
        # The pairs are weighed already; entropy and KL are means over tokens as everywhere.
        return with_extras(loss, replace(t, weight_E=t.mean_E), self.actor, {})


def pairs(rows: Rows) -> list[tuple[Floats, Floats]]:
    """Row indices of the better and the worse episode of each pair."""
    found = []
    for group in np.unique(rows.group_R):
        members = np.flatnonzero(rows.group_R == group)
        episodes, first = np.unique(rows.episode_R[members], return_index=True)
        rewards = rows.rewards[members[first]]
        order = episodes[np.argsort(-rewards, kind="stable")]
        rank = np.sort(rewards)[::-1]
        for k in range(len(order) // 2):
            if rank[k] > rank[-1 - k]:
                found.append(
                    (np.flatnonzero(rows.episode_R == order[k]), np.flatnonzero(rows.episode_R == order[-1 - k]))
                )
    return found
