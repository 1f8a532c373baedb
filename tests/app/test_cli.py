"""The command line, as a newcomer and as somebody whose input is wrong meet it."""

import io
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

from commands import printed
from rollbook.app.models import prepare_model
from rollbook.app.reading import print_table
from rollbook.store import (
    EpisodeClosed,
    EpisodeOpened,
    Event,
    InteractionRecorded,
    InteractionsPruned,
    Messages,
    PayloadPruned,
    RewardGiven,
    __version__,
    open_book,
)
from rollbook.store.directory import LAKE_FORMAT
from rollbook.store.events import encode_messages


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The exit status and all that was printed, on one line."""
    status, text = printed(capsys, *words)
    return status, " ".join(text.split())


@pytest.fixture
def book_path(tmp_path: Path) -> Path:
    path = tmp_path / "book"
    with open_book(path, writer="test") as book:
        for i in range(3):
            book.log.append_blocking(
                Event(run_id="r", episode_id=f"ep_{i}", fact=EpisodeOpened(task_id="t", group_id="g")),
                Event(run_id="r", episode_id=f"ep_{i}", fact=RewardGiven(value=i / 2)),
                Event(run_id="r", episode_id=f"ep_{i}", fact=EpisodeClosed(state="done")),
            )
    return path


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--version") == (0, f"rollbook {__version__}")
    status, text = said(capsys, "--help")
    assert status == 0
    for command in ("serve", "train", "sql", "show", "demo"):
        assert command in text


@pytest.mark.parametrize(
    "command",
    [
        "serve",
        "train",
        "eval",
        "sql",
        "runs",
        "groups",
        "episodes",
        "show",
        "tail",
        "stats",
        "doctor",
        "export",
        "import",
        "reward",
        "rewards",
        "replay",
        "verify",
        "lake",
        "prune",
        "demo",
        "run-areal",
    ],
)
def test_every_command_explains_itself_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, command, "--help")
    assert status == 0
    assert f"Example: rollbook {command}" in text


def test_sql_in_every_format(book_path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    query = "select state, avg(reward) as reward from episodes group by state"
    assert said(capsys, "sql", str(book_path), query, "--format", "csv") == (0, "state,reward done,0.5")
    status, text = said(capsys, "sql", str(book_path), query, "--format", "json")
    assert (status, json.loads(text)) == (0, [{"state": "done", "reward": 0.5}])
    status, text = said(capsys, "sql", str(book_path), query)
    assert status == 0
    assert "done" in text
    target = tmp_path / "out.parquet"
    assert said(capsys, "sql", str(book_path), query, "--format", "parquet", "-o", str(target))[0] == 0
    import pyarrow.parquet as pq

    assert pq.read_table(target).to_pylist() == [{"state": "done", "reward": 0.5}]


def test_csv_has_lines_as_other_programs_of_a_shell_have_them(
    book_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(capsys, "sql", str(book_path), "select 1 as n", "--format", "csv") == (0, "n\n1\n")


def test_names_with_brackets_and_colons_are_shown_as_they_are(
    book_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = book_path.parent / "[bold]b [/x] :smile:"
    odd.parent.mkdir()
    book_path.rename(odd)
    status, text = said(capsys, "sql", str(odd), """select 1 as "l[i]", 2 as "[/b]", 3 as ":x:" """)
    assert (status, ["l[i]", "[/b]", ":x:"]) == (0, text.replace("┃", " ").split()[1:4])
    assert said(capsys, "verify", str(odd))[1].startswith(f"{odd}: ")
    status, text = said(capsys, "export", str(odd), "--format", "parquet", "--out", f"{odd}/tables")
    assert (status, f"at {odd}/tables" in text) == (0, True)


@pytest.mark.parametrize(
    "order",
    ["sql BOOK QUERY --format csv", "sql BOOK --format csv QUERY", "sql --format csv BOOK QUERY"],
)
def test_options_stand_anywhere(order: str, book_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = [{"BOOK": str(book_path), "QUERY": "select 1 as n"}.get(word, word) for word in order.split()]
    assert said(capsys, *told) == (0, "n 1")


def test_an_option_that_is_not_there_is_named(book_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _ = said(capsys, "sql", str(book_path), "--fromat", "csv", "select 1 as n")
    assert status == 2


def test_canned_questions_by_name(book_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, "sql", str(book_path))
    assert status == 0
    assert "task_curve" in text
    status, text = said(capsys, "sql", str(book_path), "group_health", "run=r", "--format", "json")
    assert status == 0
    assert json.loads(text)[0]["run_id"] == "r"
    status, text = said(capsys, "sql", str(book_path), "group_health", "nonsense=1")
    assert status == 1
    assert "no parameter 'nonsense'" in text


@pytest.fixture
def spoken_book(tmp_path: Path) -> Path:
    """Two ended episodes and an open one, a model call each."""
    path = tmp_path / "book"
    with open_book(path, writer="test") as book:
        for name in ("ep_old", "ep_new", "ep_open"):
            call = Event(
                run_id="r",
                episode_id=name,
                interaction_id=f"{name}_call",
                fact=InteractionRecorded(prompt_length=3),
                messages=encode_messages(Messages(request=[], reply={"role": "assistant", "content": "hello"})),
                prompt_ids=np.arange(3, dtype=np.int32),
                output_ids=np.arange(2, dtype=np.int32),
                logprobs=np.zeros(2, np.float32),
                versions=np.zeros(2, np.int32),
            )
            book.log.append_blocking(Event(run_id="r", episode_id=name, fact=EpisodeOpened(task_id=name)), call)
            if name != "ep_open":
                closed = Event(run_id="r", episode_id=name, fact=EpisodeClosed(state="done"))
                book.log.append_blocking(Event(run_id="r", episode_id=name, fact=RewardGiven(value=1.0)), closed)
    return path


def has_tokens(path: Path) -> set[str]:
    """The episodes whose tokens are still there."""
    there = set()
    with open_book(path) as book:
        for name in ("ep_old", "ep_new", "ep_open"):
            try:
                book.load([f"{name}_call"])
                there.add(name)
            except PayloadPruned:
                assert book.episode(name).row["reward"] == 1.0  # the facts stay
    return there


def test_prune_says_what_it_would_remove_and_removes_it_when_told(
    spoken_book: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("prune", str(spoken_book), "--where", "task_id <> 'ep_new'")
    everything = {"ep_old", "ep_new", "ep_open"}
    files = {p: p.read_bytes() for p in (spoken_book / "log").rglob("*.*")}
    status, text = said(capsys, *words, "--dry-run")
    assert (status, "1 events of 1 ended episodes" in text, "dry run" in text) == (0, True, True)
    assert {p: p.read_bytes() for p in (spoken_book / "log").rglob("*.*")} == files
    assert not (spoken_book / "sealed").exists()
    for answer, expected in (("n\n", 0), ("\n", 0), ("", 1)):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        status, text = said(capsys, *words)
        assert (status, "nothing was removed" in text) == (expected, True)
    assert has_tokens(spoken_book) == everything
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert said(capsys, *words)[0] == 0
    assert has_tokens(spoken_book) == everything - {"ep_old"}
    assert "pruned" in said(capsys, "show", str(spoken_book), "ep_old")[1]
    (call,) = json.loads(said(capsys, "show", str(spoken_book), "ep_old", "--json")[1])["interactions"]
    assert (call["n_output"], call["output_ids"]) == (2, None)
    status, text = said(capsys, *words, "--yes")
    assert (status, "nothing to prune" in text) == (0, True)
    assert said(capsys, "prune", str(spoken_book), "--where", "true", "--yes")[0] == 0
    assert has_tokens(spoken_book) == {"ep_open"}
    assert said(capsys, "verify", str(spoken_book))[0] == 0


def test_prune_ends_what_an_earlier_one_began(spoken_book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_book(spoken_book, writer="prune") as book:  # as one that was killed right after it said so
        named = InteractionsPruned(interaction_ids=["ep_old_call"])
        book.log.append_blocking(Event(run_id="r", episode_id="ep_old", fact=named))
    assert len(has_tokens(spoken_book)) == 3
    status, text = said(capsys, "verify", str(spoken_book))
    assert (status, "`rollbook prune BOOK --where false` removes them" in text) == (0, True)
    status, text = said(capsys, "prune", str(spoken_book), "--where", "false", "--yes")
    assert (status, "1 events are of an earlier prune" in text) == (0, True)
    assert has_tokens(spoken_book) == {"ep_new", "ep_open"}


def test_prune_wants_a_condition_that_reads(spoken_book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, "prune", str(spoken_book), "--where", "nonsense = 1", "--yes")
    assert (status, "nonsense" in text, "docs/sql.md" in text) == (1, True, True)
    for command in (("prune", "--yes"), ("rescore", "--model", "tiny", "--name", "x")):
        status, text = said(capsys, command[0], str(spoken_book), *command[1:], "--where", "true) or (true")
        assert (status, "got 'true) or (true'" in text) == (1, True), "it would take the open episode along"
    assert said(capsys, "prune", str(spoken_book), "--yes")[0] == 2
    assert len(has_tokens(spoken_book)) == 3


STOPPED = """
import os, signal, sys, threading, time
from rollbook.app.reading import answer, open_for_reading

def stop():
    begun = time.process_time()
    while time.process_time() < begun + 0.3:  # nothing but the query computes
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
with open_for_reading(sys.argv[1]) as book:
    threading.Thread(target=stop, daemon=True).start()
    try:
        answer(book, "select max(hash(i)) from range(1000000000000) t(i)")
    except KeyboardInterrupt:
        print(answer(book, "select 7 as n")["n"][0])
"""


def test_a_signal_that_duckdb_meets_first_is_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stopped_rows.py").write_text(
        """
import duckdb, pyarrow as pa

class Table:
    schema = pa.schema({"x": pa.int64()})

    def __arrow_c_stream__(self, requested_schema=None):
        raise KeyboardInterrupt  # as the handler of a signal does that comes now

    def __len__(self):
        return 1

class Agent:
    async def run(self, data, **_): ...

def rows():
    with duckdb.connect() as connection:
        connection.register("t", Table())
        return connection.sql("from t").fetchall()
"""
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    status, told = said(capsys, "eval", "stopped_rows.Agent", "stopped_rows:rows", "--model", "tiny")
    assert (status, "stopped; what was acknowledged is in the book" in told) == (130, True), told


def test_a_query_without_an_end_is_ended_by_ctrl_c(book_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", STOPPED, str(book_path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr


def test_show_and_episodes(book_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "ep_2" in said(capsys, "episodes", str(book_path))[1]
    status, text = said(capsys, "show", str(book_path), "ep_1")
    assert status == 0
    assert "reward 0.5" in text
    status, text = said(capsys, "show", str(book_path), "ep_")
    assert status == 1
    assert "all begin with it" in text


def test_verify(book_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "verify", str(book_path))[0] == 0
    segment = next((book_path / "log").rglob("*.log"))
    content = bytearray(segment.read_bytes())
    content[100] ^= 1
    segment.write_bytes(content)
    assert said(capsys, "verify", str(book_path))[0] == 1


def test_a_missing_book_says_how_to_make_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, "sql", str(tmp_path / "none"), "select 1")
    assert status == 1
    assert str(tmp_path / "none") in text
    assert "`rollbook serve`, a training run and" in text
    assert text.count(".") < 8
    assert not (tmp_path / "none").exists()


def test_wrong_sql_is_one_sentence(book_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, "sql", str(book_path), "select nothing from episodes")
    assert status == 1
    assert "nothing" in text
    assert "Traceback" not in text


def test_a_book_of_a_newer_version_names_both_versions(book_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = json.loads((book_path / "book.json").read_text())
    (book_path / "book.json").write_text(json.dumps({**manifest, "format": 99}))
    before = sorted(path.name for path in book_path.rglob("*"))
    status, text = said(capsys, "sql", str(book_path), "select 1")
    assert status == 1
    assert "format 99" in text
    assert f"up to format {LAKE_FORMAT}" in text
    assert sorted(path.name for path in book_path.rglob("*")) == before


def config(tmp_path: Path, text: str) -> str:
    (tmp_path / "config.yaml").write_text(text)
    return str(tmp_path / "config.yaml")


def test_an_unknown_key_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, "train", config(tmp_path, "actor: {pth: tiny}"))
    assert status == 1
    assert "'actor.pth'" in text
    assert "'path'" in text


def test_a_missing_model_is_named_and_nothing_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text_of = (
        f"workflow: json.JSONEncoder\ncluster: {{fileroot: {tmp_path}/runs}}\nactor: {{path: {tmp_path}/no-model}}\n"
    )
    status, text = said(capsys, "train", config(tmp_path, text_of))
    assert status == 1
    assert f"{tmp_path}/no-model" in text
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("workflow", "says"),
    [("no_such_module.Agent", "no_such_module"), ("json.NoSuchAgent", "NoSuchAgent"), ("json.JSONEncoder", "run")],
)
def test_an_agent_that_does_not_resolve_is_named_before_anything_starts(
    workflow: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    text_of = (
        f"workflow: {workflow}\ncluster: {{fileroot: {tmp_path}/runs}}\n"
        f"actor: {{path: tiny}}\ntrain_dataset: {{path: {tmp_path}/rows.jsonl}}\n"
    )
    status, text = said(capsys, "train", config(tmp_path, text_of))
    assert status == 1
    assert says in text
    assert "Traceback" not in text or "no_such_module" in text
    assert not (tmp_path / "runs").exists()


def test_a_config_without_an_agent_says_which_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, "train", config(tmp_path, "actor: {path: tiny}"))
    assert status == 1
    assert "workflow" in text


def test_a_full_disk_is_one_sentence_and_the_book_stays_whole(book_path: Path) -> None:
    """The limit on file size stands for the disk: the same error from the same call, and safe to have in a test."""
    code = (
        "import resource, sys\n"
        "from rollbook.store import *\n"
        "book = open_book(sys.argv[1], writer='test')\n"
        "size = max(p.stat().st_size for p in __import__('pathlib').Path(sys.argv[1], 'log').rglob('*.log'))\n"
        "__import__('signal').signal(__import__('signal').SIGXFSZ, __import__('signal').SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, size + 1000))\n"
        "try:\n"
        "    while True: book.log.append_blocking(Event(run_id='r', fact=RunStarted(name='x' * 400)))\n"
        "except LogWriteFailed as error: print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, str(book_path)], env=environment, capture_output=True, text=True)
    assert done.stdout.count("\n") == 1, done.stdout + done.stderr
    assert str(book_path) in done.stdout
    with open_book(book_path) as book:
        assert book.sql("select count(*) n from episodes")["n"][0].as_py() == 3


def test_a_missing_extra_names_what_to_install(tmp_path: Path) -> None:
    """In an interpreter that cannot import litestar, `serve` says which extra brings it."""
    code = (
        "import sys\n"
        "sys.modules['litestar'] = None\n"
        "from rollbook.app.cli import main\n"
        "main(['serve', sys.argv[1], '--model', 'tiny'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "book")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "pip install 'rollbook[serve]'" in done.stderr


def test_tables_of_a_newer_version_are_computed_again_with_one_sentence(book_path: Path) -> None:
    with duckdb.connect(str(book_path / "views.duckdb")) as con:
        con.execute("update alembic_version set version_num = '9999'")
    ask = [sys.executable, "-m", "rollbook.app.cli", "sql", str(book_path), "from tokens limit 1", "--format", "csv"]
    asked = subprocess.run(ask, capture_output=True, text=True, check=True)
    assert asked.stdout.startswith("interaction_id,place,token_id")
    (line,) = asked.stderr.splitlines()
    assert line.endswith("has tables of revision 9999, which this version does not know; computing them again")


def test_a_book_of_a_newer_format_is_refused_with_one_sentence(
    book_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (book_path / "book.json").write_text('{"format": 99, "created_by": "rollbook 9.0"}')
    status, printed = said(capsys, "sql", str(book_path), "from episodes")
    assert status == 1
    assert printed.startswith("rollbook: ")
    assert "99" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["algorithm=gpro"], "algorithm is 'gpro'; expected one of"),
        (["algorithm=nowhere.Mine"], "algorithm 'nowhere.Mine' cannot be imported: No module named 'nowhere'"),
        (["algorithm=ppo"], "algorithm 'ppo' needs a value model; set critic.path"),
        (["actor.kl_ctl=0.1"], "asks for a reference model; set ref.path"),
        (
            ["scheduler.type=kubernetes"],
            "scheduler.type is 'kubernetes', but the installed schedulers are: local, ray, slurm",
        ),
    ],
)
def test_a_setting_that_cannot_be_is_one_sentence_and_nothing_is_made(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(
        f"workflow: json.JSONDecoder\nactor: {{path: tiny}}\ncluster: {{fileroot: {tmp_path}/runs}}\n"
        f"train_dataset: {{path: {tmp_path}/rows.jsonl}}\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1"}\n')
    status, text = said(capsys, "train", str(tmp_path / "config.yaml"), *words)
    assert status == 1
    assert text.startswith("rollbook: ")
    assert expected in text
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--port", "70000"], "cannot listen on port 70000: it must be 0 to 65535; choose another"),
        (["--set", "a={"], "unknown field `a`"),
        (["--port", "0", "--address-file", "/nowhere/[x]"], "/nowhere/[x].part: No such file or directory"),
    ],
)
def test_serve_says_in_one_sentence_what_it_cannot_do(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = said(capsys, "serve", str(tmp_path / "book"), "--model", "tiny", "--threads", "1", *words)
    assert status == 1
    assert text.startswith("rollbook: ")
    assert expected in text


def test_weights_of_another_shape_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(prepare_model("tiny"), folder)
    (folder / "config.json").write_text(
        (folder / "config.json").read_text().replace('hidden_size": 64', 'hidden_size": 32')
    )
    status, text = said(capsys, "serve", str(tmp_path / "book"), "--model", str(folder), "--threads", "1")
    assert status == 1
    assert f"rollbook: could not load a model from {folder}" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["BOOK"], "book is a file, and a book is a folder"),
        (["NEW", "--engine", "scripted", "--script", "nomod:f"], "script 'nomod:f': there is no module 'nomod'"),
        (
            ["NEW", "--engine", "scripted", "--script", "os:getpid"],
            "expected os:getpid to take the tokenizer and return the script, a function of a Generation; it takes ()",
        ),
        (["NEW", "--engine", "scripted", "--script", "copy:copy"], "which is no function"),
        (["NEW", "--port", "0", "--writer", "../x"], "--writer: a writer name is 1 to 100 letters"),
        (["NEW", "--host", "0.0.0.0", "--port", "0", "--set", "admin_key=short"], "too weak to serve on 0.0.0.0"),
        (["NEW", "--threads", "0"], "--threads must be at least 1, got 0"),
        (["NEW", "--weights-version", "-1"], "--weights-version must be at least 0, got -1"),
        (["NEW", "--engine", "openai"], "give --engine-url URL"),
        (["NEW", "--engine-url", "http://127.0.0.1:1"], "--engine is embedded"),
    ],
)
def test_what_cannot_be_served_makes_no_book(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "book").touch()
    book, *rest = words
    path = tmp_path / ("book" if book == "BOOK" else "new")
    status, text = said(capsys, "serve", str(path), "--model", "tiny", "--threads", "1", *rest)
    assert status == 1
    assert expected in " ".join(text.split())
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("words", [["--threads", "0"], ["--steps", "0"]])
def test_a_demo_of_nothing_is_refused(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, "demo", "--dir", str(tmp_path / "demo"), *words)
    assert status == 1
    assert f"{words[0]} must be at least 1, got 0" in text
    assert not (tmp_path / "demo").exists()


def test_ids_stay_in_one_piece_on_a_narrow_terminal() -> None:
    name = "ep_01a2295e5f51727a81df5977584e785a"
    table = pa.table({"episode_id": [name], "reason": ["a long reason " * 10], "other_id": [name * 2]})
    narrow = Console(width=80, record=True, file=io.StringIO())
    print_table(table, "table", narrow)
    assert name in narrow.export_text()


def test_a_port_in_use_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        status, text = said(
            capsys, "serve", str(tmp_path / "book"), "--model", "tiny", "--threads", "1", "--port", str(port)
        )
    assert status == 1
    assert text.startswith(f"rollbook: cannot listen on 127.0.0.1 port {port}: Address already in use; choose another")
    assert not (tmp_path / "book").exists(), "nothing was served, so there is no empty book"
