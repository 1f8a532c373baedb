"""Attention over tries: plain causal where a sequence is one path, a tree elsewhere.

On a GPU a tree of few forks is computed in dense pieces (`segments.py`), one of many by FlexAttention: blocks of
128 x 128 that are empty are skipped, full ones need no mask. Which blocks are which follows from the subtree ends
alone, so nothing of size L x L is ever made. On a CPU it is a boolean mask. Registered with transformers under NAME;
the model's own attention code calls it.

Shapes: [B, H, L, D] queries, [B, K, L, D] keys and values (K heads, grouped), N blocks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface

from . import segments

NAME = "rollbook_tree"
BLOCK = 128
LEAST_HEAD = 16
"""FlexAttention's kernel takes no smaller D; such models, which are toys, get a boolean mask on a GPU, too."""

_compiled: Any = None


class NeedsItsOwn(Exception):
    """Scores that are capped, or sinks beside the keys: nothing that is fast here computes them."""


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers asks of an attention function: [B, L, H, D] and no weights."""
    if softcap is not None or s_aux is not None:
        raise NeedsItsOwn
    is_grouped = query.shape[1] != key.shape[1]
    if isinstance(attention_mask, segments.Segments):
        out = segments.attend(query, key, value, attention_mask, scaling)
    elif isinstance(attention_mask, BlockMask):
        out = _flex(query, key, value, attention_mask, scaling, is_grouped)
    else:
        out = _dense(query, key, value, attention_mask, dropout, scaling, is_grouped)
    return out.transpose(1, 2).contiguous(), None


@torch.compiler.disable  # with segments.HAS_ONE_PLAN cuDNN's log-sum-exp has other strides than a graph expects
def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float | None,
    is_grouped: bool,
) -> Tensor:
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=is_grouped,
    )


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None, is_grouped: bool) -> Tensor:
    global _compiled
    if _compiled is None:
        _compiled = torch.compile(flex_attention) if query.is_cuda else flex_attention
    out: Tensor = _compiled(query, key, value, block_mask=mask, scale=scale, enable_gqa=is_grouped)
    return out


def dense_mask(end_BL: Tensor) -> Tensor:
    """[B, 1, L, L], True where query (row) sees key (column)."""
    q = torch.arange(end_BL.shape[1], device=end_BL.device)
    return ((q[None, None, :] <= q[None, :, None]) & (q[None, :, None] < end_BL[:, None, :]))[:, None]


def block_mask(end_BL: Tensor) -> BlockMask:
    """The same for FlexAttention; L must be a multiple of BLOCK.

    With k <= q < end[k]: a block of keys before a block of queries is seen at all iff its largest end is beyond the
    first query, and seen in full iff its smallest end is beyond the last. On the diagonal every token sees itself.
    """
    batch, length = end_BL.shape
    n = length // BLOCK
    ends_BNb = end_BL.reshape(batch, n, BLOCK)
    least, most = ends_BNb.amin(-1)[:, None, :], ends_BNb.amax(-1)[:, None, :]
    block = torch.arange(n, device=end_BL.device)
    i, j = block[None, :, None], block[None, None, :]
    is_full = (j < i) & (least >= (i + 1) * BLOCK)
    is_seen = ((j < i) & (most > i * BLOCK)) | (j == i).expand(batch, n, n)

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        index = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        return chosen.sum(-1, dtype=torch.int32)[:, None], index.to(torch.int32)[:, None]

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < end_BL[b, k])

    return BlockMask.from_kv_blocks(*listed(is_seen & ~is_full), *listed(is_full), BLOCK_SIZE=BLOCK, mask_mod=sees)


AttentionInterface.register(NAME, attend)
