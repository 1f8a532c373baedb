"""Answers are held to the form that a client insists on, whatever the model would rather say."""

import json
from pathlib import Path

import anyio
import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from proxy.engine_contract import collect, ids_of, logprobs_of
from proxy.models import tiny_model
from proxy.talk import BASH, Talk, user
from rollbook.proxy.capture import CaptureSettings
from rollbook.proxy.config import ServeConfig
from rollbook.proxy.embedded import EmbeddedEngine
from rollbook.proxy.engine import Call, Form, Generation, Sampling
from rollbook.proxy.errors import BadRequest
from rollbook.proxy.form import structural_tag
from rollbook.proxy.guide import Guides
from rollbook.proxy.server import Service, serve
from rollbook.proxy.tokenizer import Tokenizer
from rollbook.store import MemoryLog
from rollbook.store.events import InteractionRecorded, from_batch

pytestmark = pytest.mark.anyio

END = 2  # <|im_end|>
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "n"],
    "additionalProperties": False,
}
CALL = Call('<tool_call>\n{"name": "weather", "arguments": ', SCHEMA, "}\n</tool_call>")


def is_good(value: object) -> bool:
    return isinstance(value, dict) and set(value) == {"city", "n"} and value["city"] in ("Bern", "Oslo")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "forms", context=2048)


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def asked(form: Form | None, **sampling: object) -> Generation:
    settings = {"max_tokens": 400, "stop_token_ids": (END,), "seed": 3, **sampling}
    return Generation(
        request_id="g", prompt_ids=np.array([5, 6, 7], np.int32), sampling=Sampling(**settings), form=form
    )  # type: ignore[arg-type]


async def test_json_by_schema_and_each_logprob_is_that_of_the_tokens_that_were_left(folder, tokenizer):
    form = Form(schema=SCHEMA)
    async with EmbeddedEngine(folder, device="cpu", threads=1) as engine:
        for temperature in (1.0, 0.7):
            pieces = await collect(engine, asked(form, temperature=temperature))
            ids = ids_of(pieces)
            assert pieces[-1].finish_reason == "stop"
            assert ids[-1] == END
            assert is_good(json.loads(tokenizer.decode(ids[:-1])))
            model = AutoModelForCausalLM.from_pretrained(folder)
            guide = Guides(folder, model.config.vocab_size).begin(form, frozenset({END}))
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([[5, 6, 7, *ids]])).logits[0, 2:-1].float()
            for row, token, logprob in zip(logits, ids, logprobs_of(pieces), strict=True):
                allowed = torch.from_numpy(guide.allowed())
                expected = torch.log_softmax(row.masked_fill(~allowed, -torch.inf) / temperature, -1)[token]
                assert logprob == pytest.approx(float(expected), abs=2e-4)
                guide.take(token)
            assert sum(x == 0 for x in logprobs_of(pieces)) > 10, "what was forced was certain"


async def test_raw_logprobs_stay_the_models_own(folder):
    async with EmbeddedEngine(folder, device="cpu", threads=1, logprobs_mode="raw") as engine:
        assert min(logprobs_of(await collect(engine, asked(Form(schema=SCHEMA))))) < -1
        assert max(logprobs_of(await collect(engine, asked(Form(schema=SCHEMA))))) < 0


async def test_a_form_that_is_too_large_is_the_mistake_of_who_asked(folder, tokenizer):
    large = {"type": "object", "properties": {str(i): {"type": ["string", "integer"]} for i in range(1500)}}
    async with EmbeddedEngine(folder, device="cpu", threads=1) as engine:
        with pytest.raises(BadRequest, match="too large") as refused:
            await collect(engine, asked(Form(schema=large)))
        assert refused.value.param == "response_format"
        assert await collect(engine, asked(Form(schema=SCHEMA)))


@pytest.mark.parametrize("is_single", [True, False])
async def test_calls_are_written_as_the_model_writes_them(folder, tokenizer, is_single):
    form = Form(
        calls=(CALL, Call('<tool_call>\n{"name": "b", "arguments": ', {"const": {}}, "}\n</tool_call>")),
        is_single=is_single,
    )
    async with EmbeddedEngine(folder, device="cpu", threads=1) as engine:
        for seed in range(4):
            ids = ids_of(await collect(engine, asked(form, seed=seed, temperature=1.0)))
            said = tokenizer.decode(ids).removesuffix("<|im_end|>")
            blocks = said.split("</tool_call>\n")
            assert len(blocks) == 1 or not is_single
            for block in blocks:
                body = json.loads(block.removeprefix("<tool_call>\n").removesuffix("</tool_call>"))
                assert (
                    is_good(body["arguments"]) if body["name"] == "weather" else body == {"name": "b", "arguments": {}}
                )


@pytest.mark.parametrize("thought", ["open", "may"])
async def test_a_thought_comes_before_the_form(folder, tokenizer, thought):
    form = Form(schema=SCHEMA, thought=thought)
    guide = Guides(folder, 263).begin(form, frozenset({END}))
    begun = "" if thought == "open" else "<think>"
    for token in tokenizer.encode(begun + 'hm, {"x"} <\n</think>\n\n{"city": "Bern", "n": 7}').tolist():
        assert guide.allowed()[token]
        guide.take(token)
    assert guide.allowed()[END]
    guide = Guides(folder, 263).begin(form, frozenset({END}))
    assert bool(guide.allowed()[tokenizer.encode("{")[0]])
    assert not guide.allowed()[END]


async def test_min_tokens_do_not_keep_a_whole_form_open(folder, tokenizer):
    async with EmbeddedEngine(folder, device="cpu", threads=1) as engine:
        ids = ids_of(await collect(engine, asked(Form(schema={"const": "a"}), min_tokens=50)))
        assert tokenizer.decode(ids) == '"a"<|im_end|>'
        pieces = await collect(engine, asked(Form(schema={"const": "a"}), stop_token_ids=()))
        assert (tokenizer.decode(ids_of(pieces)), pieces[-1].finish_reason) == ('"a"', "stop")


async def test_forms_survive_new_weights_and_share_a_batch_with_free_answers(folder, tokenizer, tmp_path):
    other = tiny_model(tmp_path / "other", seed=1, context=2048)
    words = {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 20, "maxItems": 20}
    async with EmbeddedEngine(folder, device="cpu", threads=2) as engine:
        answers: dict[int, list[int]] = {}
        versions: dict[int, set[int]] = {}
        begun = anyio.Event()

        async def one(n: int) -> None:
            form = None if n % 2 else Form(schema=words)
            pieces = []
            async for piece in engine.generate(asked(form, seed=n, max_tokens=100 if form is None else 1200)):
                pieces.append(piece)
                if n == 0 and len(pieces) == 3:
                    begun.set()
            versions[n] = {p.version for p in pieces}
            answers[n] = ids_of(pieces)

        async with anyio.create_task_group() as tasks:
            for n in range(8):
                tasks.start_soon(one, n)
            # New weights in the middle of the first answer, however busy the machine: it is held there meanwhile.
            await begun.wait()
            await engine.pause()
            await engine.load_weights(str(other), 1)
            await engine.resume()
        assert versions[0] == {0, 1}
        for n in range(0, 8, 2):
            assert len(json.loads(tokenizer.decode(answers[n][:-1]))) == 20


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "if": {"type": "object"}},
        {"type": "nonsense"},
        {"$ref": "#/nowhere"},
        {"type": "string", "pattern": "(?=x)"},
    ],
)
async def test_what_cannot_be_enforced_is_refused(folder, schema):
    async with EmbeddedEngine(folder, device="cpu", threads=1) as engine:
        with pytest.raises(BadRequest, match="cannot be enforced"):
            await collect(engine, asked(Form(schema=schema)))


# ---------------------------------------------------------------- over HTTP


WEATHER = {"name": "weather", "parameters": SCHEMA}
DIALECTS = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [user("a")], "tools": [{"type": "function", "function": WEATHER}]},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA, "strict": True}}},
    ),
    "responses": (
        "/v1/responses",
        {"input": "a", "tools": [{"type": "function", **WEATHER}]},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "name": "weather"}},
        {"text": {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA, "strict": True}}},
    ),
    "messages": (
        "/v1/messages",
        {"messages": [user("a")], "max_tokens": 400, "tools": [{"name": "weather", "input_schema": SCHEMA}]},
        {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ),
}


def read(dialect: str, body: dict) -> tuple[str, list[tuple[str, object]]]:
    """(text, calls) of an answer."""
    if dialect == "chat":
        message = body["choices"][0]["message"]
        calls = [c["function"] for c in message.get("tool_calls", ())]
        return message["content"] or "", [(c["name"], _json(c["arguments"])) for c in calls]
    if dialect == "responses":
        text = "".join(p["text"] for i in body["output"] if i["type"] == "message" for p in i["content"])
        return text, [(i["name"], _json(i["arguments"])) for i in body["output"] if i["type"] == "function_call"]
    text = "".join(b["text"] for b in body["content"] if b["type"] == "text")
    return text, [(b["name"], b["input"]) for b in body["content"] if b["type"] == "tool_use"]


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text  # cut by length


async def test_every_dialect_gets_what_it_insists_on_from_a_model_that_knows_nothing(folder):
    log = MemoryLog()
    tokenizer = Tokenizer.load(folder)
    engine = EmbeddedEngine(folder, device="cpu", threads=1, seed=1)
    service = Service(log=log, engine=engine, tokenizer=tokenizer, config=ServeConfig(admin_key="admin"))
    async with serve(service) as url, httpx.AsyncClient(timeout=60, base_url=url) as http:
        started = await http.post("/rl/start_session", json={"task_id": "t"}, headers={"x-api-key": "admin"})
        http.headers["x-api-key"] = started.json()["api_key"]
        for dialect, (path, body, required, named, form) in DIALECTS.items():
            for wish in (required, named):
                answer = await http.post(path, json={**body, **wish})
                assert answer.status_code == 200, answer.text
                text, calls = read(dialect, answer.json())
                assert text == ""
                assert calls
                if "parallel" not in str(wish):  # this model calls till it is cut
                    calls = calls[:1]
                assert [name for name, _ in calls] == ["weather"]
                assert is_good(calls[0][1])
            answer = await http.post(path, json={k: v for k, v in (body | form).items() if k != "tools"})
            assert is_good(json.loads(read(dialect, answer.json())[0])), answer.text
        wrong = {
            "response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": {"not": {}, "if": 1}}}
        }
        answer = await http.post("/v1/chat/completions", json={"messages": [user("a")], **wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
    facts = [e.fact for b in log.read() for e in from_batch(b) if isinstance(e.fact, InteractionRecorded)]
    assert len(facts) == 9
    for fact in facts:
        assert fact.sampling["is_held"] is True
        assert ("tool_choice" in fact.sampling) != ("response_format" in fact.sampling)
        assert fact.logprobs_mode == "processed"


# ---------------------------------------------------------------- what the engine is asked for


@pytest.mark.parametrize(
    ("parser", "template", "begin", "end"),
    [
        ("hermes", None, '<tool_call>{"name": "bash", "arguments": ', "}</tool_call>"),
        ("hermes", "chatml_tools", '<tool_call>\n{"name": "bash", "arguments": ', "}\n</tool_call>"),
        ("json", None, '{"name": "bash", "arguments": ', "}"),
        ("llama", None, '{"name": "bash", "parameters": ', "}"),
        ("mistral", None, '[TOOL_CALLS][{"name": "bash", "arguments": ', "}]"),
    ],
)
async def test_a_call_is_asked_for_as_the_template_or_the_parser_has_it(parser, template, begin, end):
    text = f"{begin}{{}}{end}"
    async with Talk(
        text, template=template, settings=CaptureSettings(tool_parser=parser, reasoning_parser="none")
    ) as talk:
        reply = await talk.ask([user("a")], tools=[BASH], tool_choice="required")
        assert [(c.name, c.arguments) for c in reply.tool_calls] == [("bash", "{}")]
        assert talk.asked[0].form == Form(
            calls=(Call(begin, BASH["function"]["parameters"], end),), is_single=parser != "hermes"
        )
        talk.check_book()


async def test_json_or_a_call_where_the_client_has_tools_and_wants_json():
    async with Talk('{"a": 1}', "x") as talk:
        form = {"type": "json_object"}
        await talk.ask([user("a")], tools=[BASH], response_format=form)
        await talk.ask([user("a")], tools=[BASH], tool_choice="none", response_format=form)
        assert [(a.form.schema, len(a.form.calls)) for a in talk.asked] == [
            ({"type": "object"}, 1),
            ({"type": "object"}, 0),
        ]
        assert talk.fact(next(iter(talk.recorded))).sampling["is_held"]


async def test_a_model_whose_calls_have_no_known_form_is_not_asked_for_one():
    async with Talk(settings=CaptureSettings(tool_parser="none")) as talk:
        with pytest.raises(BadRequest, match="tool_choice"):
            await talk.ask([user("a")], tools=[BASH], tool_choice="required")


def test_servers_are_told_in_structural_tags():
    told = json.loads(structural_tag(Form(calls=(CALL,), schema=SCHEMA, thought="may", is_single=True)))
    thought, said = told["format"]["elements"]
    assert thought["type"] == "optional"
    assert said["elements"][0] == {"type": "json_schema", "json_schema": SCHEMA}
    tags = said["elements"][1]
    assert (tags["stop_after_first"], tags["tags"][0]["begin"], tags["tags"][0]["end"]) == (True, CALL.begin, CALL.end)
