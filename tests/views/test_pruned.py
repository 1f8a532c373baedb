"""What `prune` took is known: to a server that follows the log, after a rebuild, whenever the command was killed."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollbook.store import (
    BadEvent,
    BookBusy,
    DirectoryLog,
    EpisodeClosed,
    EpisodeOpened,
    Event,
    InteractionsPruned,
    Messages,
    RewardGiven,
    TokensScored,
    plan_prune,
    prune,
    verify,
)
from rollbook.store.book import Book, open_book
from rollbook.store.events import encode_messages
from rollbook.store.schema import metadata
from rollbook.store.selection import Selection
from rollbook.store.views import Views
from views_books import event, interaction

CALL = {"id": "c", "function": {"name": "look"}}
SAID = encode_messages(Messages(request=[], reply={"role": "assistant", "tool_calls": [CALL]}))
HEARD = encode_messages(Messages(request=[{"role": "tool", "tool_call_id": "c", "content": "x"}], reply={}))


def episode(name: str, *, n_calls: int = 3) -> list[Event]:
    """Calls that extend one another, the first with a tool, and scores of it."""
    return [
        event(EpisodeOpened(task_id="t"), episode_id=name),
        *(
            interaction(
                f"{name}.{i}",
                name,
                parent=f"{name}.{i - 1}" if i else None,
                edge="extends" if i else None,
                shared=7 * i,
                version=i,
                messages=HEARD if i else SAID,
                at=i,
            )
            for i in range(n_calls)
        ),
        event(TokensScored(version=9), interaction_id=f"{name}.0", logprobs=np.zeros(3, np.float32)),
        event(RewardGiven(value=1.0), episode_id=name),
        event(EpisodeClosed(state="done"), episode_id=name),
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two writers with a segment each; episode e0 is in the first one's, e1 in the other's, e2 in both."""
    path = tmp_path / "book"
    for n, writer in enumerate(("a", "b")):
        log = DirectoryLog(path, writer, live_bytes=None)
        log.append_blocking(*episode(f"e{n}"), *episode("e2")[4 * n : 4 * n + 4])
        log.seal()
        log.close()
    return path


def offered(book: Book) -> set[str]:
    ids = book.select(Selection())["interaction_id"].to_pylist()
    assert book.load(ids).row_ids == ids
    return {name.partition(".")[0] for name in ids}


def contents(book: Book) -> dict[str, list[dict[str, Any]]]:
    tables = {}
    for name, table in metadata.tables.items():
        columns = ", ".join(f'"{c.name}"' for c in table.columns if c.name not in ("node", "up_node", "main_node"))
        tables[name] = sorted(book.sql(f"select {columns} from {name}").to_pylist(), key=repr)
    return tables


def rebuilt(path: Path) -> Book:
    log = DirectoryLog(path)
    return Book(log, Views(log))


KILLED = """
import importlib, os, signal, sys
module = importlib.import_module("rollbook.store.prune")

def killed(*args):
    if not left.pop():
        os.kill(os.getpid(), signal.SIGKILL)
    return rewrite(*args)

if sys.argv[2] == "before":
    module.DirectoryLog.append_blocking = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
else:
    left = [False, True][: 1 + int(sys.argv[2])]
    rewrite, module.write_sealed = module.write_sealed, killed
module.prune(sys.argv[1], episode_ids=["e0", "e1"])
"""


@pytest.mark.parametrize("when", ["before", "0", "1"])
def test_a_killed_prune_offers_nothing_that_is_gone_and_any_prune_ends_it(path: Path, when: str) -> None:
    with open_book(path, "server") as server:
        assert offered(server) == {"e0", "e1", "e2"}
        killed = subprocess.run([sys.executable, "-c", KILLED, str(path), when], stderr=subprocess.DEVNULL)
        assert killed.returncode == -signal.SIGKILL
        server.catch_up()
        left = {"before": {"e0", "e1", "e2"}}.get(when, {"e2"})
        assert offered(server) == left
        middle = rebuilt(path)
        assert offered(middle) == left
        n_left = {"before": 0, "0": 6, "1": 3}[when]
        notes = [note for note in verify(path).notes if "are to be pruned" in note]
        assert [note.split()[0] for note in notes] == ([str(n_left)] if n_left else [])
        if when == "before":
            assert plan_prune(path).n_events == 0
            prune(path, episode_ids=["e0", "e1"])
        else:
            assert plan_prune(path).n_begun == plan_prune(path).n_events == (8 if when == "0" else 4)
            prune(path)
            assert contents(rebuilt(path)) == contents(middle)  # tables do not tell how far the command had come
        server.catch_up()
        assert offered(server) == {"e2"}
        assert contents(server) == contents(rebuilt(path))
    assert verify(path).n_pruned == 6
    assert plan_prune(path).n_events == 0
    assert not any("to be pruned" in note for note in verify(path).notes)


def test_the_facts_of_what_is_pruned_stay(path: Path) -> None:
    facts = (
        "select episode_id, state, reward, n_interactions, n_output, version_min, version_max, main_id from episodes "
        "order by all"
    )
    nodes = "select interaction_id, n_prompt, n_output, version_max, is_leaf from interactions order by all"
    with open_book(path) as book:
        before = [book.sql(facts), book.sql(nodes), book.credits().sort_by("interaction_id")]
    prune(path, episode_ids=["e0"])
    with open_book(path) as book:
        assert [book.sql(facts), book.sql(nodes), book.credits().sort_by("interaction_id")] == before
        assert book.discards(Selection()).to_pylist() == [
            {"episode_id": "e0", "group_id": None, "task_id": "t", "reason": "pruned"}
        ]
        assert book.select(Selection(rows="trajectories"))["leaf_id"].to_pylist() == ["e1.2", "e2.2"]
        pruned = "select interaction_id, run_id, episode_id from pruned order by interaction_id"
        assert book.sql(pruned).to_pylist() == [
            {"interaction_id": f"e0.{i}", "run_id": "run", "episode_id": "e0"} for i in range(3)
        ]
        assert book.sql("select count(*) as n from tool_calls where episode_id = 'e0'").to_pylist() == [{"n": 0}]


def test_what_shares_tokens_of_the_pruned_is_lost_with_them_and_what_shares_none_stays(path: Path) -> None:
    with open_book(path, "late") as book:
        prune(path, interaction_ids=["e0.2"])
        tokens = {"episode": "e0", "parent": "e0.2", "edge": "rerendered"}
        book.log.append_blocking(
            interaction("e0.shares", shared=2, **tokens),
            interaction("e0.below", "e0", parent="e0.shares", edge="extends", shared=9),
            interaction("e0.alone", **tokens),
            interaction("e0.beside", "e0", parent="e0.1", edge="rerendered", shared=14),
        )
        book.catch_up()
        said = book.sql("select interaction_id from interactions where is_pruned order by all")
        assert said["interaction_id"].to_pylist() == ["e0.2", "e0.below", "e0.shares"]
        ids = book.select(Selection(episode_ids=("e0",)))["interaction_id"].to_pylist()
        assert sorted(ids) == ["e0.0", "e0.1", "e0.alone", "e0.beside"]
        assert book.load(ids).row_ids == ids
        n = book.sql("select n_output, n_pruned from episodes where episode_id = 'e0'").to_pylist()
        assert n == [{"n_output": 21, "n_pruned": 9}]
        assert contents(book) == contents(rebuilt(path))
    report = verify(path)
    assert report.is_whole
    assert any(note.startswith("1 interactions share tokens of a pruned parent") for note in report.notes)


def test_what_a_writer_at_work_has_not_sealed_is_not_offered_either_and_goes_later(path: Path) -> None:
    with open_book(path, "a") as server:
        server.log.append_blocking(*episode("e3"))
        assert prune(path, episode_ids=["e3"]).n_left == 4
        server.catch_up()
        assert offered(server) == {"e0", "e1", "e2"}
    assert prune(path).n_events == 4
    assert plan_prune(path).n_events == 0


def test_what_an_earlier_version_pruned_is_said_by_the_next_prune(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(DirectoryLog, "append_blocking", lambda *_: None)
        prune(path, episode_ids=["e0"])
    assert any(note.startswith("3 interactions were pruned by an earlier") for note in verify(path).notes)
    assert plan_prune(path).n_unknown == 3
    assert prune(path).n_events == 0
    with open_book(path) as book:
        assert offered(book) == {"e1", "e2"}
    assert plan_prune(path).n_unknown == 0
    assert not verify(path).notes


def test_two_prunes_at_once_are_one_after_the_other(path: Path) -> None:
    other = DirectoryLog(path, "prune")
    with pytest.raises(BookBusy, match=r"another prune of .* is at work"):
        prune(path, episode_ids=["e0"])
    other.close()
    assert prune(path, episode_ids=["e0"]).n_events == 4


def test_a_pruned_child_does_not_hold_its_parent(path: Path) -> None:
    prune(path, interaction_ids=["e0.2"])
    with open_book(path) as book:
        how = Selection(rows="trajectories", episode_ids=("e0",))
        assert book.select(how)["leaf_id"].to_pylist() == ["e0.1"]
    assert prune(path, interaction_ids=["e0.1"]).n_events == 1


def test_an_event_that_prunes_nothing_is_refused(path: Path) -> None:
    log = DirectoryLog(path, "x")
    with pytest.raises(BadEvent, match="needs interaction_ids"):
        log.append_blocking(event(InteractionsPruned(interaction_ids=[]), episode_id="e0"))
    with pytest.raises(BadEvent, match="InteractionsPruned needs an episode_id"):
        log.append_blocking(event(InteractionsPruned(interaction_ids=["e0.0"])))
    log.close()
