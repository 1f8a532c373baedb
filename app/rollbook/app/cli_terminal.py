"""Commands that look at a book: `runs`, `groups`, `episodes`, `show`, `tail`, `stats`, `doctor`, `verify`."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.text import Text

from rollbook.store import accept_loss

from .reading import COLOURS, open_for_reading, print_table, show_episode, verify_book, visible
from .terminal import doctor, lists, tail

Add = Callable[[str, Callable[[argparse.Namespace], None], str, str], argparse.ArgumentParser]

_BOOK = "the folder of the book, or the URL of a served one"


def add_commands(command: Add, out: Console, stop: type[Exception]) -> None:
    """Register the commands of this file. stop: what ends a command with a sentence and status 1."""
    _add_list(command, out, "runs", "list the runs of a book", "rollbook runs runs/demo/book")
    groups = _add_list(
        command, out, "groups", "list groups of episodes, newest first", "rollbook groups BOOK --run demo"
    )
    groups.add_argument("--task", default=None, help="only of this task")
    episodes = _add_list(
        command, out, "episodes", "list the latest episodes of a book", "rollbook episodes runs/demo/book"
    )
    episodes.add_argument("--task", default=None, help="only of this task")
    episodes.add_argument("--group", default=None, help="only of this group")
    episodes.add_argument("--state", default=None, help="open, done, failed, abandoned or lost")
    _add_show(command, out)
    _add_tail(command, out)
    _add_stats(command, out)
    _add_doctor(command, out)
    _add_verify(command, out, stop)


def print_json(value: Any) -> None:
    json.dump(value, sys.stdout, default=str, ensure_ascii=False, indent=1)
    sys.stdout.write("\n")


def _add_list(command: Add, out: Console, name: str, help_: str, example: str) -> argparse.ArgumentParser:
    def list_(args: argparse.Namespace) -> None:
        where = [] if args.where is None else [args.where]
        for column in ("run", "task", "group"):
            where += lists.equals(f"{column}_id", getattr(args, column, None))
        where += lists.equals("state", getattr(args, "state", None))
        with open_for_reading(args.book) as book:
            table = lists.listing(book, name, where=where, limit=args.limit or None)
        print_table(table, "json" if args.json else args.format, out)

    made = command(name, list_, help_, example)
    made.add_argument("book", metavar="BOOK", help=_BOOK)
    made.add_argument("--where", default=None, metavar="SQL", help="a condition on the columns that are shown")
    made.add_argument("--run", default=None, help="only of this run")
    made.add_argument("--limit", type=int, default=20, metavar="N", help="how many; 0: all")
    made.add_argument("--format", choices=["table", "csv", "json"], default="table", help="as what")
    made.add_argument("--json", action="store_true", help="as --format json")
    return made


def _add_show(command: Add, out: Console) -> None:
    def show(args: argparse.Namespace) -> None:
        from .models import tokenizer_folder

        show_episode(
            args.book,
            args.episode,
            out,
            scheme=args.scheme,
            gamma=args.gamma,
            colour=args.color,
            n_tokens=args.tokens,
            tokenizer=None if args.tokenizer is None else tokenizer_folder(args.tokenizer),
            is_json=args.json,
        )

    made = command(
        "show", show, "show one episode: its tree, messages, tokens, credits", "rollbook show runs/demo/book ep_0198..."
    )
    made.add_argument("book", metavar="BOOK", help=_BOOK)
    made.add_argument("episode", metavar="EPISODE", help="an episode id or the beginning of one; `last` for the newest")
    made.add_argument(
        "--scheme", choices=["tree", "broadcast", "arrival", "none"], default="tree", help="how rewards spread"
    )
    made.add_argument("--gamma", type=float, default=1.0, help="discount per turn")
    made.add_argument("--color", choices=list(COLOURS), default="probability", help="what the colour of a token says")
    made.add_argument("--tokens", type=int, default=200, metavar="N", help="tokens shown of each answer; 0: none")
    made.add_argument("--tokenizer", default=None, metavar="DIR", help="a model folder to spell tokens with")
    made.add_argument("--json", action="store_true", help="print JSON instead")


def _add_tail(command: Add, out: Console) -> None:
    def follow(args: argparse.Namespace) -> None:
        import anyio

        kinds = [kind for name in args.only or () for kind in tail.KINDS[name]]
        if not kinds:
            kinds = [kind for some in tail.KINDS.values() for kind in some]
        wants = tail.wanted(args.run, args.episode, kinds)

        async def print_news() -> None:
            async for row in tail.news(book, wants=wants):
                tail.print_row(row, out, is_json=args.json)

        with open_for_reading(args.book) as book:
            for row in tail.last_events(book, args.lines, run=args.run, episode=args.episode, kinds=kinds):
                tail.print_row(row, out, is_json=args.json)
            if not args.no_follow:
                anyio.run(print_news)

    made = command(
        "tail",
        follow,
        "follow a live book: a line for each call, reward, episode and step",
        "rollbook tail runs/demo/book",
    )
    made.add_argument("book", metavar="BOOK", help=_BOOK)
    made.add_argument("--only", action="append", choices=list(tail.KINDS), default=None, help="only lines of this kind")
    made.add_argument("--run", default=None, help="only of this run")
    made.add_argument("--episode", default=None, help="only of this episode; the beginning of its id is enough")
    made.add_argument("--lines", "-n", type=int, default=10, metavar="N", help="of the past, first")
    made.add_argument("--no-follow", action="store_true", help="end after those")
    made.add_argument("--json", action="store_true", help="a JSON object a line")


def _add_stats(command: Add, out: Console) -> None:
    def stats(args: argparse.Namespace) -> None:
        with open_for_reading(args.book) as book:
            found = lists.stats(book, args.book, run=args.run)
        if args.json:
            print_json(found)
            return
        for name, value in found.items():
            if isinstance(value, dict):
                out.print(Text(name, style="bold"), highlight=False)
                for key, number in value.items():
                    out.print(f"  {key:<22} {_number(key, number)}", highlight=False, soft_wrap=True)
            else:
                out.print(Text.assemble((name, "bold"), f" {value}"), highlight=False)

    made = command(
        "stats", stats, "numbers of a book: calls, tokens, speed, states, size", "rollbook stats runs/demo/book"
    )
    made.add_argument("book", metavar="BOOK", help=_BOOK)
    made.add_argument("--run", default=None, help="of this run")
    made.add_argument("--json", action="store_true", help="print JSON instead")


def _number(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else str(value)


def _add_doctor(command: Add, out: Console) -> None:
    def examine(args: argparse.Namespace) -> None:
        with open_for_reading(args.book) as book:
            findings = doctor.examine(book, args.book, run=args.run)
        if args.json:
            print_json([dataclasses.asdict(finding) for finding in findings])
        elif not findings:
            out.print("nothing found; `rollbook verify` checks every record")
        else:
            for finding in findings:
                style = "bold red" if finding.level == "wrong" else "yellow"
                examples = f" (e.g. {', '.join(finding.examples)})" if finding.examples else ""
                head = Text.assemble((f"{finding.name}: ", style), visible(finding.found), (examples, "dim"))
                out.print(head, soft_wrap=not out.is_terminal, highlight=False)
                out.print(Text(f"    {finding.do}"), soft_wrap=not out.is_terminal, highlight=False)
        if any(finding.level == "wrong" for finding in findings):
            sys.exit(1)

    made = command(
        "doctor", examine, "say what is wrong with a book or a run, and what to do", "rollbook doctor runs/demo/book"
    )
    made.add_argument("book", metavar="BOOK", help=_BOOK)
    made.add_argument("--run", default=None, help="only this run")
    made.add_argument("--json", action="store_true", help="print JSON instead; the status is 1 if something is wrong")


def _add_verify(command: Add, out: Console, stop: type[Exception]) -> None:
    def verify(args: argparse.Namespace) -> None:
        if args.accept_loss:
            for loss in accept_loss(args.book):
                print(f"given up: {loss}", file=sys.stderr)
        if not verify_book(args.book, out, is_json=args.json):
            raise stop(f"{args.book} has faults, listed above; keep the folder as it is and restore it from a copy")

    made = command("verify", verify, "check every record of a book", "rollbook verify runs/demo/book")
    made.add_argument("book", metavar="BOOK", help="the folder of the book")
    made.add_argument("--json", action="store_true", help="print JSON instead")
    made.add_argument(
        "--accept-loss",
        action="store_true",
        help="where a log has lost its end, acknowledged events, and there is no copy: go on without them; the book "
        "says for ever which ones are missing",
    )
