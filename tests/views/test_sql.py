"""The SQL surface answers questions and does nothing else."""

import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from rollbook.store import EpisodeClosed, EpisodeOpened, MemoryLog, QueryRefused, RewardGiven, views
from rollbook.store.book import Book, open_book
from rollbook.store.sql import Limits, run_query
from views_books import event, interaction


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with open_book(tmp_path_factory.mktemp("sql") / "book", writer="w") as book:
        book.log.append_blocking(
            event(EpisodeOpened(task_id="t", group_id="g"), episode_id="e"),
            interaction("i1"),
            interaction("i2", parent="i1", edge="extends"),
            event(RewardGiven(value=1.0), episode_id="e"),
        )
        book.catch_up()
        yield book


@pytest.mark.parametrize(
    "query",
    [
        "select count(*) as n from interactions",
        "from episodes",
        "with x as (select * from episodes) select reward from x where reward > 0",
        "select task_id, avg(reward) from episodes group by all order by 1 limit 10",
        "select * from trajectories join episodes using (episode_id)",
        "select episode_id, row_number() over (partition by task_id order by opened_at) from episodes",
        "with recursive r(n) as (select 1 union all select n + 1 from r where n < 10) select * from r",
        "select unnest(range(10))",
        "select * from range(10) t(i), generate_series(1, 3)",
        "values (1), (2)",
        "show tables",
        "describe episodes",
        "summarize episodes",
        "select json_extract(config, '$.lr') from runs -- a comment",
        "/* a comment */ select regexp_matches(task_id, '^t') from episodes;",
        "select 1 union all select 2 except select 3",
        "select list_transform([1, 2], lambda x: x + 1)",
        "select * from rewards asof join interactions on rewards.given_at >= interactions.recorded_at",
    ],
)
def test_questions_are_answered(book: Book, query: str) -> None:
    assert run_query(book.views, query).num_columns >= 1


def test_answers_are_arrow_and_parameters_are_bound(book: Book) -> None:
    answer = run_query(book.views, "select interaction_id from interactions where depth = ?", [1])
    assert answer.to_pylist() == [{"interaction_id": "i2"}]


HOSTILE = [
    "copy episodes to '/tmp/rollbook-stolen.csv'",
    "copy (select 1) to '/tmp/rollbook-stolen.parquet' (format parquet)",
    "export database '/tmp/rollbook-stolen'",
    "attach ':memory:' as other",
    "attach '/tmp/rollbook-stolen.duckdb'",
    "detach memory",
    "use information_schema",
    "install httpfs",
    "load httpfs",
    "set threads = 64",
    "reset threads",
    "set variable x = 1",
    "pragma database_list",
    "pragma memory_limit = '100GB'",
    "call pragma_version()",
    "select * from pragma_database_size()",
    "select * from read_csv('SECRET')",
    "select * from read_csv_auto('SECRET')",
    "select * from read_text('SECRET')",
    "select content from read_blob('SECRET')",
    "select * from read_json('SECRET')",
    "select * from read_parquet('SECRET')",
    "select * from parquet_metadata('SECRET')",
    "select * from sniff_csv('SECRET')",
    "select * from glob('/etc/*')",
    "from 'SECRET'",
    'from "SECRET"',
    "with \"SECRET\" as (select 1) select * from (select * from 'SECRET')",
    "select * from 'https://localhost:1/x.csv'",
    "select getenv('HOME')",
    "select current_setting('home_directory')",
    "select getvariable('x')",
    "select * from duckdb_secrets()",
    "select * from which_secret('s3://x', 's3')",
    "select * from duckdb_settings()",
    "select * from duckdb_extensions()",
    "select * from duckdb_logs",
    "select * from duckdb_tables()",
    "select * from information_schema.tables",
    "select * from pg_catalog.pg_class",
    "select * from sqlite_master",
    "select * from main.episodes",
    "select * from alembic_version",
    "select 1; select 2",
    "select 1; drop table episodes",
    "select 1 /* ; */; drop table episodes --",
    "drop table episodes",
    "delete from episodes",
    "update episodes set reward = 100",
    "insert into rewards (value) values (1)",
    "truncate episodes",
    "merge into episodes using runs on true when matched then delete",
    "create table x as select 1",
    "create temp table x as select 1",
    "create or replace view episodes as select 1",
    "create macro f() as 1",
    "alter table episodes drop column reward",
    "with gone as (delete from episodes returning *) select * from gone",
    "with new as (insert into rewards (value) values (1) returning *) select * from new",
    "with gone as (update episodes set reward = 9 returning *) select count(*) from gone",
    "select * from (with gone as (delete from episodes returning *) select * from gone)",
    "begin",
    "commit",
    "rollback",
    "checkpoint",
    "vacuum",
    "analyze",
    "prepare p as select 1",
    "execute p",
    "explain analyze select 1",
    "select * from query('select 1')",
    "select * from query_table('episodes')",
    "select * from json_execute_serialized_sql(json_serialize_sql('select 1'))",
    "select write_log('x')",
    "select nextval('s')",
    "select sleep_ms(100000)",
    "select pg_sleep(1000)",
    "select setseed(0.5)",
    "select * from no_such_table",
    "select no_such_column from episodes",
    "select",
    "",
    ";",
    "\x00",
    "select '\x00'",
    "select * from _events",
]


@pytest.mark.parametrize("query", HOSTILE)
def test_what_is_not_a_question_is_refused_and_changes_nothing(book: Book, tmp_path: Path, query: str) -> None:
    (tmp_path / "secret.csv").write_text("a,b\n1,2\n")
    with pytest.raises(QueryRefused):
        run_query(book.views, query.replace("SECRET", str(tmp_path / "secret.csv")))
    assert book.sql("select count(*) as n, max(reward) as r from episodes").to_pylist() == [{"n": 1, "r": 1.0}]
    assert not list(Path("/tmp").glob("rollbook-stolen*"))


def test_a_python_variable_is_not_a_table(book: Book) -> None:
    own_rows = book.sql("from episodes")
    assert own_rows.num_rows
    with pytest.raises(QueryRefused, match="no table 'own_rows'"):
        run_query(book.views, "select * from own_rows")


@pytest.mark.parametrize(
    "query",
    [
        "with recursive r(n) as (select 1 union all select n + 1 from r) select max(n) from r",
        "select count(*) from range(10000000000) a, range(10000000000) b where a.range * b.range % 7 = 3",
        "select sum(a.range) from range(100000000000) a",
    ],
)
def test_a_query_without_end_is_ended(book: Book, query: str) -> None:
    with pytest.raises(QueryRefused, match=r"longer than 0\.3 s"):
        run_query(book.views, query, limits=Limits(timeout_s=0.3))
    assert run_query(book.views, "select count(*) as n from episodes").to_pylist() == [{"n": 1}]


GREEDY = [
    "select count(*) from (select range, count(*) from range(100000000) group by range)",
    "select array_agg(range) over () from range(100000)",
    "select string_agg(repeat('x', 1000), '') from range(10000000)",
    "select length(repeat('x', 2000000000)) from range(100)",
    "select string_split(repeat('a,', 300000000), ',')",
    "select array_agg(i order by hash(i)) from range(300000000) t(i)",
]


@pytest.mark.parametrize("query", GREEDY)
def test_no_query_gets_more_memory_than_it_may(book: Book, query: str) -> None:
    ours = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(QueryRefused, match="more than 256 MiB of memory"):
        run_query(book.views, query, limits=Limits(memory_bytes=256 << 20, timeout_s=300))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - ours < 64 << 10  # KiB
    assert max(_peaks(), default=0) < 600 << 10
    assert run_query(book.views, "select count(*) as n from episodes").to_pylist() == [{"n": 1}]


def _peaks() -> list[int]:
    """Peak memory in KiB of our child processes that run."""
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    lines: list[str] = []
    for pid in children:
        with suppress(OSError):  # one that has just ended
            lines += Path(f"/proc/{pid}/status").read_text().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]


def test_a_query_that_does_not_listen_is_ended_in_time(book: Book) -> None:
    query = "select jaro_winkler_similarity(repeat('ab', 4000000), repeat('ba', 4000000))"
    with pytest.raises(QueryRefused, match=r"longer than 0\.3 s"):
        run_query(book.views, query, limits=Limits(timeout_s=0.3))
    assert run_query(book.views, "select 1 as one").to_pylist() == [{"one": 1}]


def test_other_queries_go_on_while_one_is_greedy(book: Book) -> None:
    with ThreadPoolExecutor() as pool:
        greedy = pool.submit(run_query, book.views, "select list(range) from range(4000000000)", limits=Limits())
        for _ in range(20):
            assert run_query(book.views, "select count(*) as n from episodes").to_pylist() == [{"n": 1}]
        with pytest.raises(QueryRefused):
            greedy.result()


@pytest.mark.parametrize("query", ["select " + "(" * 20_000 + "1" + ")" * 20_000, "select " + "[" * 900 + "]" * 900])
def test_a_query_nested_without_end_is_refused(book: Book, query: str) -> None:
    with pytest.raises(QueryRefused, match=r"depth|deeply|memory exhausted"):
        run_query(book.views, query)


def test_a_query_waits_for_its_turn_no_longer_than_it_may_take(book: Book) -> None:
    with ExitStack() as others:
        for _ in range(4):  # as many as there may be
            others.enter_context(book.views.guest(300))
        with pytest.raises(QueryRefused, match="other queries"):
            run_query(book.views, "select 1", limits=Limits(timeout_s=0.2))
    assert run_query(book.views, "select 1 as one").to_pylist() == [{"one": 1}]


def test_an_answer_that_is_too_large_is_refused(book: Book) -> None:
    with pytest.raises(QueryRefused, match="more than 1000 rows"):
        run_query(book.views, "select * from range(1001)", limits=Limits(rows=1000))
    assert run_query(book.views, "select * from range(1000)", limits=Limits(rows=1000)).num_rows == 1000
    with pytest.raises(QueryRefused, match="larger than 1 MiB"):
        run_query(book.views, "select repeat('x', 100000) from range(100)", limits=Limits(result_bytes=1 << 20))


def test_the_projection_goes_on_while_queries_run(book: Book) -> None:
    book.log.append_blocking(interaction("i3", parent="i2", edge="extends"))
    with pytest.raises(QueryRefused):
        run_query(book.views, "select count(*) from range(10000000000)t(a), range(100)", limits=Limits(timeout_s=0.2))
    assert book.catch_up() == 1
    assert run_query(book.views, "select count(*) as n from interactions").to_pylist() == [{"n": 3}]


@pytest.mark.parametrize("where", ["a folder", "memory"])
def test_a_query_sees_all_that_the_tables_have(tmp_path: Path, where: str) -> None:
    with open_book(tmp_path / "book", writer="w") if where == "a folder" else Book(MemoryLog()) as book:
        for n in range(3):
            assert run_query(book.views, "select count(*) as n from groups").to_pylist() == [{"n": n}]
            book.log.append_blocking(event(EpisodeOpened(task_id="t", group_id=f"g{n}"), episode_id=f"e{n}"))
            book.catch_up()


def test_who_reads_the_file_meets_no_half_written_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "_WAL_BYTES", 50_000)
    monkeypatch.setattr(views, "_MOST_WAL_BYTES", 500_000)
    query = """
        select count(*) as n, coalesce(sum(reward), 0) as r, (select coalesce(sum(value), 0) from rewards) as v,
          (select count(*) from interactions) as i, (select count(distinct episode_id) from events) as e,
          (select count(*) from range(20000000) t(x) where x % 7 = 3) as long from episodes
    """
    wrong: list[Any] = []
    until = time.monotonic() + 3

    def ask(book: Book) -> None:
        while time.monotonic() < until:
            said = run_query(book.views, query).to_pylist()[0]
            n = said["n"]
            if (said["i"], said["e"], said["r"], said["v"]) != (2 * n, n, n * (n - 1) / 2, n * (n - 1) / 2):
                wrong.append(said)

    with open_book(tmp_path / "book", writer="w") as book, ThreadPoolExecutor() as pool:
        asking = [pool.submit(ask, book) for _ in range(2)]
        n = 0
        while time.monotonic() < until:
            for _ in range(20):  # episodes that are whole in each transaction
                name = f"e{n}"
                book.log.append_blocking(
                    event(EpisodeOpened(task_id="t"), episode_id=name),
                    interaction(f"{name}-1", name),
                    interaction(f"{name}-2", name, parent=f"{name}-1", edge="extends"),
                    event(RewardGiven(value=float(n)), episode_id=name),
                    event(EpisodeClosed(state="done"), episode_id=name),
                )
                n += 1
            book.catch_up()
        for one in asking:
            one.result()
        assert not wrong
        assert not (wal := tmp_path / "book" / "views.duckdb.wal").exists() or wal.stat().st_size < 1_000_000
        # Readers are let in, writers are not.
        rogue = f"import duckdb; duckdb.connect({str(tmp_path / 'book' / 'views.duckdb')!r})"
        assert "lock" in subprocess.run([sys.executable, "-c", rogue], capture_output=True, text=True).stderr
