"""`rollbook doctor`: what is wrong with a run, or could be, each with what to do about it.

A finding has a level: `wrong` (something is lost or cannot be learnt from), `look` (often wrong, sometimes meant).
Every check is one query over the tables, so that it can be asked again by hand; `verify` checks the bytes.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollbook.store import Book
from rollbook.store.connection import is_url

from .lists import disk_bytes, equals


@dataclass(frozen=True)
class Finding:
    """level, what was found (with numbers), what to do, and some of the episodes or calls it is about."""

    level: Literal["wrong", "look"]
    name: str
    found: str
    do: str
    examples: tuple[str, ...] = ()


def examine(book: Book, where: str, *, run: str | None = None) -> list[Finding]:
    """Everything that is found, worst first. where: the book's place."""
    own = " and ".join(equals("run_id", run)) or "true"
    checks = (_episodes(book, own), _calls(book, own), _rewards(book, own), _training(book, own), _disk(book, where))
    return sorted((finding for check in checks for finding in check), key=lambda finding: finding.level != "wrong")


def _row(book: Book, query: str) -> dict[str, Any]:
    row: dict[str, Any] = book.sql(query).to_pylist()[0]
    return row


def _share(n: int, of: int) -> str:
    return f"{n} of {of} ({n / of:.0%})" if of else "none"


def _episodes(book: Book, own: str) -> Iterator[Finding]:
    row = _row(
        book,
        f"""
        select count(*) as n, count(*) filter (where state = 'lost') as lost,
          count(*) filter (where state = 'abandoned') as abandoned, count(*) filter (where state = 'failed') as failed,
          count(*) filter (where state <> 'open') as ended,
          count(*) filter (where state = 'open' and coalesce(l.last_at, opened_at) < now() - interval 1 hour) as stuck,
          list(episode_id) filter (where state = 'lost') as lost_ids,
          list(episode_id) filter (where state = 'failed') as failed_ids,
          list(episode_id) filter (where state = 'open') as open_ids,
          count(*) filter (where state = 'done' and n_interactions = 0) as silent,
          list(episode_id) filter (where state = 'done' and n_interactions = 0) as silent_ids
        from episodes left join (select episode_id, max(recorded_at) as last_at from interactions group by all) l
          using (episode_id) where {own}
        """,
    )
    if not row["n"]:
        yield Finding("look", "empty", "no episodes", "open a session (`rollbook serve`), or train or import something")
        return
    if row["lost"]:
        yield Finding(
            "look", "lost", f"{_share(row['lost'], row['ended'])} episodes are lost: their program was killed",
            "nothing, if you killed it: they are drawn again; else look at what ends your agents' process",
            _some(row["lost_ids"]),
        )  # fmt: skip
    if row["abandoned"]:
        yield Finding(
            "look", "abandoned", f"{_share(row['abandoned'], row['ended'])} episodes ended without end_session",
            "end sessions when the agent is done, or raise the session timeout if it was only slow",
        )  # fmt: skip
    if row["failed"]:
        reason = book.sql(
            f"select reason, count(*) as n from episodes where {own} and state = 'failed' group by all "
            "order by n desc, reason limit 1"
        ).to_pylist()[0]
        yield Finding(
            "wrong" if row["failed"] * 10 > row["ended"] else "look",
            "failed",
            f"{_share(row['failed'], row['ended'])} episodes failed, most ({reason['n']}) with: {reason['reason']}",
            "read one with `rollbook show`; an agent that raises teaches nothing unless it got a reward first",
            _some(row["failed_ids"]),
        )
    if row["stuck"]:
        yield Finding(
            "look", "stuck", f"{row['stuck']} episodes are open and had no call for an hour",
            "end their sessions; groups with an open episode are not trained", _some(row["open_ids"]),
        )  # fmt: skip
    if row["silent"]:
        yield Finding(
            "wrong", "silent", f"{row['silent']} episodes are done without a single model call",
            "check that the agent uses the base_url and api_key that it is given", _some(row["silent_ids"]),
        )  # fmt: skip


def _some(ids: list[str] | None) -> tuple[str, ...]:
    return tuple(sorted(ids or ())[:3])


def _calls(book: Book, own: str) -> Iterator[Finding]:
    row = _row(
        book,
        f"""
        select count(*) as n, count(*) filter (where finish_reason = 'length') as cut,
          count(*) filter (where edge = 'rerendered') as drifted,
          count(*) filter (where parent_id is not null) as children,
          count(*) filter (where is_retried and is_leaf) as orphans,
          count(*) filter (where capture <> 'complete') as torn, count(*) filter (where n_output = 0) as mute,
          list(interaction_id) filter (where finish_reason = 'length') as cut_ids
        from interactions where {own}
        """,
    )
    n = row["n"]
    if row["cut"] * 20 > n:
        yield Finding(
            "wrong" if row["cut"] * 2 > n else "look", "cut", f"{_share(row['cut'], n)} answers were cut by length",
            "raise gconfig.max_new_tokens or the context, or reward being brief: a cut answer rarely earns anything",
            _some(row["cut_ids"]),
        )  # fmt: skip
    if row["drifted"]:
        causes = book.sql(
            f"select cause, count(*) as n, any_value(interaction_id) as example from interactions "
            f"where {own} and edge = 'rerendered' group by all order by n desc, cause"
        ).to_pylist()
        said = ", ".join(f"{cause['n']} {cause['cause']}" for cause in causes[:4])
        yield Finding(
            "wrong" if row["drifted"] * 2 > row["children"] else "look",
            "drift",
            f"{_share(row['drifted'], row['children'])} calls do not go on from their parent's tokens: {said}",
            "; ".join(dict.fromkeys(_drift_advice(cause["cause"] or "") for cause in causes[:4])),
            tuple(cause["example"] for cause in causes[:3]),
        )
    if row["orphans"]:
        yield Finding(
            "look", "orphans", f"{_share(row['orphans'], n)} answers were asked for again and never used",
            "raise the client's timeout above the engine's slowest answer; orphans are out of training",
        )  # fmt: skip
    if row["torn"]:
        yield Finding(
            "look", "incomplete", f"{_share(row['torn'], n)} calls have no whole record of tokens and logprobs",
            "imported text has none; else use an engine that returns token ids and logprobs",
        )  # fmt: skip
    if row["mute"] * 50 > n:
        yield Finding(
            "look", "mute", f"{_share(row['mute'], n)} calls sampled no token",
            "look at stop strings and at the chat template's generation prompt",
        )  # fmt: skip
    for failure in book.sql(
        f"select error, count(*) as n, any_value(message) as message, any_value(episode_id) as example from failures "
        f"where {own} group by error order by n desc, error limit 5"
    ).to_pylist():
        is_judge = failure["error"] == "RewardFailed"
        yield Finding(
            "wrong" if failure["n"] * 10 > n else "look",
            "judge failures" if is_judge else "call failures",
            f"{failure['n']} {'judgements' if is_judge else 'calls'} failed: {failure['error']}: {failure['message']}",
            "run the same `rollbook reward` again: it tries only those" if is_judge else "see the table `failures`",
            _some([failure["example"]] if failure["example"] else []),
        )


def _drift_advice(cause: str) -> str:
    if "reasoning" in cause:
        return "the template drops earlier reasoning: set history=exact to keep it, if deployment does"
    if "system" in cause:
        return "keep clocks and counters out of the system prompt, or name their lines as volatile"
    if "argument" in cause or "call ids" in cause or "whitespace" in cause:
        return "the client rewrites what the model said: send messages back as they came"
    if "edited" in cause:
        return "the agent edits its history; that is fine if it is meant"
    return "the chat template renders history anew; `docs/decisions` says when that is"


def _rewards(book: Book, own: str) -> Iterator[Finding]:
    row = _row(
        book,
        f"""
        select count(*) filter (where state = 'done') as done,
          count(*) filter (where state = 'done' and reward is null) as missing,
          list(episode_id) filter (where state = 'done' and reward is null) as missing_ids,
          count(reward) as n, min(reward) as low, max(reward) as high
        from episodes where {own} and n_interactions > 0
        """,
    )
    if row["missing"]:
        yield Finding(
            "wrong" if row["missing"] * 2 > row["done"] else "look",
            "no reward",
            f"{_share(row['missing'], row['done'])} finished episodes have no reward, and are not trained",
            "return one from the agent, call set_reward, or give it now by `rollbook reward`",
            _some(row["missing_ids"]),
        )
    if row["n"] > 1 and row["low"] == row["high"]:
        yield Finding(
            "wrong", "constant reward", f"all {row['n']} rewards are {row['low']:g}: there is nothing to learn from",
            "check the reward function on an episode that you have read; make tasks easier or harder",
        )  # fmt: skip
        return
    groups = _row(
        book,
        f"""
        select count(*) as n, count(*) filter (where low = high) as equal,
          count(*) filter (where low = high and low = best) as solved
        from (select min(reward) as low, max(reward) as high from episodes
              where {own} and reward is not null and group_id is not null and not coalesce(is_eval, false)
              group by run_id, group_id having count(*) > 1), (select max(reward) as best from episodes where {own})
        """,
    )
    if groups["equal"] * 2 > groups["n"]:
        yield Finding(
            "look", "equal groups",
            f"{_share(groups['equal'], groups['n'])} groups have one reward in all their episodes "
            f"({groups['solved']} the best there is): they move nothing",
            "draw more samples per task, choose tasks between too easy and too hard, or filter with drops_equal",
        )  # fmt: skip


def _training(book: Book, own: str) -> Iterator[Finding]:
    gap = _row(
        book,
        f"""
        select count(*) as n, avg(abs(s.mean_gap)) as gap, max(abs(s.mean_gap)) as worst
        from scores s join interactions i using (interaction_id)
        where {own} and s.version = i.version_min and s.version = i.version_max
        """,
    )
    if gap["n"] and gap["gap"] is not None and gap["gap"] > 0.02:
        yield Finding(
            "wrong" if gap["gap"] > 0.1 else "look", "gap",
            f"engine and trainer differ by {gap['gap']:.3f} in mean logprob at one version (worst {gap['worst']:.2f})",
            "compare dtypes, temperature and logprobs_mode of both, and the weights that the engine really has",
        )  # fmt: skip
    stale = _row(
        book,
        f"""
        select count(*) as n, count(*) filter (where b.version - i.version_min > 8) as stale,
          max(b.version - i.version_min) as worst
        from batches b join batch_rows r using (batch_id) join interactions i using (interaction_id)
        where {own.replace("run_id", "b.run_id")}
        """,
    )
    if stale["stale"] * 10 > stale["n"]:
        yield Finding(
            "look", "stale",
            f"{_share(stale['stale'], stale['n'])} trained calls are over 8 versions old (worst {stale['worst']})",
            "lower max_head_offpolicyness, or train with the decoupled loss",
        )  # fmt: skip
    row = _row(book, f"select count(*) as n from batches where {own} and trained_at is null")
    if row["n"] > 1:
        yield Finding(
            "look",
            "untrained",
            f"{row['n']} batches were taken and not trained",
            "start the run again: it goes on there",
        )
    gone = [
        path
        for path in book.sql(
            f"select path from policies where {own} qualify version = max(version) over (partition by run_id)"
        )["path"].to_pylist()
        if not Path(path).is_dir()
    ]
    if gone:
        yield Finding(
            "look", "weights", f"the newest weights of {len(gone)} runs are not here ({gone[0]})",
            "copy the folder along, or name a model with --tokenizer where text is wanted",
        )  # fmt: skip


def _disk(book: Book, where: str) -> Iterator[Finding]:
    if is_url(where):
        return
    path = Path(where)
    free = shutil.disk_usage(path).free
    row = _row(
        book,
        "select epoch(max(recorded_at) - min(recorded_at)) / 3600 as hours from events "
        "where recorded_at > (select max(recorded_at) from events) - interval 1 day",
    )
    sizes = disk_bytes(path)
    size = sum(sizes.get(part, 0) for part in ("log", "sealed"))
    whole = _row(book, "select epoch(max(recorded_at) - min(recorded_at)) / 3600 as hours from events")
    growth = size / max(whole["hours"] or 0, 1 / 60)
    hours = free / growth if growth and (row["hours"] or 0) > 0 else None
    if free < 1 << 30 or (hours is not None and hours < 24):
        left = "" if hours is None else f", {hours:.0f} hours at the pace of this book"
        yield Finding(
            "wrong" if free < 1 << 28 else "look", "disk", f"{free / 1e9:.1f} GB are free{left}",
            "`rollbook prune` removes old tokens; older policy folders may be deleted",
        )  # fmt: skip
    policies = sizes.get("policies", 0)
    if policies > 20 * max(size, 1 << 26):
        yield Finding(
            "look", "weights on disk", f"{policies / 1e9:.1f} GB of policies beside {size / 1e9:.2f} GB of log",
            "delete the folders of versions that you will not serve again; the book does not need them",
        )  # fmt: skip
