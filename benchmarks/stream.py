"""Trees and token streams in figures: python benchmarks/stream.py [--trajectories 100000] [--only NAME].

Times are CPU of this process, medians, beside what the same machine needs for a plain copy of memory and for the way
over Python lists, in the same run. Families P4, P5, P8 and P9 and their targets are those of the project's plan.
"""

import argparse
import json
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from rollbook.store import DirectoryLog, Event, InteractionRecorded, Messages
from rollbook.store.book import open_book
from rollbook.store.events import encode_messages
from rollbook.store.stream import NODE_COLUMNS, Nodes, Payloads
from rollbook.store.tree import TreeIndex

RNG = np.random.default_rng(0)


def row(name: str, value: str, target: str = "") -> None:
    print(f"{name:<64} {value:<30} {target}", flush=True)


def cpu_of(function: Callable[[], Any], n: int) -> float:
    """Median CPU seconds of a call."""
    times = []
    for _ in range(n):
        begin = time.process_time()
        function()
        times.append(time.process_time() - begin)
    return statistics.median(times)


# ---------------------------------------------------------------- the tree


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def long_session() -> None:
    """P4: each turn resends the grown history, 1.8 KB a turn, decoded afresh as a proxy gets it."""
    for n_turns in (5, 20, 50, 200, 1000):
        index = TreeIndex()
        history = [{"role": "system", "content": "s" * 2000}]
        resolving, decoding = [], []
        for t in range(n_turns):
            history.append(user(f"question {t} " + "q" * 800))
            body = msgspec.json.encode(history)
            begin = time.process_time()
            messages = msgspec.json.decode(body)
            decoded = time.process_time()
            match = index.resolve(messages)
            index.add(f"n{t}", match, assistant(f"answer {t} " + "a" * 1000))
            resolving.append(time.process_time() - decoded)
            decoding.append(decoded - begin)
            assert match.parent_id == (f"n{t - 1}" if t else None)
            history.append(assistant(f"answer {t} " + "a" * 1000))
        last = statistics.median(resolving[-5:]) * 1e3
        row(
            f"P4 parent of a turn, {n_turns} turns ({len(body) // 1000} KB): last",
            f"{last:.3f} ms (decoding: {statistics.median(decoding[-5:]) * 1e3:.3f})",
            "<= 2 ms at 200, aim .8" if n_turns == 200 else "",
        )
        if n_turns == 1000:
            total = sum(resolving) + sum(decoding)
            row("   the whole conversation of 1,000 turns", f"{total:.2f} s, decoding included", "<= 1 s")


def fan_out() -> None:
    """P5: K sub-agents, interleaved, four turns each."""
    for k in (50, 200, 800, 2000):
        index = TreeIndex()
        histories = [[{"role": "system", "content": "agent " * 50}, user(f"part {i} of the work")] for i in range(k)]
        times = []
        for t in range(4):
            for i, history in enumerate(histories):
                messages = msgspec.json.decode(msgspec.json.encode(history))
                begin = time.process_time()
                match = index.resolve(messages)
                times.append(time.process_time() - begin)
                assert match.parent_id == (f"{i}-{t - 1}" if t else None)
                index.add(f"{i}-{t}", match, assistant(f"done {t} " + "x" * 200))
                history += [assistant(f"done {t} " + "x" * 200), user("go on")]
        row(
            f"P5 parent among {k} sub-agents ({len(index)} nodes)",
            f"{statistics.median(times) * 1e6:.1f} us",
            "<= 40, aim 10",
        )


def flat() -> None:
    """The same short conversation goes on while the episode holds ever more nodes."""
    index = TreeIndex()
    n = 0
    for size in (10, 100, 1000, 10_000):
        while n < size:
            index.add(f"n{n}", index.resolve([user(f"task {n}")]), assistant(f"reply {n}"))
            n += 1
        history = [user("task 3"), assistant("reply 3"), user("more")]
        times = []
        for i in range(200):
            messages = msgspec.json.decode(msgspec.json.encode(history))
            begin = time.process_time()
            match = index.resolve(messages)
            index.add(f"x{size}-{i}", match, assistant(f"fork {i}"))
            times.append(time.process_time() - begin)
            assert match.parent_id == "n3"
        row(f"   resolve + add with {size} nodes in the episode", f"{statistics.median(times) * 1e6:.1f} us", "flat")


# ---------------------------------------------------------------- streams


def turn(episode: int, t: int, n_first: int, n_prompt: int, n_output: int) -> Event:
    length = n_first + n_output + (t - 1) * (n_prompt + n_output) if t else 0
    new = n_prompt if t else n_first
    at = (episode * 7919 + t * 131) % 90_000
    return Event(
        run_id="r",
        episode_id=f"e{episode}",
        interaction_id=f"e{episode}t{t}",
        fact=InteractionRecorded(
            parent_id=f"e{episode}t{t - 1}" if t else None,
            edge="extends" if t else None,
            shared=length,
            prompt_length=length + new,
        ),
        messages=MESSAGES,
        prompt_ids=IDS[at : at + new],
        output_ids=IDS[at + 2000 : at + 2000 + n_output],
        logprobs=LOGPROBS[at : at + n_output],
        versions=VERSIONS[:n_output],
    )


WINDOW = 64 * 320  # episodes looked at together: those written side by side must be
IDS = RNG.integers(0, 150_000, 100_000).astype(np.int32)
LOGPROBS = -RNG.exponential(0.5, 100_000).astype(np.float32)
VERSIONS = np.full(2000, 3, np.int32)
MESSAGES = encode_messages(Messages(request=[user("word " * 100)], reply=assistant("word " * 150)))


def write(folder: Path, n_episodes: int, n_turns: int, sizes: tuple[int, int, int], group: int) -> pa.Table:
    """Episodes written side by side, `group` events a commit. Returns the rows of `interactions`."""
    log = DirectoryLog(folder, "w", live_bytes=None)
    rows = []
    for first in range(0, n_episodes, 64):
        events = [turn(e, t, *sizes) for t in range(n_turns) for e in range(first, min(first + 64, n_episodes))]
        for at in range(0, len(events), group):
            for event, position in zip(
                events[at : at + group], log.append_blocking(*events[at : at + group]), strict=True
            ):
                fact = event.fact
                assert isinstance(fact, InteractionRecorded)
                rows.append(
                    (
                        event.interaction_id,
                        fact.parent_id,
                        fact.edge,
                        fact.prompt_length,
                        fact.shared,
                        sizes[2],
                        "w",
                        position,
                    )
                )
    log.close()
    types = [pa.string(), pa.string(), pa.string(), pa.int64(), pa.int64(), pa.int64(), pa.string(), pa.int64()]
    return pa.table({name: pa.array([r[i] for r in rows], types[i]) for i, name in enumerate(NODE_COLUMNS)})


def write_elsewhere(*args: Any) -> pa.Table:
    """The same in another process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(write, args)


def episode_rows(table: pa.Table, n_turns: int) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
    """Where in the table turn t of episode e is."""
    names = [name[1:].split("t") for name in table["interaction_id"].to_pylist()]
    places = np.empty((len(names) // n_turns, n_turns), np.int64)
    at = np.array(names, np.int64)
    places[at[:, 0], at[:, 1]] = np.arange(len(names))
    return places


def read_back(folder: Path) -> None:
    """P8: a finished 8-turn session, each turn a commit of its own, written by another process, to arrays."""
    n_sessions, n_turns = 192, 8
    table = write_elsewhere(folder, n_sessions, n_turns, (1000, 72, 300), 1)
    places = episode_rows(table, n_turns)
    log = DirectoryLog(folder)
    log.gather([("w", 0)])  # the files are known, as they are to a learner that runs
    payloads = Payloads(log)
    sessions = [table.take(pa.array(places[s])) for s in range(n_sessions)]
    seen = iter(sessions)
    n_bytes = 0

    def first_time() -> None:
        nonlocal n_bytes
        nodes = Nodes.read(next(seen), payloads)
        n_bytes = 12 * nodes.load([n_turns - 1], form="trajectory").n_tokens

    first = cpu_of(first_time, n_sessions) * 1e3
    seen = iter(sessions)
    again = cpu_of(first_time, n_sessions) * 1e3
    row(
        "P8 an 8-turn session to arrays, first look at its 8 frames",
        f"{first:.3f} ms, {n_bytes // 1000} KB",
        "<= .5 ms",
    )
    row("   the same session once more", f"{again:.3f} ms", "aim .1")
    nodes = Nodes.read(sessions[0], payloads)
    tokens = nodes.load([n_turns - 1], form="trajectory")
    body = json.dumps([tokens.input_ids.tolist(), tokens.logprobs.tolist(), tokens.versions.tolist()])

    def by_json() -> None:
        ids, logprobs, versions = json.loads(body)
        np.array(ids, np.int32), np.array(logprobs, np.float32), np.array(versions, np.int32)

    row("   calibration: the same session out of JSON, no transport", f"{cpu_of(by_json, 50) * 1e3:.3f} ms")
    log.close()
    with open_book(folder) as book:
        names = iter([f"e{s}t{n_turns - 1}" for s in range(n_sessions)])
        by_sql = cpu_of(lambda: book.load([next(names)], form="trajectory"), 50) * 1e3
    row("   by its id, through SQL on the views (book.load)", f"{by_sql:.3f} ms")


def memory_mb() -> float:
    """Memory of this process that is no mapped file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1e3
    raise RuntimeError("no RssAnon in /proc/self/status; run this on Linux")


def batches(folder: Path, n_trajectories: int) -> None:
    """P9: trajectories of 4 turns and 1,350 tokens, 64 events a commit."""
    n_turns = 4
    table = write_elsewhere(folder, n_trajectories, n_turns, (200, 50, 250), 64)
    places = episode_rows(table, n_turns)
    log = DirectoryLog(folder)
    payloads = Payloads(log)
    begin = time.process_time()
    for at in range(0, len(table), 4 * WINDOW):
        Nodes.read(table.slice(at, 4 * WINDOW), payloads)
    row(f"   first look at the frames of {n_trajectories} trajectories", f"{time.process_time() - begin:.2f} s")

    picks = [RNG.choice(n_trajectories, min(512, n_trajectories), replace=False) for _ in range(12)]
    subs = [table.take(pa.array(places[pick].ravel())) for pick in picks]
    each = iter(subs)
    n_tokens = 0

    def random_batch() -> None:
        nonlocal n_tokens
        nodes = Nodes.read(next(each), payloads)
        ends = np.arange(n_turns - 1, len(nodes), n_turns)
        n_tokens = nodes.load(ends, form="trajectory").n_tokens

    ms = cpu_of(random_batch, len(subs)) * 1e3
    row(
        f"P9 random 512 of {n_trajectories} trajectories to packed arrays",
        f"{ms:.1f} ms ({n_tokens / ms / 1e3:.0f} M tokens/s)",
        "<= 10 ms",
    )

    last = np.flatnonzero(np.isin(np.arange(len(table)), places[:, -1]))
    total, spent, growth = 0, 0.0, []
    before = memory_mb()
    for at in range(0, len(table), 4 * WINDOW):
        begin = time.process_time()
        nodes = Nodes.read(table.slice(at, 4 * WINDOW), payloads)
        ends = last[(last >= at) & (last < at + 4 * WINDOW)] - at
        for pack in nodes.packs(ends, max_tokens=500_000, form="trajectory"):
            total += pack.n_tokens
        spent += time.process_time() - begin
        growth.append(memory_mb() - before)
    row("P9 a full pass to packed arrays", f"{total / spent / 1e6:.0f} M tokens/s", ">= 100, aim 500")
    half = len(growth) // 2
    row("   memory beyond the start: at half, at the end", f"{growth[half]:.0f}, {growth[-1]:.0f} MB", "flat")

    source = np.empty(12 * n_tokens, np.uint8)
    target = np.empty_like(source)
    copy_s = cpu_of(lambda: np.copyto(target, source), 9)
    row("   calibration: copying as many bytes, once", f"{n_tokens / copy_s / 1e6:.0f} M tokens/s")
    stored = log.gather([("w", int(p)) for p in table["position"].to_numpy()[:2000]])
    columns = [stored[name] for name in ("prompt_ids", "output_ids", "logprobs", "versions")]

    def by_lists() -> int:
        lists = [column.to_pylist() for column in columns]
        ids = [np.array(p + o, np.int32) for p, o in zip(lists[0], lists[1], strict=True)]
        rest = [np.array(values) for column in lists[2:] for values in column]
        return sum(map(len, ids)) + 0 * len(rest)

    count = by_lists()
    lists_s = cpu_of(by_lists, 3)
    row("   calibration: the same over Python lists", f"{count / lists_s / 1e6:.2f} M tokens/s")
    log.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trajectories", type=int, default=100_000, help="of the P9 book, 17 KB each")
    parser.add_argument("--only", choices=["tree", "P8", "P9"])
    parser.add_argument(
        "--folder", type=Path, help="where the books go; default: a temporary folder, removed at the end"
    )
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="rollbook-bench-"))
    try:
        if args.only in (None, "tree"):
            long_session()
            fan_out()
            flat()
        if args.only in (None, "P8"):
            read_back(folder / "sessions")
        if args.only in (None, "P9"):
            batches(folder / "trajectories", args.trajectories)
    finally:
        if args.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
