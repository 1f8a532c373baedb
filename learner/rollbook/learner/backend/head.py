"""Logprobs and entropies from hidden states, without keeping [P, V] float32 logits.

Logits are computed in chunks of predictors, reduced to what the loss needs, and computed again in the backward pass
(or kept in the computing precision where they are small). The gradient is written out here; gradcheck tests it. On a
GPU what lies between the products is compiled, one pass over a chunk instead of a dozen. Nothing here waits for the
GPU: which entries belong to which chunk is known beforehand.

Shapes: P predictors, H hidden size, V vocabulary, E entries (each names a predictor and the token sampled there).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rollbook.learner.rows import Ints

from .moving import put

CHUNK_BYTES = 256 << 20
"""Logits computed at once: in the computing precision where all that is done with them is compiled, else in float32."""

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

    @property
    def is_whole(self) -> bool:
        """Whether every token can be drawn."""
        return self.top_p >= 1.0 and self.top_k <= 0


def logprobs_and_entropies(
    hidden_PH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    predictor_E: Ints,
    target_E: Ints,
    distribution: Distribution,
) -> tuple[Tensor, Tensor]:
    """logprobs_E of the targets and entropies_P of the predictors' distributions, in nats, at least float32.

    With top_k or top_p the distribution is renormalised over the tokens that are kept; a token that was sampled is
    kept even where the two policies' rounding would put it outside.
    """
    order = np.lexsort((target_E, predictor_E))
    at, to = predictor_E[order], target_E[order]
    is_new = np.append(True, (at[1:] != at[:-1]) | (to[1:] != to[:-1]))[: len(order)]
    is_compiled = hidden_PH.is_cuda and distribution.is_whole
    size = max(1, CHUNK_BYTES // ((hidden_PH.element_size() if is_compiled else 4) * len(weight_VH)))
    bounds = [*range(0, len(hidden_PH), size), len(hidden_PH)]
    ends = np.searchsorted(at[is_new], bounds).tolist()
    chunks = [(bounds[i], bounds[i + 1], ends[i], ends[i + 1]) for i in range(len(bounds) - 1)]

    def there(values: Ints) -> Tensor:
        return put(values, hidden_PH.device, torch.int64)

    apply: Any = _Head.apply
    logprobs, entropies = apply(
        hidden_PH, weight_VH, bias_V, there(at[is_new]), there(to[is_new]), chunks, distribution
    )
    place_E = np.empty(len(order), np.int64)
    place_E[order] = np.cumsum(is_new) - 1
    return logprobs[there(place_E)], entropies


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


def _reduce(scores_PV: Tensor) -> tuple[Tensor, Tensor]:
    """P: log-sum-exp and entropy."""
    lse = scores_PV.logsumexp(-1)
    p = (scores_PV - lse[:, None]).exp()
    return lse, lse - (p * scores_PV.masked_fill(scores_PV == -torch.inf, 0.0)).sum(-1)


def _reduce_raw(raw_PV: Tensor, d: Distribution) -> tuple[Tensor, Tensor]:
    return _reduce(_scores(raw_PV, d))


def _slope(
    d: Distribution, of_target: Tensor | float, raw: Tensor, scores: Tensor, lse: Tensor, entropy: Tensor,
    of_logprob: Tensor, of_entropy: Tensor | None,
) -> Tensor:  # fmt: skip
    """d loss / d raw logit. `of_target` is the loss's derivative by that token's own logprob.

    d logprob(t) / d score = [t] - p;   d entropy / d score = -p (log p + entropy)
    """
    logp = scores - lse
    p = logp.exp()
    slope = of_target - of_logprob * p
    if of_entropy is not None:
        slope = slope - of_entropy * p * (logp.masked_fill(logp == -torch.inf, 0.0) + entropy)
    if d.scale != d.temperature:
        slope = slope * (d.scale / d.temperature)
    if d.softcap is not None:
        slope = slope * (1.0 - torch.tanh(raw.to(slope.dtype) * (d.scale / d.softcap)) ** 2)
    return slope.to(raw.dtype)


def _slope_raw(
    raw_PV: Tensor, lse: Tensor, entropies: Tensor, of_logprob: Tensor, of_entropy: Tensor | None, d: Distribution
) -> Tensor:
    return _slope(d, 0.0, raw_PV, _scores(raw_PV, d), lse, entropies, of_logprob, of_entropy)


_compiled: dict[Any, Any] = {}


def _fused(function: Any, tensor: Tensor, d: Distribution) -> Any:
    """`function(..., d)`, as one kernel or two where there is a GPU."""
    if not tensor.is_cuda:
        return lambda *args: function(*args, d)
    if (function, d) not in _compiled:
        _compiled[function, d] = torch.compile(lambda *args: function(*args, d), dynamic=True)
    return _compiled[function, d]


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        predictor: Tensor,
        target: Tensor,
        chunks: list[tuple[int, int, int, int]],
        d: Distribution,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        wide = _wide(hidden.dtype)
        logprobs = hidden.new_empty(len(target), dtype=wide)
        entropies = hidden.new_empty(len(hidden), dtype=wide)
        lse = hidden.new_empty(len(hidden), dtype=wide)
        keep = len(hidden) * len(weight) * hidden.element_size() <= KEEP_BYTES and ctx.needs_input_grad[0]
        kept: list[Tensor] = []
        for a, b, e, f in chunks:
            raw = F.linear(hidden[a:b], weight, bias)
            if keep:
                kept.append(raw)
            at, to = predictor[e:f] - a, target[e:f]
            if d.is_whole:
                lse[a:b], entropies[a:b] = _fused(_reduce_raw, raw, d)(raw)
                logprobs[e:f] = _scores(raw[at, to], d) - lse[a:b][at]
                continue
            scores = _truncate(_scores(raw, d), at, to, d)
            lse[a:b], entropies[a:b] = _reduce(scores)
            logprobs[e:f] = scores[at, to] - lse[a:b][at]
        ctx.save_for_backward(hidden, weight, bias, predictor, target, lse, entropies, *kept)
        ctx.distribution, ctx.chunks = d, chunks
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        grad_logprobs, grad_entropies = grads
        hidden, weight, bias, predictor, target, lse, entropies, *kept = ctx.saved_tensors
        d: Distribution = ctx.distribution
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=_wide(weight.dtype)) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        per_predictor = torch.zeros_like(lse)
        if grad_logprobs is not None:
            per_predictor.index_add_(0, predictor, grad_logprobs)
        for i, (a, b, e, f) in enumerate(ctx.chunks):
            at, to = predictor[e:f] - a, target[e:f]
            raw = kept[i] if kept else F.linear(hidden[a:b], weight, bias)
            given: list[Any] = [x if x is None else x[a:b] for x in (lse, entropies, per_predictor, grad_entropies)]
            rows: list[Any] = [x if x is None else x[:, None] for x in given]
            if d.is_whole:
                slope = _fused(_slope_raw, raw, d)(raw, *rows)
                scores = _scores(raw[at, to], d)
            else:
                whole = _truncate(_scores(raw, d), at, to, d)
                slope, scores = _slope(d, 0.0, raw, whole, *rows), whole[at, to]
            if grad_logprobs is not None:  # the targets once more, whole: what is added to a rounded number is lost
                mine: list[Any] = [x if x is None else x[at] for x in given]
                slope[at, to] = _slope(d, grad_logprobs[e:f], raw[at, to], scores, *mine)
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
            *[None] * 4,
        )
