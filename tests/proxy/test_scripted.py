"""The scripted engine keeps every promise of the seam."""

from contextlib import AbstractAsyncContextManager

import numpy as np
import pytest

from proxy.engine_contract import EngineContract, Limits, collect, ids_of, logprobs_of
from rollbook.proxy.engine import Engine, Generation, Sampling
from rollbook.proxy.errors import EngineFailed
from rollbook.proxy.scripted import ScriptedEngine, check_script, scripted_logprob


def count_up(generation: Generation) -> list[int]:
    """Ids that depend on the prompt, so that answers cannot be mixed up unseen."""
    start = int(generation.prompt_ids.sum()) % 97
    return [(start + n) % 256 for n in range(300)]


class TestScripted(EngineContract):
    limits = Limits(is_sampling=False)

    def make(self) -> AbstractAsyncContextManager[Engine]:
        return ScriptedEngine(count_up, max_context=256, token_s=0.0005)


@pytest.mark.anyio
async def test_a_logprob_is_a_function_of_its_token_and_place():
    async with ScriptedEngine(count_up) as engine:
        pieces = await collect(
            engine, Generation(request_id="g", prompt_ids=np.asarray([1], np.int32), sampling=Sampling(max_tokens=20))
        )
    expected = [scripted_logprob(token, n) for n, token in enumerate(ids_of(pieces))]
    assert np.allclose(logprobs_of(pieces), expected)


@pytest.mark.anyio
@pytest.mark.parametrize("answer", ["text", 7, [1.5], [[1], [2]], ["a"], None])
async def test_what_are_no_token_ids_is_told_in_one_sentence(answer):
    async with ScriptedEngine(lambda generation: answer) as engine:
        with pytest.raises(EngineFailed, match="the script must return token ids, a list of ints, and returned"):
            await collect(engine, Generation(request_id="g", prompt_ids=np.asarray([1], np.int32)))


@pytest.mark.anyio
async def test_an_empty_answer_is_one():
    async with ScriptedEngine(lambda generation: []) as engine:
        assert ids_of(await collect(engine, Generation(request_id="g", prompt_ids=np.asarray([1], np.int32)))) == []


def test_what_is_no_script_is_refused_with_what_was_expected():
    expected = "expected m:f to take the tokenizer and return the script, a function of a Generation; it returned"
    for made, why in (
        ([1, 2], "no function"),
        (lambda: [1], r"one that takes \(\)"),
        (lambda a, b: [1], "one that takes"),
    ):
        with pytest.raises(ValueError, match=expected + ".*" + why):
            check_script(made, "m:f")
    for made in (count_up, lambda generation, more=0: [1], print):
        assert check_script(made, "m:f") is made
