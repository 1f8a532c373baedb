"""Model calls in progress: who waits for which answer, and what happens when a client goes.

A call lives on its own, apart from the connection that asked for it. Its client may go and come back within
`grace_s` (SDKs re-post the same bytes after a time-out or a cut), and then it is the same call, with the same answer
and ids. After that the engine is aborted, and the capture records what was sampled. Identical requests whose clients
all wait are different calls: k samples, and k retries of them find a call each. Nothing here knows a vendor's JSON.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from contextlib import aclosing
from types import TracebackType
from typing import Self

import anyio
import msgspec

from rollbook.store.errors import LogClosed, LogWriteFailed

from .capture import Capture, Hold, new_interaction_id
from .config import ServeConfig
from .errors import Busy, EngineFailed, EngineUnavailable, NotRecorded, ProxyError, SessionEnded
from .request import Piece, Reply, Request
from .sessions import Session, Sessions

_log = logging.getLogger("rollbook.proxy")

_KEPT = 512
"""Answers that nobody took, kept for a client that comes back, over all sessions. The book has them in any case."""


class Call:
    """One request on its way. `pieces` are (choice, piece) in order of arrival, kept for streams only."""

    def __init__(self, session: Session, request: Request) -> None:
        self.session = session
        self.request = request
        self.pieces: list[tuple[int, Piece]] = []
        self.n_sent = 0  # pieces that a client has been sent
        self.holds = [Hold() for _ in range(request.n)] if request.is_stream else []
        self.first: Piece | None = None  # of the first choice: has the interaction_id and prompt_tokens
        self.replies: list[Reply | None] = [None] * request.n
        self.error: ProxyError | None = None
        self.is_done = False
        self.has_gone = False  # aborted since nobody waited
        self.clients: set[Client] = set()
        self.turn: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None] | None = None
        self._is_stopped = False

    @property
    def answer(self) -> list[Reply]:
        """The replies of a call that is done and has no error."""
        return [reply for reply in self.replies if reply is not None]

    def delivered(self, choice: int) -> int:
        """Output tokens of a choice that reached the client."""
        return sum(len(piece.token_ids) for i, piece in self.pieces[: self.n_sent] if i == choice)

    def wake(self) -> None:
        """There is something new: for those who wait for it, or, if it is the end, for all."""
        for client in self.clients:
            if self.is_done or not client.is_pausing:
                client.wake()

    def look(self) -> None:
        """Clients came, went, or wait for other things: text is wanted at once while anybody waits for it."""
        is_on = all(client.is_pausing for client in self.clients)
        for hold in self.holds:
            hold.is_on = is_on

    def gather(self) -> None:
        """Have among `pieces` all that has come."""
        for choice, hold in enumerate(self.holds):
            self.pieces += [(choice, piece) for piece in hold.read()]

    def stop(self) -> None:
        """Give it up; what was sampled is recorded. Twice is once: recording is not to be disturbed."""
        if not self._is_stopped and self.task is not None:
            self._is_stopped = True
            self.task.cancel()


class Client:
    """One connection that waits for a call. retries: how often it has been asked before, as the client says."""

    def __init__(self, call: Call, retries: int) -> None:
        self.call = call
        self.retries = retries
        self.is_replaced = False  # a later try of the same client waits, too: this one's end was not noticed
        self.has_left = False
        self.is_served = False  # got all of it
        self.is_pausing = False  # what comes can wait
        self._future: asyncio.Future[None] | None = None
        call.clients.add(self)
        call.look()

    def wake(self) -> None:
        future = self._future
        if future is not None and not future.done():
            future.set_result(None)

    async def wait(self) -> None:
        """Until the call has something new, or the connection is gone."""
        self._future = asyncio.get_running_loop().create_future()
        try:
            await self._future
        finally:
            self._future = None

    async def pause(self, seconds: float) -> None:
        """Let what comes gather: until the time is over, the call done, or the connection gone."""
        timer = asyncio.get_running_loop().call_later(seconds, self.wake)
        self.is_pausing = True
        self.call.look()
        try:
            await self.wait()
        finally:
            timer.cancel()
            self.is_pausing = False
            self.call.look()

    def leave(self) -> None:
        """The connection is gone. Twice is once."""
        self.has_left = True
        self.wake()


class Calls:
    """All calls of a server: an async context manager, which stops those that are left when it is left."""

    def __init__(self, capture: Capture, sessions: Sessions, config: ServeConfig) -> None:
        self._capture = capture
        self._sessions = sessions
        self._config = config
        self._is_open = False
        self.log_failure: str | None = None  # why the log takes no more, from then on
        self._waited: dict[_Key, list[Call]] = {}  # undelivered calls
        self._failed: OrderedDict[_Key, int] = OrderedDict()  # tries that got no answer, and may be made again
        self._undelivered: deque[Call] = deque()  # those of them that are done, and nobody came back for yet
        self._running: set[Call] = set()
        self._turns: dict[str, deque[asyncio.Future[None]]] = {}

    async def __aenter__(self) -> Self:
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        with anyio.CancelScope(shield=True):
            await self._stop(list(self._running))

    @property
    def running(self) -> int:
        return len(self._running)

    def begin(self, session: Session, request: Request) -> Client:
        """Start a call, or join the one that this request repeats. Raises Busy."""
        key = _key(session, request)
        has_failed = request.retries > 0 and self._failed.get(key, 0) > 0
        known = self._repeated(key, request, has_failed=has_failed)
        if known is not None:
            return Client(known, request.retries)
        retries = request.retries
        if has_failed:
            self._failed[key] -= 1
            request = msgspec.structs.replace(request, retries=0)  # there is no answer to look for
        if not self._is_open:
            raise EngineUnavailable("the server is not running; come back when it is", retry_after_s=1)
        if self.log_failure is not None:
            raise NotRecorded(f"an answer could not be recorded, so none is sampled: {self.log_failure}")
        if session.calls >= self._config.max_concurrent and session.waiting >= self._config.max_waiting:
            self._note_failure(key)
            raise Busy(
                f"{session.calls} calls of this session are in progress and {session.waiting} wait, the most it may "
                "have; wait for an answer",
                retry_after_s=1,
            )
        call = Call(session, request)
        call.turn = self._queue(session)
        self._waited.setdefault(key, []).append(call)
        client = Client(call, retries)
        self._running.add(call)
        # A task of our own, not of a task group: it is made for every call, and this is half the price.
        call.task = asyncio.get_running_loop().create_task(self._run(call))
        return client

    def _repeated(self, key: "_Key", request: Request, *, has_failed: bool) -> Call | None:
        """The call that a request is, asked again: any of its idempotency key; without one, a call whose client has
        gone, or, where the client counts its retries and no such try has failed, one that an earlier try seems to
        wait for."""
        calls = [call for call in self._waited.get(key, ()) if not call.has_gone and call.error is None]
        if request.idempotency_key is not None:
            return next(iter(calls), None)
        alone = next((call for call in calls if not call.clients), None)
        if alone is not None or has_failed or not request.retries:
            return alone
        waiting = (client for call in calls for client in call.clients)
        earlier = next((one for one in waiting if one.retries < request.retries and not one.is_replaced), None)
        if earlier is None:
            return None
        earlier.is_replaced = True
        return earlier.call

    def _note_failure(self, key: "_Key") -> None:
        """A try has got no answer: who retries it is not to get that of another who sent the same."""
        self._failed[key] = self._failed.pop(key, 0) + 1
        if len(self._failed) > _KEPT:
            self._failed.popitem(last=False)

    def finish(self, client: Client) -> None:
        """A connection is through with its call: it took the answer, or it left."""
        call = client.call
        call.clients.discard(client)
        call.look()
        if client.is_served:
            # From here on it is in the book that a retry finds it.
            self._forget(call)
        elif not call.clients and not call.is_done:
            asyncio.get_running_loop().call_later(self._config.grace_s, self._abort_unless_awaited, call)
        elif call.error is not None:
            self._note_failure(_key(call.session, call.request))
        elif not call.clients:
            self._keep(call)

    def _keep(self, call: Call) -> None:
        """It is done, and nobody has it."""
        self._undelivered.append(call)
        if len(self._undelivered) > _KEPT:
            self._forget(self._undelivered.popleft())

    def _forget(self, call: Call) -> None:
        key = _key(call.session, call.request)
        calls = self._waited.get(key, [])
        if call in calls:
            calls.remove(call)
            if not calls:
                del self._waited[key]

    def _abort_unless_awaited(self, call: Call) -> None:
        if not call.clients and not call.is_done:
            call.has_gone = True
            self._forget(call)
            self._note_failure(_key(call.session, call.request))
            call.stop()

    async def stop_session(self, session: Session) -> None:
        """End every call of a session, and wait until they are recorded; who waits gets SessionEnded."""
        stopped = [c for c in self._running if c.session is session]
        for call in stopped:
            call.error = SessionEnded(f"session {session.episode_id} ended while this call was in progress")
        for memory in (self._waited, self._failed):
            for key in [key for key in memory if key[0] == session.episode_id]:
                del memory[key]
        await self._stop(stopped)

    async def _stop(self, calls: list[Call]) -> None:
        for call in calls:
            call.stop()
        tasks = [call.task for call in calls if call.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self, call: Call) -> None:
        session = call.session
        try:
            if call.turn is not None:
                await self._wait_turn(session, call.turn)
            try:
                await self._answer(call)
            finally:
                self._give_turn(session)
        except asyncio.CancelledError:
            call.error = call.error or EngineUnavailable("the call was stopped before it was answered", retry_after_s=1)
        except ProxyError as error:
            call.error = error
        except (LogWriteFailed, LogClosed) as error:
            _log.error("an answer could not be recorded and was not given: %s", error)
            self.log_failure = str(error)
            call.error = NotRecorded(f"the answer could not be recorded, so it was not given: {error}")
        except Exception:
            _log.exception("a model call failed in a way that nobody foresaw")
            call.error = EngineFailed("the call failed inside the server; its log says why")
        finally:
            call.is_done = True
            self._sessions.touch(session)
            self._running.discard(call)
            if call.error is not None:
                self._forget(call)
            elif not call.clients:
                self._keep(call)
            call.wake()

    async def _answer(self, call: Call) -> None:
        if call.request.n == 1:
            await self._pump(call, 0, call.request)
            return
        failed: list[ProxyError] = []
        # In order, so that the book can tell which answer was which choice.
        ids = sorted(new_interaction_id(call.request.dialect) for _ in range(call.request.n))

        async def pump(choice: int) -> None:
            one = msgspec.structs.replace(call.request, n=1, choice=choice, interaction_id=ids[choice])
            try:
                await self._pump(call, choice, one)
            except ProxyError as error:
                failed.append(error)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for choice in range(call.request.n):
                tasks.start_soon(pump, choice)
        if failed:
            raise failed[0]

    async def _pump(self, call: Call, choice: int, request: Request) -> None:
        episode = call.session.episode or await self._sessions.episode_of(call.session)
        keeps = request.is_stream
        hold = call.holds[choice] if keeps else None
        items = self._capture.stream(episode, request, delivered=lambda: call.delivered(choice), hold=hold)
        async with aclosing(items):  # type: ignore[type-var]
            async for item in items:
                if isinstance(item, Reply):
                    if item.finish_reason == "abort":
                        raise EngineUnavailable("the engine stopped before the answer was whole", retry_after_s=1)
                    call.replies[choice] = item
                elif item.interaction_id is not None:
                    if choice == 0:
                        call.first = item
                elif keeps:
                    call.pieces.append((choice, item))
                    call.wake()
        if call.replies[choice] is None:
            raise EngineFailed("the engine ended without an answer")

    def _queue(self, session: Session) -> "asyncio.Future[None] | None":
        """Count a call in: None if it may go on at once, else what to wait for."""
        if session.calls < self._config.max_concurrent:
            session.calls += 1
            return None
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.setdefault(session.episode_id, deque()).append(turn)
        session.waiting += 1
        return turn

    async def _wait_turn(self, session: Session, turn: "asyncio.Future[None]") -> None:
        try:
            await turn  # who gives it leaves its place to us
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._give_turn(session)
            raise
        finally:
            session.waiting -= 1

    def _give_turn(self, session: Session) -> None:
        waiting = self._turns.get(session.episode_id)
        while waiting:
            turn = waiting.popleft()
            if not turn.done():
                turn.set_result(None)  # our place is theirs
                return
        self._turns.pop(session.episode_id, None)
        session.calls -= 1


_Key = tuple[str, str | None, str | None]
"""Session, body and idempotency key: what two requests must share to be the same one."""


def _key(session: Session, request: Request) -> _Key:
    return session.episode_id, request.body_sha256, request.idempotency_key
