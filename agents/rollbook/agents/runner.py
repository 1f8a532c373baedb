"""Runs agents: one session per episode, n episodes per group, any number of groups at once.

Rules: a session that was started is ended, whatever happens in between: `done`, `failed` with the reason, or
`abandoned` where we were told to stop, so that a restart draws it again. An episode that was `lost` with its proxy is
drawn again at once. What an agent or its reward does wrong harms
no other episode. Only a proxy that is gone stops the runner. The reward comes from the return value; what the agent
prints is printed.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import anyio
import msgspec

from rollbook.proxy.client import SessionLost
from rollbook.proxy.errors import BadRequest, Busy, NotFound, SessionEnded

from .data import Task
from .errors import AgentStopped, BadReward, Rejected, describe, said
from .rewards import Reward, read_reward
from .watch import watching
from .workflow import Session, Workflow, resolve

STOP_S = 5.0
"""How long an agent that is cancelled may take to clean up before it is left behind, and a session to open."""


class Opened(Protocol):
    """What starting a session gives."""

    @property
    def session_id(self) -> str: ...
    @property
    def api_key(self) -> str: ...
    @property
    def base_url(self) -> str | None: ...  # None: the proxy's


class Proxy(Protocol):
    """What we use of `rollbook.proxy.client.ProxyClient`. `base_url` ends in /v1.

    `end_session` raises SessionLost where the episode was lost with its server; it is drawn again.
    """

    @property
    def base_url(self) -> str: ...

    async def start_session(
        self,
        task_id: str,
        *,
        group_id: str | None = None,
        attempt: int = 1,
        is_eval: bool = False,
        task: dict[str, Any] | None = None,
        run_id: str | None = None,
        origin_interaction_id: str | None = None,
    ) -> Opened: ...

    async def set_reward(
        self, api_key: str, reward: float, *, interaction_id: str | None = None, source: str = "client"
    ) -> str | None: ...

    async def end_session(self, api_key: str, *, state: str = "done", reason: str | None = None) -> int: ...


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """How one attempt ended. reward: the sum over what the agent gave; None where it gave none."""

    episode_id: str
    task_id: str
    group_id: str
    attempt: int
    state: str  # done | failed | lost
    reason: str | None = None
    reward: float | None = None
    n_interactions: int = 0
    seconds: float = 0.0


def group_id_of(run_id: str, epoch: int, index: int, *, is_eval: bool = False) -> str:
    """The group of a task in an epoch: the same after a restart, so that nothing is drawn twice."""
    return f"{run_id}/{'eval' if is_eval else 'epoch'}-{epoch}/{index}"


def remaining_attempts(ended: Sequence[tuple[int, str]], *, n_samples: int, max_attempts: int) -> list[int]:
    """Attempt numbers still to start so that every sample of a group comes to its end.

    ended: (attempt, state) of the group's episodes so far. A failed attempt k is followed by attempt k + 1 up to
    max_attempts; an episode that was lost or abandoned does not count as an attempt and is drawn again.
    """
    starts: list[int] = []
    wanted = n_samples
    for attempt in range(1, max_attempts + 1):
        done = sum(1 for a, state in ended if a == attempt and state == "done")
        failed = sum(1 for a, state in ended if a == attempt and state == "failed")
        starts += [attempt] * max(0, wanted - done - failed)
        wanted = min(wanted, failed)
    return starts


class Runner:
    """Runs one workflow against one proxy.

    n_samples: episodes per group. time_limit_s: for one episode. max_attempts: tries per sample.
    max_concurrent: episodes at once, over all groups; None: no limit of its own.
    origin: the interaction that every episode is a fork of, see the proxy's start_session.
    on_episode: called on the event loop with each ended Episode.
    """

    def __init__(
        self,
        proxy: Proxy,
        workflow: Any,
        *,
        run_id: str,
        workflow_kwargs: Mapping[str, Any] | None = None,
        n_samples: int = 1,
        time_limit_s: float | None = None,
        max_attempts: int = 1,
        max_concurrent: int | None = None,
        is_eval: bool = False,
        origin: str | None = None,
        on_episode: Callable[[Episode], None] | None = None,
    ) -> None:
        self.proxy = proxy
        self.workflow: Workflow = resolve(workflow, **(workflow_kwargs or {}))
        self.run_id = run_id
        self.n_samples = n_samples
        self.time_limit_s = time_limit_s
        self.max_attempts = max_attempts
        self.is_eval = is_eval
        self.origin = origin
        self.n_running = 0
        self._on_episode = on_episode
        self._source = f"agent {self.workflow.name}"
        # Agents begin one after the other: many build an SDK's client first, tens of milliseconds without an await.
        self._starting = anyio.Lock()
        self._left_behind: set[asyncio.Task[Any]] = set()
        self._agents: dict[str, asyncio.Task[Any]] = {}  # by session_id
        self._places = anyio.Semaphore(max_concurrent) if max_concurrent else None

    async def run(self, tasks: Sequence[Task], *, epoch: int = 0) -> list[Episode]:
        """A group for each task, all at once (bounded by max_concurrent); in the order of the tasks."""
        groups: list[list[Episode]] = [[] for _ in tasks]

        async def one(i: int, task: Task) -> None:
            groups[i] = await self.run_group(task, epoch=epoch)

        with watching(self.workflow.blocking):
            async with anyio.create_task_group() as group:
                for i, task in enumerate(tasks):
                    group.start_soon(one, i, task)
        return [episode for group_episodes in groups for episode in group_episodes]

    async def run_group(
        self, task: Task, *, epoch: int = 0, ended: Sequence[tuple[int, str]] = (), group_id: str | None = None
    ) -> list[Episode]:
        """The samples of one task in parallel. `ended`: (attempt, state) of those that a run before this one ended."""
        group_id = group_id or group_id_of(self.run_id, epoch, task.index, is_eval=self.is_eval)
        episodes: list[Episode] = []

        async def sample(attempt: int) -> None:
            while True:
                episode, is_final = await self._run_episode(task, group_id, attempt)
                episodes.append(episode)
                if episode.state == "lost":
                    continue
                if episode.state == "done" or is_final or attempt >= self.max_attempts:
                    return
                attempt += 1

        async with anyio.create_task_group() as group:
            for attempt in remaining_attempts(ended, n_samples=self.n_samples, max_attempts=self.max_attempts):
                group.start_soon(sample, attempt)
        return episodes

    def stop_agents(self, session_ids: Sequence[str]) -> None:
        """Nobody will answer these: their episodes end now."""
        for session_id in session_ids:
            agent = self._agents.get(session_id)
            if agent is not None:
                agent.cancel()

    async def _run_episode(self, task: Task, group_id: str, attempt: int) -> tuple[Episode, bool]:
        """One attempt, and whether another one is pointless."""
        if self._places is None:
            return await self._run_session(task, group_id, attempt)
        async with self._places:
            return await self._run_session(task, group_id, attempt)

    async def _run_session(self, task: Task, group_id: str, attempt: int) -> tuple[Episode, bool]:
        opened = await self._start_session(task, group_id, attempt)
        base_url = opened.base_url or self.proxy.base_url
        session = Session(session_id=opened.session_id, api_key=opened.api_key, base_url=base_url)
        self.n_running += 1
        began = time.monotonic()
        state, n_interactions, is_final = "abandoned", 0, False
        reason: str | None = "cancelled"
        reward: float | None = None
        try:
            returned = await self._call(task, session)
            reward = await self._give(session, read_reward(returned))
            state, reason = "done", None
        except (BadReward, Rejected) as error:
            state, reason, is_final = "failed", describe(error), True
        except Exception as error:  # the agent's own: data about this episode, nobody else's concern
            state, reason = "failed", describe(error)
        finally:
            self.n_running -= 1
            with anyio.CancelScope(shield=True):
                try:
                    n_interactions = await self.proxy.end_session(session.api_key, state=state, reason=reason)
                except SessionLost as error:
                    state, reason = "lost", describe(error)
                except SessionEnded as error:  # by the proxy: it was idle for too long, say
                    state, reason = "failed", describe(error)
        episode = Episode(
            episode_id=session.session_id,
            task_id=task.task_id,
            group_id=group_id,
            attempt=attempt,
            state=state,
            reason=reason,
            reward=reward,
            n_interactions=n_interactions,
            seconds=time.monotonic() - began,
        )
        if self._on_episode is not None:
            self._on_episode(episode)
        return episode, is_final

    async def _start_session(self, task: Task, group_id: str, attempt: int) -> Opened:
        """Waits while the proxy has no room. Cancelled, it ends what the proxy has opened meanwhile."""
        while True:
            asking = asyncio.ensure_future(
                self.proxy.start_session(
                    task.task_id,
                    group_id=group_id,
                    attempt=attempt,
                    is_eval=self.is_eval,
                    task=dict(task.row),
                    run_id=self.run_id,
                    **({} if self.origin is None else {"origin_interaction_id": self.origin}),
                )
            )
            try:
                return await asyncio.shield(asking)
            except Busy as error:
                await anyio.sleep(error.retry_after_s or 1.0)
            except asyncio.CancelledError:
                with anyio.CancelScope(shield=True):
                    await self._take_back(asking)
                raise

    async def _take_back(self, asking: "asyncio.Future[Opened]") -> None:
        """Nobody wants this session any more, and it may be open already, its answer on the way."""
        await asyncio.wait({asking}, timeout=STOP_S)
        if not asking.done():  # no proxy is there, or none with time
            asking.cancel()
            await asyncio.wait({asking})
        if asking.cancelled() or asking.exception() is not None:
            return
        with suppress(SessionLost, SessionEnded):
            await self.proxy.end_session(asking.result().api_key, state="abandoned", reason="cancelled")

    async def _call(self, task: Task, session: Session) -> Any:
        """What the agent returns. It runs as a task of its own, which may be left behind if it refuses to end."""
        agent: asyncio.Task[Any] | None = None
        try:
            async with self._starting:
                agent = asyncio.create_task(self._contain(task, session), name=f"agent {session.session_id}")
                self._agents[session.session_id] = agent
                await asyncio.sleep(0)
            await asyncio.wait({agent}, timeout=self.time_limit_s)
        finally:
            self._agents.pop(session.session_id, None)
            is_late = agent is not None and not agent.done()
            if agent is not None and is_late:
                await self._stop(agent)
        if is_late:
            raise AgentStopped(f"the agent took longer than {self.time_limit_s:g} s")
        if agent.cancelled():
            raise AgentStopped("the agent cancelled itself")
        return agent.result()

    async def _stop(self, agent: "asyncio.Task[Any]") -> None:
        """Cancel an agent and give it a while; one that goes on is left behind, its session closed."""
        agent.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait({agent}, timeout=STOP_S)
        if not agent.done():
            self._left_behind.add(agent)
            agent.add_done_callback(self._forget)
            asyncio.tasks._unregister_task(agent)  # a loop that closes waits for all that it knows of

    def _forget(self, agent: "asyncio.Task[Any]") -> None:
        self._left_behind.discard(agent)
        if not agent.cancelled():
            agent.exception()  # nobody waits for it any more

    async def _contain(self, task: Task, session: Session) -> Any:
        pid = os.getpid()
        try:
            return await self.workflow.run(task.row, session)
        except SystemExit as error:
            raise AgentStopped(f"the agent tried to end the program with exit code {error.code}") from error
        except (Exception, asyncio.CancelledError, GeneratorExit):
            raise
        except KeyboardInterrupt as error:
            if threading.current_thread() is threading.main_thread():
                raise  # a person's
            raise AgentStopped("the agent raised KeyboardInterrupt") from error
        except BaseException as error:  # a panic of a Rust extension, say: of this episode, not of the run
            raise AgentStopped(f"the agent raised {said(error)}") from error
        finally:
            if os.getpid() != pid:
                os._exit(0)  # the agent forked, and its child came back here

    async def _give(self, session: Session, reward: Reward) -> float | None:
        """Put the reward into the book. Known interactions keep theirs, whatever an unknown id beside them is."""
        if reward is None:
            return None
        if isinstance(reward, float):
            try:
                await self.proxy.set_reward(session.api_key, reward, source=self._source)
            except BadRequest as error:
                raise BadReward(f"the agent returned {reward:g}, which found no model call: {error}") from error
            return reward
        refused: list[str] = []
        for interaction_id, value in reward.items():
            try:
                await self.proxy.set_reward(session.api_key, value, interaction_id=interaction_id, source=self._source)
            except (BadRequest, NotFound):
                refused.append(interaction_id)
        if refused:
            raise BadReward(
                f"the agent returned rewards for {', '.join(map(repr, refused))}, which are no interactions of this "
                f"episode; use the `id` of a reply. The other {len(reward) - len(refused)} were kept"
            )
        return sum(reward.values()) if reward else None
