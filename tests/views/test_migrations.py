"""Projections of other versions are migrated or computed again; events of other versions are read as today's."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import duckdb
import pytest

from rollbook.store import (
    BookTooNew,
    EpisodeClosed,
    EpisodeOpened,
    InteractionsPruned,
    MemoryLog,
    RewardGiven,
    migrate,
    prune,
)
from rollbook.store.book import Book, open_book
from rollbook.store.schema import PROJECTION, create_statements, metadata
from rollbook.store.upcasts import upcast
from rollbook.store.views import Views
from views_books import event, interaction

GOLDEN = Path(__file__).parents[1] / "golden"


def columns(con: duckdb.DuckDBPyConnection) -> list[tuple[Any, ...]]:
    return con.execute(
        "select table_name, column_name, data_type from duckdb_columns() join duckdb_tables() using (table_name) "
        "where table_name <> 'alembic_version' order by all"
    ).fetchall()


def test_migrations_make_the_tables_of_the_schema(tmp_path: Path) -> None:
    migrate.upgrade(tmp_path / "views.duckdb")
    with duckdb.connect() as fresh, duckdb.connect(str(tmp_path / "views.duckdb")) as migrated:
        for statement in create_statements():
            fresh.execute(statement)
        assert columns(migrated) == columns(fresh)
        assert migrated.execute("select version_num from alembic_version").fetchall() == [(PROJECTION,)]


def test_the_newest_migration_is_the_revision_of_the_schema() -> None:
    assert migrate.revisions()[-1] == PROJECTION


def log() -> MemoryLog:
    log = MemoryLog()
    log.append_blocking(event(EpisodeOpened(task_id="t"), episode_id="e"), interaction("i"))
    return log


def test_tables_that_migrations_made_are_filled_like_any_other(tmp_path: Path) -> None:
    migrate.upgrade(tmp_path / "views.duckdb")
    views = Views(log(), tmp_path / "views.duckdb")
    assert views.catch_up() == 2
    assert views.cursor().execute("select n_interactions from episodes").fetchall() == [(1,)]
    views.close()


def as_before_pruning(con: duckdb.DuckDBPyConnection) -> None:
    """The tables of revision 0004."""
    con.execute("drop table pruned")
    con.execute("alter table interactions drop column is_pruned")
    con.execute("alter table episodes drop column n_pruned")
    con.execute("update alembic_version set version_num = '0004'")


@pytest.mark.parametrize("names", [[], ["i"]])
def test_tables_that_know_of_no_pruning_are_kept_where_there_was_none(tmp_path: Path, names: list[str]) -> None:
    path = tmp_path / "views.duckdb"
    written = log()
    if names:  # projected by a version that passes over kinds it does not know
        written.append_blocking(event(InteractionsPruned(interaction_ids=names), episode_id="e"))
    views = Views(written, path)
    views.catch_up()
    views.close()
    with duckdb.connect(str(path)) as con:
        as_before_pruning(con)
    views = Views(written, path)
    assert views.catch_up() == (3 if names else 0)
    found = views.cursor().execute("select i.is_pruned, e.n_output, e.n_pruned from interactions i, episodes e")
    assert found.fetchall() == [(bool(names), 3, 3 if names else 0)]
    views.close()


@pytest.mark.parametrize("sources", [["a@0123456789ab", "b@0123456789ab"], ["a@0123456789ab", "person"]])
def test_what_several_judges_gave_is_computed_again(tmp_path: Path, sources: list[str]) -> None:
    written = log()
    written.append_blocking(
        event(RewardGiven(value=1.0, source=sources[0]), episode_id="e", at=1),
        event(RewardGiven(value=2.0, source=sources[1]), episode_id="e", interaction_id="i", at=2),
    )
    views = Views(written, tmp_path / "views.duckdb")
    views.catch_up()
    views.close()
    with duckdb.connect(str(tmp_path / "views.duckdb")) as con:  # as the version before had it
        con.execute("update episodes set reward = 1")
        con.execute("update alembic_version set version_num = '0005'")
    views = Views(written, tmp_path / "views.duckdb")
    several = sources[1] != "person"
    assert views.catch_up() == (4 if several else 0)
    assert views.cursor().execute("select reward from episodes").fetchall() == [(2.0 if several else 1.0,)]
    views.close()


def test_what_only_the_log_can_tell_is_computed_again(tmp_path: Path) -> None:
    path = tmp_path / "views.duckdb"
    Views(log(), path).close()
    said = b'{"request":[],"reply":{"role":"assistant","tool_calls":[{"id":"c","function":{"name":"run"}}]}}'
    with_tools = log()
    with_tools.append_blocking(interaction("asks", messages=said), interaction("no parent", parent="gone", shared=1))
    views = Views(with_tools, path)
    views.catch_up()
    views.close()
    with duckdb.connect(str(path)) as con:  # as the version before had it
        con.execute("drop table tool_calls")
        con.execute("drop table tool_results")
        con.execute("alter table interactions drop column is_broken")
        as_before_pruning(con)
        con.execute("update alembic_version set version_num = '0002'")
    with Book(with_tools, Views(with_tools, path)) as book:
        assert book.sql("select interaction_id, tool from tool_calls").to_pylist() == [
            {"interaction_id": "asks", "tool": "run"}
        ]
        assert book.sql("select n_interactions from episodes").to_pylist() == [{"n_interactions": 3}]
        broken = "select interaction_id from interactions where is_broken"
        assert book.sql(broken).to_pylist() == [{"interaction_id": "no parent"}]


@pytest.mark.parametrize("revision", ["9999", "unknown"])
def test_tables_of_an_unknown_revision_are_computed_again(
    tmp_path: Path, revision: str, caplog: pytest.LogCaptureFixture
) -> None:
    with duckdb.connect(str(tmp_path / "views.duckdb")) as con:
        con.execute("create table episodes (from_the_future varchar)")
        if revision != "unknown":
            con.execute("create table alembic_version (version_num varchar)")
            con.execute("insert into alembic_version values (?)", [revision])
    with caplog.at_level(logging.WARNING):
        views = Views(log(), tmp_path / "views.duckdb")
    assert "computing them again" in caplog.text
    assert views.catch_up() == 2
    views.close()


def test_a_file_that_is_no_database_is_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "views.duckdb").write_bytes(b"no database" * 1000)
    views = Views(log(), tmp_path / "views.duckdb")
    assert "computing it again" in caplog.text
    assert views.catch_up() == 2
    views.close()


def test_an_old_fact_goes_through_every_step_since() -> None:
    steps = {
        ("RewardGiven", 1): lambda fact: {**fact, "value": fact["value"] * 100},
        ("RewardGiven", 3): lambda fact: {**fact, "name": "percent"},
    }
    new = upcast("RewardGiven", 1, b'{"value": 0.5}', upcasts=steps, current=4)
    assert json.loads(new) == {"value": 50.0, "name": "percent"}
    assert upcast("RewardGiven", 2, b'{"value": 0.5}', upcasts=steps, current=3) == b'{"value": 0.5}'
    with pytest.raises(BookTooNew, match="version 5"):
        upcast("RewardGiven", 5, b"{}", upcasts=steps, current=4)


def golden_rows(book: Book) -> dict[str, Any]:
    """The documented tables of a golden book, as JSON has them."""
    rows = {}
    for name, table in metadata.tables.items():
        names = [c.name for c in table.columns if c.name not in ("node", "up_node", "main_node")]
        if name != "cursors":
            found = book.sql(f"select {', '.join(map(json.dumps, names))} from {name}")
            rows[name] = sorted(found.to_pylist(), key=repr)
    return json.loads(json.dumps(rows, default=str))


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.glob("book-v*") if path.is_dir()))
def test_a_golden_book_reads_as_it_always_did(tmp_path: Path, name: str) -> None:
    shutil.copytree(GOLDEN / name, tmp_path / name)
    expected = json.loads((GOLDEN / f"{name}.json").read_text())
    with open_book(tmp_path / name) as book:
        found = golden_rows(book)
        assert {table: found[table] for table in expected} == expected
        assert book.load(["i2"]).input_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 0, 1, 2]


def make_golden(name: str, *, pruned: str | None = None) -> None:
    """How a golden book of version 1 was made; run once per version, by hand. book-v1-pruned: pruned="gone"."""
    with open_book(GOLDEN / name, writer="golden") as book:
        book.log.append_blocking(
            event(EpisodeOpened(task_id="t", group_id="g", task={"answer": 4}), episode_id="e", at=1, key="opened"),
            interaction("i1", at=2, key="i1", finish_reason="tool_calls", sampling={"temperature": 1.0}),
            interaction("i2", parent="i1", edge="extends", shared=7, at=3, key="i2", version=1),
            event(RewardGiven(value=0.5), episode_id="e", interaction_id="i2", at=4, key="reward"),
            event(EpisodeClosed(state="done"), episode_id="e", at=5, key="closed"),
        )
        if pruned is not None:
            book.log.append_blocking(interaction("g1", pruned, at=6, key="g1"))
    if pruned is not None:
        prune(GOLDEN / name, episode_ids=[pruned])
    with open_book(GOLDEN / name) as book:
        (GOLDEN / f"{name}.json").write_text(json.dumps(golden_rows(book), indent=1) + "\n")
