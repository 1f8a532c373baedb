"""Rewards: what counts as one, and judging without stalling or lying.

`read_reward` decides what an agent's return value means. `AsyncRewardWrapper` runs a judging function in worker
processes with a time limit. A reward that could not be judged is missing, never 0.
"""

import functools
import math
import os
import re
import string
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .alarms import ready_math_verify
from .errors import BadReward, RewardFailed, said
from .pool import ProcessPool, WorkerDied, WorkerTimeout

Reward = float | dict[str, float] | None
"""One number for the episode's last interaction, one per interaction id, or None: it comes later."""


def read_reward(value: Any) -> Reward:
    """What an agent returned, as a reward. Raises BadReward for NaN, infinities and everything that is no number.

    Takes float, int, bool, numpy and torch scalars, a mapping {interaction_id: number}, and None.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        rewards: dict[str, float] = {}
        for key, each in value.items():
            if not isinstance(key, str):
                raise BadReward(f"a dict of rewards has interaction ids as keys; got the key {key!r}")
            if each is not None:
                rewards[key] = _number(each, f"reward of {key}")
        return rewards
    return _number(value, "the returned reward")


def _number(value: Any, what: str) -> float:
    if not isinstance(value, bool | int | float | np.generic):
        # a 0-d array or tensor; `item` of anything larger raises
        if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            value = value.item()
        else:
            raise BadReward(
                f"{what} is {_short(value)} ({type(value).__name__}); return a float, int, bool or numpy scalar, "
                "a dict {interaction_id: reward}, or None for a reward that comes later"
            )
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadReward(f"{what} is {_short(value)} ({type(value).__name__}), which is not a number") from error
    if not math.isfinite(number):
        raise BadReward(f"{what} is {number}; a reward is a finite number, or None when there is none")
    return number


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


class AsyncRewardWrapper:
    """An async reward function made of a blocking one: `await wrapper(...)` judges in a worker process.

    timeout_seconds: for one try; the worker is killed, its place taken by a fresh one. max_retries: further tries
    after a time-out or a dead worker, not after an exception, which would come again. Raises RewardFailed.
    The processes are shared by all wrappers of the same size and start at the first call.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any],
        timeout_seconds: float = 15.0,
        max_workers: int | None = None,
        max_retries: int = 3,
    ) -> None:
        self.reward_fn = reward_fn
        self.timeout_s = timeout_seconds
        self.max_retries = max_retries
        self._pool = _shared_pool(max_workers or max(1, min(4, (os.cpu_count() or 2) // 2)))

    async def __call__(self, *args: Any, **kwargs: Any) -> float:
        name = getattr(self.reward_fn, "__qualname__", repr(self.reward_fn))
        for attempt in range(self.max_retries + 1):
            try:
                value = await self._pool.call(self.reward_fn, args, kwargs, timeout_s=self.timeout_s)
            except (WorkerTimeout, WorkerDied) as error:
                if attempt == self.max_retries:
                    raise RewardFailed(f"reward {name}: {error}; tried {attempt + 1} times") from error
            except Exception as error:  # the function's own, brought back from its process
                raise RewardFailed(f"reward {name} raised {said(error)}") from error
            else:
                reward = read_reward(value)
                if not isinstance(reward, float):
                    raise BadReward(f"reward {name} returned {_short(value)}; expected a number")
                return reward
        raise AssertionError("unreachable")


@functools.cache
def _shared_pool(max_workers: int) -> ProcessPool:
    return ProcessPool(max_workers)


def math_verify_score(completion: str, answer: str) -> float:
    """1.0 if `completion` ends in something that equals `answer` mathematically, else 0.0.

    Any thread may call it. Each step is limited to 5 seconds; what takes longer counts as not equal.
    """
    from math_verify import parse, verify

    ready_math_verify()
    return float(verify(parse(answer), parse(completion)))


def exact_match(completion: str, answer: str) -> float:
    """1.0 if both say the same but for case, blanks, articles and punctuation, else 0.0."""
    return float(_plain(completion) == _plain(answer))


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation.replace("-", "").replace(".", ""))


def _plain(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()).rstrip(".")


def shaped(correct: float, completion: str, *, pattern: str = r"\\boxed\{.+?\}", bonus: float = 0.1) -> float:
    """`correct` (0..1) plus a bonus for an answer in the asked-for form, scaled so that 1 stays the most.

    Gives a weak model a slope to climb before it is ever right.
    """
    has_form = re.search(pattern, completion, re.DOTALL) is not None
    return (1 - bonus) * correct + bonus * has_form
