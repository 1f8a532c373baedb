"""What can go wrong while learning, one tree.

LearnerError
├── NothingToTrain      no rewards, no rows or no groups where some must be
├── PoliciesDisagree    engine and learner give the same tokens very different logprobs
├── BadSetting          a setting, a model or recorded tokens that do not go together
├── BadCheckpoint       a checkpoint that is of another model or run, or cannot be read
└── RankLost            one of the processes that train together is gone
"""


class LearnerError(Exception):
    """Root of what the learner raises on purpose."""


class NothingToTrain(LearnerError):
    """No rewards, no rows or no groups where some must be."""


class PoliciesDisagree(LearnerError):
    """Engine and learner give the same tokens very different logprobs: one of them is wrong."""


class BadSetting(LearnerError, ValueError):
    """A setting, a model or recorded tokens that do not go together."""


class BadCheckpoint(LearnerError, ValueError):
    """A checkpoint of another model or run, or one that cannot be read."""


class RankLost(LearnerError):
    """One of the processes that train one model together is gone."""
