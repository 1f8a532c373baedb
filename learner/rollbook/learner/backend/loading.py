"""A transformers model as it is loaded: from a folder, without chance, and computed in a way that is right for it.

A trie rests on attention that does what its mask says and on positions that are given. Models that mix tokens in
another way (convolutions, states, scores with a bias of their own) would get other logprobs, and nothing would fail.
So each model is asked once: a small tree here, and the same rows one by one through transformers' own plain code.
"""

from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from rollbook.learner.config import ModelConfig
from rollbook.learner.errors import BadSetting
from rollbook.learner.rows import Floats, Rows
from rollbook.learner.trie import build

from . import attention
from .model import TreeModel, model_distribution

_log = getLogger(__name__)

TOLERANCE = 1e-3
"""Nats, of nine tokens in ten: float32 is far below, another computation far above. The tenth may differ, where a
router was undecided between two experts."""

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


def load_model(config: ModelConfig, *, device: torch.device, seed: int = 0) -> tuple[nn.Module, bool]:
    """A causal LM in float32 (float64 if asked), ready to be trained, and whether it may be computed in tries.

    Raises BadSetting naming a missing path, and for a model that gets other logprobs here than by itself.
    """
    if not config.path:
        raise BadSetting("a model's path (actor, ref or critic) is empty; set it to the folder of a transformers model")
    if config.path.startswith((".", "/")) and not (Path(config.path) / "config.json").exists():
        raise BadSetting(f"{config.path!r} has no config.json; give the folder of a transformers model")
    dtype = torch.float64 if config.dtype == "float64" else torch.float32
    logging.disable_progress_bar()  # ours has the terminal
    torch.manual_seed(seed)
    auto: Any = AutoModelForCausalLM
    model: Any
    try:
        if config.init_from_scratch:
            model = auto.from_config(AutoConfig.from_pretrained(config.path), dtype=dtype, attn_implementation="eager")
        else:
            model = auto.from_pretrained(config.path, dtype=dtype, attn_implementation="eager")
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: config.json and weights differ in shape
        raise BadSetting(f"could not load a model from {config.path}: {error}") from error
    model.config.use_cache = False
    moved: nn.Module = model.to(device)
    rows = _few_rows(int(model.config.get_text_config().vocab_size))
    expected = _one_by_one(model.eval(), rows)
    if config.disable_dropout:
        without_dropout(model)
    if config.gradient_checkpointing:
        recompute_activations(model)
    takes_tries = choose_attention(moved, config, rows, expected)
    if config.compile:
        if model.config._attn_implementation != attention.NAME:  # attention inside the graph: see attention._dense
            torch.backends.cuda.enable_cudnn_sdp(False)
        for layer in moved.get_decoder().layers:  # type: ignore[operator]
            layer.compile()
    return moved, takes_tries


def without_dropout(model: Any) -> None:
    """Switch off whatever a model leaves to chance in training, as a module, a number of a module, or of its config."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        _switch_off(module)
    for config in (model.config, model.config.get_text_config()):
        _switch_off(config)


def _switch_off(owner: Any) -> None:
    for name, value in list(vars(owner).items()):
        if isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(owner, name, 0.0)


def recompute_activations(model: Any) -> None:
    """Gradient checkpointing of every decoder layer. transformers renamed it in 5.2x and warns about the old name."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def choose_attention(model: Any, config: ModelConfig, rows: Rows, expected: Floats) -> bool:
    """Set the attention that the model is computed with; returns whether it may be computed in tries.

    expected: E, what transformers' own code says of the rows. Raises BadSetting where no way gives just that.
    """
    ways = {
        "auto": [(attention.NAME, True), ("sdpa", False), ("eager", False)],
        "plain": [("sdpa", False), ("eager", False)],
    }.get(config.attn_impl, [(config.attn_impl, True), (config.attn_impl, False)])
    if _is_capped(model, rows):
        ways = [(name, takes_tries) for name, takes_tries in ways if name == "eager"]
    model.train(config.disable_dropout)  # as it will be trained: chance that is left shows
    said = "" if ways else f"there is nothing that computes its attention with attn_impl={config.attn_impl}"
    for name, takes_tries in ways:
        try:
            model.set_attn_implementation(name)
            if model.config._attn_implementation != name:
                said = f"it does not take {name} attention"
                continue
            found = _in_one(model, rows, takes_tries=takes_tries)
        except Exception as error:  # whatever a model's code raises where it is used in a way it was not made for
            said = f"with {name} attention it raises {type(error).__name__}: {error}"
            continue
        is_number = np.isfinite(expected)  # weights that are no numbers are told where they are used
        distance = float(np.quantile(np.abs(found - expected)[is_number], 0.9)) if is_number.any() else 0.0
        if distance <= TOLERANCE:
            if not takes_tries and config.attn_impl != "plain":
                why = said or "it needs that"
                _log.warning("%s is computed path by path with its own %s attention: %s", config.path, name, why)
            return takes_tries
        said = f"with {name} attention a token's logprob is off by {distance:.2g} nats"
    raise BadSetting(
        f"the learner cannot compute {config.path} (a {model.config.model_type}) as transformers does: {said}; "
        "take another model, or attn_impl: auto"
    )


def _few_rows(vocabulary: int) -> Rows:
    """Two groups that share prompts, forks inside answers, and a turn that goes on from another."""
    first, second = [3, 41, 5, 19, 7, 23], [11, 2, 31, 13, 29]
    paths = [(first, [17, 4, 9, 21]), (first, [17, 4, 33, 8]), (first, [6, 14, 27, 12])]
    paths += [(second, [10, 37, 22, 5]), (second, [18, 3, 40, 16]), ([*second, 18, 3, 40, 16, 24], [1, 30, 26])]
    n = [len(output) for _, output in paths]
    return Rows(
        interaction_ids=[str(r) for r in range(len(paths))],
        episode_ids=[str(r) for r in range(len(paths))],
        group_ids=["" for _ in paths],
        ids=np.concatenate([np.array(prompt + output) for prompt, output in paths]) % vocabulary,
        starts=np.concatenate([[0], np.cumsum([len(prompt) + len(output) for prompt, output in paths])]),
        n_prompt=np.array([len(prompt) for prompt, _ in paths]),
        logprobs=np.zeros(sum(n)),
        versions=np.zeros(sum(n), np.int64),
        credits=np.zeros(len(paths)),
        rewards=np.zeros(len(paths)),
        is_cut=np.zeros(len(paths), np.bool_),
    )


@torch.no_grad()
def _one_by_one(model: Any, rows: Rows) -> Floats:
    """E: logprobs as transformers computes them."""
    found: list[Tensor] = []
    for r in range(len(rows)):
        ids = torch.as_tensor(rows.path(r), dtype=torch.int64, device=model.device)
        n = int(rows.n_prompt[r])
        logp = model(input_ids=ids[None], use_cache=False).logits[0, n - 1 : -1].double().log_softmax(-1)
        found.append(logp.gather(-1, ids[n:, None])[:, 0])
    return torch.cat(found).cpu().numpy()


@torch.no_grad()
def _in_one(model: Any, rows: Rows, *, takes_tries: bool) -> Floats:
    """E: logprobs as they are computed here."""
    every = int(model.config.get_text_config().vocab_size)  # of so many none is left out, and no kernel is compiled
    distribution = model_distribution(model, temperature=1.0, top_k=every)
    tree = TreeModel(model, distribution, takes_tries=takes_tries)
    tree.in_segments, tree.in_blocks = False, False  # kernels are compared with one another where they are chosen
    return tree(build(rows, form="trie" if takes_tries else "paths"))[0].double().cpu().numpy()


def _is_capped(model: Any, rows: Rows) -> bool:
    """Whether its attention does something to scores that only its own plain code knows: others leave it out."""
    try:
        model.set_attn_implementation(attention.NAME)
        _one_by_one(model, rows)
    except attention.NeedsItsOwn:
        return True
    except Exception:  # it does not take this attention at all, which the loop over the ways finds, too
        return False
    return False
