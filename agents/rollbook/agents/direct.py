"""The direct way: a client that an agent's own workflow makes, rewards and exports from, with AReaL's names.

`ArealOpenAI(engine=engine)` is an AsyncOpenAI that speaks to this episode's proxy, where every call is recorded as
ever, and that also remembers its chat completions, so that a workflow can reward them and look at them. What it is told
of rewards goes into the book as given, when the workflow ends; discounts are opinions and stay here (the run's are
`credit.gamma` and `credit.scheme`). New agents need none of this: see `workflow.py`.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from openai import AsyncOpenAI
from openai.resources.chat import AsyncChat, AsyncCompletions
from openai.types.chat import ChatCompletion

from rollbook.store.tree import canonical_json, text_of

from .errors import BadReward
from .rewards import read_reward
from .workflow import EpisodeEngine

_log = logging.getLogger("rollbook.agents")

Message = dict[str, Any]


@dataclass(eq=False)
class Interaction:
    """One answered call. reward: its own, or with what `apply_reward_discount` gave it; None: none yet.

    prompt_ids [P], output_ids [T], logprobs [T]: as the engine saw and sampled them.
    """

    interaction_id: str
    messages: list[Message]
    completion: ChatCompletion
    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    version: int
    parent: "Interaction | None" = None
    reward: float | None = None
    keys: list[bytes] = field(default_factory=list, repr=False)  # of messages and reply, for finding children

    @property
    def output_message_list(self) -> list[Message]:
        """The reply, as a message."""
        return [self.completion.choices[0].message.model_dump(exclude_none=True)]

    def to_tensor_dict(self) -> dict[str, Any]:
        """AReaL's tensors, batch of 1. T = prompt + output tokens; masked places have logprob 0 and version -1.

        Raises ValueError without a reward: a missing reward is not 0.
        """
        import torch

        if self.reward is None:
            raise ValueError(f"interaction {self.interaction_id} has no reward; give it one with set_reward")
        n_prompt, n_output = len(self.prompt_ids), len(self.output_ids)
        return {
            "input_ids": torch.tensor([self.prompt_ids + self.output_ids], dtype=torch.int32),
            "loss_mask": torch.tensor([[0] * n_prompt + [1] * n_output], dtype=torch.int32),
            "logprobs": torch.tensor([[0.0] * n_prompt + self.logprobs], dtype=torch.float32),
            "versions": torch.tensor([[-1] * n_prompt + [self.version] * n_output], dtype=torch.int32),
            "attention_mask": torch.ones((1, n_prompt + n_output), dtype=torch.bool),
            "rewards": torch.tensor([self.reward], dtype=torch.float32),
        }


class _Record:
    """A client's interactions in order of arrival."""

    def __init__(self, engine: EpisodeEngine) -> None:
        self.engine = engine
        self.interactions: dict[str, Interaction] = {}
        self.is_discounted = False

    def add(self, messages: list[Message], completion: ChatCompletion) -> None:
        extra = completion.model_extra or {}
        choice = completion.choices[0]
        logprobs = choice.logprobs.content or [] if choice.logprobs is not None else []
        keys = [_key(message) for message in messages]
        new = Interaction(
            interaction_id=completion.id,
            messages=messages,
            completion=completion,
            prompt_ids=extra.get("prompt_token_ids") or [],
            output_ids=(choice.model_extra or {}).get("token_ids") or [],
            logprobs=[each.logprob for each in logprobs],
            version=extra.get("policy_version", -1),
            parent=self.parent_of(keys),
            keys=[*keys, _key(choice.message.model_dump(exclude_none=True))],
        )
        self.interactions[new.interaction_id] = new

    def parent_of(self, keys: list[bytes]) -> Interaction | None:
        """The longest earlier interaction whose messages and reply begin these messages; of equals the latest."""
        best = None
        for each in self.interactions.values():
            n = len(each.keys)
            if n <= len(keys) and keys[:n] == each.keys and (best is None or n >= len(best.keys)):
                best = each
        return best


def _key(message: Message) -> bytes:
    functions = [call.get("function") or {} for call in message.get("tool_calls") or []]
    calls = [[each.get("name"), canonical_json(each.get("arguments")).decode()] for each in functions]
    return canonical_json([message.get("role"), text_of(message), calls, message.get("tool_call_id")])


class _Completions(AsyncCompletions):
    _client: "ArealOpenAI"

    async def create(self, *, messages: Any, extra_body: Any = None, **keywords: Any) -> Any:
        if keywords.get("stream"):  # recorded by the proxy as ever, but not remembered here
            return await super().create(messages=messages, extra_body=extra_body, **keywords)
        extra_body = {**(extra_body or {}), "return_token_ids": True}
        keywords = {**keywords, "logprobs": True, "model": keywords.get("model") or "default"}
        completion = await super().create(messages=messages, extra_body=extra_body, **keywords)
        if isinstance(completion, ChatCompletion):
            self._client.record.add([dict(message) for message in messages], completion)
        return completion


class _Chat(AsyncChat):
    _client: "ArealOpenAI"

    @cached_property
    def completions(self) -> _Completions:
        return _Completions(self._client)


class ArealOpenAI(AsyncOpenAI):
    """See the module's docstring. engine: what `arun_episode` was given.

    The parsers and the template are the server's (`rollout.agent`); `tokenizer` is not needed.
    """

    def __init__(
        self,
        engine: EpisodeEngine,
        tokenizer: Any = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        engine_max_tokens: int | None = None,
        chat_template_type: str = "hf",
        *,
        record: _Record | None = None,
        **keywords: Any,
    ) -> None:
        if not isinstance(engine, EpisodeEngine):
            raise TypeError(
                f"ArealOpenAI needs the engine that arun_episode(engine, data) is given, got {type(engine).__name__}"
            )
        keywords = {"base_url": engine.session.base_url, "api_key": engine.session.api_key, **keywords}
        super().__init__(**keywords)
        self.engine = engine
        self.record = record or _Record(engine)
        given = {"tool_call_parser": tool_call_parser, "reasoning_parser": reasoning_parser}
        ignored = [name for name, value in given.items() if value is not None]
        if ignored:
            _log.info("ArealOpenAI: %s of the run's config hold (rollout.agent)", " and ".join(ignored))
        self._limit = engine_max_tokens

    def copy(self, **keywords: Any) -> "ArealOpenAI":
        """A client with other options and the same record."""
        extra = {**keywords.pop("_extra_kwargs", {}), "engine": self.engine, "record": self.record}
        return super().copy(**keywords, _extra_kwargs=extra)

    with_options = copy

    @cached_property
    def chat(self) -> _Chat:
        return _Chat(self)

    def get_interaction(self, interaction_id: str) -> Interaction | None:
        """One of this client's interactions; None for an unknown id."""
        return self.record.interactions.get(interaction_id)

    def set_reward(self, interaction_id: str, reward: float) -> None:
        """Judge one interaction. Raises KeyError for an unknown id, BadReward for what is no number."""
        interaction = self.record.interactions.get(interaction_id)
        if interaction is None:
            raise KeyError(
                f"{interaction_id!r} is no interaction of this client; it has {len(self.record.interactions)}"
            )
        value = read_reward(reward)
        if not isinstance(value, float):
            raise BadReward(f"the reward of {interaction_id} is {reward!r}; expected a number")
        interaction.reward = value
        self.engine.rewards[interaction_id] = value

    def set_last_reward(self, reward: float) -> None:
        """Judge the latest interaction. Raises RuntimeError where there is none."""
        if not self.record.interactions:
            raise RuntimeError("set_last_reward: this client has made no call yet")
        self.set_reward(next(reversed(self.record.interactions)), reward)

    def apply_reward_discount(self, turn_discount: float = 1.0) -> dict[str, Interaction]:
        """Carry rewards back over the turns: acc = acc * turn_discount + own, from the last call to the first.

        Interactions without a reward count as 0 here. Only once; raises RuntimeError after that. Changes what
        `export_interactions` shows, not what is in the book.
        """
        if self.record.is_discounted:
            raise RuntimeError("apply_reward_discount was called before; rewards are discounted once")
        self.record.is_discounted = True
        self.engine.turn_discount = turn_discount
        carried = 0.0
        for interaction in reversed(self.record.interactions.values()):
            carried = carried * turn_discount + (interaction.reward or 0.0)
            interaction.reward = carried
        return dict(self.record.interactions)

    def export_interactions(self, style: str = "individual") -> dict[str, Interaction]:
        """individual: every interaction. concat: the leaves, where each path is token-exact. Raises ValueError."""
        interactions: Mapping[str, Interaction] = self.record.interactions
        if style == "individual":
            return dict(interactions)
        if style != "concat":
            raise ValueError(f"Invalid export interactions style {style!r}; expected 'individual' or 'concat'")
        for each in interactions.values():
            above = each.parent
            if above is not None:
                path = above.prompt_ids + above.output_ids
                if each.prompt_ids[: len(path)] != path:
                    raise ValueError(
                        f"Cannot export interactions in 'concat' style: the prompt of {each.interaction_id} does not "
                        f"begin with the tokens of {above.interaction_id}; use 'individual'"
                    )
        inner = {each.parent.interaction_id for each in interactions.values() if each.parent is not None}
        return {name: each for name, each in interactions.items() if name not in inner}
