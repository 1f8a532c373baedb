"""Which interactions of an episode a learner trains on."""

import numpy as np

from rollbook.learner.batches import load_rows
from rollbook.store import EpisodeClosed, EpisodeOpened, Event, InteractionRecorded, InteractionsPruned, MemoryLog
from rollbook.store.book import Book


def answer(name: str, fact: InteractionRecorded) -> Event:
    ids = np.arange(fact.prompt_length - fact.shared, dtype=np.int32)
    out = np.arange(2, dtype=np.int32)
    return Event(
        run_id="r", episode_id="e", interaction_id=name, fact=fact, prompt_ids=ids, output_ids=out,
        logprobs=np.zeros(2, np.float32), versions=np.zeros(2, np.int32),
    )  # fmt: skip


def test_an_answer_whose_prompt_cannot_be_rebuilt_stops_no_learner() -> None:
    log = MemoryLog()
    log.append_blocking(
        Event(run_id="r", episode_id="e", fact=EpisodeOpened(task_id="t")),
        answer("sound", InteractionRecorded(prompt_length=3)),
        answer("broken", InteractionRecorded(parent_id="gone", edge="extends", shared=2, prompt_length=4)),
        answer("below", InteractionRecorded(parent_id="broken", edge="extends", shared=6, prompt_length=7)),
        Event(run_id="r", episode_id="e", fact=EpisodeClosed(state="done")),
    )
    book = Book(log)
    assert load_rows(book, episode_ids=["e"]).interaction_ids == ["sound"]
    log.append_blocking(
        Event(run_id="r", episode_id="e", fact=InteractionsPruned(interaction_ids=["sound"])),
        answer("another", InteractionRecorded(prompt_length=3)),
    )
    book.catch_up()
    assert load_rows(book, episode_ids=["e"]).interaction_ids == ["another"]
