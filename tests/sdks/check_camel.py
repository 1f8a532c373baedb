"""`make test-sdks`: CAMEL-AI both ways, in an environment of its own: by its base URL, and AReaL's direct way."""

from pathlib import Path

from rollbook.store import open_book
from sdk_checks import run_areal, run_example

TRAIN = '''
import sys

from areal import PPOTrainer
from areal.api.cli_args import GenerationHyperparameters, GRPOConfig, load_expr_config
from areal.api.reward_api import AsyncRewardWrapper
from areal.api.workflow_api import RolloutWorkflow
from areal.dataset import get_custom_dataset
from areal.experimental.camel.openai_model import AReaLOpenAICompatibleModel
from areal.experimental.openai import ArealOpenAI
from areal.utils.hf_utils import load_hf_tokenizer
from camel.agents import ChatAgent
from transformers import PreTrainedTokenizerFast


def math_reward_fn(result, answer):
    """简单的奖励函数：正确返回 1.0，否则返回 0.0。"""
    return 1.0 if result.strip() == answer.strip() else 0.0


class CamelMathAgent:
    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer = tokenizer
        # 为异步执行包装奖励函数
        self.async_reward_fn = AsyncRewardWrapper(math_reward_fn)

    async def run_agent(self, data, client: ArealOpenAI):
        """在数据集样本上运行智能体。"""
        # 使用 AReaL OpenAI 兼容模型创建智能体
        agent = ChatAgent(
            system_message="You are a helpful math assistant.",
            model=AReaLOpenAICompatibleModel(openai_client=client, tokenizer=self.tokenizer, model_type="areal"),
        )

        # 运行智能体
        response = await agent.astep(data["messages"][-1]["content"])
        content = response.msg.content

        # 评估奖励并在客户端上设置
        reward = await self.async_reward_fn(result=content, answer=data["answer"])
        client.set_last_reward(reward)

        return reward


class CamelRLVRWorkflow(RolloutWorkflow):
    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: PreTrainedTokenizerFast,
    ):
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self.agent = CamelMathAgent(tokenizer=self.tokenizer)

    async def arun_episode(self, engine, data):
        """运行一个训练 episode。"""
        # 每个轨迹创建一个客户端
        client = ArealOpenAI(engine=engine, tokenizer=self.tokenizer)

        # 运行智能体
        reward = await self.agent.run_agent(data=data, client=client)

        # 对多轮对话应用奖励折扣
        client.apply_reward_discount(turn_discount=0.9)
        # 导出带有 token 级别数据的交互
        return client.export_interactions(style="individual")


def main(args):
    config, _ = load_expr_config(args, GRPOConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    train_dataset = get_custom_dataset(split="train", dataset_config=config.train_dataset, tokenizer=tokenizer)
    workflow = CamelRLVRWorkflow(
        gconfig=config.gconfig,
        tokenizer=tokenizer,
    )
    with PPOTrainer(config, train_dataset=train_dataset) as trainer:
        trainer.train(workflow=workflow)


if __name__ == "__main__":
    main(sys.argv[1:])
'''

CONFIG = """
experiment_name: camel
trial_name: first
total_train_epochs: 10
total_train_steps: 1
tokenizer_path: tiny
cluster: {fileroot: FOLDER}
gconfig: {n_samples: 4, max_new_tokens: 64}
rollout: {backend: "scripted:agents_areal:script", max_head_offpolicyness: 1}
actor: {path: tiny, dtype: float32}
train_dataset: {batch_size: 2, path: "agents_areal:rows"}
"""


def test_camel_by_its_base_url_is_recorded_call_by_call_and_rewarded() -> None:
    result = run_example("camel_math.MathAgent", "calculator")
    assert result["episodes"] == [["done", None, 1.0, 3]] * 2
    assert result["is_whole"]
    assert sorted(map(str, result["edges"])) == ["None"] * 2 + ["extends"] * 4


def test_camel_the_direct_way_runs_unchanged_to_a_trained_step(tmp_path: Path) -> None:
    done = run_areal(tmp_path, TRAIN, CONFIG)
    assert done.returncode == 0, done.stdout + done.stderr
    with open_book(tmp_path / "camel" / "first" / "book") as book:
        assert book.sql("select count(*) n from batches where trained_at is not null")["n"].to_pylist() == [1]
        episodes = book.sql("select reward, n_interactions n from episodes where state = 'done'").to_pylist()
    assert {e["reward"] for e in episodes} == {0.0, 1.0}
    assert {e["n"] for e in episodes} == {1}
