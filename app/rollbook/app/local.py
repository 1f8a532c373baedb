"""Rollouts of a run: servers started by a launcher, the agents inline on an event loop thread.

`scheduler.type: local` in the config names this, with servers as child processes; `launch_slurm.py` and `launch_ray.py`
change who starts them, and nothing else. The programs share the book's folder, HTTP on loopback and
weight folders, exactly as they would across machines.
"""

import gc
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import numpy.typing as npt
from anyio.from_thread import BlockingPortal, start_blocking_portal
from rich.console import Console

from rollbook.agents.data import Task, tasks_of, weights_from_sql
from rollbook.agents.errors import AgentsError
from rollbook.agents.loop import RolloutLoop, ended_episodes
from rollbook.agents.modes import workflow_of
from rollbook.agents.online import keep_open
from rollbook.agents.runner import Runner
from rollbook.agents.workflow import resolve
from rollbook.proxy.client import ProxyClient
from rollbook.store import Book, EpisodeClosed, Event, open_book

from .keeper import read, write
from .launch import LaunchFailed, Program, Resources, SchedulerConfig, Supervisor, start_servers
from .launch_local import LocalLauncher
from .online import online_of
from .proxies import Proxies

ENGINES = ("embedded", "scripted", "vllm", "sglang")
_LOOK_S = 1.0
_ENGINE_WAIT_S = 600.0  # a large model takes minutes to load
PROXIES = "proxies"
"""A file of a run's folder: how many servers it has. Who changes the number changes them, while the run goes on."""


def engine_of(backend: str) -> tuple[str, str | None]:
    """`rollout.backend` in two: `scripted:module:function`, `vllm:URL,URL`, `vllm:--flags`, `vllm:d2t4`."""
    name, _, rest = backend.partition(":")
    if name not in ENGINES:
        raise LaunchFailed(f"rollout.backend is {backend!r}; expected one of {', '.join(ENGINES)}")
    return name, rest or None


def parallel(text: str) -> dict[str, int]:
    """AReaL's `d2t4`: two engines (d) of four GPUs each (t). Raises LaunchFailed for what it does not say."""
    found = re.fullmatch(r"(?:d(?P<d>[1-9]\d*))?(?:[pt]1)*(?:t(?P<t>[1-9]\d*))?(?:p1)?", text)
    if not found or not text:
        raise LaunchFailed(
            f"rollout.backend ends with {text!r}; expected an address (several with commas), flags, or d2t4: two "
            "engines of four GPUs each"
        )
    return {name: int(value or 1) for name, value in found.groupdict().items()}


class LocalRollouts:
    """See `rollbook.learner.rollouts.Rollouts`."""

    def __init__(self) -> None:
        self._servers: dict[int, Program] = {}  # by number, from 1
        self._config: Any = None
        self._run_id = ""
        self._runners: list[Runner] = []  # at work
        self._book_path = ""
        self._loop: RolloutLoop | None = None
        self._proxies: Proxies | None = None
        self._portal: BlockingPortal | None = None
        self._stack = ExitStack()
        self._failure: BaseException | None = None

    def launcher_of(self, config: Any) -> Supervisor:
        """Who starts the servers; `launch_slurm.py` and `launch_ray.py` have others."""
        return LocalLauncher(max_restarts=config.scheduler.max_restarts)

    def resolve(self, workflow: Any, workflow_kwargs: Mapping[str, Any]) -> None:
        resolve(workflow, **workflow_kwargs)

    def start(
        self,
        config: Any,
        *,
        book_path: str,
        run_id: str,
        tasks: Sequence[Mapping[str, Any]],
        workflow: Any,
        workflow_kwargs: Mapping[str, Any],
        version: int,
        weights: str,
    ) -> None:
        self._config, self._run_id, self._book_path = config, run_id, book_path
        online = online_of(config) if config.is_online else None
        with open_book(book_path, writer="rollouts") as book:
            if online is None:  # an application goes on where it was: the server knows its session again
                bury_the_dead(book, run_id)
            ended, n_rejected = ended_groups(book, run_id)
        scheduler: SchedulerConfig = config.scheduler
        launcher = self._stack.enter_context(self.launcher_of(config))
        serve = partial(
            start_servers,
            launcher,
            book_path,
            wait_s=_ENGINE_WAIT_S,
            resources=Resources(cpus=scheduler.cpus, gpus=scheduler.gpus, memory_gb=scheduler.memory_gb),
            python=scheduler.python,
        )
        arguments = self._serve_arguments(config, version, weights)
        servers, admin_key = serve(
            [*arguments, "--writer", "proxy-{index}", *(online.serve_arguments() if online else ())],
            log_path=Path(config.run_path, "server.log"),
            n=scheduler.proxies,
            admin_key=online.admin_key if online else config.rollout.agent.admin_api_key,
        )
        self._servers = dict(enumerate(servers, start=1))
        portal = self._stack.enter_context(start_blocking_portal(name="rollouts"))
        self._proxies = self._stack.enter_context(
            portal.wrap_async_context_manager(Proxies(servers, admin_key, version=version, on_lost=self._stop_agents))
        )
        self._portal = portal
        if online is not None:
            url = servers[0].url
            _say(online.answering_at(url, config.run_path))
            client = self._stack.enter_context(portal.wrap_async_context_manager(ProxyClient(url, admin_key)))
            self._keep_up(portal, partial(keep_open, client, online.api_key, run_id=run_id))
            return
        runner = self._runner(workflow, workflow_kwargs, n_samples=config.gconfig.n_samples)
        self._stack.callback(runner.workflow.close)
        self._runners.append(runner)
        rows = tasks_of(tasks)
        curriculum = config.train_dataset.curriculum
        weigh = None if curriculum is None else partial(self._weights, curriculum, rows)
        self._loop = RolloutLoop(
            runner,
            rows,
            config.rollout,
            consumer_batch_size=config.groups_per_step,
            seed=config.seed,
            shuffle=config.train_dataset.shuffle,
            total_epochs=config.total_train_epochs if weigh is None else None,
            version=self._horizon(version),
            ended=ended,
            rejected=n_rejected,
            weights=weigh,
        )
        self._keep_up(portal, self._loop.run)

        def serve_one(number: int) -> Program:
            log_path = Path(config.run_path, "server.log" if number == 1 else f"server-{number}.log")
            [program], _ = serve(
                [*arguments, "--writer", f"proxy-{number}"], log_path=log_path, n=1, admin_key=admin_key
            )
            return program

        self._keep_up(portal, partial(self._keep_number, serve_one))

    async def _keep_number(self, serve_one: Callable[[int], Program]) -> None:
        """Have as many servers as the file `proxies` of the run's folder says."""
        assert self._proxies is not None
        path = Path(self._config.run_path, PROXIES)
        write(path, f"{len(self._servers)}\n")
        refused = ""
        while True:
            await anyio.sleep(_LOOK_S)
            for number, program in list(self._servers.items()):
                if len(self._servers) > 1 and (why := _why_gone(program)) is not None:
                    await self._part_with(number)
                    _say(f"{len(self._servers)} of the servers are left, as {path} says now, too: {why}")
                    write(path, f"{len(self._servers)}\n")
            text = (read(path) or "").strip()
            if text != refused:
                refused = ""
            if text in (refused, "", str(len(self._servers))):
                continue
            if not re.fullmatch(r"[1-9]\d{0,4}", text):
                refused = text
                _say(f"{path} must hold a number of servers, 1 or more; it holds {text!r}. Nothing is changed")
            elif int(text) > len(self._servers):
                number = next(n for n in count(1) if n not in self._servers)
                try:
                    program = await anyio.to_thread.run_sync(serve_one, number, abandon_on_cancel=True)
                except LaunchFailed as error:
                    refused = text
                    _say(f"{path} asks for {text} servers, and the next one did not come up: {error}")
                    continue
                self._servers = {**self._servers, number: program}  # first: `check` must know of whoever gets sessions
                await self._proxies.add(program)
            else:
                await self._part_with(max(self._servers))

    async def _part_with(self, number: int) -> None:
        """One server less. Returns when its sessions are over and it has ended."""
        assert self._proxies is not None
        program = self._servers[number]
        self._servers = {n: other for n, other in self._servers.items() if n != number}
        await self._proxies.remove(program)
        await anyio.to_thread.run_sync(program.stop)

    def _weights(self, query: str, tasks: Sequence[Task], epoch: int) -> npt.NDArray[np.float64]:
        """What the book says of the tasks as this epoch begins. Raises StoreError, DataError."""
        with open_book(self._book_path) as book:
            return weights_from_sql(book, query, tasks)

    def _keep_up(self, portal: BlockingPortal, work: Callable[[], Awaitable[None]]) -> None:
        """What brings episodes, until it is closed or fails."""
        scope = portal.call(anyio.CancelScope)
        live = portal.start_task_soon(self._live, work, scope)
        # Clients that agents left open close while there is a loop.
        self._stack.callback(lambda: portal.call(gc.collect))
        self._stack.callback(live.result)  # running episodes are closed before the client and the server go
        self._stack.callback(lambda: portal.call(scope.cancel))

    async def _live(self, work: Callable[[], Awaitable[None]], scope: anyio.CancelScope) -> None:
        with scope:
            try:
                await work()
            except Exception as error:
                self._failure = error

    def _serve_arguments(self, config: Any, version: int, weights: str) -> list[str]:
        engine, rest = engine_of(config.rollout.backend)
        words = ["--run", self._run_id, "--engine", engine, "--model", config.actor.path]
        words += ["--weights", weights, "--weights-version", str(version)]
        words += ["--set", f"gconfig={msgspec.json.encode(config.gconfig).decode()}"]
        agent = config.rollout.agent
        history = "exact" if agent.chat_template_type == "concat" else None
        given = {"tool_parser": agent.tool_call_parser, "reasoning_parser": agent.reasoning_parser, "history": history}
        words += [f"--set=capture.{name}={value}" for name, value in given.items() if value is not None]
        if (host := self.host_of(config)) is not None:
            words += ["--host", host]
        if rest is None:
            return words
        if engine == "scripted":
            return [*words, "--script", rest]
        words += ["--update", config.scheduler.update]
        if rest.startswith("http"):
            return [*words, *(f"--engine-url={url}" for url in rest.split(","))]
        if rest.startswith("-"):
            return [*words, f"--engine-args={rest}"]
        sizes = parallel(rest)
        flag = "--tensor-parallel-size" if engine == "vllm" else "--tp"
        args = f"{flag}={sizes['t']}" if sizes["t"] > 1 else ""
        return [*words, "--replicas", str(sizes["d"]), f"--engine-args={args}"]

    def host_of(self, config: Any) -> str | None:
        """Where servers listen; {node} is the name of their host."""
        host: str | None = config.scheduler.host
        return host

    def _stop_agents(self, session_ids: list[str]) -> None:
        for runner in self._runners:
            runner.stop_agents(session_ids)

    def _runner(self, workflow: Any, kwargs: Mapping[str, Any], *, n_samples: int, is_eval: bool = False) -> Runner:
        agent = self._config.rollout.agent
        assert self._proxies is not None
        return Runner(
            self._proxies,
            workflow_of(agent, workflow, kwargs, gamma=self._config.credit.gamma),
            run_id=self._run_id,
            n_samples=n_samples,
            time_limit_s=agent.session_timeout_seconds,
            max_attempts=agent.max_attempts,
            is_eval=is_eval,
        )

    def publish(self, path: str, version: int) -> None:
        self.check()
        portal, proxies = self._running()
        portal.call(proxies.load_weights, path, version)
        if self._loop is not None:
            self._loop.on_version(self._horizon(version))

    def _horizon(self, version: int) -> int:
        """The version that decides how many groups may begin: none that no step will take."""
        if self._config.total_train_steps is None:
            return version
        return min(version, self._config.total_train_steps - 1 - self._config.rollout.max_head_offpolicyness)

    def reject(self, n_groups: int) -> None:
        if self._loop is not None:
            self._loop.reject(n_groups)

    def evaluate(
        self, tasks: Sequence[Mapping[str, Any]], workflow: Any, workflow_kwargs: Mapping[str, Any], *, epoch: int
    ) -> None:
        self.check()
        portal = self._running()[0]
        runner = self._runner(workflow, workflow_kwargs, n_samples=self._config.evaluator.n_samples, is_eval=True)
        self._runners.append(runner)
        try:
            portal.call(partial(runner.run, tasks_of(tasks), epoch=epoch))
        finally:
            self._runners.remove(runner)
            runner.workflow.close()

    def check(self) -> None:
        error = self._failure
        if error is not None:
            causes = _causes(error)
            cause = next((one for one in causes if isinstance(one, AgentsError | LaunchFailed)), causes[0])
            if isinstance(cause, AgentsError | LaunchFailed):
                raise cause
            raise LaunchFailed(f"the rollouts ended: {type(cause).__name__}: {cause}") from error
        servers = self._servers.values()
        for server in servers if not any(server.is_up for server in servers) else ():
            server.check()  # none is up: is there one that will be?

    def close(self) -> None:
        self._portal = None
        self._stack.close()

    def _running(self) -> tuple[BlockingPortal, Proxies]:
        if self._portal is None or self._proxies is None:
            raise LaunchFailed("the rollouts have not been started, or have ended")
        return self._portal, self._proxies


def _say(text: str) -> None:
    Console(stderr=True).print(text, soft_wrap=True, highlight=False, markup=False)


def _why_gone(program: Program) -> str | None:
    """Why it is gone for good; None while it lives or is started again."""
    try:
        program.check()
    except LaunchFailed as error:
        return str(error)
    return None


def _causes(error: BaseException) -> list[BaseException]:
    """What a task group raised, without the groups around it."""
    if isinstance(error, BaseExceptionGroup):
        return [cause for one in error.exceptions for cause in _causes(one)]
    return [error]


def bury_the_dead(book: Book, run_id: str) -> None:
    """Close the episodes that a killed process of this run left open; their tasks are drawn again."""
    lost = book.sql("select episode_id from episodes where run_id = ? and state = 'open'", [run_id])
    fact = EpisodeClosed(state="lost", reason="the process that ran it is gone")
    events = [Event(run_id=run_id, episode_id=id_, fact=fact) for id_ in lost.column(0).to_pylist()]
    if events:
        book.log.append_blocking(*events)
        book.catch_up()


def ended_groups(book: Book, run_id: str) -> tuple[dict[str, list[tuple[int, str]]], int]:
    """What earlier processes of the run ended, and of how many groups that were done batches had no use.

    A group of which every sample failed is drawn again, unless a batch has said that it failed.
    """
    used: set[str] = set()
    rejected: set[str] = set()
    for text in book.sql("select selection from batches where run_id = ?", [run_id]).column(0).to_pylist():
        selection = json.loads(text) if text else {}
        used.update(selection.get("groups", ()), selection.get("rejected", ()))
        rejected.update(selection.get("rejected", ()))
    ended = ended_episodes(book, run_id)
    done = {group for group, episodes in ended.items() if any(state == "done" for _, state in episodes)}
    return {group: ended[group] for group in ended if group in done or group in used}, len(rejected & done)
