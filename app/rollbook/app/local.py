"""Rollouts on this machine: the server as a child process, the agents inline on an event loop thread.

`scheduler.type: local` in the config names this. The programs share the book's folder, HTTP on loopback and
weight folders, exactly as they would across machines.
"""

import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec

from rollbook.agents.data import tasks_of
from rollbook.agents.errors import AgentsError
from rollbook.agents.loop import RolloutLoop, ended_episodes
from rollbook.agents.runner import Runner
from rollbook.proxy.client import ProxyClient
from rollbook.store import EpisodeClosed, Event, open_book

from .launch import Launcher, LaunchFailed, LocalLauncher, Program

ENGINES = ("embedded", "scripted", "vllm")


def engine_of(backend: str) -> tuple[str, str | None]:
    """`rollout.backend` as (engine, what follows the colon): `scripted:module:function`, AReaL's `vllm:d1t2`."""
    name, _, rest = backend.partition(":")
    if name not in ENGINES:
        raise LaunchFailed(f"rollout.backend is {backend!r}; expected one of {', '.join(ENGINES)}")
    return name, rest or None


class LocalRollouts:
    """See `rollbook.learner.rollouts.Rollouts`."""

    def __init__(self, launcher: Launcher | None = None) -> None:
        self._launcher = launcher or LocalLauncher()
        self._server: Program | None = None
        self._loop: RolloutLoop | None = None
        self._client: ProxyClient | None = None
        self._thread: threading.Thread | None = None
        self._call: Callable[[Callable[[], Any]], Any] | None = None
        self._stop: Callable[[], None] = lambda: None
        self._failure: BaseException | None = None

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
        bury_the_dead(book_path, run_id)
        with open_book(book_path) as book:
            ended = ended_episodes(book, run_id)
        admin_key = secrets.token_urlsafe(32)
        engine, rest = engine_of(config.rollout.backend)
        command = [sys.executable, "-m", "rollbook.app.cli", "serve", book_path, "--engine", engine, "--run", run_id]
        command += ["--model", config.actor.path, "--weights", weights, "--weights-version", str(version)]
        command += ["--set", f"gconfig={msgspec.json.encode(config.gconfig).decode()}"]
        if engine == "scripted" and rest:
            command += ["--script", rest]
        self._server = self._launcher.start(
            command,
            env={"ROLLBOOK_ADMIN_KEY": admin_key},
            log_path=Path(config.run_path, "server.log"),
            wait_s=600.0 if engine == "vllm" else 180.0,
        )
        is_ready = threading.Event()

        async def live() -> None:
            assert self._server is not None
            async with ProxyClient(self._server.url, admin_key) as client, anyio.from_thread.BlockingPortal() as portal:
                runner = Runner(
                    client,
                    workflow,
                    run_id=run_id,
                    workflow_kwargs=workflow_kwargs,
                    n_samples=config.gconfig.n_samples,
                    time_limit_s=config.rollout.agent.session_timeout_seconds,
                    max_attempts=config.rollout.agent.max_attempts,
                )
                self._loop = RolloutLoop(
                    runner,
                    tasks_of(tasks),
                    config.rollout,
                    consumer_batch_size=config.train_dataset.batch_size,
                    seed=config.seed,
                    shuffle=config.train_dataset.shuffle,
                    total_epochs=config.total_train_epochs if config.total_train_steps is None else None,
                    version=version,
                    ended=ended,
                )
                self._client = client
                self._call = portal.call
                async with anyio.create_task_group() as group:
                    self._stop = lambda: portal.call(group.cancel_scope.cancel)
                    is_ready.set()
                    await self._loop.run()

        def body() -> None:
            try:
                anyio.run(live)
            except BaseException as error:
                self._failure = error
            finally:
                is_ready.set()

        self._thread = threading.Thread(target=body, name="rollouts", daemon=True)
        self._thread.start()
        is_ready.wait()
        self.check()

    def publish(self, path: str, version: int) -> None:
        self.check()
        if self._call is None or self._client is None or self._loop is None:
            raise LaunchFailed("the rollouts have not been started")
        client = self._client
        self._call(lambda: client.load_weights(path, version))
        self._loop.on_version(version)

    def reject(self, n_groups: int) -> None:
        """The learner could not use so many finished groups: others take their place."""
        if self._loop is not None:
            self._loop.reject(n_groups)

    def check(self) -> None:
        if self._failure is not None:
            error = self._failure
            while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
                error = error.exceptions[0]
            if isinstance(error, AgentsError):
                raise error
            raise LaunchFailed(f"the rollouts ended: {type(error).__name__}: {error}") from self._failure
        if self._server is not None:
            self._server.check()

    def close(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            self._stop()
            self._thread.join()
        if self._server is not None:
            self._server.stop()


def bury_the_dead(book_path: str, run_id: str) -> None:
    """Close the episodes that a killed process of this run left open; their tasks are drawn again."""
    with open_book(book_path, writer="rollouts") as book:
        book.catch_up()
        lost = book.sql("select episode_id from episodes where run_id = ? and state = 'open'", [run_id])
        fact = EpisodeClosed(state="lost", reason="the process that ran it is gone")
        events = [Event(run_id=run_id, episode_id=id_, fact=fact) for id_ in lost.column(0).to_pylist()]
        if events:
            book.log.append_blocking(*events)
