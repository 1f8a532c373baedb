"""Questions that every run is asked, each with its SQL and one line of help.

`book.canned("task_curve", run="run-1")`. A parameter that is left out has its default; `run` None means all runs.
`$name` in the SQL is the parameter of that name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import BadSelection
from .schema import standing_sql


@dataclass(frozen=True)
class Canned:
    """One question. defaults: its parameters."""

    name: str
    help: str
    sql: str
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def bind(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters to run it with. Raises BadSelection for one that it does not have."""
        known = {"run": None, **self.defaults}
        strange = sorted(given.keys() - known.keys())
        if strange:
            raise BadSelection(f"{self.name} has no parameter {strange[0]!r}; it has {', '.join(known)}")
        used = set(re.findall(r"\$(\w+)", self.sql))
        return {name: value for name, value in {**known, **given}.items() if name in used}


_RUN = "($run::varchar is null or run_id = $run)"
_TRAINED = "is_trainable and capture = 'complete' and not (is_retried and is_leaf) and not is_broken"

_ALL = (
    Canned(
        "reward_by_turns",
        "Mean reward by number of model calls: do longer episodes do better?",
        f"""
        select n_interactions as turns, count(*) as episodes, count(reward) as rewarded, avg(reward) as reward_mean,
          stddev_samp(reward) as reward_std, avg(n_output) as tokens_mean
        from episodes where {_RUN} and state <> 'open' group by turns order by turns
        """,
    ),
    Canned(
        "task_curve",
        "Mean reward by policy version, training and evaluation apart: is it learning?",
        f"""
        select run_id, coalesce(is_eval, false) as is_eval, coalesce(version, version_min) as version,
          count(*) as episodes, count(reward) as rewarded, avg(reward) as reward_mean,
          stddev_samp(reward) as reward_std, avg(n_output) as tokens_mean, avg(n_interactions) as turns_mean
        from episodes where {_RUN} and state <> 'open' and ($task::varchar is null or task_id = $task)
        group by all order by run_id, is_eval, version
        """,
        {"task": None},
    ),
    Canned(
        "pass_at_k",
        "Chance that at least one of k attempts at a task is rewarded above the threshold (unbiased estimate).",
        f"""
        with t as (
            select run_id, task_id, count(reward) as n, count(*) filter (where reward > $threshold) as c
            from episodes where {_RUN} and state <> 'open' and task_id is not null group by run_id, task_id
        ), k as (select unnest([1, 2, 4, 8, 16, 32, 64, 128]) as k),
        p as (
            select run_id, k, n, c, case when n - c < k then 1.0
              else 1 - coalesce(list_product([1 - k / i::double for i in range(n - c + 1, n + 1)]), 1.0) end as pass
            from t, k where n >= k
        )
        select run_id, k, count(*) as tasks, avg(pass) as pass_at_k from p group by run_id, k order by run_id, k
        """,
        {"threshold": 0.5},
    ),
    Canned(
        "tool_errors",
        "Tool calls by tool: how many had arguments that are no JSON, how many results report an error.",
        f"""
        select tool, count(*) as calls, count(*) filter (where not is_json) as bad_arguments,
          count(is_error) as results, count(*) filter (where is_error) as errors,
          count(*) filter (where is_error) / nullif(count(is_error), 0) as error_rate
        from tool_calls where {_RUN} group by tool order by calls desc, tool
        """,
    ),
    Canned(
        "truncation",
        "How answers ended, by policy version: stop, length (cut off), tool_calls, abort.",
        f"""
        select *, interactions / sum(interactions) over (partition by run_id, version) as share
        from (
            select run_id, version_max as version, finish_reason, count(*) as interactions, avg(n_output) as tokens_mean
            from interactions where {_RUN} group by run_id, version_max, finish_reason
        ) order by run_id, version, finish_reason
        """,
    ),
    Canned(
        "group_health",
        "Groups by what they can teach: waiting, without reward, all equal, or informative.",
        f"""
        with g as (
            select run_id, group_id, count(*) as n, count(*) filter (where state = 'open') as n_open,
              count(*) filter (where state in ('failed', 'abandoned', 'lost')) as n_failed, count(reward) as n_rewarded,
              max(reward) - min(reward) as spread, avg(reward) as mean
            from episodes where {_RUN} and group_id is not null group by run_id, group_id
        )
        select run_id, case when n_open > 0 then 'waiting' when n_rewarded = 0 then 'no reward'
            when spread <= 1e-6 then 'all equal' else 'informative' end as health,
          count(*) as groups, sum(n)::bigint as episodes, sum(n_failed)::bigint as failed, avg(mean) as reward_mean
        from g group by all order by run_id, health
        """,
    ),
    Canned(
        "discards",
        "What learners left out of their batches, by reason.",
        f"""
        select run_id, reason, sum(n)::bigint as episodes, count(*) as batches, min(step) as first_step,
          max(step) as last_step
        from (
            select run_id, step, reason, json_extract(discarded, '$."' || reason || '"')::bigint as n
            from (select *, unnest(json_keys(discarded)) as reason from batches where {_RUN} and discarded is not null)
        ) group by run_id, reason order by run_id, episodes desc, reason
        """,
    ),
    Canned(
        "drift_causes",
        "Why conversations forked instead of going on token by token, most frequent first.",
        f"""
        select run_id, edge, coalesce(cause, '') as cause, count(*) as interactions,
          count(distinct episode_id) as episodes, avg(n_prompt - n_shared) as tokens_again_mean
        from interactions where {_RUN} and edge is not null and edge <> 'extends'
        group by all order by interactions desc, run_id, edge, cause
        """,
    ),
    Canned(
        "rows_per_trajectory",
        "How many interactions trajectories have, and how many tokens training saves by sharing prefixes.",
        f"""
        select n_interactions, count(*) as trajectories, avg(n_tokens) as tokens_mean, avg(n_output) as output_mean,
          sum(n_tokens)::bigint as tokens
        from trajectories where {_RUN} and not is_orphan group by n_interactions order by n_interactions
        """,
    ),
    Canned(
        "staleness",
        "How many versions old the trained tokens were when their batch was taken, by step.",
        """
        select b.run_id, b.step, count(*) as interactions, avg(b.version - i.version_min) as oldest_mean,
          max(b.version - i.version_min) as oldest_max, avg(b.version - i.version_max) as newest_mean
        from batches b join batch_rows r using (batch_id) join interactions i using (interaction_id)
        where ($run::varchar is null or b.run_id = $run) group by all order by b.run_id, b.step
        """,
    ),
    Canned(
        "logprob_gap_by_staleness",
        "Trainer minus engine logprob by versions between them; 0 at staleness 0 when both compute the same.",
        """
        select s.scorer, s.version - i.version_min as staleness, count(*) as interactions,
          avg(s.mean_logprob - i.mean_logprob) as gap_mean, avg(abs(s.mean_logprob - i.mean_logprob)) as gap_abs_mean,
          max(abs(s.mean_logprob - i.mean_logprob)) as gap_abs_max
        from scored s join interactions i using (interaction_id)
        where ($run::varchar is null or i.run_id = $run) group by all order by s.scorer, staleness
        """,
    ),
    Canned(
        "entropy_by_step",
        "Mean entropy of the policy along its own answers, by training step: is it collapsing?",
        """
        select b.run_id, b.step, count(*) as interactions,
          sum(s.mean_entropy * i.n_output) / sum(i.n_output) as entropy_mean, min(s.mean_entropy) as entropy_min
        from scored s join batches b using (batch_id) join interactions i using (interaction_id)
        where s.mean_entropy is not null and ($run::varchar is null or b.run_id = $run)
        group by all order by b.run_id, b.step
        """,
    ),
    Canned(
        "token_ledger",
        "Where the tokens went, by policy version: sampled, trainable, taken into batches, trained.",
        f"""
        with rows as (
            select interaction_id, bool_or(trained_at is not null) as is_trained
            from batch_rows join batches using (batch_id) group by interaction_id
        )
        select run_id, version_max as version, count(*) as interactions, sum(n_output)::bigint as sampled,
          coalesce(sum(n_output) filter (where {_TRAINED}), 0)::bigint as trainable,
          coalesce(sum(n_output) filter (where is_trained is not null), 0)::bigint as taken,
          coalesce(sum(n_output) filter (where is_trained), 0)::bigint as trained,
          sum(n_prompt)::bigint as prompt, sum(n_prompt - n_shared)::bigint as prompt_new
        from interactions left join rows using (interaction_id) where {_RUN} group by all order by run_id, version
        """,
    ),
    Canned(
        "late_rewards",
        "Rewards that came after their episode ended, latest first.",
        """
        select r.run_id, r.episode_id, r.interaction_id, r.name, r.value, r.source,
          epoch(r.given_at - e.closed_at) as seconds_late
        from rewards r join episodes e using (episode_id)
        where r.given_at > e.closed_at and ($run::varchar is null or r.run_id = $run)
        order by seconds_late desc, r.event_id limit $limit
        """,
        {"limit": 100},
    ),
    Canned(
        "orphans",
        "Answers that nobody continued because the request was sent again; kept, and out of training.",
        f"""
        select run_id, episode_id, interaction_id, n_output, finish_reason, delivered, recorded_at
        from interactions where {_RUN} and is_retried and is_leaf order by recorded_at desc, event_id limit $limit
        """,
        {"limit": 100},
    ),
    Canned(
        "reward_versions_diff",
        "Episodes whose reward differs between two names: what did a new judge change?",
        f"""
        with last as ( -- as in `episode_rewards`, but both names in one pass
            select any_value(run_id) as run_id, episode_id, interaction_id, name = $after as is_after,
              arg_max(value * weight, {{'at': given_at, 'id': event_id}}) as value
            from ({standing_sql(f"(from rewards where name in ($before, $after) and {_RUN})")})
            group by episode_id, interaction_id, "start", "end", is_after
        ), pairs as (
            select any_value(run_id) as run_id, episode_id,
              coalesce(sum(value) filter (where not is_after and interaction_id is null),
                sum(value) filter (where not is_after)) as before,
              coalesce(sum(value) filter (where is_after and interaction_id is null),
                sum(value) filter (where is_after)) as after
            from last group by episode_id
        ), top as (
            select * from pairs where abs(after - before) > 1e-9
            order by abs(after - before) desc, episode_id limit $limit
        )
        select p.run_id, episode_id, e.task_id, before, after, after - before as change
        from top p left join episodes e using (episode_id) order by abs(change) desc, episode_id
        """,
        {"before": "reward", "after": "reward_v2", "limit": 100},
    ),
    Canned(
        "run_compare",
        "Runs side by side: episodes, rewards, failures, tokens, steps.",
        f"""
        select run_id, any_value(r.name) as name, count(*) as episodes,
          count(*) filter (where state in ('failed', 'abandoned', 'lost')) as failed,
          avg(reward) filter (where not coalesce(is_eval, false)) as train_reward,
          avg(reward) filter (where is_eval) as eval_reward, sum(n_interactions)::bigint as interactions,
          sum(n_output)::bigint as tokens, any_value(b.steps) as steps
        from episodes left join runs r using (run_id) left join (
            select run_id, count(*) filter (where trained_at is not null) as steps from batches group by run_id
        ) b using (run_id)
        where {_RUN} group by run_id order by run_id
        """,
    ),
    Canned(
        "slowest",
        "The model calls that took longest.",
        f"""
        select run_id, episode_id, interaction_id, seconds, first_token_seconds, n_prompt, n_output,
          n_output / nullif(seconds, 0) as tokens_per_s
        from interactions where {_RUN} and seconds is not null order by seconds desc, interaction_id limit $limit
        """,
        {"limit": 20},
    ),
    Canned(
        "best_worst",
        "The episodes with the highest and the lowest reward: what to read first.",
        f"""
        with ranked as (
            select run_id, episode_id, task_id, reward, n_interactions, n_output, state, closed_at,
              row_number() over (order by reward desc, episode_id) as best,
              row_number() over (order by reward, episode_id) as worst
            from episodes where {_RUN} and reward is not null
        )
        select case when best <= $limit then 'best' else 'worst' end as which, * exclude (best, worst)
        from ranked where best <= $limit or worst <= $limit order by reward desc, episode_id
        """,
        {"limit": 10},
    ),
)

CANNED: Mapping[str, Canned] = {canned.name: canned for canned in _ALL}


def find_canned(name: str) -> Canned:
    """The question of that name. Raises BadSelection with the names there are."""
    if name not in CANNED:
        raise BadSelection(f"no canned view {name!r}; there are {', '.join(sorted(CANNED))}")
    return CANNED[name]
