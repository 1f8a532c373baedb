"""Where an embedded engine keeps keys and values: `Rows` of running sequences, `PrefixTree` of finished text.

Memory is counted in tokens, and whoever asks for it makes room first; nothing here knows requests or weights.

Shapes: L layers, H key/value heads, D head size, S slots, C capacity of a slot in tokens, T tokens of one sequence.
A piece of one sequence is [2, L, H, T, D], keys before values.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from rollbook.store.events import Int32s

Sequence = TypeVar("Sequence")


@dataclass(frozen=True, kw_only=True)
class KVShape:
    """What one token costs: 2 * L * H * D numbers of `dtype`."""

    n_layers: int
    n_heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        return 2 * self.n_layers * self.n_heads * self.head_size * self.dtype.itemsize

    def piece(self, n_tokens: int) -> torch.Tensor:
        """Zeros [2, L, H, T, D]: never garbage, since a masked NaN is still a NaN in the sum over values."""
        shape = (2, self.n_layers, self.n_heads, n_tokens, self.head_size)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


class Rows(Generic[Sequence]):
    """Slots of one capacity, the used ones always first, so that attention runs over one dense block."""

    def __init__(self, shape: KVShape, capacity: int) -> None:
        self.capacity = capacity
        self.sequences: list[Sequence] = []  # who sits in slot i
        self._shape = shape
        self._slots: torch.Tensor | None = None  # [2, L, S, H, C, D]

    @property
    def n_slots(self) -> int:
        return 0 if self._slots is None else self._slots.shape[2]

    def wanted_slots(self) -> int:
        """How many slots the next sequence asks for; the same as now while there is a free one."""
        n = self.n_slots
        return n if len(self.sequences) < n else n + max(4, n // 2)

    def resize(self, n_slots: int) -> None:
        """n_slots >= the sequences here. Zero gives the memory back."""
        shape, old = self._shape, self._slots
        self._slots = None
        if n_slots:
            size = (2, shape.n_layers, n_slots, shape.n_heads, self.capacity, shape.head_size)
            self._slots = torch.zeros(size, dtype=shape.dtype, device=shape.device)
            if old is not None and self.sequences:
                n = len(self.sequences)
                self._slots[:, :, :n] = old[:, :, :n]

    def add(self, sequence: Sequence) -> int:
        """Give `sequence` the next slot, which must be there."""
        self.sequences.append(sequence)
        return len(self.sequences) - 1

    def remove(self, slot: int) -> Sequence | None:
        """Free a slot; the last sequence moves into it and is returned, if it is another one."""
        assert self._slots is not None
        last = self.sequences.pop()
        if slot == len(self.sequences):
            return None
        self._slots[:, :, slot] = self._slots[:, :, len(self.sequences)]
        self.sequences[slot] = last
        return last

    def slot(self, slot: int) -> torch.Tensor:
        """[2, L, H, C, D] of one slot, to read and write."""
        assert self._slots is not None
        return self._slots[:, :, slot]

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [n, H, C, D] of the used slots in one layer."""
        assert self._slots is not None
        keys, values = self._slots[:, layer, : len(self.sequences)]
        return keys, values


class _Node:
    """A run of tokens that all conversations through it share."""

    __slots__ = ("children", "ids", "kv", "parent", "used")

    def __init__(self, ids: Int32s, kv: torch.Tensor, parent: "_Node | None") -> None:
        self.ids = ids
        self.kv = kv  # [2, L, H, len(ids), D]
        self.parent = parent
        self.children: dict[int, _Node] = {}  # by their first token
        self.used = 0


def _n_common(a: Int32s, b: Int32s) -> int:
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


class PrefixTree:
    """Keys and values of text seen before, by its token ids: a radix tree, least recently used leaves go first."""

    def __init__(self, shape: KVShape) -> None:
        self.n_tokens = 0
        self._shape = shape
        self._clock = 0
        self._root = _Node(np.empty(0, np.int32), shape.piece(0), None)

    def _walk(self, ids: Int32s) -> tuple[_Node, int, int]:
        """(last node reached, how many of its tokens agree, how many of `ids` agree)."""
        self._clock += 1
        node, done = self._root, 0
        while True:
            node.used = self._clock
            child = node.children.get(int(ids[done])) if done < len(ids) else None
            if child is None:
                return node, len(node.ids), done
            n = _n_common(child.ids, ids[done:])
            child.used = self._clock
            node, done = child, done + n
            if n < len(child.ids):
                return child, n, done

    def match(self, ids: Int32s) -> list[torch.Tensor]:
        """The longest known beginning of `ids`, as pieces in order."""
        node, n, _ = self._walk(ids)
        pieces = []
        while node.parent is not None:
            pieces.append(node.kv[..., :n, :])
            node = node.parent
            n = len(node.ids)
        return pieces[::-1]

    def insert(self, ids: Int32s, kv: torch.Tensor) -> None:
        """Remember `ids`; kv is [2, L, H, >= len(ids), D] and only what is new is copied out of it."""
        node, n, done = self._walk(ids)
        if done == len(ids):
            return
        if n < len(node.ids):
            node = self._split(node, n)
        leaf = _Node(ids[done:].copy(), kv[..., done : len(ids), :].clone(), node)
        leaf.used = self._clock
        node.children[int(leaf.ids[0])] = leaf
        self.n_tokens += len(leaf.ids)

    def _split(self, node: _Node, n: int) -> _Node:
        """The first n tokens of `node` become its parent. Both halves are copied: a view would pin the whole."""
        assert node.parent is not None
        head = _Node(node.ids[:n].copy(), node.kv[..., :n, :].clone(), node.parent)
        head.used = node.used
        node.parent.children[int(head.ids[0])] = head
        node.ids, node.kv, node.parent = node.ids[n:].copy(), node.kv[..., n:, :].clone(), head
        head.children[int(node.ids[0])] = node
        return head

    def shrink(self, n_tokens: int) -> None:
        """Forget leaves, the longest unused first, until at most n_tokens are left.

        Goes a tenth further, so that a full tree is not searched for leaves on every insert.
        """
        if self.n_tokens <= n_tokens:
            return
        target = n_tokens - n_tokens // 10
        while self.n_tokens > target:
            leaves: list[_Node] = []
            stack = [self._root]
            while stack:
                node = stack.pop()
                stack.extend(node.children.values())
                if not node.children and node.parent is not None:
                    leaves.append(node)
            for leaf in sorted(leaves, key=lambda node: node.used):
                if self.n_tokens <= target:
                    break
                assert leaf.parent is not None
                del leaf.parent.children[int(leaf.ids[0])]
                self.n_tokens -= len(leaf.ids)

    def clear(self) -> None:
        """Forget everything, as new weights demand."""
        self._root.children.clear()
        self.n_tokens = 0
