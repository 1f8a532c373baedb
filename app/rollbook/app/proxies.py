"""Several proxies as the one that a runner talks to: where a session begins, and what becomes of it without its proxy.

All samples of a group begin at one proxy, and a task prefers the same proxy every time (rendezvous hashing): their
prompts begin alike, and the engine behind that proxy has them cached. A proxy that is much busier than the others is
passed over. A session stays where it began.

A proxy may come back at the same address (its sessions go on, agents' retries find it), come back elsewhere, or not at
all; or its network is cut, and it lives but does not answer. In the latter cases its episodes are recorded as `lost`
through another proxy, and the runner draws them again.
Proxies may be added and taken away at any time.
"""

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import anyio
import msgspec
import pyarrow as pa

from rollbook.proxy.bodies import Started
from rollbook.proxy.client import ProxyClient, SessionLost, Unreachable
from rollbook.proxy.errors import NotFound, ProxyError, Unauthorized

from .launch import LaunchFailed, Program

T = TypeVar("T")

SPREAD = 1.25
"""A proxy may have so many times its even share of open sessions before others are preferred."""

_BACK_S = 15.0  # how long the sessions of a proxy that died wait for it at its address
_LOOK_S = 0.25
_PROBE_S = 3.0
_GROUPS_KEPT = 10_000


@dataclass(eq=False)
class _Slot:
    """One proxy, whatever process it is now."""

    program: Program
    client: ProxyClient | None = None  # None while it is away
    n_starts: int = 0  # which process `client` speaks to
    version: int = 0  # of the policy that it was given
    away_since: float | None = None  # its process is gone
    silent_since: float | None = None  # it does not answer
    is_leaving: bool = False
    n_starting: int = 0  # sessions that it was asked for and has not answered
    sessions: dict[str, str] = field(default_factory=dict)  # open ones: api_key -> session_id

    @property
    def url(self) -> str:
        return self.program.url

    @property
    def name(self) -> bytes:
        return str(id(self)).encode()


async def _answers(client: ProxyClient) -> bool:
    with anyio.move_on_after(_PROBE_S):
        try:
            await client.health()
        except Unreachable:
            return False
        except ProxyError:
            return True  # if only to say that its engine is not ready
        return True
    return False


class Proxies:
    """See `rollbook.agents.runner.Proxy`; an async context manager that knows the proxies again when they come back.

    on_lost: told the ids of sessions that are lost while their agents may still wait for answers.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        admin_key: str,
        *,
        version: int = 0,
        on_lost: Callable[[list[str]], None] = lambda _: None,
        back_s: float = _BACK_S,
    ) -> None:
        self._slots = [_Slot(program, version=version) for program in programs]
        self._order = {id(slot): i for i, slot in enumerate(self._slots)}
        self._admin_key = admin_key
        self._policy: tuple[str, int] | None = None
        self._first_version = version
        self._back_s = back_s
        self.on_lost = on_lost
        self._by_key: dict[str, tuple[_Slot, str]] = {}
        self._lost: dict[str, tuple[_Slot, str]] = {}  # the same, of sessions that their proxy left behind
        self._groups: OrderedDict[str, _Slot] = OrderedDict()
        self._looking = anyio.Lock()
        self._old: list[ProxyClient] = []

    async def __aenter__(self) -> Self:
        await self._look()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._keep_looking)
        self._tasks.start_soon(self._keep_asking)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)
        for client in [*self._old, *(slot.client for slot in self._slots if slot.client is not None)]:
            await client.aclose()

    # -- who is there

    @property
    def base_url(self) -> str:
        """Of any that is up; sessions have their own."""
        return self._any().base_url

    @property
    def n_open(self) -> list[int]:
        """Open sessions of each proxy."""
        return [len(slot.sessions) for slot in self._slots]

    async def add(self, program: Program) -> None:
        """One more proxy, from now on."""
        slot = _Slot(program, version=self._first_version)
        self._order[id(slot)] = max(self._order.values(), default=-1) + 1
        await self._look_at(slot)
        self._slots.append(slot)

    async def remove(self, program: Program, *, drain_s: float = 600.0) -> None:
        """No new sessions there; returns when those that it has are over. The program is the caller's to stop."""
        [slot] = [slot for slot in self._slots if slot.program is program]
        slot.is_leaving = True
        with anyio.move_on_after(drain_s):
            while slot.sessions or slot.n_starting:  # noqa: ASYNC110 - their ends are events of many places
                await anyio.sleep(_LOOK_S)
        await self._lose(slot, "its proxy was taken away")
        self._slots.remove(slot)
        if slot.client is not None:
            self._old.append(slot.client)

    def _up(self) -> list[_Slot]:
        """Those that answer; those that did not a moment ago only where there are no others."""
        up = [slot for slot in self._slots if slot.client is not None and slot.program.is_up]
        return [s for s in up if s.silent_since is None] or [s for s in up if not self._is_silent(s)]

    def _is_silent(self, slot: _Slot) -> bool:
        """Whether it has not answered for so long that nobody waits for it any more."""
        return slot.silent_since is not None and time.monotonic() - slot.silent_since > self._back_s

    def _any(self) -> ProxyClient:
        for slot in self._up():
            assert slot.client is not None
            return slot.client
        raise Unreachable("no proxy of this run is up now", retry_after_s=1)

    async def _keep_looking(self) -> None:
        while True:
            await anyio.sleep(_LOOK_S)
            await self._look()

    async def _keep_asking(self) -> None:
        while True:
            await anyio.sleep(_PROBE_S / 2)
            async with anyio.create_task_group() as group:
                for slot in self._slots:
                    if slot.client is not None and slot.program.is_up:
                        group.start_soon(self._ask_health, slot, slot.client)

    async def _ask_health(self, slot: _Slot, client: ProxyClient) -> None:
        if await _answers(client):
            slot.silent_since = None
        else:
            slot.silent_since = slot.silent_since or time.monotonic()

    async def _look(self) -> None:
        async with self._looking:
            for slot in list(self._slots):
                await self._look_at(slot)

    async def _look_at(self, slot: _Slot) -> None:
        """Speak to the process that the slot's program is now, and give it the policy that the others have."""
        if slot.program.is_up and slot.program.n_starts != slot.n_starts:
            before = slot.client
            client = ProxyClient(slot.url, self._admin_key)
            if before is not None and before.base_url != client.base_url:
                await self._lose(slot, "its proxy died, and came back elsewhere")
            try:
                if self._policy is not None:
                    await client.load_weights(*self._policy)
                    slot.version = self._policy[1]
            except Unreachable:
                await client.aclose()
                return  # it died again; the next look sees what became of it
            slot.client, slot.n_starts = client, slot.program.n_starts
            slot.away_since = slot.silent_since = None
            if before is not None:
                self._old.append(before)  # somebody may wait for an answer of it still
        elif not slot.program.is_up:
            slot.away_since = slot.away_since or time.monotonic()
            if slot.sessions and (time.monotonic() - slot.away_since > self._back_s or self._is_gone(slot)):
                await self._lose(slot, "its proxy is gone")
        elif self._is_silent(slot):
            await self._lose(slot, "its proxy does not answer")
        elif (
            slot.silent_since is None
            and self._policy is not None
            and slot.version != self._policy[1]
            and slot.client is not None
        ):
            await self._load(slot, *self._policy)

    def _is_gone(self, slot: _Slot) -> bool:
        try:
            slot.program.check()
        except LaunchFailed:
            return True
        return False

    async def _lose(self, slot: _Slot, why: str) -> None:
        """Close the sessions of a proxy that will not answer them, through one that is there."""
        sessions, slot.sessions = slot.sessions, {}
        self._groups = OrderedDict((group, at) for group, at in self._groups.items() if at is not slot)
        if not sessions:
            return
        for key, session_id in sessions.items():
            self._by_key.pop(key, None)
            self._lost[key] = (slot, session_id)
        self.on_lost(list(sessions.values()))

    # -- where a session goes

    def _choose(self, task_id: str, group_id: str | None) -> _Slot:
        """Raises Unreachable while none is up, LaunchFailed when none will be."""
        up = [slot for slot in self._up() if not slot.is_leaving]
        if not up:
            gone = [slot for slot in self._slots if self._is_gone(slot)]
            if len(gone) == len(self._slots) and gone:
                gone[0].program.check()
            raise Unreachable("no proxy of this run is up now", retry_after_s=1)
        if group_id is not None and (known := self._groups.get(group_id)) in up:
            self._groups.move_to_end(group_id)
            assert known is not None
            return known
        most = math.ceil(SPREAD * (sum(len(slot.sessions) for slot in up) + 1) / len(up))
        ranked = sorted(up, key=lambda slot: self._score(slot, task_id), reverse=True)
        chosen = next((slot for slot in ranked if len(slot.sessions) < most), ranked[0])
        if group_id is not None:
            self._groups[group_id] = chosen
            if len(self._groups) > _GROUPS_KEPT:
                self._groups.popitem(last=False)
        return chosen

    def _score(self, slot: _Slot, task_id: str) -> bytes:
        return hashlib.blake2b(f"{self._order[id(slot)]}/{task_id}".encode(), digest_size=8).digest()

    # -- what a runner asks

    async def start_session(self, task_id: str, *, group_id: str | None = None, **facts: Any) -> Started:
        """Open an episode where its prefix is at home. Waits while no proxy is up. Raises LaunchFailed, Busy."""
        while True:
            try:
                slot = self._choose(task_id, group_id)
            except Unreachable:
                await anyio.sleep(_LOOK_S)
                continue
            client = slot.client
            assert client is not None
            slot.n_starting += 1
            try:
                started = await self._ask(slot, lambda at: at.start_session(task_id, group_id=group_id, **facts))
                slot.sessions[started.api_key] = started.session_id
            except Unreachable:
                await anyio.sleep(_LOOK_S)
                continue
            finally:
                slot.n_starting -= 1
            self._by_key[started.api_key] = (slot, started.session_id)
            return msgspec.structs.replace(started, base_url=client.base_url)

    async def _ask(self, slot: _Slot, call: Callable[[ProxyClient], Awaitable[T]]) -> T:
        """What a proxy answers. Raises what it refuses, and Unreachable when it is given up while we wait."""
        client = slot.client
        if client is None:
            raise Unreachable("this proxy is away", retry_after_s=1)
        answers: list[T] = []
        refusals: list[ProxyError] = []

        async def give_up() -> None:
            while not self._is_silent(slot):  # noqa: ASYNC110 - silence is no event
                await anyio.sleep(_LOOK_S)
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(give_up)
            try:
                answers.append(await call(client))
            except ProxyError as error:
                refusals.append(error)
            group.cancel_scope.cancel()
        if refusals:
            raise refusals[0]
        if not answers:
            raise Unreachable("this proxy does not answer", retry_after_s=1)
        return answers[0]

    async def set_reward(
        self, api_key: str, reward: float, *, interaction_id: str | None = None, source: str = "client"
    ) -> str | None:
        """See `ProxyClient.set_reward`. Raises SessionLost."""
        slot, _ = self._by_key.get(api_key, (None, ""))
        if slot is None:
            raise SessionLost("the proxy of this session is gone")
        return await self._ask(
            slot, lambda at: at.set_reward(api_key, reward, interaction_id=interaction_id, source=source)
        )

    async def end_session(self, api_key: str, *, state: str = "done", reason: str | None = None) -> int:
        """Close an episode. Raises SessionLost, the loss recorded, where its proxy went before the episode was done."""
        slot, session_id = self._by_key.pop(api_key, (None, ""))
        if slot is None:
            await self._end_lost(*self._lost.pop(api_key), state, reason)
        try:
            if state == "failed" and not await self._is_there(slot, api_key):
                await self._end_lost(slot, session_id, state, reason)
            return await self._end(slot, api_key, state, reason)
        except (Unreachable, Unauthorized):
            await self._end_lost(slot, session_id, state, reason)
        finally:
            slot.sessions.pop(api_key, None)

    async def _end(self, slot: _Slot, api_key: str, state: str, reason: str | None) -> int:
        """Its proxy may be away for a moment. Raises Unreachable when it is for longer."""
        give_up = time.monotonic() + self._back_s
        while True:
            try:
                return await self._ask(slot, lambda at: at.end_session(api_key, state=state, reason=reason))
            except Unreachable:
                if time.monotonic() > give_up or self._is_gone(slot) or self._is_silent(slot):
                    raise
            await anyio.sleep(_LOOK_S)

    async def _is_there(self, slot: _Slot, api_key: str) -> bool:
        """Whether the process that a session began at answers."""
        return slot.client is not None and slot.program.is_up and await _answers(slot.client)

    async def _end_lost(self, slot: _Slot, session_id: str, state: str, reason: str | None) -> NoReturn:
        """Say in the book that it is lost, unless its end got there before its proxy went. Raises SessionLost."""
        why = f"its proxy went before the episode was known to be {state}" + (f" ({reason})" if reason else "")
        lost = SessionLost(f"the proxy of session {session_id} is gone")
        while True:
            # Its own first, which may be back with the session still open; it may also seem up, and be cut off.
            for there in sorted(self._up(), key=lambda one: one is not slot):
                try:
                    await self._ask(
                        there, lambda at: at.end_session(None, session_id=session_id, state="lost", reason=why)
                    )
                    raise lost
                except NotFound:
                    raise lost from None  # it was not yet open when its proxy went
                except Unreachable:
                    continue
            if all(self._is_gone(one) for one in self._slots):
                raise lost
            await anyio.sleep(_LOOK_S)

    # -- what a learner asks

    async def load_weights(self, path: str, version: int) -> int:
        """All that are up answer with these weights when this returns; others get them before their first session."""
        self._policy = (path, version)
        async with self._looking, anyio.create_task_group() as group:
            for slot in self._slots:
                if slot.client is not None and slot.program.is_up:
                    group.start_soon(self._load, slot, path, version)
        return version

    async def _load(self, slot: _Slot, path: str, version: int) -> None:
        """Give a proxy the policy, however long that takes, unless it is lost meanwhile."""
        client = slot.client
        assert client is not None

        async def give_up() -> None:
            while slot.program.is_up and not slot.is_leaving and not self._is_silent(slot):  # noqa: ASYNC110 - a program has no event for it
                await anyio.sleep(_LOOK_S)
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(give_up)
            try:
                await client.load_weights(path, version)
                slot.version = version
            except Unreachable:
                pass  # `_look_at` gives it the policy when it is there again
            group.cancel_scope.cancel()

    async def version(self) -> int:
        """The version that all have which are up."""
        return min([slot.version for slot in self._slots if slot.client is not None], default=0)

    async def sql(self, query: str) -> pa.Table:
        """See `ProxyClient.sql`, at one that is up."""
        return await self._any().sql(query)
