"""Clients that leave, engines that break, disks that refuse: nobody gets an answer that the book does not have."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator

import anthropic
import anyio
import httpx
import numpy as np
import openai
import pytest

from proxy_serving import said, serving
from rollbook.proxy.config import ServeConfig
from rollbook.proxy.engine import Generation, Sampled
from rollbook.proxy.errors import EngineFailed, EngineUnavailable
from rollbook.proxy.scripted import ScriptedEngine
from rollbook.store import LogWriteFailed, MemoryLog

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "hi"}]
LONG = "x" * 400
QUICK = ServeConfig(admin_key="admin-key-of-the-tests", grace_s=0.05)
PATIENT = ServeConfig(admin_key="admin-key-of-the-tests", grace_s=20)


async def until(holds, seconds=600.0):
    """Wait for something to become true."""
    with anyio.fail_after(seconds):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event
            await anyio.sleep(0.01)


async def post(served, key, body, path="/v1/chat/completions", headers=None):
    async with httpx.AsyncClient(base_url=served.url, trust_env=False, timeout=60) as http:
        return await http.post(path, json=body, headers={"authorization": f"Bearer {key}", **(headers or {})})


class Counted:
    """An engine, and how many pieces it was asked for."""

    def __init__(self, served):
        self._engine, self.n = served.service.engine, 0
        self.logprobs_mode = self._engine.logprobs_mode
        served.service.capture._engine = self

    async def health(self):
        return await self._engine.health()

    async def generate(self, generation):
        async with contextlib.aclosing(self._engine.generate(generation)) as pieces:
            async for piece in pieces:
                self.n += 1
                yield piece


async def leave(served, key):
    """Ask, and hang up in the middle of the answer."""
    calls, engine = served.service.calls, Counted(served)
    asking = asyncio.create_task(post(served, key, {"messages": HELLO}))
    await until(lambda: engine.n > 1)
    asking.cancel()
    await until(lambda: not any(call.clients for call in calls._running))


async def leave_after(served, key, body, n_chunks):
    """Read n chunks of a stream, and hang up."""
    async with httpx.AsyncClient(timeout=60, base_url=served.url, trust_env=False) as http:
        sent = {"authorization": f"Bearer {key}"}
        async with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}, headers=sent) as reply:
            seen = ""
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    seen += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                    n_chunks -= 1
                    if not n_chunks:
                        break
            return seen


async def test_a_client_that_leaves_a_stream_stops_the_engine_and_leaves_a_partial():
    async with serving(lambda _: said(LONG), config=QUICK, chunk_tokens=2, token_s=0.02) as served:
        key = (await served.client.start_session("t")).api_key
        seen = await leave_after(served, key, {"messages": HELLO}, 4)
        await until(lambda: served.events("InteractionRecorded"))
        [event] = served.events("InteractionRecorded")
        assert event.fact.finish_reason == "abort"
        assert not event.fact.is_trainable
        assert len(seen) <= event.fact.delivered <= len(event.output_ids) < 100
        assert (await served.service.engine.health()).running == 0
        assert served.service.calls.running == 0


async def test_a_client_that_leaves_a_whole_answer_has_nothing_delivered():
    async with serving(lambda _: said(LONG), config=QUICK, chunk_tokens=2, token_s=0.02) as served:
        key = (await served.client.start_session("t")).api_key
        await leave(served, key)
        await until(lambda: served.events("InteractionRecorded"))
        [event] = served.events("InteractionRecorded")
        assert (event.fact.finish_reason, event.fact.delivered) == ("abort", 0)


async def test_a_retry_after_a_time_out_finds_the_same_call():
    async with serving(lambda _: said("y" * 30), config=PATIENT, chunk_tokens=1, token_s=0.02) as served:
        key = (await served.client.start_session("t")).api_key
        await leave(served, key)
        again = await post(served, key, {"messages": HELLO})
        [event] = served.events("InteractionRecorded")
        assert again.json()["id"] == event.interaction_id
        assert event.fact.is_trainable
        assert again.json()["choices"][0]["message"]["content"] == "y" * 30


async def test_a_retry_finds_an_answer_that_was_finished_and_not_delivered():
    async with serving(lambda _: said("y" * 8), config=PATIENT, chunk_tokens=1, token_s=0.05) as served:
        key = (await served.client.start_session("t")).api_key
        await leave(served, key)
        await until(lambda: served.events("InteractionRecorded"))
        again = await post(served, key, {"messages": HELLO})
        assert again.json()["id"] == served.events("InteractionRecorded")[0].interaction_id
        fresh = await post(served, key, {"messages": HELLO})  # it was delivered: this is another sample
        assert fresh.json()["id"] != again.json()["id"]
        assert len(served.events("InteractionRecorded")) == 2


async def test_a_stream_that_is_asked_for_again_is_given_from_its_beginning():
    async with serving(lambda _: said("z" * 20), config=PATIENT, chunk_tokens=1, token_s=0.02) as served:
        key = (await served.client.start_session("t")).api_key
        await leave_after(served, key, {"messages": HELLO}, 5)
        again = await leave_after(served, key, {"messages": HELLO}, -1)
        assert again == "z" * 20
        assert len(served.events("InteractionRecorded")) == 1


async def test_identical_requests_that_all_wait_are_as_many_samples():
    async with serving(lambda _: said("y"), chunk_tokens=1, token_s=0.02) as served:
        key = (await served.client.start_session("t")).api_key
        replies = await asyncio.gather(*(post(served, key, {"messages": HELLO}) for _ in range(4)))
        assert len({reply.json()["id"] for reply in replies}) == 4
        assert all(event.fact.is_trainable for event in served.events("InteractionRecorded"))


@pytest.mark.parametrize("headers", [{"x-stainless-retry-count": "1"}, {"idempotency-key": "k1"}])
async def test_who_says_that_it_asks_again_gets_the_same_answer(headers):
    async with serving(lambda _: said("y")) as served:
        key = (await served.client.start_session("t")).api_key
        first = await post(served, key, {"messages": HELLO}, headers={k: v for k, v in headers.items() if v == "k1"})
        again = await post(served, key, {"messages": HELLO}, headers=headers)
        assert again.json()["id"] == first.json()["id"]
        assert len(served.events("InteractionRecorded")) == 1
        other = await served.client.start_session("t")
        elsewhere = await post(served, other.api_key, {"messages": HELLO}, headers=headers)
        assert elsewhere.json()["id"] != first.json()["id"]


def numbered(gate: anyio.Event | None = None):
    """A script whose answers all differ, and wait for the gate."""
    counter = itertools.count()

    async def script(_):
        n = next(counter)
        if gate is not None:
            await gate.wait()
        return said(f"answer {n}")

    return script


@pytest.mark.parametrize("headers", [{"x-stainless-retry-count": "1"}, {}], ids=["counted", "uncounted"])
async def test_retries_of_k_samples_are_k_samples(headers):
    gate = anyio.Event()
    async with serving(numbered(gate), config=PATIENT) as served:
        key = (await served.client.start_session("t")).api_key
        calls = served.service.calls
        tries = [asyncio.create_task(post(served, key, {"messages": HELLO})) for _ in range(4)]
        await until(lambda: calls.running == 4)
        for one in tries:
            one.cancel()
        await until(lambda: not any(call.clients for call in calls._running))
        again = [asyncio.create_task(post(served, key, {"messages": HELLO}, headers=headers)) for _ in range(4)]
        await until(lambda: sum(len(call.clients) for call in calls._running) == 4)
        assert calls.running == 4
        gate.set()
        ids = {reply.json()["id"] for reply in await asyncio.gather(*again)}
        assert len(ids) == 4
        assert {event.interaction_id for event in served.events("InteractionRecorded")} == ids


async def test_a_retry_joins_a_call_whose_client_seems_to_wait_and_a_second_one_does_not():
    gate = anyio.Event()
    async with serving(numbered(gate), config=PATIENT) as served:
        key = (await served.client.start_session("t")).api_key
        first = asyncio.create_task(post(served, key, {"messages": HELLO}))
        await until(lambda: served.service.calls.running == 1)
        retry = {"x-stainless-retry-count": "1"}
        again = [asyncio.create_task(post(served, key, {"messages": HELLO}, headers=retry)) for _ in range(3)]
        await until(lambda: sum(len(call.clients) for call in served.service.calls._running) == 4)
        gate.set()
        ids = [reply.json()["id"] for reply in await asyncio.gather(*again)]
        assert len(set(ids)) == 3
        assert ids.count((await first).json()["id"]) == 1


async def test_who_was_refused_for_want_of_room_does_not_get_the_answer_of_another():
    narrow = ServeConfig(admin_key="admin-key-of-the-tests", max_concurrent=1, max_waiting=1)
    async with serving(numbered(), config=narrow, chunk_tokens=1, token_s=0.01) as served:
        key = (await served.client.start_session("t")).api_key
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key=key, max_retries=50) as client:
            made = await asyncio.gather(
                *(client.chat.completions.create(model="m", messages=HELLO) for _ in range(4))  # type: ignore[arg-type]
            )
        assert len({answer.id for answer in made}) == 4
        assert len(served.events("InteractionRecorded")) == 4


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_who_was_refused_does_not_join_a_call_that_another_waits_for(is_streamed):
    gate = anyio.Event()
    narrow = ServeConfig(admin_key="admin-key-of-the-tests", max_concurrent=1, max_waiting=0)
    async with serving(numbered(gate), config=narrow) as served:
        key = (await served.client.start_session("t")).api_key
        body = {"messages": HELLO, "stream": is_streamed}
        first = asyncio.create_task(post(served, key, body))
        await until(lambda: served.service.calls.running == 1)
        for n in range(3):
            refused = await post(served, key, body, headers={"x-stainless-retry-count": str(n)})
            assert refused.status_code == 429
        gate.set()
        await first
        assert (await post(served, key, body, headers={"x-stainless-retry-count": "3"})).status_code == 200
        assert len(served.events("InteractionRecorded")) == 2


async def test_who_got_an_error_does_not_get_the_answer_of_another():
    async with serving(numbered()) as served:
        key = (await served.client.start_session("t")).api_key
        first = (await post(served, key, {"messages": HELLO})).json()["id"]
        engine, served.service.capture._engine = served.service.capture._engine, BrokenEngine(lambda _: [])
        assert (await post(served, key, {"messages": HELLO})).status_code == 502
        served.service.capture._engine = engine
        again = await post(served, key, {"messages": HELLO}, headers={"x-stainless-retry-count": "1"})
        assert again.json()["id"] != first
        # Nobody else had an error: an answer was lost on its way.
        lost = await post(served, key, {"messages": HELLO}, headers={"x-stainless-retry-count": "1"})
        assert lost.json()["id"] == first


@pytest.mark.parametrize("name", ["idempotency-key", "x-stainless-retry-count"])
async def test_each_choice_is_found_again_however_often_it_is_asked_for(name):
    async with serving(numbered()) as served:
        key = (await served.client.start_session("t")).api_key
        asked = {"messages": HELLO, "n": 4}
        tries = [(await post(served, key, asked, headers={name: str(n)})).json() for n in range(4)]
        if name == "idempotency-key":
            tries = [(await post(served, key, asked, headers={name: "k"})).json() for n in range(4)]
        ids = [[choice["interaction_id"] for choice in reply["choices"]] for reply in tries]
        assert len(set(ids[0])) == 4
        assert ids == ids[:1] * 4


class BrokenEngine(ScriptedEngine):
    """Fails before the first token."""

    async def generate(self, generation: Generation) -> AsyncIterator[Sampled]:
        raise EngineFailed("the engine broke")
        yield


class AwayEngine(ScriptedEngine):
    """Is not there for the first request."""

    was_asked = False

    async def generate(self, generation: Generation) -> AsyncIterator[Sampled]:
        if not self.was_asked:
            self.was_asked = True
            raise EngineUnavailable("the engine restarts", retry_after_s=0.01)
        async for some in super().generate(generation):
            yield some


@pytest.mark.parametrize("api", ["chat", "responses", "completions", "messages"])
async def test_sdks_ask_again_for_a_stream_whose_engine_was_away(api):
    async with serving(lambda _: said("back")) as served:
        key = (await served.client.start_session("t")).api_key
        async with AwayEngine(lambda _: said("back")) as away:
            served.service.capture._engine = away
            async with (
                openai.AsyncOpenAI(base_url=served.url + "/v1", api_key=key) as client,
                anthropic.AsyncAnthropic(base_url=served.url, api_key=key) as other,
            ):
                asked = {"model": "m", "stream": True}
                if api == "chat":
                    stream = await client.chat.completions.create(messages=HELLO, **asked)
                elif api == "responses":
                    stream = await client.responses.create(input="hi", **asked)
                elif api == "completions":
                    stream = await client.completions.create(prompt="hi", **asked)
                else:
                    stream = await other.messages.create(messages=HELLO, max_tokens=99, **asked)
                assert [chunk async for chunk in stream]
        assert len(served.events("InteractionFailed")) == len(served.events("InteractionRecorded")) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_says_which_interaction_each_choice_is(path):
    async with serving(numbered()) as served:
        key = (await served.client.start_session("t")).api_key
        asked = {"messages": HELLO} if "chat" in path else {"prompt": "hi"}
        reply = await post(served, key, {**asked, "n": 3, "stream": True}, path=path)
        chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        texts, ids = ["", "", ""], ["", "", ""]
        for choice in choices:
            texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            ids[choice["index"]] += choice.get("interaction_id", "")
        assert ids[0] == chunks[0]["id"]
        told = {
            e.interaction_id: served.service.capture.decode(e.output_ids) for e in served.events("InteractionRecorded")
        }
        assert len(told) == 3
        assert all(text in told[name] for name, text in zip(ids, texts, strict=True))


class BreakingEngine(ScriptedEngine):
    """Breaks off after some tokens, as an upstream that is cut."""

    async def generate(self, generation: Generation) -> AsyncIterator[Sampled]:
        ids = np.asarray(said("hello")[:3], np.int32)
        yield Sampled(ids=ids, logprobs=np.zeros(3, np.float32), version=0)
        raise EngineFailed("the engine closed the stream")


async def test_a_cut_upstream_is_an_error_to_every_client_and_never_a_clean_finish():
    async with serving(lambda _: said("hello")) as served:
        served.service.capture._engine = BreakingEngine(lambda _: [])
        key = (await served.client.start_session("t")).api_key
        async with openai.AsyncOpenAI(base_url=served.base_url, api_key=key, max_retries=0) as sdk:
            with pytest.raises(openai.APIError, match="closed the stream"):
                async for _ in await sdk.chat.completions.create(model="m", messages=HELLO, stream=True):
                    pass
            with pytest.raises(openai.APIError, match="closed the stream"):
                async for _ in await sdk.responses.create(model="m", input="hi", stream=True):
                    pass
            with pytest.raises(openai.InternalServerError, match="closed the stream"):
                await sdk.chat.completions.create(model="m", messages=HELLO)
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key=key, max_retries=0) as sdk:
            with pytest.raises(anthropic.APIError, match="closed the stream"):
                async with sdk.messages.stream(model="m", max_tokens=50, messages=HELLO) as stream:
                    await stream.get_final_message()
        assert len(served.events("InteractionFailed")) == 4
        assert not any(event.fact.is_trainable for event in served.events("InteractionRecorded"))


class FullLog(MemoryLog):
    """A disk that refuses from when it is told to; a log then takes no more."""

    is_full = False

    async def append(self, *events):
        if self.is_full:
            raise LogWriteFailed("no space left on device")
        return await super().append(*events)


async def test_what_cannot_be_recorded_is_not_answered():
    log, asked = FullLog(), []
    async with serving(lambda asking: asked.append(asking) or said("hello"), log=log) as served:
        started = await served.client.start_session("t")
        log.is_full = True
        reply = await post(served, started.api_key, {"messages": HELLO})
        assert reply.status_code == 503
        assert reply.headers["x-should-retry"] == "false"
        assert "no space left" in reply.json()["error"]["message"]
        async with httpx.AsyncClient(timeout=60, base_url=served.url, trust_env=False) as http:
            health = await http.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "failed")
            assert "no space left" in health.json()["reason"]
            for path, body in (
                ("start_session", {"task_id": "t"}),
                ("end_session", {"session_id": started.session_id}),
            ):
                refused = await http.post(f"/rl/{path}", json=body, headers={"x-api-key": served.service.admin_key})
                assert refused.status_code == 503
        asked_before = len(asked)
        for is_stream in (False, True):  # nothing is sampled that cannot be kept
            refused = await post(served, started.api_key, {"messages": HELLO, "stream": is_stream})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_recorded")
        assert len(asked) == asked_before


async def test_a_stream_that_cannot_be_recorded_does_not_end_well():
    log = FullLog()
    async with serving(lambda _: said("hello"), log=log) as served:
        started = await served.client.start_session("t")
        log.is_full = True
        streamed = await post(served, started.api_key, {"messages": HELLO, "stream": True})
        assert "[DONE]" not in streamed.text
        assert "not_recorded" in streamed.text


async def test_the_end_of_a_session_ends_its_calls_and_comes_after_them_in_the_book():
    async with serving(lambda _: said(LONG), chunk_tokens=2, token_s=0.02) as served:
        key = (await served.client.start_session("t")).api_key
        async with anyio.create_task_group() as tasks:
            replies = []

            async def call():
                replies.append(await post(served, key, {"messages": HELLO}))

            engine = Counted(served)
            tasks.start_soon(call)
            await until(lambda: engine.n > 1)
            await served.client.end_session(key)
        assert replies[0].status_code == 410
        kinds = [event.kind for event in served.events()]
        assert kinds == ["EpisodeOpened", "InteractionRecorded", "EpisodeClosed"]


async def test_more_calls_than_allowed_wait_their_turn_and_too_many_are_told_when_to_come_back():
    config = ServeConfig(admin_key="admin-key-of-the-tests", max_concurrent=2, max_waiting=3)
    most = 0
    gate = anyio.Event()

    async def script(_):
        nonlocal most
        most = max(most, (await served.service.engine.health()).running + 1)
        await gate.wait()
        return said("y")

    async with serving(script, config=config, token_s=0.03) as served:
        key = (await served.client.start_session("t")).api_key
        bodies = [{"messages": [{"role": "user", "content": str(i)}]} for i in range(7)]
        asked = [asyncio.create_task(post(served, key, body)) for body in bodies]
        await until(lambda: sum(one.done() for one in asked) == 2)
        gate.set()
        replies = await asyncio.gather(*asked)
        by_status = sorted(reply.status_code for reply in replies)
        assert by_status == [200] * 5 + [429] * 2
        refused = next(reply for reply in replies if reply.status_code == 429)
        assert refused.headers["x-should-retry"] == "true"
        assert float(refused.headers["retry-after"]) > 0
        assert most <= 2
        again = await post(served, key, bodies[0])
        assert again.status_code == 200


async def test_a_server_that_stops_lets_answers_finish():
    async with serving(lambda _: said("y" * 10), chunk_tokens=1, token_s=0.03) as served:
        key = (await served.client.start_session("t")).api_key
        call = asyncio.ensure_future(post(served, key, {"messages": HELLO}))
        await until(lambda: served.service.calls.running)
    reply = await call
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["message"]["content"] == "y" * 10


async def test_a_server_that_must_stop_records_what_was_sampled():
    config = ServeConfig(admin_key="admin-key-of-the-tests", stop_s=1)
    async with serving(lambda _: said(LONG), config=config, chunk_tokens=1, token_s=0.03) as served:
        key = (await served.client.start_session("t")).api_key
        engine = Counted(served)
        call = asyncio.ensure_future(post(served, key, {"messages": HELLO}))
        await until(lambda: engine.n > 1)
    with pytest.raises(httpx.HTTPError):
        (await call).raise_for_status()
    [event] = served.events("InteractionRecorded")
    assert event.fact.finish_reason == "abort"
    assert 0 < len(event.output_ids) < len(LONG)


@pytest.mark.parametrize("headers", [{"x-stainless-retry-count": "1"}, {"idempotency-key": "k1"}])
async def test_a_retry_after_a_restart_gets_the_answer_that_the_book_has(headers):
    log = MemoryLog()
    async with serving(lambda _: said("first"), log=log) as served:
        key = (await served.client.start_session("t")).api_key
        named = {k: v for k, v in headers.items() if v == "k1"}
        first = await post(served, key, {"messages": HELLO}, headers=named)
    async with serving(lambda _: said("second"), log=log) as served:
        again = await post(served, key, {"messages": HELLO}, headers=headers)
        assert again.json()["id"] == first.json()["id"]
        assert again.json()["choices"][0]["message"]["content"] == "first"
        assert len(served.events("InteractionRecorded")) == 1
        fresh = await post(served, key, {"messages": HELLO})
        assert fresh.json()["choices"][0]["message"]["content"] == "second"


async def test_after_a_restart_as_many_retries_get_as_many_answers():
    log = MemoryLog()
    async with serving(numbered(), log=log) as served:
        key = (await served.client.start_session("t")).api_key
        first = (await post(served, key, {"messages": HELLO})).json()["id"]
    async with serving(numbered(), log=log) as served:
        retry = {"x-stainless-retry-count": "1"}
        again = await asyncio.gather(*(post(served, key, {"messages": HELLO}, headers=retry) for _ in range(3)))
        ids = [reply.json()["id"] for reply in again]
        assert first in ids
        assert len(set(ids)) == 3
