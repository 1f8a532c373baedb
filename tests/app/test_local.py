"""Rollouts under a launcher: their servers come and go as asked; what ends them reaches the learner as one error."""

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import anyio
import httpx
import msgspec
import pytest

from app.launcher_contract import command_lines, processes
from proxy.engine_contract import collect, generation, ids_of
from proxy.fake_vllm import FakeVLLM, serving
from proxy.models import tiny_model
from rollbook.agents.errors import RolloutsFailing
from rollbook.app.config import ConfigError, GRPOConfig
from rollbook.app.launch import LaunchFailed
from rollbook.app.local import LocalRollouts, ended_groups, engine_of, parallel
from rollbook.app.serving import gpus_of, make_engines
from rollbook.store import BatchTaken, EpisodeClosed, EpisodeOpened, Event, open_book

LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)


def failed(error: BaseException) -> LocalRollouts:
    rollouts = LocalRollouts()
    rollouts._failure = error
    return rollouts


def test_the_reason_is_found_among_what_a_task_group_raised() -> None:
    group = BaseExceptionGroup("", [OSError("aside"), BaseExceptionGroup("", [RolloutsFailing("they all failed")])])
    with pytest.raises(RolloutsFailing, match="they all failed"):
        failed(group).check()
    with pytest.raises(LaunchFailed, match="the rollouts ended: OSError: aside"):
        failed(BaseExceptionGroup("", [OSError("aside"), ValueError("too")])).check()


@pytest.mark.parametrize(
    ("backend", "engine"),
    [
        ("embedded", ("embedded", None)),
        ("scripted:module:function", ("scripted", "module:function")),
        ("vllm:http://127.0.0.1:8000", ("vllm", "http://127.0.0.1:8000")),
        ("sglang:d4t2", ("sglang", "d4t2")),
    ],
)
def test_the_engine_and_what_it_is_given(backend: str, engine: tuple[str, str | None]) -> None:
    assert engine_of(backend) == engine


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(LaunchFailed, match="expected one of embedded"):
        engine_of("llamafile")


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("d2t4", {"d": 2, "t": 4}), ("d8", {"d": 8, "t": 1}), ("t2", {"d": 1, "t": 2}), ("d4p1t1", {"d": 4, "t": 1})],
)
def test_how_many_engines_of_how_many_gpus(text: str, sizes: dict[str, int]) -> None:
    assert parallel(text) == sizes


def test_a_split_that_is_not_understood_is_refused() -> None:
    with pytest.raises(LaunchFailed, match="two engines of four GPUs each"):
        parallel("d2p2")


def test_each_engine_gets_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert [env["CUDA_VISIBLE_DEVICES"] for env in gpus_of(2, ["--tensor-parallel-size=2"])] == ["4,5", "6,7"]
    assert gpus_of(1, ["--tp", "2"]) == [{}]
    with pytest.raises(ConfigError, match="need 6"):
        gpus_of(3, ["--tp", "2"])


def test_an_address_is_for_engines_that_are_servers() -> None:
    with pytest.raises(ConfigError, match="--engine is scripted"):
        make_engines("scripted", "m", urls=["http://127.0.0.1:1"], script="x:y", version=0, tokenizer=None)


@pytest.mark.anyio
async def test_the_address_of_any_compatible_server_is_taken(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    async with serving(FakeVLLM(folder, has_generate=False, is_dev=False, has_lora=False)) as fake:
        made = make_engines("openai", str(folder), urls=[fake.url, fake.url], version=0, tokenizer=None)
        async with made as engine:
            assert len(ids_of(await collect(engine, generation([4, 5], max_tokens=12)))) == 12


def test_groups_that_failed_whole_come_again_unless_a_batch_knows_of_them(tmp_path: Path) -> None:
    states = {
        "done": ["done", "failed"],
        "failed": ["failed", "failed"],
        "told": ["failed", "failed"],
        "dull": ["done"],
    }
    with open_book(str(tmp_path), writer="w") as book:
        for group, ended in states.items():
            for i, state in enumerate(ended):
                opened = EpisodeOpened(task_id="t", group_id=group)
                for fact in (opened, EpisodeClosed(state=state)):
                    book.log.append_blocking(Event(run_id="r", episode_id=f"{group}{i}", fact=fact))
        selection = {"groups": [], "rejected": ["told", "dull"]}
        taken = BatchTaken(batch_id="b", step=0, version=0, rows=[], selection=selection)
        book.log.append_blocking(Event(run_id="r", fact=taken))
        book.catch_up()
        found, n_rejected = ended_groups(book, "r")
    assert found.keys() == {"done", "told", "dull"}
    assert n_rejected == 1  # a group that failed was never counted as one to train on


class Asking:
    """An agent that asks twice; where it is `held`, it never goes on."""

    def __init__(self) -> None:
        self.met: set[str] = set()
        self.held = ""
        self.n_held = 0

    async def run(self, data: dict[str, object], *, base_url: str, api_key: str) -> float:
        self.met.add(base_url)
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}, timeout=300) as client:
            for _turn in range(2):
                body = {"model": "m", "messages": data["messages"]}
                (await client.post(f"{base_url}/chat/completions", json=body)).raise_for_status()
                if base_url == self.held:
                    self.n_held += 1
                    await anyio.sleep_forever()
                await anyio.sleep(0.1)
        return 1.0


def test_servers_come_and_go_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    config = msgspec.convert(
        {
            "experiment_name": "e",
            "trial_name": "t",
            "total_train_epochs": 1_000_000,
            "cluster": {"fileroot": str(tmp_path)},
            "rollout": {
                "backend": "scripted:rollbook.app.demo:calculator",
                "max_head_offpolicyness": 1_000_000,
                "max_concurrent_rollouts": 4,
            },
            "gconfig": {"n_samples": 1, "max_new_tokens": 16},
            "actor": {"path": "tiny"},
            "train_dataset": {"path": "none", "batch_size": 1},
            "scheduler": {"max_restarts": 0},
        },
        GRPOConfig,
    )
    run, rollouts, agent = tmp_path / "e" / "t", LocalRollouts(), Asking()
    tasks = [{"messages": [{"role": "user", "content": f"What is {i} + 1?"}]} for i in range(8)]

    def until(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 600
        while not is_so():
            rollouts.check()
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def writers(since: datetime = LONG_AGO) -> set[str]:
        with open_book(config.book_path) as book:
            found = book.sql("select distinct writer from interactions where recorded_at > ?", [since])
        return set(found["writer"].to_pylist())

    def states() -> set[str]:
        with open_book(config.book_path) as book:
            return set(book.sql("select distinct state from episodes")["state"].to_pylist())

    rollouts.start(
        config,
        book_path=config.book_path,
        run_id=config.run_id,
        tasks=tasks,
        workflow=agent,
        workflow_kwargs={},
        version=0,
        weights="tiny",
    )
    try:
        until(lambda: writers() == {"proxy-1"})
        [first] = agent.met
        assert (run / "proxies").read_text() == "1\n"
        (run / "proxies").write_bytes(b"none\xff")
        until(lambda: "must hold a number of servers" in capsys.readouterr().err)
        (run / "proxies").write_text("2\n")
        until(lambda: writers() == {"proxy-1", "proxy-2"})
        (run / "proxies").write_text("02")
        until(lambda: "it holds '02'. Nothing is changed" in capsys.readouterr().err)
        (run / "proxies").write_text("1\n")
        until(lambda: not any("proxy-2" in line and str(tmp_path) in line for line in command_lines()))
        now = datetime.now(UTC)
        until(lambda: writers(now) == {"proxy-1"})
        assert not {"lost", "failed"} & states()
        # One that has used up its restarts is none any more, and its number is free.
        now = datetime.now(UTC)  # what the second one did before it was taken away does not count
        (run / "proxies").write_text("2\n")
        until(lambda: writers(now) == {"proxy-1", "proxy-2"})
        agent.held = first
        until(lambda: agent.n_held > 0)  # an episode is in its middle there
        for pid, line in processes():
            if str(tmp_path) in line and "--writer proxy-1 " in line and "keeper" not in line:
                os.kill(pid, signal.SIGKILL)
        until(lambda: (run / "proxies").read_text() == "1\n")
        assert "ended with status -9, and is not started again" in capsys.readouterr().err
        (run / "proxies").write_text("2\n")
        now = datetime.now(UTC)
        until(lambda: writers(now) == {"proxy-1", "proxy-2"})
    finally:
        rollouts.close()
    assert states() - {"abandoned"} == {"done", "lost"}
