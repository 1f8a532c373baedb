"""Where a run's numbers go besides the book: a JSON-lines file, TensorBoard, W&B, and a line for whoever watches."""

import importlib
import importlib.util
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .config import TrainConfig
from .errors import BadSetting

WRITERS = {"tensorboard": "stats_logger.tensorboard.path", "wandb": "stats_logger.wandb.mode"}


def check_writers(config: TrainConfig, writers: Mapping[str, str] = WRITERS) -> None:
    """Raise BadSetting where metrics shall go to what is not installed. writers: package -> the setting that asks."""
    logger = config.stats_logger
    wanted = {
        "stats_logger.tensorboard.path": logger.tensorboard.path is not None,
        "stats_logger.wandb.mode": logger.wandb.mode != "disabled",
    }
    for package, setting in writers.items():
        if wanted[setting] and importlib.util.find_spec(package) is None:
            raise BadSetting(f"{setting} is set and the package {package} is not here; pip install {package}")


class Report:
    """Open for the length of a run. `past`: metrics of steps that earlier processes of this run trained."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        total_steps: int,
        past: Sequence[Mapping[str, float]] = (),
        console: Console | None = None,
    ) -> None:
        folder = Path(config.run_path)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        # The book is the truth; the file is written anew from it, so a kill leaves no gap and no double line.
        self.path.write_text("".join(json.dumps(dict(m)) + "\n" for m in past))
        self._file = self.path.open("a")
        self._tensorboard: Any = None
        self._wandb: Any = None
        logger = config.stats_logger
        if logger.tensorboard.path is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(logger.tensorboard.path)
        if logger.wandb.mode != "disabled":
            wandb: Any = importlib.import_module("wandb")

            self._wandb = wandb.init(
                mode=logger.wandb.mode,
                project=logger.wandb.project or config.experiment_name,
                entity=logger.wandb.entity,
                name=logger.wandb.name or config.trial_name,
                tags=logger.wandb.tags,
                dir=str(folder),
                id=config.run_id.replace("-", "--").replace("/", "-"),
                resume="allow",
            )
        self._console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[line]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=total_steps, completed=len(past), line="")

    def __enter__(self) -> "Report":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._progress.stop()
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(error is not None))

    def say(self, text: str) -> None:
        """A line for whoever watches."""
        self._console.print(text, highlight=False, soft_wrap=True)

    @property
    def is_live(self) -> bool:
        """Whether somebody sees what the loop waits for."""
        return not self._progress.disable

    def waiting(self, line: str) -> None:
        """What the loop waits for."""
        self._progress.update(self._task, line=line)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A trained step's numbers."""
        known = {name: value if math.isfinite(value) else None for name, value in metrics.items()}  # JSON has no NaN
        self._file.write(json.dumps({"step": step, "at": round(time.time(), 3), **known}) + "\n")
        self._file.flush()
        line = summary(metrics)
        self._progress.update(self._task, completed=step + 1, line=line)
        if not self._console.is_terminal:
            self.say(f"step {step:4d}  {line}")
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(dict(metrics), step=step)


def summary(metrics: Mapping[str, float]) -> str:
    """The few numbers that fit on a line."""
    parts = []
    for name, label, form in (
        ("reward", "reward", ".3f"),
        ("eval_reward", "eval", ".3f"),
        ("loss", "loss", ".4f"),
        ("entropy", "entropy", ".2f"),
        ("gap", "gap", ".3f"),
        ("staleness", "stale", ".1f"),
        ("tokens_per_s", "tok/s", ".0f"),
        ("mfu", "mfu", ".2f"),
        ("version", "version", ".0f"),
    ):
        if name in metrics:
            parts.append(f"{label} {format(metrics[name], form)}")
    return "  ".join(parts)
