"""`rollbook sql BOOK`: questions one after the other, with completion and a history that outlives the session.

A statement ends with a semicolon; a line that begins with a dot is for the prompt itself (`.help`). The book is
followed: every answer is of the moment.
"""

import os
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.text import Text

from rollbook.app.reading import answer, print_table
from rollbook.store import Book, StoreError
from rollbook.store.canned import CANNED
from rollbook.store.relations import TOKENS
from rollbook.store.schema import VIEWS, metadata

_WORD = re.compile(r"[A-Za-z_0-9]+")

FORMATS = ("table", "csv", "json", "parquet", "arrow")

_KEYWORDS = """
    select from where group by order having limit join left using on as distinct case when then else end and or not in
    is null between like count avg sum min max median stddev_samp quantile_cont any_value list unnest with all
"""

HELP = """A statement ends with a semicolon; a ready-made question is its name, then a=b parameters.
.tables             the tables
.columns TABLE      its columns
.questions          the ready-made questions
.format FORMAT      table, csv, json, parquet or arrow
.output FILE        write the next answer there (parquet and arrow need it)
.quit               or Ctrl-D"""


def columns_of() -> dict[str, list[str]]:
    """Every relation that a query may name, with its columns."""
    found = {name: [column.name for column in table.columns] for name, table in metadata.tables.items()}
    found |= {view.name: list(view.columns) for view in VIEWS}
    return found | {"tokens": list(TOKENS)}


class Words(Completer):
    """Completes table names, columns of the tables that a statement names, questions, keywords, dot commands."""

    def __init__(self) -> None:
        self._tables = columns_of()

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        text = document.text_before_cursor
        word = document.get_word_before_cursor(pattern=_WORD)
        if text.lstrip().startswith("."):
            yield from self._dots(text.lstrip())
            return
        before = text[: len(text) - len(word)].split()
        named = {name for name in self._tables if name in document.text.lower().split() or f"{name}." in document.text}
        if before and before[-1].lower() in ("from", "join"):
            candidates = list(self._tables)
        elif not before:
            candidates = [*_KEYWORDS.split(), *CANNED]
        else:
            candidates = (
                [c for name in sorted(named) for c in self._tables[name]] + list(self._tables) + _KEYWORDS.split()
            )
        for candidate in dict.fromkeys(candidates):
            if candidate.startswith(word.lower()) and candidate != word:
                yield Completion(candidate, start_position=-len(word))

    def _dots(self, text: str) -> Iterator[Completion]:
        command, space, rest = text.partition(" ")
        known = {".columns": list(self._tables), ".format": list(FORMATS)}
        candidates = known.get(command, []) if space else [line.split()[0] for line in HELP.splitlines()[1:]]
        part = rest if space else text
        for candidate in candidates:
            if candidate.startswith(part):
                yield Completion(candidate, start_position=-len(part))


def history_file() -> Path:
    """Where statements are kept between sessions."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "rollbook" / "sql_history"


class Repl:
    """One session. `run` answers one input; `loop` reads them."""

    def __init__(self, book: Book, out: Console, *, format: str = "table") -> None:
        self._book = book
        self._out = out
        self._format = format
        self._output: Path | None = None

    def loop(self) -> None:
        """Read and answer until .quit or the end of input."""
        session: PromptSession[str] = PromptSession(
            history=_history(), completer=Words(), complete_while_typing=False, multiline=True, key_bindings=_keys()
        )
        self._out.print(
            "Statements end with ; - Tab completes, .help helps, Ctrl-D ends.", style="dim", highlight=False
        )
        while True:
            try:
                text = session.prompt("rollbook> ", prompt_continuation="     ...> ")
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
            if not self.run(text):
                return

    def run(self, text: str) -> bool:
        """Answer one input. False where it ends the session."""
        statement = text.strip().rstrip(";").strip()
        if not statement:
            return True
        if statement.startswith("."):
            return self._dot(statement)
        began = time.perf_counter()
        try:
            self._book.catch_up()
            words = statement.split()
            name, params = (words[0], shlex.split(statement)[1:]) if words[0] in CANNED else (statement, [])
            table = answer(self._book, name, params)
            print_table(table, self._format, self._out, self._output)
        except (StoreError, ValueError) as error:
            self._out.print(Text(str(error), style="red"))
            return True
        except KeyboardInterrupt:
            self._out.print("stopped", style="red")
            return True
        where = "" if self._output is None else f" written to {self._output}"
        self._output = None
        self._out.print(
            f"{table.num_rows} rows{where} in {time.perf_counter() - began:.3f} s", style="dim", highlight=False
        )
        return True

    def _dot(self, text: str) -> bool:
        command, *words = text.split()
        tables = columns_of()
        if command in (".quit", ".exit"):
            return False
        if command == ".tables":
            self._out.print(" ".join(sorted(tables)), highlight=False)
        elif command == ".columns" and len(words) == 1 and words[0] in tables:
            self._out.print(" ".join(tables[words[0]]), highlight=False)
        elif command == ".questions":
            print_table(answer(self._book, None), "table", self._out)
        elif command == ".format" and len(words) == 1 and words[0] in FORMATS:
            self._format = words[0]
        elif command == ".output" and len(words) == 1:
            self._output = Path(words[0])
        else:
            self._out.print(HELP, highlight=False, markup=False)
        return True


def _history() -> History:
    file = history_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError:  # a home that cannot be written costs the history, not the session
        return InMemoryHistory()
    return FileHistory(str(file))


def _keys() -> KeyBindings:
    """Enter ends a statement that has its semicolon, a dot command and a question; else it begins a line."""
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        text = buffer.text.strip()
        if not text or text.endswith(";") or text.startswith(".") or text.split()[0] in CANNED:
            buffer.validate_and_handle()
        else:
            buffer.insert_text("\n")

    return keys
