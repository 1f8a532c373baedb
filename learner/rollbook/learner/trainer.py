"""`PPOTrainer`: a training run as a context manager, with the names that AReaL's users know."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from rollbook.store import BookBusy
from rollbook.store.book import Book, open_book

from .algorithms import find_algorithm
from .backend import Backend, make_backend, ranks_of
from .batches import Group, recorded_groups
from .config import ModelConfig, OptimizerConfig, TrainConfig, check
from .errors import BadSetting, NothingToTrain
from .metrics import Report, check_writers
from .rollouts import Rollouts, find_rollouts
from .train import Run, train

Tasks = Sequence[Mapping[str, Any]]


class PPOTrainer:
    """Trains whatever `config.algorithm` says (the name is AReaL's).

    with PPOTrainer(config, train_dataset=rows) as trainer:
        trainer.train(workflow="my_agent.MathAgent")

    rollouts: who runs engine and agents; by default what `scheduler.type` names.
    """

    def __init__(
        self,
        config: TrainConfig,
        train_dataset: Tasks | None = None,
        valid_dataset: Tasks | None = None,
        *,
        rollouts: Rollouts | None = None,
    ) -> None:
        if not isinstance(config, TrainConfig):
            raise BadSetting(
                f"config is a {type(config).__name__}; expected a TrainConfig, such as rollbook.app.config.load_config "
                "makes of a file"
            )
        check(config)
        for name, rows in (("train_dataset", train_dataset), ("valid_dataset", valid_dataset)):
            _check_tasks(name, rows)
        self.config = config
        self.train_dataset: Tasks = [] if train_dataset is None else train_dataset
        self.valid_dataset: Tasks = [] if valid_dataset is None else valid_dataset
        if config.is_online:
            if config.total_train_steps is None:
                raise BadSetting("an online run has no tasks to count; set total_train_steps")
            if config.gconfig.n_samples != 1:
                raise BadSetting(
                    f"gconfig.n_samples is {config.gconfig.n_samples}, but an online run has each conversation once; "
                    "set gconfig.n_samples=1, and an algorithm that compares over the batch, such as reinforce"
                )
        elif config.train_dataset.curriculum is not None and config.total_train_steps is None:
            raise BadSetting("with train_dataset.curriculum the length of an epoch is not known; set total_train_steps")
        elif not len(self.train_dataset) and config.scheduler.type != "none":
            raise BadSetting("train_dataset has no rows; pass a list of dicts with the tasks to train on")
        self.algorithm = find_algorithm(config.algorithm, config.actor)
        self._rollouts = rollouts
        self._team: Any = None  # of the ranks that share actor, reference and critic
        self._stack = ExitStack()

    def __enter__(self) -> "PPOTrainer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def train(
        self,
        workflow: Any = None,
        eval_workflow: Any = None,
        workflow_kwargs: Mapping[str, Any] | None = None,
        eval_workflow_kwargs: Mapping[str, Any] | None = None,
        dynamic_filter_fn: Callable[[Group], bool] | None = None,
        total_epochs: int | None = None,
    ) -> None:
        """Train to the end; the same call after a kill goes on where the run was.

        workflow: `"module.Name"`, or any object or class with `async run(data, **extra)`.
        dynamic_filter_fn: says of a finished group whether to train on it; others take the place of the rejected.
        """
        config = self.config
        self._stack.close()  # of an earlier call
        if total_epochs is not None:
            config.total_train_epochs = total_epochs
        check(config)
        epochs = config.total_train_epochs
        if config.actor.max_new_tokens is None:
            config.actor.max_new_tokens = config.gconfig.max_new_tokens
        # The cheap things that can be wrong come before the model is loaded.
        if self.algorithm.needs_critic and config.critic is None:
            raise BadSetting(f"algorithm {config.algorithm!r} needs a value model; set critic.path in the config")
        has_length = config.actor.fixed_length or config.actor.max_new_tokens
        if (config.actor.loss_agg or self.algorithm.loss_agg) == "fixed_length" and not has_length:
            raise BadSetting("loss_agg is fixed_length; set actor.fixed_length or actor.max_new_tokens to that length")
        if config.actor.overlong_reward_penalty and not (config.actor.overlong_tokens and config.actor.max_new_tokens):
            raise BadSetting(
                "actor.overlong_reward_penalty is set without a zone: set actor.overlong_tokens, the tokens before the "
                "limit in which it grows, and actor.max_new_tokens or gconfig.max_new_tokens, the limit"
            )
        if config.ref is not None and config.ref_scores is not None:
            raise BadSetting("ref and ref_scores are both set; measure KL against a model or against stored scores")
        if config.ref_scores is not None and config.scheduler.type != "none":
            raise BadSetting(
                "ref_scores are of answers that the book has, and a run with an engine draws new ones; set ref.path"
            )
        if (config.actor.kl_ctl or config.actor.kl_loss_coef) and config.ref is None and config.ref_scores is None:
            raise BadSetting("actor.kl_ctl or kl_loss_coef asks for a reference model; set ref.path, or ref_scores")
        if config.tokenizer_path and not Path(config.tokenizer_path).is_dir():
            raise BadSetting(
                f"tokenizer_path {config.tokenizer_path!r} is no folder; leave it empty for actor.path's own"
            )
        check_writers(config)
        n_ranks = ranks_of(config.actor.backend)
        is_shared = config.actor.backend != "single"
        if is_shared:
            from .backend import team as ranks

            ranks.check_devices(n_ranks, config.actor.device)
            if ranks.is_follower():
                ranks.follow_torchrun(config.actor.device)
                return
        rollouts: Rollouts | None = None
        if config.scheduler.type != "none":
            rollouts = self._rollouts or find_rollouts(config.scheduler.type)
            if not config.is_online:
                rollouts.resolve(workflow, workflow_kwargs or {})
        try:
            book: Book = self._stack.enter_context(open_book(config.book_path, writer="learner"))
        except BookBusy as error:
            raise BadSetting(
                f"another training run writes to the book {config.book_path} at this moment; wait for it or stop it, "
                "or give this run a book of its own (trial_name=... or book=...)"
            ) from error
        recorded = None
        if rollouts is None:
            recorded = recorded_groups(book, config.run_id, config.selection, reward=config.credit.reward)
        total_groups = epochs * len(self.train_dataset if recorded is None else recorded)
        if config.is_online or config.train_dataset.curriculum is not None:
            total_groups = sys.maxsize
        total_steps = max(1, total_groups // config.groups_per_step)
        if config.total_train_steps is not None:
            total_steps = min(total_steps, config.total_train_steps)
        if is_shared:
            self._team = ranks.Team.start(n_ranks, device=config.actor.device, log_folder=Path(config.run_path))
            self._stack.callback(self._team.close)
        actor = self._backend(config.actor, total_steps, optimizer=config.actor.optimizer)
        reference = None if config.ref is None else self._backend(config.ref, total_steps)
        critic = None
        if self.algorithm.needs_critic and config.critic is not None:
            critic = self._backend(config.critic, total_steps, optimizer=config.critic.optimizer, has_values=True)
        report = self._stack.enter_context(
            Report(config, total_steps=total_steps, past=_past_metrics(book, config.run_id))
        )
        if rollouts is not None:
            self._stack.callback(rollouts.close)
        train(
            Run(
                config=config,
                book=book,
                rollouts=rollouts,
                algorithm=self.algorithm,
                actor=actor,
                reference=reference,
                critic=critic,
                report=report,
                tasks=self.train_dataset,
                valid_tasks=self.valid_dataset,
                workflow=workflow,
                workflow_kwargs=workflow_kwargs or {},
                eval_workflow=eval_workflow,
                eval_workflow_kwargs=eval_workflow_kwargs or workflow_kwargs or {},
                accept=dynamic_filter_fn,
                total_steps=total_steps,
                total_groups=total_groups,
                recorded=recorded,
            )
        )
        if rollouts is not None:
            require_step(book, config)

    def _backend(
        self,
        model: ModelConfig,
        total_steps: int,
        *,
        optimizer: OptimizerConfig | None = None,
        has_values: bool = False,
    ) -> Backend:
        sampling = self.config.gconfig
        temperature = self.config.actor.temperature
        return make_backend(
            self.config.actor.backend,
            model,
            team=self._team,
            optimizer=optimizer,
            total_steps=total_steps * self.config.actor.ppo_n_minibatches,
            temperature=sampling.temperature if temperature is None else temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            has_values=has_values,
            seed=self.config.seed,
        )


def _check_tasks(name: str, rows: Any) -> None:
    """Raise BadSetting for what is no sequence of tasks."""
    is_sequence = hasattr(rows, "__len__") and hasattr(rows, "__getitem__") and not isinstance(rows, str | Mapping)
    if rows is not None and not is_sequence:
        raise BadSetting(f"{name} is a {type(rows).__name__}; pass a list of dicts, one for each task")
    if rows is not None and len(rows) and not isinstance(rows[0], Mapping):
        raise BadSetting(f"{name} holds {type(rows[0]).__name__} where a dict was expected, one for each task")


def require_step(book: Book, config: TrainConfig) -> None:
    """Raise NothingToTrain for a run that has ended without a step because its episodes failed."""
    book.catch_up()
    query = "select count(*) as n from batches where run_id = ? and trained_at is not null"
    if book.sql(query, [config.run_id])["n"][0].as_py():
        return
    (found,) = book.sql(
        "select count(*) as n, count(*) filter (state in ('failed', 'lost', 'abandoned')) as n_failed, "
        "arg_max(reason, closed_at) filter (state = 'failed') as reason from episodes where run_id = ?",
        [config.run_id],
    ).to_pylist()
    if found["n"] and not found["n_failed"]:
        raise NothingToTrain(
            f"no step was trained: none of the groups of {found['n']} episodes was taken; a dynamic_filter_fn, or "
            f"dynamic sampling, left out every one. `rollbook doctor {config.book_path}` says more"
        )
    if found["n_failed"]:
        raise NothingToTrain(
            f"no step was trained: {found['n_failed']} of {found['n']} episodes failed, the last with "
            f"{found['reason'] or 'no reason'}. `rollbook doctor {config.book_path}` says more; once it is put right "
            "the same command draws them again"
        )


def _past_metrics(book: Book, run_id: str) -> list[dict[str, float]]:
    table = book.sql(
        "select step, metrics from batches where run_id = $run and trained_at is not null order by step",
        {"run": run_id},
    )
    return [
        {"step": step, **json.loads(metrics or "{}")}
        for step, metrics in zip(table["step"].to_pylist(), table["metrics"].to_pylist(), strict=True)
    ]
