"""Settings are read strictly and have a default each."""

import msgspec
import pytest

from rollbook.learner.config import TrainConfig


def test_unknown_key_is_refused_by_path() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"lrr.*\$\.actor\.optimizer"):
        msgspec.convert({"actor": {"optimizer": {"lrr": 1.0}}}, TrainConfig)


def test_every_setting_has_a_default_and_round_trips() -> None:
    config = TrainConfig()
    assert msgspec.convert(msgspec.to_builtins(config), TrainConfig) == config
    assert config.run_id == "experiment/trial"


def test_sections_are_not_shared_between_configs() -> None:
    one, two = TrainConfig(), TrainConfig()
    one.actor.optimizer.lr = 1.0
    assert two.actor.optimizer.lr != 1.0


def test_names_known_from_areal_are_accepted() -> None:
    config = msgspec.convert(
        {
            "experiment_name": "gsm8k",
            "trial_name": "one",
            "gconfig": {"n_samples": 4},
            "rollout": {"max_head_offpolicyness": 2},
            "actor": {
                "path": "model",
                "dtype": "bfloat16",
                "mb_spec": {"max_tokens_per_mb": 10240},
                "gradient_checkpointing": True,
                "optimizer": {"type": "adam", "lr": 1e-6, "warmup_steps_proportion": 0.01},
                "eps_clip": 0.4,
                "reward_norm": {"mean_level": "group", "std_level": "group"},
                "adv_norm": {"mean_level": "batch", "std_level": "batch"},
                "recompute_logprob": True,
                "use_decoupled_loss": True,
                "ppo_n_minibatches": 1,
                "prox_logp_method": "loglinear",
                "rejection_sampling": {"level": "token", "action": "mask", "metric": "ratio", "upper": 5.0},
            },
            "saver": {"freq_epochs": 1},
            "recover": {"mode": "disabled", "freq_secs": 3600},
            "stats_logger": {"wandb": {"mode": "disabled"}},
        },
        TrainConfig,
    )
    assert config.rollout.max_head_offpolicyness == 2
    assert config.actor.optimizer.type == "adam"
