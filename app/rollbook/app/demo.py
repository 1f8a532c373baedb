"""`rollbook demo`: a tool conversation recorded, then a real model trained, in one book; and what to look at after.

Part 1 runs the OpenAI Agents SDK agent of examples/openai_agents_math.py. A 135M model does not call tools, so a
scripted engine plays the model there, and the demo says so. Part 2 is real: SmolLM2-135M-Instruct answers, is
rewarded and is trained by GRPO. Both are recorded by the same proxy into the same book.

Killed at any point, the same command goes on: what is in the book is not done again.
"""

import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.rule import Rule
from rich.text import Text

from rollbook.agents.data import tasks_of
from rollbook.agents.loop import ended_episodes
from rollbook.agents.naming import load
from rollbook.agents.runner import Runner
from rollbook.proxy.client import ProxyClient
from rollbook.proxy.engine import Generation
from rollbook.proxy.scripted import Script
from rollbook.proxy.tokenizer import Tokenizer
from rollbook.store import open_book

from .config import load_config
from .examples import examples_folder, make_importable
from .launch import start_servers
from .launch_local import LocalLauncher
from .local import bury_the_dead
from .models import prepare_model
from .reading import print_table, show_episode
from .training import train_on

MODEL = "smollm2-135m"
TOOLS_RUN = "demo/tools"


def run(*, seed: int, root: Path, steps: int | None, threads: int, out: Console, algorithm: str = "grpo") -> None:
    """All of it. root: where the book, the plot and the run's files go. algorithm: what learns in part 2."""
    make_importable(examples_folder())
    book_path = root / "book"
    with Progress(TextColumn("{task.description}"), BarColumn(), console=out, transient=True) as progress:
        bar = progress.add_task("Preparing SmolLM2-135M-Instruct (once)", total=1.0)
        model = prepare_model(
            MODEL, progress=lambda what, done: progress.update(bar, description=what, completed=done or 0.0)
        )
    _head(out, "Part 1: a tool-using agent is recorded (OpenAI Agents SDK; a script plays the model)")
    record_tools(book_path, model, root, out)

    name = algorithm.upper().replace("_", "-")
    _head(out, f"Part 2: a real model learns (SmolLM2-135M-Instruct, {name}, an agent on the OpenAI SDK)")
    overrides = [f"seed={seed}", f"book={book_path}", f"cluster.fileroot={root}", f"actor.path={model}"]
    overrides += [f"total_train_steps={steps}"] if steps else []
    overrides += settings_of(algorithm, model)
    config = load_config(examples_folder() / "arithmetic.yaml", overrides)
    train_on(config, rows=load("arithmetic:questions")(100, seed=seed))

    _head(out, "What the book says")
    report(book_path, config.run_id, model, root, out)


def _head(out: Console, title: str) -> None:
    """A line across the terminal; what is piped has no width, and gets one that can be read."""
    out.print(Rule(Text(title)), width=min(out.width, 120))


def settings_of(algorithm: str, model: Path) -> list[str]:
    """What another algorithm than the example's needs beside its name."""
    if algorithm == "grpo":
        return []
    settings = [f"algorithm={algorithm}", f"trial_name={algorithm}-seed${{seed}}"]
    if algorithm == "ppo":  # its value model begins as the policy with a head that says 0
        settings += [f"critic.path={model}", "critic.optimizer.lr=1e-5", "critic.optimizer.weight_decay=0.0"]
    return settings


# Part 1


def sums(n: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """n rows `What is A * B + C?`."""
    rng = random.Random(seed)
    rows = []
    for _ in range(n):
        a, b, c = rng.randint(2, 12), rng.randint(2, 12), rng.randint(1, 20)
        content = f"What is {a} * {b} + {c}?"
        rows.append({"messages": [{"role": "user", "content": content}], "answer": str(a * b + c)})
    return rows


def calculator(tokenizer: Tokenizer) -> Script:
    """A script for the scripted engine: it plays a model that uses the agent's two tools.

    Asked `What is A * B + C?` it calls multiply, then add, then answers; where the product is above 60 it forgets the
    addition, so that there is a mistake to be seen.
    """

    def answer(generation: Generation) -> Sequence[int]:
        prompt = tokenizer.decode(generation.prompt_ids)
        asked = re.findall(r"What is (\d+) \* (\d+) \+ (\d+)\?", prompt)
        results = re.findall(r"<\|im_start\|>tool\n\s*([\d.]+)", prompt)
        if not asked:
            text = "Ask me: What is A * B + C?"
        else:
            a, b, c = map(int, asked[-1])
            if not results:
                text = _call("multiply", a, b)
            elif len(results) == 1 and float(results[0]) <= 60:
                text = _call("add", float(results[0]), c)
            else:
                text = rf"The result is \boxed{{{float(results[-1]):g}}}."
        return [*tokenizer.encode(text + "<|im_end|>").tolist()]

    return answer


def _call(name: str, a: float, b: float) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"a": {a:g}, "b": {b:g}}}}}</tool_call>'


def record_tools(
    book_path: Path, model: Path, root: Path, out: Console, *, n_tasks: int = 6, n_samples: int = 2
) -> None:
    """Run the seed's MathAgent on a scripted engine, whatever of it is not in the book yet, and say how it went."""
    with open_book(str(book_path), writer="rollouts") as book:
        bury_the_dead(book, TOOLS_RUN)
        ended = ended_episodes(book, TOOLS_RUN)
    if sum(len(group) for group in ended.values()) < n_tasks * n_samples:
        arguments = ["--engine", "scripted", "--script", "rollbook.app.demo:calculator"]
        arguments += ["--model", str(model), "--run", TOOLS_RUN]
        log_path = root / "tools-server.log"

        async def record(url: str, admin_key: str) -> None:
            async with ProxyClient(url, admin_key) as client:
                runner = Runner(
                    client, "openai_agents_math.MathAgent", run_id=TOOLS_RUN, n_samples=n_samples, time_limit_s=60
                )
                for task in tasks_of(sums(n_tasks)):
                    await runner.run_group(task, ended=ended.get(f"{TOOLS_RUN}/epoch-0/{task.index}", ()))

        with LocalLauncher() as launcher:
            [server], admin_key = start_servers(launcher, str(book_path), arguments, log_path=log_path, wait_s=60)
            anyio.run(record, server.url, admin_key)
    with open_book(str(book_path)) as book:
        counts = book.sql(
            "select count(*) as episodes, sum(n_interactions)::int as model_calls, avg(reward) as mean_reward "
            "from episodes where run_id = ? and state = 'done'",
            [TOOLS_RUN],
        )
    print_table(counts, "table", out)


# What the book says

BY_STEP = """
select b.step, any_value(b.version) as policy_version, count(distinct e.episode_id) as episodes,
  avg(e.reward) as mean_reward
from batches b join batch_rows r using (batch_id) join interactions i using (interaction_id)
  join episodes e using (episode_id)
where b.run_id = '{run_id}' group by b.step order by b.step
"""


def report(book_path: Path, run_id: str, model: Path, root: Path, out: Console) -> None:
    """Reward by step (bars and a plot file), the SQL behind it, one conversation tree, and what to try next."""
    statement = " ".join(BY_STEP.format(run_id=run_id).split())
    with open_book(str(book_path)) as book:
        table = book.sql(statement)
        tree = book.sql(
            "select episode_id from episodes where run_id = ? and state = 'done' order by opened_at limit 1",
            [TOOLS_RUN],
        ).to_pylist()
    steps = table.column("step").to_pylist()
    rewards = table.column("mean_reward").to_pylist()
    third = max(1, len(rewards) // 3)
    out.print("\nMean reward per training step, from 0 to 1:")
    for step, reward in zip(steps, rewards, strict=True):
        bar = "█" * math.floor(40 * reward)
        out.print(Text.assemble(f"  {step:3d} ", (f"{bar:<40}", "green"), f" {reward:.3f}"))
    if len(rewards) > 1:
        first, last = sum(rewards[:third]) / third, sum(rewards[-third:]) / third
        out.print(
            Text.assemble("First third ", (f"{first:.3f}", "bold"), ", last third ", (f"{last:.3f}", "bold"), ".")
        )
    plot = plot_rewards(steps, rewards, root / f"reward-{run_id.replace('/', '-')}.png")
    out.print(f"Plotted in {plot}\n")
    out.print("The same by SQL, reward by step and policy version:")
    out.print(f'  rollbook sql {book_path} "{statement}"', soft_wrap=True, highlight=False)
    print_table(table.slice(max(0, table.num_rows - 5)), "table", out)
    if tree:
        out.print("\nOne tool conversation as a tree, with tokens and credits:")
        show_episode(str(book_path), tree[0]["episode_id"], out, tokenizer=str(model))
    out.print("\nWhat to try next:", style="bold")
    for line in (
        f'rollbook sql {book_path} "select state, count(*), avg(reward) from episodes group by state"',
        f"rollbook show {book_path} last",
        "make demo SEED=2                # another run in the same book",
        "rollbook train examples/arithmetic.yaml actor.optimizer.lr=2e-5",
    ):
        out.print(f"  {line}", soft_wrap=True, highlight=False)


def plot_rewards(steps: Sequence[int], rewards: Sequence[float], path: Path) -> Path:
    """A PNG of the curve and its mean over five steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(steps, rewards, ".", label="mean reward of the step")
    window = [sum(rewards[max(0, i - 4) : i + 1]) / len(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))]
    axes.plot(steps, window, label="mean over the last five steps")
    axes.set(xlabel="training step", ylabel="reward", ylim=(0, 1))
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
