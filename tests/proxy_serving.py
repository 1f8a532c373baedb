"""A real server on a free loopback port, with the scripted engine: what tests of the HTTP surface run against."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rollbook.proxy.client import ProxyClient
from rollbook.proxy.config import ServeConfig
from rollbook.proxy.scripted import Script, ScriptedEngine
from rollbook.proxy.server import Service, serve
from rollbook.proxy.tokenizer import Tokenizer
from rollbook.store import Event, Log, MemoryLog
from rollbook.store.events import from_batch

BYTES = Tokenizer.load("bytes")


def said(text: str) -> list[int]:
    """Token ids of an answer that ends its turn."""
    return [*BYTES.encode(text).tolist(), BYTES.eos_ids[0]]


@dataclass
class Served:
    """A running server and how to speak to it."""

    url: str
    service: Service
    client: ProxyClient
    log: Log

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def events(self, kind: str | None = None) -> list[Event]:
        """What the book has, oldest first."""
        found = [event for batch in self.log.read() for event in from_batch(batch)]
        return [event for event in found if kind is None or event.kind == kind]


@asynccontextmanager
async def serving(
    script: Script,
    *,
    log: Log | None = None,
    config: ServeConfig | None = None,
    tokenizer: Tokenizer = BYTES,
    **engine: object,
) -> AsyncIterator[Served]:
    """Serve a script until left."""
    log = MemoryLog() if log is None else log
    service = Service(
        log=log,
        engine=ScriptedEngine(script, **engine),
        tokenizer=tokenizer,
        config=config or ServeConfig(admin_key="admin-key-of-the-tests"),
    )
    async with serve(service) as url, ProxyClient(url, service.admin_key) as client:
        yield Served(url, service, client, log)
