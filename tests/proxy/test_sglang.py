"""The adapter to SGLang keeps the seam's promises against a fake of its native API; no real server was asked yet."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from proxy.engine_contract import EngineContract, Limits, collect, generation, ids_of, logprobs_of
from proxy.fake_sglang import FakeSGLang
from proxy.fake_vllm import answer, serving, until
from proxy.models import misfits, tiny_model
from rollbook.proxy.engine import Call, Engine, Form
from rollbook.proxy.errors import BadRequest, EngineFailed
from rollbook.proxy.form import structural_tag
from rollbook.proxy.sglang import SGLangEngine


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("sglang") / "base")


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("sglang") / "other", seed=1)


@asynccontextmanager
async def engine_on(fake: FakeSGLang) -> AsyncIterator[SGLangEngine]:
    async with serving(fake), SGLangEngine(fake.model, url=fake.url) as engine:
        yield engine


@pytest.mark.parametrize("is_incremental", [False, True], ids=["cumulative", "incremental"])
class TestSGLang(EngineContract):
    @pytest.fixture(autouse=True)
    def _server(self, folder: Path, other: Path, tmp_path: Path, is_incremental: bool) -> None:
        self.folder, self.is_incremental = folder, is_incremental
        bad = misfits(folder, tmp_path / "misfits")
        self.limits = Limits(is_sampling=False, new_weights=(str(other),), bad_weights=tuple(map(str, bad.values())))

    @asynccontextmanager
    async def make(self) -> AsyncIterator[Engine]:  # type: ignore[override]
        fake = FakeSGLang(self.folder, is_incremental=self.is_incremental, is_deterministic=True)
        async with engine_on(fake) as engine:
            yield engine


@pytest.mark.anyio
async def test_answers_go_on_after_other_weights_and_after_a_death(folder: Path, other: Path) -> None:
    fake = FakeSGLang(folder, dies_after=None)
    async with engine_on(fake) as engine:
        await engine.load_weights(str(other), 4)
        fake.dies_after = 20
        asked = asyncio.gather(*(collect(engine, generation([9, n], str(n), max_tokens=30)) for n in range(3)))
        await until(lambda: fake.dies_after is None)
        await asyncio.sleep(0.2)
        await fake.live()
        got = await asked
    assert [ids_of(pieces) for pieces in got] == [answer("other", [9, n], 30) for n in range(3)]
    assert {piece.version for pieces in got for piece in pieces} == {4}
    assert all(len(ids_of(pieces)) == len(logprobs_of(pieces)) for pieces in got)


@pytest.mark.anyio
async def test_what_its_logprobs_do_not_follow_is_refused_by_name(folder: Path) -> None:
    async with engine_on(FakeSGLang(folder)) as engine:
        assert engine.logprobs_mode == "processed"
        for name, value in (("top_p", 0.9), ("top_k", 5), ("min_p", 0.1), ("seed", 1)):
            with pytest.raises(BadRequest) as caught:
                await collect(engine, generation([4], max_tokens=3, **{name: value}))
            assert caught.value.param == name
        assert ids_of(await collect(engine, generation([4], max_tokens=3, top_p=0.9, temperature=0.0)))
    for mode in ("raw", "processed"):
        async with engine_on(FakeSGLang(folder, mode=mode)) as engine:
            assert engine.logprobs_mode == mode
            assert ids_of(await collect(engine, generation([4], max_tokens=3, top_p=0.9)))


@pytest.mark.anyio
async def test_weights_that_it_does_not_load_leave_the_old_ones_answering(folder: Path, tmp_path: Path) -> None:
    poison = tiny_model(tmp_path / "poison", seed=2)
    (poison / "poison").touch()
    async with engine_on(FakeSGLang(folder)) as engine:
        with pytest.raises(EngineFailed, match=r"Failed to update weights.*the old weights answer"):
            await engine.load_weights(str(poison), 1)
        pieces = await collect(engine, generation([4], max_tokens=10))
        assert (ids_of(pieces), pieces[0].version) == (answer("base", [4], 10), 0)


@pytest.mark.anyio
async def test_a_version_that_somebody_else_set_is_an_error(folder: Path) -> None:
    fake = FakeSGLang(folder)
    async with engine_on(fake) as engine:
        fake.reports = "12"
        with pytest.raises(EngineFailed, match=r"version 12 answered, expected 0: somebody else"):
            await collect(engine, generation([4], max_tokens=10))


@pytest.mark.anyio
async def test_a_form_is_passed_on_in_sglangs_words(folder: Path) -> None:
    fake = FakeSGLang(folder)
    calls = Form(calls=(Call("<call>", {"type": "object"}, "</call>"),))
    async with serving(fake), SGLangEngine(folder, url=fake.url) as engine:
        for form in (Form(schema={"type": "object"}), calls):
            asked = generation([4], max_tokens=5, min_tokens=3)
            await collect(engine, msgspec.structs.replace(asked, form=form))
    json_body, calls_body = [body["sampling_params"] for body in fake.bodies[-2:]]
    assert json_body["json_schema"] == '{"type": "object"}'
    assert calls_body["structural_tag"] == structural_tag(calls)
    assert json_body["min_new_tokens"] == calls_body["min_new_tokens"] == 0
