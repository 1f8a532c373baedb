"""Who computes: the trainer backend's seam. `single` is one process."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rollbook.learner.errors import BadSetting
from rollbook.learner.rows import Floats
from rollbook.learner.trie import Trie

if TYPE_CHECKING:
    from torch import Tensor

    Objective = Callable[[Trie, "Tensor", "Tensor"], "tuple[Tensor, Mapping[str, Tensor]]"]
    """(trie, logprobs_E or values_E, entropies_E) -> this micro-batch's share of the loss, and sums to report."""


class Backend(Protocol):
    """A model, its optimiser and how both are computed."""

    def score(self, tries: Iterable[Trie]) -> tuple[Floats, Floats]:
        """logprobs (or values) and entropies of all entries, by `Trie.entry_E`; no gradient."""
        ...

    def forward_backward(self, tries: Iterable[Trie], objective: "Objective") -> dict[str, float]:
        """Add the gradient of the summed objective; returns the summed reports and `loss`."""
        ...

    def step(self) -> dict[str, float]:
        """Clip, update, forget the gradient; returns `grad_norm`, `lr`. One that is not finite changes nothing."""
        ...

    def save(self, folder: Path) -> None:
        """Weights, optimiser and step count into an existing folder, so that `load` goes on bit for bit."""
        ...

    def load(self, folder: Path) -> None:
        """Reverse of `save`. Raises BadCheckpoint for the state of another model."""
        ...

    def export(self, folder: Path) -> None:
        """The weights as a transformers model folder, in the computing precision."""
        ...


def make_backend(name: str, *args: Any, **kwargs: Any) -> Backend:
    """The backend named in the config. torch is imported here and not before."""
    if name == "single":
        from .single import SingleBackend

        return SingleBackend(*args, **kwargs)
    raise BadSetting(f"actor.backend is {name!r}; expected single")
