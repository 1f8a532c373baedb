"""From a request to a durable event: parent, prompt, engine, book, and only then the reply.

`Capture.stream` is the whole loop. What it keeps in memory of an open episode (`Episode`) is what the next request
needs: which messages lead to which node, and each node's own tokens. All of it can be rebuilt from the book, so a
restart in the middle of an episode is no more than `reopen`. Who waits for an answer, and whether two identical
requests are one, is for the caller (`calls.py`) to say; HTTP and vendors' JSON are not known here.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec
import numpy as np

from rollbook.store.events import (
    Event,
    Float32s,
    Int32s,
    InteractionFailed,
    InteractionRecorded,
    Messages,
    encode_messages,
    new_id,
)
from rollbook.store.log import Log

from .engine import Engine, FinishReason, Generation, Sampled
from .errors import ContextOverflow, EngineFailed, ProxyError
from .request import Piece, Reply, Request
from .tokenizer import Tokenizer

_ID_PREFIX = {"chat": "chatcmpl", "responses": "resp", "messages": "msg", "completions": "cmpl"}


@dataclass(slots=True, eq=False)
class Node:
    """One interaction of an open episode: its own tokens and its parent. path: see store/events.py."""

    interaction_id: str
    parent: "Node | None"
    shared: int
    prompt_ids: Int32s  # after the shared ones
    output_ids: Int32s

    def path(self) -> Int32s:
        """Every token up to and with the output, int32 [T]; built when asked for."""
        parts: list[Int32s] = []
        node: Node | None = self
        keep: int | None = None
        while node is not None:
            own = np.concatenate((node.prompt_ids, node.output_ids)) if len(node.output_ids) else node.prompt_ids
            if keep is not None:
                own = own[: max(0, keep - node.shared)]
                keep = min(keep, node.shared)
            else:
                keep = node.shared
            parts.append(own)
            if keep == 0:
                break
            node = node.parent
        return np.concatenate(parts[::-1])


@dataclass(slots=True, eq=False)
class Episode:
    """What an open episode needs in memory. Made by `Capture.open` or `Capture.reopen`."""

    episode_id: str
    run_id: str
    nodes: dict[str, Node] = field(default_factory=dict)

    @property
    def n_interactions(self) -> int:
        """Answered calls, orphans included."""
        return len(self.nodes)

    @property
    def last_main(self) -> str | None:
        """The interaction that a reward without an id belongs to: the last one of the main trajectory."""
        return next(reversed(self.nodes), None)


class CaptureSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How prompts are made and replies read."""

    model: str = "default"  # the name that replies carry where the client named none


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
    ) -> None:
        self._log = log
        self._engine = engine
        self._tokenizer = tokenizer
        self._run_id = run_id
        self._settings = settings or CaptureSettings()
        self._max_context: int | None = None

    def open(self, episode_id: str, *, run_id: str | None = None) -> Episode:
        """Memory for a new episode, of the capture's run unless told; its EpisodeOpened is the caller's to append."""
        return Episode(episode_id, run_id or self._run_id)

    def reopen(self, episode_id: str, events: "list[Event]") -> Episode:
        """The same for an episode that the book already knows: its events, oldest first."""
        episode = Episode(episode_id, events[0].run_id if events else self._run_id)
        for event in events:
            fact = event.fact
            if isinstance(fact, InteractionRecorded) and event.interaction_id is not None:
                node = Node(
                    event.interaction_id,
                    episode.nodes.get(fact.parent_id or ""),
                    fact.shared,
                    _ints(event.prompt_ids),
                    _ints(event.output_ids),
                )
                episode.nodes[node.interaction_id] = node
        return episode

    async def stream(
        self, episode: Episode, request: Request, *, delivered: Callable[[], int] | None = None
    ) -> AsyncIterator[Piece | Reply]:
        """Answer one request, one choice (`request.n` is the caller's).

        Yields a Piece with the interaction_id once the request is known to be good, then the answer as it is sampled,
        and last the Reply, when its event is durable. Closing or cancelling means that the client left: the engine is
        aborted, and what was sampled is recorded as an orphan. delivered: asked then how many output tokens had
        reached the client; None: those in pieces taken from here.

        Raises BadRequest and its kin before the first piece, EngineFailed and EngineUnavailable at any time,
        LogWriteFailed and LogClosed instead of the Reply; then nothing was answered.
        """
        call = _Call(interaction_id=request.interaction_id or new_id(_ID_PREFIX.get(request.dialect, "call")))
        try:
            prompt_ids = await self._prompt(request)
            yield Piece(interaction_id=call.interaction_id, prompt_tokens=len(prompt_ids))
            room = self._max_context - len(prompt_ids) if self._max_context is not None else None
            wanted = request.sampling.max_tokens
            limit = room if wanted is None else wanted if room is None else min(wanted, room)
            sampling = msgspec.structs.replace(
                request.sampling,
                max_tokens=limit,
                stop_token_ids=(*request.sampling.stop_token_ids, *self._tokenizer.eos_ids),
            )
            generation = Generation(request_id=call.interaction_id, prompt_ids=prompt_ids, sampling=sampling)
            async with aclosing(self._engine.generate(generation)) as pieces:  # type: ignore[type-var]
                async for sampled in pieces:
                    call.take(sampled)
                    text = self._tokenizer.decode(sampled.ids, skip_special_tokens=True)
                    call.text += text
                    if len(sampled.ids):
                        yield Piece(text=text, token_ids=sampled.ids.tolist(), logprobs=sampled.logprobs.tolist())
                        call.n_delivered += len(sampled.ids)
            if call.finish_reason is None:
                raise EngineFailed("the engine's stream ended without a finish reason; ask again")
        except ProxyError as error:
            await self._record_failure(episode, request, error)
            raise
        except BaseException:
            with anyio.CancelScope(shield=True):
                if call.ids:
                    call.finish_reason = "abort"
                    reached = call.n_delivered if delivered is None else delivered()
                    await self._record(episode, request, call, prompt_ids, sampling, delivered=reached)
            raise
        await self._record(episode, request, call, prompt_ids, sampling)
        yield Reply(
            interaction_id=call.interaction_id,
            content=call.text,
            finish_reason=call.finish_reason,
            prompt_tokens=len(prompt_ids),
            output_ids=call.output_ids.tolist(),
            logprobs=call.logprobs.tolist(),
            prompt_ids=prompt_ids.tolist(),
            created=int(call.started_at),
            model=request.model,
            version=call.version,
        )

    async def _prompt(self, request: Request) -> Int32s:
        if self._max_context is None:
            self._max_context = (await self._engine.health()).max_context
        text = self._tokenizer.render(request.messages, request.tools, add_generation_prompt=True)
        prompt_ids = self._tokenizer.encode(text)
        if len(prompt_ids) >= self._max_context:
            raise ContextOverflow(
                f"the prompt has {len(prompt_ids)} tokens, the model's context is {self._max_context} for prompt and "
                "answer together; shorten the messages"
            )
        return prompt_ids

    async def _record(
        self,
        episode: Episode,
        request: Request,
        call: "_Call",
        prompt_ids: Int32s,
        sampling: Any,
        *,
        delivered: int | None = None,
    ) -> None:
        event = Event(
            run_id=episode.run_id,
            episode_id=episode.episode_id,
            interaction_id=call.interaction_id,
            fact=InteractionRecorded(
                prompt_length=len(prompt_ids),
                dialect=request.dialect,
                model=request.model,
                role=request.role,
                sampling=msgspec.to_builtins(sampling),
                logprobs_mode=self._engine.logprobs_mode,
                finish_reason=call.finish_reason,
                is_trainable=request.store and delivered is None,
                delivered=delivered,
                request_sha256=request.body_sha256,
                seconds=call.seconds,
                first_token_seconds=call.first_token_seconds,
            ),
            messages=encode_messages(
                Messages(
                    request=request.messages,
                    reply={"role": "assistant", "content": call.text},
                    tools=request.tools or None,
                )
            ),
            prompt_ids=prompt_ids,
            output_ids=call.output_ids,
            logprobs=call.logprobs,
            versions=call.versions,
        )
        await self._log.append(event)
        episode.nodes[call.interaction_id] = Node(call.interaction_id, None, 0, prompt_ids, call.output_ids)

    async def _record_failure(self, episode: Episode, request: Request, error: ProxyError) -> None:
        await self._log.append(
            Event(
                run_id=episode.run_id,
                episode_id=episode.episode_id,
                fact=InteractionFailed(
                    error=type(error).__name__, message=error.message, status=error.status, dialect=request.dialect
                ),
            )
        )


@dataclass(slots=True, eq=False)
class _Call:
    """What has come from the engine so far."""

    interaction_id: str
    started_at: float = field(default_factory=time.time)
    started: float = field(default_factory=time.perf_counter)
    ids: list[Int32s] = field(default_factory=list)
    lps: list[Float32s] = field(default_factory=list)
    vers: list[Int32s] = field(default_factory=list)
    version: int = 0
    text: str = ""
    finish_reason: FinishReason | None = None
    n_delivered: int = 0
    first_token_seconds: float | None = None
    seconds: float = 0.0

    def take(self, sampled: Sampled) -> None:
        self.seconds = time.perf_counter() - self.started
        if len(sampled.ids) != len(sampled.logprobs):
            raise EngineFailed(
                f"the engine sent {len(sampled.ids)} ids with {len(sampled.logprobs)} logprobs; each id needs one"
            )
        if len(sampled.ids):
            if self.first_token_seconds is None:
                self.first_token_seconds = self.seconds
            self.ids.append(sampled.ids)
            self.lps.append(sampled.logprobs)
            self.vers.append(np.full(len(sampled.ids), sampled.version, np.int32))
        self.version = sampled.version
        self.finish_reason = sampled.finish_reason or self.finish_reason

    @property
    def output_ids(self) -> Int32s:
        return np.concatenate(self.ids) if self.ids else np.empty(0, np.int32)

    @property
    def logprobs(self) -> Float32s:
        return np.concatenate(self.lps) if self.lps else np.empty(0, np.float32)

    @property
    def versions(self) -> Int32s:
        return np.concatenate(self.vers) if self.vers else np.empty(0, np.int32)


def _ints(ids: Int32s | None) -> Int32s:
    return np.empty(0, np.int32) if ids is None else ids
