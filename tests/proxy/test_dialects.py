"""What each vendor's own SDK reads from us, streamed and whole."""

import anthropic
import openai
import pytest

from proxy_serving import said, serving

pytestmark = pytest.mark.anyio
HELLO = [{"role": "user", "content": "hi"}]


async def test_responses_whole_and_streamed_say_the_same():
    async with serving(lambda _: said("Hello there, you"), chunk_tokens=3) as served:
        started = await served.client.start_session("t1")
        async with openai.AsyncOpenAI(base_url=served.base_url, api_key=started.api_key, max_retries=0) as sdk:
            whole = await sdk.responses.create(model="m", input="hi", instructions="be kind")
            async with sdk.responses.stream(model="m", input="hi", instructions="be kind") as stream:
                kinds = [event.type async for event in stream]
                streamed = await stream.get_final_response()
        assert whole.output_text == streamed.output_text == "Hello there, you"
        assert whole.status == streamed.status == "completed"
        assert whole.usage == streamed.usage
        assert kinds[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert kinds[-4:] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        first, second = served.events("InteractionRecorded")
        assert [first.interaction_id, second.interaction_id] == [whole.id, streamed.id]


async def test_messages_whole_and_streamed_say_the_same():
    async with serving(lambda _: said("Hello there, you"), chunk_tokens=3) as served:
        started = await served.client.start_session("t1")
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key=started.api_key, max_retries=0) as sdk:
            whole = await sdk.messages.create(model="m", max_tokens=50, messages=HELLO, system="be kind")
            async with sdk.messages.stream(model="m", max_tokens=50, messages=HELLO, system="be kind") as stream:
                text = "".join([piece async for piece in stream.text_stream])
                streamed = await stream.get_final_message()
        assert whole.content[0].text == text == streamed.content[0].text == "Hello there, you"
        assert whole.stop_reason == streamed.stop_reason == "end_turn"
        assert whole.usage == streamed.usage
        first, second = served.events("InteractionRecorded")
        assert [first.interaction_id, second.interaction_id] == [whole.id, streamed.id]


async def test_an_answer_cut_by_length_says_so_in_every_dialect():
    async with serving(lambda _: said("Hello there, you")) as served:
        started = await served.client.start_session("t1")
        key = started.api_key
        async with openai.AsyncOpenAI(base_url=served.base_url, api_key=key, max_retries=0) as sdk:
            chat = await sdk.chat.completions.create(model="m", messages=HELLO, max_tokens=5)
            response = await sdk.responses.create(model="m", input="hi", max_output_tokens=5)
            legacy = await sdk.completions.create(model="m", prompt="hi", max_tokens=5)
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key=key, max_retries=0) as sdk:
            message = await sdk.messages.create(model="m", max_tokens=5, messages=HELLO)
    assert chat.choices[0].finish_reason == legacy.choices[0].finish_reason == "length"
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert message.stop_reason == "max_tokens"
    assert chat.choices[0].message.content == response.output_text == legacy.choices[0].text == message.content[0].text


async def test_n_samples_are_n_interactions():
    answers = iter(["one", "two", "three"])
    async with serving(lambda _: said(next(answers))) as served:
        started = await served.client.start_session("t1")
        async with openai.AsyncOpenAI(base_url=served.base_url, api_key=started.api_key, max_retries=0) as sdk:
            chat = await sdk.chat.completions.create(model="m", messages=HELLO, n=3)
        assert sorted(choice.message.content for choice in chat.choices) == ["one", "three", "two"]
        recorded = {event.interaction_id for event in served.events("InteractionRecorded")}
        assert recorded == {choice.interaction_id for choice in chat.choices}
        assert chat.id in recorded


async def test_logprobs_belong_to_their_tokens():
    async with serving(lambda _: said("Hé"), chunk_tokens=1) as served:
        started = await served.client.start_session("t1")
        async with openai.AsyncOpenAI(base_url=served.base_url, api_key=started.api_key, max_retries=0) as sdk:
            chat = await sdk.chat.completions.create(model="m", messages=HELLO, logprobs=True)
            stream = await sdk.chat.completions.create(model="m", messages=HELLO, logprobs=True, stream=True)
            streamed = [item async for chunk in stream if (lp := chunk.choices[0].logprobs) for item in lp.content]
        [first, second] = served.events("InteractionRecorded")
        for event, content in ((first, chat.choices[0].logprobs.content), (second, streamed)):
            assert [item.logprob for item in content] == event.logprobs.tolist()
            assert bytes(b for item in content[:-1] for b in item.bytes).decode() == "Hé"


CANNOT = [
    ("chat/completions", {"messages": HELLO, "surprise": 1}, "surprise"),
    ("chat/completions", {"messages": HELLO, "temperature": "hot"}, "temperature"),
    ("chat/completions", {"messages": HELLO, "temperature": 9}, "temperature"),
    ("chat/completions", {"messages": HELLO, "top_logprobs": 3, "logprobs": True}, "top_logprobs"),
    ("chat/completions", {"messages": HELLO, "logit_bias": {"5": 1}}, "logit_bias"),
    ("chat/completions", {"messages": HELLO, "n": 0}, "n"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": [{"role": "wizard", "content": ""}]}, "messages[0].role"),
    ("chat/completions", {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
    ("chat/completions", {"messages": HELLO, "tools": [{"type": "custom"}]}, "tools[0].type"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0]",
    ),
    (
        "chat/completions",
        {"messages": HELLO, "chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs.messages",
    ),
    ("responses", {"input": [{"type": "computer_call"}]}, "input[0]"),
    ("responses", {"input": "hi", "background": True}, "background"),
    ("responses", {"input": "hi", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    ("responses", {}, "input"),
    ("completions", {"prompt": ["a", "b"]}, "prompt"),
    ("completions", {"prompt": "a", "echo": True}, "echo"),
]


async def test_what_cannot_be_done_is_refused_by_its_name():
    async with serving(lambda _: said("no")) as served:
        started = await served.client.start_session("t1")
        async with openai.AsyncOpenAI(base_url=served.base_url, api_key=started.api_key, max_retries=0) as sdk:
            for path, body, param in CANNOT:
                with pytest.raises(openai.BadRequestError) as refused:
                    await sdk.post(f"/{path}", body=body, cast_to=object)
                assert refused.value.param == param
        assert not served.events("InteractionRecorded")


async def test_anthropic_errors_have_its_shape_and_statuses():
    async with serving(lambda _: said("no")) as served:
        started = await served.client.start_session("t1")
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key="sk-rb-wrong-key", max_retries=0) as sdk:
            with pytest.raises(anthropic.AuthenticationError) as wrong:
                await sdk.messages.create(model="m", max_tokens=5, messages=HELLO)
        assert wrong.value.body["error"]["type"] == "authentication_error"
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key=started.api_key, max_retries=0) as sdk:
            image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
            with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\]"):
                await sdk.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": [image]}])
            with pytest.raises(anthropic.BadRequestError) as thread:
                await sdk.messages.create(
                    model="m", max_tokens=5, messages=HELLO, extra_body={"thread": {"type": "create"}}
                )
        assert thread.value.body["error"]["details"] == {
            "error_code": "thread_unsupported_request",
            "unsupported": ["thread"],
        }


async def test_what_nobody_foresaw_has_the_vendors_shape_too(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise TypeError("nobody foresaw this")

    async with serving(lambda _: said("no")) as served:
        started = await served.client.start_session("t1")
        monkeypatch.setattr(served.service.calls, "begin", fail)
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key=started.api_key, max_retries=0) as sdk:
            with pytest.raises(anthropic.InternalServerError, match="its log says why") as theirs:
                await sdk.messages.create(model="m", max_tokens=5, messages=HELLO)
        assert theirs.value.body["error"]["type"] == "api_error"
        async with openai.AsyncOpenAI(base_url=served.base_url, api_key=started.api_key, max_retries=0) as sdk:
            with pytest.raises(openai.InternalServerError, match="its log says why"):
                await sdk.chat.completions.create(model="m", messages=HELLO)


async def test_the_model_list_suits_both_vendors():
    async with serving(lambda _: said("no")) as served:
        started = await served.client.start_session("t1")
        async with openai.AsyncOpenAI(base_url=served.base_url, api_key=started.api_key) as sdk:
            assert [model.id async for model in sdk.models.list()] == ["default"]
            assert (await sdk.models.retrieve("default")).id == "default"
            with pytest.raises(openai.NotFoundError):
                await sdk.models.retrieve("other")
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key=started.api_key) as sdk:
            assert [model.id async for model in sdk.models.list()] == ["default"]


async def test_tokens_are_counted_as_they_would_be_prompted():
    async with serving(lambda _: said("ok")) as served:
        started = await served.client.start_session("t1")
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key=started.api_key, max_retries=0) as sdk:
            counted = await sdk.messages.count_tokens(model="m", messages=HELLO, system="be kind")
            message = await sdk.messages.create(model="m", max_tokens=5, messages=HELLO, system="be kind")
        assert counted.input_tokens == message.usage.input_tokens
        assert len(served.events("InteractionRecorded")) == 1
