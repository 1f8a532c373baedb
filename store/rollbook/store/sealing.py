"""Sealing: a closed segment becomes a compressed Parquet file that any tool reads, and its log is removed.

The order keeps every event in one whole file at every moment: write under a scratch name, sync, read back and
compare checksums of the content, rename, sync the folder, and only then unlink the log. A kill in between leaves a
scratch file or both files; the next sealing of that segment begins again.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .errors import LogCorrupt
from .events import SCHEMA
from .frames import crc32
from .segments import SEALED_CRC, SEALED_IDS, Sealed, Segment, sealed_name

ROW_GROUP_BYTES = 4 << 20
"""Of Arrow data: what reading one row decodes. Small enough for that, large enough to compress."""


class SealingStopped(Exception):
    """The log is being closed; the segment stays as it is."""


def seal(segment: Segment, folder: Path, *, is_stopping: Callable[[], bool] = lambda: False) -> Sealed:
    """Write a closed segment to `folder`. Its log is still there on return: whoever reads it must be told first.

    Raises OSError, LogCorrupt for damage in the segment, SealingStopped.
    """
    path = folder / sealed_name(segment.first, segment.next)
    ids = dict(zip(SEALED_IDS, (segment.lowest, segment.highest, segment.newest), strict=True))
    write_sealed(path, _row_groups(segment, is_stopping), ids, is_stopping)
    return Sealed(path, segment.first, segment.next)


def write_sealed(
    path: Path,
    row_groups: Iterator[pa.Table],
    ids: dict[bytes, bytes],
    is_stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Make `path` hold these row groups, whole or not at all, and verified before it gets its name."""
    scratch = path.with_name(f".{path.name}.part")
    crc = 0
    with pq.ParquetWriter(scratch, SCHEMA, **_PARQUET) as writer, open(scratch, "rb") as file:
        for table in row_groups:
            writer.write_table(table, row_group_size=table.num_rows)
            crc = content_crc(table, crc)
            os.fsync(file.fileno())  # little by little: the log's own syncs would wait for one large write
        notes = {k: v.hex() for k, v in ids.items()}
        writer.add_key_value_metadata({**notes, SEALED_CRC: f"{crc:08x}"})
    with open(scratch, "rb") as file:
        os.fsync(file.fileno())
    found = 0
    with pq.ParquetFile(scratch, page_checksum_verification=True) as copy:
        for k in range(copy.num_row_groups):
            if is_stopping():
                raise SealingStopped
            found = content_crc(copy.read_row_group(k, use_threads=False), found)
    if found != crc:
        raise LogCorrupt(f"{scratch} does not read back as it was written, the log is kept; see to the disk")
    os.rename(scratch, path)
    sync_folder(path.parent)


def _row_groups(segment: Segment, is_stopping: Callable[[], bool]) -> Iterator[pa.Table]:
    waiting: list[pa.RecordBatch] = []
    size = 0
    for k in range(len(segment)):
        if is_stopping():
            raise SealingStopped
        batch = segment.batch(k)
        if waiting and size + batch.nbytes > ROW_GROUP_BYTES:
            yield pa.Table.from_batches(waiting, SCHEMA)
            waiting, size = [], 0
        waiting.append(batch)
        size += batch.nbytes
    if waiting:
        yield pa.Table.from_batches(waiting, SCHEMA)


def content_crc(table: pa.Table, crc: int = 0) -> int:
    """A checksum of what the rows say, whatever file or encoding they came from. Continues `crc`."""
    for column in table.combine_chunks().columns:
        array = pa.concat_arrays(column.chunks)
        crc = crc32(np.packbits(array.is_valid().to_numpy(zero_copy_only=False)).tobytes(), crc)
        array = array.drop_null()
        if pa.types.is_list(array.type):
            crc = crc32(pc.list_value_length(array).to_numpy(), crc)
            array = pc.list_flatten(array)
        elif pa.types.is_string(array.type):
            crc = crc32(pc.binary_length(array).to_numpy(), crc)
            offsets = np.frombuffer(array.buffers()[1], np.int32)[array.offset :]
            data = array.buffers()[2]
            if len(array) and data is not None:
                crc = crc32(data.slice(int(offsets[0]), int(offsets[len(array)] - offsets[0])), crc)
            continue
        width = array.type.byte_width
        if len(array):
            crc = crc32(array.buffers()[1].slice(array.offset * width, len(array) * width), crc)
    return crc


def sync_folder(path: Path) -> None:
    """Make names created, renamed or removed in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# Measured on real text (docs/LOG.md): token ids compress best plain, logprobs as separate byte streams; versions,
# names and kinds repeat, so they keep a dictionary.
_PARQUET = {
    "compression": "zstd",
    "compression_level": 3,
    "use_dictionary": ["writer", "kind", "schema_version", "run_id", "episode_id", "versions.list.element"],
    "column_encoding": {
        "position": "DELTA_BINARY_PACKED",
        "recorded_at": "DELTA_BINARY_PACKED",
        "logprobs.list.element": "BYTE_STREAM_SPLIT",
        "entropies.list.element": "BYTE_STREAM_SPLIT",
    },
    "write_statistics": ["position", "recorded_at", "kind", "run_id"],
    "write_page_checksum": True,
}
