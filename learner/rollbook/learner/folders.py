"""Folders that appear whole or not at all: checkpoints and policies."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def appears_whole(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when the block ends well: files synced, renamed, parent synced.

    An older `folder` of the same name is replaced. A kill leaves at most a folder that ends in `.tmp`.
    """
    building = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    yield building
    for path in [*building.rglob("*"), building]:
        _sync(path)
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(building, folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def keep_newest(parent: Path, pattern: str, *, keep: int, also: frozenset[Path] = frozenset()) -> None:
    """Remove all but the `keep` newest (by the number their names end with) of the folders that match."""
    found = sorted((p for p in parent.glob(pattern) if p.is_dir() and number_of(p) is not None), key=number_of)  # type: ignore[arg-type]
    for old in found[: max(0, len(found) - max(keep, 1))]:
        if old not in also:
            shutil.rmtree(old)
    for left in parent.glob(pattern + ".tmp"):  # of a run that was killed
        shutil.rmtree(left, ignore_errors=True)


def number_of(path: Path) -> int | None:
    """The number at the end of a name: v12 -> 12, step-00003 -> 3; None for anything else."""
    digits = path.name[len(path.name.rstrip("0123456789")) :]
    return int(digits) if digits else None
