"""The scripted engine keeps every promise of the seam."""

from contextlib import AbstractAsyncContextManager

import numpy as np
import pytest

from proxy.engine_contract import EngineContract, Limits, collect, ids_of, logprobs_of
from rollbook.proxy.engine import Engine, Generation, Sampling
from rollbook.proxy.scripted import ScriptedEngine, scripted_logprob


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
