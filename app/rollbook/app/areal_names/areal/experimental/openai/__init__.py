"""See the package `areal`."""

from rollbook.agents.direct import ArealOpenAI
from rollbook.app.areal_compat import missing

__all__ = ["ArealOpenAI"]


def __getattr__(name: str) -> object:
    raise missing(__name__, name, __all__)
