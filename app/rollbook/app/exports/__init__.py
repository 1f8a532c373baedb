"""A book in the forms that other tools read: Parquet tables, chat JSONL, TRL's datasets, verl's and AReaL's tensors.

    export_book(book, "trl", "out/", selection=Selection(needs_reward=True), kind="preference")

Which rows says a selection, the same for every form. What a form cannot hold is counted and said, never dropped in
silence. One file here per form; `conversations.py` is what the forms of messages share.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rollbook.store import BadSelection, Book
from rollbook.store.selection import Selection

from . import chat, tables, tensors, trl


@dataclass
class Exported:
    """What was written. `left_out`: reason -> episodes; `notes`: sentences on what the form could not hold."""

    format: str
    files: list[Path]
    n_rows: int
    left_out: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


FORMATS: Mapping[str, Callable[..., tuple[list[Path], int, list[str]]]] = {
    "parquet": tables.export,
    "chat": chat.export,
    "trl": trl.export,
    "verl": tensors.export_verl,
    "areal": tensors.export_areal,
}

OPTIONS: Mapping[str, frozenset[str]] = {
    "parquet": frozenset(),
    "chat": frozenset({"rows", "all_fields"}),
    "trl": frozenset({"rows", "kind", "label_at"}),
    "verl": frozenset({"pad_id"}),
    "areal": frozenset({"rows"}),
}
"""What a form takes beyond a selection."""

_EVERYTHING = {
    "states": ("open", "done", "failed", "abandoned", "lost"),
    "is_eval": None,
    "is_trainable": None,
}
_NEEDING_REWARDS = {"verl", "areal"}


def default_selection(format: str, **given: Any) -> Selection:
    """What a form takes where nothing else is said: tables take everything, tensors what has a reward."""
    base: dict[str, Any] = dict(_EVERYTHING) if format == "parquet" else {}
    if format in _NEEDING_REWARDS:
        base["needs_reward"] = True
    return Selection(**{**base, **given})


def export_book(
    book: Book, format: str, out: str | Path, *, selection: Selection | None = None, **options: Any
) -> Exported:
    """Write chosen rows of a book under `out`: a folder for parquet, verl and areal, a .jsonl file for chat and trl.

    options: `OPTIONS[format]`, each described where it is read. Raises BadSelection for a format or option that there
    is not and for a form that wants rewards that are missing, FileExistsError where something lies at `out`.
    """
    if format not in FORMATS:
        raise BadSelection(f"no format {format!r}; there are {', '.join(FORMATS)}")
    strange = options.keys() - OPTIONS[format]
    if strange:
        known = ", ".join(sorted(OPTIONS[format])) or "none"
        raise BadSelection(f"{format} takes no option {min(strange)!r}; it takes {known}")
    target = Path(out)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(17, "there is something already; name a new place", str(target))
    book.catch_up()
    chosen = default_selection(format) if selection is None else selection
    if (
        format in _NEEDING_REWARDS and not chosen.needs_reward
    ):  # a missing reward is not 0, and they have no word for it
        chosen = msgspec.structs.replace(chosen, needs_reward=True)
    # Written beside and renamed: what lies at `out` is whole.
    beside = target.with_name(target.name + ".part")
    files, n_rows, notes = FORMATS[format](book, beside, chosen, **options)
    beside.replace(target)
    if format in ("chat", "trl"):
        chosen = msgspec.structs.replace(chosen, is_trainable=None)
    if not n_rows and chosen.is_eval is False:
        n_eval = book.sql("select count(*) as n from episodes where is_eval")["n"][0].as_py()
        if n_eval:
            notes = [*notes, f"{n_eval} episodes are evaluations; --selection '{{\"is_eval\": null}}' takes those, too"]
    reasons = book.discards(chosen)["reason"].value_counts().to_pylist()
    return Exported(
        format=format,
        files=[target / file.relative_to(beside) if file != beside else target for file in files],
        n_rows=n_rows,
        left_out={row["values"]: row["counts"] for row in reasons},
        notes=notes,
    )
