"""Events for small books, with ids that a person can read and times that a test controls."""

import hashlib
from typing import Any

import numpy as np

from rollbook.store import Event, Fact, InteractionRecorded


def event(fact: Fact, *, run: str = "run", at: int = 0, key: str | None = None, **rest: Any) -> Event:
    """An event recorded at `at` microseconds. The same key gives the same event_id."""
    extra = {} if key is None else {"event_id": hashlib.sha256(key.encode()).digest()[:16]}
    return Event(run_id=run, fact=fact, recorded_at=at, **extra, **rest)


def interaction(
    name: str,
    episode: str = "e",
    *,
    parent: str | None = None,
    edge: str | None = None,
    n_output: int = 3,
    n_new: int = 4,
    shared: int = 0,
    version: int = 0,
    logprob: float = -0.5,
    run: str = "run",
    at: int = 0,
    key: str | None = None,
    messages: bytes | None = None,
    **fact: Any,
) -> Event:
    """A recorded interaction with `n_output` tokens that all have one version and one logprob."""
    return event(
        InteractionRecorded(parent_id=parent, edge=edge, shared=shared, prompt_length=shared + n_new, **fact),
        run=run,
        at=at,
        key=key,
        episode_id=episode,
        interaction_id=name,
        messages=messages,
        prompt_ids=np.arange(n_new, dtype=np.int32),
        output_ids=np.arange(n_output, dtype=np.int32),
        logprobs=np.full(n_output, logprob, np.float32),
        versions=np.full(n_output, version, np.int32),
    )
