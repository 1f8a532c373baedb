"""Selected tokens as a torch dataset: the rows of a selection, loaded from the book when they are asked for.

Shapes: T tokens of a row; B rows of a padded batch, T then the longest.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch.utils.data import Dataset

from .book import Book
from .selection import Selection
from .stream import Form, Tokens

Row = dict[str, Any]

_NUMBERS = ("reward", "credit", "weight", "advantage_std", "advantage_mean", "group_mean", "group_std")
"""Columns of the selection that each row has as float32 scalars; NaN where they are missing."""


class TokenRows(Dataset[Row]):
    """One row per interaction or trajectory of a selection. A row is a dict:

        row_id          the interaction, or the leaf of the trajectory
        input_ids       int64 [T], prompt and output
        loss_mask       bool [T], sampled by the policy
        logprobs        float32 [T], of the policy that sampled; 0 where loss_mask is false
        versions        int64 [T], of that policy; -1 where loss_mask is false
        reward, weight, group_mean, ... float32 scalars as `selection.select_query` says; credit, if it is asked for

    A DataLoader fetches a whole batch with one read. Workers, forked or spawned, open the book for themselves.
    """

    def __init__(self, book: Book, selection: Selection, *, form: Form, where: str, key: str | None) -> None:
        rows = "trajectories" if form == "trajectory" else "interactions"
        self.table = book.select(msgspec.structs.replace(selection, rows=rows))
        self._ids: list[str] = self.table["leaf_id" if form == "trajectory" else "interaction_id"].to_pylist()
        self._numbers = {
            name: torch.from_numpy(self.table[name].to_numpy().astype(np.float32))
            for name in _NUMBERS
            if name in self.table.column_names
        }
        self._form: Form = form
        self._where = where
        self._key = key
        self._book: Book | None = book
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> Row:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        """These rows, by one read of the book."""
        wanted = [range(len(self._ids))[i] for i in indices]
        tokens = self._open().load([self._ids[i] for i in wanted], form=self._form)
        return [
            {**_row(tokens, r), **{name: values[i] for name, values in self._numbers.items()}}
            for r, i in enumerate(wanted)
        ]

    def _open(self) -> Book:
        if self._book is None or self._pid != os.getpid():  # a worker
            from .connection import open_anywhere

            self._book, self._pid = open_anywhere(self._where, key=self._key), os.getpid()
        return self._book

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_book": None}


def _row(tokens: Tokens, r: int) -> Row:
    at = tokens.row(r)
    return {
        "row_id": tokens.row_ids[r],
        "input_ids": torch.from_numpy(tokens.input_ids[at]).long(),
        "loss_mask": torch.from_numpy(tokens.loss_mask[at].copy()),
        "logprobs": torch.from_numpy(tokens.logprobs[at].copy()),
        "versions": torch.from_numpy(tokens.versions[at]).long(),
    }


def pad_rows(rows: Sequence[Mapping[str, Any]], *, pad_id: int = 0) -> dict[str, Any]:
    """Rows as one batch, padded on the right: [B, T] arrays, `attention_mask` bool [B, T], scalars as [B]."""
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    fill = {"input_ids": pad_id, "loss_mask": False, "logprobs": 0.0, "versions": -1}
    batch: dict[str, Any] = {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)
        for name, value in fill.items()
    }
    batch["attention_mask"] = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    for name in rows[0].keys() - fill.keys() - {"row_id"}:
        batch[name] = torch.stack([row[name] for row in rows])
    batch["row_ids"] = [row["row_id"] for row in rows]
    return batch
