"""What can go wrong between a dataset row and its episode's reward.

    AgentsError
    ├── WorkflowError    `workflow` cannot be resolved into something that runs
    ├── DataError        a dataset cannot be read, or a row is not what we take
    ├── BadReward        an agent or a reward function returned what is not a reward
    ├── RewardFailed     a reward function raised, or took too long; the reward stays missing
    ├── Rejected         the workflow threw its own sample away
    ├── AgentFailed      a program that is an agent could not start, or ended with an error
    ├── AgentStopped     the agent took too long, ended itself or tried to end the program
    └── RolloutsFailing  episode after episode fails: something is wrong with the agent or the engine

Whatever an agent itself raises stays as it is: the runner catches it once and records it on the episode, as
`describe` puts it.
"""

import os
import traceback

_CUT = " ... "


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


class AgentFailed(AgentsError):
    """A program that is an agent could not start, or ended with an error."""


class AgentStopped(AgentsError):
    """The agent took too long, cancelled itself, or tried to end the program."""


class RolloutsFailing(AgentsError):
    """Episode after episode fails, so going on would only burn through the dataset."""


class WorkerTraceback(Exception):
    """Where an exception was raised in a worker process; stands as the cause of the exception itself."""

    def __init__(self, text: str, where: str) -> None:
        super().__init__(text, where)
        self.text = text
        self.where = where

    def __str__(self) -> str:
        return "\n" + self.text


def said(error: BaseException) -> str:
    """The type and the words of what somebody's code raised, as text that can be stored.

    Words may have half a character, as names of files and a model's JSON do, and `__str__` may raise.
    """
    try:
        words = str(error)
    except Exception as odd:
        words = f"(its text cannot be had: {type(odd).__name__})"
    return f"{type(error).__name__}: {words}".strip().rstrip(":").encode(errors="replace").decode()


def describe(error: BaseException, limit: int = 2000) -> str:
    """An error as a reason: its type, what it says, and where in a person's code it was raised.

    What is longer than `limit` characters loses its middle: the end is what a program said last.
    """
    text = said(error)
    if not isinstance(error, AgentsError):
        text += where(error)
    if isinstance(error, BaseExceptionGroup):
        text += "".join(f"; {describe(each, limit)}" for each in error.exceptions[:3])
    if len(text) <= limit:
        return text
    end = (limit - len(_CUT)) // 2
    return text[: limit - len(_CUT) - end] + _CUT + text[-end:]


def where(error: BaseException) -> str:
    """` (file:line in function)` of the innermost frame that is neither ours nor an installed package's, if any."""
    if isinstance(error.__cause__, WorkerTraceback):
        return error.__cause__.where
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_HERE, "<"))]
    frames = [f for f in frames if "site-packages" not in f.filename] or frames
    if not frames:
        return ""
    return f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name})"


_HERE = os.path.dirname(os.path.abspath(__file__))
