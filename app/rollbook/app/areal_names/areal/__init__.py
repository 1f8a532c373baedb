"""What AReaL's scripts import, answered by Rollbook. On sys.path only inside `rollbook run-areal`."""

from rollbook.app.areal_compat import PPOTrainer, missing

__all__ = ["PPOTrainer"]


def __getattr__(name: str) -> object:
    raise missing(__name__, name, __all__)
