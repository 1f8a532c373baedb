"""Settings of rollouts and agents. The names are those that AReaL's users know.

A setting sits here if this room reads it. Unknown keys are refused; lengths are in what the name says.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]


class AgentConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How agents run and how their conversations are read."""

    mode: Literal["inline", "subproc", "command", "online"] = "inline"
    """inline: in this process. subproc: a pool of worker processes. command: any program. online: a person's app."""
    tool_call_parser: str | None = None
    """Which syntax the model's tool calls have: hermes, json, llama, mistral, none; None: told from the template."""
    reasoning_parser: str | None = None
    """Which syntax the model's reasoning has: think, none; None: told from the chat template."""
    chat_template_type: Literal["hf", "concat"] = "hf"
    """hf: the prompt follows the template, even where it rewrites history. concat: history keeps its exact tokens."""
    export_style: Literal["individual", "concat"] = "individual"
    """Kept for AReaL configs: every interaction is trained, shared tokens computed once; exports have their own."""
    turn_discount: float = 1.0
    """How much of a reward reaches the turn before it: AReaL's name of `credit.gamma`, which wins if it is set."""
    subproc_max_workers: Count = 4
    """Worker processes of the subproc mode, kept warm."""
    session_timeout_seconds: Seconds = 3600.0
    """An episode that takes longer has failed."""
    admin_api_key: str | None = None
    """Key of the routes that start sessions; None: a new one for each start (online: kept with the run)."""
    online_api_key: str | None = None
    """online: the key under which the application calls; None: made at the first start and kept with the run."""
    online_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """online: where the proxy listens; 0: a free port at the first start, the same one from then on."""
    max_attempts: Count = 1
    """Tries per sample. A failed try stays in the book with its number; more than 1 hides how often an agent fails."""
    command: list[str] | None = None
    """Program and arguments of the command mode."""


class RolloutConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How many groups are generated at once and how far ahead of the learner."""

    backend: str = "embedded"
    """The engine, with its own flags after it."""
    max_concurrent_rollouts: Count | None = None
    """Groups that run at once (C); None: as many as staleness allows before anything is trained, B * (eta + 1)."""
    queue_size: int | None = None
    """Kept for AReaL configs: finished groups wait in the book, which has no bound."""
    consumer_batch_size: int | None = None
    """Groups that the learner takes in one step (B); None: train_dataset.batch_size."""
    max_head_offpolicyness: Annotated[int, Meta(ge=0)] = 0
    """Versions that a group may begin ahead of the learner (eta); 0: generate, train, generate."""
    request_timeout: Seconds = 3600.0
    """Kept for AReaL configs: the agent's client decides, within `agent.session_timeout_seconds`."""
    dump_to_file: bool = False
    """Kept for AReaL configs: everything is in the book already."""
    agent: AgentConfig = msgspec.field(default_factory=AgentConfig)
