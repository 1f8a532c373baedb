"""`rollbook run-areal SCRIPT ...`: runs a training script written for AReaL, unchanged.

Its `areal` imports are answered by the small package in `areal_names/`, which is on sys.path only inside this command
(and in the worker processes that the script starts). Settings that have no meaning here are named once in a warning;
a key that looks like one of ours misspelt is an error, as everywhere.
"""

import difflib
import importlib.util
import logging
import math
import re
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rollbook.agents.errors import AgentsError
from rollbook.learner import TrainConfig
from rollbook.learner.trainer import PPOTrainer as _PPOTrainer
from rollbook.proxy.parsing import REASONING_PARSERS, TOOL_PARSERS

from .config import GRPOConfig, read_tree, split_command_line, to_config
from .models import prepare_model
from .training import prepare_models

NAMES = Path(__file__).with_name("areal_names")
_log = logging.getLogger("rollbook.app")
C = TypeVar("C", bound=TrainConfig)
_TRAINER = re.compile(r"(?:fsdp|megatron|archon):((?:[a-z]\d+)*)")
_TOOL_PARSERS = {"qwen": "hermes", "qwen25": "hermes", "qwen3": "hermes", "llama3": "llama", "llama3_json": "llama"}
_TOOL_PARSERS |= {name: name for name in (*TOOL_PARSERS, "transformers", "none", "auto")}
_REASONING_PARSERS = {"qwen3": "think", "qwen3-thinking": "think", "deepseek-r1": "think", "deepseek_r1": "think"}
_REASONING_PARSERS |= {name: name for name in (*REASONING_PARSERS, "none", "auto")}
"""SGLang's and vLLM's names, and ours, to ours. For others the template tells, which is the default."""


def run(argv: Sequence[str]) -> None:
    """argv: the script and what it gets as its arguments. Raises FileNotFoundError, and what the script raises."""
    script, *arguments = argv
    path = Path(script)
    if not path.is_file():
        raise FileNotFoundError(f"there is no script {script} (looked from {Path.cwd()})")
    logging.basicConfig(format="rollbook: %(message)s")  # warnings reach the terminal, unless the script sets its own
    for folder in (str(Path.cwd()), str(path.resolve().parent), str(NAMES)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("areal."):
            raise
        known = sorted(file.relative_to(NAMES).with_suffix("").as_posix() for file in NAMES.rglob("*.py"))
        names = ", ".join(name.removesuffix("/__init__").replace("/", ".") for name in known)
        raise NotAnswered(
            f"{error.name} is not among the modules of AReaL that rollbook run-areal answers; those are {names}"
        ) from error


class PPOTrainer(_PPOTrainer):
    """Ours, with the model prepared and the workflow of the config as the default."""

    def __init__(
        self, config: GRPOConfig, train_dataset: Any = None, valid_dataset: Any = None, **keywords: Any
    ) -> None:
        prepare_models(config)
        super().__init__(config, train_dataset, valid_dataset, **keywords)

    def train(self, workflow: Any = None, eval_workflow: Any = None, *arguments: Any, **keywords: Any) -> None:
        """See `rollbook.learner.PPOTrainer.train`."""
        config: Any = self.config
        super().train(workflow or config.workflow, eval_workflow or config.eval_workflow, *arguments, **keywords)


def load_expr_config(argv: Sequence[str], config_cls: type[C]) -> tuple[C, str]:
    """`--config x.yaml a.b=c ...` -> (config, path). Raises ConfigError."""
    path, overrides = split_command_line(argv)
    tree = read_tree(path, overrides)
    unknown: list[str] = []
    kept = _known(tree, config_cls, "", unknown)
    notes = _translate(kept)
    if unknown:
        _log.warning("%s: these settings have no meaning here and are left out: %s", path, ", ".join(sorted(unknown)))
    for note in notes:
        _log.warning("%s: %s", path, note)
    config = to_config(kept, config_cls, path)
    config.tokenizer_path = config.tokenizer_path or config.actor.path  # scripts load it themselves
    return config, path


def load_hf_tokenizer(path: str) -> Any:
    """The transformers tokenizer of a model folder or of a model that we know by name."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(prepare_model(path)))


class NotAnswered(AgentsError, ImportError):
    """A script imports a name of AReaL that we do not answer."""


def missing(module: str, name: str, known: Sequence[str]) -> Exception:
    """What `from areal... import name` raises where there is no such name here."""
    if name.startswith("__"):
        return AttributeError(name)  # Python asks for these
    return NotAnswered(
        f"{module}.{name} is not among the names of AReaL that rollbook run-areal answers; {module} has "
        f"{', '.join(known)}. For more use Rollbook's own modules, see docs/agents.md"
    )


def _known(tree: Mapping[str, Any], type_: Any, prefix: str, unknown: list[str]) -> dict[str, Any]:
    """`tree` without the keys that `type_` lacks; their names go to `unknown`. Likely misspellings stay, to be told.

    `null` for what cannot be null here is left out as well.
    """
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(type_)}
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in fields:
            if difflib.get_close_matches(key, fields, 1, 0.85):
                kept[key] = value
            else:
                unknown.append(f"{prefix}{key}")
            continue
        if value is None and type(None) not in getattr(fields[key], "__args__", ()):
            continue  # AReaL's `null` where we have a default
        inner = next((t for t in (fields[key], *getattr(fields[key], "__args__", ())) if _is_struct(t)), None)
        kept[key] = _known(value, inner, f"{prefix}{key}.", unknown) if inner and isinstance(value, dict) else value
    return kept


def _is_struct(type_: Any) -> bool:
    return isinstance(type_, type) and issubclass(type_, msgspec.Struct)


def _translate(tree: dict[str, Any]) -> list[str]:
    """Values that mean the same under another name here; returns what is worth saying about it."""
    notes: list[str] = []
    rollout = tree.get("rollout")
    rollout = rollout if isinstance(rollout, dict) else {}
    engine, _, sizes = str(rollout.get("backend", "")).partition(":")
    if engine == "sglang" and importlib.util.find_spec("sglang") is None:
        answers = ":".join(filter(None, ("vllm", sizes))) if importlib.util.find_spec("vllm") else "embedded"
        notes.append(f"rollout.backend {rollout['backend']!r} is not here; {answers!r} answers instead")
        rollout["backend"] = answers
    actor = tree.get("actor")
    for name in ("actor", "ref", "critic"):
        section = tree.get(name)
        if isinstance(section, dict) and (found := _TRAINER.match(str(section.get("backend", "")))):
            n_gpus = math.prod(map(int, re.findall(r"[dptc](\d+)", found[1])))
            trains = "single" if n_gpus == 1 else f"fsdp:d{n_gpus}"
            if re.fullmatch(r"fsdp:d\d+(?:[ptce]1)*", section["backend"]) is None:
                notes.append(f"{name}.backend {section['backend']!r} is not here; {trains!r} trains, on as many GPUs")
            section["backend"] = trains
    if isinstance(actor, dict) and actor.get("weight_update_mode") not in (None, "disk"):
        notes.append(f"actor.weight_update_mode {actor['weight_update_mode']!r} is not here; weights go over files")
        actor["weight_update_mode"] = "disk"
    agent = rollout.get("agent")
    for setting, names in (("tool_call_parser", _TOOL_PARSERS), ("reasoning_parser", _REASONING_PARSERS)):
        if isinstance(agent, dict) and isinstance(theirs := agent.get(setting), str):
            agent[setting] = theirs if theirs.startswith("vllm:") else names.get(theirs)
            if agent[setting] is None:
                notes.append(f"rollout.agent.{setting} {theirs!r} is not here; the model's chat template tells")
    return notes
