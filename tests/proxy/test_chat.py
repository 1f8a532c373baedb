"""Chat completions over HTTP: what the openai SDK gets, and what the book has."""

import pytest
from openai import AsyncOpenAI

from proxy_serving import said, serving

pytestmark = pytest.mark.anyio


async def test_an_answer_is_in_the_book_with_its_tokens():
    async with serving(lambda _: said("Hello there")) as served:
        started = await served.client.start_session("t1")
        async with AsyncOpenAI(base_url=served.base_url, api_key=started.api_key, max_retries=0) as sdk:
            answer = await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        assert answer.choices[0].message.content == "Hello there"
        assert answer.choices[0].finish_reason == "stop"
        [event] = served.events("InteractionRecorded")
        assert event.interaction_id == answer.id
        assert event.episode_id == started.session_id
        assert event.output_ids.tolist() == said("Hello there")
        assert answer.usage.prompt_tokens == event.fact.prompt_length


async def test_a_stream_says_the_same_as_the_book():
    async with serving(lambda _: said("Hello there, you"), chunk_tokens=3) as served:
        started = await served.client.start_session("t1")
        async with AsyncOpenAI(base_url=served.base_url, api_key=started.api_key, max_retries=0) as sdk:
            text, ids, usage = "", set(), None
            async for chunk in await sdk.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "hi"}],
                stream=True,
                stream_options={"include_usage": True},
            ):
                ids.add(chunk.id)
                if chunk.choices:
                    text += chunk.choices[0].delta.content or ""
                usage = chunk.usage or usage
        [event] = served.events("InteractionRecorded")
        assert text == "Hello there, you"
        assert ids == {event.interaction_id}
        assert usage.completion_tokens == len(event.output_ids)
