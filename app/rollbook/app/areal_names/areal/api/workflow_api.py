"""See the package `areal`."""

from rollbook.agents.workflow import RolloutWorkflow
from rollbook.app.areal_compat import missing

__all__ = ["RolloutWorkflow"]


def __getattr__(name: str) -> object:
    raise missing(__name__, name, __all__)
