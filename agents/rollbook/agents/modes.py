"""Which way a run's config asks for its agents to be run."""

from collections.abc import Mapping
from typing import Any

from .command import CommandAgent
from .config import AgentConfig
from .errors import WorkflowError
from .subprocesses import SubprocessAgent
from .workflow import Workflow, resolve


def workflow_of(
    config: AgentConfig, workflow: Any, workflow_kwargs: Mapping[str, Any] | None = None, *, gamma: float | None = None
) -> Workflow:
    """The agent of a run, ready for `Runner`. Close it when the run ends. Raises WorkflowError.

    inline: in this process. subproc: in `subproc_max_workers` processes. command: `command` is the agent, and
    `workflow` may be None. online: there is no agent to run, see `online.keep_open`. gamma: the discount with which
    the run trains, so that nobody is told to set what is set.
    """
    if config.mode == "subproc":
        return SubprocessAgent(workflow, workflow_kwargs, max_workers=config.subproc_max_workers, gamma=gamma)
    if config.mode == "command":
        if not config.command:
            raise WorkflowError("rollout.agent.mode is command, but rollout.agent.command names no program")
        return CommandAgent(config.command)
    if config.mode == "online":
        raise WorkflowError(
            "rollout.agent.mode is online: the agent is an application outside, so there is none to run"
        )
    found = resolve(workflow, **(workflow_kwargs or {}))
    found.gamma = gamma
    return found
