"""What an agent may say about its own episode while it runs: rewards, when and where it knows them.

An agent whose `run` takes `episode` gets one; any other program makes its own from its environment. A reward is a
number, or named parts of one: each part is kept under its name, and their weighted sum is the reward that is trained.
Other weights later are a setting (`credit.reward: "0.9 * correct + 0.1 * form"`), not another run of the agent.
"""

import json
import os
import time
from collections.abc import Mapping
from typing import Any

import anyio
import httpx

from rollbook.store.events import new_event_id

from .errors import BadReward
from .rewards import read_reward

_ATTEMPTS = 4
_BACK_OFF_S = 0.2


class EpisodeClient:
    """Rewards the episode of a key. base_url, api_key: None: ROLLBOOK_BASE_URL, ROLLBOOK_API_KEY of the environment."""

    def __init__(self, base_url: str | None = None, api_key: str | None = None) -> None:
        self.base_url = base_url or os.environ["ROLLBOOK_BASE_URL"]
        self.api_key = api_key or os.environ["ROLLBOOK_API_KEY"]

    async def reward(
        self,
        value: Any,
        *,
        interaction_id: str | None = None,
        name: str = "reward",
        weights: Mapping[str, float] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> str:
        """Judge a reply by its id, or the latest of the main conversation; returns the id.

        value: a number, or {part: number} with `weights` by part (1 where they say nothing). name: of the number or of
        the sum; "reward" is what training takes unless `credit.reward` says otherwise. details: kept beside it.
        Raises BadReward for what is no number, or what the proxy refuses.
        """
        async with http_client(self.base_url) as http:
            for body in _bodies(value, name, weights, details):
                body["interaction_id"] = interaction_id
                for attempt in range(_ATTEMPTS):
                    try:
                        answer = await http.post(self._url, content=json.dumps(body), headers=self._headers)
                    except httpx.TransportError:
                        if attempt + 1 == _ATTEMPTS:
                            raise
                        await anyio.sleep(_BACK_OFF_S * 2**attempt)
                    else:
                        break
                interaction_id = _read(answer)
        assert interaction_id is not None
        return interaction_id

    def reward_blocking(
        self,
        value: Any,
        *,
        interaction_id: str | None = None,
        name: str = "reward",
        weights: Mapping[str, float] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> str:
        """The same for code that is not async."""
        with httpx.Client(verify=self.base_url.startswith("https"), trust_env=False, timeout=60) as http:
            for body in _bodies(value, name, weights, details):
                body["interaction_id"] = interaction_id
                for attempt in range(_ATTEMPTS):
                    try:
                        answer = http.post(self._url, content=json.dumps(body), headers=self._headers)
                    except httpx.TransportError:
                        if attempt + 1 == _ATTEMPTS:
                            raise
                        time.sleep(_BACK_OFF_S * 2**attempt)
                    else:
                        break
                interaction_id = _read(answer)
        assert interaction_id is not None
        return interaction_id

    @property
    def _url(self) -> str:
        return f"{self.base_url}/rl/set_reward"

    @property
    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}", "content-type": "application/json"}


def http_client(base_url: str, timeout_s: float = 60.0) -> httpx.AsyncClient:
    """A client that is cheap to make: reading the certificates for TLS takes 25 ms of the event loop."""
    return httpx.AsyncClient(verify=base_url.startswith("https"), trust_env=False, timeout=timeout_s)


def weigh(parts: Mapping[str, Any], weights: Mapping[str, float] | None = None) -> float:
    """The weighted sum of named parts of a reward. Raises BadReward for a weight without its part."""
    weights = weights or {}
    unknown = sorted(set(weights) - set(parts))
    if unknown:
        raise BadReward(f"there are weights for {', '.join(unknown)}, but the parts are {', '.join(parts)}")
    return sum(_number(value, part) * weights.get(part, 1.0) for part, value in parts.items())


def _bodies(
    value: Any, name: str, weights: Mapping[str, float] | None, details: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    given: list[dict[str, Any]] = []
    if isinstance(value, Mapping):
        if name in value:
            raise BadReward(f"a part is called {name!r}, as their sum is; give the part another name")
        given = [{"name": str(part), "reward": _number(each, str(part))} for part, each in value.items()]
        value = weigh(value, weights)
    elif weights is not None:
        raise BadReward(f"weights are for named parts, {{part: number}}; the reward is {value!r}")
    given.append({"name": name, "reward": _number(value, name), "details": dict(details) if details else None})
    return [{**each, "source": "agent", "event_id": new_event_id().hex()} for each in given]


def _number(value: Any, what: str) -> float:
    number = read_reward(value)
    if not isinstance(number, float):
        raise BadReward(f"{what} is {value!r}; expected a number")
    return number


def _read(answer: httpx.Response) -> str:
    if answer.is_error:
        raise BadReward(f"the proxy refused the reward ({answer.status_code}): {answer.text[:300]}")
    interaction_id: str = answer.json()["interaction_id"]
    return interaction_id
