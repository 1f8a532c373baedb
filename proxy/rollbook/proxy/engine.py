"""The engine's seam: token ids in; token ids, logprobs and policy version out.

An engine knows no messages, templates, sessions or books. It samples, streams what it samples as it samples it,
stops at stop *tokens* (stop strings are the proxy's), and swaps weights between tokens so that every token is
labelled with the version that made it.
"""

from collections.abc import AsyncIterator
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from rollbook.store.events import Float32s, Int32s

from .errors import BadRequest

FinishReason = Literal["stop", "length", "abort"]
LogprobsMode = Literal["processed", "raw", "invented"]
"""processed: of the distribution that was sampled (temperature, top_p, top_k applied); raw: of the model's own;
invented: of no model, so a learner does not compare them with its own."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to draw. `max_tokens` None means the context that is left."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0


def check_sampling(sampling: Sampling) -> None:
    """Refuse what no engine can do, by name. Raises BadRequest."""
    for name, is_good, expected in (
        ("temperature", sampling.temperature >= 0, "at least 0"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("top_k", sampling.top_k >= 0, "at least 0 (0 is off)"),
        ("min_p", 0 <= sampling.min_p <= 1, "from 0 to 1"),
        ("max_tokens", sampling.max_tokens is None or sampling.max_tokens >= 1, "at least 1"),
        ("min_tokens", sampling.min_tokens >= 0, "at least 0"),
        ("repetition_penalty", sampling.repetition_penalty > 0, "above 0"),
    ):
        if not is_good:
            raise BadRequest(f"{name} must be {expected}, got {getattr(sampling, name)}", param=name)


def drawable(sampling: Sampling, vocab_size: int | None) -> Sampling:
    """The same without stop tokens that the model does not have: none is ever drawn, and there are engines that fail
    where one is named. None: how many tokens it has is not known."""
    stops = sampling.stop_token_ids
    if vocab_size is None or not stops or 0 <= min(stops) <= max(stops) < vocab_size:
        return sampling
    return msgspec.structs.replace(sampling, stop_token_ids=tuple(i for i in stops if 0 <= i < vocab_size))


def refuse_twice(is_entered: bool) -> None:
    """Two that run one engine would spoil each other's answers. Raises RuntimeError."""
    if is_entered:
        raise RuntimeError(
            "this engine runs already; enter it once, or give it to a Service or to Replicas, which enter it themselves"
        )


class Call(msgspec.Struct, frozen=True):
    """A tool call as the model writes it: `begin`, arguments that fit a JSON schema, `end`."""

    begin: str
    schema: dict[str, Any]
    end: str


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer has to be: JSON that fits `schema`, or calls, whichever the model begins; then a stop token.

    It is enforced: a token that would break it has probability zero, and processed logprobs are those of what is left,
    so a token that was forced has 0.
    """

    schema: dict[str, Any] | None = None
    calls: tuple[Call, ...] = ()
    is_single: bool = False  # one call at most; else several may follow each other, a line break between
    thought: Literal["none", "may", "open"] = "none"  # a thought comes before: not, if the model likes, or is begun


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One request to an engine. prompt_ids: int32 [T]. Stop tokens are sampled, reported, and end the output.

    is_streamed: somebody reads on the way. Else the engine may send larger pieces, if that costs less.
    """

    request_id: str
    prompt_ids: Int32s
    sampling: Sampling = Sampling()
    form: Form | None = None
    is_streamed: bool = True


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of an answer. ids int32 [n], logprobs float32 [n], all sampled by `version`; n may be 0 at the end.

    The last piece, and only it, has a finish_reason. The end-of-turn token, where sampled, is among the ids. n_sampled,
    on the last piece, is how many tokens the engine says it has sampled in all, where it says so: if fewer came, the
    capture is incomplete.
    """

    ids: Int32s
    logprobs: Float32s
    version: int
    finish_reason: FinishReason | None = None
    n_sampled: int | None = None


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself. max_context counts prompt and output tokens together."""

    is_ready: bool
    version: int
    model: str
    max_context: int
    vocab_size: int | None = None
    running: int = 0
    waiting: int = 0
    reason: str | None = None


class Engine(Protocol):
    """Implementations: scripted, embedded (transformers), vllm, sglang, replay; one contract suite.

    Engines are async context managers: entering starts what must run, leaving ends every request and gives the
    memory back. Entering one that is entered raises RuntimeError (`refuse_twice`).
    """

    logprobs_mode: LogprobsMode

    def generate(self, generation: Generation) -> AsyncIterator[Sampled]:
        """Stream an answer. Closing the iterator aborts the request. Raises EngineFailed, EngineUnavailable,
        BadRequest for sampling settings and forms the engine does not have, ContextOverflow."""
        ...

    async def pause(self) -> None:
        """Stop sampling between two tokens, keeping running requests; new ones queue. Twice is once."""
        ...

    async def resume(self) -> None:
        """Go on. Twice is once."""
        ...

    async def load_weights(self, path: str, version: int) -> None:
        """Swap weights between two tokens: what is sampled after this returns carries `version`.

        path is a folder of safetensors in Hugging Face layout. Checked before anything is touched (names, shapes);
        raises EngineFailed and keeps the old weights if they do not fit. Cached state of old weights is dropped.
        """
        ...

    async def health(self) -> Health:
        """Now, without waiting for running requests."""
        ...


EMPTY_IDS: Int32s = np.empty(0, np.int32)
EMPTY_LOGPROBS: Float32s = np.empty(0, np.float32)
