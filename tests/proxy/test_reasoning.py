"""Thoughts, text and parallel calls in one turn, as each dialect has it; sent back, they are the same turn."""

import anthropic
import openai
import pytest

from proxy_serving import said, serving
from rollbook.proxy.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio

THOUGHTFUL = Tokenizer.load("bytes", chat_template="chatml_tools")
TURN = (
    "<think>\nTwo at once.\n</think>\n\nLooking up.\n"
    '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {"at": "b"}}\n</tool_call>'
)
LAST = "<think>\nEasy.\n</think>\n\nDone."
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}}
HELLO = [{"role": "user", "content": "look twice"}]


def script():
    lines = iter([TURN, LAST])
    return lambda _: said(next(lines))


def edges(served):
    return [event.fact.edge for event in served.events("InteractionRecorded")]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_chat(is_streamed):
    tools = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]
    async with serving(script(), tokenizer=THOUGHTFUL, chunk_tokens=5) as served:
        key = (await served.client.start_session("t")).api_key
        async with openai.AsyncOpenAI(base_url=served.base_url, api_key=key, max_retries=0) as sdk:
            messages = list(HELLO)
            asked = {"model": "m", "messages": messages, "tools": tools}
            if is_streamed:
                async with sdk.chat.completions.stream(**asked) as stream:
                    message = (await stream.get_final_completion()).choices[0].message
            else:
                message = (await sdk.chat.completions.create(**asked)).choices[0].message
            assert message.reasoning_content.strip() == "Two at once."
            assert message.content.strip() == "Looking up."
            assert [call.function.arguments for call in message.tool_calls] == ['{"at": "é"}', '{"at": "b"}']
            assert len({call.id for call in message.tool_calls}) == 2
            messages.append(message.model_dump())
            messages += [{"role": "tool", "tool_call_id": c.id, "content": "x"} for c in message.tool_calls]
            last = (await sdk.chat.completions.create(**asked)).choices[0].message
        assert (last.content, last.reasoning_content.strip()) == ("Done.", "Easy.")
        assert edges(served) == [None, "extends"]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_responses(is_streamed):
    tools = [{"type": "function", "name": "look", "parameters": PARAMETERS, "strict": False}]
    async with serving(script(), tokenizer=THOUGHTFUL, chunk_tokens=5) as served:
        key = (await served.client.start_session("t")).api_key
        async with openai.AsyncOpenAI(base_url=served.base_url, api_key=key, max_retries=0) as sdk:
            asked = {"model": "m", "input": list(HELLO), "tools": tools}
            if is_streamed:
                async with sdk.responses.stream(**asked) as stream:
                    kinds = [event.type async for event in stream]
                    response = await stream.get_final_response()
                assert kinds.count("response.output_item.done") == 4
                assert "response.reasoning_text.delta" in kinds
            else:
                response = await sdk.responses.create(**asked)
            thought, text, *calls = response.output
            assert thought.content[0].text.strip() == "Two at once."
            assert text.content[0].text.strip() == "Looking up."
            assert [call.arguments for call in calls] == ['{"at": "é"}', '{"at": "b"}']
            assert len({item.id for item in response.output}) == 4
            asked["input"] += [item.to_dict() for item in response.output]
            asked["input"] += [{"type": "function_call_output", "call_id": c.call_id, "output": "x"} for c in calls]
            last = await sdk.responses.create(**asked)
        assert last.output_text == "Done."
        assert edges(served) == [None, "extends"]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_messages(is_streamed):
    tools = [{"name": "look", "input_schema": PARAMETERS}]
    async with serving(script(), tokenizer=THOUGHTFUL, chunk_tokens=5) as served:
        key = (await served.client.start_session("t")).api_key
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key=key, max_retries=0) as sdk:
            asked = {"model": "m", "max_tokens": 500, "messages": list(HELLO), "tools": tools}
            if is_streamed:
                async with sdk.messages.stream(**asked) as stream:
                    message = await stream.get_final_message()
            else:
                message = await sdk.messages.create(**asked)
            thought, text, *calls = message.content
            assert thought.thinking.strip() == "Two at once."
            assert thought.signature
            assert text.text.strip() == "Looking up."
            assert [call.input for call in calls] == [{"at": "é"}, {"at": "b"}]
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "x"} for call in calls]
            asked["messages"] += [
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": results},
            ]
            last = await sdk.messages.create(**asked)
        assert last.content[-1].text == "Done."
        assert edges(served) == [None, "extends"]


async def test_arguments_that_are_no_json_reach_the_client_and_come_back_as_they_were():
    broken = '<tool_call>\n{"name": "look", "arguments": {"at": oops}}\n</tool_call>'
    tools = [{"name": "look", "input_schema": PARAMETERS}]
    lines = iter([broken, LAST])
    async with serving(lambda _: said(next(lines)), tokenizer=THOUGHTFUL) as served:
        key = (await served.client.start_session("t")).api_key
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key=key, max_retries=0) as sdk:
            asked = {"model": "m", "max_tokens": 500, "messages": list(HELLO), "tools": tools}
            async with sdk.messages.stream(**asked) as stream:
                message = await stream.get_final_message()
            if message.stop_reason == "tool_use":
                result = {"type": "tool_result", "tool_use_id": message.content[-1].id, "content": "bad"}
                more = [result]
            else:
                more = [{"type": "text", "text": "that was no call"}]
            asked["messages"] += [
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": more},
            ]
            await sdk.messages.create(**asked)
        assert edges(served) == [None, "extends"]
