"""Whatever a model does between its tokens, the learner's logprobs are those of transformers' own code."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from learner.tiny import make_rows, random_rows
from rollbook.learner.backend import attention
from rollbook.learner.backend.single import SingleBackend
from rollbook.learner.config import ActorConfig, LoraConfig, OptimizerConfig
from rollbook.learner.errors import BadSetting
from rollbook.learner.learn import tries_of
from rollbook.learner.rows import Floats, Rows

SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
OLD_SIZES = {"vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
TOKENS = {"bos_token_id": 0, "eos_token_id": 0}
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "llama": (SIZES, attention.NAME),
    "gpt2": (OLD_SIZES | TOKENS, attention.NAME),
    # dropout as a number of a module, of the config, and of attention; jitter before a router
    "opt": (SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.5}, attention.NAME),
    "gpt_bigcode": (OLD_SIZES | TOKENS, attention.NAME),
    "seed_oss": (SIZES | {"residual_dropout": 0.5, "attention_dropout": 0.5}, attention.NAME),
    "mixtral": (SIZES | {"num_local_experts": 4, "router_jitter_noise": 0.5}, attention.NAME),
    # heads of two sizes
    "gemma4_text": (SIZES | {"global_head_dim": 16}, attention.NAME),
    # scores that are capped, sinks beside the keys
    "gemma2": (SIZES | {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 8}, "eager"),
    "gpt_oss": (SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}, "eager"),
    # biases by position that know of no given positions
    "falcon": ({k: v for k, v in SIZES.items() if k != "head_dim"} | {"alibi": True}, "eager"),
    # states and convolutions, which go on from the token before
    "mamba": (SIZES | {"state_size": 8}, "eager"),
    "qwen3_5_text": (
        SIZES
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
        | {"layer_types": ["linear_attention", "full_attention"]},
        "sdpa",
    ),
}


def folder(kind: str, sizes: dict[str, Any], to: Path) -> str:
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(CONFIG_MAPPING[kind](**sizes)).float()
    for parameter in model.parameters():  # what a model does shows where its weights are not nearly nothing
        parameter.data += 0.15 * torch.randn_like(parameter)
    model.save_pretrained(to)
    return str(to)


@torch.no_grad()
def row_by_row(path: str, rows: Rows) -> Floats:
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for r in range(len(rows)):
        ids = torch.as_tensor(rows.path(r), dtype=torch.int64)
        n = int(rows.n_prompt[r])
        logp = model(input_ids=ids[None], use_cache=False).logits[0, n - 1 : -1].log_softmax(-1)
        found.append(logp.gather(-1, ids[n:, None])[:, 0].numpy())
    return np.concatenate(found)


def whole(_: Any, logprobs_E: Any, __: Any) -> Any:
    return logprobs_E.sum(), {}


def backend(path: str, **settings: Any) -> SingleBackend:
    config = ActorConfig(path=path, dtype="float32", device="cpu", **settings)
    return SingleBackend(config, optimizer=OptimizerConfig())


@pytest.mark.parametrize("kind", FAMILIES)
def test_logprobs_are_the_models_own(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes, implementation = FAMILIES[kind]
    path = folder(kind, sizes, tmp_path / "model")
    rows = random_rows(3, n_groups=2)
    expected = row_by_row(path, rows)
    one = backend(path)
    tries = tries_of(rows, one.config.mb_spec, one)
    is_told = any("is computed path by path with its own" in record.getMessage() for record in caplog.records)
    assert is_told == (implementation != attention.NAME)
    assert one.model.model.config._attn_implementation == implementation  # type: ignore[union-attr]
    for found in (one.score(tries)[0], one.forward_backward(tries, whole).values_E):
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_window_is_refused_in_tries_and_right_without(tmp_path: Path) -> None:
    path = folder("mistral", SIZES | {"sliding_window": 16}, tmp_path / "model")
    rows = make_rows([(list(range(20)), [21, 22]), (list(range(20)), [23])])
    by_tries = backend(path)
    with pytest.raises(BadSetting, match=r"sliding window of 16.* set actor\.attn_impl=plain"):
        by_tries.score(tries_of(rows, by_tries.config.mb_spec, by_tries))
    plain = backend(path, attn_impl="plain")
    found = plain.score(tries_of(rows, plain.config.mb_spec, plain))[0]
    np.testing.assert_allclose(found, row_by_row(path, rows), atol=1e-4)


def test_a_model_that_is_computed_in_no_way_is_refused_by_name(tmp_path: Path) -> None:
    sizes = FAMILIES["gemma2"][0]
    path = folder("gemma2", sizes, tmp_path / "model")
    with pytest.raises(BadSetting, match=r"gemma2.*nothing that computes its attention with attn_impl=sdpa"):
        backend(path, attn_impl="sdpa")


LORA = {
    "gpt2": OLD_SIZES | TOKENS,  # matrices the other way round, some of them square
    "mixtral": SIZES | {"num_local_experts": 4},  # a router, and experts in one tensor
}


@pytest.mark.parametrize("kind", LORA)
def test_adapters_of_all_forms_are_published_as_they_were_trained(kind: str, tmp_path: Path) -> None:
    rows = random_rows(3, n_groups=2)
    path = folder(kind, LORA[kind], tmp_path / "model")
    config = ActorConfig(path=path, dtype="float32", device="cpu", lora=LoraConfig(r=4))
    one = SingleBackend(config, optimizer=OptimizerConfig(lr=0.05))
    tries = tries_of(rows, config.mb_spec, one)
    for _ in range(3):
        one.forward_backward(tries, whole)
        one.step()
    trained = one.score(tries)[0]
    assert np.abs(trained - row_by_row(path, rows)).max() > 0.1
    (tmp_path / "out").mkdir()
    one.export(tmp_path / "out")
    np.testing.assert_allclose(row_by_row(str(tmp_path / "out"), rows), trained, atol=1e-3)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_adapters_that_would_not_be_trained_or_not_published_are_refused(target: str, tmp_path: Path) -> None:
    path = folder("llama", SIZES, tmp_path / "model")
    with pytest.raises(BadSetting, match=rf"actor\.lora cannot adapt .*{target}"):
        backend(path, lora=LoraConfig(target_modules=["q_proj", target]))
