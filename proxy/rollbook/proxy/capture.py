"""From a request to a durable event: parent, prompt, engine, book, and only then the reply.

`Capture.stream` is the whole loop. What it keeps in memory of an open episode (`Episode`) is what the next request
needs: which messages lead to which node, and each node's own tokens. All of it can be rebuilt from the book, so a
restart in the middle of an episode is no more than `reopen`. Who waits for an answer, and whether two requests that
are there at once are one, is for the caller (`calls.py`) to say; HTTP and vendors' JSON are not known here.
"""

import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import pyarrow as pa

from rollbook.store.events import (
    Edge,
    Event,
    Float32s,
    Int32s,
    InteractionFailed,
    InteractionRecorded,
    Messages,
    decode_messages,
    encode_messages,
    from_batch,
    made_at,
    new_id,
)
from rollbook.store.log import Log
from rollbook.store.tree import DEFAULT_RULES, Match, Rules, TreeIndex

from .engine import EMPTY_IDS, EMPTY_LOGPROBS, Engine, FinishReason, Generation, Sampled, Sampling, check_sampling
from .errors import BadRequest, ContextOverflow, EngineFailed, EngineUnavailable, NotFound, ProxyError
from .forks import Fork
from .gather import Gather
from .metrics import Metrics
from .parsing import Cut, Parser, Reader
from .render import History, Path, Renderer, Turn, Ways, thoughts_in
from .replay import Recorded
from .request import Message, Piece, Reply, Request, Tool, ToolCall
from .seen import Seen
from .spans import Spans
from .tokenizer import Tokenizer

_ID_PREFIX = {"chat": "chatcmpl", "responses": "resp", "messages": "msg", "completions": "cmpl"}
_LONG = 20_000  # characters; a text above this is rendered and tokenised in a thread
_TOOL_CHARS = 2_000  # of a tool's description, about
_SYSTEM = ("system", "developer")

_NODE_SIZE = 1_500  # bytes of a node and its place in the tree, beside tokens and messages
_PATHS_SIZE = 2 << 20  # tokens of whole paths that are kept for the next turn

T = TypeVar("T")


def new_interaction_id(dialect: str) -> str:
    """As the vendor's own ids begin."""
    return new_id(_ID_PREFIX.get(dialect, "call"))


class CaptureSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How prompts are made and replies read."""

    model: str = "default"  # the name that replies carry where the client named none
    history: History = "template"  # where the template rewrites history: follow it, or keep the tokens (`exact`)
    # How it writes calls: hermes, json, llama, mistral, none; auto: as its template shows; see also outside.py.
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"  # how it writes its thoughts: think, none; auto; see also outside.py
    template: dict[str, Any] = {}  # variables that the chat template gets with every request
    rules: Rules = DEFAULT_RULES  # what is left out of a message's identity
    memory: int = 64 << 20  # bytes, about, that open episodes keep; above it the ones used least recently sleep


# ---------------------------------------------------------------- what is kept of an episode


@dataclass(slots=True, eq=False)
class Node:
    """One interaction of an open episode: what it adds to its parent's path (store/events.py), and where it is."""

    interaction_id: str
    parent: "Node | None"
    edge: Edge | None
    shared: int
    own_ids: Int32s  # prompt after the shared tokens, then output
    n_output: int
    n_messages: int  # of its request
    call_names: tuple[tuple[str, str], ...]  # (id, name) of the reply's tool calls
    cut: Cut | None
    ways: Ways  # how the template is used in its request and reply
    thoughts: int  # of its request, see render.thoughts_in
    n_replies: int  # assistant messages in its request
    depth: int
    tools: list[Tool]
    root: "Node | None" = None  # None: itself
    is_whole: bool = True  # its messages are its parent's and more; not after compaction or other tools
    is_orphan: bool = False  # its answer was not finished, or its client left
    is_trainable: bool = True
    has_children: bool = False
    given_to: int = 0  # the latest retry of its request that got it (`Request.retries`)
    idempotency_key: str | None = None
    origin_id: str | None = None  # in a fork: what it repeats
    place: tuple[str, int] | None = None  # writer and position in the log, once it is durable

    @property
    def n_prompt(self) -> int:
        """Tokens of the whole prompt."""
        return self.shared + len(self.own_ids) - self.n_output

    def path(self) -> Int32s:
        """Prompt and output, int32 [T]; put together from the parents'."""
        parts: list[Int32s] = [self.own_ids]
        node, wanted = self, self.shared
        while wanted:
            parent = node.parent
            assert parent is not None
            if wanted > parent.shared:
                parts.append(parent.own_ids[: wanted - parent.shared])
                wanted = parent.shared
            node = parent
        return np.concatenate(parts[::-1]) if len(parts) > 1 else self.own_ids

    def above(self) -> list[tuple[int, int]]:
        """(n_messages, n_prompt) of this node and of those above whose prompts begin its prompt, nearest first."""
        found = [(self.n_messages, self.n_prompt)]
        node, shared = self, self.shared
        while node.is_whole and node.parent is not None:
            node = node.parent
            if node.n_prompt <= shared:
                found.append((node.n_messages, node.n_prompt))
            shared = min(shared, node.shared)
        return found


@dataclass(slots=True, eq=False)
class Episode:
    """What an open episode needs in memory. Made by `Capture.open` or `Capture.reopen`.

    One that nobody has used for long, where many are open, is asleep: it knows its interactions' names and places in
    the book, and the rest is read again when a request comes.
    """

    episode_id: str
    run_id: str
    places: dict[str, tuple[str, int] | None] = field(default_factory=dict)  # by interaction; None: not durable yet
    tree: TreeIndex = field(default_factory=TreeIndex)
    nodes: dict[str, Node] = field(default_factory=dict)
    roots: list[tuple[Node, bool]] = field(default_factory=list)  # (node, whether it asked for a form of answer)
    bodies: dict[str, list[Node]] = field(default_factory=dict)  # sha256 of a request -> its interactions
    size: int = 0  # bytes, about
    n_running: int = 0  # requests in progress
    is_asleep: bool = False
    has_ended: bool = False
    main_when_asleep: str | None = None
    seen: Seen = field(default_factory=Seen)
    fork: Fork | None = None  # where it repeats another episode, up to a point

    @property
    def n_interactions(self) -> int:
        """Answered calls, those included whose client left."""
        return len(self.places)

    @property
    def last_main(self) -> str | None:
        """The interaction that a reward without an id belongs to: the last one of the main trajectory.

        The main trajectory is in the first tree of the episode whose root has tools, else in the first whose root did
        not ask for a form of answer (a side call does, for a title), else in the first. Orphans, and what was asked
        with `store: false`, have no part in it.
        """
        if self.is_asleep:
            return self.main_when_asleep
        with_tools = (root for root, has_form in self.roots if root.tools and not has_form)
        without_form = (root for root, has_form in self.roots if not has_form)
        main = next(with_tools, None) or next(without_form, None) or next((root for root, _ in self.roots), None)
        for node in reversed(self.nodes.values()):
            if (node.is_trainable or node.origin_id is not None) and (node.root or node) is main:
                return node.interaction_id
        return None

    def put(self, node: Node, *, body: str | None, has_form: bool) -> None:
        """Take a node in."""
        self.nodes[node.interaction_id] = node
        if node.parent is not None:
            node.parent.has_children = True
        elif node.is_trainable or node.is_orphan or node.origin_id is not None:
            self.roots.append((node, has_form))
        if body is not None:
            self.bodies.setdefault(body, []).append(node)

    def sleep(self) -> None:
        """Forget what the book knows."""
        self.main_when_asleep, self.is_asleep, self.size = self.last_main, True, 0
        self.tree, self.nodes, self.roots, self.bodies, self.seen = TreeIndex(), {}, [], {}, Seen()


@dataclass(slots=True, eq=False)
class _Prompt:
    """Where a request stands, and what the engine gets."""

    match: Match
    path: Path
    shared: int
    edge: Edge | None
    cause: str | None
    parent: Node | None
    ids: Int32s = field(init=False)  # of the path

    def __post_init__(self) -> None:
        self.ids = self.path.ids


class Hold:
    """In the hand of who takes a streamed answer: while it `is_on`, tokens gather, and are read all at once.

    They are read when `read` is called, when a token comes while it is off, and at the end. Text is never late by it
    but where its taker wants that. Without effect where a stop string may have to end the answer.
    """

    __slots__ = ("_call", "is_on")

    def __init__(self) -> None:
        self.is_on = False
        self._call: _Call | None = None

    def read(self) -> list[Piece]:
        """What has gathered, once; [] where that is nothing."""
        return [] if self._call is None else self._call.give()


# ---------------------------------------------------------------- the core


class Capture:
    """One model's proxy core. Needs an engine that is running and a log that is open; owns neither."""

    def __init__(
        self,
        *,
        log: Log,
        engine: Engine,
        tokenizer: Tokenizer,
        run_id: str,
        settings: CaptureSettings | None = None,
        metrics: Metrics | None = None,
        spans: Spans | None = None,
    ) -> None:
        self._log = log
        self._engine = engine
        self._tokenizer = tokenizer
        self._run_id = run_id
        self._metrics = metrics
        self._spans = spans
        self._settings = settings = settings or CaptureSettings()
        self.renderer = Renderer(
            tokenizer,
            history=settings.history,
            tool_parser=settings.tool_parser,
            reasoning_parser=settings.reasoning_parser,
            variables=settings.template,
        )
        self._gather = Gather(log)
        self._max_context: int | None = None
        self._awake: OrderedDict[Episode, None] = OrderedDict()  # idle, the one used least recently first
        self._waking = anyio.Lock()
        self._size = 0  # of all episodes that are awake
        self._paths: OrderedDict[Node, Path] = OrderedDict()  # whole paths of the newest nodes
        self._paths_size = 0

    def open(self, episode_id: str, *, run_id: str | None = None) -> Episode:
        """Memory for a new episode, of the capture's run unless told; its EpisodeOpened is the caller's to append."""
        return Episode(episode_id, run_id or self._run_id, tree=TreeIndex(self._settings.rules))

    def reopen(self, episode_id: str, rows: pa.Table) -> Episode:
        """The same for an episode that the book knows: its events as `Log.gather` gives them, oldest first. Blocks."""
        found = _events_in(rows)
        episode = Episode(episode_id, found[0][0].run_id if found else self._run_id)
        self._read(episode, found)
        return episode

    def _read(self, episode: Episode, found: list[tuple[Event, tuple[str, int]]]) -> None:
        """Take in what the book has; where some of it was pruned, only names and places."""
        calls = [(e, fact, place) for e, place in found if isinstance(fact := e.fact, InteractionRecorded)]
        if any(event.messages is None for event, _, _ in calls):
            episode.places.update({event.interaction_id or "": place for event, _, place in calls})
            return
        episode.tree = TreeIndex.from_events((event for event, _ in found), self._settings.rules)
        for event, fact, place in calls:
            self._remember(episode, event, fact, place)

    async def _wake(self, episode: Episode) -> None:
        """An episode that is in memory, and will be until it is let go of."""
        self._awake.pop(episode, None)
        if episode.is_asleep:
            async with self._waking:
                if episode.is_asleep:
                    places = [place for place in episode.places.values() if place is not None]
                    rows = await anyio.to_thread.run_sync(self._log.gather, places)
                    self._read(episode, _events_in(rows))
                    episode.is_asleep = False

    def _let_go(self, episode: Episode) -> None:
        episode.n_running -= 1
        if episode.n_running or episode.has_ended:
            return
        self._awake[episode] = None
        while self._size > self._settings.memory and self._awake:
            sleeper = self._awake.popitem(last=False)[0]
            self._size -= sleeper.size
            sleeper.sleep()

    def forget(self, episode: Episode) -> None:
        """The episode has ended; what is kept of it counts no more."""
        self._awake.pop(episode, None)
        self._size -= episode.size
        episode.size, episode.has_ended = 0, True

    async def stream(
        self,
        episode: Episode,
        request: Request,
        *,
        delivered: Callable[[], int] | None = None,
        hold: Hold | None = None,
    ) -> AsyncIterator[Piece | Reply]:
        """Answer one request, one choice (`request.n` is the caller's).

        Yields a Piece with the interaction_id once the request is known to be good, then the answer as it is sampled,
        and last the Reply, when its event is durable. Closing or cancelling means that the client left: the engine is
        aborted, and what was sampled is recorded as an orphan, which a later try of the same request replaces.
        delivered: asked then how many output tokens had reached the client; None: those in pieces taken from here.
        hold: see there; what it read is not yielded again.

        A request that says it is a retry of one whose answer is in the book gets that answer, with its ids.

        Raises BadRequest and its kin before the first piece, EngineFailed and EngineUnavailable at any time,
        LogWriteFailed and LogClosed instead of the Reply; then nothing was answered.
        """
        episode.n_running += 1
        self._gather.begin()
        try:
            await self._wake(episode)
            known = self._answered(episode, request)
            if known is not None:
                async for item in self._replay(known, request):
                    yield item
                return
            call = _Call(request.interaction_id or new_interaction_id(request.dialect))
            prompt: _Prompt | None = None
            try:
                prompt = await self._prompt(episode, request, await self._most_tokens(request))
                form = None if request.dialect == "completions" else self.renderer.form(prompt.ids, request)
                sampling = call.sampling = await self._sampling(request, len(prompt.ids))
                yield Piece(interaction_id=call.interaction_id, prompt_tokens=len(prompt.ids))
                reader = call.reader = self._reader(request, prompt.ids, sampling)
                call.reads_at_end = not (request.is_stream or request.stop)
                if hold is not None and request.is_stream and not request.stop:
                    call.hold, hold._call = hold, call
                generation = Generation(
                    request_id=call.interaction_id,
                    prompt_ids=prompt.ids,
                    sampling=sampling,
                    form=form,
                    is_streamed=not call.reads_at_end,
                )
                answers = self._engine.generate(generation)
                if episode.fork is not None:
                    answers, call.repeated = episode.fork.answer(generation, self._engine)
                async with aclosing(answers) as sampled:  # type: ignore[type-var]
                    async for some in sampled:
                        for piece in call.take(some):
                            call.n_given += len(piece.token_ids)  # none where nothing is streamed
                            yield piece
                        if reader.is_stopped:
                            call.finish_reason = "stop"
                            break
                if call.finish_reason is None:
                    raise EngineFailed("the engine's stream ended without a finish reason; ask again")
                if call.finish_reason == "abort":
                    raise EngineUnavailable("the engine stopped before the answer was whole", retry_after_s=1)
                if request.is_stream:
                    for piece in call.finish_reading():
                        yield piece
            except ProxyError as error:
                call.keep_unread()
                await self._record_failure(episode, request, error, call, prompt, delivered)
                raise
            except BaseException:
                call.keep_unread()
                if prompt is not None and call.n_output:
                    await self._record(episode, request, call, prompt, reached=call.reached(delivered))
                raise
            await self._record(episode, request, call, prompt)
            yield call.reply(request, prompt, self._settings.model)
        finally:
            self._gather.end()
            self._let_go(episode)

    def decode(self, ids: Int32s) -> str:
        """The text of tokens, special ones spelled out."""
        return self._tokenizer.decode(ids)

    async def count(self, request: Request) -> int:
        """Tokens of the prompt that a request would begin a conversation with. Raises BadRequest."""
        return len((await self._prompt(self.open(""), request)).ids)

    # ------------------------------------------------------------ the prompt

    async def _prompt(self, episode: Episode, request: Request, most: int | None = None) -> _Prompt:
        """Find the parent and make the prompt. Raises BadRequest, NotFound, and ContextOverflow where its text's length
        alone says that it has more than `most` tokens."""
        messages, parent_id = request.messages, request.parent_id
        if not messages and parent_id is None:
            raise BadRequest("messages is empty; send at least one", param="messages")
        variables = {k: v for k, v in request.template.items() if k in self._tokenizer.template_names}
        if request.dialect == "completions":
            raw = messages[0].get("content") or ""
            match = episode.tree.resolve([{"role": "user", "content": raw if isinstance(raw, str) else str(raw)}])
            match = msgspec.structs.replace(match, parent_id=None, n_matched=0, edge=None, kept=None)
            ids = await _aside(len(raw), partial(self.renderer.raw, raw, most=most))
            return _Prompt(match, Path(ids), 0, None, None, None)
        if parent_id is not None:
            parent = episode.nodes.get(parent_id)
            if parent is None:
                raise NotFound(
                    f"no interaction {parent_id!r} in this session; name one that it answered",
                    param="previous_response_id",
                )
            if self._begins_anew(parent, request, episode):
                told = await anyio.to_thread.run_sync(self._told, episode, parent)
                led = bool(messages) and messages[0].get("role") in _SYSTEM
                messages = [*messages[:1], *_without_system(told), *messages[1:]] if led else [*told, *messages]
                parent_id = None
        match = episode.tree.resolve(messages, request.tools, parent_id)
        repeated = episode.nodes.get(match.repeats_id or "")
        if repeated is not None and repeated.is_orphan and not repeated.has_children:
            match = msgspec.structs.replace(match.as_retry(), kept=repeated.n_messages)
            n_prompt = repeated.n_prompt
            return _Prompt(match, Path(repeated.path()[:n_prompt]), n_prompt, "retries", match.cause, repeated)
        parent = episode.nodes[match.parent_id] if match.parent_id is not None else None
        n_chars = _size(match.messages[match.n_matched :])
        if parent is None:
            root = partial(self.renderer.root, match.messages, request.tools, variables, most=most)
            n_chars += _TOOL_CHARS * len(request.tools)
            return _Prompt(match, Path(await _aside(n_chars, root)), 0, None, match.cause, None)
        whole: Callable[[], list[Message]] = partial(list, match.messages)
        if parent_id is not None and match.n_matched <= parent.n_messages:  # only what is new came
            whole, n_chars = partial(self._whole, episode, parent, match), max(n_chars, _LONG)
        path = self._path(parent)
        ways = self.renderer.ways((), request.tools, variables, parent.ways)
        if ways.has_reasoning or not self.renderer.check(ways).is_exact:  # then all of it may have to be written
            n_chars += 4 * path.n
        turn = self._turn(episode, parent, path)
        child = partial(self.renderer.child, turn, match, whole, request.tools, variables, most=most)
        rendered = await _aside(n_chars, child)
        path = path.plus(rendered.more, kept=rendered.kept)
        return _Prompt(match, path, rendered.shared, rendered.edge, rendered.cause, parent)

    def _begins_anew(self, parent: Node, request: Request, episode: Episode) -> bool:
        """Whether a request that names its parent brings another system message or other tools."""
        if request.tools != parent.tools:
            return True
        messages = request.messages
        return (
            bool(messages)
            and messages[0].get("role") in _SYSTEM
            and episode.tree.resolve(messages, request.tools, parent.interaction_id).n_matched == 0
        )

    def _told(self, episode: Episode, node: Node) -> list[Message]:
        """A node's whole conversation, its reply included, from the book. Blocks."""
        chain: list[Node] = []
        at: Node | None = node
        while at is not None:
            chain.append(at)
            at = at.parent if at.is_whole or at.edge == "retries" else None
        places = [n.place for n in reversed(chain)]
        if None in places:
            raise NotFound(
                f"interaction {node.interaction_id!r} is not recorded yet; ask again", param="previous_response_id"
            )
        rows = self._log.gather([place for place in places if place is not None])
        told: list[Message] = []
        for text in rows.column("messages").to_pylist():
            said = decode_messages(text)
            if said.kept is not None:
                told = told[: said.kept]
            elif said.resent is not None:
                told[-1] = said.resent
            told += [*said.request, said.reply]
        return told

    def _whole(self, episode: Episode, parent: Node, match: Match) -> list[Message]:
        return [*self._told(episode, parent), *map(dict, match.messages[match.n_matched :])]

    def _turn(self, episode: Episode, node: Node, path: Path) -> Turn:
        return Turn(
            path_ids=path.ids,
            n_prompt=node.n_prompt,
            n_messages=node.n_messages,
            reply=partial(episode.tree.reply, node.interaction_id),
            call_names=node.call_names,
            cut=node.cut,
            thoughts=node.thoughts,
            ways=node.ways,
            depth=node.depth,
            above=node.above,
        )

    def _path(self, node: Node) -> Path:
        """A node's path; the newest are kept, since the next turn asks for them."""
        path = self._paths.pop(node, None)
        if path is None:
            return Path(node.path())
        self._paths_size -= path.n
        return path

    def _keep_path(self, node: Node, path: Path) -> None:
        self._paths[node] = path
        self._paths_size += path.n
        while self._paths_size > _PATHS_SIZE:
            self._paths_size -= self._paths.popitem(last=False)[1].n

    async def _most_tokens(self, request: Request) -> int:
        """What prompt and answer together may have."""
        if self._max_context is None:
            self._max_context = (await self._engine.health()).max_context
        asked = request.max_total_tokens
        return self._max_context if asked is None else min(self._max_context, asked)

    async def _sampling(self, request: Request, n_prompt: int) -> Sampling:
        """What the engine is asked for: the client's wishes, within the context that is left."""
        check_sampling(request.sampling)
        most = await self._most_tokens(request)
        room = most - n_prompt
        if room < 1:
            raise ContextOverflow.of(n_prompt, most)
        wanted = request.sampling.max_tokens
        eos = [i for i in self._tokenizer.eos_ids if i not in request.sampling.stop_token_ids]
        return msgspec.structs.replace(
            request.sampling,
            max_tokens=room if wanted is None else min(wanted, room),
            stop_token_ids=(*request.sampling.stop_token_ids, *eos),
        )

    def _reader(self, request: Request, prompt_ids: Int32s, sampling: Sampling) -> Reader:
        chain: list[Parser] = []
        if request.dialect != "completions":
            tools = [] if request.tool_choice == "none" else request.tools
            chain = self.renderer.parsers(prompt_ids, tools)
        return Reader(
            self.renderer.vocabulary,
            stop=request.stop,
            stop_ids=sampling.stop_token_ids,
            parsers=chain,
            keep_tokens=request.is_stream,
        )

    # ------------------------------------------------------------ the book

    async def _record(
        self,
        episode: Episode,
        request: Request,
        call: "_Call",
        prompt: _Prompt,
        *,
        reached: int | None = None,
        also: tuple[Event, ...] = (),
    ) -> None:
        """Make the answer durable and known. reached: output tokens that the client got, where it did not get all."""
        call.finish_reading()
        match, reply, repeated = prompt.match, call.message(), call.repeated
        is_orphan = reached is not None
        is_complete = call.n_claimed is None or call.n_claimed == call.n_output
        reply_hash = episode.tree.add(call.interaction_id, match, reply)
        said = Messages(
            request=[*match.messages[match.n_matched :]],  # type: ignore[list-item]
            reply=reply,
            tools=request.tools if match.kept == 0 else (request.tools or None) if prompt.parent is None else None,
            resent=match.resent,
            kept=match.kept,
        )
        fact = InteractionRecorded(
            parent_id=match.parent_id,
            edge=prompt.edge,
            cause=prompt.cause,
            shared=prompt.shared,
            prompt_length=len(prompt.ids),
            prefix_hash=match.prefix_hash,
            reply_hash=reply_hash,
            dialect=request.dialect,
            model=request.model,
            role=request.role,
            sampling=_sampling_facts(call.sampling, request),
            logprobs_mode=self._engine.logprobs_mode if repeated is None else repeated.logprobs_mode,
            finish_reason="abort" if is_orphan else call.finish,
            is_trainable=request.store and not is_orphan and repeated is None,
            origin_id=None if repeated is None else repeated.interaction_id,
            capture="complete" if is_complete else "incomplete",
            delivered=reached,
            request_sha256=request.body_sha256,
            idempotency_key=request.idempotency_key,
            seconds=call.seconds,
            first_token_seconds=call.first_token_seconds,
        )
        event = Event(
            run_id=episode.run_id,
            episode_id=episode.episode_id,
            interaction_id=call.interaction_id,
            fact=fact,
            messages=encode_messages(said),
            prompt_ids=prompt.ids[prompt.shared :],
            output_ids=call.output_ids,
            logprobs=call.logprobs,
            versions=call.versions,
        )
        cut = call.reader.cut if call.reader is not None else None
        node = self._remember(episode, event, fact, None, said=said, cut=cut, tools=request.tools, told=match.messages)
        node.given_to = request.retries
        self._keep_path(node, prompt.path.plus(call.output_ids))
        positions = await self._gather.append(event, *also)
        self._count(call, prompt)
        if self._log.writer is not None:
            node.place = episode.places[node.interaction_id] = (self._log.writer, positions[0])

    def _count(self, call: "_Call", prompt: _Prompt) -> None:
        """An answer is durable."""
        if self._metrics is None:
            return
        committed = time.perf_counter() - call.started - call.seconds  # since the last token
        self._metrics.commit.add(committed)
        if call.repeated is not None:
            self._metrics.repeated += 1
            return
        n_prompt = len(prompt.ids)
        self._metrics.sampled(n_prompt, prompt.shared, call.n_output, call.seconds, call.first_token_seconds)
        if self._spans is not None:
            self._spans.sampled(seconds=call.seconds, first_token=call.first_token_seconds, committed=committed)

    async def _record_failure(
        self,
        episode: Episode,
        request: Request,
        error: ProxyError,
        call: "_Call",
        prompt: _Prompt | None,
        delivered: Callable[[], int] | None,
    ) -> None:
        """A failure is a fact; what had been sampled is kept, as an orphan."""
        failed = Event(
            run_id=episode.run_id,
            episode_id=episode.episode_id,
            fact=InteractionFailed(
                error=type(error).__name__,
                message=error.message,
                status=error.status,
                dialect=request.dialect,
                parent_id=prompt.match.parent_id if prompt is not None else None,
            ),
        )
        if prompt is not None and call.n_output:
            reached = call.reached(delivered)
            await self._record(episode, request, call, prompt, reached=reached, also=(failed,))
        else:
            await self._gather.append(failed)

    def _remember(
        self,
        episode: Episode,
        event: Event,
        fact: InteractionRecorded,
        place: tuple[str, int] | None,
        *,
        said: Messages | None = None,
        cut: Cut | None = None,
        tools: list[Tool] | None = None,
        told: Sequence[Mapping[str, Any]] = (),
    ) -> Node:
        """The node of an event, taken into the episode. The tree index has it already."""
        output = EMPTY_IDS if event.output_ids is None else event.output_ids
        delta = EMPTY_IDS if event.prompt_ids is None else event.prompt_ids
        if said is None:  # from the book
            said = decode_messages(event.messages or b"")
            cut = self._cut_again(output, fact.sampling)
        parent = episode.nodes.get(fact.parent_id or "")
        is_retry = fact.edge == "retries"
        if parent is not None and is_retry:
            kept, ways, depth = parent.n_messages, parent.ways, parent.depth
            thoughts, n_replies, tools = parent.thoughts, parent.n_replies, parent.tools
        elif parent is not None and said.kept is None:
            back = said.resent
            if back is None and parent.ways.has_reasoning:  # otherwise its reply has none
                back = episode.tree.reply(parent.interaction_id)
            kept, depth = parent.n_messages + 1, parent.depth + 1
            thoughts = parent.thoughts | thoughts_in([] if back is None else [back]) << parent.n_replies
            n_replies, tools, ways = parent.n_replies + 1, parent.tools, parent.ways
        else:
            kept, depth, thoughts, n_replies, ways = said.kept or 0, 1, 0, 0, None
            tools = tools if tools is not None else said.tools or []
        assert tools is not None
        if said.request:
            thoughts |= thoughts_in(said.request) << n_replies
            n_replies += sum(m.get("role") == "assistant" for m in said.request)
        n_messages = kept + len(said.request)
        ways = self.renderer.ways((*said.request, said.reply), tools, None, ways)
        if ways.has_reasoning and len(told) == n_messages:  # as it was told now, not as it once was
            thoughts = thoughts_in(told)
        node = Node(
            interaction_id=event.interaction_id or "",
            parent=parent,
            edge=fact.edge,
            shared=fact.shared,
            own_ids=np.concatenate((delta, output)),
            n_output=len(output),
            n_messages=n_messages,
            call_names=tuple((c["id"], c["function"]["name"]) for c in said.reply.get("tool_calls") or ()),
            cut=cut,
            ways=ways,
            thoughts=thoughts,
            n_replies=n_replies,
            depth=depth,
            tools=tools,
            root=None if parent is None else parent.root or parent,
            is_whole=parent is not None and (said.kept is None or is_retry),
            is_orphan=fact.delivered is not None,
            is_trainable=fact.is_trainable,
            idempotency_key=fact.idempotency_key,
            origin_id=fact.origin_id,
            place=place,
        )
        episode.put(node, body=fact.request_sha256, has_form="response_format" in fact.sampling)
        episode.places[node.interaction_id] = place
        size = node.own_ids.nbytes + 2 * len(event.messages or b"") + _NODE_SIZE
        episode.size += size
        self._size += size
        return node

    def _cut_again(self, output: Int32s, sampling: dict[str, Any]) -> Cut | None:
        """What a stop string left of an output that is read back from the book."""
        if not (stop := sampling.get("stop")):
            return None
        reader = Reader(self.renderer.vocabulary, stop=stop, stop_ids=sampling.get("stop_token_ids", ()))
        reader.push(output, EMPTY_LOGPROBS)
        return reader.cut

    # ------------------------------------------------------------ retries

    def _answered(self, episode: Episode, request: Request) -> Node | None:
        """The interaction that has answered this request already, where the client says that it is the same one.

        By its key it is found as often as it is asked for. Without one, several clients may have sent the same bytes:
        each of them counts its retries, so an answer is given to one first retry, one second retry, and so on.
        """
        is_named = request.idempotency_key is not None
        if request.body_sha256 is None or not (is_named or request.retries):
            return None
        nodes = [
            node
            for node in episode.bodies.get(request.body_sha256, ())
            if node.idempotency_key == request.idempotency_key
        ]
        # In the order of their ids, which is that of the choices of a request.
        whole = sorted((n for n in nodes if not n.is_orphan and n.place is not None), key=lambda n: n.interaction_id)
        if is_named:
            return whole[request.choice] if request.choice < len(whole) else None
        if any(node.is_orphan and not node.has_children for node in nodes):
            return None  # it is that one, which broke off, that is asked again
        return next((n for n in whole if n.given_to < request.retries and not n.has_children), None)

    async def _replay(self, node: Node, request: Request) -> AsyncIterator[Piece | Reply]:
        """An answer that is in the book, once more."""
        node.given_to = request.retries
        assert node.place is not None
        rows = await anyio.to_thread.run_sync(self._log.gather, [node.place])
        [event] = from_batch(rows.combine_chunks().to_batches()[0])
        fact, said = event.fact, decode_messages(event.messages or b"").reply
        assert isinstance(fact, InteractionRecorded)
        output = EMPTY_IDS if event.output_ids is None else event.output_ids
        logprobs = EMPTY_LOGPROBS if event.logprobs is None else event.logprobs
        calls = tuple(
            ToolCall(id=c["id"], name=c["function"]["name"], arguments=c["function"]["arguments"])
            for c in said.get("tool_calls") or ()
        )
        yield Piece(interaction_id=node.interaction_id, prompt_tokens=node.n_prompt)
        reply = Reply(
            interaction_id=node.interaction_id,
            content=said.get("content"),
            reasoning=said.get("reasoning_content"),
            tool_calls=calls,
            finish_reason=fact.finish_reason or "stop",
            prompt_tokens=node.n_prompt,
            sampled=output,
            sampled_logprobs=logprobs,
            prompt_ids=node.path()[: node.n_prompt].tolist() if request.extra.get("return_token_ids") else None,
            created=int(made_at(node.interaction_id) or event.recorded_at / 1e6),  # as it was said the first time
            model=fact.model,
            version=int(event.versions[-1]) if event.versions is not None and len(event.versions) else 0,
        )
        for piece in _pieces_of(reply):
            yield piece
        yield reply


@dataclass(slots=True, eq=False)
class _Call:
    """What has come from the engine so far."""

    interaction_id: str
    sampling: Sampling = Sampling()  # noqa: RUF009 - frozen
    reader: Reader | None = None
    started: float = field(default_factory=time.perf_counter)
    reads_at_end: bool = False  # nobody waits for text on the way
    is_read: bool = False
    hold: Hold | None = None
    repeated: Recorded | None = None  # what of the record it is, in a fork
    n_unread: int = 0  # of the latest `ids`, which the reader has not seen
    unseen: list[Piece] = field(default_factory=list)  # read, and not given
    ids: list[Int32s] = field(default_factory=list)
    lps: list[Float32s] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)  # (version, tokens)
    n_output: int = 0
    n_given: int = 0  # output tokens in pieces that were taken
    n_claimed: int | None = None  # output tokens that the engine says it sampled
    finish_reason: FinishReason | None = None
    first_token_seconds: float | None = None
    seconds: float = 0.0

    def take(self, sampled: Sampled) -> list[Piece]:
        """Keep tokens and give what they say. Raises EngineFailed for ids without logprobs."""
        ids, logprobs = sampled.ids, sampled.logprobs
        self.seconds = time.perf_counter() - self.started
        if len(ids) != len(logprobs):
            raise EngineFailed(
                f"the engine sent {len(ids)} token ids with {len(logprobs)} logprobs; each id needs its own"
            )
        self.finish_reason = sampled.finish_reason or self.finish_reason
        if sampled.n_sampled is not None:
            self.n_claimed = sampled.n_sampled
        if not len(ids) or self.reader is None:
            return []
        if self.first_token_seconds is None:
            self.first_token_seconds = self.seconds
        n, pieces = len(ids), []
        if self.reads_at_end or (self.hold is not None and self.hold.is_on):
            self.n_unread += 1
        else:
            if self.n_unread:
                pieces = self.read()
            before = self.reader.n_taken
            pieces += self.reader.push(ids, logprobs)
            n = self.reader.n_taken - before
            if self.reader.is_stopped:
                self.n_claimed = None  # we ended it
        self.ids.append(ids if n == len(ids) else ids[:n])
        self.lps.append(logprobs if n == len(ids) else logprobs[:n])
        if self.spans and self.spans[-1][0] == sampled.version:
            self.spans[-1] = (sampled.version, self.spans[-1][1] + n)
        else:
            self.spans.append((sampled.version, n))
        self.n_output += n
        return pieces

    def read(self) -> list[Piece]:
        """What the reader has not seen yet."""
        n, self.n_unread = self.n_unread, 0
        if not n or self.reader is None:
            return []
        return self.reader.push(np.concatenate(self.ids[-n:]), np.concatenate(self.lps[-n:]))

    def give(self) -> list[Piece]:
        """What nobody has been given yet; for `Hold`."""
        pieces, self.unseen = self.unseen + self.read(), []
        return pieces

    def keep_unread(self) -> None:
        """Where the answer breaks off: what came is still to be given, though the recording of it reads to the end."""
        if self.hold is not None:
            self.unseen += self.read()

    def finish_reading(self) -> list[Piece]:
        """What was not read, and what the reader held back. Twice is once."""
        if self.reader is None or self.is_read:
            return []
        self.is_read = True
        return self.read() + self.reader.finish()

    def reached(self, delivered: Callable[[], int] | None) -> int:
        """Output tokens that the client had got."""
        return min(self.n_given if delivered is None else delivered(), self.n_output)

    @property
    def output_ids(self) -> Int32s:
        if len(self.ids) == 1:
            return self.ids[0]
        if self.ids and not self.n_unread:  # joined once: it is asked for several times
            self.ids = [np.concatenate(self.ids)]
            return self.ids[0]
        return np.concatenate(self.ids) if self.ids else EMPTY_IDS

    @property
    def logprobs(self) -> Float32s:
        if len(self.lps) == 1:
            return self.lps[0]
        if self.lps and not self.n_unread:
            self.lps = [np.concatenate(self.lps)]
            return self.lps[0]
        return np.concatenate(self.lps) if self.lps else EMPTY_LOGPROBS

    @property
    def versions(self) -> Int32s:
        versions, counts = zip(*self.spans, strict=True) if self.spans else ((), ())
        return np.repeat(np.asarray(versions, np.int32), np.asarray(counts, np.int64))

    @property
    def finish(self) -> str:
        has_calls = self.reader is not None and bool(self.reader.tool_calls)
        return "tool_calls" if has_calls and self.finish_reason == "stop" else self.finish_reason or "stop"

    def message(self) -> Message:
        """The answer as an assistant message in chat-completions form."""
        said: Message = {"role": "assistant", "content": None}
        if self.reader is not None:
            said["content"] = self.reader.content
            if self.reader.reasoning is not None:
                said["reasoning_content"] = self.reader.reasoning
            if calls := self.reader.tool_calls:
                said["tool_calls"] = [
                    {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                    for c in calls
                ]
        return said

    def reply(self, request: Request, prompt: _Prompt, model: str) -> Reply:
        assert self.reader is not None
        return Reply(
            interaction_id=self.interaction_id,
            content=self.reader.content,
            reasoning=self.reader.reasoning,
            tool_calls=self.reader.tool_calls,
            finish_reason=self.finish,
            prompt_tokens=len(prompt.ids),
            sampled=self.output_ids,
            sampled_logprobs=self.logprobs,
            prompt_ids=prompt.ids.tolist() if request.extra.get("return_token_ids") else None,
            created=int(made_at(self.interaction_id) or time.time()),
            model=request.model if request.model != "default" else model,
            version=self.spans[-1][0] if self.spans else 0,
        )


def _events_in(rows: pa.Table) -> list[tuple[Event, tuple[str, int]]]:
    """Events and where they stand in the log."""
    found: list[tuple[Event, tuple[str, int]]] = []
    for batch in rows.combine_chunks().to_batches():
        places = zip(batch.column("writer").to_pylist(), batch.column("position").to_pylist(), strict=True)
        found += zip(from_batch(batch), places, strict=True)
    return found


def _pieces_of(reply: Reply) -> Iterator[Piece]:
    """A finished answer as a stream would have given it, in as few pieces as can be."""
    ids, logprobs = reply.output_ids, reply.logprobs
    if reply.reasoning:
        yield Piece(reasoning=reply.reasoning, token_ids=ids, logprobs=logprobs)
        ids, logprobs = [], []
    if reply.content:
        yield Piece(text=reply.content, token_ids=ids, logprobs=logprobs)
        ids, logprobs = [], []
    for n, call in enumerate(reply.tool_calls):
        yield Piece(tool_index=n, tool_id=call.id, tool_name=call.name, token_ids=ids, logprobs=logprobs)
        yield Piece(tool_index=n, tool_arguments=call.arguments)
        ids, logprobs = [], []
    if ids:
        yield Piece(token_ids=ids, logprobs=logprobs)


def _sampling_facts(sampling: Sampling, request: Request) -> dict[str, Any]:
    """What the tokens were drawn with; temperature, top_p and top_k always, since logprobs mean nothing without."""
    facts: dict[str, Any] = msgspec.to_builtins(sampling)
    facts |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    if request.stop:
        facts["stop"] = list(request.stop)
    if request.response_format is not None:
        facts["response_format"] = request.response_format
    if request.tool_choice not in ("auto", "none"):
        facts["tool_choice"] = request.tool_choice
    if "response_format" in facts or "tool_choice" in facts:
        facts["is_held"] = True  # to that form: what would break it had probability zero, see engine.Form
    return facts


def _without_system(messages: Sequence[Message]) -> list[Message]:
    return [m for m in messages if m.get("role") not in _SYSTEM]


def _size(messages: "Sequence[Any]") -> int:
    """About how many characters messages have, without looking closely."""
    n = 0
    for message in messages:
        content = message.get("content")
        n += len(content) if isinstance(content, str) else 256 * len(content or ())
    return n


async def _aside(n_chars: int, work: Callable[[], T]) -> T:
    """Do long work in a thread, short work here."""
    return work() if n_chars < _LONG else await anyio.to_thread.run_sync(work)
