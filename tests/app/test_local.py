"""What ends a run's rollouts reaches the learner as the one error that says why."""

import pytest

from rollbook.agents.errors import RolloutsFailing
from rollbook.app.launch import LaunchFailed
from rollbook.app.local import LocalRollouts, engine_of


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
