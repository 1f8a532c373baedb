"""The tables and views that are computed from the log: stable names, one line of help for every column.

They hold narrow facts and pointers (writer, position) into the log, never payloads: no LIST columns (DuckDB
rewrites them on every small commit), no foreign keys (they forbid ALTER), no primary keys (`views.py` keeps rows
unique; an index would cost more than the rest of the projection). Everything here can be dropped and computed
again. A change of a table is a migration in `migrations/` and a new `PROJECTION`.
"""

from dataclasses import dataclass

import sqlalchemy as sa
from duckdb_sqlalchemy import Dialect
from sqlalchemy.schema import CreateTable

PROJECTION = "0006"
"""The revision of these tables; the newest file in `migrations/versions`."""

metadata = sa.MetaData()


def _text(name: str, help: str) -> "sa.Column[str]":
    return sa.Column(name, sa.String, comment=help)


def _int(name: str, help: str) -> "sa.Column[int]":
    return sa.Column(name, sa.Integer, comment=help)


def _long(name: str, help: str) -> "sa.Column[int]":
    return sa.Column(name, sa.BigInteger, comment=help)


def _float(name: str, help: str) -> "sa.Column[float]":
    return sa.Column(name, sa.Double, comment=help)


def _flag(name: str, help: str) -> "sa.Column[bool]":
    return sa.Column(name, sa.Boolean, comment=help)


def _time(name: str, help: str) -> "sa.Column[object]":
    return sa.Column(name, sa.DateTime(timezone=True), comment=help)


def _event(name: str, help: str) -> "sa.Column[object]":
    return sa.Column(name, sa.Uuid, comment=help)


cursors = sa.Table(
    "cursors",
    metadata,
    _text("writer", "a writer of the log"),
    _long("position", "the next of its events to project"),
    comment="How far the tables have followed the log; written in the transaction of the rows.",
)

events = sa.Table(
    "events",
    metadata,
    _event("event_id", "UUIDv7 of the event"),
    _text("writer", "who appended it"),
    _long("position", "its place within that writer's log"),
    _text("kind", "InteractionRecorded, RewardGiven, ..."),
    _text("run_id", "the run"),
    _text("episode_id", "the episode it is about, if any"),
    _text("interaction_id", "the interaction it is about, if any"),
    _time("recorded_at", "when it was recorded"),
    comment="One row per event of the log, each event_id once.",
)

runs = sa.Table(
    "runs",
    metadata,
    _text("run_id", "one experiment/trial"),
    _text("name", "its name"),
    sa.Column("config", sa.String, comment="its config as JSON, of the latest start"),
    _time("started_at", "when it first started"),
    _time("restarted_at", "when it last started"),
    _event("event_id", "of the latest start"),
    comment="One row per run; a restart changes config and restarted_at.",
)

policies = sa.Table(
    "policies",
    metadata,
    _text("run_id", "the run"),
    _text("policy", "which of the run's policies"),
    _int("version", "its version; only rises within a run"),
    _text("path", "the folder of its weights"),
    _int("step", "how many steps had been trained; step k, counted from 0, makes version k + 1"),
    _time("published_at", "when it was published"),
    _event("event_id", "of PolicyPublished"),
    comment="One row per published version; published again, the later one stands.",
)

episodes = sa.Table(
    "episodes",
    metadata,
    _text("episode_id", "one attempt at a task by an agent"),
    _text("run_id", "the run"),
    _text("task_id", "the task; NULL while only the end of the episode is known"),
    _text("group_id", "the episodes drawn together for one task"),
    _int("attempt", "1 for the first try"),
    _flag("is_eval", "for evaluation, not for training"),
    _int("version", "policy version when it began"),
    _text("task", "the dataset row as JSON, where it was kept"),
    _text("key_sha256", "of the session key"),
    _text("origin_interaction_id", "continued from this interaction of another episode"),
    _text("state", "open until closed; then done, failed, abandoned or lost"),
    _text("reason", "why it ended so"),
    _time("opened_at", "when it began"),
    _time("closed_at", "when it ended"),
    _event("opened_by", "event_id of its opening"),
    _event("closed_by", "event_id of its end"),
    _float("reward", "its current reward named 'reward': the episode's own, else the sum over its interactions"),
    _int("n_interactions", "its model calls"),
    _long("n_output", "sampled tokens of those that are trainable: whole, in use, and can be rebuilt"),
    _long("n_pruned", "of n_output, those that can be rebuilt no more since `rollbook prune`"),
    _int("version_min", "oldest policy version among its trainable tokens"),
    _int("version_max", "newest policy version among its trainable tokens"),
    _text(
        "main_id",
        "the last interaction of the main trajectory: of the first tree that went on after its root, else of the "
        "first; where a reward of the episode stands when it is spread",
    ),
    _long("main_node", "the node number of main_id"),
    _int("n_taken", "how often an interaction of it was taken into a batch"),
    comment="One row per episode.",
)

interactions = sa.Table(
    "interactions",
    metadata,
    _text("interaction_id", "one model call: a node of the episode's tree"),
    _text("episode_id", "its episode"),
    _text("run_id", "its run"),
    _text("parent_id", "the node it hangs on; NULL for a root"),
    _text("top_id", "the topmost node above it along up_id; unlike root_id also across compaction"),
    _text("root_id", "the root above it (itself for a root, and for what compacts)"),
    _long("node", "a number for joins within these tables; a rebuild gives others"),
    _long("up_node", "the node number of up_id"),
    _text("up_id", "the node that its credit flows to: the parent; for a retry, that of the node it repeats"),
    _text("up_edge", "why it hangs on up_id"),
    _int("depth", "nodes above it along up_id"),
    _text("edge", "extends, rerendered, compacts or retries; NULL for a root"),
    _text("cause", "why the edge is not extends"),
    _int("version_min", "oldest policy version among its sampled tokens"),
    _int("version_max", "newest policy version among its sampled tokens"),
    _int("n_prompt", "tokens of its whole prompt"),
    _int("n_shared", "of those, the first ones that its parent's path holds"),
    _int("n_output", "sampled tokens"),
    _text("finish_reason", "stop, length, tool_calls, abort"),
    _text("model", "the model that was asked for"),
    _text("role", "which of several agents asked"),
    _text("dialect", "the API it came by"),
    _flag("is_trainable", "may be trained on"),
    _text("capture", "complete or incomplete"),
    _text("origin_id", "in a fork: the interaction that it repeats from the record; NULL where it was sampled"),
    _int("delivered", "sampled tokens that reached the client, where it left early"),
    _text("logprobs_mode", "of which distribution the logprobs are: processed, raw, or invented by a script"),
    _text("sampling", "sampling settings as JSON"),
    _float("mean_logprob", "mean behaviour logprob of its sampled tokens; NULL once they are pruned"),
    _float("seconds", "from request to last token"),
    _float("first_token_seconds", "from request to first token"),
    _time("recorded_at", "when it was recorded"),
    _text("writer", "where its tokens and messages are in the log"),
    _long("position", "where its tokens and messages are in the log"),
    _event("event_id", "of InteractionRecorded"),
    _flag("is_leaf", "no node extends it: the end of a trajectory"),
    _flag("is_retried", "a later request repeated it; with is_leaf: an orphan, out of training by default"),
    _flag("is_broken", "it shares tokens that no parent in its episode has, so its prompt cannot be rebuilt"),
    _flag("is_pruned", "`rollbook prune` removed its tokens, or some of a parent's that it shares"),
    _text("start_id", "first node of its trajectory"),
    _int("path_n", "nodes from there to here"),
    _long("path_output", "sampled tokens from there to here"),
    _int("path_version_min", "oldest policy version from there to here"),
    _int("path_version_max", "newest policy version from there to here"),
    comment="One row per model call.",
)

rewards = sa.Table(
    "rewards",
    metadata,
    _event("event_id", "of RewardGiven"),
    _text("run_id", "the run"),
    _text("episode_id", "the episode"),
    _text("interaction_id", "the interaction; NULL: the episode itself is judged"),
    _int("start", "first output token of the judged span"),
    _int("end", "end (exclusive) of the judged span"),
    _text("name", "what is judged"),
    _float("value", "the judgement"),
    _float("weight", "what it counts; a reward counts value * weight"),
    _text("source", "who judged"),
    _text("details", "anything else, as JSON"),
    _time("given_at", "when it was given"),
    comment="One row per reward ever given; the view `current_rewards` has those that stand.",
)

batches = sa.Table(
    "batches",
    metadata,
    _text("batch_id", "what a learner took in one step"),
    _text("run_id", "the run"),
    _int("step", "the training step, from 0"),
    _int("version", "the learner's version when it was taken"),
    _time("taken_at", "when it was taken"),
    _time("trained_at", "when it was trained; NULL until then"),
    _int("n_rows", "interactions in it"),
    _text("selection", "the selection it came from, as JSON"),
    _text("discarded", "episodes left out by reason, as JSON"),
    _text("metrics", "of the training step, as JSON"),
    _event("taken_by", "event_id of BatchTaken"),
    _event("trained_by", "event_id of BatchTrained"),
    comment="One row per batch.",
)

batch_rows = sa.Table(
    "batch_rows",
    metadata,
    _text("batch_id", "the batch"),
    _text("interaction_id", "an interaction in it"),
    _float("credit", "its credit"),
    _float("advantage", "its advantage"),
    _float("weight", "its weight in the loss"),
    comment="One row per interaction of a batch.",
)

scored = sa.Table(
    "scored",
    metadata,
    _text("interaction_id", "the interaction"),
    _text("run_id", "the run"),
    _int("version", "the weights that scored it; NULL where they are none of the run's policies"),
    _text("scorer", "who scored"),
    _text("weights_sha256", "of the weights' files, where they were read from a folder"),
    _text("batch_id", "for which batch"),
    _float("mean_logprob", "mean logprob of its output under those weights; NULL once that is pruned"),
    _float("mean_entropy", "mean entropy of those weights along its output; NULL once that is pruned"),
    _time("scored_at", "when"),
    _text("writer", "where the scores are in the log"),
    _long("position", "where the scores are in the log"),
    _event("event_id", "of TokensScored"),
    comment="One row per scoring of an interaction's output under other weights; the view `scores` adds the gap.",
)

pruned = sa.Table(
    "pruned",
    metadata,
    _text("interaction_id", "an interaction whose messages and tokens are removed"),
    _text("episode_id", "its episode"),
    _text("run_id", "its run"),
    _time("pruned_at", "when `rollbook prune` first took it"),
    _event("event_id", "of InteractionsPruned"),
    comment="One row per interaction that `rollbook prune` took. Its row of `interactions`, rewards and versions stay.",
)

failures = sa.Table(
    "failures",
    metadata,
    _text("run_id", "the run"),
    _text("episode_id", "the episode"),
    _text("error", "the kind of failure"),
    _text("message", "what happened"),
    _int("status", "HTTP status that the client got"),
    _text("dialect", "the API it came by"),
    _time("failed_at", "when"),
    _event("event_id", "of InteractionFailed"),
    comment="One row per model call that got no usable answer.",
)

tool_calls = sa.Table(
    "tool_calls",
    metadata,
    _text("run_id", "the run"),
    _text("episode_id", "the episode"),
    _text("interaction_id", "the model call that asked for the tool"),
    _int("call", "its place among the calls of that answer"),
    _text("tool", "the tool's name"),
    _flag("is_json", "its arguments are a JSON object"),
    _flag("is_error", "what came back reports an error; NULL while nothing has come back"),
    _time("called_at", "when the answer that asked was recorded"),
    _long("key", "a number for the call's id within its episode; the same in `tool_results`"),
    comment="One row per tool call that a model made. Read from messages, so there are none of what was pruned.",
)

tool_results = sa.Table(
    "tool_results",
    metadata,
    _text("run_id", "the run"),
    _text("episode_id", "the episode"),
    _text("interaction_id", "the model call whose request brought it"),
    _int("place", "its place among the new messages of that request"),
    _flag("is_error", "it reports an error"),
    _time("answered_at", "when that model call was recorded"),
    _long("key", "a number for the call's id within its episode; the same in `tool_calls`"),
    comment="One row per result that an agent sent back; branches may send one again. None of what was pruned.",
)


@dataclass(frozen=True)
class View:
    """A view: its SQL, one line of help, and the help of each column."""

    name: str
    help: str
    columns: dict[str, str]
    sql: str


def is_judge_sql(source: str) -> str:
    """SQL for whether a reward is of a judge, by `rollbook reward`: its source ends with the hash of what judged."""
    return f"regexp_matches({source}, '@[0-9a-f]{{12}}$')"


def standing_sql(rewards: str) -> str:
    """SQL for these rows of `rewards` without those of earlier judges: under one name an episode is judged by the last
    one alone, whatever it judged in it (the episode, some interactions), or values of both would be added up.
    """
    return f"""
        select r.* from {rewards} r left join (
          select episode_id, name, arg_max(source, {{'at': given_at, 'id': event_id}}) as judge
          from {rewards} where {is_judge_sql("source")}
          group by episode_id, name having min(source) <> max(source)
        ) j using (episode_id, name)
        where j.judge is null or r.source = j.judge or not {is_judge_sql("r.source")}
    """


def current_rewards_sql(rewards: str) -> str:
    """SQL for what stands of some rows of `rewards`, given as a relation in SQL. It groups, so that a condition behind
    it is a condition on all rewards of the book: choose before.
    """
    return f"""
        select run_id, episode_id, interaction_id, "start", "end", name, last.value as value, last.weight as weight,
          last.source as source, given_at, last.event_id as event_id
        from (
          select any_value(run_id) as run_id, episode_id, interaction_id, "start", "end", name,
            max(given_at) as given_at,
            arg_max(
              {{'value': value, 'weight': weight, 'source': source, 'event_id': event_id}},
              {{'at': given_at, 'id': event_id}}
            ) as last
          from ({standing_sql(rewards)}) group by episode_id, interaction_id, "start", "end", name
        )
    """


def episode_rewards_sql(current: str) -> str:
    """SQL for the view `episode_rewards` of some rows of `current_rewards`."""
    return f"""
        select any_value(run_id) as run_id, episode_id, name,
          coalesce(sum(value * weight) filter (where interaction_id is null), sum(value * weight)) as reward,
          max(given_at) as given_at
        from {current} group by episode_id, name
    """


VIEWS: tuple[View, ...] = (
    View(
        "current_rewards",
        "Of the rewards on one target under one name, the one given last; of several judges, the last one's.",
        {
            "run_id": "the run",
            "episode_id": "the episode",
            "interaction_id": "the interaction; NULL: the episode itself is judged",
            "start": "first output token of the judged span",
            "end": "end (exclusive) of the judged span",
            "name": "what is judged",
            "value": "the judgement",
            "weight": "what it counts",
            "source": "who judged",
            "given_at": "when it was given",
            "event_id": "of RewardGiven",
        },
        current_rewards_sql("rewards"),
    ),
    View(
        "episode_rewards",
        "An episode's current reward under each name: its own if it has one, else the sum over its interactions.",
        {
            "run_id": "the run",
            "episode_id": "the episode",
            "name": "what is judged",
            "reward": "value * weight, summed as said",
            "given_at": "when the last of them was given",
        },
        episode_rewards_sql("current_rewards"),
    ),
    View(
        "groups",
        "One row per group of episodes.",
        {
            "run_id": "the run",
            "group_id": "the group",
            "task_id": "its task",
            "n_episodes": "episodes in it",
            "n_done": "episodes that ended, whatever their state",
            "n_rewarded": "episodes that have a reward",
            "reward_mean": "mean over the episodes that have one",
            "reward_std": "sample standard deviation over them; NULL for fewer than two",
        },
        """
        select run_id, group_id, min(task_id) as task_id, count(*) as n_episodes,
          count(*) filter (where state <> 'open') as n_done, count(reward) as n_rewarded,
          avg(reward) as reward_mean, stddev_samp(reward) as reward_std
        from episodes where group_id is not null group by run_id, group_id
        """,
    ),
    View(
        "tasks",
        "One row per task of a run.",
        {
            "run_id": "the run",
            "task_id": "one dataset row",
            "task": "the row as JSON, where it was kept",
            "n_groups": "groups drawn for it",
            "n_episodes": "episodes of it",
        },
        """
        select run_id, task_id, min(task) as task, count(distinct group_id) as n_groups, count(*) as n_episodes
        from episodes where task_id is not null group by run_id, task_id
        """,
    ),
    View(
        "trajectories",
        "One row per trajectory: a path of `extends` edges, tokens exactly as the model saw them.",
        {
            "leaf_id": "its last interaction",
            "episode_id": "the episode",
            "run_id": "the run",
            "root_id": "the root of its tree",
            "start_id": "its first interaction",
            "n_interactions": "interactions in it",
            "n_tokens": "all its tokens",
            "n_output": "those that were sampled",
            "version_min": "oldest policy version among them",
            "version_max": "newest policy version among them",
            "is_orphan": "its last request was repeated and nothing follows it: out of training by default",
        },
        """
        select interaction_id as leaf_id, episode_id, run_id, root_id, start_id, path_n as n_interactions,
          n_prompt + n_output as n_tokens, path_output as n_output,
          path_version_min as version_min, path_version_max as version_max,
          is_retried as is_orphan
        from interactions where is_leaf
        """,
    ),
    View(
        "scores",
        "Logprobs and entropies of interactions under other weights than those that sampled them.",
        {
            "interaction_id": "the interaction",
            "version": "the weights that scored it; NULL where they are none of the run's policies",
            "scorer": "who scored",
            "weights_sha256": "of the weights' files, where they were read from a folder",
            "batch_id": "for which batch",
            "mean_logprob": "mean logprob of its output under those weights",
            "mean_gap": "that minus the mean behaviour logprob; 0 when engine and trainer agree",
            "mean_entropy": "mean entropy of those weights along its output",
            "scored_at": "when",
            "writer": "where the scores are in the log",
            "position": "where the scores are in the log",
        },
        """
        select s.interaction_id, s.version, s.scorer, s.weights_sha256, s.batch_id, s.mean_logprob,
          s.mean_logprob - i.mean_logprob as mean_gap, s.mean_entropy, s.scored_at, s.writer, s.position
        from scored s left join interactions i using (interaction_id)
        """,
    ),
)


def create_statements() -> list[str]:
    """The SQL that makes every table and view in an empty database."""
    dialect = Dialect()
    tables = [str(CreateTable(table).compile(dialect=dialect)) for table in metadata.sorted_tables]
    return tables + view_statements()


def view_statements() -> list[str]:
    """The SQL that makes, or replaces, every view; views hold no data and need no migration."""
    return [f"create or replace view {view.name} as {view.sql.strip()}" for view in VIEWS]
