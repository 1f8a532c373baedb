"""Every algorithm learns to say a digit back, with the book left out: rows straight from the model to `learn`."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from learner.tiny import make_rows, tiny_folder
from rollbook.learner.algorithms import NAMES, find_algorithm
from rollbook.learner.backend.single import SingleBackend
from rollbook.learner.config import ActorConfig, CriticConfig, OptimizerConfig
from rollbook.learner.learn import learn
from rollbook.learner.rows import Rows

N_DIGITS, SEPARATOR, N_SAMPLES = 10, 11, 16


@torch.no_grad()
def draw(model: torch.nn.Module, *, seed: int) -> Rows:
    """Sixteen answers to each digit; reward 1 for the digit itself."""
    prompts = torch.tensor([[SEPARATOR + 1, digit, SEPARATOR] for digit in range(N_DIGITS)])
    device = next(model.parameters()).device
    logp_DV = model(input_ids=prompts.to(device)).logits[:, -1].log_softmax(-1).cpu()
    generator = torch.Generator().manual_seed(seed)
    answers = torch.multinomial(logp_DV.exp(), N_SAMPLES, replacement=True, generator=generator)
    digits = np.repeat(np.arange(N_DIGITS), N_SAMPLES)
    rows = make_rows(
        [([SEPARATOR + 1, int(d), SEPARATOR], [int(a)]) for d, a in zip(digits, answers.flatten(), strict=True)],
        groups=[f"g{d}" for d in digits],
        rewards=[float(d == a) for d, a in zip(digits, answers.flatten(), strict=True)],
    )
    return replace(rows, logprobs=logp_DV.gather(1, answers).flatten().double().numpy())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("model"), hidden=32)


def curve(model: str, name: str, *, n_steps: int = 70, lag: int = 0, **settings: object) -> list[float]:
    """Mean reward of each step. lag: the policy that samples is that many steps old."""
    config = ActorConfig(path=model, dtype="float32", entropy_coef=0.02, max_new_tokens=1, dpo_beta=1.0)
    for key, value in settings.items():
        setattr(config, key, value)
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.0)
    algorithm = find_algorithm(name, config)
    actor = SingleBackend(config, optimizer=optimizer)
    critic_config = CriticConfig(path=model, dtype="float32")
    critic = SingleBackend(critic_config, optimizer=optimizer, has_values=True) if algorithm.needs_critic else None
    rewards: list[float] = []
    waiting: list[Rows] = []
    for step in range(n_steps):
        rows = draw(actor.model.model, seed=step)
        rewards.append(float(rows.rewards.mean()))
        waiting.append(replace(rows, versions=np.full(len(rows), step)))
        rows = waiting.pop(0) if len(waiting) > lag else waiting[0]
        rows = replace(rows, advantages=algorithm.advantages(rows))
        learn(
            rows,
            actor=actor,
            algorithm=algorithm,
            config=config,
            version=step,
            seed=step,
            critic=critic,
            critic_config=critic_config,
        )
    return rewards


@pytest.mark.parametrize("name", [name for name in NAMES if name != "sft"])
def test_reward_rises(model: str, name: str) -> None:
    # A pair has no gradient left once its group is solved, so DPO gets no entropy bonus to fight, and more steps.
    rewards = curve(model, name, n_steps=100, entropy_coef=0.0) if name == "dpo" else curve(model, name)
    assert np.mean(rewards[:5]) < 0.2
    assert np.mean(rewards[-5:]) > 0.6


@pytest.mark.parametrize("settings", [{"prox_logp_method": "recompute"}, {"prox_logp_method": "loglinear"}])
def test_stale_data_teaches_too(model: str, settings: dict[str, str]) -> None:
    rewards = curve(model, "grpo", n_steps=80, lag=4, **settings)
    assert np.mean(rewards[-5:]) > 0.5


def test_two_optimiser_steps_per_batch(model: str) -> None:
    rewards = curve(model, "grpo", n_steps=40, ppo_n_minibatches=2)
    assert np.mean(rewards[-5:]) > 0.6
