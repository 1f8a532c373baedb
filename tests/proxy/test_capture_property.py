"""Any conversation, however it forks: what the engine got is what the book says, token for token."""

from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.talk import BASH, END, Talk, said, system, tool, user
from rollbook.proxy.capture import CaptureSettings
from rollbook.proxy.request import Reply, Request

REPLIES = st.sampled_from(
    [
        "ok",
        "",
        "é 👩‍👧",
        "<think>\nhm\n</think>\n\nwell",
        "<think>never closed",
        "before STOP after",
        '<tool_call>{"name": "bash", "arguments": {"b": 1.0, "a": "x"}}</tool_call>',
        'do\n<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>\n<tool_call>{"name":"bash"}</tool_call>',
        '<tool_call>{"name": "bash", "arguments": {"a": }}</tool_call>',
        [78, 79],  # cut by length
        [78, 227, 134, END],  # half a character
        [END],
        [90] * 30 + [END],
    ]
)
STEP = st.fixed_dictionaries(
    {
        "what": st.sampled_from(["go on"] * 6 + ["edit", "again", "leave", "named", "root", "restart", "at once"]),
        "of": st.integers(0, 99),  # which earlier one
        "reply": REPLIES,
        "client": st.sampled_from(
            ["faithful"] * 3 + ["no reasoning", "respells", "null content", "parts", "drops text"]
        ),
    }
)


def as_sent(reply: Reply, client: str) -> dict[str, Any]:
    message = said(reply)
    if client == "no reasoning":
        message.pop("reasoning_content", None)
    elif client == "respells":
        for call in message.get("tool_calls", ()):
            if call["function"]["arguments"] == '{"b": 1.0, "a": "x"}':
                call["function"]["arguments"] = '{"a":"x","b":1}'
    elif client == "null content":
        message["content"] = message["content"] or None
    elif client == "parts":
        message["content"] = [{"type": "text", "text": message["content"] or ""}]
    elif client == "drops text" and message.get("tool_calls"):
        message["content"] = ""
    return message


def after(reply: Reply, n: int) -> list[dict[str, Any]]:
    return [tool(c.id, f"out {n}") for c in reply.tool_calls] or [user(f"question {n}")]


async def play(steps: list[dict[str, Any]], template: str | None, settings: CaptureSettings | None = None) -> None:
    async with Talk(template=template, settings=settings, chunk_tokens=3) as talk:
        done: list[tuple[list[dict[str, Any]], Reply]] = []

        async def ask(
            told: list[dict[str, Any]], reply: Any, full: list[dict[str, Any]] | None = None, **more: Any
        ) -> None:
            talk.replies.append(reply)
            answer = await talk.ask(told, tools=[BASH], stop=("STOP",), **more)
            done.append((full or told, answer))

        await ask([system("s"), user("begin")], "ok")
        for n, step in enumerate(steps):
            told, reply = done[step["of"] % len(done)]
            nxt = [*told, as_sent(reply, step["client"]), *after(reply, n)]
            match step["what"]:
                case "go on":
                    await ask(nxt, step["reply"])
                case "edit":
                    place = step["of"] % len(told)
                    changed = {**told[place], "content": f"edited {n}"}
                    await ask([*nxt[:place], changed, *nxt[place + 1 :]], step["reply"])
                case "again":
                    await ask(told, step["reply"])
                case "leave":
                    talk.replies.append("a longer answer that nobody waits for")
                    asked = Request(dialect="chat", messages=nxt, tools=[BASH], is_stream=True)
                    stream = talk.capture.stream(talk.episode, asked)
                    await anext(stream)
                    for _ in range(step["of"] % 3):
                        await anext(stream)
                    await stream.aclose()
                    if step["of"] % 3 == 0:
                        talk.replies.clear()
                    await ask(nxt, step["reply"])
                case "named":
                    full = [*told, said(reply), *after(reply, n)]
                    await ask(after(reply, n), step["reply"], full, parent_id=reply.interaction_id)
                case "root":
                    await ask([system(f"agent {step['of'] % 3}"), user("begin")], step["reply"])
                case "restart":
                    talk.restart()
                case "at once":
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(ask, nxt, step["reply"])
                        tasks.start_soon(ask, nxt, step["reply"])
        talk.check_book()
        recorded = talk.recorded
        for interaction_id, event in recorded.items():
            fact = talk.fact(interaction_id)
            if fact.parent_id is not None:
                parent = recorded[fact.parent_id]
                n_path = talk.fact(fact.parent_id).prompt_length + len(parent.output_ids)
                assert (fact.shared == n_path) == (fact.edge == "extends") or fact.edge == "retries"
                assert fact.shared <= n_path
            assert fact.edge != "rerendered" or fact.cause
            assert len(event.output_ids) == len(event.versions)
        for told, reply in done:
            kept = talk.messages_in_book(reply.interaction_id)
            assert [m["role"] for m in kept] == [m["role"] for m in [*told, said(reply)]]
            for ours, theirs in zip(kept, told, strict=False):
                if theirs["role"] != "assistant":
                    assert ours == theirs
        before = talk.episode
        talk.restart()
        for interaction_id, node in before.nodes.items():
            again = talk.episode.nodes[interaction_id]
            assert (again.path().tolist(), again.depth, again.n_messages, again.cut, again.ways.has_calls) == (
                node.path().tolist(),
                node.depth,
                node.n_messages,
                node.cut,
                node.ways.has_calls,
            )
        assert talk.episode.last_main == before.last_main


@pytest.mark.parametrize("template", [None, "chatml_tools"])
@given(
    steps=st.lists(STEP, max_size=14),
    history=st.sampled_from(["template", "exact"]),
    memory=st.sampled_from([1, 1 << 20]),  # with next to none, episodes are read from the book at each request
)
@settings(max_examples=50, deadline=None)
def test_what_the_engine_got_is_what_the_book_says(template, steps, history, memory):
    anyio.run(play, steps, template, CaptureSettings(history=history, memory=memory))
