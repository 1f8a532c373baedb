"""Credit: what each interaction gets once rewards are spread over the conversation tree. Computed, never stored.

A reward stands on an interaction, or on the episode; the episode's stands at the end of its main trajectory
(`episodes.main_id`), so that a side call or a sub-agent gets nothing by accident. Then, by scheme:

    tree       G(n) = r(n) + gamma * fork over n's children of G    (fork: mean, sum or max; the default)
    arrival    the same along the order of recording, whatever the tree; AReaL's reversed arrival order
    broadcast  every interaction gets the episode's reward
    none       every interaction gets its own reward

Children are by `up_id`: a retry stands for the request that it repeats, and nothing flows from an orphan. Credit
crosses compaction unless told otherwise, never from one root to another. Missing is missing: a node gets NULL unless
it or something below it was rewarded, and a branch without rewards does not count in a mean.

`reward` is a name (the rewards of that name, as they were given), or an SQL expression over the columns of `episodes`
and the names of rewards (`accuracy - 0.01 * n_interactions`), which gives each episode a reward.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from .errors import BadSelection
from .expressions import literal, parse, quote
from .schema import current_rewards_sql, episode_rewards_sql, metadata

Scheme = Literal["tree", "arrival", "broadcast", "none"]
Fork = Literal["mean", "sum", "max"]

_FORKS = {"mean": "avg", "sum": "sum", "max": "max"}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LEVELS = 64
EPISODE_COLUMNS = frozenset(column.name for column in metadata.tables["episodes"].columns)


def is_reward_name(reward: str) -> bool:
    """Whether `reward` is a name, not an expression. A name with other signs is written in double quotes."""
    return bool(_NAME.fullmatch(reward)) or (
        len(reward) > 2 and reward[0] == reward[-1] == '"' and '"' not in reward[1:-1]
    )


def given_query(reward: str | None, episodes: str | None = None) -> str:
    """SQL for the rewards to be spread: (episode_id, interaction_id or NULL for the episode's own, value).

    episodes: SQL for the episode_ids wanted; None for all.
    """
    name = "reward" if reward is None else reward.strip('"')
    if reward is None or is_reward_name(reward):
        return (
            f"select episode_id, interaction_id, sum(value * weight) as value from {_standing([name], episodes)} "
            "group by episode_id, interaction_id"
        )
    return (
        "select episode_id, null::varchar as interaction_id, value from "
        f"({episode_rewards_query(reward, episodes)}) where value is not null"
    )


def _standing(names: Sequence[str], episodes: str | None) -> str:
    """SQL for `current_rewards` under these names, of all episodes or of the wanted ones, which are chosen first."""
    only = "" if episodes is None else f" and episode_id in ({episodes})"
    wanted = ", ".join(literal(name) for name in names)
    return f"({current_rewards_sql(f'(from rewards where name in ({wanted}){only})')})"


def episode_rewards_query(reward: str | None, episodes: str | None = None) -> str:
    """SQL for the reward of each episode: (episode_id, value). Episodes without one may be missing or NULL.

    An expression that gives no finite number gives none: one such value would be its whole group's mean.
    """
    query = computed_rewards_query(reward, episodes)
    if reward is None or is_reward_name(reward):
        return query
    return f"select episode_id, case when isfinite(value) then value end as value from ({query})"


def computed_rewards_query(reward: str | None, episodes: str | None = None) -> str:
    """The same with whatever an expression gives, infinities and NaN included."""
    only = "" if episodes is None else f" where episode_id in ({episodes})"
    if reward is None or reward == "reward":
        return f"select episode_id, reward as value from episodes{only}"
    if is_reward_name(reward):
        rewards = episode_rewards_sql(_standing([reward.strip('"')], episodes))
        return f"select episode_id, reward as value from ({rewards})"
    expression = parse(reward)
    names = expression.beyond(EPISODE_COLUMNS)
    if not names:
        return f"select episode_id, ({expression.text}\n)::double as value from episodes{only}"
    pivot = ", ".join(f"max(reward) filter (where name = {literal(name)}) as {quote(name)}" for name in names)
    rewards = episode_rewards_sql(_standing(names, episodes))
    return f"""
        select episode_id, ({expression.text}
        )::double as value
        from (select * from episodes{only}) left join (
            select episode_id, {pivot} from ({rewards}) group by episode_id
        ) using (episode_id)
    """


def credit_query(
    *,
    scheme: Scheme = "tree",
    gamma: float = 1.0,
    fork: Fork = "mean",
    reward: str | None = None,
    compacts: bool = True,
    episodes: str | None = None,
) -> str:
    """SQL for (interaction_id, credit), one row per interaction, credit NULL where it is missing.

    episodes: SQL for the episode_ids wanted; None for all. Raises BadSelection.
    """
    if scheme not in get_args(Scheme):
        raise BadSelection(f"credit scheme must be one of {', '.join(get_args(Scheme))}, got {scheme!r}")
    if fork not in _FORKS:
        raise BadSelection(f"fork must be one of {', '.join(_FORKS)}, got {fork!r}")
    if not 0 <= gamma <= 1:
        raise BadSelection(f"gamma must be between 0 and 1, got {gamma}")
    only = "" if episodes is None else f"where episode_id in ({episodes})"
    if scheme == "broadcast":
        return f"""
            select i.interaction_id, r.value as credit
            from (select interaction_id, episode_id from interactions {only}) i
            left join ({episode_rewards_query(reward, episodes)}) r using (episode_id)
        """
    own = f"""
        given as ({given_query(reward, episodes)}),
        own as (
            select node, sum(value) as r from (
                select i.node, g.value from given g join interactions i using (interaction_id)
                union all
                select e.main_node, g.value from given g join episodes e using (episode_id)
                where g.interaction_id is null and e.main_node is not null
            ) group by node
        )
    """
    if scheme == "none":
        return f"""
            with {own}
            select i.interaction_id, own.r as credit
            from (select interaction_id, node from interactions {only}) i left join own using (node)
        """
    if scheme == "arrival":
        fork = "sum"
        up = "lag(node) over arrived"
        depth = "row_number() over arrived"
        window = "window arrived as (partition by episode_id order by recorded_at, event_id)"
    else:
        keeps = "is_retried and is_leaf" if compacts else "(is_retried and is_leaf) or up_edge = 'compacts'"
        up = f"case when {keeps} then null else up_node end"
        depth = "depth"
        window = ""
    # One round per level, lowest first: a recursive term sees only the round before it, so all children of a level are
    # there at once. A level is a depth (which may have holes where a parent lies in another episode), as far as
    # _LEVELS. Below, rounds would be as many as conversations have turns: nodes with one child are stepped over, by
    # ways to their ends that double (a chain of 10,000 takes 14 rounds), and a level is the number of ends above.
    return f"""
        with recursive {own},
        nodes as materialized ( -- up: what its credit flows to
            select n.*, own.r from (
                select node, {up} as up, {depth} as depth from interactions {only} {window}
            ) n left join own using (node)
        ),
        passed as materialized (
            select n.node, k.child, n.r from (
                select up as node, any_value(node) as child from nodes where depth > {_LEVELS} and up is not null
                group by up having count(*) = 1
            ) k join nodes n using (node) where n.depth >= {_LEVELS}
        ),
        doubling(round, node, "end", s, n) as (
            select 0, node, child, r, 1 from passed
            union all
            select a.round + 1, a.node, coalesce(b."end", a."end"), {_plus("a.s", f"power({gamma!r}, a.n) * b.s")},
              a.n + coalesce(b.n, 0)
            from doubling a left join doubling b on b.node = a."end"
            where a.round < (select ceil(log2(greatest(2, max(depth) - {_LEVELS} + 2))) from nodes)
        ),
        ways as materialized (
            select node, "end", s, n, power({gamma!r}, n) as share from doubling
            where round = (select max(round) from doubling)
        ),
        deep as materialized (
            select n.node, n.r, case when w.node is null then n.up else t.up end as up, w.s,
              coalesce(w.share, 1.0) as share
            from (from nodes anti join passed using (node) where depth >= {_LEVELS}) n
            left join (select * from ways qualify n = max(n) over (partition by "end")) w on w."end" = n.node
            left join nodes t on t.node = w.node
        ),
        placed(node, level) as (
            select d.node, coalesce(t.depth + 1, 0) from deep d left join nodes t on t.node = d.up
            where t.node is null or t.depth < {_LEVELS}
            union all
            select d.node, p.level + 1 from deep d join placed p on p.node = d.up
        ),
        ends as materialized (
            select depth as level, node, up, r, null::double as s, 1.0::double as share from nodes
            where depth < {_LEVELS}
            union all
            select p.level, d.node, d.up, d.r, d.s, d.share from deep d join placed p using (node)
        ),
        levels(level, node, up, g, up_g) as (
            select level, node, up, r, {_plus("s", "share * r")} from ends
            where level = (select max(level) from ends)
            union all
            select level, node, up, g, {_plus("s", "share * g")} from (
                select n.*, {_plus("n.r", f"{gamma!r} * k.g")} as g from (
                    select * from ends
                    where level = (select max(level) from ends where level < (select min(level) from levels))
                ) n
                left join (
                    select up, {_FORKS[fork]}(up_g) as g from levels where up is not null and up_g is not null
                    group by up
                ) k on k.up = n.node
            )
        )
        select i.interaction_id, c.g as credit
        from (
            select node, g from levels
            union all
            select w.node, {_plus("w.s", "w.share * levels.g")} from ways w join levels
            on levels.node = w."end"
        ) c join (select interaction_id, node from interactions {only}) i using (node)
    """


def _plus(own: str, spread: str) -> str:
    """SQL for a sum of which a part, or both, may be missing."""
    return f"case when {spread} is null then {own} else coalesce({own}, 0) + {spread} end"


@dataclass(frozen=True, slots=True)
class Turn:
    """One interaction of an episode, as far as credit is concerned."""

    interaction_id: str
    up_id: str | None
    reward: float | None = None  # its own
    up_edge: str | None = None
    is_orphan: bool = False


def credit_episode(
    turns: Sequence[Turn],
    *,
    scheme: Scheme = "tree",
    gamma: float = 1.0,
    fork: Fork = "mean",
    episode_reward: float | None = None,
    main_id: str | None = None,
    compacts: bool = True,
) -> dict[str, float | None]:
    """The credits of one episode, the same numbers as `credit_query`, without a database.

    turns: in the order of recording; parents may come after their children. main_id: where the episode's reward
    stands. Linear in the number of turns, no recursion.
    """
    own: dict[str, float | None] = {turn.interaction_id: turn.reward for turn in turns}
    if scheme == "broadcast":
        given = [reward for reward in own.values() if reward is not None]
        value = episode_reward if episode_reward is not None else sum(given) if given else None
        return dict.fromkeys(own, value)
    if episode_reward is not None and main_id in own:
        own[main_id] = (own[main_id] or 0.0) + episode_reward
    if scheme == "none":
        return own
    below: dict[str, list[str]] = {}
    if scheme == "arrival":
        fork = "sum"
        order = [turn.interaction_id for turn in reversed(turns)]
        for later, earlier in pairwise(order):
            below[earlier] = [later]
    else:
        stack = []
        for turn in turns:
            if turn.up_id in own and (compacts or turn.up_edge != "compacts"):
                if not turn.is_orphan:
                    below.setdefault(turn.up_id, []).append(turn.interaction_id)
                else:
                    stack.append(turn.interaction_id)
            else:
                stack.append(turn.interaction_id)
        order = []
        while stack:
            name = stack.pop()
            order.append(name)
            stack.extend(below.get(name, ()))
        order.reverse()
    credits: dict[str, float | None] = dict.fromkeys(own)
    for name in order:
        gains = [gain for gain in (credits[child] for child in below.get(name, ())) if gain is not None]
        mine = own[name]
        if gains:
            spread = sum(gains) if fork == "sum" else max(gains) if fork == "max" else sum(gains) / len(gains)
            credits[name] = (mine or 0.0) + gamma * spread
        else:
            credits[name] = mine
    return credits


TOLERANCE = 1e-6
"""Rewards of a group that differ by less than this (relative to their size, where that is above 1) are equal."""


def _tolerance_sql(low: str, high: str) -> str:
    return f"{TOLERANCE} * greatest(1.0, abs({high}), abs({low}))"


def is_equal_sql(low: str, high: str) -> str:
    """SQL for whether rewards between `low` and `high` are all equal; true where there are none."""
    return f"coalesce({high} - {low} <= {_tolerance_sql(low, high)}, true)"


def group_statistics_query(rewards: str) -> str:
    """SQL that adds the statistics of its group to each row of a relation (episode_id, run_id, group_id, reward).

    Over the episodes of the group that have a reward: group_n, group_mean, group_std (of the sample; 0 for one),
    others_mean (of the others; NULL for one), group_rank (0 for the lowest to 1 for the highest; ties, which are
    rewards that follow one another within TOLERANCE, in the middle), is_equal (no difference beyond TOLERANCE), and
    three advantages, all 0 where is_equal: advantage_std = (r - mean) / std, advantage_mean = r - mean,
    advantage_others = r - mean of the others. A row without a group is a group of its own, and
    an id names a group of its run.
    """
    return f"""
        with grouped as (
            select x.*, g.n as group_n, g.mean as group_mean, coalesce(g.std, 0.0) as group_std,
              {is_equal_sql("g.low", "g.high")} as is_equal, coalesce(x.group_id, x.episode_id) as _key,
              {_tolerance_sql("g.low", "g.high")} as _tolerance
            from ({rewards}) x left join (
                select run_id, coalesce(group_id, episode_id) as key, count(*) as n, avg(reward) as mean,
                  stddev_samp(reward) as std, min(reward) as low, max(reward) as high
                from ({rewards}) where reward is not null group by all
            ) g on g.run_id = x.run_id and g.key = coalesce(x.group_id, x.episode_id)
        ),
        stepped as (
            select *, reward - lag(reward) over (partition by run_id, _key order by reward) > _tolerance as _is_apart
            from grouped
        ),
        tied as ( -- the frame ends with the last of equal rewards, so it does not matter which of them is apart
            select *, case when reward is not null
              then count(*) filter (_is_apart) over (partition by run_id, _key order by reward) end as _tie
            from stepped
        ),
        ranked as (
            select *,
              case when reward is not null and group_n > 1 then (group_n * group_mean - reward) / (group_n - 1) end
                as others_mean,
              case when reward is null then null when group_n = 1 then 0.5 else (
                rank() over (partition by run_id, _key order by _tie) - 1 +
                (count(*) over (partition by run_id, _key, _tie) - 1) / 2.0
              ) / (group_n - 1) end as group_rank
            from tied
        )
        select * exclude (_key, _tolerance, _is_apart, _tie),
          case when reward is null then null when is_equal then 0.0 else (reward - group_mean) / group_std end
            as advantage_std,
          case when reward is null then null when is_equal then 0.0 else reward - group_mean end as advantage_mean,
          case when reward is null then null when is_equal then 0.0 else reward - others_mean end as advantage_others
        from ranked
    """
