"""What is learned from a batch: the algorithm's seam. One file each, with its formula and paper.

Shapes: R rows (interactions) of a batch, E entries (trained tokens), of a micro-batch in `Tokens`.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rollbook.learner.config import ActorConfig, NormConfig
from rollbook.learner.errors import BadSetting
from rollbook.learner.rows import Floats, Rows

if TYPE_CHECKING:
    from torch import Tensor

    from .recipe import Scores


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The entries of one micro-batch; whole rows, so sequence-level formulas see whole sequences."""

    logprobs_E: "Tensor"  # of the weights being trained; carries the gradient
    entropies_E: "Tensor"
    old_E: "Tensor"  # of the policy that sampled
    prox_E: "Tensor"  # of the weights at the start of the step (= old where nothing is decoupled)
    ref_E: "Tensor | None"  # of the reference model
    advantages_E: "Tensor"
    row_E: "Tensor"  # 0..n_rows-1
    n_rows: int
    weight_E: "Tensor"  # share of each entry in the batch's loss, as loss_agg says
    mean_E: "Tensor"  # 1/N over the batch's trained entries, 0 elsewhere: for reports


class Algorithm(Protocol):
    """Made from the actor's settings; keeps no state between steps. `recipe.Recipe` implements all but the loss."""

    needs_critic: ClassVar[bool]
    needs_scores: ClassVar[bool]  # logprobs of the weights about to be trained, before the first minibatch
    drop_all_equal: ClassVar[bool]  # groups whose rewards are all equal are rejected and drawn anew
    loss_agg: ClassVar[str]  # the recipe's way to weigh tokens; see `parts.entry_weights`
    adv_norm: "ClassVar[NormConfig | None]"  # of the tokens' advantages
    imitates: ClassVar[bool]  # answers are examples: also what a form left no choice about

    def advantages(self, rows: Rows) -> Floats:
        """R: what the batch records for each row, before anything that depends on a model."""
        ...

    def mask(self, rows: Rows, mask_E: Floats, scores: "Scores") -> Floats:
        """E: which of the tokens count; 0 leaves one out."""
        ...

    def spread(self, rows: Rows, mask_E: Floats, scores: "Scores") -> Floats:
        """E: each token's advantage, before `adv_norm`."""
        ...

    def loss(self, tokens: Tokens) -> "tuple[Tensor, Mapping[str, Tensor]]":
        """This micro-batch's share of the loss, and sums (over the batch: means) to report."""
        ...


NAMES = (
    "best_of_n",
    "cispo",
    "dapo",
    "dpo",
    "dr_grpo",
    "grpo",
    "gspo",
    "lite_ppo",
    "m2po",
    "ppo",
    "reinforce",
    "reinforce_pp",
    "rloo",
    "sapo",
    "sft",
)


def find_algorithm(name: str, actor: ActorConfig) -> Algorithm:
    """`algorithm: <name>`: one of NAMES, or `module.Name` of a class that takes an ActorConfig."""
    if name in NAMES:
        module = importlib.import_module(f"{__name__}.{name}")
        made: Algorithm = module.Algorithm(actor)
        return made
    if "." not in name:
        raise BadSetting(f"algorithm is {name!r}; expected one of {', '.join(NAMES)}, or module.Name of your own")
    path, _, attribute = name.rpartition(".")
    try:
        make: Any = getattr(importlib.import_module(path), attribute)
    except (ImportError, AttributeError) as error:
        raise BadSetting(f"algorithm {name!r} cannot be imported: {error}; give module.Name of a class") from error
    try:
        mine: Algorithm = make(actor)
    except TypeError as error:
        raise BadSetting(
            f"algorithm {name!r} cannot be made from the actor's settings ({error}); start from algorithms/recipe.py"
        ) from error
    if missing := [part for part in ("advantages", "mask", "spread", "loss") if not hasattr(mine, part)]:
        raise BadSetting(f"algorithm {name!r} has no {', '.join(missing)}; start from algorithms/recipe.py")
    return mine
