"""The contract against a real vLLM on a CPU, and what only the real one can show: `make test-vllm`.

Not collected by a plain `pytest`: it needs 3.5 GB of packages and minutes. ROLLBOOK_VLLM_PYTHON names the interpreter
that has vLLM.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path
from typing import Any

import anthropic
import anyio
import anyio.from_thread
import msgspec
import numpy as np
import openai
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from proxy.engine_contract import EngineContract, Limits, collect, generation, ids_of, logprobs_of, until_idle
from proxy.models import adapted, tiny_adapter
from rollbook.app.models import prepare_model
from rollbook.proxy.client import ProxyClient
from rollbook.proxy.config import ServeConfig
from rollbook.proxy.engine import Call, Engine, Form, Generation, Sampled
from rollbook.proxy.errors import BadRequest
from rollbook.proxy.server import Service, serve
from rollbook.proxy.tokenizer import Tokenizer
from rollbook.proxy.vllm import VLLMEngine
from rollbook.store import InteractionRecorded, MemoryLog
from rollbook.store.events import from_batch

ARGS = ("--dtype", "float32", "--max-model-len", "256", "--enforce-eager", "--max-num-seqs", "64")
ARGS += ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "4")
ENV = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "auto"}
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="session")
def folder() -> Path:
    return prepare_model("smollm2-135m")


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """The same model a step further, as a learner would leave it."""
    path = tmp_path_factory.mktemp("weights")
    generator = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    moved = {n: t * (1 + 0.05 * torch.randn(t.shape, generator=generator)).to(t.dtype) for n, t in weights.items()}
    save_file(moved, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_bytes((folder / "config.json").read_bytes())
    return path


def started(folder: Path) -> VLLMEngine:
    return VLLMEngine(folder, python=os.environ["ROLLBOOK_VLLM_PYTHON"], args=ARGS, env=ENV)


@pytest.fixture(scope="session")
def url(folder: Path) -> Iterator[str]:
    with anyio.from_thread.start_blocking_portal() as portal:
        since = time.monotonic()
        with portal.wrap_async_context_manager(started(folder)) as engine:
            print(f"\nvLLM answered after {time.monotonic() - since:.0f} s")
            yield engine._url


class TestVLLM(EngineContract):
    @pytest.fixture(autouse=True)
    def _server(self, folder: Path, other: Path, url: str, tmp_path: Path) -> None:
        self.folder, self.url = folder, url
        (tmp_path / "empty").mkdir()
        (tmp_path / "wrong").mkdir()
        save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "wrong" / "model.safetensors")
        bad = (str(tmp_path / "nowhere"), str(tmp_path / "empty"), str(tmp_path / "wrong"))
        self.limits = Limits(new_weights=(str(other),), bad_weights=bad)

    def make(self) -> AbstractAsyncContextManager[Engine]:
        return VLLMEngine(self.folder, url=self.url)


def dense_logprobs(model: Any, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0].tolist()


@pytest.fixture
async def engine(folder: Path, url: str) -> AsyncIterator[VLLMEngine]:
    async with VLLMEngine(folder, url=url) as engine:
        await engine.load_weights(str(folder), 0)  # another test left its own
        yield engine


@pytest.mark.anyio
async def test_processed_logprobs_are_those_of_a_forward_pass(engine: VLLMEngine, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert engine.logprobs_mode == "processed"
    assert await engine._is_on_cpu()
    for temperature in (1.0, 0.7):
        pieces = await collect(engine, generation(PROMPT, max_tokens=24, temperature=temperature, seed=1))
        expected = dense_logprobs(model, PROMPT, ids_of(pieces), temperature)
        print("largest difference", np.abs(np.subtract(logprobs_of(pieces), expected)).max())
        assert np.allclose(logprobs_of(pieces), expected, atol=1e-3)


def whole(asked: Generation) -> Generation:
    """The same, where nobody reads on the way."""
    return msgspec.structs.replace(asked, is_streamed=False)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("n", "stops"), [(3, ()), (150, ()), (150, (28,)), (1, ())], ids=["few", "many", "stop", "one"]
)
async def test_a_whole_reply_is_the_streamed_one_in_fewer_pieces(
    engine: VLLMEngine, folder: Path, n: int, stops: tuple[int, ...]
) -> None:
    asked = generation(PROMPT, max_tokens=n, seed=3, stop_token_ids=stops)
    streamed, at_once = await collect(engine, asked), await collect(engine, whole(asked))
    output = ids_of(streamed)
    print(len(output), "tokens in", len(streamed), "pieces, and in", len(at_once))
    assert ids_of(at_once) == output
    assert at_once[-1].finish_reason == streamed[-1].finish_reason == ("stop" if output[-1] in stops else "length")
    assert len(output) == n or stops
    assert len(at_once) <= 2 + len(output) // 64
    assert len(output) < 100 or len(at_once) < len(streamed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert np.allclose(logprobs_of(at_once), dense_logprobs(model, PROMPT, output), atol=1e-3)


@pytest.mark.anyio
async def test_a_whole_reply_can_be_left(engine: VLLMEngine) -> None:
    answer = engine.generate(whole(generation(PROMPT, max_tokens=200, seed=4)))
    async with aclosing(answer) as pieces:  # type: ignore[type-var]
        async for _ in pieces:
            break
    await until_idle(engine)


SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
JSON = r'\{\s*"n"\s*:\s*[12]\s*\}'
CALLED = rf'<tool_call>\n\{{"name": "add", "arguments": {JSON}\}}\n</tool_call>'
CALL = Call('<tool_call>\n{"name": "add", "arguments": ', SCHEMA, "}\n</tool_call>")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (Form(schema=SCHEMA), r'\{\s*"n"\s*:\s*[12]\s*\}'),
        (
            Form(calls=(CALL,), is_single=True),
            r'<tool_call>\n\{"name": "add", "arguments": \{\s*"n"\s*:\s*[12]\s*\}\}\n</tool_call>',
        ),
        (Form(schema=SCHEMA, calls=(CALL,)), r".*"),
        (Form(schema=SCHEMA, thought="open"), r'.*</think>\s*\{\s*"n"\s*:\s*[12]\s*\}'),
    ],
    ids=["json", "call", "either", "thought"],
)
async def test_an_answer_is_held_to_its_form(engine: VLLMEngine, folder: Path, form: Form, pattern: str) -> None:
    tokenizer = Tokenizer.load(folder)
    asked = generation(PROMPT, max_tokens=180, seed=5, stop_token_ids=(2,))
    pieces = await collect(engine, msgspec.structs.replace(asked, form=form))
    said, logprobs = tokenizer.decode(ids_of(pieces)), logprobs_of(pieces)
    print(repr(said[-120:]), pieces[-1].finish_reason)
    if form.thought == "none" or pieces[-1].finish_reason == "stop":  # it may think till it is cut
        assert re.fullmatch(pattern, said.removesuffix("<|im_end|>"), re.DOTALL)
        assert ids_of(pieces)[-1] == 2
    # Of the tokens that the form left: never below those of the model alone, and far above where it forced one.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    more = np.subtract(logprobs, dense_logprobs(model, PROMPT, ids_of(pieces)))
    print("more than the model alone", more.min(), more.max())
    assert more.min() > -1e-3
    assert form.thought != "none" or more.max() > 1


@pytest.mark.anyio
async def test_a_form_that_vllm_does_not_take_is_a_bad_request(engine: VLLMEngine) -> None:
    with pytest.raises(BadRequest, match="cannot hold an answer to this form: Grammar error"):
        await collect(engine, msgspec.structs.replace(generation(PROMPT), form=Form(schema={"type": "nonsense"})))


@pytest.mark.anyio
async def test_weights_change_under_running_requests_and_every_label_is_true(
    engine: VLLMEngine, folder: Path, other: Path
) -> None:
    models = {v: AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for v, p in ((0, folder), (1, other))}
    answers: list[list[Sampled]] = [[] for _ in range(4)]
    took = 0.0

    async def ask(n: int) -> None:
        nonlocal took
        asked = generation([*PROMPT, 20 + n], str(n), max_tokens=60, seed=n)
        async with aclosing(engine.generate(whole(asked) if n % 2 else asked)) as pieces:
            async for piece in pieces:
                answers[n].append(piece)
                if n == 0 and len(answers[0]) == 20:
                    since = time.monotonic()
                    await engine.load_weights(str(other), 1)
                    took = time.monotonic() - since

    async with anyio.create_task_group() as tasks:
        for n in range(4):
            tasks.start_soon(ask, n)
    print(f"the update took {took:.2f} s")
    for n, pieces in enumerate(answers):
        output, got = ids_of(pieces), np.array(logprobs_of(pieces))
        versions = np.array([piece.version for piece in pieces for _ in piece.ids])
        assert len(output) == 60
        assert set(versions) == {0, 1}
        for version, model in models.items():
            expected = np.array(dense_logprobs(model, [*PROMPT, 20 + n], output))
            assert np.allclose(got[versions == version], expected[versions == version], atol=1e-3)
            assert not np.allclose(got[versions != version], expected[versions != version], atol=1e-2)


@pytest.mark.anyio
async def test_adapters_answer_by_version_without_a_pause(engine: VLLMEngine, folder: Path, tmp_path: Path) -> None:
    adapters = [tiny_adapter(folder, tmp_path / str(n), seed=n, scale=0.02) for n in (1, 2)]
    models = {n: adapted(folder, adapter) for n, adapter in enumerate(adapters, 1)}
    models[0] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers: dict[int, list[Sampled]] = {n: [] for n in range(3)}

    async def ask(n: int) -> None:
        async with aclosing(engine.generate(generation([*PROMPT, 40 + n], str(n), max_tokens=40, seed=n))) as pieces:
            async for piece in pieces:
                answers[n].append(piece)

    async with anyio.create_task_group() as tasks:
        for n in range(3):
            if n:
                since = time.monotonic()
                await engine.load_weights(str(adapters[n - 1]), n)
                print(f"adapter {n} took {time.monotonic() - since:.2f} s")
            tasks.start_soon(ask, n)
            with anyio.fail_after(600):
                while not answers[n]:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
    for n, pieces in answers.items():
        assert {piece.version for piece in pieces} == {n}
        differences = {}
        for version, model in models.items():
            expected = dense_logprobs(model, [*PROMPT, 40 + n], ids_of(pieces))
            differences[version] = np.abs(np.subtract(logprobs_of(pieces), expected)).max()
        print("largest difference by model", differences)
        assert differences[n] < 5e-3
        assert all(differences[other] > 2e-2 for other in differences if other != n)


@pytest.mark.anyio
async def test_a_killed_server_is_started_again_and_answers_go_on(folder: Path, other: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    async with started(folder) as engine:
        await engine.load_weights(str(other), 5)

        async def kill() -> None:
            with anyio.fail_after(600):
                while (await engine.health()).running < 3:  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            await anyio.sleep(1.0)
            assert engine._process is not None
            for child in psutil.Process(engine._process.pid).children(recursive=True):
                if "EngineCore" in " ".join(child.cmdline()) or "EngineCore" in child.name():
                    os.kill(child.pid, signal.SIGKILL)
                    return
            raise AssertionError("vLLM has no EngineCore process here")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill)
            asked = [generation([*PROMPT, 30 + n], str(n), max_tokens=60, seed=n) for n in range(3)]
            asked[2] = whole(asked[2])
            answers = await asyncio.gather(*(collect(engine, one) for one in asked))
        for n, pieces in enumerate(answers):
            assert len(ids_of(pieces)) == 60
            assert {piece.version for piece in pieces} == {5}
            expected = dense_logprobs(model, [*PROMPT, 30 + n], ids_of(pieces))
            assert np.allclose(logprobs_of(pieces), expected, atol=1e-3)
        assert engine._lives == 2
        group = engine._process
        assert group is not None
        processes = psutil.Process(group.pid).children(recursive=True)
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


@pytest.mark.anyio
async def test_sdks_through_the_proxy_leave_an_exact_book(engine: VLLMEngine, folder: Path, url: str) -> None:
    log = MemoryLog(writer="w")
    service = Service(
        log=log,
        engine=VLLMEngine(folder, url=url),
        tokenizer=Tokenizer.load(folder),
        config=ServeConfig(admin_key="admin-key-of-the-tests"),
    )
    async with serve(service) as address, ProxyClient(address, service.admin_key) as client:
        told: list[Any] = [{"role": "system", "content": "Answer briefly."}]
        key = (await client.start_session("chat")).api_key
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0) as sdk:
            for n, question in enumerate(("What is a cat?", "And a dog?", "Which is louder?")):
                told.append({"role": "user", "content": question})
                asked = {"model": "m", "messages": told, "max_tokens": 24}
                if n % 2:
                    chunks = [chunk async for chunk in await sdk.chat.completions.create(**asked, stream=True)]
                    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                else:
                    text = (await sdk.chat.completions.create(**asked)).choices[0].message.content or ""
                told.append({"role": "assistant", "content": text})
        said: list[Any] = []
        key = (await client.start_session("messages")).api_key
        async with anthropic.AsyncAnthropic(base_url=address, api_key=key, max_retries=0) as other_sdk:
            for question in ("What is a cat?", "And a dog?"):
                said.append({"role": "user", "content": question})
                reply = await other_sdk.messages.create(
                    model="m", messages=said, max_tokens=24, extra_body={"temperature": 0.7}
                )
                said.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    paths: dict[str, list[int]] = {}
    edges: list[str | None] = []
    for event in (event for batch in log.read() for event in from_batch(batch)):
        fact = event.fact
        if not isinstance(fact, InteractionRecorded):
            continue
        before = paths[fact.parent_id][: fact.shared] if fact.parent_id else []
        assert fact.edge is None or fact.shared == len(paths[fact.parent_id or ""])
        prompt, output = [*before, *event.prompt_ids.tolist()], event.output_ids.tolist()
        expected = dense_logprobs(model, prompt, output, fact.sampling["temperature"])
        assert np.allclose(event.logprobs, expected, atol=2e-3)
        assert fact.logprobs_mode == "processed"
        paths[event.interaction_id or ""] = prompt + output
        edges.append(fact.edge)
    assert edges == [None, "extends", "extends", None, "extends"]


_PARSERS = """
import json, sys
sys.path += json.loads(sys.argv[1])
from rollbook.proxy.render import Renderer
from rollbook.proxy.tokenizer import Tokenizer
from rollbook.proxy.parsing import read_text
tokenizer = Tokenizer.load("bytes")
tools = [{"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in ("add", "get")]
found = {}
for name, said in json.loads(sys.argv[2]).items():
    renderer = Renderer(tokenizer, tool_parser="vllm:" + name, reasoning_parser="vllm:deepseek_r1")
    text, thought, calls = read_text(said, renderer.parsers(tokenizer.encode("x"), tools))
    found[name] = [text, thought, [[c.name, json.loads(c.arguments)] for c in calls]]
print("FOUND" + json.dumps(found))
"""


def test_vllms_own_parsers_read_replies() -> None:
    said = {
        "hermes": 'hm</think>I add.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        "pythonic": "hm</think>[add(a=1), get(city='Oslo')]",
    }
    path = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
    command = [os.environ["ROLLBOOK_VLLM_PYTHON"], "-c", _PARSERS, json.dumps(path), json.dumps(said)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | ENV
    answer = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert "FOUND" in answer.stdout, answer.stderr[-2000:]
    found = json.loads(answer.stdout.split("FOUND")[1])
    print(found)
    assert found["hermes"] == ["I add.", "hm", [["add", {"a": 1}]]]
    assert found["pythonic"][2] == [["add", {"a": 1}], ["get", {"city": "Oslo"}]]
    refused = [*command[:-1], json.dumps({"llama3_json": ""})]
    answer = subprocess.run(refused, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert "cannot read this model: Llama3JsonToolParser could not locate the bot token" in answer.stderr
