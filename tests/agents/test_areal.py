"""AReaL's scripts, unchanged, to a trained step."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rollbook.app.config import ConfigError
from rollbook.store import open_book
from sdk_checks import EXAMPLES, run_areal

TRAIN = """
import sys

from areal import PPOTrainer
from areal.api.cli_args import load_expr_config, GRPOConfig
from areal.dataset import get_custom_dataset
from areal.utils.hf_utils import load_hf_tokenizer

def main(args):
    config, _ = load_expr_config(args, GRPOConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)

    train_dataset = get_custom_dataset(
        split="train",
        dataset_config=config.train_dataset,
        tokenizer=tokenizer,
    )

    with PPOTrainer(
        config,
        train_dataset=train_dataset
    ) as trainer:
        trainer.train(
            workflow="my_agent.MathAgent"
        )

if __name__ == "__main__":
    main(sys.argv[1:])
"""

# The second script's CAMEL agent needs an environment of its own (sdks/check_camel.py); here the client is used as is.
WORKFLOW = """
import sys

from areal import PPOTrainer
from areal.api.cli_args import GenerationHyperparameters, GRPOConfig, load_expr_config
from areal.api.reward_api import AsyncRewardWrapper
from areal.api.workflow_api import RolloutWorkflow
from areal.dataset import get_custom_dataset
from areal.experimental.openai import ArealOpenAI
from areal.utils.hf_utils import load_hf_tokenizer
from transformers import PreTrainedTokenizerFast

def math_reward_fn(result, answer):
    return 1.0 if result.strip() == answer.strip() else 0.0

class MathAgent:
    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer = tokenizer
        self.async_reward_fn = AsyncRewardWrapper(math_reward_fn)

    async def run_agent(self, data, client: ArealOpenAI):
        response = await client.chat.completions.create(model="areal", messages=data["messages"])
        content = response.choices[0].message.content
        reward = await self.async_reward_fn(result=content, answer=data["answer"])
        client.set_last_reward(reward)
        return reward

class RLVRWorkflow(RolloutWorkflow):
    def __init__(self, gconfig: GenerationHyperparameters, tokenizer: PreTrainedTokenizerFast):
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self.agent = MathAgent(tokenizer=self.tokenizer)

    async def arun_episode(self, engine, data):
        client = ArealOpenAI(engine=engine, tokenizer=self.tokenizer)
        reward = await self.agent.run_agent(data=data, client=client)
        client.apply_reward_discount(turn_discount=0.9)
        return client.export_interactions(style="individual")

def main(args):
    config, _ = load_expr_config(args, GRPOConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    train_dataset = get_custom_dataset(split="train", dataset_config=config.train_dataset, tokenizer=tokenizer)
    workflow = RLVRWorkflow(gconfig=config.gconfig, tokenizer=tokenizer)
    with PPOTrainer(config, train_dataset=train_dataset) as trainer:
        trainer.train(workflow=workflow)

if __name__ == "__main__":
    main(sys.argv[1:])
"""

CONFIG = """
experiment_name: areal
trial_name: first
seed: 1
total_train_epochs: 10
total_train_steps: 1
tokenizer_path: ${actor.path}
workflow: my_agent.MathAgent
cluster: {n_nodes: 1, n_gpus_per_node: 1, fileroot: FOLDER, name_resolve: {type: nfs, nfs_record_root: /nowhere}}
scheduler: {type: null}
gconfig: {n_samples: 4, min_new_tokens: 0, max_new_tokens: 64, greedy: false, temperature: 1.0}
rollout:
  backend: "scripted:agents_areal:script"
  max_concurrent_rollouts: 4
  queue_size: null
  consumer_batch_size: ${train_dataset.batch_size}
  max_head_offpolicyness: 1
  enable_rollout_tracing: false
  agent: {mode: inline, turn_discount: 1.0, export_style: individual, tool_call_parser: qwen3}
actor:
  backend: "fsdp:d1"
  path: tiny
  dtype: float32
  logprob_gap_warn: 1.0e9
  logprob_gap_stop: 1.0e9
  optimizer: {type: adam, lr: 1.0e-3, warmup_steps_proportion: 0.0}
  scheduling_spec: [{task_type: worker, gpu: 1}]
train_dataset: {batch_size: 2, path: "agents_areal:rows", type: rl, num_workers: 0}
sglang: {mem_fraction_static: 0.8}
perf_tracer: {enabled: false}
"""


def run(folder: Path, script: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(EXAMPLES / "openai_agents_math.py", folder / "my_agent.py")
    return run_areal(folder, script, CONFIG, *overrides)


@pytest.mark.slow
@pytest.mark.parametrize("script", [TRAIN, WORKFLOW], ids=["agent", "workflow"])
def test_an_areal_script_runs_unchanged_to_a_trained_step(tmp_path, script):
    done = run(tmp_path, script, "scheduler.type=local", "workflow=my_agent.MathAgent")
    assert done.returncode == 0, done.stdout + done.stderr
    with open_book(tmp_path / "areal" / "first" / "book") as book:
        (trained,) = book.sql("select count(*) n from batches where trained_at is not null")["n"].to_pylist()
        assert trained == 1
        episodes = book.sql("select state, reward, n_interactions from episodes where state <> 'open'").to_pylist()
        assert {e["reward"] for e in episodes if e["state"] == "done"} == {0.0, 1.0}
        calls = {e["n_interactions"] for e in episodes if e["state"] == "done"}
        assert calls == ({3} if script == TRAIN else {1})
    assert done.stderr.count("have no meaning here") == 1
    for name in ("cluster.name_resolve", "perf_tracer", "sglang", "actor.scheduling_spec", "train_dataset.num_workers"):
        assert name in done.stderr
    assert "actor.backend" not in done.stderr, "one process is what fsdp:d1 says"
    assert ("credit.gamma=0.9" in done.stderr) == (script == WORKFLOW)


def test_a_misspelt_key_is_told_and_no_areal_is_importable_outside(tmp_path, monkeypatch):
    from rollbook.app.areal_compat import load_expr_config
    from rollbook.app.config import GRPOConfig

    (tmp_path / "c.yaml").write_text("actor: {optimizer: {weight_decai: 0.1}}")
    with pytest.raises(ConfigError, match="did you mean 'weight_decay'"):
        load_expr_config(["--config", str(tmp_path / "c.yaml")], GRPOConfig)
    outside = subprocess.run([sys.executable, "-c", "import rollbook.app.areal_compat, areal"], capture_output=True)
    assert b"No module named 'areal'" in outside.stderr


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("from areal import SFTTrainer", "areal.SFTTrainer is not among the names of AReaL"),
        ("from areal.workflow.rlvr import X", "areal.workflow is not among the modules of AReaL"),
    ],
)
def test_a_name_of_areal_that_is_not_here_is_told_in_a_sentence(tmp_path, script, says):
    done = run(tmp_path, script)
    assert done.returncode == 1
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_a_missing_script_is_told(tmp_path):
    from rollbook.app.areal_compat import run

    with pytest.raises(FileNotFoundError, match=r"there is no script .*train.py"):
        run([str(tmp_path / "train.py")])


def test_every_key_of_areals_agentic_configs_is_accepted_and_what_has_no_meaning_is_named_once(caplog):
    from rollbook.app.areal_compat import load_expr_config
    from rollbook.app.config import GRPOConfig

    path = Path(__file__).with_name("areal_keys.yaml")
    config, _ = load_expr_config(["--config", str(path), "scheduler.type=local"], GRPOConfig)
    first, *notes = [record.getMessage() for record in caplog.records]
    assert first.endswith("are left out: actor.reward_norm.group_size, stats_logger.swanlab")
    assert [note.split("' is not here")[0].rsplit("'", 1)[1] for note in notes] == ["sglang:d4", "xccl"]
    assert (config.actor.backend, config.rollout.agent.tool_call_parser) == ("fsdp:d4", "hermes")
    assert (config.actor.optimizer.lr, config.gconfig.stop, config.credit.gamma) == (1e-5, (), 0.9)


@pytest.mark.parametrize(
    ("theirs", "ours", "is_told"),
    [
        ("fsdp:d1", "single", False),
        ("fsdp:d8", "fsdp:d8", False),
        ("fsdp:d8p1t1", "fsdp:d8", False),
        ("fsdp:d4t2", "fsdp:d8", True),
        ("fsdp:d2c2", "fsdp:d4", True),
        ("megatron:d2p2t4", "fsdp:d16", True),
        ("megatron:d4e4", "fsdp:d4", True),
    ],
)
def test_a_trainer_of_areal_becomes_ours_on_as_many_gpus(tmp_path, caplog, theirs, ours, is_told):
    from rollbook.app.areal_compat import load_expr_config
    from rollbook.app.config import GRPOConfig

    (tmp_path / "c.yaml").write_text(f"actor: {{backend: '{theirs}'}}\nref: {{backend: '{theirs}'}}\n")
    config, _ = load_expr_config(["--config", str(tmp_path / "c.yaml")], GRPOConfig)
    assert (config.actor.backend, config.ref.backend) == (ours, ours)
    told = [f"actor.backend {theirs!r} is not here" in caplog.text, f"{ours!r} trains" in caplog.text]
    assert told == [is_told, is_told]


@pytest.mark.parametrize(
    ("setting", "theirs", "ours"),
    [
        ("tool_call_parser", "qwen25", "hermes"),
        ("tool_call_parser", "json", "json"),
        ("tool_call_parser", "kimi_k2", None),
        ("reasoning_parser", "deepseek-r1", "think"),
        ("reasoning_parser", "none", "none"),
        ("reasoning_parser", "kimi", None),
    ],
)
def test_a_parsers_name_of_areal_becomes_ours(tmp_path, caplog, setting, theirs, ours):
    from rollbook.app.areal_compat import load_expr_config
    from rollbook.app.config import GRPOConfig

    (tmp_path / "c.yaml").write_text(f"rollout: {{agent: {{{setting}: {theirs}}}}}\n")
    config, _ = load_expr_config(["--config", str(tmp_path / "c.yaml")], GRPOConfig)
    assert getattr(config.rollout.agent, setting) == ours
    assert (f"{setting} {theirs!r} is not here" in caplog.text) == (ours is None)
