"""Bodies of our own routes, for the server and its clients. AReaL's names, and ours beside them."""

from typing import Any, Literal

import msgspec


class StartSession(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /rl/start_session. With `session_id` and `api_key` given, asking twice is asking once."""

    task_id: str
    group_id: str | None = None
    attempt: int = 1
    is_eval: bool = False
    task: dict[str, Any] | None = None
    run_id: str | None = None
    api_key: str | None = None
    session_id: str | None = None
    refresh: bool | None = None  # an open session of this key is ended first; None: as the server is set
    origin_interaction_id: str | None = None  # fork: answered from the book up to this one, by the engine from it on


class Started(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`base_url`: where this session's calls go, if it matters to which of several servers."""

    session_id: str
    api_key: str
    base_url: str | None = None


class SetReward(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /rl/set_reward.

    Target: `interaction_id`; or the episode with target="episode"; or, with neither, the last interaction of the main
    trajectory (see `Episode.last_main`). `session_id` lets an admin reward any session. The same `event_id` (32 hex
    digits) twice is one reward.
    """

    reward: float | bool
    interaction_id: str | None = None
    target: Literal["interaction", "episode"] | None = None
    session_id: str | None = None
    name: str = "reward"
    weight: float = 1.0
    source: str = "client"
    start: int | None = None
    end: int | None = None
    details: dict[str, Any] | None = None
    event_id: str | None = None


class EndSession(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /rl/end_session. `session_id` lets an admin end any session of this server, and record as `lost` one
    of another server of the book that is gone."""

    state: Literal["done", "failed", "abandoned", "lost"] = "done"
    reason: str | None = None
    session_id: str | None = None


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    interaction_count: int


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /rl/weights."""

    path: str
    version: int


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /sql."""

    query: str


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /export_trajectories.

    discount: what a reward loses per turn back. credit: how rewards are spread; `arrival` is AReaL's own way. reward: a
    name, or an SQL expression over an episode's rewards. style: individual, concat or tree.
    """

    session_id: str | None = None
    discount: float = 1.0
    style: str = "individual"
    credit: Literal["tree", "broadcast", "arrival", "none"] = "tree"
    fork: Literal["mean", "sum", "max"] = "mean"
    reward: str | None = None
