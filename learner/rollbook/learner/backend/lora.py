"""Low-rank adapters (peft) in the place of full weights, and the full weights that they amount to.

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
"""

from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from rollbook.learner.config import LoraConfig


def add_adapters(model: nn.Module, config: LoraConfig) -> None:
    """Put an adapter beside each target module, in place; only the adapters are trained from now on."""
    settings = peft.LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.target_modules,
        task_type="CAUSAL_LM",
    )
    peft.inject_adapter_in_model(settings, model)


@torch.no_grad()
def merged_weights(model: nn.Module) -> dict[str, Tensor] | None:
    """The model's weights with the adapters added, under the model's own names; None where there are no adapters.

    The sum is made in float32 and rounded once, and the trained adapters stay as they are.
    """
    layers: dict[str, Any] = {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}
    if not layers:
        return None
    merged: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        owner, _, rest = name.partition(".base_layer.")
        if ".lora_" in name:
            continue
        if rest == "weight" and owner in layers:
            delta = sum(_delta(layers[owner], adapter) for adapter in layers[owner].active_adapters)
            value = (value.float() + delta).to(value.dtype)
        merged[f"{owner}.{rest}" if rest else name] = value
    return merged


def _delta(layer: Any, adapter: str) -> Tensor:
    down, up = layer.lora_A[adapter].weight.float(), layer.lora_B[adapter].weight.float()
    product: Tensor = up @ down * layer.scaling[adapter]
    return product
