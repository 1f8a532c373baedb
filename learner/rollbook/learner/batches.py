"""From the book to batches: which groups are finished, which of them can be trained, what their rows are.

A group is finished when each of its samples came to an end; it is usable when its rewards can teach something. Groups
that a batch used or rejected are named in `BatchTaken.selection`, so a restart knows them. A batch is written down
before it is trained, with the credit and advantage of each row: `rows_of` builds it again from that event alone.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollbook.store import BatchRow, BatchTaken, Event, new_id
from rollbook.store.book import Book
from rollbook.store.credit import episode_rewards_query
from rollbook.store.expressions import UNCOMPUTABLE, parse, why_uncomputable

from .algorithms import Algorithm
from .config import CreditConfig, SelectionConfig, TrainConfig
from .errors import BadSetting, NothingToTrain
from .rows import Draw, Floats, Rows


@dataclass(frozen=True, kw_only=True)
class Group:
    """The finished episodes of one task. This is what a `dynamic_filter_fn` gets."""

    group_id: str
    key: str  # the same of a run's own group; see `group_key`
    task_id: str
    task: dict[str, Any] | None
    episode_ids: list[str]
    states: list[str]  # done, failed
    rewards: list[float | None]  # None: not judged, or by an expression that gave no finite number

    @property
    def known_rewards(self) -> list[float]:
        return [reward for reward in self.rewards if reward is not None]


@dataclass(kw_only=True)
class Taken:
    """What the book says of a batch, whose tokens may have been pruned since."""

    batch_id: str
    step: int
    is_trained: bool = False  # the book says so already: a replay after a restart


@dataclass(kw_only=True)
class Batch(Taken):
    """What one step trains."""

    rows: Rows
    ref_E: Floats | None = None  # stored logprobs of the reference, where they have been read
    discarded: dict[str, int] = field(default_factory=dict)


def natural(name: str) -> tuple[Any, ...]:
    """Sort key that puts .../2 before .../10."""
    return tuple(int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name)))


def group_key(group_id: str, run_id: str, own_run_id: str | None) -> str:
    """What tells groups of a book apart: an id names a group of its run, and two runs may use the same ids."""
    return group_id if run_id == own_run_id else json.dumps([run_id, group_id])


def finished_groups(
    book: Book,
    run_id: str,
    *,
    n_samples: int,
    known: set[str],
    without: Collection[str] = (),
    reward: str | None = None,
) -> list[Group]:
    """Groups of the run whose samples all ended, without the known ones; those that finished first come first.

    without: episodes that do not count. Nor do those that were lost or abandoned, which are drawn again; a second
    attempt stands for a failed one.
    """
    table = _judged(
        book,
        f"""
        with judged as ({episode_rewards_query(reward)})
        select group_id, any_value(task_id) as task_id, any_value(task) as task, max(closed_at) as finished_at,
          list(episode_id order by episode_id) filter (where state in ('done', 'failed')) as episode_ids,
          list(state order by episode_id) filter (where state in ('done', 'failed')) as states,
          list(judged.value order by episode_id) filter (where state in ('done', 'failed')) as rewards
        from episodes left join judged using (episode_id)
        where run_id = $run and group_id is not null and not coalesce(is_eval, false)
          and episode_id not in (select unnest($without::varchar[]))
        group by group_id
        having count(*) filter (where state in ('done', 'failed'))
             - count(*) filter (where attempt > 1 and state in ('open', 'done', 'failed')) >= $n
          and count(*) filter (where state = 'open') = 0
        order by finished_at, group_id
        """,
        {"run": run_id, "n": n_samples, "without": list(without)},
        reward=reward,
    )
    return [_group(row, row["group_id"]) for row in table.to_pylist() if row["group_id"] not in known]


def failed_episodes(book: Book, run_id: str, used: Collection[str]) -> frozenset[str]:
    """Of groups that no batch took and of which nothing was done: a run that goes on draws these anew."""
    table = book.sql(
        """
        select unnest(list(episode_id) filter (where state = 'failed')) as episode_id from episodes
        where run_id = $run and group_id is not null and not coalesce(is_eval, false)
          and group_id not in (select unnest($used::varchar[]))
        group by group_id having count(*) filter (where state = 'done') = 0
        """,
        {"run": run_id, "used": list(used)},
    )
    return frozenset(table["episode_id"].to_pylist())


UNDER_WAY_S = 30.0
"""Over how long tokens per second are counted: answers come whole."""


def under_way(book: Book, run_id: str) -> str:
    """How the run's rollouts go now: episodes that run, that failed, the mean of the last 100 rewards, tokens/s."""
    (now,) = book.sql(
        """
        with ours as (select * from episodes where run_id = $run and not coalesce(is_eval, false)),
        late as (select reward from ours where state = 'done' and reward is not null order by closed_at desc limit 100),
        recent as (
          select sum(n_output) as n, least($window, epoch(now()) - epoch((select min(opened_at) from ours))) as seconds
          from interactions where run_id = $run and epoch(recorded_at) > epoch(now()) - $window
        )
        select count(*) filter (state = 'open') as running, count(*) filter (state = 'failed') as failed,
          (select avg(reward) from late) as reward, (select n / greatest(seconds, 1) from recent) as tokens_per_s
        from ours
        """,
        {"run": run_id, "window": UNDER_WAY_S},
    ).to_pylist()
    reward = "" if now["reward"] is None else f"  reward {now['reward']:.3f}"
    return f"running {now['running']}  failed {now['failed']}{reward}  tok/s {now['tokens_per_s'] or 0:.0f}"


def recorded_groups(book: Book, run_id: str, selection: SelectionConfig, *, reward: str | None) -> list[Group]:
    """Groups that other runs left in the book, as the selection says, with whatever of their episodes ended."""
    where = "true" if selection.where is None else parse(selection.where).text
    query = f"""
        with judged as ({episode_rewards_query(reward)})
        select run_id, coalesce(group_id, episode_id) as group_id, any_value(task_id) as task_id,
          any_value(task) as task, list(episode_id order by episode_id) as episode_ids,
          list(state order by episode_id) as states, list(judged.value order by episode_id) as rewards
        from (select * from episodes where ({where}
          )) left join judged using (episode_id)
        where run_id <> $run and (len($runs::varchar[]) = 0 or run_id in (select unnest($runs::varchar[])))
          and not coalesce(is_eval, false) and state in ('done', 'failed')
        group by run_id, coalesce(group_id, episode_id)
        """
    params = {"run": run_id, "runs": selection.runs or []}
    table = _judged(book, query, params, reward=reward, where=selection.where)
    groups = [_group(row, group_key(row["group_id"], row["run_id"], run_id)) for row in table.to_pylist()]
    if not groups:
        raise NothingToTrain(
            f"the selection (runs: {selection.runs or 'all others'}, where: {selection.where or 'anything'}) finds no "
            'ended episode in the book; `rollbook sql BOOK "select run_id, state from episodes"` '
            "shows what is there"
        )
    return sorted(groups, key=lambda group: natural(group.key))


def _judged(book: Book, query: str, params: dict[str, Any], *, reward: str | None, where: str | None = None) -> Any:
    """What a query over rewards finds. Raises BadSetting where the expressions of the settings cannot be computed."""
    try:
        return book.sql(query, params)
    except UNCOMPUTABLE as error:
        given = {"selection.where": where, "credit.reward": reward}
        names = [f"{name} {text!r}" for name, text in given.items() if text is not None]
        if not names:
            raise
        raise BadSetting(
            f"{' or '.join(names)} cannot be computed: {why_uncomputable(error)} (docs/sql.md lists the columns of "
            "`episodes`)"
        ) from error


def _group(row: dict[str, Any], key: str) -> Group:
    return Group(
        group_id=row["group_id"],
        key=key,
        task_id=row["task_id"],
        task=json.loads(row["task"]) if row["task"] else None,
        episode_ids=row["episode_ids"],
        states=row["states"],
        rewards=[None if reward is None or not math.isfinite(reward) else reward for reward in row["rewards"]],
    )


def reason_to_reject(
    group: Group, *, drop_all_equal: bool, accept: Callable[[Group], bool] | None = None
) -> str | None:
    """Why a finished group teaches nothing, or None if it does."""
    if "done" not in group.states:
        return "failed"
    if not group.known_rewards:
        return "no_reward"
    if drop_all_equal and max(group.known_rewards) - min(group.known_rewards) <= 1e-8:
        return "zero_variance"
    if accept is not None and not accept(group):
        return "filtered"
    return None


def take(
    book: Book,
    config: TrainConfig,
    algorithm: Algorithm,
    groups: Sequence[Group],
    rejected: Sequence[tuple[Group, str]],
    *,
    step: int,
    version: int,
    check: Callable[[Rows], Floats | None],
) -> Batch:
    """Make a batch of these groups and write it down. Durable when this returns.

    check: returns the reference's stored logprobs, if there are any. Raises where the rows cannot be trained; nothing
    is written then, and the groups stay free.
    """
    wanted = [
        episode
        for group in groups
        for episode, reward in zip(group.episode_ids, group.rewards, strict=True)
        if reward is not None
    ]
    unjudged = sum(reward is None for group in groups for reward in group.rewards)
    discarded = Counter({"no_reward": unjudged} if unjudged else {})
    for group, reason in rejected:
        discarded[reason] += len(group.episode_ids)
    rows = load_rows(book, episode_ids=wanted, credit=config.credit, run_id=config.run_id)
    if untrainable := len(set(wanted) - set(rows.episode_ids)):
        discarded["untrainable"] += untrainable
    ref_E = None
    if len(rows):
        ref_E = check(rows)
        rows = replace(rows, advantages=algorithm.advantages(rows))
    batch = Batch(batch_id=new_id("batch"), step=step, rows=rows, discarded=dict(discarded), ref_E=ref_E)
    fact = BatchTaken(
        batch_id=batch.batch_id,
        step=step,
        version=version,
        rows=[
            BatchRow(interaction_id=i, credit=float(c), advantage=float(a))
            for i, c, a in zip(rows.interaction_ids, rows.credits, rows.advantages, strict=True)
        ],
        selection={
            "groups": [group.key for group in groups],
            "rejected": [group.key for group, _ in rejected],
            "credit": {f: getattr(config.credit, f) for f in config.credit.__struct_fields__},
            "algorithm": config.algorithm,
        },
        discarded=batch.discarded,
    )
    book.log.append_blocking(Event(run_id=config.run_id, fact=fact))
    return batch


def taken_batches(book: Book, run_id: str, *, from_step: int) -> list[Taken]:
    """Batches of the run from a step on, in order; `rows_of` reads them."""
    known = book.sql(
        "select batch_id, step, trained_at is not null as is_trained from batches "
        "where run_id = $run and step >= $step order by step, taken_at",
        {"run": run_id, "step": from_step},
    ).to_pylist()
    return [Taken(**batch) for batch in known]


def rows_of(book: Book, batch_id: str, run_id: str | None = None) -> Rows:
    """A taken batch again, byte for byte: tokens from the log, credits and advantages from its event.

    Rewards are those that it was taken for: of the name or the expression that its event tells.
    """
    said = book.sql("select selection from batches where batch_id = $batch", {"batch": batch_id})["selection"]
    selection = json.loads(said[0].as_py() or "{}") if len(said) else {}
    taken = book.sql(
        "select interaction_id, credit, advantage from batch_rows where batch_id = $batch", {"batch": batch_id}
    )
    by_id = dict(
        zip(
            taken["interaction_id"].to_pylist(),
            zip(taken["credit"].to_pylist(), taken["advantage"].to_pylist(), strict=True),
            strict=True,
        )
    )
    reward = selection.get("credit", {}).get("reward")
    rows = load_rows(book, interaction_ids=list(by_id), reward=reward, run_id=run_id)
    return replace(
        rows,
        credits=np.array([by_id[i][0] for i in rows.interaction_ids], np.float64),
        advantages=np.array([by_id[i][1] for i in rows.interaction_ids], np.float64),
    )


def used_groups(book: Book, run_id: str) -> Counter[str]:
    """How often batches of the run used or rejected each group, by its key."""
    selections = book.sql("select selection from batches where run_id = $run", {"run": run_id})["selection"].to_pylist()
    used: Counter[str] = Counter()
    for selection in selections:
        chosen = json.loads(selection) if selection else {}
        used.update([*chosen.get("groups", ()), *chosen.get("rejected", ())])
    return used


def load_rows(
    book: Book,
    *,
    episode_ids: Sequence[str] | None = None,
    interaction_ids: Sequence[str] | None = None,
    credit: CreditConfig | None = None,
    reward: str | None = None,
    run_id: str | None = None,
) -> Rows:
    """The trainable interactions of some episodes, or exactly the given ones, in an order that depends on content only.

    An interaction is trainable unless its client said no, its capture is incomplete, it sampled nothing, it has no
    prompt or one that cannot be rebuilt, it was pruned, a logprob of it is no finite number, or its request was sent
    again and went on from there. Credits are computed where a scheme is given; else `reward` names the rewards.
    """
    by_episode = episode_ids is not None
    wanted: Sequence[str] = (episode_ids if episode_ids is not None else interaction_ids) or ()
    table = book.sql(
        f"""
        with judged as ({episode_rewards_query(reward if credit is None else credit.reward)})
        select i.interaction_id, i.episode_id, coalesce(e.group_id, i.episode_id) as group_id, e.run_id,
          i.finish_reason, i.n_output, i.sampling, i.logprobs_mode, judged.value as reward
        from interactions i join episodes e using (episode_id) left join judged using (episode_id)
        where {"i.episode_id" if by_episode else "i.interaction_id"} in (select unnest($ids::varchar[]))
        {"and i.is_trainable and i.capture = 'complete' and i.n_output > 0" if by_episode else ""}
        {"and not (i.is_leaf and i.is_retried) and not i.is_broken and not i.is_pruned" if by_episode else ""}
        """,
        {"ids": list(wanted)},
    )
    facts = {row["interaction_id"]: row for row in table.to_pylist()}
    ids = list(facts)
    tokens = book.load(ids)
    order = [facts[i] for i in tokens.row_ids]
    credits = np.array([np.nan if row["reward"] is None else row["reward"] for row in order], np.float64)
    if credit is not None and ids:
        credits = _credits(book, tokens.row_ids, credit, wanted)
    mask = tokens.loss_mask
    versions = tokens.versions[mask]
    if run_id is not None:
        # Another run's versions are other weights: older than version 0 of this one, whatever their number.
        is_foreign = np.array([row["run_id"] != run_id for row in order], np.bool_)
        n_E = np.array([row["n_output"] for row in order], np.int64)
        versions = np.where(np.repeat(is_foreign, n_E), -1, versions)
    starts = tokens.cu_seqlens.astype(np.int64)
    n_output = np.add.reduceat(mask.astype(np.int64), starts[:-1]) if len(ids) else np.empty(0, np.int64)
    rows = Rows(
        interaction_ids=list(tokens.row_ids),
        episode_ids=[row["episode_id"] for row in order],
        group_ids=[group_key(row["group_id"], row["run_id"], run_id) for row in order],
        ids=tokens.input_ids,
        starts=starts,
        n_prompt=np.diff(starts) - n_output,
        logprobs=tokens.logprobs[mask].astype(np.float64),
        versions=versions,
        credits=credits,
        rewards=np.array([np.nan if row["reward"] is None else row["reward"] for row in order], np.float64),
        is_cut=np.array([row["finish_reason"] == "length" for row in order], np.bool_),
        advantages=np.zeros(len(ids)),
        draws=[drawn(row["sampling"], row["logprobs_mode"]) for row in order],
        is_held=np.array([was_held(row["sampling"], row["logprobs_mode"]) for row in order], np.bool_),
    )
    paths = [rows.path(r).astype(">u4").tobytes() for r in range(len(rows))]
    keys = [(natural(rows.group_ids[r]), paths[r], rows.interaction_ids[r]) for r in range(len(rows))]
    if by_episode and ids:
        is_known = np.logical_and.reduceat(np.isfinite(rows.logprobs), rows.output_starts[:-1])
        is_usable = is_known & (rows.n_prompt > 0) & (np.isfinite(credits) if credit is not None else True)
    else:
        is_usable = np.ones(len(ids), np.bool_)
    kept = [r for r in sorted(range(len(rows)), key=keys.__getitem__) if is_usable[r]]
    return rows.take(np.array(kept, np.int64))


def drawn(sampling: str | None, logprobs_mode: str | None) -> Draw | None:
    """The distribution that an interaction's logprobs are of; None where the book does not say.

    Raw logprobs are of the model's own distribution, whatever it was drawn from. Greedy ones are too.
    """
    said = json.loads(sampling) if sampling else {}
    temperature, top_p, top_k = (_number(said.get(name)) for name in ("temperature", "top_p", "top_k"))
    if temperature is None or temperature < 0:
        return None
    if logprobs_mode == "raw" or not temperature:
        return Draw()
    return Draw(temperature, 1.0 if top_p is None else top_p, max(0, int(top_k or 0)))


def _number(value: Any) -> float | None:
    """A finite number of a record; None for anything else, since whoever appends may write what he likes there."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def was_held(sampling: str | None, logprobs_mode: str | None) -> bool:
    """Whether logprobs are of no distribution that is known here: a script's, or of what an enforced form left.

    Raw ones are of the model's own distribution, form or not.
    """
    if logprobs_mode in ("raw", "invented"):
        return logprobs_mode == "invented"
    return bool(sampling) and json.loads(sampling or "{}").get("is_held") is True


def scored(book: Book, rows: Rows, scorer: str) -> Floats:
    """E: the stored logprobs of rows under that name. Raises NothingToTrain where some have none that can be used."""
    table = book.scores(scorer, rows.interaction_ids)
    found = dict(zip(table["interaction_id"].to_pylist(), table["logprobs"], strict=True))
    parts: list[Floats] = []
    for interaction_id, n in zip(rows.interaction_ids, rows.n_output.tolist(), strict=True):
        stored = found.get(interaction_id)
        values = None if stored is None or stored.values is None else stored.values.to_numpy(zero_copy_only=False)
        if values is not None and len(values) == n and np.isfinite(values).all():
            parts.append(values)
    if missing := len(rows) - len(parts):
        raise NothingToTrain(
            f"{missing} of {len(rows)} interactions of the batch have no scores {scorer!r}, or not a finite number for "
            f"each of their tokens; `rollbook rescore BOOK --model REFERENCE --name {scorer}` writes them. Nothing was "
            "trained"
        )
    return np.concatenate(parts).astype(np.float64) if parts else np.empty(0)


def _credits(book: Book, rows: Sequence[str], credit: CreditConfig, episode_ids: Sequence[str]) -> Floats:
    """R: what each interaction gets, NaN where nothing is known."""
    table = book.credits(
        scheme=credit.scheme, gamma=credit.gamma, fork=credit.fork, reward=credit.reward, episode_ids=episode_ids
    )
    by_id = dict(zip(table["interaction_id"].to_pylist(), table["credit"].to_pylist(), strict=True))
    return np.array([np.nan if by_id.get(i) is None else by_id[i] for i in rows], np.float64)


def refuse_unjudged(groups: Sequence[Group], config: TrainConfig) -> None:
    """Raise NothingToTrain: a whole batch's worth of groups came to an end and none has a reward."""
    states = Counter(state for group in groups for state in group.states)
    said = ", ".join(f"{n} {state}" for state, n in states.items())
    raise NothingToTrain(
        f"{len(groups)} groups {'of the selection' if config.scheduler.type == 'none' else f'of run {config.run_id}'} "
        f"ended ({said}) and none of "
        "their episodes has a reward; return a number from the agent's run(), call set_reward, or give rewards "
        "later and train again. Nothing was trained and nothing is lost"
    )
