"""Model folders for tests of engines: the tiny model, with a shorter context or other weights."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rollbook.app.models import prepare_model


def tiny_model(folder: Path, *, seed: int = 0, context: int = 256, scale: float = 8.0) -> Path:
    """A copy of `tiny` whose weights were drawn from `seed`, sharper by `scale` so that tokens are not all alike."""
    shutil.copytree(prepare_model("tiny", cache_dir=folder.parent / "cache"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context}))
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: tensor if tensor.ndim == 1 else torch.empty(tensor.shape).normal_(0, 0.02 * scale, generator=generator)
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tiny_family(folder: Path, kind: str, *, seed: int = 0, **config: Any) -> Path:
    """Random weights of another architecture, as transformers writes it."""
    sizes = {"vocab_size": 263, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    common = sizes | heads | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**common, **config}), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, 0.15, generator=generator)
    model.save_pretrained(folder)
    return folder


def misfits(model: Path, base: Path) -> dict[str, Path]:
    """Checkpoints that must not be taken, by what is wrong with them."""
    weights = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    wrong = {
        "shape": {**weights, name: weights[name][:-1]},
        "missing": {n: tensor for n, tensor in weights.items() if n != name},
        "unknown": {**weights, "model.extra": torch.zeros(3)},
        "integers": {**weights, name: weights[name].int()},
    }
    for kind, tensors in wrong.items():
        (base / kind).mkdir(parents=True)
        save_file(tensors, base / kind / "model.safetensors")
    (base / "cut").mkdir()
    whole = (model / "model.safetensors").read_bytes()
    (base / "cut" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    (base / "empty").mkdir()
    return {path.name: path for path in sorted(base.iterdir())}


def tiny_adapter(model: Path, folder: Path, *, seed: int = 0, scale: float = 0.3) -> Path:
    """A LoRA adapter of `model`, as peft writes it, that changes what it says."""
    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's, about transformers
        changed = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)
        for name, parameter in changed.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0.0, scale)
        changed.save_pretrained(folder)
    return folder


def adapted(model: Path, adapter: Path) -> Any:
    """The model as peft adapts it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), adapter)
