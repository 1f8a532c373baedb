"""Another book, or `events.parquet` of an export: its events as they are, those that this book does not have."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from rollbook.app.exports.tables import EVENTS
from rollbook.store import BadEvent, Book, InteractionRecorded, PolicyPublished, TokensScored, open_book
from rollbook.store.events import SCHEMA, EpisodeOpened, Event, from_batch
from rollbook.store.upcasts import upcast

from .record import Imported, WrongSource

WEIGHTS = "policies whose weights are not here: only their names came along"
PRUNED = "events belong to episodes whose tokens were pruned in the source: those episodes are left out"
_EVENTS_AT_ONCE = 4096
_BYTES_AT_ONCE = 64 << 20


def import_book(book: Book, path: Path, outcome: Imported, *, run: str | None) -> None:
    """run: the name that all of it gets here; by default each run keeps its own. An event is in a book once."""
    if (path / "book.json").is_file():
        with open_book(path) as source:
            pruned = _pruned_episodes(source.log.read())
            _copy(book, source.log.read(), pruned, outcome, run)
        return
    file = path / EVENTS if path.is_dir() else path
    stored = pq.ParquetFile(file)
    if set(SCHEMA.names) - set(stored.schema_arrow.names):
        raise WrongSource(f"{file}: expected the columns {', '.join(SCHEMA.names)}, as `rollbook export` writes them")

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in stored.iter_batches(_EVENTS_AT_ONCE):
            yield from pa.Table.from_batches([batch]).select(SCHEMA.names).cast(SCHEMA).combine_chunks().to_batches()

    _copy(book, batches(), _pruned_episodes(batches()), outcome, run)


def _pruned_episodes(batches: Iterable[pa.RecordBatch]) -> set[str]:
    """Episodes with an interaction that says it has tokens, and has none."""
    found: set[str] = set()
    for batch in batches:
        for event in _events(batch.filter(pa.compute.equal(batch["kind"], "InteractionRecorded"))):
            fact = event.fact
            has = 0 if event.prompt_ids is None else len(event.prompt_ids)
            if isinstance(fact, InteractionRecorded) and fact.prompt_length != fact.shared + has and event.episode_id:
                found.add(event.episode_id)
    return found


def _events(batch: pa.RecordBatch) -> list[Event]:
    payloads = [
        upcast(kind, version, payload.encode())
        for kind, version, payload in zip(
            *(batch[name].to_pylist() for name in ("kind", "schema_version", "payload")), strict=True
        )
    ]
    at = batch.schema.get_field_index("payload")
    return from_batch(batch.set_column(at, SCHEMA.field("payload"), pa.array(payloads, pa.binary()).view(pa.string())))


def _pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows, many at once: a log has as many batches as its writer had commits."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= _EVENTS_AT_ONCE or size >= _BYTES_AT_ONCE:
            yield pa.concat_batches(waiting)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield pa.concat_batches(waiting)


def _copy(book: Book, batches: Iterable[pa.RecordBatch], pruned: set[str], outcome: Imported, run: str | None) -> None:
    for found in _pieces(batches):
        for at in range(0, found.num_rows, _EVENTS_AT_ONCE):
            batch = found.slice(at, _EVENTS_AT_ONCE)
            ids = pa.table({"id": [name.hex() for name in batch["event_id"].to_pylist()]})
            there = "select event_id::varchar as id from events where event_id in (select id::uuid from _wanted)"
            known = {name.replace("-", "") for name in book.sql(there, _wanted=ids)["id"].to_pylist()}
            new = []
            for event in _events(batch):
                is_opening = isinstance(event.fact, EpisodeOpened)
                if event.event_id.hex() in known:
                    outcome.n_there += is_opening
                    continue
                # Scores of an interaction may name no episode.
                if event.episode_id in pruned or (isinstance(event.fact, TokensScored) and event.logprobs is None):
                    outcome.notes[PRUNED] += 1
                    continue
                outcome.n_episodes += is_opening
                outcome.n_interactions += isinstance(event.fact, InteractionRecorded)
                if isinstance(event.fact, PolicyPublished) and not Path(event.fact.path).is_dir():
                    outcome.notes[WEIGHTS] += 1
                new.append(event if run is None else msgspec.structs.replace(event, run_id=run))
            try:
                book.log.append_blocking(*new)
            except BadEvent as error:
                raise WrongSource(f"the source has an event that a book does not take: {error}") from error
            book.catch_up()
