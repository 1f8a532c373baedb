"""The adapter to vLLM keeps the seam's promises, against a faithful fake; `test_vllm_real.py` asks the real one."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import aiohttp
import anyio
import msgspec
import pytest
import torch
from safetensors.torch import load_file

from proxy.engine_contract import EngineContract, Limits, collect, generation, ids_of, logprobs_of
from proxy.fake_vllm import FakeVLLM, answer, next_token, serving, until
from proxy.models import misfits, tiny_adapter, tiny_model
from rollbook.proxy.checkpoint import check_fits, is_tied, write_untied
from rollbook.proxy.engine import Call, Engine, Form, Sampled
from rollbook.proxy.errors import BadRequest, EngineFailed, EngineUnavailable
from rollbook.proxy.form import structural_tag
from rollbook.proxy.vllm import VLLMEngine


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("vllm") / "base")


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("vllm") / "other", seed=1)


@pytest.mark.parametrize("has_generate", [True, False], ids=["generate", "completions"])
class TestVLLM(EngineContract):
    @pytest.fixture(autouse=True)
    def _server(self, folder: Path, other: Path, tmp_path: Path, has_generate: bool) -> None:
        self.folder = folder
        self.has_generate = has_generate
        bad = misfits(folder, tmp_path / "misfits")
        self.limits = Limits(is_sampling=False, new_weights=(str(other),), bad_weights=tuple(map(str, bad.values())))

    @asynccontextmanager
    async def make(self) -> AsyncIterator[Engine]:  # type: ignore[override]
        fake = FakeVLLM(self.folder, has_generate=self.has_generate)
        async with serving(fake), VLLMEngine(self.folder, url=fake.url) as engine:
            yield engine


@asynccontextmanager
async def engine_on(fake: FakeVLLM, **kwargs: float) -> AsyncIterator[VLLMEngine]:
    async with serving(fake), VLLMEngine(fake.model, url=fake.url, **kwargs) as engine:  # type: ignore[arg-type]
        yield engine


@pytest.mark.anyio
async def test_weights_change_in_the_order_that_loses_nothing(folder: Path, other: Path) -> None:
    fake = FakeVLLM(folder, token_s=0.01)  # so that none is over before the pause
    async with engine_on(fake) as engine:
        answers: list[list[Sampled]] = [[] for _ in range(4)]

        async def ask(n: int) -> None:
            async with aclosing(engine.generate(generation([5, 6, n], str(n), max_tokens=100))) as pieces:
                async for piece in pieces:
                    answers[n].append(piece)

        async with anyio.create_task_group() as tasks:
            for n in range(4):
                tasks.start_soon(ask, n)
            await until(lambda: all(len(pieces) >= 5 for pieces in answers))
            fake.calls.clear()
            await engine.load_weights(str(other), 7)
            steps = [call for n, call in enumerate(fake.calls) if call != "abort" or fake.calls[n - 1] != "abort"]
            assert steps == ["pause", "abort", "reload other", "reset", "version 7", "resume"]
    for n, pieces in enumerate(answers):
        old = sum(len(piece.ids) for piece in pieces if piece.version == 0)
        assert {piece.version for piece in pieces} == {0, 7}
        expected = answer("base", [5, 6, n], old)
        expected += answer("other", [5, 6, n, *expected], 100 - old)
        assert ids_of(pieces) == expected
    assert all(body["cache_salt"] == "v7" for body in fake.bodies[-4:])


@pytest.mark.anyio
async def test_a_token_without_a_logprob_is_no_answer_and_no_canary(folder: Path, other: Path) -> None:
    fake = FakeVLLM(folder)
    async with engine_on(fake) as engine:
        fake.logprob = -9999.0
        with pytest.raises(EngineFailed, match="logprob -9999"):
            await collect(engine, generation([5, 6, 7], max_tokens=5))
        with pytest.raises(EngineFailed, match="logprob"):
            await engine.load_weights(str(other), 1)
        assert (await engine.health()).version == 0
        fake.logprob = None
        assert len(ids_of(await collect(engine, generation([5, 6, 7], max_tokens=5)))) == 5


@pytest.mark.anyio
async def test_an_answer_goes_on_where_a_dead_server_left_it(folder: Path, other: Path) -> None:
    fake = FakeVLLM(folder, dies_after=None)
    async with engine_on(fake) as engine:
        await engine.load_weights(str(other), 3)
        fake.dies_after = 30

        async def bring_back() -> None:
            await until(lambda: fake.dies_after is None)
            while (await engine.health()).is_ready:  # noqa: ASYNC110 - there is no event for it
                await anyio.sleep(0.01)
            await fake.live()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bring_back)
            got = await asyncio.gather(*(collect(engine, generation([9, n], str(n), max_tokens=40)) for n in range(3)))
        assert (await engine.health()).is_ready
        # The server came back with the weights it starts with, and was given those it had.
        assert [ids_of(pieces) for pieces in got] == [answer("other", [9, n], 40) for n in range(3)]
        assert {piece.version for pieces in got for piece in pieces} == {3}
        assert all(len(ids_of(pieces)) == len(logprobs_of(pieces)) for pieces in got)


@pytest.mark.anyio
async def test_a_server_that_does_not_come_back_is_said_to_be_gone(folder: Path) -> None:
    fake = FakeVLLM(folder)
    async with engine_on(fake, start_s=3) as engine:
        fake.dies_after = 5
        asked = [collect(engine, generation([9, n], str(n), max_tokens=40)) for n in range(5)]
        with anyio.fail_after(600):
            got = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(one, EngineUnavailable) and one.retry_after_s for one in got)
        health = await engine.health()
        assert (health.is_ready, "no vLLM at" in (health.reason or "")) == (False, True)


@pytest.mark.anyio
async def test_weights_that_kill_the_server_leave_the_old_ones_answering(folder: Path, tmp_path: Path) -> None:
    poison = tiny_model(tmp_path / "poison", seed=2)
    (poison / "poison").touch()
    fake = FakeVLLM(folder)
    async with engine_on(fake) as engine:

        async def bring_back() -> None:
            await until(lambda: "reload poison" in fake.calls)
            await anyio.sleep(0.3)
            await fake.live()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bring_back)
            with pytest.raises(EngineFailed, match=r"poison .*the old weights answer"):
                await engine.load_weights(str(poison), 1)
        pieces = await collect(engine, generation([4], max_tokens=10))
        assert (ids_of(pieces), pieces[0].version) == (answer("base", [4], 10), 0)


@pytest.mark.anyio
async def test_a_request_that_breaks_the_server_each_time_is_refused(folder: Path) -> None:
    fake = FakeVLLM(folder)
    async with engine_on(fake) as engine:
        fake.breaks_with = "CUDA error: an illegal memory access"
        with pytest.raises(EngineFailed, match="broke off: CUDA error"):
            await collect(engine, generation([4], max_tokens=10))


@pytest.mark.anyio
async def test_a_version_that_somebody_else_set_is_an_error(folder: Path) -> None:
    fake = FakeVLLM(folder)
    async with engine_on(fake) as engine:
        fake.reports = "12"
        with pytest.raises(EngineFailed, match=r"version 12 answered, expected 0: somebody else"):
            await collect(engine, generation([4], max_tokens=10))


@pytest.mark.anyio
async def test_what_the_logprobs_are_of_is_found_out(folder: Path) -> None:
    async with engine_on(FakeVLLM(folder)) as engine:
        assert engine.logprobs_mode == "processed"
    async with engine_on(FakeVLLM(folder, mode="raw")) as engine:
        assert engine.logprobs_mode == "raw"


@pytest.mark.anyio
async def test_a_server_without_dev_routes_answers_but_takes_no_weights(folder: Path, other: Path) -> None:
    async with engine_on(FakeVLLM(folder, is_dev=False)) as engine:
        assert ids_of(await collect(engine, generation([4], max_tokens=5))) == answer("base", [4], 5)
        with pytest.raises(EngineFailed, match="VLLM_SERVER_DEV_MODE=1"):
            await engine.load_weights(str(other), 1)


@pytest.mark.anyio
async def test_a_tied_server_on_a_cpu_takes_no_weights_and_an_untied_one_gets_a_head(
    folder: Path, other: Path, tmp_path: Path
) -> None:
    """vLLM 0.32 on a CPU answers through the old head after a reload of a tied model."""
    async with engine_on(FakeVLLM(folder, is_on_cpu=True)) as engine:
        with pytest.raises(EngineFailed, match="would keep the old head"):
            await engine.load_weights(str(other), 1)
    write_untied(folder, folder, tmp_path / "untied")
    fake = FakeVLLM(folder, is_on_cpu=True, root=tmp_path / "untied")
    async with engine_on(fake) as engine:
        await engine.load_weights(str(other), 1)
    assert fake.reloaded[0].keys() - load_file(folder / "model.safetensors").keys() == {"lm_head.weight"}


def test_an_untied_folder_has_its_embeddings_as_head(folder: Path, other: Path, tmp_path: Path) -> None:
    write_untied(folder, other, tmp_path / "untied")
    assert is_tied(other)
    assert not is_tied(tmp_path / "untied")
    check_fits(folder, tmp_path / "untied")
    expected = load_file(other / "model.safetensors")
    head = load_file(tmp_path / "untied" / "lm_head.safetensors")
    assert head.keys() == {"lm_head.weight"}
    assert torch.equal(head["lm_head.weight"], expected["model.embed_tokens.weight"])
    assert (tmp_path / "untied" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


@pytest.mark.anyio
async def test_what_vllm_refuses_is_a_bad_request(folder: Path) -> None:
    async with engine_on(FakeVLLM(folder)) as engine:
        with pytest.raises(BadRequest, match=r"temperature must be in \[0, 2\]"):
            await collect(engine, generation([4], max_tokens=5, temperature=3.0))


@pytest.mark.anyio
async def test_rollbook_serve_answers_through_a_given_server(folder: Path, other: Path, tmp_path: Path) -> None:
    fake = FakeVLLM(folder)
    async with serving(fake):
        command = [sys.executable, "-m", "rollbook.app.cli", "serve", str(tmp_path / "book"), "--port", "0"]
        command += ["--engine", "vllm", "--engine-url", fake.url, "--model", str(folder)]
        command += ["--weights", str(other), "--weights-version", "3", "--address-file", str(tmp_path / "address")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "ROLLBOOK_ADMIN_KEY": "k" * 32}
        process = await anyio.open_process(command, env=env, stdout=None, stderr=None)
        try:
            await until((tmp_path / "address").exists)
            url = json.loads((tmp_path / "address").read_text())["url"]
            async with aiohttp.ClientSession(headers={"Authorization": "Bearer " + "k" * 32}) as http:
                async with http.get(f"{url}/rl/weights") as reply:
                    assert (await reply.json())["version"] == 3
                assert fake.calls[0] == "reload other"
        finally:
            process.terminate()
            await process.wait()


@pytest.mark.anyio
async def test_a_server_that_does_not_start_says_why(folder: Path, tmp_path: Path) -> None:
    engine = VLLMEngine(folder, python=sys.executable, args=("--no-such-flag",), output=tmp_path / "out", start_s=30)
    with pytest.raises(EngineUnavailable, match=r"ended while it started .*out\)"):
        async with engine:
            pass


def test_a_tethered_command_ends_when_its_holder_is_killed(tmp_path: Path) -> None:
    sleeper = f"import os,time; open({str(tmp_path / 'pid')!r},'w').write(str(os.getpid())); time.sleep(3600)"
    command = [sys.executable, "-m", "rollbook.proxy.tether", sys.executable, "-c", sleeper]
    holder = f"import subprocess,time; subprocess.Popen({command!r}, stdin=subprocess.PIPE); time.sleep(3600)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", holder], env=env)
    deadline = time.monotonic() + 600
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    pid = int((tmp_path / "pid").read_text())
    while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


FORM = Form(schema={"type": "object"})
CALLS = Form(calls=(Call("<call>", {"type": "object"}, "</call>"),), is_single=True)


@pytest.mark.anyio
@pytest.mark.parametrize("has_generate", [True, False], ids=["generate", "completions"])
async def test_a_form_is_passed_on_in_vllms_words(folder: Path, has_generate: bool) -> None:
    fake = FakeVLLM(folder, has_generate=has_generate)
    async with engine_on(fake) as engine:
        for form in (FORM, CALLS):
            asked = generation([4], max_tokens=5, min_tokens=3)
            await collect(engine, msgspec.structs.replace(asked, form=form))
        bodies = [body.get("sampling_params", body) for body in fake.bodies[-2:]]
        assert [body["structured_outputs"] for body in bodies] == [
            {"json": FORM.schema},
            {"structural_tag": structural_tag(CALLS)},
        ]
        assert all(body["min_tokens"] == 0 for body in bodies)


@pytest.mark.anyio
async def test_a_server_that_would_ignore_a_form_is_found_out(folder: Path) -> None:
    async with engine_on(FakeVLLM(folder, has_forms=False)) as engine:
        with pytest.raises(BadRequest, match="does not know structured_outputs"):
            await collect(engine, msgspec.structs.replace(generation([4], max_tokens=5), form=FORM))


@pytest.mark.anyio
async def test_new_weights_wait_for_a_form_and_one_that_is_interrupted_is_to_be_asked_again(
    folder: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeVLLM(folder)
    async with engine_on(fake) as engine:
        outcomes: list[object] = []

        async def ask(n: int) -> None:
            asked = msgspec.structs.replace(generation([5, n], str(n), max_tokens=60), form=FORM)
            try:
                outcomes.append({piece.version for piece in await collect(engine, asked)})
            except EngineUnavailable as error:
                outcomes.append(error.retry_after_s)

        for grace_s, fake.token_s, expected in ((200.0, 0.01, {0}), (0.01, 0.5, 1)):
            monkeypatch.setattr("rollbook.proxy.served.FORMS_S", grace_s)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, 1)
                await until(lambda: (fake.prompts or [None])[-1] == [5, 1])
                await anyio.sleep(0.05)
                await engine.load_weights(str(other), 1)
                await engine.load_weights(str(folder), 0)
            assert outcomes.pop() == expected
            fake.prompts.clear()


@pytest.mark.anyio
@pytest.mark.parametrize("has_generate", [True, False], ids=["generate", "completions"])
async def test_an_adapter_is_taken_without_a_pause_and_each_answer_keeps_its_version(
    folder: Path, tmp_path: Path, has_generate: bool
) -> None:
    one, two = (tiny_adapter(folder, tmp_path / name, seed=n) for n, name in enumerate(("one", "two")))
    fake = FakeVLLM(folder, has_generate=has_generate)
    async with engine_on(fake) as engine:
        answers: dict[int, list[Sampled]] = {}

        async def ask(n: int) -> None:
            answers[n] = await collect(engine, generation([5, n], str(n), max_tokens=60))

        async with anyio.create_task_group() as tasks:
            for version, adapter in ((0, None), (1, one), (2, two)):
                if adapter is not None:
                    await engine.load_weights(str(adapter), version)
                tasks.start_soon(ask, version)
                await until(lambda v=version: [5, v] in fake.prompts)
        assert not {"pause", "abort", "resume"} & set(fake.calls)
        for version, name in ((0, "base"), (1, "baseone"), (2, "basetwo")):
            assert {piece.version for piece in answers[version]} == {version}
            assert ids_of(answers[version]) == answer(name, [5, version], 60)
        await engine.load_weights(str(one), 3)
        assert fake.adapters == {"v3": "one"}, "those that nobody uses are gone"
        # After a death the newest is there again.
        fake.dies_after = 10

        async def bring_back() -> None:
            await until(lambda: fake.dies_after is None)
            await anyio.sleep(0.3)
            await fake.live()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bring_back)
            pieces = await collect(engine, generation([7], max_tokens=30))
        assert (ids_of(pieces), {piece.version for piece in pieces}) == (answer("baseone", [7], 30), {3})


@pytest.mark.anyio
async def test_an_adapter_that_does_not_load_leaves_the_old_weights_answering(folder: Path, tmp_path: Path) -> None:
    bad = tiny_adapter(folder, tmp_path / "bad")
    (bad / "poison").touch()
    fake = FakeVLLM(folder)
    async with engine_on(fake) as engine:
        with pytest.raises(EngineFailed, match=r"max_lora_rank 16.*--enable-lora"):
            await engine.load_weights(str(bad), 1)
        pieces = await collect(engine, generation([4], max_tokens=10))
        assert (ids_of(pieces), pieces[0].version) == (answer("base", [4], 10), 0)
        (bad / "adapter_config.json").write_text('{"peft_type": "IA3", "lora_alpha": 1, "r": 1}')
        with pytest.raises(EngineFailed, match="not plain LoRA"):
            await engine.load_weights(str(bad), 1)


@pytest.mark.anyio
async def test_weights_that_answer_otherwise_than_the_learner_says_are_not_taken(folder: Path, tmp_path: Path) -> None:
    """The canary: a server may load, or seem to, and answer with something else."""
    new = tiny_model(tmp_path / "new", seed=3)
    prompts = [[5, 6, n] for n in range(4)]
    truth = [{"prompt_ids": prompt, "logprob": next_token("new", prompt)[1]} for prompt in prompts]
    fake = FakeVLLM(folder)
    async with engine_on(fake) as engine:
        for off, version in ((0.1, 1), (0.6, 2)):
            said = [{**one, "logprob": one["logprob"] - off} for one in truth]
            (new / "canary.json").write_text(json.dumps(said))
            if off < 0.2:
                await engine.load_weights(str(new), version)
                continue
            with pytest.raises(EngineFailed, match=r"are 0.60 off those of the learner.*the old weights answer"):
                await engine.load_weights(str(new), version)
        assert (await engine.health()).version == 1
        (new / "canary.json").write_text("[{}]")
        with pytest.raises(EngineFailed, match="could not read"):
            await engine.load_weights(str(new), 3)
        assert (await engine.health()).is_ready
