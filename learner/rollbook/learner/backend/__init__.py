"""Who computes: the trainer backend's seam. `single` is one process, `fsdp:dN` N of them, one a GPU."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rollbook.learner.errors import BadSetting
from rollbook.learner.rows import Floats, Ints
from rollbook.learner.trie import Trie

if TYPE_CHECKING:
    from torch import Tensor


class Objective(Protocol):
    """What is minimised: plain data, so that it can be computed elsewhere."""

    def __call__(self, trie: Trie, values_E: "Tensor", entropies_E: "Tensor") -> "tuple[Tensor, Mapping[str, Tensor]]":
        """values_E: logprobs, or a critic's values. Returns this micro-batch's share of the loss, and sums to report.

        Shares add up: whatever is a mean has been divided by the whole batch's count.
        """
        ...

    def take(self, entries: Ints) -> "Objective":
        """The same for these of the batch's entries, numbered anew."""
        ...


@dataclass(frozen=True)
class Pass:
    """What a pass over a batch found. E: by `Trie.entry_E`."""

    report: dict[str, float]  # summed over micro-batches, and `loss`
    values_E: Floats  # logprobs, or a critic's values
    entropies_E: Floats


class Backend(Protocol):
    """A model, its optimiser and how both are computed."""

    vocabulary: int
    ranks: int  # processes that share the micro-batches; their number should divide that of the micro-batches
    hidden: int  # of the model: what attention costs beside the rest
    least_shared: int  # tokens that a fork must save to be made
    n_parameters: int  # of the model, all ranks together
    peak_flops: float | None  # what the devices of all ranks could do in a second in the computing precision, if known

    def score(self, tries: Iterable[Trie]) -> tuple[Floats, Floats]:
        """logprobs (or values) and entropies of all entries, by `Trie.entry_E`; no gradient."""
        ...

    def forward_backward(self, tries: Iterable[Trie], objective: "Objective") -> Pass:
        """Add the gradient of the summed objective."""
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


def ranks_of(name: str) -> int:
    """1 for `single`, N for `fsdp:dN`. Raises BadSetting for anything else."""
    found = re.fullmatch(r"single|fsdp:d(\d+)", name)
    if found is None or found[1] == "0":
        raise BadSetting(f"actor.backend is {name!r}; expected single, or fsdp:dN for N processes of one GPU each")
    return int(found[1] or 1)


def make_backend(name: str, *args: Any, team: Any = None, **kwargs: Any) -> Backend:
    """The backend named in the config. torch is imported here and not before. team: a `team.Team` of its ranks."""
    if ranks_of(name) == 1 and team is None:
        from .single import SingleBackend

        return SingleBackend(*args, **kwargs)
    from .sharded import ShardedBackend

    return ShardedBackend(team, *args, **kwargs)
