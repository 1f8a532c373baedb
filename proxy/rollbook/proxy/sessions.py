"""Sessions: the credential under which one episode speaks HTTP.

A key opens exactly one episode at a time. Keys are known only by their sha256, here and in the book. Opening, rewarding
and closing are appended to the log before they are answered, so a server that comes back knows every session again
(`Sessions.remember`). Model calls after the end are refused; rewards after it are welcome.

What a call says and what it costs is not known here: `calls.py` and `capture.py` see to that.
"""

import asyncio
import hashlib
import hmac
import math
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import Literal
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread
import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store import EpisodeClosed, EpisodeOpened, Event, Log, RewardGiven, new_id
from rollbook.store.book import Book
from rollbook.store.events import EpisodeState, decode_fact

from .bodies import SetReward, Started, StartSession
from .capture import Capture, Episode
from .config import ServeConfig
from .errors import BadRequest, Busy, Conflict, Forbidden, NotFound, SessionEnded, Unauthorized
from .forks import Fork, Origin
from .permits import Permits

_ORIGINS_KEPT = 64
"""Whose tokens are kept for the next fork of the same one."""

_OF_OURS = pa.array(["EpisodeOpened", "EpisodeClosed", "InteractionRecorded"])
_OF_OTHERS = pa.array(["EpisodeClosed"])
_REMEMBERED = ["recorded_at", "writer", "position", "kind", "episode_id", "run_id", "payload"]
"""What is read of the log at a start."""


class Session(msgspec.Struct, kw_only=True, eq=False):
    """One episode and its key. `episode_id` is what HTTP calls session_id."""

    episode_id: str
    run_id: str
    task_id: str
    key: bytes | None  # sha256
    state: EpisodeState | Literal["open"] = "open"
    last_used: float
    episode: Episode | None = None  # what the capture keeps of an open one
    origin_id: str | None = None  # the interaction of another episode that it is a fork of
    # Where the book has the interactions of one that this server found there.
    pointers: Sequence[tuple[str, int]] = ()
    interactions: str = ""  # of one that ended here, a space between: many are kept, and no collection looks at them
    last_main: str | None = None
    calls: int = 0  # model calls in progress
    waiting: int = 0  # and those that wait for their turn
    ending: anyio.Lock | None = None  # while it is being ended

    @property
    def has_interactions(self) -> bool:
        """Of one that is open."""
        return bool(self.pointers) if self.episode is None else self.episode.n_interactions > 0


def hash_key(key: str) -> bytes:
    """What is kept of a key. Keys are random and long, so one round of sha256 is enough."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class Sessions:
    """All sessions of a server, and who may do what."""

    def __init__(
        self,
        log: Log,
        capture: Capture,
        config: ServeConfig,
        *,
        admin_key: str,
        permits: Permits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._capture = capture
        self._config = config
        self._admin = hash_key(admin_key)
        self._clock = clock
        self._by_key: dict[bytes, Session] = {}
        self._open: dict[str, Session] = {}
        self._ended: OrderedDict[bytes, Session] = OrderedDict()
        self._ended_ids: dict[str, Session] = {}
        self._opening: set[str] = set()  # ids whose start is being recorded
        self._reopening = anyio.Lock()
        self.permits = permits or Permits(config.permit_s, clock=clock)
        self._busy_keys: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self.book: Callable[[], Book] | None = None  # where forks find what they repeat; blocks
        self._origins: OrderedDict[str, Origin] = OrderedDict()
        self.on_close: Callable[[Session], Awaitable[None]] | None = None  # stops the calls of a session that ends
        self.version: int | None = None  # of the policy that new episodes begin with

    # Who asks

    def is_admin(self, key: str | None) -> bool:
        """Whether the key is the admin's. Raises Unauthorized without one."""
        if key is None:
            raise Unauthorized("expected `Authorization: Bearer KEY` or `x-api-key: KEY`; no key came")
        return hmac.compare_digest(hash_key(key), self._admin)

    def require_admin(self, key: str | None) -> None:
        """Raises Unauthorized without a key, Forbidden with one that is not the admin's."""
        if not self.is_admin(key):
            raise Forbidden("this route needs the admin key; the key that came is not it")

    def find(self, key: str | None) -> Session:
        """The session of a key, open or ended. Raises Unauthorized, Forbidden for the admin key."""
        if key is None:
            raise Unauthorized("expected `Authorization: Bearer KEY` or `x-api-key: KEY`; no key came")
        digest = hash_key(key)
        session = self._by_key.get(digest) or self._ended.get(digest)
        if session is not None and session.key is not None and hmac.compare_digest(session.key, digest):
            return session
        if hmac.compare_digest(digest, self._admin):
            raise Forbidden(
                "this route needs the key of a session; the admin key came. POST /rl/start_session gives one"
            )
        raise Unauthorized("no session has this key; POST /rl/start_session gives one")

    def require_open(self, key: str | None) -> Session:
        """The open session of a key. Raises what `find` does, and SessionEnded."""
        session = self.find(key)
        if session.state != "open":
            raise SessionEnded(f"session {session.episode_id} is {session.state}; its data stays. Start a new one")
        self.touch(session)
        return session

    async def episode_of(self, session: Session) -> Episode:
        """What the capture knows of a session's conversations, read back from the book where it must be."""
        if session.episode is None:
            async with self._reopening:
                if session.episode is None and session.pointers:
                    session.episode = await anyio.to_thread.run_sync(self._read_back, session)
                    session.pointers = ()
                elif session.episode is None:
                    session.episode = self._capture.open(session.episode_id, run_id=session.run_id)
                    if session.origin_id is not None:
                        session.episode.fork = await self._fork(session.origin_id)
        return session.episode

    def _read_back(self, session: Session) -> Episode:
        episode = self._capture.reopen(session.episode_id, self._log.gather(session.pointers))
        if session.origin_id is not None and session.state == "open":
            origin = self._origin(session.origin_id)
            again = [node.origin_id for node in episode.nodes.values()]
            episode.fork = Fork(origin, self._capture.decode, [name for name in again if name is not None])
            episode.fork.is_live = None in again
        return episode

    async def _fork(self, origin_id: str) -> Fork:
        return Fork(await anyio.to_thread.run_sync(self._origin, origin_id), self._capture.decode)

    def _origin(self, origin_id: str) -> Origin:
        """Raises NotFound. Blocks."""
        known = self._origins.get(origin_id)
        if known is None:
            if self.book is None:
                raise NotFound("this server has no book to fork from", param="origin_interaction_id")
            book = self.book()
            book.catch_up()
            known = self._origins[origin_id] = Origin(book, origin_id)
            while len(self._origins) > _ORIGINS_KEPT:
                self._origins.pop(next(iter(self._origins)), None)
        return known

    def by_id(self, session_id: str) -> Session:
        """An open or recently ended session. Raises NotFound."""
        session = self._open.get(session_id) or self._ended_ids.get(session_id)
        if session is None:
            raise NotFound(f"no session {session_id!r} on this server")
        return session

    async def in_book(self, session_id: str, book: Callable[[], Book]) -> Session:
        """A session that this server has forgotten or never had, for a late reward. Raises NotFound."""

        def read() -> Session | None:
            found = book()
            found.catch_up()
            rows = found.sql(
                "select run_id, task_id, state from episodes where episode_id = ?", [session_id]
            ).to_pylist()
            if not rows:
                return None
            places = found.sql(
                "select writer, position from interactions where episode_id = ? order by recorded_at, event_id",
                [session_id],
            ).to_pylist()
            return Session(
                episode_id=session_id,
                run_id=rows[0]["run_id"],
                task_id=rows[0]["task_id"],
                key=None,
                state=rows[0]["state"],
                last_used=self._clock(),
                pointers=[(place["writer"], place["position"]) for place in places],
            )

        session = await anyio.to_thread.run_sync(read)
        if session is None:
            raise NotFound(f"no session {session_id!r}, neither on this server nor in its book")
        return session

    @property
    def open(self) -> list[Session]:
        return list(self._open.values())

    # Life of a session

    async def start(self, body: StartSession) -> Started:
        """Open an episode. Raises BadRequest, Conflict, Busy, NotFound for an origin that the book does not have."""
        if not body.task_id:
            raise BadRequest("task_id must not be empty", param="task_id")
        key = body.api_key
        if key is None:
            key = "sk-rb-" + secrets.token_urlsafe(32)
        elif len(key) < 8 or len(key) > 512 or not key.isascii() or not key.isprintable() or " " in key:
            raise BadRequest("api_key must be 8 to 512 visible ASCII characters", param="api_key")
        digest = hash_key(key)
        if hmac.compare_digest(digest, self._admin):
            raise BadRequest("api_key must not be the admin key", param="api_key")
        async with self._busy(digest):
            return await self._start(body, key, digest)

    def _busy(self, key: bytes) -> asyncio.Lock:
        """What starts on one key take turns with. It lives as long as somebody holds it or waits for it."""
        return self._busy_keys.setdefault(key, asyncio.Lock())

    async def _start(self, body: StartSession, key: str, digest: bytes) -> Started:
        held = self._by_key.get(digest)
        if held is not None:
            if body.session_id == held.episode_id:
                return Started(session_id=held.episode_id, api_key=key)
            if not (self._config.is_online if body.refresh is None else body.refresh):
                raise Conflict(
                    f"this api_key is bound to the open session {held.episode_id}; end that, or use another key"
                )
        fork = None if body.origin_interaction_id is None else await self._fork(body.origin_interaction_id)
        # From here until it counts as opening nothing is waited for; and a start that is refused ends no session.
        if body.session_id is not None and (
            body.session_id in self._open or body.session_id in self._ended_ids or body.session_id in self._opening
        ):
            raise Conflict(f"session_id {body.session_id!r} is taken; leave it out to get a new one")
        ends_one = held is not None and held.episode_id in self._open
        if len(self._open) + len(self._opening) - ends_one >= self._config.max_sessions:
            raise Busy(f"{self._config.max_sessions} sessions are open, the most this server keeps", retry_after_s=5)
        if not self.permits.take() and self._config.needs_permit:
            raise Busy("no permit is free; POST /grant_capacity gives one", retry_after_s=1)
        episode_id = body.session_id or new_id("ep")
        self._opening.add(episode_id)
        try:
            if held is not None:
                await self._end(held, "done", "refreshed")
            session = await self._open_episode(body, episode_id, digest, fork)
        finally:
            self._opening.discard(episode_id)
        self._enter(session)
        return Started(session_id=session.episode_id, api_key=key)

    async def _open_episode(self, body: StartSession, episode_id: str, digest: bytes, fork: Fork | None) -> Session:
        """Have it in the book."""
        session = Session(
            episode_id=episode_id,
            run_id=body.run_id or self._config.run_id,
            task_id=body.task_id,
            key=digest,
            last_used=self._clock(),
            origin_id=body.origin_interaction_id,
        )
        session.episode = self._capture.open(session.episode_id, run_id=session.run_id)
        session.episode.fork = fork
        # Learners count in groups; a conversation that nobody drew is a group of its own.
        group_id = f"{session.run_id}/online/{session.episode_id}" if self._config.is_online else None
        opened = EpisodeOpened(
            task_id=body.task_id,
            group_id=body.group_id or group_id,
            attempt=body.attempt,
            is_eval=body.is_eval,
            version=self.version,
            task=body.task,
            key_sha256=digest.hex(),
            origin_interaction_id=body.origin_interaction_id,
        )
        await self._log.append(Event(run_id=session.run_id, episode_id=session.episode_id, fact=opened))
        return session

    def _enter(self, session: Session) -> None:
        self._open[session.episode_id] = session
        if session.key is not None:
            self._by_key[session.key] = session
            forgotten = self._ended.pop(session.key, None)
            if forgotten is not None and forgotten.episode_id != session.episode_id:
                forgotten.key = None  # the key speaks for the new session; the old one stays known by its id

    async def reward(self, session: Session, body: SetReward) -> str | None:
        """Record a reward on an interaction (its id is returned) or on the episode (None). Raises BadRequest."""
        if not math.isfinite(body.reward) or not math.isfinite(body.weight):
            raise BadRequest(
                f"reward and weight must be finite numbers, got {body.reward}, {body.weight}", param="reward"
            )
        if (body.start is None) != (body.end is None) or (
            body.start is not None and body.end is not None and not 0 <= body.start < body.end
        ):
            raise BadRequest(f"a span must be 0 <= start < end, got [{body.start}, {body.end})", param="start")
        target = await self._target(session, body)
        fact = RewardGiven(
            value=float(body.reward),
            name=body.name,
            weight=body.weight,
            source=body.source,
            start=body.start,
            end=body.end,
            details=body.details,
        )
        event = Event(run_id=session.run_id, episode_id=session.episode_id, interaction_id=target, fact=fact)
        if body.event_id is not None:
            try:
                event_id = bytes.fromhex(body.event_id)
            except ValueError:
                event_id = b""
            if len(event_id) != 16:
                raise BadRequest(f"event_id must be 32 hex digits, got {body.event_id!r}", param="event_id")
            event = msgspec.structs.replace(event, event_id=event_id)
        await self._log.append(event)
        self.touch(session)
        return target

    async def _target(self, session: Session, body: SetReward) -> str | None:
        if body.target == "episode":
            if body.interaction_id is not None:
                raise BadRequest("give an interaction_id or target='episode', not both", param="target")
            return None
        if session.episode is not None or session.pointers or session.state == "open":
            episode = await self.episode_of(session)
            known: Collection[str] = episode.places
            last = episode.last_main
            if session.state != "open" or self._open.get(session.episode_id) is not session:
                self._put_away(session, episode)
        else:
            known, last = session.interactions.split(), session.last_main
        if body.interaction_id is not None:
            if body.interaction_id not in known:
                raise BadRequest(
                    f"session {session.episode_id} has no interaction {body.interaction_id!r}", param="interaction_id"
                )
            return body.interaction_id
        if last is None:
            has = "no interactions to reward; make a model call first"
            if known:
                has = "only interactions that are not trained on or were pruned; give an interaction_id"
            raise BadRequest(
                f"session {session.episode_id} has {has}, or reward the episode with target='episode'",
                param="interaction_id",
            )
        return last

    def _put_away(self, session: Session, episode: Episode) -> None:
        """Keep of an ended session's episode what a late reward needs; its tokens are in the book."""
        session.interactions = " ".join(episode.places)
        session.last_main = episode.last_main
        session.episode = None
        self._capture.forget(episode)

    async def end(self, session: Session, state: EpisodeState, reason: str | None = None) -> int:
        """Close an episode and return how many interactions it has. Twice is once.

        On an online server that wants no permit the next episode of its key is open when this returns: an application
        calls on as ever.
        """
        key, was_open = session.key, session.state == "open"
        count = await self._end(session, state, reason)
        if self._config.is_online and was_open and key is not None:
            async with self._busy(key):
                if key not in self._by_key:
                    with suppress(Busy):  # no permit: the end stands, and the next one is opened by a start
                        await self._start(StartSession(task_id=session.task_id, run_id=session.run_id), "", key)
        return count

    async def _end(self, session: Session, state: EpisodeState, reason: str | None) -> int:
        session.ending = session.ending or anyio.Lock()
        async with session.ending:
            if session.state == "open":
                session.state = state  # from here on no call begins
                try:
                    if self.on_close is not None:
                        await self.on_close(session)
                    closed = EpisodeClosed(state=state, reason=reason)
                    await self._log.append(Event(run_id=session.run_id, episode_id=session.episode_id, fact=closed))
                except BaseException:
                    session.state = "open"
                    raise
                if session.episode is not None:
                    self._put_away(session, session.episode)
                self._leave(session)
        session.ending = None
        return len(session.interactions.split()) or len(session.pointers)

    def touch(self, session: Session) -> None:
        """It is in use now."""
        session.last_used = self._clock()

    def _leave(self, session: Session) -> None:
        self._open.pop(session.episode_id, None)
        if session.key is not None and self._by_key.get(session.key) is session:
            del self._by_key[session.key]
            self._ended[session.key] = session
        self._ended_ids[session.episode_id] = session
        while len(self._ended_ids) > self._config.max_ended:
            old = self._ended_ids.pop(next(iter(self._ended_ids)))
            if old.key is not None and self._ended.get(old.key) is old:
                del self._ended[old.key]

    def idle(self) -> list[Session]:
        """Open sessions that nobody used for `idle_s`. An online one that nobody ever used waits on: after its end
        there would be another of the same kind."""
        limit = self._clock() - self._config.idle_s
        idle = [s for s in self._open.values() if s.last_used < limit and not s.calls]
        return [s for s in idle if s.has_interactions] if self._config.is_online else idle

    # Coming back

    def remember(self) -> int:
        """Know again, from the log, the sessions that this writer opened; returns how many are open.

        Blocking: it reads the log once. Sessions count from now on as used. Those of other writers are theirs to end;
        of what others wrote only the end of one of ours matters, which they record where it was lost. Of those that
        ended the last are kept, as in life.
        """
        known: dict[str, Session] = {}
        closed: dict[str, EpisodeState] = {}
        ended: deque[str] = deque()  # of the known ones
        places: dict[str, list[tuple[int, str, int]]] = {}
        for batch in self._log.read():
            if not batch.num_rows:
                continue
            is_ours = batch.column("writer")[0].as_py() == self._log.writer
            kinds = _OF_OURS if is_ours else _OF_OTHERS
            rows = batch.select(_REMEMBERED).filter(pc.is_in(batch.column("kind"), value_set=kinds))
            stamps = rows.column("recorded_at").view(pa.int64()).to_pylist()
            columns = [rows.column(name).to_pylist() for name in ("writer", "position", "kind", "episode_id", "run_id")]
            for i, (writer, position, kind, episode_id, run_id) in enumerate(zip(*columns, strict=True)):
                if kind == "InteractionRecorded":
                    if episode_id in known:
                        places.setdefault(episode_id, []).append((stamps[i], writer, position))
                    continue
                fact = decode_fact(kind, rows.column("payload")[i].as_py())
                if isinstance(fact, EpisodeClosed):
                    if is_ours or fact.state != "done":
                        closed[episode_id] = fact.state
                    if episode_id in known:
                        ended.append(episode_id)
                elif isinstance(fact, EpisodeOpened):
                    known[episode_id] = Session(
                        episode_id=episode_id,
                        run_id=run_id,
                        task_id=fact.task_id,
                        key=bytes.fromhex(fact.key_sha256) if fact.key_sha256 else None,
                        last_used=self._clock(),
                        origin_id=fact.origin_interaction_id,
                    )
            while len(ended) > self._config.max_ended:
                forgotten = ended.popleft()
                for memory in (known, closed, places):
                    memory.pop(forgotten, None)
        for episode_id, session in known.items():
            session.pointers = [(writer, position) for _, writer, position in sorted(places.get(episode_id, ()))]
            self._enter(session)
            if episode_id in closed:
                session.state = closed[episode_id]
                self._leave(session)
        return len(self._open)
