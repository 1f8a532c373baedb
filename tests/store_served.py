"""Logs behind a real HTTP server in this process, many books on one port: what `HttpLog` is tested against."""

import asyncio
import itertools
import threading
from collections.abc import MutableMapping
from types import SimpleNamespace
from typing import Any

import uvicorn
from litestar import Litestar
from litestar.datastructures import State

from rollbook.proxy.errors import Forbidden
from rollbook.proxy.events import HANDLERS
from rollbook.proxy.listener import bind
from rollbook.proxy.server import refuse
from rollbook.store import Log

KEY = "sk-rb-admin-of-a-test"


def _require_admin(key: str | None) -> None:
    if key != KEY:
        raise Forbidden("this route needs the admin key")


class Server:
    """One uvicorn in a thread; `add` puts a log under a path of its own. The routes are the product's."""

    def __init__(self) -> None:
        self._apps: dict[str, Litestar] = {}
        self._numbers = itertools.count()
        self._socket = bind("127.0.0.1", 0)
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app, interface="asgi3", log_config=None, log_level="critical", lifespan="off", ws="none"
            )
        )
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([self._socket])))
        self._thread.start()

    def add(self, log: Log) -> str:
        """Returns its URL."""
        name = f"/b{next(self._numbers)}"
        service = SimpleNamespace(log=log, sessions=SimpleNamespace(require_admin=_require_admin))
        self._apps[name] = Litestar(
            HANDLERS,
            path=name,
            state=State({"service": service}),
            exception_handlers={Exception: refuse},
            openapi_config=None,
            logging_config=None,
        )
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}{name}"

    async def _app(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        await self._apps["/" + scope["path"].split("/")[1]](scope, receive, send)  # type: ignore[arg-type]

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
