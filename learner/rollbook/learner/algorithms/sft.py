"""SFT: every selected interaction is an example.

    L = -log pi(token), the mean over trained tokens

Rewards play no part; which interactions are examples is the selection's business.
"""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from rollbook.learner.rows import Floats, Rows

from . import Tokens
from .parts import with_extras
from .recipe import Recipe


class Algorithm(Recipe):
    """See `algorithms.Algorithm`."""

    imitates = True

    def advantages(self, rows: Rows) -> Floats:
        return np.ones(len(rows))

    def loss(self, tokens: Tokens) -> tuple[Tensor, Mapping[str, Tensor]]:
        t = tokens
        loss = -(t.weight_E * t.logprobs_E).sum()
        return with_extras(loss, t, self.actor, {})
