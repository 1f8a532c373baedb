"""The names of a book's writers, so that a folder of one that is gone is missed.

    BOOK/book.writers    a line for each: its name, and the inode of this file

A writer is named when it opens the book, before anything is acknowledged to it, and so is everyone else whose folder is
there. In a copy the file has another inode: what its lines say is true of the original, and proves nothing until the
first writer that opens the copy has named all that are there.
"""

import os
from pathlib import Path

from .errors import LogCorrupt
from .sealing import sync_folder
from .segments import GO_ON

FILE = "book.writers"


def name_all(book: Path) -> None:
    """Name every writer whose folder is there and who is not named. Durable when this returns; safe at once."""
    fd = os.open(book / FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        inode = os.fstat(fd).st_ino
        own, _ = _read(fd)
        with os.scandir(book / "log") as found:
            new = sorted({entry.name for entry in found if entry.is_dir()} - own)
        if new:
            # Begun with a line's end: a kill may have left half a line.
            os.write(fd, "".join(["\n", *(f"{name} {inode}\n" for name in new)]).encode())
            os.fsync(fd)
            sync_folder(book)
    finally:
        os.close(fd)


def find_missing(book: Path) -> tuple[list[str], list[str]]:
    """Who is named and has no folder in `log`: of this book, and of the one that it is a copy of."""
    try:
        fd = os.open(book / FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # of a version without names
        return [], []
    try:
        own, others = _read(fd)
    finally:
        os.close(fd)
    own_missing, others_missing = (
        sorted(name for name in names if not (book / "log" / name).is_dir()) for names in (own, others - own)
    )
    return own_missing, others_missing


def say_missing(book: Path, writer: str) -> str:
    """What `find_missing` found, in words."""
    return f"{book / 'log' / writer} is gone, and with it all events of {writer!r} that were not sealed"


def check_all_there(book: Path) -> None:
    """Raise LogCorrupt where a writer's folder is gone."""
    own, _ = find_missing(book)
    if own:
        raise LogCorrupt(f"{say_missing(book, own[0])}: restore the folder from a copy, or {GO_ON}")


def _read(fd: int) -> tuple[set[str], set[str]]:
    """The names of this book's writers, and those that a copy brought along."""
    inode = str(os.fstat(fd).st_ino)
    own: set[str] = set()
    others: set[str] = set()
    for line in os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace").splitlines():
        name, _, of = line.partition(" ")
        if of.isdigit():
            (own if of == inode else others).add(name)
    return own, others
