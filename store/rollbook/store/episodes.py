"""Episodes and their model calls as Python objects: `Book.episodes`.

A re-reward makes hundreds of thousands of them and looks at little of each, so what was read stays in Arrow tables, and
rows and messages become Python objects when somebody asks for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .errors import PayloadPruned
from .events import Float32s, Int32s, Messages, decode_messages
from .log import Log
from .stream import NODE_COLUMNS, Nodes, Payloads, Tokens

Row = dict[str, Any]


@dataclass(frozen=True)
class EpisodeRows:
    """What the tables of a book hold of some episodes; to be sent to whoever reads them."""

    ids: list[str]
    # Each ordered by its last column `n`, the index in `ids`, and by time.
    episodes: pa.Table
    interactions: pa.Table
    rewards: pa.Table
    failures: pa.Table

    def slice(self, start: int, stop: int) -> "EpisodeRows":
        """Of ids[start:stop] alone, without a copy."""
        return EpisodeRows(
            self.ids[start:stop],
            *(_between(t, start, stop) for t in (self.episodes, self.interactions, self.rewards, self.failures)),
        )

    def read(self, log: Log, payloads: Payloads, *, is_lasting: bool = False) -> "list[Episode]":
        """The episodes, with their messages from the log. Raises KeyError.

        is_lasting: they may be used when the log is closed. Otherwise tokens are found when first asked for, which
        is half of the work of reading, and most judges look at text alone.
        """
        table = self.interactions
        said = Said([])
        if table.num_rows:
            stored = log.gather(list(zip(table["writer"].to_pylist(), table["position"].to_pylist(), strict=True)))
            said = Said(stored["messages"].to_pylist())
        held = _Held(self, said, payloads)
        if is_lasting and table.num_rows:
            _ = held.nodes
        begins = np.searchsorted(table["n"].to_numpy(), np.arange(len(self.ids) + 1)).tolist()
        names = table["interaction_id"].to_pylist()
        known = set(self.episodes["episode_id"].to_pylist())
        episodes = []
        for n, name in enumerate(self.ids):
            of = range(begins[n], begins[n + 1])
            if name not in known and not of:
                raise KeyError(f"no episode {name!r} in this book")
            episodes.append(Episode(name, [Interaction(names[i], held, i) for i in of], held))
        return episodes

    def __getstate__(self) -> tuple[list[str], bytes]:
        # A slice pickles with all of what it is a slice of; as a stream it does not.
        sink = pa.BufferOutputStream()
        for table in (self.episodes, self.interactions, self.rewards, self.failures):
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
        return self.ids, sink.getvalue().to_pybytes()

    def __setstate__(self, state: tuple[list[str], bytes]) -> None:
        ids, data = state
        object.__setattr__(self, "ids", ids)
        source = pa.BufferReader(data)
        for name in ("episodes", "interactions", "rewards", "failures"):
            object.__setattr__(self, name, pa.ipc.open_stream(source).read_all())


def _between(table: pa.Table, start: int, stop: int) -> pa.Table:
    """The rows whose `n` is in [start, stop), counted from 0 again."""
    n = table["n"].to_numpy()
    begin, end = np.searchsorted(n, [start, stop]).tolist()
    part = table.slice(begin, end - begin)
    return part.set_column(part.num_columns - 1, "n", pa.array(n[begin:end] - start, pa.int32()))


class Said:
    """The messages of interactions, each decoded when it is first asked for."""

    def __init__(self, texts: Sequence[bytes | str | None]) -> None:
        self._texts = texts
        self._decoded: dict[int, Messages] = {}

    def __getitem__(self, i: int) -> Messages:
        found = self._decoded.get(i)
        if found is None:
            found = self._decoded[i] = decode_messages(self._texts[i] or b'{"request":[],"reply":{}}')
        return found

    def has(self, i: int) -> bool:
        """Whether there are any: an import may have none, and `prune` removes them."""
        return self._texts[i] is not None


class _Held:
    """What was read of some episodes together."""

    def __init__(self, rows: EpisodeRows, said: Said, payloads: Payloads) -> None:
        self._rows = rows
        self.said = said
        self._payloads = payloads

    @cached_property
    def nodes(self) -> Nodes:
        """Raises LogCorrupt where tables and log do not fit together."""
        return Nodes.read(self._rows.interactions.select(NODE_COLUMNS), self._payloads)

    @cached_property
    def parents(self) -> list[int]:
        """Index of each interaction's parent, -1 for none."""
        table = self._rows.interactions
        found = pc.index_in(table["parent_id"].combine_chunks(), table["interaction_id"].combine_chunks())
        parents: list[int] = found.fill_null(-1).to_pylist()
        return parents

    @cached_property
    def interactions(self) -> list[Row]:
        return _python(self._rows.interactions)

    @cached_property
    def episodes(self) -> dict[str, Row]:
        rows = {row["episode_id"]: row for row in _python(self._rows.episodes)}
        if len(rows) < len(self._rows.ids):  # of some only calls have come so far
            for row in self.interactions:
                name = row["episode_id"]
                rows.setdefault(name, {"episode_id": name, "run_id": row["run_id"], "state": "open"})
        return rows

    @cached_property
    def rewards(self) -> dict[tuple[str, str | None], list[Row]]:
        return _by_target(self._rows.rewards)

    @cached_property
    def failures(self) -> dict[tuple[str, str | None], list[Row]]:
        return _by_target(self._rows.failures)

    def is_gone(self, i: int) -> bool:
        return not self.said.has(i) and bool(self._rows.interactions["is_pruned"][i].as_py())

    def own(self, i: int) -> Messages:
        """What was new in it. Raises PayloadPruned: an empty answer would be judged as if it had been given."""
        if self.is_gone(i):
            name = self._rows.interactions["interaction_id"][i]
            raise PayloadPruned(
                f"the messages of {name} were pruned; its facts are in the tables, its messages are gone"
            )
        return self.said[i]

    def _way(self, i: int) -> list[int]:
        """The interactions whose messages its own stand on, itself first. A circle of parents ends at its last."""
        said, parent = self.said, self.parents
        way = [i]
        while said[way[-1]].kept != 0 and parent[way[-1]] >= 0 and len(way) < len(parent):
            way.append(parent[way[-1]])
        return way

    def has_messages(self, i: int) -> bool:
        way = self._way(i)
        is_begun = self.said[way[-1]].kept == 0 or self._rows.interactions["parent_id"][way[-1]].as_py() is None
        return is_begun and all(self.said.has(k) for k in way)

    def messages(self, i: int) -> list[dict[str, Any]]:
        parent = self.parents
        way = self._way(i)
        messages = list(self.own(way.pop()).request)
        for n in reversed(way):
            own = self.own(n)
            above = self.own(parent[n])
            messages.append(own.resent if own.resent is not None else above.reply)
            del messages[len(messages) if own.kept is None else own.kept :]
            messages += own.request
        return messages

    def tools(self, i: int) -> list[dict[str, Any]]:
        for _ in self.parents:  # no more steps than interactions: damaged parents may be a circle
            tools, parent = self.own(i).tools, self.parents[i]
            if tools is not None or parent < 0:
                return tools or []
            i = parent
        return []


def _python(table: pa.Table) -> list[Row]:
    rows: list[Row] = table.drop_columns(["n"]).to_pylist()
    return rows


def _by_target(table: pa.Table) -> dict[tuple[str, str | None], list[Row]]:
    """Rows by (episode, interaction); None for the episode itself."""
    rows: dict[tuple[str, str | None], list[Row]] = {}
    for row in _python(table):
        rows.setdefault((row["episode_id"], row.get("interaction_id")), []).append(row)
    return rows


class Interaction:
    """One model call as the model saw it. What its parents already hold is put together when it is asked for.

    Asking for messages or tokens that are gone raises PayloadPruned.
    """

    def __init__(self, interaction_id: str, held: _Held, index: int) -> None:
        self.interaction_id = interaction_id
        self._held = held
        self._index = index

    def __repr__(self) -> str:
        return f"<Interaction {self.interaction_id}>"

    @property
    def row(self) -> Row:
        """Its row of `interactions`."""
        return self._held.interactions[self._index]

    @property
    def is_pruned(self) -> bool:
        """Whether `prune` removed what was said and sampled in it."""
        return self._held.is_gone(self._index)

    @property
    def request(self) -> list[dict[str, Any]]:
        """The messages that were new in it."""
        return self._held.own(self._index).request

    @property
    def reply(self) -> dict[str, Any]:
        return self._held.own(self._index).reply

    @property
    def rewards(self) -> list[Row]:
        """Every reward ever given on it, oldest first."""
        return self._held.rewards.get((self.row["episode_id"], self.interaction_id), [])

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The whole request, as the client sent it."""
        return self._held.messages(self._index)

    @property
    def has_messages(self) -> bool:
        """Whether the book has all of these: nothing was pruned, and no parent they stand on is missing."""
        return self._held.has_messages(self._index)

    @property
    def tools(self) -> list[dict[str, Any]]:
        return self._held.tools(self._index)

    @cached_property
    def _tokens(self) -> Tokens:
        return self._held.nodes.load([self._index])

    @property
    def prompt_ids(self) -> Int32s:
        """The whole prompt."""
        return self._tokens.input_ids[~self._tokens.loss_mask]

    @cached_property
    def _output(self) -> tuple[Int32s, Float32s, Int32s]:
        return self._held.nodes.output(self._index)

    @property
    def output_ids(self) -> Int32s:
        return self._output[0]

    @property
    def logprobs(self) -> Float32s:
        """One per output token."""
        return self._output[1]

    @property
    def versions(self) -> Int32s:
        """The policy's, one per output token."""
        return self._output[2]


class Episode:
    """One attempt at a task, with all its model calls in the order in which they were recorded."""

    def __init__(self, episode_id: str, interactions: list[Interaction], held: _Held) -> None:
        self.episode_id = episode_id
        self.interactions = interactions
        self._held = held

    def __repr__(self) -> str:
        return f"<Episode {self.episode_id}, {len(self.interactions)} interactions>"

    @property
    def row(self) -> Row:
        """Its row of `episodes`."""
        return self._held.episodes[self.episode_id]

    @property
    def rewards(self) -> list[Row]:
        """Every reward ever given on the episode itself, oldest first."""
        return self._held.rewards.get((self.episode_id, None), [])

    @property
    def failures(self) -> list[Row]:
        return self._held.failures.get((self.episode_id, None), [])
