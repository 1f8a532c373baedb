"""`rollbook eval`: an agent over a dataset, with a model or a policy of a book, into a book; and how well it did.

The agent is the one that is trained: same code, same proxy, same recording. An episode that fails counts as not
solved, since a user would count it so; the reasons are in the book.
"""

import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa

from rollbook.agents.data import tasks_of
from rollbook.agents.runner import Episode, Runner
from rollbook.proxy.client import ProxyClient
from rollbook.store import Book, open_book

from .launch import start_servers
from .launch_local import LocalLauncher

BY_TASK = """
select task_id, count(*) as episodes, count(reward) as rewarded,
  count(*) filter (where coalesce(reward, 0) >= $solved) as solved, avg(coalesce(reward, 0)) as mean_reward
from episodes where run_id = $run and is_eval and state in ('done', 'failed')
group by task_id order by mean_reward, task_id
"""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that one of k samples solves a task, unbiased from c of n that did (Chen et al. 2021, section 2.1)."""
    return 1.0 - math.prod((n - c - i) / (n - i) for i in range(k)) if n - c >= k else 1.0


def interval(values: Sequence[float], n_episodes: int = 0) -> tuple[float, float, float]:
    """Mean of per-task values and its 95 % interval over tasks, which are what was sampled.

    Of values in [0, 1] Wilson's score interval, which stays inside: with so many trials as have the variance that the
    tasks show, between the tasks and the episodes (Wilson 1927; Kish 1965 for the number). Of others the normal one.
    """
    n = len(values)
    mean = sum(values) / n
    variance = sum((v - mean) ** 2 for v in values) / (n - 1) if n > 1 else math.inf
    if min(values) < 0 or max(values) > 1:
        error = 1.96 * math.sqrt(variance / n) if n > 1 else 0.0
        return mean, mean - error, mean + error
    spread = mean * (1 - mean)
    trials = min(n * spread / variance if variance else math.inf, float(n_episodes or n)) if spread else float(n)
    trials = max(trials, 1.0)
    z = 1.96**2 / trials
    middle = (mean + z / 2) / (1 + z)
    error = math.sqrt(z * (spread + z / 4)) / (1 + z)
    return mean, max(0.0, middle - error), min(1.0, middle + error)


def summary(book: Book, run_id: str, *, n_samples: int, solved_at: float = 1.0) -> tuple[pa.Table, pa.Table]:
    """(pass@k for k = 1, 2, 4, ... and the mean reward, each with its interval; the table by task)."""
    tasks = book.sql(BY_TASK, {"run": run_id, "solved": solved_at})
    counts = list(zip(tasks["episodes"].to_pylist(), tasks["solved"].to_pylist(), strict=True))
    rows = []
    if counts:
        fewest = min(n for n, _ in counts)
        ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k <= min(fewest, n_samples)]
        measures = [(f"pass@{k}", [pass_at_k(n, c, k) for n, c in counts]) for k in ks]
        measures.append(("mean reward", tasks["mean_reward"].to_pylist()))
        for name, values in measures:
            mean, low, high = interval(values, sum(n for n, _ in counts))
            rows.append({"measure": name, "value": mean, "low_95": low, "high_95": high, "tasks": len(values)})
    return pa.Table.from_pylist(rows), tasks


def evaluate(
    book_path: Path,
    workflow: Any,
    rows: Sequence[Mapping[str, Any]],
    *,
    run_id: str,
    serve_args: Sequence[str],
    n_samples: int = 1,
    max_concurrent: int = 64,
    time_limit_s: float = 600.0,
) -> list[Episode]:
    """Run every task n times against a server that is started for it with `serve_args`; returns the episodes."""

    async def work(client: ProxyClient) -> list[Episode]:
        runner = Runner(
            client,
            workflow,
            run_id=run_id,
            n_samples=n_samples,
            max_concurrent=max_concurrent,
            time_limit_s=time_limit_s,
            is_eval=True,
        )
        return await runner.run(tasks_of(rows))

    return on_server(book_path, run_id, serve_args, work, log_name="eval")


def on_server(
    book_path: Path,
    run_id: str,
    serve_args: Sequence[str],
    work: Callable[[ProxyClient], Awaitable[list[Episode]]],
    *,
    log_name: str,
) -> list[Episode]:
    """Do some work against a server that is started for it, with its log beside the book."""
    log_path = book_path.parent / f"{log_name}-{os.getpid()}.log"
    arguments = ["--run", run_id, *serve_args]

    async def run(url: str, admin_key: str) -> list[Episode]:
        async with ProxyClient(url, admin_key) as client:
            return await work(client)

    with LocalLauncher() as launcher:
        [server], admin_key = start_servers(launcher, str(book_path), arguments, log_path=log_path, wait_s=600.0)
        return anyio.run(run, server.url, admin_key)


def policy_args(book_path: Path, policy: str) -> list[str]:
    """`RUN` or `RUN@VERSION` of a book -> what `serve` needs to answer with it. Raises ValueError."""
    run_id, _, version = policy.partition("@")
    with open_book(book_path) as book:
        found = book.sql(
            "select version, path from policies where run_id = ? and (? = '' or version = try_cast(? as int)) "
            "order by version desc limit 1",
            [run_id, version, version],
        ).to_pylist()
    if not found:
        raise ValueError(
            f"{book_path} has no policy {policy!r}; `select run_id, version, path from policies` lists them"
        )
    path = found[0]["path"]
    if not Path(path).is_dir():
        raise ValueError(
            f"the weights of {policy!r} are no longer at {path}: old versions are removed as new ones come"
        )
    return ["--model", path, "--weights-version", str(found[0]["version"])]
