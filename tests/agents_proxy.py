"""A proxy that keeps what the runner tells it, for what the real one cannot show quickly: faults and counts."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import anyio.lowlevel

from rollbook.proxy.errors import BadRequest, Busy, EngineUnavailable, SessionEnded


@dataclass
class KeepingProxy:
    """Sessions in a dict; `calls` says how many model calls a session is taken to have made."""

    base_url: str = "http://127.0.0.1:1/v1"
    calls: int = 1
    sessions: dict[str, dict] = field(default_factory=dict)
    busy: int = 0
    is_gone: bool = False

    async def start_session(self, task_id, **facts):
        await anyio.lowlevel.checkpoint()
        if self.is_gone:
            raise EngineUnavailable("the proxy is gone")
        if self.busy:
            self.busy -= 1
            raise Busy("no permit", retry_after_s=0.001)
        key = f"sk-{len(self.sessions)}"
        self.sessions[key] = {"task_id": task_id, "state": "open", "reason": None, "rewards": {}, **facts}
        return SimpleNamespace(session_id=f"ep_{key}", api_key=key, base_url=None)

    async def set_reward(self, api_key, reward, *, interaction_id=None, source):
        if not self.calls or interaction_id not in (None, "i0"):
            raise BadRequest(f"no interaction {interaction_id}")
        self.sessions[api_key]["rewards"][interaction_id] = reward

    async def end_session(self, api_key, *, state="done", reason=None):
        await anyio.lowlevel.checkpoint()
        session = self.sessions[api_key]
        if session["state"] != "open":
            raise SessionEnded("it is abandoned")
        session.update(state=state, reason=reason)
        return self.calls

    def ended(self):
        return sorted((s["task_id"], s["attempt"], s["state"]) for s in self.sessions.values())
