"""What the core promises: the numbered cases that it answers for, each with its right value."""

from contextlib import aclosing

import anyio
import numpy as np
import pytest

from proxy.talk import BASH, END, Talk, plain, said, system, tool, user
from rollbook.proxy.capture import CaptureSettings
from rollbook.proxy.engine import Sampled, Sampling
from rollbook.proxy.errors import BadRequest, ContextOverflow, EngineFailed, NotFound
from rollbook.proxy.request import Piece, Reply, Request
from rollbook.store import InteractionFailed
from rollbook.store.events import decode_messages, made_at

pytestmark = pytest.mark.anyio


async def test_the_first_piece_has_the_id_and_the_last_item_is_the_reply():
    async with Talk("hello") as talk:
        items = await talk.items([user("hi")], is_stream=True)
    first, reply = items[0], items[-1]
    assert isinstance(first, Piece)
    assert isinstance(reply, Reply)
    assert first.interaction_id == reply.interaction_id
    assert (first.text, first.prompt_tokens) == ("", reply.prompt_tokens)
    assert "".join(p.text for p in items[1:-1]) == reply.content == "hello"
    assert [t for p in items[1:-1] for t in p.token_ids] == reply.output_ids
    assert reply.prompt_ids == talk.asked[0].prompt_ids.tolist()


async def test_the_reply_comes_only_when_its_event_is_durable():
    async with Talk("hello") as talk:
        waiting, go_on = anyio.Event(), anyio.Event()
        append = talk.log.append

        async def slow(*events):
            waiting.set()
            await go_on.wait()
            return await append(*events)

        talk.log.append = slow
        got = []

        async def ask():
            got.append(await talk.ask([user("hi")]))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await waiting.wait()
            await anyio.sleep(0.01)
            assert got == []
            go_on.set()
        assert got[0].interaction_id in talk.recorded


async def test_case_1_nothing_is_encoded_again():
    # `h`, `i` as two tokens is not how `hi` with a merge would be written; here the drift is a special token as text.
    async with Talk([*b"\x4e\x4f", END], "ok") as talk:  # ids 78, 79: "hi"
        first = await talk.ask([user("a")])
        second = await talk.ask([user("a"), said(first), user("b")])
        path = first.prompt_ids + first.output_ids
        assert second.prompt_ids[: len(path)] == path
        assert talk.fact(second).edge == "extends"
        assert talk.fact(second).shared == len(path)
        talk.check_book()


async def test_case_1_sampled_tokens_stay_though_the_text_has_another_spelling():
    # The bytes of `<|im_start|>` one by one read the same as the special token, and would be encoded as that one.
    async with Talk("", "ok") as talk:
        spelt = [talk.tokenizer.backend.token_to_id(c) for c in "<|im_start|>"]
        talk.replies[0] = [*spelt, END]
        assert talk.tokenizer.encode("<|im_start|>").tolist() != spelt
        first = await talk.ask([user("a")])
        assert first.content == "<|im_start|>"
        second = await talk.ask([user("a"), said(first), user("b")])
        begin = len(first.prompt_ids)
        assert second.prompt_ids[begin : begin + len(spelt) + 1] == [*spelt, END]
        talk.check_book()


@pytest.mark.parametrize("template", [None, "chatml_tools"])
async def test_case_2_thinking_stripped_by_the_client_is_another_trajectory(template):
    async with Talk("<think>\nx\n</think>\n\nok", "fine", template=template) as talk:
        first = await talk.ask([user("a")])
        assert (first.reasoning, first.content) == ("x", "ok")
        second = await talk.ask([user("a"), {"role": "assistant", "content": "ok"}, user("b")])
        fact = talk.fact(second)
        assert (fact.parent_id, fact.edge, fact.cause) == (first.interaction_id, "rerendered", "reasoning removed")
        assert fact.shared == len(first.prompt_ids)  # the first index that differs
        assert fact.is_trainable
        assert talk.fact(first).is_trainable
        text = talk.tokenizer.decode(second.prompt_ids)
        assert "<think>" not in text
        assert "ok<|im_end|>\n<|im_start|>user\nb" in text
        talk.check_book()


async def test_a_template_that_drops_reasoning_is_followed_and_said_so():
    async with Talk("<think>\nx\n</think>\n\nok", "fine") as talk:  # the bytes template writes no reasoning
        first = await talk.ask([user("a")])
        second = await talk.ask([user("a"), said(first), user("b")])
        assert talk.fact(second).edge == "rerendered"
        assert talk.fact(second).cause == "reasoning removed by template"
        talk.check_book()


async def test_exact_history_keeps_the_tokens_that_a_template_would_drop():
    settings = CaptureSettings(history="exact")
    async with Talk("<think>\nx\n</think>\n\nok", "fine", "fine", settings=settings) as talk:
        first = await talk.ask([user("a")])
        second = await talk.ask([user("a"), {"role": "assistant", "content": "ok"}, user("b")])
        assert talk.fact(second).edge == "extends"
        path = first.prompt_ids + first.output_ids
        assert second.prompt_ids[: len(path)] == path
        talk.check_book()


async def test_reasoning_sent_back_stays_where_the_template_keeps_it():
    async with Talk(
        "<think>\nx\n</think>\n\nok", "<think>\ny\n</think>\n\nwell", "fine", template="chatml_tools"
    ) as talk:
        told = [user("a")]
        for question in ("b", "c"):
            told += [said(await talk.ask(told)), user(question)]
        last = await talk.ask(told)
        assert talk.fact(last).edge == "extends"
        talk.check_book()


async def test_reasoning_dropped_from_an_older_turn_only_is_seen():
    thinking = "<think>\n{}\n</think>\n\nok{}"
    async with Talk(thinking.format("x", 1), thinking.format("y", 2), "z", "w", template="chatml_tools") as talk:
        first = await talk.ask([user("a")])
        second = await talk.ask([user("a"), said(first), user("b")])
        stripped = [user("a"), {"role": "assistant", "content": "ok1"}, user("b"), said(second), user("c")]
        third = await talk.ask(stripped)
        fact = talk.fact(third)
        assert (fact.edge, fact.cause) == ("rerendered", "reasoning removed")
        assert fact.shared == len(first.prompt_ids)
        text = talk.tokenizer.decode(third.prompt_ids)
        assert "x" not in text.split("ok1")[0].split("assistant")[-1]
        assert "<think>\ny\n</think>\n\nok2" in text
        fourth = await talk.ask([*stripped, said(third), user("d")])
        assert talk.fact(fourth).edge == "extends"
        talk.check_book()


CALL = '<tool_call>{"name": "bash", "arguments": {"b":1,"a":"\\u00e9"}}</tool_call>'


@pytest.mark.parametrize("template", [None, "chatml_tools"])
async def test_case_3_arguments_spelt_anew_are_the_same_path(template):
    async with Talk(CALL, "done", template=template) as talk:
        first = await talk.ask([user("a")], tools=[BASH])
        assert first.finish_reason == "tool_calls"
        assert first.content is None
        [call] = first.tool_calls
        assert (call.name, call.arguments) == ("bash", '{"b":1,"a":"\\u00e9"}')
        back = said(first)
        back["tool_calls"][0]["function"]["arguments"] = '{"a": "é", "b": 1.0}'
        second = await talk.ask([user("a"), back, tool(call.id, "out")], tools=[BASH])
        fact = talk.fact(second)
        assert (fact.parent_id, fact.edge) == (first.interaction_id, "extends")
        assert CALL in talk.tokenizer.decode(second.prompt_ids)
        assert decode_messages(talk.recorded[second.interaction_id].messages).resent == back
        talk.check_book()


@pytest.mark.parametrize("content", ["", None, ..., [{"type": "text", "text": ""}]])
async def test_case_4_content_may_be_empty_null_absent_or_parts(content):
    async with Talk(CALL, "done") as talk:
        first = await talk.ask([user("a")], tools=[BASH])
        back = said(first) | {"content": content, "refusal": None, "annotations": [], "index": 0}
        if content is ...:
            del back["content"]
        second = await talk.ask(
            [{"role": "user", "content": [{"type": "text", "text": "a"}]}, back, tool(first.tool_calls[0].id, "out")],
            tools=[BASH],
        )
        assert talk.fact(second).parent_id == first.interaction_id
        assert talk.fact(second).edge == "extends"
        talk.check_book()


@pytest.mark.parametrize("ids", [("call_0", "call_0"), ("", ""), ("x", "y")])
async def test_case_5_parallel_calls_with_bad_ids_go_by_position(ids):
    async with Talk(CALL + CALL.replace('"b":1', '"b":2'), "done") as talk:
        first = await talk.ask([user("a")], tools=[BASH])
        assert len({c.id for c in first.tool_calls}) == 2
        back = said(first)
        for call, sent in zip(back["tool_calls"], ids, strict=True):
            call["id"] = sent
        second = await talk.ask([user("a"), back, tool(ids[0], "1"), tool(ids[1], "2")], tools=[BASH])
        assert talk.fact(second).edge == "extends"
        kept = decode_messages(talk.recorded[second.interaction_id].messages)
        assert [c["id"] for c in kept.resent["tool_calls"]] == list(ids)
        talk.check_book()


class Broken:
    """An engine that sends what it is told."""

    logprobs_mode = "processed"

    def __init__(self, engine, *pieces, error=None):
        self._engine, self._pieces, self._error = engine, pieces, error

    async def health(self):
        return await self._engine.health()

    async def generate(self, generation):
        for piece in self._pieces:
            yield piece
        if self._error is not None:
            raise self._error


class Leaving(Broken):
    """An engine whose client is cancelled when its third piece is out."""

    def __init__(self, engine, scope):
        super().__init__(engine)
        self._scope = scope

    async def generate(self, generation):
        n = 0
        async with aclosing(self._engine.generate(generation)) as pieces:
            async for one in pieces:
                n += 1
                if n == 4:
                    self._scope.cancel()
                yield one


def piece(ids, n_logprobs=None, **more):
    logprobs = np.full(len(ids) if n_logprobs is None else n_logprobs, -1, np.float32)
    return Sampled(ids=np.asarray(ids, np.int32), logprobs=logprobs, version=0, **more)


async def test_case_6_ids_without_logprobs_are_refused_by_lengths():
    async with Talk() as talk:
        talk.capture._engine = Broken(talk.engine, piece([5, 6, 2], 2, finish_reason="stop"))
        with pytest.raises(EngineFailed, match="3 token ids with 2 logprobs"):
            await talk.ask([user("a")])
        [event] = talk.events
        assert isinstance(event.fact, InteractionFailed)


async def test_case_7_fewer_ids_than_the_engine_counts_is_an_incomplete_capture():
    async with Talk() as talk:
        pieces = [piece([78, 79]), piece([]), piece([80], finish_reason="length", n_sampled=4)]
        talk.capture._engine = Broken(talk.engine, *pieces)
        reply = await talk.ask([user("a")])
        assert talk.fact(reply).capture == "incomplete"
        assert talk.recorded[reply.interaction_id].output_ids.tolist() == [78, 79, 80]


async def test_case_8_another_tool_list_is_another_root():
    async with Talk("x", "y") as talk:
        first, second = await talk.ask([user("a")]), await talk.ask([user("a")], tools=[BASH])
        assert talk.fact(first).parent_id is talk.fact(second).parent_id is None
        assert talk.fact(first).prefix_hash != talk.fact(second).prefix_hash


async def test_case_9_a_header_line_that_changes_stays_one_conversation():
    async with Talk("x", "y") as talk:
        header = "x-anthropic-billing-header: {}\nBe good."
        first = await talk.ask([system(header.format(1)), user("a")])
        second = await talk.ask([system(header.format(2)), user("a"), said(first), user("b")])
        assert talk.fact(second).parent_id == first.interaction_id
        assert talk.fact(second).edge == "extends"
        talk.check_book()


async def test_case_10_a_turn_cut_by_length_gets_its_end_from_the_template_as_prompt():
    async with Talk("abcdef", "ok") as talk:
        first = await talk.ask([user("a")], sampling=Sampling(max_tokens=3))
        assert (first.content, first.finish_reason) == ("abc", "length")
        second = await talk.ask([user("a"), said(first), user("go on")])
        fact = talk.fact(second)
        path = first.prompt_ids + first.output_ids
        assert (fact.edge, fact.shared) == ("extends", len(path))
        assert second.prompt_ids[len(path)] == END  # in the prompt: nobody sampled it
        assert talk.recorded[first.interaction_id].output_ids.tolist()[-1] != END
        talk.check_book()


async def test_case_11_the_book_says_what_the_logprobs_are_of():
    async with Talk("x") as talk:
        reply = await talk.ask([user("a")], sampling=Sampling(top_p=0.9))
        fact = talk.fact(reply)
        assert fact.logprobs_mode == talk.engine.logprobs_mode == "invented"
        assert (fact.sampling["temperature"], fact.sampling["top_p"], fact.sampling["top_k"]) == (1.0, 0.9, 0)


async def test_case_12_interleaved_sub_agents_are_two_trajectories():
    async with Talk("a1", "b1", "a2", "b2") as talk:
        a1 = await talk.ask([system("A"), user("q")])
        b1 = await talk.ask([system("B"), user("q")])
        a2 = await talk.ask([system("A"), user("q"), said(a1), user("r")])
        b2 = await talk.ask([system("B"), user("q"), said(b1), user("r")])
        assert talk.fact(a2).parent_id == a1.interaction_id
        assert talk.fact(b2).parent_id == b1.interaction_id
        talk.check_book()


async def leave_after(talk, n_pieces, messages, **request):
    """A client that goes after so many pieces with something in them."""
    asked = Request(dialect="chat", messages=messages, is_stream=True, sampling=Sampling(), **request)
    stream = talk.capture.stream(talk.episode, asked)
    first = await anext(stream)
    for _ in range(n_pieces):
        await anext(stream)
    await stream.aclose()
    return first.interaction_id


async def test_case_13_what_is_retried_is_an_orphan_and_the_second_goes_on():
    async with Talk("first answer, long enough", "second", "third", chunk_tokens=4) as talk:
        lost = await leave_after(talk, 2, [user("a")])
        second = await talk.ask([user("a")])
        fact = talk.fact(second)
        assert (fact.parent_id, fact.edge) == (lost, "retries")
        assert fact.shared == fact.prompt_length == talk.fact(lost).prompt_length
        assert not talk.fact(lost).is_trainable
        assert fact.is_trainable
        third = await talk.ask([user("a"), said(second), user("b")])
        assert (talk.fact(third).parent_id, talk.fact(third).edge) == (second.interaction_id, "extends")
        assert talk.episode.last_main == third.interaction_id
        assert talk.messages_in_book(third.interaction_id)[:-1] == [user("a"), said(second), user("b")]
        talk.check_book()


async def test_case_14_identical_requests_are_samples():
    async with Talk("a", "b", "c", "a") as talk:
        replies = [await talk.ask([user("q")], body_sha256="00") for _ in range(4)]
        assert len({r.interaction_id for r in replies}) == 4
        assert all(talk.fact(r).is_trainable and talk.fact(r).parent_id is None for r in replies)
        talk.check_book()


async def test_case_15_a_summary_is_a_root_that_compacts():
    async with Talk("one", "two", "three") as talk:
        told = [system("s"), user("a")]
        for _ in range(2):
            told += [said(await talk.ask(told)), user("more")]
        third = await talk.ask([system("s"), user("Summary of the conversation so far: one, two.")])
        fact = talk.fact(third)
        assert fact.edge == "compacts"
        assert fact.parent_id is not None
        assert talk.messages_in_book(third.interaction_id)[:-1] == [
            system("s"),
            user("Summary of the conversation so far: one, two."),
        ]
        talk.check_book()


async def test_case_16_the_last_of_the_main_trajectory_is_not_a_title():
    form = {"type": "json_schema", "json_schema": {}}
    async with Talk("title", "one", "two", "title", "side") as talk:
        await talk.ask([system("Write a title."), user("a")], response_format=form)
        first = await talk.ask([system("s"), user("a")], tools=[BASH])
        last = await talk.ask([system("s"), user("a"), said(first), user("b")], tools=[BASH])
        await talk.ask([system("Write a title."), user("a b")], response_format=form)
        await talk.ask([system("s"), user("a"), said(first), user("b")], tools=[BASH], store=False)
        assert talk.episode.last_main == last.interaction_id
        assert talk.episode.n_interactions == 5


async def test_case_28_a_client_that_leaves_aborts_the_engine_and_the_partial_answer_is_kept():
    async with Talk("x" * 40, chunk_tokens=4) as talk:
        left = await leave_after(talk, 3, [user("a")])
        assert (await talk.engine.health()).running == 0
        fact, event = talk.fact(left), talk.recorded[left]
        assert (fact.delivered, fact.finish_reason, fact.is_trainable) == (12, "abort", False)
        assert len(event.output_ids) == len(event.logprobs) == 12
        assert all(e.kind == "InteractionRecorded" for e in talk.events)
        assert talk.episode.last_main is None


async def test_a_cancelled_client_is_one_that_left():
    async with Talk("x" * 400, chunk_tokens=4, token_s=0.002) as talk:
        with anyio.CancelScope() as scope:
            talk.capture._engine = Leaving(talk.engine, scope)
            await talk.ask([user("a")])
        assert (await talk.engine.health()).running == 0
        [event] = talk.events
        assert event.fact.delivered == 0  # nothing was streamed
        assert 0 < len(event.output_ids) < 400


async def test_the_caller_may_say_how_much_was_delivered():
    async with Talk("x" * 40, chunk_tokens=4) as talk:
        asked = Request(dialect="chat", messages=[user("a")], is_stream=True)
        stream = talk.capture.stream(talk.episode, asked, delivered=lambda: 7)
        first = await anext(stream)
        await anext(stream)
        await anext(stream)
        await stream.aclose()
        assert talk.fact(first.interaction_id).delivered == 7


async def test_case_29_an_upstream_that_breaks_off_is_an_error_to_the_client():
    async with Talk() as talk:
        error = EngineFailed("the engine closed the connection")
        talk.capture._engine = Broken(talk.engine, piece([78, 79]), error=error)
        with pytest.raises(EngineFailed, match="closed"):
            await talk.ask([user("a")])
        recorded, failed = talk.events
        assert (recorded.fact.finish_reason, recorded.fact.is_trainable) == ("abort", False)
        assert isinstance(failed.fact, InteractionFailed)
        talk.capture._engine = Broken(talk.engine, piece([78, 79]))
        with pytest.raises(EngineFailed, match="without a finish reason"):
            await talk.ask([user("b")])


async def test_case_31_after_a_kill_a_retry_by_the_same_key_gets_the_recorded_answer():
    async with Talk("answer", "other") as talk:
        first = await talk.ask([user("a")], body_sha256="aa", idempotency_key="k")
        talk.restart()
        again = await talk.ask([user("a")], body_sha256="aa", idempotency_key="k")
        assert plain(again) == plain(first)
        assert len(talk.events) == 1
        other = await talk.ask([user("a")], body_sha256="aa", idempotency_key="another")
        assert other.interaction_id != first.interaction_id


async def test_case_31_so_does_a_retry_that_says_so():
    async with Talk("<think>\nt\n</think>\n\nsaid" + CALL, "more") as talk:
        items = await talk.items([user("a")], body_sha256="aa", tools=[BASH], is_stream=True)
        talk.restart()
        again = await talk.items([user("a")], body_sha256="aa", tools=[BASH], is_stream=True, retries=1)
        assert plain(again[-1]) == plain(items[-1])
        assert again[-1].created == int(made_at(again[-1].interaction_id) or 0), (
            "not the second in which it was recorded"
        )
        for name in ("text", "reasoning", "tool_name", "tool_arguments"):
            texts = ["".join(getattr(p, name) or "" for p in stream[:-1]) for stream in (items, again)]
            assert texts[0] == texts[1]
        assert [t for p in again[:-1] for t in p.token_ids] == items[-1].output_ids


async def test_a_second_sample_of_an_answered_request_needs_no_mark():
    async with Talk("answer", "other") as talk:
        first = await talk.ask([user("a")], body_sha256="aa")
        second = await talk.ask([user("a")], body_sha256="aa")
        assert first.interaction_id != second.interaction_id


async def test_case_34_a_prompt_that_leaves_no_room_is_refused():
    async with Talk("x", max_context=64) as talk:
        with pytest.raises(ContextOverflow) as caught:
            await talk.ask([user("a" * 80)])
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
        [event] = talk.events
        assert event.fact.error == "ContextOverflow"


async def test_case_34_a_prompt_that_is_far_too_long_is_refused_by_its_length_and_made_no_tokens():
    """The longest token of this tokenizer has 13 characters."""
    async with Talk("x", max_context=1000) as talk:
        first = await talk.ask([user("a")])
        for messages in ([user("a" * 50_000)], [user("a"), said(first), user("a" * 50_000)]):
            with pytest.raises(
                ContextOverflow, match=r"the prompt has at least 38[0-9]{2} tokens and leaves"
            ) as caught:
                await talk.ask(messages)
            assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
            assert talk.events[-1].fact.error == "ContextOverflow"
        with pytest.raises(ContextOverflow, match=r"the prompt has 50[0-9]{2} tokens and leaves"):
            await talk.ask([user("a" * 5000)])
        counted = await talk.capture.count(Request(dialect="messages", messages=[user("a" * 50_000)]))
        assert counted > 50_000, "who only counts is told"


async def test_max_tokens_is_what_is_left_of_the_context():
    async with Talk("x", "y", "z", max_context=64) as talk:
        reply = await talk.ask([user("a")])
        assert talk.asked[-1].sampling.max_tokens == 64 - reply.prompt_tokens
        await talk.ask([user("a")], sampling=Sampling(max_tokens=128_000))
        assert talk.asked[-1].sampling.max_tokens == 64 - reply.prompt_tokens
        await talk.ask([user("a")], max_total_tokens=reply.prompt_tokens + 5)
        assert talk.asked[-1].sampling.max_tokens == 5


async def test_a_stop_string_trims_the_text_and_keeps_the_tokens():
    async with Talk("say STOP more", "ok", chunk_tokens=8) as talk:
        first = await talk.ask([user("a")], stop=("STOP",))
        assert (first.content, first.finish_reason) == ("say ", "stop")
        assert talk.tokenizer.decode(first.output_ids) == "say STOP"
        second = await talk.ask([user("a"), said(first), user("b")])
        fact = talk.fact(second)
        assert (fact.edge, fact.cause) == ("rerendered", "stop text removed")
        assert fact.shared == len(first.prompt_ids) + len("say ")
        assert "STOP" not in talk.tokenizer.decode(second.prompt_ids)
        talk.check_book()


async def test_an_end_token_that_the_template_does_not_write_is_not_in_the_next_prompt():
    async with Talk([78, 0], "ok") as talk:  # ends with <|endoftext|>
        talk.tokenizer.eos_ids = (0, 2)
        first = await talk.ask([user("a")])
        assert first.finish_reason == "stop"
        second = await talk.ask([user("a"), said(first), user("b")])
        fact = talk.fact(second)
        assert (fact.edge, fact.cause) == ("rerendered", "end of turn replaced")
        assert fact.shared == len(first.prompt_ids) + 1
        talk.check_book()


async def test_a_named_parent_needs_only_what_is_new():
    async with Talk("one", "two", "three", "four") as talk:
        first = await talk.ask([system("s"), user("a")], tools=[BASH])
        second = await talk.ask([user("b")], parent_id=first.interaction_id, tools=[BASH])
        third = await talk.ask([system("s"), user("c")], parent_id=second.interaction_id, tools=[BASH])
        told = [system("s"), user("a"), said(first), user("b"), said(second), user("c"), said(third), user("d")]
        fourth = await talk.ask(told, tools=[BASH])
        assert [talk.fact(r).edge for r in (second, third, fourth)] == ["extends"] * 3
        assert talk.messages_in_book(fourth.interaction_id)[:-1] == told
        with pytest.raises(NotFound) as error:
            await talk.ask([user("b")], parent_id="resp_unknown")
        assert error.value.param == "previous_response_id"
        talk.check_book()


async def test_a_named_parent_under_other_instructions_is_told_anew():
    async with Talk("one", "two", "three", "four", "five") as talk:
        first = await talk.ask([system("s"), user("a")])
        second = await talk.ask([system("other"), user("b")], parent_id=first.interaction_id)
        fact = talk.fact(second)
        assert (fact.parent_id, fact.edge) == (first.interaction_id, "rerendered")
        told = [system("other"), user("a"), said(first), user("b")]
        assert talk.messages_in_book(second.interaction_id)[:-1] == told
        text = talk.tokenizer.decode(second.prompt_ids)
        assert "other" in text
        assert text == talk.tokenizer.render(told, add_generation_prompt=True)
        third = await talk.ask([user("c")], parent_id=second.interaction_id, tools=[BASH])
        assert "bash" in talk.tokenizer.decode(third.prompt_ids)
        fourth = await talk.ask([user("d")], parent_id=third.interaction_id)
        assert "bash" not in talk.tokenizer.decode(fourth.prompt_ids)
        assert [talk.fact(r).cause for r in (third, fourth)] == ["tools changed", "tools changed"]
        talk.restart()
        assert [talk.episode.nodes[r.interaction_id].tools for r in (second, third, fourth)] == [[], [BASH], []]
        fifth = await talk.ask([user("e")], parent_id=fourth.interaction_id)
        assert talk.fact(fifth).edge == "extends"
        talk.check_book()


@pytest.mark.parametrize("template", [None, "chatml_tools"])
async def test_a_restart_in_the_middle_changes_nothing(template):
    script = ["<think>\nt\n</think>\n\none", CALL, "three STOP", "four", "five"]

    async def play(restarts):
        async with Talk(*script, template=template, chunk_tokens=3) as talk:
            told, replies = [user("a")], []
            for n in range(5):
                if restarts:
                    talk.restart()
                reply = await talk.ask(told, tools=[BASH], stop=("STOP",))
                replies.append(reply)
                told += [said(reply)]
                told += [tool(c.id, "out") for c in reply.tool_calls] or [user(f"q{n}")]
            talk.check_book()
            facts = [talk.fact(r) for r in replies]
            return [(f.edge, f.cause, f.shared, f.prompt_length) for f in facts], talk.episode.last_main == replies[
                -1
            ].interaction_id

    assert await play(False) == await play(True)


async def test_raw_prompts_are_not_templated():
    async with Talk("x", "y") as talk:
        reply = await talk.ask([user("once")], dialect="completions")
        assert talk.tokenizer.decode(reply.prompt_ids) == "once"
        assert reply.interaction_id.startswith("cmpl_")
        ids = await talk.ask([{"role": "user", "content": [78, 79]}], dialect="completions")
        assert ids.prompt_ids == [78, 79]
        talk.check_book()


async def test_images_are_refused_by_name():
    async with Talk() as talk:
        with pytest.raises(BadRequest, match="image_url"):
            await talk.ask([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}])


async def test_versions_are_those_that_sampled_each_token():
    async with Talk("x" * 20, chunk_tokens=5) as talk:
        stream = talk.capture.stream(talk.episode, Request(dialect="chat", messages=[user("a")], is_stream=True))
        await anext(stream)
        await anext(stream)
        await talk.engine.load_weights("w", 3)
        reply = [item async for item in stream][-1]
        versions = talk.recorded[reply.interaction_id].versions.tolist()
        assert versions == sorted(versions)
        assert (versions[0], versions[-1], reply.version) == (0, 3, 3)


async def test_episodes_sleep_where_many_are_open_and_go_on_as_if_they_had_not():
    settings = CaptureSettings(memory=1)
    async with Talk("a", "b", "c", "d", settings=settings) as talk:
        first = await talk.ask([user("q")])
        assert talk.episode.is_asleep
        assert not talk.episode.nodes
        assert talk.episode.last_main == first.interaction_id
        assert talk.episode.n_interactions == 1
        second = await talk.ask([user("q"), said(first), user("r")])
        assert talk.fact(second).edge == "extends"
        other = talk.capture.open("ep_2")
        async with anyio.create_task_group() as tasks:
            for episode in (talk.episode, other):
                told = (
                    [user("q"), said(first), user("r"), said(second), user("s")]
                    if episode is talk.episode
                    else [user("q")]
                )
                asked = Request(dialect="chat", messages=told)

                async def run(episode=episode, asked=asked):
                    async for _ in talk.capture.stream(episode, asked):
                        pass

                tasks.start_soon(run)
        assert other.is_asleep
        assert talk.episode.is_asleep
        assert sorted(str(talk.fact(i).edge) for i in talk.recorded) == ["None", "None", "extends", "extends"]
        talk.check_book()
        talk.capture.forget(talk.episode)
        assert talk.capture._size == 0
