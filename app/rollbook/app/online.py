"""Online runs: the policy that is trained answers a person's application, at an address and under a key that stay.

Both are in `online.json` in the run's folder, made at the first start and readable by its owner only. The application
calls with that key and never changes anything; what it says between two ends of a session is an episode.
"""

import json
import os
import secrets
from pathlib import Path
from typing import Any

import msgspec

from .config import ConfigError

FILE = "online.json"


class Online(msgspec.Struct, kw_only=True):
    """Where and how an application speaks to a run. base_url ends in /v1; "" until the server has answered."""

    base_url: str = ""
    api_key: str
    admin_key: str
    port: int = 0

    def serve_arguments(self) -> list[str]:
        """For `rollbook serve`: starting a session on a key that is open ends the one before."""
        return ["--set", "is_online=true", "--set", f"port={self.port}"]

    def answering_at(self, url: str, run_path: str) -> str:
        """Keep the address for the next start; what to tell whoever runs the application."""
        self.base_url, self.port = f"{url}/v1", int(url.rsplit(":", 1)[1])
        path = Path(run_path, FILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".part")
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(self)))
        beside.replace(path)
        return (
            f"Online: give the application OPENAI_BASE_URL={self.base_url} and as OPENAI_API_KEY the api_key in {path}"
        )


def online_of(config: Any) -> Online:
    """As the config says, else as at the last start, else new keys and a free port. Raises ConfigError."""
    agent = config.rollout.agent
    if config.scheduler.proxies != 1:
        raise ConfigError(
            f"scheduler.proxies is {config.scheduler.proxies}, but an application has one address; set it to 1"
        )
    path = Path(config.run_path, FILE)
    kept: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return Online(
        api_key=agent.online_api_key or kept.get("api_key") or "sk-rb-" + secrets.token_urlsafe(32),
        admin_key=agent.admin_api_key or kept.get("admin_key") or secrets.token_urlsafe(32),
        port=agent.online_port or kept.get("port", 0),
    )
