"""Soak: many interactions through several proxies of one book, on the scripted engine.

    python benchmarks/soak.py [--interactions 200000] [--proxies 2] [--rate 1000] [--turns 8] [--set max_ended=2000]
    python benchmarks/soak.py --scaling          one proxy against two, as fast as they go

The proxies are `rollbook serve` programs, as a launcher starts them. Sessions of 8 turns send their whole history each
time and get 64 tokens. The load comes from one process that speaks plain sockets and has all requests ready made, so
that its share of the cores is small; it is printed. With --rate, sessions begin at fixed times (an open loop), and a
turn's latency counts from when it was sent; the scripted engine takes no time, so all of it is added by the proxy.

Two proxies at 1000/s take more than half of two cores, so whatever else runs there makes a queue. What other programs
took of the machine is measured beside it, and latencies are given twice: of all answers, and of those that came while
the others took little.

Afterwards the book is read: every acknowledged id must be in it once, and nothing else. Memory of each proxy is
sampled all the way; its growth is that of the second half.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

TURNS = 8
OUTPUT = 64
LOOK_S = 0.25  # between looks at memory and at the machine
LITTLE = 0.3  # cores that others may take without anybody noticing; the kernel's own work for us is among them
QUESTION = "and what follows from this, if we look at it from the other side of the table once more? " * 3
ANSWER = "".join(chr(97 + i * 7 % 26) for i in range(OUTPUT - 1))


def script(tokenizer: Any) -> Callable[[Any], list[int]]:
    """What the engine says: always the same, so that histories are known beforehand."""
    ids = [*tokenizer.encode(ANSWER).tolist(), tokenizer.eos_ids[0]]
    return lambda _: ids


def bodies(turns: int) -> list[bytes]:
    """The request of each turn."""
    made, messages = [], [{"role": "system", "content": "You are one of many agents that are all asked the same."}]
    for _ in range(turns):
        messages.append({"role": "user", "content": QUESTION})
        made.append(json.dumps({"model": "m", "messages": messages}).encode())
        messages.append({"role": "assistant", "content": ANSWER})
    return made


@dataclass
class Load:
    """What the clients of all proxies did."""

    wanted: int
    turns: int = TURNS
    began: int = 0  # interactions that sessions begun so far will make
    done: int = 0
    ids: list[bytes] = field(default_factory=list)
    took: list[float] = field(default_factory=list)
    came: list[float] = field(default_factory=list)  # when each answer did
    waiting: "deque[Client]" = field(default_factory=deque)  # idle connections, with --rate
    is_paced: bool = False
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    failures: list[bytes] = field(default_factory=list)


def post(path: bytes, key: bytes, body: bytes) -> bytes:
    head = b"POST %b HTTP/1.1\r\nhost: b\r\nauthorization: Bearer %b\r\ncontent-length: %d\r\n\r\n"
    return head % (path, key, len(body)) + body


class Client(asyncio.Protocol):
    """One keep-alive connection that plays one session after the other."""

    def __init__(self, load: Load, admin_key: str, requests: list[bytes]) -> None:
        self.load = load
        self.start = post(b"/rl/start_session", admin_key.encode(), b'{"task_id":"t"}')
        self.requests = requests
        self.buffer = b""
        self.missing = 0  # bytes of the answer that are still to come
        self.turn = -2  # -1: a session is being started; load.turns: it is being ended
        self.key = b""
        self.sent = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.idle()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.load.finished.is_set():
            self.fail(b"connection lost: %r" % str(error).encode())

    def idle(self) -> None:
        if self.load.is_paced:
            self.load.waiting.append(self)
        else:
            self.begin()

    def begin(self) -> None:
        load = self.load
        if load.began >= load.wanted:
            if load.done >= load.wanted:
                load.finished.set()
            return
        load.began += load.turns
        self.turn = -1
        self.transport.write(self.start)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if not self.missing:
            at = self.buffer.find(b"\r\n\r\n")
            if at < 0:
                return
            length = self.buffer.find(b"content-length: ") + 16
            self.missing = at + 4 + int(self.buffer[length : self.buffer.find(b"\r", length)])
        if len(self.buffer) >= self.missing:
            answer, self.buffer, self.missing = self.buffer, b"", 0
            self.answered(answer)

    def answered(self, answer: bytes) -> None:
        load = self.load
        if not answer.startswith(b"HTTP/1.1 200"):
            self.fail(answer)
            return
        if self.turn == -1:
            at = answer.rfind(b'"api_key":"') + 11
            self.key = answer[at : answer.find(b'"', at)]
        elif self.turn < load.turns:
            load.came.append(time.perf_counter())
            load.took.append(load.came[-1] - self.sent)
            at = answer.find(b'"id":"') + 6
            load.ids.append(answer[at : answer.find(b'"', at)])
            load.done += 1
        else:
            self.idle()
            return
        self.turn += 1
        body = self.requests[self.turn] if self.turn < load.turns else b"{}"
        path = b"/v1/chat/completions" if self.turn < load.turns else b"/rl/end_session"
        self.sent = time.perf_counter()
        self.transport.write(post(path, self.key, body))

    def fail(self, what: bytes) -> None:
        self.load.failures.append(what[-400:])
        self.load.finished.set()


async def run_load(load: Load, urls: list[str], admin_key: str, *, connections: int, rate: float | None) -> None:
    """Until all interactions are done."""
    loop, requests = asyncio.get_running_loop(), bodies(load.turns)
    load.is_paced = rate is not None
    clients = []
    for url in urls:
        host, port = url.removeprefix("http://").split(":")
        for _ in range(connections):
            _, client = await loop.create_connection(lambda: Client(load, admin_key, requests), host, int(port))
            clients.append(client)
    if rate is not None:
        # Connections of the proxies take turns.
        load.waiting = deque(client for k in range(connections) for client in clients[k::connections])
        began, n = time.perf_counter(), 0
        while n * load.turns < load.wanted and not load.finished.is_set():
            if load.waiting and began + n * load.turns / rate <= time.perf_counter():
                load.waiting.popleft().begin()
                n += 1
            else:
                await asyncio.sleep(0.002)
    while not load.finished.is_set():
        try:
            await asyncio.wait_for(load.finished.wait(), 0.05)
        except TimeoutError:
            if load.done >= load.wanted:
                load.finished.set()
    for client in clients:
        client.transport.abort()


def pids_of(book: Path) -> list[int]:
    """The servers of a book, by what was started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"serve" in words and str(book).encode() in words and b"rollbook.app.keeper" not in words:
                found.append(int(entry.name))
    return sorted(found)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    """Of all cores together since the machine began, with what its host took from it."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = Path("/proc/stat").read_text().split()[1:9]
    return sum(map(int, (user, nice, system, irq, softirq, steal))) / os.sysconf("SC_CLK_TCK")


def share_priority(pids: list[int]) -> None:
    """Give the proxies the priority of this program: each is a session of its own, which the kernel weighs alone."""
    try:
        nice = Path("/proc/self/autogroup").read_text().rsplit(" ", 1)[1]
        for pid in pids:
            Path(f"/proc/{pid}/autogroup").write_text(nice)
    except OSError:
        return  # a kernel without them, or nothing to give


def rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def soak(
    *,
    interactions: int,
    proxies: int,
    rate: float | None,
    connections: int,
    turns: int = TURNS,
    settings: Sequence[str] = (),
    is_checked: bool = True,
    keep: bool = False,
) -> float:
    """One run; prints what it found, returns interactions per second. Exits where something is lost or twice."""
    import uvloop

    from rollbook.app.launch import start_servers
    from rollbook.app.launch_local import LocalLauncher

    folder = Path(tempfile.mkdtemp(prefix="rollbook-soak-"))
    book = folder / "book"
    arguments = ["--engine", "scripted", "--script", "soak:script", "--model", "tiny", "--writer", "proxy-{index}"]
    arguments += [f"--set={setting}" for setting in settings]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    interactions -= interactions % turns
    try:
        with LocalLauncher(max_restarts=0) as launcher:
            programs, key = start_servers(
                launcher, str(book), arguments, log_path=folder / "server.log", wait_s=120, n=proxies
            )
            pids, urls = pids_of(book), [program.url for program in programs]
            share_priority(pids)

            async def run(wanted: int, seen: list[list[float]] | None = None) -> Load:
                load = Load(wanted=wanted, turns=turns)

                async def sample() -> None:
                    while seen is not None:
                        ours = time.process_time() + sum(cpu_seconds(pid) for pid in pids)
                        others = busy_seconds() - ours
                        seen.append([time.perf_counter(), others, load.done, *(rss_mb(pid) for pid in pids)])
                        await asyncio.sleep(LOOK_S)

                sampling = asyncio.create_task(sample())
                await run_load(load, urls, key, connections=connections, rate=rate)
                sampling.cancel()
                if load.failures:
                    raise SystemExit(f"a call failed: {load.failures[0]!r}")
                return load

            warm = uvloop.run(run(400 * proxies))
            before, ours = [cpu_seconds(pid) for pid in pids], time.process_time()
            seen: list[list[float]] = []
            began = time.perf_counter()
            load = uvloop.run(run(interactions, seen))
            seconds = time.perf_counter() - began
            cpu = sum(cpu_seconds(pid) - b for pid, b in zip(pids, before, strict=True))
            ours = time.process_time() - ours
            for program in programs:
                program.check()
        if is_checked:
            check(book, warm.ids + load.ids, proxies)
        print(
            f"{proxies} prox{'y' if proxies == 1 else 'ies'}: {load.done} interactions in {seconds:.1f} s, "
            f"{load.done / seconds:.0f}/s, {1e6 * cpu / load.done:.0f} us CPU each and {1e6 * ours / load.done:.0f} of "
            f"the load; {latencies(load, np.asarray(seen))}",
            flush=True,
        )
        if seconds > 20:
            print_memory(np.asarray(seen)[:, 2:])
        return load.done / seconds
    finally:
        if keep:
            print(f"  the book is {book}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def latencies(load: Load, seen: "np.ndarray[Any, Any]") -> str:
    """In words: of all answers, and of those before which other programs had taken little for a second."""

    def words(took: "np.ndarray[Any, Any]") -> str:
        return "p50 {:.2f} p99 {:.2f} p99.9 {:.2f} ms".format(*np.quantile(took * 1e3, (0.5, 0.99, 0.999)))

    took, came, at = np.asarray(load.took), np.asarray(load.came), seen[:, 0]
    cores = np.diff(seen[:, 1]) / np.diff(at)
    said = f"added latency {words(took)}; other programs took {(seen[-1, 1] - seen[0, 1]) / (at[-1] - at[0]):.2f} cores"
    back = round(1 / LOOK_S)
    is_quiet = np.array([cores[max(0, i - back) : i + 1].max() < LITTLE for i in range(len(cores))])
    alone = is_quiet[np.clip(np.searchsorted(at, came) - 1, 0, len(cores) - 1)]
    if alone.any():
        said += (
            f"; of the {alone.mean():.0%} of answers before which they took less than {LITTLE}: {words(took[alone])}"
        )
    return said


def print_memory(rows: "np.ndarray[Any, Any]") -> None:
    """rows: interactions so far, MB of each proxy."""
    proxies = rows.shape[1] - 1
    half = rows[len(rows) // 2 :]
    for i in range(1, proxies + 1):
        slope = np.polyfit(half[:, 0], half[:, i], 1)[0]
        eighths = " ".join(f"{mb:.0f}" for mb in rows[np.linspace(0, len(rows) - 1, 9).astype(int), i])
        print(
            f"  memory of proxy {i}, MB at each eighth: {eighths}; in the second half {1e4 * slope * proxies:+.2f} MB "
            "per 10,000 of its own"
        )


def check(book: Path, acknowledged: list[bytes], proxies: int) -> None:
    """Acknowledged and recorded are the same, each once; the proxies shared the work; files are whole."""
    from rollbook.store.directory import DirectoryLog
    from rollbook.store.verify import verify

    log = DirectoryLog(book)
    recorded: Counter[str] = Counter()
    writers: Counter[str] = Counter()
    for batch in log.read():
        for kind, writer, interaction in zip(
            *(batch.column(name).to_pylist() for name in ("kind", "writer", "interaction_id")), strict=True
        ):
            if kind == "InteractionRecorded":
                recorded[interaction] += 1
                writers[writer] += 1
    log.close()
    said = {name.decode() for name in acknowledged}
    lost, extra = len(said - recorded.keys()), len(recorded.keys() - said)
    twice = sum(n > 1 for n in recorded.values()) + len(acknowledged) - len(said)
    report = verify(book)
    print(
        f"  {len(said)} acknowledged, {len(recorded)} recorded: {lost} lost, {twice} twice, {extra} that nobody got; "
        f"by writer {dict(writers)}; files {'whole' if report.is_whole else 'NOT WHOLE'}"
    )
    if lost or twice or extra or len(writers) != proxies or not report.is_whole:
        raise SystemExit("the soak found a fault")


def scaling(*, interactions: int, connections: int) -> None:
    """One against two, alternating, as fast as they go."""
    ones, twos = [], []
    for _ in range(3):
        ones.append(soak(interactions=interactions, proxies=1, rate=None, connections=connections, is_checked=False))
        twos.append(soak(interactions=interactions, proxies=2, rate=None, connections=connections, is_checked=False))
    one, two = statistics.median(ones), statistics.median(twos)
    print(f"two proxies: {two / one:.2f} times one (medians of three: {one:.0f}/s and {two:.0f}/s)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interactions", type=int, default=200_000)
    parser.add_argument("--proxies", type=int, default=2)
    parser.add_argument(
        "--rate", type=float, default=None, help="interactions per second over all; none: a closed loop"
    )
    parser.add_argument("--connections", type=int, default=32, help="to each proxy")
    parser.add_argument("--turns", type=int, default=TURNS, help="model calls of a session")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], help="of the servers, as in rollbook serve"
    )
    parser.add_argument("--keep", action="store_true", help="leave the book there")
    parser.add_argument("--scaling", action="store_true")
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    if given.scaling:
        scaling(interactions=min(given.interactions, 16_000), connections=given.connections)
    else:
        soak(
            interactions=given.interactions,
            proxies=given.proxies,
            rate=given.rate,
            connections=given.connections,
            turns=given.turns,
            settings=given.settings,
            keep=given.keep,
        )
