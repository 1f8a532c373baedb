"""Low-rank adapters (peft) in the place of full weights, and the full weights that they amount to.

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
"""

import warnings
from collections.abc import Mapping
from typing import Any

import peft
import torch
from peft.tuners.lora import Linear, LoraLayer
from peft.tuners.lora.layer import ParamWrapper
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
        with warnings.catch_warnings():
            for told in ("fan_in_fan_out is set", "The following (rank|alpha)_pattern keys"):  # what peft puts right
                warnings.filterwarnings("ignore", told)
            peft.inject_adapter_in_model(settings, model)
    except ValueError as error:  # peft's errors are of that kind
        raise BadSetting(f"actor.lora cannot be put into this model: {error}") from error
    _refuse_what_is_not_merged(model)


def _refuse_what_is_not_merged(model: Any) -> None:
    """Raises BadSetting for adapters that would be trained and not published, or not be trained at all."""
    head = model.get_output_embeddings()
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer) and (layer is head or not isinstance(layer, Linear | ParamWrapper)):
            raise BadSetting(
                f"actor.lora cannot adapt {name}, a {type(layer.get_base_layer()).__name__}"
                f"{' that makes the logits' if layer is head else ''}; name linear layers of the decoder in "
                "actor.lora.target_modules, or all-linear"
            )


@torch.no_grad()
def merged_weights(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state`, the weights of a model with adapters, as the weights they amount to, under the model's own names.

    The sum is made in float32 and rounded once; the model itself is only asked for scales and forms.
    """
    merged = {_own_name(name): value for name, value in state.items() if ".lora_" not in name}
    for owner, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        parameter = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
        name = f"{_own_name(owner)}.{parameter}"
        for adapter in layer.active_adapters:
            down, up = (state[f"{owner}.{part}.{adapter}.weight"].float() for part in ("lora_A", "lora_B"))
            value, change = merged[name], _product(layer, down, up) * layer.scaling[adapter]
            merged[name] = (value.float() + change).to(value.dtype)
    return merged


def _own_name(name: str) -> str:
    return name.replace(".base_layer", "")


def _product(layer: Any, down: Tensor, up: Tensor) -> Tensor:
    """What an adapter adds, before its scale, in the form of what it is added to."""
    if isinstance(layer, ParamWrapper) and layer.num_experts > 1:
        # One pair of matrices for each expert: their ranks stand one expert after the other in `down`, mixed in `up`.
        down_eri = down.reshape(layer.num_experts, -1, down.shape[-1])
        up_ore = up.reshape(up.shape[0], -1, layer.num_experts)
        found_eoi = torch.einsum("ore,eri->eoi", up_ore, down_eri)
        return found_eoi if layer._did_swap_in_out_features else found_eoi.mT
    found = up @ down
    return found.T if getattr(layer, "fan_in_fan_out", False) else found
