"""Commands that take data out of a book and into it: `export`, `import`."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from rollbook.store import BadSelection
from rollbook.store.selection import Selection, selection_from

from .exports import FORMATS, OPTIONS, default_selection, export_book
from .imports import FORMATS as SOURCES
from .imports import import_into

Add = Callable[[str, Callable[[argparse.Namespace], None], str, str], argparse.ArgumentParser]


def add_commands(command: Add, out: Console) -> None:
    """Register the commands of this file."""
    _add_export(command, out)
    _add_import(command, out)


def selection_of(args: argparse.Namespace, format: str = "chat") -> Selection:
    """What `--selection`, `--where`, `--run`, `--reward` and `--limit` say together. Raises BadSelection."""
    given: dict[str, Any] = {}
    if args.selection is not None:
        text = args.selection
        if not text.lstrip().startswith("{"):
            text = Path(text).read_text()
        try:
            given = json.loads(text)
        except ValueError as error:
            raise BadSelection(f"--selection: expected a JSON object, or a file with one: {error}") from error
    for name, value in (("where", args.where), ("run_id", args.run), ("reward", args.reward), ("limit", args.limit)):
        if value is not None:
            given[name] = value
    base = msgspec.to_builtins(default_selection(format))
    return selection_from({**base, **given})


def add_selection(made: argparse.ArgumentParser) -> None:
    made.add_argument("--where", default=None, metavar="SQL", help="a condition on the episodes table")
    made.add_argument("--run", default=None, metavar="RUN", help="only this run")
    made.add_argument("--reward", default=None, metavar="NAME", help="by this reward instead of `reward`")
    made.add_argument("--limit", type=int, default=None, metavar="N", help="groups at most")
    made.add_argument("--selection", default=None, metavar="JSON", help="a whole selection, as JSON or a file of it")


def _add_export(command: Add, out: Console) -> None:
    def export(args: argparse.Namespace) -> None:
        from .reading import open_for_reading

        options = {
            name: getattr(args, name)
            for name in ("rows", "kind", "label_at", "all_fields", "pad_id")
            if getattr(args, name) not in (None, False)
        }
        with open_for_reading(args.book) as book:
            done = export_book(book, args.format, args.out, selection=selection_of(args, args.format), **options)
        if args.json:
            print(json.dumps({**vars(done), "files": [str(file) for file in done.files]}))
            return
        out.print(f"{done.n_rows} rows in {len(done.files)} files at {args.out}", highlight=False, soft_wrap=True)
        if done.left_out:
            reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(done.left_out.items()))
            out.print(f"episodes left out: {reasons}", highlight=False, soft_wrap=True)
        for note in done.notes:
            out.print(note, highlight=False, soft_wrap=True)

    made = command(
        "export",
        export,
        "write a book's rows for other tools",
        "rollbook export runs/demo/book --format chat --where 'reward = 1' --out best.jsonl",
    )
    made.add_argument("book", metavar="BOOK", help="the folder of the book, or the URL of a served one")
    made.add_argument("--format", required=True, choices=list(FORMATS), help="for what")
    made.add_argument("--out", required=True, metavar="PATH", help="a .jsonl file (chat, trl) or a folder (the others)")
    add_selection(made)

    def takers(option: str) -> str:
        return ", ".join(name for name, options in OPTIONS.items() if option in options)

    made.add_argument(
        "--rows",
        choices=["trajectories", "interactions"],
        default=None,
        help=f"a row is one of these ({takers('rows')})",
    )
    made.add_argument(
        "--type",
        dest="kind",
        choices=["prompt-completion", "preference", "unpaired", "messages"],
        default=None,
        help=f"the dataset type; preference is DPO's, unpaired KTO's ({takers('kind')})",
    )
    made.add_argument(
        "--label-at", type=float, default=None, metavar="R", help="reward of a good completion (unpaired)"
    )
    made.add_argument(
        "--all-fields", action="store_true", help=f"reasoning, ids and rewards too ({takers('all_fields')})"
    )
    made.add_argument("--pad-id", type=int, default=None, metavar="ID", help=f"the padding token ({takers('pad_id')})")
    made.add_argument("--json", action="store_true", help="say what was written as JSON")


def _add_import(command: Add, out: Console) -> None:
    def import_(args: argparse.Namespace) -> None:
        from .models import tokenizer_folder

        tokenizer = None if args.tokenizer is None else tokenizer_folder(args.tokenizer)
        done = import_into(args.book, args.source, format=args.format, run=args.run, tokenizer=tokenizer)
        if args.json:
            print(json.dumps(vars(done)))
            return
        there = f"; {done.n_there} were there already" if done.n_there else ""
        out.print(
            f"{done.n_episodes} episodes with {done.n_interactions} interactions imported from {args.source} "
            f"({done.format}){there}",
            highlight=False,
            soft_wrap=True,
        )
        for note, n in sorted(done.notes.items()):
            out.print(f"{n} {note}", highlight=False, soft_wrap=True)

    made = command(
        "import",
        import_,
        "add rollouts recorded elsewhere to a book",
        "rollbook import runs/my-book results.jsonl --run old",
    )
    made.add_argument("book", metavar="BOOK", help="the folder of the book; made if it is not there")
    made.add_argument("source", metavar="SOURCE", help="a book, or files of AReaL, verifiers or chat JSONL")
    made.add_argument("--format", choices=list(SOURCES), default="auto", help="what SOURCE is; auto looks at it")
    made.add_argument("--run", default=None, metavar="RUN", help="the run it becomes; by default the source's own name")
    made.add_argument("--tokenizer", default=None, metavar="MODEL", help="make tokens of text, for supervised training")
    made.add_argument("--json", action="store_true", help="say what was imported as JSON")
