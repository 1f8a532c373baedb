"""DuckDB reads from a payload what Python reads from it."""

import json
from typing import Any

import duckdb
import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.store import BatchRow, BatchTaken, EpisodeOpened, InteractionRecorded, RewardGiven
from rollbook.store.events import KINDS, Fact, encode_fact
from rollbook.store.payloads import facts_query

words = st.text(max_size=8)  # any character, NUL and quotes among them
numbers = st.integers(-(2**31), 2**31 - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)
objects = st.dictionaries(words, st.none() | st.booleans() | numbers | floats | words | st.lists(words), max_size=3)

facts: st.SearchStrategy[Fact] = st.one_of(
    st.builds(
        InteractionRecorded, parent_id=st.none() | words, cause=st.none() | words, shared=numbers,
        prompt_length=numbers, sampling=objects, model=words, is_trainable=st.booleans(), seconds=st.none() | floats,
        delivered=st.none() | numbers,
    ),
    st.builds(RewardGiven, value=floats, name=words, weight=floats, details=st.none() | objects, start=numbers),
    st.builds(EpisodeOpened, task_id=words, is_eval=st.booleans(), task=st.none() | objects, attempt=numbers),
    st.builds(
        BatchTaken, batch_id=words, step=numbers, version=numbers, selection=objects,
        rows=st.lists(st.builds(BatchRow, interaction_id=words, credit=floats, advantage=floats), max_size=3),
        discarded=st.dictionaries(words, numbers, max_size=2),
    ),
)  # fmt: skip


def read(kind: str, payloads: list[bytes]) -> list[dict[str, Any]]:
    with duckdb.connect() as con:
        con.register("_rows", pa.table({"payload": pa.array(payloads, pa.binary()).cast(pa.string())}))
        return con.sql(f"from {facts_query(kind, '_rows')}").to_arrow_table().to_pylist()


@settings(max_examples=60, deadline=None)
@given(facts)
def test_the_fields_of_a_fact_are_columns(fact: Fact) -> None:
    (row,) = read(type(fact).__name__, [encode_fact(fact)])
    assert row.keys() == set(fact.__struct_fields__)
    for name, value in row.items():
        want = getattr(fact, name)
        if isinstance(want, dict):
            assert json.loads(value) == want
        elif isinstance(want, list):
            assert [{**r, "weight": 1.0 if r["weight"] is None else r["weight"]} for r in value] == [
                msgspec.structs.asdict(one) for one in want
            ]
        else:
            assert (value, type(value)) == (want, type(want))


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_a_payload_has_beyond_its_fields_is_ignored(kind: str) -> None:
    (row,) = read(kind, [b'{"of_a_later_version":[{"any":"thing"}]}'])
    assert row.keys() == set(KINDS[kind].__struct_fields__)
