"""A book as DuckDB relations, Arrow, pandas, Polars, torch and Hugging Face datasets; live, copied and over HTTP."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from rollbook.app.cli import main
from rollbook.store import BookNotFound, EpisodeOpened, Event, PackageMissing, connect, open_book
from rollbook.store.selection import Credit, Selection
from rollbook.store.torch_rows import pad_rows
from store_served import KEY, Server

# Rounded: two connections may add the same numbers in another order.
QUERY = (
    "select run_id, count(*) as n, round(avg(reward), 9) as reward from episodes where reward is not null "
    "group by run_id order by run_id"
)


def test_the_same_answer_in_every_form(shown_book: Path) -> None:
    with connect(shown_book) as db:
        expected = db.arrow(QUERY).to_pylist()
        assert [row["run_id"] for row in expected]
        assert db.sql(QUERY).fetchall() == [tuple(row.values()) for row in expected]
        assert db.sql(QUERY).filter("n > 0").df().to_dict("records") == expected
        assert db.pandas(QUERY).to_dict("records") == expected
        assert db.polars(QUERY).to_dicts() == expected
        assert db.huggingface(QUERY).to_list() == expected
        assert db.huggingface("from events limit 3").num_rows == 3


def test_a_query_may_name_frames_parameters_and_tokens(shown_book: Path) -> None:
    with connect(shown_book) as db:
        runs = db.pandas("select run_id from runs")
        assert db.sql("select count(*) from episodes join mine using (run_id)", mine=runs).fetchall() != [(0,)]
        assert db.arrow("select count(*) as n from runs where run_id = ?", ["nope"]).to_pylist() == [{"n": 0}]
        (counts,) = db.arrow("select count(*) as n from tokens where is_sampled").to_pylist()
        assert counts == db.arrow("select sum(n_output)::bigint as n from interactions").to_pylist()[0]


@pytest.mark.parametrize(
    "query", ["drop table episodes", "insert into runs select * from runs", "create table t (i int)"]
)
def test_nothing_can_be_written_and_the_next_query_works(query: str, shown_book: Path) -> None:
    with connect(shown_book) as db:
        with pytest.raises(duckdb.Error):
            db.sql(query)
        with pytest.raises(duckdb.Error):
            db.sql("from runs").create("mine")
        assert db.sql("select count(*) from runs").fetchall() != [(0,)]


def test_a_live_book_is_followed_and_its_writer_is_not_hindered(tmp_path: Path) -> None:
    with open_book(tmp_path / "book", writer="live") as writing, connect(tmp_path / "book") as db:
        opened = db.sql("select count(*) from episodes")
        assert opened.fetchall() == [(0,)]
        writing.log.append_blocking(Event(run_id="r", episode_id="e", fact=EpisodeOpened(task_id="t")))
        assert db.sql("select episode_id from episodes").fetchall() == [("e",)]
        assert writing.catch_up() == 1


def test_a_copied_book_answers_alike(shown_book: Path, tmp_path: Path) -> None:
    shutil.copytree(shown_book, tmp_path / "copy")
    with connect(shown_book) as db, connect(tmp_path / "copy") as copy:
        assert copy.arrow(QUERY) == db.arrow(QUERY)


def test_a_served_book_answers_alike(
    shown_book: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server()
    try:
        with open_book(shown_book) as book:
            url = server.add(book.log)
            with connect(url, key=KEY) as db, connect(shown_book) as here:
                assert db.arrow(QUERY) == here.arrow(QUERY)
                rows, expected = db.torch(), here.torch()
                assert torch.equal(rows[0]["logprobs"], expected[0]["logprobs"])
            with pytest.raises(BookNotFound, match="admin key"):
                connect(url)
            monkeypatch.setenv("ROLLBOOK_ADMIN_KEY", KEY)
            told = []
            for where in (url, str(shown_book)):
                main(["rewards", where, "reward", "reward", "--json"])
                rows = json.loads(capsys.readouterr().out)
                told.append(sorted((row["task_id"], row["episodes"], row["moved"]) for row in rows))
            assert told[0] == told[1] != []
    finally:
        server.close()


@pytest.mark.parametrize("form", ["individual", "trajectory"])
def test_torch_rows_are_the_selected_tokens(form: str, shown_book: Path) -> None:
    selection = Selection(needs_reward=True, credit=Credit(gamma=0.5))
    with connect(shown_book) as db:
        rows = db.torch(selection, form=form)
        assert len(rows) == rows.table.num_rows > 4
        ids = rows.table["leaf_id" if form == "trajectory" else "interaction_id"].to_pylist()
        tokens = db.book.load(ids, form=form)
        batches = list(DataLoader(rows, batch_size=3, collate_fn=pad_rows))
        assert [name for batch in batches for name in batch["row_ids"]] == ids
        at = 0
        for batch in batches:
            for b in range(len(batch["row_ids"])):
                is_there = batch["attention_mask"][b]
                where = tokens.row(at)
                for name in ("input_ids", "loss_mask", "logprobs", "versions"):
                    assert np.array_equal(batch[name][b][is_there].numpy(), getattr(tokens, name)[where])
                assert not batch["loss_mask"][b][~is_there].any()
                at += 1
        np.testing.assert_allclose(
            torch.cat([batch["credit"] for batch in batches]).numpy(), rows.table["credit"].to_numpy(), rtol=1e-6
        )
        assert torch.equal(rows[-1]["input_ids"], rows[len(rows) - 1]["input_ids"])
        with pytest.raises(IndexError):
            rows[len(rows)]


def test_a_dataloader_worker_opens_the_book_for_itself(shown_book: Path) -> None:
    with connect(shown_book) as db:
        rows = db.torch()
        loader = DataLoader(rows, batch_size=8, collate_fn=pad_rows, num_workers=1, multiprocessing_context="spawn")
        assert [n for batch in loader for n in batch["row_ids"]] == rows.table["interaction_id"].to_pylist()


def test_a_missing_package_is_one_sentence(shown_book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect(shown_book) as db:
        for package, ask in (("pandas", db.pandas), ("polars", db.polars), ("datasets", db.huggingface)):
            monkeypatch.setitem(sys.modules, package, None)
            with pytest.raises(PackageMissing, match=f"needs the package {package}.*pip install {package}"):
                ask(QUERY)
        monkeypatch.setitem(sys.modules, "torch", None)
        with pytest.raises(PackageMissing, match="torch"):
            db.torch()


def test_connecting_imports_none_of_the_heavy_packages(shown_book: Path) -> None:
    program = (
        "import sys; from rollbook.store import connect\n"
        f"with connect({str(shown_book)!r}) as db: db.arrow('from runs')\n"
        "print([p for p in ('torch', 'polars', 'datasets') if p in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
