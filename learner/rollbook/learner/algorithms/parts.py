"""What several algorithms are put together from: reward shaping, normalising, ratios, weights.

Shapes: R rows of a batch, E entries, e episodes. Statistics of rewards run over episodes, never over rows: an agent
that makes more calls has no louder voice in its group.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rollbook.learner.config import ActorConfig, NormConfig, RejectionConfig
from rollbook.learner.errors import BadSetting
from rollbook.learner.rows import Floats, Ints, Rows

from . import Tokens

NO_SPREAD = 1e-8
"""Deviations up to this carry no signal: what would be divided by them becomes 0."""


FAR = 20.0
"""Nats between two policies' logprobs of a token beyond which more makes no difference. Some engines write -9999 for a
token that cannot be; its ratio is infinite in float32, and 0 times that, where it is masked or clipped, is no number.
"""


def shape_rewards(values: Floats, actor: ActorConfig) -> Floats:
    """clip((value + bias) * scaling, +-clip)."""
    shaped = (values + actor.reward_bias) * actor.reward_scaling
    return np.clip(shaped, -actor.reward_clip, actor.reward_clip)


def overlong_penalty(n_tokens: Ints, *, limit: int, zone: int, factor: float) -> Floats:
    """DAPO's soft punishment: 0 up to limit - zone, then linear down to -factor at the limit and beyond.

    Yu et al. 2025, "DAPO", section 3.4, equation 13.
    """
    over = (n_tokens - (limit - zone)) / max(zone, 1)
    return -factor * np.clip(over, 0.0, 1.0)


def normalise(values_R: Floats, rows: Rows, norm: NormConfig, rewards_R: Floats) -> Floats:
    """(value - mean) / deviation, with mean and deviation of the episodes' rewards.

    rewards_R: the episode's reward, repeated on its rows. Where a deviation is asked for and there is none (a group of
    one, all equal), the result is 0. A leave-one-out mean of a group of one is the episode itself: 0 as well.
    """
    _, first, episode_R = np.unique(rows.episode_R, return_index=True, return_inverse=True)
    reward_e = rewards_R[first]
    group_e = rows.group_R[first]
    out_R = values_R.astype(np.float64)
    if norm.mean_level is not None:
        level_e = group_e if norm.mean_level == "group" else np.zeros_like(group_e)
        count_e, mean_e, _ = _statistics(reward_e, level_e, unbiased=norm.std_unbiased)
        if norm.mean_leave1out:
            others = np.maximum(count_e - 1, 1)
            mean_e = np.where(count_e > 1, (mean_e * count_e - reward_e) / others, reward_e)
        out_R = out_R - mean_e[episode_R]
    if norm.std_level is not None:
        level_e = group_e if norm.std_level == "group" else np.zeros_like(group_e)
        _, _, std_e = _statistics(reward_e, level_e, unbiased=norm.std_unbiased)
        std_R = std_e[episode_R]
        out_R = np.where(std_R > NO_SPREAD, out_R / (std_R + norm.eps), 0.0)
    return out_R


def normalise_advantages(advantages_E: Floats, rows: Rows, mask_E: Floats, norm: NormConfig) -> Floats:
    """E: the same for advantages, over the trained tokens of the batch or of the group."""
    out_E = advantages_E.astype(np.float64)

    def level(name: str) -> Ints:
        return rows.group_R[rows.row_E] if name == "group" else np.zeros(len(advantages_E), np.int64)

    if norm.mean_level is not None:
        _, mean_E, _ = _statistics(advantages_E, level(norm.mean_level), unbiased=norm.std_unbiased, weights=mask_E)
        out_E = out_E - mean_E
    if norm.std_level is not None:
        _, _, std_E = _statistics(advantages_E, level(norm.std_level), unbiased=norm.std_unbiased, weights=mask_E)
        out_E = np.where(std_E > NO_SPREAD, out_E / (std_E + norm.eps), 0.0)
    return out_E


def episode_sums(values_R: Floats, rows: Rows) -> Floats:
    """R: the sum over all rows of each row's episode."""
    return np.asarray(np.bincount(rows.episode_R, values_R)[rows.episode_R]) if len(rows) else values_R


def group_max(values_R: Floats, rows: Rows) -> Floats:
    """R: the largest value in each row's group."""
    most = np.full(int(rows.group_R.max(initial=-1)) + 1, -np.inf)
    np.maximum.at(most, rows.group_R, values_R)
    return np.asarray(most[rows.group_R])


def to_go(values_E: Floats, rows: Rows) -> Floats:
    """E: the sum from each entry to the end of its row."""
    before_E = np.concatenate([[0.0], np.cumsum(values_E)])
    return np.asarray(before_E[rows.output_starts[1:]][rows.row_E] - before_E[:-1])


def terminal_rewards(values_R: Floats, rows: Rows, mask_E: Floats) -> Floats:
    """E: each row's value at its last trained entry, 0 elsewhere."""
    rewards_E = np.zeros(len(mask_E))
    trained = np.flatnonzero(mask_E)
    last = trained[np.append(rows.row_E[trained][1:] != rows.row_E[trained][:-1], True)] if len(trained) else trained
    rewards_E[last] = values_R[rows.row_E[last]]
    return rewards_E


def gae(rewards_E: Floats, values_E: Floats, mask_E: Floats, rows: Rows, *, discount: float, lam: float) -> Floats:
    """E: generalised advantage estimation within each row, over trained entries only; 0 on the others.

    Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation", equation 16.
    """
    advantages_E = np.zeros(len(rewards_E))
    # Rows side by side, right-aligned, so one pass over the longest row serves all of them.
    trained = np.flatnonzero(mask_E)
    row = rows.row_E[trained]
    count_R = np.bincount(row, minlength=len(rows))
    ends = np.cumsum(count_R)
    alive = np.flatnonzero(count_R)
    running_R, next_value_R = np.zeros(len(rows)), np.zeros(len(rows))
    for back in range(int(count_R.max(initial=0))):
        alive = alive[count_R[alive] > back]
        at = trained[ends[alive] - 1 - back]
        delta = rewards_E[at] + discount * next_value_R[alive] - values_E[at]
        running_R[alive] = delta + discount * lam * running_R[alive]
        next_value_R[alive] = values_E[at]
        advantages_E[at] = running_R[alive]
    return advantages_E


def keep_second_moment(squares_E: Floats, mask_E: Floats, threshold: float) -> Floats:
    """E: the mask without the largest squares, so that the mean of those left is at most the threshold."""
    trained = np.flatnonzero(mask_E)
    order = trained[np.argsort(squares_E[trained], kind="stable")]
    means = np.cumsum(squares_E[order]) / np.arange(1, len(order) + 1)
    kept_E = np.zeros_like(mask_E)
    kept = order[: int(np.searchsorted(means, threshold, side="right"))]  # means of sorted values only rise
    kept_E[kept] = mask_E[kept]
    return kept_E


def kl_estimate_numpy(logprobs_E: Floats, ref_E: Floats, estimator: str) -> Floats:
    """E: `kl_estimate` of arrays."""
    return kl_estimate(torch.as_tensor(logprobs_E), torch.as_tensor(ref_E), estimator).numpy()


def _statistics(
    values: Floats, level: Ints, *, unbiased: bool, weights: Floats | None = None
) -> tuple[Floats, Floats, Floats]:
    """Count, mean and deviation of each value's level, one per value. The deviation of one value is 0."""
    w = np.ones(len(values)) if weights is None else weights
    _, level = np.unique(level, return_inverse=True)
    if not len(values):
        return values, values, values
    count = np.bincount(level, w)
    mean = np.bincount(level, w * values) / np.maximum(count, 1e-300)
    square = np.bincount(level, w * (values - mean[level]) ** 2)
    divisor = count - 1 if unbiased else count
    std = np.sqrt(np.where(divisor > 0, square / np.where(divisor > 0, divisor, 1.0), 0.0))
    return count[level], mean[level], std[level]


def entry_weights(rows: Rows, mask_E: Floats, *, loss_agg: str, fixed_length: int | None) -> Floats:
    """E: each entry's share of the loss.

    token_mean: 1 / trained tokens. sequence_mean: 1 / (trained rows * the row's trained tokens).
    sum: 1. fixed_length: 1 / (trained rows * fixed_length), which keeps long answers as loud per token as short ones
    (Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.1).
    """
    trained_R = np.bincount(rows.row_E, mask_E, minlength=len(rows))
    n_rows = max(int((trained_R > 0).sum()), 1)
    if loss_agg == "sum":
        return mask_E
    if loss_agg == "token_mean":
        return mask_E / max(mask_E.sum(), 1.0)
    if loss_agg == "sequence_mean":
        return mask_E / (n_rows * np.maximum(trained_R, 1.0))[rows.row_E]
    if loss_agg == "fixed_length":
        if not fixed_length:
            raise BadSetting("loss_agg is fixed_length; set actor.fixed_length or actor.max_new_tokens to that length")
        return mask_E / (n_rows * fixed_length)
    raise BadSetting(f"loss_agg is {loss_agg!r}; expected token_mean, sequence_mean or fixed_length")


def sequence_mean(values_E: Tensor, t: Tokens) -> Tensor:
    """E: the mean over each entry's row, over entries that count."""
    counts_E = (t.mean_E > 0).to(values_E.dtype)
    total = values_E.new_zeros(t.n_rows).index_add(0, t.row_E, values_E * counts_E)
    count = values_E.new_zeros(t.n_rows).index_add(0, t.row_E, counts_E)
    return (total / count.clamp(min=1.0))[t.row_E]


def apart(one_E: Tensor, other_E: Tensor) -> Tensor:
    """E: the difference of two logprobs, at most FAR."""
    return (one_E - other_E).clamp(-FAR, FAR)


def log_ratio(t: Tokens, level: str) -> Tensor:
    """E: logp - prox; at sequence level its mean over the row, on each of the row's entries."""
    difference_E = apart(t.logprobs_E, t.prox_E)
    if level == "token":
        return difference_E
    if level == "sequence":
        return sequence_mean(difference_E, t)
    raise BadSetting(f"importance_sampling_level is {level!r}; expected token or sequence")


def behaviour_weight(t: Tokens, rejection: RejectionConfig | None) -> tuple[Tensor, Mapping[str, Tensor]]:
    """E: exp(prox - old), masked or capped; a constant to the gradient.

    level sequence puts the aggregate's weight on all of a row's entries. kl metrics of d = prox - old:
    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d (the estimators of KL(old | prox)).
    """
    d = apart(t.prox_E, t.old_E).detach()
    if rejection is not None and rejection.level == "sequence":
        aggregate = _aggregate(d, t, rejection.agg)
        weight = aggregate.clamp(-FAR, FAR).exp()
    else:
        weight = d.exp()
    if rejection is None:
        return weight, {}
    if rejection.metric == "ratio":
        metric = weight
    else:
        per_token = {"kl_k1": -d, "kl_k2": 0.5 * d * d, "kl_k3": torch.expm1(d) - d}[rejection.metric]
        metric = per_token if rejection.level == "token" else _aggregate(per_token, t, rejection.agg)
    outside = torch.zeros_like(metric, dtype=torch.bool)
    if rejection.upper is not None:
        outside |= metric > rejection.upper
    if rejection.lower is not None:
        outside |= metric < rejection.lower
    if rejection.action == "mask":
        weight = torch.where(outside, torch.zeros_like(weight), weight)
    elif rejection.metric == "ratio":
        weight = weight.clamp(min=rejection.lower, max=rejection.upper)
    else:
        raise BadSetting("rejection_sampling: action clamp needs metric ratio; use action mask with a kl metric")
    return weight, {"rejected": (t.mean_E * outside).sum()}


def _aggregate(values_E: Tensor, t: Tokens, agg: str) -> Tensor:
    if agg == "mean":
        return sequence_mean(values_E, t)
    counts_E = t.mean_E > 0
    if agg == "sum":
        return values_E.new_zeros(t.n_rows).index_add(0, t.row_E, values_E * counts_E)[t.row_E]
    least = torch.full((t.n_rows,), -torch.inf, dtype=values_E.dtype, device=values_E.device)
    masked = values_E.masked_fill(~counts_E, -torch.inf)
    largest = least.scatter_reduce(0, t.row_E, masked, "amax")[t.row_E]
    return largest.masked_fill(largest == -torch.inf, 0.0)


def kl_estimate(logprobs_E: Tensor, ref_E: Tensor, estimator: str) -> Tensor:
    """E: an estimate of KL(policy | reference) at sampled tokens. Schulman 2020, "Approximating KL divergence".

    With d = ref - logp: k1 = -d (unbiased, noisy), k2 = d^2 / 2 (biased), k3 = exp(d) - 1 - d (unbiased, >= 0).
    """
    d = apart(ref_E, logprobs_E)
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * d * d
    if estimator == "k3":
        return torch.expm1(d) - d
    raise BadSetting(f"kl_estimator is {estimator!r}; expected k1, k2 or k3")


def clipped_surrogate(
    ratio_E: Tensor, advantages_E: Tensor, *, low: float, high: float, c_clip: float | None
) -> tuple[Tensor, Tensor]:
    """E: max(-A rho, -A clip(rho, 1-low, 1+high)), and where the clip is active.

    Schulman et al. 2017, "PPO", equation 7. c_clip: where A < 0 the loss is at most c |A|
    (Ye et al. 2020, "Mastering complex control in MOBA games", equation 5).
    """
    plain = -advantages_E * ratio_E
    clipped = -advantages_E * ratio_E.clamp(1.0 - low, 1.0 + high)
    loss = torch.maximum(plain, clipped)
    is_clipped = clipped > plain
    if c_clip is not None:
        capped = torch.minimum(loss, c_clip * advantages_E.abs())
        loss = torch.where(advantages_E < 0, capped, loss)
    return loss, is_clipped


def with_extras(
    loss: Tensor, t: Tokens, actor: ActorConfig, report: Mapping[str, Tensor]
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Add the entropy bonus and the KL loss that the settings ask for, and what every objective reports."""
    extra: dict[str, Tensor] = {}
    if actor.entropy_coef:
        loss = loss - actor.entropy_coef * (t.weight_E * t.entropies_E).sum()
    if t.ref_E is not None:
        kl = kl_estimate(t.logprobs_E, t.ref_E, actor.kl_estimator)
        extra["kl_ref"] = (t.mean_E * kl.detach()).sum()
        if actor.kl_loss_coef:
            loss = loss + actor.kl_loss_coef * (t.weight_E * kl).sum()
    extra["entropy"] = (t.mean_E * t.entropies_E.detach()).sum()
    return loss, {**report, **extra}
