"""What can go wrong between a dataset row and its episode's reward.

    AgentsError
    ├── WorkflowError    `workflow` cannot be resolved into something that runs
    ├── DataError        a dataset cannot be read, or a row is not what we take
    ├── BadReward        an agent or a reward function returned what is not a reward
    ├── RewardFailed     a reward function raised, or took too long; the reward stays missing
    ├── Rejected         the workflow threw its own sample away
    ├── AgentStopped     the agent took too long, ended itself or tried to end the program
    └── RolloutsFailing  episode after episode fails: something is wrong with the agent or the engine

Whatever an agent itself raises stays as it is: the runner catches it once and records it on the episode.
"""


class AgentsError(Exception):
    """Root of everything this room raises on purpose."""


class WorkflowError(AgentsError):
    """`workflow` cannot be resolved; an import's own traceback is in the message and in `__cause__`."""


class DataError(AgentsError):
    """A dataset cannot be read, or a row is not what we take."""


class BadReward(AgentsError):
    """A returned value is not a reward. Trying again would not help."""


class RewardFailed(AgentsError):
    """A reward function raised or took too long. The reward is missing, not 0."""


class Rejected(AgentsError):
    """The workflow threw its own sample away (`arun_episode` returned None)."""


class AgentStopped(AgentsError):
    """The agent took too long, cancelled itself, or tried to end the program."""


class RolloutsFailing(AgentsError):
    """Episode after episode fails, so going on would only burn through the dataset."""
