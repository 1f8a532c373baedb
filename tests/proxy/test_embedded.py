"""The embedded engine keeps every promise of the seam, and its numbers are those of a plain forward pass."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from proxy.engine_contract import EngineContract, Limits, collect, generation, ids_of, logprobs_of, until_idle
from proxy.models import adapted, misfits, tiny_adapter, tiny_family, tiny_model
from rollbook.proxy.embedded import EmbeddedEngine
from rollbook.proxy.engine import Engine, Sampled
from rollbook.proxy.errors import BadRequest, EngineFailed, EngineUnavailable

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture(scope="session")
def misfitting(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> dict[str, Path]:
    return misfits(folder, tmp_path_factory.mktemp("misfits"))


class TestEmbedded(EngineContract):
    @pytest.fixture(autouse=True)
    def _models(self, folder: Path, other: Path, misfitting: dict[str, Path]) -> None:
        self.folder = folder
        self.limits = Limits(new_weights=(str(other),), bad_weights=tuple(map(str, misfitting.values())))

    def make(self) -> AbstractAsyncContextManager[Engine]:
        return EmbeddedEngine(self.folder, device="cpu", threads=1)


@pytest.fixture
def dense(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def dense_logits(model: Any, ids: list[int], n_output: int) -> torch.Tensor:
    """[n_output, V]: what the model says before each of the last n_output ids."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0, -n_output - 1 : -1].float()
    return logits


def dense_logprobs(model: Any, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
    logprobs = (dense_logits(model, prompt + output, len(output)) / temperature).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(output)[:, None])[:, 0].tolist()


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[EmbeddedEngine]:
    async with EmbeddedEngine(folder, device="cpu", threads=2) as engine:
        yield engine


def keep_pace(engine: EmbeddedEngine, seen: list[Sampled]) -> None:
    """At most a few tokens ahead of who reads the first answer: what he does comes in its middle, however late."""
    worker = engine._worker

    def wait(*_: object) -> None:
        first = worker._alive.get(0)
        while first is not None and len(first.output) > len(seen) + 8 and worker.commands.empty():
            time.sleep(0.001)

    worker._model._model.register_forward_pre_hook(wait)


async def collect_all(engine: Engine, asked: list[Any]) -> list[list[Sampled]]:
    return await asyncio.gather(*(collect(engine, one) for one in asked))


# ---- numbers


@pytest.mark.anyio
async def test_logprobs_are_those_of_a_dense_forward_pass(engine: EmbeddedEngine, dense: Any) -> None:
    prompts = [PROMPT[: n + 2] * (n + 1) for n in range(8)] + [PROMPT] * 4
    asked = [generation(p, str(n), max_tokens=40, seed=n, temperature=0.5 + n / 8) for n, p in enumerate(prompts)]
    for n, pieces in enumerate(await collect_all(engine, asked)):
        expected = dense_logprobs(dense, prompts[n], ids_of(pieces), 0.5 + n / 8)
        assert np.allclose(logprobs_of(pieces), expected, atol=1e-4)


@pytest.mark.anyio
async def test_bfloat16_stays_within_its_own_rounding(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    async with EmbeddedEngine(folder, device="cpu", dtype="bfloat16") as engine:
        answers = await collect_all(engine, [generation(PROMPT, str(n), max_tokens=40, seed=n) for n in range(12)])
    gaps = [np.subtract(logprobs_of(a), dense_logprobs(model, PROMPT, ids_of(a))) for a in answers]
    assert np.abs(gaps).mean() < 0.05
    assert abs(np.mean(gaps)) < 0.01


@pytest.mark.anyio
@pytest.mark.parametrize(
    "sampling",
    [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.8, "temperature": 0.7}],
    ids=lambda sampling: "+".join(sampling),
)
async def test_logprobs_are_of_what_top_k_top_p_and_min_p_left(
    engine: EmbeddedEngine, dense: Any, sampling: dict[str, float]
) -> None:
    pieces = await collect(engine, generation(PROMPT, max_tokens=60, seed=3, **sampling))
    output = ids_of(pieces)
    logits = dense_logits(dense, PROMPT + output, len(output)) / sampling.get("temperature", 1.0)
    for row, token, logprob in zip(logits, output, logprobs_of(pieces), strict=True):
        p = row.softmax(-1).sort(descending=True)
        kept = p.values >= sampling.get("min_p", 0) * p.values[0]
        kept &= torch.arange(len(row)) < sampling.get("top_k", len(row))
        among = torch.where(kept, p.values, 0.0)
        among /= among.sum()
        kept &= among.cumsum(0) - among < sampling.get("top_p", 1.0)
        place = p.indices.tolist().index(token)
        assert kept[place]
        assert logprob == pytest.approx(float(p.values[place].log() - p.values[kept].sum().log()), abs=1e-4)


@pytest.mark.anyio
async def test_raw_logprobs_are_of_the_model_whatever_was_drawn(folder: Path, dense: Any) -> None:
    async with EmbeddedEngine(folder, device="cpu", logprobs_mode="raw") as engine:
        assert engine.logprobs_mode == "raw"
        pieces = await collect(engine, generation(PROMPT, max_tokens=30, seed=1, temperature=0.4, top_k=5))
    assert np.allclose(logprobs_of(pieces), dense_logprobs(dense, PROMPT, ids_of(pieces)), atol=1e-4)


@pytest.mark.anyio
async def test_draws_follow_the_distribution(engine: EmbeddedEngine, dense: Any) -> None:
    asked = [generation(PROMPT, str(n), max_tokens=1, seed=n, top_k=4) for n in range(600)]
    tokens = [ids_of(pieces)[0] for pieces in await collect_all(engine, asked)]
    top = dense_logits(dense, [*PROMPT, 0], 1)[0].topk(4)
    counts = np.array([tokens.count(token) for token in top.indices.tolist()])
    expected = 600 * top.values.softmax(-1).numpy()
    assert counts.sum() == 600
    assert (np.square(counts - expected) / expected).sum() < 16.3  # chi square, 3 degrees, p = .001; seeds are fixed


@pytest.mark.anyio
async def test_penalties_and_min_tokens_change_the_draw_as_they_say(engine: EmbeddedEngine, dense: Any) -> None:
    free = ids_of(await collect(engine, generation(PROMPT, temperature=0.0, max_tokens=30)))
    assert len(set(free)) < 30
    once = ids_of(await collect(engine, generation(PROMPT, temperature=0.0, max_tokens=30, presence_penalty=1e4)))
    assert len(set(once)) == 30
    assert (
        ids_of(await collect(engine, generation(PROMPT, temperature=0.0, max_tokens=30, frequency_penalty=1e4))) == once
    )
    pieces = await collect(engine, generation(PROMPT, temperature=0.0, max_tokens=3, repetition_penalty=1e9))
    assert not set(ids_of(pieces)) & set(PROMPT)
    stop = free[0]
    pieces = await collect(
        engine, generation(PROMPT, temperature=0.0, max_tokens=30, stop_token_ids=(stop,), min_tokens=4)
    )
    assert stop not in ids_of(pieces)[:4]


@pytest.mark.anyio
async def test_seeds_repeat_whoever_else_is_there(engine: EmbeddedEngine) -> None:
    alone = await collect(engine, generation(PROMPT, seed=5, max_tokens=30))
    crowd = [generation(PROMPT[: n % 9 + 1], str(n), seed=n, max_tokens=10 + n) for n in range(20)]
    together = await collect_all(engine, [*crowd, generation(PROMPT, "x", seed=5, max_tokens=30)])
    assert ids_of(together[-1]) == ids_of(alone)
    assert np.allclose(logprobs_of(together[-1]), logprobs_of(alone), atol=1e-4)


@pytest.mark.anyio
async def test_requests_without_seeds_are_samples_of_their_own(folder: Path) -> None:
    async def sample(seed: int | None) -> list[list[int]]:
        async with EmbeddedEngine(folder, device="cpu", seed=seed) as engine:
            asked = [generation(PROMPT, str(n), max_tokens=20) for n in range(8)]
            return [ids_of(pieces) for pieces in await collect_all(engine, asked)]

    first = await sample(1)
    assert len({tuple(ids) for ids in first}) == 8
    assert await sample(1) == first
    assert await sample(None) != first


# ---- what is computed once


@pytest.mark.anyio
@pytest.mark.parametrize("prefix_cache", [True, False])
async def test_a_conversation_is_the_same_with_and_without_the_prefix_cache(
    folder: Path, dense: Any, prefix_cache: bool
) -> None:
    async with EmbeddedEngine(folder, device="cpu", prefix_cache=prefix_cache, step_tokens=16) as engine:
        prompt = list(PROMPT)
        for turn in range(5):
            several = [generation(prompt, f"{turn}.{n}", seed=n, max_tokens=12) for n in range(3)]
            answers = await collect_all(engine, several)
            for pieces in answers:
                assert np.allclose(logprobs_of(pieces), dense_logprobs(dense, prompt, ids_of(pieces)), atol=1e-4)
            prompt += [*ids_of(answers[turn % 3]), 1, 30 + turn, 2]


@pytest.mark.anyio
async def test_known_text_is_not_computed_again(folder: Path) -> None:
    read: list[int] = []
    async with EmbeddedEngine(folder, device="cpu", threads=1) as engine:
        model = engine._worker._model._model
        model.register_forward_pre_hook(lambda *args: read.append(args[2]["input_ids"].numel()), with_kwargs=True)
        prompt = PROMPT * 6
        await engine.pause()  # so that all of them meet in one step
        asked = [generation(prompt, str(n), seed=n, max_tokens=4) for n in range(8)]
        together = asyncio.ensure_future(collect_all(engine, asked))
        while engine._worker.commands.empty() and not engine._worker.waiting:
            await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        await engine.resume()
        answers = await together
        assert sum(read) == 60 + 8 * 3  # the prompt once; the first token of each comes from it
        read.clear()
        child = [*prompt, *ids_of(answers[0]), 7, 8]
        await collect(engine, generation(child, "child", max_tokens=1))
        assert sum(read) == 3  # the last token of the answer was never put in, and two are new


@pytest.mark.anyio
async def test_little_memory_makes_requests_wait_or_give_way_but_changes_nothing(folder: Path, dense: Any) -> None:
    token_bytes = 2 * 2 * 2 * 16 * 4
    asked = [generation(PROMPT[: n % 7 + 1], str(n), seed=n, max_tokens=150) for n in range(12)]
    async with EmbeddedEngine(folder, device="cpu", cache_bytes=800 * token_bytes) as engine:
        answers = await collect_all(engine, asked)
        worker = engine._worker
        assert worker._used_tokens() + worker._tree.n_tokens <= 800
    for one, pieces in zip(asked, answers, strict=True):
        assert len(ids_of(pieces)) == 150
        expected = dense_logprobs(dense, one.prompt_ids.tolist(), ids_of(pieces))
        assert np.allclose(logprobs_of(pieces), expected, atol=1e-4)


@pytest.mark.anyio
async def test_more_requests_than_may_run_wait_their_turn(folder: Path) -> None:
    async with EmbeddedEngine(folder, device="cpu", max_running=2) as engine:
        await engine.pause()
        async with anyio.create_task_group() as tasks:
            for n in range(5):
                tasks.start_soon(collect, engine, generation([5, n], str(n), max_tokens=50))
            with anyio.fail_after(600):
                while (await engine.health()).waiting < 5:  # noqa: ASYNC110 - an engine has no event for this
                    await anyio.sleep(0.01)
            await engine.resume()
        assert (await engine.health()).waiting == 0


# ---- weights, failures


@pytest.mark.anyio
async def test_each_token_carries_the_version_that_sampled_it(folder: Path, other: Path, dense: Any) -> None:
    """And its logprob is of that version, after all that came before, whoever sampled that."""
    async with EmbeddedEngine(folder, device="cpu", threads=1) as engine:
        models = {0: dense, 1: AutoModelForCausalLM.from_pretrained(other), 2: dense}
        answers: list[list[Sampled]] = [[] for _ in range(6)]
        keep_pace(engine, answers[0])

        async def ask(n: int) -> None:
            asked = generation(PROMPT if n < 4 else PROMPT[:n], str(n), max_tokens=200, seed=n)
            async with aclosing(engine.generate(asked)) as pieces:
                async for piece in pieces:
                    answers[n].append(piece)
                    if n == 0 and len(answers[0]) == 20:
                        await engine.load_weights(str(other), 1)
                    if n == 0 and len(answers[0]) == 100:
                        await engine.load_weights(str(folder), 2)

        async with anyio.create_task_group() as tasks:
            for n in range(6):
                tasks.start_soon(ask, n)
    for n, pieces in enumerate(answers):
        prompt, output = PROMPT if n < 4 else PROMPT[:n], ids_of(pieces)
        versions = np.array([piece.version for piece in pieces])
        assert set(versions) == {0, 1, 2}
        assert (np.diff(versions) >= 0).all()
        for version, model in models.items():
            got, expected = np.array(logprobs_of(pieces)), np.array(dense_logprobs(model, prompt, output))
            assert np.allclose(got[versions == version], expected[versions == version], atol=1e-4)


@pytest.mark.anyio
async def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    engine: EmbeddedEngine, misfitting: dict[str, Path]
) -> None:
    said = {
        "cut": "could not read",
        "empty": r"no weights to load: .*safetensors",
        "integers": r"up_proj.weight is \(160, 64\) of torch.int32, the model has \(160, 64\) of floats",
        "missing": r"1 of its 20 tensors are missing, first model.layers.1.mlp.up_proj",
        "shape": r"up_proj.weight is \(159, 64\)",
        "unknown": r"model.extra is \(3,\) of torch.float32, the model has no such tensor",
    }
    assert said.keys() == misfitting.keys()
    for kind, path in misfitting.items():
        with pytest.raises(EngineFailed, match=said[kind]):
            await engine.load_weights(str(path), 1)


@pytest.mark.anyio
async def test_weights_that_answer_otherwise_than_the_learner_says_are_put_back(folder: Path, tmp_path: Path) -> None:
    new = tiny_model(tmp_path / "new", seed=1)
    prompts = [[5, 6, n] for n in range(4)]
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(new)(input_ids=torch.tensor(prompts)).logits[:, -1]
    truth = logits.float().log_softmax(-1).max(-1).values.tolist()

    def say(off: float) -> None:
        said = [{"prompt_ids": p, "logprob": value - off} for p, value in zip(prompts, truth, strict=True)]
        (new / "canary.json").write_text(json.dumps(said))

    async with EmbeddedEngine(folder, device="cpu", threads=1) as engine:
        old = await collect(engine, generation(PROMPT, max_tokens=30, seed=1))
        say(0.6)
        async with aclosing(engine.generate(generation(PROMPT, "running", max_tokens=120, seed=2))) as running:
            pieces = [await anext(running)]
            with pytest.raises(EngineFailed, match=r"are 0.60 off those of the learner.*the old weights answer"):
                await engine.load_weights(str(new), 1)
            pieces += [piece async for piece in running]
        again = await collect(engine, generation(PROMPT, max_tokens=30, seed=1))
        assert ids_of(again) == ids_of(old)
        assert np.allclose(logprobs_of(again), logprobs_of(old), atol=1e-4)
        assert {piece.version for piece in pieces + again} == {0}
        expected = dense_logprobs(AutoModelForCausalLM.from_pretrained(folder), PROMPT, ids_of(pieces))
        assert np.allclose(logprobs_of(pieces), expected, atol=1e-4)
        (new / "canary.json").write_text('[{"prompt_ids": [99999], "logprob": -1.0}]')
        with pytest.raises(EngineFailed, match="is no prompt of this model"):
            await engine.load_weights(str(new), 1)
        say(0.0)
        await engine.load_weights(str(new), 1)
        last = await collect(engine, generation(PROMPT, max_tokens=30, seed=1))
        assert {piece.version for piece in last} == {1}
        expected = dense_logprobs(AutoModelForCausalLM.from_pretrained(new), PROMPT, ids_of(last))
        assert np.allclose(logprobs_of(last), expected, atol=1e-4)


@pytest.mark.anyio
async def test_an_aborted_request_frees_its_place(folder: Path) -> None:
    async with EmbeddedEngine(folder, device="cpu", max_running=1) as engine:
        async with aclosing(engine.generate(generation(PROMPT, "first", max_tokens=200))) as first:
            await anext(first)
            async with aclosing(engine.generate(generation(PROMPT, "gone", max_tokens=200))) as waiting:
                with anyio.move_on_after(0.05):
                    await anext(waiting)
        await until_idle(engine)
        assert len(ids_of(await collect(engine, generation(PROMPT, "next", max_tokens=3)))) == 3
        assert (await engine.health()).waiting == 0


@pytest.mark.anyio
async def test_a_failed_step_reaches_everyone_and_the_engine_goes_on(folder: Path, tmp_path: Path) -> None:
    poison = tmp_path / "nan"
    poison.mkdir()
    weights = load_file(folder / "model.safetensors")
    save_file({n: torch.full_like(tensor, torch.nan) for n, tensor in weights.items()}, poison / "model.safetensors")
    async with EmbeddedEngine(folder, device="cpu", max_running=3) as engine:
        good = await collect(engine, generation(PROMPT, seed=1, max_tokens=5))
        await engine.load_weights(str(poison), 1)
        asked = [collect(engine, generation(PROMPT[:n], str(n), max_tokens=50)) for n in range(1, 6)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(answer, EngineFailed) and "not finite" in str(answer) for answer in answers)
        await engine.load_weights(str(folder), 2)
        assert ids_of(await collect(engine, generation(PROMPT, seed=1, max_tokens=5))) == ids_of(good)


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["processed", "raw"])
@pytest.mark.parametrize(
    "asked",
    [{"min_tokens": 2, "stop_token_ids": tuple(range(263))}, {"repetition_penalty": 1e-300}],
    ids=["no token left", "no numbers"],
)
async def test_settings_that_leave_nothing_to_draw_from_fail_their_own_request_only(
    folder: Path, asked: dict[str, Any], mode: Any
) -> None:
    async with EmbeddedEngine(folder, device="cpu", logprobs_mode=mode) as engine:
        alone = await collect(engine, generation(PROMPT, seed=1, max_tokens=30))
        await engine.pause()  # so that all of them meet in one step
        together = asyncio.gather(
            collect(engine, generation(PROMPT, seed=1, max_tokens=30)),
            collect(engine, generation(PROMPT, "p", max_tokens=5, **asked)),
            collect(engine, generation(PROMPT[:2], "q", temperature=0.0, max_tokens=5, **asked)),
            return_exceptions=True,
        )
        await anyio.lowlevel.checkpoint()
        await engine.resume()
        good, *bad = await together
        assert ids_of(good) == ids_of(alone)
        assert all(isinstance(answer, BadRequest) and "no token to draw" in str(answer) for answer in bad)


@pytest.mark.anyio
@pytest.mark.parametrize("asked", [{"temperature": 1e-44}, {"temperature": 1e-60}, {"top_p": 1e-320}], ids=str)
async def test_the_smallest_temperature_and_top_p_draw_the_likeliest(engine: EmbeddedEngine, asked: Any) -> None:
    likeliest = ids_of(await collect(engine, generation(PROMPT, temperature=0.0, max_tokens=10)))
    pieces = await collect(engine, generation(PROMPT, max_tokens=10, **asked))
    assert (ids_of(pieces), logprobs_of(pieces)) == (likeliest, [0.0] * 10)


@pytest.mark.anyio
@pytest.mark.parametrize("place", ["resize", "add", "slot"])
async def test_a_lack_of_memory_anywhere_in_a_step_reaches_everyone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    async with EmbeddedEngine(folder, device="cpu", max_running=3) as engine:
        with monkeypatch.context() as patch:

            def lack(*args: object) -> None:
                raise torch.OutOfMemoryError("no memory")

            patch.setattr(f"rollbook.proxy.kv.Rows.{place}", lack)
            asked = [collect(engine, generation(PROMPT[:n], str(n), max_tokens=50)) for n in range(1, 6)]
            with anyio.fail_after(600):
                answers = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(answer, EngineFailed) and "no memory" in str(answer) for answer in answers)
        assert len(ids_of(await collect(engine, generation(PROMPT, max_tokens=5)))) == 5


@pytest.mark.anyio
async def test_ids_outside_the_vocabulary_and_empty_prompts_are_refused(engine: EmbeddedEngine) -> None:
    for prompt, said in (([5, 263], "263"), ([-1], "-1"), ([], "no tokens")):
        with pytest.raises(BadRequest, match=said):
            await collect(engine, generation(prompt, max_tokens=1))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("qwen3", {}),
        ("mistral", {"sliding_window": 6}),
        ("gemma3_text", {"sliding_window": 6, "num_hidden_layers": 6}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_other_families_give_their_own_logprobs_and_take_weights(
    tmp_path: Path, kind: str, config: dict[str, int]
) -> None:
    first, second = (tiny_family(tmp_path / str(seed), kind, seed=seed, **config) for seed in (0, 1))
    async with EmbeddedEngine(first, device="cpu", threads=1, step_tokens=8) as engine:
        for version, path in enumerate((first, second)):
            await engine.load_weights(str(path), version)
            asked = [generation(PROMPT * 2, str(n), max_tokens=20, seed=n) for n in range(2)]
            model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
            for pieces in await collect_all(engine, asked):
                expected = dense_logprobs(model, PROMPT * 2, ids_of(pieces))
                assert np.allclose(logprobs_of(pieces), expected, atol=1e-4)


@pytest.mark.anyio
async def test_a_model_that_attends_in_another_way_is_refused(tmp_path: Path) -> None:
    folder = tiny_family(tmp_path / "m", "gpt_oss", num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(EngineUnavailable, match="GptOssForCausalLM"):
        async with EmbeddedEngine(folder, device="cpu"):
            pass


@pytest.mark.anyio
async def test_a_folder_without_a_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="could not load a model from"):
        async with EmbeddedEngine(tmp_path / "nothing", device="cpu"):
            pass


@pytest.mark.anyio
async def test_a_stopped_engine_says_that_it_does_not_start_again(folder: Path) -> None:
    engine = EmbeddedEngine(folder, device="cpu")
    async with engine:
        pass
    with pytest.raises(EngineUnavailable, match="make a new one"):
        async with engine:
            pass


@pytest.mark.anyio
async def test_too_little_cache_says_how_much_is_needed(folder: Path) -> None:
    with pytest.raises(EngineUnavailable, match="at least 98304"):
        async with EmbeddedEngine(folder, device="cpu", cache_bytes=1000):
            pass


@pytest.mark.anyio
async def test_an_adapter_answers_as_peft_has_it_and_each_token_has_its_version(folder: Path, tmp_path: Path) -> None:
    adapter = tiny_adapter(folder, tmp_path / "adapter")
    with_adapter = adapted(folder, adapter)
    base = AutoModelForCausalLM.from_pretrained(folder)
    async with EmbeddedEngine(folder, device="cpu", threads=1) as engine:
        pieces: list[Sampled] = []
        keep_pace(engine, pieces)
        async with aclosing(engine.generate(generation(PROMPT, max_tokens=40, seed=1))) as stream:
            async for piece in stream:
                pieces.append(piece)
                if len(pieces) == 10:
                    await engine.load_weights(str(adapter), 4)
        output, got = ids_of(pieces), np.array(logprobs_of(pieces))
        versions = np.array([piece.version for piece in pieces for _ in piece.ids])
        assert set(versions) == {0, 4}
        for version, model in ((0, base), (4, with_adapter)):
            logits = dense_logits(model, PROMPT + output, len(output))
            expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(output)[:, None])[:, 0].numpy()
            assert np.allclose(got[versions == version], expected[versions == version], atol=1e-3)
            assert not np.allclose(got[versions != version], expected[versions != version], atol=1e-2)
        # The next adapter is of the base as well, not of what the last one made of it.
        await engine.load_weights(str(adapter), 5)
        logits = dense_logits(with_adapter, [*PROMPT, 3], 1)
        again = await collect(engine, generation(PROMPT, max_tokens=1, temperature=0.0))
        assert logprobs_of(again)[0] == pytest.approx(float(torch.log_softmax(logits, -1).max()), abs=1e-3)


@pytest.mark.anyio
async def test_an_adapter_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    adapter = tiny_adapter(folder, tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = next(name for name in tensors if "lora_B" in name)
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, adapter / "adapter_model.safetensors")
    async with EmbeddedEngine(folder, device="cpu", threads=1) as engine:
        with pytest.raises(EngineFailed, match="does not fit the running model"):
            await engine.load_weights(str(adapter), 1)
        assert (await engine.health()).version == 0
