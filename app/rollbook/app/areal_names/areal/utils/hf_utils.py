"""See the package `areal`."""

from rollbook.app.areal_compat import load_hf_tokenizer, missing

__all__ = ["load_hf_tokenizer"]


def __getattr__(name: str) -> object:
    raise missing(__name__, name, __all__)
