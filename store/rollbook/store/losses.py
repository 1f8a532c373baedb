"""Going on after the end of a log was lost.

A log that ends below what its writer acknowledged opens for nobody (see `segments.SYNCED`): whoever passed over it
would give the positions of lost events to others. The way back is a copy of the folder. Where there is none, a person
may go on without: `accept_loss` puts an `EventLost` at every lost position, so that the book says for ever what is
missing and no position is given twice. Bytes that could not be read are kept beside the segment.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from . import frames, locks, rows
from .directory import check_book
from .errors import BookBusy
from .events import Event, EventLost
from .sealing import sync_folder
from .segments import Chain, Segment, log_name
from .writers import find_missing, say_missing

_FRAME_EVENTS = 4096


@dataclass(frozen=True)
class Loss:
    """What was given up. kept: a file with the bytes that could not be read, None where there were none."""

    writer: str
    first: int  # lost position
    next: int  # after the last lost one; the log goes on there
    kept: Path | None
    is_counted: bool = True  # where a whole folder was gone, nobody knows how many were lost

    def __str__(self) -> str:
        if not self.is_counted:
            return f"all events of {self.writer!r} from position {self.first} on are lost"
        what = f"positions {self.first} to {self.next - 1} of {self.writer!r} are lost"
        return what if self.kept is None else f"{what}; the bytes that could not be read are in {self.kept}"


def accept_loss(path: str | os.PathLike[str]) -> list[Loss]:
    """Give up what is lost at the ends of a book's logs, and nothing else; again is nothing.

    Raises BookNotFound, BookBusy where such a writer is at work, LogCorrupt for other damage.
    """
    book = Path(path)
    check_book(book)
    losses = [_give_up_folder(book, writer) for writer in find_missing(book)[0]]
    for folder in sorted(p for p in (book / "log").glob("*") if p.is_dir()):
        with _held(folder):
            chain = Chain(book, folder.name)
            lost = chain.lost(chain.look())
            if lost is not None:
                losses.append(_give_up(chain, lost, chain.said.position))
    return losses


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        owner = locks.take(fd)
        if owner is not None:
            raise BookBusy(f"the writer {folder.name!r} is at work in {owner}; stop it first")
        yield
    finally:
        os.close(fd)


def _give_up_folder(book: Path, writer: str) -> Loss:
    """One `EventLost` for all that a missing folder had; the folder gets its name when it has the event."""
    chain = Chain(book, writer)
    chain.look()  # what was sealed is there
    target = chain.folder
    chain.folder = book / f".{writer}.lost"
    shutil.rmtree(chain.folder, ignore_errors=True)  # of a try that was killed
    chain.folder.mkdir(mode=0o700)
    with _held(chain.folder):
        loss = _give_up(chain, f"{say_missing(book, writer)}; how many is not known", chain.next + 1)
        target.parent.mkdir(exist_ok=True, mode=0o700)
        chain.folder.rename(target)
        sync_folder(target.parent)
        sync_folder(book)
    return replace(loss, is_counted=False)


def _give_up(chain: Chain, reason: str, stop: int) -> Loss:
    """Write frames of `EventLost` up to `stop`. A kill in between leaves the rest of them to the next try."""
    last = chain.segments[-1] if chain.segments else None
    first, end = chain.next, last.end if isinstance(last, Segment) else 0
    target = last.path if isinstance(last, Segment) else chain.folder / log_name(first)
    kept = None
    fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        rest = os.pread(fd, os.fstat(fd).st_size - end, end)
        if rest:
            kept = target.with_name(f"{target.stem}-{end}.lost")
            with open(kept, "wb") as file:
                file.write(rest)
                file.flush()
                os.fsync(file.fileno())
            sync_folder(chain.folder)
            os.ftruncate(fd, end)
        with open(fd, "ab", closefd=False) as file:
            for at in range(first, stop, _FRAME_EVENTS):
                n = min(_FRAME_EVENTS, stop - at)
                events = [Event(run_id="lost", fact=EventLost(reason=reason)) for _ in range(n)]
                ids = [event.event_id for event in events]
                message = rows.message([rows.admit(event) for event in events], chain.writer, at)
                file.writelines(frames.encode(message, n, at, min(ids), max(ids)))
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_folder(chain.folder)
    return Loss(chain.writer, first, stop, kept)
