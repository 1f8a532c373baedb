"""A transformers decoder run on packed tokens: what many sequences need in one step, in one row, without padding.

Only attention knows where each token belongs. It is replaced by ours (`_attend`), which finds keys and values in
`kv.Rows` (`NextTokens`) or in the piece of a text that is being read (`Reading`); everything else is the model's own
code. At start both ways of attending are compared, and a model for which they differ is refused. Also here: reading and
checking a checkpoint for the running model. Threads may run different parts at once.

Shapes: N packed tokens, n sequences, K kept places, V vocabulary, A query heads, L layers, H key/value heads, D head
size, T tokens of one sequence, W keys looked at.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from rollbook.store.events import Int32s

from .checkpoint import ADAPTER, check_fits, is_adapter, read_adapter, read_shapes
from .errors import EngineFailed, EngineUnavailable
from .kv import KVShape, Rows


class NextTokens:
    """The next token of the sequences in slots [first, first + n) of `rows`. positions_n: where each one stands."""

    def __init__(self, rows: Rows[Any], first: int, ids_n: Int32s, positions_n: Int32s, shape: KVShape) -> None:
        self.ids = ids_n
        self.positions = positions_n
        self.keep: Sequence[int] = range(len(ids_n))
        self._rows = rows
        self._slots = slice(first, first + len(ids_n))
        self._shape = shape
        self._index_n = torch.arange(len(ids_n), device=shape.device)
        self._positions_n = torch.from_numpy(positions_n).long().to(shape.device)
        self._width = min(rows.capacity, -(-(int(positions_n.max()) + 1) // 8) * 8)
        self._masks: dict[int | None, torch.Tensor] = {}

    def attend(
        self,
        layer: int,
        query_nAD: torch.Tensor,
        key_nHD: torch.Tensor,
        value_nHD: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        keys, values = self._rows.layer(layer)
        keys, values = keys[self._slots], values[self._slots]
        keys[self._index_n, :, self._positions_n] = key_nHD
        values[self._index_n, :, self._positions_n] = value_nHD
        n, _, head_size = query_nAD.shape
        # The queries that share a key head stand where a prompt's queries would, so nothing is repeated.
        out = F.scaled_dot_product_attention(
            query_nAD.reshape(n, self._shape.n_heads, -1, head_size),
            keys[:, :, : self._width],
            values[:, :, : self._width],
            attn_mask=self._mask(window),
            scale=scale,
        )
        return out.reshape(n, -1, head_size)

    def _mask(self, window: int | None) -> torch.Tensor:
        """Additive [n, 1, 1, W]."""
        if window not in self._masks:
            keys_W = torch.arange(self._width, device=self._shape.device)
            is_seen = keys_W <= self._positions_n[:, None]
            if window is not None:
                is_seen &= keys_W > self._positions_n[:, None] - window
            mask = torch.zeros(is_seen.shape, dtype=self._shape.dtype, device=self._shape.device)
            self._masks[window] = mask.masked_fill_(~is_seen, -torch.inf)[:, None, None]
        return self._masks[window]


class Reading:
    """Tokens [first, end) of a text whose beginning is in kv, [2, L, H, T, D], and which are written there."""

    def __init__(self, ids_T: Int32s, kv: torch.Tensor, first: int, end: int, shape: KVShape) -> None:
        self.ids = ids_T[first:end]
        self.positions = np.arange(first, end, dtype=np.int32)
        self.keep: Sequence[int] = [end - first - 1] if end == len(ids_T) else []
        self._kv = kv
        self._first = first
        self._end = end
        self._shape = shape
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def attend(
        self,
        layer: int,
        query_nAD: torch.Tensor,
        key_nHD: torch.Tensor,
        value_nHD: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        keys, values = self._kv[:, layer]  # [H, T, D]
        keys[:, self._first : self._end] = key_nHD.transpose(0, 1)
        values[:, self._first : self._end] = value_nHD.transpose(0, 1)
        mask = self._mask(window)
        out = F.scaled_dot_product_attention(
            query_nAD.transpose(0, 1)[None],
            keys[None, :, : self._end],
            values[None, :, : self._end],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=query_nAD.shape[1] != self._shape.n_heads,
        )
        return out[0].transpose(0, 1)

    def _mask(self, window: int | None) -> torch.Tensor | None:
        """True [T, W] where a key is seen; None where plain causal attention from the first token is meant."""
        if window not in self._masks:
            if self._first == 0 and (window is None or window >= self._end):
                self._masks[window] = None
            else:
                queries = torch.arange(self._first, self._end, device=self._shape.device)[:, None]
                keys = torch.arange(self._end, device=self._shape.device)
                is_seen = keys <= queries
                if window is not None:
                    is_seen &= keys > queries - window
                self._masks[window] = is_seen
        return self._masks[window]


Part = NextTokens | Reading


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    rollbook_parts: Sequence[Part],
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, A, N, D], key and value [1, H, N, D] -> [1, N, A, D]."""
    if softcap is not None or s_aux is not None:
        raise NotImplementedError("attention with a soft cap or with sinks")
    query_NAD, key_NHD, value_NHD = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]
    outs, start = [], 0
    for part in rollbook_parts:
        here = slice(start, start + len(part.ids))
        outs.append(part.attend(layer, query_NAD[here], key_NHD[here], value_NHD[here], scale, sliding_window))
        start = here.stop
    return (outs[0] if len(outs) == 1 else torch.cat(outs))[None], None


class PackedModel:
    """A causal language model and its weights. Raises EngineUnavailable where this engine cannot run it."""

    def __init__(self, path: Path, *, device: torch.device, dtype: str) -> None:
        AttentionInterface.register("rollbook", _attend)
        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True)
            with _Loading():
                model: Any = AutoModelForCausalLM.from_pretrained(
                    path, dtype=dtype, attn_implementation="sdpa", local_files_only=True
                )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # RuntimeError: shapes differ
            raise EngineUnavailable(f"could not load a model from {path}: {error}") from error
        self._model: Any = model.to(device).requires_grad_(False)
        text = config.get_text_config()
        self.context: int = text.max_position_embeddings
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self.shape = KVShape(
            n_layers=text.num_hidden_layers,
            n_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
            head_size=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            dtype=next(model.parameters()).dtype,
            device=device,
        )
        self._parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
        self._aliases = model.state_dict().keys() - self._parameters.keys()  # tied weights under their other names
        self._path = path
        self._config = config
        # transformers merges some tensors as it reads them, the experts of a mixture above all.
        self._is_merged = not read_shapes(path).keys() <= self._parameters.keys() | self._aliases
        self._compare_attention()

    def logits(self, parts: Sequence[Part]) -> torch.Tensor:
        """[K, V], K the places that the parts keep, in order."""
        keep: list[int] = []
        start = 0
        for part in parts:
            keep += [start + place for place in part.keep]
            start += len(part.ids)
        device = self.shape.device
        output = self._model(
            input_ids=torch.from_numpy(np.concatenate([part.ids for part in parts])).long().to(device)[None],
            position_ids=torch.from_numpy(np.concatenate([part.positions for part in parts])).long().to(device)[None],
            use_cache=False,
            logits_to_keep=torch.tensor(keep, dtype=torch.long, device=device),
            rollbook_parts=parts,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def _compare_attention(self) -> None:
        """Three tokens read, one more read, one in a row: the logprobs after each must be those of the model itself."""
        shape, model = self.shape, self._model
        ids = np.arange(1, 6, dtype=np.int32) % self.vocab_size
        ids_1T = torch.from_numpy(ids).long().to(shape.device)[None]
        expected_KV = model(input_ids=ids_1T, use_cache=False).logits[0, 2:].float().log_softmax(-1)
        kv = shape.piece(len(ids))
        rows: Rows[None] = Rows(shape, 8)
        rows.resize(1)
        rows.add(None)
        try:
            model.set_attn_implementation("rollbook")
            logits = [
                self.logits([Reading(ids[:3], kv, 0, 3, shape)]),
                self.logits([Reading(ids[:4], kv, 3, 4, shape)]),
            ]
            rows.slot(0)[..., :4, :] = kv[..., :4, :]
            logits.append(self.logits([NextTokens(rows, 0, ids[4:], np.array([4], np.int32), shape)]))
        except (TypeError, KeyError, RuntimeError, IndexError, AttributeError, ValueError) as error:
            raise EngineUnavailable(
                f"the embedded engine cannot run {type(model).__name__}: {type(error).__name__}: {error}; serve this "
                "model with vLLM"
            ) from error
        difference = (torch.cat(logits).float().log_softmax(-1) - expected_KV).abs().mean().item()
        # bfloat16 keeps 8 bits, so that logits of 20 are off by .06 either way.
        limit = 1e-3 if shape.dtype == torch.float32 else 0.1
        if not difference < limit:
            raise EngineUnavailable(
                f"the embedded engine attends differently from {type(model).__name__} itself (logprobs differ by "
                f"{difference:.3g} on average, expected < {limit}); serve this model with vLLM"
            )

    def read_checkpoint(self, path: Path) -> dict[str, torch.Tensor]:
        """All weights of the model from a folder of safetensors, checked, in memory. Raises EngineFailed.

        From a folder with a LoRA adapter: the model's own weights, the adapter merged into them.
        """
        if is_adapter(path):
            return self._read_adapter(path)
        if self._is_merged:
            return self._read_merged(path)
        old = "the old weights stay"
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise EngineFailed(f"no weights to load: {path} is not a folder with *.safetensors; {old}")
        tensors: dict[str, torch.Tensor] = {}
        try:
            for file in files:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 (not a dict)
                        if name in self._aliases:
                            continue
                        tensor: torch.Tensor = opened.get_tensor(name)
                        expected = self._parameters.get(name)
                        if expected is None or tensor.shape != expected.shape or not tensor.is_floating_point():
                            wanted = "no such tensor" if expected is None else f"{tuple(expected.shape)} of floats"
                            raise EngineFailed(
                                f"the weights in {path} do not fit the running model: {name} is {tuple(tensor.shape)} "
                                f"of {tensor.dtype}, the model has {wanted}; {old}"
                            )
                        tensors[name] = tensor.to(expected.dtype)
        except (OSError, SafetensorError) as error:
            raise EngineFailed(f"could not read weights from {path}: {error}; {old}") from error
        if missing := sorted(self._parameters.keys() - tensors.keys()):
            raise EngineFailed(
                f"the weights in {path} do not fit the running model: {len(missing)} of its {len(self._parameters)} "
                f"tensors are missing, first {missing[0]}; {old}"
            )
        return tensors

    def _read_adapter(self, path: Path) -> dict[str, torch.Tensor]:
        adapter = read_adapter(path)
        tensors = self.read_checkpoint(self._path)
        with safe_open(path / ADAPTER, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                if ".lora_A." not in name:
                    continue
                target = name.removeprefix("base_model.model.").partition(".lora_A.")[0] + ".weight"
                down, up = (
                    opened.get_tensor(name).float(),
                    opened.get_tensor(name.replace(".lora_A.", ".lora_B.")).float(),
                )
                weight = tensors.get(target)
                if weight is None or weight.shape != (up.shape[0], down.shape[1]):
                    raise EngineFailed(
                        f"the adapter in {path} does not fit the running model: it changes {target} by "
                        f"{up.shape[0]} x {down.shape[1]}; the old weights stay"
                    )
                weight.copy_(weight.float() + adapter.scale * (up @ down))
        return tensors

    def _read_merged(self, path: Path) -> dict[str, torch.Tensor]:
        check_fits(self._path, path)
        with _Loading():
            model = AutoModelForCausalLM.from_pretrained(
                path, config=self._config, dtype=self.shape.dtype, local_files_only=True
            )
        return dict(model.named_parameters())

    @torch.inference_mode()
    def swap(self, tensors: dict[str, torch.Tensor], *, keep: bool = False) -> None:
        """Put in what `read_checkpoint` gave. Keys and values computed before are wrong afterwards.

        keep: `tensors` then has what was there before, so that the same call again takes it back.
        """
        for name, tensor in tensors.items():
            old = self._parameters[name].to(tensor.device, copy=True) if keep else None
            self._parameters[name].copy_(tensor)
            if old is not None:
                tensors[name] = old

    @torch.inference_mode()
    def likeliest(self, prompts: Sequence[Sequence[int]]) -> list[float]:
        """The logprob of the likeliest token after each prompt."""
        parts = []
        for prompt in prompts:
            ids = np.asarray(prompt, np.int32)
            parts.append(Reading(ids, self.shape.piece(len(ids)), 0, len(ids), self.shape))
        found: list[float] = self.logits(parts).float().log_softmax(-1).max(-1).values.tolist()
        return found


class _Loading:
    """transformers loads one model at a time (it changes torch's defaults meanwhile), and draws bars on stderr; whoever
    starts an engine has a display of their own."""

    _turn = threading.Lock()

    def __enter__(self) -> None:
        self._turn.acquire()
        self._were_on = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        if self._were_on:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        self._turn.release()
