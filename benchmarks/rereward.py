"""Re-reward against its function's bare rate, both on 2 processes: `python benchmarks/rereward.py [EPISODES]`.

The functions are pure Python that takes some 1.3 and 5 ms of CPU on an episode's text. Bare: the same function on
episodes that are in memory already, in processes that have started. Re-reward: the whole call, from starting its
processes on, and its rate from the first judgements to the last.
"""

import os
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from rollbook.app.rereward import reward_by_function
from rollbook.store import EpisodeClosed, EpisodeOpened, Event, InteractionRecorded, Messages, open_book
from rollbook.store.events import encode_messages

JUDGE = """
def score(episode, rounds=ROUNDS):
    text = " ".join(str(m["content"]) for one in episode.interactions for m in [*one.request, one.reply])
    total = 0
    for _ in range(rounds):
        for c in text:
            total = (total * 31 + ord(c)) % 1000003
    return total / 1000003
"""
PROCESSES = 2


def make_book(path: Path, n: int) -> None:
    """n episodes of 4 turns, 500 bytes of text and 100 tokens a turn."""
    random = np.random.default_rng(0)
    with open_book(path, writer="w") as book:
        for e in range(n):
            name = f"ep_{e:06d}"
            events = [Event(run_id="r", episode_id=name, fact=EpisodeOpened(task_id=f"t{e % 50}"))]
            parent, length = None, 0
            for t in range(4):
                said = "".join(chr(97 + c) for c in random.integers(0, 26, 500))
                messages = Messages(
                    request=[{"role": "user", "content": said[:250]}],
                    reply={"role": "assistant", "content": said[250:]},
                )
                fact = InteractionRecorded(
                    parent_id=parent,
                    edge=None if parent is None else "extends",
                    shared=length,
                    prompt_length=length + 50,
                )
                call = Event(
                    run_id="r", episode_id=name, interaction_id=f"{name}-{t}", fact=fact,
                    messages=encode_messages(messages), prompt_ids=np.arange(50, dtype=np.int32),
                    output_ids=np.arange(50, dtype=np.int32), logprobs=np.zeros(50, np.float32),
                    versions=np.zeros(50, np.int32),
                )  # fmt: skip
                parent, length = f"{name}-{t}", length + 100
                events.append(call)
            book.log.append_blocking(*events, Event(run_id="r", episode_id=name, fact=EpisodeClosed(state="done")))


def bare(book_path: str, names: list[str], judge: str) -> float:
    """Seconds that the function alone takes on these episodes."""
    scope: dict = {}
    exec(judge, scope)
    with open_book(book_path) as book:
        episodes = [one for at in range(0, len(names), 256) for one in book.episodes(names[at : at + 256])]
        began = time.perf_counter()
        for episode in episodes:
            scope["score"](episode)
        return time.perf_counter() - began


def compare(path: Path, n: int, rounds: int) -> None:
    judge = JUDGE.replace("ROUNDS", str(rounds))
    (path / "judge.py").write_text(judge)
    names = [f"ep_{e:06d}" for e in range(n)]
    with get_context("spawn").Pool(PROCESSES) as pool:
        pieces = [names[i::PROCESSES] for i in range(PROCESSES)]
        seconds = max(pool.starmap(bare, [(str(path / "book"), piece, judge) for piece in pieces]))
    done: list[tuple[float, int]] = []
    began = time.perf_counter()
    outcome = reward_by_function(
        str(path / "book"),
        f"{path}/judge.py:score",
        name=f"after-{rounds}",
        where=f"episode_id < 'ep_{n:06d}'",
        processes=PROCESSES,
        progress=lambda n_done, _: done.append((time.perf_counter() - began, n_done)),
    )
    took = time.perf_counter() - began
    assert outcome.n_judged == n
    (first, n_first), (last, n_last) = done[0], done[-1]
    steady = (n_last - n_first) / (last - first)
    print(
        f"{seconds / n * PROCESSES * 1e3:.2f} ms a judgement: bare {n / seconds:,.0f} episodes/s; "
        f"re-reward {n / took:,.0f}/s, {seconds / took:.3f} of it; "
        f"once begun (after {first:.2f} s) {steady:,.0f}/s, {steady * seconds / n:.3f} of it; "
        f"load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 6000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        make_book(path / "book", n)
        compare(path, n, 12)
        compare(path, n // 2, 48)


if __name__ == "__main__":
    main()
