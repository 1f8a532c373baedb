"""A transformers model over a trie: each node's hidden state once, then logprobs (or values) where they are needed.

Shapes: [B, L] packed nodes, P predictors, E entries, H hidden size.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from rollbook.learner.config import ModelConfig
from rollbook.learner.errors import BadSetting
from rollbook.learner.rows import Ints
from rollbook.learner.trie import Trie, in_one, pack

from . import attention, segments
from .head import Distribution, logprobs_and_entropies
from .moving import put

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BadSetting(f"device is {name!r}; expected auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadSetting(f"device is {name!r} and there are {torch.cuda.device_count()} GPUs; set it to auto or cpu")
    return device


def load_model(config: ModelConfig, *, device: torch.device, seed: int = 0) -> nn.Module:
    """A causal LM in float32 (float64 if asked), ready to be trained. Raises BadSetting naming a missing path."""
    if not config.path:
        raise BadSetting("a model's path (actor, ref or critic) is empty; set it to the folder of a transformers model")
    if config.path.startswith((".", "/")) and not (Path(config.path) / "config.json").exists():
        raise BadSetting(f"{config.path!r} has no config.json; give the folder of a transformers model")
    dtype = torch.float64 if config.dtype == "float64" else torch.float32
    name = {"auto": attention.NAME, "flex": attention.NAME}.get(config.attn_impl, config.attn_impl)
    logging.disable_progress_bar()  # ours has the terminal
    torch.manual_seed(seed)
    auto: Any = AutoModelForCausalLM
    model: Any
    try:
        if config.init_from_scratch:
            model = auto.from_config(AutoConfig.from_pretrained(config.path), dtype=dtype, attn_implementation=name)
        else:
            model = auto.from_pretrained(config.path, dtype=dtype, attn_implementation=name)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: config.json and weights differ in shape
        raise BadSetting(f"could not load a model from {config.path}: {error}") from error
    model.config.use_cache = False
    if config.disable_dropout:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if hasattr(model.config, "attention_dropout"):
            model.config.attention_dropout = 0.0
            for module in model.modules():
                if hasattr(module, "attention_dropout"):
                    module.attention_dropout = 0.0
    if config.gradient_checkpointing:
        recompute_activations(model)
    moved: nn.Module = model.to(device)
    if config.compile:
        if name != attention.NAME:  # attention inside the graph: see attention._dense
            torch.backends.cuda.enable_cudnn_sdp(False)
        for layer in moved.get_decoder().layers:  # type: ignore[operator]
            layer.compile()
    return moved


def recompute_activations(model: Any) -> None:
    """Gradient checkpointing of every decoder layer. transformers renamed it in 5.2x and warns about the old name."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})


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

    def __init__(self, model: nn.Module, distribution: Distribution, *, has_values: bool = False) -> None:
        super().__init__()
        self.model = model
        self.distribution = distribution
        text: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
        self.compute_dtype: torch.dtype | None = None  # where it is not that of the parameters (shards)
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
        config: Any = self.model.config
        is_tree = config._attn_implementation == attention.NAME
        is_blocked = is_tree and device.type == "cuda" and self._head_dim >= attention.LEAST_HEAD
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
        _refuse_window(config, int(trie.depth_T.max()) + 1)
        body: Any = self.model.get_decoder()  # type: ignore[operator]
        output = body(
            input_ids=put(layout.ids_BL, device, torch.int64),
            attention_mask=mask,
            position_ids=position_BL,
            use_cache=False,
        )
        hidden_NH: Tensor = output.last_hidden_state.flatten(0, 1)
        return hidden_NH[put(layout.place_P, device)]

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
        if getattr(text, "v_head_dim", None) is not None:  # values of another size than keys
            return False
        heads = int(text.num_attention_heads)
        key_heads = getattr(text, "num_key_value_heads", None) or heads
        dtype = self.compute_dtype or next(self.parameters()).dtype
        return segments.fast_kernel(heads, key_heads, self._head_dim, dtype, device) is not None

    @property
    def _head_dim(self) -> int:
        text: Any = self.model.config.get_text_config()  # type: ignore[operator, union-attr]
        return int(getattr(text, "head_dim", None) or self.hidden // text.num_attention_heads)


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def _refuse_window(config: Any, longest: int) -> None:
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True) and longest > window:
        raise BadSetting(
            f"a path of {longest} tokens is longer than the model's sliding window of {window}, which trie batches do "
            "not mask; select shorter trajectories or use a model with full attention"
        )
