"""Does a folder of weights fit a model? Read from the safetensors headers alone, before an engine is asked to load it.

A server that is told to load what does not fit may die of it (vLLM does), so engines outside this process are asked
only for what passed here. No torch: a header is JSON behind eight bytes of length.
"""

import json
from pathlib import Path

import msgspec

from .errors import EngineFailed

_LONGEST_HEADER_BYTES = 100 << 20


HEAD = "lm_head.weight"


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


Shapes = dict[str, tuple[int, ...]]


def read_shapes(folder: Path) -> Shapes:
    """Names and shapes of all tensors in a folder; the files are as long as their headers say. Raises EngineFailed."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineFailed(f"no weights to load: {folder} is not a folder with *.safetensors; the old weights stay")
    shapes: Shapes = {}
    for path in files:
        try:
            start, tensors = _read_header(path)
            size = path.stat().st_size
        except (OSError, msgspec.DecodeError) as error:
            raise EngineFailed(f"could not read weights from {path}: {error}; the old weights stay") from error
        expected = start + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
        if size != expected:
            raise EngineFailed(f"{path} has {size} bytes, its header says {expected}: it is cut; the old weights stay")
        for name, tensor in tensors.items():
            if not tensor.dtype.startswith(("F", "BF")):
                raise EngineFailed(f"{name} in {path} is {tensor.dtype}, expected floating point; the old weights stay")
            shapes[name] = tensor.shape
    return shapes


def _read_header(path: Path) -> tuple[int, dict[str, _Tensor]]:
    """(where the data begin, the tensors) of one file."""
    with path.open("rb") as file:
        n = int.from_bytes(file.read(8), "little")
        header = file.read(n) if n <= _LONGEST_HEADER_BYTES else b""
    fields = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    fields.pop("__metadata__", None)
    return 8 + n, {name: msgspec.json.decode(raw, type=_Tensor) for name, raw in fields.items()}


def is_tied(folder: Path) -> bool:
    """Does the model compute its logits with its input embeddings?"""
    return bool(json.loads((folder / "config.json").read_bytes()).get("tie_word_embeddings"))


def write_untied(model: Path, weights: Path, target: Path) -> None:
    """`target`, a new folder: links to `weights` and to what else `model` has, and the head written out on its own."""
    target.mkdir(parents=True)
    for source in (weights, model):
        for path in source.iterdir():
            is_weights = path.name.endswith((".safetensors", ".safetensors.index.json"))
            if (
                not (target / path.name).exists()
                and path.name != "config.json"
                and (source == weights or not is_weights)
            ):
                (target / path.name).symlink_to(path.absolute())
    config = json.loads((model / "config.json").read_bytes())
    (target / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}, indent=2))
    heads, embeddings = [], []
    for path in sorted(weights.glob("*.safetensors")):
        start, tensors = _read_header(path)
        heads += [name for name in tensors if name == HEAD]
        embeddings += [(path, start, t) for name, t in tensors.items() if name.endswith("embed_tokens.weight")]
    if heads:
        return
    if not embeddings:
        raise EngineFailed(f"{weights} has no embed_tokens.weight, from which the head of a tied model is taken")
    path, start, tensor = embeddings[0]
    first, end = tensor.data_offsets
    fields = {HEAD: {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [0, end - first]}}
    header = json.dumps(fields).encode()
    header += b" " * (-len(header) % 8)
    with path.open("rb") as file, (target / "lm_head.safetensors").open("wb") as head:
        head.write(len(header).to_bytes(8, "little") + header)
        file.seek(start + first)
        for place in range(first, end, 1 << 20):
            head.write(file.read(min(1 << 20, end - place)))
    index = target / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_bytes())
        content["weight_map"][HEAD] = "lm_head.safetensors"
        index.unlink()
        index.write_text(json.dumps(content))


def check_fits(model: Path, weights: Path) -> None:
    """`weights` has exactly the tensors of `model`, in the same shapes. Raises EngineFailed.

    Tied embeddings may be written once or twice.
    """
    expected, got = read_shapes(model), read_shapes(weights)
    tied = {HEAD} if is_tied(model) else set()
    wrong = [name for name in sorted(expected.keys() & got.keys()) if expected[name] != got[name]]
    if wrong:
        name = wrong[0]
        raise EngineFailed(
            f"the weights in {weights} do not fit the running model: {name} has shape {got[name]}, the model has "
            f"{expected[name]}; the old weights stay"
        )
    for names, what in ((expected.keys() - got.keys(), "lacks"), (got.keys() - expected.keys(), "has besides")):
        if odd := sorted(names - tied):
            raise EngineFailed(
                f"the weights in {weights} do not fit the running model: the folder {what} {len(odd)} tensors, first "
                f"{odd[0]}; the old weights stay"
            )


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter as peft writes it: W + scale * B A for each of its modules."""

    peft_type: str
    lora_alpha: float
    r: int
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    bias: str = "none"
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    modules_to_save: list[str] | None = None

    @property
    def scale(self) -> float:
        return float(self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r))


ADAPTER = "adapter_model.safetensors"


def is_adapter(folder: Path) -> bool:
    """Whether a folder has a peft adapter instead of whole weights."""
    return (folder / "adapter_config.json").is_file()


def read_adapter(folder: Path) -> Adapter:
    """What an adapter is, its file whole. Raises EngineFailed for what only peft itself could apply."""
    try:
        adapter = msgspec.json.decode((folder / "adapter_config.json").read_bytes(), type=Adapter)
    except (OSError, msgspec.DecodeError) as error:
        raise EngineFailed(f"could not read the adapter in {folder}: {error}; the old weights stay") from error
    odd = [
        name
        for name in ("use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save")
        if getattr(adapter, name)
    ]
    if adapter.peft_type != "LORA" or adapter.bias != "none" or odd:
        what = adapter.peft_type if adapter.peft_type != "LORA" else ", ".join(odd) or f"bias={adapter.bias}"
        raise EngineFailed(f"the adapter in {folder} is not plain LoRA ({what}); publish whole weights instead")
    shapes = read_shapes(folder)
    halves = {name.rpartition(".lora_")[0] for name in shapes if ".lora_A." in name or ".lora_B." in name}
    if not halves or len(shapes) != 2 * len(halves):
        raise EngineFailed(f"the adapter in {folder} has {len(shapes)} tensors, expected a lora_A and a lora_B each")
    return adapter


CANARY = "canary.json"


class Canary(msgspec.Struct, frozen=True):
    """What the learner's own forward pass says after a prompt: the logprob of the likeliest token, at temperature 1."""

    prompt_ids: list[int]
    logprob: float


def read_canaries(folder: Path) -> list[Canary]:
    """Those that the learner wrote beside the weights; [] where it wrote none. Raises EngineFailed."""
    try:
        return msgspec.json.decode((folder / CANARY).read_bytes(), type=list[Canary])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError) as error:
        raise EngineFailed(f"could not read {folder / CANARY}: {error}; the old weights stay") from error


CANARY_TOLERANCE = 0.2
"""Mean difference of logprobs that bfloat16 explains; other weights are off by more."""


def compare_canaries(canaries: list[Canary], logprobs: list[float], version: int) -> None:
    """Raise EngineFailed where an engine's logprobs are not those of the learner's own forward pass."""
    mean = sum(abs(got - canary.logprob) for got, canary in zip(logprobs, canaries, strict=True)) / len(canaries)
    if not mean <= CANARY_TOLERANCE:
        raise EngineFailed(
            f"logprobs of version {version} are {mean:.2f} off those of the learner's forward pass on "
            f"{len(canaries)} prompts, rounding explains {CANARY_TOLERANCE}: the weights were not taken as they are"
        )
