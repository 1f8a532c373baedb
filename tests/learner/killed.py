"""A training run in a process of its own that kills itself: `python killed.py ROOT MODEL POINT COUNT`.

POINT is a sentence of the loop; the process dies the COUNT-th time it gets there. `never` lives to the end.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from learner.echo import EchoRollouts, echo_config, echo_tasks
from rollbook.learner import PPOTrainer, batches, checkpoint, publish
from rollbook.learner import folders as folders_module
from rollbook.learner.train import Run


def main(root: str, model: str, point: str, count: str) -> None:
    torch.set_num_threads(1)
    left = int(count)

    def die() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(function: Callable[..., Any], *, before: bool) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if before:
                die()
            result = function(*args, **kwargs)
            if not before:
                die()
            return result

        return wrapped

    rollouts: Any = EchoRollouts()
    if point == "half a group":
        draw = rollouts.draw

        def half(group: str) -> Any:
            events = draw(group)
            rollouts.book.log.append_blocking(*events[: len(events) // 2 + 1])  # in the middle of an episode
            die()
            return events[len(events) // 2 + 1 :]

        rollouts.draw = half
    elif point == "taken":
        batches.take = around(batches.take, before=False)
    elif point == "checkpoint half written":
        folders_module._sync = around(folders_module._sync, before=True)
    elif point == "checkpoint written":
        checkpoint.write_checkpoint = around(checkpoint.write_checkpoint, before=False)
    elif point == "weights written":
        publish.write_policy = around(publish.write_policy, before=False)
    elif point == "announced":
        Run.announce = around(Run.announce, before=False)  # type: ignore[method-assign]
    elif point == "published":
        Run.publish = around(Run.publish, before=False)  # type: ignore[method-assign]
    config = echo_config(Path(root), model, total_train_epochs=8, gconfig__n_samples=4)
    config.recover.freq_steps = 3 if point == "published" else 1
    config.rollout.max_head_offpolicyness = 1 if point == "half a group" else 0
    with PPOTrainer(config, echo_tasks(10), rollouts=rollouts) as trainer:
        trainer.train(workflow="agent")


if __name__ == "__main__":
    main(*sys.argv[1:])
