"""The whole config of a training run, from YAML and `a.b=c` overrides.

Each setting is defined by the room that reads it; this module only puts the sections together and says in one
sentence what is wrong with a file. `${section.key}` in a value takes another value of the same file.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import msgspec
import yaml

from rollbook.agents.config import RolloutConfig
from rollbook.learner.config import TrainConfig
from rollbook.proxy.config import GenerationHyperparameters

from .launch import SchedulerConfig


class ConfigError(ValueError):
    """A config that cannot be used; the message names the file, the key and what was expected."""


class GRPOConfig(TrainConfig, kw_only=True, forbid_unknown_fields=True):
    """A training run: the learner's settings, how to sample, how to run the agents."""

    # The whole structs of proxy and agents, where the learner's config has the few fields that it reads itself.
    gconfig: GenerationHyperparameters = msgspec.field(default_factory=GenerationHyperparameters)  # type: ignore[assignment]
    rollout: RolloutConfig = msgspec.field(default_factory=RolloutConfig)  # type: ignore[assignment]
    scheduler: SchedulerConfig = msgspec.field(default_factory=SchedulerConfig)  # type: ignore[assignment]
    workflow: str | None = None  # the agent: my_agent.MathAgent or my_agent.py:MathAgent
    eval_workflow: str | None = None

    def __post_init__(self) -> None:
        if self.credit.gamma == 1.0:
            self.credit.gamma = self.rollout.agent.turn_discount

    @property
    def is_online(self) -> bool:
        return self.rollout.agent.mode == "online"


class PPOConfig(GRPOConfig, kw_only=True, forbid_unknown_fields=True):
    """The same sections; `algorithm: ppo` and the critic's settings matter."""


C = TypeVar("C", bound=TrainConfig)
_REFERENCE = re.compile(r"\$\{([^}]+)\}")


def put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set `a.b.c` in nested dicts, making the sections that are missing. Raises ConfigError."""
    *parents, leaf = dotted.split(".")
    for parent in parents:
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"cannot set {dotted}: {parent} is {child!r}, not a section")
        tree = child
    tree[leaf] = value


def _look_up(tree: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        if not isinstance(tree, dict) or key not in tree:
            raise ConfigError(f"${{{dotted}}} names a key that is not in the file; write the value or add the key")
        tree = tree[key]
    return tree


def _resolve(node: Any, root: Any, depth: int = 0) -> Any:
    if depth > 20:
        raise ConfigError(f"${{...}} references go round in a circle near {node!r}")
    if isinstance(node, dict):
        return {key: _resolve(value, root, depth) for key, value in node.items()}
    if isinstance(node, list):
        return [_resolve(value, root, depth) for value in node]
    if isinstance(node, str):
        whole = _REFERENCE.fullmatch(node)
        if whole:
            return _resolve(_look_up(root, whole[1]), root, depth + 1)
        return _REFERENCE.sub(lambda match: str(_resolve(_look_up(root, match[1]), root, depth + 1)), node)
    return node


def _explain(error: msgspec.ValidationError, type_: type, source: str) -> str:
    """msgspec says `Object contains unknown field `x` - at `$.actor``; we say which key, where, and the nearest."""
    text = str(error)
    at = re.search(r" - at `\$\.?([^`]*)`$", text)
    section = at[1] if at else ""
    what = text[: at.start()] if at else text
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", what)
    if not unknown:
        return f"{source}: {section or 'the config'}: {what[0].lower()}{what[1:]}"
    fields: Any = type_
    for part in filter(None, section.split(".")):
        fields = next((f.type for f in msgspec.structs.fields(fields) if f.encode_name == part), None)
        fields = next((t for t in getattr(fields, "__args__", ()) if hasattr(t, "__struct_fields__")), fields)
    names = list(getattr(fields, "__struct_encode_fields__", ()))
    near = difflib.get_close_matches(unknown[1], names, 1)
    key = f"{section}.{unknown[1]}" if section else unknown[1]
    hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(names)}"
    return f"{source}: unknown config key {key!r}; {hint}"


@overload
def load_config(path: str | Path, overrides: Sequence[str] = ()) -> GRPOConfig: ...
@overload
def load_config(path: str | Path, overrides: Sequence[str], type_: type[C]) -> C: ...
def load_config(path: str | Path, overrides: Sequence[str] = (), type_: type[Any] = GRPOConfig) -> Any:
    """Read a YAML file, apply `a.b=c` overrides (values are YAML), check every key and type.

    Raises ConfigError, one sentence.
    """
    return to_config(read_tree(path, overrides), type_, str(path))


def read_tree(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A YAML file with `a.b=c` overrides applied and references resolved, not yet checked. Raises ConfigError."""
    path = Path(path)
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}; give the path of a YAML file") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold sections with keys, got {type(tree).__name__}")
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"expected an override like actor.optimizer.lr=1e-5, got {override!r}")
        put(tree, key, scalar(value))
    resolved: dict[str, Any] = _numbers(_resolve(tree, tree))
    return resolved


def to_config(tree: Mapping[str, Any], type_: type[C], source: str) -> C:
    """Check every key and type. Raises ConfigError, one sentence that begins with `source`."""
    try:
        return msgspec.convert(tree, type_)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(error, type_, source)) from error


def scalar(text: str) -> Any:
    """The value that a word of the command line is as YAML; itself, where it is none."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _numbers(node: Any) -> Any:
    """YAML 1.1 reads 1e-5 as text; people mean a number."""
    if isinstance(node, dict):
        return {key: _numbers(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_numbers(value) for value in node]
    if isinstance(node, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", node):
        return float(node)
    return node


def load_expr_config(argv: Sequence[str], type_: type[C]) -> tuple[C, str]:
    """`--config x.yaml a.b=c ...` -> (config, path): the command line of AReaL's scripts."""
    path, overrides = split_command_line(argv)
    return load_config(path, overrides, type_), path


def split_command_line(argv: Sequence[str]) -> tuple[str, list[str]]:
    """`--config x.yaml a.b=c ...` -> (path, overrides). Raises ConfigError."""
    rest = list(argv)
    for i, word in enumerate(rest):
        if word == "--config" and i + 1 < len(rest):
            path = rest[i + 1]
            del rest[i : i + 2]
            return path, rest
        if word.startswith("--config="):
            del rest[i]
            return word.removeprefix("--config="), rest
    raise ConfigError("expected --config FILE.yaml and then overrides like a.b=c")
