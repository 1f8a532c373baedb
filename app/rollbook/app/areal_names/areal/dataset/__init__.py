"""See the package `areal`."""

from rollbook.agents.data import get_custom_dataset
from rollbook.app.areal_compat import missing

__all__ = ["get_custom_dataset"]


def __getattr__(name: str) -> object:
    raise missing(__name__, name, __all__)
