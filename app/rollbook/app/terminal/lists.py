"""`runs`, `groups`, `episodes`, `stats`: what is in a book, as tables."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from rollbook.store import Book, QueryRefused
from rollbook.store.connection import is_url
from rollbook.store.expressions import in_parentheses

_RUNS = """
    select r.run_id, count(e.episode_id) as episodes, count(*) filter (where e.state = 'open') as open,
      count(*) filter (where e.state in ('failed', 'abandoned', 'lost')) as not_done,
      avg(e.reward) filter (where not coalesce(e.is_eval, false)) as reward,
      avg(e.reward) filter (where e.is_eval) as eval_reward,
      any_value(p.version) as version, any_value(b.steps) as steps, sum(e.n_interactions)::bigint as calls,
      sum(e.n_output)::bigint as tokens, max(coalesce(e.closed_at, e.opened_at)) as last_at
    from (select run_id from runs union select run_id from episodes) r left join episodes e using (run_id)
    left join (select run_id, max(version) as version from policies group by run_id) p using (run_id)
    left join (select run_id, count(*) filter (where trained_at is not null) as steps from batches group by run_id) b
      using (run_id)
    group by r.run_id order by last_at desc nulls last, r.run_id
"""
_GROUPS = """
    select group_id, run_id, any_value(task_id) as task_id, count(*) as episodes,
      count(*) filter (where state = 'open') as open, count(*) filter (where state in ('failed', 'abandoned', 'lost'))
        as not_done,
      avg(reward) as reward, stddev_samp(reward) as reward_std, min(reward) as worst, max(reward) as best,
      sum(n_taken) > 0 as is_taken, min(version_min) as version_min, max(version_max) as version_max,
      max(coalesce(closed_at, opened_at)) as last_at
    from episodes where group_id is not null group by group_id, run_id order by last_at desc, group_id
"""
_EPISODES = """
    select episode_id, run_id, task_id, group_id, state, reward, n_interactions as calls, n_output as tokens,
      version_min as version, attempt, is_eval, opened_at, epoch(closed_at - opened_at) as seconds, reason
    from episodes order by opened_at desc, episode_id
"""
LISTS = {"runs": _RUNS, "groups": _GROUPS, "episodes": _EPISODES}


def listing(book: Book, name: str, *, where: Sequence[str] = (), limit: int | None = None) -> pa.Table:
    """One of LISTS, newest first: the rows for which all of the SQL conditions hold. Raises QueryRefused, BadSelection.

    The conditions are over the columns that are shown; those of `episodes` also over the whole table.
    """
    query = LISTS[name]
    rows = f"from l where {_all(where)}"
    if name == "episodes":
        rows = f"from l where episode_id in (select episode_id from episodes where {_all(where)})"
    statement = f"with l as ({query}) {rows} {'' if limit is None else f'limit {int(limit)}'}"
    try:
        return book.sql(statement)
    except duckdb.Error as error:
        raise QueryRefused(f"{str(error).strip()} (`rollbook {name} BOOK --json` shows the columns)") from error


def _all(where: Sequence[str]) -> str:
    return " and ".join(in_parentheses(condition) for condition in where) or "true"


def equals(column: str, value: str | None) -> list[str]:
    """A condition, where there is a value; text of a person is quoted."""
    return [] if value is None else [f"{column} = '{value.replace(chr(39), chr(39) * 2)}'"]


_STATS = """
    select count(*) as interactions, count(distinct episode_id) as episodes_with_calls,
      sum(n_prompt)::bigint as prompt_tokens, sum(n_prompt - n_shared)::bigint as prompt_tokens_stored,
      sum(n_output)::bigint as sampled_tokens,
      sum(n_output) filter (where is_trainable and capture = 'complete')::bigint as trainable_tokens,
      avg(seconds) as seconds_mean, quantile_cont(seconds, .5) as seconds_p50,
      quantile_cont(seconds, .99) as seconds_p99,
      quantile_cont(first_token_seconds, .5) as first_token_p50, avg(n_output) as output_mean,
      avg((finish_reason = 'length')::int) as cut_by_length, min(recorded_at) as first_at, max(recorded_at) as last_at,
      count(*) / nullif(epoch(max(recorded_at) - min(recorded_at)), 0) as calls_per_s,
      sum(n_output) / nullif(epoch(max(recorded_at) - min(recorded_at)), 0) as tokens_per_s
    from interactions where {where}
"""
_COUNTS = {
    "states": ("state", "episodes"),
    "edges": ("coalesce(edge, 'root')", "interactions"),
    "dialects": ("dialect", "interactions"),
    "rewards": ("name", "current_rewards"),
    "failures": ("error", "failures"),
    "events": ("kind", "events"),
}
"""What is counted: an expression, over a table."""


def stats(book: Book, where: str, *, run: str | None = None) -> dict[str, Any]:
    """Numbers of a book, or of one run of it; sizes on disk where it is a folder here. where: its place."""
    condition = " and ".join(equals("run_id", run)) or "true"
    (row,) = book.sql(_STATS.format(where=condition)).to_pylist()
    found: dict[str, Any] = {"calls": row}
    for name, (what, table) in _COUNTS.items():
        query = f"select {what}, count(*) as n from {table} where {condition} group by 1 order by n desc, 1"
        found[name] = dict(zip(*(column.to_pylist() for column in book.sql(query)), strict=True))
    found["episodes"] = sum(found["states"].values())
    found["writers"] = len(book.views.position)
    if not is_url(where):
        found["disk_bytes"] = disk_bytes(Path(where))
    return found


def disk_bytes(path: Path) -> dict[str, int]:
    """Bytes of the parts of a book's folder. A file that goes while we look (a sealed segment's) counts nothing."""
    sizes: dict[str, int] = {}
    for folder, _, names in os.walk(path):
        top = Path(folder).relative_to(path).parts
        for name in names:
            try:
                size = os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
            part = top[0] if top else "tables" if name.startswith("views.duckdb") else "other"
            sizes[part] = sizes.get(part, 0) + size
    return dict(sorted(sizes.items()))
