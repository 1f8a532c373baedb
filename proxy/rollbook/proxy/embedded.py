"""A transformers model inside this process, as an `engine.Engine`: continuous batching, prefix cache, live weights.

One thread owns the model. Between two steps it takes commands (a new request, an abort, other weights); a step is one
forward pass over the next token of every running request and a share of the prompts that are still being read, packed
without padding (`packed.py`).

On a CPU the requests of a step are dealt out to a few threads that run the model side by side, each without OpenMP:
its threads meet after every operation and wait by spinning, so that on a machine that is busy elsewhere two of them
were measured ten times slower than one.

A prompt asked for several times at once is computed once. Text seen before is found in the prefix tree. A request
that loses its keys and values, to other weights or to a lack of memory, is read again from its tokens: what was
sampled stays sampled, and its dice go on where they were.

The event loop hears from the thread once per step, whatever the number of requests.
"""

import asyncio
import itertools
import logging
import math
import os
import queue
import random
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import anyio
import msgspec
import numpy as np
import torch

from rollbook.store.events import Int32s

from .checkpoint import CANARY, Canary, compare_canaries, read_canaries
from .draw import Dice, draw
from .engine import (
    EMPTY_IDS,
    EMPTY_LOGPROBS,
    FinishReason,
    Generation,
    Health,
    LogprobsMode,
    Sampled,
    check_sampling,
    drawable,
    refuse_twice,
)
from .errors import BadRequest, ContextOverflow, EngineFailed, EngineUnavailable, ProxyError
from .guide import Guide, Guides
from .kv import PrefixTree, Rows
from .packed import NextTokens, PackedModel, Reading

T = TypeVar("T")
Answer = Sampled | Exception

log = logging.getLogger(__name__)

MIN_ROWS_PER_THREAD = 8
"""Below this a thread's share costs as much as the whole: the time goes into reading the weights."""

SMALLEST_ROW = 64
"""Capacities of rows are this times a power of two, so that a short request never pays for a long neighbour."""


class EmbeddedEngine:
    """See `engine.Engine`. Runs on asyncio.

    model_path: a folder in Hugging Face layout with safetensors. version: of the weights in it.
    device, dtype: as torch names them; "auto" is the GPU if there is one, and the dtype of the checkpoint.
    threads: CPU threads that share a step, None for as many as there are cores.
    max_running: requests sampled at once; others wait.
    step_tokens: prompt tokens read per step beside the sampling; more is faster to read and stutters more. None: 512
        on CPU, 8192 on a GPU.
    cache_bytes: for keys and values, running and remembered. None: 2 GiB on CPU, half of what is free on a GPU.
    prefix_cache: remember finished text.
    logprobs_mode: processed gives logprobs of the distribution that was drawn from, raw those of the model.
    seed: what requests without a seed of their own draw from, in the order in which they came; None: the system.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        version: int = 0,
        threads: int | None = None,
        max_running: int = 128,
        step_tokens: int | None = None,
        cache_bytes: int | None = None,
        prefix_cache: bool = True,
        logprobs_mode: LogprobsMode = "processed",
        seed: int | None = None,
    ) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.logprobs_mode: LogprobsMode = logprobs_mode
        self._path = Path(model_path)
        self._worker = _Worker(
            self._path,
            device=torch.device(device),
            dtype=dtype,
            version=version,
            threads=threads or _n_cores(),
            max_running=max_running,
            step_tokens=step_tokens or (512 if device == "cpu" else 8192),
            cache_bytes=cache_bytes,
            prefix_cache=prefix_cache,
            logprobs_mode=logprobs_mode,
        )
        self._seeds = random.Random(seed) if seed is not None else random.SystemRandom()
        self._thread: threading.Thread | None = None
        self._loading = anyio.Lock()

    async def __aenter__(self) -> "EmbeddedEngine":
        refuse_twice(self._thread is not None)
        if self._worker.is_closing:
            raise EngineUnavailable("this embedded engine was stopped; make a new one")
        loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = loop.create_future()
        self._thread = threading.Thread(target=self._worker.run, args=(loop, started), name="rollbook-engine")
        self._thread.daemon = True
        self._thread.start()
        try:
            await started
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def _stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._worker.commands.put(self._worker.close)
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(thread.join)
            self._worker.is_closing = True  # also of one that did not get as far as to take the command

    async def generate(self, generation: Generation) -> AsyncIterator[Sampled]:
        request = self._checked(generation)
        worker = self._worker
        if generation.form is not None:
            request.guide = await anyio.to_thread.run_sync(worker.begin_guide, generation, request.stops)
        worker.commands.put(lambda: worker.submit(request))
        is_done = False
        try:
            while not is_done:
                answer = await request.answers.get()
                is_done = isinstance(answer, Exception) or answer.finish_reason is not None
                if isinstance(answer, Exception):
                    raise answer
                yield answer
        finally:
            if not is_done:
                worker.commands.put(lambda: worker.abort(request))

    def _checked(self, generation: Generation) -> "_Request":
        if self._thread is None:
            raise EngineUnavailable("the embedded engine is not running; enter it with `async with` first")
        sampling, prompt = generation.sampling, np.ascontiguousarray(generation.prompt_ids, np.int32)
        check_sampling(sampling)
        worker = self._worker
        if len(prompt) == 0:
            raise BadRequest("the prompt has no tokens; at least one is needed to sample the next")
        room = worker.max_context - len(prompt)
        if room < 1:
            raise ContextOverflow(
                f"the prompt has {len(prompt)} tokens and the context is {worker.max_context}, output "
                "included; shorten it"
            )
        if prompt.min() < 0 or prompt.max() >= worker.vocab_size:
            worst = int(prompt.min()) if prompt.min() < 0 else int(prompt.max())
            raise BadRequest(f"token id {worst} is outside the model's vocabulary of {worker.vocab_size}")
        seed = sampling.seed if sampling.seed is not None else self._seeds.getrandbits(64)
        sampling = drawable(sampling, worker.vocab_size)
        output: list[int] = []
        return _Request(
            prompt=prompt,
            limit=min(sampling.max_tokens or room, room),
            stops=frozenset(sampling.stop_token_ids),
            output=output,
            dice=Dice(
                sampling=sampling if generation.form is None else msgspec.structs.replace(sampling, min_tokens=0),
                random=random.Random(seed),
                prompt_ids=prompt,
                output_ids=output,
            ),
        )

    async def pause(self) -> None:
        await self._call(self._worker.pause)

    async def resume(self) -> None:
        await self._call(self._worker.resume)

    async def load_weights(self, path: str, version: int) -> None:
        """See the seam. The files are read into memory beside the running model, then swapped in between two steps;
        running requests go on, their keys and values computed anew. Where the new weights do not say what the learner
        wrote beside them (canaries), the old ones are put back."""
        async with self._loading:
            worker = self._worker
            tensors, canaries = await anyio.to_thread.run_sync(worker.read_checkpoint, Path(path))
            await self._call(lambda: worker.swap(tensors, version, canaries))

    async def health(self) -> Health:
        worker = self._worker
        return Health(
            is_ready=self._thread is not None,
            version=worker.version,
            model=self._path.name,
            max_context=worker.max_context,
            vocab_size=worker.vocab_size or None,
            running=worker.n_running,
            waiting=len(worker.waiting),
            reason="not started" if self._thread is None else None,
        )

    async def _call(self, command: Callable[[], T]) -> T:
        """Run `command` in the thread between two steps and wait for it."""
        if self._thread is None:
            raise EngineUnavailable("the embedded engine is not running; enter it with `async with` first")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._worker.commands.put(lambda: _resolve(loop, done, command))
        return await done


def _resolve(loop: asyncio.AbstractEventLoop, done: "asyncio.Future[T]", command: Callable[[], T]) -> bool:
    """Run `command`, tell `done` in its loop, and say whether it went well."""

    def settle(result: T | None, error: Exception | None) -> None:
        if not done.done():  # whoever waited may have been cancelled
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

    try:
        result = command()
    except Exception as error:  # it belongs to whoever asked
        loop.call_soon_threadsafe(settle, None, error)
        return False
    loop.call_soon_threadsafe(settle, result, None)
    return True


# ---- in the thread ---------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class _Request:
    """One request in flight: waiting, in a prefill, or seated in a row."""

    prompt: Int32s
    limit: int
    stops: frozenset[int]
    output: list[int]
    dice: Dice
    guide: Guide | None = None
    lost: ProxyError | None = None  # why it alone cannot go on
    answers: "asyncio.Queue[Answer]" = field(default_factory=asyncio.Queue)
    number: int = 0
    prefill: "_Prefill | None" = None
    rows: "Rows[_Request] | None" = None
    slot: int = 0
    n_cached: int = 0  # of its tokens, those whose keys and values are in its slot

    def ids(self) -> Int32s:
        return np.concatenate([self.prompt, np.asarray(self.output, np.int32)])

    @property
    def last_id(self) -> int:
        return self.output[-1] if self.output else int(self.prompt[-1])


@dataclass(kw_only=True, eq=False)
class _Prefill:
    """A text being read, and who waits for it. kv: [2, L, H, len(ids), D]."""

    ids: Int32s
    prompt: bytes
    kv: torch.Tensor
    done: int
    requests: list[_Request]


class _Worker:
    """What the thread owns. Other threads only put commands, and read plain numbers for `health`."""

    def __init__(
        self,
        path: Path,
        *,
        device: torch.device,
        dtype: str,
        version: int,
        threads: int,
        max_running: int,
        step_tokens: int,
        cache_bytes: int | None,
        prefix_cache: bool,
        logprobs_mode: LogprobsMode,
    ) -> None:
        self.commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.version = version
        self.max_context = 0
        self.vocab_size = 0
        self.n_running = 0
        self.waiting: deque[_Request] = deque()
        self._path = path
        self._device = device
        self._dtype = dtype
        self._threads = threads
        self._max_running = max_running
        self._step_tokens = step_tokens
        self._cache_bytes = cache_bytes
        self._prefix_cache = prefix_cache
        self._mode: LogprobsMode = logprobs_mode
        self._rows: dict[int, Rows[_Request]] = {}  # by capacity
        self._prefills: dict[bytes, _Prefill] = {}  # by all of their ids, oldest first
        self._numbers = itertools.count()
        self._alive: dict[int, _Request] = {}  # by number: whoever still waits for an answer, wherever it is
        self._guides: Guides | None = None
        self._guides_lock = threading.Lock()
        self._news: list[tuple[asyncio.Queue[Answer], Answer]] = []
        self._is_paused = False
        self.is_closing = False

    # -- life

    def run(self, loop: asyncio.AbstractEventLoop, started: "asyncio.Future[None]") -> None:
        _one_thread_each()
        with (
            torch.inference_mode(),
            ThreadPoolExecutor(max(1, self._threads - 1), initializer=_one_thread_each) as pool,
        ):
            self._pool = pool
            if not _resolve(loop, started, self._load):
                return
            while not self.is_closing:
                try:
                    self._take_commands()
                    if self._has_work and not self._is_paused:
                        self._step()
                except Exception as error:  # the thread's outermost loop: whoever waits must hear of it
                    log.exception("the embedded engine failed in a step")
                    self._fail(f"the embedded engine failed in a step: {type(error).__name__}: {error}")
                self._report(loop)
            for request in self._alive.values():
                end = Sampled(ids=EMPTY_IDS, logprobs=EMPTY_LOGPROBS, version=self.version, finish_reason="abort")
                self._news.append((request.answers, end))
            self._forget_all()
            self._report(loop)
            del self._model, self._tree

    def _take_commands(self) -> None:
        """All that is there; at least one when there is nothing else to do."""
        try:
            command = self.commands.get(block=self._is_paused or not self._has_work)
            while True:
                command()
                command = self.commands.get_nowait()
        except queue.Empty:
            return

    def _report(self, loop: asyncio.AbstractEventLoop) -> None:
        self.n_running = self._seated + sum(len(prefill.requests) for prefill in self._prefills.values())
        if self._news:
            news, self._news = self._news, []
            loop.call_soon_threadsafe(_deliver, news)

    def close(self) -> None:
        self.is_closing = True

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    @property
    def _has_work(self) -> bool:
        return bool(self.waiting or self._prefills or self._seated)

    @property
    def _seated(self) -> int:
        return sum(len(rows.sequences) for rows in self._rows.values())

    # -- requests

    def begin_guide(self, generation: Generation, stops: frozenset[int]) -> Guide:
        """In any thread. Raises BadRequest."""
        with self._guides_lock:
            if self._guides is None:
                self._guides = Guides(self._path, self.vocab_size)
        assert generation.form is not None
        return self._guides.begin(generation.form, stops, generation.sampling.min_tokens)

    def submit(self, request: _Request) -> None:
        request.number = next(self._numbers)
        self._alive[request.number] = request
        self.waiting.append(request)

    def abort(self, request: _Request) -> None:
        if self._alive.pop(request.number, None) is None:
            return
        if request.rows is not None or request.prefill is not None:
            self._unseat(request)
        else:
            self.waiting.remove(request)

    def _unseat(self, request: _Request) -> None:
        """Take a request out of its row or prefill; its keys and values are lost."""
        if request.prefill is not None:
            request.prefill.requests.remove(request)
            if not request.prefill.requests:
                del self._prefills[request.prefill.ids.tobytes()]
        elif request.rows is not None:
            moved = request.rows.remove(request.slot)
            if moved is not None:
                moved.slot = request.slot
        request.prefill, request.rows, request.n_cached = None, None, 0

    def _running(self) -> list[_Request]:
        """Those in a row or a prefill, in the order in which they came."""
        running = [request for rows in self._rows.values() for request in rows.sequences]
        running += [request for prefill in self._prefills.values() for request in prefill.requests]
        return sorted(running, key=lambda request: request.number)

    def _fail(self, message: str) -> None:
        for request in self._alive.values():
            self._news.append((request.answers, EngineFailed(f"{message}; the request is lost, send it again")))
        self._forget_all()

    def _forget_all(self) -> None:
        """Nothing of what was computed is kept: after a failure it is unknown, and a NaN spreads even from behind a
        mask."""
        self._alive.clear()
        self.waiting.clear()
        self._prefills.clear()
        self._rows.clear()
        self._tree.clear()

    # -- a step

    def _step(self) -> None:
        """Sample the next token of each seated request, and read on in the prompts."""
        self._admit()
        self._grow()
        parts = self._seated_parts()
        n_next = sum(len(part.requests) for part in parts)
        left = max(self._step_tokens - n_next, self._step_tokens // 8)
        finished: list[_Prefill] = []
        for prefill in self._prefills.values():
            first, end = prefill.done, min(prefill.done + left, len(prefill.ids))
            if first == end:
                break
            left -= end - first
            part = Reading(prefill.ids, prefill.kv, first, end, self._model.shape)
            prefill.done = end
            if end < len(prefill.ids):
                parts.append(_Part(part, []))
            else:
                finished.append(prefill)
                parts.append(_Part(part, [*prefill.requests]))
        if not parts:
            return
        drawn = self._draw_all(parts)
        for rows in self._rows.values():
            for request in rows.sequences:
                request.n_cached += 1
        for prefill in finished:
            del self._prefills[prefill.ids.tobytes()]
            self._remember(prefill.ids, prefill.kv)
        for request, token, logprob in drawn:
            self._answer(request, token, logprob)
        for prefill in finished:
            for request in prefill.requests:
                request.prefill = None
                if request.number in self._alive and not self._seat(request, [prefill.kv]):
                    self.waiting.appendleft(request)

    def _seated_parts(self) -> "list[_Part]":
        """The seated requests, each block of rows cut into one part for each thread unless it is small."""
        parts = []
        for rows in self._rows.values():
            requests = rows.sequences
            if not requests:
                continue
            n_parts = max(1, min(self._threads, len(requests) // MIN_ROWS_PER_THREAD))
            size = -(-len(requests) // n_parts)
            for first in range(0, len(requests), size):
                here = requests[first : first + size]
                ids = np.array([request.last_id for request in here], np.int32)
                positions = np.array([request.n_cached for request in here], np.int32)
                parts.append(_Part(NextTokens(rows, first, ids, positions, self._model.shape), here))
        return parts

    def _draw_all(self, parts: "list[_Part]") -> list[tuple[_Request, int, float]]:
        """One pass over the parts, spread over the threads by their tokens."""
        shares: list[list[_Part]] = [[] for _ in range(min(self._threads, len(parts)))]
        loads = [0] * len(shares)
        for part in sorted(parts, key=lambda part: -len(part.packed.ids)):
            lightest = loads.index(min(loads))
            shares[lightest].append(part)
            loads[lightest] += len(part.packed.ids)
        others = [self._pool.submit(self._draw, share) for share in shares[1:]]
        try:
            drawn = self._draw(shares[0])
        finally:
            wait(others)  # whatever went wrong, nobody may be left at work on rows that are about to change
        return drawn + [one for other in others for one in other.result()]

    @torch.inference_mode()
    def _draw(self, parts: "list[_Part]") -> list[tuple[_Request, int, float]]:
        logits_KV = self._model.logits([part.packed for part in parts])
        requests: list[_Request] = []
        places: list[int] = []  # a place may serve several requests: a prompt asked for several times
        place = 0
        for part in parts:
            requests += part.requests
            is_shared = isinstance(part.packed, Reading)
            places += [place] * len(part.requests) if is_shared else range(place, place + len(part.requests))
            place += len(part.packed.keep)
        if not requests:
            return []
        if len(places) != len(logits_KV):
            logits_KV = logits_KV[torch.tensor(places, device=logits_KV.device)]
        for request in requests:
            if request.guide is not None:
                try:
                    request.dice.allowed = request.guide.allowed()
                except BadRequest as error:
                    request.dice.allowed, request.lost = None, error
        tokens, logprobs = draw(logits_KV, [request.dice for request in requests], self._mode)
        for request, logprob in zip(requests, logprobs, strict=True):
            if request.dice.leaves_none:
                request.lost = request.lost or BadRequest(
                    "the settings of this request leave no token to draw; look at min_tokens with stop_token_ids, at "
                    "the penalties and at the form of the answer"
                )
            elif not math.isfinite(logprob):
                raise ArithmeticError("the model's logits are not finite; look at the weights that were loaded last")
        return list(zip(requests, tokens, logprobs, strict=True))

    def _answer(self, request: _Request, token: int, logprob: float) -> None:
        if request.lost is not None:
            self._news.append((request.answers, request.lost))
            self.abort(request)
            return
        request.output.append(token)
        if request.guide is not None:
            request.guide.take(token)
        reason: FinishReason | None = None
        if token in request.stops or (request.guide is not None and request.guide.is_over):
            reason = "stop"
        elif len(request.output) == request.limit:
            reason = "length"
        ids, logprobs = np.array([token], np.int32), np.array([logprob], np.float32)
        piece = Sampled(ids=ids, logprobs=logprobs, version=self.version, finish_reason=reason)
        self._news.append((request.answers, piece))
        if reason is not None:
            del self._alive[request.number]
            if request.rows is not None:
                self._remember(request.ids()[: request.n_cached], request.rows.slot(request.slot))
                self._unseat(request)

    # -- memory

    def _admit(self) -> None:
        """Let waiting requests in, in order, as far as room and `max_running` go."""
        later: list[_Request] = []
        room = self._max_running - len(self._running())
        prompts = {prefill.prompt for prefill in self._prefills.values()}
        while self.waiting and room > 0:
            request = self.waiting.popleft()
            ids = request.ids()
            same = self._prefills.get(ids.tobytes())
            if same is not None:
                same.requests.append(request)
                request.prefill = same
            elif self._prefix_cache and request.output and request.prompt.tobytes() in prompts:
                # Its prompt is being read for a sibling: one step later it is in the tree.
                later.append(request)
                continue
            elif self._begin(request, ids):
                if request.prefill is not None:
                    prompts.add(request.prefill.prompt)
            else:
                self.waiting.appendleft(request)
                break
            room -= 1
        self.waiting.extendleft(reversed(later))

    def _begin(self, request: _Request, ids: Int32s) -> bool:
        """Seat a request whose text is known but for the last token, else start to read it."""
        pieces = self._tree.match(ids[:-1]) if self._prefix_cache else []
        known = sum(piece.shape[3] for piece in pieces)
        if known == len(ids) - 1 and known > 0:
            return self._seat(request, pieces)
        if not self._make_room(len(ids) + _capacity(len(ids) + 1, self.max_context)):
            return False
        prefill = _Prefill(
            ids=ids,
            prompt=request.prompt.tobytes(),
            kv=self._model.shape.piece(len(ids)),
            done=known,
            requests=[request],
        )
        _copy(pieces, prefill.kv)
        self._prefills[ids.tobytes()] = prefill
        request.prefill = prefill
        return True

    def _seat(self, request: _Request, pieces: list[torch.Tensor]) -> bool:
        """Put a request with these keys and values into a row; False if there is no room."""
        known = sum(piece.shape[3] for piece in pieces)
        capacity = _capacity(known + 1, self.max_context)
        rows = self._rows.setdefault(capacity, Rows(self._model.shape, capacity))
        wanted = rows.wanted_slots()
        if wanted > rows.n_slots:
            if not self._make_room((wanted - rows.n_slots) * capacity):
                wanted = rows.n_slots + 1
                if not self._make_room(capacity):
                    return False
            rows.resize(wanted)
        slot = rows.add(request)
        _copy(pieces, rows.slot(slot))
        request.rows, request.slot, request.n_cached = rows, slot, known
        return True

    def _grow(self) -> None:
        """Move requests that filled their slot to a larger one; where there is none, the youngest give way."""
        full = [
            request for rows in self._rows.values() for request in rows.sequences if request.n_cached == rows.capacity
        ]
        for request in full:
            if request.rows is None:
                continue  # it gave way to an older one
            piece = request.rows.slot(request.slot)[..., : request.n_cached, :].clone()
            self._unseat(request)
            while not self._seat(request, [piece]):
                others = [other for rows in self._rows.values() for other in rows.sequences]
                youngest = max(others, key=lambda other: other.number, default=None)
                if youngest is None or youngest.number < request.number:
                    self.waiting.appendleft(request)
                    break
                self._unseat(youngest)
                self.waiting.appendleft(youngest)

    def _used_tokens(self) -> int:
        rows = sum(rows.n_slots * rows.capacity for rows in self._rows.values())
        return rows + sum(len(prefill.ids) for prefill in self._prefills.values())

    def _make_room(self, n_tokens: int) -> bool:
        """Forget remembered text, then give back empty rows, until n_tokens more fit."""
        used = self._used_tokens()
        if used + n_tokens > self._budget_tokens:
            for rows in self._rows.values():
                if not rows.sequences:
                    rows.resize(0)
            used = self._used_tokens()
        if used + n_tokens > self._budget_tokens:
            return False
        self._tree.shrink(self._budget_tokens - used - n_tokens)
        return True

    def _remember(self, ids: Int32s, kv: torch.Tensor) -> None:
        if self._prefix_cache:
            self._tree.insert(ids, kv)
            self._tree.shrink(max(0, self._budget_tokens - self._used_tokens()))

    # -- weights

    def _load(self) -> None:
        model = self._model = PackedModel(self._path, device=self._device, dtype=self._dtype)
        budget = self._cache_bytes
        if budget is None:
            budget = 2 << 30 if self._device.type == "cpu" else torch.cuda.mem_get_info(self._device)[0] // 2
        self._budget_tokens = budget // model.shape.token_bytes
        # A request that fills the context needs its last slot, the one before it and its prefill, at the worst.
        self.max_context = min(model.context, self._budget_tokens // 3)
        if self.max_context < SMALLEST_ROW:
            needed = 3 * SMALLEST_ROW * model.shape.token_bytes
            raise EngineUnavailable(f"cache_bytes={budget} is too little for this model: give at least {needed}")
        self.vocab_size = model.vocab_size
        self._tree = PrefixTree(model.shape)

    def read_checkpoint(self, path: Path) -> tuple[dict[str, torch.Tensor], list[Canary]]:
        """In any thread. Raises EngineFailed."""
        tensors, canaries = self._model.read_checkpoint(path), read_canaries(path)
        for canary in canaries:
            if not canary.prompt_ids or not 0 <= min(canary.prompt_ids) <= max(canary.prompt_ids) < self.vocab_size:
                raise EngineFailed(f"could not read {path / CANARY}: {canary.prompt_ids} is no prompt of this model")
        return tensors, canaries

    def swap(self, tensors: dict[str, torch.Tensor], version: int, canaries: list[Canary]) -> None:
        """New weights for everybody: who is running is read again, its tokens kept. Raises EngineFailed."""
        self._model.swap(tensors, keep=bool(canaries))
        if canaries:
            try:
                compare_canaries(canaries, self._model.likeliest([c.prompt_ids for c in canaries]), version)
            except EngineFailed as error:
                self._model.swap(tensors)
                raise EngineFailed(f"{error}; the old weights answer") from error
        self.version = version
        running = self._running()
        for request in running:
            self._unseat(request)
        self.waiting.extendleft(reversed(running))
        self._tree.clear()


@dataclass(frozen=True)
class _Part:
    """Packed tokens, and the requests that draw from their logits."""

    packed: NextTokens | Reading
    requests: list[_Request]


def _deliver(news: "list[tuple[asyncio.Queue[Answer], Answer]]") -> None:
    for answers, answer in news:
        answers.put_nowait(answer)


def _one_thread_each() -> None:
    """Threads of ours never wait for OpenMP's."""
    torch.set_num_threads(1)


def _n_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _capacity(n_tokens: int, most: int) -> int:
    """The smallest capacity of a row for n_tokens."""
    capacity = SMALLEST_ROW
    while capacity < n_tokens:
        capacity *= 2
    return min(capacity, most)


def _copy(pieces: Iterable[torch.Tensor], kv: torch.Tensor) -> None:
    """Lay pieces [2, L, H, t, D] one after the other into kv."""
    done = 0
    for piece in pieces:
        kv[..., done : done + piece.shape[3], :] = piece
        done += piece.shape[3]
