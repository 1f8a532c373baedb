"""`rollbook sql BOOK` in a terminal: a real pseudo-terminal, keys and all."""

import io
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from rich.console import Console

from rollbook.app.terminal.repl import Repl, Words
from rollbook.store import open_book


class Terminal:
    """The command behind a pseudo-terminal."""

    def __init__(self, book: Path, home: Path) -> None:
        self._ours, theirs = pty.openpty()
        env = {**os.environ, "XDG_STATE_HOME": str(home), "TERM": "xterm", "COLUMNS": "200", "LINES": "50"}
        words = [sys.executable, "-m", "rollbook.app.cli", "sql", str(book)]
        self._process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=env, close_fds=True)
        os.close(theirs)
        self.text = self._end = ""

    def answer(self, keys: str) -> None:
        """Type at a new prompt: what comes earlier is not read by it."""
        self.wait_for("rollbook>")
        self.type(keys)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait_for(self, text: str) -> None:
        """Read until the text came after what was waited for before."""
        until = time.monotonic() + 600
        while text not in self.text:
            ready, _, _ = select.select([self._ours], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"waited for {text!r}, got {self.text!r}"
            got = os.read(self._ours, 65536).decode(errors="replace")
            self.text += got
            self._end += got
            if "\x1b[6n" in self._end:  # where is the cursor?
                self.type("\x1b[1;1R")
            self._end = self._end[-3:]  # half a question
        self.text = self.text.split(text, 1)[1]

    def end(self) -> int:
        self.answer("\x04")
        return self._process.wait(800)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)


@pytest.fixture
def open_terminal(shown_book: Path, tmp_path: Path) -> Iterator[Callable[[], Terminal]]:
    opened: list[Terminal] = []

    def open_one() -> Terminal:
        opened.append(Terminal(shown_book, tmp_path))
        return opened[-1]

    yield open_one
    for terminal in opened:
        terminal.stop()


def test_questions_are_typed_completed_answered_and_remembered(
    open_terminal: Callable[[], Terminal], tmp_path: Path
) -> None:
    terminal = open_terminal()
    terminal.answer("select count(*) > 3 as many from interac\t")
    terminal.wait_for("tions")
    terminal.type(";\r")
    terminal.wait_for("many")
    terminal.wait_for("True")
    terminal.wait_for("1 rows in")
    terminal.answer("selec nonsense;\r")
    terminal.wait_for("syntax error")
    terminal.answer("run_compare\r")
    terminal.wait_for("train_reward")
    terminal.answer(".columns runs\r")
    terminal.wait_for("restarted_at")
    assert terminal.end() == 0
    assert "run_compare" in (tmp_path / "rollbook" / "sql_history").read_text()
    again = open_terminal()
    again.answer("\x1b[A\x1b[A")  # up, up: before .columns was run_compare
    again.wait_for("run_compare")
    again.type("\r")
    again.wait_for("rows in")
    assert again.end() == 0


@pytest.mark.parametrize(
    ("text", "expected", "unexpected"),
    [
        ("select * from epi", "episodes", "episode_id"),
        ("select rew|  from episodes", "reward", None),
        ("task_c", "task_curve", None),
        (".for", ".format", "from"),
        (".format p", "parquet", "csv"),
    ],
)
def test_completion_knows_where_it_stands(text: str, expected: str, unexpected: str | None) -> None:
    at = text.index("|") if "|" in text else len(text)
    document = Document(text.replace("|", ""), at)
    found = [one.text for one in Words().get_completions(document, CompleteEvent())]
    assert expected in found
    assert unexpected not in found


def test_answers_are_written_in_every_format(shown_book: Path, tmp_path: Path) -> None:
    text = io.StringIO()
    with open_book(shown_book) as book:
        repl = Repl(book, Console(file=text, width=200))
        assert repl.run("")
        assert repl.run(".format parquet")
        assert repl.run(f".output {tmp_path}/out.parquet")
        assert repl.run("select run_id, count(*) as n from episodes group by run_id;")
        assert pq.read_table(tmp_path / "out.parquet").column_names == ["run_id", "n"]
        for line in (".help", ".tables", ".questions", ".format nonsense", ".columns nonsense", "drop table nonsense;"):
            assert repl.run(line), line
        assert "ready-made question" in text.getvalue()
        assert "nonsense does not exist" in text.getvalue()
        assert not repl.run(".quit")
