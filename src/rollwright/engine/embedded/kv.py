"""Keys and values of the running requests: the end of each history, one contiguous row each.

Role: where a step writes, and where its attention reads what is not shared. Neighbours: `attend` reads and
writes, the scheduler moves KV between rows and `radix` (which holds shared prefixes and everything that is
not running). Invariant: what lies in row r at place i is the rotated key and the value of its token
`base[r] + i`.

Decoding reads a row for every token sampled, so rows are dense in memory and need no gather; [heads, places,
head] is the order that batched matrix products like. The table grows with the number of requests and with
the longest end, in the steps that the planner counts with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollwright.engine.kv.embedded import POSITIONS, ROWS
from rollwright.model.base import Shape

Index = npt.NDArray[np.int64]


class KV:
    """Keys and values of all layers; it grows as it is asked to."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.device = shape, device
        self.kv_heads, self.head_dim = shape.kv_heads, shape.head_dim
        self.replaced: Callable[[], None] = lambda: None
        """Called when the table is another, so that nobody keeps the old one."""
        self._make(
            torch.zeros(shape.layers, 2, 0, shape.kv_heads, 0, shape.head_dim, device=device, dtype=dtype)
        )

    def _make(self, table: Tensor) -> None:
        self.replaced()
        self.table = table
        """float[layers, key or value, rows, kv_heads, places, head_dim]"""
        self.rows, self.places = table.shape[2], table.shape[4]
        self.layers = [layer.view(-1, self.head_dim) for layer in table]
        """Each layer as float[2 × rows × kv_heads × places, head_dim]; see `vectors`."""
        self.keys = [layer[0].flatten(0, 1).transpose(1, 2) for layer in table]
        """Each layer's keys as float[rows × kv_heads, head_dim, places], for batched products."""
        self.values = [layer[1].flatten(0, 1) for layer in table]
        """Each layer's values as float[rows × kv_heads, places, head_dim]."""
        first = np.arange(2)[:, None, None] * self.rows * self.kv_heads + np.arange(self.kv_heads)
        self._heads = first * self.places

    @property
    def bytes(self) -> int:
        """Bytes allocated."""
        return self.table.numel() * self.table.element_size()

    def reserve(self, rows: int, places: int, used: int) -> None:
        """Make room for `rows` rows of `places` tokens; `used` rows hold something already."""
        self._resize(max(self.rows, _up(rows, ROWS)), max(self.places, _up(places, POSITIONS)), used)

    def shrink(self, rows: int, places: int) -> None:
        """Give back memory where `rows` rows of `places` tokens are at most half of it."""
        used, rows, places = rows, _up(rows, ROWS), _up(places, POSITIONS)
        if 2 * rows * places <= self.rows * self.places:
            self._resize(min(rows, self.rows), min(places, self.places), used)

    def _resize(self, rows: int, places: int, used: int) -> None:
        old, (layers, two, _, heads, _, dim) = self.table, self.table.shape
        new = _zeros((layers, two, rows, heads, places, dim), old)
        r, p = min(rows, used), min(places, self.places)
        new[:, :, :r, :, :p] = old[:, :, :r, :, :p]
        self._make(new)

    def vectors(self, rows: Index, places: Index) -> Index:
        """Where M tokens' vectors lie in one of `layers`: int64[2 × M × kv_heads], all keys before all
        values."""
        return (self.bases(rows) + places[:, None]).reshape(-1)

    def bases(self, rows: Index) -> Index:
        """Where the vectors of place 0 lie: int64[2, M, kv_heads]."""
        return self._heads + (rows * (self.kv_heads * self.places))[:, None]

    def load(self, row: int, blocks: Sequence[Tensor]) -> None:
        """Fill a row from its beginning with blocks float[layers, 2, kv_heads, tokens, head_dim]."""
        start = 0
        for block in blocks:
            end = start + block.shape[3]
            self.table[:, :, row, :, start:end] = block
            start = end

    def read(self, row: int, start: int, end: int) -> Tensor:
        """A copy of a row's places `start` to `end`, as `load` takes it."""
        return self.table[:, :, row, :, start:end].clone()

    def shift(self, row: int, start: int, end: int) -> None:
        """Move places `start` to `end` to the row's beginning."""
        if end > start:
            self.table[:, :, row, :, : end - start] = self.read(row, start, end)

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` of one row over another's."""
        self.table[:, :, target, :, :tokens] = self.table[:, :, source, :, :tokens]


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


def _zeros(size: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros of that size, which on a CPU take memory only where they are written to."""
    if like.device.type == "cpu" and like.dtype is torch.float32:
        return torch.from_numpy(np.zeros(size, np.float32))
    return like.new_zeros(size)
