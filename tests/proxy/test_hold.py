"""Tokens that gather unread while nobody waits for them: the same answer, the same book, nothing lost or told twice."""

import time
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from proxy.talk import BASH, END, Talk, user
from proxy_serving import said, serving
from rollbook.proxy.capture import Hold
from rollbook.proxy.config import ServeConfig
from rollbook.proxy.engine import Generation
from rollbook.proxy.errors import EngineFailed
from rollbook.proxy.request import Reply, Request

CALL = 'Let me see. <tool_call>\n{"name": "bash", "arguments": {"c": "é"}}\n</tool_call>'


class Nudged:
    """An engine, and a taker who does the next thing before each token."""

    logprobs_mode = "processed"

    def __init__(self, engine: Any, hold: Hold, deeds: list[str], seen: list[Any]) -> None:
        self.engine, self.hold, self.deeds, self.seen = engine, hold, deeds, seen

    async def health(self) -> Any:
        return await self.engine.health()

    async def generate(self, generation: Generation) -> Any:
        left = list(self.deeds)
        async for sampled in self.engine.generate(generation):
            deed = left.pop(0) if left else ""
            if deed == "break":
                raise EngineFailed("gone")
            if deed == "read":
                self.seen += self.hold.read()
            elif deed:
                self.hold.is_on = deed == "on"
            yield sampled


def told(items: list[Any]) -> tuple[str, str, list[tuple[int, str | None, str]], list[int], list[float]]:
    calls: dict[int, list[Any]] = {}
    for piece in items:
        if piece.tool_index is not None:
            call = calls.setdefault(piece.tool_index, [piece.tool_name, ""])
            call[1] += piece.tool_arguments
    return (
        "".join(p.text for p in items),
        "".join(p.reasoning for p in items),
        [(k, *call) for k, call in calls.items()],
        [i for p in items for i in p.token_ids],
        [x for p in items for x in p.logprobs],
    )


async def take(reply: str | list[int], deeds: list[str], stop: tuple[str, ...] = ()) -> tuple[Any, Reply, Talk]:
    hold, seen = Hold(), []
    async with Talk(reply, template="chatml_tools", chunk_tokens=1) as talk:
        talk.capture._engine = Nudged(talk.engine, hold, deeds, seen)
        asked = Request(dialect="chat", messages=[user("a")], tools=[BASH], is_stream=True, stop=stop)
        last = None
        try:
            async for item in talk.capture.stream(talk.episode, asked, hold=hold):
                last = item
                if not isinstance(item, Reply) and item.interaction_id is None:
                    seen.append(item)
        finally:
            seen += hold.read()
            assert hold.read() == []
    return told(seen), last, talk


deeds = st.lists(st.sampled_from(["on", "off", "read", ""]), max_size=60)


@given(st.sampled_from(["héllo", CALL, [195, 169, 195, END]]), deeds, st.sampled_from([(), ("see",)]))
@example(CALL, ["on"], ())
@example("x" * 50, ["on", "", "", "read", "", "read", "", "off", "", "on"], ())
@settings(max_examples=40, deadline=None)
def test_what_gathers_unread_is_the_same_answer_once(reply: Any, deeds: list[str], stop: tuple[str, ...]) -> None:
    async def check() -> None:
        plain, expected, _ = await take(reply, [], stop)
        seen, got, talk = await take(reply, deeds, stop)
        assert seen == plain
        assert (got.content, [c.arguments for c in got.tool_calls]) == (
            expected.content,
            [c.arguments for c in expected.tool_calls],
        )
        assert got.output_ids == expected.output_ids == seen[3]
        event = talk.recorded[got.interaction_id]
        assert event.output_ids.tolist() == got.output_ids
        assert event.logprobs.tolist() == got.logprobs == seen[4]

    anyio.run(check)


@pytest.mark.anyio
async def test_what_gathered_before_a_break_is_still_given() -> None:
    hold, seen = Hold(), []
    async with Talk("long enough", chunk_tokens=1) as talk:
        talk.capture._engine = Nudged(talk.engine, hold, ["on", "", "", "break"], seen)
        asked = Request(dialect="chat", messages=[user("a")], is_stream=True)
        with pytest.raises(EngineFailed):
            async for _ in talk.capture.stream(talk.episode, asked, hold=hold):
                pass
        assert "".join(p.text for p in hold.read()) == "lon"
        assert hold.read() == []
        assert len(talk.events[0].output_ids) == 3


@pytest.mark.anyio
async def test_the_end_of_an_answer_does_not_wait_for_the_pace() -> None:
    config = ServeConfig(admin_key="admin-key-of-the-tests", pace_s=50)
    async with serving(lambda _: said("y" * 40), config=config, chunk_tokens=1) as served:
        key = (await served.client.start_session("t")).api_key
        began = time.monotonic()
        async with httpx.AsyncClient(timeout=60, base_url=served.url, trust_env=False) as http:
            body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
            reply = await http.post("/chat/completions", json=body, headers={"x-api-key": key}, timeout=40)
        assert time.monotonic() - began < 30
        assert reply.text.count("y") >= 40
        assert reply.text.endswith("data: [DONE]\n\n")
        assert reply.text.count('"delta":{"content":"y') == 2  # the first at once, all others together
