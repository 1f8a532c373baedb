"""A book as Parquet: its tables as they stand, what was said and sampled, and the events themselves.

    episodes.parquet, interactions.parquet, rewards.parquet, ...   the tables of docs/sql.md
    messages.parquet   per interaction: what was new in the request, the reply and the tools, as JSON
    tokens.parquet     per interaction: prompt_ids (what it adds), output_ids, logprobs, versions, entropies
    events.parquet     the log itself; `rollbook import` makes a book of it that answers alike

Of chosen episodes only their own rows are written, and the runs and policies they belong to.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollbook.store import Book
from rollbook.store.events import SCHEMA, decode_messages
from rollbook.store.schema import metadata
from rollbook.store.selection import Selection, episodes_query

EVENTS = "events.parquet"

_BY_EPISODE = ("episodes", "interactions", "rewards", "failures", "pruned", "tool_calls", "tool_results")
_BY_RUN = ("runs", "policies")
_BY_INTERACTION = ("batch_rows", "scored")
_ARRAYS = ("prompt_ids", "output_ids", "logprobs", "versions", "entropies")
_WRITE = {"compression": "zstd"}
_json = msgspec.json.encode


def export(book: Book, out: Path, selection: Selection) -> tuple[list[Path], int, list[str]]:
    """Every table is a file; the number of rows is that of events."""
    out.mkdir(parents=True, exist_ok=True)
    chosen = book.sql(f"select episode_id, run_id from episodes where episode_id in ({episodes_query(selection)})")
    is_whole = book.sql("select count(*) as n from episodes")["n"][0].as_py() == chosen.num_rows
    files = []
    for name in metadata.tables:
        if name in ("cursors", "events"):  # how far our tables have read, and what events.parquet has
            continue
        files.append(out / f"{name}.parquet")
        pq.write_table(book.sql(f"from {name} {_where(name, is_whole)}", _chosen=chosen), files[-1], **_WRITE)
    n = _write_log(book, out, None if is_whole else chosen)
    notes = [] if is_whole else ["batches name episodes that are not among the chosen; their events are left out"]
    return [*files, out / "messages.parquet", out / "tokens.parquet", out / EVENTS], n, notes


def _where(name: str, is_whole: bool) -> str:
    if is_whole:
        return ""
    if name in _BY_EPISODE:
        return "where episode_id in (select episode_id from _chosen)"
    if name in _BY_RUN:
        return "where run_id in (select run_id from _chosen)"
    of_them = "select interaction_id from interactions where episode_id in (select episode_id from _chosen)"
    if name in _BY_INTERACTION:
        return f"where interaction_id in ({of_them})"
    return f"where batch_id in (select batch_id from batch_rows where interaction_id in ({of_them}))"


def chosen_events(book: Book, chosen: pa.Table | None) -> Iterator[pa.RecordBatch]:
    """The events of these episodes (episode_id, run_id), with the runs and policies they belong to; None: all."""
    if chosen is None:
        yield from book.log.read()
        return
    episodes, runs = (column.combine_chunks() for column in chosen.columns)
    of_runs = pa.array(["RunStarted", "PolicyPublished"])
    for batch in book.log.read():
        is_chosen = pc.is_in(batch["episode_id"], episodes)
        is_theirs = pc.and_(pc.is_in(batch["kind"], of_runs), pc.is_in(batch["run_id"], runs))
        kept = batch.filter(pc.or_(is_chosen, is_theirs))
        if kept.num_rows:
            yield kept


def _write_log(book: Book, out: Path, chosen: pa.Table | None) -> int:
    n = 0
    seen: set[bytes] = set()  # an event that two writers have, as after an import, is one
    said_schema = pa.schema([(name, pa.string()) for name in ("interaction_id", "request", "reply", "tools")])
    token_schema = pa.schema([SCHEMA.field("interaction_id"), *(SCHEMA.field(name) for name in _ARRAYS)])
    with (
        pq.ParquetWriter(out / EVENTS, SCHEMA, **_WRITE) as events,
        pq.ParquetWriter(out / "messages.parquet", said_schema, **_WRITE) as messages,
        pq.ParquetWriter(out / "tokens.parquet", token_schema, **_WRITE) as tokens,
    ):
        for found in chosen_events(book, chosen):
            ids = found["event_id"].to_pylist()
            is_new = [not (name in seen or seen.add(name)) for name in ids]  # type: ignore[func-returns-value]
            batch = found if all(is_new) else found.filter(pa.array(is_new))
            events.write_batch(batch)
            n += batch.num_rows
            calls = batch.filter(pc.equal(batch["kind"], "InteractionRecorded"))
            if calls.num_rows:
                tokens.write_batch(calls.select(token_schema.names))
                messages.write_batch(_messages(calls, said_schema))
    return n


def _messages(calls: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    said = [None if text is None else decode_messages(text) for text in calls["messages"].to_pylist()]
    columns = [
        calls["interaction_id"],
        pa.array([None if one is None else _json(one.request).decode() for one in said], pa.string()),
        pa.array([None if one is None else _json(one.reply).decode() for one in said], pa.string()),
        pa.array(
            [None if one is None or one.tools is None else _json(one.tools).decode() for one in said], pa.string()
        ),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
