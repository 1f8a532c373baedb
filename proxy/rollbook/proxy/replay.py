"""An engine that answers from the record: the tokens, logprobs and versions of model calls that a book holds.

A call is answered if its prompt is, token for token, one that was recorded; calls with equal prompts are answered in
the order in which they were recorded. Anything else is a divergence and is refused with both prompts, since an agent,
a parser or a template that asks differently is what a playback is meant to find. No model, no weights.
"""

from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from types import TracebackType

import anyio.lowlevel
import msgspec

from rollbook.store.episodes import Interaction
from rollbook.store.events import Float32s, Int32s
from rollbook.store.tree import shared_prefix

from .engine import EMPTY_IDS, EMPTY_LOGPROBS, FinishReason, Generation, Health, LogprobsMode, Sampled, refuse_twice
from .errors import BadRequest, EngineUnavailable

_SHOWN = 200
"""Characters of each prompt that a divergence shows, around the place where they part."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """One model call as it was: int32 [T] prompt and [n] output, float32 [n] logprobs, int32 [n] versions."""

    interaction_id: str
    prompt_ids: Int32s
    output_ids: Int32s
    logprobs: Float32s
    versions: Int32s
    finish_reason: FinishReason = "stop"
    logprobs_mode: LogprobsMode = "processed"


def recorded(one: Interaction) -> Recorded:
    """What a replay engine answers with, of a book's interaction."""
    return Recorded(
        interaction_id=one.interaction_id,
        prompt_ids=one.prompt_ids,
        output_ids=one.output_ids,
        logprobs=one.logprobs,
        versions=one.versions,
        finish_reason="length" if one.row["finish_reason"] == "length" else "stop",
        logprobs_mode=one.row["logprobs_mode"],
    )


class ReplayEngine:
    """See `engine.Engine`. decode: ids to text, for what a divergence shows."""

    def __init__(
        self, record: Iterable[Recorded], *, decode: Callable[[Int32s], str], logprobs_mode: LogprobsMode = "processed"
    ) -> None:
        self.logprobs_mode: LogprobsMode = logprobs_mode
        self._record = list(record)
        self._waiting: dict[bytes, deque[Recorded]] = defaultdict(deque)
        for one in self._record:
            self._waiting[one.prompt_ids.tobytes()].append(one)
        self._decode = decode
        self._is_open = False
        self._running = 0
        self.divergence: str | None = None
        """What was asked that the record does not answer, the first time it happened."""

    @property
    def n_left(self) -> int:
        """Recorded calls that nobody has asked for yet."""
        return sum(len(queue) for queue in self._waiting.values())

    async def __aenter__(self) -> "ReplayEngine":
        refuse_twice(self._is_open)
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False

    async def generate(self, generation: Generation) -> AsyncIterator[Sampled]:
        if not self._is_open:
            raise EngineUnavailable("the replay engine is not running; enter it with `async with` first")
        one = self.take(generation.prompt_ids)
        if one is None:
            raise BadRequest(self.diverge(generation.prompt_ids))
        async with aclosing(self.play(one)) as sampled:  # type: ignore[type-var]
            async for some in sampled:
                yield some

    def take(self, prompt: Int32s) -> Recorded | None:
        """The next call with this prompt that was recorded and not played yet."""
        queue = self._waiting.get(prompt.tobytes())
        return queue.popleft() if queue else None

    def diverge(self, prompt: Int32s) -> str:
        """Say what was asked that the record does not answer."""
        message = self._divergence(prompt)
        self.divergence = self.divergence or message
        return message

    async def play(self, one: Recorded) -> AsyncIterator[Sampled]:
        """An answer as it was sampled, in one piece per version."""
        self._running += 1
        try:
            await anyio.lowlevel.checkpoint()
            start = 0
            for i in range(1, len(one.output_ids) + 1):
                if i == len(one.output_ids) or one.versions[i] != one.versions[start]:
                    yield Sampled(
                        ids=one.output_ids[start:i], logprobs=one.logprobs[start:i], version=int(one.versions[start])
                    )
                    start = i
            version = int(one.versions[-1]) if len(one.versions) else 0
            yield Sampled(ids=EMPTY_IDS, logprobs=EMPTY_LOGPROBS, version=version, finish_reason=one.finish_reason)
        finally:
            self._running -= 1

    def _divergence(self, prompt: Int32s) -> str:
        if any(len(one.prompt_ids) == len(prompt) and (one.prompt_ids == prompt).all() for one in self._record):
            return "replay diverged: a recorded call was made once more than it was recorded"
        if not self._record:
            return "replay diverged: the record has no model calls"
        nearest = max(self._record, key=lambda one: shared_prefix(one.prompt_ids, prompt))
        at = shared_prefix(nearest.prompt_ids, prompt)
        return (
            f"replay diverged after {at} tokens of a prompt of {len(prompt)}. Asked: ...{self._around(prompt, at)!r}; "
            f"recorded in {nearest.interaction_id}: ...{self._around(nearest.prompt_ids, at)!r}"
        )

    def _around(self, ids: Int32s, at: int) -> str:
        before = self._decode(ids[max(0, at - 20) : at])[-_SHOWN // 4 :]
        return before + " >>> " + self._decode(ids[at : at + 100])[:_SHOWN]

    async def pause(self) -> None:
        """Nothing is sampled, so nothing stops."""

    async def resume(self) -> None:
        """See pause."""

    async def load_weights(self, path: str, version: int) -> None:
        """Refused: a record has the versions that it has."""
        raise BadRequest("a replay has no weights to load; it answers with the versions that were recorded")

    async def health(self) -> Health:
        return Health(
            is_ready=self._is_open,
            version=max((int(one.versions.max(initial=0)) for one in self._record), default=0),
            model="replay",
            max_context=1 << 20,
            running=self._running,
            reason=None if self._is_open else "not started",
        )
