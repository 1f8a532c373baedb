"""Turns whatever a person calls their agent into something the runner can run.

`resolve` takes, in this order: a RolloutWorkflow instance, a RolloutWorkflow subclass (built with the keywords), a
name that `load` takes ("my_agent.MathAgent", "my_agent.py:MathAgent"), a class or an object with `run(data, **extra)`,
a plain function of that shape. An agent is built once and serves every episode, so what it keeps on itself stays. Code
that blocks runs in threads of its own. The row is copied for each episode: an agent may write into it.
"""

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from .alarms import ready_math_verify
from .episode import EpisodeClient
from .errors import Rejected, WorkflowError
from .naming import load
from .threads import in_thread, in_thread_loop
from .watch import Blocking, timed

_log = logging.getLogger("rollbook.agents")


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """Where an episode's model calls go. `base_url` ends in /v1; `api_key` belongs to this episode alone."""

    session_id: str
    api_key: str
    base_url: str


class EpisodeEngine:
    """What a RolloutWorkflow gets as its engine: where the episode's calls go, and what its clients reward.

    rewards: by interaction id, as given by the clients' `set_reward`; the runner puts them into the book.
    turn_discount: what a client's `apply_reward_discount` asked for; None where it was not called.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.rewards: dict[str, float] = {}
        self.turn_discount: float | None = None


class RolloutWorkflow(ABC):
    """An agent that drives the model through a client of its own, as AReaL's direct mode does."""

    @abstractmethod
    async def arun_episode(self, engine: EpisodeEngine, data: dict[str, Any]) -> Any:
        """Run one episode. Returns interactions (`client.export_interactions()`), a reward, or None to reject it."""


class Workflow(ABC):
    """A resolved agent: `await workflow.run(data, session)` gives whatever the person's code returned."""

    blocking: Blocking | None = None
    """What is known of its blocking the event loop; None where it does not run on it."""
    gamma: float | None = None
    """The discount with which its episodes are trained; None: not known."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"

    @abstractmethod
    async def run(self, data: Mapping[str, Any], session: Session) -> Any:
        """One episode. Raises what the agent raises."""

    def close(self) -> None:  # noqa: B027, most start nothing
        """End what the workflow itself started. Twice is once."""


class AsyncAgent(Workflow):
    """`async def run(data, **extra)`, on the runner's own loop, or on loops in threads once it was seen to block."""

    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        super().__init__(name)
        self._call = call
        self._takes = _accepted_keywords(call)
        self.blocking: Blocking = Blocking(name)

    async def run(self, data: Mapping[str, Any], session: Session) -> Any:
        ready_math_verify()
        keywords = _keywords(session, self._takes)
        if self.blocking.is_proven:
            return await in_thread_loop(lambda: self._call(dict(data), **keywords), name=self.name)
        return await timed(self._call(dict(data), **keywords), self.blocking)


class SyncAgent(Workflow):
    """`def run(data, **extra)`, each episode in a thread of its own."""

    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        super().__init__(name)
        self._call = call
        self._takes = _accepted_keywords(call)

    async def run(self, data: Mapping[str, Any], session: Session) -> Any:
        result = await in_thread(lambda: self.run_here(data, session), name=self.name)
        return await result if inspect.isawaitable(result) else result

    def run_here(self, data: Mapping[str, Any], session: Session) -> Any:
        """In this thread, blocking."""
        ready_math_verify()
        return self._call(dict(data), **_keywords(session, self._takes))


class DirectAgent(Workflow):
    """A RolloutWorkflow: it makes its own client, and rewards through that."""

    def __init__(self, name: str, arun_episode: Callable[..., Any]) -> None:
        super().__init__(name)
        self._arun_episode = arun_episode
        self._is_mentioned = False

    async def run(self, data: Mapping[str, Any], session: Session) -> Any:
        ready_math_verify()
        engine = EpisodeEngine(session)
        result = await self._arun_episode(engine, dict(data))
        if result is None:
            raise Rejected(f"{self.name} returned None from arun_episode: it rejects this sample")
        self._mention(engine.turn_discount)
        if engine.rewards:
            return engine.rewards
        is_numbers = not isinstance(result, Mapping) or all(isinstance(v, int | float) for v in result.values())
        return result if is_numbers else None

    def _mention(self, turn_discount: float | None) -> None:
        if turn_discount in (None, 1.0, self.gamma) or self._is_mentioned:
            return
        self._is_mentioned = True
        _log.warning(
            "%s applies a reward discount of %g. The book keeps rewards as they were given; to train on discounted "
            "ones set credit.gamma=%g, with credit.scheme=arrival for AReaL's order or tree for the conversation's",
            self.name,
            turn_discount,
            turn_discount,
        )


def _keywords(session: Session, takes: "_Takes") -> dict[str, Any]:
    # No shared HTTP client: SDKs differ in which library they want one from, and build a fitting one themselves.
    extra = {"base_url": session.base_url, "api_key": session.api_key, "http_client": None}
    given: dict[str, Any] = {k: v for k, v in extra.items() if takes.has_any or k in takes.names}
    if "episode" in takes.names:  # only where it is named: AReaL's agents do not expect it among their keywords
        given["episode"] = EpisodeClient(session.base_url, session.api_key)
    return given


def resolve(workflow: Any, **workflow_kwargs: Any) -> Workflow:
    """See the module's docstring. Raises WorkflowError with what is wrong and what would work."""
    if workflow is None:
        raise WorkflowError(
            "workflow is None, which only the online mode takes; give a name such as "
            "'my_agent.MathAgent', a class or an object with `async def run(self, data, **extra_kwargs)`, or a function"
        )
    name = workflow if isinstance(workflow, str) else _name(workflow)
    target = load(workflow) if isinstance(workflow, str) else workflow
    if isinstance(target, Workflow):
        return target
    if inspect.isclass(target):
        target = _build(name, target, workflow_kwargs)
        workflow_kwargs = {}
    elif workflow_kwargs and not inspect.isroutine(target):
        raise WorkflowError(
            f"workflow {name} is built already, so workflow_kwargs ({', '.join(workflow_kwargs)}) cannot reach it; "
            "pass the class, or build it with them"
        )
    if isinstance(target, RolloutWorkflow) or inspect.iscoroutinefunction(getattr(target, "arun_episode", None)):
        return DirectAgent(name, target.arun_episode)
    if inspect.isroutine(target):
        kind = AsyncAgent if inspect.iscoroutinefunction(inspect.unwrap(target)) else SyncAgent
        return kind(name, _with_keywords(target, workflow_kwargs))
    run = getattr(target, "run", None)
    if callable(run):
        return (AsyncAgent if inspect.iscoroutinefunction(inspect.unwrap(run)) else SyncAgent)(name, run)
    raise WorkflowError(
        f"workflow {name} is a {type(target).__name__} without a `run` method; expected "
        "`async def run(self, data, **extra_kwargs)` that returns a reward, or a RolloutWorkflow"
    )


def _build(name: str, cls: type, kwargs: dict[str, Any]) -> Any:
    if not (issubclass(cls, RolloutWorkflow) or callable(getattr(cls, "run", None)) or hasattr(cls, "arun_episode")):
        raise WorkflowError(
            f"workflow {name} is a class without a `run` method; expected "
            "`async def run(self, data, **extra_kwargs)` that returns a reward, or a RolloutWorkflow"
        )
    try:
        inspect.signature(cls).bind(**kwargs)
    except TypeError as error:
        raise WorkflowError(
            f"workflow {name}{inspect.signature(cls)} cannot be built from workflow_kwargs {sorted(kwargs)}: {error}"
        ) from error
    except ValueError:
        pass  # a signature that Python cannot tell
    return cls(**kwargs)


def _name(target: Any) -> str:
    named = target if inspect.isclass(target) or inspect.isroutine(target) else type(target)
    return f"{named.__module__}.{named.__qualname__}"


def _with_keywords(function: Callable[..., Any], keywords: dict[str, Any]) -> Callable[..., Any]:
    if not keywords:
        return function

    def call(data: Any, **extra: Any) -> Any:
        return function(data, **{**keywords, **extra})

    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return call


class _Takes(msgspec.Struct, frozen=True):
    """Names that a call takes by keyword after its data, and whether it takes any others."""

    names: frozenset[str]
    has_any: bool


def _accepted_keywords(call: Callable[..., Any]) -> _Takes:
    try:
        parameters = inspect.signature(call).parameters.values()
    except ValueError:
        return _Takes(frozenset(), has_any=True)
    names = frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return _Takes(names, has_any=any(p.kind is p.VAR_KEYWORD for p in parameters))
