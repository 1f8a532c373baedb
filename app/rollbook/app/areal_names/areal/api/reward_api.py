"""See the package `areal`."""

from rollbook.agents.rewards import AsyncRewardWrapper
from rollbook.app.areal_compat import missing

__all__ = ["AsyncRewardWrapper"]


def __getattr__(name: str) -> object:
    raise missing(__name__, name, __all__)
