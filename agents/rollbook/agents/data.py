"""Datasets: rows from files, Hugging Face or a function; which row comes when; how a restart knows.

A row is a dict with `messages` (chat form) and whatever the agent and its reward need, `answer` for one. Its id is the
one it has (`id` or `task_id`) or the hash of its content. The order of an epoch is a pure function of seed and epoch.
"""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from .errors import DataError, WorkflowError
from .naming import load

Row = dict[str, Any]


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One dataset row. `index` is its place in the dataset, whatever the order it is drawn in."""

    task_id: str
    index: int
    row: Mapping[str, Any]


class DatasetSettings(Protocol):
    """What we read of a dataset's config, e.g. `config.train_dataset`."""

    @property
    def path(self) -> str: ...
    @property
    def max_length(self) -> int | None: ...


class Dataset(Sequence[Row]):
    """Rows in memory, checked. `name` says where they come from."""

    def __init__(self, rows: Iterable[Mapping[str, Any]], name: str = "dataset") -> None:
        self.name = name
        self._rows: list[Row] = []
        for i, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise DataError(f"{name}, row {i}: expected an object with `messages`, got a {type(row).__name__}")
            self._rows.append(dict(row))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"Dataset({self.name}, {len(self)} rows)"


def tasks_of(rows: Iterable[Mapping[str, Any]]) -> list[Task]:
    """Rows with their ids."""
    return [Task(task_id=task_id_of(row), index=i, row=row) for i, row in enumerate(rows)]


def task_id_of(row: Mapping[str, Any]) -> str:
    """`task_id` or `id` of the row, else 16 hex digits of the sha256 of its content, keys sorted."""
    for key in ("task_id", "id"):
        given = row.get(key)
        if given is not None and not isinstance(given, Mapping | list):
            return str(given)
    text = json.dumps(row, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    return str(value)


def order(
    n_rows: int, *, epoch: int, seed: int, shuffle: bool = True, weights: npt.ArrayLike | None = None
) -> npt.NDArray[np.int64]:
    """Row numbers in the order in which `epoch` draws them: a pure function of its arguments.

    weights: one per row, >= 0; heavier rows tend to come earlier (Efraimidis & Spirakis 2006), rows of weight 0 are
    left out. Without weights every row comes once.
    """
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    if weights is None:
        return rng.permutation(n_rows) if shuffle else np.arange(n_rows)
    weight = np.asarray(weights, np.float64)
    if weight.shape != (n_rows,) or not np.isfinite(weight).all() or (weight < 0).any():
        raise DataError(f"expected {n_rows} finite weights of 0 or more, one per row; got an array {weight.shape}")
    arrival = rng.exponential(size=n_rows)  # drawn for all rows, so that one row's weight moves no other row's draw
    kept = np.flatnonzero(weight > 0)
    return kept[np.argsort(arrival[kept] / weight[kept], kind="stable")]


def weights_from_sql(book: Any, query: str, tasks: Sequence[Task], *, default: float = 1.0) -> npt.NDArray[np.float64]:
    """One weight per task from `query`, whose rows are (task_id, weight); tasks it does not name get `default`.

    `book` has `sql(query)`, e.g. `open_book(path)`. Tasks with a pass rate between .2 and .8:

        SELECT task_id, CAST(avg(reward_mean) BETWEEN .2 AND .8 AS INT) FROM groups GROUP BY task_id
    """
    table = book.sql(query)
    if table.num_columns != 2:
        raise DataError(f"a curriculum query gives (task_id, weight); this one gives {table.column_names}")
    known = dict(zip(table.column(0).to_pylist(), table.column(1).to_pylist(), strict=True))
    values = [default if (w := known.get(task.task_id)) is None else float(w) for task in tasks]
    return np.asarray(values, np.float64)


def get_custom_dataset(
    split: str = "train",
    dataset_config: DatasetSettings | None = None,
    tokenizer: Any = None,
    *,
    path: str | None = None,
    max_length: int | None = None,
    **kwargs: Any,
) -> Dataset:
    """Rows of a .jsonl, .json or .parquet file, of a function `module:function`, or of a Hugging Face dataset.

    split: which part, where the source has parts; of a folder the file `<split>.jsonl`, `.json` or `.parquet`.
    dataset_config: has `path` and `max_length`; or give them as keywords. max_length counts the tokens of a row's
    messages, for which it needs the tokenizer. More keywords go to the function or to `datasets.load_dataset`.
    Raises DataError.
    """
    if dataset_config is not None:
        path, max_length = path or dataset_config.path, max_length or dataset_config.max_length
    if not path:
        raise DataError("get_custom_dataset needs a path: train_dataset.path in the config, or path=...")
    rows = _read(path, split, tokenizer, kwargs)
    if max_length is not None:
        rows = _short_enough(rows, max_length, tokenizer)
    dataset = Dataset(rows, path)
    if not len(dataset):
        raise DataError(f"{path} has no rows" + (" short enough" if max_length else ""))
    return dataset


def _read(path: str, split: str, tokenizer: Any, kwargs: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    if os.path.isdir(path):
        for ending in (".jsonl", ".json", ".parquet"):
            inside = os.path.join(path, split + ending)
            if os.path.isfile(inside):
                return _read_file(inside, split)
        raise DataError(f"{path} has no {split}.jsonl, {split}.json or {split}.parquet; name the file")
    if os.path.isfile(path):
        return _read_file(path, split)
    if path.endswith((".jsonl", ".json", ".parquet")):
        raise DataError(f"there is no dataset file {path} (looked from {os.getcwd()})")
    if ".py:" in path or (":" in path and "/" not in path):
        return _read_function(path, split, tokenizer, kwargs)
    return _read_hub(path, split, kwargs)


def _read_file(path: str, split: str) -> Iterable[Mapping[str, Any]]:
    if path.endswith(".jsonl"):
        return _read_lines(path)
    if path.endswith(".json"):
        return _read_json(path, split)
    if path.endswith(".parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            rows: list[Row] = pq.read_table(path).to_pylist()
        except pa.ArrowInvalid as error:
            raise DataError(f"{path} is not a Parquet file: {error}") from error
        return rows
    raise DataError(f"{path}: expected a file that ends in .jsonl, .json or .parquet")


def _read_lines(path: str) -> Iterator[Row]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}, line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: expected an object, got {type(row).__name__}")
            yield row


def _read_json(path: str, split: str) -> list[Row]:
    with open(path, "rb") as file:
        try:
            content = json.load(file)
        except ValueError as error:
            raise DataError(f"{path} is not JSON: {error}") from error
    if isinstance(content, dict) and isinstance(content.get(split), list):
        content = content[split]
    if not isinstance(content, list):
        raise DataError(f"{path}: expected a list of rows, or an object with such a list under {split!r}")
    return content


def _read_function(path: str, split: str, tokenizer: Any, kwargs: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    import inspect

    try:
        function = load(path, "dataset")
    except WorkflowError as error:
        raise DataError(str(error)) from error
    if not callable(function):
        raise DataError(f"{path} is a {type(function).__name__}; expected a function that gives rows")
    takes = inspect.signature(function).parameters
    given = {"split": split, "tokenizer": tokenizer, **kwargs}
    has_any = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    rows = function(**{k: v for k, v in given.items() if has_any or k in takes})
    if not isinstance(rows, Iterable) or isinstance(rows, str | bytes | Mapping):
        raise DataError(f"{path} returned a {type(rows).__name__}; expected an iterable of rows")
    return rows


def _read_hub(path: str, split: str, kwargs: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    try:
        importlib.metadata.version("datasets")
    except importlib.metadata.PackageNotFoundError as error:
        raise DataError(
            f"{path!r} is neither a file nor a folder here, so it can only be a Hugging Face dataset id, and those "
            "need the `datasets` package: pip install 'rollbook[hub]'"
        ) from error
    from datasets import load_dataset

    try:
        rows: Iterable[Mapping[str, Any]] = load_dataset(path, split=split, **kwargs)
    except Exception as error:  # of many kinds: not found, no network, no such split
        raise DataError(f"Hugging Face dataset {path!r}, split {split!r}: {type(error).__name__}: {error}") from error
    return rows


def _short_enough(rows: Iterable[Mapping[str, Any]], max_length: int, tokenizer: Any) -> Iterator[Mapping[str, Any]]:
    if tokenizer is None:
        raise DataError("max_length counts tokens: pass the tokenizer to get_custom_dataset, or leave max_length out")
    for row in rows:
        text = "\n".join(str(message.get("content") or "") for message in row.get("messages", []))
        ids = tokenizer.encode(text)
        if len(getattr(ids, "ids", ids)) <= max_length:
            yield row
