"""Programs as actors of a Ray cluster, in a placement group that spreads them: one that runs, or one started here.

An actor holds its keeper by standard input, as `launch_local.py` does: Ray ends the actors of a driver that is gone,
and with an actor goes what it holds. Programs share URLs and files with the rest of the run, no objects of Ray's.
"""

import logging
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .launch import LOST_S, PATIENT_S, Job, LaunchFailed, SchedulerConfig, Supervisor, Ticket, let_go
from .local import LocalRollouts

_log = logging.getLogger(__name__)


class _Holder:
    """The actor."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **env},
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def status(self) -> int | None:
        return self._process.poll()

    def end(self, wait_s: float) -> None:
        let_go(self._process, wait_s)


class _Actor:
    """One actor in its place of a placement group."""

    def __init__(self, actor: Any, place: "_Place", name: str) -> None:
        self._actor = actor
        self._name = name
        self._tell_at: float | None = time.monotonic() + PATIENT_S  # None: it has begun, or its waiting was told
        self._place = place
        self._asked: Any = None
        self._is_ended = False

    def why_ended(self) -> str | None:
        # Asked without waiting: an actor that waits in Ray's queue does not answer yet.
        if self._asked is None:
            self._asked = self._actor.status.remote()
        done, _ = ray.wait([self._asked], timeout=0)
        if not done:
            self._tell_of_waiting()
            return None
        self._tell_at = None
        asked, self._asked = self._asked, None
        try:
            status = ray.get(asked)
        except RayError as error:
            return f"ended: Ray says {type(error).__name__}: {str(error).strip().splitlines()[0]}"
        return None if status is None else f"ended: its keeper ended with status {status}"

    def _tell_of_waiting(self) -> None:
        if self._tell_at is None or time.monotonic() < self._tell_at:
            return
        self._tell_at = None
        _log.warning(
            "%s waits in Ray's queue for %s; it begins when there is room for all that were asked for together, and "
            "never where the cluster has less: see scheduler.cpus, gpus and memory_gb, and `ray status`",
            self._name,
            self._place.asked,
        )

    def end(self, wait_s: float) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        with suppress(RayError):  # it is gone already
            ray.get(self._actor.end.remote(wait_s), timeout=wait_s + 5)
        with suppress(RayError):
            ray.kill(self._actor)
        self._place.leave()


class _Place:
    """A placement group, given back when the last of its actors has ended."""

    def __init__(self, bundles: list[dict[str, float]]) -> None:
        self.group = placement_group(bundles, strategy="SPREAD")
        self.asked = f"{len(bundles)} x {bundles[0]}"
        self._left = len(bundles)

    def leave(self) -> None:
        self._left -= 1
        if not self._left:
            with suppress(RayError):
                remove_placement_group(self.group)


class RayLauncher(Supervisor):
    """See `Launcher`. address: of a running cluster (as ray.init takes it); None: a cluster of this machine alone.

    The log's folder must be one that all nodes see, as the book's must.
    """

    look_s = 0.5

    def __init__(
        self,
        *,
        address: str | None = None,
        python: str | None = None,
        max_restarts: int = 3,
        lost_s: float = LOST_S,
    ) -> None:
        super().__init__(max_restarts=max_restarts, lost_s=lost_s)
        self._python = python
        self._is_ours = not ray.is_initialized()
        self._is_alone = self._is_ours and address is None
        if self._is_ours:
            if address is None:
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster of ours tells nobody of itself
            else:
                _knock(address)
            try:
                ray.init(
                    address=address or "local",
                    namespace="rollbook",
                    include_dashboard=False if address is None else None,
                    log_to_driver=False,
                    logging_level="ERROR",
                )
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise LaunchFailed(
                    f"no Ray cluster answers at {address or 'this machine'}: {error}; start one with "
                    "`ray start --head`, or leave scheduler.address out"
                ) from error

    def submit(self, jobs: Sequence[Job]) -> Sequence[Ticket]:
        needs = jobs[0].resources
        bundle: dict[str, float] = {"CPU": needs.cpus}
        if needs.gpus:
            bundle["GPU"] = needs.gpus
        if needs.memory_gb is not None:
            bundle["memory"] = needs.memory_gb * 2**30
        self._refuse_what_never_fits(bundle, len(jobs))
        place = _Place([bundle] * len(jobs))
        tickets = []
        for i, job in enumerate(jobs):
            strategy = PlacementGroupSchedulingStrategy(place.group, placement_group_bundle_index=i)
            make = ray.remote(
                num_cpus=needs.cpus,
                num_gpus=needs.gpus,
                memory=bundle.get("memory"),
                max_restarts=0,  # a restart is ours to make
                scheduling_strategy=strategy,
            )(_Holder)
            env = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), **job.env}
            actor = make.remote(job.kept("--stdin", python=self._python), env, os.getcwd())
            tickets.append(_Actor(actor, place, job.log_path.stem))
        return tickets

    def _refuse_what_never_fits(self, bundle: Mapping[str, float], n: int) -> None:
        """Ray would let it wait for ever. Of a cluster that is not ours the number may grow."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        room = sum(min(int(node.get(name, 0) // needed) for name, needed in bundle.items()) for node in nodes)
        if not room:
            raise LaunchFailed(f"no node of the Ray cluster has {dict(bundle)}; its nodes have {nodes}")
        if room < n and self._is_alone:
            raise LaunchFailed(
                f"this machine has room for {room} programs of {dict(bundle)} at once, and {n} were asked for: lower "
                "scheduler.cpus or gpus, or give scheduler.address of a larger Ray cluster"
            )

    def close(self) -> None:
        super().close()
        if self._is_ours and ray.is_initialized():
            ray.shutdown()


def _knock(address: str) -> None:
    """Where nobody listens Ray itself tries on for more than five minutes. Raises LaunchFailed."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # `auto`, say
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise LaunchFailed(
            f"no Ray cluster answers at {address}: {error}; start one with `ray start --head`, or leave "
            "scheduler.address out"
        ) from error


class RayRollouts(LocalRollouts):
    """See `rollbook.learner.rollouts.Rollouts`: servers are held by Ray actors, agents run beside the learner."""

    def launcher_of(self, config: Any) -> RayLauncher:
        scheduler: SchedulerConfig = config.scheduler
        return RayLauncher(address=scheduler.address, python=scheduler.python, max_restarts=scheduler.max_restarts)

    def host_of(self, config: Any) -> str:
        return config.scheduler.host or "{node}"
