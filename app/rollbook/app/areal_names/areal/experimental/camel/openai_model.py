"""See the package `areal`."""

from rollbook.agents.camel import AReaLOpenAICompatibleModel
from rollbook.app.areal_compat import missing

__all__ = ["AReaLOpenAICompatibleModel"]


def __getattr__(name: str) -> object:
    raise missing(__name__, name, __all__)
