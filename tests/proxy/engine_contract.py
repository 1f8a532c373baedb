"""What every engine promises (`rollbook.proxy.engine.Engine`), as tests that each implementation runs.

Subclass `EngineContract`, give it `make` and, where an engine cannot do something, say so in its `Limits` table. An
engine under test answers any prompt of ids below 256 with at least `Limits.min_answer` tokens unless told to stop.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing

import anyio
import anyio.lowlevel
import msgspec
import numpy as np
import pytest

from rollbook.proxy.engine import Engine, Generation, Sampled, Sampling
from rollbook.proxy.errors import BadRequest, ContextOverflow, EngineFailed, EngineUnavailable


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What an implementation can do; the contract asks for all of it by default."""

    min_answer: int = 24  # tokens that an unlimited answer has at least
    max_context: int = 256
    is_sampling: bool = True  # temperature, seeds and top_p mean something
    new_weights: tuple[str, ...] = ()  # weight folders that load; none: any path does
    bad_weights: tuple[str, ...] = ()  # folders that must be refused with everything left as it was


def generation(prompt: list[int], name: str = "g", **sampling: object) -> Generation:
    return Generation(
        request_id=name,
        prompt_ids=np.asarray(prompt, np.int32),
        sampling=Sampling(**sampling),  # type: ignore[arg-type]
    )


async def collect(engine: Engine, asked: Generation) -> list[Sampled]:
    async with aclosing(engine.generate(asked)) as pieces:  # type: ignore[type-var]
        return [piece async for piece in pieces]


def ids_of(pieces: list[Sampled]) -> list[int]:
    return [i for piece in pieces for i in piece.ids.tolist()]


def logprobs_of(pieces: list[Sampled]) -> list[float]:
    return [x for piece in pieces for x in piece.logprobs.tolist()]


async def until_idle(engine: Engine) -> None:
    with anyio.fail_after(600):
        while (await engine.health()).running:  # noqa: ASYNC110 - an engine has no event for this
            await anyio.sleep(0.01)


class EngineContract:
    """Run by each implementation's test class."""

    limits = Limits()

    def make(self) -> AbstractAsyncContextManager[Engine]:
        """A fresh engine, not entered yet."""
        raise NotImplementedError

    @pytest.fixture
    async def engine(self) -> AsyncIterator[Engine]:
        async with self.make() as engine:
            yield engine

    @property
    def weights(self) -> str:
        return self.limits.new_weights[0] if self.limits.new_weights else "/weights"

    # ------------------------------------------------------------ answers

    @pytest.mark.anyio
    async def test_each_id_has_a_logprob_and_only_the_last_piece_has_a_finish_reason(self, engine: Engine) -> None:
        pieces = await collect(engine, generation([5, 6, 7], max_tokens=20))
        assert all(len(p.ids) == len(p.logprobs) for p in pieces)
        assert all(p.ids.dtype == np.int32 and p.logprobs.dtype == np.float32 for p in pieces)
        assert [p.finish_reason is not None for p in pieces] == [False] * (len(pieces) - 1) + [True]
        assert all(x <= 0 and np.isfinite(x) for x in logprobs_of(pieces))

    @pytest.mark.anyio
    async def test_max_tokens_ends_with_length(self, engine: Engine) -> None:
        pieces = await collect(engine, generation([5, 6, 7], max_tokens=5))
        assert (len(ids_of(pieces)), pieces[-1].finish_reason) == (5, "length")

    @pytest.mark.anyio
    async def test_an_answer_is_streamed_in_several_pieces(self, engine: Engine) -> None:
        assert len(await collect(engine, generation([5, 6, 7], max_tokens=self.limits.min_answer))) > 1

    @pytest.mark.anyio
    async def test_a_stop_token_is_sampled_reported_and_ends_the_answer(self, engine: Engine) -> None:
        free = ids_of(await collect(engine, generation([5, 6, 7], temperature=0.0, max_tokens=8)))
        stop = free[-1]
        pieces = await collect(engine, generation([5, 6, 7], temperature=0.0, max_tokens=8, stop_token_ids=(stop,)))
        assert ids_of(pieces) == free[: free.index(stop) + 1]
        assert pieces[-1].finish_reason == "stop"

    @pytest.mark.anyio
    async def test_a_stop_token_that_the_model_does_not_have_changes_nothing(self, engine: Engine) -> None:
        free, asked = [
            ids_of(await collect(engine, generation([5, 6, 7], temperature=0.0, max_tokens=8, **more)))
            for more in ({}, {"stop_token_ids": (-3, 10**6, 10**12), "min_tokens": 4})
        ]
        assert asked == free

    @pytest.mark.anyio
    async def test_without_max_tokens_the_context_is_the_limit(self, engine: Engine) -> None:
        most = (await engine.health()).max_context
        prompt = [5] * (most - 4)
        pieces = await collect(engine, generation(prompt, max_tokens=None))
        assert len(ids_of(pieces)) <= 4
        pieces = await collect(engine, generation(prompt, max_tokens=100))
        assert len(ids_of(pieces)) <= 4

    @pytest.mark.anyio
    async def test_a_prompt_that_leaves_no_room_is_refused_by_name(self, engine: Engine) -> None:
        most = (await engine.health()).max_context
        with pytest.raises(ContextOverflow):
            await collect(engine, generation([5] * most))

    @pytest.mark.anyio
    async def test_greedy_answers_repeat(self, engine: Engine) -> None:
        first, second = [await collect(engine, generation([9, 8], temperature=0.0, max_tokens=12)) for _ in range(2)]
        assert ids_of(first) == ids_of(second)
        assert np.allclose(logprobs_of(first), logprobs_of(second), atol=1e-4)

    @pytest.mark.anyio
    async def test_a_seed_repeats_an_answer(self, engine: Engine) -> None:
        first, second = [await collect(engine, generation([9, 8], seed=7, max_tokens=12)) for _ in range(2)]
        assert ids_of(first) == ids_of(second)

    @pytest.mark.anyio
    async def test_requests_at_once_do_not_mix(self, engine: Engine) -> None:
        prompts = [[5, 6, n] for n in range(10, 16)]
        alone = [ids_of(await collect(engine, generation(p, temperature=0.0, max_tokens=10))) for p in prompts]
        together: dict[int, list[int]] = {}

        async def ask(n: int, prompt: list[int]) -> None:
            together[n] = ids_of(await collect(engine, generation(prompt, f"g{n}", temperature=0.0, max_tokens=10)))

        async with anyio.create_task_group() as tasks:
            for n, prompt in enumerate(prompts):
                tasks.start_soon(ask, n, prompt)
        assert [together[n] for n in range(len(prompts))] == alone

    # ------------------------------------------------------------ leaving

    @pytest.mark.anyio
    async def test_closing_the_stream_aborts_the_request(self, engine: Engine) -> None:
        async with aclosing(engine.generate(generation([5, 6, 7], max_tokens=100))) as pieces:  # type: ignore[type-var]
            await anext(pieces)
        await until_idle(engine)
        assert ids_of(await collect(engine, generation([5, 6, 7], max_tokens=3)))

    @pytest.mark.anyio
    async def test_cancelling_the_reader_aborts_the_request(self, engine: Engine) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect, engine, generation([5, 6, 7], max_tokens=200))
            await anyio.sleep(0.02)
            tasks.cancel_scope.cancel()
        await until_idle(engine)

    # ------------------------------------------------------------ pausing and weights

    @pytest.mark.anyio
    async def test_a_paused_engine_keeps_its_requests_and_queues_new_ones(self, engine: Engine) -> None:
        seen: list[Sampled] = []
        names: set[str] = set()

        async def ask(name: str) -> None:
            async with aclosing(engine.generate(generation([5, 6, 7], name, max_tokens=60))) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    seen.append(piece)
                    names.add(name)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "running")
            with anyio.fail_after(600):
                while not seen:
                    await anyio.lowlevel.checkpoint()
            await engine.pause()
            await engine.pause()
            tasks.start_soon(ask, "queued")
            before = -1
            while before < len(seen):  # what was on its way arrives
                before = len(seen)
                await anyio.sleep(0.2)
            assert names == {"running"}
            await engine.resume()
            await engine.resume()
        assert [p.finish_reason for p in seen if p.finish_reason] == ["length"] * 2
        assert len(ids_of(seen)) == 120

    @pytest.mark.anyio
    async def test_what_is_sampled_after_a_weight_update_carries_its_version(self, engine: Engine) -> None:
        before = (await engine.health()).version
        await engine.load_weights(self.weights, before + 3)
        assert (await engine.health()).version == before + 3
        pieces = await collect(engine, generation([5, 6, 7], max_tokens=6))
        assert {p.version for p in pieces} == {before + 3}

    @pytest.mark.anyio
    async def test_a_request_in_flight_survives_a_weight_update_with_versions_in_order(self, engine: Engine) -> None:
        for before in range(20):
            seen: list[Sampled] = []
            async with aclosing(engine.generate(generation([5, 6, 7], max_tokens=200))) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    seen.append(piece)
                    if len(seen) == 1:
                        await engine.pause()
                        await engine.load_weights(self.weights, before + 1)
                        await engine.resume()
            assert len(ids_of(seen)) == 200
            versions = [p.version for p in seen if len(p.ids)]
            assert versions == sorted(versions)
            if versions[-1] > before:
                break  # else its engine was faster than the pause
        assert (versions[0], versions[-1]) == (before, before + 1)

    @pytest.mark.anyio
    async def test_weights_that_do_not_fit_change_nothing(self, engine: Engine) -> None:
        before = await collect(engine, generation([9, 8], temperature=0.0, max_tokens=6))
        for path in self.limits.bad_weights:
            with pytest.raises(EngineFailed):
                await engine.load_weights(path, 5)
        after = await collect(engine, generation([9, 8], temperature=0.0, max_tokens=6))
        assert ids_of(before) == ids_of(after)
        assert (await engine.health()).version == 0

    # ------------------------------------------------------------ being there

    @pytest.mark.anyio
    async def test_health_tells_what_it_is(self, engine: Engine) -> None:
        health = await engine.health()
        assert health.is_ready
        assert health.max_context == self.limits.max_context
        assert health.version == 0

    @pytest.mark.anyio
    async def test_an_engine_that_is_not_running_says_so(self) -> None:
        engine_context = self.make()
        async with engine_context as engine:
            pass
        with pytest.raises(EngineUnavailable):
            await collect(engine, generation([5, 6, 7], max_tokens=3))

    @pytest.mark.anyio
    async def test_one_that_runs_is_not_started_again_and_goes_on(self, engine: Engine) -> None:
        with pytest.raises(RuntimeError, match="runs already"):
            async with engine:  # type: ignore[attr-defined]
                pass
        assert len(ids_of(await collect(engine, generation([5, 6, 7], max_tokens=3)))) == 3

    @pytest.mark.anyio
    async def test_leaving_ends_running_requests(self) -> None:
        seen: list[Sampled] = []
        ended = anyio.Event()

        async def ask(engine: Engine) -> None:
            try:
                async with aclosing(engine.generate(generation([5, 6, 7], max_tokens=10_000))) as pieces:  # type: ignore[type-var]
                    async for piece in pieces:
                        seen.append(piece)
            except EngineUnavailable:
                pass
            ended.set()

        async with anyio.create_task_group() as tasks:
            async with self.make() as engine:
                tasks.start_soon(ask, engine)
                with anyio.fail_after(600):
                    while not seen:
                        await anyio.lowlevel.checkpoint()
            with anyio.fail_after(600):
                await ended.wait()

    @pytest.mark.anyio
    async def test_sampling_that_makes_no_sense_is_refused_by_name(self, engine: Engine) -> None:
        for wrong in ({"temperature": -1.0}, {"top_p": 0.0}, {"max_tokens": 0}):
            with pytest.raises(BadRequest):
                await collect(engine, generation([5, 6, 7], **wrong))
