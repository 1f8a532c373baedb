"""Logprobs and entropies of the sampling distribution, and their gradient."""

from typing import Any

import numpy as np
import pytest
import torch

from rollbook.learner.backend import head
from rollbook.learner.backend.head import Distribution, logprobs_and_entropies

CASES = [
    Distribution(),
    Distribution(temperature=0.6),
    Distribution(temperature=1.3, scale=0.5, softcap=3.0),
    Distribution(top_k=3, temperature=0.8),
    Distribution(top_p=0.7),
    Distribution(top_p=0.8, top_k=4, softcap=2.0),
]


def inputs() -> tuple[Any, ...]:
    torch.manual_seed(0)
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)
    return hidden, weight, bias, np.array([4, 0, 1, 3, 4, 0, 4]), np.array([6, 2, 3, 0, 6, 1, 5])


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("d", CASES)
def test_gradient_is_the_derivative(d: Distribution, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_BYTES", 2 * 4 * 7)  # two predictors at a time
    monkeypatch.setattr(head, "KEEP_BYTES", head.KEEP_BYTES if keep else 0)
    hidden, weight, bias, predictor, target = inputs()
    assert torch.autograd.gradcheck(
        lambda h, w, b: logprobs_and_entropies(h, w, b, predictor, target, d), (hidden, weight, bias)
    )


def test_truncation_renormalises_over_what_is_kept() -> None:
    hidden = torch.eye(1, dtype=torch.float64)
    weight = torch.log(torch.tensor([[0.5], [0.3], [0.15], [0.05]], dtype=torch.float64))
    predictor, target = np.array([0, 0]), np.array([0, 1])
    logprobs, entropies = logprobs_and_entropies(hidden, weight, None, predictor, target, Distribution(top_p=0.75))
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.5 / 0.8, 0.3 / 0.8], dtype=torch.float64))
    p = torch.tensor([0.5, 0.3], dtype=torch.float64) / 0.8
    torch.testing.assert_close(entropies, -(p * p.log()).sum()[None])


def test_a_sampled_token_is_never_impossible() -> None:
    hidden = torch.eye(1, dtype=torch.float64)
    weight = torch.log(torch.tensor([[0.5], [0.3], [0.15], [0.05]], dtype=torch.float64))
    logprobs, _ = logprobs_and_entropies(hidden, weight, None, np.array([0]), np.array([3]), Distribution(top_k=2))
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.05 / 0.85], dtype=torch.float64))


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, bias, predictor, target = inputs()
    whole = logprobs_and_entropies(hidden, weight, bias, predictor, target, Distribution())
    monkeypatch.setattr(head, "CHUNK_BYTES", 1)
    parts = logprobs_and_entropies(hidden, weight, bias, predictor, target, Distribution())
    torch.testing.assert_close(whole, parts)


def test_the_gradient_of_a_sure_token_is_not_lost_in_rounding() -> None:
    """Of a token with p near 1 it is g (1 - p): what is left of two large numbers."""
    rng = np.random.default_rng(0)  # torch's numbers depend on its version and the processor
    hidden, weight = (torch.tensor(rng.standard_normal((n, 8))).bfloat16() for n in (6, 16))
    hidden[:3] = weight[5] * (10 / weight[5].square().sum())
    at, to = np.arange(6), np.array([5, 5, 5, 1, 2, 3])
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        h, w = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        logprobs, _ = logprobs_and_entropies(h, w, None, at, to, Distribution())
        found.append(torch.autograd.grad(logprobs.sum(), (h, w)))
        assert logprobs[0] > -0.05
    for exact, rounded in zip(*found, strict=True):
        assert ((rounded - exact).norm(dim=-1) <= 0.05 * exact.norm(dim=-1) + 1e-4).all()
