"""The learner: batches from the book, an algorithm, a step, a new version of the policy.

Importing this package imports no torch; `PPOTrainer` does when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

from .config import TrainConfig

if TYPE_CHECKING:
    from .trainer import PPOTrainer

__all__ = ["PPOTrainer", "TrainConfig"]


def __getattr__(name: str) -> Any:
    if name == "PPOTrainer":
        from .trainer import PPOTrainer

        return PPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
