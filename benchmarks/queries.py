"""How fast the book answers: replay, credit, selection, re-reward.

    python benchmarks/queries.py            a million rows each; about two minutes and 4 GiB
    python benchmarks/queries.py --rows 100000

Each figure is the best of a few runs (wall and CPU seconds), beside what it should reach and a calibration in the same
run: the time DuckDB takes to sum a column of as many numbers grouped by a text key.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from rollbook.store.book import Book, open_book
from rollbook.store.canned import CANNED
from rollbook.store.credit import Turn, credit_episode
from rollbook.store.events import (
    EpisodeClosed,
    EpisodeOpened,
    Event,
    InteractionRecorded,
    RewardGiven,
)
from rollbook.store.memory import MemoryLog
from rollbook.store.rows import admit_rewards, to_batch
from rollbook.store.selection import Credit, Selection


def timed(run: Callable[[], Any], times: int = 3) -> tuple[float, float]:
    """Best wall and CPU seconds."""
    best = (float("inf"), float("inf"))
    for _ in range(times):
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        best = min(best, (time.perf_counter() - wall, time.process_time() - cpu))
    return best


def row(name: str, wall: float, cpu: float, target: str, got: str = "") -> None:
    print(f"{name:<58} {wall * 1e3:>10.2f} {cpu * 1e3:>10.2f}   {got:<16} {target}", flush=True)


# ---------------------------------------------------------------- replay


def history(n_episodes: int, n_turns: int, *, uses_tools: bool = False) -> Iterator[list[Event]]:
    """Episodes of `n_turns` chained calls with 11 KB payloads: opened, calls, reward, closed.

    uses_tools: each answer is a tool call, and each request but the first a result.
    """
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 32_000, 1000, dtype=np.int32)
    logprobs = rng.normal(-1, 0.5, 300).astype(np.float32)
    versions = np.zeros(300, np.int32)
    said = b'{"request":[{"role":"user","content":"' + b"x" * 5000 + b'"}],"reply":{"role":"assistant"}}'
    for e in range(n_episodes):
        episode = f"ep_{e:032x}"
        events = [
            Event(run_id="run", episode_id=episode, fact=EpisodeOpened(task_id=f"t{e // 8}", group_id=f"g{e // 8}"))
        ]
        for turn in range(n_turns):
            if uses_tools:
                back = b'"tool","tool_call_id":"call_%x_%x"' % (e, turn - 1) if turn else b'"user"'
                asks = b'{"id":"call_%x_%x","type":"function","function":{"name":"run","arguments":"{}"}}' % (e, turn)
                said = (
                    b'{"request":[{"role":' + back + b',"content":"' + b"x" * 5000 + b'"}],'
                    b'"reply":{"role":"assistant","content":"","tool_calls":[' + asks + b"]}}"
                )
            fact = InteractionRecorded(
                parent_id=f"chatcmpl-{e:024x}{turn - 1:04x}" if turn else None,
                edge="extends" if turn else None,
                shared=1300 * turn,
                prompt_length=1300 * turn + 1000,
                prefix_hash="0" * 32,
                reply_hash="0" * 32,
                sampling={"temperature": 1.0, "max_tokens": 300},
                finish_reason="stop",
                seconds=1.0,
                first_token_seconds=0.1,
            )
            events.append(
                Event(
                    run_id="run", episode_id=episode, interaction_id=f"chatcmpl-{e:024x}{turn:04x}", fact=fact,
                    messages=said, prompt_ids=ids, output_ids=ids[:300], logprobs=logprobs, versions=versions,
                )
            )  # fmt: skip
        events.append(Event(run_id="run", episode_id=episode, fact=RewardGiven(value=float(e % 2))))
        events.append(Event(run_id="run", episode_id=episode, fact=EpisodeClosed(state="done")))
        yield events


class Recorded(MemoryLog):
    """A log with batches that were made before the clock started."""

    def __init__(self, batches: list[pa.RecordBatch]) -> None:
        super().__init__("w")
        self._book["w"] = batches


def replay(n_events: int, *, uses_tools: bool = False) -> None:
    waiting: list[Event] = []
    batches: list[pa.RecordBatch] = []
    done = 0
    for events in history(n_events // 11, 8, uses_tools=uses_tools):
        waiting += events
        if len(waiting) >= 512:
            batches.append(to_batch(waiting, writer="w", first_position=done))
            done += len(waiting)
            waiting = []
    log = Recorded(batches)
    wall, cpu = timed(lambda: Book(log).close(), times=2)
    row(
        f"replay {done:,} events{', with tools,' * uses_tools} to the tables",
        wall,
        cpu,
        ">= 100,000 events/s",
        f"{done / wall:,.0f}/s",
    )


# ---------------------------------------------------------------- the rest


def fill(book: Book, sql: str) -> None:
    with book.views.cursor() as cursor:
        cursor.execute(sql)


def credit(rows: int) -> None:
    """Branching trees of 20 nodes, one rewarded node each."""
    book = Book(MemoryLog())
    n = rows // 20
    rng = np.random.default_rng(0)
    place = np.tile(np.arange(20), n)
    up = np.arange(n * 20) - np.minimum(rng.integers(1, 4, n * 20), np.maximum(place, 1))
    depth = np.zeros(n * 20, np.int32)
    for k in range(1, 20):
        at = np.arange(k, n * 20, 20)
        depth[at] = depth[up[at]] + 1
    table = pa.table({"node": np.arange(n * 20), "up": pa.array(up, mask=place == 0), "depth": depth})
    with book.views.cursor() as cursor:
        cursor.register("made", table)
        cursor.execute("""
            insert into interactions by name select node, up as up_node, depth,
              'chatcmpl-' || lpad(hex(node), 32, '0') as interaction_id,
              'ep_' || lpad(hex(node // 20), 32, '0') as episode_id,
              true as is_trainable, false as is_leaf, false as is_retried, false as is_broken, false as is_pruned
            from made
        """)
        cursor.execute("""
            insert into rewards by name select uuid() as event_id, episode_id, interaction_id, 'reward' as name,
              random() as value, 1.0 as weight, now() as given_at from interactions where node % 20 = 19
        """)
    assert book.credits(gamma=0.95).num_rows == n * 20
    row(f"credit of {n * 20:,} interactions in SQL", *timed(lambda: book.credits(gamma=0.95)), "<= 700 ms")
    turns = [Turn(str(i), str(up[i]) if i else None, 1.0 if i == 47 else None) for i in range(48)]
    online = timed(lambda: credit_episode(turns, gamma=0.95), times=50)
    row("credit of one episode of 48 interactions, online", *online, "<= 1 ms")
    book.close()


def fill_episodes(book: Book, rows: int) -> None:
    """Groups of 8, versions 0 to 99, a tenth of the groups with equal rewards."""
    fill(book, f"""
        insert into episodes by name select 'ep_' || lpad(hex(i), 32, '0') as episode_id, 'run' as run_id,
          'task' || (i // 8) as task_id, 'group_' || lpad(hex(i // 8), 28, '0') as group_id, 1 as attempt,
          false as is_eval, 'done' as state, i * 100 // {rows} as version_min, i * 100 // {rows} as version_max,
          (case when (i // 8) % 10 = 0 then 1 else (i * 7919) % 2 end)::double as reward, 1 as n_interactions,
          300 as n_output, 0 as n_pruned, i as main_node, 0 as n_taken, now() as opened_at, now() as closed_at
        from range({rows}) t(i)
    """)  # fmt: skip


def selection(rows: int) -> None:
    """Episodes of one trajectory each."""
    book = Book(MemoryLog())
    fill_episodes(book, rows)
    fill(book, f"""
        insert into interactions by name select 'chatcmpl-' || lpad(hex(i), 32, '0') as interaction_id, i as node,
          'ep_' || lpad(hex(i), 32, '0') as episode_id, 'run' as run_id, 0 as depth, true as is_trainable,
          'complete' as capture, true as is_leaf, false as is_retried, 300 as n_output, 1000 as n_prompt, 1 as path_n,
          false as is_broken, false as is_pruned,
          300 as path_output, i * 100 // {rows} as version_min, i * 100 // {rows} as version_max, now() as recorded_at,
          i * 100 // {rows} as path_version_min, i * 100 // {rows} as path_version_max from range({rows}) t(i)
    """)  # fmt: skip
    how = Selection(
        run_id="run", current_version=99, max_staleness=4, group_size=8, drops_equal=True, is_untaken=True, limit=64,
        rows="trajectories",
    )  # fmt: skip
    found = book.select(how)
    assert found.num_rows == 512
    row(f"512 of {rows:,} trajectories: stale, whole, advantages", *timed(lambda: book.select(how), 5), "<= 100 ms")
    row("  the same with their credit", *timed(lambda: book.select(_with_credit(how)), 3), "")
    row("  why the others were left out", *timed(lambda: book.discards(how), 2), "")
    book.close()


def _with_credit(how: Selection) -> Selection:
    return Selection(**{f: getattr(how, f) for f in how.__struct_fields__ if f != "credit"}, credit=Credit(gamma=0.9))


def rereward(rows: int) -> None:
    """100,000 of `rows` stored episodes, in a book on the disk: in its log, synced, and in its views.duckdb."""
    some = Selection(run_id="run", version_min=max(0, 100 - 100 * 100_000 // rows))
    with tempfile.TemporaryDirectory(prefix="rollbook-bench-") as folder, open_book(folder, writer="w") as book:
        fill_episodes(book, rows)
        fill(book, "checkpoint")
        for name in ("v2", "v3"):
            wall, cpu = timed(lambda name=name: book.rereward("1 - reward", name=name, selection=some), 1)  # type: ignore[misc]
            n = book.sql("select count(*) as n from rewards where name = $name", {"name": name})["n"][0].as_py()
            again = " again" if name == "v3" else ""
            row(f"re-reward of {n:,} episodes{again}, durable and projected", wall, cpu, "<= 1,000 ms")
        given = book.sql("select run_id, episode_id, value from rewards where name = 'v2'")
        start = time.perf_counter(), time.process_time()
        for at in range(0, given.num_rows, 8192):
            book.log.append_rows_blocking(admit_rewards(given.slice(at, 8192), RewardGiven(value=0, name="v4")))
        row("  of that: admitted and in the log", time.perf_counter() - start[0], time.process_time() - start[1], "")


def canned(rows: int) -> None:
    """A run of `rows` interactions in episodes of 8 turns and groups of 8, versions 0 to 99, two rewards for each, a
    batch of 512 taken and scored for every eight groups, now and then a rerendered edge, a retry, a late reward."""
    book = Book(MemoryLog())
    fill(
        book,
        f"""
        insert into interactions by name select 'chatcmpl-' || lpad(hex(i), 32, '0') as interaction_id, i as node,
          'ep_' || lpad(hex(i // 8), 32, '0') as episode_id, 'run' || (i * 2 // {rows}) as run_id,
          (i % 8)::int as depth, true as is_trainable, 'complete' as capture, i % 8 = 7 as is_leaf, false as is_broken,
          false as is_pruned, i % 40 = 7 as is_retried,
          case when i % 8 > 0 then 'chatcmpl-' || lpad(hex(i - 1), 32, '0') end as parent_id,
          case when i % 8 = 0 then null when i % 23 = 0 then 'rerendered' else 'extends' end as edge,
          case when i % 23 = 0 then 'template drops reasoning' end as cause, 1300 * (i % 8)::int as n_shared,
          (200 + i * 7919 % 200)::int as n_output, (1300 * (i % 8) + 1000)::int as n_prompt,
          (i % 8 + 1)::int as path_n, 300 * (i % 8 + 1) as path_output,
          (i * 100 // {rows})::int as version_min, (i * 100 // {rows})::int as version_max,
          (i * 100 // {rows})::int as path_version_min, (i * 100 // {rows})::int as path_version_max,
          case when i % 11 = 0 then 'length' else 'stop' end as finish_reason, -random() as mean_logprob,
          random() * 20 as seconds, .2 as first_token_seconds, uuid() as event_id,
          timestamptz '2026-01-01' + interval 1 second * (i // 8) as recorded_at, 'w' as writer, i as position
        from range({rows}) t(i)
    """,
    )
    fill(
        book,
        f"""
        insert into episodes by name select 'ep_' || lpad(hex(i), 32, '0') as episode_id,
          'run' || (i * 16 // {rows}) as run_id, 'task' || (i // 8 % 1000) as task_id, 'group_' || (i // 8) as group_id,
          1 as attempt, i % 50 = 0 as is_eval, 'done' as state, (i * 800 // {rows})::int as version,
          (i * 800 // {rows})::int as version_min, (i * 800 // {rows})::int as version_max,
          (i * 7919 % 2)::double as reward, 8 as n_interactions, 2400 as n_output, 0 as n_pruned,
          i * 8 + 7 as main_node, 0 as n_taken, timestamptz '2026-01-01' + interval 1 second * i as opened_at,
          timestamptz '2026-01-01' + interval 1 second * (i + 60) as closed_at from range({rows // 8}) t(i)
    """,
    )
    fill(
        book,
        """
        insert into rewards by name select uuid() as event_id, run_id, episode_id, name, value, 1.0 as weight,
          'judge' as source, closed_at + interval 1 second * (case when hash(episode_id) % 20 = 0 then 30 else -1 end)
          as given_at from (select *, unnest(['reward', 'reward_v2']) as name, random() as value from episodes)
    """,
    )
    fill(
        book,
        f"""
        insert into batches by name select 'b' || i as batch_id, 'run' || (i * 4096 // {rows}) as run_id, i as step,
          (i * 204800 // {rows})::int as version, now() as taken_at, now() as trained_at, 512 as n_rows,
          '{{"stale": 3, "no reward": 2}}' as discarded from range({rows // 2048}) t(i)
    """,
    )
    fill(
        book,
        f"""
        insert into batch_rows by name select 'b' || (i // 512) as batch_id,
          'chatcmpl-' || lpad(hex(i * 4), 32, '0') as interaction_id, 1.0 as credit, .5 as advantage, 1.0 as weight
        from range({rows // 2048 * 512}) t(i)
    """,
    )
    fill(
        book,
        """
        insert into scored by name select interaction_id, 'run0' as run_id, 3 as version, 'learner' as scorer, batch_id,
          -random() as mean_logprob, random() as mean_entropy, now() as scored_at, uuid() as event_id from batch_rows
    """,
    )
    fill(
        book,
        """
        insert into tool_calls by name select run_id, episode_id, interaction_id, 0 as call,
          'tool' || (node % 12) as tool, node % 50 <> 0 as is_json,
          case when node % 8 < 7 then node % 9 = 0 end as is_error, recorded_at as called_at,
          (hash(node) >> 1)::bigint as key
        from interactions
    """,
    )
    for name in CANNED:
        wall, cpu = timed(lambda name=name: book.canned(name))  # type: ignore[misc]
        row(f"canned view {name}", wall, cpu, "<= 300 ms", f"{book.canned(name).num_rows} rows")
    book.close()


def calibrate(rows: int) -> None:
    with duckdb.connect() as con:
        con.execute(f"create table t as select 'ep_' || lpad(hex(i // 8), 32, '0') as k, i from range({rows}) t(i)")
        run = "select count(*) from (select k, sum(i) from t group by k)"
        row(f"calibration: sum of {rows:,} by text key", *timed(lambda: con.execute(run).fetchall()), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--events", type=int, default=110_000)
    parser.add_argument("--only", choices=["replay", "credit", "selection", "rereward", "canned"])
    options = parser.parse_args()
    print(f"duckdb {duckdb.__version__}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(f"{'':<58} {'wall ms':>10} {'CPU ms':>10}   {'':<16} target")
    calibrate(options.rows)
    for name, run in (
        ("replay", lambda: replay(options.events)),
        ("replay", lambda: replay(options.events, uses_tools=True)),
        ("credit", lambda: credit(options.rows)),
        ("selection", lambda: selection(options.rows)),
        ("rereward", lambda: rereward(options.rows)),
        ("canned", lambda: canned(options.rows)),
    ):
        if options.only in (None, name):
            run()


if __name__ == "__main__":
    main()
