"""Frames: how record batches lie in a segment file, and how a damaged one is told from a good one.

A frame is a 64-byte header and a body: one Arrow IPC record batch message, padded to 64 bytes so that mapped buffers
stay aligned. The header's checksum covers the header, which holds the body's checksum; so a walk over headers alone is
safe, and ids and positions of a frame are known without touching its body.

    magic 4s | header_crc u32 | body_crc u32 | length u32 | rows u32 | layout u32 | first u64 | lowest 16s | highest 16s

`lowest` and `highest` bound the event ids within. `layout` says which columns the batch has: see `LAYOUTS`.
"""

import struct
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from .events import SCHEMA

try:  # the same checksum, fifteen times as fast
    from isal.isal_zlib import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

MAGIC = b"RBF1"
HEADER = struct.Struct("<4sIIIIIQ16s16s")
SIZE = HEADER.size  # 64 bytes
ALIGNMENT = 64
LAYOUT = 1
LAYOUTS = {1: SCHEMA}
"""Columns by number. A log outlives its schema: what was written with fewer columns is read with those."""


class Frame(NamedTuple):
    """A header, checked."""

    length: int  # bytes of the body, padding included
    rows: int
    layout: int
    first: int  # position of the first event
    lowest: bytes
    highest: bytes
    body_crc: int

    @property
    def size(self) -> int:
        """Bytes from this header to the next."""
        return SIZE + self.length


def encode(message: list[bytes], n_rows: int, first: int, lowest: bytes, highest: bytes) -> list[bytes]:
    """Buffers to write: a header, then the body. message: the pieces of an encapsulated IPC message, together of a
    multiple of ALIGNMENT."""
    body_crc = length = 0
    for piece in message:
        body_crc = crc32(piece, body_crc)
        length += len(piece)
    fields = (body_crc, length, n_rows, LAYOUT, first, lowest, highest)
    crc = crc32(HEADER.pack(MAGIC, 0, *fields))
    return [HEADER.pack(MAGIC, crc, *fields), *message]


def decode_header(data: bytes | memoryview | pa.Buffer) -> Frame | None:
    """The frame that 64 bytes announce; None where they are not a whole, undamaged header."""
    if len(data) < SIZE:
        return None
    magic, crc, body_crc, length, rows, layout, first, lowest, highest = HEADER.unpack_from(data)
    if magic != MAGIC:
        return None
    if crc != crc32(HEADER.pack(magic, 0, body_crc, length, rows, layout, first, lowest, highest)):
        return None
    return Frame(length, rows, layout, first, lowest, highest, body_crc)


def is_body_good(frame: Frame, body: pa.Buffer) -> bool:
    return body.size == frame.length and crc32(body) == frame.body_crc


def decode_body(frame: Frame, body: pa.Buffer) -> pa.RecordBatch:
    """The batch, zero copy: it keeps `body` alive."""
    return pa.ipc.read_record_batch(pa.ipc.read_message(body), LAYOUTS[frame.layout])


def find_frame(data: bytes) -> int | None:
    """Offset of the first whole, undamaged frame in `data`, which starts at a multiple of ALIGNMENT."""
    at = data.find(MAGIC)
    while at >= 0:
        if at % ALIGNMENT == 0:
            frame = decode_header(data[at : at + SIZE])
            is_whole = frame is not None and at + frame.size <= len(data)
            if frame and is_whole and is_body_good(frame, pa.py_buffer(data[at + SIZE : at + SIZE + frame.length])):
                return at
        at = data.find(MAGIC, at + 1)
    return None


def id_keys(ids: pa.Array) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """A 64-bit fingerprint of each 16-byte id, for sorted lookups; equal ids have equal ones."""
    halves = np.frombuffer(ids.buffers()[1], np.uint64)[2 * ids.offset : 2 * (ids.offset + len(ids))].reshape(-1, 2)
    return (halves[:, 0] * np.uint64(0x9E3779B97F4A7C15)) ^ halves[:, 1]
