"""Several processes, each with a share of the weights and of the batch (FSDP2).

Weights, moments and gradients are cut into as many shards as there are ranks (ZeRO-3); a layer is put together in the
computing precision just before it is computed, its gradients are summed over the ranks in float32. Where memory allows,
weights stay together for all of a step's micro-batches and gradients are summed once, after the last. The objective's
shares add up to the whole batch's, so nothing is averaged: N ranks compute the loss, the gradient and the step of one.

A batch is dealt by what its tries cost, not by their number; every rank gets the same number, because the layers are
put together by all ranks at once. A rank gets its tries, and of the batch's arrays its entries; nothing else.
"""

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rollbook.learner.errors import BadCheckpoint, BadSetting
from rollbook.learner.rows import Floats, Ints
from rollbook.learner.trie import Trie, cost

from . import Pass
from .single import SingleBackend, refuse_damaged_state, write_canaries
from .team import Team

if TYPE_CHECKING:
    from . import Objective

EMPTY = np.empty(0, np.int64)
FILLER = Trie(
    row_indices=EMPTY,
    ids_T=np.zeros(1, np.int64),
    depth_T=np.zeros(1, np.int64),
    end_T=np.ones(1, np.int64),
    node_P=EMPTY,
    predictor_E=EMPTY,
    target_E=EMPTY,
    row_E=EMPTY,
    entry_E=EMPTY,
)
"""One token and nothing to learn: what a rank computes while the others have a micro-batch more."""


SUMS = "checksums.json"
"""Beside a checkpoint's shards: file name -> CRC-32 of its bytes."""

ROOM = 1 / 8
"""The part of a GPU's memory that whole weights and gradients may take, where the settings leave it open."""


@dataclass(frozen=True)
class Share:
    """One rank's part of a batch."""

    tries: list[Trie]  # their entries numbered from 0
    entries: Ints  # of the batch


def deal(tries: Sequence[Trie], n: int, hidden: int) -> list[Share]:
    """As many tries to each of n ranks, of about the same cost: in each round the dearest goes to who has least."""
    order = sorted(range(len(tries)), key=lambda i: -cost(tries[i], hidden))
    hands: list[list[Trie]] = [[] for _ in range(n)]
    held = [0.0] * n
    for start in range(0, len(order), n):
        takers = sorted(range(n), key=lambda rank: held[rank])
        for rank, i in zip(takers, order[start : start + n], strict=False):
            hands[rank].append(tries[i])
            held[rank] += cost(tries[i], hidden)
    n_rounds = -(-len(tries) // n)
    return [_share([*hand, *[FILLER] * (n_rounds - len(hand))]) for hand in hands]


def _share(tries: list[Trie]) -> Share:
    at, local = 0, []
    for trie in tries:
        local.append(replace(trie, entry_E=np.arange(at, at + len(trie.entry_E))))
        at += len(trie.entry_E)
    return Share(local, np.concatenate([EMPTY, *(trie.entry_E for trie in tries)]))


class ShardedBackend:
    """See `backend.Backend`. Lives on rank 0; what it is asked for, all ranks do."""

    def __init__(self, team: Team, *args: Any, **kwargs: Any) -> None:
        self.team = team
        self._name = f"shard-{len(team.names)}"
        self.local: Shard = team.make(self._name, *args, **kwargs)
        self.vocabulary, self.hidden, self.ranks = self.local.vocabulary, self.local.hidden, team.size
        self.least_shared = self.local.least_shared
        self.n_parameters = self.local.n_parameters
        peak = self.local.peak_flops
        self.peak_flops = None if peak is None else peak * team.size

    def score(self, tries: Iterable[Trie]) -> tuple[Floats, Floats]:
        shares = deal(list(tries), self.ranks, self.hidden)
        found = self.team.run(self._name, "score", [(share.tries,) for share in shares])
        return _gathered(shares, found)

    def forward_backward(self, tries: Iterable[Trie], objective: "Objective") -> Pass:
        shares = deal(list(tries), self.ranks, self.hidden)
        orders = [(share.tries, objective.take(share.entries)) for share in shares]
        passes: list[Pass] = self.team.run(self._name, "forward_backward", orders)
        report: dict[str, float] = {}
        for one in passes:
            for name, value in one.report.items():
                report[name] = report.get(name, 0.0) + value
        return Pass(report, *_gathered(shares, [(one.values_E, one.entropies_E) for one in passes]))

    def step(self) -> dict[str, float]:
        told: dict[str, float] = self._all("step")[0]
        return told

    def save(self, folder: Path) -> None:
        sums: dict[str, int] = {}
        for told in self._all("save", folder):
            sums |= told
        (folder / "shards" / SUMS).write_text(json.dumps(sums))

    def load(self, folder: Path) -> None:
        # What a rank raises ends it; found here first, a fault is an error of this process.
        if (folder / "state.pt").is_file():
            refuse_damaged_state(folder)
        else:
            damaged = [fault for found in self._all("damaged", folder) for fault in found]
            if damaged:
                raise BadCheckpoint(damaged[0])
        self.local.check_checkpoint(folder)
        self._all("load", folder)

    def export(self, folder: Path) -> None:
        self._all("export", folder)

    def _all(self, method: str, *args: Any) -> list[Any]:
        return self.team.run(self._name, method, [args] * self.ranks)


def _gathered(shares: Sequence[Share], found: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    n = 1 + max(int(share.entries.max(initial=-1)) for share in shares)
    out = np.zeros((2, n))
    for share, (values_E, entropies_E) in zip(shares, found, strict=True):
        out[0, share.entries], out[1, share.entries] = values_E, entropies_E
    return out[0], out[1]


class Shard(SingleBackend):
    """One rank's share of the weights. Every method is called on all ranks at once."""

    def __init__(self, device: torch.device, *args: Any, **kwargs: Any) -> None:
        self._own = device
        super().__init__(*args, **kwargs)

    def _pick_device(self) -> torch.device:
        return self._own

    @property
    def _cradle(self) -> torch.device:
        return torch.device("cpu")  # a GPU never holds more than its share and the layer at hand

    @property
    def _rank(self) -> int:
        return dist.get_rank()

    def _split_precision(self, *, is_trained: bool) -> None:
        if not self.model.takes_tries:  # it gets as many passes as lengths of paths, and ranks must make as many
            raise BadSetting(
                f"{self.config.path} can only be computed path by path, which ranks do not share yet; set "
                "actor.backend=single"
            )
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        for parameter in self.model.parameters():
            parameter.requires_grad_(parameter.requires_grad and is_trained)
            if not parameter.requires_grad:  # nobody adds to it: no wide copy is kept
                parameter.data = parameter.data.to(self.dtype)
        self.gathers_once = self._gathers_once(wide)
        settings: dict[str, Any] = {
            "reshard_after_forward": not self.gathers_once,
            "mesh": init_device_mesh(self.device.type, (dist.get_world_size(),)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=wide, cast_forward_inputs=False),
        }
        decoder: Any = self.model.model.get_decoder()  # type: ignore[operator]
        self._parts: list[Any] = [fully_shard(layer, **settings) for layer in decoder.layers]
        root: Any = fully_shard(self.model, **{**settings, "reshard_after_forward": False})  # backward begins there
        self._parts.insert(0, root)
        for module in self._parts:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        for module, following in pairwise(self._parts):  # so that a layer is there when its turn comes
            module.set_modules_to_forward_prefetch([following])
        self.model.to(self.device)
        self.model.compute_dtype = self.dtype
        self.masters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def _gathers_once(self, wide: torch.dtype) -> bool:
        if self.config.gather_once is not None or self.device.type != "cuda":
            return self.config.gather_once is not False
        size = sum(
            parameter.numel() * (self.dtype.itemsize + (wide.itemsize if parameter.requires_grad else 0))
            for parameter in self.model.parameters()
        )
        return size <= ROOM * torch.cuda.get_device_properties(self.device).total_memory

    def _begin(self, *, is_last: bool) -> None:
        if self.gathers_once:
            root = self._parts[0]
            root.set_is_last_backward(is_last)
            root.set_requires_gradient_sync(is_last)
            root.set_reshard_after_backward(is_last)

    def _cut(self) -> None:
        """Forget whole weights: a pass without gradient leaves them, and those of the next step are others."""
        for module in self._parts:
            module.reshard()

    def score(self, tries: Iterable[Trie]) -> tuple[Floats, Floats]:
        found = super().score(tries)
        self._cut()
        return found

    def _canaries(self) -> list[dict[str, Any]]:
        found = super()._canaries()
        self._cut()
        return found

    def _judge(
        self, objective: "Objective", trie: Trie, value_E: Tensor, entropy_E: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        if not len(trie.entry_E):
            return value_E.sum() + 0.0 * entropy_E.sum(), {}
        return objective(trie, value_E, entropy_E)

    def _number(self, value: Tensor) -> float:
        return float(value.full_tensor() if isinstance(value, DTensor) else value)

    def save(self, folder: Path) -> dict[str, int]:  # type: ignore[override]
        """Returns the checksums of the files that this rank wrote."""
        shards, rank = folder / "shards", dist.get_rank()
        dcp.save(self._state(), checkpoint_id=shards)
        mine = list(shards.glob(f"__{rank}_*"))
        if rank == 0:
            torch.save({"steps": self.steps}, shards / "rest.pt")
            mine += [shards / "rest.pt", shards / ".metadata"]
        return {path.name: checksum(path) for path in mine}

    def damaged(self, folder: Path) -> list[str]:
        """What is wrong with the files that are this rank's to look at: torch compares no checksum."""
        path = folder / "shards" / SUMS
        try:
            sums = msgspec.json.decode(path.read_bytes(), type=dict[str, int])
        except (OSError, msgspec.DecodeError) as error:
            return [f"{path} cannot be read ({error})"]
        mine = sorted(sums)[dist.get_rank() :: dist.get_world_size()]
        return [fault for name in mine if (fault := _fault(folder / "shards" / name, sums[name])) is not None]

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        assert self.optimizer is not None
        state = self._state()
        if (folder / "state.pt").is_file():  # of one process
            rest: Any = torch.load(folder / "state.pt", mmap=True, weights_only=True)
            for name, master in self.masters.items():
                _cut_into(master, rest["masters"][name])
            order = [name for group in rest["optimizer"]["param_groups"] for name in group["params"]]
            mine = [master for group in self.optimizer.param_groups for master in group["params"]]
            for number, master in zip(order, mine, strict=True):
                for key, value in rest["optimizer"]["state"].get(number, {}).items():
                    _cut_into(self.optimizer.state[master][key], value)
        else:
            dcp.load(state, checkpoint_id=folder / "shards")
            rest = torch.load(folder / "shards" / "rest.pt", weights_only=True)
        self.steps = rest["steps"]

    def check_checkpoint(self, folder: Path) -> None:
        """Raises BadCheckpoint for that of another model, by its table of contents."""
        if (folder / "state.pt").is_file():
            held = torch.load(folder / "state.pt", mmap=True, weights_only=True)["masters"]
            theirs = {name: tuple(master.shape) for name, master in held.items()}
        else:
            found = dcp.FileSystemReader(folder / "shards").read_metadata().state_dict_metadata
            theirs = {
                name.removeprefix("masters."): tuple(getattr(about, "size", ()))
                for name, about in found.items()
                if name.startswith("masters.")
            }
            if isinstance(self.optimizer, torch.optim.AdamW) and not any(name.startswith("moments.") for name in found):
                raise BadCheckpoint(
                    f"the checkpoint {folder} has no moments; go on with the optimizer.type that wrote it"
                )
        self._refuse_others(folder, theirs)

    def _state(self) -> dict[str, Any]:
        """Masters and moments by the weights' names, as tensors that are written and read in place."""
        assert self.optimizer is not None
        moments: dict[str, Any] = {}
        for name, master in self.masters.items():
            held = self.optimizer.state[master]
            if not held and isinstance(self.optimizer, torch.optim.AdamW):  # before the first step
                held["step"] = torch.zeros((), dtype=torch.float32, device=self.device)
                held["exp_avg"], held["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
            moments[name] = {key: value for key, value in held.items() if isinstance(value, Tensor)}
        return {"masters": {name: master.detach() for name, master in self.masters.items()}, "moments": moments}

    @torch.no_grad()
    def export(self, folder: Path) -> None:
        is_first = dist.get_rank() == 0
        whole: dict[int, Tensor] = {}  # tied weights are one tensor
        state: dict[str, Tensor] = {}
        model: Any = self.model.model
        for name, value in model.state_dict(keep_vars=True).items():
            if id(value) not in whole:
                full = value.detach().to(self.dtype)
                full = full.full_tensor() if isinstance(full, DTensor) else full
                whole[id(value)] = full.cpu() if is_first else full.new_empty(0)
            state[name] = whole[id(value)]
        canaries = self._canaries()
        if is_first:
            self._write(folder, state)
            write_canaries(folder, canaries)


def checksum(path: Path) -> int:
    """CRC-32 of a file's bytes."""
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            value = zlib.crc32(block, value)
    return value


def _fault(path: Path, expected: int) -> str | None:
    try:
        return (
            None if checksum(path) == expected else f"{path} is damaged: its checksum is not the one it was saved with"
        )
    except OSError as error:
        return f"{path} cannot be read ({error})"


def _cut_into(mine: Tensor, whole: Tensor) -> None:
    """This rank's part of a tensor that every rank has."""
    if isinstance(mine, DTensor):
        whole = distribute_tensor(whole.to(mine.device), mine.device_mesh, mine.placements, src_data_rank=None)
    mine.copy_(whole)
