"""Each advantage and each loss against slow plain Python in float64, and against known values."""

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.tiny import make_rows, random_rows
from rollbook.learner.algorithms import NAMES, Tokens, find_algorithm
from rollbook.learner.algorithms.dpo import pairs
from rollbook.learner.algorithms.parts import (
    behaviour_weight,
    entry_weights,
    gae,
    keep_second_moment,
    kl_estimate,
    normalise,
    normalise_advantages,
    overlong_penalty,
    shape_rewards,
    terminal_rewards,
    to_go,
)
from rollbook.learner.algorithms.recipe import Scores
from rollbook.learner.config import ActorConfig, NormConfig, RejectionConfig
from rollbook.learner.rows import Rows

EPS, HIGH, C = 0.2, 0.28, 3.0


def actor(**kwargs: Any) -> ActorConfig:
    return ActorConfig(reward_clip=1e9, rejection_sampling=None, fixed_length=7, **kwargs)


def judged(seed: int) -> Rows:
    """Random trees with one reward per episode, credited to each of its rows."""
    rows = random_rows(seed)
    by_episode = {
        e: float(np.random.default_rng(i).integers(0, 3)) for i, e in enumerate(sorted(set(rows.episode_ids)))
    }
    rewards = np.array([by_episode[e] for e in rows.episode_ids])
    return replace(rows, credits=rewards, rewards=rewards)


def simple(rewards: list[float], groups: list[str] | None = None, lengths: list[int] | None = None) -> Rows:
    lengths = lengths or [1] * len(rewards)
    return make_rows([([1], [2] * n) for n in lengths], rewards=rewards, groups=groups)


# ---------------------------------------------------------------- advantages


def group_rewards(rows: Rows) -> dict[str, dict[str, float]]:
    out: dict[str, dict[str, float]] = {}
    for group, episode, reward in zip(rows.group_ids, rows.episode_ids, rows.rewards, strict=True):
        out.setdefault(group, {})[episode] = float(reward)
    return out


def plain_advantages(name: str, rows: Rows) -> list[float]:
    groups = group_rewards(rows)
    everything = [r for g in groups.values() for r in g.values()]
    out = []
    for group, episode, reward in zip(rows.group_ids, rows.episode_ids, rows.rewards.tolist(), strict=True):
        mine = list(groups[group].values())
        mean = statistics.fmean(mine)
        std = statistics.stdev(mine) if len(mine) > 1 else 0.0
        others = [r for e, r in groups[group].items() if e != episode]
        if name in ("grpo", "dapo", "gspo", "sapo", "cispo", "m2po"):
            out.append((reward - mean) / (std + 1e-6) if std > 1e-8 else 0.0)
        elif name == "dr_grpo":
            out.append(reward - mean)
        elif name == "rloo":
            out.append(reward - statistics.fmean(others) if others else 0.0)
        elif name == "lite_ppo":
            spread = statistics.stdev(everything)
            out.append((reward - mean) / (spread + 1e-6) if spread > 1e-8 else 0.0)
        elif name == "reinforce":
            out.append(reward - statistics.fmean(everything))
        elif name in ("reinforce_pp", "ppo"):
            out.append(reward)
        elif name == "sft":
            out.append(1.0)
        elif name == "best_of_n":
            out.append(float(reward == max(mine) and reward >= 0.5))
        else:
            raise AssertionError(name)
    return out


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", [name for name in NAMES if name != "dpo"])
def test_advantages_are_those_of_the_plain_formula(name: str, seed: int) -> None:
    rows = judged(seed)
    np.testing.assert_allclose(find_algorithm(name, actor()).advantages(rows), plain_advantages(name, rows), rtol=1e-9)


def test_leave_one_out_of_1_2_3_4() -> None:
    got = find_algorithm("rloo", actor()).advantages(simple([1, 2, 3, 4]))
    np.testing.assert_allclose(got, [-2, -2 / 3, 2 / 3, 2])


def test_statistics_run_over_episodes_not_rows() -> None:
    rows = replace(simple([1, 1, 1, 0]), episode_ids=["a", "a", "a", "b"])
    np.testing.assert_allclose(find_algorithm("dr_grpo", actor()).advantages(rows), [0.5, 0.5, 0.5, -0.5])


@pytest.mark.parametrize("name", ["grpo", "lite_ppo", "dapo"])
def test_a_group_that_agrees_gives_zero_not_an_explosion(name: str) -> None:
    rows = simple([1, 1, 1, 1])
    assert (find_algorithm(name, actor()).advantages(rows) == 0).all()
    discounted = replace(rows, credits=np.array([0.9, 1, 1, 1]))  # credits of earlier turns differ from the reward
    assert np.abs(find_algorithm(name, actor()).advantages(discounted)).max() == 0


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo"])
def test_a_partial_group_has_finite_statistics_of_its_own(name: str) -> None:
    rows = simple([1, 2, 3], groups=["a", "a", "b"])  # three rows of a batch where groups should have two
    got = find_algorithm(name, actor()).advantages(rows)
    assert np.abs(got).max() <= 1.0
    assert got[2] == 0


def test_rewards_are_shaped_before_anything_else() -> None:
    config = ActorConfig(reward_bias=1.0, reward_scaling=2.0, reward_clip=5.0)
    np.testing.assert_allclose(shape_rewards(np.array([0.0, 1.0, 9.0, -9.0]), config), [2, 4, 5, -5])


def test_overlong_answers_pay_gradually() -> None:
    got = overlong_penalty(np.array([10, 80, 90, 100, 120]), limit=100, zone=20, factor=1.0)
    np.testing.assert_allclose(got, [0, 0, -0.5, -1, -1])
    rows = simple([1.0, 1.0], lengths=[2, 10])
    config = actor(overlong_tokens=5, max_new_tokens=10, overlong_reward_penalty=True)
    np.testing.assert_allclose(find_algorithm("dr_grpo", config).advantages(rows), [0.5, -0.5])


def test_settings_win_over_the_recipe() -> None:
    config = actor(reward_norm=NormConfig(mean_level=None, std_level=None))
    np.testing.assert_allclose(find_algorithm("grpo", config).advantages(simple([1, 2])), [1, 2])


@pytest.mark.parametrize("level", ["batch", "group"])
def test_token_advantages_are_normalised_over_trained_tokens(level: Any) -> None:
    rows = random_rows(1)
    values = np.random.default_rng(0).normal(size=len(rows.logprobs))
    mask = (np.random.default_rng(1).random(len(values)) < 0.7).astype(float)
    got = normalise_advantages(values, rows, mask, NormConfig(mean_level=level, std_level=level))
    labels = rows.group_R[rows.row_E] if level == "group" else np.zeros(len(values), int)
    for label in set(labels.tolist()):
        own = [float(v) for v, m, la in zip(values, mask, labels, strict=True) if m and la == label]
        for e in np.flatnonzero((labels == label) & (mask > 0)):
            assert got[e] == pytest.approx((values[e] - statistics.fmean(own)) / (statistics.stdev(own) + 1e-6))


def test_one_mean_for_all_needs_no_groups() -> None:
    rows = simple([0, 1, 5], groups=["a", "b", "c"])
    norm = NormConfig(mean_level="batch", std_level="batch")
    got = normalise(rows.credits, rows, norm, rows.rewards)
    np.testing.assert_allclose(got, (np.array([0, 1, 5]) - 2) / (statistics.stdev([0, 1, 5]) + 1e-6))


# ---------------------------------------------------------------- per token


def test_gae_skips_masked_tokens_and_matches_the_recursion() -> None:
    rows = random_rows(2)
    rng = np.random.default_rng(0)
    n = len(rows.logprobs)
    rewards, values, mask = rng.normal(size=n), rng.normal(size=n), (rng.random(n) < 0.8).astype(float)
    got = gae(rewards, values, mask, rows, discount=0.9, lam=0.8)
    for r in range(len(rows)):
        entries = [e for e in range(rows.output_starts[r], rows.output_starts[r + 1]) if mask[e]]
        running = next_value = 0.0
        for e in reversed(entries):
            running = rewards[e] + 0.9 * next_value - values[e] + 0.9 * 0.8 * running
            next_value = values[e]
            assert got[e] == pytest.approx(running)
    assert (got[mask == 0] == 0).all()


def test_gae_without_discount_is_return_minus_value() -> None:
    rows = simple([3.0], lengths=[4])
    rewards = terminal_rewards(rows.credits, rows, np.ones(4))
    np.testing.assert_allclose(rewards, [0, 0, 0, 3])
    got = gae(rewards, np.array([1.0, 2.0, 0.5, 0.0]), np.ones(4), rows, discount=1.0, lam=1.0)
    np.testing.assert_allclose(got, [2, 1, 2.5, 3])


def test_the_reward_falls_on_the_last_trained_token() -> None:
    rows = simple([3.0, 4.0], lengths=[3, 2])
    np.testing.assert_allclose(terminal_rewards(rows.credits, rows, np.array([1.0, 1, 0, 0, 0])), [0, 3, 0, 0, 0])


def test_kl_to_go_lowers_earlier_tokens_more() -> None:
    rows = replace(simple([1.0], lengths=[3]), advantages=np.array([1.0]))
    now, ref = np.array([-1.0, -2.0, -3.0]), np.array([-1.5, -2.5, -2.0])
    np.testing.assert_allclose(to_go(now - ref, rows), [0.0, -0.5, -1.0])
    got = find_algorithm("reinforce_pp", actor(kl_ctl=0.1)).spread(rows, np.ones(3), Scores(now_E=now, ref_E=ref))
    np.testing.assert_allclose(got, [1.0, 1.05, 1.1])


def test_kl_estimators() -> None:
    logp, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    np.testing.assert_allclose(kl_estimate(logp, ref, "k1"), [0.5, -1.0])
    np.testing.assert_allclose(kl_estimate(logp, ref, "k2"), [0.125, 0.5])
    np.testing.assert_allclose(kl_estimate(logp, ref, "k3"), [math.exp(-0.5) - 0.5, math.e - 2], rtol=1e-6)
    # Their means under the policy: k1 and k3 are the divergence.
    p = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    q = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    true = (p * (p / q).log()).sum()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((p * kl_estimate(p.log(), q.log(), estimator)).sum(), true)


def test_m2_keeps_the_most_tokens_within_the_threshold() -> None:
    squares = np.array([0.01, 0.5, 0.02, 0.09, 4.0])
    np.testing.assert_allclose(keep_second_moment(squares, np.ones(5), 0.04), [1, 0, 1, 1, 0])
    np.testing.assert_allclose(keep_second_moment(squares, np.ones(5), 10.0), np.ones(5))
    np.testing.assert_allclose(keep_second_moment(squares, np.array([1.0, 1, 1, 0, 0]), 0.03), [1, 0, 1, 0, 0])


@pytest.mark.parametrize("seed", range(3))
def test_weights_of_entries(seed: int) -> None:
    rows = random_rows(seed)
    mask = (np.random.default_rng(seed).random(len(rows.logprobs)) < 0.8).astype(float)
    by_row = [mask[rows.row_E == r].sum() for r in range(len(rows))]
    n_rows = sum(n > 0 for n in by_row)
    token = entry_weights(rows, mask, loss_agg="token_mean", fixed_length=None)
    assert token.sum() == pytest.approx(1)
    sequence = entry_weights(rows, mask, loss_agg="sequence_mean", fixed_length=None)
    for r, n in enumerate(by_row):
        if n:
            assert sequence[rows.row_E == r].sum() == pytest.approx(1 / n_rows)
    fixed = entry_weights(rows, mask, loss_agg="fixed_length", fixed_length=7)
    np.testing.assert_allclose(fixed, mask / (n_rows * 7))


def test_a_fixed_length_must_be_known() -> None:
    rows = random_rows(0)
    with pytest.raises(ValueError, match=r"set actor\.fixed_length or actor\.max_new_tokens"):
        entry_weights(rows, np.ones(len(rows.logprobs)), loss_agg="fixed_length", fixed_length=None)


# ---------------------------------------------------------------- losses


def tokens_of(rows: Rows, *, seed: int = 0, with_ref: bool = False, spread: float = 0.4) -> Tokens:
    rng = np.random.default_rng(seed)
    n = len(rows.logprobs)

    def near(spread: float) -> Tensor:
        return torch.as_tensor(rows.logprobs + rng.normal(0, spread, n))

    mask = (rng.random(n) < 0.85).astype(float)
    return Tokens(
        logprobs_E=near(spread).requires_grad_(),
        entropies_E=torch.as_tensor(rng.random(n)).requires_grad_(),
        old_E=torch.as_tensor(rows.logprobs),
        prox_E=near(spread / 2),
        ref_E=near(spread) if with_ref else None,
        advantages_E=torch.as_tensor(rng.normal(size=n)),
        row_E=torch.as_tensor(rows.row_E),
        n_rows=len(rows),
        weight_E=torch.as_tensor(mask / mask.sum()),
        mean_E=torch.as_tensor(mask / mask.sum()),
    )


def plain_loss(name: str, t: Tokens, config: ActorConfig) -> float:
    n, total = len(t.logprobs_E), 0.0
    logp, old, prox = t.logprobs_E.tolist(), t.old_E.tolist(), t.prox_E.tolist()
    adv, row, weight, mean = t.advantages_E.tolist(), t.row_E.tolist(), t.weight_E.tolist(), t.mean_E.tolist()
    higher = config.eps_clip_higher or (0.28 if name == "dapo" else config.eps_clip)
    for e in range(n):
        rho, a = math.exp(logp[e] - prox[e]), adv[e]
        if name == "gspo":
            mine = [k for k in range(n) if row[k] == row[e] and mean[k] > 0]
            rho = math.exp(sum(logp[k] - prox[k] for k in mine) / len(mine)) if mine else 1.0
            a = sum(adv[k] for k in mine) / len(mine) if mine else 0.0
        clipped = min(max(rho, 1 - config.eps_clip), 1 + higher)
        loss = max(-a * rho, -a * clipped)
        if config.c_clip and a < 0:
            loss = min(loss, config.c_clip * abs(a))
        if name in ("reinforce", "rloo"):
            loss = -a * rho
        elif name == "sapo":
            tau = config.sapo_tau_pos if a > 0 else config.sapo_tau_neg
            loss = -a * 4 / tau / (1 + math.exp(-tau * (rho - 1)))
        elif name == "cispo":
            loss = -min(rho, 1 + config.cispo_eps_max) * a * logp[e]
        elif name == "m2po":
            loss = -a * math.exp(logp[e] - old[e])
        elif name in ("sft", "best_of_n"):
            loss = -logp[e]
        elif name == "dpo":
            loss = -a * logp[e]
        if name not in ("m2po", "sft", "best_of_n", "dpo"):
            loss *= math.exp(prox[e] - old[e])
        total += weight[e] * loss
    total -= config.entropy_coef * sum(w * h for w, h in zip(weight, t.entropies_E.tolist(), strict=True))
    if t.ref_E is not None and config.kl_loss_coef:
        for e, ref in enumerate(t.ref_E.tolist()):
            d = ref - logp[e]
            kl = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[config.kl_estimator]
            total += config.kl_loss_coef * weight[e] * kl
    return total


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"c_clip": C, "eps_clip_higher": HIGH},
        {"entropy_coef": 0.1, "kl_loss_coef": 0.3, "kl_estimator": "k3"},
        {"kl_loss_coef": 0.3, "kl_estimator": "k2"},
    ],
)
def test_losses_are_those_of_the_plain_formula(name: str, settings: dict[str, Any]) -> None:
    config = actor(**settings)
    t = tokens_of(random_rows(3), with_ref="kl_loss_coef" in settings)
    loss, report = find_algorithm(name, config).loss(t)
    assert float(loss.detach()) == pytest.approx(plain_loss(name, t, config), rel=1e-10)
    assert all(math.isfinite(float(v)) for v in report.values())


def differentiable(name: str, config: ActorConfig, t: Tokens) -> Callable[[Tensor, Tensor], Tensor]:
    algorithm = find_algorithm(name, config)
    return lambda logprobs, entropies: algorithm.loss(replace(t, logprobs_E=logprobs, entropies_E=entropies))[0]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "cispo"])
def test_the_gradient_is_the_derivative(name: str) -> None:
    config = actor(c_clip=C, entropy_coef=0.1, kl_loss_coef=0.2)
    t = tokens_of(random_rows(4, n_groups=1), with_ref=True)
    assert torch.autograd.gradcheck(differentiable(name, config, t), (t.logprobs_E, t.entropies_E))


def test_cispo_gives_every_token_its_capped_weight() -> None:
    t = tokens_of(random_rows(4))
    find_algorithm("cispo", actor()).loss(t)[0].backward()  # type: ignore[no-untyped-call]
    ratio = (t.logprobs_E - t.prox_E).exp().detach().clamp(max=1.28)
    expected = -t.weight_E * (t.prox_E - t.old_E).exp() * ratio * t.advantages_E
    torch.testing.assert_close(t.logprobs_E.grad, expected)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce", "gspo", "sapo", "cispo", "m2po"])
def test_on_fresh_data_the_gradient_is_the_policy_gradient(name: str) -> None:
    rows = make_rows([([1], [2]), ([1], [3]), ([1], [4])])  # one token each: tokens are sequences
    t = tokens_of(rows)
    fresh = replace(t, logprobs_E=t.old_E.clone().requires_grad_(), prox_E=t.old_E)
    find_algorithm(name, actor()).loss(fresh)[0].backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(fresh.logprobs_E.grad, -t.weight_E * t.advantages_E)


def test_sapo_where_nothing_moved() -> None:
    rows = simple([1.0])
    t = replace(
        tokens_of(rows),
        logprobs_E=torch.tensor([-1.0]),
        prox_E=torch.tensor([-1.0]),
        old_E=torch.tensor([-1.0]),
        advantages_E=torch.tensor([1.0]),
        weight_E=torch.ones(1),
        mean_E=torch.ones(1),
        entropies_E=torch.zeros(1),
    )
    assert float(find_algorithm("sapo", actor(sapo_tau_pos=1.0)).loss(t)[0]) == -2.0


# ---------------------------------------------------------------- off-policy weights


def apart(d: list[float], **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    n = len(d)
    rows = simple([0.0], lengths=[n])
    zero = torch.zeros(n, dtype=torch.float64)
    t = replace(
        tokens_of(rows),
        old_E=zero,
        prox_E=torch.tensor(d, dtype=torch.float64),
        row_E=torch.zeros(n, dtype=torch.int64),
        mean_E=torch.full((n,), 1 / n, dtype=torch.float64),
        n_rows=1,
    )
    weight, report = behaviour_weight(t, RejectionConfig(**kwargs))
    return weight, dict(report)


def test_a_token_beyond_the_ratio_is_masked() -> None:
    weight, report = apart([0, 1, 0], level="token", action="mask", metric="ratio", upper=2.0)
    assert weight.tolist() == [1, 0, 1]
    assert float(report["rejected"]) == pytest.approx(1 / 3)


def test_a_sequence_has_the_weight_of_its_mean() -> None:
    weight, _ = apart([0, 0.5, 1], level="sequence", action="clamp", metric="ratio", agg="mean", upper=2.0)
    np.testing.assert_allclose(weight, [math.exp(0.5)] * 3)


@pytest.mark.parametrize(
    ("d", "kwargs", "expected"),
    [
        ([0, 1, -2], {"action": "clamp", "upper": 2.0}, [1, 2, math.exp(-2)]),
        ([0, 1, -2], {"action": "clamp", "upper": 2.0, "lower": 0.5}, [1, 2, 0.5]),
        ([0, 1, -2], {"action": "mask", "upper": None, "lower": 0.5}, [1, math.e, 0]),
        ([0.1, 1.0], {"action": "mask", "metric": "kl_k2", "upper": 0.2}, [math.exp(0.1), 0]),
        ([0.1, 1.0], {"action": "mask", "metric": "kl_k1", "upper": 0.0, "lower": -0.5}, [math.exp(0.1), 0]),
        ([0.1, 1.0], {"action": "mask", "metric": "kl_k3", "upper": 0.2}, [math.exp(0.1), 0]),
        ([0.1, 1.0], {"level": "sequence", "action": "mask", "agg": "max", "upper": 2.0}, [0, 0]),
        ([0.3, 0.3], {"level": "sequence", "action": "clamp", "agg": "sum", "upper": 5.0}, [math.exp(0.6)] * 2),
        ([0.3, 0.5], {"level": "sequence", "action": "mask", "metric": "kl_k2", "upper": 0.09}, [math.exp(0.4)] * 2),
    ],
)
def test_rejection(d: list[float], kwargs: dict[str, Any], expected: list[float]) -> None:
    np.testing.assert_allclose(apart(d, **kwargs)[0], expected)


def test_clamping_by_kl_makes_no_sense_and_says_so() -> None:
    with pytest.raises(ValueError, match="use action mask with a kl metric"):
        apart([0.0], action="clamp", metric="kl_k2", upper=1.0)


# ---------------------------------------------------------------- preference pairs


def test_dpo_steps_along_the_gradient_of_its_loss() -> None:
    rows = judged(5)
    algorithm = find_algorithm("dpo", actor(dpo_beta=0.3))
    rows = replace(rows, advantages=algorithm.advantages(rows))
    rng = np.random.default_rng(0)
    n = len(rows.logprobs)
    now, ref = rows.logprobs + rng.normal(0, 0.5, n), rows.logprobs + rng.normal(0, 0.5, n)
    mask = algorithm.mask(rows, np.ones(n), Scores(now_E=now, ref_E=ref))
    coefficients = algorithm.spread(rows, mask, Scores(now_E=now, ref_E=ref))
    logp = torch.as_tensor(now).requires_grad_()
    row = torch.as_tensor(rows.row_E)
    found = pairs(rows)
    assert found
    total = torch.zeros((), dtype=torch.float64)
    for better, worse in found:
        assert rows.rewards[better[0]] > rows.rewards[worse[0]]
        margin = logp - torch.as_tensor(ref)
        h = 0.3 * (
            margin[torch.isin(row, torch.as_tensor(better))].sum()
            - margin[torch.isin(row, torch.as_tensor(worse))].sum()
        )
        total = total - torch.nn.functional.logsigmoid(h) / len(found)
    total.backward()  # type: ignore[no-untyped-call]
    np.testing.assert_allclose(-coefficients * mask, logp.grad, rtol=1e-9, atol=1e-15)


def test_best_of_n_trains_the_best_and_nobody_else() -> None:
    rows = simple([1, 0, 1, 0.2, 0.1], groups=["a", "a", "a", "b", "b"], lengths=[1, 2, 1, 1, 1])
    algorithm = find_algorithm("best_of_n", actor(best_of=0.5))
    rows = replace(rows, advantages=algorithm.advantages(rows))
    np.testing.assert_allclose(algorithm.mask(rows, np.ones(6), Scores()), [1, 0, 0, 1, 0, 0])
