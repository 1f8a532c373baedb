"""The seam to whoever runs the engine and the agents of a training run.

The learner imports neither proxy nor agents. `scheduler.type` in the config names an entry point of the group
`rollbook.schedulers`; what it points to is called without arguments and must be a `Rollouts`.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

from .errors import BadSetting

GROUP = "rollbook.schedulers"


class Rollouts(Protocol):
    """Keeps episodes coming, as many as staleness allows, into the book."""

    def resolve(self, workflow: Any, workflow_kwargs: Mapping[str, Any]) -> None:
        """Raise now what `start` would raise for an agent that cannot be run: before models load and books are made."""
        ...

    def start(
        self,
        config: Any,
        *,
        book_path: str,
        run_id: str,
        tasks: Sequence[Mapping[str, Any]],
        workflow: Any,
        workflow_kwargs: Mapping[str, Any],
        version: int,
        weights: str,
    ) -> None:
        """Start engine, proxy and agents; returns when the proxy answers. Finished groups of the run are not redone.

        Groups that earlier batches rejected (`rejected` in their selection) count as rejected, not as accepted.
        """
        ...

    def publish(self, path: str, version: int) -> None:
        """Engines answer with these weights when this returns; staleness lets more groups begin."""
        ...

    def reject(self, n_groups: int) -> None:
        """So many finished groups teach nothing; others may begin in their place."""
        ...

    def evaluate(
        self, tasks: Sequence[Mapping[str, Any]], workflow: Any, workflow_kwargs: Mapping[str, Any], *, epoch: int
    ) -> None:
        """Run `evaluator.n_samples` episodes of each task with `is_eval`; returns when they ended.

        epoch: the policy's version; it makes the group ids, so an evaluation that a kill cut short goes on.
        """
        ...

    def check(self) -> None:
        """Raise what killed the rollouts, if something did."""
        ...

    def close(self) -> None:
        """End running episodes and every process that `start` started. Twice is once."""
        ...


def find_rollouts(name: str) -> Rollouts:
    """The rollouts that `scheduler.type: <name>` asks for. Raises BadSetting with the names that are installed."""
    known = {point.name: point for point in entry_points(group=GROUP)}
    if name not in known:
        raise BadSetting(
            f"scheduler.type is {name!r}, but the installed schedulers are: {', '.join(sorted(known)) or 'none'}; "
            "install the package that provides it or choose one of these"
        )
    make: Callable[[], Rollouts] = known[name].load()
    return make()
