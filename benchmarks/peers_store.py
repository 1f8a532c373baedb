"""Stores of model calls side by side: python benchmarks/peers_store.py [--turns 8 32 100] [--only NAME ...].

The same calls go into each store: sessions whose requests resend the grown history (50 new prompt and 50 sampled
tokens a turn), every fourth with a fork, one call in twenty repeated, sixteen sessions at a time. Printed are CPU of
the whole process per call (of what the store is given: lists of tokens, messages), bytes on disk or in memory per
call, calls that were acknowledged and are gone after kill -9 at half, whether a second export equals the first, and
what a second reward does to the first. A store that keeps everything in memory is durable by nobody's claim.

Peers are installed from PyPI into environments of their own; one that cannot be is listed with the reason. Only
their stores run: packages whose import pulls a whole framework are entered below it.
"""

import argparse
import asyncio
import importlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import sysconfig
import tempfile
import time
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

N_NEW, N_OUTPUT, N_AT_ONCE = 50, 50, 16

_AGENTLIGHTNING_NEEDS = [
    "pydantic",
    "pydantic-core",
    "typing-extensions",
    "annotated-types",
    "typing-inspection",
    "aiologic",
    "wrapt",
    "sniffio",
    "opentelemetry-api",
    "opentelemetry-sdk",
    "opentelemetry-semantic-conventions",
    "psutil",
]
PEERS: dict[str, tuple[list[str], bool]] = {
    # name: (what pip installs, whether it also sees this interpreter's packages: torch, openai)
    "rllm": (["rllm-model-gateway==0.1.0"], False),
    "tinker": (["--no-deps", "tinker-cookbook==0.6.1"], False),
    "agentlightning": (["--no-deps", "agentlightning==0.3.0", *_AGENTLIGHTNING_NEEDS], False),
    "areal": (["--no-deps", "areal==1.0.4", "colorlog"], True),
}


def call(
    rng: random.Random, session: int, turn: str, asked: str, messages: list[dict[str, Any]], tokens: list[int]
) -> dict[str, Any]:
    output = [rng.randrange(150_000) for _ in range(N_OUTPUT)]
    return {
        "session": f"s{session}",
        "id": f"s{session}{turn}",
        "messages": [*messages, {"role": "user", "content": asked + "word " * 35}],
        "reply": {"role": "assistant", "content": f"reply {turn} " + "word " * 40},
        "prompt_ids": [*tokens, *(rng.randrange(150_000) for _ in range(N_NEW))],
        "output_ids": output,
        "logprobs": [-rng.expovariate(2.0) for _ in output],
    }


def calls(n_turns: int, n_calls: int) -> list[list[dict[str, Any]]]:
    """Sessions of calls, the same for every store."""
    rng = random.Random(0)
    sessions = []
    while sum(map(len, sessions)) < n_calls:
        s = len(sessions)
        session: list[dict[str, Any]] = []
        messages: list[dict[str, Any]] = [{"role": "system", "content": "a careful engineer " * 10}]
        tokens = [rng.randrange(150_000) for _ in range(100)]

        for t in range(n_turns):
            made = call(rng, s, f"t{t}", f"question {t} ", messages, tokens)
            session.append(made)
            if rng.random() < 0.05:
                session.append({**made, "id": made["id"] + "r"})
            if s % 4 == 0 and t == n_turns // 2:
                session.append(call(rng, s, f"t{t}f", f"another way {t} ", messages, tokens))
            messages = [*made["messages"], made["reply"]]
            tokens = made["prompt_ids"] + made["output_ids"]
        sessions.append(session)
    return sessions


# ---------------------------------------------------------------- the stores


class Store:
    """What is asked of each."""

    is_durable = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def append(self, call: dict[str, Any]) -> None:
        raise NotImplementedError

    async def export(self) -> Any:
        """Every call's tokens, in a form that can be compared."""
        raise NotImplementedError

    async def reward(self, call: dict[str, Any], value: float) -> None:
        raise NotImplementedError

    async def rewards(self, call: dict[str, Any]) -> list[float]:
        raise NotImplementedError

    async def close(self) -> None: ...


class Rollbook(Store):
    """The log, with the parent found and only the rest stored."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        import numpy as np

        from rollbook.store import DirectoryLog
        from rollbook.store.tree import TreeIndex

        self.np, self.index = np, TreeIndex
        self.log = DirectoryLog(folder, "w")
        self.trees: dict[str, Any] = {}
        self.paths: dict[str, int] = {}

    async def append(self, call: dict[str, Any]) -> None:
        from rollbook.store import Event, InteractionRecorded, Messages
        from rollbook.store.events import encode_messages

        np = self.np
        tree = self.trees.setdefault(call["session"], self.index())
        match = tree.resolve(call["messages"])
        shared = self.paths[match.parent_id] if match.parent_id else 0
        length = len(call["prompt_ids"])
        fact = InteractionRecorded(
            parent_id=match.parent_id,
            edge=match.edge,
            shared=shared,
            prompt_length=length,
            prefix_hash=match.prefix_hash,
        )
        said = Messages(request=list(match.messages[match.n_matched :]), reply=call["reply"], kept=match.kept)
        await self.log.append(
            Event(
                run_id="r",
                episode_id=call["session"],
                interaction_id=call["id"],
                fact=fact,
                messages=encode_messages(said),
                prompt_ids=np.array(call["prompt_ids"][shared:], np.int32),
                output_ids=np.array(call["output_ids"], np.int32),
                logprobs=np.array(call["logprobs"], np.float32),
                versions=np.zeros(N_OUTPUT, np.int32),
            )
        )
        tree.add(call["id"], match, call["reply"])
        self.paths[call["id"]] = length + N_OUTPUT

    async def export(self) -> Any:
        from rollbook.store.book import Book

        book = Book(self.log)
        ids = book.sql("select interaction_id from interactions order by interaction_id")["interaction_id"].to_pylist()
        tokens = book.load(ids)
        return {name: tokens.input_ids[tokens.row(r)].tobytes() for r, name in enumerate(tokens.row_ids)}

    async def reward(self, call: dict[str, Any], value: float) -> None:
        from rollbook.store import Event, RewardGiven

        fact = RewardGiven(value=value)
        await self.log.append(Event(run_id="r", episode_id=call["session"], interaction_id=call["id"], fact=fact))

    async def rewards(self, call: dict[str, Any]) -> list[float]:
        from rollbook.store.book import Book

        query = "select value from rewards where interaction_id = ? order by given_at, event_id"
        return Book(self.log).sql(query, [call["id"]])["value"].to_pylist()

    async def close(self) -> None:
        self.log.close()


class Sqlite(Store):
    """The plain floor: WAL, synchronous=FULL, each call a row of JSON, as sent."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.db = sqlite3.connect(folder / "calls.db", isolation_level=None)
        self.db.execute("pragma journal_mode=wal")
        self.db.execute("pragma synchronous=full")
        self.db.execute("create table if not exists calls (id text primary key, session text, data text)")
        self.db.execute("create table if not exists rewards (id text, value real)")

    async def append(self, call: dict[str, Any]) -> None:
        self.db.execute("insert or ignore into calls values (?, ?, ?)", (call["id"], call["session"], json.dumps(call)))

    async def export(self) -> Any:
        return {
            name: (call := json.loads(data))["prompt_ids"] + call["output_ids"]
            for name, data in self.db.execute("select id, data from calls")
        }

    async def reward(self, call: dict[str, Any], value: float) -> None:
        self.db.execute("insert into rewards values (?, ?)", (call["id"], value))

    async def rewards(self, call: dict[str, Any]) -> list[float]:
        return [v for (v,) in self.db.execute("select value from rewards where id = ?", (call["id"],))]

    async def close(self) -> None:
        self.db.close()


class Rllm(Store):
    """rllm-model-gateway's SqliteTraceStore (rollback journal, synchronous=NORMAL). It has no rewards."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        folder.mkdir(parents=True, exist_ok=True)
        module = importlib.import_module("rllm_model_gateway.store.sqlite_store")
        self.store = module.SqliteTraceStore(str(folder / "traces.db"))

    async def append(self, call: dict[str, Any]) -> None:
        trace = {
            "trace_id": call["id"],
            "session_id": call["session"],
            "messages": call["messages"],
            "prompt_token_ids": call["prompt_ids"],
            "response_message": call["reply"],
            "completion_token_ids": call["output_ids"],
            "logprobs": call["logprobs"],
        }
        await self.store.store_trace(call["id"], call["session"], trace)

    async def export(self) -> Any:
        db = sqlite3.connect(self.folder / "traces.db")
        names = sorted({s for (s,) in db.execute("select session_id from trace_sessions")})
        db.close()
        found = [trace for name in names for trace in await self.store.get_session_traces(name)]
        return {trace["trace_id"]: trace["prompt_token_ids"] + trace["completion_token_ids"] for trace in found}

    async def close(self) -> None:
        await self.store.close()


class Tinker(Store):
    """tinker-cookbook's CaptureDB (WAL, synchronous by SQLite's default), without its HTTP daemon. No messages."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        folder.mkdir(parents=True, exist_ok=True)
        below("tinker_cookbook", "tinker_cookbook.capture", "tinker_cookbook.capture.store")
        self.db = importlib.import_module("tinker_cookbook.capture.store.db").CaptureDB(folder / "capture.db")
        self.n = 0

    async def append(self, call: dict[str, Any]) -> None:
        self.n += 1
        row = {
            "run_id": "r",
            "sampling_session_id": call["session"],
            "seq_id": self.n,
            "sample_idx": 0,
            "prompt_tokens": call["prompt_ids"],
            "sampled_tokens": call["output_ids"],
            "logprobs": call["logprobs"],
            "metadata": {"id": call["id"]},
        }
        self.db.ingest_wire([row])

    async def export(self) -> Any:
        rows = self.db.query_rows("r", limit=10**6)
        return {row["metadata"]["id"]: row["prompt_tokens"] + row["sampled_tokens"] for row in rows}

    async def reward(self, call: dict[str, Any], value: float) -> None:
        event = {"event_id": os.urandom(8).hex(), "run_id": "r", "kind": "reward", "payload": {call["id"]: value}}
        self.db.ingest_annotations([event])

    async def rewards(self, call: dict[str, Any]) -> list[float]:
        return [a["payload"][call["id"]] for a in self.db.query_annotations("r", kind="reward")]

    async def close(self) -> None:
        self.db.close()


class AgentLightning(Store):
    """agentlightning's InMemoryLightningStore: a call is a span, so is a reward."""

    is_durable = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        below("agentlightning", "agentlightning.store", "agentlightning.utils")
        self.store = importlib.import_module("agentlightning.store.memory").InMemoryLightningStore(thread_safe=False)
        self.types = importlib.import_module("agentlightning.types")
        self.rollouts: dict[str, Any] = {}
        self.n = 0

    async def _span(self, session: str, name: str, attributes: dict[str, Any]) -> None:
        rollout = self.rollouts.get(session)
        if rollout is None:
            rollout = self.rollouts[session] = await self.store.start_rollout(input={})
        self.n += 1
        attempt_id = rollout.attempt.attempt_id
        await self.store.add_span(
            self.types.Span(
                rollout_id=rollout.rollout_id,
                attempt_id=attempt_id,
                sequence_id=self.n,
                trace_id=f"{self.n:032x}",
                span_id=f"{self.n:016x}",
                parent_id=None,
                name=name,
                status=self.types.TraceStatus(status_code="OK"),
                attributes=attributes,
                events=[],
                links=[],
                start_time=0.0,
                end_time=1.0,
                context=None,
                parent=None,
                resource=self.types.OtelResource(attributes={}, schema_url=""),
            )
        )

    async def append(self, call: dict[str, Any]) -> None:
        attributes = {
            "id": call["id"],
            "messages": json.dumps(call["messages"]),
            "reply": json.dumps(call["reply"]),
            "prompt_token_ids": call["prompt_ids"],
            "response_token_ids": call["output_ids"],
            "logprobs": call["logprobs"],
        }
        await self._span(call["session"], "call", attributes)

    async def _spans(self, name: str) -> list[Any]:
        spans = [s for r in self.rollouts.values() for s in await self.store.query_spans(r.rollout_id)]
        return [s.attributes for s in spans if s.name == name]

    async def export(self) -> Any:
        return {a["id"]: [*a["prompt_token_ids"], *a["response_token_ids"]] for a in await self._spans("call")}

    async def reward(self, call: dict[str, Any], value: float) -> None:
        await self._span(call["session"], "reward", {"id": call["id"], "reward": value})

    async def rewards(self, call: dict[str, Any]) -> list[float]:
        return [a["reward"] for a in await self._spans("reward") if a["id"] == call["id"]]


class Areal(Store):
    """AReaL's InteractionCache, one per session, and its tensors on export."""

    is_durable = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        below("areal", "areal.utils", "areal.experimental", "areal.experimental.openai")
        api = types.ModuleType("areal.api")
        api.ModelResponse = Response  # type: ignore[attr-defined]
        sys.modules["areal.api"] = api
        self.types = importlib.import_module("areal.experimental.openai.types")
        self.cache = importlib.import_module("areal.experimental.openai.cache").InteractionCache
        self.sessions: dict[str, Any] = {}

    async def append(self, call: dict[str, Any]) -> None:
        interaction = self.types.InteractionWithTokenLogpReward(
            model_response=Response(call["prompt_ids"], call["output_ids"], call["logprobs"]),
            messages=call["messages"],
            output_message_list=[call["reply"]],
        )
        interaction._interaction_id = call["id"]
        self.sessions.setdefault(call["session"], self.cache())[call["id"]] = interaction

    async def export(self) -> Any:
        return {
            name: interaction.to_tensor_dict()["input_ids"].numpy().tobytes()
            for cache in self.sessions.values()
            for name, interaction in cache.items()
        }

    async def reward(self, call: dict[str, Any], value: float) -> None:
        self.sessions[call["session"]].set_reward(call["id"], value)

    async def rewards(self, call: dict[str, Any]) -> list[float]:
        return [self.sessions[call["session"]][call["id"]].reward]


class Response:
    """The part of AReaL's ModelResponse that its cache reads."""

    def __init__(self, input_tokens: list[int], output_tokens: list[int], output_logprobs: list[float]) -> None:
        self.input_tokens, self.output_tokens, self.output_logprobs = input_tokens, output_tokens, output_logprobs
        self.output_versions = [0] * len(output_tokens)
        self.input_len, self.output_len = len(input_tokens), len(output_tokens)


def below(*packages: str) -> None:
    """Make packages importable without running their __init__, which would load a framework."""
    for name in packages:
        parent, _, last = name.rpartition(".")
        roots = sys.modules[parent].__path__ if parent else sys.path
        module = types.ModuleType(name)
        module.__path__ = [str(Path(root) / last) for root in roots if (Path(root) / last).is_dir()]
        sys.modules[name] = module


STORES: dict[str, type[Store]] = {
    "rollbook": Rollbook,
    "sqlite": Sqlite,
    "rllm": Rllm,
    "tinker": Tinker,
    "agentlightning": AgentLightning,
    "areal": Areal,
}


# ---------------------------------------------------------------- one store, in its own process


def memory_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status; run this on Linux")


def folder_bytes(folder: Path, pattern: str = "*") -> int:
    return sum(f.stat().st_size for f in folder.rglob(pattern) if f.is_file())


async def fill(store: Store, sessions: Iterable[list[dict[str, Any]]], acknowledged: Any) -> None:
    waiting = iter(sessions)

    async def work() -> None:
        for session in waiting:
            for call in session:
                await store.append(call)
                acknowledged(call)
                await asyncio.sleep(0)

    await asyncio.gather(*(work() for _ in range(N_AT_ONCE)))


async def child(name: str, mode: str, folder: Path, n_turns: int, n_calls: int) -> None:
    sessions = calls(n_turns, n_calls)
    store = STORES[name](folder)
    if mode == "kill":
        await fill(store, sessions, lambda call: print(call["id"], flush=True))
        return
    if mode == "count":
        print(json.dumps(sorted(await store.export())))
        return
    await store.append({**sessions[0][0], "id": "warm", "session": "warm"})
    count = sum(map(len, sessions))
    began, cpu = time.perf_counter(), time.process_time()
    await fill(store, sessions, lambda call: None)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - began
    first = await store.export()
    tokens = {c["id"]: c["prompt_ids"] + c["output_ids"] for s in sessions for c in s}
    some = sessions[0][-1]
    try:
        await store.reward(some, 1.0)
        await store.reward(some, 2.0)
        kept = await store.rewards(some)
        rereward = "both kept" if kept == [1.0, 2.0] else "first lost" if kept == [2.0] else f"got {kept}"
    except NotImplementedError:
        rereward = "no rewards"
    second = await store.export()
    await store.close()
    if store.is_durable:
        size = folder_bytes(folder)
    else:  # once more, with calls that nobody else holds, as they come from a socket
        texts = [json.dumps(session) for session in sessions]
        store, before = STORES[name](folder), memory_bytes()
        await fill(store, map(json.loads, texts), lambda call: None)
        size = memory_bytes() - before
    result = {
        "cpu_us": cpu / count * 1e6,
        "wall_us": wall / count * 1e6,
        "bytes": size / count,
        "same": first == second and len(first) == len(tokens) + 1,
        "rereward": rereward,
    }
    if name == "rollbook":
        from rollbook.store import DirectoryLog

        log = DirectoryLog(folder, "w")
        log.seal()
        log.close()
        result["sealed"] = folder_bytes(folder / "sealed", "*.parquet") / count
    print(json.dumps(result))


# ---------------------------------------------------------------- all of them


def environment(folder: Path, name: str) -> Path:
    """The Python of a peer's environment, made if it is not there. Raises CalledProcessError."""
    packages, sees_ours = PEERS[name]
    python = folder / name / "bin" / "python"
    if not (folder / name / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder / name], check=True)
        # --no-deps counts for a whole command.
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
        subprocess.run(install, check=True, capture_output=True, text=True, timeout=600)
        if sees_ours:
            site = next((folder / name / "lib").glob("python*/site-packages"))
            (site / "ours.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        (folder / name / "ready").touch()
    return python


def run(python: Path, *args: str) -> str:
    done = subprocess.run([python, __file__, *args], check=True, capture_output=True, text=True, timeout=600)
    return done.stdout.strip().splitlines()[-1]


def killed(python: Path, name: str, folder: Path, n_turns: int, n_calls: int) -> tuple[int, int]:
    """Calls acknowledged until kill -9 at half of them, and how many of those are gone."""
    args = ["--child", name, "kill", str(folder), str(n_turns), str(n_calls)]
    process = subprocess.Popen([python, __file__, *args], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    acknowledged = []
    for line in process.stdout:
        acknowledged.append(line.strip())
        if len(acknowledged) == n_calls // 2:
            process.send_signal(signal.SIGKILL)
            break
    acknowledged += [line.strip() for line in process.stdout if line.endswith("\n")]
    process.wait()
    process.stdout.close()
    found = set(json.loads(run(python, "--child", name, "count", str(folder), str(n_turns), str(n_calls))))
    return len(acknowledged), len(set(acknowledged) - found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--turns", type=int, nargs="+", default=[8, 32, 100])
    parser.add_argument("--calls", type=int, default=600)
    parser.add_argument("--only", nargs="+", choices=STORES, default=list(STORES))
    parser.add_argument("--envs", type=Path, default=Path.home() / ".cache" / "rollbook" / "peers")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        name, mode, folder, n_turns, n_calls = args.child
        asyncio.run(child(name, mode, Path(folder), int(n_turns), int(n_calls)))
        return
    pythons, missing = {}, {}
    for name in args.only:
        try:
            pythons[name] = environment(args.envs, name) if name in PEERS else Path(sys.executable)
        except subprocess.CalledProcessError as error:
            missing[name] = (error.stderr or str(error)).strip().splitlines()[-1]
    head = f"{'store':<16}{'turns':>6}{'CPU us/call':>13}{'bytes/call':>12}{'sealed':>8}{'lost':>12}"
    print(f"{head}  {'second export':<14} second reward", flush=True)
    for n_turns in args.turns:
        for name in list(pythons):
            folder = Path(tempfile.mkdtemp(prefix="rollbook-peers-"))
            try:
                told = run(pythons[name], "--child", name, "run", str(folder / "a"), str(n_turns), str(args.calls))
                r = json.loads(told)
                acknowledged, lost = killed(pythons[name], name, folder / "b", n_turns, args.calls)
            except subprocess.CalledProcessError as error:
                missing[name] = (error.stderr or str(error)).strip().splitlines()[-1]
                del pythons[name]
                continue
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            where = "" if STORES[name].is_durable else "*"
            sealed = f"{r['sealed']:.0f}" if "sealed" in r else ""
            print(
                f"{name:<16}{n_turns:>6}{r['cpu_us']:>13.0f}{r['bytes']:>11.0f}{where or ' '}{sealed:>8}"
                f"{f'{lost} of {acknowledged}':>12}  {'same' if r['same'] else 'NOT THE SAME':<14} {r['rereward']}",
                flush=True,
            )
    print("* in memory")
    for name, reason in missing.items():
        print(f"{name}: not measured: {reason}")


if __name__ == "__main__":
    main()
