"""Keys and values of the running requests: one contiguous row each.

Role: where a step's attention reads and writes. Neighbours: `attend` does that, the scheduler copies cached
prefixes in and computed ones out (`radix` keeps those). Invariant: what lies in a row at position i is the
rotated key and the value of its token i.

A decoding request reads its whole history for every token it samples, a cached prefix is read once a turn.
So a prefix is copied into the row on admission and decoding needs no gather; [heads, positions, head] is
the order that batched matrix products like. Rows grow with the longest request, to stay dense in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Index = npt.NDArray[np.int64]


class KV:
    """Float32 keys and values of all layers for `rows` requests of up to `context` tokens."""

    def __init__(self, *, layers: int, kv_heads: int, head_dim: int, rows: int, context: int) -> None:
        self.kv_heads, self.head_dim, self._context = kv_heads, head_dim, context
        self._resize(torch.zeros(layers, 2, rows, kv_heads, min(128, context), head_dim))

    def _resize(self, rows: Tensor) -> None:
        self.rows = rows
        """float32[layers, key or value, rows, kv_heads, positions, head_dim]"""
        count, self._positions = rows.shape[2], rows.shape[4]
        self.layers = [layer.view(-1, self.head_dim) for layer in rows]
        """Each layer as float32[2 × rows × kv_heads × positions, head_dim]; see `vectors`."""
        first = np.arange(2)[:, None, None] * count * self.kv_heads + np.arange(self.kv_heads)
        self._heads = first * self._positions

    def reserve(self, length: int) -> None:
        """Make rows long enough for `length` tokens."""
        if length > self._positions:
            old = self.rows
            longer = min(self._context, max(length, self._positions * 5 // 4))
            self._resize(old.new_zeros(*old.shape[:4], longer, self.head_dim))
            self.rows[..., : old.shape[4], :] = old

    def vectors(self, rows: Index, positions: Index) -> Tensor:
        """Where M tokens' vectors lie in one of `layers`: int64[2 × M × kv_heads], all keys before all
        values."""
        at = rows * (self.kv_heads * self._positions) + positions
        return torch.from_numpy((self._heads + at[:, None]).reshape(-1))

    def load(self, row: int, blocks: Sequence[Tensor]) -> None:
        """Fill a row from its beginning with blocks float32[layers, 2, kv_heads, tokens, head_dim]."""
        start = 0
        for block in blocks:
            end = start + block.shape[3]
            self.rows[:, :, row, :, start:end] = block
            start = end

    def read(self, row: int, start: int, end: int) -> Tensor:
        """A copy of a row's tokens `start` to `end`, as `load` takes it."""
        return self.rows[:, :, row, :, start:end].clone()

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` of one row over another's."""
        self.rows[:, :, target, :, :tokens] = self.rows[:, :, source, :, :tokens]
