"""Several engines that serve the same policy, as one `engine.Engine`.

A request goes where the longest beginning of its prompt was seen last, since that engine has it cached, unless that
engine is much busier than another. One that fails is left out until it is well again, and what it was answering goes on
elsewhere from the tokens it has. One that comes back gets the weights of the others before it gets a request.

New weights go to one engine after the other (`rolling`: the others go on sampling the old version meanwhile) or to all
while none samples (`barrier`). Either way each token carries the version of the engine that sampled it, and the
versions of one answer only rise.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

import anyio
import msgspec
import numpy as np
import xxhash

from rollbook.store.events import Int32s

from .engine import EMPTY_IDS, EMPTY_LOGPROBS, Engine, Generation, Health, LogprobsMode, Sampled, refuse_twice
from .errors import EngineFailed, EngineUnavailable, ProxyError

Update: TypeAlias = Literal["rolling", "barrier"]

LOOK_S = 2.0
"""How often engines are asked how they are."""

_BLOCKS_KEPT = 1 << 17
_FIRST_BLOCK, _LAST_BLOCK = 32, 512
_SLACK = 4
"""So many requests more than the idlest, or half as many again, and a prefix is not worth the wait."""


class _Replica:
    def __init__(self, engine: Engine, index: int) -> None:
        self.engine = engine
        self.index = index
        self.version = 0
        self.running = 0  # requests of ours
        self.is_leaving = False  # drained: gets no new ones
        self.why_down: str | None = None


def beginnings(prompt_ids: Int32s) -> list[int]:
    """A hash of each beginning of a prompt, of 32, 64, ... 512, 1024, 1536, ... tokens: equal for equal beginnings."""
    hashes, seed, start, size = [], 0, 0, _FIRST_BLOCK
    ids = np.ascontiguousarray(prompt_ids, np.int32)
    while start + size <= len(ids):
        seed = xxhash.xxh3_64_intdigest(ids[start : start + size].data, seed)
        hashes.append(seed)
        start += size
        size = min(start, _LAST_BLOCK)
    return hashes


class Replicas:
    """See `engine.Engine`. update: how new weights come in. drain_s: how long `rolling` waits for an engine's answers
    to end before it gets them; 0 changes weights between two tokens."""

    def __init__(
        self, engines: Sequence[Engine], *, update: Update = "rolling", drain_s: float = 0.0, look_s: float = LOOK_S
    ) -> None:
        if not engines:
            raise ValueError("expected at least one engine, got none")
        self.logprobs_mode: LogprobsMode = engines[0].logprobs_mode
        self._replicas = [_Replica(engine, i) for i, engine in enumerate(engines)]
        self._update: Update = update
        self._drain_s = drain_s
        self._look_s = look_s
        self._homes: OrderedDict[int, int] = OrderedDict()  # hash of a beginning -> index of who had it last
        self._policy: tuple[str, int] | None = None
        self._changing = asyncio.Lock()  # held by who changes weights
        self._is_paused = False
        self._is_open = False
        self._stack = AsyncExitStack()
        self._looking: asyncio.Task[None] | None = None

    # -- being there

    async def __aenter__(self) -> Self:
        refuse_twice(self._is_open)
        async with AsyncExitStack() as stack:

            async def enter(replica: _Replica) -> None:
                await stack.enter_async_context(replica.engine)  # type: ignore[arg-type]

            # Side by side: a server takes minutes. Only those that were entered are left: one may run for others.
            started = await asyncio.gather(*map(enter, self._replicas), return_exceptions=True)
            for outcome in started:
                if isinstance(outcome, BaseException):
                    raise outcome
            for replica in self._replicas:
                replica.version = (await replica.engine.health()).version
            modes = {replica.engine.logprobs_mode for replica in self._replicas}
            if len(modes) > 1:
                raise EngineFailed("some engines give raw logprobs and some processed ones; start them alike")
            self.logprobs_mode = self._replicas[0].engine.logprobs_mode
            self._is_open = True
            self._stack = stack.pop_all()
        self._looking = asyncio.create_task(self._keep_looking())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        await self._stack.__aexit__(None, None, None)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            for replica in self._replicas:
                await self._look(replica)

    async def _look(self, replica: _Replica) -> None:
        """Whether one that is down is well again, and one that is up still is."""
        try:
            health = await replica.engine.health()
            if not health.is_ready:
                replica.why_down = health.reason or "it is not ready"
                return
            async with self._changing:
                health = await replica.engine.health()  # while we waited it may have got new weights
                if self._policy is not None and health.version != self._policy[1]:
                    await replica.engine.load_weights(*self._policy)
                    health = await replica.engine.health()
                if replica.why_down is not None and self._is_paused:
                    await replica.engine.pause()
            replica.version, replica.why_down = health.version, None
        except ProxyError as error:
            replica.why_down = str(error)

    # -- where a request goes

    def _choose(self, prompt_ids: Int32s, at_least: int, without: set[int]) -> _Replica:
        """Raises EngineUnavailable where none can take it."""
        can = [r for r in self._replicas if r.why_down is None and r.version >= at_least and r.index not in without]
        ready = [r for r in can if not r.is_leaving] or can
        if not ready:
            reasons = {f"{r.index}: {r.why_down or f'has version {r.version}'}" for r in self._replicas}
            raise EngineUnavailable(f"no engine can answer ({'; '.join(sorted(reasons))})", retry_after_s=self._look_s)
        hashes = beginnings(prompt_ids)
        idlest = min(ready, key=lambda r: r.running)
        chosen = idlest
        for key in reversed(hashes):
            home = self._homes.get(key)
            found = next((r for r in ready if r.index == home), None)
            if found is not None:
                if found.running <= idlest.running + max(_SLACK, idlest.running // 2):
                    chosen = found
                break
        for key in hashes:
            self._homes[key] = chosen.index
            self._homes.move_to_end(key)
        while len(self._homes) > _BLOCKS_KEPT:
            self._homes.popitem(last=False)
        return chosen

    async def generate(self, generation: Generation) -> AsyncIterator[Sampled]:
        """See the seam."""
        ids, more = np.asarray(generation.prompt_ids, np.int32), list[Int32s]()
        n_prompt, version, tried = len(ids), 0, set[int]()
        while True:
            if not self._is_open:
                raise EngineUnavailable("the engines are not running; enter them with `async with` first")
            replica = self._choose(ids, version, tried)
            replica.running += 1
            try:
                rest = self._rest(generation, ids, n_prompt)
                async with aclosing(replica.engine.generate(rest)) as pieces:  # type: ignore[type-var]
                    async for piece in pieces:
                        if piece.finish_reason == "abort" and self._is_open:
                            raise EngineUnavailable("the engine gave the answer up")
                        version = max(version, piece.version)
                        if len(piece.ids):
                            more.append(piece.ids)
                        if piece.n_sampled is not None and len(rest.prompt_ids) > n_prompt:
                            piece = msgspec.structs.replace(
                                piece, n_sampled=piece.n_sampled + len(rest.prompt_ids) - n_prompt
                            )
                        yield piece
                        if piece.finish_reason is not None:
                            return
            except EngineUnavailable as error:
                if not self._is_open:
                    raise
                replica.why_down = str(error)
                tried.add(replica.index)
                ids, more = np.concatenate([ids, *more]), []
                n = len(ids) - n_prompt
                sampling = generation.sampling
                if n and generation.form is not None:
                    raise  # a form is kept from its first token on, by one engine
                if n and int(ids[-1]) in sampling.stop_token_ids:
                    yield Sampled(ids=EMPTY_IDS, logprobs=EMPTY_LOGPROBS, version=version, finish_reason="stop")
                    return
                if n and n == sampling.max_tokens:
                    yield Sampled(ids=EMPTY_IDS, logprobs=EMPTY_LOGPROBS, version=version, finish_reason="length")
                    return
            finally:
                replica.running -= 1

    def _rest(self, generation: Generation, ids: Int32s, n_prompt: int) -> Generation:
        """What is still to be sampled of an answer that another engine began."""
        n = len(ids) - n_prompt
        if not n:
            return generation
        sampling = generation.sampling
        most = None if sampling.max_tokens is None else sampling.max_tokens - n
        return Generation(
            request_id=f"{generation.request_id}-{n}",
            prompt_ids=ids,
            sampling=msgspec.structs.replace(
                sampling, max_tokens=most, min_tokens=max(0, min(sampling.min_tokens - n, most or 1 << 30))
            ),
        )

    # -- pausing and weights

    async def pause(self) -> None:
        async with self._changing:
            self._is_paused = True
            await self._each("pause")

    async def resume(self) -> None:
        async with self._changing:
            self._is_paused = False
            await self._each("resume")

    async def _each(self, what: Literal["pause", "resume", "load_weights"], *arguments: Any) -> list[ProxyError]:
        """Of all that are up, at once. Who fails is down from then on; returns why."""
        up = [replica for replica in self._replicas if replica.why_down is None]
        outcomes = await asyncio.gather(
            *(getattr(replica.engine, what)(*arguments) for replica in up), return_exceptions=True
        )
        failures: list[ProxyError] = []
        for replica, outcome in zip(up, outcomes, strict=True):
            if isinstance(outcome, ProxyError):
                replica.why_down = str(outcome)
                failures.append(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            elif what == "load_weights":
                replica.version = arguments[1]
        return failures

    async def load_weights(self, path: str, version: int) -> None:
        """See the seam. Raises what an engine raised if none took them; who alone did not is down from then on."""
        async with self._changing:
            before = {replica.index for replica in self._replicas if replica.why_down is None}
            if self._update == "barrier":
                failures = await self._load_at_once(path, version)
            else:
                failures = await self._load_in_turn(path, version)
            if failures and len(failures) == len(before):
                for replica in self._replicas:
                    if replica.index in before and isinstance(failures[0], EngineFailed):
                        replica.why_down = None  # they refused, and are as they were
                raise failures[0]
            self._policy = (path, version)

    async def _load_at_once(self, path: str, version: int) -> list[ProxyError]:
        if self._is_paused:
            return await self._each("load_weights", path, version)
        await self._each("pause")
        try:
            return await self._each("load_weights", path, version)
        finally:
            await self._each_resumes()

    async def _each_resumes(self) -> None:
        """Also those that refused: they were paused."""
        for replica in self._replicas:
            try:
                await replica.engine.resume()
            except ProxyError as error:
                replica.why_down = str(error)

    async def _load_in_turn(self, path: str, version: int) -> list[ProxyError]:
        failures = []
        for replica in self._replicas:
            if replica.why_down is not None:
                continue
            try:
                await self.drain(replica.index, self._drain_s)
                await replica.engine.load_weights(path, version)
                replica.version = version
            except ProxyError as error:
                replica.why_down = str(error)
                failures.append(error)
            finally:
                self.admit(replica.index)
        return failures

    async def drain(self, index: int, seconds: float) -> bool:
        """No new requests to an engine while others can take them; returns when it has none, or after `seconds`."""
        replica = self._replicas[index]
        replica.is_leaving = True
        with anyio.move_on_after(seconds):
            while replica.running:  # noqa: ASYNC110 - requests end in many places
                await anyio.sleep(0.01)
        return not replica.running

    def admit(self, index: int) -> None:
        """Requests to an engine again."""
        self._replicas[index].is_leaving = False

    async def health(self) -> Health:
        """Of all. The version is one that all have which are up; a context, what each of them takes."""
        healths = [await replica.engine.health() for replica in self._replicas]
        up = [h for h, r in zip(healths, self._replicas, strict=True) if h.is_ready and r.why_down is None]
        down = [
            f"{r.index}: {r.why_down or h.reason}" for h, r in zip(healths, self._replicas, strict=True) if h not in up
        ]
        known = up or healths
        return Health(
            is_ready=bool(up),
            version=min(h.version for h in known),
            model=healths[0].model,
            max_context=min(h.max_context for h in known),
            vocab_size=healths[0].vocab_size,
            running=sum(h.running for h in healths),
            waiting=sum(h.waiting for h in healths),
            reason=f"{len(down)} of {len(healths)} engines are down ({'; '.join(down)})" if down else None,
        )
