"""The end of a log: what was acknowledged and is gone is never passed over, and there is one way to go on."""

import logging
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from rollbook.app.cli import main
from rollbook.store import (
    BookBusy,
    DirectoryLog,
    EpisodeOpened,
    Event,
    EventLost,
    LogCorrupt,
    RewardGiven,
    TablesDamaged,
    accept_loss,
    open_book,
    verify,
)
from rollbook.store.book import Book
from rollbook.store.events import from_batch
from rollbook.store.sql import run_query
from store_histories import interaction

Harm = Callable[[Path], None]


def segments(path: Path) -> list[Path]:
    return sorted((path / "log" / "w").glob("*.log"))


def ids(path: Path) -> list[bytes]:
    with closing(DirectoryLog(path)) as log:
        return [event.event_id for batch in log.read() for event in from_batch(batch)]


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """Six frames of one event each, two to a segment; all acknowledged, tables kept."""
    path = tmp_path / "book"
    with closing(DirectoryLog(path, "w", roll_bytes=2500, live_bytes=None)) as log:
        for n in range(5):
            log.append_blocking(interaction(2, 2, f"call {n}", episode_id=f"ep{n}"))
        log.append_blocking(Event(run_id="run", episode_id="ep4", fact=RewardGiven(value=1)))
    open_book(path).close()
    assert len(segments(path)) == 3
    return path


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(bytes(data))


def last_frame(path: Path) -> int:
    data = segments(path)[-1].read_bytes()
    return data.rindex(b"RBF1")


HARMS: dict[str, tuple[Harm, int]] = {
    "a byte of the last frame": (lambda path: flip(segments(path)[-1], -300), 5),
    "a byte of its header": (lambda path: flip(segments(path)[-1], last_frame(path) + 8), 5),
    "its magic": (lambda path: flip(segments(path)[-1], last_frame(path)), 5),
    "an end cut off": (lambda path: os.truncate(segments(path)[-1], segments(path)[-1].stat().st_size - 1), 5),
    "a frame cut off": (lambda path: os.truncate(segments(path)[-1], last_frame(path)), 5),
    "two frames cut off": (lambda path: os.truncate(segments(path)[-1], 0), 4),
    "the last segment gone": (lambda path: segments(path)[-1].unlink(), 4),
    "all segments gone": (lambda path: [p.unlink() for p in segments(path)] and None, 0),
}


@pytest.mark.parametrize("harm", HARMS)
def test_an_end_below_what_was_acknowledged_is_damage(book: Path, harm: str) -> None:
    do, n = HARMS[harm]
    do(book)
    before = {p: p.read_bytes() for p in segments(book)}
    message = rf"the log of 'w' ends at position {n} .*up to position 6 were acknowledged.*restore.*--accept-loss"
    for writer in ("w", None):
        with pytest.raises(LogCorrupt, match=message), closing(DirectoryLog(book, writer)) as log:
            list(log.read())
    with pytest.raises(LogCorrupt, match=message):
        open_book(book)
    report = verify(book)
    assert [p for p in report.problems if "were acknowledged" in p]
    assert {p: p.read_bytes() for p in segments(book)} == before


@pytest.mark.parametrize("harm", HARMS)
def test_a_loss_that_is_accepted_is_in_the_book_for_ever(
    book: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    do, n = HARMS[harm]
    before = ids(book)
    rest = segments(book)[-1].read_bytes()
    do(book)
    (loss,) = accept_loss(book)
    assert (loss.writer, loss.first, loss.next) == ("w", n, 6)
    if loss.kept is not None:
        assert loss.kept.stat().st_size in (len(rest) - last_frame_of(rest), len(rest) - last_frame_of(rest) - 1)
    assert accept_loss(book) == []
    after = ids(book)
    assert after[:n] == before[:n]
    assert len(after) == 6
    assert not set(after[n:]) & set(before)
    report = verify(book)
    assert report.is_whole, str(report)
    assert any(f"{6 - n} events of 'w' were lost and given up" in note for note in report.notes)
    with open_book(book, "w") as opened:  # its tables had the lost ones
        assert "has other events than the log (what it says is kept" in caplog.text
        lost = opened.sql("select position, run_id from events where kind = 'EventLost' order by position")
        assert lost.to_pylist() == [{"position": p, "run_id": "lost"} for p in range(n, 6)]
        assert opened.sql("select count(*) as n from interactions")["n"].to_pylist() == [min(n, 5)]
        new = interaction()
        assert opened.log.append_blocking(new) == [6]  # no position is given twice
        facts = [e.fact for b in opened.log.read({"w": n}) for e in from_batch(b)]
        assert isinstance(facts[0], EventLost)
        assert "ends at position" in facts[0].reason


def last_frame_of(data: bytes) -> int:
    return data.rindex(b"RBF1")


def test_a_loss_is_accepted_by_a_person_and_of_a_writer_at_rest(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(segments(book)[-1], 0)
    with pytest.raises(SystemExit):
        main(["verify", str(book)])
    assert "were acknowledged" in capsys.readouterr().out
    assert verify(book).problems
    main(["verify", str(book), "--accept-loss"])
    said = capsys.readouterr()
    assert "given up: positions 4 to 5 of 'w' are lost" in said.err
    assert "were lost and given up" in said.out
    with (
        closing(DirectoryLog(book, "w")),
        pytest.raises(BookBusy, match="'w' is at work in this process; stop it first"),
    ):
        accept_loss(book)


def test_a_kill_while_a_loss_is_written_down_leaves_the_rest_to_the_next_try(book: Path) -> None:
    os.truncate(segments(book)[-1], 0)
    accept_loss(book)
    whole = segments(book)[-1].read_bytes()
    for size in (0, 1, 100, len(whole) - 1):
        segments(book)[-1].write_bytes(whole[:size])
        with pytest.raises(LogCorrupt):
            DirectoryLog(book, "w")
        (loss,) = accept_loss(book)
        assert (loss.first, loss.next) == (4, 6)
        assert verify(book).is_whole


# ---- folders


@pytest.fixture
def two_writers(book: Path) -> Path:
    with closing(DirectoryLog(book, "v", live_bytes=None)) as log:
        for _ in range(3):
            log.append_blocking(interaction())
    return book


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_writers_folder_that_is_gone_is_missed_and_may_be_given_up(
    two_writers: Path, is_sealed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    book = two_writers
    if is_sealed:
        with closing(DirectoryLog(book, "v", live_bytes=None)) as log:
            log.seal()
            log.append_blocking(interaction())  # nobody will know of it
    shutil.rmtree(book / "log/v")
    message = r"log/v is gone, and with it all events of 'v' that were not sealed: restore .*--accept-loss"
    for open_ in (
        lambda: DirectoryLog(book, "v"),
        lambda: DirectoryLog(book, "other"),
        lambda: DirectoryLog(book),
        lambda: open_book(book),
    ):
        with pytest.raises(LogCorrupt, match=message):
            open_()
    assert [p for p in verify(book).problems if "log/v is gone" in p]
    assert not (book / "log/v").exists()
    main(["verify", str(book), "--accept-loss"])
    n = 3 if is_sealed else 0
    assert f"all events of 'v' from position {n} on are lost" in capsys.readouterr().err
    assert accept_loss(book) == []
    with open_book(book, "v") as opened:
        lost = opened.sql("select writer, position from events where kind = 'EventLost'")
        assert lost.to_pylist() == [{"writer": "v", "position": n}]
        assert opened.log.append_blocking(interaction()) == [n + 1]
    assert verify(book).is_whole


def test_a_kill_while_a_folder_is_given_up_leaves_it_to_the_next_try(
    two_writers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(two_writers / "log/v")

    def killed(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            accept_loss(two_writers)
    with pytest.raises(LogCorrupt, match="log/v is gone"):
        DirectoryLog(two_writers)
    assert [loss.writer for loss in accept_loss(two_writers)] == ["v"]
    assert verify(two_writers).is_whole


def test_a_copy_without_a_writer_is_one_until_a_writer_opens_it(two_writers: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(two_writers, copy)
    shutil.rmtree(copy / "log/v")
    report = verify(copy)
    assert report.is_whole
    assert "this is a copy without log/v, which the original had" in report.notes
    assert len(ids(copy)) == 6
    DirectoryLog(copy, "new").close()  # names all that are there
    shutil.rmtree(copy / "log/w")
    with pytest.raises(LogCorrupt, match="log/w is gone"):
        DirectoryLog(copy)


def test_half_a_name_that_a_kill_left_harms_nobody(two_writers: Path) -> None:
    with open(two_writers / "book.writers", "ab") as file:
        file.write(b"gho")
    DirectoryLog(two_writers, "u").close()
    assert len(ids(two_writers)) == 9
    shutil.rmtree(two_writers / "log/u")
    with pytest.raises(LogCorrupt, match="log/u is gone"):
        DirectoryLog(two_writers)


# ---- copies


def test_a_copy_of_a_live_book_ends_where_it_was_copied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its segments are older than its `synced`, or newer, as it happened."""
    path, copy = tmp_path / "book", tmp_path / "copy"
    with closing(DirectoryLog(path, "w")) as log:
        log.append_blocking(interaction())
        segment, said = segments(path)[0].read_bytes(), (path / "log/w/synced").read_bytes()
        log.append_blocking(interaction())
        shutil.copytree(path, copy)
        later, said_later = segments(path)[0].read_bytes(), (path / "log/w/synced").read_bytes()
    for end, says, n in ((segment, said_later, 1), (later[:-10], said_later, 1), (later, said, 2)):
        segments(copy)[0].write_bytes(end)
        (copy / "log/w/synced").write_bytes(says)
        assert len(ids(copy)) == n
        report = verify(copy)
        assert report.is_whole
        if n == 1:
            assert any(
                "is a copy that ends at position 1; its writer had gone on to position 2" in x for x in report.notes
            )
        assert accept_loss(copy) == []
    segments(copy)[0].write_bytes(later[:-10])
    (copy / "log/w/synced").write_bytes(said_later)
    with closing(DirectoryLog(copy, "w")) as log:  # a book of its own from now on
        assert log.append_blocking(interaction()) == [1]
    assert "the folder is a copy, made while its writer went on to position 2" in caplog.text
    os.truncate(segments(copy)[0], 0)
    with pytest.raises(LogCorrupt, match="up to position 2 were acknowledged"):
        ids(copy)


def test_damage_at_the_end_of_a_copy_is_damage(book: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(book, copy)
    flip(segments(copy)[-1], -300)
    with pytest.raises(LogCorrupt, match=r"bad checksum.*up to position 6 were acknowledged"):
        ids(copy)
    assert not verify(copy).is_whole
    (loss,) = accept_loss(copy)
    assert (loss.first, loss.next) == (5, 6)


@pytest.mark.parametrize("said", [b"", b"\0" * 20, b"x" * 20, b"x" * 7, (2**60).to_bytes(8, "little")])
def test_what_synced_says_when_it_is_damaged_harms_nobody(book: Path, said: bytes) -> None:
    (book / "log/w/synced").write_bytes(said)
    assert len(ids(book)) == 6
    with closing(DirectoryLog(book, "w")) as log:
        assert log.append_blocking(interaction()) == [6]


# ---- tables


def test_tables_ahead_of_their_log_are_computed_again(book: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log was restored from an older copy, the tables were not."""
    os.truncate(segments(book)[-1], 0)
    (book / "log/w/synced").unlink()
    with open_book(book, "w") as opened:
        assert "has 6 events of writer 'w', and the log fewer (what it says is kept in views.duckdb.old)" in caplog.text
        assert opened.sql("select count(*) as n from interactions")["n"].to_pylist() == [4]
        assert opened.log.append_blocking(interaction()) == [4]
    caplog.clear()
    with open_book(book) as opened:
        assert opened.sql("select count(*) as n from interactions")["n"].to_pylist() == [5]
    assert caplog.text == ""


def test_tables_of_another_log_are_computed_again(book: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.truncate(segments(book)[-1], 0)
    (book / "log/w/synced").unlink()
    with closing(DirectoryLog(book, "w")) as log:  # as many events as the tables have, and more, but others
        log.append_blocking(interaction(episode_id="a"))
        log.append_blocking(interaction(episode_id="b"), interaction(episode_id="c"))
    with open_book(book) as opened:
        assert "has other events than the log" in caplog.text
        found = opened.sql("select episode_id from interactions order by position")["episode_id"].to_pylist()
        assert found == ["ep0", "ep1", "ep2", "ep3", "a", "b", "c"]


def test_tables_with_a_flipped_byte_are_computed_again(book: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("rollbook.store").setLevel(logging.WARNING)
    whole = (book / "views.duckdb").read_bytes()
    n_found = 0
    for at in [*range(0, 12288, 2048), *range(12288 + 8, len(whole), 131072)]:
        (book / "views.duckdb").write_bytes(whole)
        flip(book / "views.duckdb", at)
        caplog.clear()
        with open_book(book) as opened:
            assert opened.sql("select count(*) as n from interactions")["n"].to_pylist() == [5]
        n_found += "from the log" in caplog.text
    assert n_found > 3
    (book / "views.duckdb.wal").write_bytes(b"nonsense" * 100)
    with open_book(book) as opened:
        assert opened.sql("select count(*) as n from interactions")["n"].to_pylist() == [5]


def ask_owner(book: Book, query: str) -> None:
    book.sql(query)


def ask_guest(book: Book, query: str) -> None:
    run_query(book.views, query)


def met(book: Path, ask: Callable[[Book, str], None]) -> str | None:
    """Reads all that a book's tables have; what it met."""
    with open_book(book) as opened:
        try:
            for table in ("events", "interactions", "episodes"):
                ask(opened, f"select max(hash(columns(*))) from {table}")
        except TablesDamaged as error:
            return str(error)
    return None


@pytest.mark.parametrize("ask", [ask_owner, ask_guest])
def test_damage_met_by_a_query_is_one_sentence_and_the_next_opening_mends_it(
    book: Path, ask: Callable[[Book, str], None]
) -> None:
    with closing(DirectoryLog(book, "w")) as log:
        names = [os.urandom(32).hex() for _ in range(15_000)]
        log.append_blocking(*(Event(run_id="r", episode_id=n, fact=EpisodeOpened(task_id=n)) for n in names))
    open_book(book).close()
    path = book / "views.duckdb"
    whole = path.read_bytes()
    for at in range(12288 + 100, len(whole), 262144):  # one byte in every block, until one is no block of the opening
        path.write_bytes(whole)
        flip(path, at)
        said = met(book, ask)
        if said is not None:
            break
    assert said is not None
    assert "views.duckdb is damaged" in said
    assert "open the book again" in said
    assert "\n" not in said
    assert met(book, ask) is None
    with open_book(book) as opened:
        assert opened.sql("select count(*) as n from episodes")["n"].to_pylist() == [15_000]
