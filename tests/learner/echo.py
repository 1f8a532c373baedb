"""Rollouts without a proxy: a tiny model says a digit back, and its episodes go straight into the book.

Everything is a function of seed, group and weights, so a run that was killed must end as one that was not.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollbook.learner.config import TrainConfig
from rollbook.store import EpisodeClosed, EpisodeOpened, Event, InteractionRecorded, RewardGiven
from rollbook.store.book import open_book

SEPARATOR = 11
N_DIGITS = 10


def echo_tasks(n: int) -> list[dict[str, Any]]:
    return [{"digit": i % N_DIGITS} for i in range(n)]


def right_digit(task: Mapping[str, Any], output: int) -> float | None:
    return float(output == task["digit"])


def echo_config(root: Path, model: str, **overrides: Any) -> TrainConfig:
    config = TrainConfig(experiment_name="echo", trial_name="t")
    config.cluster.fileroot = str(root)
    config.actor.path = model
    config.actor.dtype = "float32"
    config.actor.optimizer.lr = 1e-2
    config.actor.optimizer.weight_decay = 0.0
    config.actor.entropy_coef = 0.02
    config.gconfig.n_samples = 16
    config.train_dataset.batch_size = 10
    for path, value in overrides.items():
        *sections, name = path.split("__")
        target: Any = config
        for section in sections:
            target = getattr(target, section)
        setattr(target, name, value)
    return config


class EchoRollouts:
    """See `rollouts.Rollouts`. Draws as many groups as staleness allows when the learner looks for what went wrong."""

    def __init__(self, reward: Callable[[Mapping[str, Any], int], float | None] = right_digit) -> None:
        self.reward = reward
        self.published: list[int] = []
        self.model: Any = None
        self.n_drawn = 0
        self.is_closed = False

    def resolve(self, workflow: Any, workflow_kwargs: Mapping[str, Any]) -> None:
        """There are no agents here."""

    def start(
        self,
        config: Any,
        *,
        book_path: str,
        run_id: str,
        tasks: Sequence[Mapping[str, Any]],
        workflow: Any,
        workflow_kwargs: Mapping[str, Any],
        version: int,
        weights: str,
    ) -> None:
        self.config, self.run_id, self.tasks = config, run_id, tasks
        self.book = open_book(book_path, writer="engine")
        self.book.catch_up()
        states = self.book.sql(
            "select group_id, episode_id, state from episodes where run_id = $run and not is_eval", {"run": run_id}
        ).to_pylist()
        for row in states:
            if row["state"] == "open":
                self._append(EpisodeClosed(state="lost", reason="the process was killed"), row["episode_id"])
        done: dict[str, int] = {}
        for row in states:
            done[row["group_id"]] = done.get(row["group_id"], 0) + (row["state"] == "done")
        names = [f"{run_id}/epoch-{e}/{i}" for e in range(config.total_train_epochs) for i in range(len(tasks))]
        self.ended = {name: done.get(name, 0) for name in names}
        self.accepted = sum(n >= config.gconfig.n_samples for n in self.ended.values())
        self.waiting = [name for name in names if self.ended[name] < config.gconfig.n_samples]
        self.publish(weights, version)

    def publish(self, path: str, version: int) -> None:
        if self.model is None:
            auto: Any = AutoModelForCausalLM
            self.model = auto.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
        else:
            self.model.load_state_dict(load_file(Path(path) / "model.safetensors"), strict=False)
        self.version = version
        self.published.append(version)

    def reject(self, n_groups: int) -> None:
        self.accepted -= n_groups

    def check(self) -> None:
        room = (self.config.rollout.max_head_offpolicyness + self.version + 1) * self.config.groups_per_step
        events: list[Event] = []
        while self.waiting and self.accepted < room:
            events += self.draw(self.waiting.pop(0))
            self.accepted += 1
        if events:
            self.book.log.append_blocking(*events)

    def evaluate(
        self, tasks: Sequence[Mapping[str, Any]], workflow: Any, workflow_kwargs: Mapping[str, Any], *, epoch: int
    ) -> None:
        for i, task in enumerate(tasks):
            group = f"{self.run_id}/eval-{epoch}/{i}"
            self.book.log.append_blocking(*self._group(group, i, task, self.config.evaluator.n_samples, is_eval=True))

    def close(self) -> None:
        if not self.is_closed and hasattr(self, "book"):
            self.book.close()
        self.is_closed = True

    def draw(self, group: str) -> list[Event]:
        index = int(group.rsplit("/", 1)[1])
        self.n_drawn += 1
        return self._group(group, index, self.tasks[index], self.config.gconfig.n_samples, first=self.ended[group])

    @torch.no_grad()
    def _group(
        self, group: str, index: int, task: Mapping[str, Any], n: int, *, is_eval: bool = False, first: int = 0
    ) -> list[Event]:
        prompt = [SEPARATOR + 1, int(task["digit"]), SEPARATOR]
        logp_V = self.model(input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.config.seed} {group}".encode()))
        outputs = torch.multinomial(logp_V.exp(), n, replacement=True, generator=generator).tolist()
        events: list[Event] = []
        for sample in range(first, n):
            output = outputs[sample]
            episode, interaction = f"{group}#{sample}", f"{group}#{sample}.1"
            reward = self.reward(task, output)
            opened = EpisodeOpened(
                task_id=f"task-{index}", group_id=group, is_eval=is_eval, version=self.version, task=dict(task)
            )
            events += [
                Event(run_id=self.run_id, episode_id=episode, fact=opened),
                Event(
                    run_id=self.run_id,
                    episode_id=episode,
                    interaction_id=interaction,
                    fact=InteractionRecorded(prompt_length=len(prompt), finish_reason="stop"),
                    prompt_ids=np.array(prompt, np.int32),
                    output_ids=np.array([output], np.int32),
                    logprobs=np.array([float(logp_V[output])], np.float32),
                    versions=np.array([self.version], np.int32),
                ),
            ]
            if reward is not None:
                events.append(Event(run_id=self.run_id, episode_id=episode, fact=RewardGiven(value=reward)))
            events.append(Event(run_id=self.run_id, episode_id=episode, fact=EpisodeClosed(state="done")))
        return events

    def _append(self, fact: Any, episode: str) -> None:
        self.book.log.append_blocking(Event(run_id=self.run_id, episode_id=episode, fact=fact))
