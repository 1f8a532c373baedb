"""The facade: a book on disk, its tokens and its messages."""

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from rollbook.store import (
    BookBusy,
    BookNotFound,
    DirectoryLog,
    EpisodeClosed,
    EpisodeOpened,
    Messages,
    QueryRefused,
    RewardGiven,
)
from rollbook.store.book import open_book
from rollbook.store.events import encode_messages
from rollbook.store.views import Views
from views_books import event, interaction


def said(reply: str, *request: str, **rest: object) -> bytes:
    return encode_messages(
        Messages(
            request=[{"role": "user", "content": text} for text in request],
            reply={"role": "assistant", "content": reply},
            **rest,  # type: ignore[arg-type]
        )
    )


def test_a_book_is_written_by_one_and_read_by_another(tmp_path: Path) -> None:
    with open_book(tmp_path / "book", writer="proxy") as book, open_book(tmp_path / "book") as reader:
        book.log.append_blocking(event(EpisodeOpened(task_id="t"), episode_id="e"), interaction("i1"))
        assert book.catch_up() == 2
        assert reader.catch_up() == 2
        query = "select episode_id, n_interactions from episodes"
        assert (
            reader.sql(query).to_pylist() == book.sql(query).to_pylist() == [{"episode_id": "e", "n_interactions": 1}]
        )


_OWNER = """
import sys
from rollbook.store.book import open_book
with open_book(sys.argv[1]) as book:
    print(book.views.position, flush=True)
    sys.stdin.read()
"""


def test_another_process_owns_the_projection_until_it_dies(tmp_path: Path) -> None:
    path = tmp_path / "book"
    with open_book(path, writer="w") as book:
        book.log.append_blocking(event(EpisodeOpened(task_id="t"), episode_id="e"), interaction("i1"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _OWNER, str(path)]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "{'w': 2}\n"
            with closing(DirectoryLog(path)) as log, pytest.raises(BookBusy, match=r"owned by another process \(\d+\)"):
                Views(log, path / "views.duckdb")
            with open_book(path, writer="w") as second:  # goes on with tables of its own
                second.log.append_blocking(event(EpisodeClosed(state="done"), episode_id="e"))
                second.catch_up()
                assert second.sql("select state from episodes").to_pylist() == [{"state": "done"}]
        finally:
            owner.kill()
    with closing(DirectoryLog(path)) as log:
        views = Views(log, path / "views.duckdb")
        assert views.catch_up() == 1  # what the dead owner had projected is kept
        views.close()


def test_a_book_that_is_not_there_is_not_made_by_reading(tmp_path: Path) -> None:
    with pytest.raises(BookNotFound):
        open_book(tmp_path / "book")
    assert not list(tmp_path.iterdir())


def test_an_episode_is_read_as_the_model_saw_it(tmp_path: Path) -> None:
    with open_book(tmp_path / "book", writer="proxy") as book:
        first = interaction("i1", n_new=4, n_output=2, at=1, messages=said("A", "a", tools=[{"type": "function"}]))
        second = interaction(
            "i2", parent="i1", edge="extends", shared=6, n_new=3, n_output=1, at=2, version=5, messages=said("B", "b")
        )
        again = interaction(
            "i3", parent="i2", edge="retries", shared=9, n_new=0, n_output=3, at=3, messages=said("C", kept=3)
        )
        book.log.append_blocking(
            event(EpisodeOpened(task_id="t"), episode_id="e"),
            first,
            second,
            again,
            event(RewardGiven(value=0.5), episode_id="e", interaction_id="i2", at=4),
            event(RewardGiven(value=1.0), episode_id="e", at=5),
            event(EpisodeClosed(state="done"), episode_id="e", at=6),
        )
        book.catch_up()
        episode = book.episode("e")
        assert [one.interaction_id for one in episode.interactions] == ["i1", "i2", "i3"]
        assert [reward["value"] for reward in episode.rewards] == [1.0]
        one = book.interaction("i2")
        assert [message["content"] for message in one.messages] == ["a", "A", "b"]
        assert one.reply["content"] == "B"
        assert one.tools == [{"type": "function"}]
        assert one.prompt_ids.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2]
        assert one.output_ids.tolist() == [0]
        assert one.versions.tolist() == [5]
        assert [reward["value"] for reward in one.rewards] == [0.5]
        retry = book.interaction("i3")
        assert [message["content"] for message in retry.messages] == ["a", "A", "b"]
        assert retry.prompt_ids.tolist() == one.prompt_ids.tolist()
        tokens = book.load(["i3", "i1"])
        assert tokens.row_ids == ["i3", "i1"]
        assert tokens.cu_seqlens.tolist() == [0, 12, 18]
        with pytest.raises(KeyError, match="nobody"):
            book.load(["nobody"])
        with pytest.raises(KeyError, match="nobody"):
            book.episode("nobody")


@pytest.mark.parametrize(
    "query", ["delete from events", "update episodes set state = 'lost' returning episode_id", "drop table rewards"]
)
def test_a_query_writes_nothing(query: str, tmp_path: Path) -> None:
    with open_book(tmp_path / "book", writer="proxy") as book:
        book.log.append_blocking(event(EpisodeOpened(task_id="t"), episode_id="e"))
        book.catch_up()
        with pytest.raises(QueryRefused, match="append events"):
            book.sql(query)
        assert book.sql("select state from episodes").to_pylist() == [{"state": "open"}]
        assert book.sql("select count(*) n from rewards").to_pylist() == [{"n": 0}]


@pytest.mark.parametrize("name", ["what?", "a\\b"])
def test_a_path_that_duckdb_reads_in_its_own_way_is_read_as_it_is(tmp_path: Path, name: str) -> None:
    for folder, n in ((tmp_path / name, 1), (tmp_path / "a" / "b", 2)):
        with open_book(folder / "book", writer="w") as book:
            opened = [event(EpisodeOpened(task_id="t"), episode_id=f"e{i}") for i in range(n)]
            book.log.append_blocking(*opened)
    with open_book(tmp_path / name / "book") as book:
        assert book.sql("select episode_id from episodes")["episode_id"].to_pylist() == ["e0"]
