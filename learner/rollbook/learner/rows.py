"""What a learner trains: interactions with their whole prompts, as flat arrays.

Shapes: R rows (interactions), E entries (output tokens of all rows, in row order).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[Any]
"""Of any integer type."""
Floats = npt.NDArray[Any]
"""Of any floating type."""


@dataclass(frozen=True)
class Draw:
    """What a request asked for: the distribution that its logprobs are of."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all


@dataclass(frozen=True, kw_only=True)
class Rows:
    """R interactions. `ids[starts[r]:starts[r+1]]` is the prompt and then the output of row r."""

    interaction_ids: Sequence[str]
    episode_ids: Sequence[str]  # R
    group_ids: Sequence[str]  # R; an episode without a group is its own
    ids: Ints
    starts: Ints  # R+1
    n_prompt: Ints  # R, each >= 1
    logprobs: Floats  # E, of the policy that sampled, under its sampling distribution
    versions: Ints  # E, that policy's version
    credits: Floats  # R, what each interaction gets of its episode's rewards
    rewards: Floats  # R, the whole episode's reward
    is_cut: npt.NDArray[np.bool_]  # R, the output ended at a length limit
    advantages: Floats = field(default_factory=lambda: np.empty(0))  # R once known
    draws: Sequence[Draw | None] = ()  # R; None, or none at all: as the settings say
    is_held: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    """R, or none: the logprobs are of what a form left (engine.Form), which nobody here can compute again."""

    def __len__(self) -> int:
        return len(self.interaction_ids)

    @property
    def n_output(self) -> Ints:
        """R: trained tokens of each row."""
        return np.diff(self.starts) - self.n_prompt

    @property
    def output_starts(self) -> Ints:
        """R+1: where each row's entries begin."""
        return np.concatenate([[0], np.cumsum(self.n_output)])

    @property
    def row_E(self) -> Ints:
        """E: the row of each entry."""
        return np.repeat(np.arange(len(self)), self.n_output)

    @property
    def held_E(self) -> npt.NDArray[np.bool_]:
        """E: the tokens of rows that were held to a form."""
        return self.is_held[self.row_E] if len(self.is_held) else np.zeros(len(self.logprobs), np.bool_)

    @property
    def output_ids(self) -> Ints:
        """E: the sampled tokens."""
        place = np.arange(len(self.ids)) - np.repeat(self.starts[:-1], np.diff(self.starts))
        return self.ids[place >= np.repeat(self.n_prompt, np.diff(self.starts))]

    @property
    def episode_R(self) -> Ints:
        """R: small numbers for episodes."""
        return np.unique(np.asarray(self.episode_ids, dtype=object), return_inverse=True)[1]

    @property
    def group_R(self) -> Ints:
        """R: small numbers for groups."""
        return np.unique(np.asarray(self.group_ids, dtype=object), return_inverse=True)[1]

    def path(self, r: int) -> Ints:
        """Prompt and output of a row."""
        return self.ids[self.starts[r] : self.starts[r + 1]]

    def take(self, rows: Ints) -> "Rows":
        """The rows at these indices, in this order."""
        rows = np.asarray(rows, dtype=np.int64)
        out = self.output_starts
        pick = [np.arange(self.starts[r], self.starts[r + 1]) for r in rows]
        pick_E = [np.arange(out[r], out[r + 1]) for r in rows]
        index = np.concatenate(pick) if len(rows) else np.empty(0, np.int64)
        index_E = np.concatenate(pick_E) if len(rows) else np.empty(0, np.int64)
        lengths = np.diff(self.starts)[rows]
        return replace(
            self,
            interaction_ids=[self.interaction_ids[r] for r in rows],
            episode_ids=[self.episode_ids[r] for r in rows],
            group_ids=[self.group_ids[r] for r in rows],
            ids=self.ids[index],
            starts=np.concatenate([[0], np.cumsum(lengths)]),
            n_prompt=self.n_prompt[rows],
            logprobs=self.logprobs[index_E],
            versions=self.versions[index_E],
            credits=self.credits[rows],
            rewards=self.rewards[rows],
            is_cut=self.is_cut[rows],
            advantages=self.advantages[rows] if len(self.advantages) else self.advantages,
            draws=[self.draws[r] for r in rows] if self.draws else (),
            is_held=self.is_held[rows] if len(self.is_held) else self.is_held,
        )
