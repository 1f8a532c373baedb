"""A config says in one sentence what is wrong with it."""

from pathlib import Path

import pytest

from rollbook.app.config import ConfigError, GRPOConfig, load_config, load_expr_config
from rollbook.app.serving import _serve_config


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_overrides_win_and_numbers_are_numbers(tmp_path: Path) -> None:
    path = write(tmp_path, "seed: 3\nactor:\n  optimizer:\n    lr: 1e-5\n")
    config = load_config(path, ["actor.optimizer.lr=3e-4", "gconfig.n_samples=5", "workflow=my_agent.MathAgent"])
    assert isinstance(config, GRPOConfig)
    assert (config.seed, config.actor.optimizer.lr, config.gconfig.n_samples) == (3, 3e-4, 5)
    assert config.workflow == "my_agent.MathAgent"


def test_references_take_values_of_the_same_file(tmp_path: Path) -> None:
    path = write(tmp_path, "seed: 7\ntrial_name: seed${seed}\nactor:\n  path: tiny\ntokenizer_path: ${actor.path}\n")
    config = load_config(path)
    assert (config.trial_name, config.tokenizer_path) == ("seed7", "tiny")


def test_a_circle_of_references_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="circle"):
        load_config(write(tmp_path, "workflow: ${eval_workflow}\neval_workflow: ${workflow}\n"))


@pytest.mark.parametrize(
    ("text", "overrides", "says"),
    [
        ("actr: {}\n", [], "unknown config key 'actr'; did you mean 'actor'?"),
        ("", ["rollout.max_head_offpolicyness=-1"], "rollout.max_head_offpolicyness: expected `int` >= 0"),
        ("", ["rollout.agent.session_timeout_seconds=0"], "session_timeout_seconds: expected `float` > 0"),
        ("", ["rollout.agent.max_attempts=0"], "rollout.agent.max_attempts: expected `int` >= 1"),
        ("", ["rollout.agent.subproc_max_workers=0"], "subproc_max_workers: expected `int` >= 1"),
        ("actor:\n  optimizer:\n    lrr: 1\n", [], "unknown config key 'actor.optimizer.lrr'; did you mean 'lr'?"),
        ("{}\n", ["gconfig.n_sample=4"], "unknown config key 'gconfig.n_sample'; did you mean 'n_samples'?"),
        ("seed: many\n", [], "seed: expected `int`, got `str`"),
        ("- 1\n", [], "must hold sections"),
        ("a: [\n", [], "is not YAML"),
        ("{}\n", ["seed"], "expected an override like"),
        ("{}\n", ["scheduler.memory_gb=-1"], "scheduler.memory_gb must be above 0, or null, got -1"),
        ("workflow: ${nowhere.at.all}\n", [], "names a key that is not in the file"),
    ],
)
def test_a_wrong_config_names_the_key(tmp_path: Path, text: str, overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), overrides)
    assert says in str(caught.value)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config"):
        load_config(tmp_path / "none.yaml")


def test_the_command_line_of_areal_scripts(tmp_path: Path) -> None:
    path = write(tmp_path, "seed: 1\n")
    config, where = load_expr_config(["--config", str(path), "seed=2"], GRPOConfig)
    assert (config.seed, where) == (2, str(path))
    with pytest.raises(ConfigError, match="--config"):
        load_expr_config(["seed=2"], GRPOConfig)


def test_a_turn_discount_is_the_discount_of_the_run_unless_that_is_set(tmp_path: Path) -> None:
    path = write(tmp_path, "rollout: {agent: {turn_discount: 0.9}}\n")
    assert load_config(path).credit.gamma == 0.9
    assert load_config(path, ["credit.gamma=0.5"]).credit.gamma == 0.5


def test_a_server_is_told_how_replies_are_read() -> None:
    config, capture = _serve_config(["model=m", "capture.tool_parser=json", "capture.history=exact"], run_id="r")
    assert (config.run_id, capture.model, capture.tool_parser, capture.history) == ("r", "m", "json", "exact")
    with pytest.raises(ConfigError, match=r"unknown field `parser`.*known: capture.model, capture.history"):
        _serve_config(["capture.parser=json"])
    with pytest.raises(ConfigError, match=r"unknown field `x`.*known: host, port"):
        _serve_config(["x=1"])
