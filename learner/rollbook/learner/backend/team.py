"""The processes that compute one model together. Rank 0 is the training run; the others do what it says.

An order names a shard, a method and each rank's own arguments: its share of a batch and nothing else. All ranks run it
at the same time, since the shards' collectives meet inside, and rank 0 gets every rank's answer. Orders travel over
gloo on the CPU, weights and gradients over NCCL where there are GPUs.

    Team.start(n)      starts n - 1 processes on this machine, or joins those that torchrun started
    follow(...)        what they run: `python -m rollbook.learner.backend.team` or the same program under torchrun

A rank that dies ends the run with one sentence; what the others were computing is lost, the book is not.
"""

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rollbook.learner.errors import BadSetting, RankLost

PATIENCE = timedelta(days=365)
"""How long a rank waits for its next order: a step may wait for rollouts as long as it likes."""


class Team:
    """Rank 0's view. `device` is the device of rank 0; the others have one each."""

    def __init__(self, size: int, device: torch.device, children: Sequence["_Child"], log_folder: Path | None) -> None:
        self.size = size
        self.device = device
        self._children = children
        self._shards: dict[str, Any] = {}
        self.names = self._shards.keys()
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._is_closed = False
        self._watch = threading.Thread(target=self._end_if_stuck, name="ranks", daemon=True)
        self._watch.start()

    @classmethod
    def start(cls, size: int, *, device: str = "auto", log_folder: Path | None = None) -> "Team":
        """log_folder: where the other ranks' output goes. Raises BadSetting where there are fewer GPUs than ranks."""
        kind = check_devices(size, device)
        if "RANK" in os.environ:  # torchrun has started the others already
            if int(os.environ["WORLD_SIZE"]) != size:
                raise BadSetting(
                    f"actor.backend asks for {size} ranks and torchrun started {os.environ['WORLD_SIZE']}; "
                    "make the two the same"
                )
            return cls(size, _join_torchrun(kind), (), log_folder)
        _stay_on_loopback()
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        children = [_Child(rank, size, store.port, kind, log_folder) for rank in range(1, size)]
        try:
            with _lost(children):
                made = _join(kind, store, rank=0, size=size, local_rank=0)
                return cls(size, made, children, log_folder)
        except BaseException:
            for child in children:
                child.stop()
            raise

    def make(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A shard on every rank; returns rank 0's."""
        self.run(name, "make", [(args, kwargs)] * self.size)
        return self._shards[name]

    def run(self, name: str, method: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        """`shard.method(*shares[rank])` on every rank; the answers in the order of ranks. Raises RankLost."""
        with _lost(self._children):
            # Orders travel while this rank is at work on its own.
            posts = [_Post((name, method, share), rank, self._group) for rank, share in enumerate(shares) if rank]
            answers = [_obey(self._shards, (name, method, shares[0]), self.device)]
            answers += [_taken(rank, self._group) for rank in range(1, self.size)]
            for post in posts:
                post.wait()
        return answers

    def close(self) -> None:
        """Send everybody home. Twice is once."""
        if self._is_closed:
            return
        self._is_closed = True
        if sys.exc_info()[0] is None and all(child.is_alive() for child in self._children):
            for rank in range(1, self.size):
                _Post(("", "stop", ()), rank, self._group).wait()
            for child in self._children:
                child.wait(20)
        for child in self._children:
            child.stop()
        self._shards.clear()
        self._watch.join()  # it holds this object, and torch's objects must not be let go while Python ends
        dist.destroy_process_group()

    def _end_if_stuck(self) -> None:
        """NCCL waits for a dead neighbour; gloo does not. Where this process does not notice itself, end it."""
        while not self._is_closed:
            time.sleep(0.2)
            gone = next((child for child in self._children if not child.is_alive()), None)
            if gone is None or self._is_closed:
                continue
            for _ in range(600):  # a busy machine takes its time to notice, and to say it better
                time.sleep(0.1)
                if self._is_closed:
                    return
            sys.stderr.write(f"{gone.obituary()}\n")
            sys.stderr.flush()
            os._exit(1)


class _Child:
    def __init__(self, rank: int, size: int, port: int, kind: str, log_folder: Path | None) -> None:
        self.rank, self.size = rank, size
        self.log = None if log_folder is None else log_folder / f"rank-{rank}.log"
        if self.log is not None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with open(self.log or os.devnull, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(rank), str(size), str(port), kind],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out if self.log is not None else None,
            )

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def wait(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self) -> None:
        if self.is_alive():
            self.process.terminate()
            if not self.wait(5):
                self.process.kill()
        self.process.wait()

    def obituary(self) -> str:
        status = self.process.poll()
        how = f"was ended by {signal.Signals(-status).name}" if status and status < 0 else f"ended with status {status}"
        said = "" if self.log is None else f" ({self.log})"
        last = ""
        if self.log is not None and self.log.exists():
            lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            last = f"; it said last: {lines[-1]}" if lines and status and status > 0 else ""
        return (
            f"rank {self.rank} of {self.size} {how}{said}, so the run ends{last}. Nothing in the book is lost: the "
            "same command goes on from the last checkpoint"
        )


@contextmanager
def _lost(children: Sequence[_Child]) -> Iterator[None]:
    """What a collective says when a neighbour is gone, as RankLost."""
    try:
        yield
    except RuntimeError as error:
        give_up = time.monotonic() + 2.0
        while time.monotonic() < give_up:
            gone = next((child for child in children if not child.is_alive()), None)
            if gone is not None:
                raise RankLost(gone.obituary()) from error
            time.sleep(0.05)
        raise


def check_devices(size: int, device: str) -> str:
    """cuda or cpu. Raises BadSetting where `size` ranks have no device each; imports and computes nothing on a GPU."""
    kind = torch.device(device).type if device != "auto" else "cuda"
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if kind == "cuda" and torch.cuda.device_count() < here:
        raise BadSetting(
            f"actor.backend asks for {here} GPUs on this machine and there are {torch.cuda.device_count()}; ask for "
            "fewer ranks (fsdp:d1), or set actor.device: cpu to try it without GPUs"
        )
    return kind


def is_follower() -> bool:
    """Whether torchrun started this process to follow another."""
    return int(os.environ.get("RANK", "0")) > 0


def follow_torchrun(device: str) -> None:
    """What the program does instead of training where torchrun started it as another rank than 0."""
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    made = _join_torchrun(check_devices(size, device))
    _follow(rank, made)


def _join_torchrun(kind: str) -> torch.device:
    return _join(
        kind,
        None,
        rank=int(os.environ["RANK"]),
        size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
    )


def _join(kind: str, store: Any, *, rank: int, size: int, local_rank: int) -> torch.device:
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    where: Any = {"init_method": "env://"} if store is None else {"store": store}
    dist.init_process_group(backend, rank=rank, world_size=size, **where)
    return device


def _stay_on_loopback() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"


def _follow(rank: int, device: torch.device) -> None:
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    shards: dict[str, Any] = {}
    while True:
        order = _taken(0, group)
        if order[1] == "stop":
            break
        _Post(_obey(shards, order, device), 0, group).wait()
    shards.clear()
    dist.destroy_process_group()


class _Post:
    """An object on its way to another rank."""

    def __init__(self, value: Any, rank: int, group: Any) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(value, protocol=5)), dtype=torch.uint8)
        self._tensors = (torch.tensor([len(data)]), data)  # must live until they have gone
        self._works = [dist.isend(tensor, group=group, group_dst=rank) for tensor in self._tensors]

    def wait(self) -> None:
        for work in self._works:
            assert work is not None
            work.wait()


def _taken(rank: int, group: Any) -> Any:
    """The next object from another rank."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, group=group, group_src=rank)
    data = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(data, group=group, group_src=rank)
    return pickle.loads(data.numpy().data)


def _obey(shards: dict[str, Any], order: tuple[str, str, tuple[Any, ...]], device: torch.device) -> Any:
    name, method, share = order
    if method == "make":
        from .sharded import Shard

        args, kwargs = share
        shards[name] = Shard(device, *args, **kwargs)
        return None
    return getattr(shards[name], method)(*share)


def main(rank: str, size: str, port: str, kind: str) -> None:
    """A rank that `Team.start` began."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # end with rank 0, however it ends
    _stay_on_loopback()
    store = dist.TCPStore("127.0.0.1", int(port), int(size), is_master=False)
    _follow(int(rank), _join(kind, store, rank=int(rank), size=int(size), local_rank=int(rank)))


if __name__ == "__main__":
    main(*sys.argv[1:])
