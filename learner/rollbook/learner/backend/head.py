"""Logprobs and entropies from hidden states, without keeping [P, V] float32 logits.

Logits are computed in chunks of predictors, reduced to what the loss needs, and computed again in the backward pass
(or kept in the computing precision where they are small). The gradient is written out here; gradcheck tests it.

Shapes: P predictors, H hidden size, V vocabulary, E entries (each names a predictor and the token sampled there).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_BYTES = 256 << 20
"""Float32 logits computed at once."""

KEEP_BYTES = 512 << 20
"""Logits up to this size, in the computing precision, are kept for the backward pass instead of computed again."""


@dataclass(frozen=True)
class Distribution:
    """How logits become the distribution that tokens are sampled from."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    scale: float = 1.0  # the model's own factor on logits
    softcap: float | None = None  # the model's own cap * tanh(logits / cap)


def logprobs_and_entropies(
    hidden_PH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    predictor_E: Tensor,
    target_E: Tensor,
    distribution: Distribution,
) -> tuple[Tensor, Tensor]:
    """logprobs_E of the targets and entropies_P of the predictors' distributions, in nats, at least float32.

    With top_k or top_p the distribution is renormalised over the tokens that are kept; a token that was sampled is
    kept even where the two policies' rounding would put it outside.
    """
    apply: Any = _Head.apply
    logprobs, entropies = apply(hidden_PH, weight_VH, bias_V, predictor_E, target_E, distribution)
    return logprobs, entropies


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scores(raw_PV: Tensor, d: Distribution) -> Tensor:
    """Raw logits to those of the sampling distribution before truncation, wide."""
    scores = raw_PV.to(_wide(raw_PV.dtype))
    if d.scale != 1.0:
        scores = scores * d.scale
    if d.softcap is not None:
        scores = d.softcap * torch.tanh(scores / d.softcap)
    return scores if d.temperature == 1.0 else scores / d.temperature


def _truncate(scores_PV: Tensor, predictor_e: Tensor, target_e: Tensor, d: Distribution) -> Tensor:
    vocabulary = scores_PV.shape[-1]
    if not (0 < d.top_k < vocabulary or d.top_p < 1.0):
        return scores_PV
    kept = torch.ones_like(scores_PV, dtype=torch.bool)
    if 0 < d.top_k < vocabulary:
        kept = scores_PV >= scores_PV.topk(d.top_k).values[:, -1:]
    if d.top_p < 1.0:
        ordered, index = scores_PV.masked_fill(~kept, -torch.inf).sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        kept = kept & torch.zeros_like(kept).scatter(-1, index, before < d.top_p)
    kept[predictor_e, target_e] = True
    return scores_PV.masked_fill(~kept, -torch.inf)


def _chunks(n_predictors: int, vocabulary: int) -> list[tuple[int, int]]:
    size = max(1, CHUNK_BYTES // (4 * vocabulary))
    return [(a, min(a + size, n_predictors)) for a in range(0, n_predictors, size)]


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        predictor: Tensor,
        target: Tensor,
        d: Distribution,
    ) -> tuple[Tensor, Tensor]:
        wide = _wide(hidden.dtype)
        logprobs = hidden.new_empty(len(target), dtype=wide)
        entropies = hidden.new_empty(len(hidden), dtype=wide)
        lse = hidden.new_empty(len(hidden), dtype=wide)
        chunks = _chunks(len(hidden), len(weight))
        keep = len(hidden) * len(weight) * hidden.element_size() <= KEEP_BYTES and ctx.needs_input_grad[0]
        kept: list[Tensor] = []
        for a, b in chunks:
            mine = ((predictor >= a) & (predictor < b)).nonzero()[:, 0]
            raw = F.linear(hidden[a:b], weight, bias)
            if keep:
                kept.append(raw)
            scores = _truncate(_scores(raw, d), predictor[mine] - a, target[mine], d)
            lse[a:b] = scores.logsumexp(-1)
            logprobs[mine] = scores[predictor[mine] - a, target[mine]] - lse[predictor[mine]]
            p = (scores - lse[a:b, None]).exp_()
            entropies[a:b] = lse[a:b] - (p * scores.masked_fill(scores == -torch.inf, 0.0)).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, predictor, target, lse, entropies, *kept)
        ctx.distribution, ctx.chunks = d, chunks
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad_logprobs, grad_entropies = grads
        hidden, weight, bias, predictor, target, lse, entropies, *kept = ctx.saved_tensors
        d: Distribution = ctx.distribution
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=_wide(weight.dtype)) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        per_predictor = torch.zeros_like(lse).index_add_(0, predictor, grad_logprobs)
        for i, (a, b) in enumerate(ctx.chunks):
            mine = ((predictor >= a) & (predictor < b)).nonzero()[:, 0]
            raw = kept[i] if kept else F.linear(hidden[a:b], weight, bias)
            scores = _truncate(_scores(raw, d), predictor[mine] - a, target[mine], d)
            logp = scores - lse[a:b, None]
            p = logp.exp()
            # d logprob(t) / d score = [t] - p;   d entropy / d score = -p (log p + entropy)
            slope = -per_predictor[a:b, None] * p
            if grad_entropies.any():
                finite = logp.masked_fill(logp == -torch.inf, 0.0)
                slope -= grad_entropies[a:b, None] * p * (finite + entropies[a:b, None])
            slope.index_put_((predictor[mine] - a, target[mine]), grad_logprobs[mine], accumulate=True)
            slope *= d.scale / d.temperature
            if d.softcap is not None:
                slope *= 1.0 - torch.tanh(raw.to(slope.dtype) * d.scale / d.softcap) ** 2
            slope = slope.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[a:b] = slope @ weight
            if grad_weight is not None:
                grad_weight += slope.T @ hidden[a:b]
            if grad_bias is not None:
                grad_bias += slope.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            grad_bias,
            None,
            None,
            None,
        )
