"""A server that is merely OpenAI-compatible: recorded from where it gives ids, else refused at the start."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from proxy.engine_contract import collect, generation, ids_of, logprobs_of
from proxy.fake_vllm import FakeVLLM, answer, next_token, serving
from proxy.models import tiny_model
from rollbook.proxy.compatible import CompatibleEngine
from rollbook.proxy.engine import Form
from rollbook.proxy.errors import BadRequest, ContextOverflow, EngineFailed, EngineUnavailable

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("compatible") / "base")


def compatible(folder: Path, **kwargs: Any) -> FakeVLLM:
    return FakeVLLM(folder, has_generate=False, is_dev=False, has_lora=False, **kwargs)


async def test_it_is_recorded_from_and_its_answers_stop_where_they_should(folder: Path) -> None:
    async with serving(compatible(folder)) as fake, CompatibleEngine(folder, url=fake.url) as engine:
        pieces = await collect(engine, generation([4, 5], max_tokens=12))
        assert ids_of(pieces) == answer("base", [4, 5], 12)
        assert pieces[-1].finish_reason == "length"
        assert len(logprobs_of(pieces)) == 12
        stop = ids_of(pieces)[3]
        pieces = await collect(engine, generation([4, 5], max_tokens=12, stop_token_ids=(stop,)))
        assert pieces[-1].finish_reason == "stop"
        assert engine.logprobs_mode == "processed"
        with pytest.raises(ContextOverflow):
            await collect(engine, generation([4] * 256))
        with pytest.raises(EngineFailed, match="no new weights"):
            await engine.load_weights(str(folder), 1)
        with pytest.raises(BadRequest, match="form is not known"):
            await collect(engine, msgspec.structs.replace(generation([4]), form=Form(schema={})))
    async with serving(compatible(folder, mode="raw")) as fake, CompatibleEngine(folder, url=fake.url) as engine:
        assert engine.logprobs_mode == "raw"


class Lacking(FakeVLLM):
    """One that lacks something: see the test."""

    lacks = ""

    async def _event(
        self, answer: web.StreamResponse, ids: list[int], logprobs: list[float], reason: str | None
    ) -> None:
        choice: dict[str, Any] = {"index": 0, "text": "a", "finish_reason": reason}
        if self.lacks != "ids":
            choice["token_ids"] = ids
        if self.lacks != "logprobs":
            choice["logprobs"] = {"token_logprobs": logprobs}
        if self.lacks == "prompt":
            choice["prompt_token_ids"] = [1]
        await answer.write(b"data: %b\n\n" % msgspec.json.encode({"choices": [choice]}))


@pytest.mark.parametrize(
    ("lacks", "why"),
    [("ids", "no token_ids"), ("logprobs", "with 0 logprobs"), ("prompt", "is not the one that would be recorded")],
)
async def test_one_that_could_not_be_trained_on_is_refused_at_the_start(folder: Path, lacks: str, why: str) -> None:
    fake = Lacking(folder, has_generate=False, is_dev=False, has_lora=False)
    fake.lacks = lacks
    async with serving(fake):
        with pytest.raises(EngineUnavailable, match=why):
            async with CompatibleEngine(folder, url=fake.url):
                pass
    assert next_token("base", [1])[0]


async def test_one_that_names_no_context_needs_to_be_told(folder: Path) -> None:
    async with serving(compatible(folder, max_model_len=0)) as fake:
        with pytest.raises(EngineUnavailable, match="give max_context"):
            async with CompatibleEngine(folder, url=fake.url):
                pass
