"""An engine that says what a script tells it to: for tests, demos of the plumbing, load and soak runs.

It keeps every promise of `engine.Engine` (streaming, abort, pause, versions) without a model. Logprobs are a fixed
function of the token and its place, so a test can say which logprob belongs to which token; they are recorded as
`invented`, and a learner takes its own instead.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType

import anyio
import numpy as np

from rollbook.store.events import Float32s, Int32s

from .engine import EMPTY_IDS, EMPTY_LOGPROBS, Generation, Health, LogprobsMode, Sampled, check_sampling, refuse_twice
from .errors import ContextOverflow, EngineFailed, EngineUnavailable

Script = Callable[[Generation], Sequence[int] | Awaitable[Sequence[int]]]
"""Token ids to answer with, end-of-turn token included if the answer is to finish with `stop`."""


def check_script(made: object, named: str) -> Script:
    """What a function that makes scripts returned, if it can be one. Raises ValueError with what was expected."""
    expected = f"expected {named} to take the tokenizer and return the script, a function of a Generation"
    if not callable(made):
        raise ValueError(f"{expected}; it returned {made!r:.80}, which is no function")
    try:
        signature = inspect.signature(made)
    except ValueError:  # built in
        return made
    try:
        signature.bind(None)
    except TypeError:
        raise ValueError(f"{expected}; it returned one that takes {signature}") from None
    return made


def scripted_logprob(token: int, index: int) -> float:
    """The logprob that a ScriptedEngine gives to `token` as the index-th of its answer."""
    return -float(np.float32(0.01 + ((token * 31 + index * 7) % 997) / 500))


def _logprobs(ids: Int32s) -> Float32s:
    """`scripted_logprob` of each token of an answer."""
    if len(ids) < 8:
        return np.asarray([scripted_logprob(token, i) for i, token in enumerate(ids.tolist())], np.float32)
    return -(0.01 + ((ids * np.int64(31) + np.arange(len(ids)) * 7) % 997) / 500).astype(np.float32)


def _ids_of(answer: object) -> Int32s:
    """Raises EngineFailed for what are no token ids."""
    given = np.asarray(answer) if not isinstance(answer, str) else np.empty((0, 0))
    if given.ndim != 1 or (len(given) and not np.issubdtype(given.dtype, np.integer)):
        raise EngineFailed(
            f"the script must return token ids, a list of ints, and returned {answer!r:.80}; "
            "write [*tokenizer.encode(text).tolist()]"
        )
    return given.astype(np.int32)


class ScriptedEngine:
    """See `engine.Engine`.

    script: what to answer. chunk_tokens: tokens per streamed piece. token_s: seconds each token takes.
    """

    logprobs_mode: LogprobsMode = "invented"

    def __init__(
        self,
        script: Script,
        *,
        chunk_tokens: int = 8,
        token_s: float = 0.0,
        version: int = 0,
        max_context: int = 1 << 20,
        vocab_size: int | None = None,
    ) -> None:
        self._script = script
        self._chunk_tokens = chunk_tokens
        self._token_s = token_s
        self._version = version
        self._max_context = max_context
        self._vocab_size = vocab_size
        self._running = 0
        self._paused: anyio.Event | None = None  # set at resume
        self._is_open = False

    async def __aenter__(self) -> "ScriptedEngine":
        refuse_twice(self._is_open)
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        await self.resume()

    async def generate(self, generation: Generation) -> AsyncIterator[Sampled]:
        if not self._is_open:
            raise EngineUnavailable("the scripted engine is not running; enter it with `async with` first")
        check_sampling(generation.sampling)
        room = self._max_context - len(generation.prompt_ids)
        if room < 1:
            raise ContextOverflow(
                f"the prompt has {len(generation.prompt_ids)} tokens, the context {self._max_context}; shorten it"
            )
        answer = self._script(generation)
        ids = _ids_of(await answer if inspect.isawaitable(answer) else answer)
        limit = min(generation.sampling.max_tokens or room, room)
        stops = set(generation.sampling.stop_token_ids)
        plain = ids.tolist()
        end = min((plain.index(token) + 1 for token in stops if token in plain), default=len(plain))
        finish = "stop" if end <= limit else "length"
        end = min(end, limit)
        logprobs = _logprobs(ids[:end])
        self._running += 1
        try:
            for start in range(0, end, self._chunk_tokens):
                piece = ids[start : min(start + self._chunk_tokens, end)]
                if self._token_s:
                    await anyio.sleep(self._token_s * len(piece))
                else:
                    await asyncio.sleep(0)  # others get their turn
                while self._paused is not None:
                    await self._paused.wait()
                if not self._is_open:
                    yield Sampled(ids=EMPTY_IDS, logprobs=EMPTY_LOGPROBS, version=self._version, finish_reason="abort")
                    return
                yield Sampled(
                    ids=piece,
                    logprobs=logprobs[start : start + len(piece)],
                    version=self._version,
                )
            yield Sampled(
                ids=EMPTY_IDS,
                logprobs=EMPTY_LOGPROBS,
                version=self._version,
                finish_reason="stop" if finish == "stop" else "length",
            )
        finally:
            self._running -= 1

    async def pause(self) -> None:
        if self._paused is None:
            self._paused = anyio.Event()

    async def resume(self) -> None:
        if self._paused is not None:
            self._paused.set()
            self._paused = None

    async def load_weights(self, path: str, version: int) -> None:
        self._version = version

    async def health(self) -> Health:
        return Health(
            is_ready=self._is_open,
            version=self._version,
            model="scripted",
            max_context=self._max_context,
            vocab_size=self._vocab_size,
            running=self._running,
            reason=None if self._is_open else "not started",
        )
