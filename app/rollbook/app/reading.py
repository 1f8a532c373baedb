"""Reading a book from the terminal: answers to SQL, one episode as a tree, a check of every record."""

import csv
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import duckdb
import pyarrow as pa
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from rollbook.store import BadSelection, Book, QueryRefused, StoreError, open_book
from rollbook.store.canned import CANNED
from rollbook.store.connection import is_url, open_anywhere
from rollbook.store.credit import Scheme
from rollbook.store.episodes import Episode, Interaction
from rollbook.store.expressions import in_parentheses
from rollbook.store.verify import verify

from .launch import ADMIN_KEY

_WIDTH = 60  # of a cell; a terminal is no place for a whole config


def query(book_path: str, statement: str | None, params: Sequence[str] = ()) -> pa.Table:
    """`answer` of a book at a place, live or not."""
    if statement is None:
        return answer(None, None)
    with open_for_reading(book_path) as book:
        return answer(book, statement, params)


def answer(book: Book | None, statement: str | None, params: Sequence[str] = ()) -> pa.Table:
    """Answer a statement, or a canned question by its name and `a=b` parameters.

    None: the canned questions themselves, of which no book is needed. Raises StoreError.
    """
    if statement is None or book is None:
        return pa.table({"question": list(CANNED), "help": [one.help for one in CANNED.values()]})
    ask = partial(book.canned, statement, **_params(params)) if statement in CANNED else partial(book.sql, statement)
    try:
        return _stoppable(book, ask)
    except duckdb.Error as error:
        raise QueryRefused(f"{str(error).strip()} (docs/sql.md lists the tables and their columns)") from error


def _stoppable(book: Book, ask: Callable[[], pa.Table]) -> pa.Table:
    """DuckDB looks at no signal while it computes, so this thread stays free for Ctrl-C, which ends the query."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        try:
            return asked.result()
        except KeyboardInterrupt:
            while not asked.done():
                book.interrupt()
                wait([asked], timeout=0.02)
            raise


def _params(words: Sequence[str]) -> dict[str, Any]:
    """`a=b` words; a value that reads as JSON is one."""
    given: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise BadSelection(f"expected a parameter like run=my-run, got {word!r}")
        try:
            given[name] = json.loads(value)
        except ValueError:
            given[name] = value
    return given


_UNSEEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """Text of a model or a tool for a terminal: what would command it, or turn its lines round, is spelled out."""
    return _UNSEEN.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    text = visible(str(value).replace("\n", "\\n"))
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


def _fitting(table: pa.Table, out: Console) -> pa.Table:
    """The first columns of a table that a terminal's width has room for, at least two; the last of them may fold."""
    room, n = out.width - 1, 0
    for name in table.column_names:
        cells = [len(_cell(value)) for value in table[name].slice(0, 200).to_pylist()]
        room -= max([len(name), *cells]) + 3
        if room < 0 and n >= 2:
            break
        n += 1
    return table.select(table.column_names[:n])


def print_table(table: pa.Table, format_: str, out: Console, output: Path | None = None) -> None:
    """Print (or write to `output`) as table, csv, json, parquet or arrow."""
    if format_ in ("parquet", "arrow"):
        sink = pa.BufferOutputStream()
        if format_ == "parquet":
            import pyarrow.parquet as pq

            pq.write_table(table, sink)
        else:
            with pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
        data = sink.getvalue().to_pybytes()
        if output is None:
            sys.stdout.buffer.write(data)
        else:
            output.write_bytes(data)
        return
    if format_ == "table" and output is None:
        fitting = _fitting(table, out)
        shown = Table(header_style="bold")
        for i, field in enumerate(fitting.schema):
            is_number = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
            is_key = i == 0 and field.name.endswith("_id")  # stays in one piece, to be copied
            justify: Literal["left", "right"] = "right" if is_number else "left"
            shown.add_column(Text(field.name), justify=justify, overflow="fold", no_wrap=is_key)
        for row in fitting.to_pylist():
            shown.add_row(*(Text(_cell(value)) for value in row.values()))
        out.print(shown)
        if fitting.num_columns < table.num_columns:
            rest = ", ".join(table.column_names[fitting.num_columns :])
            out.print(Text(f"not shown for want of width: {rest}", style="dim"))
        return
    text = io.StringIO()
    if format_ == "json":
        json.dump(table.to_pylist(), text, default=str, ensure_ascii=False, indent=1)
        text.write("\n")
    else:
        rows = csv.writer(text, lineterminator="\n")  # as other programs of a shell have it
        rows.writerow(table.column_names)
        rows.writerows(row.values() for row in table.to_pylist())
    if output is None:
        sys.stdout.write(text.getvalue())
    else:
        output.write_text(text.getvalue())


def open_for_reading(where: str) -> Book:
    """The book in a folder, or behind a URL whose admin key is in ROLLBOOK_ADMIN_KEY. Raises StoreError."""
    if is_url(where) and ADMIN_KEY not in os.environ:
        raise StoreError(f"a served book needs its admin key; set {ADMIN_KEY} to the key that {where} was started with")
    return open_anywhere(where, key=os.environ.get(ADMIN_KEY))


def verify_book(book_path: str, out: Console, *, is_json: bool = False) -> bool:
    """Check every record; print what was found. Whether the book is whole."""
    report = verify(book_path)
    if is_json:
        found = {**asdict(report), "is_whole": report.is_whole, "n_events": report.n_events}
        json.dump(found, sys.stdout, default=str, indent=1)
        sys.stdout.write("\n")
        return report.is_whole
    out.print(str(report), highlight=False, soft_wrap=True)
    return report.is_whole


def find_episode(book: Book, name: str) -> str:
    """The id that begins with `name`, or the newest episode for `last`. Raises StoreError."""
    return _find(book, "episode", "opened_at", name, "`rollbook episodes` lists them")


def find_interaction(book: Book, name: str) -> str:
    """The id that begins with `name`, or the newest interaction for `last`. Raises StoreError."""
    help_ = "`rollbook show BOOK EPISODE --json` has the ids of an episode"
    return _find(book, "interaction", "recorded_at", name, help_)


def _find(book: Book, what: str, time: str, name: str, help_: str) -> str:
    if name == "last":
        found = book.sql(f"select {what}_id as id from {what}s order by {time} desc limit 1")
    else:
        found = book.sql(f"select {what}_id as id from {what}s where starts_with({what}_id, ?) limit 3", [name])
    ids: list[str] = found["id"].to_pylist()
    if len(ids) != 1:
        came = f"no {what}" if not ids else f"{', '.join(ids)}, ... all begin with it"
        raise StoreError(f"expected one {what} that is or begins with {name!r}: {came}; {help_}")
    return ids[0]


def find_ended(book_path: str, where: str) -> list[str]:
    """Ids of the ended episodes for which the SQL condition holds. Raises StoreError."""
    query = f"select episode_id from episodes where state <> 'open' and {in_parentheses(where)} order by episode_id"
    with open_book(book_path) as book:
        try:
            found = book.sql(query)
        except duckdb.Error as error:
            raise QueryRefused(f"{str(error).strip()} (docs/sql.md lists the columns of `episodes`)") from error
    ids: list[str] = found["episode_id"].to_pylist()
    return ids


def show_episode(
    book_path: str,
    name: str,
    out: Console,
    *,
    scheme: Scheme = "tree",
    gamma: float = 1.0,
    colour: str = "probability",
    n_tokens: int = 200,
    tokenizer: str | None = None,
    is_json: bool = False,
) -> None:
    """One episode: its tree, what was said, its tokens coloured by one of COLOURS, credits.

    tokenizer: a model folder; by default the run's own, where it is here. Without one the text is coloured as a whole.
    """
    with open_for_reading(book_path) as book:
        episode = book.episode(find_episode(book, name))
        run_id = episode.row["run_id"]
        table = book.credits(scheme, gamma, episode_ids=[episode.row["episode_id"]])
        credits_of = dict(zip(table["interaction_id"].to_pylist(), table["credit"].to_pylist(), strict=True))
        if is_json:
            json.dump(_plain(episode, credits_of), sys.stdout, default=str, ensure_ascii=False, indent=1)
            sys.stdout.write("\n")
            return
        newest = book.sql("select max(version) as v from policies where run_id = ?", [run_id])["v"][0].as_py()
        seen = [value for value in credits_of.values() if value is not None]
        shown = _Shown(
            spell=_speller(tokenizer) if tokenizer else _speller_if_here(tokenizer_of(book, run_id)),
            colour=colour,
            n_tokens=n_tokens,
            newest=max([one.row["version_max"] or 0 for one in episode.interactions] + [newest or 0]),
            scale=max(map(abs, seen), default=0.0) or 1.0,
        )
        out.print(_tree(episode, credits_of, shown))
        if n_tokens:
            out.print(Text.assemble(f"colour is {colour}: ", *_LEGENDS[colour]), style="dim", highlight=False)


def tokenizer_of(book: Book, run_id: str) -> str | None:
    """The newest of the run's model folders that is here and has a tokenizer; else the one it was served with."""
    found = book.sql("select path from policies where run_id = ? order by version desc", [run_id])["path"].to_pylist()
    found += book.sql("select config->>'$.model' as path from runs where run_id = ?", [run_id])["path"].to_pylist()
    return next((path for path in found if path and Path(path, "tokenizer.json").is_file()), None)


@dataclass(frozen=True)
class _Shown:
    """How tokens are shown. spell: ids -> one text per token; None: their text is not known."""

    spell: Callable[[Sequence[int]], list[str]] | None
    colour: str
    n_tokens: int
    newest: int  # version
    scale: float  # the largest credit, as a magnitude


def _speller_if_here(folder: str | None) -> Callable[[Sequence[int]], list[str]] | None:
    if folder is None or not all(map(find_spec, ("tokenizers", "jinja2"))):  # of the extra `serve`
        return None
    return _speller(folder)


def _speller(folder: str) -> Callable[[Sequence[int]], list[str]]:
    from rollbook.proxy.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder)
    return lambda ids: [tokenizer.decode([i]) for i in ids]


def _tree(episode: Episode, credits_of: dict[str, float | None], shown: _Shown) -> Tree:
    row = episode.row
    reward = row.get("reward")
    head = Text.assemble(
        (row["episode_id"], "bold"),
        f"  task {row.get('task_id')}  {row['state']}",
        "" if reward is None else f"  reward {reward:g}",
        "" if row.get("reason") is None else f"  ({row['reason']})",
    )
    root = Tree(head)
    branches: dict[str, Tree] = {}
    children: dict[str, int] = {}
    for one in episode.interactions:
        parent = one.row["parent_id"]
        children[parent] = children.get(parent, 0) + 1
        # A chain stays at one level: only forks indent, so that a hundred turns are readable.
        above = branches.get(parent, root)
        under = above if parent is None or children[parent] == 1 else above.add(Text("fork", style="magenta"))
        _add(under, one, credits_of.get(one.interaction_id), shown)
        branches[one.interaction_id] = under
    for failure in episode.failures:
        what = "failed judgement" if failure["error"] == "RewardFailed" else "failed call"
        root.add(Text(f"{what}: {failure['error']}: {failure['message']}", style="red"))
    return root


def _add(under: Tree, one: Interaction, credit: float | None, shown: _Shown) -> None:
    row = one.row
    for message in () if one.is_pruned else one.request:
        under.add(Text.assemble((f"{message.get('role', '?')}: ", "cyan"), _said(message)))
    facts = [f"prompt {row['n_prompt']}"]
    if row["n_shared"]:
        facts.append(f"of which {row['n_shared']} are the parent's")
    facts.append(f"sampled {row['n_output']}")
    if row["version_min"] is not None:
        facts.append(
            f"version {row['version_min']}" + (f"-{row['version_max']}" * (row["version_max"] != row["version_min"]))
        )
    if row["is_pruned"]:
        facts.append("pruned")
    if credit is not None:
        facts.append(f"credit {credit:g}")
    if row["edge"] not in (None, "extends"):
        facts.append(f"{row['edge']}: {row['cause']}")
    facts += [f"{reward['name']} {reward['value']:g} by {reward['source']}" for reward in one.rewards]
    whole = "" if shown.spell else _overall(one, credit, shown)
    said = "" if one.is_pruned else _said(one.reply)
    node = under.add(Text.assemble(("assistant: ", "green"), (said, whole), (f"  [{', '.join(facts)}]", "dim")))
    if shown.spell is None or not shown.n_tokens or not row["n_output"] or row["is_pruned"]:
        return
    ids = one.output_ids.tolist()[: shown.n_tokens]
    styles = _styles(one, credit, shown)
    tokens = Text("tokens: ", style="dim")
    for text, style in zip(shown.spell(ids), styles, strict=False):
        tokens.append(visible(text.replace("\n", "\\n")) + "│", style=style)
    if row["n_output"] > len(ids):
        tokens.append(f" … {row['n_output'] - len(ids)} more")
    node.add(tokens)


def _styles(one: Interaction, credit: float | None, shown: _Shown) -> list[str]:
    """A style per output token."""
    if shown.colour == "credit":
        return [_credit_style(credit, shown.scale)] * len(one.output_ids)
    if shown.colour == "version":
        return [_age_style(shown.newest - version) for version in one.versions.tolist()]
    return [_probability_style(logprob) for logprob in one.logprobs.tolist()]


def _overall(one: Interaction, credit: float | None, shown: _Shown) -> str:
    """The style of an answer of which only the text is known: of its mean."""
    row = one.row
    if shown.colour == "credit":
        return _credit_style(credit, shown.scale)
    if row["version_min"] is None or row["mean_logprob"] is None:
        return ""
    return (
        _age_style(shown.newest - row["version_min"])
        if shown.colour == "version"
        else _probability_style(row["mean_logprob"])
    )


def _probability_style(logprob: float) -> str:
    """Red for a token that was unlikely, green for one that was certain; none where nobody knows."""
    if math.isnan(logprob):
        return ""
    probability = math.exp(min(0.0, logprob))
    return next(style for least, style in _PROBABILITIES if probability >= least)


def _credit_style(credit: float | None, scale: float) -> str:
    if credit is None:
        return ""
    return next(style for least, style in _CREDITS if credit / scale >= least)


def _age_style(age: int) -> str:
    return next(style for least, style in _AGES if age >= least)


_PROBABILITIES = ((0.9, "green"), (0.5, "yellow"), (0.1, "dark_orange"), (0.0, "red"))
_CREDITS = ((0.5, "bold green"), (1e-9, "green"), (-1e-9, ""), (-0.5, "red"), (-math.inf, "bold red"))
_AGES = ((8, "red"), (3, "dark_orange"), (1, "yellow"), (-(1 << 31), "green"))

_LEGENDS: dict[str, list[tuple[str, str]]] = {
    "probability": [("over .9 ", "green"), ("over .5 ", "yellow"), ("over .1 ", "dark_orange"), ("less", "red")],
    "credit": [("at least half the most ", "bold green"), ("above 0 ", "green"), ("0 ", ""), ("below 0", "red")],
    "version": [
        ("the newest ", "green"),
        ("1 or 2 behind ", "yellow"),
        ("3 to 7 ", "dark_orange"),
        ("8 or more", "red"),
    ],
}
COLOURS = tuple(_LEGENDS)
"""What the colour of a token may say."""


def _said(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = " ".join(str(part.get("text", part.get("type"))) for part in content)
    calls = [
        f"{call.get('function', {}).get('name')}({call.get('function', {}).get('arguments')})"
        for call in message.get("tool_calls") or []
    ]
    text = visible(" ".join([*([str(content)] if content else []), *calls]))
    return text if len(text) <= 500 else text[:499] + "…"


def _plain(episode: Episode, credits_of: dict[str, float | None]) -> dict[str, Any]:
    return {
        **episode.row,
        "rewards": episode.rewards,
        "failures": episode.failures,
        "interactions": [
            {
                **one.row,
                "request": None if one.is_pruned else one.request,
                "reply": None if one.is_pruned else one.reply,
                "rewards": one.rewards,
                "credit": credits_of.get(one.interaction_id),
                **{name: _tokens(one, name) for name in ("prompt_ids", "output_ids", "logprobs", "versions")},
            }
            for one in episode.interactions
        ],
    }


def _tokens(one: Interaction, name: str) -> list[Any] | None:
    """None where they cannot be rebuilt."""
    if one.row["is_pruned"] or one.row["is_broken"]:
        return None
    found: list[Any] = getattr(one, name).tolist()
    return found
