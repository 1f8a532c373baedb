"""A transformers model over a trie: each node's hidden state once, then logprobs (or values) where they are needed.

Shapes: [B, L] packed nodes, P predictors, E entries, H hidden size.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollbook.learner.errors import BadSetting
from rollbook.learner.rows import Ints
from rollbook.learner.trie import Trie, in_one, pack

from . import attention, segments
from .head import Distribution, logprobs_and_entropies
from .moving import put


def model_distribution(model: nn.Module, *, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Distribution:
    """The sampling distribution, with what the model itself does to its logits."""
    config: Any = model.config
    scale = getattr(config, "logit_scale", None) or 1.0
    if getattr(config, "logits_scaling", None):
        scale /= config.logits_scaling
    return Distribution(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        scale=scale,
        softcap=getattr(config, "final_logit_softcapping", None),
    )


class TreeModel(nn.Module):
    """A causal LM whose forward takes a trie. With `has_values` it has a value head instead of logits."""

    def __init__(
        self, model: nn.Module, distribution: Distribution, *, has_values: bool = False, takes_tries: bool = True
    ) -> None:
        """takes_tries: whether the model does what a mask of a tree says; else it gets one path at a time."""
        super().__init__()
        self.model = model
        self.distribution = distribution
        self.takes_tries = takes_tries
        text: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
        self.compute_dtype: torch.dtype | None = None  # where it is not that of the parameters (shards)
        self.in_blocks = True  # trees by FlexAttention on a GPU, where they are not in segments
        self.in_segments: bool | None = None  # trees in dense pieces; None: on a GPU, where they are few
        self.vocabulary, self.hidden = int(text.vocab_size), int(text.hidden_size)
        self.value_head: nn.Linear | None = None
        if has_values:
            # Zero weights: the first values are 0, so the first advantages are the returns themselves.
            self.value_head = nn.Linear(int(text.hidden_size), 1)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
            self.value_head.to(next(model.parameters()))

    def forward(self, trie: Trie | Tensor) -> tuple[Tensor, Tensor]:
        """logprobs_E and entropies_E; with a value head values_E and nothing.

        Of prompts as they are, ids [B, L]: the logits [B, V] after each, and nothing. (Shards are put together by
        calls of this method only.)
        """
        if isinstance(trie, Tensor):
            asked: Any = self.model
            logits: Tensor = asked(input_ids=trie, use_cache=False).logits[:, -1]
            return logits, logits.new_empty(0)
        device = next(self.parameters()).device
        hidden_PH = self._hidden(trie, device)
        if self.value_head is not None:
            values = self.value_head(hidden_PH)[:, 0][put(trie.predictor_E, device)]
            return values.to(torch.promote_types(values.dtype, torch.float32)), values.new_empty(0)
        head: Any = self.model.get_output_embeddings()  # type: ignore[operator]
        found = [self._reduced(trie, kind, hidden_PH, head) for kind in range(len(trie.draws))]
        if len(found) == 1:
            return found[0][1], found[0][2]
        place = put(np.argsort(np.concatenate([entries for entries, _, _ in found])), device)
        return torch.cat([one for _, one, _ in found])[place], torch.cat([one for _, _, one in found])[place]

    def _reduced(self, trie: Trie, kind: int, hidden_PH: Tensor, head: Any) -> tuple[Ints, Tensor, Tensor]:
        """The entries that were drawn from the trie's distribution of that number, their logprobs and entropies."""
        draw, distribution = trie.draws[kind], self.distribution
        if draw is not None:
            distribution = replace(distribution, temperature=draw.temperature, top_p=draw.top_p, top_k=draw.top_k)
        entries, predictor_E = np.arange(len(trie.entry_E)), trie.predictor_E
        if len(trie.draws) > 1:
            assert trie.draw_P is not None
            mine_P = np.flatnonzero(trie.draw_P == kind)
            entries = np.flatnonzero(trie.draw_P[predictor_E] == kind)
            predictor_E = np.searchsorted(mine_P, predictor_E[entries])
            hidden_PH = hidden_PH[put(mine_P, hidden_PH.device)]
        logprobs, entropies_P = logprobs_and_entropies(
            hidden_PH, head.weight, head.bias, predictor_E, trie.target_E[entries], distribution
        )
        return entries, logprobs, entropies_P[put(predictor_E, hidden_PH.device)]

    def _hidden(self, trie: Trie, device: torch.device) -> Tensor:
        """Final hidden states of the predictors, [P, H]."""
        if not self.takes_tries:
            return self._hidden_of_paths(trie, device)
        config: Any = self.model.config
        is_tree = config._attn_implementation == attention.NAME
        is_blocked = self.in_blocks and is_tree and device.type == "cuda" and self._head_dim >= attention.LEAST_HEAD
        mask: Any = None
        layout = None if trie.is_forked else pack(trie)
        if is_tree and (layout is None or not layout.is_causal):
            mask = self._segments(trie, device)
            if mask is not None:
                layout = in_one(trie)
            elif is_blocked:  # one long sequence: empty blocks cost nothing there
                layout = pack(trie, length=_round_up(trie.n_nodes, 128 if trie.n_nodes < 8192 else 1024))
        if layout is None:
            layout = pack(trie)
        if layout.is_causal:
            position_BL = torch.arange(layout.shape[1], device=device).expand(layout.shape)
        else:
            position_BL = put(layout.depth_BL, device, torch.int64)
        if mask is None and not layout.is_causal:
            end_BL = put(layout.end_BL, device)
            mask = attention.block_mask(end_BL) if is_blocked else attention.dense_mask(end_BL)
            if config._attn_implementation == "eager":  # adds its mask to the scores
                mask = torch.zeros_like(mask, dtype=next(self.parameters()).dtype).masked_fill(~mask, -torch.inf)
        _refuse_window(config.get_text_config(), int(trie.depth_T.max()) + 1)
        body: Any = self.model.get_decoder()  # type: ignore[operator]
        output = body(
            input_ids=put(layout.ids_BL, device, torch.int64),
            attention_mask=mask,
            position_ids=position_BL,
            use_cache=False,
        )
        hidden_NH: Tensor = output.last_hidden_state.flatten(0, 1)
        node: Any = hidden_NH.grad_fn
        if node is not None:
            node.metadata["mask"] = mask  # whose plan the backward pass reads
        return hidden_NH[put(layout.place_P, device)]

    def _hidden_of_paths(self, trie: Trie, device: torch.device) -> Tensor:
        """The same where each path is a sequence of its own and the model gets its ids and nothing else.

        What stands behind a path to fill a batch is seen by no token of it.
        """
        body: Any = self.model.get_decoder()  # type: ignore[operator]
        roots = np.flatnonzero(trie.depth_T == 0)
        sizes = np.diff(np.append(roots, trie.n_nodes))
        found: list[Tensor] = []
        place_T, n_placed = np.empty(trie.n_nodes, np.int64), 0
        waiting = np.argsort(-sizes, kind="stable")
        while len(waiting):
            length = int(sizes[waiting[0]])
            alike = sizes[waiting] * 8 >= length * 7
            ids_BL = np.zeros((int(alike.sum()), length), np.int64)
            for b, tree in enumerate(waiting[alike]):
                mine = slice(roots[tree], roots[tree] + sizes[tree])
                ids_BL[b, : sizes[tree]] = trie.ids_T[mine]
                place_T[mine] = n_placed + b * length + np.arange(sizes[tree])
            output = body(input_ids=put(ids_BL, device, torch.int64), use_cache=False)
            found.append(output.last_hidden_state.flatten(0, 1))
            n_placed += ids_BL.size
            waiting = waiting[~alike]
        return torch.cat(found)[put(place_T[trie.node_P], device)]

    def _segments(self, trie: Trie, device: torch.device) -> segments.Segments | None:
        """The trie as one sequence in dense pieces, if that is how it is computed."""
        if self.in_segments is False or (self.in_segments is None and not self._has_fast_kernel(device)):
            return None
        plan = segments.plan(trie.depth_T, trie.end_T, device)
        if self.in_segments is None and plan.n_calls > segments.MOST_CALLS:
            return None
        return segments.Segments(plan, trie.n_nodes)

    def _has_fast_kernel(self, device: torch.device) -> bool:
        text: Any = self.model.config.get_text_config()  # type: ignore[operator, union-attr]
        if not self._head_dim or getattr(text, "v_head_dim", None) is not None:  # values of another size than keys
            return False
        heads = int(text.num_attention_heads)
        key_heads = getattr(text, "num_key_value_heads", None) or heads
        dtype = self.compute_dtype or next(self.parameters()).dtype
        return segments.fast_kernel(heads, key_heads, self._head_dim, dtype, device) is not None

    @property
    def _head_dim(self) -> int:
        """D; 0 where it is not the same in all layers."""
        text: Any = self.model.config.get_text_config()  # type: ignore[operator, union-attr]
        try:
            found = getattr(text, "head_dim", None)
        except RuntimeError:  # transformers' way to say so
            return 0
        return int(found or self.hidden // text.num_attention_heads)


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def _refuse_window(config: Any, longest: int) -> None:
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True) and longest > window:
        raise BadSetting(
            f"a path of {longest} tokens is longer than the model's sliding window of {window}, which trie batches do "
            "not mask; set actor.attn_impl=plain (ref and critic alike), with which the model masks by itself"
        )
