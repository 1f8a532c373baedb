"""Several engines as one: the engines' contract either way of updating, and where requests go."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from proxy.engine_contract import EngineContract, Limits, collect, generation, ids_of, logprobs_of
from proxy.models import misfits, tiny_model
from proxy.test_scripted import count_up
from rollbook.proxy.embedded import EmbeddedEngine
from rollbook.proxy.engine import Engine, Generation, Sampled
from rollbook.proxy.errors import EngineFailed, EngineUnavailable
from rollbook.proxy.replicas import Replicas, Update, beginnings
from rollbook.proxy.scripted import ScriptedEngine

pytestmark = pytest.mark.anyio


def one() -> ScriptedEngine:
    return ScriptedEngine(count_up, max_context=256, token_s=0.0005)


class TestRolling(EngineContract):
    limits = Limits(is_sampling=False)
    update: Update = "rolling"

    def make(self) -> AbstractAsyncContextManager[Engine]:
        return Replicas([one() for _ in range(3)], update=self.update)


class TestBarrier(TestRolling):
    update: Update = "barrier"


class TestEmbedded(EngineContract):
    @pytest.fixture(autouse=True)
    def _models(self, folder: Path, other: Path, misfitting: dict[str, Path]) -> None:
        self.folder = folder
        self.limits = Limits(new_weights=(str(other),), bad_weights=tuple(map(str, misfitting.values())))

    def make(self) -> AbstractAsyncContextManager[Engine]:
        return Replicas([EmbeddedEngine(self.folder, device="cpu", threads=1) for _ in range(2)], update="barrier")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "a", seed=0)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "b", seed=1)


@pytest.fixture(scope="module")
def misfitting(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return misfits(folder, tmp_path_factory.mktemp("misfits"))


class Keeping(ScriptedEngine):
    """Keeps the order of what happened, over all engines; may break."""

    happened: list[tuple[str, int]]

    def __init__(self, name: int, happened: list[tuple[str, int]], **settings: float) -> None:
        super().__init__(lambda _: list(range(200)), **{"token_s": 0.002, "chunk_tokens": 4, **settings})  # type: ignore[arg-type]
        self.name = name
        self.happened = happened
        self.is_broken = False
        self.refuses = False

    async def generate(self, generation: Generation) -> AsyncIterator[Sampled]:
        self.happened.append(("asked", self.name))
        async with aclosing(super().generate(generation)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                if self.is_broken:
                    raise EngineUnavailable("it died")
                if len(piece.ids):
                    self.happened.append((f"sampled {piece.version}", self.name))
                yield piece

    async def load_weights(self, path: str, version: int) -> None:
        if self.refuses:
            raise EngineFailed("they do not fit")
        await anyio.sleep(0.02)
        await super().load_weights(path, version)
        self.happened.append((f"loaded {version}", self.name))

    async def health(self):  # type: ignore[no-untyped-def]
        found = await super().health()
        return (
            found
            if not self.is_broken
            else type(found)(
                is_ready=False, version=found.version, model="m", max_context=found.max_context, reason="it died"
            )
        )


@asynccontextmanager
async def three(**settings: object) -> AsyncIterator[tuple[Replicas, list[Keeping], list[tuple[str, int]]]]:
    happened: list[tuple[str, int]] = []
    engines = [Keeping(i, happened) for i in range(3)]
    async with Replicas(engines, look_s=0.02, **settings) as replicas:  # type: ignore[arg-type]
        yield replicas, engines, happened


def test_equal_beginnings_have_equal_hashes_and_long_prompts_few() -> None:
    rng = np.random.default_rng(0)
    a = rng.integers(0, 1000, 32_000).astype(np.int32)
    b = a.copy()
    b[700] += 1
    ours, theirs = beginnings(a), beginnings(b)
    assert len(ours) == len(theirs) < 100
    assert [x == y for x, y in zip(ours, theirs, strict=True)][:6] == [True] * 5 + [False]
    assert not set(ours[5:]) & set(theirs[5:])
    assert beginnings(a[:31]) == []


async def test_a_conversation_stays_where_its_beginning_is_cached_and_others_spread() -> None:
    async with three() as (replicas, _, happened):
        for turn in range(3):
            for talk in range(6):
                prompt = [talk] * 64 + list(range(turn * 40))
                await collect(replicas, generation(prompt, max_tokens=2))
        homes = [[name for what, name in happened if what == "asked"][talk::6] for talk in range(6)]
        assert all(len(set(home)) == 1 for home in homes)


async def test_a_busy_engine_is_passed_over_though_it_has_the_beginning() -> None:
    async with three() as (replicas, _, happened), anyio.create_task_group() as group:
        for i in range(24):
            group.start_soon(collect, replicas, generation([7] * 64, f"g{i}", max_tokens=200))
        asked: list[int] = []
        while len(asked) < 24:
            await anyio.sleep(0.01)
            asked = [name for what, name in happened if what == "asked"]
        assert {asked.count(name) for name in range(3)} <= set(range(5, 13))


async def test_what_an_engine_that_died_was_answering_goes_on_elsewhere_token_by_token() -> None:
    async with three() as (replicas, engines, happened):
        prompt = [3] * 40
        seen: list[Sampled] = []
        async with aclosing(replicas.generate(generation(prompt, max_tokens=20))) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                seen.append(piece)
                if len(ids_of(seen)) == 8:
                    first = next(name for what, name in happened if what == "asked")
                    engines[first].is_broken = True
        # The scripted engine begins its answer again; a real one goes on from the tokens it is given.
        assert ids_of(seen) == [*range(8), *range(12)]
        assert len(logprobs_of(seen)) == 20
        assert seen[-1].finish_reason == "length"
        for _ in range(6):
            await collect(replicas, generation(prompt, max_tokens=2))
        asked = [name for what, name in happened if what == "asked"]
        assert first not in asked[1:]
        assert "1 of 3 engines are down" in ((await replicas.health()).reason or "")
        await replicas.load_weights("/w", 4)
        engines[first].is_broken = False
        while (await replicas.health()).reason is not None:  # noqa: ASYNC110 - there is no event for it
            await anyio.sleep(0.01)
        assert engines[first]._version == 4, "who comes back has the others' weights before it is asked"


async def test_without_any_engine_a_request_is_refused_for_now() -> None:
    async with three() as (replicas, engines, _):
        for engine in engines:
            engine.is_broken = True
        with pytest.raises(EngineUnavailable, match="no engine can answer") as refused:
            await collect(replicas, generation([1, 2, 3], max_tokens=2))
        assert refused.value.retry_after_s
        assert not (await replicas.health()).is_ready


@pytest.mark.parametrize("update", ["rolling", "barrier"])
async def test_every_token_carries_the_version_of_who_sampled_it_and_no_answer_goes_back(update: Update) -> None:
    async with three(update=update) as (replicas, _engines, happened):
        answers: list[list[Sampled]] = []

        async def ask(i: int) -> None:
            for k in range(4):
                answers.append(await collect(replicas, generation([i] * 40, f"g{i}-{k}", max_tokens=40)))

        async with anyio.create_task_group() as group:
            for i in range(9):
                group.start_soon(ask, i)
            for version in (1, 2, 3):
                await anyio.sleep(0.06)
                await replicas.load_weights("/w", version)
                assert (await replicas.health()).version == version
        for pieces in answers:
            versions = [piece.version for piece in pieces if len(piece.ids)]
            assert versions == sorted(versions)
        # Each engine's label is what it had loaded last, whatever the others were doing.
        has = dict.fromkeys(range(3), 0)
        for what, name in happened:
            kind, _, version = what.partition(" ")
            if kind == "loaded":
                has[name] = int(version)
            elif kind == "sampled":
                assert int(version) == has[name]
        if update == "barrier":
            for version in (1, 2, 3):
                loads = [i for i, (what, _) in enumerate(happened) if what == f"loaded {version}"]
                assert len(loads) == 3
                assert not any(what.startswith("sampled") for what, _ in happened[loads[0] : loads[-1]]), (
                    "no engine samples while some have the new weights"
                )
        else:
            loads = [i for i, (what, _) in enumerate(happened) if what == "loaded 1"]
            assert any(what.startswith("sampled") for what, _ in happened[loads[0] : loads[-1]]), (
                "the others go on while one gets new weights"
            )


async def test_rolling_with_a_drain_waits_for_the_answers_of_each() -> None:
    async with three(drain_s=200.0) as (replicas, _, happened), anyio.create_task_group() as group:
        answers: list[list[Sampled]] = []

        async def ask(i: int) -> None:
            answers.append(await collect(replicas, generation([i] * 40, f"g{i}", max_tokens=40)))

        for i in range(6):
            group.start_soon(ask, i)
        while len(happened) < 12:  # noqa: ASYNC110 - all have begun
            await anyio.sleep(0.001)
        await replicas.load_weights("/w", 1)
        assert all({piece.version for piece in pieces} == {0} for pieces in answers)
        assert len(answers) == 6


@pytest.mark.parametrize("update", ["rolling", "barrier"])
async def test_weights_that_all_refuse_change_nothing_and_one_that_refuses_alone_is_left_out(update: Update) -> None:
    async with three(update=update) as (replicas, engines, happened):
        for engine in engines:
            engine.refuses = True
        with pytest.raises(EngineFailed, match="do not fit"):
            await replicas.load_weights("/w", 1)
        assert (await replicas.health()).version == 0
        assert await collect(replicas, generation([1], max_tokens=4))
        engines[1].refuses = engines[2].refuses = False
        await replicas.load_weights("/w", 2)
        assert (await replicas.health()).version == 2
        happened.clear()
        for i in range(6):
            await collect(replicas, generation([i], max_tokens=4))
        assert 0 not in {name for what, name in happened if what == "asked"}


async def test_an_engine_that_runs_for_somebody_else_goes_on_and_the_others_are_left() -> None:
    running, fresh = one(), one()
    async with running:
        with pytest.raises(RuntimeError, match="runs already"):
            async with Replicas([fresh, running]):
                pass
        assert len(ids_of(await collect(running, generation([5], max_tokens=3)))) == 3
        assert not (await fresh.health()).is_ready
    async with Replicas([fresh, running]) as both:
        assert len(ids_of(await collect(both, generation([5], max_tokens=3)))) == 3


async def test_a_second_entering_while_the_first_one_starts_ends_nothing(folder: Path) -> None:
    replicas = Replicas([EmbeddedEngine(folder, device="cpu", threads=1)])
    first = asyncio.ensure_future(replicas.__aenter__())
    await anyio.lowlevel.checkpoint()
    with pytest.raises(RuntimeError, match="runs already"):
        await replicas.__aenter__()
    try:
        await first
        assert len(ids_of(await collect(replicas, generation([5], max_tokens=3)))) == 3
    finally:
        await replicas.__aexit__(None, None, None)
