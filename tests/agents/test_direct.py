"""The direct way, with AReaL's own figures; and the same client against the real server."""

import logging

import pytest
from openai.types.chat import ChatCompletion

from agents_scripts import counting
from proxy_serving import serving
from rollbook.agents.config import AgentConfig
from rollbook.agents.data import tasks_of
from rollbook.agents.direct import ArealOpenAI
from rollbook.agents.errors import BadReward
from rollbook.agents.modes import workflow_of
from rollbook.agents.runner import Runner
from rollbook.agents.workflow import EpisodeEngine, RolloutWorkflow, Session

pytestmark = pytest.mark.anyio
TASKS = tasks_of([{"messages": [{"role": "user", "content": "Hello"}], "answer": "turn 3"}])


def user(*texts):
    """Messages that alternate between user and assistant."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def client_with(*calls):
    """A client that has made `calls`: (name, texts so far, reply, prompt tokens, output tokens)."""
    client = ArealOpenAI(EpisodeEngine(Session(session_id="e", api_key="k", base_url="http://127.0.0.1:1/v1")))
    for name, texts, reply, prompt, output in calls:
        body = {
            "id": name, "object": "chat.completion", "created": 0, "model": "m", "prompt_token_ids": prompt,
            "policy_version": 3,
            "choices": [{
                "index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": reply},
                "token_ids": output,
                "logprobs": {"content": [
                    {"token": "", "logprob": -0.5 * (i + 1), "top_logprobs": []} for i in range(len(output))
                ]},
            }],
        }  # fmt: skip
        client.record.add(user(*texts), ChatCompletion.model_validate(body))
    return client


TREE = [
    ("1", ["A"], "B", [1], [2]),
    ("2", ["A", "B", "C"], "D", [1, 2, 3], [4]),
    ("3", ["A"], "E", [1], [5]),
    ("4", ["A", "B", "C", "D", "F"], "G", [1, 2, 3, 4, 6], [7]),
]


def test_parents_are_the_longest_earlier_prefix():
    client = client_with(*TREE)
    parents = {name: each.parent and each.parent.interaction_id for name, each in client.export_interactions().items()}
    assert parents == {"1": None, "2": "1", "3": None, "4": "2"}
    assert set(client.export_interactions("concat")) == {"3", "4"}
    assert set(client.export_interactions("concat")) == {"3", "4"}
    assert client.get_interaction("9") is None


@pytest.mark.parametrize(
    ("rewards", "discount", "expected"),
    [([None, None, 10], 0.9, [8.1, 9, 10]), ([None, 1.5, 2.5], 0.85, [3.08125, 3.625, 2.5])],
)
def test_a_discount_runs_once_over_the_calls_from_last_to_first(rewards, discount, expected):
    client = client_with(*((str(i), [str(i)], "x", [i], [i]) for i in range(3)))
    for i, reward in enumerate(rewards):
        if reward is not None:
            client.set_reward(str(i), reward)
    client.apply_reward_discount(turn_discount=discount)
    assert [each.reward for each in client.export_interactions().values()] == pytest.approx(expected)
    with pytest.raises(RuntimeError, match="was called before"):
        client.apply_reward_discount(turn_discount=discount)
    assert client.engine.rewards == {str(i): r for i, r in enumerate(rewards) if r is not None}  # raw, for the book


def test_what_cannot_be_done_is_said():
    client = client_with()
    with pytest.raises(RuntimeError, match="no call yet"):
        client.set_last_reward(1.0)
    client = client_with(*TREE[:1])
    with pytest.raises(KeyError, match="'9' is no interaction"):
        client.set_reward("9", 1.0)
    with pytest.raises(BadReward, match="is nan"):
        client.set_last_reward(float("nan"))
    with pytest.raises(ValueError, match="Invalid export interactions style 'tree'"):
        client.export_interactions("tree")
    with pytest.raises(ValueError, match="has no reward"):
        client.get_interaction("1").to_tensor_dict()
    with pytest.raises(TypeError, match="needs the engine"):
        ArealOpenAI(engine=None)
    rendered = client_with(TREE[0], ("2", ["A", "B", "C"], "D", [1, 9, 3], [4]))
    with pytest.raises(ValueError, match="Cannot export interactions in 'concat' style"):
        rendered.export_interactions("concat")


def test_tensors_mark_what_was_sampled():
    client = client_with(("1", ["A"], "B", [7, 8], [9, 10, 11]))
    client.set_last_reward(0.5)
    tensors = client.get_interaction("1").to_tensor_dict()
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "input_ids": [[7, 8, 9, 10, 11]],
        "loss_mask": [[0, 0, 1, 1, 1]],
        "logprobs": [[0.0, 0.0, -0.5, -1.0, -1.5]],
        "versions": [[-1, -1, 3, 3, 3]],
        "attention_mask": [[True] * 5],
        "rewards": [0.5],
    }


class Turns(RolloutWorkflow):
    """Three turns; the reward on the last, discounted by .9."""

    def __init__(self):
        self.exported = []

    async def arun_episode(self, engine, data):
        async with ArealOpenAI(engine=engine, tokenizer=None) as client:
            messages = list(data["messages"])
            for _ in range(3):
                reply = await client.with_options(timeout=30).chat.completions.create(model="areal", messages=messages)
                messages += [
                    reply.choices[0].message.model_dump(exclude_none=True),
                    {"role": "user", "content": "And?"},
                ]
            client.set_last_reward(float(reply.choices[0].message.content == data["answer"]))
            client.apply_reward_discount(turn_discount=0.9)
            exported = client.export_interactions(style="individual")
            self.exported.append(exported)
            return exported


async def test_a_rollout_workflow_is_recorded_with_its_rewards_as_given(caplog):
    workflow = Turns()
    async with serving(counting) as served:
        with caplog.at_level(logging.WARNING, "rollbook.agents"):
            (episode,) = await Runner(served.client, workflow, run_id="run").run(TASKS)
        assert (episode.state, episode.reason, episode.reward, episode.n_interactions) == ("done", None, 1.0, 3)
        (exported,) = workflow.exported
        assert [each.reward for each in exported.values()] == pytest.approx([0.81, 0.9, 1.0])
        recorded = served.events("InteractionRecorded")
        assert list(exported) == [e.interaction_id for e in recorded]
        for event, each in zip(recorded, exported.values(), strict=True):
            assert each.output_ids == event.output_ids.tolist()
            assert each.logprobs == pytest.approx(event.logprobs.tolist())
            assert len(each.prompt_ids) == event.fact.prompt_length
        assert [each.parent for each in exported.values()] == [None, *list(exported.values())[:2]]
        (given,) = served.events("RewardGiven")
        assert (given.interaction_id, given.fact.value) == (list(exported)[-1], 1.0)
        assert len(caplog.records) == 1
        assert "credit.gamma=0.9" in caplog.text


@pytest.mark.parametrize(("gamma", "n_said"), [(0.9, 0), (1.0, 1)])
async def test_who_trains_with_the_discount_is_not_told_to_set_it(caplog, gamma, n_said):
    async with serving(counting) as served:
        agent = workflow_of(AgentConfig(), Turns, gamma=gamma)
        with caplog.at_level(logging.WARNING, "rollbook.agents"):
            await Runner(served.client, agent, run_id="run").run(TASKS)
    assert len(caplog.records) == n_said
