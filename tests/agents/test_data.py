"""Rows, their ids and their order."""

import importlib.metadata
import json
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.agents.data import get_custom_dataset, order, task_id_of, tasks_of, weights_from_sql
from rollbook.agents.errors import DataError

ROWS = [{"messages": [{"role": "user", "content": f"{i}+{i}?"}], "answer": str(2 * i)} for i in range(5)]


def read(path, **kwargs):
    return list(get_custom_dataset("train", path=str(path), **kwargs))


def test_the_same_rows_come_from_every_kind_of_file(tmp_path):
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "splits.json").write_text(json.dumps({"train": ROWS, "test": []}))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    for name in ("train.jsonl", "rows.json", "splits.json", "rows.parquet", ""):
        assert read(tmp_path / name) == ROWS


def test_a_function_gives_rows_and_gets_what_it_takes(tmp_path, monkeypatch):
    (tmp_path / "my_rows.py").write_text(
        "def rows(split, n=2):\n    return [{'messages': [], 'split': split, 'i': i} for i in range(n)]\n"
        "def wrong():\n    return 'rows'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert [row["i"] for row in read("my_rows:rows", n=3)] == [0, 1, 2]
    with pytest.raises(DataError, match="returned a str"):
        read("my_rows:wrong")
    with pytest.raises(DataError, match="there is no module 'my_row'"):
        read("my_row:rows")
    sys.modules.pop("my_rows")


def test_what_cannot_be_read_is_named(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(DataError, match=r"bad.jsonl, line 2 is not JSON"):
        read(tmp_path / "bad.jsonl")
    (tmp_path / "list.jsonl").write_text("[1]\n")
    with pytest.raises(DataError, match="line 1: expected an object, got list"):
        read(tmp_path / "list.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="has no rows"):
        read(tmp_path / "empty.jsonl")
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(DataError, match="is not a Parquet file"):
        read(tmp_path / "bad.parquet")
    with pytest.raises(DataError, match="there is no dataset file"):
        read(tmp_path / "missing.jsonl")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"has no train.jsonl"):
        read(tmp_path / "folder")


def test_a_hub_id_without_the_hubs_package_says_what_to_install(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(DataError, match=r"pip install 'rollbook\[hub\]'"):
        read("somebody/something")


def test_rows_that_are_too_long_are_left_out():
    class Words:
        def encode(self, text):
            return text.split()

    config = SimpleNamespace(path="rows_here:rows", max_length=2)
    module = type(sys)("rows_here")
    module.rows = lambda: [{"messages": [{"role": "user", "content": "a b c"}]}, {"messages": [{"content": "a b"}]}]
    sys.modules["rows_here"] = module
    try:
        assert len(get_custom_dataset("train", config, Words())) == 1
        with pytest.raises(DataError, match="pass the tokenizer"):
            get_custom_dataset("train", config)
    finally:
        del sys.modules["rows_here"]


def test_a_task_keeps_its_id_and_without_one_gets_its_content_hash():
    assert task_id_of({"id": 7, "x": 1}) == "7"
    assert task_id_of({"task_id": "t", "id": 7}) == "t"
    assert task_id_of({"a": 1, "b": [2]}) == task_id_of({"b": [2], "a": 1})
    assert task_id_of({"a": 1}) != task_id_of({"a": 2})
    assert task_id_of({"a": np.int64(1)}) == task_id_of({"a": 1})


@settings(deadline=None)
@given(n=st.integers(0, 200), seed=st.integers(0, 2**32), epoch=st.integers(0, 50))
def test_an_epoch_draws_every_row_once_and_always_in_the_same_order(n, seed, epoch):
    first = order(n, epoch=epoch, seed=seed)
    assert sorted(first.tolist()) == list(range(n))
    assert (order(n, epoch=epoch, seed=seed) == first).all()
    assert order(n, epoch=epoch, seed=seed, shuffle=False).tolist() == list(range(n))


def test_epochs_and_seeds_differ_in_order():
    orders = {tuple(order(50, epoch=e, seed=s).tolist()) for e in range(3) for s in range(3)}
    assert len(orders) == 9


def test_weights_bring_rows_forward_and_leave_rows_out():
    weights = [0.0, 1.0, 9.0]
    firsts = [order(3, epoch=e, seed=0, weights=weights).tolist() for e in range(2000)]
    assert all(sorted(each) == [1, 2] for each in firsts)
    assert np.mean([each[0] == 2 for each in firsts]) == pytest.approx(0.9, abs=0.03)
    with pytest.raises(DataError, match="3 finite weights"):
        order(3, epoch=0, seed=0, weights=[1.0, -1.0, 1.0])


def test_curriculum_weights_are_a_query():
    class Book:
        def sql(self, query):
            return pa.table({"task_id": ["a", "c"], "weight": [1.0, None]})

    tasks = tasks_of([{"id": "a"}, {"id": "b"}, {"id": "c"}])
    assert weights_from_sql(Book(), "SELECT ...", tasks, default=0.25).tolist() == [1.0, 0.25, 0.25]
