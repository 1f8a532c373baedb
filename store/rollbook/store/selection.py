"""Which trajectories: one typed object, the same for learner, export, re-reward and UI.

A selection goes over episodes. Every episode in its scope (run, tasks, groups, training or evaluation) is either
chosen or left out for one reason, the first that holds:

    open          it has not ended
    state         it ended in a state that was not asked for
    taken         a batch took it already
    no_data       nothing of it can be trained on: not meant for it, repeated later, or its prompt cannot be rebuilt
    pruned        all of that was removed by `rollbook prune`
    stale         its oldest token is too old, or outside the versions asked for
    no_reward     it has no reward under that name or expression
    filtered      the filter expression is not true of it
    incomplete    its group has not ended, or ended with too few episodes
    zero_variance all chosen episodes of its group have the same reward
    not_drawn     the limit was reached

`select` gives rows of the chosen ones, `discards` the others with their reasons; both are one query.
"""

import math
from typing import Any, Literal, get_args, get_origin

import msgspec

from .credit import Fork, Scheme, credit_query, episode_rewards_query, group_statistics_query, is_equal_sql
from .errors import BadSelection
from .expressions import literal, parse
from .schema import metadata

Rows = Literal["interactions", "trajectories", "episodes"]
Order = Literal["oldest", "newest", "random"]
State = Literal["open", "done", "failed", "abandoned", "lost"]

FILTER_COLUMNS = frozenset(column.name for column in metadata.tables["episodes"].columns)


def _check_types(given: msgspec.Struct, what: str) -> None:
    """Python does not look at the types of what a struct is made of. Raises BadSelection, naming the field."""
    for field in msgspec.structs.fields(type(given)):
        value = getattr(given, field.name)
        try:
            msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            names = _choices(field.type)
            expected = f"; expected {', '.join(names)}" if names else ""
            raise BadSelection(f"{what}: {field.name} = {value!r:.100}: {error}{expected}") from None


def _choices(kind: Any) -> tuple[str, ...]:
    """The words that a type allows, somewhere in it."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(word for part in get_args(kind) for word in _choices(part))


class Credit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How rewards are spread over the rows; see `credit.py`."""

    scheme: Scheme = "tree"
    gamma: float = 1.0
    fork: Fork = "mean"
    compacts: bool = True

    def __post_init__(self) -> None:
        _check_types(self, "credit")
        if not math.isfinite(self.gamma):
            raise BadSelection(f"credit: gamma must be a finite number, got {self.gamma}")


class Selection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Which trajectories. A default says: ended as done, not for evaluation, and trainable, whatever the rest."""

    run_id: str | None = None
    task_ids: tuple[str, ...] | None = None
    group_ids: tuple[str, ...] | None = None
    episode_ids: tuple[str, ...] | None = None
    is_eval: bool | None = False  # None: both
    states: tuple[State, ...] = ("done",)
    version_min: int | None = None  # of the oldest token
    version_max: int | None = None  # of the newest token
    current_version: int | None = None  # the learner's version now
    max_staleness: int | None = None  # versions between the oldest token and current_version
    group_size: int | None = None  # whole groups only: none open, at least so many episodes ended, whatever their state
    reward: str | None = None  # a name or an SQL expression; None: 'reward'
    needs_reward: bool = False
    drops_equal: bool = False  # leave out groups whose rewards are all equal
    is_untaken: bool = False  # leave out episodes of which a batch took something
    is_trainable: bool | None = True  # of the rows; None: all
    edges: tuple[str, ...] | None = None  # of the rows: extends, rerendered, compacts, retries, root
    where: str | None = None  # an SQL expression over the columns of `episodes`
    limit: int | None = None  # groups (episodes, where they have none) at most
    order: Order = "oldest"  # which come first, and are drawn first under a limit: by when their group ended
    seed: int = 0  # of the random order
    rows: Rows = "interactions"
    credit: Credit | None = None  # adds the column `credit`

    def __post_init__(self) -> None:
        _check_types(self, "selection")
        if self.max_staleness is not None and self.current_version is None:
            raise BadSelection("max_staleness needs current_version, the version to measure from; give both or neither")
        for name in ("max_staleness", "limit", "group_size"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise BadSelection(f"{name} must not be negative, got {value}")
        if self.where is not None:
            unknown = parse(self.where).beyond(FILTER_COLUMNS)
            if unknown:
                raise BadSelection(
                    f"filter {self.where!r} names {', '.join(unknown)}; "
                    f"the columns are {', '.join(sorted(FILTER_COLUMNS))}"
                )


def selection_from(data: Any) -> Selection:
    """A selection from plain data (JSON, YAML). Raises BadSelection, naming the field."""
    try:
        return msgspec.convert(data, Selection)
    except msgspec.ValidationError as error:
        raise BadSelection(f"selection: {error}") from error


def _any_of(column: str, values: tuple[str, ...]) -> str:
    return f"{column} in ({', '.join(literal(value) for value in values)})" if values else "false"


def _scope(selection: Selection) -> str:
    parts = []
    if selection.run_id is not None:
        parts.append(f"run_id = {literal(selection.run_id)}")
    for column, values in (
        ("task_id", selection.task_ids),
        ("group_id", selection.group_ids),
        ("episode_id", selection.episode_ids),
    ):
        if values is not None:
            parts.append(_any_of(column, values))
    if selection.is_eval is not None:
        parts.append(f"coalesce(is_eval, false) = {selection.is_eval}")
    return " and ".join(parts) or "true"


def _reasons(selection: Selection) -> list[tuple[str, str]]:
    """(reason, SQL that is true where it holds), of one episode by itself, in order."""
    reasons = [("open", "state = 'open'")] if "open" not in selection.states else []
    reasons.append(("state", f"not ({_any_of('state', selection.states)})"))
    if selection.is_untaken:
        reasons.append(("taken", "n_taken > 0"))
    if selection.is_trainable:
        reasons += [("no_data", "n_output = 0"), ("pruned", "n_pruned = n_output")]
    stale = []
    if selection.max_staleness is not None and selection.current_version is not None:
        stale.append(f"version_min < {selection.current_version - selection.max_staleness}")
    if selection.version_min is not None:
        stale.append(f"version_min < {selection.version_min}")
    if selection.version_max is not None:
        stale.append(f"version_max > {selection.version_max}")
    if stale:
        reasons.append(("stale", " or ".join(stale)))
    return reasons


def _judged(selection: Selection, *, with_reasons: bool = False) -> str:
    """CTEs: `scoped` (all episodes in scope, with a reason), `fit` (those that can be chosen), `drawn` (the groups)."""
    reasons = _reasons(selection)
    columns = "episode_id, run_id, group_id, task_id, version_min, version_max, n_output, closed_at, opened_at"
    simple = selection.reward is None or selection.reward == "reward"
    reward = "e.reward" if simple else "r.value"
    spread = episode_rewards_query(selection.reward, "select episode_id from live")
    join = "" if simple else f"left join ({spread}) r using (episode_id)"
    second = [("no_reward", "reward is null")] if selection.needs_reward or selection.drops_equal else []
    if selection.where is not None:
        second.append(("filtered", f"not coalesce(({selection.where}\n), false)"))
    case = " ".join(f"when {condition} then '{name}'" for name, condition in reasons)
    case2 = " ".join(f"when {condition} then '{name}'" for name, condition in second)
    own = f"case {case2} end" if second else "null"
    # Without the need to name a reason the conditions are plain filters, which is much less work.
    passes = " and ".join([_scope(selection), *(f"coalesce(not ({condition}), true)" for _, condition in reasons)])
    live = f"live as (select * from episodes where {passes})"
    if with_reasons:
        live = f"""
            scoped as (select *, case {case} end as reason_1 from episodes where {_scope(selection)}),
            live as (select * exclude (reason_1) from scoped where reason_1 is null)
        """
    return f"""
        {live},
        rewarded as (select e.* exclude (reward), {reward} as reward from live e {join}),
        own as (select {columns}, reward, {own} as reason_2 from rewarded),
        fit as (
            select * exclude (reason_2), coalesce(group_id, episode_id) as key from own where reason_2 is null
        ),
        facts as (
            select run_id, key, any_value(group_id) as group_id, max(coalesce(closed_at, opened_at)) as ended_at,
              {is_equal_sql("min(reward)", "max(reward)")} as is_equal
            from fit group by run_id, key  -- a group is of its run: two runs may use the same ids
        ),
        sized as ({_sized(selection)}),
        drawn as ({_drawn(selection)})
    """


def _sized(selection: Selection) -> str:
    """The groups of `fit`, and whether each is whole. Counted over all episodes in scope, chosen or not."""
    if selection.group_size is None:
        return "select *, true as is_whole from facts"
    return f"""
        select f.*, coalesce(g.n_open = 0 and g.n_ended >= {selection.group_size}, false) as is_whole
        from facts f left join (
            select run_id, group_id, count(*) filter (where state = 'open') as n_open,
              count(*) filter (where state in ('done', 'failed')) as n_ended
            from episodes where group_id in (select group_id from facts) and {_scope(selection)} group by all
        ) g using (run_id, group_id)
    """


def _drawn(selection: Selection) -> str:
    place = {
        "oldest": "ended_at, key, run_id",
        "newest": "ended_at desc, key, run_id",
        "random": f"hash(key || {literal(str(selection.seed))}), key, run_id",
    }[selection.order]
    limit = "" if selection.limit is None else f"limit {selection.limit}"
    also = " and not is_equal" if selection.drops_equal else ""
    return f"""
        select run_id, key, row_number() over (order by {place}) as place from sized
        where is_whole{also} order by {place} {limit}
    """


STATISTICS = (
    "group_n", "group_mean", "group_std", "others_mean", "group_rank", "advantage_std", "advantage_mean",
    "advantage_others",
)  # fmt: skip


_LOST = "(is_broken or is_pruned)"
_CUT = f"""
    select up_node from interactions
    where up_edge = 'extends' and up_node in (
        select up_node from interactions where {_LOST} and up_edge = 'extends'
    ) group by up_node having bool_and({_LOST} or (is_retried and is_leaf))
"""
"""SQL for the nodes that are no leaves, and after which nothing can be rebuilt: there a trajectory ends, too."""


def select_query(selection: Selection) -> str:
    """SQL for the rows of a selection, groups together, in its order.

    Columns: episode_id, run_id, group_id, task_id, reward and the statistics of `group_statistics_query`, over the
    chosen episodes; version_min and version_max of the row; per row also

        interactions   interaction_id, n_prompt, n_output, edge, and weight: its share of the sampled tokens of the
                       episode's rows, so that the weights of an episode sum to one; credit, where it is asked for
        trajectories   leaf_id, n_interactions, n_tokens, n_output, weight: one over the episode's rows; credit: the
                       mean over its interactions; where the end of one cannot be rebuilt, as far as it can
        episodes       n_output, weight: 1
    """
    chosen = group_statistics_query("select * from picked")
    base = f"""
        with {_judged(selection)}, picked as (select fit.*, place from fit join drawn using (run_id, key)),
        chosen as ({chosen})
    """
    about = f"c.episode_id, c.run_id, c.group_id, c.task_id, c.reward, {', '.join('c.' + name for name in STATISTICS)}"
    if selection.rows == "episodes":
        return f"""
            {base} select {about}, c.version_min, c.version_max, c.n_output, 1.0::double as weight from chosen c
            order by c.place, c.episode_id
        """
    how = selection.credit
    credit = "" if how is None else f"""
        , credits as ({credit_query(
            scheme=how.scheme, gamma=how.gamma, fork=how.fork, reward=selection.reward, compacts=how.compacts,
            episodes="select episode_id from chosen",
        )})
    """  # fmt: skip
    kept = ["i.episode_id in (select episode_id from chosen)"]
    if selection.is_trainable:
        kept += ["i.is_trainable", "i.capture = 'complete'", "i.n_output > 0", "not (i.is_retried and i.is_leaf)"]
        kept += ["not i.is_broken", "not i.is_pruned"]
    elif selection.is_trainable is not None:
        kept.append("not i.is_trainable")
    if selection.edges is not None:
        kept.append(_any_of("coalesce(i.edge, 'root')", selection.edges))
    if selection.rows == "trajectories":
        mean = "" if how is None else ", n.credit"
        spread = "" if how is None else """
            left join (
                select p.start_id, avg(credits.credit) as credit
                from credits join interactions p using (interaction_id) group by p.start_id
            ) n on n.start_id = i.start_id
        """  # fmt: skip
        kept.append(f"(i.is_leaf or i.node in ({_CUT}))" if selection.is_trainable else "i.is_leaf")
        return f"""
            {base} {credit}
            select {about}, i.path_version_min as version_min, i.path_version_max as version_max,
              i.interaction_id as leaf_id, i.path_n as n_interactions, i.n_prompt + i.n_output as n_tokens,
              i.path_output as n_output, 1.0 / count(*) over (partition by c.episode_id) as weight {mean}
            from interactions i join chosen c using (episode_id) {spread}
            where {" and ".join(kept)}
            order by c.place, c.episode_id, i.recorded_at, i.event_id
        """
    return f"""
        {base} {credit}
        select {about}, i.version_min, i.version_max, i.interaction_id, i.n_prompt, i.n_output, i.edge,
          i.n_output / sum(i.n_output) over (partition by c.episode_id) as weight
          {"" if how is None else ", credits.credit"}
        from interactions i join chosen c using (episode_id)
        {"" if how is None else "left join credits on credits.interaction_id = i.interaction_id"}
        where {" and ".join(kept)}
        order by c.place, c.episode_id, i.recorded_at, i.event_id
    """


def episodes_query(selection: Selection) -> str:
    """SQL for the episode_ids of a selection, in no order and without statistics."""
    return f"with {_judged(selection)} select episode_id from fit join drawn using (run_id, key)"


def discards_query(selection: Selection) -> str:
    """SQL for the episodes in the scope of a selection that it leaves out: (episode_id, group_id, task_id, reason)."""
    return f"""
        with {_judged(selection, with_reasons=True)},
        reasons as (
            select s.episode_id, s.group_id, s.task_id, coalesce(
                s.reason_1, o.reason_2,
                case when not z.is_whole then 'incomplete'
                  when z.is_equal and {selection.drops_equal} then 'zero_variance'
                  when d.key is null then 'not_drawn' end
            ) as reason
            from scoped s left join own o using (episode_id)
            left join sized z on z.run_id = s.run_id and z.key = coalesce(s.group_id, s.episode_id)
            left join drawn d on d.run_id = z.run_id and d.key = z.key
        )
        from reasons where reason is not null order by episode_id
    """
