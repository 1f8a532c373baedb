"""Does a folder of weights fit a model? Read from the safetensors headers alone, before an engine is asked to load it.

A server that is told to load what does not fit may die of it (vLLM does), so engines outside this process are asked
only for what passed here. No torch: a header is JSON behind eight bytes of length.
"""

import json
from pathlib import Path

import msgspec

from .errors import EngineFailed

_LONGEST_HEADER_BYTES = 100 << 20


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
            with path.open("rb") as file:
                n = int.from_bytes(file.read(8), "little")
                header = file.read(n) if n <= _LONGEST_HEADER_BYTES else b""
                size = path.stat().st_size
            fields = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
            fields.pop("__metadata__", None)
            tensors = {name: msgspec.json.decode(raw, type=_Tensor) for name, raw in fields.items()}
        except (OSError, msgspec.DecodeError) as error:
            raise EngineFailed(f"could not read weights from {path}: {error}; the old weights stay") from error
        expected = 8 + n + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
        if size != expected:
            raise EngineFailed(f"{path} has {size} bytes, its header says {expected}: it is cut; the old weights stay")
        for name, tensor in tensors.items():
            if not tensor.dtype.startswith(("F", "BF")):
                raise EngineFailed(f"{name} in {path} is {tensor.dtype}, expected floating point; the old weights stay")
            shapes[name] = tensor.shape
    return shapes


def check_fits(model: Path, weights: Path) -> None:
    """`weights` has exactly the tensors of `model`, in the same shapes. Raises EngineFailed.

    Tied embeddings may be written once or twice.
    """
    expected, got = read_shapes(model), read_shapes(weights)
    config = json.loads((model / "config.json").read_bytes())
    tied = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
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
