"""`verify` finds what is wrong and nothing else; `prune` removes payloads and nothing else."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from rollbook.store import (
    BadSelection,
    BookNotFound,
    DirectoryLog,
    EpisodeClosed,
    Event,
    InteractionRecorded,
    PrunePlan,
    RewardGiven,
    RunStarted,
    TokensScored,
    plan_prune,
    prune,
    rows,
    verify,
)
from rollbook.store import frames as frames_module
from rollbook.store.events import from_batch
from store_histories import interaction, same


def conversation(episode_id: str, n_turns: int, rng: np.random.Generator) -> list[Event]:
    """Turns that extend one another, a reward, an end."""
    found: list[Event] = []
    length = 0
    for turn in range(n_turns):
        event = interaction(int(rng.integers(1, 20)), int(rng.integers(1, 20)), f"turn {turn}", episode_id=episode_id)
        assert event.prompt_ids is not None
        assert event.output_ids is not None
        fact = InteractionRecorded(
            parent_id=found[-1].interaction_id if found else None,
            edge="extends" if found else None,
            shared=length,
            prompt_length=length + len(event.prompt_ids),
        )
        found.append(msgspec.structs.replace(event, fact=fact))
        length += len(event.prompt_ids) + len(event.output_ids)
    scored = Event(
        run_id="run",
        interaction_id=found[-1].interaction_id,
        fact=TokensScored(version=1),
        logprobs=found[-1].logprobs,
        entropies=found[-1].logprobs,
    )
    return [
        *found,
        Event(run_id="run", episode_id=episode_id, fact=RewardGiven(value=1.0)),
        Event(run_id="run", episode_id=episode_id, fact=EpisodeClosed(state="done", reason="asked for it")),
        scored,
    ]


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """Two writers, sealed and live segments; the children of one's interactions are in the other."""
    rng = np.random.default_rng(0)
    path = tmp_path / "book"
    a, b = (DirectoryLog(path, name, roll_bytes=15_000, live_bytes=20_000) for name in ("a", "b"))
    a.append_blocking(Event(run_id="run", fact=RunStarted(name="x")))
    for i in range(6):
        for j, event in enumerate(conversation(f"ep{i}", 4, rng)):
            (b, a)[(i + j) % 2].append_blocking(event)
    a.seal()
    for i in range(6, 9):
        for j, event in enumerate(conversation(f"ep{i}", 4, rng)):
            (a, b)[(i + j) % 2].append_blocking(event)
    a.close()
    b.close()
    return path


def events_of(path: Path) -> dict[tuple[str, int], Event]:
    return {
        (batch["writer"][0].as_py(), position): event
        for batch in DirectoryLog(path).read()
        for position, event in zip(batch["position"].to_pylist(), from_batch(batch), strict=True)
    }


def test_a_sound_book_is_whole(book: Path) -> None:
    report = verify(book)
    assert report.is_whole, str(report)
    assert report.n_events == 1 + 9 * 7
    assert report.n_interactions == 36
    assert [w.writer for w in report.writers] == ["a", "b"]
    assert report.writers[0].n_sealed >= 1
    assert str(report).endswith("whole")
    with pytest.raises(BookNotFound):
        verify(book / "log")


def test_any_flipped_byte_of_any_segment_is_found(book: Path) -> None:
    rng = np.random.default_rng(1)
    before = events_of(book)
    for file in [*book.glob("log/*/*.log"), *book.glob("sealed/*/*.parquet")]:
        whole = file.read_bytes()
        if not whole:
            continue
        for at in rng.integers(0, len(whole), 8):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            report = verify(book)
            if file.suffix == ".parquet" and report.is_whole:  # some bytes of its footer say nothing about events
                assert all(same(e, before[key]) for key, e in events_of(book).items())
            else:
                assert report.problems or report.notes, (file, at)
                assert str(file) in str(report)
        file.write_bytes(whole)
    assert verify(book).is_whole


def test_a_missing_segment_is_found(book: Path) -> None:
    sorted(book.glob("*/a/*"))[0].unlink()
    next(iter(sorted(book.glob("sealed/a/*")))).unlink()
    assert any("a segment is missing" in p for p in verify(book).problems)


def test_a_torn_tail_is_a_note(tmp_path: Path) -> None:
    log = DirectoryLog(tmp_path / "book", "w")
    log.append_blocking(interaction())
    with open(tmp_path / "book" / "log" / "w" / f"{0:020d}.log", "ab") as file:
        file.write(b"RBF1 and a kill")
        file.flush()
        report = verify(tmp_path / "book")
    assert any("interrupted write (short header)" in n for n in report.notes)
    assert report.is_whole
    log.close()


def write_unchecked(path: Path, *events: Event) -> None:
    """A segment that no log would write: what a bug or another program may have left."""
    DirectoryLog(path, "w").close()
    (segment,) = path.glob("log/w/*.log")
    message = rows.message([rows.encode(event) for event in events], "w", 0)
    segment.write_bytes(b"".join(frames_module.encode(message, len(events), 0, b"\0" * 16, b"\xff" * 16)))


def test_what_a_log_would_refuse_is_found(tmp_path: Path) -> None:
    good = interaction()
    child = InteractionRecorded(parent_id=good.interaction_id, edge="extends", shared=99, prompt_length=149)
    replace = msgspec.structs.replace
    cases = {
        "50 output_ids but 49 logprobs": replace(good, logprobs=np.zeros(49, np.float32)),
        "prompt_length 7 is not shared 0 + prompt_ids 50": replace(good, fact=InteractionRecorded(prompt_length=7)),
        "does not share all of its parent's path": replace(interaction(), fact=child),
        "its parent is not in the book": replace(
            interaction(), fact=InteractionRecorded(parent_id="gone", shared=1, prompt_length=51)
        ),
        "it shares more tokens than its parent's path has": replace(
            interaction(), fact=InteractionRecorded(parent_id=good.interaction_id, shared=101, prompt_length=151)
        ),
        "is already at 0": good,
    }
    for i, (sentence, bad) in enumerate(cases.items()):
        write_unchecked(tmp_path / str(i), good, bad)
        problems = [p for p in verify(tmp_path / str(i)).problems if "already at 0" not in p or bad is good]
        if sentence.startswith(("50", "prompt")):
            assert "position 1" in problems[0]
        assert sentence in problems[0]


def test_pruning_removes_payloads_and_keeps_facts_and_positions(book: Path) -> None:
    before = events_of(book)
    size = sum(p.stat().st_size for p in book.rglob("*.parquet"))
    plan = plan_prune(book, episode_ids=["ep1", "ep7"])
    assert events_of(book).keys() == before.keys()
    result = prune(book, episode_ids=["ep1", "ep7"])
    assert plan.n_events == result.n_events
    assert plan.payload_bytes > 0
    after = events_of(book)
    assert after.keys() - before.keys() == {("prune", 0), ("prune", 1)}  # one for each episode
    last = {e.interaction_id for e in before.values() if e.episode_id in ("ep1", "ep7") and e.interaction_id}
    n = 0
    for key, old in before.items():
        new = after[key]
        if old.interaction_id in last:
            n += 1
            assert new.messages is new.prompt_ids is new.output_ids is new.logprobs is new.entropies is None
            kept = {
                name: getattr(old, name) for name in ("messages", "prompt_ids", "output_ids", "logprobs", "entropies")
            }
            assert same(msgspec.structs.replace(new, **kept), old)  # versions, and so lengths, stay
        else:
            assert same(new, old)
    assert (result.n_events, result.n_left, n) == (10, 0, 10)
    report = verify(book)
    assert report.is_whole, str(report)
    assert report.n_pruned == 8
    assert prune(book, episode_ids=["ep1", "ep7"]).n_events == 0
    assert plan_prune(book, episode_ids=["ep1", "ep7"]) == PrunePlan(0, 0)
    assert size > 0
    log = DirectoryLog(book, "a")
    assert log.append_blocking(before["a", 0]) == [0]  # pruned books still know what they have seen
    log.close()


def test_pruning_leaves_what_a_writer_at_work_has_not_sealed(book: Path) -> None:
    log = DirectoryLog(book, "b")
    result = prune(book, episode_ids=["ep8"])
    assert result.n_left > 0
    log.seal()
    log.close()
    assert prune(book, episode_ids=["ep8"]).n_left == 0


def test_what_others_are_built_on_is_not_pruned_alone(book: Path) -> None:
    root = next(
        e.interaction_id
        for e in events_of(book).values()
        if isinstance(e.fact, InteractionRecorded) and e.fact.parent_id is None
    )
    assert root is not None
    with pytest.raises(BadSelection, match=r"is built on .* choose it too, or whole episodes"):
        prune(book, interaction_ids=[root])
    with pytest.raises(BadSelection, match="no interaction nobody in the book"):
        prune(book, interaction_ids=["nobody"])
    assert verify(book).n_pruned == 0
