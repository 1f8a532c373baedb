"""Settings of the server, each beside what it means.

`GenerationHyperparameters` has AReaL's names (`gconfig`). Its values are the defaults of an agent's request where that
says nothing, and `max_new_tokens`/`max_tokens` are caps for one that asks for more; what was used is recorded with
every interaction.
"""

import math

import msgspec

from .engine import Sampling
from .errors import BadRequest


class GenerationHyperparameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to draw where the agent does not say. None leaves it to the request and the context that is left."""

    n_samples: int = 1  # episodes per task; the runner's, no default of a request's `n`
    max_new_tokens: int | None = None  # cap of an answer
    max_tokens: int | None = None  # cap of prompt and answer together
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off; AReaL's "off" (a huge number) works as well
    greedy: bool = False  # the same as temperature 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        for name in ("n_samples", "max_new_tokens", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"gconfig.{name} must be at least 1, got {value}")
        if self.min_new_tokens < 0 or self.min_new_tokens > (self.max_new_tokens or self.min_new_tokens):
            raise ValueError(f"gconfig.min_new_tokens must be between 0 and max_new_tokens, got {self.min_new_tokens}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"gconfig.temperature must be 0 or more, got {self.temperature}")
        if not math.isfinite(self.frequency_penalty):
            raise ValueError(f"gconfig.frequency_penalty must be a number, got {self.frequency_penalty}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"gconfig.top_p must be in (0, 1], got {self.top_p}")


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling settings that a request names; None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None


_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "min_p": (0, 1),
    "max_tokens": (1, 1 << 30),
    "min_tokens": (0, 1 << 30),
    "top_k": (-1, 1 << 30),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "seed": (-(1 << 63), (1 << 63) - 1),
}


LEAST_TEMPERATURE = 0.01
"""What is asked for between 0 and this is this: vLLM makes it so, and the book is to say what was drawn with."""


def settle(asked: Asked, defaults: GenerationHyperparameters) -> tuple[Sampling, tuple[str, ...]]:
    """What to draw with, and the stop strings: the request's wishes, then the run's defaults, within its caps.

    Raises BadRequest for a value that no engine could use.
    """
    for name, (low, high) in _RANGES.items():
        value = getattr(asked, name)
        if value is not None and not low <= value <= high:
            raise BadRequest(f"{name} must be between {low} and {high}, got {value}", param=name)
    if asked.top_p is not None and not 0 < asked.top_p <= 1:
        raise BadRequest(f"top_p must be in (0, 1], got {asked.top_p}", param="top_p")
    for token in asked.stop_token_ids or ():
        if not 0 <= token < 1 << 31:
            raise BadRequest(f"stop_token_ids must be ids of tokens, got {token}", param="stop_token_ids")
    max_tokens = asked.max_tokens
    if defaults.max_new_tokens is not None:
        max_tokens = min(max_tokens or defaults.max_new_tokens, defaults.max_new_tokens)
    top_k = defaults.top_k if asked.top_k is None else asked.top_k
    temperature = asked.temperature
    if temperature is None:
        temperature = 0.0 if defaults.greedy else defaults.temperature
    sampling = Sampling(
        temperature=max(temperature, LEAST_TEMPERATURE) if temperature else 0.0,
        top_p=defaults.top_p if asked.top_p is None else asked.top_p,
        top_k=0 if top_k < 0 or top_k >= 1_000_000 else top_k,
        min_p=asked.min_p or 0.0,
        max_tokens=max_tokens,
        min_tokens=min(
            defaults.min_new_tokens if asked.min_tokens is None else asked.min_tokens, max_tokens or (1 << 30)
        ),
        seed=asked.seed,
        stop_token_ids=defaults.stop_token_ids if asked.stop_token_ids is None else asked.stop_token_ids,
        frequency_penalty=defaults.frequency_penalty if asked.frequency_penalty is None else asked.frequency_penalty,
        presence_penalty=asked.presence_penalty or 0.0,
        repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
    )
    stop = defaults.stop if asked.stop is None else asked.stop
    if any(not text for text in stop):
        raise BadRequest("stop strings must not be empty", param="stop")
    return sampling, stop


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one server."""

    host: str = "127.0.0.1"
    port: int = 0  # 0 = one that is free
    admin_key: str | None = None  # None = a random one for this start; `serve` reports it
    run_id: str = "default"  # of episodes whose start names no run
    model: str = "default"  # the name at /v1/models; requests may name any model and get this one
    gconfig: GenerationHyperparameters = GenerationHyperparameters()
    needs_permit: bool = False  # start_session takes a permit of /grant_capacity, else answers 429
    permit_s: float = 600.0  # a permit that nobody took is void after this long
    is_online: bool = False  # starting on a key that is open ends its session and opens the next
    max_sessions: int = 100_000  # open at once
    max_ended: int = 20_000  # ended ones that are known by their key (1 KB each); older ones only the book knows
    idle_s: float = 3600.0  # an open session without calls for this long is closed as abandoned; its data stays
    max_concurrent: int = 64  # model calls of one session at once; more wait their turn
    max_waiting: int = 256  # calls of one session that wait; more are told to come back
    grace_s: float = 1.5  # how long a call outlives its client, so that the client's retry finds it
    pace_s: float = 0.01  # tokens of a stream that come closer together than this share a write; the first never waits
    stall_s: float = 120.0  # a client that takes nothing for this long is gone
    max_body_bytes: int = 32 << 20
    max_bodies_bytes: int = (
        256 << 20
    )  # of all requests that are read or answered now; further ones are told to come back
    max_header_bytes: int = 64 << 10
    max_connections: int = 16_384  # open at once, and no more than there are files for; further ones get 429 and go
    body_s: float = 30.0  # to send the whole request body
    tracing: bool = False  # OpenTelemetry spans of model calls, to whatever SDK the process has set up
    stop_s: float = 5.0  # how long answers in progress may take to finish when the server stops

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise ValueError(f"{name} must be at least {least}, got {value}")


_LEAST: dict[str, float] = {
    **dict.fromkeys(("max_sessions", "max_concurrent", "max_connections"), 1),
    **dict.fromkeys(("max_body_bytes", "max_bodies_bytes", "max_header_bytes"), 1),
    **dict.fromkeys(("permit_s", "idle_s", "stall_s", "body_s"), 0.01),
    **dict.fromkeys(("max_ended", "max_waiting", "grace_s", "pace_s", "stop_s"), 0),
}
"""What a server can do with; a call that may never have its turn would wait for ever."""
