"""A book in a DuckLake with a real PostgreSQL catalogue; `make test-lake` starts one and sets ROLLBOOK_TEST_LAKE."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from lakes import new_lake
from rollbook.store import BookBusy, Event, LogWriteFailed, RunStarted, StoreError, open_book, verify
from rollbook.store.directory import write_manifest
from rollbook.store.events import from_batch
from rollbook.store.lake import LakeLog, connect, create_lake_book, lake_of
from store_histories import interaction

SERVER = os.environ["ROLLBOOK_TEST_LAKE"]


@pytest.fixture
def book(tmp_path: Path) -> Path:
    return new_lake(SERVER, tmp_path)


def all_ids(book: Path) -> list[bytes]:
    log = LakeLog(book)
    found = [e.event_id for batch in log.read() for e in from_batch(batch)]
    log.close()
    return found


def cut_connections(book: Path) -> None:
    """End every connection to the book's catalogue from the server's side, in the middle of whatever they do."""
    lake = lake_of(book)
    assert lake is not None
    name = lake.catalogue.rpartition("dbname=")[2]
    with psycopg.connect(f"{SERVER} dbname=postgres", autocommit=True) as connection:
        connection.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", [name])


def test_any_duckdb_reads_the_events(book: Path) -> None:
    with open_book(book, writer="first") as opened:
        opened.log.append_blocking(*(interaction() for _ in range(3)))
    lake = lake_of(book)
    assert lake is not None
    con = connect(lake)
    assert con.execute("select kind, count(*), sum(len(output_ids)) from lake.events group by 1").fetchall() == [
        ("InteractionRecorded", 3, 150)
    ]
    con.close()


def test_the_tables_are_those_of_any_book(book: Path) -> None:
    with open_book(book, writer="first") as opened:
        events = [interaction(50, 7, episode_id="ep") for _ in range(3)]
        opened.log.append_blocking(*events)
        opened.catch_up()
        assert opened.sql("select sum(n_output) from interactions").to_pylist() == [{"sum(n_output)": 21}]
        tokens = opened.load([str(events[1].interaction_id)])
        assert tokens.input_ids.tolist() == [*range(50), *range(7)]
    report = verify(book)
    assert report.is_whole, str(report)
    assert report.n_events == 3


def test_a_name_is_one_writers(book: Path) -> None:
    first = LakeLog(book, "first")
    with pytest.raises(BookBusy, match="as 'first'"):
        LakeLog(book, "first")
    first.close()
    LakeLog(book, "first").close()


def test_events_of_before_a_restart_are_known(book: Path) -> None:
    old = [interaction() for _ in range(3)]
    first = LakeLog(book, "first")
    first.append_blocking(*old)
    first.close()
    again = LakeLog(book, "first")
    assert again.append_blocking(old[1], interaction(), old[0]) == [1, 3, 0]
    again.close()
    assert len(all_ids(book)) == 4


_WRITING = """
import sys
from rollbook.store.lake import LakeLog
from store_histories import interaction
log = LakeLog(sys.argv[1], sys.argv[2])
print("ready", flush=True)
while True:
    events = [interaction() for _ in range(5)]
    log.append_blocking(*events)
    print(*(e.event_id.hex() for e in events), flush=True)
"""


def start_writer(book: Path, name: str) -> "subprocess.Popen[str]":
    tests = str(Path(__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITING, str(book), name],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path])},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_nothing_acknowledged_is_lost_when_writers_are_killed(book: Path) -> None:
    acknowledged: set[str] = set()
    for round_ in range(3):
        writers = [start_writer(book, f"w{k}") for k in range(2)]
        time.sleep(0.7 + 0.2 * round_)
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            out, _ = writer.communicate()
            # A kill in the middle of a line leaves a partial id; only whole lines were acknowledged for sure.
            acknowledged.update(
                word for line in out.splitlines(keepends=True) if line.endswith("\n") for word in line.split()
            )
    found = all_ids(book)
    assert len(acknowledged) > 50
    assert acknowledged <= {id_.hex() for id_ in found}
    assert len(found) == len(set(found))
    report = verify(book)
    assert report.is_whole, str(report)


def test_an_interrupted_catalogue_costs_nothing_but_time(book: Path) -> None:
    log = LakeLog(book, "first")
    events = [interaction() for _ in range(30)]
    for i, event in enumerate(events):
        if i % 10 == 5:
            cut_connections(book)
        assert log.append_blocking(event) == [i]
    log.close()
    assert all_ids(book) == [e.event_id for e in events]


def test_a_catalogue_out_of_reach_stops_the_log_with_one_sentence(book: Path) -> None:
    log = LakeLog(book, "first", patience_s=0.5)
    lake = lake_of(book)
    assert lake is not None
    name = lake.catalogue.rpartition("dbname=")[2]
    with psycopg.connect(f"{SERVER} dbname=postgres", autocommit=True) as connection:
        connection.execute(f"alter database {name} with allow_connections false")  # type: ignore[arg-type]
        cut_connections(book)
        with pytest.raises(LogWriteFailed, match="nothing of this append is acknowledged"):
            log.append_blocking(interaction())
        connection.execute(f"alter database {name} with allow_connections true")  # type: ignore[arg-type]
    log.close()


def test_a_reader_waits_for_a_catalogue_that_is_away_for_a_moment(book: Path, caplog: pytest.LogCaptureFixture) -> None:
    events = [interaction() for _ in range(3)]
    log = LakeLog(book, "first")
    log.append_blocking(*events)
    log.close()
    reader, hasty = LakeLog(book), LakeLog(book, patience_s=0.5)
    lake = lake_of(book)
    assert lake is not None
    name = lake.catalogue.rpartition("dbname=")[2]
    with psycopg.connect(f"{SERVER} dbname=postgres", autocommit=True) as connection, ThreadPoolExecutor() as threads:
        connection.execute(f"alter database {name} with allow_connections false")  # type: ignore[arg-type]
        cut_connections(book)
        with pytest.raises(StoreError, match=r"catalogue of the lake at .* does not answer"):
            hasty.gather([("first", 1)])
        caplog.clear()
        waiting = [threads.submit(reader.gather, [("first", 1)]), threads.submit(lambda: list(reader.read()))]
        while "could not be read, trying on" not in caplog.text:
            assert not any(one.done() for one in waiting)
            time.sleep(0.01)
        connection.execute(f"alter database {name} with allow_connections true")  # type: ignore[arg-type]
        assert waiting[0].result()["event_id"].to_pylist() == [events[1].event_id]
        assert sum(batch.num_rows for batch in waiting[1].result()) == 3
    reader.close()
    hasty.close()


def test_merging_files_changes_no_event_and_readers_go_on(book: Path) -> None:
    log = LakeLog(book, "first")
    odd = Event(run_id="a\x00b", fact=RunStarted(name="x\x00y\U0001f600"))
    events = [odd, *(interaction() for _ in range(9))]
    for event in events:
        log.append_blocking(event)
    reader = LakeLog(book)
    before = list(reader.read())
    assert len(log.files()) == 10
    log.compact(keep_s=0)
    assert len(log.files()) == 1
    late = interaction()
    log.append_blocking(late)
    assert sum(b.num_rows for b in before) == 10
    assert [e.event_id for b in reader.read({"first": 10}) for e in from_batch(b)] == [late.event_id]
    assert all_ids(book) == [e.event_id for e in [*events, late]]
    assert reader.gather([("first", 0)])["run_id"].to_pylist() == ["a\x00b"]
    reader.close()
    log.close()
    assert verify(book).is_whole


def test_a_lake_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot attach the lake"):
        create_lake_book(tmp_path / "book", f"{SERVER} dbname=nobody", tmp_path / "data")
    assert not (tmp_path / "book").exists()
    assert not (tmp_path / "data").exists()


def test_what_cannot_be_attached_is_said_without_passwords_and_our_own_options(tmp_path: Path) -> None:
    for catalogue in (r"host=127.0.0.1 port=1 dbname=x password='it\'s 1'", "postgresql://me:hidden@127.0.0.1:1/x"):
        write_manifest(tmp_path / "book", {"format": 2, "lake": {"catalogue": catalogue, "data": str(tmp_path)}})
        with pytest.raises(
            StoreError, match=r"cannot attach the lake at .*port 1 failed: Connection refused"
        ) as caught:
            open_book(tmp_path / "book")
        said = str(caught.value)
        assert "dbname=x" in said
        assert not [word for word in ("hidden", "it\\'s", "it's", "keepalives", "password") if word in said]


@pytest.mark.parametrize(
    ("catalogue", "expected"),
    [
        ("host=127.0.0.1 dbname=x password=hidden", "has a password, which would stand in book.json"),
        ("postgresql://me:hidden@127.0.0.1/x", "has a password, which would stand in book.json"),
        ("postgresql://me:hidden word@127.0.0.1/x", "is no connection string"),
    ],
)
def test_a_password_is_refused_and_not_said(tmp_path: Path, catalogue: str, expected: str) -> None:
    with pytest.raises(StoreError, match=expected) as caught:
        create_lake_book(tmp_path / "book", catalogue, tmp_path / "data")
    assert "hidden" not in str(caught.value)
    assert not list(tmp_path.iterdir())
