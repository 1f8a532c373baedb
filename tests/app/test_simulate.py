"""The simulation says what arithmetic says where arithmetic can say it."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "simulate.py"


@pytest.fixture(scope="module")
def simulate() -> Any:
    spec = importlib.util.spec_from_file_location("rollbook_simulate", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rollbook_simulate"] = module
    spec.loader.exec_module(module)
    return module


def costs(simulate: Any, **changes: Any) -> Any:
    even = {
        "proxy_s": 1e-6,
        "commit_s": 0.0,
        "token_s": 0.01,
        "token_batch_s": 0.0,
        "train_token_s": 0.0,
        "train_fixed_s": 1.0,
        "update_s": 0.0,
        "episodes": [[(100, 0.0)]],
    }
    return simulate.Measured(**{**even, **changes})


def test_a_synchronous_step_takes_as_long_as_sampling_training_and_updating(simulate: Any) -> None:
    setting = simulate.Setting(engines=2, eta=0, batch_groups=4, n_samples=4, steps=5, update="barrier")
    outcome = simulate.simulate(costs(simulate, update_s=0.5), setting)
    assert outcome.seconds == pytest.approx(5 * (100 * 0.01 + 1.0 + 0.5), rel=1e-3)
    assert outcome.staleness == 0
    assert outcome.tokens == 5 * 16 * 100


def test_ahead_of_the_learner_sampling_and_training_overlap_and_tokens_are_stale(simulate: Any) -> None:
    one = costs(simulate, train_fixed_s=1.0)
    setting = simulate.Setting(engines=2, eta=1, batch_groups=4, n_samples=4, steps=20, update="barrier")
    outcome = simulate.simulate(one, setting)
    assert outcome.seconds == pytest.approx(20 * 1.0 + 1.0, rel=0.1)
    assert 0.5 < outcome.staleness <= 1.01


def test_a_proxy_that_is_full_is_the_limit_and_two_carry_twice_as_much(simulate: Any) -> None:
    busy = costs(simulate, proxy_s=0.1, token_s=1e-4, train_fixed_s=0.0)
    rates = []
    for proxies in (1, 2):
        setting = simulate.Setting(proxies=proxies, engines=4, eta=4, batch_groups=4, n_samples=4, steps=10)
        outcome = simulate.simulate(busy, setting)
        assert outcome.proxies_busy == pytest.approx(1.0, abs=0.1)
        rates.append(outcome.per_second)
    assert rates[0] == pytest.approx(10.0, rel=0.05)
    assert rates[1] / rates[0] == pytest.approx(2.0, rel=0.1)


def test_an_engine_shares_its_steps_among_its_requests(simulate: Any) -> None:
    shared = costs(simulate, token_s=0.0, token_batch_s=0.01, train_fixed_s=0.0)
    setting = simulate.Setting(engines=1, eta=0, batch_groups=2, n_samples=4, steps=3)
    outcome = simulate.simulate(shared, setting)
    assert outcome.seconds == pytest.approx(3 * 100 * 8 * 0.01, rel=1e-3)
    assert outcome.engines_busy == pytest.approx(1.0, abs=0.01)


def test_the_same_seed_gives_the_same_run(simulate: Any) -> None:
    setting = simulate.Setting(engines=4, eta=2, steps=3, batch_groups=8)
    assert simulate.simulate(simulate.Measured(), setting, 3) == simulate.simulate(simulate.Measured(), setting, 3)
