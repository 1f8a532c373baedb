"""What `rollbook train` says at its end."""

from pathlib import Path

import pytest

from rollbook.app.training import require_step
from rollbook.learner.errors import NothingToTrain
from rollbook.store import BatchTaken, BatchTrained, EpisodeClosed, EpisodeOpened, Event, open_book


def test_a_run_whose_episodes_all_failed_says_so(tmp_path: Path) -> None:
    path = str(tmp_path / "book")
    with open_book(path, writer="w") as book:
        for i in range(3):
            episode = f"ep{i}"
            book.log.append_blocking(
                Event(run_id="r", episode_id=episode, fact=EpisodeOpened(task_id="t")),
                Event(run_id="r", episode_id=episode, fact=EpisodeClosed(state="failed", reason="ValueError: boom")),
            )
    with pytest.raises(NothingToTrain, match=r"3 of 3 episodes failed, the last with ValueError: boom.*doctor"):
        require_step(path, "r")
    require_step(path, "another")
    with open_book(path, writer="w") as book:
        taken = BatchTaken(batch_id="b", step=0, version=0, rows=[])
        book.log.append_blocking(
            Event(run_id="r", fact=taken), Event(run_id="r", fact=BatchTrained(batch_id="b", step=0))
        )
    require_step(path, "r")
