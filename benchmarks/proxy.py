"""The proxy under load, beside nginx and AReaL's proxy: families P1 to P5, in one run.

    python benchmarks/proxy.py --tokenizer FOLDER [--only P1,P1b,...] [--rounds 3] [--seconds 3] [--areal FOLDER]

A fake engine, a process of its own, answers as vLLM does: `/inference/v1/generate` for us (token ids in, 300 token ids
with their logprob objects out, 41 KB), `/v1/chat/completions` for nginx and for AReaL's engine client (the same, as
chat). A load generator sends sessions of 8 turns, each with the grown history, one request at a time per connection,
over plain sockets. Subjects take turns (A B C A B C) for `--rounds` rounds; a figure is the median of the rounds, a
ratio the median of each round's ratio. CPU is user + system time of the subject's processes, over requests.

Before a figure of ours is printed the book is read back: every reply must be there, and its tokens and logprobs must
be the ones that the engine sent, one by one, the prompt the one that the engine got, the text what the client got.

Families:
    P1   whole replies, 16 connections (--connections), durable before the reply, with our rendering and tokenisation
    P1b  1 connection: added latency over the engine asked directly
    P1c  stalls, p99 and CPU while the book grows to --grow completions (100,000), means of its first and last 20,000,
         beside nginx's of the same minutes; and P3, memory and bytes on disk
    P2   streams of 300 tokens, an event each, all there at once; P2paced: 2 ms apart; P2first: when the first is there
    P4   8 sessions of 200 turns: CPU and memory of a turn
    P5   50 to 2,000 sub-agents of one session, interleaved: CPU of a call
"""

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import logging
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop
from xxhash import xxh3_64_intdigest

ADMIN = "benchmark-admin-key"
TURNS, OUTPUT, VARIANTS = 8, 300, 16
WORDS = re.findall(
    r"\w+",
    "the of and to in is that it was for on are with as his they be at one have this from or had by hot but some what "
    "there we can out other were all your when up use word how said an each she which do their time if will way about "
    "many then them would write like so these her long make thing see him two has look more day could go come did my",
)


# ---------------------------------------------------------------- what the engine says


class Answers:
    """What the engine says to a prompt: one of some answers, chosen by the prompt's length."""

    def __init__(self, tokenizer: str) -> None:
        from rollbook.proxy.tokenizer import Tokenizer

        loaded = Tokenizer.load(tokenizer)
        rng = np.random.default_rng(1)
        self.ids: list[np.ndarray[Any, Any]] = []
        for n in range(VARIANTS):
            text = " " + " ".join(WORDS[i] for i in rng.integers(len(WORDS), size=2 * OUTPUT))
            self.ids.append(np.append(loaded.encode(f"{n}{text}")[: OUTPUT - 1], loaded.eos_ids[0]).astype(np.int32))
        self.logprobs = [-rng.exponential(0.5, OUTPUT).astype(np.float32) for _ in range(VARIANTS)]
        self.texts = [loaded.decode(ids, skip_special_tokens=True) for ids in self.ids]
        self.pieces = [[loaded.decode([int(i)]) for i in ids] for ids in self.ids]

    def generated(self, n_prompt: int, begin: int, end: int) -> bytes:
        """Tokens [begin, end) of the answer to a prompt of this length, as an event of a streamed generate."""
        variant = n_prompt % VARIANTS
        ids, logprobs = self.ids[variant], self.logprobs[variant]
        pairs = zip(ids[begin:end].tolist(), logprobs[begin:end].tolist(), strict=True)
        sampled = [{"token_id": i, "logprob": x, "rank": 1} for i, x in pairs]
        choice = {  # as vLLM 0.32 writes it
            "index": 0,
            "logprobs": {"content": [{**one, "top_logprobs": [one]} for one in sampled]},
            "finish_reason": "stop" if end == OUTPUT else None,
            "stop_reason": None,
            "token_ids": ids[begin:end].tolist(),
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": None,
        }
        told = {"request_id": "r", "output_mode": "tokens", "choices": [choice], "usage": None}
        return b"data: %b\n\n" % msgspec.json.encode(told)

    def chat(self, variant: int) -> bytes:
        """A whole chat completion, as vLLM gives it with `return_token_ids`."""
        ids, logprobs = self.ids[variant].tolist(), self.logprobs[variant].tolist()
        content = [
            {"token": text, "logprob": x, "bytes": list(text.encode()), "top_logprobs": []}
            for text, x in zip(self.pieces[variant], logprobs, strict=True)
        ]
        message = {"role": "assistant", "content": self.texts[variant], "refusal": None, "tool_calls": []}
        choice = {"index": 0, "message": message, "logprobs": {"content": content}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1000, "completion_tokens": OUTPUT, "total_tokens": 1000 + OUTPUT}
        answer = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "usage": usage}
        prompt_ids = [variant, *range(1000, 1999)]
        return msgspec.json.encode(
            {**answer, "choices": [{**choice, "token_ids": ids}], "prompt_token_ids": prompt_ids}
        )


class FakeEngine(asyncio.Protocol):
    """One connection to the fake engine. No framework: it must never be what is measured."""

    answers: Answers
    asked: dict[int, int] = {}  # hash of the ids of each prompt, as JSON -> how many ids  # noqa: RUF012
    events: dict[tuple[int, int], bytes] = {}  # (variant, tokens per event) -> the events  # noqa: RUF012
    pace_s = 0.0  # between events; 0: all at once

    def connection_made(self, transport: Any) -> None:
        self._transport, self._buffer = transport, b""

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        while True:
            head = self._buffer.find(b"\r\n\r\n")
            if head < 0:
                return
            at = self._buffer.lower().find(b"content-length:", 0, head)
            length = int(self._buffer[at + 15 : self._buffer.index(b"\r\n", at)]) if at >= 0 else 0
            if len(self._buffer) < head + 4 + length:
                return
            method, path = self._buffer.split(b" ", 2)[:2]
            body = self._buffer[head + 4 : head + 4 + length]
            self._buffer = self._buffer[head + 4 + length :]
            self._answer(method, path, body)

    def _answer(self, method: bytes, path: bytes, body: bytes) -> None:
        kind, status = b"application/json", b"200 OK"
        if path.endswith(b"/generate"):
            kind, out = b"text/event-stream", self._generate(body)
            if out is None:
                status, out = b"400 Bad Request", b"{}"
        elif path.endswith(b"/chat/completions"):
            out = self.events[len(body) % VARIANTS, 0]
        elif path == b"/asked":
            out = msgspec.json.encode(list(self.asked.items()))
        elif path == b"/v1/models":
            out = b'{"data":[{"id":"policy","max_model_len":1000000}]}'
        elif path == b"/health":
            out = b"{}"
        else:
            status, out = b"404 Not Found", b"{}"
        head = b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (status, kind, len(out))
        if self.pace_s and out.startswith(b"data:"):
            events = [event + b"\n\n" for event in out.split(b"\n\n")[:-1]]
            self._transport.write(head + events[0])
            self._give(events, 1)
        else:
            self._transport.write(head + out)

    def _give(self, events: list[bytes], n: int) -> None:
        self._transport.write(events[n])
        if n + 1 < len(events):
            asyncio.get_running_loop().call_later(self.pace_s, self._give, events, n + 1)

    def _generate(self, body: bytes) -> bytes | None:
        """None where no ids came."""
        begin = body.find(b'"token_ids":[') + 13
        if begin < 13:
            return None
        end = body.index(b"]", begin)
        ids = body[begin:end]  # never parsed: the engine must cost as little as can be
        sampling = msgspec.json.decode(body[:begin] + body[end:])["sampling_params"]
        n_ids = ids.count(b",") + 1
        if sampling["max_tokens"] < OUTPUT:  # a look at what the server is
            n = sampling["max_tokens"]
            entries = [{"token_id": 1, "logprob": 0.0}] * n
            choice = {"token_ids": [1] * n, "logprobs": {"content": entries}, "finish_reason": "length"}
            return b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode({"choices": [choice]})
        self.asked[xxh3_64_intdigest(ids)] = n_ids  # 32 bits would be too few for 100,000
        step = max(1, sampling.get("stream_interval") or 1)
        return self.events[n_ids % VARIANTS, step]

    @classmethod
    def made(cls, variant: int, step: int) -> bytes:
        """An answer in events of `step` tokens; 0: as chat."""
        if not step:
            return cls.answers.chat(variant)
        ends = [*range(1, OUTPUT, step), OUTPUT]  # the first token goes at once, as vLLM sends it
        parts = [cls.answers.generated(variant, a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        return b"".join(parts) + b"data: [DONE]\n\n"


def run_engine(tokenizer: str, pace_s: float) -> None:
    """The fake engine as a program."""
    FakeEngine.answers = Answers(tokenizer)
    FakeEngine.pace_s = pace_s
    for key in itertools.product(range(VARIANTS), (0, 1, 64)):  # none is made while somebody waits for it
        FakeEngine.events[key] = FakeEngine.made(*key)

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(FakeEngine, "127.0.0.1", 0, backlog=512)
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        await server.serve_forever()

    uvloop.run(main())


def run_rollbook(tokenizer: str, engine: str, book: str) -> None:
    """Our server as a program: what `rollbook serve --engine vllm --url ...` runs."""
    import anyio

    from rollbook.proxy.config import ServeConfig
    from rollbook.proxy.server import Service, serve_until_stopped
    from rollbook.proxy.tokenizer import Tokenizer
    from rollbook.proxy.vllm import VLLMEngine
    from rollbook.store.directory import DirectoryLog

    log = DirectoryLog(book, writer="server")
    service = Service(
        log=log,
        engine=VLLMEngine(tokenizer, url=engine),
        tokenizer=Tokenizer.load(tokenizer),
        config=ServeConfig(admin_key=ADMIN, max_sessions=100_000, max_concurrent=4096),
    )
    anyio.run(
        lambda: serve_until_stopped(service, announce=lambda url: print(url, flush=True)),
        backend_options={"use_uvloop": True},
    )
    log.close()


def run_areal(tokenizer: str) -> None:
    """AReaL's proxy server as a program, its engine stubbed in process: no hop to a server, as ours has."""
    import areal.experimental.openai.proxy.proxy_rollout_server as server
    import uvicorn
    from areal.api import ModelResponse
    from areal.experimental.openai.client import ArealOpenAI
    from areal.utils.hf_utils import load_hf_tokenizer

    answers = Answers(tokenizer)

    class Stub:
        def get_version(self) -> int:
            return 0

        async def agenerate(self, request: Any) -> Any:
            n = len(request.input_ids) % VARIANTS
            return ModelResponse(
                input_tokens=request.input_ids,
                output_tokens=answers.ids[n].tolist(),
                output_logprobs=answers.logprobs[n].tolist(),
                output_versions=[0] * OUTPUT,
                stop_reason="stop",
                tokenizer=request.tokenizer,
            )

    logging.disable(logging.WARNING)
    loaded = load_hf_tokenizer(tokenizer)
    server._openai_client = ArealOpenAI(engine=Stub(), tokenizer=loaded, chat_template_type="hf")
    server._admin_api_key, server._capacity = ADMIN, 1 << 40
    listening = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    config = uvicorn.Config(server.app, loop="uvloop", http="h11", log_level="critical", access_log=False)
    uvicorn.Server(config).run([listening])


AREAL = (
    "areal==1.0.4 colorlog litellm==1.83.0 fastapi==0.165.0 starlette annotated-doc python-dotenv tiktoken zipp "
    "importlib-metadata fastuuid flask blinker itsdangerous torchdata lark hydra-core omegaconf numba llvmlite "
    "antlr4-python3-runtime==4.9.3 einops aiofiles"
)
"""What an environment needs for AReaL's proxy beside ours, which brings torch, transformers and the OpenAI SDK."""


def areal_python(folder: str) -> str:
    """The interpreter of an environment with AReaL's proxy, made where there is none. Raises CalledProcessError."""
    python = f"{folder}/bin/python"
    if not Path(python).is_file():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        [site] = Path(folder).glob("lib/python*/site-packages")
        (site / "ours.pth").write_text(sysconfig.get_paths()["purelib"])
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *AREAL.split()], check=True)
    return python


# ---------------------------------------------------------------- load


_HAS_TEXT = re.compile(rb'"content":"[^"]|"token_ids":\[')
"""In an event with a token: ours, and the engine's own."""


class Connection(asyncio.Protocol):
    """One keep-alive connection of the load generator; one request at a time."""

    _transport: Any
    _buffer = b""
    _done: "asyncio.Future[bytes]"
    first_at = 0.0
    """When the first event with text of the latest streamed answer was here."""

    @classmethod
    async def open(cls, url: str) -> "Connection":
        host, port = url.removeprefix("http://").split(":")
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, int(port))
        return connection

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def close(self) -> None:
        self._transport.close()

    async def post(self, path: str, key: str, body: bytes) -> bytes:
        """The body of the answer; of a streamed one, all its chunks as they came."""
        self._buffer, self._head, self._length, self.first_at = b"", 0, -1, 0.0
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(
            b"POST %b HTTP/1.1\r\nhost: b\r\ncontent-type: application/json\r\nauthorization: Bearer %b\r\n"
            b"content-length: %d\r\n\r\n%b" % (path.encode(), key.encode(), len(body), body)
        )
        return await self._done

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        if not self._head:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._buffer[:end].lower()
            if not head.startswith(b"http/1.1 200"):
                self._done.set_exception(RuntimeError(self._buffer[:2000].decode("utf-8", "replace")))
                return
            at = head.find(b"content-length:")
            self._length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else -1
            self._head = end + 4
        if not self.first_at and _HAS_TEXT.search(self._buffer, self._head):
            self.first_at = time.perf_counter()
        if self._length >= 0:
            if len(self._buffer) >= self._head + self._length:
                self._done.set_result(self._buffer[self._head :])
        elif self._buffer.endswith(b"\r\n0\r\n\r\n") or self._buffer.endswith(b"\n0\r\n\r\n"):
            self._done.set_result(self._buffer[self._head :])

    def connection_lost(self, error: Exception | None) -> None:
        if hasattr(self, "_done") and not self._done.done():
            self._done.set_exception(RuntimeError(f"the connection was lost: {error}"))


@dataclass
class Burst:
    """What one run of load saw."""

    took: list[float] = field(default_factory=list)  # seconds of each request
    first: list[float] = field(default_factory=list)  # seconds to the first text of each stream
    ended: list[float] = field(default_factory=list)  # when each was there
    replies: list[tuple[str, str, str]] = field(default_factory=list)  # (session, interaction, text)
    seconds: float = 0.0

    @property
    def n(self) -> int:
        return len(self.took)

    def at(self, share: float) -> float:
        """A percentile of the latencies, ms."""
        return 1e3 * sorted(self.took)[min(self.n - 1, int(share * self.n))]


def question(rng: Any) -> bytes:
    """A message of the user of about 72 tokens, as JSON."""
    return b'{"role":"user","content":"%b"}' % " ".join(WORDS[i] for i in rng.integers(len(WORDS), size=72)).encode()


_SYSTEM = b'{"role":"system","content":"%b"}' % " ".join(WORDS[(7 * i) % len(WORDS)] for i in range(330)).encode()


class _Message(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    message: _Message


class _Answer(msgspec.Struct):
    id: str
    choices: list[_Choice]


_decode_answer = msgspec.json.Decoder(_Answer).decode


def read_answer(data: bytes, is_stream: bool) -> tuple[str, str]:
    """(id, text) of a chat completion."""
    if not is_stream:
        answer = _decode_answer(data)
        return answer.id, answer.choices[0].message.content
    found, text = "", ""
    for line in data.split(b"\n"):
        at = line.find(b"data: {")
        if at >= 0:
            chunk = json.loads(line[at + 6 :])
            found = chunk["id"]
            text += "".join(c["delta"].get("content") or "" for c in chunk["choices"])
    return found, text


async def converse(
    url: str,
    connections: int,
    *,
    seconds: float = 0.0,
    calls: int = 0,
    turns: int = TURNS,
    is_stream: bool = False,
    with_sessions: bool = True,
    path: str = "/v1/chat/completions",
    seed: int = 0,
) -> Burst:
    """Closed loop of sessions until `seconds` are over or `calls` are answered; with_sessions: one starts them."""
    burst = Burst()
    began = time.perf_counter()
    end = began + seconds if seconds else float("inf")
    most = calls or 1 << 60
    tail = b'],"max_tokens":512,"stream":true}' if is_stream else b'],"max_tokens":512}'

    async def one(n: int) -> None:
        rng = np.random.default_rng((seed, n))
        connection = await Connection.open(url)
        while time.perf_counter() < end and burst.n < most:
            key = session = "none"
            if with_sessions:
                started = json.loads(await connection.post("/rl/start_session", ADMIN, b'{"task_id":"t"}'))
                key, session = started["api_key"], started["session_id"]
            told = b'{"model":"m","messages":[' + _SYSTEM
            for _ in range(turns):
                told += b"," + question(rng)
                sent = time.perf_counter()
                data = await connection.post(path, key, told + tail)
                now = time.perf_counter()
                burst.took.append(now - sent)
                burst.ended.append(now)
                if connection.first_at:
                    burst.first.append(connection.first_at - sent)
                interaction, text = read_answer(data, is_stream)
                burst.replies.append((session, interaction, text))
                told += b',{"role":"assistant","content":%b}' % msgspec.json.encode(text)
                if time.perf_counter() >= end or burst.n >= most:
                    break
            if with_sessions:
                await connection.post("/rl/end_session", key, b"{}")
        connection.close()

    async with asyncio.TaskGroup() as tasks:
        for n in range(connections):
            tasks.create_task(one(n))
    burst.seconds = time.perf_counter() - began
    return burst


# ---------------------------------------------------------------- subjects


def tree_of(pid: int) -> list[int]:
    """A process and its children."""
    found = [pid]
    for at in found:
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{at}/task/{at}/children").read_text().split())
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its children so far."""
    ticks = 0
    for at in tree_of(pid):
        fields = Path(f"/proc/{at}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def cpu_behind(pid: int) -> float:
    """User and system time so far of a process's threads that put themselves behind the rest: the sealer."""
    ticks = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):  # it has ended
            fields = Path(f"/proc/{pid}/task/{thread}/stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[16]) > 0:  # nice
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def pss_mb(pid: int) -> float:
    """Memory of a process and its children, shared pages by share."""
    lines = [line for at in tree_of(pid) for line in Path(f"/proc/{at}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1e3


@contextlib.contextmanager
def undisturbed(subject: int, others: list[int], *, is_real_time: bool = True) -> Iterator[None]:
    """The subject has the last core for itself, the others the first; what else the machine does waits, if it may.

    is_real_time: how others are made to wait. It makes stalls of its own: all threads of the subject take turns of
    100 ms, those that had put themselves behind the rest as well, and none of them runs for 50 ms of a full second.
    """
    cores = sorted(os.sched_getaffinity(0))
    places = dict.fromkeys(tree_of(subject), cores[-1:]) | {pid: cores[:1] for pid in others if pid != subject}
    threads = [(int(t), where) for pid, where in places.items() for t in os.listdir(f"/proc/{pid}/task")]
    try:
        for thread, where in threads:
            with contextlib.suppress(OSError):  # it has ended; or priorities are not ours to give
                os.sched_setaffinity(thread, where)
                if is_real_time:
                    os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))
        yield
    finally:
        for thread, _ in threads:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
                os.sched_setaffinity(thread, cores)


class Subject:
    """Something that answers chat completions; a context manager."""

    has_sessions = True
    path = "/v1/chat/completions"
    helpers: list[int] = []  # processes that run beside it: the engine  # noqa: RUF012

    def __init__(
        self, name: str, command: list[str], *, url: str | None = None, env: dict[str, str] | None = None
    ) -> None:
        self.name, self._command, self.url, self._env = name, command, url or "", env

    def __enter__(self) -> "Subject":
        env = {**os.environ, **(self._env or {})}
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True, env=env)
        if not self.url:
            assert self._process.stdout is not None
            lines = iter(self._process.stdout.readline, "")
            self.url = next((line.strip() for line in lines if line.startswith("http://")), "")
            if not self.url:
                raise RuntimeError(f"{self.name} did not start")
        return self

    def __exit__(self, *what: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self, connections: int, *, is_real_time: bool = True, **how: Any) -> tuple[Burst, float]:
        """A burst of load, and the CPU seconds that it took. is_real_time: see `undisturbed`."""
        work = converse(self.url, connections, with_sessions=self.has_sessions, path=self.path, **how)
        with undisturbed(self.pid, [os.getpid(), *self.helpers], is_real_time=is_real_time):
            before = cpu_seconds(self.pid)
            burst = uvloop.run(work)
            return burst, cpu_seconds(self.pid) - before


class Nginx(Subject):
    """A plain reverse proxy of the same traffic. is_streamed: what comes goes on at once."""

    has_sessions = False

    def __init__(self, engine: str, folder: Path, *, is_streamed: bool = False) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        folder.mkdir()
        buffers = "proxy_buffering off;" if is_streamed else "proxy_buffers 16 16k; proxy_buffer_size 16k;"
        (folder / "nginx.conf").write_text(
            f"""daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
  uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e; client_body_buffer_size 256k; keepalive_requests 10000000;
  upstream engine {{ server {engine.removeprefix("http://")}; keepalive 128; keepalive_requests 10000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
      {buffers} }}
  }}
}}"""
        )
        super().__init__("nginx", ["nginx", "-c", f"{folder}/nginx.conf"], url=f"http://127.0.0.1:{port}")

    def __enter__(self) -> "Nginx":
        super().__enter__()
        deadline = time.perf_counter() + 5
        while time.perf_counter() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(self.url.rsplit(":", 1)[1]))):
                break
            time.sleep(0.02)
        return self


class Direct(Subject):
    """The engine, asked directly. A process that others started."""

    has_sessions = False

    def __init__(self, engine: Subject) -> None:
        self.name, self.url, self._process = "direct", engine.url, engine._process

    def __enter__(self) -> "Direct":
        return self

    def __exit__(self, *what: object) -> None: ...


# ---------------------------------------------------------------- is it true?


def check(book: Path, answers: Answers, engine: str, replies: list[tuple[str, str, str]]) -> None:
    """What clients got is in the book, token by token and logprob by logprob as the engine sent it. Raises."""
    from rollbook.store.directory import DirectoryLog
    from rollbook.store.events import InteractionRecorded, from_batch

    asked = {int(key): n for key, n in json.loads(urllib.request.urlopen(f"{engine}/asked").read())}
    paths: dict[str, np.ndarray[Any, Any]] = {}
    known: dict[str, tuple[str, str]] = {}
    roots = 0
    log = DirectoryLog(book)
    for batch in log.read():
        for event in from_batch(batch):
            fact = event.fact
            if not isinstance(fact, InteractionRecorded):
                continue
            assert event.interaction_id is not None
            assert event.prompt_ids is not None
            before = paths[fact.parent_id][: fact.shared] if fact.parent_id else np.empty(0, np.int32)
            prompt = np.concatenate((before, event.prompt_ids))
            n = len(prompt) % VARIANTS
            assert asked.get(xxh3_64_intdigest(",".join(map(str, prompt.tolist())).encode())) == len(prompt), (
                "the engine was asked something else"
            )
            assert np.array_equal(event.output_ids, answers.ids[n]), "other tokens than the engine sent"
            assert np.array_equal(event.logprobs, answers.logprobs[n]), "other logprobs than the engine sent"
            assert fact.edge in (None, "extends"), f"a turn was taken for {fact.edge}: {fact.cause}"
            roots += fact.edge is None
            paths[event.interaction_id] = np.concatenate((prompt, event.output_ids))
            known[event.interaction_id] = (event.episode_id or "", answers.texts[n])
    log.close()
    for session, interaction, text in replies:
        assert known.get(interaction) == (session, text), f"{interaction} is not in the book as the client got it"
    assert roots == len({session for session, _ in known.values()}), "a turn began a tree of its own"


# ---------------------------------------------------------------- families


def us(seconds: float, burst: Burst) -> float:
    return 1e6 * seconds / burst.n


def row(what: str, *figures: str) -> None:
    print("  ".join([f"{what:<34}", *figures, f"load {os.getloadavg()[0]:.1f}"]), flush=True)


def rotate(
    subjects: list[Subject], rounds: int, measure: Callable[[Subject], dict[str, float]]
) -> dict[str, dict[str, float]]:
    """Each subject's median figures, the subjects taking turns; with `x nginx`, the median of the rounds' ratios.

    Rounds in which nginx took more than half as much again as in its best are run again, twice at most.
    """
    taken: list[dict[str, dict[str, float]]] = []
    spare = 2
    while len(taken) < rounds:
        taken.append({subject.name: measure(subject) for subject in subjects})
        if "nginx" in taken[-1]:
            best = min(r["nginx"]["us"] for r in taken)
            good = [r for r in taken if r["nginx"]["us"] <= 1.5 * best]
            if len(good) < len(taken) and spare:
                spare -= len(taken) - len(good)
                taken = good
    medians = {
        name: {key: statistics.median(r[name][key] for r in taken) for key in taken[0][name]} for name in taken[0]
    }
    for anchor in ("nginx", "areal"):
        if anchor in medians:
            for name in medians:
                ratios = [r[name]["us"] / r[anchor]["us"] for r in taken]
                medians[name][f"x {anchor}"] = statistics.median(ratios)
    return medians


class Bench:
    """Everything that a family needs."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.folder = given, folder
        folder.mkdir(parents=True)
        self.answers = Answers(given.tokenizer)
        self._stack = contextlib.ExitStack()
        self._n = 0

    def role(self, name: str, *args: str) -> Subject:
        command = [sys.executable, __file__, "--tokenizer", self.given.tokenizer, "--role", name, *args]
        return Subject(name, command)

    def engine(self, pace_s: float = 0.0) -> Subject:
        return self.role("engine", "--pace", str(pace_s))

    def rollbook(self, engine: Subject) -> tuple[Subject, Path]:
        self._n += 1
        book = self.folder / f"book{self._n}"
        return self.role("rollbook", "--engine", engine.url, "--book", str(book)), book

    def whole(self, is_stream: bool = False, pace_s: float = 0.0) -> None:
        """P1 and P2 at 16 connections."""
        given = self.given
        with self.engine(pace_s) as engine, contextlib.ExitStack() as stack:
            Subject.helpers = [engine.pid]
            ours, book = self.rollbook(engine)
            subjects: list[Subject] = [stack.enter_context(ours)]
            if shutil.which("nginx") and not (is_stream or pace_s):
                subjects.insert(0, stack.enter_context(Nginx(engine.url, self.folder / f"nginx{self._n}")))
            if given.areal and not (is_stream or pace_s):
                command = [areal_python(given.areal), __file__, "--tokenizer", given.tokenizer, "--role", "areal"]
                quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
                subjects.append(stack.enter_context(Subject("areal", command, env=quiet)))
                subjects[-1].path = "/chat/completions"
            replies: list[tuple[str, str, str]] = []
            ours.load(given.connections, seconds=1.0, is_stream=is_stream)

            def measure(subject: Subject) -> dict[str, float]:
                memory = pss_mb(subject.pid)
                burst, cpu = subject.load(
                    given.connections, seconds=given.seconds, is_stream=is_stream, seed=len(replies) + 1
                )
                if subject is ours:
                    replies.extend(burst.replies)
                figures = {"us": us(cpu, burst), "rps": burst.n / burst.seconds, "p50": burst.at(0.5)}
                figures["p99"] = burst.at(0.99)
                if is_stream:
                    figures["first p50"] = 1e3 * statistics.median(burst.first)
                figures["MB/10k"] = 1e4 * (pss_mb(subject.pid) - memory) / burst.n
                return figures

            found = rotate(subjects, given.rounds, measure)
            stack.close()
            check(book, self.answers, engine.url, replies)
            for name, figures in found.items():
                row(f"{name} c={given.connections}", *(f"{k} {v:.4g}" for k, v in figures.items()))

    def latency(self) -> None:
        """P1b: one connection."""
        with self.engine() as engine, contextlib.ExitStack() as stack:
            Subject.helpers = [engine.pid]
            ours, book = self.rollbook(engine)
            subjects: list[Subject] = [Direct(engine), stack.enter_context(ours)]
            if shutil.which("nginx"):
                subjects.append(stack.enter_context(Nginx(engine.url, self.folder / "nginx-latency")))
            replies: list[tuple[str, str, str]] = []
            ours.load(1, seconds=1.0)

            def measure(subject: Subject) -> dict[str, float]:
                burst, cpu = subject.load(1, seconds=self.given.seconds, seed=len(replies) + 1)
                if subject is ours:
                    replies.extend(burst.replies)
                return {"us": us(cpu, burst), "p50": burst.at(0.5), "p90": burst.at(0.9), "p99": burst.at(0.99)}

            found = rotate(subjects, self.given.rounds, measure)
            stack.close()
            check(book, self.answers, engine.url, replies)
            direct = found["direct"]["p50"]
            for name, figures in found.items():
                row(
                    f"{name} c=1",
                    f"added p50 {figures['p50'] - direct:.3f} ms",
                    *(f"{k} {v:.4g}" for k, v in figures.items()),
                )

    def first_token(self) -> None:
        """P2first: when the first token of a stream is there, 1 connection, tokens 2 ms apart."""
        with self.engine(0.002) as engine, contextlib.ExitStack() as stack:
            Subject.helpers = [engine.pid]
            ours, book = self.rollbook(engine)
            stack.enter_context(ours)
            plain: Subject = engine  # beside which the engine is asked: nginx, if it is there
            if shutil.which("nginx"):
                plain = stack.enter_context(Nginx(engine.url, self.folder / "nginx-first", is_streamed=True))
            ours.load(1, seconds=1.0, is_stream=True)
            replies: list[tuple[str, str, str]] = []
            added: dict[str, list[float]] = {"rollbook": [], "nginx": []}
            for seed in range(self.given.rounds):
                burst, _ = ours.load(1, seconds=self.given.seconds, is_stream=True, seed=seed + 1)
                replies.extend(burst.replies)
                with undisturbed(plain.pid, [os.getpid(), engine.pid]):
                    direct, through = (
                        statistics.median(uvloop.run(generate_directly(url, n_prompt=1000, n=max(3, burst.n))))
                        for url in (engine.url, plain.url)
                    )
                added["rollbook"].append(1e3 * (statistics.median(burst.first) - direct))
                added["nginx"].append(1e3 * (through - direct))
            stack.close()
            check(book, self.answers, engine.url, replies)
            for name, found in added.items():
                if name != "nginx" or plain is not engine:
                    row(f"{name} c=1, first token", f"added p50 {statistics.median(found):.3f} ms")

    def growth(self) -> None:
        """P1c and P3: the book grows to --grow completions."""
        given = self.given
        with self.engine() as engine, contextlib.ExitStack() as stack:
            Subject.helpers = [engine.pid]
            ours, book = self.rollbook(engine)
            stack.enter_context(ours)
            nginx = None
            if shutil.which("nginx"):
                nginx = stack.enter_context(Nginx(engine.url, self.folder / "nginx-growth"))
            replies: list[tuple[str, str, str]] = []
            costs, memory, stalls, n = [], pss_mb(ours.pid), [], 0
            sealing: list[float] = []
            anchors: list[float] = []  # nginx's, beside each burst
            while n < given.grow:
                if nginx is not None:
                    burst, cpu = nginx.load(given.connections, calls=1500, is_real_time=False)
                    anchors.append(us(cpu, burst))
                behind = cpu_behind(ours.pid)
                calls = min(given.grow - n, 5000)
                burst, cpu = ours.load(given.connections, calls=calls, seed=n + 1, is_real_time=False)
                n += burst.n
                ended = sorted(burst.ended)
                stalls.append(1e3 * max(b - a for a, b in zip(ended, ended[1:], strict=False)))  # noqa: RUF007
                costs.append(us(cpu, burst))
                sealing.append(us(cpu_behind(ours.pid) - behind, burst))
                replies += burst.replies[::10]
                if len(costs) == 1:
                    memory = pss_mb(ours.pid)
            grown = pss_mb(ours.pid) - memory
            stack.close()
            size = sum(f.stat().st_size for f in book.rglob("*") if f.is_file())
            check(book, self.answers, engine.url, replies)
            first, last, sealed = map(statistics.fmean, (costs[:4], costs[-4:], sealing[-4:]))  # bursts differ by 10 %
            beside = [statistics.fmean(some) for some in (anchors[:4], anchors[-4:]) if some]
            ratios = [f"x nginx {cost / anchor:.1f}" for cost, anchor in zip((first, last), beside, strict=False)]
            row(
                f"rollbook c={given.connections}, {n:,} kept",
                f"us {first:.0f} at first, {last:.0f} at last, {sealed:.0f} of it sealing",
                *ratios,
                f"longest stall {max(stalls):.1f} ms (in the last {burst.n:,}: {stalls[-1]:.1f})",
                f"p99/p50 {burst.at(0.99) / burst.at(0.5):.2f}",
                f"MB/10k {1e4 * grown / max(1, n - 5000):.1f}",
                f"disk {size / n:.0f} B each",
            )

    def long_sessions(self) -> None:
        """P4: a turn around turn 200."""
        with self.engine() as engine, contextlib.ExitStack() as stack:
            Subject.helpers = [engine.pid]
            ours, book = self.rollbook(engine)
            stack.enter_context(ours)
            marks: dict[int, tuple[float, float]] = {}

            def at(turn: int) -> None:
                marks[turn] = (cpu_seconds(ours.pid), pss_mb(ours.pid))

            replies = uvloop.run(lockstep(ours.url, n_sessions=8, turns=210, at=at, marks=(20, 40, 100, 190, 210)))
            stack.close()
            check(book, self.answers, engine.url, replies)
            early = 1e6 * (marks[40][0] - marks[20][0]) / 160
            late = 1e6 * (marks[210][0] - marks[190][0]) / 160
            kept = 1e3 * (marks[210][1] - marks[100][1]) / (110 * 8)
            row("rollbook, turns 20-40, 190-210", f"us {early:.0f}, {late:.0f} each", f"kept {kept:.1f} KB a turn")

    def many_agents(self) -> None:
        """P5: interleaved sub-agents in one session."""
        for k in (50, 500, 2000):
            self._agents(k, max(2, 2000 // k))

    def _agents(self, n_agents: int, rounds: int) -> None:
        with self.engine() as engine, contextlib.ExitStack() as stack:
            Subject.helpers = [engine.pid]
            ours, _ = self.rollbook(engine)
            stack.enter_context(ours)
            marks: list[float] = []
            uvloop.run(fan_out(ours.url, n_agents, rounds, lambda: marks.append(cpu_seconds(ours.pid))))
            each = 1e6 * (marks[-1] - marks[0]) / (n_agents * rounds)
            row(f"rollbook, {n_agents} agents in a session", f"us {each:.0f} a call")


async def generate_directly(url: str, *, n_prompt: int, n: int) -> list[float]:
    """Seconds to the first token of streams that the engine is asked for without a proxy."""
    connection = await Connection.open(url)
    sampling = {"max_tokens": 512, "stream_interval": None}
    body = msgspec.json.encode({"token_ids": list(range(n_prompt)), "sampling_params": sampling, "stream": True})
    first: list[float] = []
    for _ in range(n):
        sent = time.perf_counter()
        await connection.post("/inference/v1/generate", "none", body)
        first.append(connection.first_at - sent)
    connection.close()
    return first


async def lockstep(
    url: str, *, n_sessions: int, turns: int, at: Callable[[int], None], marks: tuple[int, ...]
) -> list[tuple[str, str, str]]:
    """Sessions that take each turn together; `at` is told when these turns are over."""
    connections = [await Connection.open(url) for _ in range(n_sessions)]
    started = [json.loads(await c.post("/rl/start_session", ADMIN, b'{"task_id":"t"}')) for c in connections]
    told = [b'{"model":"m","messages":[' + _SYSTEM for _ in connections]
    replies: list[tuple[str, str, str]] = []

    async def turn(n: int, t: int) -> None:
        told[n] += b"," + question(np.random.default_rng((n, t)))
        data = await connections[n].post("/v1/chat/completions", started[n]["api_key"], told[n] + b"]}")
        interaction, text = read_answer(data, False)
        replies.append((started[n]["session_id"], interaction, text))
        told[n] += b',{"role":"assistant","content":%b}' % msgspec.json.encode(text)

    for t in range(1, turns + 1):
        await asyncio.gather(*(turn(n, t) for n in range(n_sessions)))
        if t in marks:
            at(t)
    return replies


async def fan_out(url: str, n_agents: int, rounds: int, mark: Callable[[], None]) -> None:
    """Agents of one session, each with a conversation of its own, take turns; `mark` before and after what counts."""
    connections = [await Connection.open(url) for _ in range(16)]
    key = json.loads(await connections[0].post("/rl/start_session", ADMIN, b'{"task_id":"t"}'))["api_key"]
    told = [
        b'{"model":"m","messages":[{"role":"system","content":"agent %d"},%b' % (n, question(np.random.default_rng(n)))
        for n in range(n_agents)
    ]

    async def work(connection: Connection, first: int) -> None:
        for n in range(first, n_agents, len(connections)):
            _, text = read_answer(await connection.post("/v1/chat/completions", key, told[n] + b"]}"), False)
            told[n] += b',{"role":"assistant","content":%b},%b' % (
                msgspec.json.encode(text),
                question(np.random.default_rng((n, len(told[n])))),
            )

    for t in range(rounds + 1):
        if t == 1:
            mark()
        await asyncio.gather(*(work(connection, n) for n, connection in enumerate(connections)))
    mark()


FAMILIES: dict[str, Callable[[Bench], None]] = {
    "P1": Bench.whole,
    "P1b": Bench.latency,
    "P2": lambda bench: bench.whole(is_stream=True),
    "P2paced": lambda bench: bench.whole(is_stream=True, pace_s=0.002),
    "P2first": Bench.first_token,
    "P1c": Bench.growth,
    "P4": Bench.long_sessions,
    "P5": Bench.many_agents,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="bytes", help="folder of a model")
    parser.add_argument("--only", default=",".join(FAMILIES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each burst of load")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--areal", help="folder of an environment with AReaL's proxy; made there if it is not")
    parser.add_argument("--grow", type=int, default=100_000, help="completions in P1c")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--book", help=argparse.SUPPRESS)
    parser.add_argument("--pace", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role == "engine":
        run_engine(given.tokenizer, given.pace)
    elif given.role == "areal":
        run_areal(given.tokenizer)
    elif given.role == "rollbook":
        run_rollbook(given.tokenizer, given.engine, given.book)
    else:
        gc.disable()  # nothing of the load generator's own may stop it
        folder = Path(tempfile.mkdtemp(prefix="rollbook-bench-"))
        try:
            for name in given.only.split(","):
                print(f"{name}: {FAMILIES[name].__doc__ or ''}".rstrip(": "), flush=True)
                FAMILIES[name](Bench(given, folder / name))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
