"""What ends a run's rollouts reaches the learner as the one error that says why."""

from pathlib import Path

import pytest

from rollbook.agents.errors import RolloutsFailing
from rollbook.app.config import ConfigError
from rollbook.app.launch import LaunchFailed
from rollbook.app.local import LocalRollouts, ended_groups, engine_of, parallel
from rollbook.app.serving import gpus_of, make_engines
from rollbook.store import BatchTaken, EpisodeClosed, EpisodeOpened, Event, open_book


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
