"""One process: precision, schedule, adapters, memory for time, and exports."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from learner.tiny import make_rows, random_rows, tiny_folder
from rollbook.learner.algorithms import find_algorithm
from rollbook.learner.backend.loading import load_model
from rollbook.learner.backend.single import SingleBackend, learning_rate
from rollbook.learner.config import ActorConfig, LoraConfig, MicroBatchSpec, OptimizerConfig
from rollbook.learner.errors import BadSetting, PoliciesDisagree
from rollbook.learner.learn import learn
from rollbook.learner.rows import Rows
from rollbook.learner.trie import Trie, build, micro_batches


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("model"))


def backend(model: str, *, lr: float = 1e-2, **settings: Any) -> SingleBackend:
    config = ActorConfig(path=model, **{"dtype": "float32", **settings})
    return SingleBackend(config, optimizer=OptimizerConfig(lr=lr, weight_decay=0.0))


def imitate(trie: Trie, logprobs_E: Tensor, _: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprobs_E.sum() / 10, {}


def gradient(of: SingleBackend, rows: Rows, max_tokens: int = 10_000) -> Tensor:
    of.forward_backward(micro_batches(rows, max_tokens=max_tokens), imitate)
    grads = [m.grad for m in of.masters.values() if m.grad is not None]
    return torch.cat([g.flatten() for g in grads])


def test_micro_batches_and_checkpointing_change_no_gradient(model: str) -> None:
    rows = random_rows(0)
    expected = gradient(backend(model), rows)
    torch.testing.assert_close(gradient(backend(model), rows, max_tokens=15), expected, rtol=1e-4, atol=1e-5)
    saving = backend(model, gradient_checkpointing=True)
    torch.testing.assert_close(gradient(saving, rows), expected, rtol=1e-4, atol=1e-5)


def test_bfloat16_agrees_within_its_precision_and_keeps_small_steps(model: str) -> None:
    rows = random_rows(0)
    half = backend(model, dtype="bfloat16", lr=1e-5)
    expected = gradient(backend(model), rows)
    got = gradient(half, rows)
    assert float((got - expected).norm() / expected.norm()) < 0.03
    before = {name: m.clone() for name, m in half.masters.items()}
    half.step()
    assert all(m.dtype == torch.float32 for m in half.masters.values())
    # 1e-5 is less than half a bf16 step of most weights: only the masters can hold it.
    assert all((m != before[name]).any() for name, m in half.masters.items())
    assert all(p.dtype == torch.bfloat16 for p in half.model.parameters())


def test_a_gradient_that_is_not_finite_changes_nothing(model: str) -> None:
    one = backend(model)
    before = {name: m.clone() for name, m in one.masters.items()}
    one.forward_backward([build(random_rows(0))], lambda t, logp, h: (logp.sum() * float("nan"), {}))
    assert one.step()["is_skipped"] == 1
    assert all(torch.equal(m, before[name]) for name, m in one.masters.items())


@pytest.mark.parametrize("settings", [{}, {"lora": LoraConfig(r=2, dropout=0.5)}], ids=["weights", "dropout"])
def test_save_and_load_go_on_bit_for_bit(settings: dict[str, Any], model: str, tmp_path: Path) -> None:
    rows, one, two = random_rows(0), backend(model, **settings), backend(model, **settings)
    for step in range(4):
        if step == 2:
            one.save(tmp_path)
            two.load(tmp_path)
        gradient(one, rows)
        one.step()
        if step >= 2:
            gradient(two, rows)
            two.step()
    assert one.steps == two.steps
    assert all(torch.equal(m, two.masters[name]) for name, m in one.masters.items())


def test_every_step_drops_out_something_else(model: str) -> None:
    rows, one = random_rows(0), backend(model, lora=LoraConfig(r=2, dropout=0.5), lr=0.0)
    first = gradient(one, rows)
    one.step()
    assert not torch.equal(gradient(one, rows), first)


def test_an_export_is_what_was_trained(model: str, tmp_path: Path) -> None:
    rows, one = random_rows(0), backend(model)
    gradient(one, rows)
    one.step()
    one.export(tmp_path)
    np.testing.assert_allclose(backend(str(tmp_path)).score([build(rows)])[0], one.score([build(rows)])[0], rtol=1e-5)


def test_adapters_alone_are_trained_and_exported_merged(model: str, tmp_path: Path) -> None:
    rows = random_rows(0)
    lora = backend(model, lora=LoraConfig(r=2, alpha=4), lr=0.1)
    assert all(".lora_" in name for name in lora.masters)
    base = {n: p.clone() for n, p in lora.model.named_parameters() if ".lora_" not in n}
    np.testing.assert_allclose(lora.score([build(rows)])[0], backend(model).score([build(rows)])[0], rtol=1e-5)
    for _ in range(3):
        gradient(lora, rows)
        lora.step()
    assert all(torch.equal(p, base[n]) for n, p in lora.model.named_parameters() if n in base)
    trained = lora.score([build(rows)])[0]
    assert np.abs(trained - backend(model).score([build(rows)])[0]).max() > 0.01
    lora.export(tmp_path)
    np.testing.assert_allclose(backend(str(tmp_path)).score([build(rows)])[0], trained, rtol=1e-4, atol=1e-5)
    auto: Any = AutoModelForCausalLM
    assert not any("lora" in name for name, _ in auto.from_pretrained(tmp_path).named_parameters())


def test_learning_rate_follows_its_schedule() -> None:
    linear = OptimizerConfig(lr=1.0, lr_scheduler_type="linear", warmup_steps_proportion=0.2, min_lr_ratio=0.1)
    assert [round(learning_rate(linear, s, 10), 3) for s in (0, 1, 2, 6, 10)] == [0.5, 1.0, 1.0, 0.55, 0.1]
    cosine = OptimizerConfig(lr=1.0, lr_scheduler_type="cosine", warmup_steps_proportion=0.0)
    assert [round(learning_rate(cosine, s, 10), 3) for s in (0, 5, 10)] == [1.0, 0.5, 0.0]
    assert learning_rate(OptimizerConfig(lr=2.0, warmup_steps_proportion=0.0), 5, 10) == 2.0


def test_a_missing_model_is_named() -> None:
    with pytest.raises(ValueError, match=r"'/nowhere/model' has no config\.json"):
        load_model(ActorConfig(path="/nowhere/model"), device=torch.device("cpu"))


def learn_once(model: str, rows: Rows, **settings: Any) -> Any:
    config = ActorConfig(path=model, dtype="float32", **settings)
    algorithm = find_algorithm("grpo", config)
    actor = SingleBackend(config, optimizer=OptimizerConfig())
    rows = replace(rows, advantages=algorithm.advantages(rows))
    reference = SingleBackend(ActorConfig(path=model, dtype="float32"))
    return learn(rows, actor=actor, algorithm=algorithm, config=config, version=0, seed=0, reference=reference)


def test_an_engine_of_other_weights_stops_the_run_before_a_step(model: str) -> None:
    rows = make_rows([([1, 2], [3]), ([1, 2], [4])])
    with pytest.raises(PoliciesDisagree, match=r"differ by 7\.\d+ nats per token on tokens of one version \(0\)"):
        learn_once(model, replace(rows, logprobs=np.array([-11.0, -11.0])))


HELD = [([1, 2], [3, 5, 6]), ([1, 2], [4, 5, 7]), ([1, 3], [8, 9]), ([1, 3], [9])]


def held(behaviour: float) -> Rows:
    """Two answers that a form held, its first token forced; two free ones."""
    rows = make_rows(HELD, groups=["a", "a", "b", "b"], rewards=[1.0, 0.0, 1.0, 0.0])
    logprobs = np.array([0.0, behaviour, behaviour, 0.0, behaviour, behaviour, -3.4, -3.4, -3.4])
    return replace(rows, logprobs=logprobs, is_held=np.array([True, True, False, False]))


@pytest.mark.parametrize("settings", [{}, {"use_decoupled_loss": False}, {"ppo_n_minibatches": 2}])
def test_what_a_form_left_is_no_gap_and_its_logprobs_count_for_nothing(model: str, settings: dict[str, Any]) -> None:
    some, others = (learn_once(model, held(behaviour), **settings).metrics for behaviour in (-0.1, -9.0))
    assert some == pytest.approx(others)
    assert some["gap"] < 1 < abs(-9.0 - -3.4)
    assert some["n_trained_tokens"] == 7  # not the two that the form forced
    free = learn_once(model, replace(held(-9.0), is_held=np.zeros(4, np.bool_)), logprob_gap_stop=99.0, **settings)
    assert free.metrics["gap"] > 2
    assert free.metrics["n_trained_tokens"] == 9


def test_a_forced_token_is_learnt_where_answers_are_imitated(model: str) -> None:
    config = ActorConfig(path=model, dtype="float32")
    actor = SingleBackend(config, optimizer=OptimizerConfig())
    algorithm = find_algorithm("sft", config)
    rows = replace(held(-1.0), advantages=np.ones(4))
    learned = learn(rows, actor=actor, algorithm=algorithm, config=config, version=0, seed=0)
    assert learned.metrics["n_trained_tokens"] == 9


def test_against_itself_the_reference_is_no_distance_away(model: str) -> None:
    learned = learn_once(model, random_rows(1), kl_loss_coef=0.1, kl_ctl=0.1)
    assert learned.metrics["kl_ref"] == pytest.approx(0, abs=1e-6)


def test_the_loss_does_not_depend_on_micro_batches(model: str) -> None:
    rows = random_rows(1)
    whole = learn_once(model, rows).metrics
    cut = learn_once(model, rows, mb_spec=MicroBatchSpec(max_tokens_per_mb=12)).metrics
    for name in ("loss", "grad_norm", "entropy", "gap", "clipped"):
        assert cut[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6)


def test_tokens_too_old_and_answers_cut_short_are_left_out(model: str) -> None:
    rows = make_rows([([1, 2], [3, 4]), ([1, 2], [4, 5])])
    rows = replace(rows, versions=np.array([-3, 0, 0, 0]), is_cut=np.array([False, True]))
    assert learn_once(model, rows, max_staleness=2).metrics["n_trained_tokens"] == 3
    assert learn_once(model, rows, mask_no_eos=True).metrics["n_trained_tokens"] == 2


def test_tokens_of_another_model_are_refused_before_anything_is_computed(model: str) -> None:
    with pytest.raises(BadSetting, match=r"the book has token id 40, but the model's vocabulary has 32"):
        learn_once(model, make_rows([([1, 2], [3, 40])]))
