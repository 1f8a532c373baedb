"""Low-rank adapters (peft) in the place of full weights, and the full weights that they amount to.

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
"""

from collections.abc import Mapping
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from rollbook.learner.config import LoraConfig
from rollbook.learner.errors import BadSetting


def add_adapters(model: nn.Module, config: LoraConfig) -> None:
    """Put an adapter beside each target module, in place; only the adapters are trained from now on."""
    settings = peft.LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.target_modules,
        task_type="CAUSAL_LM",
    )
    try:
        peft.inject_adapter_in_model(settings, model)
    except ValueError as error:  # peft's errors are of that kind
        raise BadSetting(f"actor.lora cannot be put into this model: {error}") from error


@torch.no_grad()
def merged_weights(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state`, the weights of a model with adapters, as the weights they amount to, under the model's own names.

    The sum is made in float32 and rounded once; the model itself is only asked for scales.
    """
    layers: dict[str, Any] = {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}
    merged: dict[str, Tensor] = {}
    for name, value in state.items():
        owner, _, rest = name.partition(".base_layer.")
        if ".lora_" in name:
            continue
        if rest == "weight" and owner in layers:
            for adapter in layers[owner].active_adapters:
                down, up = (state[f"{owner}.{part}.{adapter}.weight"].float() for part in ("lora_A", "lora_B"))
                value = (value.float() + up @ down * layers[owner].scaling[adapter]).to(value.dtype)
        merged[f"{owner}.{rest}" if rest else name] = value
    return merged
