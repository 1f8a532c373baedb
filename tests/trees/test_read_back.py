"""What is read back from a book: a batch, byte for byte, at any later time; a node and an episode of any length."""

import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rollbook.store import (
    BatchRow,
    BatchTaken,
    EpisodeClosed,
    EpisodeOpened,
    Event,
    InteractionRecorded,
    Messages,
    PayloadPruned,
    RewardGiven,
)
from rollbook.store.book import Book, open_book
from rollbook.store.events import encode_messages
from rollbook.store.prune import prune
from rollbook.store.stream import Tokens


def turn(episode: str, t: int, *, n_prompt: int = 3, n_output: int = 4) -> Event:
    """Turn t of a linear episode; its history is n_prompt + n_output tokens a turn."""
    length = t * (n_prompt + n_output)
    output = np.arange(n_output, dtype=np.int32) + 10 * t
    return Event(
        run_id="r",
        episode_id=episode,
        interaction_id=f"{episode}t{t}",
        recorded_at=1_000_000 + t,
        fact=InteractionRecorded(
            parent_id=f"{episode}t{t - 1}" if t else None,
            edge="extends" if t else None,
            shared=length,
            prompt_length=length + n_prompt,
        ),
        messages=encode_messages(
            Messages(request=[{"role": "user", "content": f"q{t}"}], reply={"role": "assistant", "content": f"a{t}"})
        ),
        prompt_ids=np.arange(n_prompt, dtype=np.int32) + 7 * t,
        output_ids=output,
        logprobs=-output.astype(np.float32) / 3,
        versions=np.full(n_output, t, np.int32),
    )


def reward(episode: str, value: float) -> Event:
    return Event(run_id="r", episode_id=episode, fact=RewardGiven(value=value))


def as_bytes(taken: tuple[pa.Table, Tokens]) -> list[bytes]:
    rows, tokens = taken
    arrays = (
        tokens.input_ids,
        tokens.cu_seqlens,
        tokens.loss_mask,
        tokens.logprobs,
        tokens.versions,
        tokens.positions,
        tokens.rows,
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as out:
        out.write_table(rows.combine_chunks())
    return [sink.getvalue().to_pybytes(), *(a.tobytes() for a in arrays), repr(tokens.row_ids).encode()]


def take(book: Book) -> list[BatchRow]:
    names = [f"e{e}t{t}" for e in (3, 0, 2) for t in (4, 1, 0)]
    return [BatchRow(interaction_id=n, credit=0.1 * k, advantage=1 / (k + 1), weight=0.5) for k, n in enumerate(names)]


@pytest.mark.parametrize("form", ["individual", "trajectory"])
def test_a_batch_is_the_same_bytes_after_later_rewards_sealing_restart_pruning_and_rebuild(tmp_path: Path, form: Any):
    with open_book(tmp_path, "w") as book:
        for e in range(4):
            opened = Event(run_id="r", episode_id=f"e{e}", fact=EpisodeOpened(task_id="t"))
            book.log.append_blocking(opened, *(turn(f"e{e}", t) for t in range(5)), reward(f"e{e}", e / 3))
            book.log.append_blocking(Event(run_id="r", episode_id=f"e{e}", fact=EpisodeClosed(state="done")))
        rows = take(book)
        book.log.append_blocking(Event(run_id="r", fact=BatchTaken(batch_id="b", step=0, version=0, rows=rows)))
        book.catch_up()
        first = as_bytes(book.batch("b", form=form))
        table, tokens = book.batch("b", form=form)
        assert table.to_pylist() == [{f: getattr(row, f) for f in row.__struct_fields__} for row in rows]
        assert tokens.row_ids == [row.interaction_id for row in rows]
        book.log.append_blocking(reward("e0", -5.0), reward("e2", 7.0), turn("e0", 5))
        book.catch_up()
        assert as_bytes(book.batch("b", form=form)) == first
        book.log.seal()
        assert as_bytes(book.batch("b", form=form)) == first
    with open_book(tmp_path) as reader:
        assert as_bytes(reader.batch("b", form=form)) == first
    assert prune(tmp_path, episode_ids=["e1"]).n_events == 5  # rewrites the segment that the batch lies in
    with open_book(tmp_path) as reader:
        assert as_bytes(reader.batch("b", form=form)) == first
    (tmp_path / "views.duckdb").unlink()
    with open_book(tmp_path, "w") as book:
        assert as_bytes(book.batch("b", form=form)) == first
        with pytest.raises(KeyError, match="no batch 'c'"):
            book.batch("c")


def test_what_was_pruned_is_named_and_hides_nothing_else(tmp_path: Path):
    with open_book(tmp_path, "w") as book:
        book.log.append_blocking(*(turn("e", t) for t in range(4)))
        book.catch_up()
        before = book.load(["et2"]).input_ids.tobytes()
    assert prune(tmp_path, interaction_ids=["et3"]).n_events == 1
    with open_book(tmp_path) as book:
        assert book.load(["et2"]).input_ids.tobytes() == before
        assert len(book.nodes(["et3"]).trie([0, 1, 2]).input_ids) == 21
        for ask in (lambda: book.load(["et3"]), lambda: book.nodes(["et3"]).trie()):
            with pytest.raises(PayloadPruned, match="et3"):
                ask()
        episode = book.episode("e")
        assert episode.interactions[2].output_ids.tolist() == [20, 21, 22, 23]
        with pytest.raises(PayloadPruned, match="et3"):
            _ = episode.interactions[3].output_ids


def test_an_episode_of_two_thousand_turns_is_shown_quickly_and_in_little_memory(tmp_path: Path):
    n = 2000
    with open_book(tmp_path, "w") as book:
        book.log.append_blocking(*(turn("e", t, n_prompt=30, n_output=40) for t in range(n)))
        book.catch_up()
        tracemalloc.start()
        began = time.process_time()
        episode = book.episode("e")
        outputs = [one.output_ids for one in episode.interactions]
        assert time.process_time() - began < 10  # .4 on an idle machine
        assert tracemalloc.get_traced_memory()[1] < 60e6  # whole prompts would take hundreds
        tracemalloc.stop()
        assert sum(map(len, outputs)) == 40 * n
        last = episode.interactions[-1]
        assert len(last.prompt_ids) == 70 * (n - 1) + 30
        assert [m["content"] for m in last.messages] == [x for t in range(n) for x in (f"q{t}", f"a{t}")][:-1]
        assert last.request == [{"role": "user", "content": f"q{n - 1}"}]
        assert book.interaction("et7").versions.tolist() == [7] * 40
