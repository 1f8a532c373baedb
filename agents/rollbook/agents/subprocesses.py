"""Agents in worker processes: for blocking, crashing or untidy code, and for agents that read their environment.

Each worker builds the agent once and keeps it, so its state lasts as long as the worker. An agent that hangs or is
killed takes its worker along and nothing else.
"""

import functools
import pickle
from collections.abc import Mapping
from typing import Any

from .errors import WorkflowError
from .pool import ProcessPool
from .workflow import Session, SyncAgent, Workflow, resolve


def environment(session: Session) -> dict[str, str]:
    """What SDKs and programs read to find the proxy. Anthropic's clients add the /v1 themselves."""
    root = session.base_url.removesuffix("/v1")
    return {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_BASE": session.base_url,
        "OPENAI_API_KEY": session.api_key,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": session.api_key,
        "ROLLBOOK_BASE_URL": session.base_url,
        "ROLLBOOK_API_KEY": session.api_key,
        "ROLLBOOK_SESSION_ID": session.session_id,
    }


class SubprocessAgent(Workflow):
    """Runs `workflow` (an import string, a class, or what can be pickled) in at most `max_workers` processes."""

    def __init__(
        self,
        workflow: Any,
        workflow_kwargs: Mapping[str, Any] | None = None,
        *,
        max_workers: int = 4,
        gamma: float | None = None,
    ) -> None:
        kwargs = dict(workflow_kwargs or {})
        super().__init__(resolve(workflow, **kwargs).name)  # here too: what is wrong with it is said at once
        try:
            self._spec = pickle.dumps((workflow, kwargs, gamma))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise WorkflowError(
                f"workflow {self.name} cannot be sent to a worker process: {error}; "
                "give an import string such as 'my_agent.MathAgent'"
            ) from error
        self._pool = ProcessPool(max_workers)

    async def run(self, data: Mapping[str, Any], session: Session) -> Any:
        return await self._pool.call(_run_here, (self._spec, dict(data), session), env=environment(session))

    def close(self) -> None:
        self._pool.close()


@functools.cache
def _agent(spec: bytes) -> Workflow:
    workflow, kwargs, gamma = pickle.loads(spec)
    found = resolve(workflow, **kwargs)
    found.gamma = gamma
    return found


def _run_here(spec: bytes, data: dict[str, Any], session: Session) -> Any:
    """In the worker: a value, or something to await for one."""
    agent = _agent(spec)
    return agent.run_here(data, session) if isinstance(agent, SyncAgent) else agent.run(data, session)
