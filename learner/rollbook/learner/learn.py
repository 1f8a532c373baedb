"""One batch into the weights: reference, values, advantages, loss, optimiser steps.

Shapes: R rows, E entries of the batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .algorithms import Algorithm, Tokens
from .algorithms.parts import entry_weights, normalise_advantages
from .algorithms.recipe import Scores
from .backend import Backend
from .backend.moving import put
from .config import ActorConfig, CriticConfig, MicroBatchSpec
from .errors import BadSetting, PoliciesDisagree
from .rows import Floats, Ints, Rows
from .trie import Trie, micro_batches


@dataclass(frozen=True)
class Learned:
    """What a step did, and the learner's own view of the batch before it."""

    metrics: dict[str, float]
    logprobs: Floats  # E, of the weights before the step
    entropies: Floats  # E


def learn(
    rows: Rows,
    *,
    actor: Backend,
    algorithm: Algorithm,
    config: ActorConfig,
    version: int,
    seed: int,
    reference: Backend | None = None,
    ref_E: Floats | None = None,
    critic: Backend | None = None,
    critic_config: CriticConfig | None = None,
) -> Learned:
    """Train a batch. `version` is that of the weights now; `seed` orders the minibatches.

    ref_E: logprobs of the reference, where they are known already; else `reference` computes them.

    Raises BadSetting before anything is computed where the book has tokens that the model does not know, and
    PoliciesDisagree before anything is changed where engine and learner are too far apart.
    """
    check_vocabularies(rows, actor, reference, critic)
    if config.temperature is not None:
        rows = replace(rows, draws=())  # the settings know better than the book
    parts = minibatches(rows, config.ppo_n_minibatches, seed=seed)
    tries = tries_of(rows, config.mb_spec, actor)
    mask_E = trained_mask(rows, config, version)
    if not algorithm.imitates:
        mask_E[rows.held_E & (rows.logprobs == 0)] = 0.0  # the form left one token: no choice, no gradient
    now_E, entropy_E = np.zeros(len(mask_E)), np.zeros(len(mask_E))
    is_scored = (
        len(parts) > 1 or algorithm.needs_scores or bool(config.kl_ctl and (reference is not None or ref_E is not None))
    )
    if is_scored:
        now_E, entropy_E = actor.score(tries)
        check_gap(now_E, rows, mask_E, config, version)
        rows = replace(rows, logprobs=np.where(rows.held_E, now_E, rows.logprobs))
    scores = Scores(
        now_E=now_E if is_scored else None,
        ref_E=ref_E if reference is None else reference.score(tries)[0],
        values_E=None if critic is None else critic.score(tries)[0],
    )
    mask_E = algorithm.mask(rows, mask_E, scores)
    advantages_E = algorithm.spread(rows, mask_E, scores)
    returns_E = None if scores.values_E is None else advantages_E + scores.values_E
    norm = config.adv_norm or algorithm.adv_norm
    if norm is not None:
        advantages_E = normalise_advantages(advantages_E, rows, mask_E, norm)
    # A step without a gradient would still move weights, by decay and momentum.
    parts = [part for part in parts if mask_E[np.isin(rows.row_E, part)].any()]
    loss_agg = config.loss_agg or algorithm.loss_agg
    fixed_length = config.fixed_length or config.max_new_tokens

    def train_part(part: Ints) -> dict[str, float]:
        part_mask_E = np.where(np.isin(rows.row_E, part), mask_E, 0.0)
        weight_E = entry_weights(rows, part_mask_E, loss_agg=loss_agg, fixed_length=fixed_length)
        mean_E = part_mask_E / max(part_mask_E.sum(), 1.0)

        objective = PolicyObjective(
            algorithm=algorithm,
            is_decoupled=config.use_decoupled_loss,
            arrays={
                "old": rows.logprobs,
                "advantages": advantages_E,
                "weight": weight_E,
                "mean": mean_E,
                **({} if scores.ref_E is None else {"ref": scores.ref_E}),
                **({} if is_scored or not rows.is_held.any() else {"held": rows.held_E}),
                **proximal(rows, now_E if is_scored else None, config, version),
            },
        )
        found = actor.forward_backward(
            tries if len(parts) == 1 else tries_of(rows, config.mb_spec, actor, part), objective
        )
        report = dict(found.report)
        if not is_scored:  # the one pass over the batch: these are the logprobs before the step
            now_E[:], entropy_E[:] = found.values_E, found.entropies_E
            check_gap(now_E, rows, mask_E, config, version)
        report |= actor.step()
        if critic is not None and critic_config is not None:
            assert scores.values_E is not None
            assert returns_E is not None
            value_objective = ValueObjective(
                config=critic_config, arrays={"old": scores.values_E, "target": returns_E, "mean": mean_E}
            )
            told = critic.forward_backward(tries_of(rows, critic_config.mb_spec, critic, part), value_objective)
            told_more = told.report | critic.step()
            report |= {f"critic_{name}": value for name, value in told_more.items()}
        return report

    metrics: dict[str, float] = {}
    if not parts:
        metrics = {"loss": 0.0, "grad_norm": 0.0, "is_skipped": 1.0}
        if not is_scored:
            now_E, entropy_E = actor.score(tries)
    for part in parts:
        for name, value in train_part(part).items():
            metrics[name] = metrics.get(name, 0.0) + value / len(parts)
    metrics |= gap(now_E, rows, mask_E, version)
    metrics["n_computed"] = float(sum(trie.n_nodes for trie in tries))  # what is shared, once
    metrics |= describe(rows, mask_E, advantages_E, version)
    return Learned(metrics, now_E, entropy_E)


@dataclass(frozen=True, kw_only=True)
class PolicyObjective:
    """See `backend.Objective`: the algorithm's loss over arrays of the batch's entries."""

    algorithm: Algorithm
    is_decoupled: bool  # the proximal policy is that of `prox`, of `drift`, or (neither) of this very pass
    arrays: Mapping[str, Floats]  # old, advantages, weight, mean; ref, prox, drift and held where there are any

    def take(self, entries: Ints) -> "PolicyObjective":
        return replace(self, arrays={name: values_E[entries] for name, values_E in self.arrays.items()})

    def __call__(self, trie: Trie, values_E: Tensor, entropies_E: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        of = _picker(self.arrays, trie, values_E)
        old_E = of("old")
        if "held" in self.arrays:  # of no distribution that is known here: taken to be this very pass's
            old_E = torch.where(of("held") > 0, values_E.detach(), old_E)
        prox_E = old_E
        if "drift" in self.arrays:
            prox_E = old_E + of("drift") * (values_E.detach() - old_E)
        elif "prox" in self.arrays:
            prox_E = of("prox")
        elif self.is_decoupled:
            prox_E = values_E.detach()
        return self.algorithm.loss(
            Tokens(
                logprobs_E=values_E,
                entropies_E=entropies_E,
                old_E=old_E,
                prox_E=prox_E,
                ref_E=of("ref") if "ref" in self.arrays else None,
                advantages_E=of("advantages"),
                row_E=put(trie.row_E, values_E.device),
                n_rows=len(trie.row_indices),
                weight_E=of("weight"),
                mean_E=of("mean"),
            )
        )


def proximal(rows: Rows, now_E: Floats | None, config: ActorConfig, version: int) -> dict[str, Floats]:
    """The proximal policy: its logprobs, or how far the current one has drifted to it; see PolicyObjective.

    now_E: the logprobs before the step; None where the pass at hand finds them.
    """
    if not config.use_decoupled_loss:
        return {}
    if config.prox_logp_method == "loglinear":
        return {"drift": interpolation(rows.versions, version)}
    return {} if now_E is None else {"prox": now_E}


@dataclass(frozen=True, kw_only=True)
class ValueObjective:
    """See `backend.Objective`: half the squared (or the Huber) distance of value and return, its change clipped."""

    config: CriticConfig
    arrays: Mapping[str, Floats]  # old, target, mean

    def take(self, entries: Ints) -> "ValueObjective":
        return replace(self, arrays={name: values_E[entries] for name, values_E in self.arrays.items()})

    def __call__(self, trie: Trie, values_E: Tensor, entropies_E: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        of = _picker(self.arrays, trie, values_E)
        old_E, target_E, weight_E = of("old"), of("target"), of("mean")
        loss_E = self._distance(values_E, target_E)
        if self.config.value_eps_clip:
            moved_E = (values_E - old_E).clamp(-self.config.value_eps_clip, self.config.value_eps_clip)
            loss_E = torch.maximum(loss_E, self._distance(old_E + moved_E, target_E))
        return (weight_E * loss_E).sum(), {"value": (weight_E * values_E.detach()).sum()}

    def _distance(self, values_E: Tensor, target_E: Tensor) -> Tensor:
        if self.config.value_loss_type == "huber":
            return torch.nn.functional.huber_loss(values_E, target_E, reduction="none")
        return 0.5 * (values_E - target_E) ** 2


def _picker(arrays: Mapping[str, Floats], trie: Trie, like: Tensor) -> Callable[[str], Tensor]:
    """From an array over the batch's entries to a tensor over this micro-batch's."""
    return lambda name: put(arrays[name][trie.entry_E], like.device, like.dtype)


def check_vocabularies(rows: Rows, actor: Backend, reference: Backend | None, critic: Backend | None) -> None:
    """Raise BadSetting for tokens that one of the models does not know."""
    for name, backend in (("model", actor), ("reference", reference), ("critic", critic)):
        if backend is not None:
            check_vocabulary(rows, backend, name)


def check_vocabulary(rows: Rows, backend: Backend, name: str = "model") -> None:
    """Raise BadSetting for tokens of another model."""
    for token in (int(rows.ids.max(initial=0)), int(rows.ids.min(initial=0))):
        if not 0 <= token < backend.vocabulary:
            raise BadSetting(
                f"the book has token id {token}, but the {name}'s vocabulary has {backend.vocabulary}; "
                "train with the model (and tokenizer) that sampled these tokens"
            )


def tries_of(rows: Rows, spec: MicroBatchSpec, backend: Backend, part: Ints | None = None) -> list[Trie]:
    """The micro-batches of a batch (or of some of its rows), as many as the backend's ranks can share evenly."""
    return list(
        micro_batches(
            rows,
            part,
            max_tokens=spec.max_tokens_per_mb,
            at_least=spec.n_mbs,
            ranks=backend.ranks,
            hidden=backend.hidden,
            least=backend.least_shared,
        )
    )


def minibatches(rows: Rows, n: int, *, seed: int) -> list[Ints]:
    """Row indices of each optimiser step: whole groups, dealt in an order that the seed decides."""
    group_R = rows.group_R
    groups = np.random.default_rng(seed).permutation(int(group_R.max()) + 1) if n > 1 else np.unique(group_R)
    parts = [np.flatnonzero(np.isin(group_R, part)) for part in np.array_split(groups, min(n, len(groups)))]
    return [part for part in parts if len(part)]


def trained_mask(rows: Rows, config: ActorConfig, version: int) -> Floats:
    """E: 1 where a token is trained. Staleness is judged per token, when the batch is taken."""
    mask_E = np.ones(len(rows.logprobs))
    if config.max_staleness is not None:
        mask_E[version - rows.versions > config.max_staleness] = 0.0
    if config.mask_no_eos:
        mask_E[rows.is_cut[rows.row_E]] = 0.0
    return mask_E


def interpolation(versions_E: Ints, version: int) -> Floats:
    """E: how far from behaviour to current weights the proximal policy is taken to lie, by version.

    The step moves the weights from `version` to version + 1; a token of version v has gone (version - v) of the
    (version + 1 - v) steps between. 0 for a token of the current version.
    """
    behind = np.maximum(version - versions_E, 0)
    return behind / (behind + 1.0)


def gap(now_E: Floats, rows: Rows, mask_E: Floats, version: int) -> dict[str, float]:
    """Mean |learner - engine| in nats per token: over all tokens, and over those of the current version.

    Answers that were held to a form are left out: their logprobs are of what the form left.
    """
    difference_E = np.abs(now_E - rows.logprobs)
    mask_E = np.where(rows.held_E, 0.0, mask_E)
    fresh_E = mask_E * (rows.versions == version)
    out = {"gap": float((difference_E * mask_E).sum() / max(mask_E.sum(), 1.0))}
    if fresh_E.sum():
        out["gap_fresh"] = float((difference_E * fresh_E).sum() / fresh_E.sum())
    return out


def check_gap(now_E: Floats, rows: Rows, mask_E: Floats, config: ActorConfig, version: int) -> None:
    """Raise PoliciesDisagree where tokens of the same weights get very different logprobs, or any gets no number."""
    fresh = gap(now_E, rows, mask_E, version).get("gap_fresh", 0.0)
    if n_odd := int((~np.isfinite(now_E)).sum()):
        raise PoliciesDisagree(
            f"the model gives {n_odd} of {len(now_E)} tokens a logprob that is no finite number: its weights hold such "
            "numbers, or actor.dtype is too narrow for them. Nothing was trained"
        )
    if not fresh <= config.logprob_gap_stop:
        raise PoliciesDisagree(
            f"engine and learner differ by {fresh:.2f} nats per token on tokens of one version ({version}), more than "
            f"actor.logprob_gap_stop = {config.logprob_gap_stop}. Check that the engine loaded these weights, that "
            "actor.temperature is the sampling temperature, and that its logprobs are of the processed distribution"
        )


def describe(rows: Rows, mask_E: Floats, advantages_E: Floats, version: int) -> dict[str, float]:
    """Facts about the batch that every algorithm reports."""
    _, first = np.unique(rows.episode_R, return_index=True)
    staleness_E = version - rows.versions
    n = max(mask_E.sum(), 1.0)
    return {
        "reward": float(rows.rewards[first].mean()),
        "reward_std": float(rows.rewards[first].std()),
        "advantage_abs": float(np.abs(advantages_E * mask_E).sum() / n),
        "n_rows": float(len(rows)),
        "n_episodes": float(len(first)),
        "n_groups": float(len(np.unique(rows.group_R))),
        "n_tokens": float(np.diff(rows.starts).sum()),
        "n_trained_tokens": float(mask_E.sum()),
        "output_length": float(rows.n_output.mean()),
        "cut": float(rows.is_cut.mean()),
        "staleness": float((staleness_E * mask_E).sum() / n),
        "staleness_max": float(staleness_E.max(initial=0)),
    }
