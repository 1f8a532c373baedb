"""One process: a model in the computing precision, float32 master weights, AdamW.

Gradients are added to the masters' as soon as each parameter has one, so no second set in the computing precision
is kept, and micro-batches add up in float32. The copy in the computing precision is what is exported: engine and
learner run the same bits.
"""

import hashlib
import json
import math
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from rollbook.learner.config import ActorConfig, ModelConfig, OptimizerConfig
from rollbook.learner.errors import BadCheckpoint
from rollbook.learner.rows import Floats, Ints
from rollbook.learner.trie import Trie

from . import Pass
from .loading import DTYPES, load_model, pick_device
from .model import TreeModel, model_distribution

if TYPE_CHECKING:
    from . import Objective


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate of a step (from 0): a linear warm-up, then constant, linear or cosine to min_lr_ratio."""
    warmup = math.ceil(config.warmup_steps_proportion * total_steps) if config.warmup_steps_proportion else 0
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.lr_scheduler_type == "constant" or total_steps <= warmup:
        return config.lr
    done = min(1.0, (step - warmup) / (total_steps - warmup))
    left = 1.0 - done if config.lr_scheduler_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)


PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12, "L4": 121e12}
"""Dense bf16 FLOP/s by the makers' datasheets; those of the PCIe and NVL forms are lower."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """What a GPU whose name we know could do; None elsewhere, and in precisions that use other units."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    return next((PEAKS[word] for word in words if word in PEAKS), None)


class SingleBackend:
    """See `backend.Backend`. Without an optimizer config it only scores."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        optimizer: OptimizerConfig | None = None,
        total_steps: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        has_values: bool = False,
        seed: int = 0,
        model: nn.Module | Callable[[], nn.Module] | None = None,
    ) -> None:
        """model: a causal LM in float32 or float64, or what builds one, for programs that have no folder."""
        self.config = config
        self.device = self._pick_device()
        self.dtype = DTYPES[config.dtype]
        self.optimizer_config = optimizer
        self.total_steps = total_steps
        self.steps = 0
        self._seed = seed
        takes_tries = True
        if model is None:
            model, takes_tries = load_model(config, device=self._cradle, seed=seed)
        elif not isinstance(model, nn.Module):
            model = model()
        model = model.to(self._cradle)
        self.has_adapters = isinstance(config, ActorConfig) and config.lora is not None
        if isinstance(config, ActorConfig) and config.lora is not None:
            from .lora import add_adapters

            torch.manual_seed(seed)
            add_adapters(model, config.lora)
        distribution = model_distribution(model, temperature=temperature, top_p=top_p, top_k=top_k)
        self.model = TreeModel(model, distribution, has_values=has_values, takes_tries=takes_tries)
        self.vocabulary, self.hidden, self.ranks = self.model.vocabulary, self.model.hidden, 1
        self.n_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.peak_flops = peak_flops(self.device, self.dtype)
        self.least_shared = 64 if self.device.type == "cuda" else 1
        if not takes_tries:
            self.least_shared = sys.maxsize  # no fork saves that much
        self.masters: dict[str, Tensor] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self._split_precision(is_trained=optimizer is not None)
        if optimizer is not None:
            self.optimizer = self._make_optimizer(optimizer)

    def _pick_device(self) -> torch.device:
        return pick_device(self.config.device)

    @property
    def _cradle(self) -> torch.device:
        """Where the model is loaded before it is where it is computed."""
        return self.device

    def _split_precision(self, *, is_trained: bool) -> None:
        for name, parameter in self.model.named_parameters():
            is_wide = parameter.dtype == self.dtype
            if not is_trained:
                parameter.requires_grad_(False)
            elif parameter.requires_grad:
                master = parameter if is_wide else parameter.detach().clone()
                self.masters[name] = master
                if not is_wide:
                    _on_gradient(parameter, _add_to(master))
            if not is_wide:
                parameter.data = parameter.data.to(self.dtype)

    def _make_optimizer(self, config: OptimizerConfig) -> torch.optim.Optimizer:
        matrices = [p for p in self.masters.values() if p.ndim > 1]
        others = [p for p in self.masters.values() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        if config.type == "sgd":
            return torch.optim.SGD(groups, lr=config.lr)
        betas = (config.beta1, config.beta2)
        return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)

    def score(self, tries: Iterable[Trie]) -> tuple[Floats, Floats]:
        found = _Found(has_entropies=self.model.value_head is None)
        self.model.eval()
        with torch.no_grad():
            for trie in tries:
                found.add(trie, *self.model(trie))
        return found.arrays()

    def forward_backward(self, tries: Iterable[Trie], objective: "Objective") -> Pass:
        # Numbers stay where they are computed until the last micro-batch: reading one would stop the queue.
        found = _Found(has_entropies=self.model.value_head is None)
        totals: dict[str, Tensor] = {}
        self.model.train()
        self._draw_anew()
        tries = list(tries)
        for i, trie in enumerate(tries):
            self._begin(is_last=i == len(tries) - 1)
            value_E, entropy_E = self.model(trie)
            found.add(trie, value_E, entropy_E)
            loss, report = self._judge(objective, trie, value_E, entropy_E)
            _backward(loss)
            for name, value in {"loss": loss.detach(), **report}.items():
                totals[name] = totals[name] + value if name in totals else value
        return Pass({name: float(value) for name, value in totals.items()}, *found.arrays())

    @property
    def _rank(self) -> int:
        return 0

    def _draw_anew(self) -> None:
        """Dropout's numbers follow from seed and step, on any device, so that a checkpoint has none to keep."""
        name = f"{self._seed} {self.steps} {self._rank}"
        torch.manual_seed(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little"))

    def _begin(self, *, is_last: bool) -> None:
        """A micro-batch is about to be computed."""

    def _judge(
        self, objective: "Objective", trie: Trie, value_E: Tensor, entropy_E: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        return objective(trie, value_E, entropy_E)

    def step(self) -> dict[str, float]:
        assert self.optimizer is not None
        assert self.optimizer_config is not None
        lr = learning_rate(self.optimizer_config, self.steps, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        limit = self.optimizer_config.gradient_clipping or math.inf
        norm = self._clip(limit)
        if math.isfinite(norm):
            self.optimizer.step()
            self._copy_down()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return {"grad_norm": norm, "lr": lr, "is_skipped": float(not math.isfinite(norm))}

    def _clip(self, limit: float) -> float:
        """The gradient's norm before it is cut to the limit. What is below it is not touched."""
        found = nn.utils.get_total_norm([m.grad for m in self.masters.values() if m.grad is not None])
        norm = self._number(found)
        if norm > limit:
            nn.utils.clip_grads_with_norm_(self.masters.values(), limit, found)
        return norm

    def _number(self, value: Tensor) -> float:
        return float(value)

    @torch.no_grad()
    def _copy_down(self) -> None:
        parameters = dict(self.model.named_parameters())
        pairs = [(parameters[name], master) for name, master in self.masters.items() if parameters[name] is not master]
        if pairs:
            torch._foreach_copy_([low for low, _ in pairs], [high for _, high in pairs])

    def save(self, folder: Path) -> None:
        assert self.optimizer is not None
        state = {
            "masters": {name: master.detach() for name, master in self.masters.items()},
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
        }
        with _out_of_room(folder / "state.pt"):
            torch.save(state, folder / "state.pt")

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        assert self.optimizer is not None
        if not (folder / "state.pt").is_file():
            raise BadCheckpoint(
                f"the checkpoint {folder} was written by several ranks; go on with actor.backend: fsdp:dN (any N, also "
                "fsdp:d1)"
            )
        state = _read_state(folder)
        self._refuse_others(folder, {name: tuple(master.shape) for name, master in state["masters"].items()})
        for name, master in self.masters.items():
            master.copy_(state["masters"][name])
        settings = [{**group, "params": []} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, mine in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(mine | {"params": group["params"]})  # as the run is set now, not as it was
        self.steps = state["steps"]
        self._copy_down()

    def _refuse_others(self, folder: Path, theirs: Mapping[str, tuple[int, ...]]) -> None:
        mine = {name: tuple(master.shape) for name, master in self.masters.items()}
        if mine != theirs:
            odd = sorted(set(mine.items()) ^ set(theirs.items()))[0][0]
            raise BadCheckpoint(
                f"the checkpoint {folder} is of another model: {odd} is {theirs.get(odd, 'absent')} there and "
                f"{mine.get(odd, 'absent')} here; give the model it was made with"
            )

    def export(self, folder: Path) -> None:
        self._write(folder, None)
        write_canaries(folder, self._canaries())

    @torch.no_grad()
    def _canaries(self) -> list[dict[str, Any]]:
        """The logprob of the likeliest token after a few prompts: what engines compare with once they have loaded."""
        self.model.eval()
        step = max(1, self.vocabulary // 61)
        prompts = [[(1 + n * 7 + i * step) % self.vocabulary for i in range(6)] for n in range(8)]
        logits, _ = self.model(torch.tensor(prompts, device=self.device))
        likeliest = torch.log_softmax(logits.float(), -1).max(-1).values.tolist()
        return [{"prompt_ids": p, "logprob": value} for p, value in zip(prompts, likeliest, strict=True)]

    def _write(self, folder: Path, state: dict[str, Tensor] | None) -> None:
        """A model folder of these weights; None: of the model's own."""
        model: Any = self.model.model  # its own writer knows which weights are tied and what its config needs
        if self.has_adapters:
            from .lora import merged_weights

            state = merged_weights(model, model.state_dict() if state is None else state)
        with _out_of_room(folder / "model.safetensors"):
            model.save_pretrained(folder, state_dict=state)


@contextmanager
def _out_of_room(path: Path) -> Iterator[None]:
    """What these libraries raise where a file cannot be written, as an OSError."""
    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        raise OSError(
            f"{path} could not be written ({str(error).splitlines()[0]}); is the disk full? With room the same command "
            "goes on from what was there before"
        ) from error


def _read_state(folder: Path) -> Mapping[str, Any]:
    """`state.pt`, on the CPU. Raises BadCheckpoint."""
    refuse_damaged_state(folder)
    state: Mapping[str, Any] = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
    return state


def refuse_damaged_state(folder: Path) -> None:
    """Raises BadCheckpoint for a `state.pt` whose checksums are not those of its parts: torch.load compares none."""
    path = folder / "state.pt"
    try:
        with zipfile.ZipFile(path) as parts:
            said = parts.testzip()
    except (OSError, zipfile.BadZipFile) as error:
        said = str(error)
    if said is not None:
        raise BadCheckpoint(f"{path} is damaged ({said})")


def write_canaries(folder: Path, canaries: list[dict[str, Any]]) -> None:
    """Beside the weights; `proxy/checkpoint.py` reads them."""
    (folder / "canary.json").write_text(json.dumps(canaries))


class _Found:
    """Values and entropies of micro-batches, left on the device until all are there."""

    def __init__(self, *, has_entropies: bool) -> None:
        self.index: list[Ints] = [np.empty(0, np.int64)]
        self.values: list[Tensor] = []
        self.entropies: list[Tensor] = []
        self.has_entropies = has_entropies

    def add(self, trie: Trie, value_E: Tensor, entropy_E: Tensor) -> None:
        self.index.append(trie.entry_E)
        self.values.append(value_E.detach())
        self.entropies.append(entropy_E.detach())

    def arrays(self) -> tuple[Floats, Floats]:
        order = np.concatenate(self.index)
        out = np.zeros((2, int(order.max()) + 1 if len(order) else 0))
        if len(order):
            out[0, order] = torch.cat(self.values).double().cpu().numpy()
            if self.has_entropies:
                out[1, order] = torch.cat(self.entropies).double().cpu().numpy()
        return out[0], out[1]


def _on_gradient(parameter: Any, hook: Any) -> None:
    parameter.register_post_accumulate_grad_hook(hook)


def _backward(loss: Any) -> None:
    loss.backward()


def _add_to(master: Tensor) -> Any:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            if master.grad is None:
                master.grad = parameter.grad.to(master.dtype)
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

    return hook
