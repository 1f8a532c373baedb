"""The log's seam: what every log promises, whatever it is made of.

`append` returns when the events are durable; appending an event_id twice is the same as once. A log hands out
the positions of its own writer, gap-free from 0, and reads the events of every writer of the book. A cursor is
one position per writer: the next one to read. Nothing here knows about trees, rewards or SQL.
"""

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .events import SCHEMA, Event
from .rows import Row

Cursor = Mapping[str, int]
"""Writer -> the next position to read. Missing writers are read from 0."""

START: Cursor = {}


class TokenPlaces(NamedTuple):
    """Where the tokens of events that lie together are in memory; so as long as `held` is."""

    first: int  # position of the first of them
    places: npt.NDArray[np.int64]  # [n, 6]: addresses of prompt_ids, output_ids, logprobs, versions; lengths of two
    held: object
    memory_bytes: int  # what holding it costs
    mapped_bytes: int  # and how much of a mapped file it keeps


class Log(Protocol):
    """Implementations: `memory.MemoryLog`, `directory.DirectoryLog`, `http.HttpLog`; one contract suite."""

    @property
    def writer(self) -> str | None:
        """The name under which this log appends; None for a reader."""
        ...

    async def append(self, *events: Event) -> list[int]:
        """Make events durable, all or none, and return their positions.

        An event_id that this writer has appended before keeps its first position and changes nothing. Raises
        BadEvent (also for such an id with other content; nothing of this append is written), LogClosed,
        LogWriteFailed (nothing is acknowledged, the log stops). Cancelling the caller does not undo the append.
        """
        ...

    def append_blocking(self, *events: Event) -> list[int]:
        """The same for code that has no event loop. Never call it on one."""
        ...

    def append_rows_blocking(self, admitted: Sequence[Row]) -> list[int]:
        """The same for events that were admitted already, by `rows.admit` or `rows.admit_rewards`."""
        ...

    def read(self, cursor: Cursor = START) -> Iterator[pa.RecordBatch]:
        """Every durable event at or after the cursor: batches of SCHEMA, in order within each writer."""
        ...

    def follow(self, cursor: Cursor = START) -> AsyncGenerator[pa.RecordBatch, None]:
        """`read`, and then what comes later, until closed or cancelled."""
        ...

    def gather(self, pointers: Sequence[tuple[str, int]]) -> pa.Table:
        """The events at (writer, position), one row each, in the order asked. Raises KeyError for none there."""
        ...

    def token_places(self, writer: str, position: int) -> TokenPlaces:
        """Where the tokens of an event lie, and those of its neighbours, for readers that come back for them: nothing
        is decoded or copied that need not be. Raises KeyError for none there.
        """
        ...

    def close(self) -> None:
        """Finish what was accepted and give the files back. Closing twice is closing once."""
        ...


def gather_rows(
    pointers: Sequence[tuple[str, int]], batch_at: Callable[[str, int], tuple[int, pa.RecordBatch]]
) -> pa.Table:
    """`Log.gather` of a log that can say which batch holds a position, and where that batch begins."""
    rows: list[pa.RecordBatch] = []
    for writer, position in pointers:
        first, batch = batch_at(writer, position)
        rows.append(batch.slice(position - first, 1))
    return pa.Table.from_batches(rows, SCHEMA)


def advance(cursor: Cursor, batch: pa.RecordBatch) -> dict[str, int]:
    """The cursor after a batch has been read. A batch holds events of one writer."""
    if not batch.num_rows:
        return dict(cursor)
    writer = batch.column("writer")[0].as_py()
    return {**cursor, writer: batch.column("position")[batch.num_rows - 1].as_py() + 1}
