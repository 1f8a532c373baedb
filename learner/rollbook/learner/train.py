"""A training run, top to bottom. Every name used here is a sentence of its own in `Run`.

What a kill leaves, and how the same command goes on, is in docs/architecture.md: a batch is an event before it is
trained, a checkpoint is a folder that appears whole, and whatever lies between the two is trained again from the book.
"""

import hashlib
import heapq
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollbook.store import BatchTrained, Event, PayloadPruned, PolicyPublished, RunStarted, TokensScored
from rollbook.store.book import Book

from . import batches, checkpoint, publish
from .algorithms import Algorithm
from .backend import Backend
from .batches import Batch, Group, Taken
from .config import FrequencyConfig, TrainConfig
from .errors import BadCheckpoint
from .folders import keep_newest
from .learn import Learned, check_vocabularies, learn
from .metrics import Report
from .rollouts import Rollouts
from .rows import Floats, Rows


def train(run: "Run") -> None:
    """Train until the steps or the tasks are over."""
    run.start()
    run.end_step()
    for batch in run.batches():
        learned = run.learn(batch)
        run.keep(batch, learned)
        run.publish(batch, learned)
        run.save_if_due(batch.step)
        run.evaluate_if_due(batch.step)


@dataclass(kw_only=True)
class Run:
    """What a run is made of. `step` counts trained batches; the policy's version is the same number."""

    config: TrainConfig
    book: Book
    rollouts: Rollouts | None
    algorithm: Algorithm
    actor: Backend
    reference: Backend | None = None
    critic: Backend | None = None
    report: Report
    tasks: Sequence[Mapping[str, Any]]
    valid_tasks: Sequence[Mapping[str, Any]] = ()
    workflow: Any = None
    workflow_kwargs: Mapping[str, Any] = field(default_factory=dict)
    eval_workflow: Any = None
    eval_workflow_kwargs: Mapping[str, Any] = field(default_factory=dict)
    accept: Callable[[Group], bool] | None = None
    total_steps: int
    total_groups: int  # that the rollouts will ever finish
    step: int = 0
    recorded: Sequence[Group] | None = None  # what there is to train on, where nobody makes more
    used: Counter[str] = field(default_factory=Counter)  # how often batches used or rejected a group
    failed_before: frozenset[str] = frozenset()  # episodes that earlier processes saw fail: their groups come again
    has_warned: bool = False  # of rewards that teach nothing
    is_rolling: bool = False  # the rollouts have started: they hear of new weights
    _due: dict[str, float] = field(default_factory=dict)
    _turns: list[tuple[int, bytes, int]] = field(default_factory=list)  # a heap: when each recorded group comes again

    # ------------------------------------------------------------ where we are

    @property
    def policies(self) -> Path:
        return Path(f"{Path(self.config.book_path).resolve()}/policies/{self.config.run_id}")

    @property
    def checkpoints(self) -> Path:
        return Path(self.config.run_path) / "checkpoints"

    @property
    def weights(self) -> Path:
        """The folder of the current version; version 0 is the model itself."""
        return self.policies / f"v{self.step}" if self.step else Path(self.config.actor.path)

    def start(self) -> None:
        """Say that the run begins, go to where an earlier process of it was, and let episodes come."""
        plain = without_keys(msgspec.to_builtins(self.config))
        self.append(RunStarted(name=self.config.run_id, config=plain))
        self.book.catch_up()
        published = self.book.sql(
            "select max(version) as v from policies where run_id = $run", {"run": self.config.run_id}
        )["v"].to_pylist()[0]
        if published is None:
            self.append(PolicyPublished(version=0, path=str(self.weights)))
        self.used = batches.used_groups(self.book, self.config.run_id)
        self.failed_before = batches.failed_episodes(self.book, self.config.run_id, self.used)
        self.load_checkpoint()
        for taken in batches.taken_batches(self.book, self.config.run_id, from_step=self.step):
            self.report.waiting(f"training batch {taken.step} again from the book")
            batch = self.again(taken)
            learned = self.learn(batch)
            self.keep(batch, learned)
            self.publish(batch, learned)
        if self.step >= self.total_steps:
            self.report.say(f"the run has trained its {self.total_steps} steps; total_train_steps or epochs set more")
        if self.rollouts is not None and (self.step < self.total_steps or self.evaluation_is_open()):
            self.rollouts.start(
                self.config,
                book_path=self.config.book_path,
                run_id=self.config.run_id,
                tasks=self.tasks,
                workflow=self.workflow,
                workflow_kwargs=self.workflow_kwargs,
                version=self.step,
                weights=str(self.weights),
            )
            self.is_rolling = True

    def end_step(self) -> None:
        """What a kill cut off behind the last step: an export, an evaluation, the best version's place."""
        if self.step and not self.saved.is_dir():
            self.save_if_due(self.step - 1)
        if self.evaluation_is_open():
            self.evaluate_if_due(self.step - 1)
        elif self.step and self.evaluates(self.step):
            self.keep_best()

    def evaluation_is_open(self) -> bool:
        """Whether the evaluation of these weights was due and has not ended."""
        if not self.step or not self.evaluates(self.step):
            return False
        ended = self.book.sql(
            "select count(*) as n from episodes where run_id = $run and is_eval and version = $version "
            "and state in ('done', 'failed')",
            {"run": self.config.run_id, "version": self.step},
        )
        return bool(ended["n"][0].as_py() < len(self.valid_tasks) * self.config.evaluator.n_samples)

    def load_checkpoint(self) -> None:
        """The newest one, if the run keeps any; and finish what a kill cut off between it and its events."""
        if self.config.recover.mode in ("off", "disabled"):
            return
        folder = checkpoint.newest_checkpoint(self.checkpoints)
        if folder is None:
            return
        meta = checkpoint.read_checkpoint(folder, run_id=self.config.run_id, actor=self.actor, critic=self.critic)
        self.step = meta.step
        last = [
            b
            for b in batches.taken_batches(self.book, self.config.run_id, from_step=self.step - 1)
            if b.step < self.step
        ]
        if not last:  # a batch is in the book before it is trained
            raise BadCheckpoint(
                f"{folder} was written after step {self.step - 1}, of which the book {self.config.book_path} knows "
                f"nothing; give the run the book that it was trained from, or another trial_name, or remove {folder}"
            )
        for batch in last:
            self.announce(batch, meta.metrics)

    def again(self, taken: Taken) -> Batch:
        """A batch that was taken after the newest checkpoint. Raises BadCheckpoint where its tokens are gone."""
        try:
            rows = batches.rows_of(self.book, taken.batch_id, self.config.run_id)
        except PayloadPruned as error:
            raise BadCheckpoint(
                f"step {taken.step} is newer than the newest checkpoint and cannot be trained again: {error}; give the "
                f"run another trial_name, with actor.path={self.weights} to go on from the checkpoint's weights"
            ) from error
        return Batch(**vars(taken), rows=rows)

    # ------------------------------------------------------------ the loop's sentences

    def batches(self) -> Iterator[Batch]:
        """The next batch as soon as enough groups are finished, each written down before it is handed out."""
        while self.step < self.total_steps:
            began = time.monotonic()
            usable, rejected = self.wait_for_groups() if self.recorded is None else self.recorded_groups()
            if not usable and self.recorded is None:
                return
            batch = batches.take(
                self.book,
                self.config,
                self.algorithm,
                sorted(usable, key=lambda group: batches.natural(group.group_id)),
                rejected,
                step=self.step,
                version=self.step,
                check=self.check,
            )
            self.used.update([group.key for group in usable])
            self.used.update([group.key for group, _ in rejected])
            self._due["waited"] = time.monotonic() - began
            yield batch

    def check(self, rows: Rows) -> Floats | None:
        """Raise for a batch that cannot be trained, before the book says that it was taken. See `batches.take`."""
        check_vocabularies(rows, self.actor, self.reference, self.critic)
        return self.reference_logprobs(rows)

    def recorded_groups(self) -> tuple[list[Group], list[tuple[Group, str]]]:
        """The next of the recorded groups: those first that were used least, each time round in another order.

        The book knows what was used, so a restart goes on where the run was, also where more has been recorded since.
        """
        assert self.recorded is not None
        if not self._turns:
            self._turns = [self.turn(i, self.used[group.key]) for i, group in enumerate(self.recorded)]
            heapq.heapify(self._turns)
        turns = [heapq.heappop(self._turns) for _ in range(min(self.config.groups_per_step, len(self._turns)))]
        for n_used, _, i in turns:
            heapq.heappush(self._turns, self.turn(i, n_used + 1))
        groups = [self.recorded[i] for _, _, i in turns]
        reasons = [
            (group, batches.reason_to_reject(group, drop_all_equal=self.drop_all_equal, accept=self.accept))
            for group in groups
        ]
        usable = [group for group, reason in reasons if reason is None]
        rejected = [(group, reason) for group, reason in reasons if reason is not None]
        if all(reason == "no_reward" for _, reason in reasons) and not any(g.known_rewards for g in self.recorded):
            batches.refuse_unjudged(self.recorded, self.config)
        return usable, rejected

    def turn(self, i: int, n_used: int) -> tuple[int, bytes, int]:
        """When a recorded group that was used so often comes again: by chance among those that were used as often."""
        assert self.recorded is not None
        name = f"{self.config.seed} {n_used} {self.recorded[i].key}"
        return n_used, hashlib.blake2b(name.encode(), digest_size=8).digest(), i

    def wait_for_groups(self) -> tuple[list[Group], list[tuple[Group, str]]]:
        """The oldest finished groups that teach something, as many as a step consumes, and those rejected meanwhile."""
        wanted, draws = self.config.groups_per_step, self.config.actor.dynamic_sampling_draws
        usable: list[Group] = []
        rejected: list[tuple[Group, str]] = []
        seen = set(self.used)
        while True:
            began = time.monotonic()
            if self.book.catch_up() or not seen - self.used.keys():
                for group in batches.finished_groups(
                    self.book,
                    self.config.run_id,
                    n_samples=self.config.gconfig.n_samples,
                    known=seen,
                    without=self.failed_before,
                    reward=self.config.credit.reward,
                ):
                    if len(usable) == wanted:
                        break
                    seen.add(group.group_id)
                    n_drawn = len(usable) + sum(reason == "zero_variance" for _, reason in rejected)
                    drop = self.drop_all_equal and (draws is None or n_drawn < draws * wanted)
                    reason = batches.reason_to_reject(group, drop_all_equal=drop, accept=self.accept)
                    if reason is None:
                        usable.append(group)
                        continue
                    rejected.append((group, reason))
                    if reason != "failed" and self.rollouts is not None:  # those were never counted as accepted
                        self.rollouts.reject(1)
            unjudged = [group for group, reason in rejected if reason == "no_reward"]
            if not usable and len(unjudged) >= max(wanted, 4) and not self.config.is_online:
                batches.refuse_unjudged(unjudged, self.config)
            is_over = len(seen) >= self.total_groups
            if len(usable) == wanted or is_over:
                if is_over and not usable and unjudged:
                    batches.refuse_unjudged(unjudged, self.config)
                return usable, rejected
            looked_s = time.monotonic() - began
            if self.rollouts is not None:
                self.rollouts.check()
            if self.report.is_live:
                now = batches.under_way(self.book, self.config.run_id)
                self.report.waiting(f"{len(usable)} of {wanted} groups for step {self.step}  {now}")
            # Looking costs CPU that engine and agents on this machine could use: at most a quarter of the time.
            time.sleep(min(0.5, max(0.01, 3 * looked_s)))

    @property
    def drop_all_equal(self) -> bool:
        setting = self.config.actor.dynamic_sampling
        return self.algorithm.drop_all_equal if setting is None else setting

    def learn(self, batch: Batch) -> Learned:
        """One batch into the weights. A batch without rows changes nothing but the version."""
        began = time.monotonic()
        if not len(batch.rows):
            why = ", ".join(f"{n} {reason}" for reason, n in batch.discarded.items()) or "nothing was selected"
            self.report.say(
                f"step {batch.step} has nothing to train (episodes left out: {why}); weights stay as they are"
            )
            return Learned({}, batch.rows.logprobs, batch.rows.logprobs)
        self.warn_of_equal_rewards(batch)
        learned = learn(
            batch.rows,
            actor=self.actor,
            algorithm=self.algorithm,
            config=self.config.actor,
            version=batch.step,
            seed=self.config.seed + batch.step,
            reference=self.reference,
            ref_E=self.reference_logprobs(batch.rows) if batch.ref_E is None else batch.ref_E,
            critic=self.critic,
            critic_config=self.config.critic,
        )
        learned.metrics["train_s"] = time.monotonic() - began
        learned.metrics.update(throughput(learned.metrics, self.actor))
        if not learned.metrics["n_trained_tokens"]:
            self.report.say(
                f"step {batch.step} trains none of its tokens: they are too old (actor.max_staleness), cut off "
                f"(actor.mask_no_eos) or left out by {self.config.algorithm}; weights stay as they are"
            )
        elif not math.isfinite(learned.metrics["grad_norm"]):
            self.report.say(
                f"step {batch.step} met a gradient that is no finite number, which changes no weights. If it comes "
                "again, lower actor.optimizer.lr, or compute in another actor.dtype"
            )
        if learned.metrics.get("gap_fresh", 0.0) > self.config.actor.logprob_gap_warn:
            self.report.say(
                f"engine and learner differ by {learned.metrics['gap_fresh']:.3f} nats per token on fresh tokens "
                f"(actor.logprob_gap_warn is {self.config.actor.logprob_gap_warn})"
            )
        return learned

    def reference_logprobs(self, rows: Rows) -> Floats | None:
        """E: those that the book holds, where the settings name them. Raises NothingToTrain where some are missing."""
        scorer = self.config.ref_scores
        return None if scorer is None else batches.scored(self.book, rows, scorer)

    def warn_of_equal_rewards(self, batch: Batch) -> None:
        """Once: nothing is learned where no sample is better than another."""
        if self.has_warned or batch.rows.advantages.any():
            return
        self.has_warned = True
        name = self.config.credit.reward or "reward"
        values = np.unique(batch.rows.rewards[np.isfinite(batch.rows.rewards)])
        said = f"is {values[0]:g} in every episode" if len(values) == 1 else "is the same within every group"
        self.report.say(
            f"step {batch.step} teaches nothing: the reward {name!r} {said}, so every advantage is 0. If it stays "
            "so, look at what the agents do (rollbook show BOOK last), take easier tasks, or reward parts of an answer"
        )

    def keep(self, batch: Batch, learned: Learned) -> None:
        """A checkpoint, if one is due."""
        self.step = batch.step + 1
        recover = self.config.recover
        if recover.mode not in ("off", "disabled") and self.is_due("recover", recover, self.step):
            checkpoint.write_checkpoint(
                self.checkpoints,
                checkpoint.Meta(run_id=self.config.run_id, step=self.step, metrics=dict(learned.metrics)),
                actor=self.actor,
                critic=self.critic,
                keep=recover.keep,
            )

    def publish(self, batch: Batch, learned: Learned) -> None:
        """Weights, then the facts in one append, then the engines."""
        metrics = {
            **learned.metrics,
            "version": float(self.step),
            "waited_s": self._due.pop("waited", 0.0),
            **{f"discarded_{reason}": float(n) for reason, n in batch.discarded.items()},
        }
        says_scores = self.config.write_scores and not batch.is_trained
        self.announce(batch, metrics, self.scores(batch, learned) if says_scores else ())
        if self.rollouts is not None and self.is_rolling:
            self.rollouts.publish(str(self.weights), self.step)
        self.report.step(batch.step, metrics)

    def announce(self, batch: Taken, metrics: Mapping[str, float | None], scores: Sequence[Event] = ()) -> None:
        """Make the weights visible and say so in the book. Again, after a kill: only what is missing."""
        if not self.weights.is_dir():
            tokenizer = Path(self.config.tokenizer_path or self.config.actor.path)
            publish.write_policy(self.actor, self.weights, tokenizer=tokenizer)
        if not batch.is_trained:
            self.append(
                *scores,
                BatchTrained(batch_id=batch.batch_id, step=batch.step, metrics=dict(metrics)),
                PolicyPublished(version=self.step, path=str(self.weights), step=self.step),
            )
        publish.forget_old_policies(
            self.policies, keep=max(2, self.config.rollout.max_head_offpolicyness + 2), also=frozenset({self.weights})
        )

    def scores(self, batch: Batch, learned: Learned) -> list[Event]:
        """What the learner's weights, before the step, thought of each token."""
        rows, out = batch.rows, batch.rows.output_starts
        return [
            Event(
                run_id=self.config.run_id,
                episode_id=rows.episode_ids[r],
                interaction_id=rows.interaction_ids[r],
                fact=TokensScored(version=batch.step, batch_id=batch.batch_id),
                logprobs=learned.logprobs[out[r] : out[r + 1]].astype("float32"),
                entropies=learned.entropies[out[r] : out[r + 1]].astype("float32"),
            )
            for r in range(len(rows))
        ]

    @property
    def saved(self) -> Path:
        """The folder of an export of the current version."""
        return Path(self.config.run_path) / "saved" / f"step-{self.step:08d}"

    def save_if_due(self, step: int) -> None:
        """An export of the model for use elsewhere, by the schedule."""
        if not self.is_due("saver", self.config.saver, step + 1):
            return
        tokenizer = Path(self.config.tokenizer_path or self.config.actor.path)
        publish.write_policy(self.actor, self.saved, tokenizer=tokenizer)
        keep_newest(self.saved.parent, "step-[0-9]*", keep=self.config.saver.keep)

    def evaluate_if_due(self, step: int) -> None:
        """Episodes on the validation tasks, by the schedule, into the same book; the best version is kept."""
        if self.rollouts is None or not self.evaluates(step + 1):
            return
        self.report.waiting(f"evaluating version {self.step}")
        self.rollouts.evaluate(
            self.valid_tasks, self.eval_workflow or self.workflow, self.eval_workflow_kwargs, epoch=self.step
        )
        self.book.catch_up()
        reward, n = self.keep_best()
        self.report.say(
            f"version {self.step}: evaluation reward {reward:.3f} over {n} episodes"
            if n
            else f"the evaluation of version {self.step} gave no reward"
        )

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation is due after `step` trained steps."""
        return (
            self.rollouts is not None
            and len(self.valid_tasks) > 0
            and self.is_due("evaluator", self.config.evaluator, step)
        )

    def keep_best(self) -> tuple[float, int]:
        """The mean reward of this version's evaluation, and over how many. None was better: the weights are kept."""
        found = self.book.sql(
            "select avg(reward) as reward, count(reward) as n from episodes "
            "where run_id = $run and is_eval and version = $version",
            {"run": self.config.run_id, "version": self.step},
        ).to_pylist()[0]
        best = Path(self.config.run_path) / "best"
        said = best / "evaluation.json"
        if found["n"] and not (said.is_file() and json.loads(said.read_text())["reward"] >= found["reward"]):
            publish.write_policy(
                self.actor,
                best,
                tokenizer=Path(self.config.tokenizer_path or self.config.actor.path),
                beside={said.name: json.dumps({"version": self.step, **found})},
            )
        return found["reward"] or 0.0, found["n"]

    # ------------------------------------------------------------ small things

    def is_due(self, what: str, frequency: FrequencyConfig, step: int) -> bool:
        """Whether something with this frequency is due after `step` trained steps."""
        now = time.monotonic()
        last = self._due.setdefault(what, now)
        n_groups = len(self.tasks if self.recorded is None else self.recorded)
        steps_per_epoch = max(1, n_groups // self.config.groups_per_step)
        is_due = (
            (bool(frequency.freq_steps) and step % (frequency.freq_steps or 1) == 0)
            or (bool(frequency.freq_epochs) and step % ((frequency.freq_epochs or 1) * steps_per_epoch) == 0)
            or (frequency.freq_secs is not None and now - last >= frequency.freq_secs)
        )
        if is_due:
            self._due[what] = now
        return is_due

    def append(self, *facts: Any) -> None:
        """Facts (or whole events) about this run, durable when this returns."""
        self.book.log.append_blocking(
            *(fact if isinstance(fact, Event) else Event(run_id=self.config.run_id, fact=fact) for fact in facts)
        )


def throughput(metrics: Mapping[str, float], actor: Backend) -> dict[str, float]:
    """Tokens of the batch per second, however often they stand in it; of those, what was computed; and the MFU.

    MFU: 6 operations per parameter and computed token, of what the devices could do (Chowdhery et al. 2022, "PaLM",
    appendix B, without attention). The passes that only score are in the time and not in the operations.
    """
    computed_per_s = metrics["n_computed"] / metrics["train_s"]
    found = {"tokens_per_s": metrics["n_tokens"] / metrics["train_s"], "computed_per_s": computed_per_s}
    if actor.peak_flops is not None:
        found["mfu"] = 6 * actor.n_parameters * computed_per_s / actor.peak_flops
    return found


def without_keys(config: Any) -> Any:
    """A plain config with every `..._key` left out: a book is read by more people than hold its keys."""
    if isinstance(config, dict):
        return {name: without_keys(value) for name, value in config.items() if not name.endswith("_key")}
    return [without_keys(value) for value in config] if isinstance(config, list) else config
