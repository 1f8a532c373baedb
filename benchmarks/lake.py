"""How fast a DuckLake takes events, by the number of events in a commit and of writers.

    python tests/lake/with_postgres.py python benchmarks/lake.py

One row per (writers, events per commit): commits and events per second of all writers together, CPU per event of the
writers' processes, and the time a commit takes. Events are completions of about 12 KB. The last column is the highest
rate of completions that commits of this size keep up with, one commit after the other.
"""

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from lakes import new_lake
from rollbook.store.lake import LakeLog
from store_histories import interaction


def write(book: Path, name: str, n_events: int, seconds: float, start: Any, results: Any) -> None:
    log = LakeLog(book, name)
    text = "many words of a conversation " * 40
    batches = [[interaction(1000, 300, text) for _ in range(n_events)] for _ in range(3)]
    log.append_blocking(*batches.pop())  # a warm start
    start.wait()
    took: list[float] = []
    cpu, began = time.process_time(), time.perf_counter()
    while time.perf_counter() - began < seconds:
        events = [interaction(1000, 300, text) for _ in range(n_events)]
        before = time.perf_counter()
        log.append_blocking(*events)
        took.append(time.perf_counter() - before)
    results.put((len(took), time.perf_counter() - began, time.process_time() - cpu, took))
    log.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="per row")
    parser.add_argument("--writers", type=int, nargs="+", default=[1, 3])
    args = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    print("writers  events/commit  commits/s  events/s  p50 ms  p99 ms  CPU us/event")
    with tempfile.TemporaryDirectory() as folder:
        for n_writers, n_events in itertools.product(args.writers, [1, 8, 64, 512]):
            book = new_lake(os.environ["ROLLBOOK_TEST_LAKE"], Path(folder))
            start, results = multiprocessing.Barrier(n_writers), multiprocessing.Queue()
            writers = [
                multiprocessing.Process(target=write, args=(book, f"w{k}", n_events, args.seconds, start, results))
                for k in range(n_writers)
            ]
            for writer in writers:
                writer.start()
            rows = [results.get() for _ in writers]
            for writer in writers:
                writer.join()
            commits = sum(n / wall for n, wall, _, _ in rows)
            took = sorted(t for *_, times in rows for t in times)
            cpu = sum(cpu for _, _, cpu, _ in rows) / sum(n * n_events for n, *_ in rows)
            p50 = statistics.median(took)
            print(
                f"{n_writers:7}  {n_events:13}  {commits:9.1f}  {commits * n_events:8.0f}  {p50 * 1e3:6.1f}"
                f"  {took[int(len(took) * 0.99)] * 1e3:6.1f}  {cpu * 1e6:12.0f}"
            )


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
