"""A new version of the policy: a folder of safetensors that appears whole, then an event, then the engines.

Engines on other machines find it through the shared folder; only the newest few are kept.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from .backend import Backend
from .folders import appears_whole, keep_newest

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
)


def write_policy(
    backend: Backend, folder: Path, *, tokenizer: Path | None = None, beside: Mapping[str, str] | None = None
) -> Path:
    """Export the weights into `folder` (durable when this returns), with the tokenizer's files beside them.

    beside: more files, name -> text.
    """
    with appears_whole(folder) as building:
        backend.export(building)
        for name in TOKENIZER_FILES:
            if tokenizer is not None and (tokenizer / name).is_file() and not (building / name).exists():
                shutil.copyfile(tokenizer / name, building / name)
        for name, text in (beside or {}).items():
            (building / name).write_text(text)
    return folder


def forget_old_policies(parent: Path, *, keep: int, also: frozenset[Path] = frozenset()) -> None:
    """Keep the newest `keep` versions, and those in `also`."""
    keep_newest(parent, "v[0-9]*", keep=keep, also=also)
