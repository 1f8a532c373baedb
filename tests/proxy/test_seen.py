"""A body of which the beginning is known is read as the whole body is; whatever it says, and wherever it differs."""

import hashlib
import json
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy_serving import said, serving
from rollbook.proxy import seen as seen_module
from rollbook.proxy.config import GenerationHyperparameters
from rollbook.proxy.dialects import Context
from rollbook.proxy.dialects.chat import Chat
from rollbook.proxy.errors import BadRequest
from rollbook.proxy.request import Request
from rollbook.proxy.seen import Seen

CHAT = Chat(lambda token: b"")


def read(body: bytes, seen: Seen | None = None) -> Request | str:
    """As the server does it: the request, or why it is refused."""
    known = None if seen is None else seen.recall(body)
    try:
        request = CHAT.parse(body, Context(defaults=GenerationHyperparameters(), headers={}, known=known))
    except BadRequest as error:
        return f"{error.message} {error.param}"
    if seen is not None:
        was_read = seen_module.read(body, known, request.messages)
        assert was_read.sha256 == hashlib.sha256(body).hexdigest()
        seen.keep(was_read)
    return request


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollbook.proxy.seen._LEAST", 0)


TEXT = st.text(alphabet='ab"\\[]{},: é', max_size=12)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": TEXT},
    optional={"extra": st.lists(st.fixed_dictionaries({"messages": TEXT}), max_size=2)},
)
AROUND = st.fixed_dictionaries({}, optional={"model": TEXT, "metadata": st.dictionaries(TEXT, TEXT, max_size=2)})


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(MESSAGE, min_size=1, max_size=3), st.booleans()), max_size=8),
    AROUND,
    AROUND,
    st.sampled_from([(",", ":"), (", ", ": ")]),
)
def test_what_is_read_is_what_the_whole_body_says(turns, before, after, separators):
    seen, told = Seen(), []
    for cut, more, is_changed in turns:
        told = told[: len(told) - cut] + more
        body: dict[str, Any] = {**before, "messages": told, "seed": int(is_changed)}
        body |= {k: v for k, v in after.items() if k not in body}
        text = json.dumps(body, separators=separators).encode()
        found, expected = read(text, seen), read(text)
        assert found == expected


def test_only_what_is_new_is_decoded():
    seen, told = Seen(), [{"role": "user", "content": "a"}]
    read(msgspec.json.encode({"messages": told}), seen)
    told = [*told, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    body = msgspec.json.encode({"messages": told})
    known = seen.recall(body)
    assert known is not None
    assert json.loads(known.text) == {"messages": told[1:]}
    second = read(body, seen)
    assert isinstance(second, Request)
    assert second.messages == told
    assert second.messages[0] is known.messages[0]


@pytest.mark.parametrize(
    "end",
    [
        b",]}",
        b",null]}",
        b',{"role":"nobody"}]}',
        b',{"role":"user","content":3}]}',
        b',{"role":"user"}',
        b',{}],"x":1}',
    ],
)
def test_what_is_wrong_is_told_by_its_place_in_the_whole_body(end):
    seen, begin = Seen(), b'{"messages":[{"role":"user","content":"a"}'
    read(begin + b"]}", seen)
    why = read(begin + end, seen)
    assert isinstance(why, str)
    assert why == read(begin + end)


def test_a_list_that_stands_twice_in_the_body_is_not_cut():
    seen, told = Seen(), [{"role": "user", "content": "a"}]
    for n in range(1, 4):
        body = msgspec.json.encode({"response_format": {"type": "text", "x": told * n}, "messages": told * n})
        assert read(body, seen) == read(body)


@pytest.mark.parametrize("end", [b'],"messages":[{"role":"user","content":"d"}]}', b'],"mess\\u0061ges":[]}'])
def test_the_last_of_two_lists_is_the_one_that_counts(end):
    seen, begin = Seen(), b'{"messages":[{"role":"user","content":"a"}'
    read(begin + b"]}", seen)
    body = begin + b',{"role":"user","content":"b"}' + end
    assert read(body, seen) == read(body)


def test_agents_that_take_turns_are_all_known():
    seen = Seen()
    told = {name: [{"role": "system", "content": name}] for name in "abcdefgh"}
    for turn in range(3):
        for name, messages in told.items():
            messages += [{"role": "user", "content": f"{name}{turn}"}]
            body = msgspec.json.encode({"messages": messages})
            assert (seen.recall(body) is not None) == (turn > 0)
            assert read(body, seen) == read(body)


@pytest.mark.anyio
async def test_of_a_request_that_was_not_answered_nothing_is_kept():
    async with serving(lambda _: said("ok"), max_context=600) as served:
        started = await served.client.start_session("t")
        headers = {"authorization": f"Bearer {started.api_key}"}
        seen = served.service.sessions.find(started.api_key).episode.seen
        async with httpx.AsyncClient(timeout=60, base_url=served.url, trust_env=False) as http:
            for text, status, n in (("x" * 2_000, 400, 0), ("hi", 200, 1)):
                body = {"messages": [{"role": "user", "content": text}]}
                reply = await http.post("/v1/chat/completions", json=body, headers=headers)
                assert (reply.status_code, len(seen._known)) == (status, n)
