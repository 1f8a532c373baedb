"""Online: a person's chat application is the agent.

It keeps one key for ever and calls the proxy with it whenever it likes. There is always a session open on that key:
when one ends (the application posts /rl/end_session with its key, or the proxy closes it after a long silence), the
next one begins, so the application never changes anything. A server that `is_online` does that itself, without a gap.
An application that has the admin key may do it as AReaL's do: start a session on its key, which ends the one before
("refresh"). Rewards come over HTTP while a session is open.
"""

import secrets
from collections.abc import Callable
from typing import Protocol

import anyio

from rollbook.proxy.errors import Busy, Conflict

from .runner import Opened


class OnlineProxy(Protocol):
    """What we use of `rollbook.proxy.client.ProxyClient`."""

    async def start_session(
        self,
        task_id: str,
        *,
        group_id: str | None = None,
        run_id: str | None = None,
        api_key: str | None = None,
        refresh: bool | None = None,
    ) -> Opened: ...


async def keep_open(
    proxy: OnlineProxy,
    api_key: str,
    *,
    run_id: str,
    task_id: str = "online",
    look_s: float = 1.0,
    on_open: Callable[[str], None] | None = None,
) -> None:
    """Open the next session on `api_key` whenever none is; until cancelled. A session is a group of its own.

    look_s: how long the key may be without a session. on_open: called with each session's id. What is open when this is
    cancelled stays open: the application may be in the middle of a conversation.
    """
    while True:
        group_id = f"{run_id}/online/{secrets.token_hex(8)}"
        try:
            opened = await proxy.start_session(
                task_id, group_id=group_id, run_id=run_id, api_key=api_key, refresh=False
            )
        except Conflict:  # the one before is still open
            await anyio.sleep(look_s)
        except Busy as error:
            await anyio.sleep(error.retry_after_s or look_s)
        else:
            if on_open is not None:
                on_open(opened.session_id)
