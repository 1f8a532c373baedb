"""Agents on their own SDKs, unmodified: each conversation is one trajectory, token for token what the engine saw.

The model is a script that calls `multiply`, then `add`, then answers. Its arguments are oddly spelt and one turn has
text beside its call, so that whatever an SDK rewrites would show.
"""

import json
from dataclasses import dataclass, field

import anthropic
import numpy as np
import openai
import pytest

from proxy_serving import BYTES, said, serving

pytestmark = pytest.mark.anyio

MULTIPLY = 'I will multiply first. \n<tool_call>{"name": "multiply", "arguments": {"b": 4,"a":  3.0}}</tool_call>'
ADD = '<tool_call>{"name": "add", "arguments": {"a": 12, "b":5}}</tool_call>'
ANSWER = "The answer is \\boxed{17}"
QUESTION = "What is 3 times 4 plus 5?"
SYSTEM = "Use the tools."


@dataclass
class Model:
    """Says its lines one after another, and keeps the prompts it got."""

    lines: list[str] = field(default_factory=lambda: [MULTIPLY, ADD, ANSWER])
    prompts: list[np.ndarray] = field(default_factory=list)

    def __call__(self, generation):
        self.prompts.append(generation.prompt_ids)
        return said(self.lines[len(self.prompts) - 1])


def check_one_trajectory(served, model):
    """Every call extends the one before it, and the book has exactly what the engine got and said."""
    events = served.events("InteractionRecorded")
    assert len(events) == len(model.prompts) == len(model.lines)
    path = np.empty(0, np.int32)
    for i, (event, prompt) in enumerate(zip(events, model.prompts, strict=True)):
        fact = event.fact
        assert fact.edge == ("extends" if i else None), (i, fact.cause)
        assert fact.parent_id == (events[i - 1].interaction_id if i else None)
        assert fact.shared == len(path)
        full = np.concatenate((path[: fact.shared], event.prompt_ids))
        assert full.tolist() == prompt.tolist()
        assert event.output_ids.tolist() == said(model.lines[i])
        path = np.concatenate((full, event.output_ids))
    text = BYTES.decode(path)
    assert text.count(QUESTION) == 1
    assert model.lines[0] in text
    return events


def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


CALL = {"multiply": multiply, "add": add}
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
}
CHAT_TOOLS = [
    {"type": "function", "function": {"name": name, "description": f.__doc__, "parameters": PARAMETERS}}
    for name, f in CALL.items()
]


@pytest.fixture
async def scripted():
    """A server whose model is a fresh script, with the key of an open session."""
    model = Model()
    async with serving(model, chunk_tokens=3) as served:
        started = await served.client.start_session("t1")
        yield served, model, started.api_key


@pytest.mark.parametrize("echo", ["whole", "without nulls"])
async def test_openai_chat(scripted, echo):
    served, model, key = scripted
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key=key, max_retries=0) as sdk:
        while True:
            answer = await sdk.chat.completions.create(model="m", messages=messages, tools=CHAT_TOOLS)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=echo == "without nulls"))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = CALL[call.function.name](**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    assert message.content == ANSWER
    events = check_one_trajectory(served, model)
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == '{"b": 4,"a":  3.0}'
    assert events[0].fact.finish_reason == "tool_calls"


async def test_openai_chat_streamed(scripted):
    served, model, key = scripted
    messages = [{"role": "user", "content": QUESTION}]
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key=key, max_retries=0) as sdk:
        while True:
            async with sdk.chat.completions.stream(model="m", messages=messages, tools=CHAT_TOOLS) as stream:
                message = (await stream.get_final_completion()).choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = CALL[call.function.name](**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    assert message.content == ANSWER
    check_one_trajectory(served, model)


RESPONSES_TOOLS = [
    {"type": "function", "name": name, "description": f.__doc__, "parameters": PARAMETERS, "strict": True}
    for name, f in CALL.items()
]


@pytest.mark.parametrize("history", ["sent", "by id"])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_openai_responses(scripted, history, is_streamed):
    served, model, key = scripted
    items, sent, previous = [{"role": "user", "content": QUESTION}], [], None
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key=key, max_retries=0) as sdk:
        while True:
            sent = items if history == "by id" else sent + items
            asked = {"model": "m", "input": sent, "instructions": SYSTEM, "tools": RESPONSES_TOOLS}
            if previous and history == "by id":
                asked["previous_response_id"] = previous
            if is_streamed:
                async with sdk.responses.stream(**asked) as stream:
                    response = await stream.get_final_response()
            else:
                response = await sdk.responses.create(**asked)
            previous = response.id
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                break
            items = []
            if history == "sent":
                items = [item.to_dict() for item in response.output]
            for call in calls:
                result = CALL[call.name](**json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": str(result)})
    assert response.output_text == ANSWER
    check_one_trajectory(served, model)


@pytest.mark.parametrize("api", ["responses", "chat"])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_openai_agents(scripted, api, is_streamed):
    from agents import Agent, OpenAIProvider, RunConfig, Runner, SQLiteSession, function_tool

    served, model, key = scripted
    # As in the guide that users come from, but that each SDK's client is closed.
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key=key, max_retries=0) as sdk:
        config = RunConfig(
            model_provider=OpenAIProvider(openai_client=sdk, use_responses=api == "responses"),
            model="default",
            tracing_disabled=True,
        )
        agent = Agent(
            name="RLVR Math with Calculator", instructions=SYSTEM, tools=[function_tool(add), function_tool(multiply)]
        )
        session = SQLiteSession("math")
        if is_streamed:
            result = Runner.run_streamed(agent, input=QUESTION, session=session, run_config=config)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, input=QUESTION, session=session, run_config=config)
        session.close()
    assert result.final_output == ANSWER
    check_one_trajectory(served, model)


ANTHROPIC_TOOLS = [{"name": name, "description": f.__doc__, "input_schema": PARAMETERS} for name, f in CALL.items()]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("version", ["2023-06-01", "2026-10-21"])
async def test_anthropic(scripted, is_streamed, version):
    served, model, key = scripted
    messages = [{"role": "user", "content": QUESTION}]
    headers = {"anthropic-version": version} | ({"x-api-key": key} if version == "2023-06-01" else {})
    async with anthropic.AsyncAnthropic(
        base_url=served.url, api_key=key, max_retries=0, default_headers=headers
    ) as sdk:
        while True:
            asked = {"model": "m", "max_tokens": 500, "messages": messages, "system": SYSTEM, "tools": ANTHROPIC_TOOLS}
            if is_streamed:
                async with sdk.messages.stream(**asked) as stream:
                    message = await stream.get_final_message()
            else:
                message = await sdk.messages.create(**asked)
            messages.append({"role": "assistant", "content": message.content})
            if message.stop_reason != "tool_use":
                break
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": str(CALL[block.name](**block.input))}
                for block in message.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})
    assert message.content[0].text == ANSWER
    check_one_trajectory(served, model)


async def test_anthropic_tool_runner(scripted):
    served, model, key = scripted
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key=key, max_retries=0) as sdk:
        tools = [_anthropic_tool(add), _anthropic_tool(multiply)]
        runner = sdk.beta.messages.tool_runner(
            model="m", max_tokens=500, tools=tools, system=SYSTEM, messages=[{"role": "user", "content": QUESTION}]
        )
        message = await runner.until_done()
    assert message.content[0].text == ANSWER
    check_one_trajectory(served, model)


def _anthropic_tool(f):
    async def call(a: float, b: float) -> str:
        return str(f(a, b))

    return anthropic.beta_async_tool(call, name=f.__name__, description=f.__doc__)


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_langchain(scripted, api, is_streamed):
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    served, model, key = scripted
    async with openai.DefaultAsyncHttpxClient() as http:
        llm = ChatOpenAI(
            model="m",
            base_url=served.base_url,
            api_key=key,
            max_retries=0,
            use_responses_api=api == "responses",
            http_async_client=http,
        )
        agent = create_agent(llm, [add, multiply], system_prompt=SYSTEM)
        asked = {"messages": [{"role": "user", "content": QUESTION}]}
        if is_streamed:
            pieces = [piece async for piece, _ in agent.astream(asked, stream_mode="messages")]
            said_last = "".join(piece.text for piece in pieces[-len(ANSWER) :])
        else:
            said_last = (await agent.ainvoke(asked))["messages"][-1].text
    assert ANSWER in said_last
    check_one_trajectory(served, model)


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_pydantic_ai(scripted, api, is_streamed):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    served, model, key = scripted
    kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key=key, max_retries=0) as sdk:
        agent = Agent(kind("m", provider=OpenAIProvider(openai_client=sdk)), instructions=SYSTEM, tools=[add, multiply])
        # `run_stream` takes text beside a call for the answer; an event handler streams every turn.
        watch = _watch if is_streamed else None
        output = (await agent.run(QUESTION, event_stream_handler=watch)).output
    assert output == ANSWER
    check_one_trajectory(served, model)


async def _watch(context, events):
    async for _ in events:
        pass


async def test_smolagents_rewrites_its_history_and_the_book_says_so():
    """It sends calls and results back as text, so its turns cannot extend each other: each says why."""
    from anyio.to_thread import run_sync
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    final = '<tool_call>{"name": "final_answer", "arguments": {"answer": "17"}}</tool_call>'
    model = Model([MULTIPLY, ADD, final])

    @tool
    def times(a: float, b: float) -> float:
        """Multiply two numbers.

        Args:
            a: one
            b: other
        """
        return a * b

    async with serving(model) as served:
        key = (await served.client.start_session("t1")).api_key

        def run():
            llm = OpenAIModel(model_id="m", api_base=served.base_url, api_key=key)
            times.name = "multiply"
            plus = tool(_plus)
            plus.name = "add"
            agent = ToolCallingAgent(tools=[times, plus], model=llm, max_steps=4, verbosity_level=0)
            answer = agent.run(QUESTION)
            llm.client.close()
            return answer

        assert await run_sync(run) == "17"
        events = served.events("InteractionRecorded")
        assert len(events) == 3
        for event, prompt in zip(events, model.prompts, strict=True):
            assert event.fact.prompt_length == len(prompt)
            assert event.fact.edge is None or event.fact.cause


def _plus(a: float, b: float) -> float:
    """Add two numbers.

    Args:
        a: one
        b: other
    """
    return a + b
