"""`rollbook train`: a config file, a dataset, an agent, one call to the trainer."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollbook.agents.data import get_custom_dataset
from rollbook.agents.modes import workflow_of
from rollbook.learner import PPOTrainer

from .config import ConfigError, GRPOConfig, load_config
from .models import prepare_model


def train(config_path: str, overrides: Sequence[str] = ()) -> None:
    """Train what the config says; its folder and the current one are importable. Raises ConfigError for what it does
    not say.
    """
    config = load_config(config_path, overrides)
    has_agent = config.rollout.agent.mode in ("online", "command") or config.scheduler.type == "none"
    if config.workflow is None and not has_agent:
        raise ConfigError(f"{config_path} names no agent; add `workflow: my_agent.MathAgent` or give workflow=... here")
    sys.path[:0] = [os.getcwd(), str(Path(config_path).resolve().parent)]  # the agent may stand beside its config
    train_on(config)


def prepare_models(config: GRPOConfig) -> None:
    """Put folders in place of the names of models that we know."""
    renders = config.scheduler.type != "none"  # without an engine there is nothing to render
    config.actor.path = str(prepare_model(config.actor.path, renders=renders))
    if config.tokenizer_path:
        config.tokenizer_path = str(prepare_model(config.tokenizer_path, renders=renders))
    else:
        config.tokenizer_path = config.actor.path


def train_on(config: GRPOConfig, *, rows: Sequence[Any] | None = None) -> None:
    """The same from a config that is loaded. rows: the training tasks; None: those of `train_dataset`."""
    prepare_models(config)
    if rows is None and config.train_dataset.path:
        rows = get_custom_dataset(split="train", dataset_config=config.train_dataset)
    valid = config.valid_dataset
    valid_rows = get_custom_dataset(split="test", dataset_config=valid) if valid and valid.path else None
    workflow: Any = config.workflow
    if config.rollout.agent.mode == "command":
        workflow = workflow_of(config.rollout.agent, workflow)
    with PPOTrainer(config, train_dataset=rows, valid_dataset=valid_rows) as trainer:
        trainer.train(workflow=workflow, eval_workflow=config.eval_workflow)
