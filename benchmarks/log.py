"""The durable log in figures: python benchmarks/log.py [--events 20000] [--recover-gb 1.0] [--only NAME].

Disks and neighbours differ, so times are given as ratios to a loop of write + fdatasync over equal batches, run
before and after each measurement in the same process, and as CPU. An event is a completion of 1,000 prompt and 300
output tokens with 5 KB of messages: about 12 KB. Targets are those of the project's plan for this machine class.
"""

import argparse
import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from rollbook.store import DirectoryLog, Event, InteractionRecorded, Messages, new_id, open_book
from rollbook.store.events import encode_fact, encode_messages, new_event_id

# Real text that every machine has: the sources of the standard library.
WORDS = [w for p in sorted(Path(os.__file__).parent.glob("*.py")) for w in p.read_text().split()]
VOCABULARY = {w: i * 37 % 150_000 for i, w in enumerate(dict.fromkeys(WORDS))}
RNG = np.random.default_rng(0)


def words(n: int) -> list[str]:
    """A piece of real text, so that it compresses like text."""
    start = int(RNG.integers(0, max(1, len(WORDS) - n)))
    return [WORDS[(start + i) % len(WORDS)] for i in range(n)]


def ids(text: list[str]) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array([VOCABULARY[w] for w in text], np.int32)


def completion(n_prompt: int = 1000, n_output: int = 300) -> Event:
    prompt, output = words(n_prompt), words(n_output)
    return Event(
        run_id="run",
        episode_id=new_id("ep"),
        interaction_id=new_id("chatcmpl"),
        fact=InteractionRecorded(
            prompt_length=n_prompt,
            prefix_hash=os.urandom(16).hex(),
            reply_hash=os.urandom(16).hex(),
            sampling={"temperature": 1.0, "max_tokens": 512},
            finish_reason="stop",
            seconds=1.5,
        ),
        messages=encode_messages(
            Messages(
                request=[{"role": "user", "content": " ".join(prompt)[:4000]}],
                reply={"role": "assistant", "content": " ".join(output)[:1000]},
            )
        ),
        prompt_ids=ids(prompt),
        output_ids=ids(output),
        logprobs=-RNG.exponential(0.5, n_output).astype(np.float32),
        versions=np.full(n_output, 3, np.int32),
    )


def copies(templates: list[Event], n: int) -> list[Event]:
    """Events with ids of their own that share arrays: making them costs little, storing them the full price."""
    return [
        msgspec.structs.replace(
            templates[i % len(templates)], event_id=new_event_id(), recorded_at=time.time_ns() // 1000
        )
        for i in range(n)
    ]


def raw_bytes(event: Event) -> int:
    arrays = (event.prompt_ids, event.output_ids, event.logprobs, event.versions)
    return len(event.messages or b"") + len(encode_fact(event.fact)) + sum(a.nbytes for a in arrays if a is not None)


def row(name: str, value: str, target: str = "") -> None:
    print(f"{name:<58} {value:<34} {target}", flush=True)


def calibrate(
    folder: Path, batch_bytes: int, seconds: float = 2.0
) -> tuple[float, "np.ndarray[tuple[int], np.dtype[np.float64]]"]:
    """write + fdatasync of equal batches, one after the other: bytes/s, and ms of each."""
    data = os.urandom(batch_bytes)
    fd = os.open(folder / "calibration", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    times = []
    begin = time.perf_counter()
    while (now := time.perf_counter()) - begin < seconds:
        os.write(fd, data)
        os.fdatasync(fd)
        times.append((time.perf_counter() - now) * 1e3)
    os.close(fd)
    (folder / "calibration").unlink()
    return batch_bytes * len(times) / (sum(times) / 1e3), np.array(times)


class Load:
    """N tasks that append one event each, wait for the answer and go on; what they met."""

    def __init__(self, folder: Path, n_tasks: int, **options: int | None) -> None:
        self.log = DirectoryLog(folder, f"w{n_tasks}", sync=self._sync, **options)  # type: ignore[arg-type]
        self.n_tasks = n_tasks
        self.acks_ms: list[float] = []
        self.n_syncs = self.n_events = self.raw_bytes = 0
        self.wall_s = self.cpu_s = self.sync_s = 0.0

    def _sync(self, fd: int) -> None:
        begin = time.perf_counter()
        os.fdatasync(fd)
        self.sync_s += time.perf_counter() - begin
        self.n_syncs += 1

    def run(self, events: list[Event]) -> float:
        """Returns the seconds it took."""
        waiting = iter(events)

        async def task() -> None:
            for event in waiting:
                begin = time.perf_counter()
                await self.log.append(event)
                self.acks_ms.append((time.perf_counter() - begin) * 1e3)

        async def main() -> None:
            await asyncio.gather(*(task() for _ in range(self.n_tasks)))

        begin, cpu = time.perf_counter(), time.process_time()
        asyncio.run(main())
        wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
        self.wall_s += wall
        self.cpu_s += cpu
        self.n_events += len(events)
        self.raw_bytes += sum(map(raw_bytes, events))
        return wall

    @property
    def frame_bytes(self) -> int:
        return self.log.written_bytes // max(1, self.n_syncs - 1)  # one sync is of opening


def percentiles(times: "list[float] | np.ndarray[tuple[int], np.dtype[np.float64]]") -> tuple[float, float]:
    p50, p99 = np.percentile(times, [50, 99])
    return float(p50), float(p99)


def appends(folder: Path, n_events: int) -> None:
    """Rounds of the calibration loop and of appends take turns, so that both meet the same neighbours."""
    templates = [completion() for _ in range(200)]
    n_rounds = 8
    for n_tasks, options, name in (
        (1, {"live_bytes": None}, "1 task"),
        (16, {"live_bytes": None}, "16 tasks"),
        (16, {"roll_bytes": 16 << 20, "live_bytes": 0}, "16 tasks, sealing meanwhile"),
        (128, {"live_bytes": None}, "128 tasks"),
        (128, {"live_bytes": 0}, "128 tasks, sealing meanwhile"),
        (512, {"live_bytes": None}, "512 tasks"),
    ):
        path = folder / "appends"
        load = Load(path, n_tasks, **options)
        load.run(copies(templates, 4 * n_tasks))  # tells the size of a batch, which the loop to compare with needs
        n = max(50, n_events * min(n_tasks, 128) // 128 // n_rounds)
        ratios, floors, syncs = [], [], []
        load.acks_ms, load.cpu_s, load.wall_s, load.sync_s, load.n_events = [], 0.0, 0.0, 0.0, 0
        for _ in range(n_rounds):
            floor, times = calibrate(folder, load.frame_bytes, 0.3)
            written = load.log.written_bytes
            wall = load.run(copies(templates, n))
            ratios.append((load.log.written_bytes - written) / wall / floor)
            floors.append(floor)
            syncs.append(times)
        sync_p50, sync_p99 = percentiles(np.concatenate(syncs))
        p50, p99 = percentiles(load.acks_ms)
        is_target = n_tasks == 128
        mb_per_s = (
            load.n_events / load.wall_s * load.log.written_bytes / (load.raw_bytes / raw_bytes(templates[0])) / 1e6
        )
        row(f"append, {name}: events/s", f"{load.n_events / load.wall_s:,.0f}", ">= 10,000" if is_target else "")
        row(
            "  MB/s; of the write + fdatasync loop, median of rounds",
            f"{mb_per_s:,.0f}; {np.median(ratios):.2f}x of {np.median(floors) / 1e6:,.0f}",
            ">= 0.5x" if is_target else "",
        )
        row(
            "  CPU us/event, all threads",
            f"{load.cpu_s / load.n_events * 1e6:.1f}",
            "<= 40" if name == "128 tasks" else "",
        )
        row("  of the time in its own fdatasync (1 is the disk's limit)", f"{load.sync_s / load.wall_s:.2f}")
        row("  ack p50 / p99 ms", f"{p50:.2f} / {p99:.2f}")
        row(
            f"  of one write + fdatasync of {load.frame_bytes // 1000} KB (p50 {sync_p50:.2f} ms)",
            f"{p50 / sync_p50:.2f}x / {p99 / sync_p50:.2f}x (its own p99 {sync_p99 / sync_p50:.1f}x)",
            "<= 1.5x / 4x" if n_tasks == 16 else "",
        )
        row(
            "  bytes written / raw bytes",
            f"{load.log.written_bytes / load.raw_bytes:.3f}",
            "<= 1.05" if is_target else "",
        )
        load.log.close()
        shutil.rmtree(path)


def sqlite_floor(folder: Path, n_events: int) -> None:
    """The same payload as blobs in SQLite (WAL, synchronous=FULL), 64 events a transaction: the plain alternative."""
    events = copies([completion() for _ in range(200)], n_events // 2)
    db = sqlite3.connect(folder / "floor.sqlite")
    db.execute("pragma journal_mode=wal")
    db.execute("pragma synchronous=full")
    db.execute("create table event (id blob primary key, fact text, messages text, p blob, o blob, l blob, v blob)")
    begin, cpu = time.perf_counter(), time.process_time()
    for i in range(0, len(events), 64):
        with db:
            db.executemany(
                "insert into event values (?,?,?,?,?,?,?)",
                [
                    (
                        e.event_id,
                        encode_fact(e.fact),
                        e.messages,
                        *(bytes(a) for a in (e.prompt_ids, e.output_ids, e.logprobs, e.versions) if a is not None),
                    )
                    for e in events[i : i + 64]
                ],
            )
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    db.close()
    row("SQLite WAL, full sync, 64 a transaction: events/s", f"{len(events) / wall:,.0f}", "for comparison")
    row("  CPU us/event", f"{cpu / len(events) * 1e6:.1f}", "for comparison")


_FOLLOWER = """
import sys, time, anyio, numpy as np
from rollbook.store import DirectoryLog
async def main():
    lags = []
    print("ready", flush=True)
    async for batch in DirectoryLog(sys.argv[1]).follow():
        now = time.time_ns() // 1000
        lags += [(now - t) / 1000 for t in batch["recorded_at"].cast("int64").to_pylist()]
        if len(lags) >= int(sys.argv[2]):
            break
    print(*np.percentile(lags[20:], [50, 99]))
anyio.run(main)
"""


def followers(folder: Path) -> None:
    """From `append` called here to the event in hand in another process, the sync included."""
    log = DirectoryLog(folder / "follow", "w")
    template = completion()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    n = 600
    with subprocess.Popen(
        [sys.executable, "-c", _FOLLOWER, str(folder / "follow"), str(n)], env=env, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        acks = []
        for event in (copies([template], 1)[0] for _ in range(n)):
            begin = time.perf_counter()
            log.append_blocking(event)
            acks.append((time.perf_counter() - begin) * 1e3)
            time.sleep(float(RNG.uniform(0, 0.008)))
        p50, p99 = map(float, reader.stdout.readline().split())
    log.close()
    row("append to the event in another process, ms p50 / p99", f"{p50:.2f} / {p99:.2f}", "p50 <= 5")
    row("  of that the append itself, p50 / p99", "{:.2f} / {:.2f}".format(*percentiles(np.array(acks))))


def recovery(folder: Path, size_gb: float) -> None:
    """Open a log for append after a kill: its tail repaired, its idempotence index ready."""
    path = folder / "recover"
    templates = [completion() for _ in range(2000)]
    log = DirectoryLog(path, "w", live_bytes=None, sync=lambda fd: None)
    n = 0
    while log.written_bytes < size_gb * 1e9:
        events = copies([templates[(n + i) % len(templates)] for i in range(64)], 64)
        log.append_blocking(*(msgspec.structs.replace(e, interaction_id=new_id("chatcmpl")) for e in events))
        n += 64
    log.close()
    last = max((path / "log" / "w").glob("*.log"))
    os.truncate(last, last.stat().st_size - 1000)
    files = sorted((path / "log" / "w").glob("*.log"))
    for is_cold in (True, False):
        if is_cold:
            for file in files:
                with open(file, "rb") as f:
                    os.fsync(f.fileno())
                    os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin, cpu = time.perf_counter(), time.process_time()
        log = DirectoryLog(path, "w", live_bytes=None)
        assert log.append_blocking(templates[0])[0] > n - 200
        wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
        log.close()
        row(
            f"open {size_gb:g} GB ({n:,} events, {len(files)} segments), {'cold' if is_cold else 'warm'} cache: s",
            f"{wall:.3f} ({cpu:.3f} CPU)",
            "<= 3 with the views",
        )
    serving(path, size_gb, n)
    begin, cpu = time.perf_counter(), time.process_time()
    total = sum(b.num_rows for b in DirectoryLog(path).read())
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    row("read it all, checksums verified: events/s; GB/s", f"{total / wall:,.0f}; {size_gb / wall:.2f}")
    reader = DirectoryLog(path)
    for _ in reader.read():  # checksums are verified once per reader
        pass
    times = []
    for _ in range(10):
        pointers = [("w", int(i)) for i in RNG.integers(0, total, 512)]
        cpu = time.process_time()
        reader.gather(pointers)
        times.append((time.process_time() - cpu) * 1e3)
    row("gather 512 random events of it: ms CPU", f"{np.median(times):.1f}", "<= 10 with packing")
    begin, cpu = time.perf_counter(), time.process_time()
    log = DirectoryLog(path, "w", live_bytes=None)
    log.seal()
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    size = sum(p.stat().st_size for p in path.rglob("*.parquet"))
    log.close()
    row("seal it: events per CPU-s; size of the log's", f"{total / cpu:,.0f}; {size / size_gb / 1e9:.2f}x")
    shutil.rmtree(path)


def serving(path: Path, size_gb: float, n: int) -> None:
    """Open that log as a server does: to append, and with every table ready to be asked. First the tables are made
    from nothing, which is the worst that a kill can leave; then they are there up to the last commit before it."""
    for name in ("tables lost", "tables kept"):
        for file in [*path.rglob("*.log"), *path.rglob("*.parquet")]:  # an open book seals its older segments
            with open(file, "rb") as f:
                os.fsync(f.fileno())
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin, cpu = time.perf_counter(), time.process_time()
        with open_book(path, writer="w") as book:
            found = book.sql("select count(*) as n from interactions")["n"][0].as_py()
            wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
        assert abs(found - n) < 200
        row(f"  to a serving state, cold cache, {name}: s", f"{wall:.3f} ({cpu:.3f} CPU)", "<= 3")


def bytes_per_turn(folder: Path) -> None:
    """Turns of 50 new prompt tokens and 50 output tokens, with their text, hashes, ids and times; after sealing."""
    for n_turns in (8, 32, 100):
        path = folder / "turns"
        log = DirectoryLog(path, "w", live_bytes=None, sync=lambda fd: None)
        n = 0
        for _ in range(2400 // n_turns):
            episode_id, parent, length = new_id("ep"), None, 0
            for _ in range(n_turns):
                event = completion(50, 50)
                fact = InteractionRecorded(
                    parent_id=parent,
                    edge="extends" if parent else None,
                    shared=length,
                    prompt_length=length + 50,
                    prefix_hash=os.urandom(16).hex(),
                    reply_hash=os.urandom(16).hex(),
                    sampling={"temperature": 1.0},
                    finish_reason="stop",
                    request_sha256=os.urandom(32).hex(),
                    seconds=float(RNG.uniform(0, 9)),
                )
                log.append_blocking(msgspec.structs.replace(event, fact=fact, episode_id=episode_id))
                parent, length, n = event.interaction_id, length + 100, n + 1
        live = sum(p.stat().st_size for p in path.rglob("*.log"))
        log.seal()
        log.close()
        size = sum(p.stat().st_size for p in path.rglob("*.parquet"))
        row(
            f"bytes per 50+50-token turn, {n_turns} turns", f"{size / n:.0f} (before sealing {live / n:.0f})", "< 1,000"
        )
        shutil.rmtree(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--recover-gb", type=float, default=1.0)
    parser.add_argument("--only", choices=["append", "sqlite", "follow", "recover", "turns"])
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rollbook-bench-"))
    parts: dict[str, Callable[[], None]] = {
        "append": lambda: appends(folder, args.events),
        "sqlite": lambda: sqlite_floor(folder, args.events),
        "follow": lambda: followers(folder),
        "recover": lambda: recovery(folder, args.recover_gb),
        "turns": lambda: bytes_per_turn(folder),
    }
    row("what", "measured", "target")
    print(f"(load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs)")
    try:
        for name, part in parts.items():
            if args.only in (None, name):
                part()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
