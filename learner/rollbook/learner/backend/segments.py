"""Tree attention out of dense attention: no mask, only whole rectangles and triangles.

A trie falls into segments, runs of tokens without a fork. A token sees its own segment up to itself (a triangle) and
each segment above it whole (a rectangle: all tokens below a segment against that segment's keys). Both are what the
fastest kernels do. A token's parts are put together by their log-sum-exp, as in ring attention; the backward pass gives
every part the whole's output and log-sum-exp, from which each finds the true probabilities, so nothing is approximate.

Shapes: [1, H, L, D] queries, [1, K, L, D] keys and values (K heads, grouped), [1, H, L] log-sum-exp.
"""

import itertools
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from rollbook.learner.rows import Ints

from .moving import put

LONG = 1024
"""Segments of so many tokens fill a GPU by themselves: a call each, nothing gathered, no new shape for each mixture."""

ALIKE = 0.8
"""Segments share a batch of triangles if none is shorter than this part of the longest: the rest is padding."""

MOST_CALLS = 48
"""A trie in more pieces than this has its mask computed by FlexAttention instead: launches would cost more."""


@dataclass(frozen=True)
class Triangles:
    """Segments of about one length, each against itself.

    Segments of one length that lie side by side are a view; others are gathered and padded.
    """

    start: int
    stop: int
    count: int
    index_BL: Tensor | None  # token of each place; a padded place repeats its segment's last token
    place_N: Tensor | None  # b * L + l of the places that are none
    token_N: Tensor | None  # their tokens
    is_padded_BL: Tensor | None


@dataclass(frozen=True)
class Rectangle:
    """Queries [below, stop) see keys [start, below) whole."""

    start: int
    below: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """How one packed sequence is computed."""

    triangles: list[Triangles]
    rectangles: list[Rectangle]
    starts: Tensor  # of all segments, and the end: what kernels of ragged batches take
    longest: int

    @property
    def n_calls(self) -> int:
        """Kernels launched in a forward pass."""
        return len(self.triangles) + len(self.rectangles)


_plans: WeakValueDictionary[int, Plan] = WeakValueDictionary()
_numbers = itertools.count()


class Segments(BlockMask):
    """A plan in the place of a mask: models hand a four-dimensional mask on as it is.

    Graphs are compiled around tensors, so what they are given of the plan is its number, as one. The plan lives as
    long as this does; what its backward pass belongs to must hold it.
    """

    def __init__(self, plan: Plan, length: int) -> None:
        self.plan = plan
        self.length = length
        number = next(_numbers)
        self.number = torch.tensor([number])
        _plans[number] = plan

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the mask that this stands for."""
        return 1, 1, self.length, self.length

    def __repr__(self) -> str:
        return f"Segments({self.plan.n_calls} calls, {self.length} tokens)"


def plan(depth_L: Ints, end_L: Ints, device: torch.device) -> Plan:
    """Segments of a sequence in depth-first order, from each token's depth and the end of its subtree."""
    n = len(depth_L)
    goes_on = (depth_L[1:] == depth_L[:-1] + 1) & (end_L[1:] == end_L[:-1])
    starts = np.concatenate([[0], np.flatnonzero(~goes_on) + 1])
    stops = np.append(starts[1:], n)
    rectangles = [Rectangle(int(a), int(b), int(end_L[a])) for a, b in zip(starts, stops, strict=True) if end_L[a] > b]
    lengths = stops - starts
    triangles: list[Triangles] = []
    alike: list[int] = []
    for i in np.argsort(-lengths, kind="stable").tolist():
        is_view = bool(alike) and lengths[i] == lengths[alike[-1]] and starts[i] == stops[alike[-1]]
        if alike and not is_view and (lengths[i] >= LONG or lengths[i] < ALIKE * lengths[alike[0]]):
            triangles.append(_triangles(starts[alike], stops[alike], device))
            alike = []
        alike.append(i)
    triangles.append(_triangles(starts[alike], stops[alike], device))
    edges = put(np.append(starts, n), device, torch.int32)
    return Plan(triangles, rectangles, edges, int((stops - starts).max()))


def _triangles(starts: Ints, stops: Ints, device: torch.device) -> Triangles:
    lengths = stops - starts
    if lengths[0] > 1 and (lengths == lengths[0]).all() and (starts[1:] == stops[:-1]).all():
        return Triangles(int(starts[0]), int(stops[-1]), len(starts), None, None, None, None)
    place = starts[:, None] + np.arange(max(2, int(lengths.max())))  # cuDNN takes no single key
    is_real = place < stops[:, None]
    index = np.minimum(place, stops[:, None] - 1)
    return Triangles(
        int(starts[0]),
        int(stops[-1]),
        len(starts),
        put(index, device),
        put(np.flatnonzero(is_real), device),
        put(index[is_real], device),
        put(~is_real, device),
    )


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Segments, scale: float | None) -> Tensor:
    """[1, H, L, D], as if each token had seen its path."""
    out: Tensor = _attend(query, key, value, mask.number, query.shape[-1] ** -0.5 if scale is None else scale)[0]
    return out


# Operators of their own, so that a compiled layer is one graph with these two in it.


@torch.library.custom_op("rollbook::attend", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor, number: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp."""
    kernel, plan = kernel_for(query, key), _plans[int(number)]
    if kernel.ragged is not None:
        out, lse = kernel.ragged.forward(query, key, value, plan.starts, plan.longest, scale)
    else:
        out, lse = _alike(query), _room_for_lse(query)
        for part in plan.triangles:
            got, got_lse = kernel.forward(*(_gather(x, part) for x in (query, key, value)), True, scale)
            _scatter(out, got, part)
            _scatter(lse, got_lse, part)
    for cross in plan.rectangles:
        q, kv = slice(cross.below, cross.stop), slice(cross.start, cross.below)
        got, got_lse = kernel.forward(query[:, :, q], key[:, :, kv], value[:, :, kv], False, scale)
        merge(out[:, :, q], lse[:, :, q], got, got_lse)
    return out, lse


@torch.library.custom_op("rollbook::attend_backward", mutates_args=())
def _attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, number: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    kernel, plan = kernel_for(query, key), _plans[int(number)]
    if kernel.ragged is not None:
        slopes = kernel.ragged.backward(grad, query, key, value, out, lse, plan.starts, plan.longest, scale)
    else:
        slopes = (_alike(query), _alike(key), _alike(value))
        for part in plan.triangles:
            parts = [_gather(x, part) for x in (grad, query, key, value, out, lse)]
            if part.is_padded_BL is not None:  # a padded place has probability 0, so it adds nothing
                parts[-1] = parts[-1].masked_fill(part.is_padded_BL[:, None], 1e5)
            for slope, got in zip(slopes, kernel.backward(*parts, True, scale), strict=True):
                _scatter(slope, got, part)
    for cross in plan.rectangles:
        q, kv = slice(cross.below, cross.stop), slice(cross.start, cross.below)
        views = (query[:, :, q], key[:, :, kv], value[:, :, kv], out[:, :, q], lse[:, :, q])
        got_q, got_k, got_v = kernel.backward(grad[:, :, q], *views, False, scale)
        slopes[0][:, :, q] += got_q
        slopes[1][:, :, kv] += got_k
        slopes[2][:, :, kv] += got_v
    return slopes


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, number: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return _alike(query), _room_for_lse(query)


@_attend_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, number: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _alike(query), _alike(key), _alike(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    query, key, value, number, out, lse = ctx.saved_tensors
    return *_attend_backward(grad, query, key, value, out, lse, number, ctx.scale), None, None


_attend.register_autograd(_differentiate, setup_context=_keep)


def _room_for_lse(query: Tensor) -> Tensor:
    return query.new_empty(query.shape[:3], dtype=_wide(query.dtype))


def _alike(x: Tensor) -> Tensor:
    """Room for as much, [1, H, L, D] with the heads of a token side by side: as models lay them out."""
    return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def _view(x: Tensor, part: Triangles) -> Tensor:
    return x[0, :, part.start : part.stop].unflatten(1, (part.count, -1)).transpose(0, 1)


def _gather(x: Tensor, part: Triangles) -> Tensor:
    """[B, H, L, ...] of the segments, from [1, H, L, ...]."""
    if part.index_BL is None:
        return _view(x, part)
    if x.ndim == 3:
        return x[0][:, part.index_BL.flatten()].view(x.shape[1], *part.index_BL.shape).transpose(0, 1)
    flat = x.transpose(1, 2)[0].index_select(0, part.index_BL.flatten())
    return flat.view(*part.index_BL.shape, *flat.shape[1:]).transpose(1, 2)


def _scatter(x: Tensor, got: Tensor, part: Triangles) -> None:
    if part.place_N is None or part.token_N is None:
        _view(x, part).copy_(got)
        return
    flat = got.transpose(1, 2).flatten(0, 1).index_select(0, part.place_N)
    x.transpose(1, 2)[0].index_copy_(0, part.token_N, flat)


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    whole = torch.logaddexp(lse, more_lse)
    out.copy_(out * (lse - whole).exp()[..., None] + more * (more_lse - whole).exp()[..., None])
    lse.copy_(whole)


_compiled_merge: Any = None


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Put two parts of a softmax together, in place. One kernel on a GPU."""
    global _compiled_merge
    if not out.is_cuda:
        _merge(out, lse, more, more_lse)
        return
    if _compiled_merge is None:
        _compiled_merge = torch.compile(_merge, dynamic=True)
    _compiled_merge(out, lse, more, more_lse)


# ---- what computes a triangle or a rectangle ---------------------------------------------------------------------


@dataclass(frozen=True)
class Ragged:
    """All triangles of a sequence in one call, whatever their lengths; starts and longest are the plan's.

    forward(q, k, v, starts, longest, scale) -> out, lse.
    backward(grad, q, k, v, out, lse, starts, longest, scale) -> the gradients of q, k and v.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Kernel:
    """forward(q, k, v, is_causal, scale) -> out, lse.

    backward(grad, q, k, v, out, lse, is_causal, scale) -> the gradients of q, k and v.
    """

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    ragged: Ragged | None = None


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, is_causal, scale)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ _spread(v, q).to(scores.dtype)).to(q.dtype), lse


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    p = (_scores(q, k, is_causal, scale) - lse[..., None]).exp()
    grad, out = grad.to(p.dtype), out.to(p.dtype)
    slope = p * (grad @ _spread(v, q).to(p.dtype).mT - (grad * out).sum(-1, keepdim=True)) * scale
    grad_q = slope @ _spread(k, q).to(p.dtype)
    grad_k, grad_v = _fold(slope.mT @ q.to(p.dtype), k), _fold(p.mT @ grad, v)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _scores(q: Tensor, k: Tensor, is_causal: bool, scale: float) -> Tensor:
    wide = _wide(q.dtype)
    scores = q.to(wide) @ _spread(k, q).to(wide).mT * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores


def _spread(x: Tensor, like: Tensor) -> Tensor:
    return x.repeat_interleave(like.shape[1] // x.shape[1], dim=1)


def _fold(x: Tensor, like: Tensor) -> Tensor:
    return x.unflatten(1, (like.shape[1], -1)).sum(2)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)
    return out, lse[..., : q.shape[2]]


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    lengths = None, None, q.shape[2], k.shape[2]
    got: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, is_causal, *_no_dropout(q.device), scale=scale
    )
    return got[0], got[1], got[2]


def _flash_ragged_forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *packed, starts, starts, longest, longest, 0.0, True, False, scale=scale
    )
    return out.transpose(0, 1)[None], lse.view(q.shape[:3])


def _flash_ragged_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts: Tensor, longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    packed = [x[0].transpose(0, 1) for x in (grad, q, k, v, out)]
    got: Any = torch.ops.aten._flash_attention_backward(
        *packed, lse[0], starts, starts, longest, longest, 0.0, True, *_no_dropout(q.device), scale=scale
    )
    one, other, third = (x.transpose(0, 1)[None] for x in got)
    return one, other, third


@lru_cache
def _no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """In the place of a generator's seed and offset, which nobody reads without dropout."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.zeros((), dtype=torch.uint64, device=device)


HAS_ONE_PLAN = os.environ.setdefault("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1") == "1"
"""cuDNN makes a plan for each new shape, which takes longer than the attention of a step; so torch gives it lengths
rounded up to a power of two and the true ones as data. That wants the heads of a token side by side, everywhere."""


def _by_token(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        _by_token(q), _by_token(k), _by_token(v), None, True, 0.0, is_causal, False, scale=scale
    )
    return out, lse.reshape(q.shape[:3])


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    lengths = None, None, q.shape[2], k.shape[2]
    lse = _by_token(lse) if HAS_ONE_PLAN else lse.contiguous()
    packed = (_by_token(x) for x in (grad, q, k, v, out))
    got: Any = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *packed, lse[..., None], *_no_dropout(q.device), None, *lengths, 0.0, is_causal, scale=scale
    )
    return got[0], got[1], got[2]


def _repeating(kernel: Kernel) -> Kernel:
    """The same for a kernel that does not know grouped heads."""

    def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        return kernel.forward(q, _spread(k, q), _spread(v, q), is_causal, scale)

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        grad_q, grad_k, grad_v = kernel.backward(grad, q, _spread(k, q), _spread(v, q), *others)
        return grad_q, _fold(grad_k, k), _fold(grad_v, v)

    return Kernel(f"{kernel.name}, repeated heads", forward, backward)


PLAIN = Kernel("plain", _plain_forward, _plain_backward)
CUDNN = Kernel("cudnn", _cudnn_forward, _cudnn_backward)
FLASH = Kernel("flash", _flash_forward, _flash_backward)
RAGGED = Kernel("flash, ragged", _flash_forward, _flash_backward, Ragged(_flash_ragged_forward, _flash_ragged_backward))
ON_GPU = (CUDNN, RAGGED, FLASH, _repeating(CUDNN), _repeating(FLASH))

_chosen: dict[tuple[Any, ...], Kernel | None] = {}


def kernel_for(query: Tensor, key: Tensor) -> Kernel:
    """What computes these heads here."""
    if not query.is_cuda:
        return PLAIN
    found = fast_kernel(query.shape[1], key.shape[1], query.shape[3], query.dtype, query.device)
    assert found is not None
    return found


def fast_kernel(heads: int, key_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Kernel | None:
    """The first kernel that works for such heads on this GPU and agrees with the plain computation."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    kind = (heads, key_heads, dim, dtype, device)
    if kind not in _chosen:
        _chosen[kind] = next((kernel for kernel in ON_GPU if error_of(kernel, *kind) < 0.02), None)
    return _chosen[kind]


@torch.no_grad()
def error_of(kernel: Kernel, heads: int, key_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> float:
    """Largest relative error of output and gradients against the plain computation; infinite if it cannot run."""
    generator = torch.Generator(device=device).manual_seed(0)
    scale = dim**-0.5

    def draw(batch: int, n: int, n_heads: int) -> Tensor:
        made = torch.randn(batch, n, n_heads, dim, generator=generator, device=device, dtype=torch.float32)
        return made.to(dtype).transpose(1, 2)

    def drawn(batch: int, n_q: int, n_k: int) -> tuple[Tensor, ...]:
        return (
            draw(batch, n_q, heads), draw(batch, n_k, key_heads), draw(batch, n_k, key_heads), draw(batch, n_q, heads)
        )  # fmt: skip

    def computed(is_causal: bool, by: Kernel, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        out, lse = by.forward(q, k, v, is_causal, scale)
        return (out, lse, *by.backward(grad, q, k, v, out, lse, is_causal, scale))

    def pieces(by: Kernel, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        edges = [0, 192, 292, 500]
        if by.ragged is not None:
            starts, longest = torch.tensor(edges, dtype=torch.int32, device=device), 208
            out, lse = by.ragged.forward(q, k, v, starts, longest, scale)
            return (out, lse, *by.ragged.backward(grad, q, k, v, out, lse, starts, longest, scale))
        found = [
            computed(True, by, q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], grad[:, :, a:b]) for a, b in pairwise(edges)
        ]
        return tuple(torch.cat(parts, 2) for parts in zip(*found, strict=True))

    cases: list[tuple[tuple[Tensor, ...], Callable[..., tuple[Tensor, ...]]]] = [
        (drawn(2, 192, 192), partial(computed, True)),
        (drawn(2, 320, 192), partial(computed, False)),
        (drawn(1, 500, 500), pieces),
    ]
    worst = 0.0
    for inputs, compute in cases:
        expected = compute(PLAIN, *inputs)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "TORCH_CUDNN_SDPA_AVOID_RECOMPILE")
                got = compute(kernel, *inputs)
        except (RuntimeError, TypeError):  # no such kernel for these heads, this card or this torch
            return float("inf")
        for one, other in zip(got, expected, strict=True):
            if one.shape != other.shape or one.isnan().any():
                return float("inf")
            worst = max(worst, float((one.float() - other.float()).norm() / other.float().norm()))
    return worst
