"""Costs that grow with a book, per row: what docs/scale.md multiplies.

    python benchmarks/scale.py [--episodes 4000]

A book of sessions of 8 turns with 11 KB payloads is made, and then: what the tables take on disk for each interaction,
what a server's start reads to know its sessions again, what a learner's look for finished groups costs, and what a
look takes in when little is new. CPU seconds of this process, best of three.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from queries import history

from rollbook.learner.batches import finished_groups
from rollbook.proxy.capture import Capture
from rollbook.proxy.config import ServeConfig
from rollbook.proxy.sessions import Sessions
from rollbook.store import Event, RewardGiven, open_book


def cpu(run: Callable[[], Any]) -> float:
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        run()
        best = min(best, time.process_time() - began)
    return best


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main(n_episodes: int) -> None:
    n = 8 * n_episodes
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "book")
        with open_book(str(path), writer="proxy") as book:
            for events in history(n_episodes, 8):
                book.log.append_blocking(*events)
            began = time.process_time()
            book.catch_up()
            projected = time.process_time() - began
            print(f"{n:,} interactions; projected at {1e6 * projected / n:.0f} us CPU each")
            capture = Capture.__new__(Capture)  # it is not asked anything
            known = cpu(lambda: Sessions(book.log, capture, ServeConfig(), admin_key="a" * 32).remember())
            print(f"a server knows its sessions again: {1e6 * known / n:.2f} us CPU per interaction of the book")
            looked = cpu(lambda: finished_groups(book, "run", n_samples=8, known=set()))
            print(f"a look for finished groups: {1e6 * looked / n_episodes:.2f} us CPU per episode of the run")
            known_groups = {group.group_id for group in finished_groups(book, "run", n_samples=8, known=set())}
            again = cpu(lambda: finished_groups(book, "run", n_samples=8, known=known_groups))
            print(f"the same, all of them known: {1e6 * again / n_episodes:.2f} us CPU per episode of the run")

            def one_more() -> None:
                fact = RewardGiven(value=1.0)
                book.log.append_blocking(Event(run_id="run", episode_id=f"ep_{0:032x}", fact=fact))
                book.catch_up()

            print(f"one event more in the tables: {1e3 * cpu(one_more):.1f} ms CPU")
        print(f"tables: {size(path) - size(path / 'log') - size(path / 'sealed'):,} bytes, ", end="")
        print(f"{(path / 'views.duckdb').stat().st_size / n:.0f} per interaction with its share of the rest")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=4000)
    main(parser.parse_args().episodes)
