"""The demo's curve by every on-policy algorithm, and a run that learns from a recorded book alone. Prints a table.

python3 benchmarks/gpu/curves.py [--only grpo ppo] [--steps 40] [--at-once 3] [--root FOLDER] [--out FILE]

Each algorithm is `rollbook train examples/arithmetic.yaml algorithm=NAME`: the same script and another name,
SmolLM2-135M, 40 steps of 96 answers. Several run at once on each GPU (on the CPU, where there is none), each with its
own book.

    recorded   1. the untrained model answers (learning rate 0) and its answers are recorded;
               2. a run without an engine trains on that book alone;
               3. what it published answers again. The reward of 1 and of 3 is told.

Needs the rooms' packages (`pip install rollbook[demo]`); the model is prepared as the demo does. Where the package is
not installed, its entry points are read from pyproject.toml.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("store", "proxy", "learner", "agents", "app")
ALGORITHMS = (
    "ppo", "grpo", "dr_grpo", "rloo", "lite_ppo", "dapo", "gspo", "reinforce", "reinforce_pp", "sapo", "m2po", "cispo",
)  # fmt: skip


def entry_points(folder: Path) -> None:
    """What an installation would say: the schedulers by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "rollbook-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rollbook\nVersion: 0\n")
    lines = []
    for group, points in project.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{name} = {where}" for name, where in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


class Bench:
    """How one run is started, and what became of it."""

    def __init__(self, options: argparse.Namespace, model: str, path: str, n_gpus: int) -> None:
        self.options, self.model, self.path, self.n_gpus = options, model, path, n_gpus
        self.slots: SimpleQueue[int] = SimpleQueue()
        for slot in range(options.at_once * max(n_gpus, 1)):
            self.slots.put(slot)
        self.lock = threading.Lock()

    def train(self, name: str, *settings: str) -> list[float]:
        """Run it to its end; the mean reward of each step. Raises RuntimeError with the end of what it said."""
        root = Path(self.options.root)
        command = [sys.executable, "-m", "rollbook.app.cli", "train", "arithmetic.yaml"]
        command += [f"trial_name={name}", f"cluster.fileroot={root.resolve()}", f"actor.path={self.model}"]
        command += ["recover.mode=disabled", *settings, *self.options.set]
        slot = self.slots.get()
        env = {**os.environ, "PYTHONPATH": self.path, "OMP_NUM_THREADS": str(self.options.threads)}
        if self.n_gpus:
            env["CUDA_VISIBLE_DEVICES"] = str(slot % self.n_gpus)
        try:
            done = subprocess.run(
                command, cwd=ROOT / "examples", env=env, capture_output=True, text=True, timeout=self.options.limit
            )
        finally:
            self.slots.put(slot)
        if done.returncode:
            raise RuntimeError("\n".join((done.stdout + done.stderr).splitlines()[-12:]))
        lines = (root / "arithmetic" / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line).get("reward", float("nan")) for line in lines]

    def algorithm(self, name: str) -> dict[str, Any]:
        """The demo's run under another name."""
        settings = [f"algorithm={name}", f"total_train_steps={self.options.steps}"]
        if name == "ppo":
            settings += [f"critic.path={self.model}", "critic.optimizer.lr=1e-5", "critic.optimizer.weight_decay=0.0"]
        return {"curve": self.train(name, *settings)}

    def recorded(self) -> dict[str, Any]:
        """Learning from a recorded book alone, measured by a later evaluation."""
        root, steps = Path(self.options.root).resolve(), self.options.steps
        half = max(1, steps // 2)
        before = self.train("recording", f"total_train_steps={half}", "actor.optimizer.lr=0.0")
        book = root / "arithmetic" / "recording" / "book"
        settings = ["scheduler.type=none", f"book={book}", "selection.runs=[arithmetic/recording]"]
        curve = self.train("recorded", f"total_train_steps={steps}", *settings)
        policies = root / "arithmetic" / "recording" / "book" / "policies" / "arithmetic-recorded"
        newest = max(policies.glob("v[0-9]*"), key=lambda path: int(path.name[1:]))
        after = self.train(
            "evaluated", f"actor.path={newest}", f"total_train_steps={max(1, steps // 8)}", "actor.optimizer.lr=0.0"
        )
        return {"curve": curve, "before": sum(before) / len(before), "after": sum(after) / len(after)}

    def tell(self, name: str, run: Callable[[], dict[str, Any]]) -> None:
        """Run it and print its line."""
        began = time.monotonic()
        try:
            found = run()
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            with self.lock:
                print(f"{name:13s} failed after {time.monotonic() - began:.0f} s: {error}", flush=True)
            return
        curve = found["curve"]
        third = max(1, len(curve) // 3)
        row = {
            "name": name,
            "first": sum(curve[:third]) / third,
            "last": sum(curve[-third:]) / third,
            "wall_s": time.monotonic() - began,
            **found,
        }
        with self.lock:
            if self.options.out:
                with self.options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            points = " ".join(f"{value:.2f}".lstrip("0") for value in curve[::3])
            if name == "recorded":
                print(f"{name:13s} before {row['before']:.3f}  after {row['after']:.3f}  wall {row['wall_s']:4.0f} s")
            else:
                print(
                    f"{name:13s} {row['first']:.3f}  {row['last']:.3f}  wall {row['wall_s']:4.0f} s  {points}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[*ALGORITHMS, "recorded"], choices=[*ALGORITHMS, "recorded"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=3, help="runs at once on each GPU")
    parser.add_argument("--threads", type=int, default=4, help="CPU threads of each program")
    parser.add_argument("--limit", type=float, default=500, help="seconds after which a run is given up")
    parser.add_argument("--root", default="/tmp/curves", help="where books and metrics go")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--set", nargs="*", default=[], help="more settings for every run, as in rollbook train")
    parser.add_argument("--out", type=Path, help="a JSON-lines file for the curves")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        entry_points(Path(folder))
        rooms = [str(ROOT / room) for room in ROOMS]
        path = os.pathsep.join([*rooms, os.environ.get("PYTHONPATH", ""), folder])
        sys.path[:0] = rooms
        import torch

        from rollbook.app.models import prepare_model

        began = time.monotonic()
        model = prepare_model(options.model)
        n_gpus = torch.cuda.device_count()
        print(f"{n_gpus} GPUs, {options.at_once} runs at once on each; {model} after {time.monotonic() - began:.0f} s")
        print(f"{'algorithm':13s} first  last   thirds of the mean reward; then every third step", flush=True)
        bench = Bench(options, str(model), path, n_gpus)
        with ThreadPoolExecutor(len(options.only)) as pool:
            order = sorted(options.only, key=lambda name: name != "recorded")  # the longest begins first
            for name in order:
                run = bench.recorded if name == "recorded" else lambda name=name: bench.algorithm(name)
                pool.submit(bench.tell, name, run)
        print(f"all of it took {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
