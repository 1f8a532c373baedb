"""Rollouts recorded elsewhere, as episodes of a book: another book, AReaL's dumps, verifiers' results, chat JSONL.

    import_into("runs/mine/book", "dumps/", run="old")

Importing twice is importing once: ids are those of the source, or made from what it says. What a source does not say
(tokens, logprobs, versions, groups) is not invented: such interactions are not trainable, and the outcome says why.
One file here per source; `record.py` makes events of what they read.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rollbook.app.exports.tables import EVENTS
from rollbook.store import BadEvent, StoreError, open_book
from rollbook.store.errors import BookNotFound

from . import areal, chat, verifiers
from .books import import_book
from .record import Attempt, Imported, Spelling, record

SOURCES: Mapping[str, Callable[[Path, Imported], Iterator[Attempt]]] = {
    "areal": areal.read,
    "verifiers": verifiers.read,
    "chat": chat.read,
}
FORMATS = ("auto", "book", *SOURCES)


def import_into(
    book_path: str | Path,
    source: str | Path,
    *,
    format: str = "auto",
    run: str | None = None,
    tokenizer: str | None = None,
) -> Imported:
    """Append what a source holds to a book, which is made if there is none. Durable when this returns.

    run: the run that episodes belong to; by default the source's own, or its name. tokenizer: a model folder to make
    tokens with where a source has text only: enough for supervised training, not for policy gradients. Raises
    StoreError for a source that cannot be read, WrongSource for a line that is not what it should be.
    """
    path = Path(source)
    if not path.exists():
        raise BookNotFound(f"there is nothing at {path}; give a file or folder to import")
    chosen = guess(path) if format == "auto" else format
    if chosen not in FORMATS:
        raise StoreError(f"no format {format!r}; there are {', '.join(FORMATS)}")
    outcome = Imported(chosen)
    spelling = None if tokenizer is None else Spelling(tokenizer)
    with open_book(book_path, writer="import") as book:
        if chosen == "book":
            import_book(book, path, outcome, run=run)
        else:
            record(book, SOURCES[chosen](path, outcome), outcome, run_id=run or path.stem, spelling=spelling)
        book.catch_up()
    if outcome.n_there and not outcome.n_episodes:  # what was read again was left where it is
        outcome.notes.clear()
    return outcome


def guess(path: Path) -> str:
    """The format of a source by what lies there. Raises StoreError where that does not say."""
    if path.is_dir():
        if (path / "book.json").is_file() or (path / EVENTS).is_file():
            return "book"
        found = next((file for file in sorted(path.rglob("*")) if file.suffix in (".pt", ".json", ".jsonl")), None)
        if found is None:
            raise StoreError(f"{path} has no book, {EVENTS}, .pt, .json or .jsonl file; say which --format it is")
        return guess(found)
    if path.name == EVENTS:
        return "book"
    if path.suffix in (".pt", ".json"):
        return "areal"
    with path.open("rb") as file:
        text = next((line for line in file if line.strip()), b"")
    try:
        first = json.loads(text)
    except ValueError as error:
        raise BadEvent(f"{path}: expected a JSON object a line: {error}") from error
    for name, keys in (("areal", {"completion", "prompt_len"}), ("verifiers", {"traces"}), ("chat", {"messages"})):
        if isinstance(first, dict) and keys <= first.keys():
            return name
    if isinstance(first, dict) and {"prompt", "completion"} <= first.keys():
        return "verifiers"
    raise StoreError(
        f"{path}: its first line is no rollout that we know; say which --format it is: {', '.join(FORMATS)}"
    )
