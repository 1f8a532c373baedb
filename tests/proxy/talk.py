"""A conversation with a capture over the scripted engine, and what the book and the engine have of it."""

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from rollbook.proxy.capture import Capture, CaptureSettings, Episode
from rollbook.proxy.engine import Generation, Sampling
from rollbook.proxy.request import Piece, Reply, Request
from rollbook.proxy.scripted import ScriptedEngine, scripted_logprob
from rollbook.proxy.tokenizer import Tokenizer
from rollbook.store import Event, InteractionRecorded, MemoryLog
from rollbook.store.events import decode_messages, from_batch

END = 2  # <|im_end|> of the bytes tokenizer


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def tool(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def said(reply: Reply) -> dict[str, Any]:
    """The reply as a well-behaved client sends it back."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in reply.tool_calls
        ]
    return message


def plain(reply: Reply) -> dict[str, Any]:
    """All that a reply says, to be compared."""
    told = {name: getattr(reply, name) for name in reply.__struct_fields__}
    return told | {"sampled": reply.output_ids, "sampled_logprobs": reply.logprobs}


BASH = {
    "type": "function",
    "function": {"name": "bash", "description": "Run it.", "parameters": {"type": "object", "properties": {}}},
}


class Talk:
    """Enter it. `say` answers what comes next: texts (an end of turn is added) or token ids as they are."""

    def __init__(
        self,
        *replies: str | Sequence[int],
        template: str | None = None,
        folder: Any = "bytes",
        settings: CaptureSettings | None = None,
        **engine: Any,
    ) -> None:
        self.tokenizer = Tokenizer.load(folder, chat_template=template)
        self.replies = list(replies)
        self.asked: list[Generation] = []
        self.log = MemoryLog()
        self.engine = ScriptedEngine(self._answer, **engine)
        self.settings = settings
        self.capture = self._capture()
        self.episode = self.capture.open("ep_1")

    def _capture(self) -> Capture:
        return Capture(log=self.log, engine=self.engine, tokenizer=self.tokenizer, run_id="run", settings=self.settings)

    async def __aenter__(self) -> "Talk":
        await self.engine.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.engine.__aexit__(None, None, None)

    def _answer(self, generation: Generation) -> list[int]:
        self.asked.append(generation)
        reply = self.replies.pop(0)
        return (
            [*self.tokenizer.encode(reply).tolist(), self.tokenizer.eos_ids[0]]
            if isinstance(reply, str)
            else list(reply)
        )

    def restart(self) -> None:
        """A new process: only the book is left."""
        self.capture = self._capture()
        events = [(e["writer"], e["position"]) for b in self.log.read() for e in b.to_pylist()]
        self.episode = self.capture.reopen("ep_1", self.log.gather(events))

    async def items(self, messages: list[dict[str, Any]], **request: Any) -> list[Piece | Reply]:
        request.setdefault("sampling", Sampling())
        request.setdefault("extra", {"return_token_ids": True})
        asked = Request(dialect=request.pop("dialect", "chat"), messages=messages, **request)
        async with aclosing(self.capture.stream(self.episode, asked)) as stream:  # type: ignore[type-var]
            return [item async for item in stream]

    async def ask(self, messages: list[dict[str, Any]], **request: Any) -> Reply:
        reply = (await self.items(messages, **request))[-1]
        assert isinstance(reply, Reply)
        return reply

    @property
    def events(self) -> list[Event]:
        return [event for batch in self.log.read() for event in from_batch(batch)]

    @property
    def recorded(self) -> dict[str, Event]:
        return {e.interaction_id or "": e for e in self.events if isinstance(e.fact, InteractionRecorded)}

    def fact(self, reply: Reply | str) -> InteractionRecorded:
        fact = self.recorded[reply if isinstance(reply, str) else reply.interaction_id].fact
        assert isinstance(fact, InteractionRecorded)
        return fact

    def prompt_in_book(self, interaction_id: str) -> list[int]:
        """The prompt as a reader of the book puts it together."""
        recorded = self.recorded
        event = recorded[interaction_id]
        fact = self.fact(interaction_id)
        path: list[int] = []
        if fact.parent_id is not None:
            path = self.prompt_in_book(fact.parent_id) + recorded[fact.parent_id].output_ids.tolist()
        return path[: fact.shared] + event.prompt_ids.tolist()

    def messages_in_book(self, interaction_id: str) -> list[dict[str, Any]]:
        """Request and reply as a reader of the book puts them together."""
        event = self.recorded[interaction_id]
        fact, text = self.fact(interaction_id), decode_messages(event.messages or b"")
        told = self.messages_in_book(fact.parent_id) if fact.parent_id is not None else []
        if text.kept is not None:
            told = told[: text.kept]
        return [*told, *text.request, text.reply]

    def check_book(self) -> None:
        """What the engine got is what the book says; each logprob belongs to its token."""
        asked = {g.request_id: g.prompt_ids.tolist() for g in self.asked}
        for interaction_id, event in self.recorded.items():
            assert self.prompt_in_book(interaction_id) == asked[interaction_id]
            assert event.output_ids is not None
            expected = [scripted_logprob(t, n) for n, t in enumerate(event.output_ids.tolist())]
            assert np.array_equal(event.logprobs, np.asarray(expected, np.float32))


__all__ = ["BASH", "END", "Episode", "Talk", "said", "system", "tool", "user"]
